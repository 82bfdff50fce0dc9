"""`align`: the order of a target's rows in which too few features miss least of it.

The rows of a layer are its neurons, and a network does not change if they are permuted together with the columns of the
next layer. So the order is free, and where there are fewer features than equations some orders fit much better.

| method | what it does | where |
| --- | --- | --- |
| greedy | one pass of best swaps, as the paper describes | everywhere |
| two_opt | best swaps from the greedy order until none helps | everywhere |
| random | the best of many random orders | everywhere |
| tabu | a walk of best swaps that may not turn back, from the two_opt order | everywhere; the best we know |
| assignment | the optimum, as a linear assignment problem | features that feed one output each, as sparse id_cond |

Theory: random_features:thm-4.1
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from onlynorm.alignment.directions import Directions, PerOutput, find_directions
from onlynorm.alignment.objective import Objective, Order, objective_for
from onlynorm.alignment.search import best_of_random, greedy, tabu_search, two_opt
from onlynorm.errors import ShapeError, ValueRangeError
from onlynorm.features.streams import check_seed
from onlynorm.validate import as_real, need_choice, need_instance, need_number

METHODS = ("greedy", "two_opt", "random", "tabu", "assignment")
N_RANDOM = 1000
MAX_STEPS, STEPS_PER_ROW = 1000, 20
"""How long tabu search walks; at 50 rows five times as many steps gain next to nothing."""


@dataclass(frozen=True)
class Attempt:
    """What one method reached: the missed energy, and its seconds with those of any start it had to make first."""

    method: str
    objective: float
    seconds: float


@dataclass(frozen=True, eq=False)
class Alignment:
    """An order of the target's rows: `target[permutation]` is what the features come nearest to.

    `objective` is the least |left diag(gamma) right - target[permutation]|^2 over gamma, `unaligned` the same for the
    target as it came. `seconds` counts everything, `preparation` of it what belongs to the features alone.
    """

    permutation: Int[Tensor, " out"]
    objective: float
    unaligned: float
    energy: float
    n_missed: int
    method: str
    is_optimal: bool
    attempts: tuple[Attempt, ...]
    preparation: float
    seconds: float

    @property
    def error(self) -> float:
        """The missed part of the aligned target, as a share of its norm."""
        return math.sqrt(self.objective / self.energy) if self.energy else 0.0

    @property
    def unaligned_error(self) -> float:
        """The same for the target as it came."""
        return math.sqrt(self.unaligned / self.energy) if self.energy else 0.0

    def __str__(self) -> str:
        tried = ", ".join(f"{a.method} {a.objective:.3g} in {a.seconds:.2g} s" for a in self.attempts)
        if not self.n_missed:
            return f"{len(self.permutation)} rows, nothing to align: the features reach every target"
        best = ", which is the optimum" if self.is_optimal else ""
        return (
            f"{len(self.permutation)} rows aligned by {self.method}{best}: relative error {self.error:.3g} instead of "
            f"{self.unaligned_error:.3g}, {self.n_missed} directions missed, {self.seconds:.2g} s "
            f"({self.preparation:.2g} s of it for the features)\n"
            f"  missed energy: as it came {self.unaligned:.3g}, {tried}"
        )


def align(
    target: Float[Tensor, "out inp"],
    left: Float[Tensor, "out feat"],
    right: Float[Tensor, "feat inp"],
    *,
    method: str = "best",
    seed: int = 0,
) -> Alignment:
    """The order of the target's rows in which these features miss least of it, as far as the method finds it.

    `best` tries all methods that fit and keeps the lowest; any name of the table above asks for one. Nothing can be
    gained where the features reach everything. Theory: random_features:thm-4.1
    """
    start = time.perf_counter()
    target, left, right = _need_matrix("target", target), _need_matrix("left", left), _need_matrix("right", right)
    if left.ndim != 2 or right.ndim != 2 or tuple(target.shape) != (left.shape[0], right.shape[-1]):
        raise ShapeError(
            "align needs target (out, inp), left (out, feat) and right (feat, inp); got "
            f"{tuple(target.shape)}, {tuple(left.shape)} and {tuple(right.shape)}. Pass a convolution's weight as "
            "weight.flatten(1), with the kernel in the first layer."
        )
    _need_method(method)
    seed = check_seed(seed)
    directions = find_directions(left.detach(), right.detach())
    return align_within(target, directions, method=method, seed=seed, preparation=time.perf_counter() - start)


def align_within(
    target: Float[Tensor, "out inp"],
    directions: Directions | PerOutput,
    *,
    method: str = "best",
    seed: int = 0,
    preparation: float = 0.0,
) -> Alignment:
    """As `align`, for directions that were found before: many targets for the same features cost little each."""
    from scipy.optimize import linear_sum_assignment

    start = time.perf_counter()
    target = _need_matrix("target", target)
    need_instance("align_within", directions, (Directions, PerOutput), cure="Pass what find_directions returns.")
    preparation = need_number("preparation", preparation, low=0.0, cure="It is in seconds.")
    _need_method(method)
    seed = check_seed(seed)
    if tuple(target.shape) != directions.shape:
        raise ShapeError(
            f"align needs a target of the shape {directions.shape} that the features are for; got "
            f"{tuple(target.shape)}. Find the directions of features for this target."
        )
    target = target.detach().double()
    if not bool(target.isfinite().all()):
        raise ValueRangeError("align needs a finite target; got a NaN or an infinity. Look at the weights it is from.")
    if method == "assignment" and not isinstance(directions, PerOutput):
        raise ValueRangeError(
            "assignment needs features that feed one output each, as sparse id_cond, so that rows do not meddle with "
            "each other; got features that feed several. Leave method out, or pass tabu."
        )
    energy, identity = float(target.square().sum()), np.arange(len(target))
    if not math.isfinite(energy) or (energy < np.finfo(np.float64).tiny and bool(target.any())):
        raise ValueRangeError(
            "align needs a target whose sum of squares float64 can hold; got a largest entry of "
            f"{float(target.abs().max()):.1e}. Divide the target by it: the order does not change."
        )
    attempts: dict[str, tuple[Order, Attempt]] = {}
    if isinstance(directions, PerOutput) and method in ("best", "assignment"):
        costs = directions.costs(target).cpu().numpy()
        order = np.asarray(linear_sum_assignment(costs)[1])
        unaligned = float(costs.diagonal().sum())
        reached = Attempt("assignment", float(costs[identity, order].sum()), time.perf_counter() - start)
        attempts["assignment"] = order, reached
    else:
        objective = objective_for(target, directions)
        unaligned = objective.missed(identity)
        if directions.n_missed:
            attempts = _attempts(objective, METHODS[:-1] if method == "best" else (method,), seed)
    winner = min(attempts, key=lambda name: attempts[name][1].objective, default="none")
    order, lowest = identity, unaligned
    if attempts and attempts[winner][1].objective < unaligned:
        order, lowest = attempts[winner][0], attempts[winner][1].objective
    return Alignment(
        permutation=torch.from_numpy(order).to(target.device),
        objective=lowest,
        unaligned=unaligned,
        energy=energy,
        n_missed=directions.n_missed,
        method=winner,
        is_optimal=winner == "assignment" or not directions.n_missed,
        attempts=tuple(attempt for _, attempt in attempts.values()),
        preparation=preparation,
        seconds=preparation + time.perf_counter() - start,
    )


def _attempts(objective: Objective, methods: tuple[str, ...], seed: int) -> dict[str, tuple[Order, Attempt]]:
    """The orders of these methods; those that start from another method's order make it, and take its time too."""
    orders: dict[str, Order] = {}
    n_steps = min(MAX_STEPS, STEPS_PER_ROW * objective.n_rows)
    ways: dict[str, Callable[[], Order]] = {
        "greedy": lambda: greedy(objective),
        "two_opt": lambda: two_opt(objective, order_of("greedy")),
        "random": lambda: best_of_random(objective, n_tries=N_RANDOM, seed=seed),
        "tabu": lambda: tabu_search(objective, order_of("two_opt"), n_steps=n_steps, seed=seed),
    }

    def order_of(name: str) -> Order:
        if name not in orders:
            orders[name] = ways[name]()
        return orders[name]

    found = {}
    for method in methods:
        start = time.perf_counter()
        order = order_of(method)
        found[method] = order, Attempt(method, objective.missed(order), time.perf_counter() - start)
    return found


def _need_matrix(name: str, value: Tensor) -> Tensor:
    return as_real(f"align: {name}", value, cure="Pass a real matrix.")


def _need_method(method: str) -> None:
    need_choice("method", method, ("best", *METHODS))
