"""Sealed JSON files: written whole or not at all, and never trusted when damaged.

A sealed file is one JSON object `{"kind", "format", "checksum", "body"}`; the checksum is the SHA-256 of the
body in canonical form. It is written beside its place, flushed to the disk and renamed, so a killed process
leaves the old file or the new one. Numbers that JSON lacks (NaN, infinities) are kept as `{"$float": "nan"}`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onlynorm.errors import FormatError, StorageError

FORMAT = 1


def to_plain(value: Any) -> Any:
    """`value` as JSON-able numbers, strings, lists and dicts; numpy arrays and torch tensors become lists."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.generic):
        return to_plain(value.item())
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, Mapping):
        odd = [key for key in value if not isinstance(key, str)]
        if odd:
            raise FormatError(f"a stored result needs string keys; got {odd[0]!r}. Use str(key).")
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | range):
        return [to_plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy arrays and torch tensors, wherever they live
        return to_plain(value.tolist())
    raise FormatError(
        f"a stored result needs numbers, strings, lists and dicts; got {type(value).__name__}. "
        "Return its fields as a dict."
    )


def from_plain(value: Any) -> Any:
    """The inverse of `to_plain` up to containers: non-finite numbers are floats again."""
    if isinstance(value, dict):
        if set(value) == {"$float"}:
            return float(value["$float"])
        return {key: from_plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    return value


def digest(value: Any) -> str:
    """SHA-256 of `value` in canonical JSON (sorted keys, no spaces): equal values, equal digests."""
    text = json.dumps(to_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """Put `data` at `path` whole or not at all, flushed to the disk."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(beside, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise
        _flush_folder(path.parent)
    except OSError as error:
        raise StorageError(
            f"saving results needs a writable folder with space; got {error.strerror or error} for {path}. "
            "Free space there or choose another folder; finished pieces are kept."
        ) from error


def _flush_folder(folder: Path) -> None:
    """Make the rename itself durable; file systems that cannot flush a folder are left alone."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_sealed(path: Path, body: Mapping[str, Any], *, kind: str) -> None:
    """Write `body` as a sealed file of this `kind`."""
    plain = to_plain(body)
    sealed = {"kind": kind, "format": FORMAT, "checksum": digest(plain), "body": plain}
    write_atomically(path, (json.dumps(sealed, allow_nan=False) + "\n").encode())


def read_sealed(path: Path, *, kind: str) -> dict[str, Any]:
    """The body of a sealed file; `FormatError` when it is damaged, altered, newer, or of another kind."""
    cure = "Delete the file and run `reproduce` again."
    try:
        sealed = json.loads(path.read_bytes())
    except OSError as error:
        raise StorageError(f"a {kind} needs a readable file; got {error.strerror} for {path}.") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"a {kind} needs whole JSON; {path.name} is damaged or cut short. {cure}") from error
    if not isinstance(sealed, dict) or sealed.get("kind") != kind or not isinstance(sealed.get("body"), dict):
        raise FormatError(f"expected a file of kind {kind!r}; {path.name} is something else. {cure}")
    if sealed.get("format") != FORMAT:
        raise FormatError(
            f"a {kind} needs format {FORMAT}; {path.name} has {sealed.get('format')!r}. "
            "Update onlynorm, or run `reproduce` again."
        )
    body = sealed["body"]
    try:
        intact = sealed.get("checksum") == digest(body)
        restored: dict[str, Any] = from_plain(body)
    except (ValueError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise FormatError(f"a {kind} needs its own checksum; {path.name} was altered or damaged. {cure}")
    return restored
