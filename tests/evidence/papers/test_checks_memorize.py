"""The checks of the statements about memorizing hold, and can fail."""

from __future__ import annotations

import pytest
import torch

from onlynorm.evidence import registry
from onlynorm.evidence.papers.hardt_ma2017 import memorization
from onlynorm.identity.memorization.memorizer import Memorizer


@pytest.mark.parametrize("key", ["thm-3.2", "lemma-3.3", "lemma-B.1", "lemma-B.2"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_statements_about_memorizing_hold_once_corrected(key: str, seed: int) -> None:
    found = registry.run_check(f"hardt_ma2017:{key}", seed=seed)
    assert found.verdict is registry.Verdict.CORRECTED, found.evidence


def test_the_checks_would_notice_a_wrong_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memorization.thresholds, "by_length", lambda points: torch.arange(len(points)))
    assert registry.run_check("hardt_ma2017:lemma-B.2").verdict is registry.Verdict.FAILS


def test_the_checks_would_notice_a_wrong_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Memorizer, "classify", lambda self, x: torch.zeros(len(x), dtype=torch.long))
    assert registry.run_check("hardt_ma2017:thm-3.2").verdict is registry.Verdict.FAILS
