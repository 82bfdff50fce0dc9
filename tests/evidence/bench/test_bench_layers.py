"""Costs of norm-only layers on tiny layers: rows, and goals that can be missed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from onlynorm.evidence.bench.blocks import BlockRow
from onlynorm.evidence.bench.races.norm_only import (
    FOLLOWED,
    METHODS,
    ORDINARY,
    PLAIN,
    CostRow,
    measure_layer,
    measure_step,
    race,
)
from onlynorm.evidence.harness import is_met


def test_every_structured_layer_is_measured_beside_the_ordinary_one() -> None:
    rows = measure_layer("tiny", nn.Linear(6, 5), torch.ones(4, 6), repeats=1)
    assert [row.method for row in rows] == [ORDINARY, *METHODS]
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


# ------------------------------------------------------------------------------- goals


def made(*, ratio: float = 1.3, step: float = 2.0, few: float = 2.3, load: float = 8.0, **changes: Any) -> Any:
    layers = [CostRow("net", m, 1.0, ratio if m == "ortho_cond" else 1.0, 10, 0, load) for m in METHODS]
    steps = [CostRow("net", PLAIN, 1.0, 1.0, 10, 20), CostRow("net", FOLLOWED, step, step, 10, 20)]
    blocks = [BlockRow(1, 4.0, 0.4, 400, 1e-11), BlockRow(4, 1.0, 0.1, 100, 1e-11)]
    few_rows = [CostRow("net", "ortho_cond", few, few, 10, 0, 0.1)]
    blocks[1] = dataclasses.replace(blocks[1], **changes)
    parts = {"layers": layers, "few": few_rows, "steps": steps, "blocks": blocks}
    return race.result([(part, row) for part, rows in parts.items() for row in rows])


def test_goals_are_met_up_to_their_limits() -> None:
    assert len(made().goals) == 7
    assert is_met(made())
    assert is_met(made(solve_seconds=1.09))
    assert race.result([]).goals == []


def test_ortho_cond_is_not_judged_where_the_batch_is_too_small_to_pay_for_its_products() -> None:
    bench = made(ratio=5.0, load=2.9)
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
