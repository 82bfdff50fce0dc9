"""Disks that are full and folders that cannot be written, as a process meets them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest


def content(folder: Path) -> dict[str, bytes]:
    """The bytes of every file in the folder, by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def fill_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets every write to the disk of this folder fail halfway; process ids in lock files still fit."""
    real = os.write

    def full(handle: int, data: bytes) -> int:
        if os.fstat(handle).st_dev != os.stat(folder).st_dev or len(data) < 8:
            return real(handle, data)
        real(handle, bytes(data)[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)


def forbid_new_files(folder: Path, error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the creation of files in this folder fail with this error number."""
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_CREAT and str(folder) in str(path):
            raise OSError(error, os.strerror(error))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
