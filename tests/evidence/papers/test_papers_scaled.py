"""Networks with scaled features: their spectra, their training beside the ordinary one, and table 1 at tiny sizes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onlynorm as on
from onlynorm.data import Split
from onlynorm.errors import UnknownNameError, ValueRangeError
from onlynorm.evidence.artifacts import load_artifacts
from onlynorm.evidence.papers.random_features import scaled as module
from onlynorm.evidence.papers.random_features.scaled import (
    GEOMETRIC,
    LAWS,
    PAPER,
    SEMICIRCLE,
    ScaledOutcome,
    ScaledTask,
    build,
    compare,
    fall,
    images_of,
    spectrum,
    spectrum_change,
    squared_spectrum,
    step_gap,
    table_1,
    train,
    training_images,
    validation_images,
)
from onlynorm.evidence.papers.reproduce import reproduce
from onlynorm.evidence.records import RecordVerdict
from onlynorm.frozen import FrozenOptions, NormOnlyLayer, wrap
from onlynorm.models import mlp
from onlynorm.seeds import seeded

EPS = torch.finfo(torch.float64).eps
TRAINING: dict[str, Any] = {"data": "stripes", "n_train": 128, "n_epochs": 3, "batch_size": 16}


def _stripes() -> Split:
    """Images of ten classes, each with its own bright row of 2 x 2 pixels, and noise."""
    labels = torch.arange(400) % 10
    inputs = 0.5 * torch.randn(400, 1, 20, 4, generator=seeded(0))
    for row in (0, 1):
        inputs[torch.arange(400), :, 2 * labels + row] += 1.0
    return Split("stripes", inputs[:300], labels[:300], inputs[300:], labels[300:])


@pytest.fixture(autouse=True, scope="module")
def stripes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        subject = ScaledTask(_stripes, lambda seed: nn.Sequential(nn.Flatten(), *mlp((20, 12, 10), seed=seed)))
        patch.setitem(module.TASKS, "stripes", subject)
        patch.setattr(module, "N_VALIDATION", 100)
        images_of.cache_clear()
        yield
    images_of.cache_clear()


# ------------------------------------------------------------------------------- spectra


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("condition", [1.0, 7.0, 1e6])
def test_a_spectrum_has_its_condition_number_and_mean_square_one(law: str, condition: float) -> None:
    s = spectrum(500, condition=condition, law=law, seed=3, layer="a")
    # Semi-circle values are rounded to float32.
    assert float(s.max() / s.min()) == pytest.approx(condition, rel=1e-6)
    assert float(s.square().mean()) == pytest.approx(1.0, rel=1e-6)
    assert torch.equal(s, spectrum(500, condition=condition, law=law, seed=3, layer="a"))
    if condition > 1.0:
        assert not torch.equal(s, spectrum(500, condition=condition, law=law, seed=3, layer="b"))


def test_geometric_values_are_evenly_spaced_in_their_logarithms_and_ordered_as_the_semicircle() -> None:
    geometric, circle = (spectrum(50, condition=100.0, law=law, seed=1) for law in (GEOMETRIC, SEMICIRCLE))
    gaps = geometric.sort().values.log().diff()
    assert torch.allclose(gaps, torch.full_like(gaps, math.log(100.0) / 49), rtol=1e-9)
    assert torch.equal(geometric.argsort(), circle.argsort())


def test_an_unknown_law_or_data_set_is_named() -> None:
    with pytest.raises(UnknownNameError, match="law of a spectrum needs a known name; got 'circle'"):
        spectrum(5, condition=2.0, law="circle")
    with pytest.raises(UnknownNameError, match="data needs a known name; got 'cifar'"):
        build("cifar", condition=None, seed=0)


def test_the_semicircle_hardly_changes_between_large_condition_numbers_and_the_geometric_law_does() -> None:
    """P(s < x) of the quarter circle is about 2x/pi: its values below 2/100 are 1.3 % of all, and tiny in both."""
    early, late = (spectrum_change("stripes", a, second=b) for a, b in ((1.0, 3.0), (100.0, 1e6)))
    assert late < 0.03 < 0.3 < early
    assert spectrum_change("stripes", 100.0, second=1e6, law=GEOMETRIC) > 0.3
    squares = squared_spectrum("stripes", condition=1e6)
    assert len(squares) == 20 * 12 + 12 * 10
    assert float(squares.max()) == pytest.approx(4.0, rel=0.05)  # of the law without end; fewer values, a bit less
    # The share below x of the quarter circle is (2 angle + sin(2 angle)) / pi, where x = 2 sin(angle).
    angle = math.asin(math.sqrt(0.1) / 2)
    share = float((squares < 0.1).double().mean())
    assert share == pytest.approx((2 * angle + math.sin(2 * angle)) / math.pi, abs=2 / 120)


# ------------------------------------------------------------------------------- networks and training


def test_a_scaled_network_is_that_of_norm_only_and_starts_as_the_ordinary_one() -> None:
    plain, scaled = (build("stripes", condition=c, seed=2, dtype=torch.float64) for c in (None, 30.0))
    made = on.to_norm_only(plain, features="id_cond", spectrum=30.0, seed=2)
    layers = [module for module in scaled.modules() if isinstance(module, NormOnlyLayer)]
    others = [module for module in made.modules() if isinstance(module, NormOnlyLayer)]
    assert len(layers) == len(others) == 2
    assert all(torch.equal(one.gamma, other.gamma) for one, other in zip(layers, others, strict=True))
    x = torch.randn(5, 1, 10, 2, dtype=torch.float64, generator=seeded(1))
    assert torch.allclose(scaled(x), plain(x), rtol=0.0, atol=100 * EPS)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("condition", [1.0, 30.0, 1e4])
def test_a_step_moves_each_weight_by_the_square_of_its_singular_value(law: str, condition: float) -> None:
    # s gamma is rounded at each of two steps through two layers of up to 20 inputs.
    assert step_gap("stripes", condition=condition, law=law, seed=1) < 1000 * EPS


def test_the_check_of_the_step_would_notice_another_power(monkeypatch: pytest.MonkeyPatch) -> None:
    def rooted(plain: nn.Linear, options: FrozenOptions, **named: Any) -> NormOnlyLayer:
        assert isinstance(options.spectrum, Tensor)
        return wrap(plain, dataclasses.replace(options, spectrum=options.spectrum.sqrt()), **named)

    monkeypatch.setattr(module, "wrap", rooted)
    assert step_gap("stripes", condition=30.0, seed=1) > 0.1


@pytest.mark.parametrize("law", LAWS)
def test_condition_one_trains_to_the_same_numbers_as_the_ordinary_network(law: str) -> None:
    ordinary, scaled = (train(condition=c, law=law, lr=0.1, seed=4, **TRAINING) for c in (None, 1.0))
    assert ordinary == scaled
    assert ordinary.accuracy > 0.5
    assert ordinary.loss < math.log(10)


def test_another_condition_or_seed_trains_to_other_numbers() -> None:
    losses = {train(condition=c, lr=0.1, seed=s, **TRAINING).loss for c, s in ((1.0, 0), (30.0, 0), (30.0, 1))}
    assert len(losses) == 3


def test_a_training_that_diverges_counts_as_guessing() -> None:
    assert train(condition=10.0, lr=1e30, seed=0, **TRAINING) == ScaledOutcome(0.1, 0.1, math.log(10))


def test_trials_are_tested_on_validation_images_which_nobody_trains_on() -> None:
    aside = {tuple(image.flatten().tolist()) for image in validation_images("stripes")[0]}
    samples = [
        {tuple(i.flatten().tolist()) for i in training_images("stripes", n_train=128, seed=s)[0]} for s in (0, 1)
    ]
    assert (len(aside), len(samples[0])) == (100, 128)
    assert not aside & (samples[0] | samples[1])
    assert samples[0] != samples[1]
    tried, judged = (train(condition=None, lr=0.1, seed=0, is_trial=is_trial, **TRAINING) for is_trial in (True, False))
    assert tried.loss == judged.loss
    assert tried.accuracy != judged.accuracy
    with pytest.raises(ValueRangeError, match="at most the 200 images outside the validation subset; got 201"):
        training_images("stripes", n_train=201, seed=0)


def test_images_are_averaged_over_two_by_two_pixels() -> None:
    split, whole = images_of("stripes"), _stripes()
    assert split.train_inputs.shape == (300, 1, 10, 2)
    assert torch.allclose(split.test_inputs[3, 0, 4, 1], whole.test_inputs[3, 0, 8:10, 2:4].mean())


# ------------------------------------------------------------------------------- table 1


def _accuracies(*means: float) -> dict[float | None, list[float]]:
    """Five seeds around the mean of every condition number, with scatter that seeds share and scatter of their own."""
    shared, own = (-1.0, 1.0, 0.0, 2.0, -2.0), (0.1, -0.1, 0.2, 0.0, -0.2)
    rows = {c: [mean + s + o for s, o in zip(shared, own, strict=True)] for c, mean in zip(PAPER, means, strict=True)}
    return {None: rows[1.0], **rows}


def test_falls_are_taken_seed_by_seed() -> None:
    spread = fall(_accuracies(50.0, 49.0, 48.0, 47.0), 1.0, 1541601.0)
    assert spread.mean == pytest.approx(3.0)
    assert spread.half == pytest.approx(0.0, abs=1e-12)


def test_the_values_tell_a_fall_a_plateau_and_a_rise_apart() -> None:
    falling = compare(_accuracies(50.0, 49.0, 48.0, 47.0), _accuracies(60.0, 59.0, 58.0, 57.0), "stripes")
    plateau = compare(_accuracies(50.0, 47.0, 47.0, 47.0), _accuracies(60.0, 57.0, 57.0, 57.0), "stripes")
    rising = compare(_accuracies(50.0, 47.0, 47.0, 48.0), _accuracies(60.0, 57.0, 57.0, 57.0), "stripes")
    rise, late = (
        "largest gain of test accuracy between neighbours, lower end",
        "loss of test accuracy, third to last, lower end",
    )
    assert falling[rise] == pytest.approx(-1.0)
    assert (falling[late], plateau[late]) == (pytest.approx(1.0), pytest.approx(0.0))
    assert plateau[rise] == pytest.approx(0.0)
    assert rising[rise] == pytest.approx(1.0)
    assert falling["loss of test accuracy, first to last, lower end"] == pytest.approx(3.0)
    assert falling["condition 1 against the ordinary network, largest difference"] == 0.0


TOML = """
[[artifact]]
id = "random_features:table-1"
title = "Table 1"
claim = "Accuracy falls."
kind = "table"
seeds = [0, 1]

[artifact.sizes.quick]
lrs = [0.03, 0.1]
n_trial_epochs = 1
training = { data = "stripes", n_train = 64, n_epochs = 2, batch_size = 16 }

[artifact.sizes.paper]

[[artifact.expect]]
name = "condition 1 against the ordinary network, largest difference"
max = 0.0
source = "Theorem 3.1"
"""


def test_the_table_stands_beside_the_papers_and_is_made_of_pieces(tmp_path: Path) -> None:
    path = tmp_path / "random_features.toml"
    path.write_text(TOML, encoding="utf-8")
    one = load_artifacts(path, {"random_features:table-1": table_1})["random_features:table-1"]
    (record,) = reproduce(one, out=tmp_path)
    assert record.verdict is RecordVerdict.CAVEAT, str(record)
    assert record.table is not None
    assert [row[:3] for row in record.table.rows] == [
        ("1", 81.89, 76.89), ("5413", 79.06, 75.84), ("10123", 79.1, 75.6), ("1541601", 76.28, 73.14),
    ]  # fmt: skip
    assert len(record.pieces) == 2 + 2 * 5
    assert {curve.label for curve in record.curves} == {
        f"{who}, {p}" for who in ("ours", "paper") for p in ("training", "test")
    }
    assert all(math.isfinite(value) for value in record.values.values())
    (again,) = reproduce(one, out=tmp_path)
    assert all(piece.is_reloaded for piece in again.pieces)
    assert again.values == record.values
