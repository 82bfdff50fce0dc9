"""Fair times: what is not counted, how turns are taken, and that nothing is timed in another way."""

from __future__ import annotations

import ast
import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from threadpoolctl import threadpool_info

import onlynorm
from onlynorm.errors import ValueRangeError
from onlynorm.evidence import timing
from onlynorm.evidence.timing import PATIENCE, one_thread, race

SOURCE = Path(onlynorm.__file__).parent / "evidence"


class Clock:
    """A clock that only moves when a method says how long it took."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def method(self, *seconds: float) -> Callable[[], int]:
        """A method that takes these seconds, one after the other (the last one ever after), and counts its calls."""
        lasts = itertools.chain(seconds, itertools.repeat(seconds[-1]))
        calls = itertools.count(1)

        def run() -> int:
            self.now += next(lasts)
            return next(calls)

        return run


def test_what_happens_only_once_is_not_counted() -> None:
    clock = Clock()
    times = race({"cold": clock.method(5.0, 0.3, 0.2, 0.4), "other": clock.method(0.1)}, rounds=3, clock=clock)
    assert times["cold"].seconds == pytest.approx(0.2)
    assert (times["cold"].n_turns, times["cold"].result) == (3, 4)
    assert list(times) == ["cold", "other"]


def test_methods_take_turns_in_an_order_that_changes_and_is_the_same_in_every_run() -> None:
    orders = []
    for _ in range(2):
        seen: list[tuple[str, int]] = []
        race(
            {name: lambda: None for name in "abc"},
            rounds=8,
            on_turn=lambda name, number, s=seen: s.append((name, number)),
        )
        orders.append(seen)
    assert orders[0] == orders[1]
    rounds = [tuple(name for name, number in orders[0] if number == k) for k in range(9)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert {number for _, number in orders[0]} == set(range(9))
    assert len({one[0] for one in rounds}) == 3


def test_a_slow_method_takes_fewer_turns_but_always_one() -> None:
    clock = Clock()
    methods = {"slow": clock.method(10 * PATIENCE), "middle": clock.method(0.6 * PATIENCE), "fast": clock.method(1.0)}
    times = race(methods, rounds=5, clock=clock)
    assert {name: one.n_turns for name, one in times.items()} == {"slow": 1, "middle": 2, "fast": 5}
    assert times["slow"].seconds == pytest.approx(10 * PATIENCE)


def test_patience_and_the_turn_that_is_not_counted_can_be_chosen() -> None:
    clock = Clock()
    times = race({"a": clock.method(5.0, 3.0)}, rounds=5, clock=clock, patience=6.0, warm_up=False)
    assert (times["a"].seconds, times["a"].n_turns) == (pytest.approx(3.0), 2)


def test_memory_is_the_highest_of_the_counted_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = iter([1000, 10, 30, 20])

    class Meter:
        def __enter__(self) -> Meter:
            self.peak = next(peaks)
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(timing, "MemoryMeter", Meter)
    assert race({"a": lambda: None}, rounds=3, metered=True)["a"].memory == 30
    assert race({"a": lambda: None}, rounds=3)["a"].memory == 0


@pytest.mark.parametrize("rounds", [0, -1, 1.5, "3", None, True])
def test_rounds_are_a_positive_count(rounds: object) -> None:
    with pytest.raises(ValueRangeError, match=r"rounds .* from 1"):
        race({"a": lambda: None}, rounds=rounds)  # type: ignore[arg-type]


def test_a_race_of_nobody_is_refused() -> None:
    with pytest.raises(ValueRangeError, match="at least one method"):
        race({}, rounds=1)


def test_an_error_in_a_method_is_not_hidden_and_threads_come_back() -> None:
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError, match="zero"), one_thread():
        race({"a": lambda: 1 / 0}, rounds=1)
    assert torch.get_num_threads() == before


def test_times_are_processor_seconds_on_one_thread_and_of_the_wall_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    wall, processor = Clock(), Clock()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=wall, process_time=processor))

    def work() -> str:
        wall.now += 3.0
        processor.now += 2.0
        return "done"

    assert race({"a": work}, rounds=1)["a"].seconds == 3.0
    with one_thread():
        assert race({"a": work}, rounds=1)["a"].seconds == 2.0
        assert timing.once(work) == timing.Timing(3.0, 0, "done")
    assert race({"a": work}, rounds=1)["a"].seconds == 3.0


def test_one_thread_holds_for_every_library() -> None:
    before = threadpool_info()
    with one_thread():
        assert {torch.get_num_threads(), *(pool["num_threads"] for pool in threadpool_info())} == {1}
    assert threadpool_info() == before


# ---------------------------------------------------------------------------------------------- no second way

SINGLE = {"bench/races/reconstruct.py", "cache.py", "papers/reproduce.py"}
"""Show how long one piece of work took, beside no other method's time."""


def clocks_read(path: Path) -> set[str]:
    """The clocks that a file reads itself."""
    calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    names = {call.attr for call in calls if isinstance(call, ast.Attribute)}
    return names & {"perf_counter", "process_time", "monotonic", "time", "thread_time"}


def test_times_are_raced_or_at_least_warm() -> None:
    paths = {path.relative_to(SOURCE).as_posix(): path for path in SOURCE.rglob("*.py")}
    timed = {name for name, path in paths.items() if clocks_read(path)}
    assert timed >= SINGLE
    cold = [name for name in timed - SINGLE if "warm_up_training()" not in paths[name].read_text()]
    assert cold == [], "these read a clock that may run cold; use race"


def test_a_warm_up_loads_what_an_optimizer_loads() -> None:
    code = (
        "import sys, torch; from onlynorm.evidence.timing import warm_up_training; warm_up_training();"
        "before = set(sys.modules); torch.optim.LBFGS([torch.ones(1, requires_grad=True)]);"
        "torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0); print(len(set(sys.modules) - before))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert ran.stdout.strip() == "0"
