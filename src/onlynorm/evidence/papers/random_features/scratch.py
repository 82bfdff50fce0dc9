"""Networks trained from scratch: ordinary networks, norms only, and norms only with gammas that follow the weights.

A small VGG with batch norms is trained on Fashion-MNIST or CIFAR-10 with averaged pixels. In all methods except the
ordinary one, convolutions and the classifier are norm-only layers, and the batch norms stay, as in section 5 of
random_features. With equal seeds, all methods start with the same weights, or the nearest that their features can
represent, and use the same images in the same order, so that they can be compared for each seed. The learning rate of a
method has the best accuracy on validation images: all methods start with the same four learning rates, and the grid is
extended while the best one is at its end.

The paper trains a VGG of width 100 with a hundred features more than weights per layer. Its relative excess, 1/900,
determines the condition number of the features, so `section_5` uses the same for its smaller network. The fourth method
is ours: the same features, with gammas that follow the weights. `onlynorm bench scratch` runs the same experiment with
other methods and sizes.

Theory: random_features:thm-3.1
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

import onlynorm as on
from onlynorm.data import Split, cifar10, fashion_mnist
from onlynorm.display import Curve, Panel, Table
from onlynorm.errors import TrainingError
from onlynorm.evidence.harness import Sizes, setting
from onlynorm.evidence.papers.reproduce import Outcome, Run
from onlynorm.evidence.sweep import Sweep, TrainingRun
from onlynorm.evidence.timing import warm_up_training
from onlynorm.evidence.validation import training_subset, validation_subset
from onlynorm.models import vgg
from onlynorm.tuning import accuracy

DATA: dict[str, Callable[[], Split]] = {"fashion_mnist": fashion_mnist, "cifar10": cifar10}
"""Data sets by name."""
LRS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""The grid of learning rates; steps on he_normal features change weights by a factor of about 4 / inputs."""
FIRST_LRS = (0.03, 0.1, 0.3, 1.0)
"""The first learning rates of every method; the grid is extended while the best one is at its end."""
N_CLASSES = 10
_S = TypeVar("_S", bound=Sizes)


@dataclass(frozen=True)
class Method:
    """The features of the layers, None for ordinary layers, and whether gammas follow the weights."""

    features: str | None = None
    excess: float | None = None
    density: float | None = None
    follow_weights: bool = False


@dataclass(frozen=True)
class ScratchTraining:
    """The settings of a training except method, learning rate and seed: network, images, schedule."""

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


class ScratchCase(NamedTuple):
    """A data set and the method of training."""

    data: str
    method: str


@dataclass(frozen=True)
class ScratchOutcome:
    """A trained network; `losses` are the mean losses of the epochs."""

    accuracy: float
    losses: tuple[float, ...]
    is_finite: bool
    n_trained: int
    seconds: float


def train(
    method: Method, training: ScratchTraining, *, lr: float, seed: int, is_trial: bool = False,
    on_step: Callable[[int, int, float], None] | None = None,
) -> ScratchOutcome:  # fmt: skip
    """A trained network with its accuracy on test images, or in a trial on validation images; chance if it diverged."""
    network = build(method, training, seed=seed)
    n_trained = sum(p.numel() for p in network.parameters())
    schedule = on.Schedule(
        epochs=training.epochs, batch_size=training.batch_size, lr=lr, momentum=training.momentum,
        warmup=training.warmup, follow_weights=method.follow_weights, seed=seed,
    )  # fmt: skip
    warm_up_training()
    start = time.process_time()
    try:
        result = on.fit(network, training_images(training, seed), schedule=schedule, on_step=on_step, accelerator="cpu")
    except TrainingError:
        return ScratchOutcome(1.0 / N_CLASSES, (), False, n_trained, time.process_time() - start)
    found = accuracy(network, validation_images(training) if is_trial else test_images(training))
    losses = tuple(row["loss"] for row in result.history)
    return ScratchOutcome(found, losses, True, n_trained, time.process_time() - start)


def make_sweep(
    name: str, about: str, sizes: type[_S], *, methods: Mapping[str, Method],
    training: Callable[[ScratchCase, _S], ScratchTraining], **options: Any,
) -> Sweep[_S, ScratchCase]:  # fmt: skip
    """The experiment: every method with the training of a case, at its best learning rate."""

    def made_of(case: ScratchCase, sizes: _S) -> dict[str, Any]:
        one = training(case, sizes)
        how = asdict(methods[case.method])
        return {"training": asdict(one), "how": how, "images": images(one.data, one.image_size)}

    sweep = Sweep(name, about, sizes, lrs=LRS, start=FIRST_LRS, made_of=made_of, **options)

    @sweep.trial
    def validation_accuracy(case: ScratchCase, run: TrainingRun, sizes: _S) -> float:
        found = train(methods[case.method], training(case, sizes), lr=run.lr, seed=run.seed, is_trial=True)
        return found.accuracy

    @sweep.measure
    def train_case(case: ScratchCase, run: TrainingRun, sizes: _S) -> ScratchOutcome:
        return train(
            methods[case.method], training(case, sizes), lr=run.lr, seed=run.seed,
            on_step=lambda now, n_steps, _: run.status(f"step {now} of {n_steps}"),
        )  # fmt: skip

    return sweep


def build(method: Method, training: ScratchTraining, *, seed: int) -> nn.Module:
    """The initial network of this method."""
    split = images(training.data, training.image_size)
    network = vgg(
        training.stages, in_channels=split.train_inputs.shape[1], image_size=training.image_size, n_classes=N_CLASSES,
        seed=seed,
    )  # fmt: skip
    if method.features is None:
        return network
    return on.to_norm_only(network, features=method.features, excess=method.excess, density=method.density, seed=seed)


def training_images(training: ScratchTraining, seed: int) -> tuple[Tensor, Tensor]:
    """Training images of this seed, and their labels."""
    split = images(training.data, training.image_size)
    return training_subset(split, training.n_train, n_validation=training.n_validation, seed=seed)


def validation_images(training: ScratchTraining) -> tuple[Tensor, Tensor]:
    """The validation images for the selection of learning rates, and their labels."""
    return validation_subset(images(training.data, training.image_size), training.n_validation)


def test_images(training: ScratchTraining) -> tuple[Tensor, Tensor]:
    """The test images, and their labels."""
    split = images(training.data, training.image_size)
    return split.test_inputs[: training.n_test], split.test_labels[: training.n_test]


@functools.lru_cache(maxsize=2)
def images(data: str, size: int) -> Split:
    """The data set of this name with images averaged over squares of pixels to this size."""
    return DATA[data]().smaller(size)


# ------------------------------------------------------------------------------- section 5

EXCESS = 1.0 + 100 / 90_000
LONGER = 500 / 300
"""Epochs of the paper's longer training per epoch of its shorter one."""
WARMUP = 0.1
"""Warmup as a fraction of the steps; the paper does not state it."""
ORDINARY, PLAIN, WARMED, FOLLOWED = (
    "ordinary",
    "he_normal",
    "he_normal, longer with warmup",
    "he_normal, follow_weights",
)
METHODS = {
    ORDINARY: Method(), PLAIN: Method("he_normal", EXCESS), WARMED: Method("he_normal", EXCESS),
    FOLLOWED: Method("he_normal", EXCESS, follow_weights=True),
}  # fmt: skip
STATED = {ORDINARY: "in the order of 94", PLAIN: "86.64 ± 0.08", WARMED: "90.08 ± 0.03", FOLLOWED: "-"}
"""Accuracies in the paper, in percent."""


@dataclass(frozen=True)
class SectionSizes(Sizes):
    """The number of networks per method."""

    seeds: int = setting(3, is_key=False)


def section_5(run: Run) -> Outcome:
    """Test accuracies after training from scratch, each method with its best learning rate.

    Theory: random_features:thm-2.2, random_features:thm-3.1
    """
    cases = {name: ScratchCase("cifar10", name) for name in METHODS}
    trainings = {name: training_of(name, run.sizes) for name in METHODS}
    sweep = make_sweep(
        "section 5", "Section 5 of random_features.", SectionSizes, methods=METHODS,
        training=lambda case, _: trainings[case.method], cases=lambda _: list(cases.values()), columns={},
    )  # fmt: skip
    found = sweep.measured(
        SectionSizes(seeds=len(run.seeds)), run.session(len(METHODS) * (len(FIRST_LRS) + len(run.seeds)))
    )
    accuracies = {name: found.spread(case) for name, case in cases.items()}
    means = {name: 100.0 * spread.mean for name, spread in accuracies.items()}
    rows: list[list[float | str]] = []
    for name, training in trainings.items():
        half = 100.0 * accuracies[name].half
        lr, interval = found.lr(cases[name]), "-" if math.isnan(half) else half
        rows.append([name, training.epochs, training.warmup, lr, means[name], interval, STATED[name]])
    columns = ["method", "epochs", "warmup", "lr", "accuracy %", "± (95 %)", "paper %"]
    return Outcome(
        values={
            **{f"accuracy, {name}": mean for name, mean in means.items()},
            "ordinary over he_normal, points": means[ORDINARY] - means[PLAIN],
            "longer with warmup over he_normal, points": means[WARMED] - means[PLAIN],
            "ordinary over longer with warmup, points": means[ORDINARY] - means[WARMED],
            "ordinary over follow_weights, points": means[ORDINARY] - means[FOLLOWED],
        },
        curves=[_curve(name, list(found.of(case)["losses"])) for name, case in cases.items()],
        panels=[Panel(title="training loss", x_label="epoch", y_label="cross entropy", y_log=True)],
        table=Table(columns, rows),
    )


def training_of(name: str, sizes: Mapping[str, Any]) -> ScratchTraining:
    """The training of this method at the sizes of the artifact."""
    is_longer = name == WARMED
    given = {key: value for key, value in sizes.items() if key not in ("epochs", "n_seeds")}
    epochs = round(sizes["epochs"] * (LONGER if is_longer else 1.0))
    return ScratchTraining("cifar10", epochs=epochs, warmup=WARMUP if is_longer else 0.0, **given)


def _curve(name: str, runs: Sequence[Sequence[float]]) -> Curve:
    losses = [statistics.fmean(epoch) for epoch in zip(*runs, strict=False)]
    return Curve(name, range(1, len(losses) + 1), losses)
