"""A cache of finished results on disk, so that an interrupted run resumes.

A piece is a sealed file. Its name ends with a digest of its dependencies, so that other data or sizes give another
piece. Versions of the library and of the code are stored in the file but are not part of the digest, since they change
too often. A piece from older code is reused, with a note.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import platform
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import scipy
import torch

import onlynorm
from onlynorm.cluster import Engine, Task, TaskOutcome, need_results, run_tasks
from onlynorm.errors import FormatError
from onlynorm.storage import claim, digest, from_plain, read_sealed, to_plain, write_sealed
from onlynorm.validate import Progress

PIECE = "onlynorm-piece"
CACHED, OLDER = "cached", "cached, from older code"
OnMessage = Callable[[str], None]

# Modules that only display or organize results cannot change them.
_NOT_COMPUTING = ("cli", "display", "evidence")  # evidence modules are included if they are imported
_ORDERING = (
    "artifacts", "cache", "expectations", "harness", "race", "records", "registry", "reproduce", "sweep", "table"
)  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """A result as plain numbers, strings, lists and dicts, computed or read from the cache."""

    key: str
    result: Any
    seconds: float
    is_reloaded: bool
    is_stale: bool

    @property
    def note(self) -> str:
        """A note if the result was cached, else an empty string."""
        return (OLDER if self.is_stale else CACHED) if self.is_reloaded else ""


@dataclass(frozen=True)
class Job:
    """A piece that a worker can compute: `function(*args)` of a module, whose result has a plain form."""

    name: str
    made_of: Mapping[str, Any]
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()


class Cache:
    """The pieces in one folder; `force` computes all of them again.

    `modules` are the names of the modules that compute the results: a change of their code, or of modules they import,
    makes a piece stale. `fresh` are the pieces that this run has computed, by key; they are not computed again.
    """

    def __init__(
        self, folder: Path, *, modules: Iterable[str], force: bool = False, status: OnMessage = lambda _: None,
        fresh: dict[str, Piece] | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.force, self.status = folder, force, status
        self.made_with = {"library": library_digest(*modules), **versions()}
        self.fresh = {} if fresh is None else fresh

    def get_or_compute(
        self,
        name: str,
        made_of: Mapping[str, Any],
        compute: Callable[[], Any],
        *,
        check: Callable[[Any], object] = lambda _: None,
    ) -> Piece:
        """The piece with these dependencies; it is computed if it is missing, damaged or rejected by `check`.

        A new result is converted in the same way as a stored one, so that types are the same.
        """
        key = digest(made_of)
        found = self._find(name, key, check)
        if found is not None:
            return found
        with claim(self.path(name, key)):  # a second run that needs this piece raises instead of computing it again
            start = time.perf_counter()
            result = to_plain(compute())
            seconds = time.perf_counter() - start
            return self._write(name, key, result, seconds, torch.get_num_threads())

    def has(self, name: str, made_of: Mapping[str, Any], *, check: Callable[[Any], object] = lambda _: None) -> bool:
        """Whether `get_or_compute` would find the piece."""
        return self._find(name, digest(made_of), check) is not None

    def compute_all(self, jobs: Sequence[Job], engine: Engine) -> None:
        """Computes pieces on the workers of the engine and stores each as it is finished.

        Raises after all others are done if one failed.
        """

        def show(done: int, total: int, names: str) -> None:
            self.status(f"{done} of {total} done; running {names}" if names else f"{done} of {total} done")

        need_results(compute_all([(self, job) for job in jobs], engine, progress=show))

    def store(self, name: str, key: str, result: Any, seconds: float, threads: int) -> Piece:
        """Writes the plain result of a worker; `get_or_compute` finds it."""
        self.fresh[key] = self._write(name, key, result, seconds, threads)
        return self.fresh[key]

    def path(self, name: str, key: str) -> Path:
        """The file of a piece."""
        return self.folder / f"{re.sub(r'[^A-Za-z0-9.=_-]+', '-', name)[:80]}-{key[:16]}.json"

    def _find(self, name: str, key: str, check: Callable[[Any], object]) -> Piece | None:
        """The piece of this run, or of an earlier one unless `force`; None if it is missing or damaged."""
        if key in self.fresh:
            return self.fresh[key]
        if self.force:
            return None
        path = self.path(name, key)
        try:
            stored = read_piece(path, key)
            if stored is not None:
                check(stored["result"])
                is_stale = stored.get("made_with") != self.made_with
                return Piece(key, stored["result"], stored["seconds"], is_reloaded=True, is_stale=is_stale)
        except FormatError:
            self.status(f"{name}: {path.name} is damaged or has other fields; computing it again")
        return None

    def _write(self, name: str, key: str, result: Any, seconds: float, threads: int) -> Piece:
        body = {"key": key, "seconds": seconds, "threads": threads, "made_with": self.made_with, "result": result}
        write_sealed(self.path(name, key), body, kind=PIECE)
        return Piece(key, from_plain(result), seconds, is_reloaded=False, is_stale=False)


def compute_all(
    jobs: Sequence[tuple[Cache, Job]], engine: Engine, *, progress: Progress | None = None
) -> list[TaskOutcome]:
    """Computes pieces of several caches on the workers of the engine; each is stored as it is finished.

    Pieces are locked while they are computed, as by `Cache.get_or_compute`.
    """
    keys = [digest(job.made_of) for _, job in jobs]
    locks = [ExitStack() for _ in jobs]

    def start(number: int) -> None:
        cache, job = jobs[number]
        locks[number].enter_context(claim(cache.path(job.name, keys[number])))

    def store(outcome: TaskOutcome) -> None:
        if outcome.error is None:
            cache, key = jobs[outcome.number][0], keys[outcome.number]
            cache.store(outcome.name, key, outcome.result, outcome.seconds, engine.threads)
        locks[outcome.number].close()

    tasks = [Task(job.name, compute_plain, (job.function, *job.args)) for _, job in jobs]
    try:
        return run_tasks(tasks, engine, on_start=start, on_done=store, progress=progress)
    finally:
        for one in locks:
            one.close()


def compute_plain(function: Callable[..., Any], *args: Any) -> Any:
    """The result of the function as it is stored; runs in a worker."""
    return to_plain(function(*args))


def read_piece(path: Path, key: str) -> dict[str, Any] | None:
    """A stored piece, or None if there is no file; raises `FormatError` if it is damaged or has another key."""
    if not path.exists():
        return None
    stored = read_sealed(path, kind=PIECE)
    if stored.get("key") != key or "result" not in stored or not isinstance(stored.get("seconds"), float):
        raise FormatError(f"a piece needs key, result and seconds; {path.name} has other fields. Delete it.")
    return stored


def worst_note(notes: Iterable[str]) -> str:
    """The note of a result from several pieces: stale before cached before none."""
    given = set(notes)
    return next((note for note in (OLDER, CACHED) if note in given), "")


# ------------------------------------------------------------------------------- the state of the code


def source_digest(function: Callable[..., Any]) -> str:
    """SHA-256 of the source of the module that defines `function`, without imports, which change if files move."""
    module = sys.modules.get(function.__module__)
    try:
        text = inspect.getsource(module if module is not None else function)
    except (OSError, TypeError) as error:
        raise FormatError(
            f"{function.__qualname__} needs source code for the digest of its results; got none. Define it in a file."
        ) from error
    return hashlib.sha256(without_imports(text).encode()).hexdigest()


def without_imports(text: str) -> str:
    """The source text without import statements and blank lines."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom) and node.end_lineno is not None:
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return "\n".join(line for line in lines if line.strip())


@functools.cache
def library_digest(*modules: str) -> str:
    """SHA-256 of the source files, without imports, that can change a result of functions in these modules.

    These are all files of the library except those that only display or organize results. Files of papers and
    benchmarks are included if the modules import them, directly or indirectly.
    """
    root = Path(inspect.getfile(onlynorm)).parent
    total = hashlib.sha256()
    for path in source_files(root, *modules):
        source = without_imports(path.read_text(encoding="utf-8"))
        total.update(f"{path.relative_to(root).as_posix()}\0{source}\0".encode())
    return total.hexdigest()


def source_files(root: Path, *modules: str) -> list[Path]:
    """The files below `root`, the folder of the package, that `library_digest` reads."""
    files = {path for path in root.rglob("*.py") if path.relative_to(root).parts[0] not in _NOT_COMPUTING}
    waiting = [path for name in modules if (path := _file_of(root, name)) is not None]
    for name in modules:
        if _file_of(root, name) is None and name in sys.modules:  # an artifact in a module of a user
            waiting += _imported_files(root, inspect.getsource(sys.modules[name]))
    while waiting:
        path = waiting.pop()
        if path not in files:
            files.add(path)
            waiting += _imported_files(root, path.read_text(encoding="utf-8"))
    return sorted(files)


def _imported_files(root: Path, source: str) -> list[Path]:
    """The files of `onlynorm.evidence` that a source text imports."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names] + [str(node.module)]
    return [path for name in names if (path := _file_of(root, name)) is not None]


def _file_of(root: Path, module: str) -> Path | None:
    """The file of a measuring module of `onlynorm.evidence`, else None."""
    parts = module.split(".")
    if parts[:2] != ["onlynorm", "evidence"] or parts[2:3] == ["report"] or parts[-1] in _ORDERING:
        return None
    path = root.joinpath(*parts[1:]).with_suffix(".py")
    return path if path.is_file() else None


def versions() -> dict[str, str]:
    """Versions of the packages that results depend on."""
    return {
        "onlynorm": onlynorm.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "scipy": scipy.__version__,
    }
