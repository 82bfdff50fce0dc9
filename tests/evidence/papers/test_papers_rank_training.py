"""Figures of daneshmand2020 on real images: the networks, what is watched in them, and whole figures at tiny sizes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onlynorm.data import Split
from onlynorm.evidence.artifacts import artifacts
from onlynorm.evidence.papers.daneshmand2020 import rank_training
from onlynorm.evidence.papers.daneshmand2020.rank_training import (
    MeanlessBatchNorm2d,
    best_rate,
    build,
    observe,
    train,
    without_means,
)
from onlynorm.evidence.papers.reproduce import reproduce
from onlynorm.evidence.records import Record
from onlynorm.seeds import seeded

FIGURES = ("fig-5", "fig-6", "fig-7", "fig-8", "fig-11")
TRAINING: dict[str, Any] = {"data": "stripes", "n_train": 64, "n_epochs": 2, "n_evaluations": 2, "batch_size": 16}
TINY: dict[str, Any] = {
    "width": 2, "depths": [1, 3], "depth": 3, "pretraining": [1, 2], "rates": [0.01, 0.1],
    "training": {**TRAINING, "n_train": 32, "n_epochs": 1},
}  # fmt: skip


def _stripes() -> Split:
    """Images of ten classes, one bright row each, with a little noise."""
    labels = torch.arange(200) % 10
    inputs = 0.1 * torch.randn(200, 3, 32, 32, generator=seeded(0))
    inputs[torch.arange(200), :, 3 * labels] += 1.0
    return Split("stripes", inputs[:160], labels[:160], inputs[160:], labels[160:])


@pytest.fixture(autouse=True, scope="module")
def stripes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(rank_training._DATA, "stripes", _stripes)
        yield


@pytest.fixture(scope="module")
def records(stripes: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    small = []
    for one in (artifacts()[f"daneshmand2020:{figure}"] for figure in FIGURES):
        sizes = {s: {**table, **{k: v for k, v in TINY.items() if k in table}} for s, table in one.sizes.items()}
        small.append(dataclasses.replace(one, sizes=sizes))
    made = reproduce(small, out=tmp_path_factory.mktemp("records"))
    return {record.artifact.partition(":")[2]: record for record in made}


def test_every_figure_measures_every_value_its_expectations_name(records: dict[str, Record]) -> None:
    for figure in FIGURES:
        record = records[figure]
        assert not any("stopped" in reason for reason in record.reasons), str(record)
        assert all(check.ours is not None and math.isfinite(check.ours) for check in record.checks)
        assert {check.name for check in record.checks} == set(record.values)
        assert record.curves
        assert record.table is not None


def test_without_norms_the_start_has_no_rank_and_gradients_align(records: dict[str, Record]) -> None:
    """Sixteen narrow convolutions are enough, whatever the images."""
    values = records["fig-8"].values
    assert values["no norms: alignment of gradients at the start"] > 0.99
    assert values["batch norms: alignment of gradients at the start"] < values[
        "no norms: alignment of gradients at the start"
    ]  # fmt: skip


def test_a_norm_without_mean_divides_by_the_root_of_the_mean_square() -> None:
    norm = MeanlessBatchNorm2d(3, eps=0.0)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
        norm.bias.copy_(torch.tensor([0.0, 0.5, -1.0]))
    x = torch.randn(4, 3, 5, 5, generator=seeded(1)) + 2.0
    made = norm(x)
    plain = (made - norm.bias[:, None, None]) / norm.weight[:, None, None]
    assert torch.allclose(plain.square().mean((0, 2, 3)), torch.ones(3), atol=1e-5)
    assert torch.allclose(plain / plain[:1, :, :1, :1], x / x[:1, :, :1, :1], rtol=1e-4), "one factor per channel"


def test_every_batch_norm_is_replaced_at_any_depth() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()), nn.BatchNorm2d(4))
    made = list(without_means(network).modules())
    assert sum(isinstance(m, MeanlessBatchNorm2d) for m in made) == 2
    assert not any(isinstance(m, nn.BatchNorm2d) for m in made)


@pytest.mark.parametrize(("kind", "n_convolutions"), [("vgg", 16), ("resnet", 53)])
def test_the_networks_have_the_depth_of_their_names(kind: str, n_convolutions: int) -> None:
    network = build(kind=kind, seed=0, inputs=torch.zeros(1, 3, 32, 32), norm="batch", width=2)
    assert sum(isinstance(m, nn.Conv2d) for m in network.modules()) == n_convolutions


def test_an_mlp_has_as_many_hidden_layers_as_asked() -> None:
    network = build(kind="mlp", seed=0, inputs=torch.zeros(1, 1, 4, 4), depth=5, width=8)
    assert [m.out_features for m in network.modules() if isinstance(m, nn.Linear)] == [8] * 5 + [10]


class _Known(nn.Module):
    """Hands its inputs to an activation and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.activation, self.classifier = nn.ReLU(), nn.Linear(4, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.activation(x))


def test_rank_is_of_what_enters_the_last_activation_and_alignment_of_what_enters_the_classifier() -> None:
    signal = torch.eye(4).repeat(2, 1) * torch.tensor([1.0, -1.0])[:, None].repeat_interleave(4, 0)
    seen = observe(_Known(), signal, torch.zeros(8, dtype=torch.long))
    assert seen["rank"] == pytest.approx(4.0)
    assert seen["alignment"] == pytest.approx(0.0, abs=1e-6), "four unit vectors; the negative half is switched off"
    one = observe(_Known(), torch.rand(8, 1, generator=seeded(0)) * torch.ones(8, 4), torch.zeros(8, dtype=torch.long))
    assert one["rank"] == pytest.approx(1.0)
    assert one["alignment"] == pytest.approx(1.0)


def test_a_dead_signal_has_neither_rank_nor_alignment() -> None:
    seen = observe(_Known(), torch.zeros(8, 4), torch.zeros(8, dtype=torch.long))
    assert math.isnan(seen["rank"])
    assert math.isnan(seen["alignment"])


def test_a_training_learns_and_is_a_function_of_its_seed() -> None:
    settings = {**TRAINING, "n_train": 160, "n_epochs": 6, "network": {"kind": "mlp", "depth": 1, "width": 32}}
    first, again, other = (train(rate=0.1, seed=seed, **settings) for seed in (3, 3, 4))
    assert first == again
    assert first["loss"] != other["loss"]
    assert first["step"] == [0, 30, 60]
    assert first["accuracy"][-1] > 80 > first["accuracy"][0]


def test_pretraining_raises_the_rank_of_the_start() -> None:
    settings = {**TRAINING, "n_train": 128, "network": {"kind": "mlp", "depth": 8, "width": 32}}
    plain, raised = (train(rate=0.01, seed=0, pretraining=steps, **settings) for steps in (0, 50))
    assert raised["rank"][0] > 2 * plain["rank"][0]


def test_noise_replaces_the_images_and_keeps_their_labels() -> None:
    images, labels = rank_training._training_images("stripes", 64, False, 5)
    noise, same = rank_training._training_images("stripes", 64, True, 5)
    assert torch.equal(labels, same)
    assert float(noise.min()) >= float(images.min())
    assert float(noise.max()) <= float(images.max())
    assert float((noise.flatten() - noise.mean()).dot(images.flatten() - images.mean()).abs()) < 0.05 * float(
        images.std() * noise.std() * noise.numel()
    )


def test_a_training_that_breaks_off_counts_as_guessing_and_keeps_its_length() -> None:
    made = train(rate=1e30, seed=0, network={"kind": "mlp", "depth": 2, "width": 8}, **TRAINING)
    assert made["step"] == [0, 4, 8]
    assert made["accuracy"][-1] == 10.0
    assert made["loss"][-1] == pytest.approx(math.log(10.0))


def test_the_best_rate_is_the_one_that_learns() -> None:
    settings = {**TRAINING, "n_train": 160, "n_epochs": 4, "network": {"kind": "mlp", "depth": 1, "width": 32}}
    assert best_rate(rates=[1e-6, 0.1], seed=0, **settings) == 0.1
