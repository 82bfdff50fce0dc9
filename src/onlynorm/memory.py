"""Peak memory of a computation, and memory limits.

On Linux the kernel tracks peak resident memory and a process can reset it, so the measurement is exact and costs
nothing. On other systems a thread samples the resident memory.
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

import torch
from torch import Tensor

from onlynorm.errors import MemoryLimitError, ValueRangeError, shown
from onlynorm.validate import is_real_number

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_GROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
ALIGNMENT = 64
"""Bytes of a cache line, and of the widest vector registers."""
_running: list[MemoryMeter] = []


def readable(n_bytes: float) -> str:
    """A number of bytes as text: 4.1 kB, 512 MB, 10.9 GB."""
    n_bytes = float(max(-(10**300), min(n_bytes, 10**300)))  # an int can exceed the range of floats
    for unit in ("B", "kB", "MB"):
        if abs(n_bytes) < 999.5:
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000.0
    return f"{n_bytes:.3g} GB"


def readable_need(n_bytes: float) -> str:
    """A number of bytes as text, rounded up."""
    digits = math.floor(math.log10(max(n_bytes, 1.0))) - 2
    return readable(n_bytes if digits <= 0 else math.ceil(n_bytes / 10**digits) * 10**digits)


def memory_limit(asked: float | None = None) -> int:
    """The memory limit of a solve in bytes; without a given one, 80 % of the free memory."""
    if asked is None:
        import psutil

        return int(0.8 * psutil.virtual_memory().available)
    if not is_real_number(asked) or not 0 < asked < math.inf:
        raise ValueRangeError(
            f"memory must be a positive number of bytes; got {shown(asked)}. Leave it out to use 80 % of free memory."
        )
    return int(asked)


def memory_budget(asked: float | None = None) -> int:
    """The memory in bytes by which a method is selected; without a given one, 80 % of total memory.

    Unlike `memory_limit` it does not depend on other processes, so the same system gets the same method and the same
    bits in every run. The limit of a container counts as total memory.
    """
    return memory_limit(asked) if asked is not None else int(0.8 * _total_memory())


@functools.cache
def _total_memory() -> int:
    import psutil

    total = int(psutil.virtual_memory().total)
    for path in _GROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no control groups, or "max" for no limit
            total = min(total, int(path.read_text()))
    return total


def need_memory(what: str, need: int, limit: int, cure: str) -> None:
    """Raises MemoryLimitError if `need` exceeds `limit`, both in bytes."""
    if need > limit:
        raise MemoryLimitError(f"{what} needs {readable_need(need)}; the limit is {readable(limit)}. {cure}")


def aligned(values: Tensor) -> Tensor:
    """The tensor in memory aligned to 64 bytes; copied only if it is not aligned.

    The rounding of matrix products depends on the alignment of their operands. Torch allocates aligned memory, but
    slices, NumPy arrays and tensors from files may be unaligned, and the last bits of results would then differ.
    """
    return values if values.data_ptr() % ALIGNMENT == 0 else values.clone(memory_format=torch.contiguous_format)


def release_free_memory() -> None:
    """Returns freed memory to the operating system, so that `MemoryMeter` counts its next use."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # a C library without malloc_trim
            ctypes.CDLL(None).malloc_trim(0)


class MemoryMeter(AbstractContextManager["MemoryMeter"]):
    """Measures peak resident memory inside the block, relative to its start; `peak` is in bytes.

    Meters can be nested: an inner one records the peak of the outer ones before it resets it. Freed memory that the C
    library holds is reused without an increase; call `release_free_memory` first to count it.
    """

    peak: int = 0

    def __enter__(self) -> MemoryMeter:
        for meter in _running:
            meter._record_peak()
        start = _reset_peak()
        self._exact = start is not None
        if start is None:
            import psutil

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
        self._record_peak()
        if not self._exact:
            self._stop.set()
            self._thread.join()
        self.peak = max(0, self._highest - self._start)

    def _record_peak(self) -> None:
        if self._exact:
            self._highest = max(self._highest, _status_bytes(_read_status(), b"VmHWM:"))

    def _sample(self) -> None:
        while not self._stop.wait(0.005):
            self._highest = max(self._highest, int(self._process.memory_info().rss))


def _reset_peak() -> int | None:
    """Resets the peak and returns the resident memory; None if the system cannot reset it."""
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
    """An entry of /proc/self/status in bytes, 0 if it is missing."""
    found = status.partition(entry)[2]
    return int(found.split(maxsplit=1)[0]) * 1024 if found else 0
