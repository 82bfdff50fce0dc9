"""What `solve` refuses, in words, and how it brings extreme numbers to the middle of the range."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from onlynorm.errors import InsufficientFeaturesError, ShapeError, ValueRangeError
from onlynorm.solvers import prepare
from onlynorm.solvers.operator import KhatriRao, times_power


def _operator(out: int = 3, inp: int = 4, feat: int = 12) -> KhatriRao:
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(out, feat, generator=generator, dtype=torch.float64)
    return KhatriRao(left, torch.randn(feat, inp, generator=generator, dtype=torch.float64))


def _ones(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.float64)


def test_a_tolerance_is_a_number_between_zero_and_one() -> None:
    assert prepare.need_tolerance(None) == prepare.DEFAULT_TOLERANCE
    assert prepare.need_tolerance(1e-3) == 1e-3
    for wrong in (0.0, 1.0, -1e-3, math.nan):
        with pytest.raises(ValueRangeError, match=rf"tolerance needs to lie in \(0, 1\); got {wrong}\. Try 1e-10"):
            prepare.need_tolerance(wrong)


@pytest.mark.parametrize("shape", [(4, 3), (12,), (3, 5), (0, 3, 4)])
def test_a_target_has_the_shape_of_the_system(shape: tuple[int, ...]) -> None:
    message = r"a target \(\.\.\., 3, 4\) for left \(3, 12\) and right \(12, 4\); got \(.*\)\. Flatten a convolution"
    with pytest.raises(ShapeError, match=message):
        prepare.need_target(_operator(), _ones(*shape), None)


def test_a_target_is_taken_from_the_graph_and_cast() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 4))
    target = prepare.need_target(_operator(), weight, None)
    assert (target.requires_grad, target.dtype) == (False, torch.float64)


def test_near_is_one_number_or_one_per_feature() -> None:
    target = _ones(3, 4)
    for near in (1.0, torch.tensor(1.0), _ones(12)):
        prepare.need_target(_operator(), target, near)
    with pytest.raises(ShapeError, match=r"near .*12 entries; got \(11,\)"):
        prepare.need_target(_operator(), target, _ones(11))
    with pytest.raises(ValueRangeError, match=r"near .*finite.*; got 1 NaN"):
        prepare.need_target(_operator(), target, math.nan)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_are_finite(bad: float) -> None:
    target = _ones(3, 4)
    target[1, 2] = bad
    message = r"target .*finite.*; got 1 NaN or infinite.*, the first at \(1, 2\)\. Check"
    with pytest.raises(ValueRangeError, match=message):
        prepare.need_target(_operator(), target, None)


def test_an_exact_solution_needs_as_many_features_as_equations() -> None:
    prepare.need_enough(_operator(feat=11), None, False)
    prepare.need_enough(_operator(feat=11), 1e-10, True)
    prepare.need_enough(_operator(feat=12), 1e-10, False)
    message = r"needs 12 features for 3 x 4 weights; got 11 \(excess 0\.917\)\. Draw 1 more features"
    with pytest.raises(InsufficientFeaturesError, match=message):
        prepare.need_enough(_operator(feat=11), 1e-10, False)


def test_dead_outputs_and_inputs_are_found() -> None:
    left, right = (x.clone() for x in _operator().dense())
    left[1] = 0.0
    right[:, 3] = 0.0
    found = prepare.live(KhatriRao(left, right, block=5))
    assert found is not None
    outputs, inputs = found
    assert outputs.tolist() == [True, False, True]
    assert inputs.tolist() == [True, True, True, False]


@pytest.mark.parametrize("last", [0, 15, 16, 39])
def test_an_output_that_one_feature_reaches_is_alive_wherever_that_feature_is(last: int) -> None:
    left, right = _ones(3, 40), _ones(40, 4)
    left[1], right[:, 2] = 0.0, 0.0
    left[1, last] = right[last, 2] = 1.0
    for block in (None, 7):
        assert prepare.live(KhatriRao(left, right, block=block)) is None  # None: all outputs and inputs are reached


def test_weights_that_no_feature_makes_are_named() -> None:
    operator = _operator()
    outputs, inputs = torch.tensor([True, False, True]), torch.tensor([True, True, True, False])
    target = _ones(2, 3, 4)
    message = r"got none at 6 of them, first in outputs 0, 1, 2 \(zero rows of left or zero columns of right\)\. Draw"
    with pytest.raises(InsufficientFeaturesError, match=message):
        prepare.need_reached(operator, target, outputs, inputs)
    target[:, 1] = 0.0
    target[:, :, 3] = 0.0
    prepare.need_reached(operator, target, outputs, inputs)


@given(st.integers(-1000, 1000), st.integers(-400, 400), st.integers(-400, 400))
def test_scaling_to_the_middle_is_exact_and_undone_by_the_power(target: int, left: int, right: int) -> None:
    operator = _operator()
    system, scaled, power = prepare.in_range(operator.scaled(left, right), times_power(_ones(3, 4), target))
    assert 0.5 <= float(scaled.abs().max()) < 1.0
    factors = zip(system.dense(), operator.dense(), strict=True)
    shifts = [math.log2(float((made[0, 0] / given_[0, 0]).abs())) for made, given_ in factors]
    assert all(shift == round(shift) for shift in shifts)
    assert max(abs(shift) for shift in shifts) <= prepare.EXTREME + 3
    # gamma of the scaled system times 2^power solves the given one
    assert math.log2(float(scaled[0, 0])) + power == target + (shifts[0] - left) + (shifts[1] - right)


def test_ordinary_features_are_not_copied() -> None:
    operator = _operator()
    assert prepare.in_range(operator, _ones(3, 4))[0] is operator
    zero, power = prepare.to_middle(torch.zeros(3, 4, dtype=torch.float64))
    assert (float(zero.abs().max()), power) == (0.0, 0)


def test_the_minimum_width_system_takes_one_target() -> None:
    prepare.need_one_target(_ones(3, 4), None)
    with pytest.raises(ShapeError, match=r"minimum_width needs one target.*got a target of shape \(2, 3, 4\)\. Solve"):
        prepare.need_one_target(_ones(2, 3, 4), None)
