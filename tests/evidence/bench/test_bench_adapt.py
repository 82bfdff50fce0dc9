"""Adapting to corrupted images on a tiny network: what each method changes and saves, what it recovers, goals."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_benchmarks import TINY, normalised
from torch import Tensor, nn

from onlynorm.errors import UnknownNameError
from onlynorm.evidence.bench.sweeps import adapt as module
from onlynorm.evidence.bench.sweeps.adapt import (
    BOTH,
    CLEAN,
    FULL,
    HEAD,
    METHODS,
    NORMS,
    NOTHING,
    STATISTICS,
    TRAINED,
    AdaptCase,
    Adapted,
    AdaptSizes,
    adapt,
    recovered,
    sweep,
)
from onlynorm.evidence.harness import is_met
from onlynorm.evidence.sweep import Measured, Results, TrainingRun, Trial
from onlynorm.evidence.validation import validation_subset
from onlynorm.models import cifar_resnet
from onlynorm.tuning import Schedule

SCHEDULE = Schedule(epochs=2, batch_size=8, lr=0.1)


def base() -> nn.Module:
    return cifar_resnet(8, width=2).eval()


def pairs() -> tuple[Tensor, Tensor]:
    split = normalised()
    return split.train_inputs, split.train_labels


# ---------------------------------------------------------------------------------------------- methods


@pytest.mark.parametrize(
    ("method", "parts"),
    [
        (NOTHING, set()),
        (STATISTICS, {"statistics"}),
        (HEAD, {"head"}),
        (NORMS, {"statistics", "norms"}),
        (BOTH, {"statistics", "norms", "head"}),
        (FULL, {"statistics", "norms", "head", "weights"}),
    ],
)
def test_a_method_changes_what_it_says_and_saves_that_exactly(method: str, parts: set[str], tmp_path: Path) -> None:
    tuner = adapt(base(), method, data=pairs(), schedule=SCHEDULE)
    network = tuner.network
    before = base().state_dict()
    moved = {name for name, value in network.state_dict().items() if not torch.equal(value, before[name])}
    assert {part_of(name) for name in moved} == parts
    tuner.save(tmp_path)
    again = tuner.reload(base(), tmp_path)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert all(torch.equal(v, network.state_dict()[k]) for k, v in again.state_dict().items())
    n_bytes = sum(v.nbytes for k, v in before.items() if part_of(k) in parts)
    assert n_bytes <= size
    assert (size == 0) == (method == NOTHING)


def part_of(name: str) -> str:
    last = name.rpartition(".")[2]
    if last in ("running_mean", "running_var", "num_batches_tracked"):
        return "statistics"
    return "norms" if "bn" in name else "head" if name.startswith("linear") else "weights"


def test_statistics_only_looks_at_no_label() -> None:
    images, labels = pairs()
    both = (adapt(base(), STATISTICS, data=(images, y), schedule=SCHEDULE) for y in (labels, labels.flip(0)))
    first, other = (tuner.network for tuner in both)
    assert all(torch.equal(v, other.state_dict()[k]) for k, v in first.state_dict().items())


# ---------------------------------------------------------------------------------------------- runs


def test_every_method_is_measured_on_every_corruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = dataclasses.replace(TINY["adapt"](monkeypatch), corruptions=("noise", "invert"), seeds=2)
    found: Any = sweep.run(sizes, out=tmp_path)
    counts = {case: len(found.of(case)) for case in found.cases}
    assert counts[AdaptCase(CLEAN, NOTHING)] == 1
    for images in ("noise", "invert"):
        assert [counts[AdaptCase(images, method)] for method in METHODS] == [1, 2, 2, 2, 2, 2]
    assert {(one.case, one.run.lr) for one in found.tried} == {
        (AdaptCase(images, method), lr) for images in ("noise", "invert") for method in TRAINED for lr in (0.01, 0.1)
    }
    assert found.runs["is_exact"].all()
    sizes_of = {method: found.of(AdaptCase("noise", method))["file_size"].iloc[0] for method in METHODS}
    assert 0 == sizes_of[NOTHING] < sizes_of[HEAD] < sizes_of[STATISTICS] < sizes_of[NORMS] < sizes_of[BOTH]
    assert sizes_of[BOTH] < sizes_of[FULL]
    other = sweep.run(dataclasses.replace(sizes, severity=1.0), out=tmp_path)
    assert set(other.runs["note"]) == {""}, "another severity is another run"  # type: ignore[attr-defined]


def test_validation_images_are_never_trained_on_and_seeds_draw_others(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Tensor] = []
    sizes = dataclasses.replace(TINY["adapt"](monkeypatch), severity=0.0)
    monkeypatch.setattr(module, "adapt", lambda base, method, *, data, schedule: drawn.append(data[0]) or base)
    for seed in (0, 1):
        module.adapted(AdaptCase("blur", FULL), TrainingRun(seed, 0.1), sizes)
    aside = {
        tuple(i.flatten().tolist())
        for i in validation_subset(normalised(), sizes.n_validation, split_seed=module.VALIDATION_SEED)[0]
    }
    first, second = ({tuple(image.flatten().tolist()) for image in images} for images in drawn)
    assert (len(aside), len(first), len(second)) == (10, 24, 24)
    assert not aside & (first | second)
    assert first != second


def test_a_learning_rate_at_which_training_diverges_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = TINY["adapt"](monkeypatch)
    assert module.validation_accuracy(AdaptCase("noise", FULL), TrainingRun(0, 1e30), sizes) == 0.0


def test_unknown_corruptions_are_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"corruptions needs a known name; got 'nois'\. Did you mean 'noise'"):
        AdaptSizes(corruptions=("nois",))


# ---------------------------------------------------------------------------------------------- numbers and goals


def made_up(n_seeds: int = 3, *, clean: float = 0.9, is_exact: bool = True, **accuracies: float) -> Any:
    """Seeds of every method on one corruption that costs 0.4; seeds differ by one percent."""
    level = {STATISTICS: 0.7, HEAD: 0.6, NORMS: 0.8, BOTH: 0.8, FULL: 0.85, **accuracies}
    runs = [Measured(AdaptCase(CLEAN, NOTHING), TrainingRun(0, math.nan), Adapted(clean, 0, True, 0.0))]
    runs += [Measured(AdaptCase("blur", NOTHING), TrainingRun(0, math.nan), Adapted(0.5, 0, True, 0.0))]
    runs += [
        Measured(AdaptCase("blur", method), TrainingRun(seed, math.nan if method == STATISTICS else 0.1),
                 Adapted(at + 0.01 * (seed - 1), 10, is_exact or method != FULL or seed > 0, 1.0))
        for method, at in level.items() for seed in range(n_seeds)
    ]  # fmt: skip
    trials = [Trial(AdaptCase("blur", method), TrainingRun(0, lr), lr) for method in TRAINED for lr in (0.1, 0.01)]
    return sweep.results(runs, trials)


def test_the_recovered_fraction_is_of_the_accuracy_that_was_lost() -> None:
    found = recovered(made_up(), AdaptCase("blur", NORMS))
    assert found.mean == pytest.approx(0.75)
    # t(0.975, 2) = 4.30265 from a table; the seeds' fractions are 0.725, 0.75, 0.775.
    assert found.half == pytest.approx(4.30265 * 0.025 / math.sqrt(3), rel=1e-5)
    shown = {row[1]: row for row in made_up().tables()[0].rows if row[0] == "blur"}
    assert shown[NORMS][2:5] == ("80.0 ± 2.5", "75.0 ± 6.2", "10")
    assert shown[NOTHING][2:5] == ("50.0", "0.0", "0")
    assert recovered(made_up(clean=0.5), AdaptCase("blur", NORMS)).percent() == "-"


def test_the_learning_rate_of_a_method_is_the_best_on_average_over_the_corruptions() -> None:
    found: Results[AdaptSizes, AdaptCase] = made_up()
    assert found.lr(AdaptCase("blur", FULL)) == 0.1
    more = [
        Trial(AdaptCase("noise", FULL), TrainingRun(0, 0.1), 0.0),
        Trial(AdaptCase("noise", FULL), TrainingRun(0, 0.01), 0.2),
    ]
    assert sweep.results([], [*found.tried, *more]).lr(AdaptCase("blur", FULL)) == 0.01
    assert math.isnan(found.lr(AdaptCase("blur", STATISTICS)))
    assert found.tables()[1].rows[0] == (HEAD, "1.0", "10.0")


def test_goals_are_met_and_each_can_be_missed() -> None:
    assert is_met(made_up())
    assert len(made_up().goals) == 4

    def missed(found: Any) -> list[str]:
        return [goal.aim for goal in found.goals if not goal.is_met]

    assert missed(made_up(**{HEAD: 0.81})) == ["norms only recovers more than head only, on every corruption"]
    assert missed(made_up(**{STATISTICS: 0.8})) == [
        "norms only recovers more than statistics only, on every corruption"
    ]
    assert missed(made_up(2)) == ["every method is measured on every corruption with 3 seeds or more"]
    drifting = made_up(is_exact=False)
    assert len(missed(drifting)) == 1
    assert made_up().goals[1].measured == "17 of 17 runs"
    assert drifting.goals[1].measured == "16 of 17 runs"
