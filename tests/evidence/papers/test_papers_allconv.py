"""Section 4 of hardt_ma2017: trainings at tiny sizes, the tables and the figure, and what is not reproduced."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import onlynorm as on
from onlynorm.data import Split, find_data
from onlynorm.errors import MissingDataError, TrainingError
from onlynorm.evidence.artifacts import Artifact, load_artifacts
from onlynorm.evidence.papers import hardt_ma2017
from onlynorm.evidence.papers.hardt_ma2017 import allconv
from onlynorm.evidence.papers.hardt_ma2017.allconv import BATCH, HEAD, NEAR_IDENTITY, SLOW, STANDARD, VARIANTS, train
from onlynorm.evidence.papers.reproduce import reproduce
from onlynorm.evidence.records import RecordVerdict

FOUND = load_artifacts(Path(hardt_ma2017.__file__).parent / "artifacts.toml", hardt_ma2017.ARTIFACTS)
TINY: dict[str, Any] = {
    "depth": 7, "width": 4, "image_size": 4, "n_train": 192, "n_test": 60, "n_epochs": 6, "batch_size": 16,
    "rate": 0.05, "n_evaluations": 5, "n_evaluation_images": 50,
}  # fmt: skip
ERRORS = {NEAR_IDENTITY: 40.0, STANDARD: 90.0, SLOW: 41.0, BATCH: 38.0, HEAD: 40.5}


def colours(size: int) -> Split:
    """Images whose class is the strongest of three channels, under some noise."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(252) % 3
    images = torch.randn(252, 3, size, size, generator=generator) + 2.0 * torch.eye(3)[labels][:, :, None, None]
    return Split("colours", images[:192], labels[:192], images[192:], labels[192:])


def pretend(*, variant: str, seed: int, training: dict[str, Any]) -> dict[str, Any]:
    """A training without one, with errors of our choice and nothing but a start where it diverges."""
    error = ERRORS[variant] + seed * training.get("spread", 0.1) + training.get(variant, 0.0)
    history = [{"step": step, "loss": 1.0, "train": error, "test": error + 4 - step} for step in (1, 2, 3, 4)]
    is_finite = error < 90
    return {"test": error, "train": error - 2, "history": history if is_finite else [], "is_finite": is_finite}


def sized(id: str, **training: Any) -> Artifact:
    sizes = {"training": training, "n_seeds": 3}
    return dataclasses.replace(FOUND[id], sizes={"quick": sizes, "paper": sizes})


@pytest.fixture
def pretending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allconv, "train", pretend)


def test_the_figure_and_both_tables_of_section_4_are_artifacts() -> None:
    assert {"hardt_ma2017:fig-1", "hardt_ma2017:table-1", "hardt_ma2017:table-2"} <= FOUND.keys()


# ------------------------------------------------------------------------------- pieces


@pytest.mark.parametrize("variant", [NEAR_IDENTITY, BATCH, HEAD])
def test_networks_learn_and_equal_seeds_give_equal_numbers(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allconv, "images", colours)
    made, again = (train(variant=variant, seed=1, training={**TINY, "rate": 0.02}) for _ in range(2))
    assert made == again
    assert made["is_finite"]
    assert made["n_steps"] == 6 * 12
    assert [look["step"] for look in made["history"]] == [15, 29, 44, 58, 72]
    assert made["test"] <= 20.0  # of 66.7 by guessing; the classes overlap little


def test_a_training_that_diverges_counts_as_guessing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allconv, "images", colours)
    made = train(variant=STANDARD, seed=0, training={**TINY, "rate": 1e6})
    assert not made["is_finite"]
    assert (made["test"], made["train"]) == (90.0, 90.0)


def test_the_schedule_is_the_papers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[on.Schedule] = []
    monkeypatch.setattr(allconv, "images", colours)

    def stop(*_: object, schedule: on.Schedule, **__: object) -> None:
        seen.append(schedule)
        raise TrainingError("enough")

    monkeypatch.setattr(allconv.on, "fit", stop)
    train(variant=SLOW, seed=0, training=TINY)
    (schedule,) = seen
    rates = [schedule.lr_at(step, 60_000) for step in (0, 29_999, 30_000, 49_999, 50_000, 59_999)]
    assert rates == pytest.approx([5e-4, 5e-4, 5e-5, 5e-5, 5e-6, 5e-6])  # a hundredth of the paper's 0.05
    assert (schedule.momentum, schedule.weight_decay, schedule.augmentation) == (0.9, 1e-4, "crop-flip")


def test_images_are_averaged_over_squares_of_pixels() -> None:
    try:
        find_data("cifar-10-batches-bin")
    except MissingDataError as error:
        pytest.skip(str(error))
    small, whole = allconv.images(16), allconv.cifar10()
    wanted = whole.test_inputs.reshape(-1, 3, 16, 2, 16, 2).mean((3, 5))
    torch.testing.assert_close(small.test_inputs, wanted)
    assert torch.equal(small.test_labels, whole.test_labels)


# ------------------------------------------------------------------------------- tables and figure


def test_the_network_of_table_1_has_the_printed_shape(tmp_path: Path) -> None:
    (record,) = reproduce(FOUND["hardt_ma2017:table-1"], out=tmp_path)
    assert record.verdict is RecordVerdict.CAVEAT, record.reasons
    assert [item.name for item in record.checks if not item.is_met] == [
        "trained parameters, millions, against section 4.1"
    ]
    assert record.table is not None
    assert [tuple(row) for row in record.table.rows] == [
        ("3 x 3 x 3 x 16", 1, "1 standard conv", 1, 432, 32),
        ("3 x 3 x 16 x 64", 1, "9 residual blocks", 18, 635_904, 32),
        ("3 x 3 x 64 x 128", 2, "9 residual blocks", 18, 2_580_480, 16),
        ("3 x 3 x 128 x 256", 2, "9 residual blocks", 18, 10_321_920, 8),
        ("-", "-", "8 x 8 global average pool", 0, 0, 1),
        ("256 x 10", "-", "random projection (not trained)", 0, 0, 1),
    ]


@pytest.mark.parametrize("change", [{"depth": 49}, {"head": "trained"}, {"init": "standard"}])
def test_another_network_than_that_of_table_1_is_not_reproduced(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allconv, "all_convolutional", functools.partial(allconv.all_convolutional, **change))
    one = FOUND["hardt_ma2017:table-1"]
    sizes = {"n_classes": [10, 11]}
    (record,) = reproduce(dataclasses.replace(one, sizes={"quick": sizes, "paper": sizes}), out=tmp_path)
    assert record.verdict is RecordVerdict.NOT_REPRODUCED


def test_table_2_has_a_row_and_a_curve_per_network(tmp_path: Path, pretending: None) -> None:
    (record,) = reproduce(sized("hardt_ma2017:table-2"), scale="paper", out=tmp_path)
    assert record.verdict is RecordVerdict.CAVEAT, record.reasons
    assert record.table is not None
    rows = {str(row[0]): row for row in record.table.rows}
    assert list(rows) == [curve.label for curve in record.curves] == list(VARIANTS)
    assert rows[NEAR_IDENTITY][1] == pytest.approx(40.1)
    assert rows[NEAR_IDENTITY][2] == pytest.approx(4.302653 * 0.1 / math.sqrt(3), rel=1e-6)
    assert rows[STANDARD][5] == "0 of 3"
    assert record.values["near identity minus batch norm, points"] == pytest.approx(2.0)
    assert record.values["standard init, learning rate / 100 minus near identity, points"] == pytest.approx(1.0)
    assert len(record.pieces) == 15


@pytest.mark.parametrize("change", [{NEAR_IDENTITY: 4.0}, {STANDARD: -51.0}, {HEAD: -4.0}, {NEAR_IDENTITY: 50.0}])
def test_an_order_against_the_paper_is_not_reproduced(
    change: dict[str, float], tmp_path: Path, pretending: None
) -> None:
    (record,) = reproduce(sized("hardt_ma2017:table-2", **change), scale="paper", out=tmp_path)
    assert record.verdict is RecordVerdict.NOT_REPRODUCED


def test_figure_1_shows_both_errors_and_the_drops(tmp_path: Path, pretending: None) -> None:
    (record,) = reproduce(sized("hardt_ma2017:fig-1"), scale="paper", out=tmp_path)
    assert record.verdict is RecordVerdict.CAVEAT, record.reasons
    assert [curve.label for curve in record.curves] == ["training images", "test images", "learning rate drops tenfold"]
    assert record.values["test error at the first drop of the learning rate minus at the end, points"] == pytest.approx(
        2.0
    )
    assert record.values["test error minus training error at the end, points"] == pytest.approx(2.0)
    assert (tmp_path / "hardt_ma2017" / "fig-1" / "paper" / "figure.png").stat().st_size > 10_000


def test_the_sizes_are_those_the_caveats_state() -> None:
    for name in ("table-2", "fig-1"):
        one = FOUND[f"hardt_ma2017:{name}"]
        training, words = one.sizes["paper"]["training"], one.caveats[0]
        side = training["image_size"]
        for size in (f"depth of {training['depth']} ", f"{side} x {side}", f"{training['n_train']:,} training",
                     f"{training['n_epochs']} epochs with batch size {training['batch_size']}"):  # fmt: skip
            assert size in words
