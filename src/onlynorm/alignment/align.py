"""`align`: the permutation of a target's rows with the smallest error for given features.

The rows of a layer are its neurons. Permuting them together with the columns of the next layer does not change the
network. With fewer features than equations, some permutations have a much smaller error than others.

| method | description | applies to |
| --- | --- | --- |
| greedy | one pass of best swaps, as in the paper | all features |
| two_opt | best swaps from the greedy order until none helps | all features |
| random | the best of many random orders | all features |
| tabu | tabu search from the two_opt order | all features; usually the best |
| assignment | the optimum, as a linear assignment problem | features with one output each, such as sparse id_cond |

Theory: random_features:thm-4.1
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from onlynorm.alignment.directions import Directions, PerOutput, find_directions
from onlynorm.alignment.objective import Objective, Order, objective_for
from onlynorm.alignment.search import best_of_random, greedy, tabu_search, two_opt
from onlynorm.display import Curve, Figure, Panel, Result, ShownResult, Table, View
from onlynorm.errors import ShapeError, ValueRangeError
from onlynorm.features.streams import check_seed
from onlynorm.validate import as_real, need_choice, need_instance, need_number

METHODS = ("greedy", "two_opt", "random", "tabu", "assignment")
N_RANDOM = 1000
MAX_STEPS, STEPS_PER_ROW = 1000, 20
"""Steps of tabu search; at 50 rows five times as many steps hardly reduce the error."""


@dataclass(frozen=True)
class Attempt(Result):
    """The result of one method: the missed energy, and the seconds including those of its initial order."""

    method: str
    objective: float
    seconds: float


@dataclass(frozen=True, eq=False, repr=False)
class Alignment(ShownResult):
    """A permutation of the target's rows, such that the features approximate `target[permutation]` best.

    `objective` is the minimum of |left diag(gamma) right - target[permutation]|^2 over gamma, `unaligned` the same for
    the original target. `preparation` is the part of `seconds` that depends on the features only.
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
        """The relative error of the aligned target."""
        return math.sqrt(self.objective / self.energy) if self.energy else 0.0

    @property
    def unaligned_error(self) -> float:
        """The relative error of the original target."""
        return math.sqrt(self.unaligned / self.energy) if self.energy else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain data, with the permutation as a list."""
        found = {"permutation": self.permutation.tolist(), "error": self.error, "unaligned_error": self.unaligned_error}
        return super().as_dict() | found

    def plot(self) -> Figure:
        """The missed energy of each method and of the original order."""
        if not self.attempts or not self.n_missed:
            return Figure()
        names = [one.method for one in self.attempts]
        ends = (0.5, len(names) + 0.5)
        return Figure(
            [
                Curve("after the method", range(1, len(names) + 1), [a.objective for a in self.attempts], "bars"),
                Curve("original order", ends, (self.unaligned,) * 2, style="law"),
            ],
            [Panel("", "Missed energy", y_label="squared error", x_names=names)],
        )

    def view(self) -> View:
        """Errors before and after alignment, and the methods tried."""
        columns = ("method", "missed energy", "seconds")
        rows = [(one.method, f"{one.objective:.4g}", f"{one.seconds:.2g}") for one in self.attempts]
        return View(
            f"{len(self.permutation):,} rows aligned by {self.method}", "optimal" if self.is_optimal else "", "good",
            facts={
                "relative error": self.error, "relative error of the original order": self.unaligned_error,
                "directions missed": self.n_missed, "seconds": self.seconds,
            },
            tables={"Methods": Table(columns, rows)},
        )  # fmt: skip

    def __str__(self) -> str:
        tried = ", ".join(f"{a.method} {a.objective:.3g} in {a.seconds:.2g} s" for a in self.attempts)
        if not self.n_missed:
            return f"{len(self.permutation)} rows, nothing to align: the features reach every target"
        best = ", which is the optimum" if self.is_optimal else ""
        return (
            f"{len(self.permutation)} rows aligned by {self.method}{best}: relative error {self.error:.3g} instead of "
            f"{self.unaligned_error:.3g}, {self.n_missed} directions missed, {self.seconds:.2g} s "
            f"({self.preparation:.2g} s for the features)\n"
            f"  missed energy: original order {self.unaligned:.3g}, {tried}"
        )


def align(
    target: Float[Tensor, "out inp"],
    left: Float[Tensor, "out feat"],
    right: Float[Tensor, "feat inp"],
    *,
    method: str = "best",
    seed: int = 0,
) -> Alignment:
    """The best permutation of the target's rows for these features that the method finds.

    "best" runs all applicable methods and returns the result with the smallest error; other names select one method of
    the table above. If the features reach every target, nothing is permuted. Theory: random_features:thm-4.1

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> generator = torch.Generator().manual_seed(0)
        >>> target = torch.randn(6, 8, generator=generator).double()
        >>> features = on.draw("he_normal", (6, 8), n_features=40)  # fewer than the 48 equations
        >>> order = on.align(target, features.left(), features.right())
        >>> sorted(order.permutation.tolist())
        [0, 1, 2, 3, 4, 5]
        >>> order.error < order.unaligned_error
        True
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
    """`align` with precomputed directions, for many targets with the same features.

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> from onlynorm.alignment import align_within, find_directions
        >>> generator = torch.Generator().manual_seed(0)
        >>> target = torch.randn(6, 8, generator=generator).double()
        >>> features = on.draw("he_normal", (6, 8), n_features=40)
        >>> directions = find_directions(features.left(), features.right())
        >>> order = align_within(target, directions, method="greedy")
        >>> sorted(order.permutation.tolist())
        [0, 1, 2, 3, 4, 5]
    """
    from scipy.optimize import linear_sum_assignment

    start = time.perf_counter()
    target = _need_matrix("target", target)
    need_instance("align_within", directions, (Directions, PerOutput), cure="Pass the result of find_directions.")
    preparation = need_number("preparation", preparation, low=0.0, cure="It is in seconds.")
    _need_method(method)
    seed = check_seed(seed)
    if tuple(target.shape) != directions.shape:
        raise ShapeError(
            f"align needs a target of the shape {directions.shape} of the features; got {tuple(target.shape)}. Call "
            "find_directions with features for this target."
        )
    target = target.detach().double()
    if not bool(target.isfinite().all()):
        raise ValueRangeError("align needs a finite target; got NaN or infinity. Check the weights.")
    if method == "assignment" and not isinstance(directions, PerOutput):
        raise ValueRangeError(
            "assignment needs features with one output each, such as sparse id_cond; got features with several. Leave "
            "method out, or pass tabu."
        )
    energy, identity = float(target.square().sum()), np.arange(len(target))
    if not math.isfinite(energy) or (energy < np.finfo(np.float64).tiny and bool(target.any())):
        raise ValueRangeError(
            "align needs a target whose sum of squares is in the range of float64; got a largest entry of "
            f"{float(target.abs().max()):.1e}. Divide the target by it: the permutation does not change."
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
    """The orders of these methods; the time of an initial order is included."""
    orders: dict[str, Order] = {}
    n_steps = min(MAX_STEPS, STEPS_PER_ROW * objective.n_rows)
    searches: dict[str, Callable[[], Order]] = {
        "greedy": lambda: greedy(objective),
        "two_opt": lambda: two_opt(objective, order_of("greedy")),
        "random": lambda: best_of_random(objective, n_tries=N_RANDOM, seed=seed),
        "tabu": lambda: tabu_search(objective, order_of("two_opt"), n_steps=n_steps, seed=seed),
    }

    def order_of(name: str) -> Order:
        if name not in orders:
            orders[name] = searches[name]()
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
