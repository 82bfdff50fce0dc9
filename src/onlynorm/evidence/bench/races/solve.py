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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
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
from onlynorm.evidence.harness import Benchmark, Goal, Sizes, Voice, number, setting
from onlynorm.evidence.timing import one_thread, race
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
        """Our time over the rival's, counted as equal to 1.2 where we are one millisecond behind."""
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


@dataclass
class Bench:
    """All rows and goals of one run."""

    rows: list[Row] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Bench:
        """The run that --json printed, so that its tables can be made again."""
        missing = dict.fromkeys(("seconds", "ratio", "residual", "error", "norm"), math.nan)
        found = [{key: value for key, value in row.items() if value is not None} for row in plain["rows"]]
        rows = [Row(**(missing | row)) for row in found]
        return cls(rows, [Goal(**goal) for goal in plain["goals"]])

    def find(self, system: str, excess: float, method: str) -> Row | None:
        """The row of one solver, or None if it was not run."""
        for row in self.rows:
            if (row.system, row.excess, row.method) == (system, excess, method):
                return row
        return None

    def duels(self, family: str) -> list[Duel]:
        """For the solution of least norm: one for each system of the family."""
        return self._duels(family, OURS, lambda row: row.method != LU or row.excess <= 1.0)

    def any_duels(self, family: str) -> list[Duel]:
        """For any solution, against all rivals: one for each system with more features than equations."""
        return self._duels(family, ANY, lambda row: True)

    def _duels(self, family: str, name: str, is_rival: Callable[[Row], bool]) -> list[Duel]:
        found: dict[tuple[str, float], list[Row]] = {}
        for row in self.rows:
            if row.family == family:
                found.setdefault((row.system, row.excess), []).append(row)
        duels = []
        for rows in found.values():
            able = (
                row for row in rows if row.method not in (OURS, ANY) and row.is_exact and math.isfinite(row.seconds)
            )
            rival = min(filter(is_rival, able), key=lambda row: row.seconds, default=None)
            duels += [Duel(row, rival) for row in rows if row.method == name]
        return duels

    def tables(self) -> list[Table]:
        """One table per family with a row per system, and one of what was left out."""
        families = dict.fromkeys(row.family for row in self.rows)
        left_out = [row for row in self.rows if math.isnan(row.seconds)]
        tables = [_family_table(family, self.duels(family) + self.any_duels(family)) for family in families]
        return tables + ([_left_out_table(left_out)] if left_out else [])

    def as_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        return {"rows": [asdict(r) for r in self.rows], "goals": [asdict(g) for g in self.goals]}


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


def _left_out_table(rows: Sequence[Row]) -> Table:
    grouped: dict[tuple[str, float], list[str]] = {}
    for row in rows:
        grouped.setdefault((row.system, row.excess), []).append(f"{row.method} ({row.note})")
    cells = [(system, f"{excess:g}", "; ".join(words)) for (system, excess), words in grouped.items()]
    return Table(("system", "excess", "left out: would take too long (predicted)"), cells, WIDTH)


def _time(seconds: float) -> str:
    if seconds < 0.9995e-3:
        return f"{1e6 * seconds:.0f} us"
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


Progress = Callable[[str], None]


def bench_solve(
    *,
    quick: bool = False,
    families: Sequence[str] = FAMILIES,
    repeats: int = 20,
    say: Progress = lambda _: None,
    on_duel: Callable[[Duel], object] = lambda _: None,
) -> Bench:
    """Solves every system with every solver on one thread and judges the goals.

    `families` chooses among flat, tall, tiny, square, sparse, unequal and convolution. `quick` takes small systems
    only, and of the larger ones the goal against LU. A solver has at most `repeats` turns, fewer where they take long.
    `on_duel` is told of every system as it is done.
    """
    bench = Bench()
    systems = [s for s in GRID if s.family in families and (not quick or _is_quick(s))]
    with one_thread():
        for system in systems:
            say(f"{system.name}, excess {system.excess:g}")
            rows = _measure(system, repeats, quick)
            bench.rows += rows
            for duel in (*Bench(rows).duels(system.family), *Bench(rows).any_duels(system.family)):
                on_duel(duel)
        shapes = dict.fromkeys((s.name, s.shape) for s in systems if s.family in GROWING)
        rates = {name: iteration_rate(shape) for name, shape in shapes}
    duels: list[Goal] = []
    for family in families:
        duels += _duel_goals(f"{family}, least norm", bench.duels(family))
        duels += _duel_goals(f"{family}, any solution", bench.any_duels(family))
    bench.goals = [*duels, *_large_goals(bench), *_rate_goals(rates), *_growth_goals(bench)]
    return bench


def _is_quick(system: System) -> bool:
    return system.equations <= SMALL or (system.equations <= 9216 and system.excess == 1.25)


def _measure(system: System, repeats: int, quick: bool) -> list[Row]:
    """The rows of all solvers; those of rivals that would take too long have no time, and a note."""
    left, right, target = system.make()
    solvers = dict(SOLVERS)
    if system.excess < 1.0:
        del solvers[LU]
    if system.excess <= 1.0:
        del solvers[ANY]
    if system.family not in GROWING:
        del solvers[PAPERS]
    shape, rate = (len(target), target.shape[1]), product_rate()
    seconds = {method: predicted_seconds(method, shape, len(right), rate) for method in solvers}
    limit = QUICK_LIMIT if quick else LIMIT
    late = [method for method in solvers if seconds[method] > (LAST_LIMIT if method in (LU, LSMR) else limit)]
    left_out = {method: f"{seconds[method]:.0f} s" for method in late}
    chosen = {method: solver for method, solver in solvers.items() if method not in left_out}
    rows = race_solvers(
        system.name,
        system.excess,
        (left, right, target),
        chosen,
        repeats=repeats,
        family=system.family,
        patience=0.25 if quick else 1.0,
    )
    for method, note in left_out.items():
        rows.append(
            Row(
                system.name, target.numel(), system.excess, method, math.nan, math.nan, 0, math.nan, 0, note,
                system.family, tolerance=rows[0].tolerance,
            )
        )  # fmt: skip
    return rows


def race_solvers(
    name: str,
    excess: float,
    system: tuple[Tensor, Tensor, Tensor],
    solvers: dict[str, Solver],
    *,
    repeats: int,
    family: str = "",
    patience: float = 1.0,
) -> list[Row]:
    """A row for each solver, ours among them, on one system (left, right, target)."""
    left, right, target = system
    n = target.numel()
    turns = {method: functools.partial(without_failure, solver, *system) for method, solver in solvers.items()}
    times = race(
        turns, rounds=repeats, clock=time.process_time, metered=n >= METERED, warm_up=n < LONG,
        patience=patience if n < LONG else max(patience, LONG_PATIENCE),
    )  # fmt: skip
    made = {method: _made(left, right, timing.result.gamma.double()) for method, timing in times.items()}
    size = torch.linalg.vector_norm(target)
    norms = {method: float(torch.linalg.vector_norm(timing.result.gamma)) for method, timing in times.items()}
    residuals = {method: float(torch.linalg.vector_norm(m - target) / size) for method, m in made.items()}
    errors, tolerance = residuals, TOLERANCE
    is_solved = any(residual <= 100 * TOLERANCE for residual in residuals.values())
    if len(right) < n or (n < LONG and not is_solved):
        fit = least_squares_fit(left, right, target)
        errors = {method: float(torch.linalg.vector_norm(m - fit) / size) for method, m in made.items()}
        tolerance = FIT_TOLERANCE
    return [
        Row(
            name, n, excess, method, timing.seconds, timing.seconds / times[OURS].seconds, timing.memory,
            residuals[method], timing.result.iterations, timing.result.note, family, errors[method], tolerance,
            norms[method] / norms[OURS],
        )
        for method, timing in times.items()
    ]  # fmt: skip


def _made(left: Tensor, right: Tensor, gamma: Tensor) -> Tensor:
    return (left[:, : len(gamma)].double() * gamma) @ right[: len(gamma)].double()


def _duel_goals(name: str, duels: Sequence[Duel]) -> Iterable[Goal]:
    """One goal for all systems of a contest."""
    judged = [duel for duel in duels if duel.rival is not None]
    if not judged:
        return
    missed = [duel for duel in judged if not duel.is_met]
    worst = max(judged, key=lambda duel: duel.badness)
    count = f"{len(missed)} of {len(judged)} missed; " if missed else ""
    yield Goal(
        f"{name}, {len(judged)} systems: within the tolerance and at most {SLOWER} times as long as the fastest rival "
        "within it, or 1 ms longer",
        f"{count}worst {worst}",
        not missed,
    )


def _large_goals(bench: Bench) -> Iterable[Goal]:
    """Speed and memory beside LU, residual and memory where a dense matrix is too large, and square systems."""
    for excess in (1.25, 1.5, 2.0):
        ours, dense = (bench.find("conv 3x3, 32 ch", excess, method) for method in (OURS, LU))
        if ours and dense:
            share = ours.memory / max(dense.memory, 1)
            yield Goal(
                f"32 channels, excess {excess:g}: 5 times faster than LU, 1/20 of its memory, residual 1e-10",
                f"{dense.seconds / ours.seconds:.1f} times faster, 1/{1 / max(share, 1e-9):.1f} of the memory, "
                f"residual {ours.residual:.1e}",
                dense.seconds >= 5 * ours.seconds and share <= 1 / 20 and ours.residual <= TOLERANCE,
            )
    for channels, excess, limit in ((64, 1.25, 1e9), (64, 1.1, 1e9), (100, 1.25, 3e9)):
        ours = bench.find(f"conv 3x3, {channels} ch", excess, OURS)
        if ours:
            yield Goal(
                f"{channels} channels, excess {excess}: residual 1e-10 within {readable(limit)}",
                f"residual {ours.residual:.1e}, {readable(ours.memory)}, {ours.seconds:.0f} s",
                ours.residual <= TOLERANCE and ours.memory < limit,
            )
    for name in ("64 x 64", "conv 3x3, 32 ch"):
        ours, dense = (bench.find(name, 1.0, method) for method in (OURS, LU))
        if ours and dense:
            yield Goal(
                f"{ours.equations} equations, square: residual 1e-9, 0.7 of LU's time, 0.6 of its memory",
                f"residual {ours.residual:.1e} (LU {dense.residual:.1e}), {ours.seconds / dense.seconds:.2f} of the "
                f"time, {ours.memory / max(dense.memory, 1):.2f} of the memory",
                ours.residual <= 1e-9 and ours.seconds <= 0.7 * dense.seconds and ours.memory <= 0.6 * dense.memory,
            )


def _rate_goals(rates: dict[str, float]) -> Iterable[Goal]:
    if rates:
        worst = min(rates, key=lambda name: rates[name])
        yield Goal(
            f"an iteration, {len(rates)} shapes: 0.8 of the rate of bare matrix products, or more",
            f"worst {rates[worst]:.2f} ({worst})",
            rates[worst] >= 0.8,
        )


def _growth_goals(bench: Bench) -> Iterable[Goal]:
    """Exponents of the time in the number of equations, at excess 1.25."""
    ours, dense = _exponent(bench, OURS), _exponent(bench, LU)
    if ours is not None:
        yield Goal("time grows like N^2 at excess 1.25", f"N^{ours:.2f}", ours <= 2.3)
    if dense is not None:
        yield Goal("LU's time grows like N^3", f"N^{dense:.2f}", dense >= 2.5)


def _exponent(bench: Bench, method: str) -> float | None:
    points = [
        (math.log(r.equations), math.log(r.seconds))
        for r in bench.rows
        if r.family in GROWING and (r.method, r.excess) == (method, 1.25) and math.isfinite(r.seconds)
    ]
    if len(points) < 3:
        return None
    x, y = np.array(points).T
    return float(np.polyfit(x, y, 1)[0])


@dataclass(frozen=True)
class SolveSizes(Sizes):
    """Families of systems and turns."""

    families: tuple[str, ...] = setting(FAMILIES, choices=FAMILIES, help=f"{', '.join(FAMILIES)}.")
    repeats: int = setting(20, help="Best of how many turns; slow methods have fewer.")


class SolveRace(Benchmark[SolveSizes]):
    """The race of solvers."""

    def work(self, sizes: SolveSizes, folder: Path, force: bool, voice: Voice) -> Bench:
        """Solves every system of the families."""
        return bench_solve(
            quick=sizes.quick, families=sizes.families, repeats=sizes.repeats, say=voice.say,
            on_duel=lambda duel: voice.tell(str(duel)),
        )  # fmt: skip


race_of_solvers = SolveRace("solve", "The solver beside LU, Cholesky, QR, lstsq and LSMR, on one thread.", SolveSizes)
