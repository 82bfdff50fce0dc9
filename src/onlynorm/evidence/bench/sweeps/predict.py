"""Does the verdict at the start predict whether a network learns? Over many networks, on real images.

Every network is diagnosed once, untrained, and then trained by plain SGD at each of several learning rates. It *learns*
if at one of them the loss of its last steps is clearly below that of guessing the frequencies of the classes. Results
of training are cached, because it takes long and does not depend on the verdict; diagnoses are made by every run.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from sklearn.metrics import auc, roc_curve
from torch import Tensor, nn

from onlynorm.data import Split, cifar10, fashion_mnist
from onlynorm.display import Curve, Figure, Panel, Table
from onlynorm.errors import TrainingError, UnknownNameError
from onlynorm.evidence.harness import Goal, Results, Sizes, Sweep, TrainingRun, first, setting
from onlynorm.models import ACTIVATIONS, cifar_resnet, mlp, resnet, vgg
from onlynorm.rank import Diagnosis, diagnose
from onlynorm.seeds import seeded
from onlynorm.tuning import Schedule, fit

N_CLASSES = 10
FASHION, CIFAR = "Fashion-MNIST", "CIFAR-10"
FIRST_SEEDS = {"test": 5000, "calibration": 2000}
"""Sets of networks by name, and the seed of the first network of each; the next has the next one."""
LEARNED = 0.95
"""Of the loss of guessing: a network that ends below has learned something."""
LIMITS = (0.98, LEARNED, 0.9, 0.8, 0.6)
"""Other definitions of learned, for the table."""
MIN_AREA = 0.95
"""Of the area under the receiver operating characteristic."""
MIN_NETWORKS = 60
LRS = (0.003, 0.03, 0.3)
_INITS = ("standard", "asymmetric")
_IMAGENET_DEPTHS = (18, 34)
"""ResNets of these depths are built in ImageNet's shape, which takes images with one channel too."""
_DATA: dict[str, Callable[[], Split]] = {FASHION: fashion_mnist, CIFAR: cifar10}


@dataclass(frozen=True)
class PredictSizes(Sizes):
    """Which networks, images of the diagnosis, and steps of each training."""

    networks: str = setting(
        "test", choices=FIRST_SEEDS, is_key=False,
        help="test, or calibration: the networks on which thresholds were set.",
    )  # fmt: skip
    steps: int = setting(250, quick=20, low=5, help="Steps of each training.")
    n_diagnosed: int = setting(128, quick=32, is_key=False)
    batch_size: int = setting(32, quick=16)
    lrs: tuple[float, ...] = setting(LRS, quick=(0.03,))


@dataclass(frozen=True)
class NetworkSpec:
    """A network, by what it is made of, and the images it learns."""

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


def subjects(name: str = "test") -> list[NetworkSpec]:
    """The networks of the set: MLPs without skips, residual and VGG-like ones, with every norm, both starts."""
    if name not in FIRST_SEEDS:
        raise UnknownNameError("set of networks", name, FIRST_SEEDS)
    return _test() if name == "test" else _calibration()


def _test() -> list[NetworkSpec]:
    """All norms and starts in every shape; activations take turns."""
    shapes = [
        *(("MLP", depth, width, FASHION) for depth, width in ((2, 96), (6, 96), (16, 64), (48, 48))),
        *(("MLP", depth, width, CIFAR) for depth, width in ((4, 64), (8, 96), (24, 64))),
        ("VGG", 8, 8, CIFAR), ("VGG", 12, 12, FASHION), ("ResNet", 14, 4, CIFAR), ("ResNet", 18, 8, FASHION),
    ]  # fmt: skip
    turns = itertools.cycle(("relu", "tanh", "gelu", "sigmoid", "silu"))
    return [
        NetworkSpec(kind, depth, width, norm, init, "relu" if kind == "ResNet" else next(turns), data)
        for kind, depth, width, data in shapes
        for norm in ("none", "batch", "layer", "group") for init in _INITS
    ]  # fmt: skip


def _calibration() -> list[NetworkSpec]:
    norms = ("none", "batch", "layer")
    made = [
        NetworkSpec("MLP", depth, width, norm, init, activation)
        for (depth, width) in ((3, 64), (12, 128), (32, 64))
        for norm in norms for init in _INITS for activation in ("relu", "tanh", "gelu")
    ]  # fmt: skip
    convolutional = (("ResNet", 8), ("ResNet", 20), ("VGG", 4), ("VGG", 16))
    made += [
        NetworkSpec(kind, depth, 8, norm, init, data=CIFAR)
        for kind, depth in convolutional for norm in norms for init in _INITS
    ]  # fmt: skip
    return made


class Case(NamedTuple):
    """A network of a set, by its description, and the seed that draws it."""

    network: str
    data: str
    network_seed: int


@dataclass(frozen=True)
class Trained:
    """The best loss over all learning rates, and its learning rate."""

    loss: float
    best_lr: float


def cases(sizes: PredictSizes) -> list[Case]:
    """The networks of the set; a quick run takes every sixth, with the seed it has in a full one."""
    numbered = enumerate(subjects(sizes.networks), FIRST_SEEDS[sizes.networks])
    return [Case(str(one), one.data, seed) for seed, one in numbered][:: 6 if sizes.quick else 1]


def subject_of(case: Case, sizes: PredictSizes) -> NetworkSpec:
    """The network of a case."""
    return subjects(sizes.networks)[case.network_seed - FIRST_SEEDS[sizes.networks]]


@functools.lru_cache(maxsize=2)
def _split(data: str) -> Split:
    return _DATA[data]()


sweep = Sweep(
    "predict", "The verdict at the start of many networks against what training made of them.", PredictSizes,
    cases=cases, seeds=lambda _case, _sizes: 1, width=140,
    made_of=lambda case, sizes: {
        "subject": asdict(subject_of(case, sizes)), "images": _split(case.data)
    },
    columns={
        "score": first("score", ".3g"), "verdict": first("verdict"), "lowest part": first("part"),
        "best loss": first("loss", ".3f"), "best lr": first("best_lr", "g"),
        "learned": lambda _, __, runs: "yes" if has_learned(float(runs["loss"].iloc[0])) else "no",
    },
)  # fmt: skip


@sweep.measure
def train_network(case: Case, run: TrainingRun, sizes: PredictSizes) -> Trained:
    """Trains the network at every learning rate."""
    subject, seed = subject_of(case, sizes), case.network_seed
    inputs, labels = _images(subject.data, sizes.steps * sizes.batch_size, seed)
    losses = {
        lr: last_loss(subject.build(inputs, seed=seed), inputs, labels, batch_size=sizes.batch_size, lr=lr, seed=seed)
        for lr in sizes.lrs
    }
    lr = min(losses, key=lambda lr: losses[lr])
    return Trained(losses[lr], lr)


def last_loss(network: nn.Module, inputs: Tensor, labels: Tensor, *, batch_size: int, lr: float, seed: int) -> float:
    """The mean loss of the last fifth of one pass over the images; infinite if training broke off."""
    losses: list[float] = []
    schedule = Schedule(epochs=1, batch_size=batch_size, lr=lr, momentum=0.0, warmup=0.0, drops=(), seed=seed)
    try:
        fit(network, (inputs, labels), schedule=schedule, accelerator="cpu", on_step=lambda *now: losses.append(now[2]))
    except TrainingError:
        return math.inf
    return float(np.mean(losses[-max(1, len(losses) // 5) :]))


def diagnose_network(subject: NetworkSpec, *, n_images: int, seed: int) -> Diagnosis:
    """The diagnosis of the network on the first images that it would be trained on."""
    inputs, labels = _images(subject.data, n_images, seed)
    return diagnose(subject.build(inputs, seed=seed), inputs, labels, seed=seed)


@sweep.facts
def diagnoses(results: Results[PredictSizes, Case], status: Callable[[str], None]) -> dict[str, Any]:
    """The score, verdict and lowest part of every network beside its run, and the areas that the scores reach."""
    found = []
    for case in results.cases:
        status(f"{case.network}: diagnosis")
        subject = subject_of(case, results.sizes)
        made = diagnose_network(subject, n_images=results.sizes.n_diagnosed, seed=case.network_seed)
        part = min(made.verdict.parts, key=lambda name: made.verdict.parts[name])
        found.append({"score": made.score, "verdict": made.verdict.word, "part": part})
    results.runs = results.runs.join(pd.DataFrame(found))
    return areas_of(results)


def areas_of(results: Results[PredictSizes, Case]) -> dict[str, Any]:
    """The area under the curve, for every definition of learned."""
    areas = {f"{limit:g}": area(*characteristic(results, limit)) for limit in LIMITS}
    return {"area": areas[f"{LEARNED:g}"], "areas": areas}


def has_learned(loss: float, limit: float = LEARNED) -> bool:
    """Whether this is better than guessing."""
    return loss < limit * math.log(N_CLASSES)


def characteristic(
    results: Results[PredictSizes, Case], limit: float = LEARNED
) -> tuple[Sequence[float], Sequence[float]]:
    """False and true positive rates, as the lowest score that counts as a prediction of learning falls."""
    learned = [has_learned(loss, limit) for loss in results.runs["loss"]]
    if len(set(learned)) < 2:
        return (0.0, 1.0), (math.nan, math.nan)
    false, true, _ = roc_curve(learned, results.runs["score"], drop_intermediate=False)
    return false.tolist(), true.tolist()


def area(false: Sequence[float], true: Sequence[float]) -> float:
    """How often a network that learns has the higher score than one that does not; a tie counts half."""
    return math.nan if any(map(math.isnan, true)) else float(auc(false, true))


@sweep.tables
def area_tables(results: Results[PredictSizes, Case]) -> list[Table]:
    """The area under the curve for other definitions of learned."""
    heads = ("fraction of the loss of guessing that counts as learned", "area under the curve")
    return [Table(heads, [(limit, f"{found:.3f}") for limit, found in results.facts["areas"].items()])]


@sweep.goals
def goals(results: Results[PredictSizes, Case]) -> Iterator[Goal]:
    """Enough networks of both kinds, and a score that ranks them."""
    learned = [has_learned(loss) for loss in results.runs["loss"]]
    n, n_learned = len(learned), sum(learned)
    yield Goal(
        f"{MIN_NETWORKS} networks or more, a quarter or more of either kind",
        f"{n} networks, of which {n_learned} learn",
        n >= MIN_NETWORKS and 4 * min(n_learned, n - n_learned) >= n,
    )  # fmt: skip
    found = results.facts["area"]
    yield Goal(
        f"the area under the curve is above {MIN_AREA:g}: the verdict at the start predicts learning", f"{found:.3f}",
        found > MIN_AREA,
    )  # fmt: skip


@sweep.figures
def draw(results: Results[PredictSizes, Case]) -> dict[str, Figure]:
    """The receiver operating characteristic, and the loss over the score."""
    guess = math.log(N_CLASSES)
    curves = [
        Curve("diagnosis", *characteristic(results), panel="roc"),
        Curve("chance", (0, 1), (0, 1), panel="roc", style="law"),
    ]
    for data in (FASHION, CIFAR):
        runs = results.runs[results.runs["data"] == data]
        scores = [max(score, 1e-12) for score in runs["score"]]
        curves.append(Curve(data, scores, [min(loss, 1.1 * guess) for loss in runs["loss"]], "points", "cloud"))
    curves.append(Curve("learned", (1e-12, 1), (LEARNED * guess,) * 2, panel="cloud", style="law"))
    name = results.sizes.networks
    title = f"area {results.facts['area']:.3f}, {len(results.runs)} networks of the {name} set"
    roc = Panel("roc", title, "false positive rate", "true positive rate")
    cloud = Panel("cloud", "", "score at the start", "best loss after training", x_log=True)
    return {f"roc_{name}": Figure(curves, [roc, cloud])}


def _images(data: str, n_images: int, seed: int) -> tuple[Tensor, Tensor]:
    split = _split(data)
    chosen = torch.randperm(len(split.train_inputs), generator=seeded(seed))[:n_images]
    return split.train_inputs[chosen], split.train_labels[chosen]
