"""What all benchmarks share: sizes, confidence intervals, goals, cached pieces, and the run of one benchmark.

A benchmark is one file with sizes, a function that measures and goals. A `Race` (see `race`) compares several methods
in one run; a `Sweep` (see `sweep`) trains every case of a grid with several seeds.

    @dataclass(frozen=True)
    class RepairSizes(Sizes):
        steps: int = setting(1000, quick=120, help="Steps of training.")
        seeds: int = setting(5, quick=3, help="Networks of each kind.", is_key=False)
"""

from __future__ import annotations

import dataclasses
import math
import typing
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from scipy.special import stdtrit

from onlynorm.cluster import Engine, fixed_threads, open_engine
from onlynorm.data import Split
from onlynorm.display import Table
from onlynorm.errors import ValueRangeError
from onlynorm.evidence.cache import Cache, Job, OnMessage, Piece
from onlynorm.evidence.records import parse
from onlynorm.storage import digest, tensors_digest
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


class BenchmarkResult(typing.Protocol):
    """The result of a benchmark."""

    @property
    def goals(self) -> Sequence[Goal]:
        """The goals that this run measured."""

    def tables(self) -> list[Table]:
        """Tables of all measurements, without the goals."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data for --json."""


def is_met(result: BenchmarkResult) -> bool:
    """Whether all measured goals were met."""
    return all(goal.is_met for goal in result.goals)


def goal_table(result: BenchmarkResult) -> Table:
    """The goals as a table."""
    return Table(GOAL_COLUMNS, [(goal.aim, goal.measured, "yes" if goal.is_met else "no") for goal in result.goals])


class Pieces(typing.Protocol):
    """Storage of finished pieces: a `Cache`, or a run of an artifact of a paper."""

    def get_or_compute(
        self, name: str, made_of: Mapping[str, Any], compute: Callable[[], Any], *,
        check: Callable[[Any], object] = ...,
    ) -> Piece:  # fmt: skip
        """The piece of this name that depends on `made_of`, stored or computed now."""

    def has(self, name: str, made_of: Mapping[str, Any], *, check: Callable[[Any], object] = ...) -> bool:
        """Whether the piece need not be computed."""

    def compute_all(self, jobs: Sequence[Job], engine: Engine) -> None:
        """Computes and stores pieces on the workers of the engine."""


@dataclass(frozen=True)
class Session:
    """One run of a benchmark: `status` shows the current step, `log` prints a line for each finished part.

    `get_or_compute` stores finished results in `pieces`; `folder` is for other files. With an `engine` of several
    workers, `compute_all` computes missing pieces at the same time.
    """

    status: OnMessage
    log: OnMessage
    folder: Path
    pieces: Pieces
    engine: Engine | None = None

    @property
    def is_parallel(self) -> bool:
        """Whether pieces can be computed by other processes."""
        return self.engine is not None and self.engine.is_parallel

    def get_or_compute(
        self, kind: type[_R], name: str, made_of: Mapping[str, Any], compute: Callable[[], _R]
    ) -> tuple[_R, str]:
        """The result for `made_of`, computed or from the cache, and a note if it was cached."""

        read = _reader(kind, name)
        piece = self.pieces.get_or_compute(name, _plain_parts(made_of), lambda: plain_result(compute), check=read)
        return read(piece.result), piece.note

    def has(self, kind: type[Any], name: str, made_of: Mapping[str, Any]) -> bool:
        """Whether the result need not be computed."""
        return self.pieces.has(name, _plain_parts(made_of), check=_reader(kind, name))

    def compute_all(self, jobs: Iterable[tuple[type[Any], Job]]) -> bool:
        """Computes those of the pieces that are missing on all workers; returns whether there were any."""
        assert self.engine is not None
        missing: dict[str, Job] = {}
        for kind, job in jobs:
            if not self.has(kind, job.name, job.made_of):
                made_of = _plain_parts(job.made_of)
                missing[digest(made_of)] = Job(job.name, made_of, plain_result, (job.function, *job.args))
        if missing:
            self.pieces.compute_all(list(missing.values()), self.engine)
        return bool(missing)


def plain_result(compute: Callable[..., Any], *args: Any) -> Any:
    """The result of the function, as a dictionary if it is a dataclass."""
    made: Any = compute(*args)
    return asdict(made) if dataclasses.is_dataclass(made) and not isinstance(made, type) else made


def _reader(kind: type[_R], name: str) -> Callable[[Any], _R]:
    """The function that reads a stored result."""
    return lambda stored: parse(kind, stored, what=f"{name}: a stored result", cure="It is computed again.")


def _plain_parts(made_of: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _plain_dependency(value) for key, value in made_of.items()}


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
    """Base class of benchmarks: a name, a description and its sizes.

    `is_stored` if results are cached in a folder, `is_parallel` if they contain no times that are compared; `width` is
    the number of columns of a terminal that tables need.
    """

    is_parallel = False

    def __init__(self, name: str, about: str, sizes: type[_S], *, is_stored: bool, width: int) -> None:
        self.name, self.about, self.sizes, self.is_stored, self.width = name, about, sizes, is_stored, width
        self.judge: Callable[[Any], Iterable[Goal]] = lambda _: ()
        self.more_tables: Callable[[Any], Iterable[Table]] = lambda _: ()

    def goals(self, function: Callable[[Any], Iterable[Goal]]) -> Any:
        """Decorator for the function that evaluates the goals of a result."""
        self.judge = function
        return function

    def tables(self, function: Callable[[Any], Iterable[Table]]) -> Any:
        """Decorator for the function that returns additional tables of a result."""
        self.more_tables = function
        return function

    def run(
        self,
        sizes: _S | None = None,
        *,
        out: Path | str = OUT,
        force: bool = False,
        workers: int | None = None,
        cluster: str | None = None,
        threads: int = 1,
        progress: OnMessage | None = None,
        on_row: OnMessage | None = None,
    ) -> BenchmarkResult:
        """Runs the benchmark; `out` is the folder of cached pieces and figures, `force` computes every piece again.

        `workers`, `cluster` and `threads` are those of `cluster.open_engine`, for sweeps only: a race measures times.
        `progress` is called with status messages, `on_row` with one line for each finished part.
        """
        sizes = need_instance(
            "sizes", self.sizes() if sizes is None else sizes, self.sizes, cure=f"Pass a {self.sizes.__name__}."
        )
        folder = need_path("out", out) / self.name
        status, log = _callback("progress", progress), _callback("on_row", on_row)
        cache = Cache(folder, modules=[self.module], force=need_flag("force", force), status=status)
        if not self.is_parallel:
            if workers is not None or cluster is not None:
                raise ValueRangeError(
                    f"workers need a benchmark without times; {self.name} compares times, which would disturb each "
                    "other. Omit workers and cluster."
                )
            return self.work(sizes, Session(status, log, folder, cache))
        with open_engine(workers=workers, cluster=cluster, threads=threads) as engine, fixed_threads(engine.threads):
            if engine.remark:
                log(engine.remark)
            return self.work(sizes, Session(status, log, folder, cache, engine))

    @property
    @abstractmethod
    def module(self) -> str:
        """Name of the module with the measuring function; cached pieces depend on its code."""

    @abstractmethod
    def work(self, sizes: _S, session: Session) -> BenchmarkResult:
        """Runs the benchmark with validated arguments."""


def _callback(name: str, value: Any) -> OnMessage:
    return (lambda _: None) if value is None else need_callable(name, value, cure="Omit it for no messages.")
