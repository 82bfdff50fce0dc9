"""Every statement of daneshmand2020 has a check that comes to the verdict we state, and that notices defects."""

from __future__ import annotations

import pytest
import torch
from checks import defect_test, verdict_test
from torch import Tensor

from onlynorm.evidence import registry
from onlynorm.evidence.papers.daneshmand2020 import chain, eigenvalues, invariant_law
from onlynorm.evidence.registry import Verdict
from onlynorm.rank.chains.chain import Chain

HOLDS = """
    lemma-2 thm-3 lemma-4 thm-5 lemma-6 example-9 lemma-10 lemma-11 lemma-12 prop-13 example-14 lemma-15 example-16
    lemma-18 lemma-20"""
CORRECTED = "lemma-1 lemma-7 prop-8 example-17"
VERDICTS = {
    f"daneshmand2020:{key}": verdict
    for keys, verdict in ((HOLDS, Verdict.HOLDS), (CORRECTED, Verdict.CORRECTED))
    for key in keys.split()
}


def test_every_statement_of_the_paper_has_a_check() -> None:
    own = [s.key for s in registry.statements("daneshmand2020")]
    assert [key for key in own if not registry.has_check(key)] == []
    assert sorted(VERDICTS) == sorted(key for key in own if not registry.statement(key).restates)
    assert all(registry.where(key).startswith("onlynorm.evidence.papers.daneshmand2020.") for key in own)


test_a_check_comes_to_the_verdict_we_state = verdict_test(
    {key: verdict for key, verdict in VERDICTS.items() if key != "daneshmand2020:lemma-10"}
)


# Defects that the checks must notice, one each: wrong constants, wrong formulas, chains of another law.


def a_ratio_that_is_twice_as_large(patch: pytest.MonkeyPatch) -> None:
    ratio = eigenvalues.rank_ratio
    patch.setattr(eigenvalues, "rank_ratio", lambda H: 2 * ratio(H))


def a_ratio_one_percent_larger(patch: pytest.MonkeyPatch) -> None:
    ratio = eigenvalues.rank_ratio
    patch.setattr(eigenvalues, "rank_ratio", lambda H: 1.01 * ratio(H))


def a_drift_with_seven_instead_of_eight(patch: pytest.MonkeyPatch) -> None:
    def wrong(M: Tensor) -> Tensor:
        squares, cube = M.square().sum(-1), ((M @ M) * M).sum((-2, -1))
        return 2 * M.shape[-1] ** 2 - 2 * squares.sum(-1) - 7 * cube + 8 * squares.square().sum(-1)

    for module in (chain, eigenvalues):
        patch.setattr(module, "frobenius_drift", wrong)


def a_regularity_ten_percent_larger(patch: pytest.MonkeyPatch) -> None:
    regularity = eigenvalues.regularity
    patch.setattr(eigenvalues, "regularity", lambda H: 1.1 * regularity(H))


def other_eigenvalues(patch: pytest.MonkeyPatch) -> None:
    make = eigenvalues.with_eigenvalues
    patch.setattr(chain, "with_eigenvalues", lambda values: make(values.flip(0) * 0 + 1))


def steps_that_are_twice_as_large(patch: pytest.MonkeyPatch) -> None:
    moments = eigenvalues.second_moments
    patch.setattr(eigenvalues, "second_moments", lambda H: 2 * moments(H))


def chains_with_batch_norms(patch: pytest.MonkeyPatch) -> None:
    make = Chain
    patch.setattr(chain, "Chain", lambda *sizes, **how: make(*sizes, **{**how, "norm": "batch"}))


def chains_without_norms(patch: pytest.MonkeyPatch) -> None:
    make = Chain
    for module in (chain, invariant_law):
        patch.setattr(module, "Chain", lambda *sizes, **how: make(*sizes, **{**how, "norm": "none"}))


def activations_that_are_not_linear(patch: pytest.MonkeyPatch) -> None:
    make = Chain
    patch.setattr(chain, "Chain", lambda *sizes, **how: make(*sizes, **{**how, "activation": torch.tanh}))


def weights_that_are_not_symmetric(patch: pytest.MonkeyPatch) -> None:
    make = Chain
    patch.setattr(invariant_law, "Chain", lambda *sizes, **how: make(*sizes, **{**how, "weights": "asymmetric"}))


def chains_that_stand_still(patch: pytest.MonkeyPatch) -> None:
    make = Chain
    patch.setattr(invariant_law, "Chain", lambda *sizes, **how: make(*sizes, **{**how, "gamma": 0.0}))


test_a_defect_turns_the_verdict = defect_test([
    ("daneshmand2020:lemma-1", a_ratio_that_is_twice_as_large),
    ("daneshmand2020:lemma-2", a_ratio_one_percent_larger),
    ("daneshmand2020:lemma-12", a_drift_with_seven_instead_of_eight),
    ("daneshmand2020:prop-13", a_drift_with_seven_instead_of_eight),
    ("daneshmand2020:example-14", other_eigenvalues),
    ("daneshmand2020:lemma-15", a_regularity_ten_percent_larger),
    ("daneshmand2020:example-16", a_regularity_ten_percent_larger),
    ("daneshmand2020:example-17", a_regularity_ten_percent_larger),
    ("daneshmand2020:lemma-20", steps_that_are_twice_as_large),
    ("daneshmand2020:lemma-4", chains_with_batch_norms),
    ("daneshmand2020:lemma-7", activations_that_are_not_linear),
    ("daneshmand2020:lemma-6", weights_that_are_not_symmetric),
    ("daneshmand2020:lemma-11", chains_that_stand_still),
    ("daneshmand2020:lemma-18", chains_without_norms),
    ("daneshmand2020:thm-3", chains_without_norms),
    ("daneshmand2020:thm-5", chains_without_norms),
])  # fmt: skip
