"""The benchmark of verdicts: the curve on known scores, single networks, and a run that resumes."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from tiny_benchmarks import TINY as SETUPS
from tiny_benchmarks import stripes
from torch import nn

from onlynorm.errors import UnknownNameError
from onlynorm.evidence.bench.networks import FASHION, FIRST_SEEDS, NetworkSpec, subjects
from onlynorm.evidence.bench.sweeps import predict
from onlynorm.evidence.bench.sweeps.predict import (
    LEARNED,
    MIN_NETWORKS,
    PredictCase,
    PredictOutcome,
    PredictSizes,
    areas_of,
    cases,
    characteristic,
    diagnose_network,
    sweep,
    train_network,
)
from onlynorm.evidence.sweep import Measured, TrainingRun
from onlynorm.rank import Thresholds, diagnose

STRICT = Thresholds(alive=1e9)
TINY = PredictSizes(n_diagnosed=32, steps=20, batch_size=16, lrs=(0.001, 0.1))


@pytest.fixture(autouse=True)
def small_images(monkeypatch: pytest.MonkeyPatch) -> None:
    predict._split.cache_clear()
    monkeypatch.setitem(predict._DATA, FASHION, stripes)


def _results(scores: list[float], learned: list[bool]) -> Any:
    losses = [1.0 if one else math.log(10.0) for one in learned]
    runs = [
        Measured(PredictCase(f"{i}", FASHION, i), TrainingRun(0, math.nan), PredictOutcome(loss, 0.1))
        for i, loss in enumerate(losses)
    ]
    found = sweep.results(runs)
    found.runs = found.runs.join(pd.DataFrame({"score": scores, "verdict": "", "part": "rank"}))
    found.facts = areas_of(found)
    return found


@pytest.mark.parametrize(
    ("scores", "learned", "area"),
    [
        ([0.1, 0.2, 0.8, 0.9], [False, False, True, True], 1.0),
        ([0.1, 0.2, 0.8, 0.9], [True, True, False, False], 0.0),
        ([0.5, 0.5, 0.5, 0.5], [True, False, True, False], 0.5),
        ([0.1, 0.3, 0.2, 0.4], [False, False, True, True], 0.75),
    ],
)
def test_the_area_is_how_often_the_able_score_higher(scores: list[float], learned: list[bool], area: float) -> None:
    assert _results(scores, learned).facts["area"] == pytest.approx(area)
    pairs = [(a, b) for a, one in zip(scores, learned, strict=True) for b, two in zip(scores, learned, strict=True)
             if one and not two]  # fmt: skip
    assert sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs) == pytest.approx(area)


def test_the_curve_goes_from_none_to_all_and_needs_both_kinds() -> None:
    false, true = characteristic(_results([0.3, 0.1, 0.2], [True, False, True]))
    assert (false[0], true[0], false[-1], true[-1]) == (0.0, 0.0, 1.0, 1.0)
    assert math.isnan(_results([0.3, 0.1], [True, True]).facts["area"])


def test_the_networks_are_enough_and_of_every_kind() -> None:
    for name, norms, activations in (
        ("calibration", {"none", "batch", "layer"}, {"relu", "tanh", "gelu"}),
        ("test", {"none", "batch", "layer", "group"}, {"relu", "tanh", "gelu", "sigmoid", "silu"}),
    ):
        made = list(subjects(name).values())
        assert len(set(made)) == len(made) >= MIN_NETWORKS
        assert {one.kind for one in made} == {"MLP", "ResNet", "VGG"}
        assert {one.norm for one in made} == norms
        assert {one.init for one in made} == {"standard", "asymmetric"}
        assert {one.activation for one in made} == activations
        assert {one.data for one in made} == {"Fashion-MNIST", "CIFAR-10"}


def test_no_network_of_the_test_has_the_shape_or_the_seed_of_one_of_the_calibration() -> None:
    shapes = [{(one.kind, one.depth, one.width) for one in subjects(name).values()} for name in FIRST_SEEDS]
    assert not shapes[0] & shapes[1]
    seeds = [set(subjects(name)) for name in FIRST_SEEDS]
    assert not seeds[0] & seeds[1]


def test_an_unknown_set_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="set of networks"):
        subjects("all")


def _convolutional(name: str, every: int) -> list[NetworkSpec]:
    return [one for one in subjects(name).values() if one.kind != "MLP"][::every]


@pytest.mark.parametrize("subject", [*_convolutional("calibration", 5), *_convolutional("test", 7)], ids=str)
def test_convolutional_networks_have_the_stated_depth(subject: NetworkSpec) -> None:
    images = torch.zeros(2, 3, 32, 32) if subject.data == "CIFAR-10" else torch.zeros(2, 1, 28, 28)
    network = subject.build(images, seed=0)
    shortcuts = {id(m) for n, m in network.named_modules() if "downsample" in n}
    n_layers = sum(isinstance(m, nn.Conv2d | nn.Linear) and id(m) not in shortcuts for m in network.modules())
    assert n_layers == subject.depth + (1 if subject.kind == "VGG" else 0)
    assert network.eval()(images).shape == (2, 10)


def test_a_shallow_network_learns_and_scores_higher_than_a_deep_one_without_norms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    able, hopeless = (NetworkSpec("MLP", depth, 16, "none", "standard") for depth in (1, 32))
    monkeypatch.setattr(predict, "subjects", lambda _: {5000: able, 5001: hopeless})
    one, other = (train_network(case, TrainingRun(0, math.nan), TINY) for case in cases(TINY))
    assert one.loss < LEARNED * math.log(10.0) < other.loss
    assert one.best_lr == 0.1
    scores = [diagnose_network(one, n_images=64, seed=7).score for one in (able, hopeless)]
    assert scores[0] > 0.5 > scores[1]


def test_a_training_that_breaks_off_has_no_loss() -> None:
    sizes = dataclasses.replace(TINY, lrs=(1e30,))
    assert train_network(cases(sizes)[0], TrainingRun(0, math.nan), sizes) == PredictOutcome(math.inf, 1e30)


def test_a_run_resumes_its_trainings_and_diagnoses_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = SETUPS["predict"](monkeypatch)
    first: Any = sweep.run(sizes, out=tmp_path)
    monkeypatch.setattr(predict, "diagnose", lambda *given, **how: diagnose(*given, **how, thresholds=STRICT))
    again: Any = sweep.run(sizes, out=tmp_path)
    assert list(again.runs["loss"]) == list(first.runs["loss"])
    assert set(again.runs["note"]) == {"cached"}
    assert tuple(again.runs.loc[0, ["verdict", "part"]]) == ("unhealthy", "alive")
    assert first.runs.loc[0, "verdict"] != "unhealthy"


def test_a_quick_run_takes_every_sixth_network_with_the_seed_it_has_in_a_full_one() -> None:
    quick, full = cases(PredictSizes(quick=True)), cases(PredictSizes())
    assert quick == full[::6]
    assert [case.network_seed for case in quick[:2]] == [5000, 5006]


def test_the_goals_ask_for_enough_networks_and_a_large_area() -> None:
    half = MIN_NETWORKS // 2
    good = _results([0.1] * half + [0.9] * half, [False] * half + [True] * half)
    assert [goal.is_met for goal in good.goals] == [True, True]
    assert not _results([0.1, 0.9], [False, True]).goals[0].is_met
    mixed = _results([0.1, 0.9] * half, [True] * half + [False] * half)
    assert [goal.is_met for goal in mixed.goals] == [True, False]
    assert len(mixed.tables()[0].rows) == MIN_NETWORKS
