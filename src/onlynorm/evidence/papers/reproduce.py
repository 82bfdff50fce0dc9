"""Runs artifacts in pieces; every finished piece is cached, so that an interrupted run resumes.

The key of a piece is the digest of
  - the artifact's id, the piece's name and its configuration,
  - the source text of the artifact's module and of the module that defines the piece's function, without imports,
  - the format of cached pieces and the version of onlynorm.
Sizes and seeds are not part of the key: a piece is a plain function without a closure, so it depends only on its
configuration and its source text, and a larger sweep reuses the pieces of a smaller one. The rest of the library, and
the modules of papers that the two modules import, change too often to be part of the key; their digest is stored in
each piece. A piece computed with another version of the library, torch, numpy or scipy is marked as stale and adds a
caveat to the record until it is recomputed with `force=True`.
"""

from __future__ import annotations

import datetime
import platform
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any, Literal

import torch

import onlynorm
from onlynorm.display import Curve, Panel, Table
from onlynorm.errors import MissingDataError, StorageError, ValueRangeError
from onlynorm.evidence.artifacts import SCALES, Artifact, Scale, artifacts, select
from onlynorm.evidence.cache import Cache, Piece, source_digest, versions
from onlynorm.evidence.harness import Session
from onlynorm.evidence.papers.expectations import check, decide
from onlynorm.evidence.records import PieceNote, Record, write_record
from onlynorm.storage import claim, from_plain, to_plain
from onlynorm.validate import need_callable, need_instance, need_items, need_path

PIECE_FORMAT = 1
RECORDS = Path("onlynorm-out/records")
_STALE = "Some pieces were computed with another version of the library. Run with force=True to compute them again."


@dataclass(frozen=True)
class Outcome:
    """Result of an artifact's function: named values, the curves of its figure, and its table."""

    values: Mapping[str, float]
    curves: Sequence[Curve] = ()
    panels: Sequence[Panel] = ()
    table: Table | None = None


@dataclass(frozen=True)
class PieceProgress:
    """One step of a run, passed to the progress callback; `total` is None until the number of pieces is known."""

    artifact: str
    piece: str
    state: Literal["started", "computed", "reloaded", "finished"]
    done: int
    total: int | None


@dataclass
class Run:
    """The run of an artifact, passed to its function: sizes, seeds and cached pieces."""

    artifact: Artifact
    scale: Scale
    folder: Path
    is_forced: bool = False
    report: Callable[[PieceProgress], None] = field(default=lambda _: None)
    notes: list[PieceNote] = field(default_factory=list)
    total: int | None = None

    @property
    def sizes(self) -> Mapping[str, Any]:
        """The sizes at this scale, from the TOML file."""
        return self.artifact.sizes[self.scale]

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds at this scale: all seeds of the artifact, or the first `n_seeds` if the sizes contain this key."""
        return self.artifact.seeds[: self.sizes.get("n_seeds")]

    def announce(self, n_pieces: int) -> None:
        """Sets the number of pieces, for the progress callback."""
        self.total = n_pieces

    def progress(self, piece: str, state: Literal["started", "computed", "reloaded", "finished"]) -> None:
        """Reports one step to the progress callback."""
        self.report(PieceProgress(self.artifact.id, piece, state, len(self.notes), self.total))

    def piece(self, name: str, function: Callable[..., Any], **config: Any) -> Any:
        """The cached result of `function(**config)`, as numbers and lists.

        A new result is converted in the same way as a cached one, so that the types are the same.
        """
        if not isinstance(function, FunctionType) or function.__closure__:
            raise ValueRangeError(
                f"piece {name!r} needs a plain function without a closure, so that its result depends only on its "
                f"configuration; got {function!r}. Define it at the top of a module and pass the rest as config."
            )
        config = to_plain(config)
        modules = (self.artifact.function.__module__, function.__module__)
        made_of = piece_parts(self.artifact, name, function, config)
        return self._stored(name, made_of, config, lambda: function(**from_plain(config)), modules).result

    def session(self, n_pieces: int) -> Session:
        """The session of a sweep inside this artifact; each training is a piece."""
        self.announce(n_pieces)
        return Session(lambda _: None, lambda _: None, self.folder, self)

    def get_or_compute(
        self, name: str, made_of: Mapping[str, Any], compute: Callable[[], Any], *,
        check: Callable[[Any], object] = lambda _: None,
    ) -> Piece:  # fmt: skip
        """A piece of a sweep; its key includes the source text of the artifact's module."""
        code = [self.artifact.source_digest, PIECE_FORMAT, onlynorm.__version__]
        config, modules = to_plain(made_of), (self.artifact.function.__module__,)
        parts = {"artifact": self.artifact.id, "piece": name, "config": config, "code": code}
        return self._stored(name, parts, config, compute, modules, check)

    def _stored(
        self, name: str, made_of: Mapping[str, Any], config: Any, compute: Callable[[], Any], modules: Iterable[str],
        check: Callable[[Any], object] = lambda _: None,
    ) -> Piece:  # fmt: skip
        cache = Cache(self.folder / "pieces", modules=modules, force=self.is_forced)
        self.progress(name, "started")
        found = cache.get_or_compute(name, made_of, compute, check=check)
        self.notes.append(PieceNote(name, found.key, config, found.seconds, found.is_reloaded, found.is_stale))
        self.progress(name, "reloaded" if found.is_reloaded else "computed")
        return found


def reproduce(
    ids: str | Artifact | Iterable[str | Artifact] | None = None,
    *,
    scale: Scale = "quick",
    out: Path | str = RECORDS,
    force: bool = False,
    progress: Callable[[PieceProgress], None] | None = None,
) -> tuple[Record, ...]:
    """One record per artifact, written with its figure to `out`; finished pieces are reused unless `force`.

    `ids` are artifact ids, keys of papers (all artifacts of that paper) or Artifact objects; None selects all. If an
    artifact raises an error, its record contains the error and the others still run. An artifact whose data is missing
    gets no record; `MissingDataError` is raised after the others are done.
    """
    if scale not in SCALES:
        raise ValueRangeError(f"reproduce needs scale in {SCALES}; got {scale!r}.")
    folder = need_path("out", out)
    if progress is not None:
        need_callable("progress", progress, cure="Leave it out for no progress reports.")
    if ids is not None:
        cure = "Pass ids like 'random_features:fig-3', keys of papers, or Artifact objects."
        ids = [ids] if isinstance(ids, str | Artifact) else need_items("ids", ids, cure=cure)
        for item in ids:
            need_instance("ids", item, (str, Artifact), cure=cure)
    only_given = ids is not None and all(isinstance(item, Artifact) for item in ids)
    chosen = select(ids, {} if only_given else artifacts())
    records, without = [], {}
    for one in chosen:
        try:
            with claim(Path(out).joinpath(*one.id.split(":"))):
                records.append(_reproduce(one, scale, folder, force, progress))
        except MissingDataError as error:
            without[one.id] = error
    if without:
        done = " The others are done." if records else ""
        raise MissingDataError(f"{', '.join(without)}: {next(iter(without.values()))}{done}")
    return tuple(records)


def _reproduce(
    one: Artifact, scale: Scale, out: Path, force: bool, progress: Callable[[PieceProgress], None] | None
) -> Record:
    folder = out.joinpath(*one.id.split(":"))
    run = Run(one, scale, folder, is_forced=force)
    if progress is not None:
        run.report = progress
    start, failure = time.perf_counter(), ""
    try:
        outcome = one.function(run)
    except (MissingDataError, StorageError):
        raise
    except Exception as error:
        outcome, failure = (
            Outcome(values={}),
            f"The run stopped: {type(error).__name__}: {_without_paths(str(error))}",
        )
    record = _record(run, outcome, failure=failure, seconds=time.perf_counter() - start)
    place = folder / scale
    write_record(place / "record.json", record)
    record.figure.write(place)
    run.progress("", "finished")
    return record


def _record(run: Run, outcome: Outcome, *, failure: str, seconds: float) -> Record:
    one = run.artifact
    values = {name: float(value) for name, value in outcome.values.items()}
    checks = tuple(check(item, values) for item in one.expectations_at(run.scale))
    caveats = (*one.caveats, *([_STALE] if any(note.is_stale for note in run.notes) else []))
    verdict, reasons = decide(checks, scale=run.scale, caveats=caveats, failure=failure)
    return Record(
        artifact=one.id,
        title=one.title,
        claim=one.claim,
        kind=one.kind,
        scale=run.scale,
        verdict=verdict,
        reasons=reasons,
        checks=checks,
        values=values,
        sizes=run.sizes,
        seeds=run.seeds,
        caveats=caveats,
        curves=tuple(outcome.curves),
        panels=tuple(outcome.panels),
        table=outcome.table,
        pieces=tuple(run.notes),
        versions=versions(),
        platform=_platform(),
        code=one.source_digest,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        seconds=seconds,
    )


def piece_parts(one: Artifact, name: str, function: FunctionType, config: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a piece's key; see the docstring of this module."""
    own_module = one.function.__module__ == function.__module__
    sources = [one.source_digest, one.source_digest if own_module else source_digest(function)]
    code = [*sources, function.__qualname__, PIECE_FORMAT, onlynorm.__version__]
    return {"artifact": one.id, "piece": name, "config": config, "code": code}


def _platform() -> dict[str, str]:
    """System, processor and threads, without the name of the machine."""
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "threads": str(torch.get_num_threads()),
        "device": "cuda" if torch.cuda.is_available() else "cpu",
    }


def _without_paths(text: str) -> str:
    """A message without the folders of this machine: paths are reduced to their last component."""
    return re.sub(r"(?:[A-Za-z]:)?[\\/](?:[^\s\\/'\":;,]+[\\/])+", "…/", text)
