"""Benchmark of the solver: every system of a grid, solved by onlynorm and by its competitors, on one thread.

Times are compared by their ratio to the fastest competitor that meets the tolerance (see `duels`). With more features
than equations there are two comparisons: for the solution of least norm, and with `least_norm=False` for any solution,
such as that of *LU of the first N features*.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onlynorm.display import Table
from onlynorm.evidence.bench.competitors import (
    ANY,
    LSMR,
    LU,
    OURS,
    PAPERS,
    SOLVERS,
    iteration_rate,
    predicted_seconds,
    product_rate,
)
from onlynorm.evidence.bench.duels import TOLERANCE, WIDTH, Row, duel_goal, duel_table, duels, race_solvers
from onlynorm.evidence.bench.systems import FAMILIES, GRID, GROWING, System
from onlynorm.evidence.harness import Goal, Session, Sizes, setting
from onlynorm.evidence.race import Race, RaceResult
from onlynorm.evidence.timing import one_thread
from onlynorm.memory import readable

LIMIT, QUICK_LIMIT, LAST_LIMIT = 12.0, 3.0, 60.0
"""Seconds: a competitor that is predicted to take longer is omitted, with a note. The last is for LU and LSMR."""
SMALL = 2500
"""Maximum number of equations in a quick run, except for the families of larger systems of excess 1.25."""


@dataclass(frozen=True)
class RateRow:
    """The time of two matrix products divided by that of an iteration, which contains them."""

    system: str
    rate: float


@dataclass(frozen=True)
class SolveSizes(Sizes):
    """Families of systems and repeats; a quick run has small systems, and of the larger ones the goal against LU."""

    families: tuple[str, ...] = setting(FAMILIES, choices=FAMILIES, help=f"{', '.join(FAMILIES)}.")
    repeats: int = setting(20, help="Number of repeats; the best one counts. Slow methods have fewer.")


race = Race(
    "solve", "The solver against LU, Cholesky, QR, lstsq and LSMR, on one thread.", SolveSizes,
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
    """Whether a quick run includes this system."""
    return system.equations <= SMALL or (system.equations <= 9216 and system.excess == 1.25)


def measure_system(system: System, *, repeats: int, quick: bool) -> list[Row]:
    """The rows of all solvers; those of competitors that would take too long have a note instead of a time."""
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


def from_dict(plain: dict[str, Any]) -> RaceResult[SolveSizes]:
    """The result from the output of --json, for printing its tables."""
    missing = dict.fromkeys(("seconds", "ratio", "residual", "error", "norm"), math.nan)
    rows = [missing | {key: value for key, value in row.items() if value is not None} for row in plain["rows"]]
    rates = [("rates", RateRow(**row)) for row in plain["rates"]]
    return race.result([*(("rows", Row(**row)) for row in rows), *rates], SolveSizes(**plain["sizes"]))


@race.goals
def goals(result: RaceResult[SolveSizes]) -> Iterator[Goal]:
    """Goals for every family, large systems, the rate of an iteration, and the growth of the time."""
    for family, rows in result.by("family").items():
        yield from duel_goal(f"{family}, least norm", duels(rows))
        yield from duel_goal(f"{family}, any solution", duels(rows, ANY))
    yield from large_goals(result)
    rates = {row.system: row.rate for row in result.parts["rates"]}
    if rates:
        worst = min(rates, key=lambda name: rates[name])
        yield Goal(
            f"an iteration, {len(rates)} shapes: at least 0.8 of the rate of matrix products",
            f"worst {rates[worst]:.2f} ({worst})", rates[worst] >= 0.8,
        )  # fmt: skip
    ours, dense = (growth(result.parts["rows"], method) for method in (OURS, LU))
    if ours is not None:
        yield Goal("time grows like N^2 at excess 1.25", f"N^{ours:.2f}", ours <= 2.3)
    if dense is not None:
        yield Goal("LU's time grows like N^3", f"N^{dense:.2f}", dense >= 2.5)


def large_goals(result: RaceResult[SolveSizes]) -> Iterator[Goal]:
    """Speed and memory relative to LU, residual and memory if a dense matrix is too large, and square systems."""
    for excess in (1.25, 1.5, 2.0):
        for ours, dense in result.pair(OURS, LU, system="conv 3x3, 32 ch", excess=excess):
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
        for ours, dense in result.pair(OURS, LU, system=name, excess=1.0):
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
    """One table per family with a row per system, and one of the omitted competitors."""
    for family, rows in result.by("family").items():
        yield duel_table(family, duels(rows) + duels(rows, ANY))
    left_out: dict[tuple[str, float], list[str]] = {}
    for row in result.parts["rows"]:
        if math.isnan(row.seconds):
            left_out.setdefault((row.system, row.excess), []).append(f"{row.method} ({row.note})")
    if left_out:
        cells = [(system, f"{excess:g}", "; ".join(words)) for (system, excess), words in left_out.items()]
        yield Table(("system", "excess", "omitted: would take too long (predicted)"), cells, WIDTH)
