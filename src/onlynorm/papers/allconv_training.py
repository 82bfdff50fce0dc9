"""All-convolutional residual networks trained on CIFAR-10, as the paper has them and changed.

Theory: hardt_ma2017:thm-2.2
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torch import Tensor

import onlynorm as on
from onlynorm.data import Split, cifar10
from onlynorm.errors import TrainingError
from onlynorm.identity import AllConvolutional, all_convolutional
from onlynorm.tuning import accuracy

NEAR_IDENTITY, STANDARD, SLOW = "near identity", "standard init", "standard init, rate / 100"
BATCH, HEAD = "batch norm", "trained head"


@dataclass(frozen=True)
class Variant:
    """What differs from the paper's network, and the share of its learning rate."""

    init: str = "near_identity"
    norm: str | None = None
    head: str = "fixed"
    rate: float = 1.0


VARIANTS = {
    NEAR_IDENTITY: Variant(),
    STANDARD: Variant(init="standard"),
    SLOW: Variant(init="standard", rate=0.01),
    BATCH: Variant(init="standard", norm="batch"),
    HEAD: Variant(head="trained"),
}
"""By name; behind batch norms the scale of a start is lost, so they start as usual."""
DROPS = (0.5, 5 / 6)
"""The paper lowers the rate tenfold at 30,000 and 50,000 steps; we take 60,000 as the whole."""
MOMENTUM, WEIGHT_DECAY = 0.9, 1e-4
_GUESSING = 90.0  # per cent of errors


@dataclass(frozen=True)
class Training:
    """What fixes a training but for the variant and the seed."""

    depth: int
    width: int
    image_size: int
    n_train: int
    n_test: int
    n_epochs: int
    batch_size: int
    rate: float
    n_looks: int
    n_look: int


def train(*, variant: str, seed: int, training: dict[str, Any]) -> dict[str, Any]:
    """Errors in per cent along a training and at its end, on `n_test` test images and as many of the training.

    `n_looks` times, evenly over all steps, errors are taken on `n_look` images each. A training whose loss is no longer
    a number stops there; its error is that of guessing.
    """
    chosen, changed = Training(**training), VARIANTS[variant]
    split = images(chosen.image_size)
    network = all_convolutional(
        chosen.depth, width=chosen.width, init=changed.init, norm=changed.norm, head=changed.head, seed=seed
    )
    seen = split.train_inputs[: chosen.n_train], split.train_labels[: chosen.n_train]
    held = split.test_inputs[: chosen.n_test], split.test_labels[: chosen.n_test]
    parts = {"train": seen, "test": held}
    looks: list[dict[str, float]] = []

    def look(step: int, n_steps: int, loss: float) -> None:
        if step * chosen.n_looks // n_steps > (step - 1) * chosen.n_looks // n_steps:
            errors = {name: _error(network, part, chosen.n_look) for name, part in parts.items()}
            looks.append({"step": step, "loss": loss, **errors})

    schedule = on.Schedule(
        epochs=chosen.n_epochs, batch_size=chosen.batch_size, lr=changed.rate * chosen.rate, momentum=MOMENTUM,
        warmup=0.0, weight_decay=WEIGHT_DECAY, drops=DROPS, augmentation="crop-flip", seed=seed,
    )  # fmt: skip
    try:
        result = on.fit(network, seen, schedule=schedule, step=look, accelerator="cpu")
    except TrainingError:
        return {**dict.fromkeys(parts, _GUESSING), "looks": looks, "is_finite": False}
    errors = {name: _error(network, part, chosen.n_test) for name, part in parts.items()}
    return {**errors, "looks": looks, "is_finite": True, "n_steps": result.n_steps}


@functools.lru_cache(maxsize=1)
def images(size: int) -> Split:
    """CIFAR-10, its images averaged over squares of pixels down to this size."""
    return cifar10().smaller(size)


def _error(network: AllConvolutional, data: tuple[Tensor, Tensor], n_images: int) -> float:
    """Per cent of the first images that the network puts into a wrong class."""
    inputs, labels = data
    return 100.0 * (1.0 - accuracy(network, (inputs[:n_images], labels[:n_images])))
