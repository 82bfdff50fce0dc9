"""The figures on depth: what narrow sources reach, what they cost, and that a loss of digits would be noticed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from onlynorm.evidence.artifacts import Artifact, artifacts
from onlynorm.evidence.papers.burkholz2024 import depth as width_depth
from onlynorm.evidence.papers.reproduce import reproduce
from onlynorm.evidence.records import RecordVerdict as Outcome


def small(id: str, **sizes: Any) -> Artifact:
    return dataclasses.replace(artifacts()[id], sizes={"quick": sizes, "paper": sizes})


def test_the_errors_of_theorem_2_stand_beside_the_unique_solution(tmp_path: Path) -> None:
    one = small("giannou2023:thm-2-errors", cases=[[16, 1], [16, 16]], excesses=[1.25, 2.0])
    (record,) = reproduce(one, out=tmp_path)
    assert record.verdict is Outcome.CAVEAT, record.reasons
    assert record.table is not None
    assert [row[:3] for row in record.table.rows] == [(16, 1, 1.25), (16, 1, 2.0), (16, 16, 1.25), (16, 16, 2.0)]
    assert [curve.label for curve in record.curves] == ["d = 16, k = 1", "d = 16, k = 16"]
    assert all(row[6] <= 1e-9 for row in record.table.rows if row[2] == 2.0)
    reached = {row[:3]: row[5] for row in record.table.rows}
    assert record.values["d = 16, largest error over k at excess 2"] == max(reached[16, 1, 2.0], reached[16, 16, 2.0])


def test_deeper_sources_are_narrower_and_not_cheaper(tmp_path: Path) -> None:
    one = small(
        "burkholz2024:width-depth", shape=[32, 32, 3, 3], measured=[5, 5], n_layers=[2, 10], network=[64, 8, 10]
    )
    (record,) = reproduce(one, out=tmp_path)
    assert record.verdict is Outcome.CAVEAT, record.reasons
    assert record.table is not None
    two, ten = record.table.rows
    assert (two[0], ten[0]) == (2, 10)
    assert ten[1] < two[1] / 5
    assert ten[3] > two[3]
    assert record.values["a whole network on digits: lowest fraction of equal predictions"] == 1.0


def test_lost_digits_are_not_reproduced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = width_depth.tradeoff

    def inexact(*args: Any, **options: Any) -> Any:
        found = whole(*args, **options)
        return dataclasses.replace(found, rows=tuple(dataclasses.replace(row, residual=1e-6) for row in found.rows))

    monkeypatch.setattr(width_depth, "tradeoff", inexact)
    one = small("burkholz2024:width-depth", shape=[32, 32, 3, 3], measured=[4, 4], n_layers=[2, 3], network=[64, 2, 10])
    (record,) = reproduce(one, out=tmp_path)
    assert record.verdict is Outcome.NOT_REPRODUCED
