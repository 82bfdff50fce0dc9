"""The checks of random_features on alignment, matching and training come to our verdicts, and can fail."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from checks import verdict_test
from torch import Tensor

from onlynorm.alignment import align
from onlynorm.evidence import registry
from onlynorm.evidence.papers.random_features import alignment, match_bounds, training
from onlynorm.evidence.registry import Verdict
from onlynorm.features import Features

VERDICTS = {
    "random_features:thm-3.1": Verdict.HOLDS,
    "random_features:conclusion": Verdict.HOLDS,
    "random_features:thm-4.1": Verdict.CORRECTED,
    "random_features:thm-4.2": Verdict.HOLDS,
    "random_features:thm-4.3": Verdict.CORRECTED,
}


def test_every_statement_of_the_paper_has_a_check() -> None:
    assert [s.key for s in registry.statements("random_features") if not registry.has_check(s.key)] == []


test_a_check_comes_to_the_verdict_we_state = verdict_test(VERDICTS, seed=1)


def test_an_alignment_that_is_not_the_best_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def lazy(*args: Any, **options: Any) -> Any:
        found = align(*args, **options)
        return dataclasses.replace(found, objective=found.unaligned)

    monkeypatch.setattr(alignment, "align", lazy)
    assert registry.run_check("random_features:thm-4.1").verdict is Verdict.FAILS


@pytest.mark.parametrize("n_more", [1, -1])
def test_a_bound_with_another_exponent_is_noticed(monkeypatch: pytest.MonkeyPatch, n_more: int) -> None:
    def wrong(degrees: list[int], *, density: float) -> float:
        return math.prod(1 - (1 - density**degree) ** (len(degrees) + n_more) for degree in degrees)

    monkeypatch.setattr(match_bounds, "match_bound", wrong)
    assert registry.run_check("random_features:thm-4.2").verdict is Verdict.FAILS


def test_an_expectation_inside_the_power_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def printed(n_rows: int, n_inputs: int, *, target_density: float, density: float, outputs_per_row: int) -> float:
        fits = (1.0 - target_density * (1.0 - density)) ** n_inputs
        return float((1.0 - (1.0 - fits) ** outputs_per_row) ** n_rows)

    monkeypatch.setattr(match_bounds, "partition_chance", printed)
    assert registry.run_check("random_features:thm-4.3").verdict is Verdict.FAILS


@pytest.mark.parametrize("name", ["thm-3.1", "conclusion"])
def test_another_scale_of_the_gradient_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    right = training.norm_only

    def stretched(features: Features) -> training.Layer:
        layer = right(features)

        def call(x: Tensor, gamma: Tensor) -> Tensor:
            made = layer(x, gamma)
            return made.detach() + 1.001 * (made - made.detach())  # the same values, a gradient off by a thousandth

        return call

    monkeypatch.setattr(training, "norm_only", stretched)
    assert registry.run_check(f"random_features:{name}").verdict is Verdict.FAILS


def test_starting_weights_are_the_same_for_one_seed() -> None:
    first, again = training.starting_weights(3), training.starting_weights(3)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
