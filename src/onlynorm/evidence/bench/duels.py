"""Comparison of solvers on one system: a row for each, and ours against the fastest competitor.

The solvers run alternately. Times are the best of several repeats, after one warm-up run. Tolerances:

- a solvable system: relative residual |M gamma - T| / |T| of 1e-10, in float64 on the features themselves;
- a system without a solution (fewer features than equations, or features of deficient rank): distance of M gamma from
  the least-squares fit of 1e-6, relative to |T|.

Memory is the peak without the features and the target. It is measured from `METERED` equations on, because measuring
it would change times of milliseconds.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onlynorm.display import Table
from onlynorm.evidence.bench.competitors import ANY, LU, OURS, Solver, least_squares_fit, without_failure
from onlynorm.evidence.bench.systems import System
from onlynorm.evidence.cache import OnMessage
from onlynorm.evidence.harness import Goal, number
from onlynorm.evidence.race import Column, time_text
from onlynorm.evidence.timing import one_thread, race
from onlynorm.memory import readable

TOLERANCE, FIT_TOLERANCE = 1e-10, 1e-6
SLOWER, LATER = 1.2, 1e-3
"""How much longer than the fastest competitor a solve may take: a factor, or seconds if that is more."""
WIDTH = 100
"""Width of the tables in terminal columns."""
METERED = 2000
"""Number of equations from which memory is measured."""
LONG = 9000
"""Number of equations from which warm-up runs are omitted: every method has already run on smaller systems."""
LONG_PATIENCE = 12.0
"""Seconds after which a method is not repeated on such a system."""


@dataclass(frozen=True)
class Row:
    """One solver on one system; `ratio` is its time divided by ours (above one: we are faster).

    `error` is the residual, or the distance from the least-squares fit; it should be at most `tolerance`. `norm` is
    |gamma| divided by that of our solution, which has the least norm.
    """

    system: str
    equations: int
    excess: float
    method: str
    seconds: float
    ratio: float
    memory: int
    residual: float
    iterations: int
    note: str = ""
    family: str = ""
    error: float = math.nan
    tolerance: float = TOLERANCE
    norm: float = math.nan

    @property
    def is_exact(self) -> bool:
        """Whether the error is within the tolerance."""
        return self.error <= self.tolerance


ROW_COLUMNS: dict[str, Column] = {
    "system": "system", "excess": "excess:g", "method": "method", "seconds": "seconds:.3g", "times ours": "ratio:.3g",
    "extra memory": "memory:bytes", "residual": "residual:.1e", "iterations": lambda row: str(row.iterations or "-"),
    "note": "note",
}  # fmt: skip
"""Columns of the table with a row per solver."""


@dataclass(frozen=True)
class Duel:
    """Our row of one system and that of the fastest competitor within the tolerance (None if there is none)."""

    ours: Row
    rival: Row | None

    @property
    def slowness(self) -> float:
        """Our time divided by the competitor's, counted as 1.2 if we take one millisecond longer."""
        if self.rival is None:
            return 0.0
        return SLOWER * self.ours.seconds / max(SLOWER * self.rival.seconds, self.rival.seconds + LATER)

    @property
    def badness(self) -> tuple[float, float]:
        """The factor by which we miss the tolerance, then the ratio of times."""
        over = self.ours.error / self.ours.tolerance
        return 0.0 if over <= 1.0 else 1e300 if math.isnan(over) else over, self.slowness

    @property
    def is_met(self) -> bool:
        """Whether we are within the tolerance and not slower, if a competitor is within it."""
        return self.rival is None or (self.ours.is_exact and self.slowness <= SLOWER)

    def __str__(self) -> str:
        place = f"{self.ours.system} at {self.ours.excess:g}"
        if self.rival is None:
            return f"{place}: no competitor meets the tolerance"
        if not self.ours.is_exact:
            return f"{place}: error {self.ours.error:.1e}, {self.rival.method} {self.rival.error:.1e}"
        times = f"{time_text(self.ours.seconds)}, {self.rival.method} {time_text(self.rival.seconds)}"
        return f"{self.ours.seconds / self.rival.seconds:.2f} at {place}: {times}"


def race_solvers(
    name: str, excess: float, system: tuple[Tensor, Tensor, Tensor], solvers: Mapping[str, Solver], *, repeats: int,
    family: str = "", patience: float = 1.0,
) -> list[Row]:  # fmt: skip
    """A row for each solver, including ours, on one system (left, right, target)."""
    left, right, target = system
    n, size = target.numel(), torch.linalg.vector_norm(target)
    times = race(
        {method: functools.partial(without_failure, solver, *system) for method, solver in solvers.items()},
        rounds=repeats, metered=n >= METERED, warm_up=n < LONG,
        patience=patience if n < LONG else max(patience, LONG_PATIENCE),
    )  # fmt: skip
    gammas = {method: timing.result.gamma.double() for method, timing in times.items()}
    made = {m: (left[:, : len(g)].double() * g) @ right[: len(g)].double() for m, g in gammas.items()}

    def distances(goal: Tensor) -> dict[str, float]:
        return {method: float(torch.linalg.vector_norm(one - goal) / size) for method, one in made.items()}

    errors = residuals = distances(target)
    tolerance, is_solved = TOLERANCE, any(residual <= 100 * TOLERANCE for residual in residuals.values())
    if len(right) < n or (n < LONG and not is_solved):
        errors, tolerance = distances(least_squares_fit(left, right, target)), FIT_TOLERANCE
    norm = torch.linalg.vector_norm(gammas[OURS])
    return [
        Row(
            name, n, excess, method, timing.seconds, timing.seconds / times[OURS].seconds, timing.memory,
            residuals[method], timing.result.iterations, timing.result.note, family, errors[method], tolerance,
            float(torch.linalg.vector_norm(gammas[method]) / norm),
        )
        for method, timing in times.items()
    ]  # fmt: skip


def race_layers(
    network: nn.Module, names: Sequence[str], excesses: Sequence[float], solvers: Mapping[str, Solver], *,
    repeats: int = 3, status: OnMessage = lambda _: None,
) -> list[Row]:  # fmt: skip
    """A row for each solver on each of these layers of a network, with he_normal features, on one thread."""
    rows = []
    for name, excess in itertools.product(names, excesses):
        status(f"{name} at excess {excess}: {' and '.join(solvers)}")
        weight = network.get_parameter(f"{name}.weight").detach().double()
        left, right, _ = System("convolution", name, tuple(weight.shape), excess).make()
        with one_thread():
            rows += race_solvers(name, excess, (left, right, weight.flatten(1)), solvers, repeats=repeats)
    return rows


def duels(rows: Sequence[Row], ours: str = OURS) -> list[Duel]:
    """One per system: for the solution of least norm, or with ANY for any solution, against all competitors."""
    systems: dict[tuple[str, str, float], list[Row]] = {}
    for row in rows:
        systems.setdefault((row.family, row.system, row.excess), []).append(row)
    made = []
    for group in systems.values():
        able = [r for r in group if r.method not in (OURS, ANY) and r.is_exact and math.isfinite(r.seconds)]
        rivals = [r for r in able if ours == ANY or r.method != LU or r.excess <= 1.0]
        rival = min(rivals, key=lambda row: row.seconds, default=None)
        made += [Duel(row, rival) for row in group if row.method == ours]
    return made


def duel_goal(name: str, found: Sequence[Duel]) -> Iterator[Goal]:
    """One goal for all systems in which a competitor meets the tolerance."""
    judged = [duel for duel in found if duel.rival is not None]
    if not judged:
        return
    missed = [duel for duel in judged if not duel.is_met]
    worst = max(judged, key=lambda duel: duel.badness)
    yield Goal(
        f"{name}, {len(judged)} systems: within the tolerance, at most {SLOWER} times the time of the fastest "
        "competitor within it, or 1 ms longer",
        (f"{len(missed)} of {len(judged)} missed; " if missed else "") + f"worst {worst}", not missed,
    )  # fmt: skip


def duel_table(family: str, found: Sequence[Duel]) -> Table:
    """A table with a row per duel; with our memory if it was measured."""
    is_metered = any(duel.ours.memory for duel in found)
    columns = (family, "excess", "ours by", "time", "error", "rival", "time", "error", "ratio")
    rows = []
    for duel in found:
        one, rival = duel.ours, duel.rival
        cells = (one.system, f"{one.excess:g}", one.note, time_text(one.seconds), number(one.error, ".0e"))
        beside = ("none", "-", "-", "-")
        if rival is not None:
            ratio = f"{one.seconds / rival.seconds:.2f}{'' if duel.is_met else ' !'}"
            beside = (rival.method, time_text(rival.seconds), number(rival.error, ".0e"), ratio)
        rows.append((*cells, *beside, *((readable(one.memory) if one.memory else "-",) if is_metered else ())))
    return Table((*columns, "memory") if is_metered else columns, rows, WIDTH)
