"""The harness of all benchmarks: sizes with quick ones, races, sweeps, goals judged by code, tables.

A benchmark is one file. A `Race` measures rows of competitors in one run, with the times of `timing.race`. A `Sweep`
measures every case of a grid with several seeds: it selects a learning rate on validation data where cases have one,
caches every finished training, so that a killed run resumes, and turns the runs into intervals, tables and a figure.

    @dataclass(frozen=True)
    class RepairSizes(Sizes):
        steps: int = setting(1000, quick=120, help="Steps of training.")
        seeds: int = setting(5, quick=3, help="Networks of each kind.", is_key=False)

    sweep = Sweep("repair", "Deep networks after every repair.", RepairSizes, cases=cases, lrs=(0.01, 0.1))

    @sweep.trial
    def validation_accuracy(case: Case, run: Run, sizes: RepairSizes) -> float: ...

    @sweep.measure
    def train(case: Case, run: Run, sizes: RepairSizes) -> Trained: ...      # a dataclass of what was measured

    @sweep.goals
    def goals(results: Results) -> Iterator[Goal]: ...                       # results.runs is a DataFrame
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import pandas as pd

from onlynorm.display import Figure, Table
from onlynorm.errors import TrainingError
from onlynorm.evidence.cache import Cache, Say, worst_note
from onlynorm.evidence.records import parse
from onlynorm.evidence.spread import Spread
from onlynorm.evidence.validation import TRIAL_SEED
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
NARROW = 0.03
"""Half the width up to which an interval of accuracies shows that two methods are equal; a wider one holds any gap."""
GOAL_COLUMNS = ("goal", "measured", "met")
_S = TypeVar("_S", bound="Sizes")
_C = TypeVar("_C", bound=tuple[Any, ...])
_R = TypeVar("_R")


@dataclass(frozen=True)
class Goal:
    """A stated aim, what was measured for it, and whether it was met."""

    aim: str
    measured: str
    is_met: bool


def number(value: float, pattern: str) -> str:
    """The value as text, or a dash where nothing was measured."""
    return "-" if math.isnan(value) else format(value, pattern)


# ------------------------------------------------------------------------------- sizes


def setting(
    default: Any, *, quick: Any = None, help: str = "", low: float | None = None, high: float | None = None,
    choices: Collection[str] = (), is_key: bool = True,
) -> Any:  # fmt: skip
    """A field of `Sizes`: its value, that of a quick run, and the text that makes it an option of the command.

    `is_key=False` says that the result of a single run does not depend on it, such as how many runs there are.
    """
    facts = {"quick": quick, "help": help, "low": low, "high": high, "choices": choices, "is_key": is_key}
    return field(default=default, metadata=facts)


@dataclass(frozen=True)
class Sizes:
    """What a benchmark measures, and how much of it: the base class of the sizes of every benchmark.

    Whole numbers are at least 1, other numbers at least 0, names are among their choices.
    """

    quick: bool = setting(False, is_key=False)

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for one in dataclasses.fields(self):
            object.__setattr__(self, one.name, _checked(one, hints[one.name], getattr(self, one.name), type(self)))

    @classmethod
    def make(cls: type[_S], *, quick: bool = False, **given: Any) -> _S:
        """The sizes of an ordinary or a quick run, with those given that are not None."""
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
    """What one run of a benchmark measured."""

    @property
    def goals(self) -> Sequence[Goal]:
        """What was promised, as far as this run measured it."""

    def tables(self) -> list[Table]:
        """Everything that was measured, without the goals."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data for --json."""


def is_met(result: Result) -> bool:
    """Whether every goal that the run could measure was met."""
    return all(goal.is_met for goal in result.goals)


def goal_table(result: Result) -> Table:
    """The goals as rows of text."""
    return Table(GOAL_COLUMNS, [(goal.aim, goal.measured, "yes" if goal.is_met else "no") for goal in result.goals])


@dataclass(frozen=True)
class Voice:
    """How a run reports: `say` what is being done, which is replaced by what follows, and `tell` what is finished."""

    say: Say
    tell: Say


class Benchmark(ABC, Generic[_S]):
    """A name, one line about it, its sizes and how it is run; `is_stored` if it caches pieces in a folder."""

    is_stored = False

    def __init__(self, name: str, about: str, sizes: type[_S]) -> None:
        self.name, self.about, self.sizes = name, about, sizes

    def run(
        self,
        sizes: _S | None = None,
        *,
        out: Path | str = OUT,
        force: bool = False,
        progress: Say | None = None,
        on_row: Say | None = None,
    ) -> Result:
        """Measures everything; `out` is the folder of cached pieces and figures, `force` computes every piece again.

        `progress` is called with what is being done, `on_row` with one line for everything that is finished.
        """
        sizes = need_instance(
            "sizes", self.sizes() if sizes is None else sizes, self.sizes, cure=f"Pass a {self.sizes.__name__}."
        )
        folder = need_path("out", out) / self.name
        voice = Voice(_listener("progress", progress), _listener("on_row", on_row))
        return self.work(sizes, folder, need_flag("force", force), voice)

    @abstractmethod
    def work(self, sizes: _S, folder: Path, force: bool, voice: Voice) -> Result:
        """What the kind of benchmark does; arguments are checked."""


def _listener(name: str, value: Any) -> Say:
    return (lambda _: None) if value is None else need_callable(name, value, cure="Leave it out to hear nothing.")


# ------------------------------------------------------------------------------- races


@dataclass(frozen=True)
class RaceResult(Generic[_S]):
    """The rows of a race, in one or several parts with a table each."""

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

    def tables(self) -> list[Table]:
        """A table for each part."""
        return [
            Table(tuple(columns), [tuple(cell(row) for cell in columns.values()) for row in self.parts[name]])
            for name, columns in self.race.columns.items()
            if self.parts.get(name)
        ]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        return {
            "sizes": asdict(self.sizes),
            **{name: [asdict(row) for row in rows] for name, rows in self.parts.items()},
            "goals": [asdict(goal) for goal in self.goals],
        }


class Race(Benchmark[_S]):
    """A benchmark whose rows are measured side by side in one run; nothing of it is cached.

    `columns` has the headings of each part's table with the function that makes a cell of a row.
    """

    def __init__(
        self, name: str, about: str, sizes: type[_S], *, columns: Mapping[str, Mapping[str, Callable[[Any], str]]]
    ) -> None:
        super().__init__(name, about, sizes)
        self.columns = columns
        self.judge: Callable[[RaceResult[_S]], Iterable[Goal]] = lambda _: ()

    def measure(self, function: Callable[[_S, Voice], Iterable[tuple[str, Any]]]) -> Any:
        """A decorator of the generator of (part, row); a row is a dataclass."""
        self.rows = function
        return function

    def goals(self, function: Callable[[RaceResult[_S]], Iterable[Goal]]) -> Any:
        """A decorator of the function that judges a result."""
        self.judge = function
        return function

    def result(self, rows: Iterable[tuple[str, Any]], sizes: _S | None = None) -> RaceResult[_S]:
        """The result that these rows make."""
        parts: dict[str, list[Any]] = {name: [] for name in self.columns}
        for part, row in rows:
            parts[part].append(row)
        return RaceResult(self, self.sizes() if sizes is None else sizes, parts)

    def work(self, sizes: _S, folder: Path, force: bool, voice: Voice) -> RaceResult[_S]:
        """Measures all rows."""
        return self.result(self.rows(sizes, voice), sizes)


# ------------------------------------------------------------------------------- learning rates


def try_lrs(
    grid: Sequence[float], attempt: Callable[[float], float], *, start: Sequence[float] | None = None
) -> dict[float, float]:
    """Validation accuracies by learning rate: of the whole grid, or of `start` and neighbours of the best.

    Neighbours are tried until the best learning rate lies between two others, or at an end of the grid.
    """
    tried = {lr: attempt(lr) for lr in grid if start is None or lr in start}
    while tried:
        place = grid.index(best_lr(tried))
        missing = next((lr for lr in grid[max(0, place - 1) : place + 2] if lr not in tried), None)
        if missing is None:
            break
        tried[missing] = attempt(missing)
    return tried


def best_lr(tried: Mapping[float, float]) -> float:
    """The learning rate with the best accuracy; the lower one of two that are equally good."""
    finite = {lr: accuracy for lr, accuracy in tried.items() if not math.isnan(accuracy)}
    if not finite:
        raise TrainingError(
            f"a choice of the learning rate needs a trial with a finite loss; got none of {len(tried)}. Lower the grid."
        )
    return max(finite, key=lambda lr: (finite[lr], -lr))


# ------------------------------------------------------------------------------- sweeps


@dataclass(frozen=True)
class Run:
    """One training: its seed and learning rate (NaN where there is none to choose), and how it reports."""

    seed: int
    lr: float
    say: Say = lambda _: None


@dataclass(frozen=True)
class Measured:
    """What one run of a case measured: a dataclass of the benchmark, and whether it came from the cache."""

    case: tuple[Any, ...]
    run: Run
    row: Any
    note: str = ""


@dataclass(frozen=True)
class Trial:
    """The accuracy of one learning rate on validation data, with a seed that is not judged."""

    case: tuple[Any, ...]
    run: Run
    accuracy: float
    note: str = ""


@dataclass
class Results(Generic[_S, _C]):
    """All runs of a sweep and the trials that chose their learning rates, as tables of pandas.

    The columns of `runs` are the fields of a case, seed, lr, what was measured, and note.
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
        """The cases that were measured."""
        return typing.cast("list[_C]", list(dict.fromkeys(one.case for one in self.measured)))

    def of(self, case: _C, *, lr: float | None = None) -> pd.DataFrame:
        """The runs of a case in the order of their seeds, at its own learning rate or at this one."""
        wanted = self.lr(case) if lr is None else lr
        mask = [one.case == case and (_same(one.run.lr, wanted)) for one in self.measured]
        return self.runs[mask].sort_values("seed") if any(mask) else self.runs.iloc[:0]

    def values(self, case: _C, column: str = "accuracy", *, lr: float | None = None) -> list[float]:
        """One measured quantity, seed by seed."""
        found = self.of(case, lr=lr)
        return [] if found.empty else [float(value) for value in found[column]]

    def spread(self, case: _C, column: str = "accuracy", *, lr: float | None = None) -> Spread:
        """Mean and interval of a measured quantity over the seeds."""
        return Spread.of(self.values(case, column, lr=lr))

    def gap(self, first: _C, second: _C, column: str = "accuracy") -> Spread:
        """By how much the first case exceeds the second, seed by seed."""
        one, other = self.of(first), self.of(second)
        if one.empty or other.empty:
            return Spread.of([])
        both = one.merge(other, on="seed", suffixes=("", "_other"))
        return Spread.of([float(value) for value in both[column] - both[f"{column}_other"]])

    def trial_accuracies(self, case: _C) -> dict[float, float]:
        """Mean validation accuracies by learning rate, over all cases that share the learning rate of this one."""
        group = self.sweep.lr_group(case)
        mask = [self.sweep.lr_group(typing.cast("_C", one.case)) == group for one in self.tried]
        if not any(mask):
            return {}
        return {float(lr): float(mean) for lr, mean in self.trials[mask].groupby("lr")["accuracy"].mean().items()}

    def lr(self, case: _C) -> float:
        """The learning rate with the best validation accuracy, the lower one of two; NaN where none was tried."""
        tried = self.trial_accuracies(case)
        return best_lr(tried) if tried else math.nan

    @property
    def goals(self) -> list[Goal]:
        """What was promised, as far as this run measured it."""
        return list(self.sweep.judge(self)) if self.measured else []

    def tables(self) -> list[Table]:
        """A row for every case, the benchmark's own tables, and the trials of learning rates."""
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
"""Makes a cell of a table of the results, a case and the DataFrame of its runs."""


def percent(column: str) -> Cell:
    """Cells with the mean of a fraction and its interval, in percent."""
    return lambda _results, _case, runs: Spread.of([float(value) for value in runs[column]]).percent()


def mean(column: str, pattern: str) -> Cell:
    """Cells with the mean of a quantity."""
    return lambda _results, _case, runs: number(float(runs[column].mean()), pattern)


def first(column: str, pattern: str = "") -> Cell:
    """Cells with a quantity that is the same for all seeds."""
    return lambda _results, _case, runs: format(runs[column].iloc[0], pattern)


class Sweep(Benchmark[_S], Generic[_S, _C]):
    """A benchmark of accuracies over a grid of cases and seeds.

    Args:
        cases: the grid for given sizes; a case is a named tuple, whose fields are the first columns of the table.
        columns: further headings with functions that make a cell, see `percent`, `mean` and `first`.
        lrs: learning rates to try, the same for every case or by case; none where a case has no learning rate.
        start: of these the ones every case begins with; neighbours follow while the best lies at an end.
        lr_group: cases that share their learning rate, by default each has its own.
        also_at: another case whose learning rate a case is trained with as well.
        seeds: how many seeds a case has, by default `sizes.seeds`; the first one is `first_seed`.
        trial_seeds: seeds of the trials, which are not judged.
        made_of: what a run depends on beside its case and the sizes, such as digests of data and models.
        hidden: measured quantities that are too long for --json.
    """

    is_stored = True

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
        also_at: Callable[[_C], _C] | None = None,
        seeds: Callable[[_C, _S], int] | None = None,
        first_seed: int = 0,
        trial_seeds: Callable[[_S], Sequence[int]] = lambda _: (TRIAL_SEED,),
        made_of: Callable[[_C, _S], Mapping[str, Any]] = lambda _case, _sizes: {},
        hidden: Collection[str] = (),
        width: int = 0,
    ) -> None:
        super().__init__(name, about, sizes)
        self.cases, self.columns, self.start, self.lr_group, self.also_at = cases, columns, start, lr_group, also_at
        self.n_seeds = seeds or (lambda _, sizes: int(getattr(sizes, "seeds", 1)))
        self.first_seed, self.trial_seeds, self.made_of = first_seed, trial_seeds, made_of
        self.hidden, self.width = frozenset(hidden), width
        self.grid = lrs
        self.judge: Callable[[Any], Iterable[Goal]] = lambda _: ()
        self.more_tables: Callable[[Any], Sequence[Table]] = lambda _: ()
        self.more_facts: Callable[[Any, Say], dict[str, Any]] = lambda _results, _say: {}
        self.draw: Callable[[Any], Mapping[str, Figure]] = lambda _: {}
        self.train: Callable[[_C, Run, _S], Any]
        self.validate: Callable[[_C, Run, _S], float]

    def lrs(self, case: _C) -> Sequence[float]:
        """The learning rates of a case, ascending."""
        return self.grid(case) if callable(self.grid) else self.grid

    def measure(self, function: Callable[[_C, Run, _S], _R]) -> Callable[[_C, Run, _S], _R]:
        """A decorator of the function that trains and tests one case; it returns a dataclass."""
        self.train = function
        self.kind = typing.get_type_hints(function)["return"]
        return function

    def trial(self, function: Callable[[_C, Run, _S], float]) -> Callable[[_C, Run, _S], float]:
        """A decorator of the function that trains one case and returns its accuracy on validation data."""
        self.validate = function
        return function

    def goals(self, function: Callable[[Any], Iterable[Goal]]) -> Any:
        """A decorator of the function that judges results."""
        self.judge = function
        return function

    def tables(self, function: Callable[[Any], Sequence[Table]]) -> Any:
        """A decorator of the function that makes further tables of results."""
        self.more_tables = function
        return function

    def facts(self, function: Callable[[Any, Say], dict[str, Any]]) -> Any:
        """A decorator of the function that adds to --json, before goals and tables are made."""
        self.more_facts = function
        return function

    def figures(self, function: Callable[[Any], Mapping[str, Figure]]) -> Any:
        """A decorator of the function that draws results; figures are named for their files."""
        self.draw = function
        return function

    def results(
        self, runs: Iterable[Measured], trials: Iterable[Trial] = (), *, sizes: _S | None = None, **facts: Any
    ) -> Results[_S, _C]:
        """The results that these runs and trials make."""
        return Results(self, self.sizes() if sizes is None else sizes, list(runs), list(trials), facts)

    def work(self, sizes: _S, folder: Path, force: bool, voice: Voice) -> Results[_S, _C]:
        """Tries learning rates, trains every case with every seed, draws, all from the cache where it can."""
        cases = list(self.cases(sizes))
        cache = Cache(folder, modules=[self.train.__module__], force=force, say=voice.say)
        lab = _Lab(self, sizes, cache, voice)
        results = self.results([], list(lab.trials(cases)), sizes=sizes)
        results = self.results(lab.runs(cases, results), results.tried, sizes=sizes)
        results.facts = self.more_facts(results, voice.say)
        drawn = [figure.write(folder, name) for name, figure in self.draw(results).items()]
        results.figures = tuple(str(paths[0]) for paths in drawn if paths)
        for path in results.figures:
            voice.tell(f"figure: {path}")
        return results


@dataclass
class _Lab(Generic[_S, _C]):
    """The trials and runs of one sweep, each from the cache or computed now."""

    sweep: Sweep[_S, _C]
    sizes: _S
    cache: Cache
    voice: Voice

    def trials(self, cases: Sequence[_C]) -> Iterator[Trial]:
        """Every learning rate that is tried, group by group."""
        groups: dict[Any, list[_C]] = {}
        for case in cases:
            groups.setdefault(self.sweep.lr_group(case), []).append(case)
        for group in groups.values():
            found: list[Trial] = []

            def attempt(lr: float, group: list[_C] = group, found: list[Trial] = found) -> float:
                seeds = self.sweep.trial_seeds(self.sizes)
                made = [self._trial(case, Run(seed, lr)) for case in group for seed in seeds]
                found += made
                return statistics.fmean(one.accuracy for one in made)

            try_lrs(self.sweep.lrs(group[0]), attempt, start=self.sweep.start)
            yield from found

    def _trial(self, case: _C, run: Run) -> Trial:
        piece = self._piece(
            case, run, "trial", lambda run: float(self.sweep.validate(case, run, self.sizes)),
            lambda stored: parse(float, stored, what="a trial", cure=""),
        )  # fmt: skip
        return Trial(case, run, float(piece[0]), piece[1])

    def runs(self, cases: Sequence[_C], chosen: Results[_S, _C]) -> Iterator[Measured]:
        """Every case with every seed, at its own learning rate and at that of the case it is compared with."""
        for case in cases:
            rates = [chosen.lr(case)]
            if self.sweep.also_at is not None:
                rates.append(chosen.lr(self.sweep.also_at(case)))
            for place in range(self.sweep.n_seeds(case, self.sizes)):
                for lr in dict.fromkeys(rates):
                    run = Run(self.sweep.first_seed + place, lr)
                    row, note = self._piece(case, run, "run", functools.partial(self._train, case), self._parse)
                    made = Measured(case, run, self._parse(row), note)
                    self.voice.tell(_told(made))
                    yield made

    def _train(self, case: _C, run: Run) -> dict[str, Any]:
        return asdict(self.sweep.train(case, run, self.sizes))

    def _parse(self, stored: Any) -> Any:
        return parse(self.sweep.kind, stored, what="a run", cure="It is computed again.")

    def _piece(
        self, case: _C, run: Run, what: str, compute: Callable[[Run], Any], check: Callable[[Any], object]
    ) -> tuple[Any, str]:
        lr = "" if math.isnan(run.lr) else f", lr {run.lr:g}"
        name = f"{_named(case)}{lr}, seed {run.seed}" + (", trial" if what == "trial" else "")
        self.voice.say(name)
        made_of = {
            "benchmark": self.sweep.name, "what": what, "case": _plain_case(case), "seed": run.seed, "lr": run.lr,
            "sizes": self.sizes.key(), **self.sweep.made_of(case, self.sizes),
        }  # fmt: skip
        speaking = dataclasses.replace(run, say=lambda text: self.voice.say(f"{name}: {text}"))
        piece = self.cache.get_or_compute(name, made_of, lambda: compute(speaking), check=check)
        return piece.result, piece.note


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


def _told(made: Measured) -> str:
    accuracy = getattr(made.row, "accuracy", math.nan)
    lr = "" if math.isnan(made.run.lr) else f", lr {made.run.lr:g}"
    told = "" if math.isnan(accuracy) else f": {100 * accuracy:.1f} %"
    return f"{_named(made.case)}{lr}, seed {made.run.seed}{told}"
