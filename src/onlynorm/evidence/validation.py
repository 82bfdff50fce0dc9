"""Training and validation subsets of the training images, for experiments that choose settings on validation data."""

from __future__ import annotations

import torch
from torch import Tensor

from onlynorm.data import Split
from onlynorm.errors import ValueRangeError
from onlynorm.seeds import seeded

TRIAL_SEED = 100
"""Seed of the validation subset and of the first network used to select learning rates; other seeds are smaller."""


def random_subset(split: Split, n: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """n training images chosen by the seed among all, and their labels."""
    return _pick(split, _order(split, seed)[:n])


def validation_subset(split: Split, n: int, *, split_seed: int = TRIAL_SEED) -> tuple[Tensor, Tensor]:
    """n training images, the same for all seeds, and their labels."""
    return random_subset(split, n, seed=split_seed)


def training_subset(
    split: Split, n: int, *, n_validation: int, seed: int, split_seed: int = TRIAL_SEED
) -> tuple[Tensor, Tensor]:
    """n training images chosen by the seed among those outside the validation subset, and their labels."""
    pool = _order(split, split_seed)[n_validation:]
    if n > len(pool):
        raise ValueRangeError(
            f"a training subset of {split.name} needs at most the {len(pool)} images outside the validation subset; "
            f"got {n}. Take fewer."
        )
    return _pick(split, pool[torch.randperm(len(pool), generator=seeded(seed))[:n]])


def first_test_images(split: Split, n: int) -> tuple[Tensor, Tensor]:
    """The first n test images and their labels."""
    return split.test_inputs[:n], split.test_labels[:n]


def _order(split: Split, seed: int) -> Tensor:
    return torch.randperm(len(split.train_inputs), generator=seeded(seed))


def _pick(split: Split, chosen: Tensor) -> tuple[Tensor, Tensor]:
    return split.train_inputs[chosen], split.train_labels[chosen]
