"""Random tensors and errors that all tests share."""

from __future__ import annotations

import torch
from torch import Tensor


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal entries in float64."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def single_normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal entries in float32, which are not those of `normal`."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference, relative to that of the expected tensor."""
    found, expected = found.detach().double(), expected.detach().double()
    return float(torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected))
