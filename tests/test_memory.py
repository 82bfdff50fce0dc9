"""The meter measures what is really allocated; limits are what was asked for or what is free."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest

from onlynorm import memory
from onlynorm.errors import MemoryLimitError, ValueRangeError
from onlynorm.memory import MemoryMeter, memory_limit, need_memory, readable, release_free_memory

BLOCK = 64 * 2**20
SLACK = 8 * 2**20  # the interpreter's own comings and goings


@pytest.fixture(autouse=True)
def nothing_kept_for_reuse() -> None:
    """Resident memory that earlier tests freed and the C library kept would serve an allocation without a rise."""
    release_free_memory()


def _touch(n_bytes: int) -> None:
    """Allocates, writes to every page, frees again and leaves nothing behind for the next allocation."""
    np.ones(n_bytes, dtype=np.uint8)
    release_free_memory()


def test_a_touched_allocation_is_measured_although_it_is_free_again() -> None:
    with MemoryMeter() as meter:
        _touch(BLOCK)
    assert abs(meter.peak - BLOCK) <= SLACK


def test_a_block_that_allocates_nothing_costs_next_to_nothing() -> None:
    _touch(BLOCK)
    with MemoryMeter() as meter:
        pass
    assert 0 <= meter.peak <= SLACK


def test_a_meter_inside_another_does_not_hide_the_outer_peak() -> None:
    with MemoryMeter() as outer:
        _touch(2 * BLOCK)
        with MemoryMeter() as inner:
            _touch(BLOCK)
    assert abs(inner.peak - BLOCK) <= SLACK
    assert abs(outer.peak - 2 * BLOCK) <= SLACK


def test_the_peak_is_there_after_an_exception() -> None:
    meter = MemoryMeter()

    def allocate_and_fail() -> None:
        with meter:
            _touch(BLOCK)
            raise ZeroDivisionError("inside")

    with pytest.raises(ZeroDivisionError, match="inside"):
        allocate_and_fail()
    assert meter.peak >= BLOCK - SLACK


def test_without_the_kernels_help_a_thread_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_reset_peak", lambda: None)
    before = threading.active_count()
    with MemoryMeter() as meter:
        block = np.ones(BLOCK, dtype=np.uint8)
        time.sleep(0.1)
        del block
    assert meter.peak >= BLOCK - SLACK
    assert threading.active_count() == before, "the sampling thread has ended"


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (4096, "4.1 kB"), (512e6, "512 MB"), (999.6e3, "1 MB"), (10.9e9, "10.9 GB")],
)
def test_bytes_read_well(n_bytes: float, text: str) -> None:
    assert readable(n_bytes) == text


def test_the_limit_is_what_was_asked_for_or_most_of_what_is_free() -> None:
    assert memory_limit(1e6) == 1_000_000
    assert 0 < memory_limit() < psutil.virtual_memory().total


@pytest.mark.parametrize("asked", [0, -1, float("nan")])
def test_an_impossible_limit_is_refused(asked: float) -> None:
    with pytest.raises(ValueRangeError, match=rf"positive number of bytes; got {asked}\. Leave it out"):
        memory_limit(asked)


def test_too_little_memory_names_need_limit_and_cure() -> None:
    need_memory("a matrix", 10, 10, "")
    with pytest.raises(MemoryLimitError, match=r"a matrix needs 2 kB; the limit is 1 kB\. Take less"):
        need_memory("a matrix", 2000, 1000, "Take less.")


FREED = """
import numpy as np
from onlynorm.memory import MemoryMeter, release_free_memory

def fill():
    return len([np.ones(2**16, dtype=np.uint8) for _ in range(1024)])  # pieces that are kept for reuse when freed

fill()
release_free_memory()
with MemoryMeter() as meter:
    fill()
print(meter.peak)
"""


def test_memory_that_was_freed_is_seen_again_after_its_release() -> None:
    """In a process of its own: where others ran before, some pieces come from pages that cannot be released."""
    ran = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    assert int(ran.stdout) >= 2**26 - SLACK
