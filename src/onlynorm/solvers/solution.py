"""`solve`: gamma from features and a target, by the method that suits them.

The walk: check the input -> scale it to the middle of the floating range -> `choose` a method -> run it -> measure
the residual in float64 on the features themselves -> if it fell short, climb to the next more robust method -> say
in words what happened.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from onlynorm.errors import ToleranceError, ValueRangeError
from onlynorm.features import Features
from onlynorm.solvers.choose import cure
from onlynorm.solvers.closed_form import solve_closed_form
from onlynorm.solvers.khatri_rao import KhatriRao, times_power
from onlynorm.solvers.krylov import Progress
from onlynorm.solvers.ladder import TINY, Attempt, climb, relative_residual
from onlynorm.solvers.memory import MemoryMeter, memory_limit, readable
from onlynorm.solvers.minimum_width import MinimumWidth, need_minimum_width
from onlynorm.solvers.needs import (
    in_range,
    live,
    need_enough,
    need_finite,
    need_one_target,
    need_reached,
    need_target,
    need_tolerance,
    to_middle,
)


@dataclass(frozen=True)
class Solution:
    """Gamma with the evidence: how exact, by which method, at what cost, and what would help if it fell short.

    `residual` is |M gamma - target| / |target| in float64, measured after the fact, never the method's own estimate.
    `output_gamma` belongs to the minimum-width system only. `shortfall` is empty unless the tolerance was missed.
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

    @property
    def is_exact(self) -> bool:
        """Whether the residual is within the tolerance."""
        return self.residual <= self.tolerance

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
    minimum_width: bool = False,
    near: Float[Tensor, " feat"] | float | None = None,
    precondition: bool | None = None,
    memory: float | None = None,
    progress: Progress | None = None,
) -> Solution:
    """Gamma with left diag(gamma) right = target: the one of least norm, or the least-squares one if none is exact.

    Giving a `tolerance` asks for exactness: too few features or a missed tolerance raise. Without it the solver
    aims at 1e-10 and reports what it reached. `minimum_width` also chooses one scale per output row
    (`output_gamma`), which needs out - 1 fewer features. `near` asks for the solution closest to a given gamma
    instead of zero. `precondition` forces whitening on or off; by default it is used where features are far from
    isotropic. `memory` limits the bytes a method may use.

    Theory: giannou2023:thm-1, burkholz2024:thm-2.2, burkholz2024:thm-2.3, random_features:thm-2.1
    """
    operator = KhatriRao(left.detach().double(), right.detach().double())
    need_finite("left", left)
    need_finite("right", right)
    return solve_operator(
        operator, target, tolerance=tolerance, method=method, minimum_width=minimum_width, near=near,
        precondition=precondition, memory=memory, progress=progress,
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
    if storage not in ("dense", "seed"):
        raise ValueRangeError(f"storage needs to be 'dense' or 'seed'; got {storage!r}. 'seed' saves memory.")
    if minimum_width and features.rows != features.shape[0]:
        raise ValueRangeError(
            f"minimum_width needs the kernel in the first layer, where a row of left is an output; got {features.rows} "
            f"rows for {features.shape[0]} outputs. Draw the features with kernel='first'."
        )
    matrix = features.as_matrix(target.detach()).double()
    need_finite("target", matrix)
    if features.structure is not None:
        return _solve_structured(features, matrix, tolerance)
    if storage == "seed":
        operator = KhatriRao.regenerating(features, dtype=torch.float64)
    else:
        operator = KhatriRao(features.left().double(), features.right().double())
    return solve_operator(
        operator, matrix, tolerance=tolerance, minimum_width=minimum_width, memory=memory, progress=progress
    )


def solve_operator(
    operator: KhatriRao,
    target: Float[Tensor, "*batch out inp"],
    *,
    tolerance: float | None = None,
    method: str = "auto",
    minimum_width: bool = False,
    near: Float[Tensor, " feat"] | float | None = None,
    precondition: bool | None = None,
    memory: float | None = None,
    progress: Progress | None = None,
) -> Solution:
    """`solve` for an operator that exists already, stored or regenerating."""
    start = time.perf_counter()
    wanted = need_tolerance(tolerance)
    limit = memory_limit(memory)
    target = need_target(operator, target, near)
    need_enough(operator, tolerance, minimum_width)
    if minimum_width:
        need_one_target(target, near)
    climbing: dict[str, Any] = {
        "tolerance": wanted, "limit": limit, "method": method, "precondition": precondition, "progress": progress
    }  # fmt: skip
    with MemoryMeter() as meter:
        outputs, inputs = live(operator)
        if tolerance is not None:
            need_reached(operator, target, outputs, inputs)
        system, scaled, power = in_range(operator, target)
        if minimum_width:
            solution = _solve_minimum_width(system, scaled, climbing)
        else:
            attempt = _attempt(system, scaled, (outputs, inputs), _offset(operator, near, target, power), climbing)
            residual = relative_residual(system, scaled, attempt.gamma)
            solution = _as_solution(attempt, residual, wanted)
        solution = replace(solution, gamma=times_power(solution.gamma, power))
    solution = replace(solution, seconds=time.perf_counter() - start, peak_memory=meter.peak)
    return _judge(operator, solution, tolerance)


def _attempt(
    system: KhatriRao,
    target: Tensor,
    live: tuple[Tensor, Tensor],
    offset: Tensor | None,
    climbing: dict[str, Any],
) -> Attempt:
    """The best attempt on what the offset leaves, at the outputs and inputs that features reach."""
    outputs, inputs = live
    rest, tolerance = target, climbing["tolerance"]
    if offset is not None:
        rest = target - system.apply(offset)
        size, left = (torch.linalg.vector_norm(x, dim=(-2, -1)) for x in (target, rest))
        share = torch.where(size > 0, size, 1.0) / left.clamp_min(TINY)
        tolerance = max(TINY, tolerance * min(1.0, float(share.min())))
    if not bool(outputs.all() and inputs.all()):
        rest = rest[..., outputs, :][..., inputs]
    if not bool(rest.any()):  # also where no output or no input is left, and no system could be made
        gamma = target.new_zeros(*target.shape[:-2], system.n_features)
        attempt = Attempt(gamma, "none", 0, 1.0, "no feature sees anything left to solve", 0.0)
    else:
        system = system if rest.shape == target.shape else system.restrict(outputs, inputs)
        attempt = climb(system, rest, **{**climbing, "tolerance": tolerance})
    return attempt if offset is None else replace(attempt, gamma=attempt.gamma + offset)


def _as_solution(attempt: Attempt, residual: float, tolerance: float) -> Solution:
    a = attempt
    return Solution(a.gamma, residual, a.method, a.iterations, a.condition, 0.0, 0, a.reason, tolerance)


def _solve_minimum_width(operator: KhatriRao, target: Tensor, climbing: dict[str, Any]) -> Solution:
    """Gamma and one scale per output; zero rows of the target are switched off and leave the system."""
    wanted = climbing["tolerance"]
    on = target.abs().amax(-1) > 0
    if not bool(on.any()):
        gamma, output_gamma = target.new_zeros(operator.n_features), target.new_zeros(operator.out)
        reason = "every output of the target is zero and switched off"
        return Solution(gamma, 0.0, "none", 0, 1.0, 0.0, 0, reason, wanted, output_gamma=output_gamma)
    everything = torch.ones(operator.inp, dtype=torch.bool, device=operator.device)
    features = operator if bool(on.all()) else operator.restrict(on, everything)
    need_minimum_width(features)
    system = MinimumWidth(features, target[on])

    def attempt(tolerance: float) -> tuple[Solution, bool]:
        found = climb(system, target[on], **{**climbing, "tolerance": tolerance})
        output_gamma = torch.zeros(operator.out, dtype=target.dtype, device=target.device)
        output_gamma[on] = 1.0 / system.row_factors(found.gamma)
        gamma = found.gamma[: operator.n_features]
        made = output_gamma[:, None] * operator.apply(gamma)
        residual = float(torch.linalg.vector_norm(made - target) / torch.linalg.vector_norm(target))
        residual = math.inf if math.isnan(residual) else residual
        solution = replace(_as_solution(found, residual, wanted), gamma=gamma, output_gamma=output_gamma)
        return solution, found.left_over <= tolerance

    best, is_solved = attempt(wanted)
    inner = wanted
    while is_solved and not best.is_exact and math.isfinite(best.residual) and inner > TINY:
        # The scales of the outputs come after the system that was solved, and magnified what it left.
        inner = max(TINY, inner * wanted / (2 * best.residual))
        again, is_solved = attempt(inner)
        best = min(best, again, key=lambda solution: solution.residual)
    return best


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


def _judge(operator: KhatriRao, solution: Solution, tolerance: float | None) -> Solution:
    found = [solution.gamma] if solution.output_gamma is None else [solution.gamma, solution.output_gamma]
    if not all(bool(torch.isfinite(values).all()) for values in found):
        raise ValueRangeError(
            "gamma needs to fit into float64; it overflows because the features are too small for the target. "
            "Rescale the features or the target."
        )
    if solution.is_exact:
        return solution
    remedy = cure(operator.out, operator.inp, operator.n_features, solution.tolerance)
    solution = replace(solution, shortfall=f"residual {solution.residual:.1e}; {remedy}")
    if tolerance is not None:
        raise ToleranceError(
            f"solve needs a relative residual of {tolerance:.0e}; {solution.method} reached {solution.residual:.1e} "
            f"on {operator.equations} equations with {operator.n_features} features. Cure: {remedy}, or leave the "
            "tolerance out to take the best there is."
        )
    return solution


def _offset(operator: KhatriRao, near: Tensor | float | None, target: Tensor, power: int) -> Tensor | None:
    if near is None:
        return None
    offset = times_power(torch.as_tensor(near, dtype=target.dtype, device=target.device), -power)
    return offset.expand(*target.shape[:-2], operator.n_features)
