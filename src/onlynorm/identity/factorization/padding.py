"""One dimension more for a matrix of negative determinant, which no product of layers near the identity has.

    [[R, b], [c, e]]

has R as its upper left part whatever b, c and e are: x is sent with a zero, and the last output is dropped. The paper
takes b = c = 0 and e = -1. With R = Q P (polar decomposition) and a unit vector q that Q flips, Q q = -q,

    b = -s p q,    c = s q^T P,    e = -p,    s >= 0,

turns q through the new dimension by less than half a turn and makes up for it by its length: the plane of q and the new
axis is turned by pi - arctan(s) and stretched by sqrt(1 + s^2). For R = -1 that is 2.18 / l instead of pi / l, and no
factorization is below it.

Theory: hardt_ma2017:negative-determinant
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onlynorm.identity.factorization.decompositions import METHODS, Parts
from onlynorm.identity.factorization.matrices import Decomposition

SMALL = 64
"""Sizes up to which the slope s is searched; for larger ones two are compared."""
MAX_SLOPE = 1e3
"""The largest slope s: what is added to R may be so much larger, since that many digits of R are lost beside it."""
_FRACTIONS = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)


def pad_as_printed(given: Decomposition) -> Decomposition:
    """[[R, 0], [0, -c]]: one, as in the paper, but never outside the singular values, whose spread stays that of R."""
    extra = torch.ones_like(given.values[:1]).clamp(given.values[-1], given.values[0])[:, None]
    return Decomposition.of(torch.block_diag(given.matrix, -extra))


def pad(given: Decomposition, depth: int) -> Decomposition:
    """The padded matrix whose spiral has the smallest norm, among the paper's and those that turn less far."""
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
    """The s at which one flipped direction of this size takes the smallest steps."""
    import scipy.optimize

    def step(longer: float) -> float:
        log, angle = math.log(size) + longer, math.pi - math.acos(math.exp(-longer))
        return math.expm1(log / depth) ** 2 + 4.0 * math.exp(log / depth) * math.sin(angle / (2 * depth)) ** 2

    most = min(math.log(MAX_SLOPE), max(-math.log(size), 0.0) + 3.0)
    longer = float(scipy.optimize.minimize_scalar(step, bounds=(0.0, most), method="bounded").x)
    return math.sqrt(math.expm1(2.0 * longer))


def _spiral_norm(found: Decomposition, depth: int) -> float:
    return max(float(torch.linalg.matrix_norm(run.core, 2)) for run in METHODS["spiral"](Parts(found), depth))
