"""What a diagnosis costs: rows of every method, a competitor that is missing or not, and goals that can be missed."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from onlynorm.evidence.bench.races import diagnose as bench
from onlynorm.evidence.bench.races.diagnose import (
    DELVE,
    OURS,
    PASS,
    DiagnoseRow,
    DiagnoseSizes,
    Network,
    race,
)
from onlynorm.evidence.harness import is_met

TINY = Network("ResNet-18, tiny", 18, 4, 2, 32)


def good(**changes: Any) -> Any:
    rows = [
        DiagnoseRow("net", "2", PASS, 1.0, 1.0, 100, 1.0, 0),
        DiagnoseRow("net", "2", OURS, 2.9, 2.9, 190, 1.9, 7),
        DiagnoseRow("net", "2", DELVE, 9.0, 9.0, 900, 9.0, 3),
    ]
    rows[1] = replace(rows[1], **changes)
    return race.result([("rows", row) for row in rows])


def test_every_method_is_measured_and_a_missing_competitor_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "QUICK", (TINY,))
    monkeypatch.setitem(sys.modules, "delve", None)  # as if it were not installed
    said: list[str] = []
    n_threads = torch.get_num_threads()
    made: Any = race.run(DiagnoseSizes(quick=True, repeats=1), progress=said.append)
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
    assert set(made.as_dict()) == {"sizes", "rows", "goals"}


def test_the_competitor_runs_if_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tracker:
        def __init__(self, folder: str, *, save_to: str, modules: nn.Module, device: str) -> None:
            self.layers = {"a": modules}
            self.calls = 0

        def add_saturations(self, *, save: bool) -> None:
            self.calls += 1

    monkeypatch.setitem(sys.modules, "delve", types.SimpleNamespace(SaturationTracker=Tracker))
    rows = bench.measure_network(TINY, repeats=1, status=lambda _: None)
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
    assert [goal.is_met for goal in good(passes=3.1).goals] == [False, True]
    assert [goal.is_met for goal in good(memory_ratio=2.1).goals] == [True, False]
