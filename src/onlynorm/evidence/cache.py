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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import scipy
import torch

import onlynorm
from onlynorm.errors import FormatError
from onlynorm.storage import claim, digest, from_plain, read_sealed, to_plain, write_sealed

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


class Cache:
    """The pieces in one folder; `force` computes all of them again.

    `modules` are the names of the modules that compute the results: a change of their code, or of modules they import,
    makes a piece stale.
    """

    def __init__(
        self, folder: Path, *, modules: Iterable[str], force: bool = False, status: OnMessage = lambda _: None
    ) -> None:
        self.folder, self.force, self.status = folder, force, status
        self.made_with = {"library": library_digest(*modules), **versions()}

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
        path = self.folder / f"{re.sub(r'[^A-Za-z0-9.=_-]+', '-', name)[:80]}-{key[:16]}.json"
        if not self.force:
            try:
                stored = read_piece(path, key)
                if stored is not None:
                    check(stored["result"])
                    is_stale = stored.get("made_with") != self.made_with
                    return Piece(key, stored["result"], stored["seconds"], is_reloaded=True, is_stale=is_stale)
            except FormatError:
                self.status(f"{name}: {path.name} is damaged or has other fields; computing it again")
        with claim(path):  # a second run that needs this piece raises instead of computing it again
            start = time.perf_counter()
            result = to_plain(compute())
            seconds = time.perf_counter() - start
            body = {"key": key, "seconds": seconds, "made_with": self.made_with, "result": result}
            write_sealed(path, body, kind=PIECE)
        return Piece(key, from_plain(result), seconds, is_reloaded=False, is_stale=False)


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
