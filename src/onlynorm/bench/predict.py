"""Does the verdict at the start foretell whether a network learns? Over many networks, on real images.

Every network is diagnosed once, untrained, and then trained by plain SGD at each of several rates. It *learns* if at
one of them the loss of its last steps is clearly below that of guessing the frequencies of the classes. What training
came to is kept, because it takes long and does not depend on the verdict; diagnoses are made anew by every run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from onlynorm.bench.arguments import listener, need_counts
from onlynorm.bench.kept import Rows, Say, fields_of
from onlynorm.bench.predict_results import PredictBench, PredictRow, write_curve
from onlynorm.bench.predict_subjects import CIFAR, FASHION, FIRST_SEEDS, Subject, subjects
from onlynorm.data import Split, cifar10, fashion_mnist, seeded
from onlynorm.errors import TrainingError
from onlynorm.modules.validate import need_instance, need_items, need_path
from onlynorm.rank import Diagnosis, diagnose
from onlynorm.reconstruction.partial import tensors_digest
from onlynorm.tuning import Schedule, fit

RATES = (0.003, 0.03, 0.3)
KIND = "onlynorm-bench-predict"
_DATA: dict[str, Callable[[], Split]] = {FASHION: fashion_mnist, CIFAR: cifar10}


@dataclass(frozen=True)
class PredictSizes:
    """Images of the diagnosis, and steps of each training."""

    n_diagnosed: int = 128
    n_steps: int = 250
    batch_size: int = 32
    rates: tuple[float, ...] = RATES

    @classmethod
    def quick(cls) -> PredictSizes:
        """Few of each."""
        return cls(n_diagnosed=32, n_steps=20, batch_size=16, rates=(0.03,))


def bench_predict(
    networks: str | Sequence[Subject] = "test",
    *,
    sizes: PredictSizes | None = None,
    quick: bool = False,
    out: Path | str = "onlynorm-out/bench",
    force: bool = False,
    progress: Say | None = None,
    on_row: Callable[[PredictRow], None] | None = None,
) -> PredictBench:
    """Diagnoses and trains every network of the set, or those given; earlier trainings are read again unless `force`.

    A training is another one if its network, seed, steps, images or rates are.
    """
    say, on_row = listener("progress", progress), listener("on_row", on_row)
    sizes = need_counts(sizes or (PredictSizes.quick() if quick else PredictSizes()), PredictSizes)
    name = networks if isinstance(networks, str) else "own"
    cure = "Pass 'test', 'calibration', or a list of Subject."
    own = [] if isinstance(networks, str) else need_items("networks", networks, cure=cure)
    chosen = [need_instance("networks", one, Subject, cure=cure) for one in own] or subjects(name)
    numbered = list(enumerate(chosen, FIRST_SEEDS.get(name, FIRST_SEEDS["test"])))[:: 6 if quick else 1]
    folder = need_path("out", out) / "predict"
    rows, bench = Rows(folder, kind=KIND, module=__name__, force=force, say=say), PredictBench(networks=name)
    for place, (seed, subject) in enumerate(numbered, 1):
        say(f"network {place} of {len(numbered)}: {subject}")
        found = diagnose_network(subject, n_images=sizes.n_diagnosed, seed=seed)
        train = functools.partial(train_network, subject, sizes=sizes, seed=seed)
        fields = fields_of(PredictRow, "name", "data", "score", "verdict", "sign")
        came_to = rows.find(str(subject), made_of(subject, sizes, seed), train, fields=fields)
        parts = found.verdict.parts
        row = PredictRow(
            name=str(subject), data=subject.data, score=found.score, verdict=found.verdict.word,
            sign=min(parts, key=lambda sign: parts[sign]), **came_to,
        )  # fmt: skip
        bench.rows.append(row)
        if on_row is not None:
            on_row(row)
    bench.figure = str(write_curve(bench, folder))
    return bench


def made_of(subject: Subject, sizes: PredictSizes, seed: int) -> dict[str, Any]:
    """Everything that a training depends on."""
    training = {name: value for name, value in asdict(sizes).items() if name != "n_diagnosed"}
    return {"subject": asdict(subject), "sizes": training, "seed": seed, "images": _images_digest(subject.data)}


def diagnose_network(subject: Subject, *, n_images: int, seed: int) -> Diagnosis:
    """The diagnosis of the network on the first images that it would be trained on."""
    inputs, labels = _images(subject.data, n_images, seed)
    return diagnose(subject.build(inputs, seed=seed), inputs, labels, seed=seed)


def train_network(subject: Subject, *, sizes: PredictSizes, seed: int) -> dict[str, float]:
    """The best loss over all rates, and its rate."""
    inputs, labels = _images(subject.data, sizes.n_steps * sizes.batch_size, seed)
    losses = {
        rate: last_loss(subject.build(inputs, seed=seed), inputs, labels, sizes=sizes, rate=rate, seed=seed)
        for rate in sizes.rates
    }
    rate = min(losses, key=lambda rate: losses[rate])
    return {"loss": losses[rate], "rate": rate}


def last_loss(
    network: nn.Module, inputs: Tensor, labels: Tensor, *, sizes: PredictSizes, rate: float, seed: int
) -> float:
    """The mean loss of the last fifth of one pass over the images; infinite if training broke off."""
    losses: list[float] = []
    schedule = Schedule(epochs=1, batch_size=sizes.batch_size, lr=rate, momentum=0.0, warmup=0.0, drops=(), seed=seed)
    try:
        fit(network, (inputs, labels), schedule=schedule, accelerator="cpu", step=lambda *now: losses.append(now[2]))
    except TrainingError:
        return math.inf
    return float(np.mean(losses[-max(1, len(losses) // 5) :]))


def _images(data: str, n_images: int, seed: int) -> tuple[Tensor, Tensor]:
    split = _split(data)
    chosen = torch.randperm(len(split.train_inputs), generator=seeded(seed))[:n_images]
    return split.train_inputs[chosen], split.train_labels[chosen]


@functools.lru_cache(maxsize=2)
def _images_digest(data: str) -> str:
    return tensors_digest(vars(_split(data)))


@functools.lru_cache(maxsize=2)
def _split(data: str) -> Split:
    return _DATA[data]()
