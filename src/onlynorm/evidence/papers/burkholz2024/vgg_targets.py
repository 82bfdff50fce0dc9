"""Small VGG-like networks trained briefly on real images, and their accuracy after they are rebuilt by norms.

Theory: burkholz2024:thm-2.3, burkholz2024:thm-2.4
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

import onlynorm as on
from onlynorm.data import Split, cifar10, fashion_mnist
from onlynorm.models import vgg

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "ReLU": nn.ReLU,
    "LeakyReLU": nn.LeakyReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
}
_DATA: dict[str, Callable[[], Split]] = {"CIFAR-10": cifar10, "Fashion-MNIST": fashion_mnist}
DEPTHS = (2, 2, 4, 4, 5)
"""Convolutions per stage, 17 in all; images are halved between the stages."""
_BATCH = 25
_WINDOW = 1e-9  # of the activation: wider adds curvature, narrower loses digits of the sigmoid to cancellation


@dataclass(frozen=True)
class VggTraining:
    """The settings of a target; equal settings give equal networks."""

    data: str
    width: int
    n_train: int
    n_epochs: int
    rate: float
    seed: int = 0


def rebuild(
    *, activation: str, distribution: str, seed: int, excess: float, n_exact: int, n_test: int, training: dict[str, Any]
) -> dict[str, float]:
    """Accuracies of a trained target and of its reconstruction in percent, and the errors of the reconstruction.

    The rebuilt network is compared with the target on `n_exact` test images in float64. On all `n_test` images the
    collapsed network is used, because a forward pass of the rebuilt one takes about a hundred times as long.
    """
    chosen = VggTraining(**training)
    split, target = _data(chosen.data), trained(activation, chosen)
    images, labels = split.test_inputs[:n_test].double(), split.test_labels[:n_test]
    result = on.reconstruct(
        target, split.train_inputs[:64].double(),
        on.Wide(features=distribution, excess=excess, activation=ACTIVATIONS[activation]()), seed=seed,
        ranges=on.Ranges(window=_WINDOW),
    )  # fmt: skip
    check = on.verify(target, result.network, images[:n_exact], batch_size=10)
    return {
        "target": accuracy(target, images, labels),
        "rebuilt": accuracy(on.collapse(result.network), images, labels),
        "agreement through the blocks": 100 * check.agreement,
        "relative error": check.relative_error,
        "outside": check.outside,
        "residual": max(layer.residual for layer in result.layers),
        "seconds": sum(layer.seconds for layer in result.layers),
    }


@functools.lru_cache(maxsize=1)
def trained(activation: str, training: VggTraining) -> nn.Module:
    """The target in float64: 17 convolutions with batch norms and one linear layer, trained by SGD.

    The learning rate follows a one-cycle schedule. The last network is cached, because all distributions and seeds of
    an activation rebuild the same one.
    """
    split = _data(training.data)
    images, labels = split.train_inputs[: training.n_train], split.train_labels[: training.n_train]
    network = vgg(
        [[training.width] * depth for depth in DEPTHS], activation=ACTIVATIONS[activation], seed=training.seed,
        in_channels=images.shape[1], image_size=images.shape[2],
    )  # fmt: skip
    optimizer = torch.optim.SGD(network.parameters(), lr=training.rate, momentum=0.9, weight_decay=5e-4)
    n_steps = training.n_epochs * -(-len(images) // _BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, training.rate, total_steps=n_steps, pct_start=0.2)
    generator = torch.Generator().manual_seed(training.seed)
    for _ in range(training.n_epochs):
        for place in torch.randperm(len(images), generator=generator).split(_BATCH):
            loss = functional.cross_entropy(network(images[place]), labels[place])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return network.double().eval()


@torch.no_grad()
def accuracy(network: nn.Module, images: Float[Tensor, "n ..."], labels: Int[Tensor, " n"]) -> float:
    """The accuracy of the network in percent."""
    guesses = torch.cat([network(part).argmax(1) for part in images.split(100)])
    return 100 * float((guesses == labels).double().mean())


@functools.lru_cache(maxsize=1)
def _data(name: str) -> Split:
    return _DATA[name]()
