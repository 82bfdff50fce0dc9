"""Training images of a seed, and those put aside, by which settings are chosen and nothing is learned or judged."""

from __future__ import annotations

import torch
from torch import Tensor

from onlynorm.data import Split
from onlynorm.errors import ValueRangeError
from onlynorm.seeds import seeded

TRIAL_SEED = 100
"""Seed of the images put aside, and of the first network on which rates are tried; networks that are judged lie below.
"""


def put_aside(split: Split, n: int) -> tuple[Tensor, Tensor]:
    """The n training images that are put aside, the same for all seeds, and their labels."""
    return _pick(split, _order(split)[:n])


def lesson(split: Split, n: int, *, n_put_aside: int, seed: int) -> tuple[Tensor, Tensor]:
    """n training images chosen by the seed among those not put aside, and their labels."""
    pool = _order(split)[n_put_aside:]
    if n > len(pool):
        raise ValueRangeError(
            f"a lesson on {split.name} needs at most the {len(pool)} images that are not put aside; got {n}. Take "
            "fewer."
        )
    return _pick(split, pool[torch.randperm(len(pool), generator=seeded(seed))[:n]])


def _order(split: Split) -> Tensor:
    return torch.randperm(len(split.train_inputs), generator=seeded(TRIAL_SEED))


def _pick(split: Split, chosen: Tensor) -> tuple[Tensor, Tensor]:
    return split.train_inputs[chosen], split.train_labels[chosen]
