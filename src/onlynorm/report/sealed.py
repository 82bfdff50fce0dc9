"""Sealed JSON files: written whole or not at all, and never trusted when damaged.

A sealed file is one JSON object `{"kind", "format", "checksum", "body"}`; the checksum is the SHA-256 of the
body in canonical form. It is written beside its place, flushed to the disk and renamed, so a killed process
leaves the old file or the new one. A file is accepted only if its content, written again, gives the same bytes.
Numbers that JSON lacks (NaN, infinities) are kept as `{"$float": "nan"}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onlynorm.errors import FormatError, OnlynormError
from onlynorm.storage import digest, from_plain, parse_json, read_file, to_plain, write_atomically

__all__ = ["digest", "from_plain", "read_sealed", "seal_json", "to_plain", "write_atomically", "write_sealed"]

FORMAT = 1


def write_sealed(path: Path, body: Mapping[str, Any], *, kind: str) -> None:
    """Write `body` as a sealed file of this `kind`."""
    write_atomically(path, seal_json(to_plain(body), kind=kind))


def seal_json(plain: Mapping[str, Any], *, kind: str) -> bytes:
    """The bytes of a sealed file with this body, in JSON types."""
    sealed = {"kind": kind, "format": FORMAT, "checksum": digest(plain), "body": plain}
    return (json.dumps(sealed, allow_nan=False) + "\n").encode()


def read_sealed(path: Path, *, kind: str) -> dict[str, Any]:
    """The body of a sealed file; `FormatError` when it is damaged, altered, newer, or of another kind."""
    cure = "Delete the file and run `reproduce` again."
    try:
        data = read_file(path, what=f"the {kind}")
        sealed = parse_json(data)
    except OnlynormError:
        raise
    except ValueError as error:
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
        intact = data == seal_json(body, kind=kind)  # byte for byte, the checksum among them
        restored = from_plain(body)
    except (ValueError, TypeError, OverflowError):
        intact = False
    if not intact or not isinstance(restored, dict):
        raise FormatError(f"the {kind} needs its own checksum; {path.name} was altered or damaged. {cure}")
    return restored
