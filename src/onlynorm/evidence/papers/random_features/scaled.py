"""Accuracy of networks trained from scratch against the condition number of their features, and table 1.

A layer's weight is s * gamma with frozen singular values s and trained gamma, so an SGD step on gamma changes each
weight by s^2 times the ordinary step. The s have a given condition number and mean square one, so that on average steps
are as large as in the ordinary network. They follow a semi-circle law, which hardly changes between large condition
numbers, or a geometric sequence, in which every value changes. All networks start with the weights of the ordinary
network, so that only the conditioning differs. There is no weight decay: it would shrink all weights equally fast,
while weights with a small s learn slowly, and so prune them.

Images are averaged over 2 x 2 pixels. SGD uses momentum 0.9, linear warmup for a twentieth of the steps, and a cosine
schedule. Learning rates are selected on validation images, with a separate seed.

Table 1 of random_features trains a ResNet-50 on ImageNet; we train a ResNet-8 at the same condition numbers. The paper
mentions no tuning, so all condition numbers use the learning rate that is best for the ordinary network. `onlynorm
bench scaled` runs the same experiment on its own grid.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

import onlynorm as on
from onlynorm.data import Split, cifar10, fashion_mnist
from onlynorm.display import Curve, Panel, Table
from onlynorm.errors import TrainingError, UnknownNameError
from onlynorm.evidence.harness import Sizes, Spread, setting
from onlynorm.evidence.papers.reproduce import Outcome, Run
from onlynorm.evidence.sweep import Sweep, TrainingRun
from onlynorm.evidence.validation import TRIAL_SEED, training_subset, validation_subset
from onlynorm.frozen import FrozenOptions, NormOnlyLayer, wrap
from onlynorm.models import cifar_resnet, mlp
from onlynorm.tuning import accuracy

SEMICIRCLE, GEOMETRIC = "semi-circle", "geometric"
LAWS = (SEMICIRCLE, GEOMETRIC)
"""Laws of the singular values."""
N_VALIDATION = 2000
"""Number of validation images for the selection of learning rates."""
_N_CLASSES = 10
ORDINARY = "ordinary network"
Accuracies: TypeAlias = Mapping[float | None, Sequence[float]]
"""Accuracies in percent of every seed, by condition number; None is the ordinary network."""
PAPER = {1.0: (81.89, 76.89), 5413.0: (79.06, 75.84), 10123.0: (79.1, 75.6), 1541601.0: (76.28, 73.14)}
"""Condition numbers of table 1, with training and test accuracies in percent."""
_PANEL = Panel(title="ID cond with a spectrum", x_label="condition number", y_label="accuracy, %", x_log=True)


@dataclass(frozen=True)
class ScaledTask:
    """A data set and its network, which is drawn from a seed."""

    load: Callable[[], Split]
    network: Callable[[int], nn.Module]


TASKS = {
    "cifar10": ScaledTask(cifar10, lambda seed: cifar_resnet(8, width=8, seed=seed)),
    "fashion_mnist": ScaledTask(
        fashion_mnist, lambda seed: nn.Sequential(nn.Flatten(), *mlp((14 * 14, 64, 64, _N_CLASSES), seed=seed))
    ),
}
"""Data sets by name: a ResNet-8 with batch norms, and a fully connected network without norms."""


# ------------------------------------------------------------------------------- training


def build(
    data: str, *, condition: float | None, law: str = SEMICIRCLE, seed: int, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """The network for this data with features of this condition number and law; None is the ordinary network."""
    network = _task(data).network(seed).to(dtype)
    if condition is None:
        return network
    for name, plain in _layers(network).items():
        assert isinstance(plain, nn.Linear | nn.Conv2d)
        s = spectrum(plain.weight.numel(), condition=condition, law=law, seed=seed, layer=name)
        parent, _, last = name.rpartition(".")
        setattr(network.get_submodule(parent), last, wrap(plain, FrozenOptions(spectrum=s), seed=seed, layer=name))
    return network


def spectrum(n: int, *, condition: float, law: str, seed: int = 0, layer: str = "") -> Float[Tensor, " n"]:
    """n singular values of this law with this condition number and mean square one, in an order from (seed, layer).

    Both laws have the same order: the same weight is the slowest under both.
    """
    if law not in LAWS:
        raise UnknownNameError("law of a spectrum", law, LAWS)
    if law == SEMICIRCLE:
        return on.features.semicircle_spectrum(n, condition=condition, seed=seed, layer=layer)
    order = on.features.semicircle_spectrum(n, condition=2.0, seed=seed, layer=layer).argsort().argsort()
    values = torch.logspace(0.0, math.log10(condition), n, dtype=torch.float64)
    return (values / values.square().mean().sqrt())[order]


@dataclass(frozen=True)
class ScaledOutcome:
    """Accuracy on training and other images, and the mean loss of the last epoch."""

    train_accuracy: float
    accuracy: float
    loss: float


def train(
    *, data: str, condition: float | None, law: str = SEMICIRCLE, lr: float, seed: int, n_train: int, n_epochs: int,
    batch_size: int, is_trial: bool = False,
) -> ScaledOutcome:  # fmt: skip
    """Accuracies of a trained network on test images, or in a trial on validation images; if it diverged, of chance."""
    network = build(data, condition=condition, law=law, seed=seed)
    chosen = training_images(data, n_train=n_train, seed=seed)
    schedule = on.Schedule(epochs=n_epochs, batch_size=batch_size, lr=lr, seed=seed)
    try:
        trained = on.fit(network, chosen, schedule=schedule, accelerator="cpu")
    except TrainingError:
        return ScaledOutcome(1.0 / _N_CLASSES, 1.0 / _N_CLASSES, math.log(_N_CLASSES))
    seen = chosen[0][:N_VALIDATION], chosen[1][:N_VALIDATION]
    split = images_of(data)
    others = validation_images(data) if is_trial else (split.test_inputs, split.test_labels)
    return ScaledOutcome(accuracy(network, seen), accuracy(network, others), trained.history[-1]["loss"])


def training_images(data: str, *, n_train: int, seed: int) -> tuple[Tensor, Tensor]:
    """Training images selected by the seed, without validation images, and their labels."""
    return training_subset(images_of(data), n_train, n_validation=N_VALIDATION, seed=seed)


def validation_images(data: str) -> tuple[Tensor, Tensor]:
    """The validation images for the selection of learning rates, and their labels."""
    return validation_subset(images_of(data), N_VALIDATION)


@functools.lru_cache(maxsize=2)
def images_of(data: str) -> Split:
    """The data set with images averaged over 2 x 2 pixels."""
    split = _task(data).load()
    return split.smaller(split.train_inputs.shape[-1] // 2)


def _task(data: str) -> ScaledTask:
    if data not in TASKS:
        raise UnknownNameError("data", data, TASKS)
    return TASKS[data]


# ------------------------------------------------------------------------------- the effect of a spectrum


def step_gap(data: str, *, condition: float, law: str = SEMICIRCLE, seed: int, n_images: int = 64) -> float:
    """The difference of an SGD step from s^2 times the ordinary step, as a fraction of the largest change."""
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
    """s^2 of every weight of the network, ascending in each layer: the factor of its steps."""
    sizes = [layer.weight.numel() for layer in _layers(_task(data).network(0)).values()]
    return torch.cat([spectrum(n, condition=condition, law=law).square().sort().values for n in sizes])


def spectrum_change(data: str, first: float, *, second: float, law: str = SEMICIRCLE) -> float:
    """The mean difference of s^2 over all weights between two condition numbers."""
    spectra = [squared_spectrum(data, condition=condition, law=law) for condition in (first, second)]
    return float((spectra[0] - spectra[1]).abs().mean())


def _layers(network: nn.Module) -> dict[str, nn.Linear | nn.Conv2d | NormOnlyLayer]:
    kinds = (nn.Linear, nn.Conv2d, NormOnlyLayer)
    return {name: module for name, module in network.named_modules() if isinstance(module, kinds)}


def _moves(network: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The change of every weight in one step of plain SGD."""
    layers = _layers(network)
    before = {name: layer.weight.detach().clone() for name, layer in layers.items()}
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    functional.cross_entropy(network(images), labels).backward()
    optimizer.step()
    return {name: layer.weight.detach() - before[name] for name, layer in layers.items()}


# ------------------------------------------------------------------------------- the experiment


@dataclass(frozen=True)
class ScaledSizes(Sizes):
    """Data sets, laws, and length of training; goals about accuracy need more than a quick run."""

    data: tuple[str, ...] = setting(
        tuple(TASKS), choices=TASKS, is_key=False, help="cifar10 or fashion_mnist."
    )  # fmt: skip
    law: tuple[str, ...] = setting(LAWS, choices=LAWS, help="semi-circle or geometric.", is_key=False)
    seeds: int | None = setting(
        None, quick=2, high=TRIAL_SEED, is_key=False, help="Networks of each kind; 3 and 10 by data."
    )
    epochs: int = setting(6, quick=2, help="Epochs of training.")
    images: int = setting(10_000, quick=1000, help="Training images.")
    trial_epochs: int = setting(3, quick=1)
    batch_size: int = 64


class ScaledCase(NamedTuple):
    """A data set, the law of the singular values and their condition number."""

    data: str
    spectrum: str
    condition: float


def ordinary(case: ScaledCase) -> ScaledCase:
    """The ordinary network for the same data."""
    return ScaledCase(case.data, ORDINARY, 1.0)


def _train(case: ScaledCase, run: TrainingRun, sizes: ScaledSizes, *, is_trial: bool) -> ScaledOutcome:
    is_ordinary = case.spectrum == ORDINARY
    return train(
        data=case.data, condition=None if is_ordinary else case.condition,
        law=SEMICIRCLE if is_ordinary else case.spectrum, lr=run.lr, seed=run.seed, n_train=sizes.images,
        n_epochs=sizes.trial_epochs if is_trial else sizes.epochs, batch_size=sizes.batch_size, is_trial=is_trial,
    )  # fmt: skip


def validation_accuracy(case: ScaledCase, run: TrainingRun, sizes: ScaledSizes) -> float:
    """The accuracy on validation images after a short training."""
    return _train(case, run, sizes, is_trial=True).accuracy


def train_case(case: ScaledCase, run: TrainingRun, sizes: ScaledSizes) -> ScaledOutcome:
    """One network, trained and tested."""
    return _train(case, run, sizes, is_trial=False)


# ------------------------------------------------------------------------------- table 1


def table_1(run: Run) -> Outcome:
    """Accuracies at the paper's condition numbers, with the learning rate that is best for the ordinary network."""
    training, lrs = run.sizes["training"], run.sizes["lrs"]
    data = training["data"]
    cases: dict[float | None, ScaledCase] = {None: ScaledCase(data, ORDINARY, 1.0)}
    cases |= {condition: ScaledCase(data, SEMICIRCLE, condition) for condition in PAPER}
    sizes = ScaledSizes(
        data=(data,), seeds=len(run.seeds), epochs=training["n_epochs"], images=training["n_train"],
        trial_epochs=run.sizes["n_trial_epochs"], batch_size=training["batch_size"],
    )  # fmt: skip
    sweep = Sweep(
        "table 1", "Table 1 of random_features.", ScaledSizes, cases=lambda _: list(cases.values()), columns={},
        lrs=lrs, lr_case=ordinary, made_of=lambda case, _: {"images": images_of(case.data)},
    )  # fmt: skip
    sweep.trial(validation_accuracy)
    sweep.measure(train_case)
    results = sweep.measured(sizes, run.session(len(lrs) + len(cases) * len(run.seeds)))
    test, seen = (
        {c: [100.0 * value for value in results.values(case, part)] for c, case in cases.items()}
        for part in ("accuracy", "train_accuracy")
    )
    return Outcome(compare(test, seen, data), _curves(test, seen), [_PANEL], _table(test, seen))


def compare(test: Accuracies, seen: Accuracies, data: str) -> dict[str, float]:
    """The values of the verdict: losses and gains of accuracy in percentage points, with lower ends of intervals."""
    first, *_, middle, last = sorted(PAPER)
    ordinary = [abs(a - b) for part in (test, seen) for a, b in zip(part[1.0], part[None], strict=True)]
    rises = [fall(test, after, before).low for before, after in itertools.pairwise(sorted(PAPER))]
    return {
        "condition 1 against the ordinary network, largest difference": max(ordinary),
        "loss of test accuracy, first to last": fall(test, first, last).mean,
        "loss of test accuracy, first to last, lower end": fall(test, first, last).low,
        "loss of training accuracy, first to last, lower end": fall(seen, first, last).low,
        "largest gain of test accuracy between neighbours, lower end": max(rises),
        "loss of test accuracy, third to last, lower end": fall(test, middle, last).low,
        "mean change of s^2, first to last": spectrum_change(data, first, second=last),
        "mean change of s^2, third to last": spectrum_change(data, middle, second=last),
    }


def fall(accuracies: Accuracies, first: float, second: float) -> Spread:
    """The accuracy at the first condition number minus that at the second, for each seed."""
    return Spread.of([a - b for a, b in zip(accuracies[first], accuracies[second], strict=True)])


def _table(test: Accuracies, seen: Accuracies) -> Table:
    rows: list[list[float | str]] = [
        [f"{condition:.7g}", *paper, _text(Spread.of(seen[condition])), _text(Spread.of(test[condition]))]
        for condition, paper in PAPER.items()
    ]
    columns = ("condition number", "paper, training %", "paper, test %", "ours, training %", "ours, test %")
    return Table(columns, rows)


def _text(spread: Spread) -> str:
    return f"{spread.mean:.2f}" + ("" if math.isnan(spread.half) else f" ± {spread.half:.2f}")


def _curves(test: Accuracies, seen: Accuracies) -> list[Curve]:
    conditions = sorted(PAPER)
    curves = [
        Curve(f"ours, {part}", conditions, [Spread.of(made[c]).mean for c in conditions], kind="line+points")
        for part, made in (("training", seen), ("test", test))
    ]
    for place, part in enumerate(("training", "test")):
        y = [PAPER[c][place] for c in conditions]
        curves.append(Curve(f"paper, {part}", conditions, y, style="law"))
    return curves
