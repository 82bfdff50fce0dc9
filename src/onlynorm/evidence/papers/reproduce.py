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

import contextlib
import datetime
import platform
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FunctionType
from typing import Any, Literal

import torch

import onlynorm
from onlynorm.cluster import Engine, fixed_threads, need_results, open_engine
from onlynorm.display import Curve, Panel, Table
from onlynorm.errors import MissingDataError, StorageError, ValueRangeError
from onlynorm.evidence.artifacts import SCALES, Artifact, Scale, artifacts, select
from onlynorm.evidence.cache import Cache, Job, Piece, compute_all, source_digest, versions
from onlynorm.evidence.harness import Session
from onlynorm.evidence.papers.expectations import check, decide
from onlynorm.evidence.records import PieceNote, Record, write_record
from onlynorm.storage import claim, digest, from_plain, to_plain
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
    engine: Engine | None = None
    fresh: dict[str, Piece] = field(default_factory=dict)

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
        job, modules = self.job(name, function, config)
        return self._stored(job, from_plain(to_plain(config)), lambda: job.function(*job.args), modules).result

    def job(self, name: str, function: Callable[..., Any], config: Mapping[str, Any]) -> tuple[Job, tuple[str, ...]]:
        """How a piece is computed, and the modules on which it depends."""
        if not isinstance(function, FunctionType) or function.__closure__:
            raise ValueRangeError(
                f"piece {name!r} needs a plain function without a closure, so that its result depends only on its "
                f"configuration; got {function!r}. Define it at the top of a module and pass the rest as config."
            )
        config = to_plain(config)
        made_of = piece_parts(self.artifact, name, function, config)
        modules = (self.artifact.function.__module__, function.__module__)
        return Job(name, made_of, call_with, (function, from_plain(config))), modules

    def session(self, n_pieces: int) -> Session:
        """The session of a sweep inside this artifact; each training is a piece."""
        self.announce(n_pieces)
        return Session(lambda _: None, lambda _: None, self.folder, self, self.engine)

    def get_or_compute(
        self, name: str, made_of: Mapping[str, Any], compute: Callable[[], Any], *,
        check: Callable[[Any], object] = lambda _: None,
    ) -> Piece:  # fmt: skip
        """A piece of a sweep; its key includes the source text of the artifact's module."""
        job = self._of_sweep(Job(name, made_of, compute))
        return self._stored(job, to_plain(made_of), compute, self._own_module, check)

    def has(self, name: str, made_of: Mapping[str, Any], *, check: Callable[[Any], object] = lambda _: None) -> bool:
        """Whether a piece of a sweep need not be computed."""
        return self.cache(self._own_module).has(
            name, self._of_sweep(Job(name, made_of, call_with)).made_of, check=check
        )

    def compute_all(self, jobs: Sequence[Job], engine: Engine) -> None:
        """Computes and stores pieces of a sweep on the workers of the engine."""
        cache = self.cache(self._own_module)
        need_results(compute_all([(cache, self._of_sweep(job)) for job in jobs], engine, progress=self.progress_of_all))

    def cache(self, modules: Iterable[str]) -> Cache:
        """The stored pieces, as computed by these modules."""
        return Cache(self.folder / "pieces", modules=modules, force=self.is_forced, fresh=self.fresh)

    def progress_of_all(self, done: int, total: int, names: str) -> None:
        """Reports pieces that workers compute at the same time."""
        self.report(PieceProgress("pieces", names, "started", done, total))

    @property
    def _own_module(self) -> tuple[str]:
        return (self.artifact.function.__module__,)

    def _of_sweep(self, job: Job) -> Job:
        code = [self.artifact.source_digest, PIECE_FORMAT, onlynorm.__version__]
        parts = {"artifact": self.artifact.id, "piece": job.name, "config": to_plain(job.made_of), "code": code}
        return replace(job, made_of=parts)

    def _stored(
        self, job: Job, config: Any, compute: Callable[[], Any], modules: Iterable[str],
        check: Callable[[Any], object] = lambda _: None,
    ) -> Piece:  # fmt: skip
        self.progress(job.name, "started")
        found = self.cache(modules).get_or_compute(job.name, job.made_of, compute, check=check)
        self.notes.append(PieceNote(job.name, found.key, config, found.seconds, found.is_reloaded, found.is_stale))
        self.progress(job.name, "reloaded" if found.is_reloaded else "computed")
        return found


def call_with(function: Callable[..., Any], config: Mapping[str, Any]) -> Any:
    """The result of a piece."""
    return function(**config)


# ------------------------------------------------------------------------------- several workers


class _NotComputedError(Exception):
    """The result of a piece was used before it was computed."""


class _Unknown:
    """Stands for the result of a piece that is not computed yet. It can be passed on and indexed, but not used."""

    def __getitem__(self, key: object) -> _Unknown:
        return self

    def __getattr__(self, name: str) -> Any:
        raise _NotComputedError(name)

    def _stop(self, *_: object) -> Any:
        raise _NotComputedError

    __iter__ = __len__ = __bool__ = __float__ = __int__ = __index__ = __contains__ = _stop
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = _stop
    __neg__ = __abs__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __round__ = __format__ = __str__ = _stop


@dataclass
class _Survey(Run):
    """A run that lists the missing pieces instead of computing them, until the function of the artifact needs one."""

    missing: dict[str, tuple[Cache, Job]] = field(default_factory=dict)
    failure: Exception | None = None

    def progress(self, piece: str, state: Literal["started", "computed", "reloaded", "finished"]) -> None:
        """Nothing: the run itself reports its pieces."""

    def piece(self, name: str, function: Callable[..., Any], **config: Any) -> Any:
        """The stored result, or an `_Unknown`."""
        try:
            job, modules = self.job(name, function, config)
        except _NotComputedError:  # it depends on an unknown result
            return _Unknown()
        cache = self.cache(modules)
        if cache.has(name, job.made_of):
            return cache.get_or_compute(name, job.made_of, lambda: None).result
        self.missing[str(cache.path(name, digest(job.made_of)))] = (cache, job)
        return _Unknown()

    def compute_all(self, jobs: Sequence[Job], engine: Engine) -> None:
        """Computes pieces of a sweep, which decides itself what comes next."""
        try:
            super().compute_all(jobs, engine)
        except Exception as error:
            self.failure = error
            raise


def _compute_ahead(runs: Sequence[Run], engine: Engine) -> dict[str, Exception]:
    """Computes missing pieces of all artifacts on the workers; returns the failures by id of the artifact.

    The function of an artifact is called until it needs a missing result. Its missing pieces are computed together
    with those of the other artifacts; then it is called again. The run itself finds all pieces in the cache.
    """
    failures: dict[str, Exception] = {}
    waiting = list(runs)
    while waiting:
        surveys = []
        for run in waiting:
            one = _Survey(
                run.artifact, run.scale, run.folder, run.is_forced, run.report, engine=engine, fresh=run.fresh
            )
            with contextlib.suppress(Exception):  # raised again by the run, unless it is due to an unknown result
                run.artifact.function(one)
            if one.failure is not None:
                failures[run.artifact.id] = one.failure
            elif one.missing:
                surveys.append((run, one))
        jobs = [(run, *pair) for run, one in surveys for pair in one.missing.values()]
        if not jobs:
            break
        outcomes = compute_all([(cache, job) for _, cache, job in jobs], engine, progress=runs[0].progress_of_all)
        for run, _ in surveys:
            own = [outcome for outcome, (owner, _, _) in zip(outcomes, jobs, strict=True) if owner is run]
            try:
                need_results(own)
            except Exception as error:
                failures[run.artifact.id] = error
        waiting = [run for run, _ in surveys if run.artifact.id not in failures]
    return failures


def reproduce(
    ids: str | Artifact | Iterable[str | Artifact] | None = None,
    *,
    scale: Scale = "quick",
    out: Path | str = RECORDS,
    force: bool = False,
    workers: int | None = None,
    cluster: str | None = None,
    threads: int = 1,
    progress: Callable[[PieceProgress], None] | None = None,
) -> tuple[Record, ...]:
    """One record per artifact, written with its figure to `out`; finished pieces are reused unless `force`.

    `workers`, `cluster` and `threads` are those of `cluster.open_engine`. Workers compute pieces of all artifacts at
    the same time; values do not depend on their number, but times in a table are then those of a busy machine.

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
    report = (lambda _: None) if progress is None else progress
    runs = [Run(one, scale, folder.joinpath(*one.id.split(":")), force, report) for one in chosen]
    records, without = [], {}
    with open_engine(workers=workers, cluster=cluster, threads=threads) as engine, fixed_threads(engine.threads):
        failures = _compute_ahead(runs, engine) if engine.is_parallel else {}
        for run in runs:
            try:
                with claim(run.folder):
                    records.append(_reproduce(run, failures.get(run.artifact.id)))
            except MissingDataError as error:
                without[run.artifact.id] = error
    if without:
        done = " The others are done." if records else ""
        raise MissingDataError(f"{', '.join(without)}: {next(iter(without.values()))}{done}")
    return tuple(records)


def _reproduce(run: Run, failed: Exception | None = None) -> Record:
    """The record of a run; `failed` is the error of a worker."""
    start, failure = time.perf_counter(), ""
    try:
        if failed is not None:
            raise failed
        outcome = run.artifact.function(run)
    except (MissingDataError, StorageError):
        raise
    except Exception as error:
        outcome, failure = (
            Outcome(values={}),
            f"The run stopped: {type(error).__name__}: {_without_paths(str(error))}",
        )
    record = _record(run, outcome, failure=failure, seconds=time.perf_counter() - start)
    place = run.folder / run.scale
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
