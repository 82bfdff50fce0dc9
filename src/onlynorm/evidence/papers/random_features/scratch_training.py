"""Networks trained from scratch in many ways: ordinary, by norms alone, and by norms that follow the weights.

A small VGG with batch norms on Fashion-MNIST or CIFAR-10, averaged down to fewer pixels. In every way but the ordinary
one each convolution and the classifier is a norm-only layer, and the batch norms stay, as in random_features, section
5. All ways of a seed start with the same weights, or with the nearest that their features reach, and see the same
images in the same order, so that they can be compared seed by seed.

Theory: random_features:thm-3.1
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

import onlynorm as on
from onlynorm.data import Split, cifar10, fashion_mnist
from onlynorm.errors import TrainingError
from onlynorm.evidence import validation
from onlynorm.evidence.timing import warm_up_training
from onlynorm.evidence.validation import TRIAL_SEED
from onlynorm.models import vgg
from onlynorm.tuning import accuracy

DATA: dict[str, Callable[[], Split]] = {"fashion_mnist": fashion_mnist, "cifar10": cifar10}
"""Data sets by name."""
RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Learning rates that can be tried; plain steps on he_normal features move weights by 4 / inputs of the rate."""
FIRST_RATES = (0.03, 0.1, 0.3, 1.0)
"""Where every way begins; neighbours follow as long as the best rate lies at an end."""
N_CLASSES = 10


@dataclass(frozen=True)
class Way:
    """Which features the layers are made of, and whether gammas follow the weights; no features: ordinary layers."""

    features: str | None = None
    excess: float | None = None
    density: float | None = None
    follow_weights: bool = False


@dataclass(frozen=True)
class Training:
    """All that fixes a training but for the way, the rate and the seed: network, images, schedule."""

    data: str
    stages: Sequence[Sequence[int]]
    image_size: int
    n_train: int
    n_put_aside: int
    n_test: int
    epochs: int
    batch_size: int = 128
    momentum: float = 0.9
    warmup: float = 0.05


def train(
    *,
    way: Mapping[str, Any],
    training: Mapping[str, Any],
    rate: float,
    seed: int,
    is_trial: bool = False,
    step: Callable[[int, int, float], None] | None = None,
) -> dict[str, Any]:
    """Accuracy after a training, on test images or in a trial on images put aside, and the loss of every epoch.

    A training whose loss is no longer a number stops there and does as well as guessing.
    """
    chosen, plan = Way(**way), Training(**training)
    network = build(chosen, plan, seed=seed)
    schedule = on.Schedule(
        epochs=plan.epochs, batch_size=plan.batch_size, lr=rate, momentum=plan.momentum, warmup=plan.warmup,
        follow_weights=chosen.follow_weights, seed=seed,
    )  # fmt: skip
    warm_up_training()
    start = time.process_time()
    try:
        result = on.fit(network, lesson(plan, seed), schedule=schedule, step=step, accelerator="cpu")
    except TrainingError:
        found: dict[str, Any] = {"accuracy": 1.0 / N_CLASSES, "losses": [], "is_finite": False}
    else:
        losses = [row["loss"] for row in result.history]
        held = put_aside(plan) if is_trial else judged(plan)
        found = {"accuracy": accuracy(network, held), "losses": losses, "is_finite": True}
    return {**found, "n_trained": sum(p.numel() for p in network.parameters()), "seconds": time.process_time() - start}


def choose_rate(*, way: Mapping[str, Any], training: Mapping[str, Any]) -> dict[str, Any]:
    """The learning rate with the highest accuracy on images put aside, and all accuracies by their rates."""

    def attempt(rate: float) -> float:
        found: float = train(way=way, training=training, rate=rate, seed=TRIAL_SEED, is_trial=True)["accuracy"]
        return found

    tried = try_rates(attempt)
    return {"rate": best_rate(tried), "tried": [[rate, tried[rate]] for rate in sorted(tried)]}


def try_rates(attempt: Callable[[float], float]) -> dict[float, float]:
    """Accuracies by rate: of the first rates, and of neighbours until the best one has both of its own beside it."""
    tried = {rate: attempt(rate) for rate in FIRST_RATES}
    while (rate := _missing_neighbour(tried)) is not None:
        tried[rate] = attempt(rate)
    return tried


def best_rate(tried: Mapping[float, float]) -> float:
    """The rate that did best; the lower one of two that did equally well."""
    return max(tried, key=lambda rate: (tried[rate], -rate))


def _missing_neighbour(tried: Mapping[float, float]) -> float | None:
    place = RATES.index(best_rate(tried))
    return next((rate for rate in RATES[max(0, place - 1) : place + 2] if rate not in tried), None)


def build(way: Way, training: Training, *, seed: int) -> nn.Module:
    """The network as it starts in this way."""
    split = images(training.data, training.image_size)
    network = vgg(
        training.stages, in_channels=split.train_inputs.shape[1], image_size=training.image_size, n_classes=N_CLASSES,
        seed=seed,
    )  # fmt: skip
    if way.features is None:
        return network
    return on.norm_only(network, features=way.features, excess=way.excess, density=way.density, seed=seed)


def lesson(training: Training, seed: int) -> tuple[Tensor, Tensor]:
    """Training images of this seed, none of which is put aside, and their labels."""
    split = images(training.data, training.image_size)
    return validation.lesson(split, training.n_train, n_put_aside=training.n_put_aside, seed=seed)


def put_aside(training: Training) -> tuple[Tensor, Tensor]:
    """The training images by which rates are chosen, and their labels."""
    return validation.put_aside(images(training.data, training.image_size), training.n_put_aside)


def judged(training: Training) -> tuple[Tensor, Tensor]:
    """The test images by which networks are judged, and their labels."""
    split = images(training.data, training.image_size)
    return split.test_inputs[: training.n_test], split.test_labels[: training.n_test]


@functools.lru_cache(maxsize=2)
def images(data: str, size: int) -> Split:
    """The data set of this name, its images averaged over squares of pixels down to this size."""
    return DATA[data]().smaller(size)
