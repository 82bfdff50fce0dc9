"""Runs the selected method and, if it misses the tolerance, more robust ones.

    lu            float32, then float64   -> qr
    cholesky      float32, then float64   -> qr
    krylov        float32 with float64 residuals, then cholesky (lu for square systems)

A method is skipped if it does not fit into memory. Conjugate gradients are then tried last, also for least squares,
where they converge even if no exact gamma exists. Attempts are compared by their residual or, with too few features, by
the part of it in the span of the features.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from onlynorm.memory import memory_limit, need_memory
from onlynorm.solvers.choose import (
    MAX_ITERATIONS,
    RATES,
    Choice,
    cholesky_memory,
    choose_valid,
    factor_dtype,
    krylov_memory,
    stores_copy,
)
from onlynorm.solvers.lazy import copy_lazy, lazy
from onlynorm.solvers.methods.direct import DirectResult, solve_cholesky, solve_lu, solve_qr, solve_svd
from onlynorm.solvers.methods.krylov import KrylovResult, anisotropy, solve_krylov
from onlynorm.solvers.operator import KhatriRao, OnStep, Operator
from onlynorm.solvers.spectrum import Prediction, condition_of_rows, estimate_condition, predict_condition

TINY, EPS = torch.finfo(torch.float64).tiny, torch.finfo(torch.float64).eps
ANISOTROPIC = 2.0
"""Whitening is used if it reduces the iterations by about this factor."""
SMALL_BYTES = 64 * 2**20
"""Free memory is not checked for methods that need less than this."""
FULL_RANK = 0.1
"""kappa eps (kappa^2 eps^2 for Cholesky) up to which a successful factorization implies full rank."""
LARGEST_QR = 8000
"""min(features, equations) up to which QR with pivoting takes minutes rather than hours."""


@lazy("condition")
@dataclass
class SolverRun:
    """The result of one method, its relative residual `error`, and the methods tried so far.

    `missing_memory` is the memory needed by the first more robust method that did not fit. `rank` is set if a
    factorization computed it, `optimality` by qr and svd. `equations` is the number of equations of the solved system.
    A condition number below `full_below` implies the rank `full_rank`.
    """

    gamma: Tensor
    method: str
    iterations: int
    condition: float
    reason: str
    error: float
    is_singular: bool = False
    tried: tuple[str, ...] = ()
    missing_memory: int = 0
    rank: int | None = None
    optimality: float | None = None
    equations: int = 0
    full_rank: int = 0
    full_below: float = 0.0

    def known_rank(self) -> int | None:
        """The rank if a factorization computed it or the condition number implies full rank, else None."""
        if self.rank is None and self.condition < self.full_below:
            return self.full_rank
        return self.rank


@dataclass(frozen=True)
class _Step:
    """A method, its precision and its memory."""

    method: str
    dtype: torch.dtype
    memory: float
    is_least_squares: bool = False
    is_last_resort: bool = False

    def __str__(self) -> str:
        if self.is_least_squares:
            return "krylov for least squares"
        return f"{self.method} in {str(self.dtype).removeprefix('torch.')}"


def solve_with_fallback(
    operator: Operator,
    target: Tensor,
    *,
    tolerance: float,
    limit: int,
    method: str = "auto",
    prediction: Prediction | None = None,
    precondition: bool | None = None,
    on_step: OnStep | None = None,
) -> SolverRun:
    """The first attempt that reaches the tolerance, or the best one within `limit` bytes.

    The operator has columns of unit length. A `method` other than "auto" is run without fallback. `prediction` is the
    predicted condition number; if it is unknown, a few products estimate it before an iteration starts.
    """
    block = operator.block if isinstance(operator, KhatriRao) and not operator.is_stored else None
    sizes = operator.out, operator.inp, operator.n_features
    if prediction is None:
        prediction = _predict_dense(*sizes)
    condition = max(1.0, prediction.condition)
    if method == "auto" and isinstance(operator, KhatriRao):
        condition = max(condition, condition_of_rows(operator))
    choice = choose_valid(*sizes, tolerance, limit, method, condition, block)
    if not prediction.is_known and choice.method == "krylov" and method == "auto":
        estimate = estimate_condition(operator).condition
        choice = choose_valid(*sizes, tolerance, limit, method, min(1e100, max(condition, estimate)), block)
    what, n_bytes = f"{choice.method} for {operator.equations} equations with {sizes[2]} features", choice.option.memory
    need_memory(what, n_bytes, limit, "Raise memory.")
    if n_bytes > SMALL_BYTES:
        # Methods round differently: too little free memory raises an error instead of changing the result.
        need_memory(
            what,
            n_bytes,
            memory_limit(),
            "Close other programs, or pass solve(..., memory=...) to select a method that needs less.",
        )
    best: SolverRun | None = None
    tried: list[str] = []
    missing, is_incomplete = 0.0, False
    for step in _steps(choice, operator, method):
        if best is not None and best.error <= tolerance and not best.is_singular:
            break
        if tried and step.memory > limit:
            is_incomplete = True
            missing = missing or (step.memory if math.isfinite(step.memory) else 0.0)
            continue
        if step.is_last_resort and not is_incomplete:
            continue
        found = _run(operator, target, step, choice, tolerance, precondition, limit, on_step)
        tried.append(f"{step} " + ("failed to factorize" if found is None else f"reached {found.error:.1e}"))
        if found is None:
            continue
        found.reason = choice.reason if len(tried) == 1 else f"{tried[-2]}, then {step} was used"
        if best is None or _is_better(found, best, target, tolerance):
            best = found
    if best is None:
        gamma = target.new_zeros(*target.shape[:-2], operator.n_features)
        best = SolverRun(gamma, choice.method, 0, math.inf, f"{choice.method} cannot factorize this system", 1.0)
    best.tried, best.missing_memory, best.equations = tuple(tried), math.ceil(missing), operator.equations
    return best


@functools.lru_cache(maxsize=1024)
def _predict_dense(n_outputs: int, n_inputs: int, n_features: int) -> Prediction:
    return predict_condition(n_outputs, n_inputs, n_features)


def _steps(choice: Choice, operator: Operator, asked: str) -> Iterator[_Step]:
    """The methods in the order in which they are tried, starting with the selected one."""
    sizes = operator.out, operator.inp, operator.n_features
    is_auto, smaller = asked == "auto", min(operator.equations, operator.n_features)
    single, double = torch.float32, torch.float64
    memory = {option.method: option.memory for option in choice.options}
    if choice.method == "krylov":
        yield _Step("krylov", single, memory["krylov"])
    falls_back = is_auto and choice.method == "krylov"
    if choice.method == "lu" or (falls_back and operator.n_features == operator.equations):
        yield _Step("lu", single, memory["lu"])
        yield _Step("lu", double, 2 * memory["lu"])
    elif choice.method == "cholesky" or falls_back:
        if factor_dtype(choice.condition, smaller) != double:
            yield _Step("cholesky", single, cholesky_memory(*sizes, single))
        yield _Step("cholesky", double, cholesky_memory(*sizes, double))
    if is_auto or choice.method == "qr":
        yield _Step("qr", double, memory["qr"] if not is_auto or smaller <= LARGEST_QR else math.inf)
    if choice.method == "svd":
        yield _Step("svd", double, memory["svd"])
    if is_auto:
        fits = krylov_memory(*sizes)
        if choice.method != "krylov" and operator.n_features >= operator.equations:
            yield _Step("krylov", single, fits, is_last_resort=True)
        yield _Step("krylov", single, fits, is_least_squares=True, is_last_resort=True)


def _iterations(choice: Choice, limit: int) -> int:
    """Maximum number of Krylov iterations, limited by the time of a factorization if one fits into memory."""
    options = {option.method: option for option in choice.options}
    krylov, factors = options["krylov"], [options["lu"], options["cholesky"]]
    able = [option.seconds for option in factors if not option.obstacle and option.memory <= limit]
    if not able or choice.reason == "requested":
        return MAX_ITERATIONS
    affordable = krylov.iterations * min(able) / max(krylov.seconds, TINY)
    return int(min(MAX_ITERATIONS, max(2 * krylov.iterations + 20, affordable)))


def _is_better(other: SolverRun, best: SolverRun, target: Tensor, tolerance: float) -> bool:
    if best.is_singular and other.error <= tolerance:
        return True  # LU of a singular matrix may not give the minimum-norm solution
    return other.error + _rounding(other, target) < best.error + _rounding(best, target)


def _rounding(attempt: SolverRun, target: Tensor) -> float:
    """Rounding error of M gamma relative to the target, the maximum over the batch.

    A huge gamma, such as that of LU of a singular matrix, may have a small residual by chance: it is only accurate to
    this size.
    """
    sizes = torch.linalg.vector_norm(target, dim=(-2, -1)).clamp_min(TINY)
    return EPS * float((torch.linalg.vector_norm(attempt.gamma, dim=-1) / sizes).nan_to_num(nan=math.inf).max())


def _run(
    operator: Operator,
    target: Tensor,
    step: _Step,
    choice: Choice,
    tolerance: float,
    precondition: bool | None,
    limit: int,
    on_step: OnStep | None,
) -> SolverRun | None:
    """Runs one method; None if its factorization fails."""
    found: DirectResult | KrylovResult | None
    if step.method == "krylov":
        sizes = operator.out, operator.inp, operator.n_features
        is_stored = isinstance(operator, KhatriRao) and operator.is_stored
        whiten = _is_anisotropic(operator, choice) if precondition is None else precondition
        found = solve_krylov(
            operator,
            target,
            tolerance=tolerance,
            max_iterations=_iterations(choice, limit),
            whiten=whiten,
            store=krylov_memory(*sizes) <= limit and (whiten or not is_stored or stores_copy(*sizes)),
            least_squares=step.is_least_squares,
            on_step=on_step,
        )
        left = found.history[-1]
        kappa = found.condition if math.isfinite(found.condition) else math.inf
        is_wide = operator.n_features >= operator.equations and not step.is_least_squares
        # The residual of the normal equations is multiplied by M^T: it can be kappa times larger in the target.
        return SolverRun(
            found.gamma,
            "krylov",
            found.iterations,
            found.condition,
            "",
            left,
            optimality=left if is_wide else left * kappa,
        )
    if step.method == "cholesky":
        found = solve_cholesky(operator, target, tolerance=tolerance, dtype=step.dtype)
    elif step.method == "lu":
        found = solve_lu(operator, target, tolerance=tolerance, dtype=step.dtype)
    elif step.method == "qr":
        found = solve_qr(operator, target)
    else:
        found = solve_svd(operator, target)
    if found is None:
        return None
    singular = step.method == "lu" and not found.condition * torch.finfo(step.dtype).eps < 1.0
    left = found.error if math.isfinite(found.error) else math.inf
    smaller = min(operator.equations, operator.n_features)
    full = FULL_RANK / torch.finfo(step.dtype).eps ** (0.5 if step.method == "cholesky" else 1.0)
    attempt = SolverRun(
        found.gamma, step.method, found.iterations, math.nan, "", left, singular, rank=found.rank,
        optimality=found.optimality, full_rank=smaller, full_below=full,
    )  # fmt: skip
    copy_lazy("condition", found, attempt)
    return attempt


def _is_anisotropic(operator: Operator, choice: Choice) -> bool:
    """Whether whitening reduces the time; False if the test itself would take a tenth of the iteration."""
    if not isinstance(operator, KhatriRao) or operator.n_features < operator.equations:
        return False
    krylov = next(option for option in choice.options if option.method == "krylov")
    cost = sum(32 * max(operator.out, operator.inp) * n**2 + 50 * n**3 for n in (operator.out, operator.inp))
    return cost <= 0.1 * krylov.seconds * RATES[torch.float32] and anisotropy(operator) > ANISOTROPIC
