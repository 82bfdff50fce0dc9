"""The benchmark harness: sizes, races, sweeps, confidence intervals, goals and tables.

A benchmark is one file. A `Race` compares several methods in one run, with the times of `timing.race`. A `Sweep` trains
every case of a grid with several seeds: it selects a learning rate on validation data, caches every finished training
so that an interrupted run resumes, and computes intervals, tables and a figure. The artifacts of a paper run sweeps
with the settings of the paper: see `Sweep.measured`.

    @dataclass(frozen=True)
    class RepairSizes(Sizes):
        steps: int = setting(1000, quick=120, help="Steps of training.")
        seeds: int = setting(5, quick=3, help="Networks of each kind.", is_key=False)

    sweep = Sweep("repair", "Deep networks after every repair.", RepairSizes, cases=cases, lrs=(0.01, 0.1))

    @sweep.trial
    def validation_accuracy(case: Case, run: TrainingRun, sizes: RepairSizes) -> float: ...

    @sweep.measure
    def train(case: Case, run: TrainingRun, sizes: RepairSizes) -> Trained: ...  # a dataclass of what was measured

    @sweep.goals
    def goals(results: Results) -> Iterator[Goal]: ...  # results.runs is a DataFrame
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import typing
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from onlynorm.data import Split
from onlynorm.display import Curve, Figure, Table
from onlynorm.errors import TrainingError
from onlynorm.evidence.cache import Cache, OnMessage, Piece, worst_note
from onlynorm.evidence.records import parse
from onlynorm.evidence.validation import TRIAL_SEED
from onlynorm.memory import readable
from onlynorm.storage import tensors_digest
from onlynorm.validate import (
    need_callable,
    need_choice,
    need_flag,
    need_instance,
    need_integer,
    need_items,
    need_number,
    need_path,
)

OUT = Path("onlynorm-out/bench")
LEVEL = 0.95
"""Confidence level of all intervals."""
NARROW = 0.03
"""Maximum half width of an interval that shows that two methods have equal accuracy."""
GOAL_COLUMNS = ("goal", "measured", "met")
_S = TypeVar("_S", bound="Sizes")
_C = TypeVar("_C", bound=tuple[Any, ...])
_R = TypeVar("_R")


@dataclass(frozen=True)
class Goal:
    """A goal, the measured values as text, and whether it was met."""

    aim: str
    measured: str
    is_met: bool


def number(value: float, pattern: str) -> str:
    """The formatted value, or a dash for NaN."""
    return "-" if math.isnan(value) else format(value, pattern)


@dataclass(frozen=True)
class Spread:
    """The mean of n measurements and the half width of its confidence interval, NaN for n = 1."""

    mean: float
    half: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Student's interval: mean +- t s / sqrt(n) with n - 1 degrees of freedom."""
        n = len(values)
        if n == 0:
            return cls(math.nan, math.nan, 0)
        if n == 1:
            return cls(values[0], math.nan, 1)
        quantile = float(stdtrit(n - 1, 0.5 + LEVEL / 2.0))
        return cls(float(np.mean(values)), quantile * float(np.std(values, ddof=1)) / math.sqrt(n), n)

    @property
    def low(self) -> float:
        """The lower end of the interval."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """The upper end of the interval."""
        return self.mean + self.half

    def percent(self) -> str:
        """Mean and half width in percent, as text."""
        if math.isnan(self.mean):
            return "-"
        return f"{100 * self.mean:.1f}" + ("" if math.isnan(self.half) else f" ± {100 * self.half:.1f}")


# ------------------------------------------------------------------------------- sizes


def setting(
    default: Any, *, quick: Any = None, help: str = "", low: float | None = None, high: float | None = None,
    choices: Collection[str] = (), is_key: bool = True,
) -> Any:  # fmt: skip
    """A field of `Sizes`: its default, the value of a quick run, and the help text of its option on the command line.

    `is_key=False` if the result of a single run does not depend on it, such as the number of seeds.
    """
    facts = {"quick": quick, "help": help, "low": low, "high": high, "choices": choices, "is_key": is_key}
    return field(default=default, metadata=facts)


@dataclass(frozen=True)
class Sizes:
    """Base class of the sizes of a benchmark.

    Integers must be at least 1, floats at least 0, names in their choices.
    """

    quick: bool = setting(False, is_key=False)

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for one in dataclasses.fields(self):
            object.__setattr__(self, one.name, _checked(one, hints[one.name], getattr(self, one.name), type(self)))

    @classmethod
    def make(cls: type[_S], *, quick: bool = False, **given: Any) -> _S:
        """The default or quick sizes, updated with the given values that are not None."""
        small = {f.name: f.metadata["quick"] for f in dataclasses.fields(cls) if f.metadata.get("quick") is not None}
        chosen = {name: value for name, value in given.items() if value is not None}
        return cls(quick=quick, **((small if quick else {}) | chosen))

    def key(self) -> dict[str, Any]:
        """The sizes on which the result of a single run depends."""
        fields = dataclasses.fields(self)
        return {f.name: getattr(self, f.name) for f in fields if f.metadata.get("is_key", True)}


def _checked(one: dataclasses.Field[Any], hint: Any, value: Any, kind: type) -> Any:
    facts, name = one.metadata, f"sizes.{one.name}"
    low, high, choices = facts.get("low"), facts.get("high"), facts.get("choices")
    cure = f"See the defaults of {kind.__name__}."
    options = typing.get_args(hint)
    if value is None and type(None) in options:
        return None
    inner = next((option for option in options if option is not type(None)), hint) if type(None) in options else hint
    if choices:
        if inner is str:
            return need_choice(one.name, value, choices)
        given = [value] if isinstance(value, str) else need_items(name, value, cure=f"Pass some of {list(choices)}.")
        return tuple(need_choice(one.name, item, choices) for item in given)
    if inner is bool:
        return need_flag(name, value, cure=cure)
    if inner is int:
        return need_integer(name, value, low=1 if low is None else int(low), high=_int(high), cure=cure)
    if inner is float:
        return need_number(name, value, low=low or 0.0, high=math.inf if high is None else high, cure=cure)
    return tuple(need_number(name, item, low=0.0, cure=cure) for item in need_items(name, value, cure=cure))


def _int(value: float | None) -> int | None:
    return None if value is None else int(value)


# ------------------------------------------------------------------------------- benchmarks


class Result(typing.Protocol):
    """The result of a benchmark."""

    @property
    def goals(self) -> Sequence[Goal]:
        """What was promised, as far as this run measured it."""

    def tables(self) -> list[Table]:
        """Tables of all measurements, without the goals."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data for --json."""


def is_met(result: Result) -> bool:
    """Whether all measured goals were met."""
    return all(goal.is_met for goal in result.goals)


def goal_table(result: Result) -> Table:
    """The goals as a table."""
    return Table(GOAL_COLUMNS, [(goal.aim, goal.measured, "yes" if goal.is_met else "no") for goal in result.goals])


class Pieces(typing.Protocol):
    """Storage of finished pieces: a `Cache`, or a run of an artifact of a paper."""

    def get_or_compute(
        self, name: str, made_of: Mapping[str, Any], compute: Callable[[], Any], *,
        check: Callable[[Any], object] = ...,
    ) -> Piece:  # fmt: skip
        """The piece of this name that depends on `made_of`, stored or computed now."""


@dataclass(frozen=True)
class Session:
    """One run of a benchmark: `status` shows the current step, `log` prints a line for each finished part.

    `get_or_compute` stores finished results in `pieces`; `folder` is for other files.
    """

    status: OnMessage
    log: OnMessage
    folder: Path
    pieces: Pieces

    def get_or_compute(
        self, kind: type[_R], name: str, made_of: Mapping[str, Any], compute: Callable[[], _R]
    ) -> tuple[_R, str]:
        """The result for `made_of`, computed or from the cache, and a note if it was cached."""

        def read(stored: Any) -> _R:
            return parse(kind, stored, what=f"{name}: a stored result", cure="It is computed again.")

        def plain() -> Any:
            made: Any = compute()
            return asdict(made) if dataclasses.is_dataclass(made) and not isinstance(made, type) else made

        made_of = {key: _plain_dependency(value) for key, value in made_of.items()}
        piece = self.pieces.get_or_compute(name, made_of, plain, check=read)
        return read(piece.result), piece.note


def _plain_dependency(value: Any) -> Any:
    """The value itself, or the digest of the tensors of a data set."""
    if not isinstance(value, Split):
        return value
    if id(value) not in _DIGESTS:
        _DIGESTS[id(value)] = tensors_digest(vars(value))
        weakref.finalize(value, _DIGESTS.pop, id(value), None)  # ids are reused
    return _DIGESTS[id(value)]


_DIGESTS: dict[int, str] = {}


class Benchmark(ABC, Generic[_S]):
    """Base class of benchmarks: a name, a description and its sizes; `is_stored` if results are cached in a folder."""

    def __init__(self, name: str, about: str, sizes: type[_S], *, is_stored: bool) -> None:
        self.name, self.about, self.sizes, self.is_stored = name, about, sizes, is_stored

    def run(
        self,
        sizes: _S | None = None,
        *,
        out: Path | str = OUT,
        force: bool = False,
        progress: OnMessage | None = None,
        on_row: OnMessage | None = None,
    ) -> Result:
        """Runs the benchmark; `out` is the folder of cached pieces and figures, `force` computes every piece again.

        `progress` is called with status messages, `on_row` with one line for each finished part.
        """
        sizes = need_instance(
            "sizes", self.sizes() if sizes is None else sizes, self.sizes, cure=f"Pass a {self.sizes.__name__}."
        )
        folder = need_path("out", out) / self.name
        status, log = _callback("progress", progress), _callback("on_row", on_row)
        cache = Cache(folder, modules=[self.module], force=need_flag("force", force), status=status)
        return self.work(sizes, Session(status, log, folder, cache))

    @property
    @abstractmethod
    def module(self) -> str:
        """Name of the module with the measuring function; cached pieces depend on its code."""

    @abstractmethod
    def work(self, sizes: _S, session: Session) -> Result:
        """Runs the benchmark with validated arguments."""


def _callback(name: str, value: Any) -> OnMessage:
    return (lambda _: None) if value is None else need_callable(name, value, cure="Omit it for no messages.")


# ------------------------------------------------------------------------------- races


@dataclass(frozen=True)
class RaceResult(Generic[_S]):
    """The rows of a race, in one or more parts with a table each."""

    race: Race[_S]
    sizes: _S
    parts: Mapping[str, list[Any]]

    @property
    def rows(self) -> list[Any]:
        """The rows of all parts."""
        return [row for rows in self.parts.values() for row in rows]

    @property
    def goals(self) -> list[Goal]:
        """What was promised, as far as this run measured it."""
        return list(self.race.judge(self))

    def find(self, **fields: Any) -> Any:
        """The first row with these values, or None if it was not measured."""
        return next((r for r in self.rows if all(getattr(r, k, None) == v for k, v in fields.items())), None)

    def tables(self) -> list[Table]:
        """One table per part, then additional tables of the benchmark."""
        made = []
        for name, columns in self.race.columns.items():
            if columns and self.parts.get(name):
                rows = [tuple(_cell(row, column) for column in columns.values()) for row in self.parts[name]]
                made.append(Table(tuple(columns), rows, self.race.width))
        return [*made, *self.race.more_tables(self)]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        return {
            "sizes": asdict(self.sizes),
            **{name: [asdict(row) for row in rows] for name, rows in self.parts.items()},
            "goals": [asdict(goal) for goal in self.goals],
        }


Column = str | Callable[[Any], str]
"""The content of a cell: a function of the row, or a field with a format, as in "seconds:.3g" or "memory:bytes"."""


def _cell(row: Any, column: Column) -> str:
    if not isinstance(column, str):
        return column(row)
    name, _, pattern = column.partition(":")
    value = getattr(row, name)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if pattern == "bytes":
        return readable(value) if value else "-"
    return format(value, pattern)


class Race(Benchmark[_S]):
    """A benchmark that compares methods in one run.

    `columns` maps the headings of each part's table to the content of a cell, see `Column`; a part without columns has
    no table. With `is_stored`, rows are cached by `Session.get_or_compute`.
    """

    def __init__(
        self, name: str, about: str, sizes: type[_S], *, columns: Mapping[str, Mapping[str, Column]],
        is_stored: bool = False, width: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(name, about, sizes, is_stored=is_stored)
        self.columns, self.width = columns, width
        self.judge: Callable[[RaceResult[_S]], Iterable[Goal]] = lambda _: ()
        self.more_tables: Callable[[RaceResult[_S]], Iterable[Table]] = lambda _: ()

    @property
    def module(self) -> str:
        """Name of the module with the measuring function."""
        return self.rows.__module__

    def measure(self, function: Callable[[_S, Session], Iterable[tuple[str, Any]]]) -> Any:
        """Decorator for the generator of (part, row) or (part, list of rows); a row is a dataclass."""
        self.rows = function
        return function

    def goals(self, function: Callable[[RaceResult[_S]], Iterable[Goal]]) -> Any:
        """Decorator for the function that evaluates the goals."""
        self.judge = function
        return function

    def tables(self, function: Callable[[RaceResult[_S]], Iterable[Table]]) -> Any:
        """Decorator for the function that returns additional tables."""
        self.more_tables = function
        return function

    def result(self, rows: Iterable[tuple[str, Any]], sizes: _S | None = None) -> RaceResult[_S]:
        """The result with these rows."""
        parts: dict[str, list[Any]] = {name: [] for name in self.columns}
        for part, row in rows:
            parts[part] += row if isinstance(row, list) else [row]
        return RaceResult(self, self.sizes() if sizes is None else sizes, parts)

    def work(self, sizes: _S, session: Session) -> RaceResult[_S]:
        """Measures all rows."""
        return self.result(self.rows(sizes, session), sizes)


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
        self.runs = pd.DataFrame([{**_facts(one), **_shallow(one.row), "note": one.note} for one in self.measured])
        self.trials = pd.DataFrame([{**_facts(one), "accuracy": one.accuracy, "note": one.note} for one in self.tried])

    @property
    def cases(self) -> list[_C]:
        """The measured cases."""
        return typing.cast("list[_C]", list(dict.fromkeys(one.case for one in self.measured)))

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

    def seeds_goal(self, aim: str, cases: Sequence[_C], least: int) -> Goal:
        """The goal that each of these cases has at least `least` seeds."""
        fewest = min(len(self.of(case)) for case in cases)
        return Goal(f"{aim} with {least} seeds or more", f"{fewest} or more in {len(cases)} cases", fewest >= least)

    def every_run_goal(self, aim: str, column: str) -> Goal:
        """The goal that a boolean column is true for every run."""
        n_true, n_runs = int(self.runs[column].sum()), len(self.runs)
        return Goal(aim, f"{n_true} of {n_runs} runs", n_true == n_runs)

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
        """What was promised, as far as this run measured it."""
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


def percent(column: str) -> Cell:
    """Cells with the mean of a fraction and its interval, in percent."""
    return lambda _results, _case, runs: Spread.of([float(value) for value in runs[column]]).percent()


def mean(column: str, pattern: str) -> Cell:
    """Cells with the mean of a quantity."""
    return lambda _results, _case, runs: number(float(runs[column].mean()), pattern)


def first(column: str, pattern: str = "") -> Cell:
    """Cells with a quantity that is equal for all seeds."""
    return lambda _results, _case, runs: format(runs[column].iloc[0], pattern)


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
        lr_case: the case whose trials select the learning rate of a case; by default the case itself.
        hidden: measured quantities that are omitted from --json.
    """

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
        hidden: Collection[str] = (),
        width: int = 0,
    ) -> None:
        super().__init__(name, about, sizes, is_stored=True)
        self.cases, self.columns, self.start, self.also_at = cases, columns, start, also_at
        self.lr_group, self.lr_case = lr_group, lr_case
        self.n_seeds = seeds or (lambda _, sizes: int(getattr(sizes, "seeds", 1)))
        self.first_seed, self.trial_seeds, self.made_of = first_seed, trial_seeds, made_of
        self.hidden, self.width = frozenset(hidden), width
        self.grid = lrs
        self.judge: Callable[[Any], Iterable[Goal]] = lambda _: ()
        self.more_tables: Callable[[Any], Sequence[Table]] = lambda _: ()
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

    def goals(self, function: Callable[[Any], Iterable[Goal]]) -> Any:
        """Decorator for the function that evaluates the goals."""
        self.judge = function
        return function

    def tables(self, function: Callable[[Any], Sequence[Table]]) -> Any:
        """Decorator for the function that returns additional tables."""
        self.more_tables = function
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
        tried = list(self._trials(cases, sizes, session))
        chosen = self.results([], tried, sizes=sizes)
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
        groups: dict[Any, list[_C]] = {}
        for case in dict.fromkeys(map(self.lr_case, cases)):
            groups.setdefault(self.lr_group(case), []).append(case)
        for group in groups.values():
            found: list[Trial] = []

            def attempt(lr: float, group: list[_C] = group, found: list[Trial] = found) -> float:
                made = [
                    Trial(case, run, *self._piece(case, run, sizes, session, float, self.validate, "trial"))
                    for case in group for run in (TrainingRun(seed, lr) for seed in self.trial_seeds(sizes))
                ]  # fmt: skip
                found += made
                return statistics.fmean(one.accuracy for one in made)

            try_lrs(self.lrs(group[0]), attempt, start=self.start)
            yield from found

    def _runs(self, cases: Sequence[_C], chosen: Results[_S, _C], session: Session) -> Iterator[Measured]:
        """The runs of every case with every seed, at its learning rate and at that of `also_at`."""
        for case in cases:
            rates = [chosen.lr(case)]
            if self.also_at is not None:
                rates.append(chosen.lr(self.also_at(case)))
            for offset in range(self.n_seeds(case, chosen.sizes)):
                for lr in dict.fromkeys(rates):
                    run = TrainingRun(self.first_seed + offset, lr)
                    row, note = self._piece(case, run, chosen.sizes, session, self.kind, self.train, "run")
                    made = Measured(case, run, row, note)
                    session.log(_row_text(made))
                    yield made

    def _piece(
        self, case: _C, run: TrainingRun, sizes: _S, session: Session, kind: type[_R],
        function: Callable[[_C, TrainingRun, _S], _R], what: str,
    ) -> tuple[_R, str]:  # fmt: skip
        """The result of the function, computed or from the cache, and a note if it was cached."""
        lr = "" if math.isnan(run.lr) else f", lr {run.lr:g}"
        name = f"{_named(case)}{lr}, seed {run.seed}" + (", trial" if what == "trial" else "")
        session.status(name)
        made_of = {
            "benchmark": self.name, "what": what, "case": _plain_case(case), "seed": run.seed, "lr": run.lr,
            "sizes": sizes.key(), **self.made_of(case, sizes),
        }  # fmt: skip
        run = dataclasses.replace(run, status=lambda text: session.status(f"{name}: {text}"))
        return session.get_or_compute(kind, name, made_of, lambda: function(case, run, sizes))


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
