"""Races: benchmarks that compare several methods in one run, with the times of `timing.race`.

race = Race("chain", "Batched chains against a loop.", ChainSizes, columns={"rows": {"width": "width:,"}})

@race.measure
def measure(sizes: ChainSizes, session: Session) -> Iterator[tuple[str, ChainRow]]: ...  # (part, row)

@race.goals
def goals(result: RaceResult[ChainSizes]) -> Iterator[Goal]: ...
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

from onlynorm.display import Table
from onlynorm.evidence.harness import Benchmark, Goal, Session, Sizes
from onlynorm.memory import readable

_S = TypeVar("_S", bound=Sizes)


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
        """The goals that this run measured."""
        return list(self.race.judge(self))

    def find(self, **fields: Any) -> Any:
        """The first row with these values, or None if it was not measured."""
        return next((r for r in self.rows if all(getattr(r, k, None) == v for k, v in fields.items())), None)

    def pair(self, first: str, second: str, **fields: Any) -> list[tuple[Any, Any]]:
        """The first rows of two methods with these values, as a list of one pair, empty if one was not measured."""
        found = [self.find(method=method, **fields) for method in (first, second)]
        return [(found[0], found[1])] if all(found) else []

    def by(self, name: str, part: str = "rows") -> dict[Any, list[Any]]:
        """The rows of a part by one of their fields."""
        found: dict[Any, list[Any]] = {}
        for row in self.parts[part]:
            found.setdefault(getattr(row, name), []).append(row)
        return found

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
"""The content of a cell: a function of the row, or a field with a factor and a format.

Such as "seconds:.3g", "seconds*1e3:.1f" in ms, "accuracy*100:.2f" in percent, "memory:bytes", "seconds:time" and
"seconds:short" (two digits).
"""


def _cell(row: Any, column: Column) -> str:
    if not isinstance(column, str):
        return column(row)
    field, _, pattern = column.partition(":")
    name, _, factor = field.partition("*")
    value = getattr(row, name)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if pattern == "bytes":
        return readable(value) if value else "-"
    if pattern == "time":
        return time_text(value)
    if pattern == "short":
        return format(value, ".2g" if value < 10 else ".0f")
    return format(value * float(factor) if factor else value, pattern)


def time_text(seconds: float) -> str:
    """The time in the unit that fits, with three digits."""
    if seconds < 0.9995e-3:
        return f"{1e6 * seconds:.0f} us"
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


class Race(Benchmark[_S]):
    """A benchmark that compares methods in one run.

    `columns` maps the headings of each part's table to the content of a cell, see `Column`; a part without columns has
    no table. With `is_stored`, rows are cached by `Session.get_or_compute`.
    """

    def __init__(
        self, name: str, about: str, sizes: type[_S], *, columns: Mapping[str, Mapping[str, Column]],
        is_stored: bool = False, width: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(name, about, sizes, is_stored=is_stored, width=width)
        self.columns = columns

    @property
    def module(self) -> str:
        """Name of the module with the measuring function."""
        return self.rows.__module__

    def measure(self, function: Callable[[_S, Session], Iterable[tuple[str, Any]]]) -> Any:
        """Decorator for the generator of (part, row) or (part, list of rows); a row is a dataclass."""
        self.rows = function
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
