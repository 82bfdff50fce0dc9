"""The systems for the comparison of solvers: flat, tall, tiny, square, sparse and unequal ones, and convolutions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from onlynorm.features import draw


@dataclass(frozen=True)
class System:
    """One system of the grid: features for a weight of `shape`, and a random target."""

    family: str
    name: str
    shape: tuple[int, ...]
    excess: float
    features: str = "he_normal"
    density: float | None = None
    decades: tuple[float, float] = (0.0, 0.0)
    """The lengths of features, and the rows of left, range over 10^-x to 10^x."""

    @property
    def equations(self) -> int:
        """The number of entries of the target."""
        return math.prod(self.shape)

    def make(self) -> tuple[Tensor, Tensor, Tensor]:
        """Left, right and the target as a matrix, in float64."""

        def factors(layer: str) -> tuple[Tensor, Tensor]:
            name = "he_normal" if self.features == "cauchy" else self.features
            made = draw(name, self.shape, excess=self.excess, seed=0, layer=layer, density=self.density)
            return made.left(), made.right()

        left, right = factors(self.name)
        if self.features == "cauchy":
            left, right = (top / below for top, below in zip((left, right), factors("below"), strict=True))
        features, rows = self.decades
        left = left * torch.logspace(-features, features, left.shape[1], dtype=torch.float64)
        left = left * torch.logspace(-rows, rows, left.shape[0], dtype=torch.float64)[:, None]
        target = np.random.default_rng(0).standard_normal((left.shape[0], right.shape[1]))
        return left.contiguous(), right.contiguous(), torch.from_numpy(target)


def _grid() -> Iterator[System]:
    def dense(family: str, shape: tuple[int, ...], *excesses: float) -> Iterator[System]:
        name = f"conv 3x3, {shape[0]} ch" if len(shape) == 4 else f"{shape[0]} x {shape[1]}"
        return (System(family, name, shape, excess) for excess in excesses)

    yield from dense("flat", (1, 1000), 0.5, 0.9, 1.02, 1.25, 2.0)
    yield from dense("flat", (2, 1000), 0.5, 0.9, 1.02, 1.25)
    yield from dense("flat", (4, 1000), 0.5, 0.9, 1.25)
    yield from dense("flat", (1, 3000), 0.5, 1.25)
    yield from dense("flat", (1, 4608), 1.25)
    yield from dense("flat", (3, 300), 0.5, 1.0, 1.25, 2.0, 4.0)
    yield from dense("tall", (1000, 1), 0.5, 1.25)
    yield from dense("tall", (1000, 2), 0.5, 1.25)
    for side in (4, 8, 16, 30):
        yield from dense("tiny", (side, side), 0.5, 1.0, 1.25, 2.0, 4.0)
    yield from dense("square", (64, 64), 0.5, 1.0, 1.1, 1.25, 2.0, 4.0)
    for density in (0.5, 0.2):
        for shape in ((30, 30), (3, 300)):
            for excess in (1.25, 2.0):
                name = f"{shape[0]} x {shape[1]}, density {density}"
                yield System("sparse", name, shape, excess, "sparse_he_normal", density)
    yield System("sparse", "30 x 30, signs 0.3", (30, 30), 1.25, "er_sign", 0.3)
    yield System("unequal", "36 x 36, Cauchy", (36, 36), 1.25, "cauchy")
    yield System("unequal", "40 x 40, Cauchy", (40, 40), 1.25, "cauchy")
    yield System("unequal", "40 x 40, lengths", (40, 40), 1.25, decades=(2.0, 0.0))
    yield System("unequal", "40 x 40, rows", (40, 40), 0.5, decades=(0.0, 3.0))
    yield from dense("convolution", (16, 16, 3, 3), 1.0, 1.1, 1.25, 1.5, 2.0)
    yield from dense("convolution", (32, 32, 3, 3), 1.0, 1.1, 1.25, 1.5, 2.0)
    yield from dense("convolution", (64, 64, 3, 3), 1.1, 1.25)
    yield from dense("convolution", (100, 100, 3, 3), 1.25)


GRID = tuple(_grid())
FAMILIES = tuple(dict.fromkeys(system.family for system in GRID))
GROWING = ("square", "convolution")
"""Families whose systems differ only in size, for the growth of the time and the rate of one iteration."""
