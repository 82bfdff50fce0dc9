"""The benchmark of alignment: what it measures, and that its goals can be missed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from onlynorm.evidence.bench.papers_method import greedy_as_described
from onlynorm.evidence.bench.races.align import (
    DESCRIBED,
    INSIDE,
    LOW,
    MIDDLE,
    SPARSE,
    UNALIGNED,
    AlignRow,
    AlignSizes,
    make_case,
    race,
)
from onlynorm.evidence.harness import is_met
from onlynorm.solvers import KhatriRao


@pytest.fixture(scope="module")
def bench() -> Any:
    said: list[str] = []
    made = race.run(AlignSizes(quick=True, repeats=1), progress=said.append)
    assert len(said) == 4
    return made


def test_quick_measures_every_method_on_every_case(bench: Any) -> None:
    for case in (LOW, MIDDLE, SPARSE):
        methods = {row.method for row in bench.rows if row.case == case}
        assert methods == {UNALIGNED, DESCRIBED, "greedy", "two_opt", "random", "tabu"}
    assert {row.method for row in bench.rows if row.case == INSIDE} == {UNALIGNED, "greedy", "assignment"}


def test_quick_meets_the_goals_that_do_not_need_the_size(bench: Any) -> None:
    assert [goal.aim for goal in bench.goals if not goal.is_met] == []
    assert not any("times faster" in goal.aim for goal in bench.goals)


def test_every_row_has_all_its_cells(bench: Any) -> None:
    (table,) = bench.tables()
    assert all(len(row) == len(table.columns) for row in table.rows)


def rows(ratio: float, missed: float, best: float, *, whole: float = 60.0) -> list[AlignRow]:
    return [
        AlignRow(LOW, "greedy", missed, 0.1, 1.0, 1.0, 1.0),
        AlignRow(LOW, DESCRIBED, 0.5, 0.1 * ratio, ratio, whole, whole),
        AlignRow(LOW, "tabu", best, 1.0),
    ]


@pytest.mark.parametrize(
    ("made", "is_good"),
    [
        (rows(60, 0.5, 0.4), True),
        (rows(40, 0.5, 0.4), False),
        (rows(60, 0.5, 0.4, whole=40.0), False),
        (rows(60, 0.6, 0.4), False),
        (rows(60, 0.5, 0.5), False),
        (rows(60, 0.5, 0.5 * (1 - 1e-12)), False),  # the same order, rounded in another way
        ([*rows(60, 0.5, 0.5), AlignRow(LOW, UNALIGNED, 0.4, math.nan)], False),
    ],
)
def test_goals_are_missed_by_slow_worse_or_no_better_methods(made: list[AlignRow], is_good: bool) -> None:
    assert is_met(race.result([("rows", row) for row in made])) is is_good


def test_the_described_greedy_permutes_and_does_not_lose() -> None:
    target, left, right = make_case(MIDDLE, 8)
    order = greedy_as_described(left, right, target)
    assert sorted(order.tolist()) == list(range(8))
    matrix = KhatriRao(left, right).materialise()
    projector = torch.eye(64, dtype=torch.float64) - matrix @ torch.linalg.pinv(matrix)
    before, after = (float((projector @ t.flatten()).square().sum()) for t in (target, target[order]))
    assert after < before
