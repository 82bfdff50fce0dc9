"""How small the largest norm of near-identity factors can be: the paper's bound, a smaller one, and a floor."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

N_PHASES = 8
"""Directions tried in the plane of each pair of eigenvectors."""


def paper_bound(stretch: float, depth: int) -> float:
    """(4 pi + 3 g) / depth, with g the largest |log| of a singular value; promised from depth 3 g on.

    Theory: hardt_ma2017:thm-2.1
    """
    return (4.0 * math.pi + 3.0 * stretch) / depth


def spiral_bound(stretch: float, depth: int) -> float:
    """2 sin(pi / (2 depth)) + exp(g / depth) - 1, which the method "spiral" keeps at every depth.

    It is below (pi + (e - 1) g) / depth from depth g on, and below (pi + 1.19 g) / depth from 3 g on.
    Theory: hardt_ma2017:thm-2.1
    """
    return 2.0 * math.sin(math.pi / (2 * depth)) + math.expm1(stretch / depth)


def least_norm(matrix: Float[Tensor, "dim dim"], depth: int) -> float:
    """A norm below which no factorization of this depth can stay, whatever its method.

    Factors of norm a stretch a vector by at most (1 + a)^depth, shrink it by at most (1 - a)^depth, and turn it by
    at most depth * arcsin(a). The last is held against the angle between x and the matrix times x, for x in the
    planes of the eigenvectors: in one of them some x turns at least as far as the eigenvalue.
    """
    values = torch.linalg.svdvals(matrix)
    largest, smallest = float(values[0].log()), float(values[-1].log())
    angle = min(largest_turn(matrix) / depth, math.pi / 2)
    return max(math.expm1(largest / depth), -math.expm1(smallest / depth), math.sin(angle), 0.0)


def largest_turn(matrix: Float[Tensor, "dim dim"]) -> float:
    """The largest angle found between a vector and its image, in radians."""
    matrix = matrix / matrix.abs().max()  # an angle has no scale, but squares overflow
    try:
        vectors = torch.linalg.eig(matrix)[1]
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return 0.0  # without eigenvectors nothing is claimed about turns
    phases = torch.exp(1j * torch.arange(N_PHASES, device=matrix.device) * (math.pi / N_PHASES))
    tried = (vectors[:, :, None] * phases.to(vectors)).real.flatten(1)
    tried = tried[:, tried.norm(dim=0) > 0.5 / N_PHASES]  # a real eigenvector has no imaginary part
    start, end = (torch.nn.functional.normalize(part, dim=0) for part in (tried, matrix @ tried))
    return float(2.0 * torch.atan2((start - end).norm(dim=0), (start + end).norm(dim=0)).max())
