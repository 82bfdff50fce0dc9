"""Bounds of the largest norm of near-identity factors: the paper's upper bound, a smaller one, and a lower bound."""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float, Num
from torch import Tensor

from onlynorm.identity.factorization.matrices import Decomposition, need_depth, need_invertible, need_matrix
from onlynorm.validate import need_number

N_PHASES = 8
"""Directions per plane of complex eigenvectors for the lower bound."""
_N_LENGTHS = 400
"""Lengths in the grid search with an extra dimension, and again in its refinement."""
_SLACK = 1e-6
"""Relative tolerance for the spacing of that grid."""


def paper_bound(stretch: float, depth: int) -> float:
    """(4 pi + 3 g) / depth, with g the largest |log| of a singular value; proven for depth >= 3 g.

    Theory: hardt_ma2017:thm-2.1

    Examples:
        >>> from onlynorm.identity import paper_bound
        >>> round(paper_bound(1.0, 100), 4)
        0.1557
    """
    stretch, depth = _need_stretch(stretch), need_depth(depth)
    return (4.0 * math.pi + 3.0 * stretch) / depth


def spiral_bound(stretch: float, depth: int) -> float:
    """2 sin(pi / (2 depth)) + exp(g / depth) - 1, an upper bound for the method "spiral" at every depth.

    It is below (pi + (e - 1) g) / depth for depth >= g, and below (pi + 1.19 g) / depth for depth >= 3 g. It may
    overflow to infinity.
    Theory: hardt_ma2017:thm-2.1

    Examples:
        >>> from onlynorm.identity import spiral_bound
        >>> round(spiral_bound(1.0, 100), 4)
        0.0415
    """
    stretch, depth = _need_stretch(stretch), need_depth(depth)
    return 2.0 * math.sin(math.pi / (2 * depth)) + _expm1(stretch / depth)


def least_norm(matrix: Num[Tensor | np.ndarray, "out inp"], depth: int) -> float:
    """A lower bound of the largest norm of any factorization of this depth.

    A layer of norm a < 1 multiplies the length of a vector by r and rotates it by t, where r exp(i t) is in the disc of
    radius a around one. The logarithms of that disc are a convex set, so l layers reach l times that set: mapping x to
    R x requires a >= |exp((s + i t) / l) - 1|, with s = log(|R x| / |x|) and t the angle between x and R x. It is
    evaluated for singular vectors, vectors in the planes of eigenvectors, and the vector with the smallest x^T R x.

    A negative determinant requires extra dimensions, in which x is mapped to (R x, anything): longer, at another angle,
    with the same component along x. The bound is then the minimum over all such images. So it is for a rectangular R,
    transposed if it has fewer rows than columns, which changes no norm; x is appended with zeros.

    For depth 1 the only factor is R - I (for rectangular R, a matrix of which it is a part).

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> from onlynorm.identity import least_norm
        >>> R = torch.tensor([[0.0, -2.0], [2.0, 0.0]])
        >>> bound = least_norm(R, 8)
        >>> round(bound, 3), bound <= on.factorize(R, 8).max_norm + 1e-9
        (0.224, True)
    """
    depth = need_depth(depth)
    given = need_matrix(matrix, what="least_norm")
    rows, columns = given.shape
    found = Decomposition.of(given.mT if rows < columns else given)
    need_invertible(found, what="least_norm")
    if depth == 1:
        return float(torch.linalg.matrix_norm(found.matrix - torch.eye(*found.matrix.shape).to(found.matrix), 2))
    logs, angles = _reached(found)
    largest = _expm1(float(found.values[0].log()) / depth)
    if rows == columns and found.sign > 0:
        floor = float(_step(logs, angles, depth).max())
        return max(largest, -math.expm1(float(found.values[-1].log()) / depth), min(floor, 1.0), 0.0)
    return max(largest, min((1.0 - _SLACK) * _floor_with_more_dimensions(logs, angles, depth), 1.0), 0.0)


def _step(logs: Tensor, angles: Tensor, depth: int) -> Tensor:
    """|exp((s + i t) / depth) - 1|, computed without cancellation."""
    grown = torch.expm1(logs / depth)
    return torch.sqrt(grown.square() + 4.0 * (1.0 + grown) * torch.sin(angles / (2 * depth)).square())


def _floor_with_more_dimensions(logs: Tensor, angles: Tensor, depth: int) -> float:
    """The maximum over vectors x of the minimum step to any (R x, c), for these logs and angles."""
    along = torch.cos(angles)  # component of R x along x, relative to its length

    def steps(longer: Tensor) -> Tensor:
        return _step(logs[:, None] + longer, torch.acos(along[:, None] * torch.exp(-longer)), depth)

    # From the length of R x up to one that costs more than a rotation by pi.
    unit = torch.linspace(0.0, 1.0, _N_LENGTHS, dtype=logs.dtype, device=logs.device)
    most = (-logs).clamp(min=0.0)[:, None] + 3.0
    longer = unit * most
    best = longer.gather(1, steps(longer).argmin(1, keepdim=True))
    around = (best + (2.0 * unit - 1.0) * most / (_N_LENGTHS - 1)).clamp(min=0.0)
    return float(steps(around).amin(1).max())


def _reached(found: Decomposition) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """(log of the length ratio, angle) of the vectors used for the lower bound; the matrix has no more columns."""
    unit = found.values[0]
    matrix = found.matrix / unit  # angles do not depend on the scale, but squares may overflow
    square = matrix[: matrix.shape[1]]
    tried = [found.right.mT, torch.linalg.eigh((square + square.mT) / 2.0)[1][:, :1]]
    try:
        vectors = torch.linalg.eig(square)[1]
        phases = torch.exp(1j * torch.arange(N_PHASES, device=matrix.device) * (math.pi / N_PHASES))
        planes = (vectors[:, :, None] * phases.to(vectors)).real.flatten(1)
        tried.append(planes[:, planes.norm(dim=0) > 0.5 / N_PHASES])  # a real eigenvector has no imaginary part
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        pass  # the bound holds without these vectors too
    start = torch.nn.functional.normalize(torch.cat(tried, 1), dim=0)
    end = matrix @ start
    start = torch.cat([start, start.new_zeros(len(end) - len(start), start.shape[1])])
    length = end.norm(dim=0)
    end = end / length
    angles = 2.0 * torch.atan2((start - end).norm(dim=0), (start + end).norm(dim=0))
    return length.log() + unit.log(), angles


def _need_stretch(stretch: float) -> float:
    return need_number("stretch", stretch, low=0.0, cure="It is the largest |log| of a singular value.")


def _expm1(value: float) -> float:
    return math.expm1(value) if value < 700.0 else math.inf
