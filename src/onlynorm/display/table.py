"""Tables of text and numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from onlynorm.errors import ValueRangeError, shown, visible
from onlynorm.validate import need_items

_ONE = r"[-+−]?(\d[\d.,]*(e[-+]?\d+)?( ?(%|[kMGTP]?B|[kMGTPE]))?|inf|∞)"
_NUMBER = re.compile(rf"[-–]|nan|NaN|{_ONE}(/{_ONE})?")


@dataclass(frozen=True)
class Table:
    """Rows of numbers and strings with column names. `width` is the number of terminal columns it needs."""

    columns: Sequence[str]
    rows: Sequence[Sequence[float | str]]
    width: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", tuple(need_items("columns", self.columns, cure="Pass a list of names.")))
        given = need_items("rows", self.rows, cure="Pass a list of rows.")
        rows = [need_items("a row", row, cure="Pass a list of cells.") for row in given]
        object.__setattr__(self, "rows", tuple(tuple(row) for row in rows))
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueRangeError(f"a row needs {len(self.columns)} cells; got {len(row)}: {shown(row)}.")

    def __repr__(self) -> str:
        return f"Table({len(self.rows)} rows of {', '.join(self.columns)})"

    def _repr_markdown_(self) -> str:
        return self.markdown()

    @property
    def numeric(self) -> tuple[int, ...]:
        """Indices of columns that contain only numbers, including formatted ones: 1.5e-03, 12 %, 3.2 MB, 5/7, -."""
        indices = range(len(self.columns)) if self.rows else ()
        return tuple(i for i in indices if all(_is_number(row[i]) for row in self.rows))

    def markdown(self) -> str:
        """The table as Markdown text."""
        lines = ["| " + " | ".join(self.columns) + " |", "|" + " --- |" * len(self.columns)]
        return visible("\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in self.rows)]))


def _is_number(cell: float | str) -> bool:
    return not isinstance(cell, str) or _NUMBER.fullmatch(cell) is not None
