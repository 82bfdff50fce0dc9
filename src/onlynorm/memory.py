"""What a computation costs in memory: a meter for the peak, and what is free to use.

On Linux the kernel keeps the peak of the resident memory and lets a process reset it, so the meter is exact and
free. Elsewhere a thread samples.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import sys
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

import psutil
import torch
from torch import Tensor

from onlynorm.errors import MemoryLimitError, ValueRangeError, shown
from onlynorm.validate import is_real_number

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_GROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector of today's processors."""
_running: list[MemoryMeter] = []


def readable(n_bytes: float) -> str:
    """Bytes as people read them: 4.1 kB, 512 MB, 10.9 GB."""
    n_bytes = float(max(-(10**300), min(n_bytes, 10**300)))  # whole numbers may be larger than any float
    for unit in ("B", "kB", "MB"):
        if abs(n_bytes) < 999.5:
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000.0
    return f"{n_bytes:.3g} GB"


def readable_need(n_bytes: float) -> str:
    """Bytes as people read them, rounded up: so much is enough."""
    digits = math.floor(math.log10(max(n_bytes, 1.0))) - 2
    return readable(n_bytes if digits <= 0 else math.ceil(n_bytes / 10**digits) * 10**digits)


def memory_limit(asked: float | None = None) -> int:
    """The bytes a solve may use: what was asked for, or 80 % of what is free now."""
    if asked is None:
        return int(0.8 * psutil.virtual_memory().available)
    if not is_real_number(asked) or not 0 < asked < math.inf:
        raise ValueRangeError(
            f"memory needs a positive number of bytes; got {shown(asked)}. Leave it out to use 80 % of what is free."
        )
    return int(asked)


def memory_budget(asked: float | None = None) -> int:
    """The bytes by which a method is chosen: what was asked for, or 80 % of the memory that the machine has.

    Unlike `memory_limit` it does not depend on what else is running, so the same system gets the same method, and
    with it the same bits, on every run. A container's limit counts as the memory of its machine.
    """
    return memory_limit(asked) if asked is not None else int(0.8 * _total_memory())


@functools.cache
def _total_memory() -> int:
    total = int(psutil.virtual_memory().total)
    for path in _GROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no control groups, or "max" for no limit
            total = min(total, int(path.read_text()))
    return total


def need_memory(what: str, need: int, limit: int, cure: str) -> None:
    """Raises MemoryLimitError if `need` bytes are more than `limit`."""
    if need > limit:
        raise MemoryLimitError(f"{what} needs {readable_need(need)}; the limit is {readable(limit)}. {cure}")


def aligned(values: Tensor) -> Tensor:
    """The values in memory that begins at a multiple of 64 bytes, copied only if theirs does not.

    Matrix products round by the alignment of their operands. Torch's own memory is aligned; slices, NumPy arrays and
    tensors of a file need not be, and would make equal numbers give results that differ in their last bits.
    """
    return values if values.data_ptr() % ALIGNMENT == 0 else values.clone(memory_format=torch.contiguous_format)


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
        for meter in _running:
            meter._note_peak()
        start = _reset_peak()
        self._exact = start is not None
        if start is None:
            self._process = psutil.Process()
            start = int(self._process.memory_info().rss)
        self._start = self._highest = start
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
            self._highest = max(self._highest, _status_bytes(_read_status(), b"VmHWM:"))

    def _sample(self) -> None:
        while not self._stop.wait(0.005):
            self._highest = max(self._highest, int(self._process.memory_info().rss))


def _reset_peak() -> int | None:
    """The resident memory, at which the peak begins again; None where the system cannot reset it."""
    try:
        with open(_CLEAR, "wb", buffering=0) as file:
            file.write(b"5")
        status = _read_status()
    except OSError:
        return None
    return _status_bytes(status, b"VmRSS:") if _status_bytes(status, b"VmHWM:") > 0 else None


def _read_status() -> bytes:
    with open(_STATUS, "rb", buffering=0) as file:
        return file.read()


def _status_bytes(status: bytes, entry: bytes) -> int:
    """One size of /proc/self/status, 0 where it is missing."""
    found = status.partition(entry)[2]
    return int(found.split(maxsplit=1)[0]) * 1024 if found else 0
