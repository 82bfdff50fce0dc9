"""Matrices to factorize."""

from __future__ import annotations

import torch
from torch import Tensor

from onlynorm.identity import random_matrix


def positive(dim: int, seed: int = 0) -> Tensor:
    matrix = random_matrix(dim, seed=seed)
    return matrix if torch.linalg.det(matrix) > 0 else matrix * torch.tensor([-1.0] + [1.0] * (dim - 1)).double()


def symmetric(dim: int, seed: int = 0) -> Tensor:
    """A symmetric positive definite matrix without negative eigenvalues: every method takes it."""
    half = random_matrix(dim, seed=seed)
    return half @ half.mT + 0.1 * torch.eye(dim).double()
