"""Sweeps: benchmarks that train every case of a grid with several seeds.

A `Sweep` selects a learning rate on validation data, caches every finished training so that an interrupted run resumes,
and computes intervals, tables and a figure. The artifacts of a paper run sweeps with the settings of the paper: see
`Sweep.measured`.

    sweep = Sweep("repair", "Deep networks after every repair.", RepairSizes, cases=cases, lrs=(0.01, 0.1))

    @sweep.trial
    def validation_accuracy(case: RepairCase, run: TrainingRun, sizes: RepairSizes) -> float: ...

    @sweep.measure
    def train(case: RepairCase, run: TrainingRun, sizes: RepairSizes) -> RepairOutcome: ...  # a dataclass

    @sweep.goals
    def goals(results: Results) -> Iterator[Goal]: ...  # results.runs is a DataFrame
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import pandas as pd

from onlynorm.display import Curve, Figure, Table
from onlynorm.errors import TrainingError
from onlynorm.evidence.cache import Job, OnMessage, worst_note
from onlynorm.evidence.harness import Benchmark, Goal, Session, Sizes, Spread, number
from onlynorm.evidence.validation import TRIAL_SEED

MIN_SEEDS = 3
"""Minimum number of seeds for a meaningful interval."""
_S = TypeVar("_S", bound=Sizes)
_C = TypeVar("_C", bound=tuple[Any, ...])
_R = TypeVar("_R")


# ------------------------------------------------------------------------------- learning rates


def try_lrs(
    grid: Sequence[float], attempt: Callable[[float], float], *, start: Sequence[float] | None = None
) -> dict[float, float]:
    """Validation accuracies by learning rate, for the whole grid or for `start` and neighbours of the best.

    Neighbours are tried until the best learning rate is between two others, or at an end of the grid.
    """
    tried = {lr: attempt(lr) for lr in grid if start is None or lr in start}
    while tried:
        best = grid.index(best_lr(tried))
        missing = next((lr for lr in grid[max(0, best - 1) : best + 2] if lr not in tried), None)
        if missing is None:
            break
        tried[missing] = attempt(missing)
    return tried


def best_lr(tried: Mapping[float, float]) -> float:
    """The learning rate with the best accuracy; the smallest one of ties."""
    finite = {lr: accuracy for lr, accuracy in tried.items() if not math.isnan(accuracy)}
    if not finite:
        raise TrainingError(
            f"a learning rate needs a trial with a finite loss; got none of {len(tried)}. Try smaller learning rates."
        )
    return max(finite, key=lambda lr: (finite[lr], -lr))


# ------------------------------------------------------------------------------- sweeps


@dataclass(frozen=True)
class TrainingRun:
    """Seed and learning rate (NaN if there is none) of one training, and a callback for status messages."""

    seed: int
    lr: float
    status: OnMessage = lambda _: None

    def on_step(self, step: int, n_steps: int, loss: float) -> None:
        """A callback for `fit` that shows the step and its loss."""
        self.status(f"step {step} of {n_steps}, loss {loss:.3f}")


@dataclass(frozen=True)
class Measured:
    """The result of one run of a case, a dataclass of the benchmark, and a note if it was cached."""

    case: tuple[Any, ...]
    run: TrainingRun
    row: Any
    note: str = ""


@dataclass(frozen=True)
class Trial:
    """The validation accuracy of one learning rate; its seed is not used in the results."""

    case: tuple[Any, ...]
    run: TrainingRun
    accuracy: float
    note: str = ""


@dataclass
class Results(Generic[_S, _C]):
    """All runs of a sweep and the trials of learning rates, as pandas DataFrames.

    The columns of `runs` are the fields of a case, seed, lr, the measured quantities, and note.
    """

    sweep: Sweep[_S, _C]
    sizes: _S
    measured: list[Measured]
    tried: list[Trial]
    facts: dict[str, Any] = field(default_factory=dict)
    figures: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        derived = self.sweep.derived
        self.runs = pd.DataFrame([
            {**_facts(one), **_shallow(one.row), "note": one.note, **{k: f(one.row) for k, f in derived.items()}}
            for one in self.measured
        ])  # fmt: skip
        self.trials = pd.DataFrame([{**_facts(one), "accuracy": one.accuracy, "note": one.note} for one in self.tried])

    @property
    def cases(self) -> list[_C]:
        """The measured cases."""
        return typing.cast("list[_C]", list(dict.fromkeys(one.case for one in self.measured)))

    def axis(self, *names: str) -> list[Any]:
        """The measured values of one field of the cases, or tuples of several."""
        found = [tuple(getattr(case, name) for name in names) for case in self.cases]
        return list(dict.fromkeys(one if len(names) > 1 else one[0] for one in found))

    def where(self, **fields: Any) -> list[_C]:
        """The measured cases with these values of their fields."""
        return [case for case in self.cases if all(getattr(case, name) == value for name, value in fields.items())]

    def by(self, name: str, values: Iterable[Any]) -> dict[Any, pd.DataFrame]:
        """The runs with each of these values of a column, without values that were not measured."""
        found = {value: self.runs[self.runs[name] == value] for value in values}
        return {value: runs for value, runs in found.items() if len(runs)}

    def of(self, case: _C, *, lr: float | None = None) -> pd.DataFrame:
        """The runs of a case, sorted by seed, at its selected learning rate or at `lr`."""
        wanted = self.lr(case) if lr is None else lr
        mask = [one.case == case and (_same(one.run.lr, wanted)) for one in self.measured]
        return self.runs[mask].sort_values("seed") if any(mask) else self.runs.iloc[:0]

    def values(self, case: _C, column: str = "accuracy", *, lr: float | None = None) -> list[float]:
        """A measured quantity, one value per seed."""
        found = self.of(case, lr=lr)
        return [] if found.empty else [float(value) for value in found[column]]

    def spread(self, case: _C, column: str = "accuracy", *, lr: float | None = None) -> Spread:
        """Mean and interval of a measured quantity over the seeds."""
        return Spread.of(self.values(case, column, lr=lr))

    def gap(self, first: _C, second: _C, column: str = "accuracy") -> Spread:
        """Paired difference of the first and second case over the seeds."""
        one, other = self.of(first), self.of(second)
        if one.empty or other.empty:
            return Spread.of([])
        both = one.merge(other, on="seed", suffixes=("", "_other"))
        return Spread.of([float(value) for value in both[column] - both[f"{column}_other"]])

    def curve(
        self, label: str, x: Sequence[float], cases: Sequence[_C], *, column: str = "accuracy", lr: float | None = None,
        **style: Any,
    ) -> Curve:  # fmt: skip
        """A curve of a fraction in percent with intervals; one case per x."""
        found = [self.spread(case, column, lr=lr) for case in cases]
        y_error = [100 * one.half for one in found]
        return Curve(label, x, [100 * one.mean for one in found], y_error=y_error, **style)

    def seeds_goal(self, aim: str, cases: Sequence[_C], least: int = MIN_SEEDS) -> Goal:
        """The goal that each of these cases has at least `least` seeds."""
        fewest = min(len(self.of(case)) for case in cases)
        return Goal(f"{aim} with {least} seeds or more", f"{fewest} or more in {len(cases)} cases", fewest >= least)

    def every_run_goal(self, aim: str, column: str) -> Goal:
        """The goal that a boolean column is true for every run."""
        n_true, n_runs = int(self.runs[column].sum()), len(self.runs)
        return Goal(aim, f"{n_true} of {n_runs} runs", n_true == n_runs)

    def growth_goal(self, aim: str, first: _C, second: _C) -> Goal:
        """The goal that the mean accuracy of the second case is higher."""
        before, after = self.spread(first), self.spread(second)
        return Goal(aim, f"{before.percent()} % to {after.percent()} %", after.mean > before.mean)

    def trial_accuracies(self, case: _C) -> dict[float, float]:
        """Mean validation accuracy by learning rate, over all cases of the same `lr_group`."""
        group = self.sweep.lr_group(self.sweep.lr_case(case))
        mask = [self.sweep.lr_group(typing.cast("_C", one.case)) == group for one in self.tried]
        if not any(mask):
            return {}
        return {float(lr): float(mean) for lr, mean in self.trials[mask].groupby("lr")["accuracy"].mean().items()}

    def lr(self, case: _C) -> float:
        """The learning rate with the best validation accuracy, the smallest of ties; NaN if none was tried."""
        tried = self.trial_accuracies(case)
        return best_lr(tried) if tried else math.nan

    @property
    def goals(self) -> list[Goal]:
        """The goals that this run measured."""
        return list(self.sweep.judge(self)) if self.measured else []

    def tables(self) -> list[Table]:
        """A table of all cases, additional tables of the benchmark, and the trials of learning rates."""
        tables = [self._case_table(), *self.sweep.more_tables(self)]
        return [*tables, self._trial_table()] if self.tried else tables

    def _case_table(self) -> Table:
        axes, columns = self.cases[0]._fields if self.cases else (), self.sweep.columns  # type: ignore[attr-defined]
        has_lr = bool(self.tried)
        heads = (*map(_words, axes), *columns, *(("lr",) if has_lr else ()), "seeds", "note")
        rows = []
        for case in self.cases:
            found = self.of(case)
            cells = [str(cell(self, case, found)) for cell in columns.values()]
            lr = [number(self.lr(case), "g") + self._edge(case)] if has_lr else []
            named = [f"{value:g}" if isinstance(value, float) else str(value) for value in case]
            rows.append((*named, *cells, *lr, str(len(found)), worst_note(found["note"])))
        return Table(heads, rows, self.sweep.width)

    def _edge(self, case: _C) -> str:
        grid = self.sweep.lrs(case)
        return ", the end of the grid" if grid and self.lr(case) in (grid[0], grid[-1]) else ""

    def _trial_table(self) -> Table:
        lrs = sorted({one.run.lr for one in self.tried})
        groups = dict.fromkeys(self.sweep.lr_group(typing.cast("_C", one.case)) for one in self.tried)
        cases = {self.sweep.lr_group(typing.cast("_C", one.case)): one.case for one in reversed(self.tried)}
        rows = []
        for group in groups:
            tried = self.trial_accuracies(typing.cast("_C", cases[group]))
            rows.append((_named(group), *(f"{100 * tried[lr]:.1f}" if lr in tried else "-" for lr in lrs)))
        return Table(("validation accuracy %, at a learning rate of", *(f"{lr:g}" for lr in lrs)), rows)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        hidden = self.sweep.hidden
        return {
            "sizes": asdict(self.sizes),
            "runs": [_plain(row, hidden) for row in self.runs.to_dict("records")],
            **({"trials": [_plain(row) for row in self.trials.to_dict("records")]} if self.tried else {}),
            **self.facts,
            **({"figures": list(self.figures)} if self.figures else {}),
            "goals": [asdict(goal) for goal in self.goals],
        }


Cell = Callable[[Results[Any, Any], Any, Any], str]
"""A function of the results, a case and the DataFrame of its runs that returns the text of a cell."""


def percent(column: str, *, where: Callable[[Any], bool] = lambda _: True) -> Cell:
    """Cells with the mean of a fraction and its interval, in percent, for the cases for which `where` is true."""
    return lambda _results, case, runs: Spread.of(list(map(float, runs[column]))).percent() if where(case) else "-"


def mean(column: str, pattern: str) -> Cell:
    """Cells with the mean of a quantity."""
    return lambda _results, _case, runs: number(float(runs[column].mean()), pattern)


def first(column: str, pattern: str = "") -> Cell:
    """Cells with a quantity that is equal for all seeds."""
    return lambda _results, _case, runs: format(runs[column].iloc[0], pattern)


def fraction_below(column: str, size: float) -> Callable[[Any], float]:
    """A derived column: the fraction of the numbers of a measured sample that are below this magnitude."""
    return lambda row: float(np.mean(np.abs(np.asarray(getattr(row, column))) < size))


def histogram(label: str, samples: Iterable[Sequence[float]], edges: Sequence[float], *, panel: str) -> Curve:
    """The fractions of all numbers of several samples; those beyond the edges are counted in the outermost bins."""
    values = np.concatenate([np.asarray(one) for one in samples])
    heights, _ = np.histogram(np.clip(values, edges[0], edges[-1]), edges)
    return Curve(label, list(edges), (heights / len(values)).tolist(), "histogram", panel)


class Sweep(Benchmark[_S], Generic[_S, _C]):
    """A benchmark of accuracies over a grid of cases and seeds.

    Args:
        cases: the grid for given sizes; a case is a named tuple, whose fields are the first columns of the table.
        columns: further headings with functions that return a cell, see `percent`, `mean` and `first`.
        lrs: learning rates to try, for all cases or as a function of the case; empty if there is no learning rate.
        start: learning rates that are tried first; neighbours are added while the best is at an end.
        lr_group: key of cases that share a learning rate; by default each case has its own.
        also_at: another case; each case is also trained with its learning rate.
        seeds: number of seeds of a case, by default `sizes.seeds`; the first one is `first_seed`.
        trial_seeds: seeds of the trials, not used in the results.
        made_of: further dependencies of a run besides case and sizes: data sets, digests of models.
        derived: further columns of `runs`, as functions of what was measured.
        lr_case: the case whose trials select the learning rate of a case; by default the case itself.
        hidden: measured quantities that are omitted from --json.
    """

    is_parallel = True

    def __init__(
        self,
        name: str,
        about: str,
        sizes: type[_S],
        *,
        cases: Callable[[_S], Sequence[_C]],
        columns: Mapping[str, Cell],
        lrs: Sequence[float] | Callable[[_C], Sequence[float]] = (),
        start: Sequence[float] | None = None,
        lr_group: Callable[[_C], Any] = lambda case: case,
        lr_case: Callable[[_C], _C] = lambda case: case,
        also_at: Callable[[_C], _C] | None = None,
        seeds: Callable[[_C, _S], int] | None = None,
        first_seed: int = 0,
        trial_seeds: Callable[[_S], Sequence[int]] = lambda _: (TRIAL_SEED,),
        made_of: Callable[[_C, _S], Mapping[str, Any]] = lambda _case, _sizes: {},
        derived: Mapping[str, Callable[[Any], Any]] | None = None,
        hidden: Collection[str] = (),
        width: int = 0,
    ) -> None:
        super().__init__(name, about, sizes, is_stored=True, width=width)
        self.cases, self.columns, self.start, self.also_at = cases, columns, start, also_at
        self.lr_group, self.lr_case = lr_group, lr_case
        self.n_seeds = seeds or (lambda _, sizes: int(getattr(sizes, "seeds", 1)))
        self.first_seed, self.trial_seeds, self.made_of = first_seed, trial_seeds, made_of
        self.derived, self.hidden, self.grid = derived or {}, frozenset(hidden), lrs
        self.more_facts: Callable[[Any, OnMessage], dict[str, Any]] = lambda _results, _status: {}
        self.draw: Callable[[Any], Mapping[str, Figure]] = lambda _: {}
        self.train: Callable[[_C, TrainingRun, _S], Any]
        self.validate: Callable[[_C, TrainingRun, _S], float]

    @property
    def module(self) -> str:
        """Name of the module with the training function."""
        return self.train.__module__

    def lrs(self, case: _C) -> Sequence[float]:
        """The learning rates of a case, ascending."""
        return self.grid(case) if callable(self.grid) else self.grid

    def measure(self, function: Callable[[_C, TrainingRun, _S], _R]) -> Callable[[_C, TrainingRun, _S], _R]:
        """Decorator for the function that trains and tests one case and returns a dataclass."""
        self.train = function
        self.kind = typing.get_type_hints(function)["return"]
        return function

    def trial(self, function: Callable[[_C, TrainingRun, _S], float]) -> Callable[[_C, TrainingRun, _S], float]:
        """Decorator for the function that trains one case and returns its validation accuracy."""
        self.validate = function
        return function

    def facts(self, function: Callable[[Any, OnMessage], dict[str, Any]]) -> Any:
        """Decorator for the function that returns additional data for --json; called before goals and tables."""
        self.more_facts = function
        return function

    def figures(self, function: Callable[[Any], Mapping[str, Figure]]) -> Any:
        """Decorator for the function that returns figures by file name."""
        self.draw = function
        return function

    def results(
        self, runs: Iterable[Measured], trials: Iterable[Trial] = (), *, sizes: _S | None = None, **facts: Any
    ) -> Results[_S, _C]:
        """The results with these runs and trials."""
        return Results(self, self.sizes() if sizes is None else sizes, list(runs), list(trials), facts)

    def measured(self, sizes: _S, session: Session) -> Results[_S, _C]:
        """Tries learning rates, then trains every case with every seed; finished trainings come from the cache."""
        cases = list(self.cases(sizes))
        if session.is_parallel:
            while session.compute_all(self._next_trials(cases, sizes, session)):
                pass
        tried = list(self._trials(cases, sizes, session))
        chosen = self.results([], tried, sizes=sizes)
        if session.is_parallel:
            runs = ((case, run) for case in cases for run in self._runs_of(case, chosen))
            session.compute_all(self._job(case, run, sizes, "run") for case, run in runs)
        return self.results(self._runs(cases, chosen, session), tried, sizes=sizes)

    def work(self, sizes: _S, session: Session) -> Results[_S, _C]:
        """Runs the sweep and writes the figures."""
        results = self.measured(sizes, session)
        results.facts = self.more_facts(results, session.status)
        drawn = [figure.write(session.folder, name) for name, figure in self.draw(results).items()]
        results.figures = tuple(str(paths[0]) for paths in drawn if paths)
        for path in results.figures:
            session.log(f"figure: {path}")
        return results

    def _trials(self, cases: Sequence[_C], sizes: _S, session: Session) -> Iterator[Trial]:
        """The trials of all learning rates, group by group."""
        for group in self._groups(cases):
            found: list[Trial] = []

            def attempt(lr: float, group: list[_C] = group, found: list[Trial] = found) -> float:
                made = [
                    Trial(case, run, *self._piece(case, run, sizes, session, "trial"))
                    for case, run in self._trials_at(lr, group, sizes)
                ]
                found += made
                return statistics.fmean(one.accuracy for one in made)

            try_lrs(self.lrs(group[0]), attempt, start=self.start)
            yield from found

    def _next_trials(self, cases: Sequence[_C], sizes: _S, session: Session) -> Iterator[tuple[type[Any], Job]]:
        """The trials that `_trials` needs next, as far as they are known from those that are finished."""
        for group in self._groups(cases):
            grid = self.lrs(group[0])

            def accuracy(lr: float, group: list[_C] = group) -> float:
                trials = [(case, run) for case, run in self._trials_at(lr, group, sizes)]
                if not all(self._has(case, run, sizes, session, "trial") for case, run in trials):
                    raise _NotTriedError(lr)
                return statistics.fmean(self._piece(case, run, sizes, session, "trial")[0] for case, run in trials)

            try:
                try_lrs(grid, accuracy, start=self.start)
            except TrainingError:  # raised again by `_trials`
                continue
            except _NotTriedError as missing:
                first = [lr for lr in grid if self.start is None or lr in self.start]
                for lr in first if missing.lr in first else [missing.lr]:
                    yield from (self._job(case, run, sizes, "trial") for case, run in self._trials_at(lr, group, sizes))

    def _groups(self, cases: Sequence[_C]) -> list[list[_C]]:
        """The cases that share a learning rate."""
        groups: dict[Any, list[_C]] = {}
        for case in dict.fromkeys(map(self.lr_case, cases)):
            groups.setdefault(self.lr_group(case), []).append(case)
        return list(groups.values())

    def _trials_at(self, lr: float, group: Sequence[_C], sizes: _S) -> list[tuple[_C, TrainingRun]]:
        return [(case, TrainingRun(seed, lr)) for case in group for seed in self.trial_seeds(sizes)]

    def _runs(self, cases: Sequence[_C], chosen: Results[_S, _C], session: Session) -> Iterator[Measured]:
        """The runs of every case with every seed, at its learning rate and at that of `also_at`."""
        for case in cases:
            for run in self._runs_of(case, chosen):
                row, note = self._piece(case, run, chosen.sizes, session, "run")
                made = Measured(case, run, row, note)
                session.log(_row_text(made))
                yield made

    def _runs_of(self, case: _C, chosen: Results[_S, _C]) -> Iterator[TrainingRun]:
        rates = [chosen.lr(case)]
        if self.also_at is not None:
            rates.append(chosen.lr(self.also_at(case)))
        for offset in range(self.n_seeds(case, chosen.sizes)):
            for lr in dict.fromkeys(rates):
                yield TrainingRun(self.first_seed + offset, lr)

    def _piece(self, case: _C, run: TrainingRun, sizes: _S, session: Session, what: str) -> tuple[Any, str]:
        """The result of a run or trial, computed or from the cache, and a note if it was cached."""
        kind, job = self._job(case, run, sizes, what)
        session.status(job.name)
        shown = dataclasses.replace(run, status=lambda text: session.status(f"{job.name}: {text}"))
        function = self.validate if what == "trial" else self.train
        return session.get_or_compute(kind, job.name, job.made_of, lambda: function(case, shown, sizes))

    def _has(self, case: _C, run: TrainingRun, sizes: _S, session: Session, what: str) -> bool:
        kind, job = self._job(case, run, sizes, what)
        return session.has(kind, job.name, job.made_of)

    def _job(self, case: _C, run: TrainingRun, sizes: _S, what: str) -> tuple[type[Any], Job]:
        """The type of the result of a run or trial, and how a worker computes it."""
        lr = "" if math.isnan(run.lr) else f", lr {run.lr:g}"
        name = f"{_named(case)}{lr}, seed {run.seed}" + (", trial" if what == "trial" else "")
        made_of = {
            "benchmark": self.name, "what": what, "case": _plain_case(case), "seed": run.seed, "lr": run.lr,
            "sizes": sizes.key(), **self.made_of(case, sizes),
        }  # fmt: skip
        function, kind = (self.validate, float) if what == "trial" else (self.train, self.kind)
        return kind, Job(name, made_of, measure_case, (function, case, run.seed, run.lr, sizes))


def measure_case(function: Callable[..., Any], case: Any, seed: int, lr: float, sizes: Any) -> Any:
    """A run or trial in a worker, which shows no status."""
    return function(case, TrainingRun(seed, lr), sizes)


class _NotTriedError(Exception):
    """The trials of a learning rate are not finished."""

    def __init__(self, lr: float) -> None:
        super().__init__(lr)
        self.lr = lr


def _facts(one: Measured | Trial) -> dict[str, Any]:
    return {**_plain_case(one.case), "seed": one.run.seed, "lr": one.run.lr}


def _plain_case(case: Any) -> dict[str, Any]:
    return dict(case._asdict())


def _shallow(row: Any) -> dict[str, Any]:
    return {one.name: getattr(row, one.name) for one in dataclasses.fields(row)}


def _plain(row: Mapping[str, Any], hidden: Collection[str] = ()) -> dict[str, Any]:
    return {str(name): value for name, value in row.items() if name not in hidden}


def _same(first: float, second: float) -> bool:
    return first == second or (math.isnan(first) and math.isnan(second))


def _named(case: Any) -> str:
    if not isinstance(case, tuple):
        return str(case)
    return ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in case)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _row_text(made: Measured) -> str:
    accuracy = getattr(made.row, "accuracy", math.nan)
    lr = "" if math.isnan(made.run.lr) else f", lr {made.run.lr:g}"
    percent = "" if math.isnan(accuracy) else f": {100 * accuracy:.1f} %"
    return f"{_named(made.case)}{lr}, seed {made.run.seed}{percent}"
