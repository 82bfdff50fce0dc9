"""One damped step on a Khatri-Rao system: step = M^T y with (M M^T + shift) y = rest.

Small systems are factorized. Large ones are solved by conjugate gradients in float32, preconditioned by the Kronecker
product

    M M^T  ~  A (x) B,    A = left left^T = U diag(a) U^T,    B = right^T right = V diag(b) V^T   (up to a factor),

which is the mean of M M^T for independent features. In the two eigenbases the damped product is diagonal: once left and
right are rotated, the preconditioner of M M^T + shift costs one elementwise product per iteration, for any shift.

The residual is checked in float64; if float32 is not accurate enough, the iteration continues in float64.
"""

from __future__ import annotations

from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from onlynorm.solvers.methods.krylov import conjugate_gradients
from onlynorm.solvers.operator import KhatriRao

MAX_ITERATIONS = 2000
TRUSTED = 0.3
"""Relative residual, measured in float64, above which a float32 solution is discarded."""


class Damped(Protocol):
    """A system that can be solved for several shifts."""

    iterations: int

    def solve(self, rest: Tensor, *, shift: float, tolerance: float) -> tuple[Tensor, Tensor] | None:
        """(M^T y, M M^T y), or None if the shift is too small to solve the system."""
        ...


class DenseDamped:
    """The damped system, solved by Cholesky factorization of M M^T."""

    iterations = 0

    def __init__(self, operator: KhatriRao) -> None:
        self._operator = operator
        self._gram = operator.row_gram()

    def solve(
        self, rest: Float[Tensor, "out inp"], *, shift: float, tolerance: float
    ) -> tuple[Float[Tensor, " feat"], Float[Tensor, "out inp"]] | None:
        """(step, M step), exact for any tolerance."""
        shifted = self._gram.clone()
        shifted.diagonal().add_(shift)
        factor, info = torch.linalg.cholesky_ex(shifted)
        if int(info) != 0:
            return None
        step = self._operator.transpose(torch.cholesky_solve(rest.reshape(-1, 1), factor).reshape(rest.shape))
        return step, self._operator.apply(step)


class KroneckerDamped:
    """The damped system, solved by preconditioned conjugate gradients without building M M^T."""

    def __init__(self, operator: KhatriRao, *, dtype: torch.dtype = torch.float32) -> None:
        left, right = operator.dense()
        a, self._left_basis = torch.linalg.eigh(left @ left.mT)
        b, self._right_basis = torch.linalg.eigh(right.mT @ right)
        model = torch.outer(a.clamp_min(0.0), b.clamp_min(0.0))
        self._model = model * (operator.column_squares().sum() / model.sum())
        self._operator = operator
        self._rotated = KhatriRao(self._left_basis.mT @ left, right @ self._right_basis)
        self._inner = self._rotated.to(dtype)
        self.iterations = 0

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the iteration: float64 if float32 was not accurate enough."""
        return self._inner.dtype

    def solve(
        self, rest: Float[Tensor, "out inp"], *, shift: float, tolerance: float
    ) -> tuple[Float[Tensor, " feat"], Float[Tensor, "out inp"]] | None:
        """(step, M step), to a relative residual `tolerance` in the preconditioned norm."""
        scale = (self._model + shift).rsqrt()
        rhs = scale * (self._left_basis.mT @ rest @ self._right_basis)
        size = torch.linalg.vector_norm(rhs)
        while True:
            y = scale * size * self._iterate(rhs / size, scale, shift, tolerance)
            y = self._left_basis @ y @ self._right_basis.mT
            step = self._operator.transpose(y)
            made = self._operator.apply(step)
            left = torch.linalg.vector_norm(rest - made - shift * y)
            if bool(left <= TRUSTED * torch.linalg.vector_norm(rest)):
                return step, made
            if self.dtype == self._operator.dtype:
                return (step, made) if bool(torch.isfinite(step).all()) else None
            self._inner = self._rotated

    def _iterate(self, rhs: Tensor, scale: Tensor, shift: float, tolerance: float) -> Tensor:
        inner = self._inner
        work, scale = inner.scratch(), scale.to(inner.dtype)

        def gram(p: Tensor) -> Tensor:
            q = scale * p
            return inner.row_gram_apply(q, work=work).add_(q, alpha=shift).mul_(scale)

        found, count, _ = conjugate_gradients(
            gram, rhs.to(inner.dtype), 2, tolerance=tolerance, max_iterations=MAX_ITERATIONS
        )
        self.iterations += count
        return found.to(self._operator.dtype)
