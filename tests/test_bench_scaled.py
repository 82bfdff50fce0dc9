"""Accuracy against condition numbers, on a tiny network and images of our own: rows, rates, tables, goals, command."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import RunCli, runner
from torch import nn

from onlynorm.cli.evidence import bench as measuring
from onlynorm.data import Split
from onlynorm.errors import UnknownNameError, ValueRangeError
from onlynorm.evidence.bench.sweeps import scaled as bench_module
from onlynorm.evidence.bench.sweeps.scaled import (
    CONDITIONS,
    N_SEEDS,
    ORDINARY,
    Scale,
    ScaledBench,
    ScaledLaw,
    ScaledRun,
    ScaledSizes,
    ScaledTrial,
    bench_scaled,
)
from onlynorm.evidence.goals import is_met
from onlynorm.evidence.papers.random_features import scaled_training as training
from onlynorm.evidence.papers.random_features.scaled_training import (
    GEOMETRIC,
    LAWS,
    SEMICIRCLE,
    SUBJECTS,
    Subject,
    images_of,
)
from onlynorm.models import mlp
from onlynorm.seeds import seeded

SIZES = ScaledSizes(n_train=32, n_epochs=1, n_trial_epochs=1, batch_size=8)
ONE, LAST, STEEP = Scale(SEMICIRCLE, 1.0), Scale(SEMICIRCLE, 1e6), Scale(GEOMETRIC, 1e6)


def _data() -> Split:
    images, labels = torch.randn(120, 1, 4, 4, generator=seeded(0)), torch.arange(120) % 10
    return Split("toy", images[:80], labels[:80], images[80:], labels[80:])


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    subject = Subject(_data, lambda seed: nn.Sequential(nn.Flatten(), *mlp((4, 5, 10), seed=seed)))
    monkeypatch.setitem(training.SUBJECTS, "toy", subject)
    monkeypatch.setattr(training, "N_PUT_ASIDE", 40)
    monkeypatch.setattr(bench_module, "RATES", (0.01, 0.1))
    monkeypatch.setattr(bench_module, "CONDITIONS", {SEMICIRCLE: (1.0, 30.0), GEOMETRIC: (30.0,)})
    images_of.cache_clear()
    yield
    images_of.cache_clear()


def bench(out: Path, **options: Any) -> ScaledBench:
    return bench_scaled(**{"data": ["toy"], "sizes": SIZES, "out": out, "n_seeds": 2, **options})


def a_run(scale: Scale, accuracy: float, seed: int = 0, rate: float = 0.1) -> ScaledRun:
    return ScaledRun("toy", scale, seed, rate, accuracy, accuracy, 1.0)


def measured(last: tuple[float, ...], *, first: tuple[float, ...] | None = None, **changes: Any) -> ScaledBench:
    """An ordinary network at about 50 %, condition 1 and the largest one."""
    usual = (0.5, 0.51, 0.49)
    given = ((ORDINARY, usual), (ONE, first or usual), (LAST, last))
    trials = [ScaledTrial("toy", scale, rate, rate) for scale, _ in given for rate in (0.03, 0.1)]
    runs = [a_run(scale, x, seed) for scale, values in given for seed, x in enumerate(values)]
    laws = [ScaledLaw("toy", scale, 4.0, 0.2, 0.06, 0.1, 1e-15) for scale in (ONE, LAST)]
    return ScaledBench(**{"runs": runs, "trials": trials, "laws": laws, **changes})


# ---------------------------------------------------------------------------------------------- rows


@pytest.mark.usefixtures("toy")
def test_every_spectrum_is_trained_at_its_own_rate_and_at_the_ordinary_one(tmp_path: Path) -> None:
    told: list[str] = []
    seen: list[ScaledRun] = []
    made = bench(tmp_path, progress=told.append, on_row=seen.append)
    assert seen == made.runs
    assert made.scales("toy") == [ORDINARY, ONE, Scale(SEMICIRCLE, 30.0), Scale(GEOMETRIC, 30.0)]
    assert len(made.trials) == 4 * 2
    usual = made.rate("toy", ORDINARY)
    for scale in made.scales("toy"):
        for rate in (None, usual):
            assert [run.seed for run in made.find("toy", scale, at=rate)] == [0, 1]
        best = max(trial.accuracy for trial in made.trials if trial.scale == scale)
        assert best in [t.accuracy for t in made.trials if (t.scale, t.rate) == (scale, made.rate("toy", scale))]
    exact, step, *falls = made.goals
    assert exact.is_met
    assert exact.measured == "2 of 2 seeds agree to the last bit"
    assert step.is_met
    assert len(falls) == 2
    assert "toy, geometric 30, rate 0.01, seed 100, a trial" in told
    assert Path(made.figure).read_bytes().startswith(b"\x89PNG")
    assert Path(made.figure).with_suffix(".svg").exists()


@pytest.mark.usefixtures("toy")
def test_finished_rows_are_read_again_and_a_killed_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(run: ScaledRun) -> None:
        if run.scale == ONE:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench(tmp_path, on_row=stop)
    first = bench(tmp_path)
    assert [run.note for run in first.find("toy", ORDINARY)] == ["kept", "kept"]
    assert [run.note for run in first.find("toy", ONE)] == ["kept", ""]
    monkeypatch.setattr(bench_module, "train", lambda **_: pytest.fail("trained again"))
    again = bench(tmp_path)
    assert again.runs == [dataclasses.replace(run, note="kept") for run in first.runs]
    cut = bench(tmp_path, n_seeds=1, laws=[GEOMETRIC])
    assert [run.scale for run in cut.runs if run.rate == cut.rate("toy", run.scale)] == [
        ORDINARY,
        Scale(GEOMETRIC, 30.0),
    ]
    assert len(cut.tables()[1].rows) == 1


@pytest.mark.usefixtures("toy")
def test_rows_of_other_sizes_are_other_rows(tmp_path: Path) -> None:
    bench(tmp_path, laws=[GEOMETRIC], n_seeds=1)
    other = bench(tmp_path, laws=[GEOMETRIC], n_seeds=1, sizes=dataclasses.replace(SIZES, n_epochs=2, n_trial_epochs=2))
    assert {run.note for run in other.runs} == {""}


def test_unknown_data_and_laws_and_seeds_of_trials_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="data needs a known name; got 'cifar'"):
        bench_scaled(data=["cifar"], out=tmp_path)
    with pytest.raises(UnknownNameError, match="law of a spectrum needs a known name; got 'circle'"):
        bench_scaled(laws=["circle"], out=tmp_path)
    with pytest.raises(ValueRangeError, match="from 1 to 100; got 101"):
        bench_scaled(n_seeds=101, out=tmp_path)


def test_every_data_set_has_its_seeds_and_every_law_its_conditions() -> None:
    assert set(N_SEEDS) == set(SUBJECTS)
    assert set(CONDITIONS) == set(LAWS)
    assert all(sorted(conditions) == list(conditions) for conditions in CONDITIONS.values())


# ---------------------------------------------------------------------------------------------- tables and goals


def test_the_largest_condition_has_to_lie_below_the_first_by_more_than_chance() -> None:
    below, unclear = measured((0.40, 0.41, 0.39)), measured((0.3, 0.6, 0.5))
    assert is_met(below)
    assert not is_met(unclear)
    goal = below.goals[-1]
    assert goal.aim == "toy, semi-circle: the interval of accuracy at condition 1e+06 lies below that at 1"
    assert goal.measured == "40.0 ± 2.5 % beside 50.0 ± 2.5 %; 10.0 ± 0.0 points lower seed by seed"
    # Seed by seed the fall is certain, but the intervals overlap.
    assert not is_met(measured((0.49, 0.50, 0.48)))


def test_condition_one_has_to_be_the_ordinary_network_to_the_last_bit() -> None:
    off = measured((0.40, 0.41, 0.39), first=(0.5, 0.51 + 1e-12, 0.49))
    assert [goal.is_met for goal in off.goals] == [False, True, True]
    assert off.goals[0].measured == "2 of 3 seeds agree to the last bit"


def test_a_step_that_is_not_the_square_misses_its_goal() -> None:
    wrong = measured((0.40, 0.41, 0.39), laws=[ScaledLaw("toy", LAST, 4.0, 0.2, 0.06, 0.1, 1e-9)])
    assert [goal.is_met for goal in wrong.goals] == [True, False, True]


def test_a_quick_run_or_a_single_seed_says_nothing_of_accuracies() -> None:
    assert len(measured((0.6, 0.6, 0.6), sizes=ScaledSizes.quick()).goals) == 2
    assert len(measured((0.6,), first=(0.5,), runs=[a_run(s, 0.5) for s in (ORDINARY, ONE, LAST)]).goals) == 2


def test_the_lower_one_of_two_equally_good_rates_is_taken() -> None:
    trials = [ScaledTrial("toy", ONE, rate, accuracy) for rate, accuracy in ((0.3, 0.5), (0.1, 0.5), (0.03, 0.4))]
    assert ScaledBench(trials=trials).rate("toy", ONE) == 0.1


def test_tables_show_accuracies_spectra_and_rates() -> None:
    accuracies, laws, rates = measured((0.40, 0.41, 0.39)).tables()
    assert accuracies.rows[-1][:7] == ("toy", SEMICIRCLE, "1e+06", "40.0 ± 2.5", "40.0 ± 2.5", "10.0 ± 0.0", "0.1")
    assert accuracies.rows[0][:6] == ("toy", "ordinary network", "1", "50.0 ± 2.5", "50.0 ± 2.5", "-")
    assert laws.rows[-1] == ("toy", SEMICIRCLE, "1e+06", "4", "20.0", "6.00", "0.1", "10.0 ± 0.0")
    assert rates.rows[-1] == ("toy", "semi-circle 1e+06", "3.0", "10.0")
    facts = json.loads(json.dumps(measured((0.4, 0.4, 0.4)).as_dict()))
    assert facts["runs"][-1]["scale"] == {"law": SEMICIRCLE, "condition": 1e6}


# ---------------------------------------------------------------------------------------------- the command


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> RunCli:
    return runner(monkeypatch, capsys, tmp_path, "bench", "scaled")


def test_the_command_hands_its_options_on_and_ends_with_one_where_a_goal_is_missed(
    run: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def pretend(**options: Any) -> ScaledBench:
        asked.append(options)
        options["on_row"](a_run(STEEP, 0.4))
        return measured((0.40, 0.41, 0.39) if options["n_seeds"] else (0.6, 0.6, 0.6))

    monkeypatch.setattr(measuring, "bench_scaled", pretend)
    ran = run("--data", "cifar10", "--law", GEOMETRIC, "--seeds", 3, "--epochs", 7, "--images", 50, "--markdown")
    assert ran.code == 0
    assert (asked[0]["data"], asked[0]["laws"], asked[0]["n_seeds"]) == (["cifar10"], [GEOMETRIC], 3)
    assert asked[0]["sizes"] == ScaledSizes(n_epochs=7, n_train=50)
    assert "| toy | semi-circle | 1e+06 | 40.0 ± 2.5 |" in ran.stdout
    assert "toy, geometric 1e+06, rate 0.1, seed 0: 40.0 %" in ran.err
    missed = run("--quick", "--json")
    assert missed.code == 1
    assert asked[1]["sizes"] == ScaledSizes.quick()
    assert (asked[1]["data"], asked[1]["laws"]) == (None, None)
    assert missed.json()["goals"][-1]["is_met"] is False
