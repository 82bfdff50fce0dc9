"""The solvers that `bench solve` compares: onlynorm, and the fastest methods of NumPy, SciPy and torch.

Every solver takes left (out, feat), right (feat, inp) and target (out, inp) in float64. M is the matrix of the system,
with one column per feature. Where two libraries have the same method, the faster one is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse.linalg
import torch
from torch import Tensor

from onlynorm.evidence.bench.papers_method import solve_as_papers
from onlynorm.evidence.timing import race
from onlynorm.features import draw
from onlynorm.solvers import KhatriRao, solve

OURS = "onlynorm"
ANY = "onlynorm, any solution"
LU = "LU, first N"
CHOLESKY = "Cholesky"
QR = "QR (gels)"
GELSY = "gelsy"
GELSD = "gelsd"
LSMR = "LSMR"
PAPERS = "float32 + LBFGS"
LSMR_STEPS = 1000
EXACT, FIT = 1e-10, 1e-8
"""Tolerance of LSMR: for the residual of a solvable system, else for the optimality |M^T r| / (|M| |r|)."""


class Found(NamedTuple):
    """The gamma of a solver (or its first entries; the others are zero), its iterations, and a note."""

    gamma: Tensor
    iterations: int = 1
    note: str = ""


Solver = Callable[[Tensor, Tensor, Tensor], Found]


def ours(left: Tensor, right: Tensor, target: Tensor) -> Found:
    """`onlynorm.solve` with its defaults; the note is the selected method."""
    solution = solve(left, right, target)
    return Found(solution.gamma, solution.iterations, solution.method)


def any_solution(left: Tensor, right: Tensor, target: Tensor) -> Found:
    """`onlynorm.solve` with `least_norm=False`, comparable to LU of the first N features."""
    solution = solve(left, right, target, least_norm=False)
    return Found(solution.gamma, solution.iterations, f"{solution.method}, any")


def lu(left: Tensor, right: Tensor, target: Tensor) -> Found:
    """LU of the first N features: the cheapest exact dense method. LAPACK factorizes the matrix in place."""
    n = target.numel()
    matrix = _columns(left[:, :n], right[:n]).mT.numpy()
    _, _, gamma, info = scipy.linalg.lapack.dgesv(matrix, target.flatten().numpy(), overwrite_a=1)
    return Found(_checked(gamma, info))


def cholesky(left: Tensor, right: Tensor, target: Tensor) -> Found:
    """Cholesky of the normal equations on the smaller side, with one step of refinement.

    NumPy computes A A^T by a symmetric product, which takes half the time of torch's general one.
    """
    w2, w1, wanted = left.numpy(), right.numpy(), target.numpy()
    is_wide = w1.shape[0] >= wanted.size
    if is_wide:
        matrix = (left[:, None, :] * right.mT[None, :, :]).flatten(0, 1).numpy()
        gram = matrix @ matrix.T
        del matrix
    elif 1 in wanted.shape:
        columns = w2.T * w1
        gram = columns @ columns.T
    else:
        gram = w2.T @ w2
        gram *= w1 @ w1.T
    factor, info = scipy.linalg.lapack.dpotrf(gram.T, lower=1, clean=0, overwrite_a=1)
    _checked(factor, info)

    def solved(rest: Any) -> Any:
        side = rest.reshape(-1) if is_wide else _transposed(w2, w1, rest)
        found = scipy.linalg.lapack.dpotrs(factor, side, lower=1)[0]
        return _transposed(w2, w1, found.reshape(wanted.shape)) if is_wide else found

    gamma = solved(wanted)
    gamma += solved(wanted - (w2 * gamma) @ w1)
    return Found(torch.from_numpy(gamma), 2)


def gelsy(left: Tensor, right: Tensor, target: Tensor) -> Found:
    """SciPy's pivoted QR. torch passes uninitialized pivots to LAPACK and returns a wrong rank for zero features."""
    matrix = _columns(left, right).mT.numpy()
    return Found(torch.from_numpy(_pivoted(matrix, target.flatten().numpy())))


def _least_squares(driver: str, left: Tensor, right: Tensor, target: Tensor) -> Found:
    """torch.linalg.lstsq by QR (gels) or SVD (gelsd)."""
    matrix = _columns(left, right).mT
    return Found(torch.linalg.lstsq(matrix, target.flatten()[:, None], driver=driver).solution[:, 0])


def lsmr(left: Tensor, right: Tensor, target: Tensor) -> Found:
    """SciPy's LSMR on features of unit length, both products as matrix-matrix products."""
    w2, w1, wanted = left.contiguous().numpy(), right.contiguous().numpy(), target.numpy()
    sizes = np.sqrt((w2**2).sum(0) * (w1**2).sum(1))
    sizes[sizes == 0.0] = 1.0
    w2 = w2 / sizes
    is_wide = w1.shape[0] >= wanted.size
    operator = scipy.sparse.linalg.LinearOperator(
        (wanted.size, w1.shape[0]),
        matvec=lambda gamma: ((w2 * gamma.reshape(-1)) @ w1).reshape(-1),
        rmatvec=lambda rest: _transposed(w2, w1, rest.reshape(wanted.shape)),
        dtype=np.float64,
    )
    found = scipy.sparse.linalg.lsmr(
        operator, wanted.reshape(-1), atol=0.0 if is_wide else FIT, btol=EXACT if is_wide else 0.0, conlim=0.0,
        maxiter=LSMR_STEPS,
    )  # fmt: skip
    steps = int(found[2])
    return Found(torch.from_numpy(found[0] / sizes), steps, "stopped" if steps == LSMR_STEPS else "")


def papers(left: Tensor, right: Tensor, target: Tensor) -> Found:
    """The method of the papers: a dense float32 solve if the system is square, then LBFGS."""
    return Found(*solve_as_papers(KhatriRao(left, right), target))


SOLVERS: dict[str, Solver] = {
    OURS: ours,
    ANY: any_solution,
    LU: lu,
    CHOLESKY: cholesky,
    QR: functools.partial(_least_squares, "gels"),
    GELSY: gelsy,
    GELSD: functools.partial(_least_squares, "gelsd"),
    LSMR: lsmr,
    PAPERS: papers,
}


def without_failure(solver: Solver, left: Tensor, right: Tensor, target: Tensor) -> Found:
    """The solution; NaN and a note if a factorization fails."""
    try:
        return solver(left, right, target)
    except (np.linalg.LinAlgError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
        return Found(torch.full((1,), torch.nan), 0, f"failed: {error}")


def least_squares_fit(left: Tensor, right: Tensor, target: Tensor) -> Tensor:
    """The orthogonal projection of the target onto the range of M, by a rank-revealing QR of normalized features."""
    matrix = _columns(left, right).mT
    matrix = matrix / torch.linalg.vector_norm(matrix, dim=0).clamp_min(1e-300)
    found = _pivoted(matrix.clone().numpy(), target.flatten().numpy())
    return (matrix @ torch.from_numpy(found)).reshape(target.shape)


def predicted_seconds(method: str, shape: tuple[int, int], n_features: int, rate: float) -> float:
    """The predicted time of a competitor; `rate` is that of matrix products. LSMR counts with 200 iterations."""
    n, c = shape[0] * shape[1], n_features
    few, many = min(n, c), max(n, c)
    work = {
        LU: 0.9 * n**3,
        CHOLESKY: (n**2 * c if c >= n else c**2 * sum(shape)) + 0.4 * few**3,
        QR: 2.7 * few**2 * (many - few / 3),
        GELSY: 4.0 * few**2 * (many - few / 3),
        GELSD: 9.0 * few**2 * many,
        LSMR: 800.0 * n * c,
    }
    return work.get(method, 0.0) / rate


@functools.cache
def product_rate() -> float:
    """Float64 operations per second of a matrix product on one thread, on this machine."""
    matrix = torch.ones(800, 800, dtype=torch.float64)
    product = race({"product": lambda: matrix @ matrix}, rounds=5)["product"]
    return 2 * 800**3 / product.seconds


def iteration_rate(shape: tuple[int, ...]) -> float:
    """The time of two matrix products divided by that of M M^T R, which contains them, in float32."""
    features = draw("he_normal", shape, excess=1.25, seed=0, layer="rate", dtype=torch.float32)
    left, right = features.left(), features.right()
    operator = KhatriRao(left, right)
    matrix, work, scaled = torch.ones(operator.out, operator.inp), operator.scratch(), left.mT.contiguous()
    product, total = torch.empty(len(right), operator.out), torch.empty(operator.inp, operator.out)

    def bare() -> None:
        torch.mm(right, matrix.mT, out=product)
        torch.mm(right.mT, scaled, out=total)

    def sweep() -> None:
        operator.row_gram_apply(matrix, work=work)

    times = race({"sweep": sweep, "bare": bare}, rounds=40, patience=3.0)
    return times["bare"].seconds / times["sweep"].seconds


def _columns(left: Tensor, right: Tensor) -> Tensor:
    """The columns of M, one per row."""
    return (left.mT.contiguous()[:, :, None] * right[:, None, :]).flatten(1)


def _pivoted(matrix: Any, target: Any) -> Any:
    return scipy.linalg.lstsq(matrix, target, cond=1e-13, lapack_driver="gelsy", overwrite_a=True, check_finite=False)[
        0
    ]


def _transposed(w2: Any, w1: Any, rest: Any) -> Any:
    return ((rest @ w1.T) * w2).sum(0)


def _checked(found: Any, info: int) -> Tensor:
    if info > 0:
        raise np.linalg.LinAlgError(f"pivot {info} is zero or negative")
    return torch.from_numpy(found)
