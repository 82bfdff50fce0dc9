"""Training after repairs, on tiny networks and images of our own: rows that outlive a kill, rates, goals, command."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from onlynorm import cli
from onlynorm.cli.evidence import bench as measuring
from onlynorm.cli.terminal import screen
from onlynorm.data import Split
from onlynorm.errors import ValueRangeError
from onlynorm.evidence.bench.sweeps import repair as bench_module
from onlynorm.evidence.bench.sweeps.repair import (
    BRIEF,
    MAIN,
    NORMS,
    NOTHING,
    OURS,
    WAYS,
    RateTrial,
    RepairBench,
    RepairRun,
    RepairSizes,
    bench_repair,
)
from onlynorm.evidence.cache import Rows
from onlynorm.evidence.goals import is_met
from onlynorm.seeds import seeded

SIZES = RepairSizes(width=8, n_steps=4, n_trial_steps=2, batch_size=8, n_repair=16, n_put_aside=10, n_judged=20)
SMALL = (3, "relu")


def data(seed: int = 0) -> Split:
    images, labels = torch.randn(80, 1, 3, 4, generator=seeded(seed)), torch.arange(80) % 10
    return Split("toy", images[:60], labels[:60], images[60:], labels[60:])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "fashion_mnist", data)
    monkeypatch.setattr(bench_module, "RATES", (0.01, 0.1))
    monkeypatch.setattr(bench_module, "MAIN", (2, "tanh"))


def run(out: Path, *networks: tuple[int, str], **options: Any) -> RepairBench:
    return bench_repair(networks=networks or (SMALL,), sizes=SIZES, out=out, **{"n_seeds": 2, **options})


def result(way: str, accuracy: float, seed: int = 0, network: tuple[int, str] = MAIN) -> RepairRun:
    return RepairRun(*network, way, seed, 0.1, accuracy, accuracy, 1.0, (5.0, 5.0, 5.0), 1.0, "mirrored", 0.1)


# ---------------------------------------------------------------------------------------------- rows


@pytest.mark.usefixtures("small")
def test_the_main_network_is_repaired_in_all_ways_and_others_by_default_beside_norms(tmp_path: Path) -> None:
    told: list[str] = []
    seen: list[RepairRun] = []
    bench = run(tmp_path, (2, "tanh"), SMALL, n_seeds=1, progress=told.append, on_row=seen.append)
    assert seen == bench.runs
    assert bench.networks == [(2, "tanh"), SMALL]
    assert bench.ways((2, "tanh")) == list(WAYS)
    assert bench.ways(SMALL) == list(BRIEF)
    assert len(bench.trials) == 2 * (len(WAYS) + len(BRIEF))
    for made in bench.runs:
        assert made.rate in (0.01, 0.1)
        assert made.test_accuracy in [n / 20 for n in range(21)]
        assert all(1.0 - 1e-4 <= r <= 8.0 for r in made.ranks)
        assert math.isfinite(made.loss)
    assert "depth 3, relu, repair, by default settings: seed 0" in told
    assert json.loads(json.dumps(bench.as_dict()))["sizes"]["width"] == 8
    table, tried = bench.tables()
    assert len(table.rows) == len(tried.rows) == len(WAYS) + len(BRIEF)
    assert table.rows[0][2] == NOTHING


@pytest.mark.usefixtures("small")
def test_finished_rows_are_read_again_and_a_killed_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(made: RepairRun) -> None:
        if made.way == NORMS:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, on_row=stop)
    first = run(tmp_path)
    assert [made.note for made in first.runs] == ["kept", "kept", "kept", "", "", ""]
    monkeypatch.setattr(bench_module, "fit", lambda *_, **__: pytest.fail("trained again"))
    again = run(tmp_path)
    assert again.runs == [dataclasses.replace(made, note="kept") for made in first.runs]


def rows(folder: Path) -> Rows:
    return Rows(folder, kind="x", module="onlynorm.evidence.bench.sweeps.repair", force=False, say=lambda _: None)


@pytest.mark.usefixtures("small")
def test_a_training_that_diverges_answers_the_same_to_everything_and_its_rate_is_not_chosen(tmp_path: Path) -> None:
    lab = bench_module._Lab(
        data(), SIZES, Rows(tmp_path, kind="x", module="onlynorm.evidence.bench", force=False, say=lambda _: None)
    )
    made = lab.run(SMALL, OURS, 0, 1e30)
    assert made.loss == math.inf
    assert made.test_accuracy == pytest.approx(0.1)  # every class is a tenth of the images
    bench = RepairBench(trials=[RateTrial(*SMALL, OURS, 1e30, 0.1), RateTrial(*SMALL, OURS, 0.01, 0.3)])
    assert bench.rate(SMALL, OURS) == 0.01


@pytest.mark.usefixtures("small")
def test_images_put_aside_are_never_trained_on(tmp_path: Path) -> None:
    lab = bench_module._Lab(
        data(), SIZES, Rows(tmp_path, kind="x", module="onlynorm.evidence.bench", force=False, say=lambda _: None)
    )
    aside = {tuple(image.tolist()) for image in lab._pick(lab.put_aside)[0]}
    first, second = ({tuple(image.tolist()) for image in lab._lesson(seed, 32)[0]} for seed in (0, 1))
    assert (len(aside), len(first), len(second)) == (10, 32, 32)
    assert not aside & (first | second)
    assert first != second


@pytest.mark.usefixtures("small")
def test_more_steps_than_images_and_seeds_of_trials_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueRangeError, match="7 steps of 8 need as many images that differ; got 50"):
        bench_repair(sizes=dataclasses.replace(SIZES, n_steps=7), out=tmp_path)
    with pytest.raises(ValueRangeError, match="n_seeds needs to be a whole number from 1 to 100; got 101"):
        bench_repair(n_seeds=101, out=tmp_path)


# ---------------------------------------------------------------------------------------------- goals


def test_the_papers_network_has_to_be_ahead_by_more_than_chance() -> None:
    theirs = [result(NORMS, 0.5, seed) for seed in range(3)]
    ahead = RepairBench([*theirs, *(result(OURS, x, s) for s, x in enumerate((0.7, 0.71, 0.72)))])
    unclear = RepairBench([*theirs, *(result(OURS, x, s) for s, x in enumerate((0.4, 0.8, 0.6)))])
    assert is_met(ahead)
    assert not is_met(unclear)
    (goal,) = ahead.goals
    assert goal.measured == "ahead by 21.0 ± 2.5 points (training), 21.0 ± 2.5 points (test)"
    assert "depth 32, relu: after 1000 steps" in goal.aim


def test_other_networks_may_not_fall_behind_by_more_than_chance() -> None:
    theirs = [result(NORMS, 0.5, seed, SMALL) for seed in range(3)]
    unclear = RepairBench([*theirs, *(result(OURS, x, s, SMALL) for s, x in enumerate((0.4, 0.6, 0.49)))])
    behind = RepairBench([*theirs, *(result(OURS, x, s, SMALL) for s, x in enumerate((0.4, 0.41, 0.39)))])
    assert is_met(unclear)
    assert not is_met(behind)
    assert RepairBench([theirs[0], result(OURS, 0.4, 0, SMALL)]).goals == []


# ---------------------------------------------------------------------------------------------- the command


def test_the_command_prints_tables_and_ends_with_one_where_a_goal_is_missed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked: list[dict[str, Any]] = []

    def pretend(**options: Any) -> RepairBench:
        asked.append(options)
        options["on_row"](result(OURS, 0.4))
        return RepairBench([result(way, x, seed) for seed in range(3) for way, x in ((NORMS, 0.5), (OURS, 0.4))])

    monkeypatch.setattr(measuring, "bench_repair", pretend)
    monkeypatch.setattr(screen, "width", 300)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(
        sys, "argv", ["onlynorm", "bench", "repair", "--markdown", "--steps", "7", "--out", str(tmp_path)]
    )
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    seen = capsys.readouterr()
    assert stopped.value.code == 1
    assert asked[0]["sizes"] == RepairSizes(n_steps=7)
    assert "| repair, by default settings: mirrored | 40.0 ± 0.0 |" in seen.out
    assert "depth 32, relu, repair, by default settings, seed 0: 40.0 %" in " ".join(seen.err.split())
