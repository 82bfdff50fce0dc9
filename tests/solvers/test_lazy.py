"""Fields of a solution that are computed when they are read: once, with the same value, and without holding much."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from dataclasses import asdict, dataclass, replace

import pytest
import torch

import onlynorm as on
from onlynorm.solvers import Solution, lazy
from onlynorm.solvers.lazy import copy_lazy, set_lazy
from onlynorm.solvers.methods import direct
from tests.systems import draw_system
from tests.tensors import normal


@lazy.lazy("value")
@dataclass
class Result:
    """A result with one field that may come later."""

    value: float = 0.0


def test_a_value_is_computed_once_and_when_it_is_read() -> None:
    calls: list[int] = []
    result = Result()
    set_lazy(result, "value", lambda _: calls.append(1) or 3.0)
    assert not calls
    assert (result.value, result.value) == (3.0, 3.0)
    assert len(calls) == 1
    result.value = 4.0
    assert result.value == 4.0


def test_a_function_that_holds_much_is_called_at_once() -> None:
    calls: list[int] = []
    result = Result()
    set_lazy(result, "value", lambda _: calls.append(1) or 3.0, n_bytes=lazy.MAX_HELD + 1)
    assert len(calls) == 1
    assert result.value == 3.0


def test_a_value_that_is_handed_on_is_computed_for_both() -> None:
    calls: list[int] = []
    first, second, third = Result(), Result(), Result()
    set_lazy(first, "value", lambda _: calls.append(1) or 3.0)
    copy_lazy("value", first, second)
    assert (second.value, first.value, len(calls)) == (3.0, 3.0, 1)
    copy_lazy("value", first, third)
    assert third.value == 3.0


@pytest.mark.parametrize("n_features", [30, 48, 80])
def test_a_solve_does_not_estimate_the_condition_number_before_it_is_read(
    n_features: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = draw_system(6, 8, n_features)
    expected = on.solve(*system, method="cholesky").condition
    calls: list[int] = []
    estimate = direct._condition
    monkeypatch.setattr(direct, "_condition", lambda factor: calls.append(1) or estimate(factor))
    solution = on.solve(*system, method="cholesky")
    assert not calls
    assert solution.condition == solution.condition == expected
    assert len(calls) == 1
    assert str(solution).startswith(f"{n_features} gammas")


def test_copies_and_files_have_the_values() -> None:
    solution = on.solve(*draw_system(6, 8, 30))
    copies = [
        pickle.loads(pickle.dumps(solution)), copy.deepcopy(solution), copy.copy(solution), replace(solution),
    ]  # fmt: skip
    for one in copies:
        assert (one.condition, one.shortfall) == (solution.condition, solution.shortfall)
    assert "18 more dense features" in asdict(solution)["shortfall"]


def test_a_shortfall_tells_the_features_there_were() -> None:
    left, right, target = draw_system(6, 8, 30)
    expected = on.solve(left, right, target).shortfall
    solution = on.solve(left, right, target)
    del left, right, target
    assert solution.shortfall == expected


def test_a_solution_that_nobody_reads_is_freed_without_the_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        solution = on.solve(*draw_system(6, 8, 30))
        seen = weakref.ref(solution)
        del solution
        assert seen() is None
    finally:
        gc.enable()


def test_large_systems_hold_no_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy, "MAX_HELD", 100)
    solution = on.solve(*draw_system(6, 8, 30), method="cholesky")
    held = [value for value in vars(solution).values() if callable(value)]
    assert not [value for value in held if not isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("method", ["auto", "qr", "cholesky", "krylov", "minimum width"])
@pytest.mark.parametrize("shape", [(4, 4, 16), (7, 3, 30), (3, 7, 20)])
def test_fields_are_those_of_the_system_that_was_solved_when_buffers_are_used_again(
    method: str, shape: tuple[int, int, int]
) -> None:
    out, inp, n_features = shape
    left, right, target = normal(out, n_features), normal(n_features, inp, seed=1), normal(out, inp, seed=2)

    def solved() -> Solution:
        if method == "minimum width":
            return on.solve(left, right, target, minimum_width=True)
        return on.solve(left, right, target, method=method)

    first, second = solved(), solved()
    before = (first.condition, first.shortfall)
    for buffer in (left, right, target):
        buffer.zero_()
    assert (second.condition, second.shortfall) == before
