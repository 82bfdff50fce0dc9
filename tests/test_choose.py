"""The choice of a method: known from the shape alone, with a reason, within the memory."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onlynorm.errors import MemoryLimitError, UnknownNameError, ValueRangeError
from onlynorm.solvers.choose import MAX_ITERATIONS, METHODS, choose, cure, krylov_memory, product_rate
from onlynorm.solvers.spectrum import condition_number, predicted_iterations

GB = 10**9
choose_module = importlib.import_module("onlynorm.solvers.choose")  # the room hands on the function of that name


@pytest.fixture(autouse=True)
def _fixed_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice depends on the machine's speed; here every machine makes 1e11 operations per second."""
    monkeypatch.setattr(choose_module, "product_rate", lambda dtype: 1e11 if dtype == torch.float32 else 5e10)


@given(st.integers(1, 200), st.integers(1, 200), st.floats(0.1, 4.0))
def test_every_shape_gets_a_method_that_can(n_outputs: int, n_inputs: int, excess: float) -> None:
    n_features = max(1, round(excess * n_outputs * n_inputs))
    choice = choose(n_outputs, n_inputs, n_features, memory=10**15)
    assert choice.method in METHODS
    assert not choice.option.obstacle
    able = [o for o in choice.options if not o.obstacle]
    assert choice.option.seconds == min(o.seconds for o in able)
    assert f"{n_features} features for {n_outputs * n_inputs} equations" in choice.reason


def test_square_systems_are_factored_and_large_wide_ones_iterated() -> None:
    assert choose(64, 64, 4096, memory=10 * GB).method == "lu"
    wide = choose(64, 576, 46_080, memory=10 * GB)
    assert wide.method == "krylov"
    assert wide.option.iterations == predicted_iterations(36_864, 46_080, tolerance=1e-10)
    assert "cholesky: needs 23.1 GB of memory" in wide.reason
    assert "lu: the system is not square" in wide.reason


def test_a_known_condition_number_replaces_the_prediction() -> None:
    predicted, known = choose(8, 8, 128, memory=GB), choose(8, 8, 128, memory=GB, condition=1e9)
    assert predicted.condition == condition_number(64, 128)
    assert known.condition == 1e9
    obstacles = {o.method: o.obstacle for o in known.options}
    assert obstacles["cholesky"] == "the squared condition number is too large"
    assert "would take about" in obstacles["krylov"]
    assert known.method == "svd"


def test_a_method_asked_for_is_taken() -> None:
    for method in METHODS:
        choice = choose(8, 8, 100, memory=1, method=method)
        assert (choice.method, choice.reason) == (method, "asked for")


def test_the_choice_reads_well() -> None:
    text = str(choose(64, 576, 46_080, memory=10 * GB))
    assert text.startswith("krylov: fastest for 46080 features for 36864 equations (excess 1.25)")
    assert "predicted condition number 17.9, about 213 iterations" in text
    assert text.endswith("beside the features)")
    assert "iterations" not in str(choose(4, 4, 16, memory=GB, method="lu"))


def test_features_from_their_seed_need_no_copy() -> None:
    shape = (100, 100, 12_500)
    whole, streamed = krylov_memory(*shape), krylov_memory(*shape, block=50)
    assert streamed < whole
    assert choose(*shape, memory=whole, block=50).option.memory == whole
    assert choose(*shape, memory=streamed, block=50).option.memory == streamed
    with pytest.raises(MemoryLimitError, match=r"solving 10000 equations"):
        choose(*shape, memory=streamed)


def test_nothing_sure_to_reach_the_tolerance_still_gets_what_fits() -> None:
    choice = choose(300, 300, 90_000, memory=GB)
    assert choice.method == "krylov"
    assert choice.reason == "no method is sure to reach 1e-10; this one fits"
    assert {o.method: o.obstacle for o in choice.options}["lu"] == "needs 36.5 GB of memory"


def test_too_little_memory_is_an_error_with_need_limit_and_cure() -> None:
    message = r"500 equations with 600 features needs at least [\d.]+ kB \(krylov\); the limit is 1 kB\. Raise memory"
    with pytest.raises(MemoryLimitError, match=message):
        choose(20, 25, 600, memory=1000)


def test_unknown_methods_and_empty_systems_are_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"method needs a known name; got 'choleski'\. Did you mean 'cholesky'"):
        choose(4, 4, 16, memory=GB, method="choleski")
    with pytest.raises(ValueRangeError, match=r"at least one equation.*got 0 equations and 5 features"):
        choose(0, 4, 5, memory=GB)
    with pytest.raises(ValueRangeError, match=r"tolerance in \(0, 1\); got 0"):
        choose(4, 4, 20, memory=GB, tolerance=0.0)


def test_the_cure_counts_features() -> None:
    few = cure(10, 10, 80, 1e-10)
    assert few.startswith("20 more features make the system solvable")
    n = 200 * 200
    near = cure(200, 200, n, 1e-10)
    more = int(near.split()[0])
    assert predicted_iterations(n, n + more, tolerance=1e-10) <= MAX_ITERATIONS
    assert near.endswith("more features reach 1e-10")
    assert "not generic" in cure(10, 10, 200, 1e-10)


def test_the_speed_of_this_machine_is_a_number() -> None:
    assert 1e6 < product_rate(torch.float64) < math.inf
