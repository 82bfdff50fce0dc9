"""A trained ResNet-20 adapted to corrupted images by six methods: recovered accuracy and file size.

Seeds determine the training images, their noise and their order; the test images and their noise are fixed. Each method
that trains has the learning rate with the best mean accuracy over all corruptions on validation images. The interval is
over seeds and does not include the choice of test images. Each method saves only what it changed: the running
statistics, the last layer, scales, shifts and statistics of norms, or the whole network.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from onlynorm.data import CIFAR_MEAN, CIFAR_STD, CORRUPTIONS, cifar10, corrupt
from onlynorm.errors import TrainingError
from onlynorm.evidence.bench import tuners
from onlynorm.evidence.bench.networks import make_target
from onlynorm.evidence.bench.tasks import TuningTask
from onlynorm.evidence.harness import Goal, Sizes, Spread, setting
from onlynorm.evidence.sweep import Results, Sweep, TrainingRun, first, mean, percent
from onlynorm.evidence.timing import warm_up_training
from onlynorm.evidence.validation import first_test_images, training_subset, validation_subset
from onlynorm.storage import tensors_digest
from onlynorm.tuning import Schedule, accuracy

NOTHING, STATISTICS, HEAD = "nothing", "statistics only", "head only"
NORMS, BOTH, FULL = "norms only", "norms and head", "full training"
METHODS: dict[str, type[tuners.Tuner]] = {
    NOTHING: tuners.Untuned, STATISTICS: tuners.Statistics, HEAD: tuners.HeadAdapter,
    NORMS: tuners.Ours, BOTH: tuners.NormsAndHead, FULL: tuners.Full,
}  # fmt: skip
TRAINED = (HEAD, NORMS, BOTH, FULL)
"""Methods with a learning rate."""
CLEAN = "clean"
VALIDATION_SEED = 2**32
"""Seed of the validation images and of the trials, which users are unlikely to choose."""
N_PROBE = 100
"""Images on which a network and the one loaded from its file are compared."""


@dataclass(frozen=True)
class AdaptSizes(Sizes):
    """Numbers of images for adaptation, validation and test, and the length of the training."""

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


class AdaptCase(NamedTuple):
    """Images, clean or corrupted, and the method of adaptation."""

    images: str
    method: str


@dataclass(frozen=True)
class Adapted:
    """One adapted network. `is_exact`: the network loaded from its file has bit-identical outputs."""

    accuracy: float
    file_size: int
    is_exact: bool
    seconds: float


base = functools.cache(functools.partial(make_target, quick=False))
"""The trained ResNet-20 of the data folder."""
split = functools.cache(cifar10)
sweep = Sweep(
    "adapt", "A trained ResNet-20 adapted to corrupted images by six methods.", AdaptSizes,
    cases=lambda sizes: [
        AdaptCase(CLEAN, NOTHING), *(AdaptCase(images, method) for images in sizes.corruptions for method in METHODS)
    ],
    lrs=lambda case: (0.003, 0.01, 0.03, 0.1, 0.3) if case.method in TRAINED else (),
    lr_group=lambda case: case.method,
    seeds=lambda case, sizes: 1 if case.method == NOTHING else sizes.seeds,
    trial_seeds=lambda _: (VALIDATION_SEED,),
    made_of=lambda _case, _sizes: {"base": tensors_digest(base().state_dict()), "data": split()},
    columns={
        "accuracy %": percent("accuracy"),
        "recovered %": lambda results, case, _: "-" if case.images == CLEAN else recovered(results, case).percent(),
        "saved": first("file_size", ","), "seconds": mean("seconds", ".1f"),
    },
)  # fmt: skip


@sweep.trial
def validation_accuracy(case: AdaptCase, run: TrainingRun, sizes: AdaptSizes) -> float:
    """The accuracy on corrupted validation images; zero if the training diverges."""
    try:
        tuner = adapted(case, run, sizes)
    except TrainingError:
        return 0.0
    images, labels = validation_subset(split(), sizes.n_validation, split_seed=VALIDATION_SEED)
    return accuracy(tuner.network, (corrupted(images, case.images, sizes, seed=1), labels))


@sweep.measure
def adapt_and_test(case: AdaptCase, run: TrainingRun, sizes: AdaptSizes) -> Adapted:
    """Adapts the network, saves the changes, and tests the network loaded from the file."""
    warm_up_training()
    start = time.perf_counter()
    tuner = adapted(case, run, sizes)
    seconds = time.perf_counter() - start
    images, labels = first_test_images(split(), sizes.n_test)
    images = corrupted(images, case.images, sizes, seed=0)
    size, drift, again = tuners.save_and_reload(tuner, images[:N_PROBE])
    return Adapted(accuracy(again, (images, labels)), size, drift == 0.0, seconds)


def adapted(case: AdaptCase, run: TrainingRun, sizes: AdaptSizes) -> tuners.Tuner:
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


def adapt(base: nn.Module, method: str, *, data: tuple[Tensor, Tensor], schedule: Schedule) -> tuners.Tuner:
    """A copy of the base adapted by this method to images and labels; statistics only uses the images."""
    tuner = METHODS[method](TuningTask(method, base, *data, data[0], "linear"))
    tuner.tune(schedule)
    tuner.network.eval()
    return tuner


def recovered(results: Results[AdaptSizes, AdaptCase], case: AdaptCase) -> Spread:
    """The fraction of the accuracy lost by the corruption that the method recovers, for each run."""
    clean, without = (results.values(AdaptCase(images, NOTHING)) for images in (CLEAN, case.images))
    lost = clean[0] - without[0]
    return Spread.of([(value - without[0]) / lost for value in results.values(case)] if lost > 0.0 else [])


@sweep.facts
def recoveries(results: Results[AdaptSizes, AdaptCase], _: Any) -> dict[str, Any]:
    """The recovered accuracy of every method for every corruption."""
    found = [images for images in results.axis("images") if images != CLEAN]
    return {"recovered": {i: {m: asdict(recovered(results, AdaptCase(i, m))) for m in METHODS} for i in found}}


@sweep.goals
def goals(results: Results[AdaptSizes, AdaptCase]) -> Iterator[Goal]:
    """Enough seeds, exact files, and more accuracy recovered by norms than by head or statistics."""
    found = [case for case in results.cases if case.method != NOTHING]
    if not found:
        return
    yield results.seeds_goal("every method is measured on every corruption", found)
    yield results.every_run_goal("a reloaded network has bit-identical outputs", "is_exact")
    for other in (HEAD, STATISTICS):
        images = [one for one in results.axis("images") if one != CLEAN]
        gains = {i: results.gap(AdaptCase(i, NORMS), AdaptCase(i, other)) for i in images}
        yield Goal(
            f"{NORMS} recovers more than {other}, on every corruption",
            ", ".join(f"{name}: {gain.percent()} points" for name, gain in gains.items()),
            all(gain.mean > 0.0 for gain in gains.values()),
        )
