"""The figure for remark 3 of giannou2023: its pieces, its values, and that a wrong law would be noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from onlynorm.evidence.artifacts import Artifact, load_artifacts
from onlynorm.evidence.papers.giannou2023 import ARTIFACTS, sparse
from onlynorm.evidence.papers.giannou2023.sparse import is_full, random_pattern
from onlynorm.evidence.papers.reproduce import reproduce
from onlynorm.evidence.records import RecordVerdict as Outcome

TABLE = """
[[artifact]]
id = "giannou2023:remark-3"
title = "t"
claim = "c"
kind = "figure"
seeds = [0]
sizes.quick = { widths = [6, 12], excesses = [1.0, 1.5], n_patterns = 12 }
sizes.paper = { widths = [6, 12], excesses = [1.0, 1.5], n_patterns = 12 }

[[artifact.expect]]
name = "half full over the law, excess 1.5"
value = 1.0
tolerance = 0.2
source = "law"

[[artifact.expect]]
name = "full as soon as no feature is dead, fraction"
min = 0.9
source = "ours"
"""


@pytest.fixture
def small(tmp_path: Path) -> Artifact:
    path = tmp_path / "giannou2023.toml"
    path.write_text(TABLE)
    id = "giannou2023:remark-3"
    return load_artifacts(path, {id: ARTIFACTS[id]})[id]


def test_a_piece_holds_the_densities_of_every_pattern() -> None:
    found = sparse.thresholds(d=6, excess=1.5, n_patterns=5, seed=2)
    assert found["alive"] == []
    for i, density in enumerate(found["full"]):
        drawn = [
            random_pattern((6, 6), p, seed=200_000 + i, excess=1.5, layer="remark 3") for p in (density, density - 1e-3)
        ]
        assert [is_full(one) for one in drawn] == [True, False]
    square = sparse.thresholds(d=6, excess=1.0, n_patterns=5, seed=2)
    assert all(alive <= full for alive, full in zip(square["alive"], square["full"], strict=True))


def test_the_figure_has_its_curves_and_meets_its_law(small: Artifact, tmp_path: Path) -> None:
    (record,) = reproduce(small, out=tmp_path / "out")
    assert record.verdict is Outcome.CAVEAT, record.reasons
    assert {panel.name for panel in record.panels} == {"fractions", "halves"}
    assert {curve.style for curve in record.curves} == {"data", "law"}
    assert record.table is not None
    assert [row[:2] for row in record.table.rows] == [(6, 1.0), (12, 1.0), (6, 1.5), (12, 1.5)]
    assert record.values["half full, smallest multiple of log d / d"] > 1.0


def test_a_wrong_law_is_not_reproduced(small: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "predicted_density", lambda shape, *, n_features: 0.9)
    (record,) = reproduce(small, out=tmp_path / "out")
    assert record.verdict is Outcome.NOT_REPRODUCED
