"""Gammas for many blocks that share one matrix: one factor for all of them, one iteration, or each block by itself.

The factor of a block of n equations costs about n^3 multiplications once, an iteration about 650 n^2 for every block
(some 260 sweeps at an excess of 1.25): the factor pays up to several hundred equations per block and block. Both
ways work in float32 and take their residuals in float64. Both need an excess that is not near one. Where they do not
reach the tolerance, and where features are too few for an exact solution, blocks are solved one by one with whatever
suits them. Features are scaled to unit length first.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from onlynorm.layers.block_operator import BlockOperator
from onlynorm.solvers import KhatriRao, solve_operator
from onlynorm.solvers.krylov import solve_krylov

EQUATIONS_PER_BLOCK = 1000
MOST_EQUATIONS = 8192
"""Of a block, for a factor: beyond, it would take more than a quarter of a gigabyte."""
LEAST_EXCESS = 1.05
"""Below, iterations grow with the size of the system, and a factor of the Gram matrix loses too many digits."""
TOLERANCE = 1e-10
"""What `solve` aims at when nobody asks for more."""
MAX_REFINEMENTS, MAX_ITERATIONS = 8, 2000


def solve_blocks(operator: KhatriRao, targets: Float[Tensor, "blocks out inp"]) -> Float[Tensor, "blocks feat"]:
    """The least-norm gammas with left diag(gamma_b) right = targets[b], or the nearest where features are too few."""
    if len(targets) > 1 and operator.excess >= LEAST_EXCESS:
        unit, lengths = operator.unit()
        sizes = targets.abs().amax((1, 2), keepdim=True)
        sizes = torch.where(sizes > 0, sizes, 1.0)  # a block that is small beside others keeps its digits
        whole, target = BlockOperator(unit, len(targets)), (targets / sizes).flatten(0, 1)
        is_small = operator.equations <= min(EQUATIONS_PER_BLOCK * len(targets), MOST_EQUATIONS)
        gamma = _by_factor(whole, target) if is_small else None
        if gamma is None:
            gamma = _by_iteration(whole, target)
        if _left_over(whole, target, gamma) <= TOLERANCE:
            return gamma.view(len(targets), -1) * sizes[:, 0] / lengths
    return torch.stack([solve_operator(operator, target).gamma for target in targets])


def _by_factor(whole: BlockOperator, target: Tensor) -> Tensor | None:
    """Gamma by one float32 factor for all blocks, refined; None where that is too coarse for these features."""
    factor, failed = torch.linalg.cholesky_ex(whole.block.to(torch.float32).row_gram())
    if int(failed):
        return None
    gamma, rest, error = target.new_zeros(whole.n_features), target, 1.0
    for _ in range(MAX_REFINEMENTS):
        size = torch.linalg.vector_norm(rest).clamp_min(torch.finfo(rest.dtype).tiny)
        columns = (rest / size).float().reshape(whole.n_blocks, -1).mT
        half = torch.linalg.solve_triangular(factor, columns, upper=False)
        found = torch.linalg.solve_triangular(factor.mT, half, upper=True).mT.to(target.dtype)
        gamma = gamma + size * whole.transpose(found.reshape(target.shape))
        rest, before, error = target - whole.apply(gamma), error, _left_over(whole, target, gamma)
        if error <= TOLERANCE:
            return gamma
        if not error <= before / 2:
            return None
    return None


def _by_iteration(whole: BlockOperator, target: Tensor) -> Tensor:
    """Gamma by one iteration on all blocks side by side."""
    return solve_krylov(whole, target, tolerance=TOLERANCE, max_iterations=MAX_ITERATIONS).gamma


def _left_over(whole: BlockOperator, target: Tensor, gamma: Tensor) -> float:
    """The relative residual over all blocks."""
    rest = torch.linalg.vector_norm(target - whole.apply(gamma))
    return float(rest / torch.linalg.vector_norm(target).clamp_min(torch.finfo(target.dtype).tiny))
