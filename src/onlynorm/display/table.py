"""A table: cells of text and numbers under their headings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onlynorm.errors import ValueRangeError, shown, visible
from onlynorm.validate import need_items


@dataclass(frozen=True)
class Table:
    """Rows of numbers and words under their headings. `width` is how many columns a terminal needs to show it."""

    columns: Sequence[str]
    rows: Sequence[Sequence[float | str]]
    width: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", tuple(need_items("columns", self.columns, cure="List the headings.")))
        given = need_items("rows", self.rows, cure="List them.")
        rows = [need_items("a row", row, cure="List its cells.") for row in given]
        object.__setattr__(self, "rows", tuple(tuple(row) for row in rows))
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueRangeError(f"a row needs {len(self.columns)} cells; got {len(row)}: {shown(row)}.")

    @property
    def numeric(self) -> tuple[int, ...]:
        """Places of the columns that hold only numbers."""
        places = range(len(self.columns)) if self.rows else ()
        return tuple(i for i in places if all(not isinstance(row[i], str) for row in self.rows))

    def markdown(self) -> str:
        """The table as Markdown text."""
        lines = ["| " + " | ".join(self.columns) + " |", "|" + " --- |" * len(self.columns)]
        return visible("\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in self.rows)]))
