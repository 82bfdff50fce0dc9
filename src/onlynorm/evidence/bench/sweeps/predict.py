"""Whether the verdict before training predicts that a network learns, for many networks and real images.

Every network is diagnosed before training, and then trained by plain SGD with several learning rates. It *learns* if
for one of them the loss of the last steps is clearly below that of predicting the class frequencies. The results of
training are cached, since they take long and do not depend on the verdict; every run computes the diagnoses.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from sklearn.metrics import auc, roc_curve

from onlynorm.data import Split, cifar10, fashion_mnist
from onlynorm.display import Curve, Figure, Panel, Table
from onlynorm.evidence.bench.networks import CIFAR, FASHION, FIRST_SEEDS, N_CLASSES, NetworkSpec, subjects
from onlynorm.evidence.harness import Goal, Sizes, setting
from onlynorm.evidence.sweep import Results, Sweep, TrainingRun, first
from onlynorm.evidence.training import plain_sgd
from onlynorm.evidence.validation import random_subset
from onlynorm.rank import Diagnosis, diagnose

GUESS = math.log(N_CLASSES)
"""The loss of predicting the class frequencies."""
LEARNED = 0.95
"""Fraction of that loss below which a network has learned."""
LIMITS = (0.98, LEARNED, 0.9, 0.8, 0.6)
"""Other definitions of learned, for the table."""
MIN_AREA = 0.95
"""Goal for the area under the receiver operating characteristic."""
MIN_NETWORKS = 60
_DATA: dict[str, Callable[[], Split]] = {FASHION: fashion_mnist, CIFAR: cifar10}


@dataclass(frozen=True)
class PredictSizes(Sizes):
    """The set of networks, the images of the diagnosis, and the steps of each training."""

    networks: str = setting(
        "test", choices=FIRST_SEEDS, is_key=False,
        help="test, or calibration: the networks for which thresholds were chosen.",
    )  # fmt: skip
    steps: int = setting(250, quick=20, low=5, help="Steps of each training.")
    n_diagnosed: int = setting(128, quick=32, is_key=False)
    batch_size: int = setting(32, quick=16)
    lrs: tuple[float, ...] = setting((0.003, 0.03, 0.3), quick=(0.03,))


class PredictCase(NamedTuple):
    """A network of a set, by its description, and the seed that draws it."""

    network: str
    data: str
    network_seed: int


@dataclass(frozen=True)
class PredictOutcome:
    """The best loss over all learning rates, and its learning rate."""

    loss: float
    best_lr: float


def cases(sizes: PredictSizes) -> list[PredictCase]:
    """The networks of the set; a quick run has every sixth, with the same seed."""
    found = [PredictCase(str(one), one.data, seed) for seed, one in subjects(sizes.networks).items()]
    return found[:: 6 if sizes.quick else 1]


_split = functools.lru_cache(maxsize=2)(lambda data: _DATA[data]())
sweep = Sweep(
    "predict", "The verdict before training against the training loss, for many networks.", PredictSizes,
    cases=cases, seeds=lambda _case, _sizes: 1, width=140,
    made_of=lambda case, sizes: {
        "subject": asdict(subjects(sizes.networks)[case.network_seed]), "images": _split(case.data)
    },
    columns={
        "score": first("score", ".3g"), "verdict": first("verdict"), "lowest part": first("part"),
        "best loss": first("loss", ".3f"), "best lr": first("best_lr", "g"),
        "learned": lambda _, __, runs: "yes" if runs["loss"].iloc[0] < LEARNED * GUESS else "no",
    },
)  # fmt: skip


@sweep.measure
def train_network(case: PredictCase, run: TrainingRun, sizes: PredictSizes) -> PredictOutcome:
    """Trains the network at every learning rate; its loss is the mean of the last fifth of the steps."""
    subject, seed = subjects(sizes.networks)[case.network_seed], case.network_seed
    inputs, labels = random_subset(_split(subject.data), sizes.steps * sizes.batch_size, seed=seed)
    losses = {}
    for lr in sizes.lrs:
        network = subject.build(inputs, seed=seed)
        steps = plain_sgd(network, (inputs, labels), batch_size=sizes.batch_size, lr=lr, seed=seed)
        losses[lr] = float(np.mean(steps[-max(1, len(steps) // 5) :]))
    lr = min(losses, key=lambda lr: losses[lr])
    return PredictOutcome(losses[lr], lr)


def diagnose_network(subject: NetworkSpec, *, n_images: int, seed: int) -> Diagnosis:
    """The diagnosis of the network on its first training images."""
    inputs, labels = random_subset(_split(subject.data), n_images, seed=seed)
    return diagnose(subject.build(inputs, seed=seed), inputs, labels, seed=seed)


@sweep.facts
def diagnoses(results: Results[PredictSizes, PredictCase], status: Callable[[str], None]) -> dict[str, Any]:
    """Score, verdict and smallest part of every network with its run, and the areas under the curves."""
    found = []
    for case in results.cases:
        status(f"{case.network}: diagnosis")
        subject = subjects(results.sizes.networks)[case.network_seed]
        made = diagnose_network(subject, n_images=results.sizes.n_diagnosed, seed=case.network_seed)
        part = min(made.verdict.parts, key=lambda name: made.verdict.parts[name])
        found.append({"score": made.score, "verdict": made.verdict.word, "part": part})
    results.runs = results.runs.join(pd.DataFrame(found))
    return areas_of(results)


def areas_of(results: Results[PredictSizes, PredictCase]) -> dict[str, Any]:
    """The area under the curve, for every definition of learned.

    The probability that a network that learns has a higher score than one that does not; a tie counts half.
    """
    areas = {f"{limit:g}": float(auc(*characteristic(results, limit))) for limit in LIMITS}
    return {"area": areas[f"{LEARNED:g}"], "areas": areas}


def characteristic(
    results: Results[PredictSizes, PredictCase], limit: float = LEARNED
) -> tuple[list[float], list[float]]:
    """False and true positive rates for decreasing thresholds of the score."""
    learned = results.runs["loss"] < limit * GUESS
    if learned.nunique() < 2:
        return [0.0, 1.0], [math.nan, math.nan]
    false, true, _ = roc_curve(learned, results.runs["score"], drop_intermediate=False)
    return false.tolist(), true.tolist()


@sweep.tables
def area_tables(results: Results[PredictSizes, PredictCase]) -> list[Table]:
    """The area under the curve for other definitions of learned."""
    heads = ("fraction of the loss of class frequencies that counts as learned", "area under the curve")
    return [Table(heads, [(limit, f"{found:.3f}") for limit, found in results.facts["areas"].items()])]


@sweep.goals
def goals(results: Results[PredictSizes, PredictCase]) -> Iterator[Goal]:
    """Enough networks of both kinds, and a large area under the curve."""
    n, n_learned = len(results.runs), int((results.runs["loss"] < LEARNED * GUESS).sum())
    aim, n_fewer = f"at least {MIN_NETWORKS} networks, at least a quarter of either kind", min(n_learned, n - n_learned)
    yield Goal(aim, f"{n} networks, of which {n_learned} learn", n >= MIN_NETWORKS and 4 * n_fewer >= n)
    aim = f"the area under the curve is above {MIN_AREA:g}: the verdict before training predicts learning"
    yield Goal(aim, f"{results.facts['area']:.3f}", results.facts["area"] > MIN_AREA)


@sweep.figures
def draw(results: Results[PredictSizes, PredictCase]) -> dict[str, Figure]:
    """The receiver operating characteristic, and the loss over the score."""
    curves = [
        Curve("diagnosis", *characteristic(results), panel="roc"),
        Curve("chance", (0, 1), (0, 1), panel="roc", style="law"),
    ]
    for data in (FASHION, CIFAR):
        runs = results.runs[results.runs["data"] == data]
        scores = [max(score, 1e-12) for score in runs["score"]]
        curves.append(Curve(data, scores, [min(loss, 1.1 * GUESS) for loss in runs["loss"]], "points", "cloud"))
    curves.append(Curve("learned", (1e-12, 1), (LEARNED * GUESS,) * 2, panel="cloud", style="law"))
    name = results.sizes.networks
    title = f"area {results.facts['area']:.3f}, {len(results.runs)} networks of the {name} set"
    roc = Panel("roc", title, "false positive rate", "true positive rate")
    cloud = Panel("cloud", "", "score before training", "best loss after training", x_log=True)
    return {f"roc_{name}": Figure(curves, [roc, cloud])}
