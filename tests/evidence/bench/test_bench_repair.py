"""Training after repairs, on tiny networks and images: what is trained on, what diverges, and goals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tiny_benchmarks import TINY

from onlynorm.errors import ValueRangeError
from onlynorm.evidence.bench.sweeps import repair as module
from onlynorm.evidence.bench.sweeps.repair import (
    BRIEF,
    MAIN,
    METHODS,
    NORMS,
    OURS,
    RepairCase,
    RepairOutcome,
    RepairSizes,
    sweep,
)
from onlynorm.evidence.harness import is_met
from onlynorm.evidence.sweep import Measured, Results, TrainingRun
from onlynorm.evidence.validation import validation_subset

SMALL = (3, "relu")


def made(method: str, accuracy: float, seed: int = 0, network: tuple[int, str] = MAIN) -> Measured:
    row = RepairOutcome(accuracy, accuracy, 1.0, (5.0, 5.0, 5.0), 1.0, "mirrored", 0.1)
    return Measured(RepairCase(*network, method), TrainingRun(seed, math.nan), row)


def results(*runs: Measured) -> Results[RepairSizes, RepairCase]:
    return sweep.results(runs)


def test_the_main_network_is_repaired_by_all_methods_and_others_by_default_beside_norms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: Any = sweep.run(TINY["repair"](monkeypatch), out=tmp_path)
    assert found.cases == [*(RepairCase(2, "tanh", m) for m in METHODS), *(RepairCase(3, "relu", m) for m in BRIEF)]
    assert len(found.tried) == 2 * len(found.cases)
    for one in found.measured:
        assert one.run.lr in (0.01, 0.1)
        assert one.row.accuracy in [n / 20 for n in range(21)]
        assert all(1.0 - 1e-4 <= r <= 8.0 for r in one.row.ranks)
        assert math.isfinite(one.row.loss)


def test_a_quick_run_takes_two_of_the_six_networks() -> None:
    quick, full = module.cases(RepairSizes(quick=True)), module.cases(RepairSizes())
    assert len(full) == len(METHODS) + 5 * len(BRIEF)
    assert quick == full[: len(METHODS) + len(BRIEF)]


def test_a_training_that_diverges_answers_the_same_to_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = TINY["repair"](monkeypatch)
    found = module.repair_and_train(RepairCase(*SMALL, OURS), TrainingRun(0, 1e30), sizes)
    assert found.loss == math.inf
    assert found.accuracy == pytest.approx(0.1)  # every class is a tenth of the images


def test_validation_images_are_never_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = TINY["repair"](monkeypatch)
    aside = {tuple(image.tolist()) for image in validation_subset(module.split(), sizes.n_validation)[0].flatten(1)}
    one, other = ({tuple(i.tolist()) for i in module.training_images(seed, 32, sizes)[0]} for seed in (0, 1))
    assert (len(aside), len(one), len(other)) == (10, 32, 32)
    assert not aside & (one | other)
    assert one != other


def test_more_steps_than_images_and_seeds_of_trials_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = TINY["repair"](monkeypatch)
    with pytest.raises(ValueRangeError, match="at most the 50 images outside the validation subset; got 56"):
        module.train(module.repaired(RepairCase(*SMALL, OURS), 0, sizes)[0], TrainingRun(0, 0.1), sizes, n_steps=7)
    with pytest.raises(ValueRangeError, match=r"seeds .* from 1 to 100; got 101"):
        RepairSizes(seeds=101)


def test_the_papers_network_has_to_be_ahead_by_more_than_chance() -> None:
    theirs = [made(NORMS, 0.5, seed) for seed in range(3)]
    ahead = results(*theirs, *(made(OURS, x, s) for s, x in enumerate((0.7, 0.71, 0.72))))
    assert is_met(ahead)
    assert not is_met(results(*theirs, *(made(OURS, x, s) for s, x in enumerate((0.4, 0.8, 0.6)))))
    (goal,) = ahead.goals
    assert goal.measured == "ahead by 21.0 ± 2.5 points (training), 21.0 ± 2.5 points (test)"
    assert "depth 32, relu: after 1000 steps" in goal.aim
    assert ahead.tables()[0].rows[1][:4] == ("32", "relu", OURS, "mirrored")


def test_other_networks_may_not_fall_behind_by_more_than_chance() -> None:
    theirs = [made(NORMS, 0.5, seed, SMALL) for seed in range(3)]
    assert is_met(results(*theirs, *(made(OURS, x, s, SMALL) for s, x in enumerate((0.4, 0.6, 0.49)))))
    assert not is_met(results(*theirs, *(made(OURS, x, s, SMALL) for s, x in enumerate((0.4, 0.41, 0.39)))))
    assert results(theirs[0], made(OURS, 0.4, 0, SMALL)).goals == []
