"""Data sets: the digits that come with scikit-learn, so that everything runs on a machine with nothing else."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from onlynorm.errors import ValueRangeError


@dataclass(frozen=True)
class Split:
    """A data set cut into a part to learn from and a part to judge by."""

    name: str
    train_inputs: Float[Tensor, "n_train ..."]
    train_labels: Int[Tensor, " n_train"]
    test_inputs: Float[Tensor, "n_test ..."]
    test_labels: Int[Tensor, " n_test"]

    def __str__(self) -> str:
        shape = tuple(self.train_inputs.shape[1:])
        return f"{self.name}: {len(self.train_inputs)} train, {len(self.test_inputs)} test samples of shape {shape}"


def digits(*, seed: int = 0, test_share: float = 0.2) -> Split:
    """1,797 handwritten digits of 8 x 8 pixels, scaled to [0, 1], shuffled by `seed`."""
    from sklearn.datasets import load_digits  # a second to import, which only those who want the digits pay

    generator = seeded(seed)
    if not 0.0 < test_share < 1.0:
        raise ValueRangeError(f"test_share needs to lie in (0, 1); got {test_share}. Try 0.2.")
    raw = load_digits()
    inputs = torch.from_numpy(raw.data).float() / 16.0
    labels = torch.from_numpy(raw.target).long()
    order = torch.randperm(len(inputs), generator=generator)
    # Whatever the share, one sample at least to learn from and one to judge by.
    cut = min(max(round(len(inputs) * (1.0 - test_share)), 1), len(inputs) - 1)
    train, test = order[:cut], order[cut:]
    return Split("digits", inputs[train], labels[train], inputs[test], labels[test])


def seeded(seed: int) -> torch.Generator:
    """A generator of its own for this seed, so that the global one stays as it is."""
    try:
        word = operator.index(seed)
    except TypeError:
        word = -1
    if not 0 <= word < 2**64:
        raise ValueRangeError(f"seed needs a whole number in [0, 2^64); got {seed!r}. Reduce it: seed % 2**64.")
    return torch.Generator().manual_seed(word)
