"""Rows that outlive a kill: each is written as a sealed record once it is measured, and read again by the next run.

The name of a record ends with the digest of everything the row was made of, so another network, other data or other
sizes are another row. The state of the library and of the benchmark's own code is stored with it but is no part of the
name: a row of older code is read again and says so.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from onlynorm.errors import FormatError
from onlynorm.evidence.papers.reproduce import library_digest, versions
from onlynorm.storage import claim, digest, read_sealed, write_sealed

KEPT, OLDER = "kept", "kept, of older code"
Say = Callable[[str], None]
_TYPES: dict[str, tuple[type, ...]] = {
    "float": (float, int), "int": (int,), "bool": (bool,), "str": (str,), "tuple": (list,), "Sequence": (list,),
}  # fmt: skip
"""Annotations of the fields of a row, and what JSON has in their place; sequences are of numbers."""


class Rows:
    """The records of one benchmark in one folder; `force` measures every row again.

    `module` is the `__name__` of the benchmark: a change of its code, or of what it imports, makes a row an older one.
    """

    def __init__(self, out: Path, *, kind: str, module: str, force: bool, say: Say) -> None:
        self.out, self.kind, self.force, self.say = out, kind, force, say
        self.made_with = {"library": library_digest(module), **versions()}

    def find(
        self,
        name: str,
        made_of: Mapping[str, Any],
        measure: Callable[[], dict[str, Any]],
        *,
        fields: Mapping[str, str],
    ) -> dict[str, Any]:
        """The fields of a row, measured now or by an earlier run; its "note" says which.

        A stored row that is damaged is measured again, and so is one that does not have exactly these fields (see
        `fields_of`), because another version wrote it.
        """
        path = self.out / f"{re.sub(r'[^A-Za-z0-9._]+', '-', name)}-{digest(made_of)[:16]}.json"
        if path.exists() and not self.force:
            try:
                body = read_sealed(path, kind=self.kind)
            except FormatError:
                self.say(f"{name}: the record {path.name} is damaged, so the row is made again")
            else:
                row = body.get("row")
                is_same = digest(body.get("made_of")) == digest(made_of)
                if is_same and isinstance(row, dict) and _has_fields(row, fields):
                    return {**row, "note": KEPT if body.get("made_with") == self.made_with else OLDER}
                self.say(f"{name}: the record {path.name} has other fields, so the row is made again")
        with claim(path):  # another run that needs this row is refused instead of measuring it a second time
            fresh = measure()
            write_sealed(path, {"made_of": made_of, "made_with": self.made_with, "row": fresh}, kind=self.kind)
        return {"note": "", **fresh}


def fields_of(row: type, *known: str) -> dict[str, str]:
    """Names and annotations of the fields of a dataclass that are measured: all but its note and those `known` before.

    The dataclass lives in a module with `from __future__ import annotations`, so that annotations are text.
    """
    return {one.name: str(one.type) for one in dataclasses.fields(row) if one.name not in (*known, "note")}


def _has_fields(row: Mapping[str, Any], fields: Mapping[str, str]) -> bool:
    def fits(value: Any, annotation: str) -> bool:
        kinds = _TYPES[annotation.partition("[")[0]]
        if kinds == (list,):
            return isinstance(value, list) and all(fits(one, "float") for one in value)
        return isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))

    return set(row) - {"note"} == set(fields) and all(fits(row[name], kind) for name, kind in fields.items())


def note_of(notes: list[str]) -> str:
    """What to say of a cell that several rows make: the worst of what is said of them."""
    return OLDER if OLDER in notes else KEPT if KEPT in notes else ""
