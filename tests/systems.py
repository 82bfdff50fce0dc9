"""Random systems to solve, and their slow references."""

from __future__ import annotations

import torch
from torch import Tensor


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def draw_system(out: int, inp: int, feat: int, *batch: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    return normal(out, feat, seed=seed), normal(feat, inp, seed=seed + 1), normal(*batch, out, inp, seed=seed + 2)


def materialise(left: Tensor, right: Tensor) -> Tensor:
    return (left[:, None, :] * right.mT[None]).flatten(0, 1)


def least_squares(left: Tensor, right: Tensor, target: Tensor) -> Tensor:
    """The minimum-norm least-squares solution of the materialised system."""
    flat = target.flatten(-2).reshape(-1, target.shape[-2] * target.shape[-1])
    found = torch.linalg.lstsq(materialise(left, right), flat.mT, driver="gelsd").solution.mT
    return found.reshape(*target.shape[:-2], -1)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def rebuild(left: Tensor, right: Tensor, gamma: Tensor) -> Tensor:
    return left @ (gamma[..., :, None] * right)
