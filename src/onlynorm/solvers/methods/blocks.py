"""Gammas of a block-diagonal system whose blocks share one matrix: by one factorization or one iteration for all.

Factorizing a block of n equations takes about n^3 multiplications, iterating about 650 n^2 for every block (some 260
sweeps at an excess of 1.25). Both run in float32 with float64 residuals and need an excess that is not near one. If
they do not reach the tolerance, or features are too few for an exact solution, blocks are solved one by one with
`solve`. Features are scaled to unit length first.

All blocks are concatenated in every product: a sweep is two large products with the features of one block. It runs at
the speed of the dense system and takes n_blocks times fewer operations.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from onlynorm.solvers.methods.krylov import solve_krylov
from onlynorm.solvers.operator import KhatriRao
from onlynorm.solvers.solve import solve_operator

PIECE = 1024
"""Features per step of a sweep."""


class BlockOperator:
    """The operator gamma -> the weight (out, inp) of all blocks; an `Operator` for the solvers."""

    def __init__(self, block: KhatriRao, n_blocks: int) -> None:
        self.block, self.n_blocks = block, n_blocks
        self.out, self.inp = block.out * n_blocks, block.inp
        self.n_features = block.n_features * n_blocks
        self.dtype, self.device = block.dtype, block.device
        left, self.right = block.dense()
        self.left = left.contiguous()

    @property
    def equations(self) -> int:
        """Weights of all blocks."""
        return self.out * self.inp

    def apply(self, gamma: Float[Tensor, " feat"]) -> Float[Tensor, "out inp"]:
        """M gamma."""
        return (gamma.view(self.n_blocks, 1, -1) * self.left).flatten(0, 1) @ self.right

    def transpose(self, residual: Float[Tensor, "out inp"]) -> Float[Tensor, " feat"]:
        """M^T R."""
        seen = (residual @ self.right.mT).view(self.n_blocks, self.block.out, -1)
        return (seen * self.left).sum(1).flatten()

    def gram_apply(self, gamma: Float[Tensor, " feat"], *, work: Tensor | None = None) -> Float[Tensor, " feat"]:
        """transpose(apply(gamma)); `work` is not needed."""
        return self.transpose(self.apply(gamma))

    def row_gram_apply(
        self, residual: Float[Tensor, "out inp"], *, work: Tensor | None = None
    ) -> Float[Tensor, "out inp"]:
        """M M^T R in one sweep: a chunk of features stays in the cache for both products."""
        total = torch.zeros_like(residual)
        for start in range(0, len(self.right), PIECE):
            right, left = self.right[start : start + PIECE], self.left[:, start : start + PIECE]
            seen = (residual @ right.mT).view(self.n_blocks, self.block.out, -1)
            weight = seen.mul_(left).sum(1, keepdim=True)
            total.addmm_(torch.mul(weight, left, out=seen).flatten(0, 1), right)
        return total

    def scratch(self) -> Tensor:
        """An empty tensor: no buffer is needed."""
        return torch.empty(0, dtype=self.dtype, device=self.device)

    def gram(self, *, is_whole: bool = True) -> Float[Tensor, "feat feat"]:
        """M^T M, block diagonal."""
        return torch.block_diag(*[self.block.gram()] * self.n_blocks)

    def row_gram(self) -> Float[Tensor, "eq eq"]:
        """M M^T, block diagonal."""
        return torch.block_diag(*[self.block.row_gram()] * self.n_blocks)

    def one_norm(self) -> float:
        """The largest column sum of |M|."""
        return self.block.one_norm()

    def materialise(self, *, dtype: torch.dtype | None = None) -> Float[Tensor, "eq feat"]:
        """M as a dense matrix."""
        return torch.block_diag(*[self.block.materialise(dtype=dtype)] * self.n_blocks)

    def to(self, dtype: torch.dtype) -> BlockOperator:
        """The same operator in another precision."""
        return BlockOperator(self.block.to(dtype), self.n_blocks)


EQUATIONS_PER_BLOCK = 1000
MOST_EQUATIONS = 8192
"""Equations of a block up to which it is factorized: more would need over a quarter of a gigabyte."""
LEAST_EXCESS = 1.05
"""Below, the number of iterations grows with the system, and the Gram matrix is too badly conditioned."""
TOLERANCE = 1e-10
"""Default tolerance of `solve`."""
MAX_REFINEMENTS, MAX_ITERATIONS = 8, 2000


def solve_blocks(operator: KhatriRao, targets: Float[Tensor, "blocks out inp"]) -> Float[Tensor, "blocks feat"]:
    """The minimum-norm gammas with left diag(gamma_b) right = targets[b], or least squares with too few features.

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> from onlynorm.solvers import KhatriRao, solve_blocks
        >>> features = on.draw("he_normal", (4, 8))
        >>> operator = KhatriRao(features.left(), features.right())
        >>> solve_blocks(operator, torch.rand(3, 4, 8).double()).shape
        torch.Size([3, 40])
    """
    if len(targets) > 1 and operator.excess >= LEAST_EXCESS:
        unit, lengths = operator.unit()
        sizes = targets.abs().amax((1, 2), keepdim=True)
        sizes = torch.where(sizes > 0, sizes, 1.0)  # equal accuracy for small blocks
        whole, target = BlockOperator(unit, len(targets)), (targets / sizes).flatten(0, 1)
        is_small = operator.equations <= min(EQUATIONS_PER_BLOCK * len(targets), MOST_EQUATIONS)
        gamma = _by_factor(whole, target) if is_small else None
        if gamma is None:
            gamma = _by_iteration(whole, target)
        if _relative_error(whole, target, gamma) <= TOLERANCE:
            return gamma.view(len(targets), -1) * sizes[:, 0] / lengths
    return torch.stack([solve_operator(operator, target).gamma for target in targets])


def _by_factor(whole: BlockOperator, target: Tensor) -> Tensor | None:
    """Gamma by a refined float32 Cholesky factorization shared by all blocks; None if it does not converge."""
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
        rest, before, error = target - whole.apply(gamma), error, _relative_error(whole, target, gamma)
        if error <= TOLERANCE:
            return gamma
        if not error <= before / 2:
            return None
    return None


def _by_iteration(whole: BlockOperator, target: Tensor) -> Tensor:
    """Gamma by one iteration on all blocks together."""
    return solve_krylov(whole, target, tolerance=TOLERANCE, max_iterations=MAX_ITERATIONS).gamma


def _relative_error(whole: BlockOperator, target: Tensor, gamma: Tensor) -> float:
    """The relative residual over all blocks."""
    rest = torch.linalg.vector_norm(target - whole.apply(gamma))
    return float(rest / torch.linalg.vector_norm(target).clamp_min(torch.finfo(target.dtype).tiny))
