"""Random systems to solve, and their slow references."""

from __future__ import annotations

from typing import Any

import torch
from tensors import normal
from torch import Tensor

from onlynorm.evidence.bench.systems import System


def draw_system(out: int, inp: int, feat: int, *batch: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    return normal(out, feat, seed=seed), normal(feat, inp, seed=seed + 1), normal(*batch, out, inp, seed=seed + 2)


def materialise(left: Tensor, right: Tensor) -> Tensor:
    return (left[:, None, :] * right.mT[None]).flatten(0, 1)


def column_lengths(left: Tensor, right: Tensor) -> Tensor:
    return left.norm(dim=0) * right.norm(dim=1)


def least_squares(left: Tensor, right: Tensor, target: Tensor) -> Tensor:
    """The least-squares solution of the materialised system, of least norm for features of unit length."""
    lengths = column_lengths(left, right)
    flat = target.flatten(-2).reshape(-1, target.shape[-2] * target.shape[-1])
    found = torch.linalg.lstsq(materialise(left, right) / lengths, flat.mT, driver="gelsd").solution.mT / lengths
    return found.reshape(*target.shape[:-2], -1)


def rebuild(left: Tensor, right: Tensor, gamma: Tensor) -> Tensor:
    return left @ (gamma[..., :, None] * right)


# Systems of `bench solve`


def bench_system(shape: tuple[int, ...], excess: float, **rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return System("", "test", shape, excess, **rest).make()


def residual(left: Tensor, right: Tensor, target: Tensor, gamma: Tensor) -> float:
    """The slow way: through the materialised matrix."""
    rest = materialise(left, right)[:, : len(gamma)] @ gamma.double() - target.flatten()
    return float(torch.linalg.vector_norm(rest) / torch.linalg.vector_norm(target))
