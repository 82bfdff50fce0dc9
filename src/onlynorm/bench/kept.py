"""Rows that outlive a kill: each is written as a sealed record once it is measured, and read again by the next run.

The name of a record ends with the digest of everything the row was made of, so another network, other data or other
sizes are another row. The state of the library is kept along but is no part of the name: a row of older code is read
again and says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from onlynorm.errors import FormatError
from onlynorm.papers.run import library_digest, versions
from onlynorm.report.sealed import digest, read_sealed, write_sealed

KEPT, OLDER = "kept", "kept, of older code"
Say = Callable[[str], None]


class Rows:
    """The records of one benchmark in one folder; `force` measures every row again."""

    def __init__(self, out: Path, *, kind: str, force: bool, say: Say) -> None:
        self.out, self.kind, self.force, self.say = out, kind, force, say
        self.made_with = {"library": library_digest(), **versions()}

    def find(self, name: str, made_of: Mapping[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The fields of a row, measured now or by an earlier run; its "note" says which."""
        path = self.out / f"{re.sub(r'[^A-Za-z0-9._]+', '-', name)}-{digest(made_of)[:16]}.json"
        if path.exists() and not self.force:
            try:
                body = read_sealed(path, kind=self.kind)
                row = dict(body["row"])
            except (FormatError, TypeError, KeyError):
                self.say(f"{name}: the record {path.name} is damaged, so the row is made again")
            else:
                return {**row, "note": KEPT if body.get("made_with") == self.made_with else OLDER}
        fresh = measure()
        write_sealed(path, {"made_of": made_of, "made_with": self.made_with, "row": fresh}, kind=self.kind)
        return {"note": "", **fresh}


def note_of(notes: list[str]) -> str:
    """What to say of a cell that several rows make: the worst of what is said of them."""
    return OLDER if OLDER in notes else KEPT if KEPT in notes else ""
