"""What every check of a paper keeps to: it comes to the verdict we state, and a defect turns it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pytest

from onlynorm.evidence import registry
from onlynorm.evidence.registry import Verdict

Spoil = Callable[[pytest.MonkeyPatch], None]
"""Puts one defect into a check."""


def verdict_test(verdicts: Mapping[str, Verdict], *, slow: Collection[str] = (), seed: int = 0) -> Callable[..., None]:
    """A test of every key: the verdict is the stated one and follows from finite numbers that are told."""

    @pytest.mark.parametrize("key", _marked([(key,) for key in verdicts], slow))
    def test(key: str) -> None:
        found = registry.run_check(key, seed=seed)
        assert found.verdict is verdicts[key], found.evidence
        assert found.measured
        assert all(math.isfinite(value) for value in found.measured.values())
        assert re.search(r"\d", found.evidence)
        if found.verdict is Verdict.CORRECTED:
            assert registry.statement(key).slips, "what is corrected is said"

    return test


def defect_test(defects: Sequence[tuple[str, Spoil]], *, slow: Collection[str] = ()) -> Callable[..., None]:
    """A test of every defect: the check notices it, by its numbers and not by an accident."""

    @pytest.mark.parametrize(
        ("key", "spoil"), _marked(defects, slow), ids=lambda value: getattr(value, "__name__", value)
    )
    def test(key: str, spoil: Spoil, monkeypatch: pytest.MonkeyPatch) -> None:
        spoil(monkeypatch)
        found = registry.run_check(key)
        assert found.verdict is Verdict.FAILS, found.evidence
        assert "raised" not in found.evidence, "the numbers have to turn it, not an accident"

    return test


def _name(value: Any) -> str:
    return str(getattr(value, "__name__", value))


def _marked(rows: Sequence[tuple[Any, ...]], slow: Collection[str]) -> list[Any]:
    """Rows of arguments, marked as slow where the check that stands first is."""
    return [pytest.param(*row, marks=[pytest.mark.slow] if row[0] in slow else []) for row in rows]
