"""Fair times: every time that is shown beside another one is measured here.

Three things make a comparison of times unfair, and `race` excludes each. What happens only once (the first use of
`torch.optim` imports for seconds, a library sets up its threads) falls on whoever comes first: every method runs once
before anything is counted. A machine that is busier at some moments: the methods take turns, and the best turn counts.
A method that always runs after the same other one finds its caches: each round has an order of its own, drawn from a
fixed seed.

Inside `one_thread` times are processor seconds, which do not count the time in which other programs run; they add up
over threads, so that elsewhere the seconds of the wall clock are taken.
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
"""Seconds of counted turns after which a method takes no further ones; it always has one."""
_Name = TypeVar("_Name")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Timing(Generic[_Result]):
    """The best time of a method over `n_turns` counted turns, peak memory (0 if not metered) and last result."""

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
    """The timing of every method, in the order in which they were given.

    Each runs once without being counted, then once in each of `rounds` rounds, or until its counted turns took
    `patience` seconds. `metered` measures the peak of the memory as well. `on_turn(name, round)` is called before every
    turn; round 0 is not counted. `warm_up=False` leaves round 0 out, for work of minutes by methods that ran before.
    The default `clock` counts processor seconds inside `one_thread`, else those of the wall.
    """
    if clock is None:
        clock = time.process_time if _is_single.get() else time.perf_counter
    rounds = need_integer("rounds", rounds, low=1, cure="Three rounds are enough for work of more than a second.")
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
    """Torch, NumPy and SciPy compute on one thread inside the block, and `race` counts processor seconds."""
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
    """Takes one step of `fit`, so that the time of the first real one does not include what torch loads once."""
    with own_randomness(0):
        network = nn.Linear(1, 1)
    schedule = Schedule(epochs=1, batch_size=2, lr=0.0)
    fit(network, (torch.zeros(2, 1), torch.zeros(2, 1)), schedule=schedule, accelerator="cpu")
