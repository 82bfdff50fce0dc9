"""Records: the measurements of one reproduction and the values of the paper, in one file.

`parse` validates the content of a file with pydantic and returns a dataclass.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from pydantic import ConfigDict, StringConstraints, TypeAdapter, ValidationError

from onlynorm.display import Curve, Figure, Panel, Table
from onlynorm.errors import FormatError, MissingDataError
from onlynorm.storage import read_sealed, write_sealed
from onlynorm.validate import need_path

RECORD = "onlynorm-record"
Filled = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
"""A non-empty string."""
STRICT = ConfigDict(extra="forbid")
"""Pydantic configuration for files written by hand: unknown fields raise."""
_T = TypeVar("_T")


class RecordVerdict(str, enum.Enum):
    """The verdict of a reproduction."""

    REPRODUCED = "reproduced"
    CAVEAT = "with a caveat"
    NOT_REPRODUCED = "not reproduced"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Check:
    """One expectation and the measured value."""

    name: str
    ours: float | None
    is_met: bool
    accepted: str
    source: str
    value: float | None = None
    is_soft: bool = False
    note: str = ""


@dataclass(frozen=True)
class PieceNote:
    """Name, configuration, time and cache state of one piece."""

    name: str
    key: str
    config: Mapping[str, Any]
    seconds: float
    is_reloaded: bool
    is_stale: bool = False


@dataclass(frozen=True)
class Record:
    """One reproduction: configuration, measurements, the values of the paper, and the verdict."""

    artifact: str
    title: str
    claim: str
    kind: str
    scale: str
    verdict: RecordVerdict
    reasons: tuple[str, ...]
    checks: tuple[Check, ...]
    values: Mapping[str, float]
    sizes: Mapping[str, Any]
    seeds: tuple[int, ...]
    caveats: tuple[str, ...] = ()
    curves: tuple[Curve, ...] = ()
    panels: tuple[Panel, ...] = ()
    table: Table | None = None
    pieces: tuple[PieceNote, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    platform: Mapping[str, str] = field(default_factory=dict)
    code: str = ""
    created: str = ""
    seconds: float = 0.0

    @property
    def paper(self) -> str:
        """The key of the paper: the part of the artifact id before the colon."""
        return self.artifact.partition(":")[0]

    @property
    def figure(self) -> Figure:
        """The figure with all curves and panels."""
        return Figure(self.curves, self.panels)

    def __str__(self) -> str:
        lines = [f"{self.artifact} ({self.scale}): {self.verdict}"]
        for check in self.checks:
            ours = "missing" if check.ours is None else f"{check.ours:.4g}"
            mark = "ok " if check.is_met else ("off" if not check.is_soft else "off (soft)")
            lines.append(f"  {mark} {check.name}: {ours}, accepted {check.accepted}")
        lines += [f"  - {reason}" for reason in self.reasons]
        return "\n".join(lines)


def write_record(path: Path, record: Record) -> None:
    """Writes a record to a sealed file."""
    body = dataclasses.asdict(record)
    body["verdict"] = record.verdict.value
    write_sealed(path, body, kind=RECORD)


def read_record(path: Path) -> Record:
    """The record in this file; raises `FormatError` if it is damaged or has fields of the wrong type."""
    path = need_path("read_record", path)
    return parse(
        Record, read_sealed(path, kind=RECORD), what=f"the record {path.name}",
        cure="Delete the file and run `reproduce` again.",
    )  # fmt: skip


def read_records(folder: Path) -> tuple[Record, ...]:
    """All records in `folder` and its subfolders, sorted by artifact and scale."""
    folder = need_path("read_records", folder)
    if not folder.is_dir():
        raise MissingDataError(
            f"a report needs a folder of records; there is none at {folder}. Run `onlynorm reproduce` first."
        )
    records = [read_record(path) for path in sorted(folder.rglob("record.json"))]
    return tuple(sorted(records, key=lambda record: (record.artifact, record.scale)))


def parse(kind: type[_T], body: Any, *, what: str, cure: str) -> _T:
    """The content of a file as an instance of a dataclass; types are strict, except that lists become tuples."""
    try:
        text = json.dumps(body, default=repr)  # TOML has dates, which no field accepts
        json.loads(text, parse_int=_need_float_range)
        made: _T = _adapter(cast("Any", kind)).validate_json(text, strict=True)
    except ArithmeticError as error:
        raise FormatError(f"{what} needs numbers that fit into a float; got a larger one. {cure}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        got = f"{'.'.join(map(str, first['loc'])) or 'document'}: {first['msg'].rstrip('.')}"
        raise FormatError(f"{what} needs all fields with the right types; got {got}. {cure}") from error
    return made


@cache
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _need_float_range(digits: str) -> float:
    return float(int(digits))  # raises OverflowError; pydantic would return infinity
