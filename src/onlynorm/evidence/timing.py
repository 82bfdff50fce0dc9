"""Fair comparison of times: all times that are compared with each other are measured here.

`race` avoids three sources of unfair comparisons:

- One-time costs, such as the import of `torch.optim` or the start of a thread pool, are counted for the first method.
  Therefore every method runs once before times are counted.
- The machine may be busier at some moments. Therefore the methods take turns, and the best time of each is used.
- A method that always runs after the same other method finds its data in the caches. Therefore each round has its own
  random order, from a fixed seed.

Inside `one_thread` times are processor seconds, which exclude the time of other programs but add up over threads.
Otherwise they are seconds of wall time.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from threadpoolctl import threadpool_limits
from torch import nn

from onlynorm.errors import ValueRangeError
from onlynorm.memory import MemoryMeter, release_free_memory
from onlynorm.seeds import own_randomness
from onlynorm.tuning import Schedule, fit
from onlynorm.validate import need_integer

_is_single: ContextVar[bool] = ContextVar("is_single", default=False)
PATIENCE = 20.0
"""A method stops after this many seconds of counted runs; at least one run is counted."""
_Name = TypeVar("_Name")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Timing(Generic[_Result]):
    """Best time of a method over `n_turns` counted runs, peak memory (0 if not `metered`), and the last result."""

    seconds: float
    memory: int
    result: _Result
    n_turns: int = 1


def race(
    methods: Mapping[_Name, Callable[[], _Result]],
    *,
    rounds: int,
    clock: Callable[[], float] | None = None,
    metered: bool = False,
    patience: float = PATIENCE,
    warm_up: bool = True,
    on_turn: Callable[[_Name, int], None] | None = None,
) -> dict[_Name, Timing[_Result]]:
    """The timing of every method, in the given order.

    Each method runs once without being counted, then once in each of `rounds` rounds, or until its counted runs took
    `patience` seconds. With `metered`, peak memory is measured too. `on_turn(name, round)` is called before every run;
    round 0 is not counted. `warm_up=False` skips round 0, for long runs of methods that have already run. The default
    `clock` counts processor seconds inside `one_thread`, else wall time.
    """
    if clock is None:
        clock = time.process_time if _is_single.get() else time.perf_counter
    rounds = need_integer("rounds", rounds, low=1, cure="Use 3 for methods that take more than a second.")
    if not methods:
        raise ValueRangeError("a race needs at least one method; got none. Pass {name: function}.")
    generator = random.Random(0)
    best = dict.fromkeys(methods, math.inf)
    spent = dict.fromkeys(methods, 0.0)
    peaks, n_turns = dict.fromkeys(methods, 0), dict.fromkeys(methods, 0)
    results: dict[_Name, _Result] = {}
    for number in range(0 if warm_up else 1, rounds + 1):
        order = list(methods)
        if number:
            generator.shuffle(order)
        for name in order:
            if spent[name] > patience:
                continue
            if on_turn is not None:
                on_turn(name, number)
            seconds, peak, results[name] = _turn(methods[name], clock, metered)
            if number:
                best[name], peaks[name] = min(best[name], seconds), max(peaks[name], peak)
                spent[name] += seconds
                n_turns[name] += 1
    return {name: Timing(best[name], peaks[name], results[name], n_turns[name]) for name in methods}


def once(run: Callable[[], _Result], *, metered: bool = False) -> Timing[_Result]:
    """The wall time of one run, for work that is not compared with another method's."""
    return Timing(*_turn(run, time.perf_counter, metered))


def _turn(run: Callable[[], _Result], clock: Callable[[], float], metered: bool) -> tuple[float, int, _Result]:
    if metered:
        release_free_memory()
    with MemoryMeter() if metered else contextlib.nullcontext() as meter:
        start = clock()
        result = run()
        seconds = clock() - start
    return seconds, 0 if meter is None else meter.peak, result


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch, NumPy and SciPy to one thread inside the block; `race` then counts processor seconds."""
    n_threads, was_single = torch.get_num_threads(), _is_single.get()
    torch.set_num_threads(1)
    _is_single.set(True)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(n_threads)
        _is_single.set(was_single)


@functools.cache
def warm_up_training() -> None:
    """Runs one step of `fit`, so that imports and setup of torch are not part of later timings."""
    with own_randomness(0):
        network = nn.Linear(1, 1)
    schedule = Schedule(epochs=1, batch_size=2, lr=0.0)
    fit(network, (torch.zeros(2, 1), torch.zeros(2, 1)), schedule=schedule, accelerator="cpu")
