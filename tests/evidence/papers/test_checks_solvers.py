"""Checks of statements about products, widths and spectra: their verdicts, and a defect that turns one of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from checks import verdict_test

from onlynorm.evidence import registry
from onlynorm.evidence.papers.random_features import widths
from onlynorm.evidence.registry import Verdict

HOLDS = """
    giannou2023:lemma-1 giannou2023:lemma-2 giannou2023:lemma-3 giannou2023:lemma-9 giannou2023:remark-5
    giannou2023:thm-5 giannou2023:thm-6 burkholz2024:thm-2.2 burkholz2024:thm-2.3 random_features:ortho-cond"""
CORRECTED = """
    giannou2023:fact-1 giannou2023:remark-4 burkholz2024:lemma-2.1 random_features:thm-2.1 random_features:thm-2.2
    random_features:orthogonal-weights random_features:eq-3"""
VERDICTS = dict.fromkeys(HOLDS.split(), Verdict.HOLDS) | dict.fromkeys(CORRECTED.split(), Verdict.CORRECTED)
FILES = ("products", "widths", "spectrum")


def test_every_statement_of_these_files_is_listed() -> None:
    files = {s.key: registry.where(s.key).partition(":")[0].rpartition(".")[2] for s in registry.statements()}
    own = [key for key, file in files.items() if file in FILES and not registry.statement(key).restates]
    assert sorted(own) == sorted(VERDICTS)


test_a_check_comes_to_the_verdict_we_state = verdict_test(VERDICTS)


def test_a_gamma_that_is_not_of_least_norm_turns_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    solve = widths.solve

    def longer(*arguments: Any, **options: Any) -> Any:
        found = solve(*arguments, **options)
        return dataclasses.replace(found, gamma=1.001 * found.gamma)

    monkeypatch.setattr(widths, "solve", longer)
    assert registry.run_check("random_features:thm-2.1").verdict is Verdict.FAILS
