"""Training from scratch on tiny networks: one training, cases, and goals."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_benchmarks import TINY, TRAINING, two_kinds

from onlynorm.errors import UnknownNameError, ValueRangeError
from onlynorm.evidence.bench.sweeps.scratch import (
    ABOVE,
    BOUND,
    EXCESSES,
    ID_COND,
    METHODS,
    ORDINARY,
    ORTHO_COND,
    QUICK,
    SPARSE,
    TRAININGS,
    ScratchSizes,
    cases,
    followed,
    plain,
    sweep,
)
from onlynorm.evidence.papers.random_features import scratch as scratch_training
from onlynorm.evidence.papers.random_features.scratch import (
    Method,
    ScratchCase,
    ScratchOutcome,
    build,
    make_sweep,
    test_images,
    train,
    training_images,
    validation_images,
)
from onlynorm.evidence.sweep import Measured, TrainingRun, Trial
from onlynorm.evidence.validation import TRIAL_SEED

test_images.__test__ = False  # type: ignore[attr-defined]
SOME = {name: METHODS[name] for name in (ORDINARY, ID_COND, followed(BOUND))}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    TINY["scratch"](monkeypatch)


def made(method: str, accuracy: float, seed: int = 0, losses: tuple[float, ...] = (1.0, 0.5)) -> Measured:
    return Measured(
        ScratchCase("toy", method), TrainingRun(seed, math.nan), ScratchOutcome(accuracy, losses, True, 100, 0.1)
    )


def goals(*runs: Measured) -> dict[str, tuple[str, bool]]:
    return {goal.aim: (goal.measured, goal.is_met) for goal in sweep.results(runs).goals}


# ---------------------------------------------------------------------------------------------- one training


@pytest.mark.usefixtures("small")
def test_validation_images_are_neither_trained_on_nor_tested_on() -> None:
    aside = {tuple(image.flatten().tolist()) for image in validation_images(TRAINING)[0]}
    first, second = (
        {tuple(image.flatten().tolist()) for image in training_images(TRAINING, seed)[0]} for seed in (0, 1)
    )
    assert (len(aside), len(first), len(second), len(test_images(TRAINING)[0])) == (20, 48, 48, 30)
    assert not aside & (first | second)
    assert first != second
    assert training_images(TRAINING, 0)[0].shape[1:] == (2, 4, 4)
    whole = two_kinds().test_inputs[0]
    torch.testing.assert_close(test_images(TRAINING)[0][0, :, 0, 0], whole[:, :2, :2].mean((1, 2)))


@pytest.mark.usefixtures("small")
def test_all_methods_of_a_seed_start_with_the_same_weights_as_far_as_features_reach() -> None:
    wanted = build(METHODS[ORDINARY], TRAINING, seed=3)
    for name in (ID_COND, ORTHO_COND, plain(BOUND), followed(ABOVE)):
        made = build(METHODS[name], TRAINING, seed=3)
        for place in (0, 4):
            gap = torch.linalg.vector_norm(made[place].weight - wanted[place].weight)
            # Gammas are rounded to float32, and products of condition numbers up to some hundreds cancel.
            assert gap <= 1e-4 * torch.linalg.vector_norm(wanted[place].weight)
        assert not torch.equal(wanted[0].weight, build(METHODS[name], TRAINING, seed=4)[0].weight)
    assert build(METHODS[plain(0.5)], TRAINING, seed=3)[0].gamma.numel() == 27  # half of 3 x 2 x 3 x 3
    assert set(build(METHODS[SPARSE], TRAINING, seed=3).state_dict()) >= {"0.gamma", "1.weight"}


@pytest.mark.usefixtures("small")
def test_id_cond_and_followed_gammas_train_as_the_ordinary_network_does() -> None:
    found = {name: train(method, TRAINING, lr=0.1, seed=0) for name, method in SOME.items()}
    ordinary = found[ORDINARY]
    assert (found[ID_COND].accuracy, found[ID_COND].losses) == (ordinary.accuracy, ordinary.losses)
    # Float32 rounds gammas of condition number some hundreds; six steps amplify it little.
    assert found[followed(BOUND)].losses == pytest.approx(ordinary.losses, rel=1e-2)
    assert len(ordinary.losses) == 2
    assert ordinary.losses[1] < ordinary.losses[0]
    assert ordinary.n_trained == found[ID_COND].n_trained


@pytest.mark.usefixtures("small")
def test_a_training_that_diverges_does_as_well_as_guessing() -> None:
    found = train(Method(), TRAINING, lr=1e30, seed=0)
    assert (found.accuracy, found.losses, found.is_finite) == (0.1, (), False)


@pytest.mark.usefixtures("small")
def test_a_trial_is_judged_by_the_images_validation_images(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(scratch_training, "accuracy", lambda _, data: seen.append(len(data[0])) or 0.5)
    for is_trial in (True, False):
        train(Method(), TRAINING, lr=0.1, seed=0, is_trial=is_trial)
    assert seen == [TRAINING.n_validation, TRAINING.n_test]


# ---------------------------------------------------------------------------------------------- goals


def test_id_cond_has_to_give_the_same_numbers() -> None:
    ordinary = [made(ORDINARY, 0.5, 0), made(ORDINARY, 0.6, 1)]
    same = goals(*ordinary, made(ID_COND, 0.5, 0), made(ID_COND, 0.6, 1))
    other = goals(*ordinary, made(ID_COND, 0.5, 0), made(ID_COND, 0.6, 1, losses=(1.0, 0.5000001)))
    aim = "toy: training id_cond is bit-identical to the ordinary network"
    assert same[aim] == ("accuracy and the losses of all epochs equal for 2 of 2 seeds", True)
    assert other[aim] == ("accuracy and the losses of all epochs equal for 1 of 2 seeds", False)


def test_followed_gammas_have_to_match_within_the_interval_of_the_ordinary_seeds() -> None:
    ordinary = [made(ORDINARY, x, seed) for seed, x in enumerate((0.80, 0.81, 0.82))]  # 81.0 ± 2.5
    near = goals(*ordinary, *(made(followed(BOUND), x, s) for s, x in enumerate((0.79, 0.80, 0.80))))
    far = goals(*ordinary, *(made(followed(BOUND), x, s) for s, x in enumerate((0.78, 0.78, 0.78))))
    aim = f"toy: {followed(BOUND)} is as accurate as the ordinary network, within the interval of its seeds"
    assert near[aim] == ("1.33 points below, interval ± 2.48", True)
    assert far[aim] == ("3.00 points below, interval ± 2.48", False)
    assert goals(ordinary[0], made(followed(BOUND), 0.1)) == {}, "one seed has no interval"
    wide = [made(ORDINARY, x, seed) for seed, x in enumerate((0.7, 0.9))]
    unclear = goals(*wide, *(made(followed(BOUND), x, s) for s, x in enumerate((0.6, 0.6))))
    assert unclear[aim] == ("20.00 points below, interval ± 127.06", False), "it would hold any gap"


def test_the_papers_finding_is_decided_by_the_interval_of_the_gap() -> None:
    ordinary = [made(ORDINARY, 0.8, seed) for seed in range(3)]
    cases = {
        "confirmed": (0.75, 0.74, 0.76),
        "refuted": (0.85, 0.84, 0.86),
        "neither confirmed nor refuted": (0.7, 0.9, 0.8),
    }
    for words, found in cases.items():
        told = goals(*ordinary, *(made(plain(ABOVE), x, s) for s, x in enumerate(found)))
        measured, met = told[f"toy: the paper's finding that {plain(ABOVE)} is below the ordinary network"]
        assert measured.endswith(f": {words}")
        assert met == (words == "confirmed")


@pytest.mark.usefixtures("small")
def test_a_learning_rate_is_chosen_with_a_seed_that_is_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[float, int, bool]] = []

    def pretend(*_: object, lr: float, seed: int, is_trial: bool = False, **__: object) -> ScratchOutcome:
        asked.append((lr, seed, is_trial))
        return ScratchOutcome(1.0 - abs(lr - 0.1), (), True, 1, 0.0)

    monkeypatch.setattr(scratch_training, "train", pretend)
    one = make_sweep(
        "one", "One method.", ScratchSizes, methods={"a": Method()}, training=lambda _case, _sizes: TRAINING,
        cases=lambda _: [ScratchCase("toy", "a")], columns={},
    )  # fmt: skip
    found: Any = one.run(ScratchSizes(seeds=1, data=("toy",)), out=tmp_path)
    assert found.lr(ScratchCase("toy", "a")) == 0.1
    assert asked == [*((lr, TRIAL_SEED, True) for lr in (0.03, 0.1, 0.3, 1.0)), (0.1, 0, False)]


def test_a_learning_rate_is_judged_by_the_mean_of_its_trials() -> None:
    found = {0.1: (0.9, 0.1), 0.3: (0.6, 0.6), 1.0: (0.2, 0.7)}
    ordinary = ScratchCase("toy", ORDINARY)
    trials = [
        Trial(ordinary, TrainingRun(TRIAL_SEED + place, lr), accuracy)
        for lr, accuracies in found.items()
        for place, accuracy in enumerate(accuracies)
    ]
    results = sweep.results([], [*trials, Trial(ScratchCase("toy", ID_COND), TrainingRun(TRIAL_SEED, 3.0), 1.0)])
    assert results.trial_accuracies(ordinary) == pytest.approx({0.1: 0.5, 0.3: 0.6, 1.0: 0.45})
    assert results.lr(ordinary) == 0.3


@pytest.mark.usefixtures("small")
def test_bad_input_is_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"data.*'cifar'.*cifar10"):
        ScratchSizes(data=("cifar",))
    with pytest.raises(ValueRangeError, match=r"seeds .* from 1 to 100; got 101"):
        ScratchSizes(seeds=101)
    with pytest.raises(ValueRangeError, match="toy needs at most the 90 images outside the validation subset; got 91"):
        training_images(dataclasses.replace(TRAINING, n_train=91), 0)


def test_the_quick_sizes_are_small_and_both_sizes_know_both_data_sets() -> None:
    assert set(QUICK) == set(TRAININGS) == {"fashion_mnist", "cifar10"}
    for name, training in TRAININGS.items():
        assert training.data == name
        assert QUICK[name].n_train * QUICK[name].epochs < training.n_train * training.epochs / 20
    assert ScratchSizes(quick=True, epochs=7).training("cifar10") == dataclasses.replace(QUICK["cifar10"], epochs=7)


def test_a_method_says_what_it_is() -> None:
    assert METHODS[followed(BOUND)] == Method("he_normal", 1.0, follow_weights=True)
    assert METHODS[SPARSE] == Method("id_cond", density=0.2)
    assert {method.excess for method in METHODS.values()} == {None, *EXCESSES}
    assert len(cases(ScratchSizes())) == 2 * len(METHODS)
