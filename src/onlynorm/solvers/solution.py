"""`solve`: gamma from features and a target, by the method that suits them.

The walk: check the input -> scale it to the middle of the floating range -> `choose` a method -> run it -> measure
the residual in float64 on the features themselves -> if it fell short, climb to the next more robust method -> say
in words what happened.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from onlynorm.errors import ToleranceError, ValueRangeError
from onlynorm.features import Features
from onlynorm.solvers.choose import MAX_ITERATIONS, SMALL, Choice, choose, cure, krylov_memory
from onlynorm.solvers.closed_form import solve_closed_form
from onlynorm.solvers.direct import DirectResult, solve_cholesky, solve_lu, solve_svd
from onlynorm.solvers.khatri_rao import KhatriRao, Operator, times_power
from onlynorm.solvers.krylov import Progress, anisotropy, solve_krylov
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

TINY = torch.finfo(torch.float64).tiny
ANISOTROPIC = 2.0
"""Whitening pays for itself where it shortens the iteration by about this factor."""


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
    with MemoryMeter() as meter:
        outputs, inputs = live(operator)
        if tolerance is not None:
            need_reached(operator, target, outputs, inputs)
        system, scaled, power = in_range(operator, target)
        if minimum_width:
            solution = _solve_minimum_width(system, scaled, wanted, method, limit, progress)
        else:
            offset = _offset(operator, near, target, power)
            gamma = target.new_zeros(*target.shape[:-2], operator.n_features) if offset is None else offset
            rest = scaled - system.apply(gamma)
            sizes = [torch.linalg.vector_norm(x, dim=(-2, -1)).clamp_min(TINY) for x in (scaled, rest)]
            goal = wanted * min(1.0, float((sizes[0] / sizes[1]).min()))  # of what is left after the offset
            if not bool(outputs.all() and inputs.all()):
                rest = rest[..., outputs, :][..., inputs]
            if bool(rest.any()):
                alive = system if rest.shape == scaled.shape else system.restrict(outputs, inputs)
                solution = _climb(alive, rest, max(goal, TINY), method, precondition, limit, progress)
                gamma = gamma + solution.gamma
            else:
                solution = Solution(
                    gamma, 0.0, "none", 0, 1.0, 0.0, 0, "no feature sees anything left to solve", wanted
                )
            residual = _residual(system, scaled, gamma)
            solution = replace(solution, gamma=gamma, residual=residual, tolerance=wanted)
        solution = replace(solution, gamma=times_power(solution.gamma, power))
    solution = replace(solution, seconds=time.perf_counter() - start, peak_memory=meter.peak)
    return _judge(operator, solution, tolerance)


def _climb(
    operator: Operator,
    target: Tensor,
    wanted: float,
    method: str,
    precondition: bool | None,
    limit: int,
    progress: Progress | None,
) -> Solution:
    """The chosen method, then more robust ones until the tolerance is met or none is left."""
    block = operator.block if isinstance(operator, KhatriRao) and not operator.is_stored else None
    choice = choose(
        operator.out, operator.inp, operator.n_features, tolerance=wanted, memory=limit, method=method, block=block
    )
    solution = _run(operator, target, choice, wanted, precondition, limit, progress)
    if method != "auto":
        return solution or _failed(operator, target, choice, wanted)
    small = operator.equations <= SMALL and operator.n_features <= 4 * SMALL
    svd_fits = small and 32 * operator.equations * operator.n_features <= limit
    double_lu = operator.n_features == operator.equations and 9 * operator.equations**2 <= limit
    ladder = [("lu64", double_lu), ("krylov", True), ("svd", svd_fits)]
    for name, can in ladder:
        left = math.inf if solution is None else _left_over(operator, target, solution.gamma)
        singular = small and solution is not None and _is_singular(solution)
        if not can or (left <= wanted and not singular) or (solution is not None and solution.method == name):
            continue
        other = _run(operator, target, replace(choice, method=name), wanted, precondition, limit, progress)
        if other is None:
            continue
        now = _left_over(operator, target, other.gamma)
        if now < (1.0 if name == "svd" else 0.5) * left or (singular and now <= wanted):
            why = "found a singular matrix" if singular else f"left {left:.1e}"
            why = "was not positive definite" if solution is None else why
            solution = replace(other, reason=f"{choice.method} {why}, so {name} took over")
    return solution or _failed(operator, target, choice, wanted)


def _is_singular(solution: Solution) -> bool:
    """Whether LU met a matrix that is singular to its precision: its answer then need not be the one of least norm."""
    limit = {"lu": torch.float32, "lu64": torch.float64}.get(solution.method)
    return limit is not None and not solution.condition * torch.finfo(limit).eps < 1.0


def _run(
    operator: Operator,
    target: Tensor,
    choice: Choice,
    wanted: float,
    precondition: bool | None,
    limit: int,
    progress: Progress | None,
) -> Solution | None:
    """One method on one system; None where it cannot work."""
    if choice.method == "krylov":
        whiten = precondition if precondition is not None else _is_anisotropic(operator)
        store = krylov_memory(operator.out, operator.inp, operator.n_features) <= limit
        found = solve_krylov(
            operator, target, tolerance=wanted, max_iterations=MAX_ITERATIONS, whiten=whiten, store=store,
            progress=progress,
        )  # fmt: skip
        return _measured(operator, target, choice, wanted, found.gamma, found.iterations, found.condition)
    direct: DirectResult | None
    if choice.method == "cholesky":
        direct = solve_cholesky(operator, target, tolerance=wanted)
    elif choice.method == "svd":
        direct = solve_svd(operator, target)
    else:
        dtype = torch.float64 if choice.method == "lu64" else torch.float32
        direct = solve_lu(operator, target, tolerance=wanted, dtype=dtype)
    if direct is None:
        return None
    return _measured(operator, target, choice, wanted, direct.gamma, direct.iterations, direct.condition)


def _measured(
    operator: Operator,
    target: Tensor,
    choice: Choice,
    wanted: float,
    gamma: Tensor,
    iterations: int,
    condition: float,
) -> Solution:
    residual = _residual(operator, target, gamma)
    return Solution(gamma, residual, choice.method, iterations, condition, 0.0, 0, choice.reason, wanted)


def _solve_minimum_width(
    operator: KhatriRao, target: Tensor, wanted: float, method: str, limit: int, progress: Progress | None
) -> Solution:
    """Gamma and one scale per output; zero rows of the target are switched off and leave the system."""
    on = target.abs().amax(-1) > 0
    if not bool(on.any()):
        gamma, output_gamma = target.new_zeros(operator.n_features), target.new_zeros(operator.out)
        reason = "every output of the target is zero and switched off"
        return Solution(gamma, 0.0, "none", 0, 1.0, 0.0, 0, reason, wanted, output_gamma=output_gamma)
    everything = torch.ones(operator.inp, dtype=torch.bool, device=operator.device)
    features = operator if bool(on.all()) else operator.restrict(on, everything)
    need_minimum_width(features)
    system = MinimumWidth(features, target[on])
    solution = _climb(system, target[on], wanted, method, None, limit, progress)
    output_gamma = torch.zeros(operator.out, dtype=target.dtype, device=target.device)
    output_gamma[on] = 1.0 / system.row_factors(solution.gamma)
    gamma = solution.gamma[: operator.n_features]
    made = output_gamma[:, None] * operator.apply(gamma)
    residual = float(torch.linalg.vector_norm(made - target) / torch.linalg.vector_norm(target))
    residual = math.inf if math.isnan(residual) else residual
    return replace(solution, gamma=gamma, output_gamma=output_gamma, residual=residual)


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


def _failed(operator: Operator, target: Tensor, choice: Choice, wanted: float) -> Solution:
    gamma = target.new_zeros(*target.shape[:-2], operator.n_features)
    reason = f"{choice.method} cannot factor this system"
    return Solution(gamma, 1.0, choice.method, 0, math.inf, 0.0, 0, reason, wanted)


def _residual(operator: Operator, target: Tensor, gamma: Tensor) -> float:
    """The worst relative residual in the batch, in float64."""
    rest = torch.linalg.vector_norm(operator.apply(gamma) - target, dim=(-2, -1))
    size = torch.linalg.vector_norm(target, dim=(-2, -1))
    worst = torch.where(size > 0, rest / size.clamp_min(TINY), rest)
    return float(worst.nan_to_num(nan=math.inf).max())


def _left_over(operator: Operator, target: Tensor, gamma: Tensor) -> float:
    """What a better method could still remove: the residual or, with too few features, the part that features see."""
    if operator.n_features >= operator.equations:
        return _residual(operator, target, gamma)
    rest = torch.linalg.vector_norm(operator.transpose(operator.apply(gamma) - target), dim=-1)
    size = torch.linalg.vector_norm(operator.transpose(target), dim=-1).clamp_min(TINY)
    return float((rest / size).nan_to_num(nan=math.inf).max())


def _is_anisotropic(operator: Operator) -> bool:
    if not isinstance(operator, KhatriRao) or operator.n_features < operator.equations:
        return False
    return anisotropy(operator) > ANISOTROPIC


def _offset(operator: KhatriRao, near: Tensor | float | None, target: Tensor, power: int) -> Tensor | None:
    if near is None:
        return None
    offset = times_power(torch.as_tensor(near, dtype=target.dtype, device=target.device), -power)
    return offset.expand(*target.shape[:-2], operator.n_features)
