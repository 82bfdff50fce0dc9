"""Direct methods: LU, Cholesky, QR and SVD.

- **LU** of a square system in float32, refined with float64 residuals. At l = 1 the condition number grows like N and
  Krylov methods stall. float32 halves the time and quarters the memory (in place, without a float64 matrix). Refinement
  stalls if kappa * eps32 is near one; then GMRES is used. It is preconditioned with the same factors, applied in
  float64: float32 substitutions are not linear, and GMRES would need ten times as many steps.
- **Cholesky** of the smaller Gram matrix, in float32 if the squared condition number allows refinement to converge,
  else in float64. The Gram matrix is computed from the factors, without M.
- **QR** of M with pivoting in float64, for any rank: its error depends on the condition number, that of Cholesky on its
  square. Gives the minimum-norm solution for deficient rank.
- **SVD**, which also gives all singular values.

All use features of unit length, so that "minimum norm" means the same for each of them.

Theory: giannou2023:thm-1, random_features:thm-2.1
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from onlynorm.errors import ShapeError
from onlynorm.solvers.lazy import MAX_HELD, lazy, set_lazy
from onlynorm.solvers.operator import Operator

Substitute = Callable[[Tensor], Tensor]
"""Solves with the factors: maps (n, k) float64 right-hand sides to (n, k) float64 solutions."""
Vector = NDArray[np.floating[Any]]
Project = Callable[[Tensor], Tensor]
"""Projects k residuals (n, k) onto the span of the features, in orthonormal coordinates."""
MAX_REFINEMENTS, MAX_RESTARTS = 12, 3
GMRES_RESTART = 40
LANCZOS = 3
"""Lanczos steps for each end of the spectrum."""
CONVERTED = 256
"""Columns of a float32 factor that are converted to float64 at once."""
FLOOR = 1e-3
"""Refinement continues to this fraction of the tolerance: it is cheap compared to the factorization."""
ROUNDED_PIVOT = 30
"""Pivots below this many eps are rounding error, also in the smallest matrices; added to the matrix size."""


@lazy("condition")
@dataclass
class DirectResult:
    """Result of a factorization: gamma, the number of solves, a condition estimate and the error.

    `error` is the relative residual or, with too few features, its part in the column space of M. QR and SVD also set
    `rank` and `optimality`, that part for any rank.
    """

    gamma: Tensor
    iterations: int
    condition: float
    error: float
    rank: int | None = None
    optimality: float | None = None


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
            f"method='lu' needs as many features as equations with a feature; got {operator.n_features} for "
            f"{operator.equations}. Use method='auto'."
        )
    substitute, condition, precondition = _factor_lu(operator, dtype)
    gamma, count, error = _refine(operator, target, lambda rest: rest, substitute, tolerance)
    for _ in range(MAX_RESTARTS):
        if error <= tolerance or not math.isfinite(error):
            break
        gamma, extra = _gmres(operator, target, gamma, precondition, tolerance)
        before, error = error, relative_residual(operator, target, gamma)
        count += extra
        if not error <= 0.5 * before:
            break
    return DirectResult(gamma, count, condition, error)


def solve_cholesky(
    operator: Operator,
    target: Float[Tensor, "*batch out inp"],
    *,
    tolerance: float,
    dtype: torch.dtype = torch.float64,
) -> DirectResult | None:
    """The minimum-norm or least-squares gamma through the smaller Gram matrix; None if it is not positive definite.

    The Gram matrix and its factor have the dtype `dtype`, residuals that of the operator.
    """
    least_squares = operator.n_features < operator.equations
    inner = operator.to(dtype)
    gram = inner.gram(is_whole=False) if least_squares else inner.row_gram()
    del inner
    factor = _factor_cholesky(gram)
    del gram
    if factor is None:
        return None

    def half(right: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(factor, right.to(dtype), upper=False)

    def other_half(right: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(factor.mT, right, upper=True).to(operator.dtype)

    def transpose(rest: Tensor) -> Tensor:
        return operator.transpose(rest.mT.unflatten(-1, (operator.out, operator.inp))).mT

    if least_squares:
        gamma, count, error = _refine(operator, target, lambda rest: half(transpose(rest)), other_half, tolerance)
    else:
        gamma, count, error = _refine(
            operator, target, lambda rest: rest, lambda rest: transpose(other_half(half(rest))), tolerance
        )
    result = DirectResult(gamma, count, math.nan, error)
    set_lazy(result, "condition", lambda _: _condition(factor), factor.numel() * factor.element_size())
    return result


def solve_qr(operator: Operator, target: Float[Tensor, "*batch out inp"]) -> DirectResult:
    """The minimum-norm least-squares gamma of a system of any rank, by QR with pivoting (LAPACK gelsy)."""
    matrix, flat = operator.materialise(), target.reshape(-1, operator.equations)
    n_bytes = matrix.numel() * matrix.element_size()
    held = matrix.clone() if n_bytes <= MAX_HELD else None
    cutoff = (max(matrix.shape) + ROUNDED_PIVOT) * torch.finfo(matrix.dtype).eps
    found, rank = _gelsy(matrix.cpu().numpy(), flat.cpu().numpy().T, cutoff)
    gamma = torch.from_numpy(found).mT.to(target).reshape(*target.shape[:-2], operator.n_features)
    rest = target - operator.apply(gamma)
    sizes = torch.linalg.vector_norm(flat, dim=1).clamp_min(torch.finfo(flat.dtype).tiny)
    # For unit features |M^T r| measures the part of the residual in their span.
    seen = torch.linalg.vector_norm(operator.transpose(rest).reshape(len(flat), -1), dim=1) / sizes
    error = float((torch.linalg.vector_norm(rest.reshape(len(flat), -1), dim=1) / sizes).max())
    optimality = float(seen.max())
    if operator.n_features < operator.equations:
        error = optimality
    result = DirectResult(gamma, 1, math.nan, error, rank=rank, optimality=optimality)
    if held is None:
        result.condition = max(1.0, _growth(operator, gamma))
    else:  # a copy: the caller may change the factors before the field is read
        set_lazy(result, "condition", lambda _: _condition_of_rank(held, rank), n_bytes)
    return result


@functools.cache
def _lapack(name: str, dtype: np.dtype[Any]) -> Callable[..., Any]:
    """A function of LAPACK; finding it takes as long as a small factorization."""
    import scipy.linalg

    (function,) = scipy.linalg.get_lapack_funcs((name,), dtype=dtype)
    return function


def _gelsy(matrix: NDArray[Any], columns: NDArray[Any], cutoff: float) -> tuple[NDArray[Any], int]:
    """The minimum-norm least-squares solution of every column, and the rank. The matrix is overwritten.

    As `scipy.linalg.lstsq`, which takes three times as long for a small matrix.
    """
    (n_rows, n_columns), n_targets = matrix.shape, columns.shape[1]
    right = np.zeros((max(n_rows, n_columns), n_targets), dtype=matrix.dtype, order="F")
    right[:n_rows] = columns
    work, _ = _lapack("gelsy_lwork", matrix.dtype)(n_rows, n_columns, n_targets, cutoff)
    order = np.zeros((n_columns, 1), dtype=np.int32)
    _, found, _, rank, _ = _lapack("gelsy", matrix.dtype)(matrix, right, order, cutoff, int(work), True, True)
    return found[:n_columns], int(rank)


def solve_svd(operator: Operator, target: Float[Tensor, "*batch out inp"]) -> DirectResult:
    """The minimum-norm least-squares gamma of a system of any rank, by SVD."""
    matrix = operator.materialise()
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    cutoff = max(matrix.shape) * torch.finfo(s.dtype).eps * s[0]
    is_nonzero = s > cutoff
    u, s, vh = u[:, is_nonzero], s[is_nonzero], vh[is_nonzero]
    flat = target.flatten(-2)
    gamma = ((flat @ u) / s) @ vh
    condition = float(s[0] / s[-1]) if len(s) else math.inf
    rest = (operator.apply(gamma) - target).flatten(-2).reshape(-1, flat.shape[-1]).mT
    sizes = torch.linalg.vector_norm(flat.reshape(-1, flat.shape[-1]), dim=1).clamp_min(torch.finfo(s.dtype).tiny)
    error, optimality = (float((_lengths(part) / sizes).max()) for part in (rest, u.mT @ rest))
    if operator.n_features < operator.equations:
        error = optimality
    return DirectResult(gamma, 1, condition, error, rank=len(s), optimality=optimality)


def relative_residual(operator: Operator, target: Tensor, gamma: Tensor) -> float:
    """Maximum of |M gamma - target| / |target| over the batch."""
    made = operator.apply(gamma)
    if target.ndim == 2:
        one, whole = (float(torch.linalg.vector_norm(x, dim=(-2, -1))) for x in (made - target, target))
        one = one / max(whole, torch.finfo(target.dtype).tiny) if whole > 0 else one
        return math.inf if math.isnan(one) else one
    rest = torch.linalg.vector_norm(made - target, dim=(-2, -1))
    size = torch.linalg.vector_norm(target, dim=(-2, -1))
    worst = torch.where(size > 0, rest / size.clamp_min(torch.finfo(size.dtype).tiny), rest)
    return float(worst.nan_to_num(nan=math.inf).max())


def _factor_cholesky(gram: Float[Tensor, "n n"]) -> Float[Tensor, "n n"] | None:
    """The lower triangular factor of a symmetric matrix; None if it is not positive definite.

    Only the upper triangle of the matrix is read, and overwritten; entries above the diagonal of the factor are
    undefined. Pivots at the level of rounding count as zero, so that the norm is not split at random among dependent
    features. SciPy's LAPACK takes three quarters of the time of torch's at every size.
    """
    least = ROUNDED_PIVOT * torch.finfo(gram.dtype).eps * gram.diagonal()
    factor = gram.mT  # column-major, so in place
    if gram.device.type != "cpu":
        factor, info = torch.linalg.cholesky_ex(factor)
    else:
        lower = factor.numpy()
        found, info = _lapack("potrf", lower.dtype)(lower, lower=1, clean=0, overwrite_a=1)
        factor = torch.from_numpy(found)
    return factor if int(info) == 0 and bool((factor.diagonal().square() > least).all()) else None


def _factor_lu(operator: Operator, dtype: torch.dtype) -> tuple[Substitute, float, Substitute]:
    """LU of M in `dtype`: the substitution in `dtype`, a 1-norm condition estimate, the substitution in float64.

    The matrix is overwritten by its factors. A zero pivot gives a residual that is NaN or infinite. SciPy's LAPACK
    takes 0.6 to 0.8 of the time of torch's.
    """
    matrix = operator.materialise(dtype=dtype)
    if matrix.device.type != "cpu":
        pivots, info = (torch.empty(size, dtype=torch.int32, device=matrix.device) for size in (len(matrix), ()))
        torch.linalg.lu_factor_ex(matrix, out=(matrix, pivots, info))
    else:
        whole = matrix.numpy()
        factors, rows, info = _lapack("getrf", whole.dtype)(whole, overwrite_a=1)
        matrix, pivots = torch.from_numpy(factors), torch.from_numpy(rows) + 1

    def substitute(rest: Tensor) -> Tensor:
        return torch.linalg.lu_solve(matrix, pivots, rest.to(dtype)).to(rest.dtype)

    @functools.cache
    def order() -> Tensor:
        rows = list(range(len(matrix)))
        for row, other in enumerate(pivots.tolist()):
            rows[row], rows[other - 1] = rows[other - 1], rows[row]
        return torch.tensor(rows, device=matrix.device)

    def substitute_in_double(rest: Tensor) -> Tensor:
        return _substitute_in_double(matrix, rest[order()])

    condition = operator.one_norm() * _inverse_one_norm(matrix, pivots) if int(info) == 0 else math.inf
    return substitute, condition, substitute if dtype == torch.float64 else substitute_in_double


def _substitute_in_double(lu: Float[Tensor, "n n"], x: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
    """(L U)^-1 x in float64, in place, from float32 factors that are converted block by block."""
    starts = range(0, len(lu), CONVERTED)
    for start in starts:
        block, stop = lu[start:, start : start + CONVERTED].double(), start + CONVERTED
        n = block.shape[1]
        x[start:stop] = torch.linalg.solve_triangular(block[:n], x[start:stop], upper=False, unitriangular=True)
        x[stop:] -= block[n:] @ x[start:stop]
    for start in reversed(starts):
        stop = start + CONVERTED
        block = lu[:stop, start:stop].double()
        x[start:stop] = torch.linalg.solve_triangular(block[start:], x[start:stop], upper=True)
        x[:start] -= block[:start] @ x[start:stop]
    return x


def _inverse_one_norm(lu: Tensor, pivots: Tensor) -> float:
    """A lower bound of |M^-1|_1, nearly always within a factor of three: Hager's estimate from a few solves."""
    n = len(lu)
    x = torch.full((n, 1), 1.0 / n, dtype=lu.dtype, device=lu.device)
    size = 0.0
    for _ in range(3):
        y = torch.linalg.lu_solve(lu, pivots, x)
        size = max(size, float(y.abs().sum()))
        z = torch.linalg.lu_solve(lu, pivots, torch.where(y < 0, -torch.ones_like(y), 1.0), adjoint=True)
        x = torch.zeros_like(x)
        x[int(z.abs().argmax())] = 1.0
    return size if math.isfinite(size) else math.inf


def _condition(factor: Float[Tensor, "n n"]) -> float:
    """An estimate of kappa(M) from a Cholesky factor of its Gram matrix, by a few Lanczos steps."""
    import scipy.linalg

    lower = factor.cpu().numpy()
    trmv, trsv = scipy.linalg.get_blas_funcs(("trmv", "trsv"), (lower,))

    def multiply(x: Vector) -> Vector:
        return trmv(lower, trmv(lower, x, lower=1, trans=1), lower=1, overwrite_x=1)

    def divide(x: Vector) -> Vector:
        return trsv(lower, trsv(lower, x, lower=1), lower=1, trans=1, overwrite_x=1)

    largest, inverse = (_largest_eigenvalue(step, np.ones_like(lower[:, 0])) for step in (multiply, divide))
    return math.sqrt(max(1.0, largest * inverse))


def _largest_eigenvalue(step: Callable[[Vector], Vector], start: Vector) -> float:
    """A lower bound of the largest eigenvalue of a symmetric operator, from a few Lanczos steps."""
    x, before, off = start / np.linalg.norm(start), 0.0 * start, 0.0
    projected = np.zeros((LANCZOS, LANCZOS))
    for i in range(LANCZOS):
        y = step(x) - off * before
        projected[i, i] = x @ y
        y -= projected[i, i] * x
        off = float(np.linalg.norm(y))
        if i + 1 == LANCZOS or not off > 0.0:
            break
        projected[i, i + 1] = projected[i + 1, i] = off
        before, x = x, y / off
    return float(np.linalg.eigvalsh(projected)[-1]) if np.isfinite(projected).all() else math.inf


def _condition_of_rank(matrix: Tensor, rank: int) -> float:
    """The largest singular value of M over the smallest of this rank."""
    s = torch.linalg.svdvals(matrix)
    return float(s[0] / s[rank - 1]) if rank > 0 else math.inf


def _growth(operator: Operator, gamma: Tensor) -> float:
    """Maximum of |M| |gamma| / |M gamma| over the batch: a lower bound of kappa(M), sharp for generic targets."""
    made = operator.apply(gamma)
    x = made.reshape(-1, operator.out, operator.inp)[0] + 1.0
    for _ in range(3):
        x = operator.row_gram_apply(x / torch.linalg.vector_norm(x))
    largest = torch.linalg.vector_norm(x).sqrt()
    sizes = torch.linalg.vector_norm(made, dim=(-2, -1))
    growth = largest * torch.linalg.vector_norm(gamma, dim=-1) / sizes
    return float(growth[sizes > 0].max()) if bool((sizes > 0).any()) else 1.0


def _lengths(rest: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rest, dim=0)


def _refine(
    operator: Operator, target: Tensor, project: Project, substitute: Substitute, tolerance: float
) -> tuple[Tensor, int, float]:
    """Repeats gamma += substitute(project(target - M gamma)) while this at least halves the projected residual.

    `project` maps a residual to the input of `substitute`. Returns the best gamma, the number of substitutions and the
    relative norm of the projected residual.
    """
    tiny = torch.finfo(target.dtype).tiny
    size = torch.linalg.vector_norm(target, dim=(-2, -1)).clamp_min(tiny)
    gamma = target.new_zeros(*target.shape[:-2], operator.n_features)
    best, error, count = gamma, 1.0, 0
    left = project((target / size[..., None, None]).reshape(-1, operator.equations).mT)
    is_least_squares = operator.n_features < operator.equations
    floor = tolerance if is_least_squares else FLOOR * tolerance  # the error enters squared in least squares
    while error > floor and count < MAX_REFINEMENTS:
        gamma = gamma + substitute(left).mT.reshape(gamma.shape) * size[..., None]
        left = project(((target - operator.apply(gamma)) / size[..., None, None]).reshape(-1, operator.equations).mT)
        count += 1
        now = float(_lengths(left).max())
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
    """GMRES on M for each right-hand side, preconditioned with `substitute`."""
    import scipy.sparse.linalg

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
