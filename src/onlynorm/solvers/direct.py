"""Factorizations, for the sizes and shapes where they are the right tool.

- **LU** of the square system, factored in float32 and refined with float64 residuals. At l = 1 the condition
  number grows like N and Krylov methods stall, so a factorization is needed; float32 halves its time and quarters
  its memory (in place, and the float64 matrix never exists). Plain refinement stops gaining where
  kappa * eps32 nears one; there GMRES, preconditioned with the same factors, takes over.
- **Cholesky** of the smaller Gram matrix in float64. The condition number is squared, so it is used only where the
  law of the spectrum says that refinement converges all the same. With too few features the Gram comes almost for
  free from two small products; otherwise it costs more than the factorization itself.
- **SVD** for small systems of deficient rank, where nothing else gives the minimum-norm solution.

Theory: giannou2023:thm-1, random_features:thm-2.1
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.linalg
import scipy.sparse.linalg
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from onlynorm.errors import ShapeError
from onlynorm.solvers.khatri_rao import Operator

Substitute = Callable[[Tensor], Tensor]
"""Solves with the factors: (n, k) float64 right-hand sides in, (n, k) float64 out."""

MAX_REFINEMENTS = 12
GMRES_RESTART = 40


@dataclass
class DirectResult:
    """What the factorization gave: gamma, solves with the factors, and its condition estimate."""

    gamma: Tensor
    iterations: int
    condition: float


def solve_lu(
    operator: Operator,
    target: Float[Tensor, "*batch out inp"],
    *,
    tolerance: float,
    dtype: torch.dtype = torch.float32,
) -> DirectResult:
    """The unique gamma of a square system, by LU in `dtype` and refinement in the operator's precision."""
    if operator.n_features != operator.equations:
        raise ShapeError(
            f"solve_lu needs as many features as equations; got {operator.n_features} for {operator.equations}. "
            "Use Krylov or Cholesky for other shapes."
        )
    substitute, condition = _factor_lu(operator, dtype)
    gamma, count, error = _refine(operator, target, substitute, tolerance)
    if error > tolerance and math.isfinite(error):
        gamma, extra = _gmres(operator, target, gamma, substitute, tolerance)
        count += extra
    return DirectResult(gamma, count, condition)


def solve_cholesky(
    operator: Operator, target: Float[Tensor, "*batch out inp"], *, tolerance: float
) -> DirectResult | None:
    """The minimum-norm or least-squares gamma through the smaller Gram matrix; None if it is not positive definite."""
    least_squares = operator.n_features < operator.equations
    gram = operator.gram() if least_squares else operator.row_gram()
    largest = torch.linalg.matrix_norm(gram, 1)
    factor, info = torch.linalg.cholesky_ex(gram)
    del gram
    if int(info) != 0:
        return None

    def substitute(rest: Tensor) -> Tensor:
        matrix = rest.mT.unflatten(-1, (operator.out, operator.inp))
        if least_squares:
            return torch.cholesky_solve(operator.transpose(matrix).mT, factor)
        y = torch.cholesky_solve(rest, factor)
        return operator.transpose(y.mT.unflatten(-1, (operator.out, operator.inp))).mT

    condition = math.sqrt(float(largest) * _inverse_norm(factor))
    gamma, count, _ = _refine(operator, target, substitute, tolerance)
    return DirectResult(gamma, count, condition)


def solve_svd(operator: Operator, target: Float[Tensor, "*batch out inp"]) -> DirectResult:
    """The minimum-norm least-squares gamma of a small system of any rank."""
    matrix = operator.materialise()
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    cutoff = max(matrix.shape) * torch.finfo(s.dtype).eps * s[0]
    kept = s > cutoff
    flat = target.flatten(-2)
    coefficients = (flat @ u[:, kept]) / s[kept]
    condition = float(s[kept][0] / s[kept][-1]) if bool(kept.any()) else math.inf
    return DirectResult(coefficients @ vh[kept], 1, condition)


def _factor_lu(operator: Operator, dtype: torch.dtype) -> tuple[Substitute, float]:
    """LU factors of M in `dtype` as a substitution, with a 1-norm condition estimate."""
    matrix = operator.materialise(dtype=dtype)
    one_norm = operator.one_norm()
    if matrix.device.type != "cpu":
        factors, pivots, _ = torch.linalg.lu_factor_ex(matrix)
        del matrix
        return lambda rest: torch.linalg.lu_solve(factors, pivots, rest.to(dtype)).to(rest.dtype), math.nan
    # LAPACK overwrites the column-major matrix, so the factors cost no second copy.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", scipy.linalg.LinAlgWarning)  # a zero pivot shows up as a residual
        lu, pivots_np = scipy.linalg.lu_factor(matrix.numpy(), overwrite_a=True, check_finite=False)
    (condition_of,) = scipy.linalg.get_lapack_funcs(("gecon",), (lu,))
    reciprocal, _ = condition_of(lu, one_norm)

    def substitute(rest: Tensor) -> Tensor:
        right = rest.numpy().astype(lu.dtype, order="F")
        with np.errstate(all="ignore"):
            found = scipy.linalg.lu_solve((lu, pivots_np), right, overwrite_b=True, check_finite=False)
        return torch.from_numpy(found.astype(np.float64))

    return substitute, 1.0 / float(reciprocal) if reciprocal > 0 else math.inf


def _inverse_norm(factor: Tensor) -> float:
    """An estimate of |(L L^T)^-1|_1 from a few power steps with the factor."""
    x = torch.full((factor.shape[0], 1), 1.0 / factor.shape[0], dtype=factor.dtype, device=factor.device)
    size = 0.0
    for _ in range(6):
        x = torch.cholesky_solve(x / torch.linalg.vector_norm(x), factor)
        size = float(torch.linalg.vector_norm(x))
    return size


def _refine(operator: Operator, target: Tensor, substitute: Substitute, tolerance: float) -> tuple[Tensor, int, float]:
    """Repeats gamma += substitute(target - M gamma) while it at least halves what is left.

    What is left is the residual or, with too few features, its part M^T r that least squares can still remove.
    Returns the best gamma, the number of substitutions and the relative size of what is left.
    """
    least_squares = operator.n_features < operator.equations

    def left_over(rest: Tensor) -> Tensor:
        if least_squares:
            return torch.linalg.vector_norm(operator.transpose(rest), dim=-1)
        return torch.linalg.vector_norm(rest, dim=(-2, -1))

    tiny = torch.finfo(target.dtype).tiny
    size = torch.linalg.vector_norm(target, dim=(-2, -1)).clamp_min(tiny)
    first = left_over(target).clamp_min(tiny)
    gamma = target.new_zeros(*target.shape[:-2], operator.n_features)
    best, error, count, rest = gamma, 1.0, 0, target
    floor = 1e-4 * tolerance  # another substitution costs next to nothing beside the factorization
    while error > floor and count < MAX_REFINEMENTS:
        flat = (rest / size[..., None, None]).reshape(-1, operator.equations)
        step = substitute(flat.mT).mT.reshape(gamma.shape)
        gamma = gamma + step * size[..., None]
        rest = target - operator.apply(gamma)
        count += 1
        now = float((left_over(rest) / first).max())
        if not now < error:
            break
        stalled = now > 0.5 * error
        best, error = gamma, now
        if stalled:
            break
    return best, count, error


def _gmres(
    operator: Operator, target: Tensor, gamma: Tensor, substitute: Substitute, tolerance: float
) -> tuple[Tensor, int]:
    """GMRES on M, right-hand side by right-hand side, preconditioned with the float32 factors."""
    n = operator.equations
    targets = target.reshape(-1, n)
    found = gamma.reshape(-1, n).clone()
    count = 0

    def apply(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return operator.apply(torch.from_numpy(x.reshape(-1))).reshape(-1).numpy()

    def precondition(x: NDArray[np.float64]) -> NDArray[np.float64]:
        nonlocal count
        count += 1
        return substitute(torch.from_numpy(np.ascontiguousarray(x)).reshape(-1, 1)).reshape(-1).numpy()

    matrix = scipy.sparse.linalg.LinearOperator((n, n), matvec=apply, dtype=np.float64)
    factors = scipy.sparse.linalg.LinearOperator((n, n), matvec=precondition, dtype=np.float64)
    for i, right in enumerate(targets):
        solution, _ = scipy.sparse.linalg.gmres(
            matrix, right.numpy(), x0=found[i].numpy(), M=factors, rtol=0.3 * tolerance, atol=0.0,
            restart=min(GMRES_RESTART, n), maxiter=4,
        )  # fmt: skip
        candidate = torch.from_numpy(solution)
        old = torch.linalg.vector_norm(right - operator.apply(found[i]).reshape(-1))
        new = torch.linalg.vector_norm(right - operator.apply(candidate).reshape(-1))
        if bool(new < old):
            found[i] = candidate
    return found.reshape(gamma.shape), count
