"""Data sets: the digits that come with scikit-learn, so that everything runs on a machine with nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from sklearn.datasets import load_digits
from torch import Tensor


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
    raw = load_digits()
    inputs = torch.from_numpy(raw.data).float() / 16.0
    labels = torch.from_numpy(raw.target).long()
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
    cut = round(len(inputs) * (1.0 - test_share))
    train, test = order[:cut], order[cut:]
    return Split("digits", inputs[train], labels[train], inputs[test], labels[test])
