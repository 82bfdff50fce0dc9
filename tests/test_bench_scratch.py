"""Training from scratch on tiny networks and images of our own: rates, rows that outlive a kill, goals, command."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import RunCli, runner

from onlynorm.cli.evidence import bench as measuring
from onlynorm.data import Split
from onlynorm.errors import UnknownNameError, ValueRangeError
from onlynorm.evidence.bench.sweeps import scratch as bench_module
from onlynorm.evidence.bench.sweeps.scratch import (
    ABOVE,
    BOUND,
    ID_COND,
    ORDINARY,
    ORTHO_COND,
    QUICK,
    SHARES,
    SPARSE,
    TRAININGS,
    WAYS,
    ScratchBench,
    ScratchRun,
    ScratchTrial,
    bench_scratch,
    followed,
    plain,
)
from onlynorm.evidence.goals import is_met
from onlynorm.evidence.papers.random_features import scratch_training
from onlynorm.evidence.papers.random_features.scratch_training import (
    RATES,
    Training,
    Way,
    best_rate,
    build,
    choose_rate,
    images,
    judged,
    lesson,
    put_aside,
    train,
    try_rates,
)
from onlynorm.evidence.validation import TRIAL_SEED
from onlynorm.seeds import seeded

SMALL = Training(
    "toy", ((3,), (4,)), image_size=4, n_train=48, n_put_aside=20, n_test=30, epochs=2, batch_size=16, warmup=0.0
)
SOME = {ORDINARY: WAYS[ORDINARY], ID_COND: WAYS[ID_COND], followed(BOUND): WAYS[followed(BOUND)]}


def toy() -> Split:
    """Two kinds of images that a line tells apart, with ten labels of which two occur."""
    inputs, labels = torch.randn(150, 2, 8, 8, generator=seeded(0)), torch.arange(150) % 2
    inputs = inputs + labels[:, None, None, None].float()
    return Split("toy", inputs[:110], labels[:110], inputs[110:], labels[110:])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch_training, "DATA", {"toy": toy})
    monkeypatch.setattr(scratch_training, "RATES", (0.03, 0.1))
    monkeypatch.setattr(scratch_training, "FIRST_RATES", (0.03, 0.1))
    images.cache_clear()


def run(out: Path, **options: Any) -> ScratchBench:
    return bench_scratch(trainings={"toy": SMALL}, out=out, **{"n_seeds": 2, "n_trials": 2, **options})


def result(way: str, accuracy: float, seed: int = 0, losses: tuple[float, ...] = (1.0, 0.5)) -> ScratchRun:
    return ScratchRun("toy", way, seed, 0.1, accuracy, losses, True, 100, 0.1)


def goals(*runs: ScratchRun) -> dict[str, tuple[str, bool]]:
    return {goal.aim: (goal.measured, goal.is_met) for goal in ScratchBench([*runs]).goals}


# ---------------------------------------------------------------------------------------------- one training


@pytest.mark.usefixtures("small")
def test_images_put_aside_are_neither_trained_on_nor_judged_by() -> None:
    aside = {tuple(image.flatten().tolist()) for image in put_aside(SMALL)[0]}
    first, second = ({tuple(image.flatten().tolist()) for image in lesson(SMALL, seed)[0]} for seed in (0, 1))
    assert (len(aside), len(first), len(second), len(judged(SMALL)[0])) == (20, 48, 48, 30)
    assert not aside & (first | second)
    assert first != second
    assert lesson(SMALL, 0)[0].shape[1:] == (2, 4, 4)
    whole = toy().test_inputs[0]
    torch.testing.assert_close(judged(SMALL)[0][0, :, 0, 0], whole[:, :2, :2].mean((1, 2)))


@pytest.mark.usefixtures("small")
def test_all_ways_of_a_seed_start_with_the_same_weights_as_far_as_features_reach() -> None:
    wanted = build(WAYS[ORDINARY], SMALL, seed=3)
    for name in (ID_COND, ORTHO_COND, plain(BOUND), followed(ABOVE)):
        made = build(WAYS[name], SMALL, seed=3)
        for place in (0, 4):
            gap = torch.linalg.vector_norm(made[place].weight - wanted[place].weight)
            # Gammas are rounded to float32, and products of condition numbers up to some hundreds cancel.
            assert gap <= 1e-4 * torch.linalg.vector_norm(wanted[place].weight)
        assert not torch.equal(wanted[0].weight, build(WAYS[name], SMALL, seed=4)[0].weight)
    assert build(WAYS[plain(0.5)], SMALL, seed=3)[0].gamma.numel() == 27  # half of 3 x 2 x 3 x 3
    assert set(build(WAYS[SPARSE], SMALL, seed=3).state_dict()) >= {"0.gamma", "1.weight"}


@pytest.mark.usefixtures("small")
def test_id_cond_and_followed_gammas_train_as_the_ordinary_network_does() -> None:
    found = {
        name: train(way=dataclasses.asdict(way), training=dataclasses.asdict(SMALL), rate=0.1, seed=0)
        for name, way in SOME.items()
    }
    ordinary = found[ORDINARY]
    assert (found[ID_COND]["accuracy"], found[ID_COND]["losses"]) == (ordinary["accuracy"], ordinary["losses"])
    # Float32 rounds gammas of condition number some hundreds; six steps amplify it little.
    assert found[followed(BOUND)]["losses"] == pytest.approx(ordinary["losses"], rel=1e-2)
    assert len(ordinary["losses"]) == 2
    assert ordinary["losses"][1] < ordinary["losses"][0]
    assert ordinary["n_trained"] == found[ID_COND]["n_trained"]


@pytest.mark.usefixtures("small")
def test_a_training_that_diverges_does_as_well_as_guessing() -> None:
    found = train(way={}, training=dataclasses.asdict(SMALL), rate=1e30, seed=0)
    assert (found["accuracy"], found["losses"], found["is_finite"]) == (0.1, [], False)


@pytest.mark.usefixtures("small")
def test_a_trial_is_judged_by_the_images_put_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(scratch_training, "accuracy", lambda _, data: seen.append(len(data[0])) or 0.5)
    for is_trial in (True, False):
        train(way={}, training=dataclasses.asdict(SMALL), rate=0.1, seed=0, is_trial=is_trial)
    assert seen == [SMALL.n_put_aside, SMALL.n_test]


# ---------------------------------------------------------------------------------------------- rates


def test_rates_are_widened_until_the_best_lies_between_two_others() -> None:
    for best in (0.003, 0.1, 30.0):
        asked: list[float] = []
        tried = try_rates(lambda rate, best=best, asked=asked: asked.append(rate) or -abs(math.log(rate / best)))
        assert best_rate(tried) == best
        assert len(asked) == len(set(asked)), "no rate is tried twice"
        place = RATES.index(best)
        assert {RATES[place - 1], best, RATES[place + 1]} <= set(tried)
    assert set(try_rates(lambda rate: rate)) >= {RATES[-2], RATES[-1]}, "it stops at the end of all rates"
    assert best_rate({0.1: 0.5, 0.3: 0.5, 1.0: 0.4}) == 0.1, "of equals the lower one"


@pytest.mark.usefixtures("small")
def test_a_rate_is_chosen_with_a_seed_that_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, int, bool]] = []

    def pretend(*, rate: float, seed: int, is_trial: bool, **_: Any) -> dict[str, Any]:
        asked.append((rate, seed, is_trial))
        return {"accuracy": -abs(rate - 0.1)}

    monkeypatch.setattr(scratch_training, "train", pretend)
    found = choose_rate(way={}, training=dataclasses.asdict(SMALL))
    assert found["rate"] == 0.1
    assert [rate for rate, _ in found["tried"]] == [0.03, 0.1]
    assert {(seed, is_trial) for _, seed, is_trial in asked} == {(TRIAL_SEED, True)}


# ---------------------------------------------------------------------------------------------- rows


@pytest.mark.usefixtures("small")
def test_every_way_is_tuned_and_trained_and_drawn(tmp_path: Path) -> None:
    told: list[str] = []
    seen: list[ScratchRun] = []
    bench = run(tmp_path, n_seeds=1, epochs=1, progress=told.append, on_row=seen.append)
    assert seen == bench.runs
    assert [made.way for made in bench.runs] == list(WAYS)
    assert {way.excess for way in WAYS.values()} == {None, *SHARES, BOUND, ABOVE}
    assert len(bench.trials) == 2 * 2 * len(WAYS)
    assert {trial.seed for trial in bench.trials} == {TRIAL_SEED, TRIAL_SEED + 1}
    for made in bench.runs:
        assert made.rate == best_rate(bench.tried("toy", made.way))
        assert made.accuracy in [n / 30 for n in range(31)]
        assert len(made.losses) == 1
    assert f"toy, {SPARSE}: seed 0" in told
    table, tried = bench.tables()
    assert len(table.rows) == len(tried.rows) == len(WAYS)
    assert table.rows[0][1] == ORDINARY
    assert json.loads(json.dumps(bench.as_dict()))["trainings"]["toy"]["epochs"] == 1
    picture = Path(bench.figure)
    assert picture.name == "shares-toy.png"
    assert picture.stat().st_size > 1000
    assert picture.with_suffix(".svg").exists()


@pytest.mark.usefixtures("small")
def test_finished_rows_are_read_again_and_a_killed_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "WAYS", SOME)

    def stop(made: ScratchRun) -> None:
        if made.way == ID_COND:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, on_row=stop)
    first = run(tmp_path)
    assert [made.note for made in first.runs] == ["kept", "kept", "kept", "", "", ""]
    monkeypatch.setattr(bench_module, "train", lambda **_: pytest.fail("trained again"))
    again = run(tmp_path)
    assert again.runs == [dataclasses.replace(made, note="kept") for made in first.runs]
    with pytest.raises(pytest.fail.Exception, match="trained again"):
        run(tmp_path, epochs=3)


@pytest.mark.usefixtures("small")
def test_bad_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"data.*'cifar'.*cifar10"):
        bench_scratch(data=["cifar"], out=tmp_path)
    with pytest.raises(ValueRangeError, match="n_seeds needs to be a whole number from 1 to 100; got 101"):
        bench_scratch(n_seeds=101, out=tmp_path)
    with pytest.raises(ValueRangeError, match="n_trials needs to be a whole number from 1; got 0"):
        bench_scratch(n_trials=0, out=tmp_path)
    with pytest.raises(ValueRangeError, match="toy needs at most the 90 images that are not put aside; got 91"):
        bench_scratch(trainings={"toy": dataclasses.replace(SMALL, n_train=91)}, out=tmp_path)


def test_the_quick_sizes_are_small_and_both_sizes_know_both_data_sets() -> None:
    assert set(QUICK) == set(TRAININGS) == {"fashion_mnist", "cifar10"}
    for name, training in TRAININGS.items():
        assert training.data == name
        assert QUICK[name].n_train * QUICK[name].epochs < training.n_train * training.epochs / 20


# ---------------------------------------------------------------------------------------------- goals


def test_id_cond_has_to_give_the_same_numbers() -> None:
    ordinary = [result(ORDINARY, 0.5, 0), result(ORDINARY, 0.6, 1)]
    same = goals(*ordinary, result(ID_COND, 0.5, 0), result(ID_COND, 0.6, 1))
    other = goals(*ordinary, result(ID_COND, 0.5, 0), result(ID_COND, 0.6, 1, losses=(1.0, 0.5000001)))
    aim = "toy: id_cond trains as the ordinary network does, to the last digit"
    assert same[aim] == ("accuracy and the losses of all epochs equal for 2 of 2 seeds", True)
    assert other[aim] == ("accuracy and the losses of all epochs equal for 1 of 2 seeds", False)


def test_followed_gammas_have_to_match_within_the_interval_of_the_ordinary_seeds() -> None:
    ordinary = [result(ORDINARY, x, seed) for seed, x in enumerate((0.80, 0.81, 0.82))]  # 81.0 ± 2.5
    near = goals(*ordinary, *(result(followed(BOUND), x, s) for s, x in enumerate((0.79, 0.80, 0.80))))
    far = goals(*ordinary, *(result(followed(BOUND), x, s) for s, x in enumerate((0.78, 0.78, 0.78))))
    aim = f"toy: {followed(BOUND)} is as accurate as the ordinary network, within the interval of its seeds"
    assert near[aim] == ("behind by 1.33 points, interval ± 2.48", True)
    assert far[aim] == ("behind by 3.00 points, interval ± 2.48", False)
    assert goals(ordinary[0], result(followed(BOUND), 0.1)) == {}, "one seed has no interval"
    wide = [result(ORDINARY, x, seed) for seed, x in enumerate((0.7, 0.9))]
    unclear = goals(*wide, *(result(followed(BOUND), x, s) for s, x in enumerate((0.6, 0.6))))
    assert unclear[aim] == ("behind by 20.00 points, interval ± 127.06", False), "it would hold any gap"


def test_the_papers_finding_is_decided_by_the_interval_of_the_gap() -> None:
    ordinary = [result(ORDINARY, 0.8, seed) for seed in range(3)]
    cases = {
        "confirmed": (0.75, 0.74, 0.76),
        "refuted": (0.85, 0.84, 0.86),
        "neither confirmed nor refuted": (0.7, 0.9, 0.8),
    }
    for words, found in cases.items():
        told = goals(*ordinary, *(result(plain(ABOVE), x, s) for s, x in enumerate(found)))
        measured, met = told[f"toy: the paper's finding that {plain(ABOVE)} trails the ordinary network"]
        assert measured.endswith(f": {words}")
        assert met == (words == "confirmed")


def test_a_rate_is_judged_by_the_mean_of_its_trials() -> None:
    found = {0.1: (0.9, 0.1), 0.3: (0.6, 0.6), 1.0: (0.2, 0.7)}
    trials = [
        ScratchTrial("toy", ORDINARY, TRIAL_SEED + place, rate, accuracy)
        for rate, accuracies in found.items()
        for place, accuracy in enumerate(accuracies)
    ]
    tried = ScratchBench(trials=[*trials, ScratchTrial("toy", ID_COND, TRIAL_SEED, 3.0, 1.0)]).tried("toy", ORDINARY)
    assert tried == pytest.approx({0.1: 0.5, 0.3: 0.6, 1.0: 0.45})
    assert best_rate(tried) == 0.3


def test_a_best_rate_at_the_end_of_all_rates_is_said() -> None:
    trials = [ScratchTrial("toy", ORDINARY, TRIAL_SEED, rate, rate) for rate in RATES]
    bench = ScratchBench([dataclasses.replace(result(ORDINARY, 0.5), rate=RATES[-1])], trials)
    assert bench.tables()[0].rows[0][6] == "1000, the end of the grid"
    assert ScratchBench([result(ORDINARY, 0.5)], trials[3:6]).tables()[0].rows[0][6] == "0.1"


# ---------------------------------------------------------------------------------------------- the command


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> RunCli:
    return runner(monkeypatch, capsys, tmp_path, "bench", "scratch")


def test_the_command_prints_tables_and_ends_with_one_where_a_goal_is_missed(
    command: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def pretend(**options: Any) -> ScratchBench:
        asked.append(options)
        options["on_row"](result(plain(BOUND), 0.4))
        runs = [result(way, x, seed) for seed in range(3) for way, x in ((ORDINARY, 0.5), (plain(BOUND), 0.6))]
        return ScratchBench(runs, figure="shares.png")

    monkeypatch.setattr(measuring, "bench_scratch", pretend)
    ran = command("--data", "cifar10", "--epochs", 5, "--seeds", 4, "--trials", 2, "--markdown")
    assert ran.code == 1
    assert [asked[0][name] for name in ("data", "epochs", "n_seeds", "n_trials")] == [["cifar10"], 5, 4, 2]
    assert "| toy | he_normal 1 | 100 | 60.0 ± 0.0 | -10.0 ± 0.0 |" in ran.out
    assert "toy, he_normal 1, seed 0: 40.0 %" in ran.err
    assert "accuracy against the share of features: shares.png" in ran.err
    assert not is_met(pretend(on_row=lambda _: None))
    assert command("--json").json()["figure"] == "shares.png"


def test_a_way_says_what_it_is() -> None:
    assert WAYS[followed(BOUND)] == Way("he_normal", 1.0, follow_weights=True)
    assert WAYS[SPARSE] == Way("id_cond", density=0.2)
