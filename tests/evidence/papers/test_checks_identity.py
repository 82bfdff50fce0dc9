"""Every statement of hardt_ma2017 on factors and landscapes has a check that comes to our verdict, and can fail."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import scipy.linalg
import torch
from checks import defect_test, verdict_test
from torch import Tensor

from onlynorm.evidence import registry
from onlynorm.evidence.papers.hardt_ma2017 import factorization
from onlynorm.evidence.papers.hardt_ma2017 import landscape as checks_landscape
from onlynorm.evidence.registry import Verdict
from onlynorm.identity import Dominance, Landscape

VERDICTS = {
    "hardt_ma2017:thm-2.1": Verdict.HOLDS,
    "hardt_ma2017:negative-determinant": Verdict.HOLDS,
    "hardt_ma2017:positive-definite": Verdict.CORRECTED,
    "hardt_ma2017:thm-2.2": Verdict.HOLDS,
    "hardt_ma2017:ineq-2.3": Verdict.CORRECTED,
    "hardt_ma2017:claim-2.3": Verdict.HOLDS,
    "hardt_ma2017:lemma-2.4": Verdict.CORRECTED,
    "hardt_ma2017:claim-A.1": Verdict.HOLDS,
    "hardt_ma2017:claim-C.1": Verdict.HOLDS,
    "hardt_ma2017:claim-C.2": Verdict.HOLDS,
}
MEMORIZATION = {f"hardt_ma2017:{name}" for name in ("thm-3.2", "lemma-3.3", "lemma-B.1", "lemma-B.2")}


def test_every_statement_that_is_not_on_memorization_has_its_check_here() -> None:
    own = {s.key for s in registry.statements("hardt_ma2017")} - MEMORIZATION
    assert own == set(VERDICTS)
    places = [registry.where(key).partition(":")[0] for key in VERDICTS]
    folder = "onlynorm.evidence.papers.hardt_ma2017"
    assert set(places) == {f"{folder}.factorization", f"{folder}.landscape"}


test_a_check_comes_to_the_verdict_we_state = verdict_test(VERDICTS)


# Defects that the checks must notice, one each.


def a_fifth_of_the_bound(patch: pytest.MonkeyPatch) -> None:
    bound = factorization.paper_bound
    patch.setattr(factorization, "paper_bound", lambda stretch, depth: bound(stretch, depth) / 5)


def a_smaller_bound_by_a_hundredth(patch: pytest.MonkeyPatch) -> None:
    bound = factorization.spiral_bound
    patch.setattr(factorization, "spiral_bound", lambda stretch, depth: 0.99 * bound(stretch, depth))


def factors_of_the_transpose(patch: pytest.MonkeyPatch) -> None:
    factorize = factorization.factorize
    patch.setattr(factorization, "factorize", lambda matrix, depth: factorize(matrix.mT, depth))


def factors_of_the_square(patch: pytest.MonkeyPatch) -> None:
    factorize = factorization.factorize
    patch.setattr(factorization, "factorize", lambda matrix, depth, **o: factorize(matrix @ matrix, depth, **o))


def the_step_of_the_proof(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(factorization.rotations.Rotation, "step_norm", lambda self, count: math.sin(self.largest / count))


def blocks_of_size_one(patch: pytest.MonkeyPatch) -> None:
    def outside(matrix: Tensor) -> tuple[float, float]:
        D, S = (torch.from_numpy(part) for part in scipy.linalg.schur(matrix.numpy(), output="real"))
        blocks = torch.diag(D.diagonal())
        return factorization.relative(blocks, D), factorization.relative(S @ blocks @ S.mT, matrix)

    patch.setattr(factorization, "_outside_blocks", outside)


def the_second_smallest_singular_value(patch: pytest.MonkeyPatch) -> None:
    svd = torch.linalg.svd

    def wrong(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        U, s, V = svd(matrix)
        return U, torch.cat([s[:-1], s[-2:-1]]), V

    patch.setattr(torch.linalg, "svd", wrong)


def a_risk_without_its_noise(patch: pytest.MonkeyPatch) -> None:
    risk = Landscape.risk
    patch.setattr(Landscape, "risk", lambda self, layers: risk(self, layers) - self.noise)


def the_printed_order(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Landscape, "gradient", checks_landscape._printed_gradient)


def twice_the_right_side(patch: pytest.MonkeyPatch) -> None:
    dominance = Landscape._dominance

    def wrong(self: Landscape, *args: Any) -> Dominance:
        seen = dominance(self, *args)
        return dataclasses.replace(seen, bound=2.0 * seen.bound)

    patch.setattr(Landscape, "_dominance", wrong)


def points_that_are_not_critical(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checks_landscape, "critical_point", lambda landscape, start: 0.3 * start)


test_a_defect_turns_the_verdict = defect_test([
    ("hardt_ma2017:thm-2.1", a_fifth_of_the_bound),
    ("hardt_ma2017:thm-2.1", a_smaller_bound_by_a_hundredth),
    ("hardt_ma2017:negative-determinant", factors_of_the_transpose),
    ("hardt_ma2017:positive-definite", factors_of_the_square),
    ("hardt_ma2017:claim-A.1", the_step_of_the_proof),
    ("hardt_ma2017:claim-C.1", blocks_of_size_one),
    ("hardt_ma2017:claim-C.2", the_second_smallest_singular_value),
    ("hardt_ma2017:claim-2.3", a_risk_without_its_noise),
    ("hardt_ma2017:lemma-2.4", the_printed_order),
    ("hardt_ma2017:ineq-2.3", twice_the_right_side),
    ("hardt_ma2017:thm-2.2", points_that_are_not_critical),
])  # fmt: skip
