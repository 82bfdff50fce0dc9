"""Every statement of daneshmand2020 has a check that comes to the verdict we state, and that notices defects."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import onlynorm.rank  # noqa: F401, the room registers its checks on import
from onlynorm import theorems
from onlynorm.rank import checks_chain, checks_law, checks_spectrum
from onlynorm.rank.chain import Chain
from onlynorm.theorems import Verdict

HOLDS = """
    lemma-2 thm-3 lemma-4 thm-5 lemma-6 example-9 lemma-10 lemma-11 lemma-12 prop-13 example-14 lemma-15 example-16
    lemma-18 lemma-20"""
CORRECTED = "lemma-1 lemma-7 prop-8 example-17"
VERDICTS = {
    f"daneshmand2020:{key}": verdict
    for keys, verdict in ((HOLDS, Verdict.HOLDS), (CORRECTED, Verdict.CORRECTED))
    for key in keys.split()
}

Spoil = Callable[[pytest.MonkeyPatch], None]


def test_every_statement_of_the_paper_has_a_check() -> None:
    own = [s.key for s in theorems.statements("daneshmand2020")]
    assert [key for key in own if not theorems.has_check(key)] == []
    assert sorted(VERDICTS) == sorted(key for key in own if not theorems.statement(key).restates)
    assert all(theorems.where(key).startswith("onlynorm.rank.checks_") for key in own)


@pytest.mark.parametrize("key", [key for key in VERDICTS if key != "daneshmand2020:lemma-10"])
def test_a_check_comes_to_the_verdict_we_state(key: str) -> None:
    found = theorems.run_check(key)
    assert found.verdict is VERDICTS[key], found.evidence
    assert found.measured
    assert all(math.isfinite(value) for value in found.measured.values())
    assert re.search(r"\d", found.evidence)
    if found.verdict is Verdict.CORRECTED:
        assert theorems.statement(key).slips, "what is corrected is said"


# Defects that the checks must notice, one each: wrong constants, wrong formulas, chains of another law.


def a_ratio_that_is_twice_as_large(patch: pytest.MonkeyPatch) -> None:
    ratio = checks_spectrum.rank_ratio
    patch.setattr(checks_spectrum, "rank_ratio", lambda H: 2 * ratio(H))


def a_ratio_one_percent_larger(patch: pytest.MonkeyPatch) -> None:
    ratio = checks_spectrum.rank_ratio
    patch.setattr(checks_spectrum, "rank_ratio", lambda H: 1.01 * ratio(H))


def a_drift_with_seven_instead_of_eight(patch: pytest.MonkeyPatch) -> None:
    def wrong(M: Tensor) -> Tensor:
        squares, cube = M.square().sum(-1), ((M @ M) * M).sum((-2, -1))
        return 2 * M.shape[-1] ** 2 - 2 * squares.sum(-1) - 7 * cube + 8 * squares.square().sum(-1)

    for module in (checks_chain, checks_spectrum):
        patch.setattr(module, "frobenius_drift", wrong)


def a_regularity_ten_percent_larger(patch: pytest.MonkeyPatch) -> None:
    regularity = checks_spectrum.regularity
    patch.setattr(checks_spectrum, "regularity", lambda H: 1.1 * regularity(H))


def other_eigenvalues(patch: pytest.MonkeyPatch) -> None:
    make = checks_spectrum.with_eigenvalues
    patch.setattr(checks_chain, "with_eigenvalues", lambda values: make(values.flip(0) * 0 + 1))


def steps_that_are_twice_as_large(patch: pytest.MonkeyPatch) -> None:
    moments = checks_spectrum.second_moments
    patch.setattr(checks_spectrum, "second_moments", lambda H: 2 * moments(H))


def chains_with_batch_norms(patch: pytest.MonkeyPatch) -> None:
    make = Chain
    patch.setattr(checks_chain, "Chain", lambda *sizes, **how: make(*sizes, **{**how, "norm": "batch"}))


def chains_without_norms(patch: pytest.MonkeyPatch) -> None:
    make = Chain
    for module in (checks_chain, checks_law):
        patch.setattr(module, "Chain", lambda *sizes, **how: make(*sizes, **{**how, "norm": "none"}))


def activations_that_are_not_linear(patch: pytest.MonkeyPatch) -> None:
    make = Chain
    patch.setattr(checks_chain, "Chain", lambda *sizes, **how: make(*sizes, **{**how, "activation": torch.tanh}))


def weights_that_are_not_symmetric(patch: pytest.MonkeyPatch) -> None:
    make = Chain
    patch.setattr(checks_law, "Chain", lambda *sizes, **how: make(*sizes, **{**how, "weights": "asymmetric"}))


def chains_that_stand_still(patch: pytest.MonkeyPatch) -> None:
    make = Chain
    patch.setattr(checks_law, "Chain", lambda *sizes, **how: make(*sizes, **{**how, "gamma": 0.0}))


@pytest.mark.parametrize(
    ("key", "spoil"),
    [
        ("lemma-1", a_ratio_that_is_twice_as_large),
        ("lemma-2", a_ratio_one_percent_larger),
        ("lemma-12", a_drift_with_seven_instead_of_eight),
        ("prop-13", a_drift_with_seven_instead_of_eight),
        ("example-14", other_eigenvalues),
        ("lemma-15", a_regularity_ten_percent_larger),
        ("example-16", a_regularity_ten_percent_larger),
        ("example-17", a_regularity_ten_percent_larger),
        ("lemma-20", steps_that_are_twice_as_large),
        ("lemma-4", chains_with_batch_norms),
        ("lemma-7", activations_that_are_not_linear),
        ("lemma-6", weights_that_are_not_symmetric),
        ("lemma-11", chains_that_stand_still),
        ("lemma-18", chains_without_norms),
        ("thm-3", chains_without_norms),
        ("thm-5", chains_without_norms),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_check_notices_a_defect(monkeypatch: pytest.MonkeyPatch, key: str, spoil: Spoil) -> None:
    spoil(monkeypatch)
    assert theorems.run_check(f"daneshmand2020:{key}").verdict is Verdict.FAILS
