"""Intervals over seeds: Student's, and what is said where there are too few."""

from __future__ import annotations

import math

import pytest

from onlynorm.evidence.harness import Spread


def test_the_interval_is_students() -> None:
    spread = Spread.of([1.0, 2.0, 3.0])
    assert (spread.mean, spread.n) == (2.0, 3)
    assert spread.half == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6), "t of a table, for two degrees of freedom"


def test_one_value_has_no_interval_and_none_has_no_mean() -> None:
    one, none = Spread.of([1.0]), Spread.of([])
    assert one.mean == 1.0
    assert math.isnan(one.half)
    assert math.isnan(none.mean)


def test_values_that_are_no_numbers_make_a_mean_that_is_none() -> None:
    assert math.isnan(Spread.of([1.0, math.nan, 2.0]).mean)


def test_percent_is_readable_text() -> None:
    assert Spread.of([0.5]).percent() == "50.0"
    assert Spread.of([0.25, 0.75]).percent().startswith("50.0 ± ")
    assert Spread.of([]).percent() == "-"
