"""A trained ResNet-20 adapted to corrupted images by six methods: what each recovers, and in how many bytes.

Seeds change which training images are drawn, their noise and their order; the test images and their noise stay. Methods
that train have one learning rate each, the one with the best mean accuracy over all corruptions on validation images.
The interval is over seeds: what another choice of test images would change is not in it. Each method saves no more than
what it changed: statistics only the running statistics, head only the last layer, norms only scales, shifts and
statistics, full training the whole network.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from onlynorm.data import CIFAR_MEAN, CIFAR_STD, CORRUPTIONS, Split, cifar10, corrupt
from onlynorm.errors import TrainingError
from onlynorm.evidence.bench.networks import make_target
from onlynorm.evidence.harness import Goal, Results, Sizes, Spread, Sweep, TrainingRun, first, mean, percent, setting
from onlynorm.evidence.timing import warm_up_training
from onlynorm.evidence.validation import training_subset, validation_subset
from onlynorm.files import save
from onlynorm.storage import tensors_digest
from onlynorm.tuning import Schedule, accuracy, fit, load_adapter, only_norms, save_adapter, take_adapter

NOTHING, STATISTICS, HEAD = "nothing", "statistics only", "head only"
NORMS, BOTH, FULL = "norms only", "norms and head", "full training"
TRAINED = (HEAD, NORMS, BOTH, FULL)
"""Methods with a learning rate."""
METHODS = (NOTHING, STATISTICS, *TRAINED)
CLEAN = "clean"
MIN_SEEDS = 3
VALIDATION_SEED = 2**32
"""Seed of the validation images and of the trials: not one a user would ask for."""
_LAST, _FILE, _PROBE = "linear", "adapted.safetensors", 100
_MOVED = ("running_mean", "running_var", "num_batches_tracked")
OnStep = Callable[[int, int, float], None]


@dataclass(frozen=True)
class AdaptSizes(Sizes):
    """Images to adapt with, to choose the learning rate with and to test on, and how long to train."""

    corruptions: tuple[str, ...] = setting(
        CORRUPTIONS, choices=CORRUPTIONS, help=f"{', '.join(CORRUPTIONS)}; may be repeated.", is_key=False
    )
    seeds: int = setting(5, quick=3, help="Runs of each method.", is_key=False)
    severity: float = setting(3.0, help="Severity of the corruptions, from 0 to 5.")
    epochs: int = setting(3, quick=1, help="Epochs of training.")
    images: int = setting(2000, quick=128, help="Training images.")
    n_validation: int = setting(1000, quick=50)
    n_test: int = setting(5000, quick=100)
    batch_size: int = setting(128, quick=16)


class Case(NamedTuple):
    """Images, clean or with a corruption, and how the network is adapted to them."""

    images: str
    method: str


@dataclass(frozen=True)
class Adapted:
    """One adapted network. `is_exact`: it came back from its file with the same outputs to the last bit."""

    accuracy: float
    file_size: int
    is_exact: bool
    seconds: float


def cases(sizes: AdaptSizes) -> list[Case]:
    """The clean images with no adaptation, and every corruption with every method."""
    return [Case(CLEAN, NOTHING), *(Case(images, method) for images in sizes.corruptions for method in METHODS)]


@functools.cache
def base() -> nn.Module:
    """The trained ResNet-20 of the data folder."""
    return make_target(quick=False)


@functools.cache
def split() -> Split:
    """CIFAR-10."""
    return cifar10()


@functools.cache
def digests() -> dict[str, Any]:
    """What identifies the network and the images."""
    return {"base": tensors_digest(base().state_dict()), "data": split()}


sweep = Sweep(
    "adapt", "A trained ResNet-20 adapted to corrupted images by six methods.", AdaptSizes, cases=cases,
    lrs=lambda case: (0.003, 0.01, 0.03, 0.1, 0.3) if case.method in TRAINED else (),
    lr_group=lambda case: case.method,
    seeds=lambda case, sizes: 1 if case.method == NOTHING else sizes.seeds,
    trial_seeds=lambda _: (VALIDATION_SEED,),
    made_of=lambda _case, _sizes: digests(),
    columns={
        "accuracy %": percent("accuracy"),
        "recovered %": lambda results, case, _: "-" if case.images == CLEAN else recovered(results, case).percent(),
        "saved": first("file_size", ","), "seconds": mean("seconds", ".1f"),
    },
)  # fmt: skip


@sweep.trial
def validation_accuracy(case: Case, run: TrainingRun, sizes: AdaptSizes) -> float:
    """The accuracy on corrupted validation images; a training that diverges has none."""
    try:
        network = adapted(case, run, sizes)
    except TrainingError:
        return 0.0
    images, labels = validation_subset(split(), sizes.n_validation, split_seed=VALIDATION_SEED)
    return accuracy(network, (corrupted(images, case.images, sizes, seed=1), labels))


@sweep.measure
def adapt_and_test(case: Case, run: TrainingRun, sizes: AdaptSizes) -> Adapted:
    """Adapts the network, saves what it learned, and tests what comes back from the file."""
    warm_up_training()
    start = time.perf_counter()
    network = adapted(case, run, sizes)
    seconds = time.perf_counter() - start
    images = corrupted(split().test_inputs[: sizes.n_test], case.images, sizes, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        size = save_adapted(network, case.method, folder=Path(folder))
        again = load_adapted(base(), case.method, folder=Path(folder))
    is_exact = torch.equal(_outputs(network, images), _outputs(again, images))
    return Adapted(accuracy(again, (images, split().test_labels[: sizes.n_test])), size, is_exact, seconds)


def adapted(case: Case, run: TrainingRun, sizes: AdaptSizes) -> nn.Module:
    """The trained network, adapted to images drawn by the seed."""
    images, labels = training_subset(
        split(), sizes.images, n_validation=sizes.n_validation, seed=run.seed, split_seed=VALIDATION_SEED
    )
    lr = 0.0 if math.isnan(run.lr) else run.lr
    schedule = Schedule(epochs=sizes.epochs, batch_size=sizes.batch_size, lr=lr, seed=run.seed)
    images = corrupted(images, case.images, sizes, seed=run.seed + 2)
    return adapt(base(), case.method, data=(images, labels), schedule=schedule)


def corrupted(inputs: Tensor, images: str, sizes: AdaptSizes, *, seed: int) -> Tensor:
    """The inputs with this corruption."""
    if images == CLEAN:
        return inputs
    return corrupt(inputs, images, severity=sizes.severity, seed=seed, mean=CIFAR_MEAN, std=CIFAR_STD)


@torch.no_grad()
def _outputs(network: nn.Module, inputs: Tensor) -> Tensor:
    device = next(network.parameters()).device
    return network.eval()(inputs[:_PROBE].to(device)).cpu()


# ------------------------------------------------------------------------------- methods


def adapt(
    base: nn.Module, method: str, *, data: tuple[Tensor, Tensor], schedule: Schedule, on_step: OnStep | None = None
) -> nn.Module:
    """A copy of the base adapted by this method to images and labels, of which statistics only sees the images."""
    network = copy.deepcopy(base)
    if method == STATISTICS:
        handle = only_norms(network, statistics="recalibrate")
        handle.recalibrate(data[0].split(schedule.batch_size))
    elif method != NOTHING:
        train_only(network, method)
        fit(network, data, schedule=schedule, on_step=on_step)
    return network.eval()


def train_only(network: nn.Module, method: str) -> None:
    """Lets gradients reach what this method trains. With the head alone statistics stay."""
    if method == FULL:
        network.requires_grad_(True)
    elif method == HEAD:
        only_norms(network, also=(_LAST,), which=lambda _: False, statistics="freeze")
    else:
        only_norms(network, also=(_LAST,) if method == BOTH else (), statistics="track")


def save_adapted(network: nn.Module, method: str, *, folder: Path) -> int:
    """Bytes of the file that holds what was learned, 0 for nothing."""
    path = folder / _FILE
    if method == NOTHING:
        return 0
    if method == FULL:
        save_file(network.state_dict(), path)
    elif method == STATISTICS:
        adapter = take_adapter(network)
        moved = {name: value for name, value in adapter.tensors.items() if name.rpartition(".")[2] in _MOVED}
        others = tuple(sorted(adapter.tensors.keys() - moved.keys()))
        save(dataclasses.replace(adapter, tensors=moved, free=others), path)
    else:
        save_adapter(network, path)
    return path.stat().st_size


def load_adapted(base: nn.Module, method: str, *, folder: Path) -> nn.Module:
    """The adapted network again, from a copy of the base and the file."""
    network = copy.deepcopy(base)
    if method == FULL:
        network.load_state_dict(load_file(folder / _FILE))
    elif method != NOTHING:
        load_adapter(network, folder / _FILE)
    return network.eval()


# ------------------------------------------------------------------------------- results


def recovered(results: Results[AdaptSizes, Case], case: Case) -> Spread:
    """The fraction of the accuracy lost by the corruption that the method recovers, run by run."""
    clean, without = (results.values(Case(images, NOTHING)) for images in (CLEAN, case.images))
    lost = clean[0] - without[0]
    return Spread.of([(value - without[0]) / lost for value in results.values(case)] if lost > 0.0 else [])


def measured_corruptions(results: Results[AdaptSizes, Case]) -> list[str]:
    """The corruptions that were measured."""
    return list(dict.fromkeys(case.images for case in results.cases if case.images != CLEAN))


@sweep.facts
def recoveries(results: Results[AdaptSizes, Case], _: Any) -> dict[str, Any]:
    """What every method recovers on every corruption."""
    found = measured_corruptions(results)
    return {"recovered": {i: {m: asdict(recovered(results, Case(i, m))) for m in METHODS} for i in found}}


@sweep.goals
def goals(results: Results[AdaptSizes, Case]) -> Iterator[Goal]:
    """Enough seeds, files that give the network back, and more recovered by norms than by head or statistics."""
    found = [case for case in results.cases if case.method != NOTHING]
    if not found:
        return
    yield results.seeds_goal("every method is measured on every corruption", found, MIN_SEEDS)
    yield results.every_run_goal("a reloaded network gives the same outputs to the last bit", "is_exact")
    for other in (HEAD, STATISTICS):
        gains = {i: results.gap(Case(i, NORMS), Case(i, other)) for i in measured_corruptions(results)}
        yield Goal(
            f"{NORMS} recovers more than {other}, on every corruption",
            ", ".join(f"{images}: {gain.percent()} points" for images, gain in gains.items()),
            all(gain.mean > 0.0 for gain in gains.values()),
        )
