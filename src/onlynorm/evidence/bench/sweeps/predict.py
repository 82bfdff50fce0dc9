"""Does the verdict at the start foretell whether a network learns? Over many networks, on real images.

Every network is diagnosed once, untrained, and then trained by plain SGD at each of several rates. It *learns* if at
one of them the loss of its last steps is clearly below that of guessing the frequencies of the classes. What training
came to is kept, because it takes long and does not depend on the verdict; diagnoses are made anew by every run.

What foretelling came to: a row for each network, the receiver operating characteristic and the area under it.

The networks whose learning the verdict shall foretell: those it was calibrated on, and others to test it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from onlynorm.data import Split, cifar10, fashion_mnist
from onlynorm.display import Curve, Figure, Panel
from onlynorm.errors import TrainingError, UnknownNameError
from onlynorm.evidence.arguments import listener, need_counts
from onlynorm.evidence.cache import Rows, Say, fields_of
from onlynorm.evidence.goals import Goal, Table
from onlynorm.models import ACTIVATIONS, cifar_resnet, mlp, resnet, vgg
from onlynorm.rank import Diagnosis, diagnose
from onlynorm.seeds import seeded
from onlynorm.storage import tensors_digest
from onlynorm.tuning import Schedule, fit
from onlynorm.validate import need_instance, need_items, need_path

N_CLASSES = 10
FASHION, CIFAR = "Fashion-MNIST", "CIFAR-10"
FIRST_SEEDS = {"test": 5000, "calibration": 2000}
"""Sets of networks by name, and the seed of the first network of each; the next has the next one."""
_INITS = ("standard", "asymmetric")
_IMAGENET_DEPTHS = (18, 34)
"""ResNets of these depths are built in ImageNet's shape, which takes images with one channel too."""


@dataclass(frozen=True)
class Subject:
    """A network to foretell, by what it is made of, and the images it learns."""

    kind: str
    depth: int
    width: int
    norm: str
    init: str
    activation: str = "relu"
    data: str = FASHION

    def __str__(self) -> str:
        norm = {"none": "no norms"}.get(self.norm, f"{self.norm} norms")
        return f"{self.kind} of depth {self.depth}, width {self.width}, {self.activation}, {norm}, {self.init} start"

    def build(self, inputs: Tensor, *, seed: int) -> nn.Module:
        """The network for such inputs, drawn from the seed."""
        settings: dict[str, Any] = {"norm": self.norm, "init": self.init, "seed": seed}
        n_channels, size = inputs.shape[1], inputs.shape[-1]
        if self.kind == "MLP":
            widths = [inputs[0].numel(), *[self.width] * self.depth, N_CLASSES]
            return nn.Sequential(nn.Flatten(), *mlp(widths, activation=ACTIVATIONS[self.activation], **settings))
        if self.kind == "VGG":
            stages = [[self.width] * (self.depth // 4)] * 4
            settings |= {"in_channels": n_channels, "image_size": size}
            return vgg(stages, activation=ACTIVATIONS[self.activation], **settings)
        if self.depth in _IMAGENET_DEPTHS:
            return resnet(self.depth, n_classes=N_CLASSES, width=self.width, in_channels=n_channels, **settings)
        return cifar_resnet(self.depth, width=self.width, **settings)


def subjects(name: str = "test") -> list[Subject]:
    """The networks of the set: MLPs without skips, residual and VGG-like ones, with every norm, both starts."""
    if name not in FIRST_SEEDS:
        raise UnknownNameError("set of networks", name, FIRST_SEEDS)
    return _test() if name == "test" else _calibration()


def _test() -> list[Subject]:
    """All norms and starts in every shape; activations take turns."""
    shapes = [
        *(("MLP", depth, width, FASHION) for depth, width in ((2, 96), (6, 96), (16, 64), (48, 48))),
        *(("MLP", depth, width, CIFAR) for depth, width in ((4, 64), (8, 96), (24, 64))),
        ("VGG", 8, 8, CIFAR), ("VGG", 12, 12, FASHION), ("ResNet", 14, 4, CIFAR), ("ResNet", 18, 8, FASHION),
    ]  # fmt: skip
    turns = itertools.cycle(("relu", "tanh", "gelu", "sigmoid", "silu"))
    return [
        Subject(kind, depth, width, norm, init, "relu" if kind == "ResNet" else next(turns), data)
        for kind, depth, width, data in shapes
        for norm in ("none", "batch", "layer", "group") for init in _INITS
    ]  # fmt: skip


def _calibration() -> list[Subject]:
    norms = ("none", "batch", "layer")
    made = [
        Subject("MLP", depth, width, norm, init, activation)
        for (depth, width) in ((3, 64), (12, 128), (32, 64))
        for norm in norms for init in _INITS for activation in ("relu", "tanh", "gelu")
    ]  # fmt: skip
    convolutional = (("ResNet", 8), ("ResNet", 20), ("VGG", 4), ("VGG", 16))
    made += [
        Subject(kind, depth, 8, norm, init, data=CIFAR)
        for kind, depth in convolutional for norm in norms for init in _INITS
    ]  # fmt: skip
    return made


LEARNED = 0.95
"""Of the loss of guessing: a network that ends below has learned something."""
LIMITS = (0.98, LEARNED, 0.9, 0.8, 0.6)
"""Other readings of learned, for the table."""
AIM = 0.95
"""Of the area under the curve."""
LEAST = 60
"""Networks that a claim needs."""


@dataclass(frozen=True)
class PredictRow:
    """A network: the verdict at its start and what it rests on, and the best loss that training brought it to."""

    name: str
    data: str
    score: float
    verdict: str
    sign: str
    loss: float
    rate: float
    note: str = ""

    @property
    def learned(self) -> bool:
        """Whether it did better than guessing."""
        return self.loss < LEARNED * math.log(N_CLASSES)


@dataclass
class PredictBench:
    """All networks, the name of their set, and where the picture of the curve lies."""

    rows: list[PredictRow] = field(default_factory=list)
    networks: str = "test"
    figure: str = ""

    @property
    def curve(self) -> tuple[list[float], list[float]]:
        """(share of the hopeless that pass, share of the able that pass) as the least score falls from 1 to 0."""
        return receiver_curve([row.score for row in self.rows], [row.learned for row in self.rows])

    @property
    def area(self) -> float:
        """How often a network that learns has the higher score than one that does not; a tie counts half."""
        return area_below(*self.curve)

    def area_at(self, limit: float) -> float:
        """The area if a network has learned whose loss is below this share of that of guessing."""
        learned = [row.loss < limit * math.log(N_CLASSES) for row in self.rows]
        return area_below(*receiver_curve([row.score for row in self.rows], learned))

    @property
    def goals(self) -> list[Goal]:
        """What was promised, as far as this run measured it."""
        return list(_goals(self))

    def tables(self) -> list[Table]:
        """Every network, those with the least score first."""
        rows = [
            (row.name, row.data, f"{row.score:.3g}", row.verdict, row.sign, f"{row.loss:.3f}", f"{row.rate:g}",
             "yes" if row.learned else "no", row.note)
            for row in sorted(self.rows, key=lambda row: row.score)
        ]  # fmt: skip
        limits = [(f"{limit:g}", f"{self.area_at(limit):.3f}") for limit in LIMITS]
        columns = ("network", "data", "score", "verdict", "least sign", "best loss", "rate", "learned", "note")
        return [
            Table(columns, rows, 140),
            Table(("loss over that of guessing that counts as learned", "area under the curve"), limits),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        return {
            "networks": self.networks,
            "rows": [{**asdict(row), "learned": row.learned} for row in self.rows],
            "area": self.area,
            "areas": {f"{limit:g}": self.area_at(limit) for limit in LIMITS},
            "figure": self.figure,
            "goals": [asdict(goal) for goal in self.goals],
        }


def receiver_curve(scores: Sequence[float], passed: Sequence[bool]) -> tuple[list[float], list[float]]:
    """Shares of those that failed and that passed with at least each score, from none to all; ties go at once."""
    values, truth = np.asarray(scores), np.asarray(passed)
    false, true = [0.0], [0.0]
    for least in sorted(set(scores), reverse=True):
        above = values >= least
        false.append(float(above[~truth].mean()) if (~truth).any() else math.nan)
        true.append(float(above[truth].mean()) if truth.any() else math.nan)
    return false, true


def area_below(false: Sequence[float], true: Sequence[float]) -> float:
    """The area below the curve, by trapezia."""
    steps = zip(itertools.pairwise(false), itertools.pairwise(true), strict=True)
    return sum((right - left) * (high + low) / 2.0 for (left, right), (low, high) in steps)


def draw_curve(bench: PredictBench) -> Figure:
    """The receiver operating characteristic, and the loss over the score."""
    guess = math.log(N_CLASSES)
    curves = [Curve("diagnosis", *bench.curve, panel="roc"), Curve("chance", (0, 1), (0, 1), panel="roc", style="law")]
    for data in (FASHION, CIFAR):
        rows = [row for row in bench.rows if row.data == data]
        scores, losses = [max(row.score, 1e-12) for row in rows], [min(row.loss, 1.1 * guess) for row in rows]
        curves.append(Curve(data, scores, losses, "points", "cloud"))
    curves.append(Curve("learned", (1e-12, 1), (LEARNED * guess,) * 2, panel="cloud", style="law"))
    title = f"area {bench.area:.3f}, {len(bench.rows)} networks of the {bench.networks} set"
    roc = Panel("roc", title, "false positive rate", "true positive rate")
    cloud = Panel("cloud", "", "score at the start", "best loss after training", x_log=True)
    return Figure(curves, [roc, cloud])


def _goals(bench: PredictBench) -> Iterator[Goal]:
    n_learned = sum(row.learned for row in bench.rows)
    counts = f"{len(bench.rows)} networks, of which {n_learned} learn"
    yield Goal(
        f"{LEAST} networks or more, a quarter or more of either kind", counts,
        len(bench.rows) >= LEAST and 4 * min(n_learned, len(bench.rows) - n_learned) >= len(bench.rows),
    )  # fmt: skip
    yield Goal(
        f"the area under the curve is above {AIM:g}: the verdict at the start foretells learning",
        f"{bench.area:.3f}", bench.area > AIM,
    )  # fmt: skip


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
    bench.figure = str(draw_curve(bench).write(folder, f"receiver_{bench.networks}")[0])
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
