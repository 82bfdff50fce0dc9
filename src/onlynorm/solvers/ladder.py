"""The chosen method and, if it falls short, the next more robust one.

    chosen -> LU in float64 (square systems) -> Krylov -> SVD (small systems) or least squares by Krylov

An attempt is judged by what it left over: the residual or, with too few features, the part of it that features can
still see. A rung is climbed only while that is above the tolerance, or where LU met a singular matrix and its answer
need not be the one of least norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from onlynorm.solvers.choose import MAX_ITERATIONS, SMALL, choose, krylov_memory
from onlynorm.solvers.direct import DirectResult, solve_cholesky, solve_lu, solve_svd
from onlynorm.solvers.khatri_rao import KhatriRao, Operator
from onlynorm.solvers.krylov import KrylovResult, Progress, anisotropy, solve_krylov

TINY = torch.finfo(torch.float64).tiny
ANISOTROPIC = 2.0
"""Whitening pays for itself where it shortens the iteration by about this factor."""


@dataclass(frozen=True)
class Attempt:
    """What one method found, and the relative size of what it left over."""

    gamma: Tensor
    method: str
    iterations: int
    condition: float
    reason: str
    left_over: float

    @property
    def is_singular(self) -> bool:
        """Whether LU met a matrix that is singular to its precision."""
        limit = {"lu": torch.float32, "lu64": torch.float64}.get(self.method)
        return limit is not None and not self.condition * torch.finfo(limit).eps < 1.0


def climb(
    operator: Operator,
    target: Tensor,
    *,
    tolerance: float,
    limit: int,
    method: str = "auto",
    precondition: bool | None = None,
    progress: Progress | None = None,
) -> Attempt:
    """The first attempt that leaves no more than the tolerance, or the best there was within `limit` bytes.

    A `method` that is asked for by name is run alone.
    """
    block = operator.block if isinstance(operator, KhatriRao) and not operator.is_stored else None
    choice = choose(
        operator.out, operator.inp, operator.n_features, tolerance=tolerance, memory=limit, method=method, block=block
    )

    def attempt(name: str, reason: str) -> Attempt | None:
        found = _run(operator, target, name, tolerance, precondition, limit, progress)
        if found is None:
            return None
        if isinstance(found, KrylovResult) and name == "krylov":
            left = found.history[-1]  # this very number, measured in float64
        else:
            left = _left_over(operator, target, found.gamma)
        return Attempt(found.gamma, name, found.iterations, found.condition, reason, left)

    best = attempt(choice.method, choice.reason)
    small = operator.equations <= SMALL and operator.n_features <= 4 * SMALL
    svd_fits = small and 32 * operator.equations * operator.n_features <= limit
    double_lu = operator.n_features == operator.equations and 9 * operator.equations**2 <= limit
    rungs = [("lu64", double_lu), ("krylov", True), ("svd", svd_fits), ("least squares", not svd_fits)]
    for name, can in rungs if method == "auto" else []:
        doubtful = best is not None and small and best.is_singular
        if best is not None and best.left_over <= tolerance and not doubtful:
            break
        if not can or (best is not None and best.method == name):
            continue
        why = "was not positive definite"
        if best is not None:
            why = "found a singular matrix" if doubtful else f"left {best.left_over:.1e}"
        other = attempt(name, f"{choice.method} {why}, so {name} took over")
        if other is not None and _is_better(other, best, tolerance, doubtful):
            best = other
    if best is None:
        gamma = target.new_zeros(*target.shape[:-2], operator.n_features)
        return Attempt(gamma, choice.method, 0, math.inf, f"{choice.method} cannot factor this system", 1.0)
    return best


def _is_better(other: Attempt, best: Attempt | None, tolerance: float, doubtful: bool) -> bool:
    if best is None or (doubtful and other.left_over <= tolerance):
        return True
    gain = 0.5 if other.method in ("lu64", "krylov") else 1.0
    return other.left_over < gain * best.left_over


def _run(
    operator: Operator,
    target: Tensor,
    method: str,
    tolerance: float,
    precondition: bool | None,
    limit: int,
    progress: Progress | None,
) -> DirectResult | KrylovResult | None:
    """One method on one system; None where it cannot work."""
    if method == "cholesky":
        return solve_cholesky(operator, target, tolerance=tolerance)
    if method == "svd":
        return solve_svd(operator, target)
    if method in ("lu", "lu64"):
        dtype = torch.float64 if method == "lu64" else torch.float32
        return solve_lu(operator, target, tolerance=tolerance, dtype=dtype)
    return solve_krylov(
        operator,
        target,
        tolerance=tolerance,
        max_iterations=MAX_ITERATIONS,
        whiten=_is_anisotropic(operator) if precondition is None else precondition,
        store=krylov_memory(operator.out, operator.inp, operator.n_features) <= limit,
        least_squares=method == "least squares",
        progress=progress,
    )


def _is_anisotropic(operator: Operator) -> bool:
    if not isinstance(operator, KhatriRao) or operator.n_features < operator.equations:
        return False
    return anisotropy(operator) > ANISOTROPIC


def relative_residual(operator: Operator, target: Tensor, gamma: Tensor) -> float:
    """The worst |M gamma - target| / |target| in the batch."""
    rest = torch.linalg.vector_norm(operator.apply(gamma) - target, dim=(-2, -1))
    size = torch.linalg.vector_norm(target, dim=(-2, -1))
    worst = torch.where(size > 0, rest / size.clamp_min(TINY), rest)
    return float(worst.nan_to_num(nan=math.inf).max())


def _left_over(operator: Operator, target: Tensor, gamma: Tensor) -> float:
    """The residual or, with too few features, the part of it that features see."""
    if operator.n_features >= operator.equations:
        return relative_residual(operator, target, gamma)
    rest = torch.linalg.vector_norm(operator.transpose(operator.apply(gamma) - target), dim=-1)
    size = torch.linalg.vector_norm(operator.transpose(target), dim=-1).clamp_min(TINY)
    return float((rest / size).nan_to_num(nan=math.inf).max())
