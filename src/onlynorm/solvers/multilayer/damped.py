"""One damped step on a Khatri-Rao system: the step = M^T y with (M M^T + shift) y = rest.

Small systems are factored. Large ones are solved by conjugate gradients in float32, preconditioned by the Kronecker
product that is nearest at hand,

    M M^T  ~  A (x) B,    A = left left^T = U diag(a) U^T,    B = right^T right = V diag(b) V^T   (up to a factor),

which for features that are independent of each other is what M M^T has as its mean. In the two eigenbases the damped
product is diagonal, so the preconditioner of M M^T + shift costs one elementwise product per iteration once left and
right are rotated: it needs no more than A and B, whatever the shift.

A step that float32 cannot give is noticed in float64, and the iteration goes on in float64.
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
"""A relative residual of the linear system, measured in float64, above which a float32 solution is not used."""


class Damped(Protocol):
    """A system that can be solved for several shifts."""

    iterations: int

    def solve(self, rest: Tensor, *, shift: float, tolerance: float) -> tuple[Tensor, Tensor] | None:
        """The step M^T y and M M^T y, or None where the shift is too small for the system to be solved."""
        ...


class DenseDamped:
    """The damped system by Cholesky factorization of M M^T, equations squared numbers."""

    iterations = 0

    def __init__(self, operator: KhatriRao) -> None:
        self._operator = operator
        self._gram = operator.row_gram()

    def solve(
        self, rest: Float[Tensor, "out inp"], *, shift: float, tolerance: float
    ) -> tuple[Float[Tensor, " feat"], Float[Tensor, "out inp"]] | None:
        """The step and what it makes, exact whatever the tolerance."""
        shifted = self._gram.clone()
        shifted.diagonal().add_(shift)
        factor, info = torch.linalg.cholesky_ex(shifted)
        if int(info) != 0:
            return None
        step = self._operator.transpose(torch.cholesky_solve(rest.reshape(-1, 1), factor).reshape(rest.shape))
        return step, self._operator.apply(step)


class KroneckerDamped:
    """The damped system by preconditioned conjugate gradients; M M^T is never built."""

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
        """The precision of the iteration: float64 once float32 did not suffice."""
        return self._inner.dtype

    def solve(
        self, rest: Float[Tensor, "out inp"], *, shift: float, tolerance: float
    ) -> tuple[Float[Tensor, " feat"], Float[Tensor, "out inp"]] | None:
        """The step and what it makes, to a relative residual `tolerance` in the preconditioned norm."""
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
