"""Frozen random networks of which only the norms are trained, compared with head only and full training.

The weights of ResNets for CIFAR-10 of increasing width and depth stay as torch initialized them. Scales are initialized
uniformly in [0, 1], as by Frankle, Schwab and Morcos, for one size also to one. All methods have the same schedule
except for the learning rate, which is higher if only norms are trained. The authors observed that training only norms
disables about a third of the features: we count the scales below 0.01 and below 0.05 in magnitude.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from onlynorm.data import cifar10
from onlynorm.display import Figure, Panel, Table
from onlynorm.evidence.harness import Goal, Sizes, Spread, setting
from onlynorm.evidence.sweep import Results, Sweep, TrainingRun, first, fraction_below, histogram, mean, percent
from onlynorm.evidence.timing import warm_up_training
from onlynorm.evidence.validation import first_test_images, random_subset
from onlynorm.models import cifar_resnet
from onlynorm.modules import find_norms
from onlynorm.tuning import Schedule, accuracy, fit, init_gamma, only_norms

NORMS, NORMS_FROM_ONES, HEAD, FULL = "norms only", "norms only, from ones", "head only", "everything"
METHODS = (NORMS, NORMS_FROM_ONES, HEAD, FULL)
TRAINED_SCALES = (NORMS, NORMS_FROM_ONES, FULL)
NETWORKS = ((8, 4), (8, 8), (8, 16), (8, 32), (14, 8), (20, 8), (32, 8))
"""(depth, width): four widths at depth 8, four depths at width 8."""
QUICK_NETWORKS = ((8, 2), (8, 4), (14, 2))
FROM_ONES = (8, 16)
"""The network that is also trained with scales initialized to one; the first one of a quick run."""
SMALL = {"below_0_01": 0.01, "below_0_05": 0.05}
"""Magnitudes below which a scale counts as close to zero."""
BELOW = {name: f"below {size:g}, %" for name, size in SMALL.items()}
EDGES = np.linspace(-1.0, 2.0, 61).tolist()
_FIRST = 1000
"""The first seed of weights, different from the seeds of scales and of the order of the images."""


@dataclass(frozen=True)
class FrozenSizes(Sizes):
    """Images, averaged to `side` pixels, and the schedule: SGD with momentum and a cosine learning rate."""

    seeds: int = setting(3, help="Runs of each method.", is_key=False)
    epochs: int = setting(8, quick=1, help="Epochs of training.")
    images: int = setting(8000, quick=256, help="Training images.")
    n_test: int = setting(5000, quick=100)
    side: int = setting(16, quick=8)
    batch_size: int = setting(32, quick=64)
    lr: float = 0.1
    norm_lr: float = 0.5
    weight_decay: float = 1e-4


class FrozenCase(NamedTuple):
    """A network and the method of training."""

    depth: int
    width: int
    method: str


@dataclass(frozen=True)
class FrozenOutcome:
    """One network after training. `is_frozen`: all frozen parameters are bit-identical."""

    accuracy: float
    n_trained: int
    n_total: int
    gammas: tuple[float, ...]
    is_frozen: bool
    seconds: float


def cases(sizes: FrozenSizes) -> list[FrozenCase]:
    """Every network with every method; scales are initialized to one in a single network."""
    networks = QUICK_NETWORKS if sizes.quick else NETWORKS
    ones = FROM_ONES if FROM_ONES in networks else networks[0]
    return [FrozenCase(*net, how) for net in networks for how in METHODS if how != NORMS_FROM_ONES or net == ones]


images = functools.lru_cache(maxsize=1)(lambda side: cifar10().smaller(side))
"""CIFAR-10, averaged to this side."""
sweep = Sweep(
    "frozen", "Frozen random ResNets of which only the norms are trained.", FrozenSizes, cases=cases,
    made_of=lambda _, sizes: {"data": images(sizes.side)}, hidden={"gammas"},
    derived={name: fraction_below("gammas", size) for name, size in SMALL.items()},
    columns={
        "trained": first("n_trained", ","), "parameters": first("n_total", ","), "accuracy %": percent("accuracy"),
        **{BELOW[name]: percent(name, where=lambda case: case.method != HEAD) for name in SMALL},
        "seconds": mean("seconds", ".0f"),
    },
)  # fmt: skip


@sweep.measure
def train(case: FrozenCase, run: TrainingRun, sizes: FrozenSizes) -> FrozenOutcome:
    """Trains the network and counts its scales."""
    split = images(sizes.side)
    network = cifar_resnet(case.depth, width=case.width, seed=_FIRST + run.seed)
    prepare(network, case.method, seed=run.seed)
    frozen = {name: p.detach().clone() for name, p in network.named_parameters() if not p.requires_grad}
    schedule = Schedule(
        epochs=sizes.epochs, batch_size=sizes.batch_size, weight_decay=sizes.weight_decay, augmentation="crop-flip",
        lr=sizes.norm_lr if case.method in (NORMS, NORMS_FROM_ONES) else sizes.lr, seed=run.seed,
    )  # fmt: skip
    warm_up_training()
    fitted = fit(network, random_subset(split, sizes.images, seed=run.seed), schedule=schedule, on_step=run.on_step)
    return FrozenOutcome(
        accuracy=accuracy(network, first_test_images(split, sizes.n_test)),
        n_trained=sum(p.numel() for p in network.parameters() if p.requires_grad),
        n_total=sum(p.numel() for p in network.parameters()),
        gammas=gammas_of(network),
        is_frozen=all(torch.equal(network.get_parameter(name).cpu(), value) for name, value in frozen.items()),
        seconds=fitted.seconds,
    )


def prepare(network: nn.Module, method: str, *, seed: int) -> None:
    """Freezes what this method does not train and draws the scales. Statistics follow the batches in every method."""
    if method == HEAD:
        only_norms(network, also=("linear",), which=lambda _: False)
    elif method != FULL:
        init_gamma(only_norms(network), how="uniform" if method == NORMS else "ones", seed=seed)


def gammas_of(network: nn.Module) -> tuple[float, ...]:
    """The scales of all norms, one after the other."""
    scales = [network.get_parameter(f"{norm.name}.{norm.scale}") for norm in find_norms(network).norms if norm.scale]
    return tuple(float(value) for scale in scales for value in scale.detach().flatten())


@sweep.tables
def scale_tables(results: Results[FrozenSizes, FrozenCase]) -> list[Table]:
    """The scales of all networks after training."""
    rows = [
        (method, *(Spread.of(list(runs[name])).percent() for name in SMALL), f"{runs['gammas'].map(len).sum():,}")
        for method, runs in results.by("method", TRAINED_SCALES).items()
    ]
    rows.append(("uniform, before training", *(f"{100 * size:.1f}" for size in SMALL.values()), "-"))
    return [Table(("scales of all networks", *BELOW.values(), "scales"), rows)]


@sweep.goals
def goals(results: Results[FrozenSizes, FrozenCase]) -> Iterator[Goal]:
    """Enough seeds, frozen weights, and accuracy that increases with the size of the network."""
    yield results.seeds_goal("every method is measured on every network", results.cases)
    yield results.every_run_goal("frozen weights are bit-identical after training", "is_frozen")
    for axis in ("width", "depth"):
        small, large = (series(results, axis)[end] for end in (0, -1))
        if small != large:
            aim = f"{NORMS}: accuracy grows with the {axis}, {getattr(small, axis)} to {getattr(large, axis)}"
            yield results.growth_goal(aim, small, large)


def series(results: Results[FrozenSizes, FrozenCase], axis: str) -> list[FrozenCase]:
    """The longest series of networks with trained norms that differ only in this axis, ascending."""
    shared = "depth" if axis == "width" else "width"
    found = [results.where(**{"method": NORMS, shared: value}) for value in results.axis(shared)]
    return max(map(sorted, found), key=len)


@sweep.figures
def draw(results: Results[FrozenSizes, FrozenCase]) -> dict[str, Figure]:
    """Histograms of all scales after training: by width, by depth, and of all networks by method."""
    curves = [
        histogram(f"{axis} {getattr(case, axis)}", results.of(case)["gammas"], EDGES, panel=axis)
        for axis in ("width", "depth") for case in series(results, axis)
    ]  # fmt: skip
    trained = results.by("method", TRAINED_SCALES)
    curves += [histogram(method, runs["gammas"], EDGES, panel="all") for method, runs in trained.items()]
    x_label, y_label = "scale after training; the last bins include all larger values", "fraction of scales"
    titles = {"width": f"{NORMS}, by width", "depth": f"{NORMS}, by depth", "all": "all networks"}
    return {"gammas": Figure(curves, [Panel(name, title, x_label, y_label) for name, title in titles.items()])}
