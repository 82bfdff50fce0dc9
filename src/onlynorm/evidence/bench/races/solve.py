"""Benchmark of the solver: every system of a grid, solved by onlynorm and by its rivals, in turns, on one thread.

Times are processor seconds: the best of several turns, after one that is not counted. A time means nothing alone, so
what is judged is the ratio to the fastest rival that meets the tolerance. Where features are more than equations there
are two contests: for the solution of least norm, and with `least_norm=False` for any solution, which *LU of the first N
features* gives as well. Tolerances:

- a solvable system: relative residual |M gamma - T| / |T| of 1e-10, in float64 on the features themselves;
- a system without a solution (fewer features than equations, or features of deficient rank): distance of M gamma from
  the least-squares fit of 1e-6, relative to |T|.

Memory is the peak above the level at which the features and the target are already in memory. It is measured from
`METERED` equations on, because the meter would disturb times of milliseconds.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onlynorm.display import Table
from onlynorm.evidence.bench.competitors import (
    ANY,
    GRID,
    LSMR,
    LU,
    OURS,
    PAPERS,
    SOLVERS,
    Solver,
    System,
    iteration_rate,
    least_squares_fit,
    predicted_seconds,
    product_rate,
    without_failure,
)
from onlynorm.evidence.harness import Goal, Race, RaceResult, Session, Sizes, number, setting
from onlynorm.evidence.timing import one_thread
from onlynorm.evidence.timing import race as take_turns
from onlynorm.memory import readable

TOLERANCE, FIT_TOLERANCE = 1e-10, 1e-6
SLOWER, LATER = 1.2, 1e-3
"""How much longer than the fastest rival a solve may take: a factor, or seconds where they are more."""
LIMIT, QUICK_LIMIT, LAST_LIMIT = 12.0, 3.0, 60.0
"""Seconds: a rival that is predicted to take longer is left out, and a row says so. The last is for LU and LSMR."""
WIDTH = 100
"""Columns of a terminal that the tables need."""
METERED = 2000
"""Equations from which memory is measured."""
LONG = 9000
"""Equations from which turns take so long that none is spent on warming up: every method ran on smaller systems."""
LONG_PATIENCE = 12.0
"""Seconds after which a method has no further turn on such a system."""
SMALL = 2500
"""Equations up to which a quick run takes a system. Of the families' larger ones it takes those of excess 1.25."""
FAMILIES = tuple(dict.fromkeys(system.family for system in GRID))
GROWING = ("square", "convolution")
"""Families whose systems differ in size only: the growth of the time and the rate of one iteration are theirs."""


@dataclass(frozen=True)
class Row:
    """One solver on one system; `ratio` is its time over ours (above one: we are faster).

    `error` is what is judged: the residual, or the distance from the least-squares fit; it is to be at most
    `tolerance`. `norm` is |gamma| over that of ours, which is the solution of least norm.
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


@dataclass(frozen=True)
class Duel:
    """Our row of one system beside the fastest rival that meets the tolerance (None if none does)."""

    ours: Row
    rival: Row | None

    @property
    def slowness(self) -> float:
        """Our time over the rival's, counted as 1.2 where we take one millisecond longer."""
        if self.rival is None:
            return 0.0
        return SLOWER * self.ours.seconds / max(SLOWER * self.rival.seconds, self.rival.seconds + LATER)

    @property
    def badness(self) -> tuple[float, float]:
        """How far we miss the tolerance, then how slow we are."""
        over = self.ours.error / self.ours.tolerance
        return 0.0 if over <= 1.0 else 1e300 if math.isnan(over) else over, self.slowness

    @property
    def is_met(self) -> bool:
        """Whether we are within the tolerance and not slower, if a rival is within it."""
        return self.rival is None or (self.ours.is_exact and self.slowness <= SLOWER)

    def __str__(self) -> str:
        place = f"{self.ours.system} at {self.ours.excess:g}"
        if self.rival is None:
            return f"{place}: no rival meets the tolerance"
        if not self.ours.is_exact:
            return f"{place}: error {self.ours.error:.1e}, {self.rival.method} {self.rival.error:.1e}"
        times = f"{_time(self.ours.seconds)}, {self.rival.method} {_time(self.rival.seconds)}"
        return f"{self.ours.seconds / self.rival.seconds:.2f} at {place}: {times}"


@dataclass(frozen=True)
class RateRow:
    """The time of two bare matrix products over that of an iteration that contains them."""

    system: str
    rate: float


@dataclass(frozen=True)
class SolveSizes(Sizes):
    """Families of systems and turns; a quick run takes small systems, and of the larger ones the goal against LU."""

    families: tuple[str, ...] = setting(FAMILIES, choices=FAMILIES, help=f"{', '.join(FAMILIES)}.")
    repeats: int = setting(20, help="Best of how many turns; slow methods have fewer.")


race = Race(
    "solve", "The solver beside LU, Cholesky, QR, lstsq and LSMR, on one thread.", SolveSizes,
    columns={"rows": {}, "rates": {}},
)  # fmt: skip


@race.measure
def measure(sizes: SolveSizes, session: Session) -> Iterator[tuple[str, list[Row] | RateRow]]:
    """Solves every system of the families with every solver, and measures the rate of an iteration."""
    systems = [s for s in GRID if s.family in sizes.families and (not sizes.quick or is_quick(s))]
    with one_thread():
        for system in systems:
            session.status(f"{system.name}, excess {system.excess:g}")
            rows = measure_system(system, repeats=sizes.repeats, quick=sizes.quick)
            for duel in (*duels(rows), *duels(rows, ANY)):
                session.log(str(duel))
            yield "rows", rows
        for name, shape in dict.fromkeys((s.name, s.shape) for s in systems if s.family in GROWING):
            yield "rates", RateRow(name, iteration_rate(shape))


def is_quick(system: System) -> bool:
    """Whether a quick run takes this system."""
    return system.equations <= SMALL or (system.equations <= 9216 and system.excess == 1.25)


def measure_system(system: System, *, repeats: int, quick: bool) -> list[Row]:
    """The rows of all solvers; those of rivals that would take too long have no time, and a note."""
    left, right, target = system.make()
    unfit = {LU: system.excess < 1.0, ANY: system.excess <= 1.0, PAPERS: system.family not in GROWING}
    solvers = {method: solver for method, solver in SOLVERS.items() if not unfit.get(method)}
    shape, rate, limit = (len(target), target.shape[1]), product_rate(), QUICK_LIMIT if quick else LIMIT
    seconds = {method: predicted_seconds(method, shape, len(right), rate) for method in solvers}
    late = [method for method in solvers if seconds[method] > (LAST_LIMIT if method in (LU, LSMR) else limit)]
    rows = race_solvers(
        system.name, system.excess, (left, right, target), {m: s for m, s in solvers.items() if m not in late},
        repeats=repeats, family=system.family, patience=0.25 if quick else 1.0,
    )  # fmt: skip
    return rows + [
        Row(system.name, target.numel(), system.excess, method, math.nan, math.nan, 0, math.nan, 0,
            f"{seconds[method]:.0f} s", system.family, tolerance=rows[0].tolerance)
        for method in late
    ]  # fmt: skip


def race_solvers(
    name: str, excess: float, system: tuple[Tensor, Tensor, Tensor], solvers: Mapping[str, Solver], *, repeats: int,
    family: str = "", patience: float = 1.0,
) -> list[Row]:  # fmt: skip
    """A row for each solver, ours among them, on one system (left, right, target)."""
    left, right, target = system
    n, size = target.numel(), torch.linalg.vector_norm(target)
    times = take_turns(
        {method: functools.partial(without_failure, solver, *system) for method, solver in solvers.items()},
        rounds=repeats, clock=time.process_time, metered=n >= METERED, warm_up=n < LONG,
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


# ------------------------------------------------------------------------------- results


def from_dict(plain: dict[str, Any]) -> RaceResult[SolveSizes]:
    """The run that --json printed, so that its tables can be made again."""
    missing = dict.fromkeys(("seconds", "ratio", "residual", "error", "norm"), math.nan)
    rows = [missing | {key: value for key, value in row.items() if value is not None} for row in plain["rows"]]
    rates = [("rates", RateRow(**row)) for row in plain["rates"]]
    return race.result([*(("rows", Row(**row)) for row in rows), *rates], SolveSizes(**plain["sizes"]))


def duels(rows: Sequence[Row], ours: str = OURS) -> list[Duel]:
    """One for each system: for the solution of least norm, or with ANY, against all rivals, for any solution."""
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


@race.goals
def goals(result: RaceResult[SolveSizes]) -> Iterator[Goal]:
    """Duels of every family, large systems, the rate of an iteration, and the growth of the time."""
    for family in dict.fromkeys(row.family for row in result.parts["rows"]):
        rows = [row for row in result.parts["rows"] if row.family == family]
        yield from duel_goal(f"{family}, least norm", duels(rows))
        yield from duel_goal(f"{family}, any solution", duels(rows, ANY))
    yield from large_goals(result)
    rates = {row.system: row.rate for row in result.parts["rates"]}
    if rates:
        worst = min(rates, key=lambda name: rates[name])
        yield Goal(
            f"an iteration, {len(rates)} shapes: 0.8 of the rate of bare matrix products, or more",
            f"worst {rates[worst]:.2f} ({worst})", rates[worst] >= 0.8,
        )  # fmt: skip
    ours, dense = (growth(result.parts["rows"], method) for method in (OURS, LU))
    if ours is not None:
        yield Goal("time grows like N^2 at excess 1.25", f"N^{ours:.2f}", ours <= 2.3)
    if dense is not None:
        yield Goal("LU's time grows like N^3", f"N^{dense:.2f}", dense >= 2.5)


def duel_goal(name: str, found: Sequence[Duel]) -> Iterator[Goal]:
    """One goal for all systems of a contest in which a rival meets the tolerance."""
    judged = [duel for duel in found if duel.rival is not None]
    if not judged:
        return
    missed = [duel for duel in judged if not duel.is_met]
    worst = max(judged, key=lambda duel: duel.badness)
    yield Goal(
        f"{name}, {len(judged)} systems: within the tolerance and at most {SLOWER} times as long as the fastest rival "
        "within it, or 1 ms longer",
        (f"{len(missed)} of {len(judged)} missed; " if missed else "") + f"worst {worst}", not missed,
    )  # fmt: skip


def large_goals(result: RaceResult[SolveSizes]) -> Iterator[Goal]:
    """Speed and memory beside LU, residual and memory where a dense matrix is too large, and square systems."""

    def pair(name: str, excess: float) -> Iterator[tuple[Row, Row]]:
        found = [result.find(system=name, excess=excess, method=method) for method in (OURS, LU)]
        return iter([(found[0], found[1])] if all(found) else [])

    for excess in (1.25, 1.5, 2.0):
        for ours, dense in pair("conv 3x3, 32 ch", excess):
            fraction = ours.memory / max(dense.memory, 1)
            yield Goal(
                f"32 channels, excess {excess:g}: 5 times faster than LU, 1/20 of its memory, residual 1e-10",
                f"{dense.seconds / ours.seconds:.1f} times faster, 1/{1 / max(fraction, 1e-9):.1f} of the memory, "
                f"residual {ours.residual:.1e}",
                dense.seconds >= 5 * ours.seconds and fraction <= 1 / 20 and ours.residual <= TOLERANCE,
            )
    for channels, excess, limit in ((64, 1.25, 1e9), (64, 1.1, 1e9), (100, 1.25, 3e9)):
        one = result.find(system=f"conv 3x3, {channels} ch", excess=excess, method=OURS)
        if one:
            yield Goal(
                f"{channels} channels, excess {excess}: residual 1e-10 within {readable(limit)}",
                f"residual {one.residual:.1e}, {readable(one.memory)}, {one.seconds:.0f} s",
                one.residual <= TOLERANCE and one.memory < limit,
            )
    for name in ("64 x 64", "conv 3x3, 32 ch"):
        for ours, dense in pair(name, 1.0):
            yield Goal(
                f"{ours.equations} equations, square: residual 1e-9, 0.7 of LU's time, 0.6 of its memory",
                f"residual {ours.residual:.1e} (LU {dense.residual:.1e}), {ours.seconds / dense.seconds:.2f} of the "
                f"time, {ours.memory / max(dense.memory, 1):.2f} of the memory",
                ours.residual <= 1e-9 and ours.seconds <= 0.7 * dense.seconds and ours.memory <= 0.6 * dense.memory,
            )


def growth(rows: Sequence[Row], method: str) -> float | None:
    """The exponent of the time in the number of equations at excess 1.25, from three systems or more."""
    found = [r for r in rows if r.family in GROWING and (r.method, r.excess) == (method, 1.25)]
    points = [(math.log(r.equations), math.log(r.seconds)) for r in found if math.isfinite(r.seconds)]
    x, y = np.array(points).reshape(-1, 2).T
    return float(np.polyfit(x, y, 1)[0]) if len(points) >= 3 else None


@race.tables
def tables(result: RaceResult[SolveSizes]) -> Iterator[Table]:
    """One table per family with a row per system, and one of what was left out."""
    for family in dict.fromkeys(row.family for row in result.parts["rows"]):
        rows = [row for row in result.parts["rows"] if row.family == family]
        yield _family_table(family, duels(rows) + duels(rows, ANY))
    left_out: dict[tuple[str, float], list[str]] = {}
    for row in result.parts["rows"]:
        if math.isnan(row.seconds):
            left_out.setdefault((row.system, row.excess), []).append(f"{row.method} ({row.note})")
    if left_out:
        cells = [(system, f"{excess:g}", "; ".join(words)) for (system, excess), words in left_out.items()]
        yield Table(("system", "excess", "left out: would take too long (predicted)"), cells, WIDTH)


def _family_table(family: str, duels: Sequence[Duel]) -> Table:
    is_metered = any(duel.ours.memory for duel in duels)
    columns = (family, "excess", "ours by", "time", "error", "rival", "time", "error", "ratio")
    rows = []
    for duel in duels:
        one, rival = duel.ours, duel.rival
        cells = (one.system, f"{one.excess:g}", one.note, _time(one.seconds), number(one.error, ".0e"))
        beside = ("none", "-", "-", "-")
        if rival is not None:
            ratio = f"{one.seconds / rival.seconds:.2f}{'' if duel.is_met else ' !'}"
            beside = (rival.method, _time(rival.seconds), number(rival.error, ".0e"), ratio)
        rows.append((*cells, *beside, *((readable(one.memory) if one.memory else "-",) if is_metered else ())))
    return Table((*columns, "memory") if is_metered else columns, rows, WIDTH)


def _time(seconds: float) -> str:
    if seconds < 0.9995e-3:
        return f"{1e6 * seconds:.0f} us"
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"
