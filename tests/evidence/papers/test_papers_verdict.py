"""Verdicts on artifacts: they follow from the checks, the scale and the caveats, by code."""

from __future__ import annotations

import math
from typing import Any

import pytest

from onlynorm.evidence.artifacts import Expectation
from onlynorm.evidence.papers.expectations import accepted_range, check, decide
from onlynorm.evidence.records import Check, RecordVerdict


def made(*, is_met: bool, is_soft: bool = False) -> Check:
    return Check(name="a", ours=1.0, is_met=is_met, accepted="x", source="s", is_soft=is_soft)


MET, OUT, SOFT_OUT = made(is_met=True), made(is_met=False), made(is_met=False, is_soft=True)


@pytest.mark.parametrize(
    ("checks", "scale", "caveats", "failure", "verdict"),
    [
        ([MET], "paper", [], "", RecordVerdict.REPRODUCED),
        ([MET], "quick", [], "", RecordVerdict.CAVEAT),
        ([MET], "paper", ["other weights"], "", RecordVerdict.CAVEAT),
        ([MET, SOFT_OUT], "paper", [], "", RecordVerdict.CAVEAT),
        ([MET, OUT], "paper", [], "", RecordVerdict.NOT_REPRODUCED),
        ([MET, OUT], "quick", ["other weights"], "", RecordVerdict.NOT_REPRODUCED),
        ([SOFT_OUT, OUT], "paper", [], "", RecordVerdict.NOT_REPRODUCED),
        ([MET], "paper", [], "The run stopped", RecordVerdict.NOT_REPRODUCED),
        ([], "paper", [], "", RecordVerdict.NOT_REPRODUCED),
    ],
)
def test_the_verdict_follows_from_checks_scale_and_caveats(
    checks: list[Check], scale: Any, caveats: list[str], failure: str, verdict: RecordVerdict
) -> None:
    decided, reasons = decide(checks, scale=scale, caveats=caveats, failure=failure)
    assert decided is verdict
    assert reasons
    assert all(caveat in reasons for caveat in caveats)
    assert not failure or reasons[0] == failure


@pytest.mark.parametrize(
    ("fields", "ours", "is_met"),
    [
        ({"value": 2.0, "tolerance": 0.1}, 2.1, True),
        ({"value": 2.0, "tolerance": 0.1}, 2.11, False),
        ({"value": 2.0, "tolerance": 0.1, "is_relative": True}, 2.19, True),
        ({"value": -2.0, "tolerance": 0.1, "is_relative": True}, -2.21, False),
        ({"minimum": 1.0}, 1.0, True),
        ({"minimum": 1.0}, 0.999, False),
        ({"maximum": 1.0}, 1.001, False),
        ({"minimum": 0.0, "maximum": 1.0}, math.inf, False),
        ({"value": 2.0, "tolerance": 1.0, "maximum": 2.5}, 2.6, False),
        ({"maximum": 1.0}, math.nan, False),
        ({"maximum": 1.0}, None, False),
    ],
)
def test_a_value_is_met_inside_its_closed_interval_only(
    fields: dict[str, Any], ours: float | None, is_met: bool
) -> None:
    expectation = Expectation(name="a", source="s", **fields)
    low, high = accepted_range(expectation)
    checked = check(expectation, {} if ours is None else {"a": ours})
    assert checked.is_met is is_met
    assert checked.is_met == (ours is not None and low <= ours <= high)
