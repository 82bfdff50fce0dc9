"""Plain SGD: a loss for every step, and infinity where it diverges."""

from __future__ import annotations

import math

import pytest
import torch

from onlynorm.data import Split
from onlynorm.evidence.training import plain_sgd
from onlynorm.evidence.validation import first_test_images, random_subset, validation_subset
from onlynorm.models import mlp
from onlynorm.seeds import seeded


def data(n: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 4, generator=seeded(0)), torch.arange(n) % 3


def test_there_is_a_loss_for_every_step_and_the_rate_is_constant() -> None:
    network = mlp((4, 3), seed=0)
    before = [p.detach().clone() for p in network.parameters()]
    inputs, labels = data(8)
    losses = plain_sgd(network, (inputs, labels), batch_size=8, lr=0.5, seed=0)
    assert len(losses) == 1
    again = mlp((4, 3), seed=0)
    torch.nn.functional.cross_entropy(again(inputs), labels).backward()
    for p, old, new in zip(network.parameters(), before, again.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), old - 0.5 * new.grad)  # type: ignore[operator]
    assert len(plain_sgd(network, data(20), batch_size=8, lr=0.1, seed=0)) == 3


def test_a_training_that_diverges_ends_with_infinity() -> None:
    losses = plain_sgd(mlp((4, 8, 8, 3), seed=0), data(200), batch_size=4, lr=1e30, seed=0)
    assert losses[-1] == math.inf
    assert len(losses) <= 50


@pytest.mark.parametrize("seed", [0, 7])
def first_test_imagess_are_chosen_by_their_seed(seed: int) -> None:
    inputs, labels = data()
    split = Split("toy", inputs, labels, inputs[:5], labels[:5])
    images, classes = random_subset(split, 6, seed=seed)
    order = torch.randperm(20, generator=seeded(seed))[:6]
    assert torch.equal(images, inputs[order])
    assert torch.equal(classes, labels[order])
    assert torch.equal(validation_subset(split, 6, split_seed=seed)[0], images)
    assert torch.equal(first_test_images(split, 3)[0], inputs[:3])
