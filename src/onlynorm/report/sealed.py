"""Sealed JSON files: written whole or not at all, and never trusted when damaged.

A sealed file is one JSON object `{"kind", "format", "checksum", "body"}`; the checksum is the SHA-256 of the
body in canonical form. It is written beside its place, flushed to the disk and renamed, so a killed process
leaves the old file or the new one. Numbers that JSON lacks (NaN, infinities) are kept as `{"$float": "nan"}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onlynorm.errors import FormatError, StorageError
from onlynorm.storage import digest, from_plain, to_plain, write_atomically

__all__ = ["digest", "from_plain", "read_sealed", "to_plain", "write_atomically", "write_sealed"]

FORMAT = 1


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
        raise StorageError(f"the {kind} needs a readable file; got {error.strerror} for {path}.") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the {kind} needs whole JSON; {path.name} is damaged or cut short. {cure}") from error
    if not isinstance(sealed, dict) or sealed.get("kind") != kind or not isinstance(sealed.get("body"), dict):
        raise FormatError(f"expected a file of kind {kind!r}; {path.name} is something else. {cure}")
    if sealed.get("format") != FORMAT:
        raise FormatError(
            f"the {kind} needs format {FORMAT}; {path.name} has {sealed.get('format')!r}. "
            "Update onlynorm, or run `reproduce` again."
        )
    body = sealed["body"]
    try:
        intact = sealed.get("checksum") == digest(body)
        restored: dict[str, Any] = from_plain(body)
    except (ValueError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise FormatError(f"the {kind} needs its own checksum; {path.name} was altered or damaged. {cure}")
    return restored
