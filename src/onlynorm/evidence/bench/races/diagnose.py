"""The cost of a diagnosis in forward and backward passes of the same network on the same batch, compared with delve.

A pass is a training step without the optimizer: the loss of a batch and all gradients. The methods run alternately on
one thread; the best processor time of several repeats counts. Memory is the peak without the network itself. delve
measures the saturation of linear layers and convolutions, with a covariance matrix and its eigenvalues for each, and no
gradients; its row includes one pass.
"""

from __future__ import annotations

import copy
import importlib
import logging
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.evidence.harness import Goal, Session, Sizes, setting
from onlynorm.evidence.race import Race, RaceResult
from onlynorm.evidence.timing import one_thread
from onlynorm.evidence.timing import race as take_turns
from onlynorm.models import resnet
from onlynorm.rank import diagnose
from onlynorm.seeds import seeded

PASS = "a pass forward and backward"
OURS = "onlynorm diagnose"
DELVE = "a pass with delve"
MOST_PASSES = 3.0
MOST_MEMORY = 2.0


@dataclass(frozen=True)
class Network:
    """A network to diagnose, and a batch of random images for it."""

    name: str
    depth: int
    width: int
    n_images: int
    size: int

    def make(self) -> tuple[nn.Module, Tensor, Tensor]:
        """The network in training mode, images and classes."""
        images = torch.randn(self.n_images, 3, self.size, self.size, generator=seeded(0))
        return resnet(self.depth, width=self.width).train(), images, torch.arange(self.n_images)


FULL = (Network("ResNet-18", 18, 64, 4, 224), Network("ResNet-50", 50, 64, 4, 224))
QUICK = (Network("ResNet-18, narrow", 18, 8, 4, 64), Network("ResNet-50, narrow", 50, 8, 4, 64))


@dataclass(frozen=True)
class DiagnoseSizes(Sizes):
    """Repeats; a quick run has narrow networks and small images."""

    repeats: int = setting(3, help="Number of repeats; the best one counts.")


@dataclass(frozen=True)
class DiagnoseRow:
    """One method on one network; `passes` and `memory_ratio` are its time and memory divided by those of a pass.

    `n_signals` is the number of measured activations.
    """

    network: str
    batch: str
    method: str
    seconds: float
    passes: float
    memory: int
    memory_ratio: float
    n_signals: int
    note: str = ""


race = Race(
    "diagnose", "A diagnosis of ResNet-18 and ResNet-50 in forward and backward passes, against delve.", DiagnoseSizes,
    columns={"rows": {
        "network": "network", "images": "batch", "method": "method", "seconds": "seconds:.3g", "passes": "passes:.2f",
        "extra memory": "memory:bytes", "of a pass": "memory_ratio:.2f", "signals": lambda r: str(r.n_signals or "-"),
        "note": "note",
    }},
)  # fmt: skip


@race.measure
def measure(sizes: DiagnoseSizes, session: Session) -> Iterator[tuple[str, list[DiagnoseRow]]]:
    """Diagnoses ResNets for ImageNet."""
    with one_thread():
        for network in QUICK if sizes.quick else FULL:
            yield "rows", measure_network(network, repeats=sizes.repeats, status=session.status)


@race.goals
def goals(result: RaceResult[DiagnoseSizes]) -> Iterator[Goal]:
    """Limits of time and memory for each network."""
    for row in result.rows:
        if row.method == OURS:
            yield Goal(
                f"{row.network}: a diagnosis takes at most {MOST_PASSES:g} forward and backward passes",
                f"{row.passes:.2f} passes", row.passes <= MOST_PASSES,
            )  # fmt: skip
            yield Goal(
                f"{row.network}: a diagnosis takes at most {MOST_MEMORY:g} times the memory of a pass",
                f"{row.memory_ratio:.2f} times", row.memory_ratio <= MOST_MEMORY,
            )  # fmt: skip


def measure_network(network: Network, *, repeats: int, status: Callable[[str], None]) -> list[DiagnoseRow]:
    """The rows of one network; that of delve has the reason if it cannot be run."""
    model, images, classes = network.make()
    methods: dict[str, Callable[[], int]] = {
        PASS: lambda: _pass(model, images, classes),
        OURS: lambda: len(diagnose(model, images, classes).layers),
    }
    missing = ""
    try:
        methods[DELVE] = delve_pass(copy.deepcopy(model), images, classes)
    except ImportError as error:
        missing = f"not run: {error} (`pip install delve`)"
    times = take_turns(
        methods, rounds=repeats, metered=True,
        on_turn=lambda name, turn: status(f"{network.name}: {name}, repeat {turn} of {repeats}"),
    )  # fmt: skip
    one_pass = times[PASS]
    batch = f"{network.n_images} of {network.size} x {network.size}"
    rows = [
        DiagnoseRow(network.name, batch, name, took.seconds, took.seconds / one_pass.seconds, took.memory,
                    took.memory / max(one_pass.memory, 1), took.result)
        for name, took in times.items()
    ]  # fmt: skip
    if missing:
        rows.append(DiagnoseRow(network.name, batch, DELVE, math.nan, math.nan, 0, math.nan, 0, missing))
    return rows


def delve_pass(model: nn.Module, images: Tensor, classes: Tensor) -> Callable[[], int]:
    """A pass with delve's hooks on the model and the saturation of every layer; the model keeps the hooks."""
    delve: Any = importlib.import_module("delve")
    logging.getLogger("delve.logger").setLevel(logging.WARNING)  # it prints every layer to standard output
    with tempfile.TemporaryDirectory() as folder:
        tracker = delve.SaturationTracker(folder, save_to="csv", modules=model, device="cpu")

    def run() -> int:
        _pass(model, images, classes)
        tracker.add_saturations(save=False)
        return len(tracker.layers)

    return run


def _pass(model: nn.Module, images: Tensor, classes: Tensor) -> int:
    """Computes loss and gradients, and discards them."""
    loss = functional.cross_entropy(model(images), classes)
    torch.autograd.grad(loss, list(model.parameters()))
    return 0
