"""Finished pieces of work that survive a kill: each is a sealed file, which the next run reads again.

The name of a file ends with the digest of everything its piece was made of, so other data or other sizes are another
piece. The state of the library and of the code that made it is stored with a piece but is no part of the name: it
changes too often. A piece of older code is read again, and says so.
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
Say = Callable[[str], None]

# What only shows or orders results cannot change them.
_NOT_COMPUTING = ("cli", "display", "evidence")  # of the evidence only what a result is made with can change it
_ORDERING = ("artifacts", "cache", "expectations", "harness", "records", "registry", "reproduce", "table")


@dataclass(frozen=True)
class Piece:
    """What was computed, now or by an earlier run, as numbers, text, lists and dicts."""

    key: str
    result: Any
    seconds: float
    is_reloaded: bool
    is_stale: bool

    @property
    def note(self) -> str:
        """What to say of a result that was not computed now."""
        return (OLDER if self.is_stale else CACHED) if self.is_reloaded else ""


class Cache:
    """The pieces in one folder; `force` computes every one again.

    `modules` are the names of the modules whose functions compute: a change of their code, or of what they import,
    makes a piece stale.
    """

    def __init__(self, folder: Path, *, modules: Iterable[str], force: bool = False, say: Say = lambda _: None) -> None:
        self.folder, self.force, self.say = folder, force, say
        self.made_with = {"library": library_digest(*modules), **versions()}

    def get_or_compute(
        self,
        name: str,
        made_of: Mapping[str, Any],
        compute: Callable[[], Any],
        *,
        check: Callable[[Any], object] = lambda _: None,
    ) -> Piece:
        """The piece that is made of these things; one that is damaged, or that `check` refuses, is computed again.

        A fresh result goes through the same conversion as a stored one, so both runs see the same types.
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
                self.say(f"{name}: {path.name} is damaged or has other fields, so it is computed again")
        with claim(path):  # another run that needs this piece is refused instead of computing it a second time
            start = time.perf_counter()
            result = to_plain(compute())
            seconds = time.perf_counter() - start
            body = {"key": key, "seconds": seconds, "made_with": self.made_with, "result": result}
            write_sealed(path, body, kind=PIECE)
        return Piece(key, from_plain(result), seconds, is_reloaded=False, is_stale=False)


def read_piece(path: Path, key: str) -> dict[str, Any] | None:
    """A stored piece; None when there is no file, `FormatError` when it is damaged or another piece."""
    if not path.exists():
        return None
    stored = read_sealed(path, kind=PIECE)
    if stored.get("key") != key or "result" not in stored or not isinstance(stored.get("seconds"), float):
        raise FormatError(f"a piece needs its key, its result and its seconds; {path.name} has others. Delete it.")
    return stored


def worst_note(notes: Iterable[str]) -> str:
    """What to say of a result that several pieces make: the worst of what is said of them."""
    given = set(notes)
    return next((note for note in (OLDER, CACHED) if note in given), "")


# ------------------------------------------------------------------------------- the state of the code


def source_digest(function: Callable[..., Any]) -> str:
    """SHA-256 of the source text of the module that defines `function`, without its imports: files may move."""
    module = sys.modules.get(function.__module__)
    try:
        text = inspect.getsource(module if module is not None else function)
    except (OSError, TypeError) as error:
        raise FormatError(
            f"{function.__qualname__} needs source text, so that stored results follow its code; none found. "
            "Define it in a file."
        ) from error
    return hashlib.sha256(without_imports(text).encode()).hexdigest()


def without_imports(text: str) -> str:
    """The source text without the lines of its import statements."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom) and node.end_lineno is not None:
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return "".join(lines)


@functools.cache
def library_digest(*modules: str) -> str:
    """SHA-256 over the source files that can change a result of functions of these modules.

    The whole library counts, without what only shows or orders results. Of the papers and benchmarks those files count
    that the modules import, directly or through each other.
    """
    root = Path(inspect.getfile(onlynorm)).parent
    total = hashlib.sha256()
    for path in source_files(root, *modules):
        total.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return total.hexdigest()


def source_files(root: Path, *modules: str) -> list[Path]:
    """The files below `root`, the folder of the package, that `library_digest` reads."""
    files = {path for path in root.rglob("*.py") if path.relative_to(root).parts[0] not in _NOT_COMPUTING}
    waiting = [path for name in modules if (path := _file_of(root, name)) is not None]
    for name in modules:
        if _file_of(root, name) is None and name in sys.modules:  # an artifact of a user's own module
            waiting += _imported_files(root, inspect.getsource(sys.modules[name]))
    while waiting:
        path = waiting.pop()
        if path not in files:
            files.add(path)
            waiting += _imported_files(root, path.read_text(encoding="utf-8"))
    return sorted(files)


def _imported_files(root: Path, source: str) -> list[Path]:
    """The files of the evidence that a source text imports."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names] + [str(node.module)]
    return [path for name in names if (path := _file_of(root, name)) is not None]


def _file_of(root: Path, module: str) -> Path | None:
    """The file of a module of the evidence that measures something, else None."""
    parts = module.split(".")
    if parts[:2] != ["onlynorm", "evidence"] or parts[2:3] == ["report"] or parts[-1] in _ORDERING:
        return None
    path = root.joinpath(*parts[1:]).with_suffix(".py")
    return path if path.is_file() else None


def versions() -> dict[str, str]:
    """The versions that a number can depend on."""
    return {
        "onlynorm": onlynorm.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "scipy": scipy.__version__,
    }
