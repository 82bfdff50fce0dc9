"""The loop that everybody writes first against our chains: the same law, rows, and goals that can be missed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from onlynorm.evidence.bench.races import chain as bench
from onlynorm.evidence.bench.races.chain import (
    EACH,
    GAMMAS,
    LOOP,
    N_LAYERS,
    OURS,
    WIDTHS,
    ChainRow,
    ChainSizes,
    chains_for,
    loop_slice,
    our_slice,
    plain_layers,
    race,
)
from onlynorm.evidence.harness import is_met
from onlynorm.rank import Chain, rank_ratio, simulate, soft_rank


def row(width: int, n_chains: int, method: str, rate: float) -> ChainRow:
    return ChainRow(width, n_chains, method, rate, 1.0, N_LAYERS * n_chains * len(GAMMAS) / rate / 3600)


def result(rows: list[ChainRow]) -> Any:
    return race.result([("rows", row) for row in rows])


def good() -> list[ChainRow]:
    """Both goals met with little to spare: 50.5 times, and 1.9 hours."""
    rates = {width: 6 * N_LAYERS * chains_for(width) * len(GAMMAS) / (1.9 * 3600) for width in WIDTHS}
    rows = [row(width, chains_for(width), OURS, rate) for width, rate in rates.items()]
    return [row(32, 64, OURS, 5050.0), row(32, 1, LOOP, 100.0), *rows]


def test_the_loop_counts_what_the_measures_count() -> None:
    generator = torch.Generator().manual_seed(1)
    H = torch.randn(6, 6, generator=generator)
    for _ in range(5):
        H, (rank,), (ratio,) = plain_layers(H, 0.5, n_layers=1, generator=generator)
        assert rank == int(soft_rank(H, 0.5))
        assert ratio == pytest.approx(float(rank_ratio(H)), rel=1e-5)
        assert float(H.square().mean(1).sub(1).abs().max()) < 1e-5


def test_the_loop_and_our_chains_have_the_same_averages() -> None:
    generator = torch.Generator().manual_seed(0)
    H = torch.randn(8, 8, generator=generator)
    _, ranks, ratios = plain_layers(H, 1.0, n_layers=1500, generator=generator)
    ours = simulate(Chain(8, 1.0, n_chains=16, seed=5), 400, every=2, burn_in=50)
    for name, numbers in (("r", ratios), ("soft_rank 0.5", ranks)):
        blocks = torch.tensor(numbers, dtype=torch.float64)[50:].view(-1, 29).mean(1)  # of 29 layers: independent
        error = math.hypot(float(blocks.std()) / math.sqrt(len(blocks)), ours[name].error)
        assert abs(float(blocks.mean()) - ours[name].value) < 5 * error
        assert error < 0.03 * ours[name].value


def test_every_method_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "WIDTHS", (8, 32))
    said: list[str] = []
    made: Any = race.run(ChainSizes(repeats=1), progress=said.append)
    methods = [(r.width, r.n_chains, r.method) for r in made.rows]
    assert methods == [(32, 64, OURS), (32, 64, EACH), (32, 1, LOOP), (8, 32, OURS), (8, 1, LOOP), (32, 8, OURS)]
    assert all(r.layers_per_second > 0 and r.hours > 0 for r in made.rows)
    assert made.rows[0].ratio == 1.0
    first, loop = made.rows[0], made.rows[2]
    assert loop.ratio == pytest.approx(first.layers_per_second / loop.layers_per_second)
    assert len(made.goals) == 2
    assert len(said) == 3
    assert set(made.as_dict()) == {"sizes", "rows", "goals"}
    (table,) = made.tables()
    assert len(table.rows) == len(made.rows)
    assert {len(cells) for cells in table.rows} == {len(table.columns)}


def test_quick_leaves_out_the_wide_chains_and_their_goal(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(bench, "_race", lambda width, methods, repeats: calls.append((width, repeats)) or [])
    made = race.run(ChainSizes(quick=True, repeats=8))
    assert [width for width, _ in calls] == [32, 8, 16, 32, 64]
    assert made.goals == []
    calls.clear()
    race.run(ChainSizes(repeats=8))
    assert calls[-2:] == [(128, 2), (256, 2)]


def test_slices_say_how_many_layers_they_took() -> None:
    assert our_slice(Chain(4, n_chains=3))() == 192
    assert loop_slice(4, 0.5, n_layers=7)() == 7


def test_goals_are_met_up_to_their_limits_and_can_be_missed() -> None:
    rows = good()
    assert len(result(rows).goals) == 2
    assert is_met(result(rows))
    slow = result([rows[0], replace(rows[1], layers_per_second=102.0), *rows[2:]])
    assert [goal.is_met for goal in slow.goals] == [False, True]
    late = result([*rows[:-1], replace(rows[-1], hours=rows[-1].hours + 0.2)])
    assert [goal.is_met for goal in late.goals] == [True, False]
    assert not is_met(late)
    assert "2.10 hours" in late.goals[1].measured
