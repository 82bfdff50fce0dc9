"""`solve`: gamma from features and a target, with automatic selection of the method.

Steps: validate the input, scale it and normalize the features to unit length, `choose` a method, run it, fall back to a
more robust method if it misses the tolerance, measure the residual in float64, report the result.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from onlynorm.display import Curve, Figure, Panel, ShownResult, View
from onlynorm.display.result import Tone
from onlynorm.errors import ToleranceError, ValueRangeError, shown
from onlynorm.features import Features
from onlynorm.memory import MemoryMeter, aligned, memory_budget, memory_limit, readable, release_free_memory
from onlynorm.modules import is_autocast, without_autocast
from onlynorm.solvers.choose import METHODS, choose, krylov_memory
from onlynorm.solvers.fallback import TINY, SolverRun, solve_with_fallback
from onlynorm.solvers.lazy import MAX_HELD, copy_lazy, lazy, set_lazy
from onlynorm.solvers.methods.closed_form import solve_closed_form
from onlynorm.solvers.methods.direct import relative_residual
from onlynorm.solvers.methods.minimum_width import MinimumWidth, equal_rows, need_minimum_width
from onlynorm.solvers.operator import KhatriRao, OnStep, times_power
from onlynorm.solvers.prepare import (
    in_range,
    is_finite,
    live,
    live_features,
    need_enough,
    need_finite,
    need_near,
    need_one_target,
    need_reached,
    need_target,
    need_tolerance,
    nonzero_fraction,
    to_middle,
)
from onlynorm.solvers.spectrum import Prediction, condition_number, predict_condition, predict_features
from onlynorm.validate import as_real, need_callable, need_choice, need_flag, need_instance

EPS = torch.finfo(torch.float64).eps
ROUNDED = 1e-12
"""A tolerance that square systems of dense features reach in float64."""
OPTIMAL = 1e-6
"""A solution is a least-squares optimum if `optimality` is at most this."""
DENSE = 0.25
"""Fraction of nonzero entries above which a square subset of the features is almost always invertible."""
LARGE = 8 * 2**20
"""Size in bytes of drawn features above which the temporary memory of drawing is released."""
ROUNDING_POWER = -900
"""Power of two below which a gamma may lose digits when it is scaled back."""
METERED = 2**20
"""Size in bytes of the dense matrix from which memory is measured, which takes as long as solving a tiny system."""
UNEQUAL_ROWS = 1e4
"""Ratio of rows of left above which more features of equal rows leave rounding errors at minimum width."""
MILD = 1e-7
"""Predicted rounding errors above this are not called rounding errors."""
N_BINS = 40
"""Bins of the histogram of gammas."""
_ON_STEP = "It is called with (iterations, relative residual)."


@lazy("condition", "shortfall")
@dataclass(frozen=True, repr=False)
class Solution(ShownResult):
    """Gamma with its residual, method, cost and, if the tolerance was missed, the reason and a cure.

    `residual` is |M gamma - target| / |target|, measured in float64 after the solve. `optimality` is the part of the
    residual in the span of the features: if it is tiny and the residual is not, gamma is a least-squares solution. At
    minimum width it is unknown and set to the residual. `condition` is the condition number of features of unit
    length: an estimate, after LU in the 1-norm (up to 20 times as large), after QR of large systems a lower bound.
    `output_gamma` is set for minimum-width systems only. `shortfall` is empty if the tolerance was reached; otherwise
    it lists the methods tried, the residual and a cure. For small systems `condition` and `shortfall` are computed on
    first access. `history` contains (iterations, residual) for every round of an iterative method. `peak_memory` is not
    measured, and 0, if the dense matrix has less than 1 MB.
    """

    gamma: Tensor
    residual: float
    method: str
    iterations: int
    condition: float
    seconds: float
    peak_memory: int
    reason: str
    tolerance: float
    shortfall: str = ""
    output_gamma: Tensor | None = None
    optimality: float = 0.0
    history: tuple[tuple[int, float], ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        """All field values; lazy fields are computed, since functions cannot be pickled."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def is_exact(self) -> bool:
        """Whether the residual is within the tolerance."""
        return self.residual <= self.tolerance

    @property
    def is_least_squares(self) -> bool:
        """Whether the residual is minimal, up to 1e-6 of the target."""
        return self.optimality <= OPTIMAL

    def plot(self) -> Figure:
        """Histogram of |gamma|, and the residual over the iterations of an iterative method."""
        curves, panels = [], []
        sizes = self.gamma.detach().double().abs().flatten()
        sizes = sizes[(sizes > 0) & sizes.isfinite()].log10().cpu()
        if len(sizes):
            low, high = float(sizes.min()), float(sizes.max())
            counts, edges = np.histogram(sizes.numpy(), bins=N_BINS, range=(low, max(high, low + 1e-3)))
            curves.append(Curve("gamma", (10.0**edges).tolist(), counts.tolist(), "histogram", "gamma"))
            panels.append(Panel("gamma", "Sizes of the gammas", "|gamma|", "features", x_log=True))
        rounds = [(n, residual) for n, residual in self.history if residual > 0 and math.isfinite(residual)]
        if rounds:
            n, residuals = zip(*rounds, strict=True)
            curves.append(Curve("residual", n, residuals, "line+points", "residual"))
            ends = (min(n), max(*n, min(n) + 1))
            curves.append(Curve("tolerance", ends, (self.tolerance,) * 2, panel="residual", style="law"))
            panels.append(Panel("residual", "Relative residual", "iterations", y_log=True))
        return Figure(curves, panels)

    def view(self) -> View:
        """The residual, the method and its cost."""
        verdict: tuple[str, Tone] = ("exact", "good") if self.is_exact else ("tolerance missed", "bad")
        if not self.is_exact and self.is_least_squares:
            verdict = ("least squares", "warn")
        return View(
            f"{self.gamma.shape[-1]:,} gammas by {self.method}", *verdict,
            [self.shortfall] if self.shortfall else [],
            facts={
                "reason for the method": self.reason,
                "relative residual": f"{self.residual:.2e}", "tolerance": f"{self.tolerance:.0e}",
                "residual in the span of the features": f"{self.optimality:.2e}",
                "condition number": f"{self.condition:.4g}", "iterations": self.iterations,
                "seconds": self.seconds, "additional memory": readable(self.peak_memory),
            },
        )  # fmt: skip

    def __str__(self) -> str:
        lines = [
            f"{self.gamma.shape[-1]} gammas by {self.method}: relative residual {self.residual:.1e} "
            f"(tolerance {self.tolerance:.0e}), {self.iterations} iterations, condition number {self.condition:.3g}, "
            f"{self.seconds:.2g} s, {readable(self.peak_memory)} additional memory",
            f"reason: {self.reason}",
        ]
        if self.shortfall:
            lines.append(f"tolerance missed: {self.shortfall}")
        return "\n".join(lines)


def solve(
    left: Float[Tensor, "out feat"],
    right: Float[Tensor, "feat inp"],
    target: Float[Tensor, "*batch out inp"],
    *,
    tolerance: float | None = None,
    method: str = "auto",
    least_norm: bool = True,
    minimum_width: bool = False,
    near: Float[Tensor, " feat"] | float | None = None,
    precondition: bool | None = None,
    memory: float | None = None,
    on_step: OnStep | None = None,
) -> Solution:
    """The minimum-norm gamma with left diag(gamma) right = target, or the least-squares gamma if none is exact.

    The norm is sum over f of (gamma_f |left[:, f]| |right[f, :]|)^2: features are scaled to unit length, so that the
    result does not depend on their lengths. `least_norm=False` accepts any exact gamma: if LU of a square subset of the
    features is faster, the other gammas are zero. Such a gamma is often a hundred times larger.

    With a `tolerance`, too few features or a larger residual raise an error. By default the tolerance is 1e-10 and the
    residual is only reported. `minimum_width` also solves for one scale per output (`output_gamma`), which needs out -
    1 fewer features. `near` selects the solution closest to a given gamma, in the Euclidean norm of gamma.
    `precondition` turns whitening on or off; by default it is used for anisotropic features. `memory` is the memory
    limit in bytes, by default 80 % of the machine's memory. The method depends only on sizes, tolerance and this limit;
    a solve that does not fit into the free memory raises.

    Theory: giannou2023:thm-1, burkholz2024:thm-2.2, burkholz2024:thm-2.3, random_features:thm-2.1

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> features = on.draw("he_normal", (4, 8))
        >>> left, right, target = features.left(), features.right(), torch.rand(4, 8).double()
        >>> solution = on.solve(left, right, target)
        >>> solution.residual < 1e-10
        True
        >>> torch.allclose(left @ torch.diag(solution.gamma) @ right, target)
        True
    """
    left, right = as_real("left", left), as_real("right", right)
    operator = KhatriRao(left.detach().double(), right.detach().double())
    need_finite("left", left)
    need_finite("right", right)
    return solve_operator(
        operator, target, tolerance=tolerance, method=method, least_norm=least_norm, minimum_width=minimum_width,
        near=near, precondition=precondition, memory=memory, on_step=on_step,
    )  # fmt: skip


def solve_features(
    features: Features,
    target: Float[Tensor, ...],
    *,
    storage: str = "dense",
    tolerance: float | None = None,
    minimum_width: bool = False,
    memory: float | None = None,
    on_step: OnStep | None = None,
) -> Solution:
    """Gamma for a target weight of any shape, from drawn features.

    Structured features are solved in closed form. With `storage="seed"` the float64 features are not stored but
    regenerated block by block; only a float32 copy is stored, or none if memory is limited.

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> solution = on.solve_features(on.draw("id_cond", (4, 8)), torch.rand(4, 8))
        >>> solution.method, solution.residual < 1e-10
        ('closed form', True)
    """
    need_instance("solve_features", features, Features, cure="Pass the result of draw.")
    if not isinstance(storage, str) or storage not in ("dense", "seed"):
        raise ValueRangeError(f"storage must be 'dense' or 'seed'; got {shown(storage)}. 'seed' saves memory.")
    if need_flag("minimum_width", minimum_width) and features.rows != features.shape[0]:
        raise ValueRangeError(
            f"minimum_width needs the kernel in the first layer, one row of left per output; got {features.rows} rows "
            f"for {features.shape[0]} outputs. Draw the features with kernel='first'."
        )
    matrix = features.as_matrix(as_real("target", target).detach()).double()
    need_finite("target", matrix)
    if features.structure is not None:
        need_tolerance(tolerance)
        memory_limit(memory)
        if on_step is not None:
            need_callable("on_step", on_step, cure=_ON_STEP)
        return _solve_structured(features, matrix, tolerance)
    if storage == "seed":
        operator = KhatriRao.regenerating(features, dtype=torch.float64)
    else:
        operator = KhatriRao(features.left().double(), features.right().double())
        if operator.stored_bytes > LARGE:
            release_free_memory()  # temporary memory of drawing
    return _solve(
        operator, matrix, tolerance=tolerance, minimum_width=minimum_width, memory=memory, on_step=on_step,
        prediction=predict_features(features),
    )  # fmt: skip


def solve_operator(
    operator: KhatriRao,
    target: Float[Tensor, "*batch out inp"],
    *,
    tolerance: float | None = None,
    method: str = "auto",
    least_norm: bool = True,
    minimum_width: bool = False,
    near: Float[Tensor, " feat"] | float | None = None,
    precondition: bool | None = None,
    memory: float | None = None,
    on_step: OnStep | None = None,
) -> Solution:
    """`solve` for an existing operator, stored or regenerating; it is converted to float64.

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> from onlynorm.solvers import KhatriRao, solve_operator
        >>> features = on.draw("he_normal", (4, 8))
        >>> operator = KhatriRao(features.left(), features.right())
        >>> solve_operator(operator, torch.rand(4, 8).double()).residual < 1e-10
        True
    """
    need_instance("solve_operator", operator, KhatriRao, cure="Pass KhatriRao(left, right).")
    if operator.dtype != torch.float64:
        operator = operator.cast(torch.float64)
    return _solve(
        operator, target, tolerance=tolerance, method=method, least_norm=least_norm, minimum_width=minimum_width,
        near=near, precondition=precondition, memory=memory, on_step=on_step,
    )  # fmt: skip


def _solve(
    operator: KhatriRao,
    target: Tensor,
    *,
    tolerance: float | None,
    method: str = "auto",
    least_norm: bool = True,
    minimum_width: bool,
    near: Tensor | float | None = None,
    precondition: bool | None = None,
    memory: float | None,
    on_step: OnStep | None,
    prediction: Prediction | None = None,
) -> Solution:
    start = time.perf_counter()
    wanted = need_tolerance(tolerance)
    need_choice("method", method, ("auto", *METHODS))
    need_flag("minimum_width", minimum_width)
    if not need_flag("least_norm", least_norm) and (minimum_width or near is not None):
        raise ValueRangeError(
            "least_norm=False needs a system without minimum_width and near, which define other solutions. Omit it."
        )
    if precondition is not None:
        need_flag("precondition", precondition)
    if on_step is not None:
        need_callable("on_step", on_step, cure=_ON_STEP)
    limit = memory_budget(memory)
    target = aligned(need_target(operator, target, near).contiguous())  # rounding of products depends on strides
    need_enough(operator, tolerance, minimum_width, has_near=near is not None)
    if minimum_width:
        need_one_target(target, near)
    history: list[tuple[int, float]] = []

    def record(iterations: int, residual: float) -> None:
        history.append((iterations, residual))
        if on_step is not None:
            on_step(iterations, residual)

    options: dict[str, Any] = {
        "tolerance": wanted, "limit": limit, "method": method, "precondition": precondition, "on_step": record,
        "prediction": prediction,
    }  # fmt: skip
    is_metered = 8 * operator.equations * operator.n_features >= METERED
    with contextlib.ExitStack() as contexts:
        if is_autocast(target):
            contexts.enter_context(without_autocast(operator.device))
        meter = contexts.enter_context(MemoryMeter()) if is_metered else None
        reached = live(operator)
        fraction = nonzero_fraction(operator)
        if fraction and prediction is None:
            options["prediction"] = predict_condition(operator.out, operator.inp, operator.n_features, density=fraction)
        if tolerance is not None and reached is not None:
            need_reached(operator, target, *reached)
        system, scaled, power = in_range(operator, target)
        output_gamma = offset = None
        if minimum_width:
            attempt, residual, output_gamma = _solve_minimum_width(system, scaled, options)
            gamma = times_power(attempt.gamma, power)
        else:
            features = None if fraction is None or method == "lu" else live_features(system)
            offset = _offset(operator, near, target, power)
            is_dense = fraction is None or fraction >= DENSE
            is_least = least_norm or not is_dense
            attempt = _attempt(system, scaled, reached, features, offset, options, least_norm=is_least)
            gamma = times_power(attempt.gamma, power)
            if (power if isinstance(power, int) else int(power.min())) < ROUNDING_POWER:
                attempt.gamma = times_power(gamma, -power)  # as rounded to a subnormal number
            residual = relative_residual(system, scaled, attempt.gamma)
    solution = Solution(
        gamma, residual, attempt.method, attempt.iterations, math.nan, time.perf_counter() - start,
        0 if meter is None else meter.peak, attempt.reason, wanted, output_gamma=output_gamma,
        optimality=min(residual, attempt.error if attempt.optimality is None else attempt.optimality),
        history=tuple(history),
    )  # fmt: skip
    copy_lazy("condition", attempt, solution)
    rounding = 0.0 if offset is None or solution.is_exact else _near_rounding(system, scaled, offset)
    return _add_shortfall(operator, solution, attempt, tolerance, method, limit, rounding)


def _attempt(
    system: KhatriRao,
    target: Tensor,
    reached: tuple[Tensor, Tensor] | None,
    features: Tensor | None,
    offset: Tensor | None,
    options: dict[str, Any],
    *,
    least_norm: bool,
) -> SolverRun:
    """The best attempt on the target minus M offset.

    The masks, if given, select the outputs, inputs and features that are not zero; others are removed from the system.
    """
    rest, tolerance, growth = target, options["tolerance"], 1.0
    if offset is not None:
        rest = target - system.apply(offset)
        size, left = (torch.linalg.vector_norm(x, dim=(-2, -1)) for x in (target, rest))
        size = torch.where(size > 0, size, 1.0)
        tolerance = max(TINY, tolerance * min(1.0, float((size / left.clamp_min(TINY)).min())))
        growth = float((left / size).max())
    if reached is not None:
        rest = rest[..., reached[0], :][..., reached[1]]
    if not bool(rest.any()):  # also if no outputs or inputs remain
        gamma = target.new_zeros(*target.shape[:-2], system.n_features)
        rank = 0 if reached is not None and not bool(reached[0].any() and reached[1].any()) else None
        attempt = SolverRun(gamma, "none", 0, 1.0, "the target is zero where features are nonzero", 0.0, rank=rank)
    elif features is not None and not bool(features.any()):
        gamma = target.new_zeros(*target.shape[:-2], system.n_features)
        attempt = SolverRun(gamma, "none", 0, 1.0, "no feature is nonzero", 1.0, rank=0, optimality=0.0)
    else:
        n_features = system.n_features
        if reached is not None or features is not None:
            outputs, inputs = (None, None) if reached is None else reached
            system = system.restrict(outputs, inputs, features)
        if offset is None:
            found = None if least_norm else _solve_first(system, rest, options)
            if found is None:
                unit, lengths = system.unit()
                found = solve_with_fallback(unit, rest, **options)
                found.gamma = found.gamma / lengths
            attempt = found
        else:  # not scaled to unit length: the distance is measured in gamma itself
            attempt = solve_with_fallback(system, rest, **{**options, "tolerance": tolerance})
        if features is not None:
            gamma = target.new_zeros(*target.shape[:-2], n_features)
            gamma[..., features] = attempt.gamma
            attempt.gamma = gamma
    if offset is None:
        return attempt
    # Errors are relative to the target minus M offset; adding the offset rounds once more.
    attempt.gamma = attempt.gamma + offset
    optimality = growth * (attempt.error if attempt.optimality is None else attempt.optimality)
    attempt.optimality = optimality + EPS * math.sqrt(system.n_features) * growth
    attempt.error *= growth
    return attempt


def _solve_first(system: KhatriRao, target: Tensor, options: dict[str, Any]) -> SolverRun | None:
    """LU of the first features, a square system; None if that is slower than the minimum norm, or not exact."""
    n, sizes = system.equations, (system.out, system.inp)
    if options["method"] != "auto" or system.n_features <= n or not system.is_stored:
        return None
    settings = {"tolerance": options["tolerance"], "memory": options["limit"]}
    whole, square = choose(*sizes, system.n_features, **settings), choose(*sizes, n, **settings)
    lu = next(option for option in square.options if option.method == "lu")
    if lu.obstacle or lu.seconds >= whole.option.seconds:
        return None
    left, right = system.dense()
    unit, lengths = KhatriRao(left[:, :n], right[:n]).unit()
    found = solve_with_fallback(unit, target, **{**options, "method": "lu", "prediction": None})
    if not found.error <= options["tolerance"] or found.is_singular:
        return None
    gamma = target.new_zeros(*target.shape[:-2], system.n_features)
    gamma[..., :n] = found.gamma / lengths
    found.gamma = gamma
    found.reason = f"LU of the first {n} features is faster than {whole.method}; least_norm=False"
    return found


def _solve_minimum_width(
    operator: KhatriRao, target: Tensor, options: dict[str, Any]
) -> tuple[SolverRun, float, Tensor]:
    """Gamma, the residual and one scale per output, with features and target rows scaled to unit length.

    Zero rows of the target get output_gamma = 0 and are removed from the system. Rows of left that are much smaller
    than the others are scaled up; the scale of the output is divided accordingly.
    """
    wanted = options["tolerance"]
    largest = target.abs().amax(-1)
    on = largest > 0
    if not bool(on.any()):
        gamma, output_gamma = target.new_zeros(operator.n_features), target.new_zeros(operator.out)
        attempt = SolverRun(gamma, "none", 0, 1.0, "the target is zero", 0.0)
        return attempt, 0.0, output_gamma
    features = operator if bool(on.all()) else operator.restrict(on)
    need_minimum_width(features)
    features, row_powers = equal_rows(features)
    unit, lengths = features.unit()
    rows = (target[on] / largest[on, None]).norm(dim=1) * largest[on]  # squares of a tiny row would underflow
    system = MinimumWidth(unit, target[on] / rows[:, None])

    def attempt_with(tolerance: float) -> tuple[SolverRun, float, Tensor]:
        found = solve_with_fallback(system, system.target, **{**options, "tolerance": tolerance})
        output_gamma = torch.zeros(operator.out, dtype=target.dtype, device=target.device)
        output_gamma[on] = times_power(rows / system.row_factors(found.gamma), row_powers)
        gamma = found.gamma[: operator.n_features] / lengths
        made = operator.apply(gamma)
        residual = _relative(output_gamma[:, None] * made, target)
        if residual > wanted:  # then the least-squares scale of each row may be better
            best = torch.where(on, (made * target).sum(1) / made.square().sum(1).clamp_min(TINY), 0.0)
            best_residual = _relative(best[:, None] * made, target)
            if best_residual < residual:
                output_gamma, residual = best, best_residual
        found.gamma, found.optimality = gamma, residual
        return found, residual, output_gamma

    best, residual, output_gamma = attempt_with(wanted)
    inner, found = wanted, best
    while found.error <= inner and residual > wanted and math.isfinite(residual) and inner > TINY:
        # The scales of the outputs amplify the residual of the solved system.
        inner = max(TINY, inner * wanted / (2 * residual))
        found, again, scales = attempt_with(inner)
        if again < residual:
            best, residual, output_gamma = found, again, scales
    return best, residual, output_gamma


def _relative(made: Tensor, target: Tensor) -> float:
    residual = float(torch.linalg.vector_norm(made - target) / torch.linalg.vector_norm(target))
    return math.inf if math.isnan(residual) else residual


def _solve_structured(features: Features, matrix: Tensor, tolerance: float | None) -> Solution:
    start = time.perf_counter()
    assert features.structure is not None
    structure = features.structure.to(torch.float64, matrix.device)
    with MemoryMeter() as meter:
        scaled, power = to_middle(matrix)
        gamma, output_gamma, residual = solve_closed_form(structure, scaled)
        if output_gamma is None:
            gamma = times_power(gamma, power)
        else:
            output_gamma = times_power(output_gamma, power)
    condition = predict_features(features).condition if features.name == "kron_normal" else 1.0
    solution = Solution(
        gamma, residual, "closed form", 0, condition, time.perf_counter() - start, meter.peak,
        f"{features.name} features have a known inverse", need_tolerance(tolerance), output_gamma=output_gamma,
    )  # fmt: skip
    if not solution.is_exact:
        short = "this is rounding error; a tolerance of 1e-14 can be reached"
        if features.name == "kron_normal":
            short = f"this is rounding error at condition number {condition:.1e}; use a larger excess"
        if features.density is not None:
            short = f"{features.equations - features.n_features} weights have no feature; use density 1"
        solution = replace(solution, shortfall=f"residual {residual:.1e}: {short}")
    if tolerance is not None and solution.shortfall:
        raise ToleranceError(f"{features.name} features need to reach {tolerance:.0e}; {solution.shortfall}.")
    return solution


def _add_shortfall(
    operator: KhatriRao,
    solution: Solution,
    attempt: SolverRun,
    tolerance: float | None,
    method: str,
    limit: int,
    near_rounding: float,
) -> Solution:
    found = [solution.gamma] if solution.output_gamma is None else [solution.gamma, solution.output_gamma]
    if not all(is_finite(values) for values in found):
        raise ValueRangeError(
            "gamma needs to fit into float64; got an overflow: the features are too small for the target. "
            "Rescale the features or the target."
        )
    if solution.is_exact:
        return solution
    tried = f"; tried: {', '.join(attempt.tried)}" if attempt.tried else ""
    if tolerance is not None:
        remedy = _cure(operator, solution, attempt, method, limit, near_rounding)
        raise ToleranceError(
            f"solve needs a relative residual of {tolerance:.0e}; {solution.method} reached {solution.residual:.1e} "
            f"on {operator.equations} equations with {operator.n_features} features{tried}. Cure: {remedy} Or omit "
            "the tolerance to get the best solution found."
        )

    # A copy, since the caller may change the factors before the field is read.
    n_bytes = operator.stored_bytes if operator.is_stored else MAX_HELD + 1
    held = operator.copied() if n_bytes <= MAX_HELD else operator

    def shortfall(solution: Solution) -> str:
        reached = f"residual {solution.residual:.1e}"
        if solution.is_least_squares:
            reached += ", the least-squares optimum for these features"
        elif solution.output_gamma is None:
            reached += f", not the least-squares optimum ({solution.optimality:.1e} in the span of the features)"
        return f"{reached}{tried}. {_cure(held, solution, attempt, method, limit, near_rounding)}"

    # Computed now if features are not stored: reading the field would draw them again.
    set_lazy(solution, "shortfall", shortfall, n_bytes)
    return solution


def _cure(
    operator: KhatriRao, solution: Solution, attempt: SolverRun, method: str, limit: int, near_rounding: float
) -> str:
    """A sentence with the change that makes the tolerance reachable."""
    is_minimum_width = solution.output_gamma is not None
    largest = solution.gamma.abs().amax(-1).flatten()
    rounded = TINY * EPS * math.sqrt(operator.n_features) / largest[largest > 0]
    if bool((rounded > 0.01 * solution.residual).any()):
        return "Gamma is too small for the precision of float64: scale the target up, or the features down."
    # No method can improve an optimum with a residual above rounding error.
    is_best = solution.is_least_squares and solution.residual > 10 * solution.optimality
    if method not in ("auto", "qr", "svd") and not is_best:
        return f"Omit method='{method}' to try more robust methods."
    if attempt.missing_memory and not is_best:
        return f"Pass memory={_rounded_up(attempt.missing_memory):.2g} or more for a more robust method."
    equations = attempt.equations if is_minimum_width else operator.equations
    known = rank = attempt.known_rank()
    if rank is None:
        reached = live(operator)
        n_reached = operator.equations if reached is None else int(reached[0].sum()) * int(reached[1].sum())
        n_nonzero = sum(int((left.any(1) & right.any(1)).sum()) for _, left, right in operator.blocks())
        rank = min(n_reached, n_nonzero + (operator.out - 1 if is_minimum_width else 0))
    wanted, enough = solution.tolerance, _more(operator, operator.equations, method, limit)
    reachable = max(2.0 * solution.residual, TINY)
    rounding = 10.0 ** math.ceil(math.log10(reachable)) if math.isfinite(reachable) else math.inf
    completed = EPS * _completed_condition(equations, rank, attempt.condition) if rank > 0 else 0.0
    is_rounded = completed > (0.01 if is_minimum_width else 0.1) * wanted  # minimum width amplifies rounding errors
    if is_minimum_width and operator.is_stored:  # dense features added to unequal rows are unequal after scaling
        rows = operator.dense()[0].abs().amax(1)
        is_rounded |= bool((rows.max() > UNEQUAL_ROWS * rows[rows > 0]).any())
    if near_rounding > 0.01 * wanted:
        if equations <= rank and not solution.is_least_squares:
            return "The residual is rounding error of near, which is too large relative to the target: omit near."
        if equations > rank:  # of features that are not scaled to unit length, where a length can hide a direction
            n = operator.equations if is_rounded or rank < operator.n_features else equations - rank
            more = _more(operator, n, method, limit)
            return f"{more} make the system solvable without near, which causes rounding errors."
    if is_minimum_width and attempt.error <= OPTIMAL < rounding:
        # Solved with a row factor of zero, as for an output without features: the rank is not informative.
        return f"{enough} make the system solvable{' without minimum_width' * is_rounded}."
    if equations > rank:
        if is_rounded and is_minimum_width:
            return f"{enough} make the system solvable without minimum_width."
        if completed > MILD or (is_rounded and (method != "auto" or attempt.method == "krylov")):
            return f"{enough} reach {max(wanted, ROUNDED):.0e}; fewer may leave rounding errors."
        more = f"{_more(operator, equations - rank, method, limit)} make the system solvable"
        if rank != operator.n_features and not is_minimum_width and known is not None:
            more += f" (their rank is {rank})"
        if is_rounded:
            return f"{more} up to rounding error, and {operator.equations} more reach {max(wanted, ROUNDED):.0e}."
        if known is None:
            return f"{more} if the present ones are independent, {operator.equations} more otherwise."
        return f"{more}."
    if is_best or rounding >= 1.0:
        return f"{enough} make the system solvable."
    return f"The residual is rounding error: a tolerance of {rounding:.0e} can be reached."


def _more(operator: KhatriRao, n: int, method: str, limit: int) -> str:
    """The number of features to add, and the arguments that must change with them.

    The memory is that for as many as equations.
    """
    need = krylov_memory(operator.out, operator.inp, operator.n_features + operator.equations)
    memory = f" and memory={_rounded_up(need):.2g} or more" if need > limit else ""
    return f"{n} more dense features{memory}" + (" and method='auto'" if method == "lu" else "")


def _completed_condition(equations: int, rank: int, condition: float) -> float:
    """Predicted condition number after dense features are added until the system is square.

    A square system is much worse conditioned than one with fewer features. The ratio of the present condition number to
    the law's (caused by rows of unequal size, for example) is assumed to stay.
    """
    return max(1.0, condition / condition_number(equations, rank)) * condition_number(equations, equations)


def _rounded_up(value: float) -> float:
    """The value rounded up to two significant digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(value / unit) * unit


def _near_rounding(operator: KhatriRao, target: Tensor, offset: Tensor) -> float:
    """The rounding error of M near relative to the target, also with more features as long as the longest or one."""
    sizes = torch.linalg.vector_norm(target, dim=(-2, -1))
    longest = max(1.0, float(operator.unit()[1].max())) * math.sqrt(operator.equations + operator.n_features)
    made = torch.linalg.vector_norm(operator.apply(offset), dim=(-2, -1))
    largest = torch.maximum(made, offset.abs().amax(-1) * longest) / torch.where(sizes > 0, sizes, 1.0)
    return EPS * math.sqrt(operator.n_features) * float(largest.nan_to_num(nan=math.inf).max())


def _offset(operator: KhatriRao, near: Tensor | float | None, target: Tensor, power: int | Tensor) -> Tensor | None:
    if near is None:
        return None
    shape = (*target.shape[:-2], operator.n_features)
    return times_power(need_near(near, shape).detach().to(target).expand(shape), -power)
