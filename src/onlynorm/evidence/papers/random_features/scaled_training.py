"""Networks whose ID cond features have a spectrum, trained from scratch on real images.

A layer's weight is s * gamma with frozen singular values s and trained gamma, so a step of SGD on gamma moves each
weight by s^2 times the ordinary step. The s have a chosen condition number and mean square one: a weight moves as far
as in the ordinary network on average. They follow a semi-circle law, which hardly changes between large condition
numbers, or are geometric, evenly spaced in their logarithms, so that every one of them changes. Every network starts
with the weights of the ordinary one, so that nothing but conditioning differs. There is no weight decay: on gamma it
would shrink every weight at the same pace, while a small s slows its learning down, and so prune it.

Images are averaged over 2 x 2 pixels. SGD has momentum 0.9, and a learning rate that rises for a twentieth of the steps
and falls to zero on a cosine. Learning rates are chosen on validation images, with a seed that is not judged.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

import onlynorm as on
from onlynorm.data import Split, cifar10, fashion_mnist
from onlynorm.errors import TrainingError, UnknownNameError
from onlynorm.evidence.validation import training_subset, validation_subset
from onlynorm.frozen import Choice, NormOnlyLayer, wrap
from onlynorm.models import cifar_resnet, mlp
from onlynorm.tuning import accuracy

SEMICIRCLE, GEOMETRIC = "semi-circle", "geometric"
LAWS = (SEMICIRCLE, GEOMETRIC)
"""Laws of the singular values."""
N_VALIDATION = 2000
"""Training images that only choose learning rates."""
_N_CLASSES = 10


@dataclass(frozen=True)
class Subject:
    """A data set and the network that learns it, drawn from a seed."""

    load: Callable[[], Split]
    network: Callable[[int], nn.Module]


SUBJECTS = {
    "cifar10": Subject(cifar10, lambda seed: cifar_resnet(8, width=8, seed=seed)),
    "fashion_mnist": Subject(
        fashion_mnist, lambda seed: nn.Sequential(nn.Flatten(), *mlp((14 * 14, 64, 64, _N_CLASSES), seed=seed))
    ),
}
"""Data sets by name: a ResNet-8 with batch norms, and a fully connected network without norms."""


# ------------------------------------------------------------------------------- training


def build(
    data: str, *, condition: float | None, law: str = SEMICIRCLE, seed: int, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """The network for this data with features of this condition number and law; None is the ordinary network."""
    network = _subject(data).network(seed).to(dtype)
    if condition is None:
        return network
    for name, plain in _layers(network).items():
        assert isinstance(plain, nn.Linear | nn.Conv2d)
        s = spectrum(plain.weight.numel(), condition=condition, law=law, seed=seed, layer=name)
        parent, _, last = name.rpartition(".")
        setattr(network.get_submodule(parent), last, wrap(plain, Choice(spectrum=s, seed=seed, layer=name)))
    return network


def spectrum(n: int, *, condition: float, law: str, seed: int = 0, layer: str = "") -> Float[Tensor, " n"]:
    """n singular values of this law with this condition number and mean square one, in an order from (seed, layer).

    Both laws put them in the same order: the weight that is the slowest under one is so under the other.
    """
    if law not in LAWS:
        raise UnknownNameError("law of a spectrum", law, LAWS)
    if law == SEMICIRCLE:
        return on.semicircle_spectrum(n, condition=condition, seed=seed, layer=layer)
    order = on.semicircle_spectrum(n, condition=2.0, seed=seed, layer=layer).argsort().argsort()
    values = torch.logspace(0.0, math.log10(condition), n, dtype=torch.float64)
    return (values / values.square().mean().sqrt())[order]


def train(
    *, data: str, condition: float | None, law: str = SEMICIRCLE, lr: float, seed: int, n_train: int, n_epochs: int,
    batch_size: int, is_trial: bool = False,
) -> dict[str, float]:  # fmt: skip
    """Accuracy on training images and on others, and the mean loss of the last epoch.

    The others are the test images, in a trial the validation images. A training that diverges counts as guessing.
    """
    network = build(data, condition=condition, law=law, seed=seed)
    chosen = training_images(data, n_train=n_train, seed=seed)
    schedule = on.Schedule(epochs=n_epochs, batch_size=batch_size, lr=lr, seed=seed)
    try:
        trained = on.fit(network, chosen, schedule=schedule, accelerator="cpu")
    except TrainingError:
        guess = 1.0 / _N_CLASSES
        return {"train_accuracy": guess, "accuracy": guess, "loss": math.log(_N_CLASSES)}
    seen = chosen[0][:N_VALIDATION], chosen[1][:N_VALIDATION]
    split = images_of(data)
    others = validation_images(data) if is_trial else (split.test_inputs, split.test_labels)
    return {
        "train_accuracy": accuracy(network, seen),
        "accuracy": accuracy(network, others),
        "loss": trained.history[-1]["loss"],
    }


def training_images(data: str, *, n_train: int, seed: int) -> tuple[Tensor, Tensor]:
    """Training images chosen by the seed outside the validation images, and their labels."""
    return training_subset(images_of(data), n_train, n_validation=N_VALIDATION, seed=seed)


def validation_images(data: str) -> tuple[Tensor, Tensor]:
    """The images that choose learning rates, and their labels."""
    return validation_subset(images_of(data), N_VALIDATION)


@functools.lru_cache(maxsize=2)
def images_of(data: str) -> Split:
    """The data set with images averaged over 2 x 2 pixels."""
    split = _subject(data).load()
    return split.smaller(split.train_inputs.shape[-1] // 2)


def _subject(data: str) -> Subject:
    if data not in SUBJECTS:
        raise UnknownNameError("data", data, SUBJECTS)
    return SUBJECTS[data]


# ------------------------------------------------------------------------------- what a spectrum does


def step_gap(data: str, *, condition: float, law: str = SEMICIRCLE, seed: int, n_images: int = 64) -> float:
    """How far weights move in one step of SGD beside s^2 times the ordinary step, as a share of the longest move."""
    images, labels = training_images(data, n_train=n_images, seed=seed)
    ordinary, scaled = (
        _moves(build(data, condition=c, law=law, seed=seed, dtype=torch.float64), images.double(), labels)
        for c in (None, condition)
    )
    worst = 0.0
    for name, move in ordinary.items():
        s = spectrum(move.numel(), condition=condition, law=law, seed=seed, layer=name)
        expected = s.reshape(move.shape).square() * move
        worst = max(worst, float((scaled[name] - expected).abs().max() / expected.abs().max()))
    return worst


def squared_spectrum(data: str, *, condition: float, law: str = SEMICIRCLE) -> Float[Tensor, " weights"]:
    """s^2 of every weight of the network, ascending in each layer: how far a step moves it beside the ordinary one."""
    sizes = [layer.weight.numel() for layer in _layers(_subject(data).network(0)).values()]
    return torch.cat([spectrum(n, condition=condition, law=law).square().sort().values for n in sizes])


def spectrum_change(data: str, first: float, *, second: float, law: str = SEMICIRCLE) -> float:
    """The mean over all weights by which s^2 differs between two condition numbers."""
    spectra = [squared_spectrum(data, condition=condition, law=law) for condition in (first, second)]
    return float((spectra[0] - spectra[1]).abs().mean())


def _layers(network: nn.Module) -> dict[str, nn.Linear | nn.Conv2d | NormOnlyLayer]:
    kinds = (nn.Linear, nn.Conv2d, NormOnlyLayer)
    return {name: module for name, module in network.named_modules() if isinstance(module, kinds)}


def _moves(network: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """What one step of plain SGD adds to every weight."""
    layers = _layers(network)
    before = {name: layer.weight.detach().clone() for name, layer in layers.items()}
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    functional.cross_entropy(network(images), labels).backward()
    optimizer.step()
    return {name: layer.weight.detach() - before[name] for name, layer in layers.items()}
