"""The chosen method and, if it falls short, the next more robust one.

    lu            float32, then float64   -> qr
    cholesky      float32, then float64   -> qr
    krylov        float32 with float64 residuals, then as cholesky (lu for square systems)

Each step is taken only if it fits into memory. Where one does not, conjugate gradients come last, those for least
squares too: they converge even if no gamma is exact. An attempt is judged by what it left: the residual or, with too
few features, the part of it that features could still remove.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from onlynorm.memory import memory_limit, need_memory
from onlynorm.solvers.choose import (
    MAX_ITERATIONS,
    RATES,
    Choice,
    cholesky_memory,
    choose,
    factor_dtype,
    keeps_copy,
    krylov_memory,
)
from onlynorm.solvers.methods.direct import DirectResult, solve_cholesky, solve_lu, solve_qr, solve_svd
from onlynorm.solvers.methods.krylov import KrylovResult, anisotropy, solve_krylov
from onlynorm.solvers.operator import KhatriRao, Operator, Progress
from onlynorm.solvers.spectrum import Prediction, condition_of_rows, estimate_condition, predict_condition

TINY, EPS = torch.finfo(torch.float64).tiny, torch.finfo(torch.float64).eps
ANISOTROPIC = 2.0
"""Whitening pays for itself where it shortens the iteration by about this factor."""
SMALL_BYTES = 64 * 2**20
"""A method that takes less than this is run without a look at what is free."""
FULL_RANK = 0.1
"""kappa eps (kappa^2 eps^2 of a Cholesky factor) up to which a factor that exists shows that the rank is full."""
LARGEST_QR = 8000
"""Features or equations, the fewer of both, up to which a factorization with pivots takes minutes and not hours."""


@dataclass(frozen=True)
class Attempt:
    """What one method found, the relative size of what it left, and what was tried before.

    `missing_memory` is the need of the first more robust method that did not fit; `rank` is known where a factorization
    found it, `optimality` where qr or svd was run. `equations` are those of the system that was solved.
    """

    gamma: Tensor
    method: str
    iterations: int
    condition: float
    reason: str
    left_over: float
    is_singular: bool = False
    tried: tuple[str, ...] = ()
    missing_memory: int = 0
    rank: int | None = None
    optimality: float | None = None
    equations: int = 0


@dataclass(frozen=True)
class _Rung:
    """One method with its precision, and what it needs."""

    method: str
    dtype: torch.dtype
    memory: float
    is_least_squares: bool = False
    is_last_resort: bool = False

    def __str__(self) -> str:
        if self.is_least_squares:
            return "krylov for least squares"
        return f"{self.method} in {str(self.dtype).removeprefix('torch.')}"


def climb(
    operator: Operator,
    target: Tensor,
    *,
    tolerance: float,
    limit: int,
    method: str = "auto",
    prediction: Prediction | None = None,
    precondition: bool | None = None,
    progress: Progress | None = None,
) -> Attempt:
    """The first attempt that leaves no more than the tolerance, or the best there was within `limit` bytes.

    The operator has columns of unit length. A `method` that is asked for by name is run alone. `prediction` is what is
    known of the features; where that is nothing, a few products estimate it before an iteration is begun.
    """
    block = operator.block if isinstance(operator, KhatriRao) and not operator.is_stored else None
    sizes = operator.out, operator.inp, operator.n_features
    settings: dict[str, Any] = {"tolerance": tolerance, "memory": limit, "method": method, "block": block}
    if prediction is None:
        prediction = predict_condition(*sizes)
    condition = max(1.0, prediction.condition)
    if method == "auto" and isinstance(operator, KhatriRao):
        condition = max(condition, condition_of_rows(operator))
    choice = choose(*sizes, **settings, condition=condition)
    if not prediction.is_known and choice.method == "krylov" and method == "auto":
        estimate = estimate_condition(operator).condition
        choice = choose(*sizes, **settings, condition=min(1e100, max(condition, estimate)))
    need_memory(
        f"{choice.method} for {operator.equations} equations with {operator.n_features} features",
        choice.option.memory,
        limit,
        "Raise memory.",
    )
    if choice.option.memory > SMALL_BYTES:
        # Another method would round differently: what is free may stop a solve, never change its result.
        need_memory(
            f"{choice.method} for {operator.equations} equations with {operator.n_features} features",
            choice.option.memory,
            memory_limit(),
            "Close other programs, or pass solve(..., memory=...) to have a method chosen that takes less.",
        )
    best: Attempt | None = None
    tried: list[str] = []
    missing, is_incomplete = 0.0, False
    for rung in _rungs(choice, operator, method):
        if best is not None and best.left_over <= tolerance and not best.is_singular:
            break
        if tried and rung.memory > limit:
            is_incomplete = True
            missing = missing or (rung.memory if math.isfinite(rung.memory) else 0.0)
            continue
        if rung.is_last_resort and not is_incomplete:
            continue
        found = _run(operator, target, rung, choice, tolerance, precondition, limit, progress)
        tried.append(f"{rung} " + ("found no factors" if found is None else f"left {found.left_over:.1e}"))
        if found is None:
            continue
        if len(tried) > 1:
            found = replace(found, reason=f"{tried[-2]}, so {rung} took over")
        else:
            found = replace(found, reason=choice.reason)
        if best is None or _is_better(found, best, target, tolerance):
            best = found
    if best is None:
        gamma = target.new_zeros(*target.shape[:-2], operator.n_features)
        best = Attempt(gamma, choice.method, 0, math.inf, f"{choice.method} cannot factor this system", 1.0)
    return replace(best, tried=tuple(tried), missing_memory=math.ceil(missing), equations=operator.equations)


def _rungs(choice: Choice, operator: Operator, asked: str) -> Iterator[_Rung]:
    """The methods in the order in which they are tried, the chosen one first."""
    sizes = operator.out, operator.inp, operator.n_features
    is_auto, smaller = asked == "auto", min(operator.equations, operator.n_features)
    single, double = torch.float32, torch.float64
    memory = {option.method: option.memory for option in choice.options}
    if choice.method == "krylov":
        yield _Rung("krylov", single, memory["krylov"])
    falls_back = is_auto and choice.method == "krylov"
    if choice.method == "lu" or (falls_back and operator.n_features == operator.equations):
        yield _Rung("lu", single, memory["lu"])
        yield _Rung("lu", double, 2 * memory["lu"])
    elif choice.method == "cholesky" or falls_back:
        if factor_dtype(choice.condition, smaller) != double:
            yield _Rung("cholesky", single, cholesky_memory(*sizes, single))
        yield _Rung("cholesky", double, cholesky_memory(*sizes, double))
    if is_auto or choice.method == "qr":
        yield _Rung("qr", double, memory["qr"] if not is_auto or smaller <= LARGEST_QR else math.inf)
    if choice.method == "svd":
        yield _Rung("svd", double, memory["svd"])
    if is_auto:
        fits = krylov_memory(*sizes)
        if choice.method != "krylov" and operator.n_features >= operator.equations:
            yield _Rung("krylov", single, fits, is_last_resort=True)
        yield _Rung("krylov", single, fits, is_least_squares=True, is_last_resort=True)


def _iterations(choice: Choice, limit: int) -> int:
    """Iterations of Krylov: all it may take or, where a factorization fits, as many as that would cost."""
    options = {option.method: option for option in choice.options}
    krylov, factors = options["krylov"], [options["lu"], options["cholesky"]]
    able = [option.seconds for option in factors if not option.obstacle and option.memory <= limit]
    if not able or choice.reason == "asked for":
        return MAX_ITERATIONS
    affordable = krylov.iterations * min(able) / max(krylov.seconds, TINY)
    return int(min(MAX_ITERATIONS, max(2 * krylov.iterations + 20, affordable)))


def _is_better(other: Attempt, best: Attempt, target: Tensor, tolerance: float) -> bool:
    if best.is_singular and other.left_over <= tolerance:
        return True  # LU of a singular matrix need not give the solution of least norm
    return other.left_over + _rounding(other, target) < best.left_over + _rounding(best, target)


def _rounding(attempt: Attempt, target: Tensor) -> float:
    """What rounding alone may change in M gamma beside the target, the worst of the batch.

    A huge gamma, as LU of a singular matrix gives, can seem to leave little: its residual differs from one way of
    computing it to the next by this much.
    """
    sizes = torch.linalg.vector_norm(target, dim=(-2, -1)).clamp_min(TINY)
    return EPS * float((torch.linalg.vector_norm(attempt.gamma, dim=-1) / sizes).nan_to_num(nan=math.inf).max())


def _run(
    operator: Operator,
    target: Tensor,
    rung: _Rung,
    choice: Choice,
    tolerance: float,
    precondition: bool | None,
    limit: int,
    progress: Progress | None,
) -> Attempt | None:
    """One method on one system; None where it cannot work."""
    found: DirectResult | KrylovResult | None
    if rung.method == "krylov":
        sizes = operator.out, operator.inp, operator.n_features
        is_stored = isinstance(operator, KhatriRao) and operator.is_stored
        whiten = _is_anisotropic(operator, choice) if precondition is None else precondition
        found = solve_krylov(
            operator,
            target,
            tolerance=tolerance,
            max_iterations=_iterations(choice, limit),
            whiten=whiten,
            store=krylov_memory(*sizes) <= limit and (whiten or not is_stored or keeps_copy(*sizes)),
            least_squares=rung.is_least_squares,
            progress=progress,
        )
        left = found.history[-1]
        kappa = found.condition if math.isfinite(found.condition) else math.inf
        is_wide = operator.n_features >= operator.equations and not rung.is_least_squares
        # The normal equations see a residual through M: what they leave can be kappa times as large in the target.
        return Attempt(
            found.gamma,
            "krylov",
            found.iterations,
            found.condition,
            "",
            left,
            optimality=left if is_wide else left * kappa,
        )
    if rung.method == "cholesky":
        found = solve_cholesky(operator, target, tolerance=tolerance, dtype=rung.dtype)
    elif rung.method == "lu":
        found = solve_lu(operator, target, tolerance=tolerance, dtype=rung.dtype)
    elif rung.method == "qr":
        found = solve_qr(operator, target)
    else:
        found = solve_svd(operator, target)
    if found is None:
        return None
    singular = rung.method == "lu" and not found.condition * torch.finfo(rung.dtype).eps < 1.0
    left = found.error if math.isfinite(found.error) else math.inf
    is_full = found.condition * torch.finfo(rung.dtype).eps ** (0.5 if rung.method == "cholesky" else 1.0) < FULL_RANK
    rank = found.rank
    if rank is None and is_full:
        rank = min(operator.equations, operator.n_features)
    return Attempt(
        found.gamma, rung.method, found.iterations, found.condition, "", left, singular, rank=rank,
        optimality=found.optimality,
    )  # fmt: skip


def _is_anisotropic(operator: Operator, choice: Choice) -> bool:
    """Whether whitening pays. Looking costs too: where it takes a tenth of the iteration, nobody looks."""
    if not isinstance(operator, KhatriRao) or operator.n_features < operator.equations:
        return False
    krylov = next(option for option in choice.options if option.method == "krylov")
    look = sum(32 * max(operator.out, operator.inp) * n**2 + 50 * n**3 for n in (operator.out, operator.inp))
    return look <= 0.1 * krylov.seconds * RATES[torch.float32] and anisotropy(operator) > ANISOTROPIC
