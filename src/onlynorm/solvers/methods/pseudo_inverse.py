"""pinv(M) for random features, computed once and applied at every training step.

pinv(M) = M^T (M M^T)^-1 with at least as many features as equations, else (M^T M)^-1 M^T. The Cholesky factor of the
smaller Gram matrix is computed once in float64. Features are scaled to unit length, as in `solve`. Blocks of outputs
share one factor.

The factor is stored in the dtype of the layer if a test shows that this is accurate enough: the error of one step is
part of the next target, so that small errors do not accumulate. If the factor does not fit into memory, conjugate
gradients are used; blocks of outputs are exact and cheaper.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from onlynorm.errors import InsufficientFeaturesError
from onlynorm.memory import memory_budget
from onlynorm.solvers.methods.krylov import conjugate_gradients
from onlynorm.solvers.operator import KhatriRao

ENOUGH = 1e-3
"""Relative residual allowed for a solve in lower precision or by iteration."""
MAX_ITERATIONS = 500


class PseudoInverse:
    """Maps a change of the weight to the minimum-norm (least-squares) change of gamma."""

    def __init__(self, operator: KhatriRao, *, dtype: torch.dtype = torch.float64, memory: float | None = None) -> None:
        """Takes an operator in float64; `dtype` is the dtype of the result, used internally if it is accurate enough.

        Factorizes if two Gram matrices fit into `memory` bytes, by default 80 % of the machine's memory.
        """
        self.is_wide = operator.n_features >= operator.equations
        self.factor: Tensor | None = None
        working = torch.float64 if dtype == torch.float64 else torch.float32
        operator, self._lengths = operator.unit()
        self.operator = operator.to(working)
        if 2 * 8 * min(operator.n_features, operator.equations) ** 2 <= memory_budget(memory):
            gram = operator.row_gram() if self.is_wide else operator.gram()
            factor = _factorize(gram, operator)
            self.factor = factor.to(working)
            if working != torch.float64 and self._relative_error(gram) > ENOUGH:
                self.factor, self.operator = factor, operator

    def __call__(self, change: Float[Tensor, "*blocks out inp"]) -> Float[Tensor, "*blocks feat"]:
        """pinv(M) change for every block."""
        if change.ndim > 2 and len(change) == 1:  # batched products are slower
            return self(change[0])[None]
        change = change.to(self.operator.dtype)
        lengths = self._lengths.to(change.dtype)
        if self.is_wide:
            return self.operator.transpose(self._solve(change, 2)) / lengths
        return self._solve(self.operator.transpose(change), 1) / lengths

    def _solve(self, right: Tensor, n_axes: int) -> Tensor:
        """The inverse of the smaller Gram matrix times vectors, which are the last `n_axes` axes."""
        if self.factor is not None:
            # Two triangular solves; cholesky_solve would copy the factor at every call.
            columns = right.reshape(-1, len(self.factor)).mT
            half = torch.linalg.solve_triangular(self.factor, columns, upper=False)
            return torch.linalg.solve_triangular(self.factor.mT, half, upper=True).mT.reshape(right.shape)
        op = self.operator
        gram = op.row_gram_apply if n_axes == 2 else op.gram_apply
        if not bool(right.isfinite().all()):  # the iteration would ignore NaN and infinity
            return torch.full_like(right, torch.nan)
        return conjugate_gradients(gram, right, n_axes, tolerance=ENOUGH, max_iterations=MAX_ITERATIONS)[0]

    def _relative_error(self, gram: Tensor) -> float:
        """Relative residual of a solve with a random right-hand side."""
        wanted = torch.randn(len(gram), generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(gram.device)
        found = self._solve(wanted.to(self.operator.dtype), 1).double()
        return float(torch.linalg.vector_norm(gram @ found - wanted) / torch.linalg.vector_norm(wanted))


def _factorize(gram: Tensor, operator: KhatriRao) -> Tensor:
    factor, info = torch.linalg.cholesky_ex(gram)
    if int(info) != 0:
        raise InsufficientFeaturesError(
            f"a preconditioned step needs independent features; got {operator!r} of lower rank. Use denser features, "
            "another seed, or a larger excess."
        )
    return factor
