"""`solve`: gamma from features and a target, by the method that suits them.

The walk: check the input -> scale it to the middle of the floating range and its features to unit length -> `choose` a
method -> run it -> if it fell short, go on to the next more robust method -> measure the residual in float64 on the
features themselves -> say in words what happened.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from onlynorm.errors import ToleranceError, ValueRangeError, shown
from onlynorm.features import Features
from onlynorm.memory import MemoryMeter, aligned, memory_budget, memory_limit, readable, release_free_memory
from onlynorm.modules import without_autocast
from onlynorm.solvers.choose import METHODS, choose
from onlynorm.solvers.fallback import TINY, Attempt, climb
from onlynorm.solvers.methods.closed_form import solve_closed_form
from onlynorm.solvers.methods.direct import relative_residual
from onlynorm.solvers.methods.minimum_width import MinimumWidth, equal_rows, need_minimum_width
from onlynorm.solvers.operator import KhatriRao, Progress, times_power
from onlynorm.solvers.prepare import (
    in_range,
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
"""A tolerance that dense features, as many as equations, reach in float64."""
OPTIMAL = 1e-6
"""Relative to the target: a residual of which features could remove less than this is a least-squares optimum."""
DENSE = 0.25
"""The fraction of nonzero entries from which the first features, as many as equations, are hardly ever dependent."""
LARGE = 8 * 2**20
"""Bytes of drawn features from which the scratch memory of drawing matters beside them."""
_PROGRESS = "It is called with (iterations so far, relative residual)."


@dataclass(frozen=True)
class Solution:
    """Gamma with the evidence: how exact, by which method, at what cost, and what would help if it fell short.

    `residual` is |M gamma - target| / |target| in float64, measured after the fact, never the method's own estimate.
    `optimality` is the part of it that the features could still remove: where it is tiny and the residual is not, gamma
    is a least-squares solution. At minimum width nobody knows that part, and it is the residual. `condition` is that
    of features scaled to unit length. `output_gamma` belongs to the minimum-width system only. `shortfall` is empty
    unless the tolerance was missed; it then says what was tried, what was reached and what helps.
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

    @property
    def is_exact(self) -> bool:
        """Whether the residual is within the tolerance."""
        return self.residual <= self.tolerance

    @property
    def is_least_squares(self) -> bool:
        """Whether no other gamma has a smaller residual, up to 1e-6 of the target."""
        return self.optimality <= OPTIMAL

    def __str__(self) -> str:
        lines = [
            f"{self.gamma.shape[-1]} gammas by {self.method}: relative residual {self.residual:.1e} "
            f"(wanted {self.tolerance:.0e}), {self.iterations} iterations, condition about {self.condition:.3g}, "
            f"{self.seconds:.2g} s, {readable(self.peak_memory)} extra",
            f"why: {self.reason}",
        ]
        if self.shortfall:
            lines.append(f"short: {self.shortfall}")
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
    progress: Progress | None = None,
) -> Solution:
    """Gamma with left diag(gamma) right = target: the one of least norm, or the least-squares one if none is exact.

    The norm is that of the contributions, sum over f of (gamma_f |left[:, f]| |right[f, :]|)^2: features count as
    scaled to unit length, so that the result is the same whatever their lengths are. `least_norm=False` asks for any
    exact gamma instead: where LU of as many features as equations is faster, the others get zero. Such a gamma is often
    a hundred times as large.

    Giving a `tolerance` asks for exactness: too few features or a missed tolerance raise. Without it the solver aims at
    1e-10 and reports what it reached. `minimum_width` also chooses one scale per output row (`output_gamma`), which
    needs out - 1 fewer features. `near` asks for the solution closest to a given gamma instead, in the plain norm of
    gamma. `precondition` forces whitening on or off; by default it is used where features are far from isotropic.
    `memory` limits the bytes a method may use; left out, it is 80 % of the machine's memory, whatever else is running:
    the method depends on sizes, tolerance and this limit only, and a solve that the memory free at the moment cannot
    hold is refused.

    Theory: giannou2023:thm-1, burkholz2024:thm-2.2, burkholz2024:thm-2.3, random_features:thm-2.1
    """
    left, right = as_real("left", left), as_real("right", right)
    operator = KhatriRao(left.detach().double(), right.detach().double())
    need_finite("left", left)
    need_finite("right", right)
    return solve_operator(
        operator, target, tolerance=tolerance, method=method, least_norm=least_norm, minimum_width=minimum_width,
        near=near, precondition=precondition, memory=memory, progress=progress,
    )  # fmt: skip


def solve_features(
    features: Features,
    target: Float[Tensor, ...],
    *,
    storage: str = "dense",
    tolerance: float | None = None,
    minimum_width: bool = False,
    memory: float | None = None,
    progress: Progress | None = None,
) -> Solution:
    """Gamma for a target weight in its own shape, from features known by their seed.

    Structured features are solved in closed form. `storage="seed"` never keeps the float64 features: residuals
    regenerate them block by block, and only a float32 copy (or, under a tight memory limit, nothing) is stored.
    """
    need_instance("solve_features", features, Features, cure="Pass what draw returns.")
    if not isinstance(storage, str) or storage not in ("dense", "seed"):
        raise ValueRangeError(f"storage needs to be 'dense' or 'seed'; got {shown(storage)}. 'seed' saves memory.")
    if need_flag("minimum_width", minimum_width) and features.rows != features.shape[0]:
        raise ValueRangeError(
            f"minimum_width needs the kernel in the first layer, where a row of left is an output; got {features.rows} "
            f"rows for {features.shape[0]} outputs. Draw the features with kernel='first'."
        )
    matrix = features.as_matrix(as_real("target", target).detach()).double()
    need_finite("target", matrix)
    if features.structure is not None:
        need_tolerance(tolerance)
        memory_limit(memory)
        if progress is not None:
            need_callable("progress", progress, cure=_PROGRESS)
        return _solve_structured(features, matrix, tolerance)
    if storage == "seed":
        operator = KhatriRao.regenerating(features, dtype=torch.float64)
    else:
        operator = KhatriRao(features.left().double(), features.right().double())
        if operator.stored_bytes > LARGE:
            release_free_memory()  # the scratch memory of drawing
    return _solve(
        operator, matrix, tolerance=tolerance, minimum_width=minimum_width, memory=memory, progress=progress,
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
    progress: Progress | None = None,
) -> Solution:
    """`solve` for an operator that exists already, stored or regenerating, in float64 whatever its precision is."""
    need_instance("solve_operator", operator, KhatriRao, cure="Pass KhatriRao(left, right).")
    if operator.dtype != torch.float64:
        operator = operator.cast(torch.float64)
    return _solve(
        operator, target, tolerance=tolerance, method=method, least_norm=least_norm, minimum_width=minimum_width,
        near=near, precondition=precondition, memory=memory, progress=progress,
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
    progress: Progress | None,
    prediction: Prediction | None = None,
) -> Solution:
    start = time.perf_counter()
    wanted = need_tolerance(tolerance)
    need_choice("method", method, ("auto", *METHODS))
    need_flag("minimum_width", minimum_width)
    if not need_flag("least_norm", least_norm) and (minimum_width or near is not None):
        raise ValueRangeError(
            "least_norm=False needs a system without minimum_width and near, which define a solution of their own. "
            "Leave it out."
        )
    if precondition is not None:
        need_flag("precondition", precondition)
    if progress is not None:
        need_callable("progress", progress, cure=_PROGRESS)
    limit = memory_budget(memory)
    target = aligned(need_target(operator, target, near).contiguous())  # products round by strides too
    need_enough(operator, tolerance, minimum_width)
    if minimum_width:
        need_one_target(target, near)
    climbing: dict[str, Any] = {
        "tolerance": wanted, "limit": limit, "method": method, "precondition": precondition, "progress": progress,
        "prediction": prediction,
    }  # fmt: skip
    with without_autocast(operator.device), MemoryMeter() as meter:
        outputs, inputs = live(operator)
        fraction = nonzero_fraction(operator)
        if fraction and prediction is None:
            climbing["prediction"] = predict_condition(
                operator.out, operator.inp, operator.n_features, density=fraction
            )
        if tolerance is not None:
            need_reached(operator, target, outputs, inputs)
        system, scaled, power = in_range(operator, target)
        if minimum_width:
            solution, attempt = _solve_minimum_width(system, scaled, climbing)
        else:
            features = None if fraction is None or method == "lu" else live_features(system)
            offset = _offset(operator, near, target, power)
            masks = outputs, inputs, features
            is_dense = fraction is None or fraction >= DENSE
            attempt = _attempt(system, scaled, masks, offset, climbing, least_norm=least_norm or not is_dense)
            solution = _as_solution(attempt, relative_residual(system, scaled, attempt.gamma), wanted)
        solution = replace(solution, gamma=times_power(solution.gamma, power))
    solution = replace(solution, seconds=time.perf_counter() - start, peak_memory=meter.peak)
    return _judge(operator, solution, attempt, tolerance, method, has_near=near is not None)


def _attempt(
    system: KhatriRao,
    target: Tensor,
    live: tuple[Tensor, Tensor, Tensor | None],
    offset: Tensor | None,
    climbing: dict[str, Any],
    *,
    least_norm: bool,
) -> Attempt:
    """The best attempt on what the offset leaves, at the outputs and inputs that features reach.

    The third mask, if there is one, tells which features are not zero: the others leave the system.
    """
    outputs, inputs, features = live
    rest, tolerance, growth = target, climbing["tolerance"], 1.0
    if offset is not None:
        rest = target - system.apply(offset)
        size, left = (torch.linalg.vector_norm(x, dim=(-2, -1)) for x in (target, rest))
        size = torch.where(size > 0, size, 1.0)
        tolerance = max(TINY, tolerance * min(1.0, float((size / left.clamp_min(TINY)).min())))
        growth = float((left / size).max())
    if not bool(outputs.all() and inputs.all()):
        rest = rest[..., outputs, :][..., inputs]
    if not bool(rest.any()):  # also where no output or no input is left, and no system could be made
        gamma = target.new_zeros(*target.shape[:-2], system.n_features)
        rank = None if bool(outputs.any() and inputs.any()) else 0
        attempt = Attempt(gamma, "none", 0, 1.0, "no feature sees anything left to solve", 0.0, rank=rank)
    else:
        n_features = system.n_features
        if rest.shape != target.shape or features is not None:
            system = system.restrict(outputs, inputs, features)
        if offset is None:
            found = None if least_norm else _solve_first(system, rest, climbing)
            if found is None:
                unit, lengths = system.unit()
                found = climb(unit, rest, **climbing)
                found = replace(found, gamma=found.gamma / lengths)
            attempt = found
        else:  # nearest in gamma itself: another length of a feature would be another distance
            attempt = climb(system, rest, **{**climbing, "tolerance": tolerance})
        if features is not None:
            gamma = target.new_zeros(*target.shape[:-2], n_features)
            gamma[..., features] = attempt.gamma
            attempt = replace(attempt, gamma=gamma)
    if offset is None:
        return attempt
    # What was left is measured against what the offset leaves; adding the offset rounds once more.
    gamma = attempt.gamma + offset
    optimality = growth * (attempt.left_over if attempt.optimality is None else attempt.optimality)
    added = EPS * math.sqrt(system.n_features) * growth
    return replace(attempt, gamma=gamma, left_over=growth * attempt.left_over, optimality=optimality + added)


def _solve_first(system: KhatriRao, target: Tensor, climbing: dict[str, Any]) -> Attempt | None:
    """LU of the first features, as many as equations; None where it is slower than least norm, or not exact."""
    n, sizes = system.equations, (system.out, system.inp)
    if climbing["method"] != "auto" or system.n_features <= n or not system.is_stored:
        return None
    settings = {"tolerance": climbing["tolerance"], "memory": climbing["limit"]}
    whole, square = choose(*sizes, system.n_features, **settings), choose(*sizes, n, **settings)
    lu = next(option for option in square.options if option.method == "lu")
    if lu.obstacle or lu.seconds >= whole.option.seconds:
        return None
    left, right = system.dense()
    unit, lengths = KhatriRao(left[:, :n], right[:n]).unit()
    found = climb(unit, target, **{**climbing, "method": "lu", "prediction": None})
    if not found.left_over <= climbing["tolerance"] or found.is_singular:
        return None
    gamma = target.new_zeros(*target.shape[:-2], system.n_features)
    gamma[..., :n] = found.gamma / lengths
    reason = f"LU of the first {n} features is faster than {whole.method}, and any solution was asked for"
    return replace(found, gamma=gamma, reason=reason)


def _as_solution(attempt: Attempt, residual: float, tolerance: float) -> Solution:
    a = attempt
    optimality = min(residual, a.left_over if a.optimality is None else a.optimality)
    return Solution(
        a.gamma, residual, a.method, a.iterations, a.condition, 0.0, 0, a.reason, tolerance, optimality=optimality
    )


def _solve_minimum_width(operator: KhatriRao, target: Tensor, climbing: dict[str, Any]) -> tuple[Solution, Attempt]:
    """Gamma and one scale per output, for features and rows of the target of unit length.

    Rows of the target that are zero are switched off and leave the system. Rows of left that are far smaller than
    others are scaled up, which the scale of the output undoes.
    """
    wanted = climbing["tolerance"]
    largest = target.abs().amax(-1)
    on = largest > 0
    if not bool(on.any()):
        gamma, output_gamma = target.new_zeros(operator.n_features), target.new_zeros(operator.out)
        attempt = Attempt(gamma, "none", 0, 1.0, "every output of the target is zero and switched off", 0.0)
        return replace(_as_solution(attempt, 0.0, wanted), output_gamma=output_gamma), attempt
    everything = torch.ones(operator.inp, dtype=torch.bool, device=operator.device)
    features = operator if bool(on.all()) else operator.restrict(on, everything)
    need_minimum_width(features)
    features, row_powers = equal_rows(features)
    unit, lengths = features.unit()
    rows = (target[on] / largest[on, None]).norm(dim=1) * largest[on]  # the squares of a tiny row would vanish
    system = MinimumWidth(unit, target[on] / rows[:, None])

    def attempt_with(tolerance: float) -> tuple[Solution, Attempt]:
        found = climb(system, system.target, **{**climbing, "tolerance": tolerance})
        output_gamma = torch.zeros(operator.out, dtype=target.dtype, device=target.device)
        output_gamma[on] = times_power(rows / system.row_factors(found.gamma), row_powers)
        gamma = found.gamma[: operator.n_features] / lengths
        made = operator.apply(gamma)
        residual = _relative(output_gamma[:, None] * made, target)
        if residual > wanted:  # then the best scale for what was made need not be the one of the system
            best = torch.where(on, (made * target).sum(1) / made.square().sum(1).clamp_min(TINY), 0.0)
            best_residual = _relative(best[:, None] * made, target)
            if best_residual < residual:
                output_gamma, residual = best, best_residual
        found = replace(found, gamma=gamma, optimality=residual)
        return replace(_as_solution(found, residual, wanted), output_gamma=output_gamma), found

    best, attempt = attempt_with(wanted)
    inner, found = wanted, attempt
    while found.left_over <= inner and not best.is_exact and math.isfinite(best.residual) and inner > TINY:
        # The scales of the outputs come after the system that was solved, and magnified what it left.
        inner = max(TINY, inner * wanted / (2 * best.residual))
        again, found = attempt_with(inner)
        if again.residual < best.residual:
            best, attempt = again, found
    return best, attempt


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
    solution = Solution(
        gamma, residual, "closed form", 0, 1.0, time.perf_counter() - start, meter.peak,
        f"{features.name} features have a known inverse", need_tolerance(tolerance), output_gamma=output_gamma,
    )  # fmt: skip
    if not solution.is_exact:
        short = "what is left is rounding; a tolerance of 1e-14 is safe"
        if features.density is not None:
            short = f"{features.equations - features.n_features} weights have no feature; density 1 reaches them all"
        solution = replace(solution, shortfall=f"residual {residual:.1e}: {short}")
    if tolerance is not None and solution.shortfall:
        raise ToleranceError(f"{features.name} features need to reach {tolerance:.0e}; {solution.shortfall}.")
    return solution


def _judge(
    operator: KhatriRao, solution: Solution, attempt: Attempt, tolerance: float | None, method: str, *, has_near: bool
) -> Solution:
    found = [solution.gamma] if solution.output_gamma is None else [solution.gamma, solution.output_gamma]
    if not all(bool(torch.isfinite(values).all()) for values in found):
        raise ValueRangeError(
            "gamma needs to fit into float64; got an overflow, because the features are too small for the target. "
            "Rescale the features or the target."
        )
    if solution.is_exact:
        return solution
    remedy = _cure(operator, solution, attempt, method, has_near=has_near)
    reached = f"residual {solution.residual:.1e}"
    if solution.is_least_squares:
        reached += ", the least-squares optimum for these features"
    elif solution.output_gamma is None:
        reached += f", not the least-squares optimum (features could remove {solution.optimality:.1e} more)"
    tried = f"; tried: {', '.join(attempt.tried)}" if attempt.tried else ""
    solution = replace(solution, shortfall=f"{reached}{tried}. {remedy}")
    if tolerance is not None:
        raise ToleranceError(
            f"solve needs a relative residual of {tolerance:.0e}; {solution.method} reached {solution.residual:.1e} "
            f"on {operator.equations} equations with {operator.n_features} features{tried}. Cure: {remedy} Or leave "
            "the tolerance out to take the best there is."
        )
    return solution


def _cure(operator: KhatriRao, solution: Solution, attempt: Attempt, method: str, *, has_near: bool) -> str:
    """What makes the system solvable to its tolerance."""
    is_minimum_width = solution.output_gamma is not None
    # An optimum that leaves more than rounding would be left by every method.
    is_best = solution.is_least_squares and solution.residual > 10 * solution.optimality
    if method not in ("auto", "qr", "svd") and not is_best:
        return f"Leave method='{method}' out to have more robust ones tried."
    if attempt.missing_memory and not is_best:
        return f"Pass memory={_rounded_up(attempt.missing_memory):.2g} or more for a method that is more robust."
    if has_near and not solution.is_least_squares:
        return "What is left is rounding of near, which is too large beside the target: leave near out."
    equations = attempt.equations if is_minimum_width else operator.equations
    rank = attempt.rank
    if rank is None:
        outputs, inputs = live(operator)
        n_nonzero = sum(int((left.any(1) & right.any(1)).sum()) for _, left, right in operator.blocks())
        rank = min(int(outputs.sum()) * int(inputs.sum()), n_nonzero + (operator.out - 1 if is_minimum_width else 0))
    wanted, note = solution.tolerance, ""
    rounding = 10.0 ** math.ceil(math.log10(max(2.0 * solution.residual, TINY)))
    if is_minimum_width and attempt.left_over <= OPTIMAL < rounding:
        # Solved by a row factor of zero, as for an output that no feature reaches: the rank says nothing.
        return f"{equations} more dense features make the system solvable."
    if equations > rank:
        if rank != operator.n_features and not is_minimum_width:
            note = f" (their rank is {rank})"
        if attempt.rank is None:
            note = " if those there are independent"
        if rank > 0 and _completed_condition(equations, rank, attempt.condition) * EPS > 0.1 * wanted:
            note += f" up to rounding, and {equations} more reach {max(wanted, ROUNDED):.0e}"
        elif has_near and solution.optimality > 0.1 * wanted:
            note += " up to the rounding of near, which is large beside the target"
        return f"{equations - rank} more dense features make the system solvable{note}."
    if is_best or rounding >= 1.0:
        return f"{equations} more dense features make the system solvable."
    return f"What is left is rounding: a tolerance of {rounding:.0e} can be met."


def _completed_condition(equations: int, rank: int, condition: float) -> float:
    """The condition number to expect once dense features have made the system square.

    A square system is far worse conditioned than one with fewer features, and what makes those there worse than the law
    (rows of unequal size, say) stays.
    """
    return max(1.0, condition / condition_number(equations, rank)) * condition_number(equations, equations)


def _rounded_up(value: float) -> float:
    """The next number of two digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(value / unit) * unit


def _offset(operator: KhatriRao, near: Tensor | float | None, target: Tensor, power: int | Tensor) -> Tensor | None:
    if near is None:
        return None
    shape = (*target.shape[:-2], operator.n_features)
    return times_power(need_near(near, shape).detach().to(target).expand(shape), -power)
