"""Artifacts: every figure, table and stated number of a paper, as words in TOML and a function in Python."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar, cast

from onlynorm.errors import FormatError, UnknownNameError
from onlynorm.evidence.cache import source_digest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onlynorm.evidence.papers.reproduce import Outcome, Run

Scale = Literal["quick", "paper"]
SCALES: tuple[Scale, ...] = ("quick", "paper")
KINDS = ("figure", "table", "number")
_ID = re.compile(r"[a-z0-9_]+:[a-z0-9][a-z0-9.-]*")
_FUNCTIONS: dict[str, tuple[Callable[[Run], Outcome], str]] = {}
_Function = TypeVar("_Function", bound="Callable[[Run], Outcome]")


@dataclass(frozen=True)
class Expectation:
    """What a value has to be: near `value` within `tolerance`, or between `minimum` and `maximum`, or both.

    `is_relative` reads the tolerance as a share of the value. A soft expectation that fails is a caveat, not
    a failure. `scale` limits it to one scale; None means both.
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
    """One figure, table or number: what the paper claims, at which sizes we measure it, what we expect."""

    id: str
    title: str
    claim: str
    kind: str
    seeds: tuple[int, ...]
    sizes: Mapping[str, Mapping[str, Any]]
    expectations: tuple[Expectation, ...]
    caveats: tuple[str, ...]
    function: Callable[[Run], Outcome]
    source_digest: str

    def expectations_at(self, scale: Scale) -> tuple[Expectation, ...]:
        """The expectations that hold at this scale."""
        return tuple(item for item in self.expectations if item.scale in (None, scale))


def artifact(id: str) -> Callable[[_Function], _Function]:
    """A decorator that binds a function `(run) -> Outcome` to the artifact of this id.

    The text of the function's module is hashed here, at import, so that the hash belongs to the code in
    memory even if the file changes later.
    """

    def bind(function: _Function) -> _Function:
        known = _FUNCTIONS.get(id)
        if known is not None and known[0].__module__ != function.__module__:
            raise FormatError(
                f"artifact {id!r} needs one function; got a second in {function.__module__} beside "
                f"{known[0].__module__}. Give it another id."
            )
        _FUNCTIONS[id] = (function, source_digest(function))
        return function

    return bind


def artifacts() -> dict[str, Artifact]:
    """Every artifact of the papers in this package, by id."""
    found: dict[str, Artifact] = {}
    for path in sorted((Path(__file__).parent / "papers").glob("*/artifacts.toml")):
        found.update(load_artifacts(path, importlib.import_module(f"{__package__}.papers.{path.parent.name}")))
    return found


def load_artifacts(path: Path | str, module: ModuleType) -> dict[str, Artifact]:
    """The artifacts that a TOML file describes and `module` computes, by id; each needs its other half."""
    path = Path(path)
    entries = _read_toml(path).get("artifact", [])
    found: dict[str, Artifact] = {}
    for entry in entries:
        fields = _Fields(entry, where=f"an artifact in {path.name}")
        id = fields.text("id")
        if not _ID.fullmatch(id):
            raise FormatError(f"an artifact needs an id like 'paper:fig-3'; got {id!r} in {path.name}.")
        if id in found:
            raise FormatError(f"{path.name} needs each artifact once; got {id!r} twice.")
        if id not in _FUNCTIONS:
            raise FormatError(
                f"artifact {id!r} of {path.name} needs a function; {module.__name__} has none. "
                f'Decorate one with @artifact("{id}").'
            )
        found[id] = _artifact(id, fields, entry)
    for id, (function, _) in _FUNCTIONS.items():
        if f"{function.__module__}.".startswith(f"{module.__name__}.") and id not in found:
            raise FormatError(f"the function for {id!r} needs an [[artifact]] table in {path.name}; it has none.")
    return found


def select(ids: Iterable[str | Artifact] | None, known: Mapping[str, Artifact]) -> tuple[Artifact, ...]:
    """The artifacts named by `ids`: ids, paper keys (all of that paper) or Artifact objects; None is all."""
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
        raise FormatError(f"{path.name} needs valid TOML; {error}.") from error


class _Fields:
    """Typed access to one TOML table; what nobody asked for is an error, so a misspelt key cannot hide."""

    def __init__(self, table: Any, *, where: str) -> None:
        if not isinstance(table, dict):
            raise FormatError(f"{where} needs to be a table; got {type(table).__name__}.")
        self.table, self.where, self.used = table, where, set[str]()

    def get(self, name: str, kind: type | tuple[type, ...], word: str, default: Any = None) -> Any:
        self.used.add(name)
        value = self.table.get(name, default)
        wrong = not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)
        if wrong and not (value is None and name not in self.table and default is None and word == "number"):
            got = "nothing" if name not in self.table else repr(value)
            raise FormatError(f"{self.where} needs {name!r} as {word}; got {got}.")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = cast(str, self.get(name, str, "text", default)).strip()
        if not value and default is None:
            raise FormatError(f"{self.where} needs {name!r}; it is empty.")
        return value

    def number(self, name: str) -> float | None:
        value = self.get(name, (int, float), "number")
        return None if value is None else float(value)

    def close(self) -> None:
        extra = sorted(set(self.table) - self.used)
        if extra:
            raise FormatError(f"{self.where} has the unknown field {extra[0]!r}. Known: {sorted(self.used)}.")


def _artifact(id: str, fields: _Fields, entry: Mapping[str, Any]) -> Artifact:
    fields.where = f"artifact {id!r}"
    kind = fields.text("kind")
    if kind not in KINDS:
        raise FormatError(f"{fields.where} needs kind in {KINDS}; got {kind!r}.")
    seeds = fields.get("seeds", list, "a list of integers")
    if not seeds or not all(type(seed) is int for seed in seeds):
        raise FormatError(f"{fields.where} needs at least one integer seed; got {seeds!r}.")
    sizes = fields.get("sizes", dict, "a table")
    if set(sizes) != set(SCALES) or not all(isinstance(table, dict) for table in sizes.values()):
        raise FormatError(f"{fields.where} needs sizes.quick and sizes.paper; got {sorted(sizes)}.")
    caveats = fields.get("caveats", list, "a list of texts", [])
    tables = fields.get("expect", list, "a list of tables")
    expectations = tuple(_expectation(part, id) for table in tables for part in _by_scale(table))
    built = Artifact(
        id=id,
        title=fields.text("title"),
        claim=fields.text("claim"),
        kind=kind,
        seeds=tuple(seeds),
        sizes=sizes,
        expectations=expectations,
        caveats=tuple(str(caveat) for caveat in caveats),
        function=_FUNCTIONS[id][0],
        source_digest=_FUNCTIONS[id][1],
    )
    fields.close()
    for scale in SCALES:
        here = built.expectations_at(scale)
        if not any(not item.is_soft for item in here):
            raise FormatError(f"{fields.where} needs an expectation that can fail at scale {scale!r}; got none.")
        if len({item.name for item in here}) < len(here):
            raise FormatError(f"{fields.where} needs one expectation per name at scale {scale!r}.")
    return built


def _by_scale(table: Any) -> list[Any]:
    """Numbers that differ by scale, `max = { quick = 0.04, paper = 0.02 }`, make an expectation per scale."""
    numbers = ("value", "tolerance", "min", "max")
    if not isinstance(table, dict) or not any(isinstance(table.get(name), dict) for name in numbers):
        return [table]
    parts = []
    for scale in SCALES:
        part = {name: item for name, item in table.items() if not isinstance(item, dict)}
        for name in numbers:
            if isinstance(table.get(name), dict):
                part[name] = table[name].get(scale)
        parts.append({**part, "scale": scale})
    return parts


def _expectation(item: Any, id: str) -> Expectation:
    fields = _Fields(item, where=f"an expectation of {id!r}")
    scale = fields.text("scale", "")
    built = Expectation(
        name=fields.text("name"),
        source=fields.text("source"),
        value=fields.number("value"),
        tolerance=fields.number("tolerance"),
        is_relative=fields.get("relative", bool, "true or false", False),
        minimum=fields.number("min"),
        maximum=fields.number("max"),
        is_soft=fields.get("soft", bool, "true or false", False),
        scale=cast(Scale, scale) if scale else None,
        note=fields.text("note", ""),
    )
    fields.close()
    where = f"expectation {built.name!r} of {id!r}"
    if scale not in ("", *SCALES):
        raise FormatError(f"{where} needs scale in {SCALES}; got {scale!r}.")
    if built.tolerance is not None and (built.value is None or not built.tolerance > 0):
        raise FormatError(f"{where} needs a value and a positive tolerance around it; got {built.tolerance!r}.")
    if built.tolerance is None and built.minimum is None and built.maximum is None:
        raise FormatError(f"{where} needs a tolerance, a min or a max: nothing decides it.")
    return built
