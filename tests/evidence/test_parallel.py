"""Sweeps, artifacts and checks on several workers: the same results as in one process, and what fails is named."""

from __future__ import annotations

import collections
import dataclasses
import json
from pathlib import Path
from typing import Any

import parallel_work as work
import pytest

from onlynorm.errors import ValueRangeError
from onlynorm.evidence import registry
from onlynorm.evidence.artifacts import Artifact, Expectation
from onlynorm.evidence.bench.table import BENCHMARKS
from onlynorm.evidence.papers.reproduce import PieceProgress, reproduce
from onlynorm.evidence.records import Record, RecordVerdict


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file with one line per call of the toy functions in any process."""
    log = tmp_path / "calls"
    monkeypatch.setenv(work.LOG, str(log))
    return log


def lines(log: Path) -> collections.Counter[str]:
    found = collections.Counter(log.read_text().splitlines() if log.exists() else [])
    log.unlink(missing_ok=True)
    return found


def artifact(number: int, **sizes: int) -> Artifact:
    expected = Expectation("sum", "arithmetic", minimum=-1e9)
    both = {"quick": {"n": 3, **sizes}, "paper": {"n": 3, **sizes}}
    return Artifact(f"toy:fig-{number}", "T", "C.", "figure", (0,), both, (expected,), (), work.figure, "digest")


def without_times(record: Record) -> dict[str, Any]:
    pieces = [dataclasses.replace(piece, seconds=0.0) for piece in record.pieces]
    return vars(dataclasses.replace(record, seconds=0.0, created="", pieces=tuple(pieces)))


def test_a_sweep_on_two_workers_computes_the_same_pieces_once_and_finds_the_same(calls: Path, tmp_path: Path) -> None:
    serial: Any = work.sweep.run(out=tmp_path / "serial")
    expected = lines(calls)
    assert sum(expected.values()) == 2 * 2 + 2 + 2 * 2, "two trials each, a neighbour each, two seeds each"
    said: list[str] = []
    parallel: Any = work.sweep.run(out=tmp_path / "parallel", workers=2, progress=said.append)
    assert lines(calls) == expected
    assert parallel.as_dict() == serial.as_dict()
    assert any("0 of 4 done; running good, lr 0.01, seed" in text for text in said)
    stored = [json.loads(path.read_text())["body"] for path in (tmp_path / "parallel").rglob("*.json")]
    assert {body["threads"] for body in stored} == {1}
    again: Any = work.sweep.run(out=tmp_path / "parallel")
    assert lines(calls) == {}
    assert set(again.runs["note"]) == {"cached"}


@pytest.mark.slow
def test_a_failed_cell_is_named_after_the_others_are_stored(calls: Path, tmp_path: Path) -> None:
    with pytest.raises(ArithmeticError, match="bad diverged"):
        work.sweep.run(work.ToySizes(seeds=1, failing="bad"), out=tmp_path / "out", workers=2, force=True)
    assert lines(calls)["run good 0.1 0"] == 1
    work.sweep.run(work.ToySizes(seeds=1), out=tmp_path / "out")
    assert lines(calls) == {"run bad 0.001 0": 1}


def test_artifacts_on_two_workers_have_the_records_of_one_process(calls: Path, tmp_path: Path) -> None:
    chosen = [artifact(1), artifact(2, n=2)]
    serial = reproduce(chosen, out=tmp_path / "serial")
    expected = lines(calls)
    seen: list[PieceProgress] = []
    parallel = reproduce(chosen, out=tmp_path / "parallel", workers=2, progress=seen.append)
    assert lines(calls) == expected
    assert sum(expected.values()) == 10
    assert list(map(without_times, parallel)) == list(map(without_times, serial))
    waves = {event.total for event in seen if event.artifact == "pieces"}
    assert waves == {5}, "first pieces of both artifacts, then second pieces of both"
    reproduce(chosen, out=tmp_path / "parallel", workers=2)
    assert lines(calls) == {}


@pytest.mark.slow
def test_a_failed_piece_fails_its_artifact_only(calls: Path, tmp_path: Path) -> None:
    good, bad = reproduce([artifact(1), artifact(2, last=99)], out=tmp_path / "out", workers=2)
    assert good.verdict is not RecordVerdict.NOT_REPRODUCED
    assert bad.verdict is RecordVerdict.NOT_REPRODUCED
    assert "3 failed: 'second 0': 99 is too many" in bad.reasons[0]


def test_checks_on_two_workers_find_the_same() -> None:
    keys = ["hardt_ma2017:thm-2.1", "giannou2023:lemma-2", "giannou2023:thm-1"]
    serial = registry.run_checks(keys, seed=1)
    parallel = registry.run_checks(keys, seed=1, workers=2)
    assert [dataclasses.replace(one, seconds=0.0) for one in parallel] == [
        dataclasses.replace(one, seconds=0.0) for one in serial
    ]


def test_a_benchmark_of_times_has_no_workers(tmp_path: Path) -> None:
    with pytest.raises(ValueRangeError, match=r"solve compares times.*Omit workers"):
        BENCHMARKS["solve"].run(out=tmp_path, workers=2)
