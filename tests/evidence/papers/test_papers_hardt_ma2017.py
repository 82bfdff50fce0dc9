"""The figures for hardt_ma2017: their values, their curves, and that a defect is not reproduced."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onlynorm.evidence.artifacts import Artifact, artifacts
from onlynorm.evidence.papers.hardt_ma2017 import factor_norms, landscape
from onlynorm.evidence.papers.reproduce import reproduce
from onlynorm.evidence.records import RecordVerdict as Outcome

LANDSCAPE = {
    "target": 2.0, "reach": 2.0, "n_places": 31, "n_starts": 4, "n_small": 30, "dim": 4, "depths": [3, 8],
    "scale": 0.02, "n_steps": 150,
}  # fmt: skip


def small(id: str, **sizes: Any) -> Artifact:
    return dataclasses.replace(artifacts()[id], sizes={"quick": sizes, "paper": sizes})


def test_norms_of_factors_lie_between_their_bounds(tmp_path: Path) -> None:
    (record,) = reproduce(small("hardt_ma2017:factor-norms", dim=5, depths=[20, 40, 80]), out=tmp_path)
    assert record.verdict is Outcome.CAVEAT, record.reasons
    assert [curve.label for curve in record.curves if curve.style == "data"] == ["svd", "polar", "spiral"]
    assert record.table is not None
    for row in record.table.rows:
        _, svd, polar, spiral, bound, smaller, least, error = (float(cell) for cell in row)
        assert least <= spiral <= smaller <= bound
        assert spiral < polar < svd <= bound
        assert error <= 1e-12


def test_the_landscape_shows_both_parameterizations(tmp_path: Path) -> None:
    (record,) = reproduce(small("hardt_ma2017:landscape", **LANDSCAPE), out=tmp_path)
    assert record.verdict is Outcome.CAVEAT, record.reasons
    assert {panel.name for panel in record.panels} == {
        *("layers I + A", "layers A", "deep layers I + A", "deep layers A"),
        *("risks", "ratios"),
    }
    ends = {curve.panel: curve for curve in record.curves if curve.label == "end"}
    assert [(1 + a) * (1 + b) for a, b in zip(ends["layers I + A"].x, ends["layers I + A"].y, strict=True)] == (
        pytest.approx([2.0] * 4, abs=0.05)
    )
    assert (tmp_path / "hardt_ma2017" / "landscape" / "quick" / "figure.png").stat().st_size > 10_000


def test_level_lines_lie_on_their_levels() -> None:
    places = np.linspace(-2, 2, 81)
    risks = (places[None, :] * places[:, None] - 2.0) ** 2
    x, y = (np.array(part) for part in landscape.level_lines(places.tolist(), risks.tolist(), landscape.LEVELS))
    heights = (x * y - 2.0) ** 2
    heights = heights[~np.isnan(heights)]
    nearest = np.abs(heights[:, None] - np.array(landscape.LEVELS)).min(1)
    assert len(heights) > 200
    assert nearest.max() < 0.02  # what linear interpolation on the grid leaves


def test_a_landscape_without_the_identity_is_not_reproduced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = landscape.Landscape
    monkeypatch.setattr(landscape, "Landscape", lambda target, *, is_residual: whole(target, is_residual=False))
    (record,) = reproduce(small("hardt_ma2017:landscape", **LANDSCAPE), out=tmp_path)
    assert record.verdict is Outcome.NOT_REPRODUCED


def test_a_worse_construction_is_not_reproduced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    factorize = factor_norms.factorize
    monkeypatch.setattr(factor_norms, "factorize", lambda matrix, depth, **o: factorize(matrix, math.isqrt(depth), **o))
    (record,) = reproduce(small("hardt_ma2017:factor-norms", dim=5, depths=[36, 64, 100]), out=tmp_path)
    assert record.verdict is Outcome.NOT_REPRODUCED
