"""What a diagnosis costs, in passes forward and backward through the same network on the same batch, beside delve.

A pass is what a step of training computes before the optimizer: the loss of a batch and all gradients. The ways take
turns on one thread and keep their best, in seconds of the processor, so that none pays for the time in which others
run. Memory is the peak above the level at which the network already lies there. delve measures the saturation of linear
layers and convolutions, a covariance matrix and its eigenvalues for each, and no gradients; its row includes one pass.
"""

from __future__ import annotations

import copy
import importlib
import logging
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.evidence.arguments import listener
from onlynorm.evidence.goals import Goal, Table, number
from onlynorm.evidence.timing import one_thread, race
from onlynorm.memory import readable
from onlynorm.models import resnet
from onlynorm.rank import diagnose
from onlynorm.seeds import seeded
from onlynorm.validate import need_integer

PASS = "a pass forward and backward"
OURS = "onlynorm diagnose"
DELVE = "a pass with delve"
MOST_PASSES = 3.0
MOST_MEMORY = 2.0
COLUMNS = ("network", "images", "method", "seconds", "passes", "extra memory", "of a pass", "signals", "note")
Progress = Callable[[str], None]


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
class DiagnoseRow:
    """One way of looking at one network; `passes` is its time over that of a pass, `memory_ratio` its memory over it.

    `n_signals` is how many activations it measures.
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


@dataclass
class DiagnoseBench:
    """All rows of one run; the goals follow from them."""

    rows: list[DiagnoseRow] = field(default_factory=list)

    @property
    def goals(self) -> list[Goal]:
        """What a diagnosis may cost on each network."""
        goals = []
        for row in self.rows:
            if row.method == OURS:
                goals += [
                    Goal(f"{row.network}: a diagnosis takes at most {MOST_PASSES:g} passes forward and backward",
                         f"{row.passes:.2f} passes", row.passes <= MOST_PASSES),
                    Goal(f"{row.network}: and at most {MOST_MEMORY:g} times the memory of one",
                         f"{row.memory_ratio:.2f} times", row.memory_ratio <= MOST_MEMORY),
                ]  # fmt: skip
        return goals

    def tables(self) -> list[Table]:
        """One table of all rows."""
        rows = [
            (r.network, r.batch, r.method, number(r.seconds, ".3g"), number(r.passes, ".2f"),
             readable(r.memory) if r.memory else "-", number(r.memory_ratio, ".2f"), str(r.n_signals or "-"), r.note)
            for r in self.rows
        ]  # fmt: skip
        return [Table(COLUMNS, rows)]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        return {"rows": [asdict(row) for row in self.rows], "goals": [asdict(goal) for goal in self.goals]}


def bench_diagnose(*, quick: bool = False, repeats: int = 3, progress: Progress | None = None) -> DiagnoseBench:
    """Diagnoses ResNets of ImageNet's shape; `quick` takes narrow ones on small images."""
    repeats = need_integer("repeats", repeats, low=1, cure="Three take some minutes.")
    say = listener("progress", progress)
    with one_thread():
        rows = [row for network in (QUICK if quick else FULL) for row in measure(network, repeats=repeats, say=say)]
    return DiagnoseBench(rows)


def measure(network: Network, *, repeats: int, say: Progress) -> list[DiagnoseRow]:
    """The rows of one network; delve gets one that says why if it cannot be run."""
    model, images, classes = network.make()
    ways: dict[str, Callable[[], int]] = {
        PASS: lambda: _pass(model, images, classes),
        OURS: lambda: len(diagnose(model, images, classes).layers),
    }
    missing = ""
    try:
        ways[DELVE] = delve_pass(copy.deepcopy(model), images, classes)
    except ImportError as error:
        missing = f"not run: {error} (`pip install delve`)"
    times = race(
        ways, rounds=repeats, clock=time.process_time, metered=True,
        on_turn=lambda name, turn: say(f"{network.name}: {name}, turn {turn} of {repeats}"),
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
    logging.getLogger("delve.logger").setLevel(logging.WARNING)  # it tells every layer on standard output
    with tempfile.TemporaryDirectory() as folder:
        tracker = delve.SaturationTracker(folder, save_to="csv", modules=model, device="cpu")

    def run() -> int:
        _pass(model, images, classes)
        tracker.add_saturations(save=False)
        return len(tracker.layers)

    return run


def _pass(model: nn.Module, images: Tensor, classes: Tensor) -> int:
    """Loss and gradients, which are thrown away; measures nothing."""
    loss = functional.cross_entropy(model(images), classes)
    torch.autograd.grad(loss, list(model.parameters()))
    return 0
