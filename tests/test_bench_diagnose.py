"""What a diagnosis costs: rows of every way, a competitor that is missing or not, and goals that can be missed."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import replace

import pytest
import torch
from torch import nn

from onlynorm.cli import main
from onlynorm.cli.evidence import bench as measure_diagnose
from onlynorm.errors import ValueRangeError
from onlynorm.evidence.bench.races import diagnose as bench
from onlynorm.evidence.bench.races.diagnose import (
    DELVE,
    OURS,
    PASS,
    DiagnoseBench,
    DiagnoseRow,
    Network,
    bench_diagnose,
)
from onlynorm.evidence.goals import is_met

TINY = Network("ResNet-18, tiny", 18, 4, 2, 32)


def good() -> DiagnoseBench:
    rows = [
        DiagnoseRow("net", "2", PASS, 1.0, 1.0, 100, 1.0, 0),
        DiagnoseRow("net", "2", OURS, 2.9, 2.9, 190, 1.9, 7),
        DiagnoseRow("net", "2", DELVE, 9.0, 9.0, 900, 9.0, 3),
    ]
    return DiagnoseBench(rows)


def test_every_way_is_measured_and_a_missing_competitor_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "QUICK", (TINY,))
    monkeypatch.setitem(sys.modules, "delve", None)  # as if it were not installed
    said: list[str] = []
    n_threads = torch.get_num_threads()
    made = bench_diagnose(quick=True, repeats=1, progress=said.append)
    assert torch.get_num_threads() == n_threads
    assert [row.method for row in made.rows] == [PASS, OURS, DELVE]
    plain, ours, delve = made.rows
    assert (plain.passes, plain.memory_ratio) == (1.0, pytest.approx(1.0, abs=1.0))
    assert ours.passes == pytest.approx(ours.seconds / plain.seconds)
    assert ours.n_signals > 40
    assert delve.note.startswith("not run: ")
    assert [goal.aim.split(":")[0] for goal in made.goals] == ["ResNet-18, tiny"] * 2
    assert len(said) == 4
    (table,) = made.tables()
    assert {len(cells) for cells in table.rows} == {len(table.columns)}
    assert set(made.as_dict()) == {"rows", "goals"}


def test_the_competitor_runs_if_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tracker:
        def __init__(self, folder: str, *, save_to: str, modules: nn.Module, device: str) -> None:
            self.layers = {"a": modules}
            self.calls = 0

        def add_saturations(self, *, save: bool) -> None:
            self.calls += 1

    monkeypatch.setitem(sys.modules, "delve", types.SimpleNamespace(SaturationTracker=Tracker))
    rows = bench.measure(TINY, repeats=1, say=lambda _: None)
    assert [(row.method, row.note) for row in rows] == [(PASS, ""), (OURS, ""), (DELVE, "")]
    assert rows[2].n_signals == 1
    assert rows[2].passes > 0


def test_the_networks_are_those_that_are_named() -> None:
    model, images, classes = TINY.make()
    assert images.shape == (2, 3, 32, 32)
    assert model.training
    assert len(classes) == 2
    assert [(network.depth, network.width, network.size) for network in bench.FULL] == [(18, 64, 224), (50, 64, 224)]


def test_goals_are_met_up_to_their_limits_and_can_be_missed() -> None:
    assert len(good().goals) == 2
    assert is_met(good())
    slow, large = good(), good()
    slow.rows[1] = replace(slow.rows[1], passes=3.1)
    assert [goal.is_met for goal in slow.goals] == [False, True]
    large.rows[1] = replace(large.rows[1], memory_ratio=2.1)
    assert [goal.is_met for goal in large.goals] == [True, False]


def test_no_turns_are_refused() -> None:
    with pytest.raises(ValueRangeError, match="repeats needs to be a whole number from 1; got 0"):
        bench_diagnose(repeats=0)


def test_the_command_tells_the_rows_and_ends_with_1_where_a_goal_is_missed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def fake(*, quick: bool, repeats: int, progress: object) -> DiagnoseBench:
        asked.append((quick, repeats))
        made = good()
        made.rows[1] = replace(made.rows[1], passes=2.9 if quick else 3.1)
        return made

    monkeypatch.setattr(measure_diagnose, "bench_diagnose", fake)
    for words, code in ((["--quick", "--repeats", "2"], 0), ([], 1)):
        monkeypatch.setattr(sys, "argv", ["onlynorm", "bench", "diagnose", "--json", *words])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert (stopped.value.code or 0) == code
        assert [row["method"] for row in json.loads(capsys.readouterr().out)["rows"]] == [PASS, OURS, DELVE]
    assert asked == [(True, 2), (False, 3)]
