"""Costs of norm-only layers on tiny layers: rows, goals that can be missed, and the command."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import pytest
import torch
from torch import nn

from onlynorm import cli
from onlynorm.cli.evidence import bench as measuring
from onlynorm.cli.terminal import screen
from onlynorm.errors import ValueRangeError
from onlynorm.evidence.bench.races.norm_only import (
    FOLLOWED,
    ORDINARY,
    PLAIN,
    TOLERANCE,
    WAYS,
    BlockRow,
    CostRow,
    LayersBench,
    bench_layers,
    measure_blocks,
    measure_layer,
    measure_step,
)
from onlynorm.evidence.goals import is_met


def test_every_structured_layer_is_measured_beside_the_ordinary_one() -> None:
    rows = measure_layer("tiny", nn.Linear(6, 5), torch.ones(4, 6), repeats=1)
    assert [row.method for row in rows] == [ORDINARY, *WAYS]
    assert rows[0].ratio == 1.0
    assert all(row.seconds > 0.0 and row.ratio == row.seconds / rows[0].seconds for row in rows)
    assert {row.method: row.n_frozen for row in rows if row.method != "id_cond, density 0.2"} == {
        ORDINARY: 0, "id_cond": 0, "id_cond_minimal": 0, "ortho_cond": 25 + 36,
    }  # fmt: skip
    assert [row.n_trained for row in rows if row.method in (ORDINARY, "id_cond", "ortho_cond")] == [35, 35, 35]


def test_steps_compare_with_plain_training_of_the_same_layer() -> None:
    rows = {row.method: row for row in measure_step(2, repeats=1, n_images=2)}
    assert list(rows) == [PLAIN, FOLLOWED, ORDINARY]
    assert rows[PLAIN].ratio == 1.0
    assert rows[PLAIN].n_trained == rows[FOLLOWED].n_trained == 45 + 2  # excess 1.25 times 36, and the shifts


def test_blocks_keep_exactness_and_drop_what_is_frozen() -> None:
    rows = measure_blocks(8, repeats=1)
    assert [row.n_blocks for row in rows] == [1, 2, 4, 8]
    assert all(row.residual <= TOLERANCE for row in rows)
    assert all(rows[0].n_frozen >= row.n_blocks * row.n_frozen for row in rows)


# ------------------------------------------------------------------------------- goals and the command


def made(*, ratio: float = 1.3, step: float = 2.0, few: float = 2.3, **changes: Any) -> LayersBench:
    layers = [CostRow("net", way, 1.0, ratio if way == "ortho_cond" else 1.0, 10, 0, 8.0) for way in WAYS]
    steps = [CostRow("net", PLAIN, 1.0, 1.0, 10, 20), CostRow("net", FOLLOWED, step, step, 10, 20)]
    blocks = [BlockRow(1, 4.0, 0.4, 400, 1e-11), BlockRow(4, 1.0, 0.1, 100, 1e-11)]
    few_rows = [CostRow("net", "ortho_cond", few, few, 10, 0, 0.1)]
    return LayersBench(layers, few_rows, steps, [blocks[0], dataclasses.replace(blocks[1], **changes)])


def test_goals_are_met_up_to_their_limits() -> None:
    assert len(made().goals) == 7
    assert is_met(made())
    assert is_met(made(solve_seconds=1.09))
    assert LayersBench().goals == []


def test_ortho_cond_is_not_judged_where_the_batch_is_too_small_to_pay_for_its_products() -> None:
    bench = made(ratio=5.0)
    bench.layers = [dataclasses.replace(row, load=2.9) for row in bench.layers]
    assert is_met(bench)
    assert len(bench.goals) == 6


@pytest.mark.parametrize(
    ("changes", "aim"),
    [
        ({"ratio": 1.31}, "ortho_cond: forward and backward"),
        ({"few": 2.6}, "ortho_cond, few samples"),
        ({"step": 2.01}, "preconditioned step"),
        ({"solve_seconds": 1.2}, "4 blocks"),
        ({"weight_seconds": 0.12}, "4 blocks"),
        ({"n_frozen": 101}, "4 blocks"),
        ({"residual": 1e-9}, "4 blocks"),
    ],
)
def test_each_goal_can_be_missed(changes: dict[str, Any], aim: str) -> None:
    missed = [goal.aim for goal in made(**changes).goals if not goal.is_met]
    assert len(missed) == 1
    assert aim in missed[0]


def test_no_turns_are_refused() -> None:
    with pytest.raises(ValueRangeError, match="repeats needs to be a whole number from 1; got 0"):
        bench_layers(repeats=0)


@pytest.mark.parametrize("is_met", [True, False])
@pytest.mark.parametrize("how", ["", "--markdown", "--json"])
def test_the_command_shows_rows_and_goals_and_exits_with_1_when_one_is_missed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_met: bool, how: str
) -> None:
    asked: dict[str, Any] = {}

    def measure(*, progress: Any, **options: Any) -> LayersBench:
        asked.update(options)
        progress("a step")
        return made(step=2.0 if is_met else 3.0)

    monkeypatch.setattr(measuring, "bench_layers", measure)
    monkeypatch.setattr(screen, "width", 300)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "argv", ["onlynorm", "bench", "layers", "--quick", *([how] if how else [])])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert int(stopped.value.code or 0) == (0 if is_met else 1)
    assert asked == {"quick": True, "repeats": 15}
    shown = capsys.readouterr().out
    if how == "--json":
        assert [row["n_blocks"] for row in json.loads(shown)["blocks"]] == [1, 4]
        assert len(json.loads(shown)["goals"]) == 7
    else:
        assert "ortho_cond" in shown
        assert "1e-11" in shown
        assert ("| net | id_cond |" in shown) == (how == "--markdown")
