"""Gammas for many blocks that share one matrix: one factor for all of them, one iteration, or each block by itself.

The factor of a block of n equations costs about n^3 multiplications once, an iteration about 1,000 n^2 for every block
(some 200 sweeps at an excess of 1.25) at twice the speed: the factor pays up to a few hundred equations per block and
block. Both need an excess that is not near one. Where they do not reach the tolerance, and where features are too few
for an exact solution, blocks are solved one by one with whatever suits them.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from onlynorm.errors import InsufficientFeaturesError
from onlynorm.layers.block_operator import BlockOperator
from onlynorm.layers.pseudo_inverse import PseudoInverse
from onlynorm.solvers import KhatriRao, solve_operator
from onlynorm.solvers.krylov import solve_krylov

EQUATIONS_PER_BLOCK = 250
LEAST_EXCESS = 1.05
"""Below, iterations grow with the size of the system, and a factor of the Gram matrix loses too many digits."""
TOLERANCE = 1e-10
"""What `solve` aims at when nobody asks for more."""
MAX_REFINEMENTS, MAX_ITERATIONS = 5, 2000


def solve_blocks(operator: KhatriRao, targets: Float[Tensor, "blocks out inp"]) -> Float[Tensor, "blocks feat"]:
    """The least-norm gammas with left diag(gamma_b) right = targets[b], or the nearest where features are too few."""
    if len(targets) > 1 and operator.excess >= LEAST_EXCESS:
        whole, target = BlockOperator(operator, len(targets)), targets.flatten(0, 1)
        is_small = operator.equations <= EQUATIONS_PER_BLOCK * len(targets)
        gamma = _by_factor(whole, target) if is_small else _by_iteration(whole, target)
        if gamma is not None and _left_over(whole, target, gamma) <= TOLERANCE:
            return gamma.view(len(targets), -1)
    return torch.stack([solve_operator(operator, target).gamma for target in targets])


def _by_factor(whole: BlockOperator, target: Tensor) -> Tensor | None:
    """Gamma by one factor for all blocks, refined; None where features are dependent."""
    try:
        inverse = PseudoInverse(whole.block)
    except InsufficientFeaturesError:
        return None
    gamma = target.new_zeros(whole.n_features)
    for _ in range(MAX_REFINEMENTS):
        rest = target - whole.apply(gamma)
        gamma = gamma + inverse(rest.view(whole.n_blocks, -1, whole.inp)).flatten()
        if _left_over(whole, target, gamma) <= TOLERANCE:
            break
    return gamma


def _by_iteration(whole: BlockOperator, target: Tensor) -> Tensor:
    """Gamma by one iteration on all blocks side by side."""
    return solve_krylov(whole, target, tolerance=TOLERANCE, max_iterations=MAX_ITERATIONS).gamma


def _left_over(whole: BlockOperator, target: Tensor, gamma: Tensor) -> float:
    """The relative residual over all blocks."""
    rest = torch.linalg.vector_norm(target - whole.apply(gamma))
    return float(rest / torch.linalg.vector_norm(target).clamp_min(torch.finfo(target.dtype).tiny))
