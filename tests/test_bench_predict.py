"""The benchmark of verdicts: the curve on known scores, single networks, and a run that resumes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from onlynorm.data import Split
from onlynorm.errors import UnknownNameError
from onlynorm.evidence.bench.sweeps import predict
from onlynorm.evidence.bench.sweeps.predict import (
    FIRST_SEEDS,
    LEARNED,
    LEAST,
    PredictBench,
    PredictRow,
    PredictSizes,
    Subject,
    bench_predict,
    diagnose_network,
    last_loss,
    receiver_curve,
    subjects,
    train_network,
)
from onlynorm.rank import Thresholds, diagnose
from onlynorm.seeds import seeded

STRICT = Thresholds(alive=1e9)
TINY = PredictSizes(n_diagnosed=32, n_steps=20, batch_size=16, rates=(0.001, 0.1))


def _stripes() -> Split:
    labels = torch.arange(400) % 10
    inputs = 0.1 * torch.randn(400, 1, 8, 20, generator=seeded(0))
    inputs[torch.arange(400), :, :, 2 * labels] += 1.0
    return Split("stripes", inputs[:320], labels[:320], inputs[320:], labels[320:])


@pytest.fixture(autouse=True)
def stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    predict._split.cache_clear()
    monkeypatch.setitem(predict._DATA, "Fashion-MNIST", _stripes)


def _bench(scores: list[float], learned: list[bool]) -> PredictBench:
    losses = [1.0 if one else math.log(10.0) for one in learned]
    rows = [
        PredictRow(f"{i}", "", s, "", "rank", loss, 0.1) for i, (s, loss) in enumerate(zip(scores, losses, strict=True))
    ]
    return PredictBench(rows)


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
    assert _bench(scores, learned).area == pytest.approx(area)
    pairs = [(a, b) for a, one in zip(scores, learned, strict=True) for b, two in zip(scores, learned, strict=True)
             if one and not two]  # fmt: skip
    assert sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs) == pytest.approx(area)


def test_the_curve_goes_from_none_to_all() -> None:
    false, true = receiver_curve([0.3, 0.1, 0.2], [True, False, True])
    assert (false[0], true[0]) == (0.0, 0.0)
    assert (false[-1], true[-1]) == (1.0, 1.0)


def test_the_networks_are_enough_and_of_every_kind() -> None:
    for name, norms, activations in (
        ("calibration", {"none", "batch", "layer"}, {"relu", "tanh", "gelu"}),
        ("test", {"none", "batch", "layer", "group"}, {"relu", "tanh", "gelu", "sigmoid", "silu"}),
    ):
        made = subjects(name)
        assert len(set(made)) == len(made) >= LEAST
        assert {one.kind for one in made} == {"MLP", "ResNet", "VGG"}
        assert {one.norm for one in made} == norms
        assert {one.init for one in made} == {"standard", "asymmetric"}
        assert {one.activation for one in made} == activations
        assert {one.data for one in made} == {"Fashion-MNIST", "CIFAR-10"}


def test_no_network_of_the_test_has_the_shape_or_the_seed_of_one_of_the_calibration() -> None:
    shapes = [{(one.kind, one.depth, one.width) for one in subjects(name)} for name in FIRST_SEEDS]
    assert not shapes[0] & shapes[1]
    seeds = [set(range(first, first + len(subjects(name)))) for name, first in FIRST_SEEDS.items()]
    assert not seeds[0] & seeds[1]


def test_an_unknown_set_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="set of networks"):
        subjects("all")


def _convolutional(name: str, every: int) -> list[Subject]:
    return [one for one in subjects(name) if one.kind != "MLP"][::every]


@pytest.mark.parametrize("subject", [*_convolutional("calibration", 5), *_convolutional("test", 7)], ids=str)
def test_convolutional_networks_have_the_stated_depth(subject: Subject) -> None:
    images = torch.zeros(2, 3, 32, 32) if subject.data == "CIFAR-10" else torch.zeros(2, 1, 28, 28)
    network = subject.build(images, seed=0)
    shortcuts = {id(m) for n, m in network.named_modules() if "downsample" in n}
    n_layers = sum(isinstance(m, nn.Conv2d | nn.Linear) and id(m) not in shortcuts for m in network.modules())
    assert n_layers == subject.depth + (1 if subject.kind == "VGG" else 0)
    assert network.eval()(images).shape == (2, 10)


def test_a_shallow_network_learns_and_scores_higher_than_a_deep_one_without_norms() -> None:
    able, hopeless = (Subject("MLP", depth, 16, "none", "standard") for depth in (1, 32))
    trained = train_network(able, sizes=TINY, seed=7)
    assert trained["loss"] < LEARNED * math.log(10.0) < train_network(hopeless, sizes=TINY, seed=7)["loss"]
    assert trained["rate"] == 0.1
    scores = [diagnose_network(one, n_images=64, seed=7).score for one in (able, hopeless)]
    assert scores[0] > 0.5 > scores[1]


def test_a_training_that_breaks_off_has_no_loss() -> None:
    split = _stripes()
    network = Subject("MLP", 2, 8, "none", "standard").build(split.train_inputs, seed=0)
    found = last_loss(network, split.train_inputs, split.train_labels, sizes=TINY, rate=1e30, seed=0)
    assert found == math.inf


def test_a_run_resumes_its_trainings_diagnoses_anew_and_draws_its_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = [Subject("MLP", depth, 8, "none", "standard") for depth in (1, 24)]
    first = bench_predict(chosen, sizes=TINY, out=tmp_path)
    assert Path(first.figure).read_bytes().startswith(b"\x89PNG")
    assert [row.note for row in first.rows] == ["", ""]

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(predict, "train_network", refuse)
    monkeypatch.setattr(predict, "diagnose", lambda *given, **how: diagnose(*given, **how, thresholds=STRICT))
    again = bench_predict(chosen, sizes=TINY, out=tmp_path)
    assert [row.note for row in again.rows] == ["kept", "kept"]
    assert [row.loss for row in again.rows] == [row.loss for row in first.rows]
    assert (again.rows[0].verdict, again.rows[0].sign) == ("unhealthy", "alive")
    assert first.rows[0].verdict != "unhealthy"


def test_a_quick_run_takes_every_sixth_network_with_the_seed_it_has_in_a_full_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Subject, int]] = []

    def fake(subject: Subject, *, sizes: PredictSizes, seed: int) -> dict[str, float]:
        seen.append((subject, seed))
        return {"loss": 1.0, "rate": 0.03}

    monkeypatch.setattr(predict, "train_network", fake)
    chosen = [Subject("MLP", 1, width, "none", "standard") for width in range(4, 11)]
    assert len(bench_predict(chosen, quick=True, out=tmp_path).rows) == 2
    assert seen == [(chosen[0], 5000), (chosen[6], 5006)]


def test_the_goals_ask_for_enough_networks_and_a_large_area() -> None:
    half = LEAST // 2
    good = _bench([0.1] * half + [0.9] * half, [False] * half + [True] * half)
    assert [goal.is_met for goal in good.goals] == [True, True]
    assert not _bench([0.1, 0.9], [False, True]).goals[0].is_met
    mixed = _bench([0.1, 0.9] * half, [True] * half + [False] * half)
    assert [goal.is_met for goal in mixed.goals] == [True, False]
    assert {"area", "areas", "networks"} <= set(mixed.as_dict())
    assert len(mixed.tables()[0].rows) == LEAST
