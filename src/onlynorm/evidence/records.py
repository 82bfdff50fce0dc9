"""Records: what one reproduction measured, beside what the paper says, in one file."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

from onlynorm.errors import FormatError, MissingDataError, ValueRangeError, shown
from onlynorm.storage import read_sealed, write_sealed
from onlynorm.validate import as_real, need_items, need_path

CurveKind = Literal["line", "points", "line+points", "histogram"]
RECORD = "onlynorm-record"


class Verdict(str, enum.Enum):
    """What a reproduction amounts to."""

    REPRODUCED = "reproduced"
    CAVEAT = "with a caveat"
    NOT_REPRODUCED = "not reproduced"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Curve:
    """One curve of a figure. A histogram has one more x (the bin edges) than y (the heights).

    `style` is "data" for what we measured and "law" for what theory or the paper predicts.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    kind: CurveKind = "line"
    panel: str = ""
    style: Literal["data", "law"] = "data"

    def __post_init__(self) -> None:
        names = [value if isinstance(value, str) else None for value in (self.kind, self.style)]
        if names[0] not in get_args(CurveKind) or names[1] not in ("data", "law"):
            raise ValueRangeError(
                f"curve {shown(self.label)} needs kind in {get_args(CurveKind)} and style data or law; "
                f"got {shown(self.kind)} and {shown(self.style)}."
            )
        for axis in ("x", "y"):
            values = as_real(f"{axis} of curve {shown(self.label)}", getattr(self, axis), ndim=1, cure="Pass a list.")
            object.__setattr__(self, axis, tuple(float(value) for value in values.tolist()))
        extra = 1 if self.kind == "histogram" else 0
        if len(self.x) != len(self.y) + extra:
            raise ValueRangeError(
                f"curve {shown(self.label)} of kind {self.kind!r} needs {len(self.y) + extra} x for its "
                f"{len(self.y)} y; got {len(self.x)}."
            )


@dataclass(frozen=True)
class Panel:
    """One pair of axes; curves name the panel they belong to.

    `x_names` stand at 1, 2, 3 and so on instead of numbers.
    """

    name: str = ""
    title: str = ""
    x_label: str = ""
    y_label: str = ""
    x_log: bool = False
    y_log: bool = False
    x_names: Sequence[str] = ()

    def __post_init__(self) -> None:
        names = need_items("x_names", self.x_names, cure="Pass a list of texts.")
        object.__setattr__(self, "x_names", tuple(names))


@dataclass(frozen=True)
class Table:
    """Rows of numbers and words under their headings."""

    columns: Sequence[str]
    rows: Sequence[Sequence[float | str]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", tuple(need_items("columns", self.columns, cure="List the headings.")))
        given = need_items("rows", self.rows, cure="List them.")
        rows = [need_items("a row", row, cure="List its cells.") for row in given]
        object.__setattr__(self, "rows", tuple(tuple(row) for row in rows))
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueRangeError(f"a row needs {len(self.columns)} cells; got {len(row)}: {shown(row)}.")


@dataclass(frozen=True)
class Check:
    """One expectation with our number beside it."""

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
    """How one piece of the work came about."""

    name: str
    key: str
    config: Mapping[str, Any]
    seconds: float
    is_reloaded: bool
    is_stale: bool = False


@dataclass(frozen=True)
class Record:
    """One reproduction: configuration, measurements, the paper's numbers beside ours, and the verdict."""

    artifact: str
    title: str
    claim: str
    kind: str
    scale: str
    verdict: Verdict
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
        """The paper's key: what stands before the colon of the artifact's id."""
        return self.artifact.partition(":")[0]

    def __str__(self) -> str:
        lines = [f"{self.artifact} ({self.scale}): {self.verdict}"]
        for check in self.checks:
            ours = "missing" if check.ours is None else f"{check.ours:.4g}"
            mark = "ok " if check.is_met else ("off" if not check.is_soft else "off (soft)")
            lines.append(f"  {mark} {check.name}: {ours}, accepted {check.accepted}")
        lines += [f"  - {reason}" for reason in self.reasons]
        return "\n".join(lines)


def write_record(path: Path, record: Record) -> None:
    """Write one sealed record file."""
    body = dataclasses.asdict(record)
    body["verdict"] = record.verdict.value
    write_sealed(path, body, kind=RECORD)


def read_record(path: Path) -> Record:
    """The record in this file; `FormatError` when it is damaged or holds fields of the wrong kind."""
    path = need_path("read_record", path)
    body = read_sealed(path, kind=RECORD)
    try:
        return _record(body)
    except FormatError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise FormatError(
            f"a record needs all its fields; {path.name} fails with {type(error).__name__}: {error}. "
            "Delete the file and run `reproduce` again."
        ) from error


def read_records(folder: Path) -> tuple[Record, ...]:
    """Every record below `folder`, ordered by artifact, then scale."""
    folder = need_path("read_records", folder)
    if not folder.is_dir():
        raise MissingDataError(
            f"a report needs a folder of records; there is none at {folder}. Run `onlynorm reproduce` first."
        )
    records = [read_record(path) for path in sorted(folder.rglob("record.json"))]
    return tuple(sorted(records, key=lambda record: (record.artifact, record.scale)))


def _record(body: Mapping[str, Any]) -> Record:
    return Record(
        artifact=_text(body, "artifact"),
        title=_text(body, "title"),
        claim=_text(body, "claim"),
        kind=_text(body, "kind"),
        scale=_text(body, "scale"),
        verdict=Verdict(_text(body, "verdict")),
        reasons=_texts(body, "reasons"),
        checks=tuple(_check(item) for item in _list(body, "checks")),
        values={name: _number(value) for name, value in _dict(body, "values").items()},
        sizes=_dict(body, "sizes"),
        seeds=_whole_numbers(body, "seeds"),
        caveats=_texts(body, "caveats"),
        curves=tuple(Curve(**_fields(item, Curve)) for item in _list(body, "curves")),
        panels=tuple(_panel(item) for item in _list(body, "panels")),
        table=None if body["table"] is None else _table(body["table"]),
        pieces=tuple(_piece(item) for item in _list(body, "pieces")),
        versions={name: _text(_dict(body, "versions"), name) for name in _dict(body, "versions")},
        platform={name: _text(_dict(body, "platform"), name) for name in _dict(body, "platform")},
        code=_text(body, "code"),
        created=_text(body, "created"),
        seconds=_number(body["seconds"]),
    )


def _check(item: Mapping[str, Any]) -> Check:
    return Check(
        name=_text(item, "name"),
        ours=None if item["ours"] is None else _number(item["ours"]),
        is_met=_flag(item, "is_met"),
        accepted=_text(item, "accepted"),
        source=_text(item, "source"),
        value=None if item["value"] is None else _number(item["value"]),
        is_soft=_flag(item, "is_soft"),
        note=_text(item, "note"),
    )


def _panel(item: Mapping[str, Any]) -> Panel:
    words = {key: _text(item, key) for key in ("name", "title", "x_label", "y_label")}
    names = _texts(item, "x_names") if "x_names" in item else ()  # older records have none
    return Panel(**words, x_log=_flag(item, "x_log"), y_log=_flag(item, "y_log"), x_names=names)


def _piece(item: Mapping[str, Any]) -> PieceNote:
    return PieceNote(
        name=_text(item, "name"),
        key=_text(item, "key"),
        config=_dict(item, "config"),
        seconds=_number(item["seconds"]),
        is_reloaded=_flag(item, "is_reloaded"),
        is_stale=_flag(item, "is_stale"),
    )


def _table(item: Mapping[str, Any]) -> Table:
    rows = _list(item, "rows")
    if not all(isinstance(row, list) for row in rows):
        raise FormatError("the table of a record needs a list of rows.")
    rows = [[cell if isinstance(cell, str) else _number(cell) for cell in row] for row in rows]
    return Table(columns=_texts(item, "columns"), rows=rows)


def _fields(item: Any, kind: type[Curve]) -> dict[str, Any]:
    names = [entry.name for entry in dataclasses.fields(kind)]
    for name in ("label", "panel", "style", "kind"):
        _text(item, name)
    numbers = {name: [_number(value) for value in _list(item, name)] for name in ("x", "y")}
    return {name: item[name] for name in names} | numbers


def _text(body: Mapping[str, Any], name: str) -> str:
    if not isinstance(body, Mapping):
        raise FormatError(f"a record needs a table with {name!r}; got {type(body).__name__}.")
    if not isinstance(body[name], str):
        raise FormatError(f"field {name!r} of a record needs text; got {type(body[name]).__name__}.")
    return str(body[name])


def _texts(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    items = _list(body, name)
    if not all(isinstance(item, str) for item in items):
        raise FormatError(f"field {name!r} of a record needs a list of texts.")
    return tuple(items)


def _whole_numbers(body: Mapping[str, Any], name: str) -> tuple[int, ...]:
    items = _list(body, name)
    if not all(type(item) is int for item in items):
        raise FormatError(f"field {name!r} of a record needs a list of whole numbers.")
    return tuple(items)


def _list(body: Mapping[str, Any], name: str) -> list[Any]:
    if not isinstance(body[name], list):
        raise FormatError(f"field {name!r} of a record needs a list; got {type(body[name]).__name__}.")
    return cast("list[Any]", body[name])


def _dict(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(body[name], dict):
        raise FormatError(f"field {name!r} of a record needs a table; got {type(body[name]).__name__}.")
    return cast("dict[str, Any]", body[name])


def _flag(body: Mapping[str, Any], name: str) -> bool:
    if not isinstance(body[name], bool):
        raise FormatError(f"field {name!r} of a record needs true or false; got {body[name]!r}.")
    return bool(body[name])


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FormatError(f"a record needs a number here; got {type(value).__name__}.")
    return float(value)
