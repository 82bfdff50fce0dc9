"""Padding of matrices that are no product of layers near the identity: rectangular ones, or of negative determinant.

A rectangular matrix becomes the upper left part of a square one, see `complete`. A negative determinant takes one extra
dimension:

    [[R, b], [c, e]]

has R as its upper left part for all b, c and e: a zero is appended to x, and the last output is dropped. The paper uses
b = c = 0 and e = -1. With R = Q P (polar decomposition) and a unit vector q with Q q = -q,

    b = -s p q,    c = s q^T P,    e = -p,    s >= 0,

rotates the plane of q and the new axis by only pi - arctan(s), and stretches it by sqrt(1 + s^2). For R = -1 the norm
is 2.18 / l instead of pi / l, and no factorization has a smaller one.

Theory: hardt_ma2017:negative-determinant
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onlynorm.identity.factorization.decompositions import METHODS, DecomposedMatrix
from onlynorm.identity.factorization.matrices import Decomposition

SMALL = 64
"""Largest size for which several slopes s are tried; for larger sizes, one."""
MAX_SLOPE = 1e3
"""The largest slope s; larger added entries would reduce the accuracy of R."""
_FRACTIONS = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)


def complete(given: Decomposition) -> Decomposition:
    """A square matrix with positive determinant whose upper left part is the given rectangular one, of full rank.

    The added rows (or columns) are orthogonal to the given ones, so singular values are those of the given matrix and
    one more, 1 clipped to their range: the bound of the paper does not change. Of all such rows, those whose rotation
    is closest to the identity are taken, in the Frobenius norm (orthogonal Procrustes problem).
    """
    rows, columns = given.matrix.shape
    if rows > columns:
        turned = complete(Decomposition(given.matrix.mT, given.right.mT, given.values, given.left.mT))
        return Decomposition.of(turned.matrix.mT)
    rest = given.right[rows:]
    left, _, right = torch.linalg.svd(rest[:, rows:])
    scale = given.values.new_ones(()).clamp(given.values[-1], given.values[0])
    made = _with_rows(given.matrix, scale * (right.mT @ left.mT @ rest))
    if made.sign > 0:
        return made
    signs = torch.ones_like(rest[:, 0])
    signs[-1] = -1.0  # the direction of the smallest singular value is the cheapest to flip
    return _with_rows(given.matrix, scale * (right.mT * signs @ left.mT @ rest))


def _with_rows(matrix: Tensor, rows: Tensor) -> Decomposition:
    return Decomposition.of(torch.cat([matrix, rows]))


def pad_as_printed(given: Decomposition) -> Decomposition:
    """[[R, 0], [0, -c]] with c = 1 as in the paper, clipped to the range of the singular values of R."""
    extra = torch.ones_like(given.values[:1]).clamp(given.values[-1], given.values[0])[:, None]
    return Decomposition.of(torch.block_diag(given.matrix, -extra))


def pad(given: Decomposition, depth: int) -> Decomposition:
    """The padded matrix with the smallest spiral norm, among that of the paper and those with smaller angles."""
    flipped = _flipped(given)
    size = float(torch.linalg.vector_norm(given.values.sqrt() * (given.right @ flipped)) ** 2)  # q^T P q
    slope = _best_slope(size, depth)
    slopes = [fraction * slope for fraction in (_FRACTIONS if len(given.matrix) <= SMALL else (1.0,))]
    tried = [pad_as_printed(given), *(_turned(given, flipped, size, slope) for slope in slopes)]
    return min(tried, key=lambda found: _spiral_norm(found, depth))


def _turned(given: Decomposition, flipped: Tensor, size: float, slope: float) -> Decomposition:
    stretching = given.right.mT * given.values @ given.right
    above = torch.cat([given.matrix, -slope * size * flipped[:, None]], 1)
    below = torch.cat([slope * flipped @ stretching, flipped.new_tensor([-size])])
    return Decomposition.of(torch.cat([above, below[None]]))


def _flipped(given: Decomposition) -> Tensor:
    """A unit vector q with Q q = -q; an orthogonal matrix of determinant -1 has one."""
    import scipy.linalg

    turning = (given.left @ given.right).cpu().numpy()
    blocks, vectors = scipy.linalg.schur(turning, output="real")
    n = len(blocks)
    alone = [i for i in range(n) if (i == 0 or blocks[i, i - 1] == 0.0) and (i + 1 == n or blocks[i + 1, i] == 0.0)]
    place = min(alone, key=lambda i: blocks[i, i])
    return torch.from_numpy(vectors[:, place].copy()).to(given.matrix)


def _best_slope(size: float, depth: int) -> float:
    """The slope s that minimizes the norm for one flipped direction of this size."""
    import scipy.optimize

    def step(longer: float) -> float:
        log, angle = math.log(size) + longer, math.pi - math.acos(math.exp(-longer))
        return math.expm1(log / depth) ** 2 + 4.0 * math.exp(log / depth) * math.sin(angle / (2 * depth)) ** 2

    most = min(math.log(MAX_SLOPE), max(-math.log(size), 0.0) + 3.0)
    longer = float(scipy.optimize.minimize_scalar(step, bounds=(0.0, most), method="bounded").x)
    return math.sqrt(math.expm1(2.0 * longer))


def _spiral_norm(found: Decomposition, depth: int) -> float:
    return max(
        float(torch.linalg.matrix_norm(run.core, 2)) for run in METHODS["spiral"](DecomposedMatrix(found), depth)
    )
