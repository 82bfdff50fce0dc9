"""Files that are whole or refused: written beside their place and renamed, sealed by a checksum, checked when read.

A sealed tensor file is a safetensors file whose metadata hold one JSON document under the key "onlynorm". Its "sha256"
is the SHA-256 of the whole file, length, header and data, taken with 64 zeros in its own place: a single altered byte
anywhere is noticed before anything in the file is looked at. Nothing in it can run.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from safetensors.torch import load, save
from torch import Tensor

from onlynorm.errors import FormatError, MemoryLimitError, StorageError

_KEY = "onlynorm"
_SEAL = b'\\"sha256\\":\\"'  # as it stands in the header, where the document is JSON inside a JSON string
_BLANK = b"0" * 64


def version() -> str:
    """The version of this library, as installed."""
    try:
        return importlib.metadata.version("onlynorm")
    except importlib.metadata.PackageNotFoundError:  # run from its sources
        return "unknown"


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


def canonical(value: Any) -> str:
    """`value` as canonical JSON: sorted keys, no spaces."""
    return json.dumps(to_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: Any) -> str:
    """SHA-256 of `value` in canonical JSON: equal values, equal digests."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


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


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], *, kind: str, format: int, document: Mapping[str, Any]
) -> None:
    """Write the tensors and the document as one sealed file of this kind and format; equal content, equal bytes."""
    whole = {**document, "kind": kind, "format": format, "onlynorm": version(), "sha256": _BLANK.decode()}
    data = bytearray(save(dict(tensors), metadata={_KEY: canonical(whole)}))
    place = data.index(_SEAL) + len(_SEAL)
    data[place : place + len(_BLANK)] = hashlib.sha256(data).hexdigest().encode()
    write_atomically(path, bytes(data))


def read_tensors(path: Path, *, kind: str, format: int, cure: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(document, tensors) of a sealed file; `FormatError` where it is damaged, altered, newer or of another kind."""
    try:
        data = path.read_bytes()
    except MemoryError as error:
        raise MemoryLimitError(f"the {kind} needs to be read at once; {path.name} does not fit into memory.") from error
    except OSError as error:
        raise StorageError(
            f"the {kind} needs a readable file; got {error.strerror} for {path}. Check the path."
        ) from error
    header = _open_seal(data, path.name, kind, cure)
    try:
        document = json.loads(json.loads(header)["__metadata__"][_KEY])
        written, own = document["format"], document["kind"]
        if type(written) is not int or written < 1:
            raise TypeError("a format is a positive whole number")
        if written > format:
            raise FormatError(f"the {kind} needs format {format} or older; {path.name} has {written}. Update onlynorm.")
        if own != kind:
            raise FormatError(f"expected a file of kind {kind!r}; {path.name} is of kind {own!r}. Pass another file.")
        restored: dict[str, Any] = from_plain(document)
        return restored, load(data)
    except FormatError:
        raise
    except Exception as error:  # whatever a forged header sets off in the parsers, it is the file's fault
        raise FormatError(f"the {kind} needs a header of our own making; {path.name} has another. {cure}") from error


def _open_seal(data: bytes, name: str, kind: str, cure: str) -> bytes:
    """The header of the file, once the checksum of the whole holds."""

    def refuse(why: str) -> NoReturn:
        raise FormatError(f"the {kind} needs a whole safetensors file written by onlynorm; {name} {why}. {cure}")

    end = 8 + int.from_bytes(data[:8], "little")
    if len(data) < 8 or end > len(data):
        refuse("is none, or was cut short")
    header = data[8:end]
    if _SEAL not in header:
        refuse("has no checksum of ours: it comes from elsewhere or was altered")
    place = 8 + header.index(_SEAL) + len(_SEAL)
    seal = hashlib.sha256(data[:place])
    seal.update(_BLANK)
    seal.update(memoryview(data)[place + len(_BLANK) :])
    if data[place : place + len(_BLANK)] != seal.hexdigest().encode():
        refuse("does not match its checksum: it was altered or cut short")
    return header
