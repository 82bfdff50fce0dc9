"""Frozen random networks on tiny sizes: what is trained, what is counted, the histogram, goals."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from tiny_benchmarks import TINY

from onlynorm.evidence.bench.sweeps import frozen as bench_module
from onlynorm.evidence.bench.sweeps.frozen import (
    FULL,
    HEAD,
    METHODS,
    NETWORKS,
    NORMS,
    NORMS_FROM_ONES,
    FrozenCase,
    FrozenOutcome,
    FrozenSizes,
    cases,
    draw,
    sweep,
)
from onlynorm.evidence.harness import is_met
from onlynorm.evidence.sweep import Measured, TrainingRun
from onlynorm.models import cifar_resnet
from onlynorm.tuning import Fit, Schedule

SMALL = ((8, 2), (8, 4), (14, 2))


@pytest.mark.parametrize(
    ("method", "trained"),
    [(NORMS, {"norms"}), (NORMS_FROM_ONES, {"norms"}), (HEAD, {"head"}), (FULL, {"norms", "head", "weights"})],
)
def test_a_method_trains_what_it_says_from_the_scales_it_says(method: str, trained: set[str]) -> None:
    network = cifar_resnet(8, width=8)
    bench_module.prepare(network, method, seed=3)
    assert {part_of(name) for name, p in network.named_parameters() if p.requires_grad} == trained
    scales = torch.tensor(bench_module.gammas_of(network))
    assert len(scales) == 8 + 2 * (8 + 16 + 32)
    if method == NORMS:
        assert 0.0 <= float(scales.min()) < 0.2 < 0.8 < float(scales.max()) <= 1.0
        other = cifar_resnet(8, width=8)
        bench_module.prepare(other, method, seed=4)
        assert bench_module.gammas_of(other) != tuple(scales.tolist())
    else:
        assert bool((scales == 1.0).all())


def part_of(name: str) -> str:
    return "norms" if "bn" in name else "head" if name.startswith("linear") else "weights"


def test_one_run_counts_what_it_trained_and_leaves_the_rest_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = TINY["frozen"](monkeypatch)

    def train(method: str, seed: int = 0) -> FrozenOutcome:
        return dataclasses.replace(
            bench_module.train(FrozenCase(8, 2, method), TrainingRun(seed, math.nan), sizes), seconds=0.0
        )

    made = {method: train(method) for method in METHODS}
    n_norms, n_head = 2 * (2 + 2 * (2 + 4 + 8)), 10 * 8 + 10
    assert {method: row.n_trained for method, row in made.items()} == {
        NORMS: n_norms, NORMS_FROM_ONES: n_norms, HEAD: n_head, FULL: made[FULL].n_total
    }  # fmt: skip
    assert all(row.is_frozen for row in made.values())
    assert set(made[HEAD].gammas) == {1.0}
    assert set(made[NORMS_FROM_ONES].gammas) != {1.0}
    assert made[NORMS] == train(NORMS)
    assert made[NORMS].gammas != train(NORMS, 1).gammas


def test_norms_alone_take_the_higher_learning_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, lrs = TINY["frozen"](monkeypatch), list[float]()

    def fit(*_: Any, schedule: Schedule, **__: Any) -> Fit:
        lrs.append(schedule.lr)
        return Fit((), 0, 0.0, "no training")

    monkeypatch.setattr(bench_module, "fit", fit)
    for method in METHODS:
        bench_module.train(FrozenCase(8, 2, method), TrainingRun(0, math.nan), sizes)
    assert lrs == [sizes.norm_lr, sizes.norm_lr, sizes.lr, sizes.lr]


def test_the_networks_grow_by_one_size_at_a_time() -> None:
    assert [width for depth, width in NETWORKS if depth == 8] == [4, 8, 16, 32]
    assert [depth for depth, width in NETWORKS if width == 8] == [8, 14, 20, 32]
    ones = [case for case in cases(FrozenSizes()) if case.method == NORMS_FROM_ONES]
    assert ones == [FrozenCase(*bench_module.FROM_ONES, NORMS_FROM_ONES)]
    assert FrozenCase(8, 2, NORMS_FROM_ONES) in cases(FrozenSizes.make(quick=True))


def made_up(n_seeds: int = 3, *, is_frozen: bool = True, gammas: tuple[float, ...] = (0.0, -0.02, 0.5, 1.5),
            **accuracies: float) -> Any:  # fmt: skip
    level = {"8,2": 0.3, "8,4": 0.4, "14,2": 0.35, **accuracies}
    return sweep.results([
        Measured(FrozenCase(*net, method), TrainingRun(seed, math.nan),
                 FrozenOutcome(level[f"{net[0]},{net[1]}"], 8, 80, gammas, is_frozen or seed > 0, 1.0))
        for seed in range(n_seeds) for net in SMALL for method in (NORMS, HEAD, FULL)
    ])  # fmt: skip


def test_scales_close_to_zero_are_counted_by_magnitude() -> None:
    found = made_up()
    assert set(found.runs["below_0_01"]) == {0.25}
    assert set(found.runs["below_0_05"]) == {0.5}
    rows = {row[:3]: row for row in found.tables()[0].rows}
    assert rows["8", "2", NORMS][3:8] == ("8", "80", "30.0 ± 0.0", "25.0 ± 0.0", "50.0 ± 0.0")
    assert rows["8", "2", HEAD][6:8] == ("-", "-")
    assert found.tables()[1].rows == (
        (NORMS, "25.0 ± 0.0", "50.0 ± 0.0", "36"),
        (FULL, "25.0 ± 0.0", "50.0 ± 0.0", "36"),
        ("uniform, before training", "1.0", "5.0", "-"),
    )
    assert "gammas" not in found.as_dict()["runs"][0]


def test_goals_are_met_and_each_can_be_missed() -> None:
    assert is_met(made_up())
    assert len(made_up().goals) == 4

    def missed(found: Any) -> list[str]:
        return [goal.aim for goal in found.goals if not goal.is_met]

    assert missed(made_up(2)) == ["every method is measured on every network with 3 seeds or more"]
    assert missed(made_up(**{"8,4": 0.3})) == ["norms only: accuracy grows with the width, 2 to 4"]
    assert missed(made_up(**{"14,2": 0.2})) == ["norms only: accuracy grows with the depth, 8 to 14"]
    assert missed(made_up(is_frozen=False)) == ["frozen weights are bit-identical after training"]


def test_a_scale_beyond_the_axis_is_counted_at_its_end() -> None:
    curves = draw(made_up(gammas=(-7.0, 9.0)))["gammas"].curves
    assert all(curve.y[0] == curve.y[-1] == 0.5 and sum(curve.y) == 1.0 for curve in curves)
