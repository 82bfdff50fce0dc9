"""Networks trained from scratch by many methods: ordinary, by norms alone, and by norms that follow the weights.

A small VGG with batch norms on Fashion-MNIST or CIFAR-10, averaged down to fewer pixels. In every method but the
ordinary one each convolution and the classifier is a norm-only layer, and the batch norms stay, as in random_features,
section 5. All methods of a seed start with the same weights, or with the nearest that their features reach, and see the
same images in the same order, so that they can be compared seed by seed.

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
from onlynorm.evidence.harness import best_lr, try_lrs
from onlynorm.evidence.timing import warm_up_training
from onlynorm.evidence.validation import TRIAL_SEED, training_subset, validation_subset
from onlynorm.models import vgg
from onlynorm.tuning import accuracy

DATA: dict[str, Callable[[], Split]] = {"fashion_mnist": fashion_mnist, "cifar10": cifar10}
"""Data sets by name."""
LRS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Learning rates that can be tried; plain steps on he_normal features move weights by 4 / inputs of it."""
FIRST_LRS = (0.03, 0.1, 0.3, 1.0)
"""Where every method begins; neighbours follow as long as the best learning rate lies at an end."""
N_CLASSES = 10


@dataclass(frozen=True)
class Method:
    """Which features the layers are made of, and whether gammas follow the weights; no features: ordinary layers."""

    features: str | None = None
    excess: float | None = None
    density: float | None = None
    follow_weights: bool = False


@dataclass(frozen=True)
class Training:
    """All that fixes a training but for the method, the learning rate and the seed: network, images, schedule."""

    data: str
    stages: Sequence[Sequence[int]]
    image_size: int
    n_train: int
    n_validation: int
    n_test: int
    epochs: int
    batch_size: int = 128
    momentum: float = 0.9
    warmup: float = 0.05


def train(
    *,
    method: Mapping[str, Any],
    training: Mapping[str, Any],
    lr: float,
    seed: int,
    is_trial: bool = False,
    step: Callable[[int, int, float], None] | None = None,
) -> dict[str, Any]:
    """Accuracy after a training, on test images or in a trial on validation images, and the loss of every epoch.

    A training that diverges stops there and does as well as guessing.
    """
    chosen, plan = Method(**method), Training(**training)
    network = build(chosen, plan, seed=seed)
    schedule = on.Schedule(
        epochs=plan.epochs, batch_size=plan.batch_size, lr=lr, momentum=plan.momentum, warmup=plan.warmup,
        follow_weights=chosen.follow_weights, seed=seed,
    )  # fmt: skip
    warm_up_training()
    start = time.process_time()
    try:
        result = on.fit(network, training_images(plan, seed), schedule=schedule, step=step, accelerator="cpu")
    except TrainingError:
        found: dict[str, Any] = {"accuracy": 1.0 / N_CLASSES, "losses": [], "is_finite": False}
    else:
        losses = [row["loss"] for row in result.history]
        held = validation_images(plan) if is_trial else test_images(plan)
        found = {"accuracy": accuracy(network, held), "losses": losses, "is_finite": True}
    return {**found, "n_trained": sum(p.numel() for p in network.parameters()), "seconds": time.process_time() - start}


def choose_lr(*, method: Mapping[str, Any], training: Mapping[str, Any]) -> dict[str, Any]:
    """The learning rate with the highest accuracy on validation images, and all accuracies by their learning rates."""

    def attempt(lr: float) -> float:
        found: float = train(method=method, training=training, lr=lr, seed=TRIAL_SEED, is_trial=True)["accuracy"]
        return found

    tried = try_lrs(LRS, attempt, start=FIRST_LRS)
    return {"lr": best_lr(tried), "tried": [[lr, tried[lr]] for lr in sorted(tried)]}


def build(method: Method, training: Training, *, seed: int) -> nn.Module:
    """The network as this method starts it."""
    split = images(training.data, training.image_size)
    network = vgg(
        training.stages, in_channels=split.train_inputs.shape[1], image_size=training.image_size, n_classes=N_CLASSES,
        seed=seed,
    )  # fmt: skip
    if method.features is None:
        return network
    return on.norm_only(network, features=method.features, excess=method.excess, density=method.density, seed=seed)


def training_images(training: Training, seed: int) -> tuple[Tensor, Tensor]:
    """Training images of this seed, and their labels."""
    split = images(training.data, training.image_size)
    return training_subset(split, training.n_train, n_validation=training.n_validation, seed=seed)


def validation_images(training: Training) -> tuple[Tensor, Tensor]:
    """The images on which learning rates are chosen, and their labels."""
    return validation_subset(images(training.data, training.image_size), training.n_validation)


def test_images(training: Training) -> tuple[Tensor, Tensor]:
    """The test images, and their labels."""
    split = images(training.data, training.image_size)
    return split.test_inputs[: training.n_test], split.test_labels[: training.n_test]


@functools.lru_cache(maxsize=2)
def images(data: str, size: int) -> Split:
    """The data set of this name, its images averaged over squares of pixels down to this size."""
    return DATA[data]().smaller(size)
