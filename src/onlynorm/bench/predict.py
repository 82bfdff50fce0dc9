"""Does the verdict at the start foretell whether a network learns? Over many networks, on real images.

Every network is diagnosed once, untrained, and then trained by plain SGD at each of several rates. It *learns* if at
one of them the loss of its last steps is clearly below that of guessing the frequencies of the classes. The receiver
operating characteristic over all networks, and the area under it, say how well the score orders them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor, nn

from onlynorm.bench.goals import Goal, Table
from onlynorm.bench.kept import Rows, Say
from onlynorm.data import Split, cifar10, fashion_mnist, seeded
from onlynorm.errors import TrainingError
from onlynorm.models import ACTIVATIONS, cifar_resnet, mlp, vgg
from onlynorm.rank import diagnose
from onlynorm.report.figure import COLOURS, STYLE, write_pictures
from onlynorm.tuning import Schedule, fit

RATES = (0.003, 0.03, 0.3)
LEARNED = 0.95
"""Of the loss of guessing: a network that ends below has learned something."""
LIMITS = (0.98, LEARNED, 0.9, 0.8, 0.6)
"""Other readings of learned, for the table."""
AIM = 0.95
"""Of the area under the curve."""
LEAST = 60
"""Networks that a claim needs."""
KIND = "onlynorm-bench-predict"
_DATA: dict[str, Callable[[], Split]] = {"Fashion-MNIST": fashion_mnist, "CIFAR-10": cifar10}
_N_CLASSES = 10
_FIRST = 2000
"""Seeds start here: thresholds of the verdict were set on other draws."""


@dataclass(frozen=True)
class Subject:
    """A network to foretell, by what it is made of."""

    kind: str
    depth: int
    width: int
    norm: str
    init: str
    activation: str = "relu"

    @property
    def data(self) -> str:
        """The images it learns."""
        return "Fashion-MNIST" if self.kind == "MLP" else "CIFAR-10"

    def __str__(self) -> str:
        norm = {"none": "no norms"}.get(self.norm, f"{self.norm} norms")
        return f"{self.kind} of depth {self.depth}, width {self.width}, {self.activation}, {norm}, {self.init} start"

    def build(self, inputs: Tensor, *, seed: int) -> nn.Module:
        """The network, drawn from the seed."""
        settings: dict[str, Any] = {"norm": self.norm, "init": self.init, "seed": seed}
        if self.kind == "MLP":
            widths = [inputs[0].numel(), *[self.width] * self.depth, _N_CLASSES]
            return nn.Sequential(nn.Flatten(), *mlp(widths, activation=ACTIVATIONS[self.activation], **settings))
        if self.kind == "ResNet":
            return cifar_resnet(self.depth, width=self.width, **settings)
        stages = [[self.width] * (self.depth // 4)] * 4
        return vgg(stages, activation=ACTIVATIONS[self.activation], **settings)


def subjects() -> list[Subject]:
    """MLPs without skips, residual and VGG-like networks: with every norm and none, both starts, three activations."""
    norms, inits, activations = ("none", "batch", "layer"), ("standard", "asymmetric"), ("relu", "tanh", "gelu")
    made = [
        Subject("MLP", depth, width, norm, init, activation)
        for (depth, width) in ((3, 64), (12, 128), (32, 64))
        for norm in norms for init in inits for activation in activations
    ]  # fmt: skip
    made += [Subject("ResNet", depth, 8, norm, init) for depth in (8, 20) for norm in norms for init in inits]
    made += [Subject("VGG", depth, 8, norm, init) for depth in (4, 16) for norm in norms for init in inits]
    return made


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


@dataclass(frozen=True)
class PredictRow:
    """A network: the score of its verdict at the start, and the best loss that training brought it to."""

    name: str
    data: str
    score: float
    verdict: str
    loss: float
    rate: float
    note: str = ""

    @property
    def learned(self) -> bool:
        """Whether it did better than guessing."""
        return self.loss < LEARNED * math.log(_N_CLASSES)


@dataclass
class PredictBench:
    """All networks, and where the picture of the curve lies."""

    rows: list[PredictRow] = field(default_factory=list)
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
        learned = [row.loss < limit * math.log(_N_CLASSES) for row in self.rows]
        return area_below(*receiver_curve([row.score for row in self.rows], learned))

    @property
    def goals(self) -> list[Goal]:
        """What was promised, as far as this run measured it."""
        return list(_goals(self))

    def tables(self) -> list[Table]:
        """Every network, those with the least score first."""
        rows = [
            (row.name, row.data, f"{row.score:.3g}", row.verdict, f"{row.loss:.3f}", f"{row.rate:g}",
             "yes" if row.learned else "no", row.note)
            for row in sorted(self.rows, key=lambda row: row.score)
        ]  # fmt: skip
        limits = [(f"{limit:g}", f"{self.area_at(limit):.3f}") for limit in LIMITS]
        return [
            Table(("network", "data", "score", "verdict", "best loss", "rate", "learned", "note"), rows, 130),
            Table(("loss over that of guessing that counts as learned", "area under the curve"), limits),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        return {
            "rows": [{**asdict(row), "learned": row.learned} for row in self.rows],
            "area": self.area,
            "figure": self.figure,
            "goals": [asdict(goal) for goal in self.goals],
        }


def bench_predict(
    *,
    networks: Sequence[Subject] | None = None,
    sizes: PredictSizes | None = None,
    quick: bool = False,
    out: Path | str = "onlynorm-out/bench",
    force: bool = False,
    progress: Say | None = None,
    on_row: Callable[[PredictRow], None] | None = None,
) -> PredictBench:
    """Diagnoses and trains every network; what an earlier run with the same sizes did is read again unless `force`."""
    say = progress or (lambda _: None)
    sizes = sizes or (PredictSizes.quick() if quick else PredictSizes())
    networks = networks or (subjects()[::6] if quick else subjects())
    folder = Path(out) / "predict"
    rows, bench = Rows(folder, kind=KIND, force=force, say=say), PredictBench()
    for place, subject in enumerate(networks):
        told = f"network {place + 1} of {len(networks)}: {subject}"
        say(told)
        measure = functools.partial(measure_network, subject, sizes=sizes, seed=_FIRST + place)
        made_of = {"subject": asdict(subject), "sizes": asdict(sizes), "seed": _FIRST + place}
        bench.rows.append(PredictRow(name=str(subject), data=subject.data, **rows.find(str(subject), made_of, measure)))
        if on_row is not None:
            on_row(bench.rows[-1])
    bench.figure = str(write_curve(bench, folder))
    return bench


def measure_network(subject: Subject, *, sizes: PredictSizes, seed: int) -> dict[str, Any]:
    """The score at the start, and the best loss over all rates."""
    split = _split(subject.data)
    n_train = min(len(split.train_inputs), sizes.n_steps * sizes.batch_size)
    chosen = torch.randperm(len(split.train_inputs), generator=seeded(seed))[:n_train]
    inputs, labels = split.train_inputs[chosen], split.train_labels[chosen]
    network = subject.build(inputs, seed=seed)
    found = diagnose(network, inputs[: sizes.n_diagnosed], labels[: sizes.n_diagnosed], seed=seed)
    losses = {
        rate: last_loss(subject.build(inputs, seed=seed), inputs, labels, sizes=sizes, rate=rate, seed=seed)
        for rate in sizes.rates
    }
    rate = min(losses, key=lambda rate: losses[rate])
    return {"score": found.score, "verdict": found.verdict.word, "loss": losses[rate], "rate": rate}


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


def write_curve(bench: PredictBench, folder: Path) -> Path:
    """The path of the picture of the curve and of loss over score, as PNG; the same as SVG lies beside it."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.0, 3.8), layout="constrained")
        FigureCanvasAgg(figure)
        curve, cloud = figure.subplots(1, 2)
        curve.plot(*bench.curve, color=COLOURS[0])
        curve.plot([0, 1], [0, 1], color=COLOURS[-1], linestyle=":")
        curve.set(
            title=f"area {bench.area:.3f}, {len(bench.rows)} networks", xlabel="of those that do not learn, passed",
            ylabel="of those that learn, passed",
        )  # fmt: skip
        for number, data in enumerate(_DATA):
            rows = [row for row in bench.rows if row.data == data]
            top = [min(row.loss, 1.1 * math.log(_N_CLASSES)) for row in rows]
            cloud.scatter([max(row.score, 1e-12) for row in rows], top, s=12, color=COLOURS[number], label=data)
        cloud.axhline(LEARNED * math.log(_N_CLASSES), color=COLOURS[-1], linestyle=":")
        cloud.set(xscale="log", xlabel="score at the start", ylabel="best loss after training")
        cloud.legend(frameon=False)
        return write_pictures(figure, folder, "receiver")[0]


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


@functools.lru_cache(maxsize=2)
def _split(data: str) -> Split:
    return _DATA[data]()
