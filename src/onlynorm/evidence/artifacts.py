"""Artifacts: the figures, tables and stated numbers of a paper, as descriptions in TOML and functions in Python."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, StringConstraints

from onlynorm.errors import FormatError, UnknownNameError
from onlynorm.evidence.cache import source_digest
from onlynorm.evidence.records import STRICT, Filled, parse

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from onlynorm.evidence.papers.reproduce import Outcome, Run

Scale = Literal["quick", "paper"]
SCALES: tuple[Scale, ...] = ("quick", "paper")
Function = Callable[["Run"], "Outcome"]
"""Computes an artifact: takes a run, returns its outcome."""


@dataclass(frozen=True)
class Expectation:
    """The expected range of a value: `value` within `tolerance`, between `minimum` and `maximum`, or both.

    With `is_relative` the tolerance is a fraction of the value. A soft expectation that fails is a caveat, not a
    failure. `scale` limits it to one scale; None means both.
    """

    name: str
    source: str
    value: float | None = None
    tolerance: float | None = None
    is_relative: bool = False
    minimum: float | None = None
    maximum: float | None = None
    is_soft: bool = False
    scale: Scale | None = None
    note: str = ""


@dataclass(frozen=True)
class Artifact:
    """A figure, table or number: the claim of the paper, the sizes of the measurement, and the expectations."""

    id: str
    title: str
    claim: str
    kind: str
    seeds: tuple[int, ...]
    sizes: Mapping[str, Mapping[str, Any]]
    expectations: tuple[Expectation, ...]
    caveats: tuple[str, ...]
    function: Function
    source_digest: str

    def expectations_at(self, scale: Scale) -> tuple[Expectation, ...]:
        """The expectations for this scale."""
        return tuple(item for item in self.expectations if item.scale in (None, scale))


def artifacts() -> dict[str, Artifact]:
    """All artifacts of the papers in this package, by id."""
    from onlynorm.evidence.papers.table import PAPERS  # avoids a circular import

    found: dict[str, Artifact] = {}
    for paper in PAPERS:
        found.update(load_artifacts(Path(str(paper.__file__)).with_name("artifacts.toml"), paper.ARTIFACTS))
    return dict(sorted(found.items(), key=lambda item: item[0].partition(":")[0]))


def load_artifacts(path: Path | str, functions: Mapping[str, Function]) -> dict[str, Artifact]:
    """The artifacts of a TOML file with their functions, by id; raises unless the ids are the same."""
    path = Path(path)
    entries = _read_toml(path).get("artifact", [])
    found: dict[str, Artifact] = {}
    for number, table in enumerate(entries, start=1):
        name = table.get("id", number) if isinstance(table, dict) else number
        entry = parse(_Entry, table, what=f"artifact {name} of {path.name}", cure="Correct the field.")
        if entry.id in found:
            raise FormatError(f"{path.name} needs each artifact once; got {entry.id!r} twice. Remove one.")
        if entry.id not in functions:
            raise FormatError(
                f"artifact {entry.id!r} of {path.name} needs a function; got {', '.join(functions) or 'none'}. Add it "
                "to the functions."
            )
        found[entry.id] = _artifact(entry, functions[entry.id])
    for id in functions:
        if id not in found:
            raise FormatError(f"the function for {id!r} needs an [[artifact]] table in {path.name}; got none. Add it.")
    return found


def select(ids: Iterable[str | Artifact] | None, known: Mapping[str, Artifact]) -> tuple[Artifact, ...]:
    """The artifacts selected by `ids`: ids, paper keys (all of that paper) or Artifact objects; None selects all."""
    if ids is None:
        return tuple(known.values())
    chosen: dict[str, Artifact] = {}
    for item in ids:
        if isinstance(item, Artifact):
            chosen[item.id] = item
        elif item in known:
            chosen[item] = known[item]
        else:
            of_paper = {id: one for id, one in known.items() if id.partition(":")[0] == item}
            if not of_paper:
                raise UnknownNameError("reproduce", item, {*known, *(id.partition(":")[0] for id in known)})
            chosen.update(of_paper)
    return tuple(chosen.values())


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise FormatError(f"{path.name} needs valid TOML; got: {error}. Correct the file.") from error


@dataclass(frozen=True)
class _Expect:
    """One [[artifact.expect]] table; numbers may differ by scale, as in `max = { quick = 0.04, paper = 0.02 }`."""

    name: Filled
    source: Filled
    value: float | dict[Scale, float] | None = None
    tolerance: float | dict[Scale, float] | None = None
    relative: bool = False
    min: float | dict[Scale, float] | None = None
    max: float | dict[Scale, float] | None = None
    soft: bool = False
    scale: Scale | None = None
    note: str = ""

    __pydantic_config__ = STRICT

    def at(self, scale: Scale) -> Expectation:
        """The expectation at one scale."""

        def number(given: float | dict[Scale, float] | None) -> float | None:
            return given.get(scale) if isinstance(given, dict) else given

        return Expectation(
            self.name, self.source, number(self.value), number(self.tolerance), self.relative, number(self.min),
            number(self.max), self.soft, scale, self.note.strip(),
        )  # fmt: skip

    def by_scale(self) -> tuple[Expectation, ...]:
        """One expectation for both scales, or one for each if values differ."""
        if any(isinstance(given, dict) for given in (self.value, self.tolerance, self.min, self.max)):
            return tuple(self.at(scale) for scale in SCALES)
        return (replace(self.at("quick"), scale=self.scale),)


@dataclass(frozen=True)
class _Sizes:
    """Sizes of an artifact at each scale."""

    quick: dict[str, Any]
    paper: dict[str, Any]

    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class _Entry:
    """One [[artifact]] table."""

    id: Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]+:[a-z0-9][a-z0-9.-]*$")]
    title: Filled
    claim: Filled
    kind: Literal["figure", "table", "number"]
    seeds: Annotated[tuple[int, ...], Field(min_length=1)]
    sizes: _Sizes
    expect: tuple[_Expect, ...]
    caveats: tuple[str, ...] = ()

    __pydantic_config__ = STRICT


def _artifact(entry: _Entry, function: Function) -> Artifact:
    expectations = tuple(one for given in entry.expect for one in given.by_scale())
    for one in expectations:
        where = f"expectation {one.name!r} of {entry.id!r}"
        if one.tolerance is not None and (one.value is None or not one.tolerance > 0):
            raise FormatError(f"{where} needs a value and a positive tolerance; got {one.tolerance!r}. Correct it.")
        if one.tolerance is None and one.minimum is None and one.maximum is None:
            raise FormatError(f"{where} needs a tolerance, a min or a max; got none. Add one.")
    built = Artifact(
        entry.id, entry.title, entry.claim, entry.kind, entry.seeds,
        {"quick": entry.sizes.quick, "paper": entry.sizes.paper}, expectations, entry.caveats, function,
        source_digest(function),
    )  # fmt: skip
    for scale in SCALES:
        expected = built.expectations_at(scale)
        if not any(not item.is_soft for item in expected):
            raise FormatError(
                f"artifact {entry.id!r} needs an expectation that is not soft at scale {scale!r}; got none. Add one."
            )
        if len({item.name for item in expected}) < len(expected):
            raise FormatError(f"artifact {entry.id!r} needs one expectation per name at scale {scale!r}.")
    return built
