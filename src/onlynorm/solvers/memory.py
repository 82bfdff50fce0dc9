"""What a computation costs in memory: a meter for the peak, and what is free to use.

On Linux the kernel keeps the peak of the resident memory and lets a process reset it, so the meter is exact and
free. Elsewhere a thread samples.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

import psutil

from onlynorm.errors import MemoryLimitError, ValueRangeError

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_running: list[MemoryMeter] = []


def readable(n_bytes: float) -> str:
    """Bytes as people read them: 4.1 kB, 512 MB, 10.9 GB."""
    for unit in ("B", "kB", "MB"):
        if abs(n_bytes) < 999.5:
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000.0
    return f"{n_bytes:.3g} GB"


def memory_limit(asked: float | None = None) -> int:
    """The bytes a solve may use: what was asked for, or 80 % of what is free now."""
    free = int(psutil.virtual_memory().available)
    if asked is None:
        return int(0.8 * free)
    if not asked > 0:
        raise ValueRangeError(
            f"memory needs a positive number of bytes; got {asked}. Leave it out to use 80 % of what is free."
        )
    return int(asked)


def need_memory(what: str, need: int, limit: int, cure: str) -> None:
    """Raises MemoryLimitError if `need` bytes are more than `limit`."""
    if need > limit:
        raise MemoryLimitError(f"{what} needs {readable(need)}; the limit is {readable(limit)}. {cure}")


def release_free_memory() -> None:
    """Hands memory that was freed but kept for reuse back to the system, so that a meter sees the next use of it."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # a C library without malloc_trim keeps what it has
            ctypes.CDLL(None).malloc_trim(0)


class MemoryMeter(AbstractContextManager["MemoryMeter"]):
    """Measures how far resident memory rises above its level at entry; `peak` holds the bytes after the block.

    Meters may stand inside each other: an inner one notes the peak of the outer ones before it resets it. Memory that
    was freed but kept resident by the C library is reused without a rise; `release_free_memory` first, to count it.
    """

    peak: int = 0

    def __enter__(self) -> MemoryMeter:
        self._process = psutil.Process()
        for meter in _running:
            meter._note_peak()
        self._exact = _reset_peak()
        self._start = int(self._process.memory_info().rss)
        self._highest = self._start
        if not self._exact:
            self._stop = threading.Event()
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()
        _running.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        _running.remove(self)
        self._note_peak()
        if not self._exact:
            self._stop.set()
            self._thread.join()
        self.peak = max(0, self._highest - self._start)

    def _note_peak(self) -> None:
        if self._exact:
            self._highest = max(self._highest, _peak_bytes())

    def _sample(self) -> None:
        while not self._stop.wait(0.005):
            self._highest = max(self._highest, int(self._process.memory_info().rss))


def _reset_peak() -> bool:
    try:
        _CLEAR.write_text("5")
        return _peak_bytes() > 0
    except OSError:
        return False


def _peak_bytes() -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
