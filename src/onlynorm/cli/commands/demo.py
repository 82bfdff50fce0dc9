"""`onlynorm demo`: a deep network is repaired and learns; a trained network is rebuilt by its norms.

First, a network that is too deep to learn is diagnosed, repaired and trained. Then a trained network is rebuilt from
frozen random layers. Only the seed and the norms are saved to a file; the network loaded from this file is compared
with the trained one on test images. A page shows both with figures.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.table import Table
from safetensors.torch import save as to_bytes
from torch import nn

from onlynorm.cli.app import AsJson, Excess, FeaturesName, app, need_folder
from onlynorm.cli.help import FEATURES, OUTPUT, START, examples, option
from onlynorm.cli.terminal import print_json, screen, spinner
from onlynorm.data import Split, digits
from onlynorm.display import Curve, Figure, Panel, ShownResult, View, write_page
from onlynorm.errors import MemoryLimitError
from onlynorm.files import load, save
from onlynorm.memory import readable
from onlynorm.models import mlp, vgg
from onlynorm.rank import Repaired, repair
from onlynorm.reconstruction import Comparison, Plan, Reconstruction, Wide, compare, plan, reconstruct
from onlynorm.seeds import seeded
from onlynorm.tuning import Schedule, accuracy, fit
from onlynorm.validate import Progress

DEPTH, WIDTH = 30, 64
"""Hidden layers of the deep network, and their width."""
SCHEDULE = Schedule(epochs=10, lr=0.01)
"""Training of the deep network, before and after the repair: SGD with momentum."""
LEARNED = 0.8
"""Minimum accuracy of a network that has learned."""
MEASURE_EVERY = 6
"""Training steps between two measurements of the accuracy."""
CALIBRATION = 512
"""Number of training images for calibration of the ranges."""
N_SHOWN = 100
"""Test images whose outputs are shown in the page."""
STAGES = 8


@dataclass(frozen=True, repr=False)
class RepairDemo(ShownResult):
    """A deep network before and after repair: both diagnoses, and (step, accuracy) of both during training."""

    data: str
    repaired: Repaired
    before: tuple[tuple[int, float], ...]
    after: tuple[tuple[int, float], ...]
    seconds: float

    @property
    def accuracies(self) -> tuple[float, float]:
        """The accuracy on the test images after training, without and with the repair."""
        return self.before[-1][1], self.after[-1][1]

    @property
    def has_learned(self) -> bool:
        """Whether the network learned after the repair and not before."""
        return self.accuracies[0] < LEARNED <= self.accuracies[1]

    def plot(self) -> Figure:
        """The accuracy during training, and rank and gradient over depth, before and after."""
        figure = self.repaired.plot()
        measured = (("before", self.before), ("after", self.after))
        curves = [
            Curve(label, [step for step, _ in points], [100 * value for _, value in points], panel="accuracy")
            for label, points in measured
        ]
        kept = ("r", "signal_gradient")
        panel = Panel("accuracy", "Accuracy during training", "training step", "test images, %")
        return Figure(
            (*curves, *(curve for curve in figure.curves if curve.panel in kept)),
            (panel, *(panel for panel in figure.panels if panel.name in kept)),
        )

    def view(self) -> View:
        """Both accuracies, and what the diagnosis found."""
        before, after = self.accuracies
        found = self.repaired.before.verdict.findings
        return View(
            f"A network of {self.repaired.before.n_layers} layers that does not learn, and does after a repair",
            f"{_percent(before)} → {_percent(after)} of the test images correct", "good" if self.has_learned else "bad",
            [
                f"onlynorm.diagnose: {found[0]}.",
                f"onlynorm.repair: {self.repaired.remark}. Only the initial weights have changed.",
                f"Both were then trained in the same way: SGD with momentum, {SCHEDULE.epochs} epochs.",
            ],
            details={"All findings of the diagnosis": {str(n): text for n, text in enumerate(found, start=1)}},
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """The results as JSON types."""
        before, after = self.accuracies
        return {
            "accuracy_before": before, "accuracy_after": after, "has_learned": self.has_learned,
            "n_layers": self.repaired.before.n_layers, "method": self.repaired.method,
            "score_before": self.repaired.before.score, "score_after": self.repaired.after.score,
            "seconds": self.seconds,
        }  # fmt: skip


@dataclass(frozen=True, repr=False)
class Demo(ShownResult):
    """A trained and a rebuilt network. Sizes in bytes, in float64: the saved file, the same with frozen weights, and
    the trained network."""

    data: str
    plan: Plan
    result: Reconstruction
    comparison: Comparison
    file_size: int
    whole_size: int
    target_size: int
    seconds: float
    outputs: tuple[tuple[float, float], ...] = ()

    @property
    def is_same_function(self) -> bool:
        """Whether predictions agree on all test images, outputs to 1e-8, and all frozen weights come from the seed."""
        check = self.comparison.check
        return check.agreement == 1.0 and check.relative_error <= 1e-8 and check.is_reproducible

    def plot(self) -> Figure:
        """The outputs of both networks on test images, and the errors of the layers."""
        x, y = zip(*self.outputs, strict=True) if self.outputs else ((), ())
        figure = self.result.plot()
        panel = Panel("outputs", f"Outputs for {N_SHOWN} test images", "trained network", "rebuilt network")
        return Figure((Curve("", x, y, "points", "outputs"), *figure.curves), (panel, *figure.panels))

    def view(self) -> View:
        """The comparison of both networks, and every layer."""
        check = self.comparison.check
        view = self.result.view()
        return View(
            "A trained network, rebuilt from random weights by its norms",
            "the same function" if self.is_same_function else "NOT the same function",
            "good" if self.is_same_function else "bad",
            [
                f"Frozen random layers have replaced {len(self.result.layers)} trained layers. Nothing but norms was "
                "chosen; a seed gives all other weights.",
                f"{self._agreement}; outputs differ by {check.relative_error:.1e} (relative).",
            ],
            facts={
                "data": self.data, "norm parameters": self.result.n_norm_parameters,
                "frozen entries, all from the seed": check.n_frozen,
                "file with seed and norms": readable(self.file_size),
                "file with frozen weights": readable(self.whole_size),
                "file of the trained network": readable(self.target_size),
                "accuracy of the trained network": _percent(self.comparison.target_accuracy),
                "accuracy of the rebuilt network": _percent(self.comparison.network_accuracy),
            },
            tables=view.tables,
        )  # fmt: skip

    @property
    def _agreement(self) -> str:
        check = self.comparison.check
        same = round(check.agreement * check.n_samples)
        return f"Same prediction for {same:,} of {check.n_samples:,} test images"

    def as_dict(self) -> dict[str, Any]:
        """The results as JSON types."""
        check = self.comparison.check
        return {
            "data": self.data,
            "target_accuracy": self.comparison.target_accuracy,
            "network_accuracy": self.comparison.network_accuracy,
            "agreement": check.agreement,
            "relative_error": check.relative_error,
            "n_frozen": check.n_frozen,
            "is_reproducible": check.is_reproducible,
            "n_other": check.n_other,
            "file_bytes": self.file_size,
            "file_with_frozen_bytes": self.whole_size,
            "target_bytes": self.target_size,
            "solve_seconds": sum(layer.seconds for layer in self.result.layers),
            "seconds": self.seconds,
            "is_same_function": self.is_same_function,
            "plan": self.plan.as_dict(),
            "layers": [layer.as_dict() for layer in self.result.layers],
        }


def run_repair(*, seed: int = 0, progress: Progress | None = None) -> RepairDemo:
    """Repairs a deep network on the digits, and trains it as it was and repaired."""
    start = time.perf_counter()
    status = _stages(progress, first=5)
    data = digits(seed=seed)
    deep = mlp((64, *[WIDTH] * DEPTH, 10), seed=seed)
    status(f"diagnosing and repairing a network of {DEPTH + 1} layers")
    repaired = repair(deep, data.train_inputs[:256], data.train_labels[:256], seed=seed)
    status("training the network as it was")
    before = _measure_training(deep, data, seed=seed)
    status("training the repaired network in the same way")
    after = _measure_training(repaired.model, data, seed=seed)
    return RepairDemo(str(data), repaired, before, after, time.perf_counter() - start)


def _measure_training(network: nn.Module, data: Split, *, seed: int) -> tuple[tuple[int, float], ...]:
    """The accuracy on the test images after every few steps of training, by step."""
    test = (data.test_inputs, data.test_labels)
    points = [(0, accuracy(network, test))]

    def measure(done: int, total: int, loss: float) -> None:
        if done % MEASURE_EVERY == 0 or done == total:
            points.append((done, accuracy(network, test)))

    schedule = Schedule(epochs=SCHEDULE.epochs, lr=SCHEDULE.lr, seed=seed)
    fit(network, (data.train_inputs, data.train_labels), schedule=schedule, on_step=measure)
    return tuple(points)


def run_demo(
    *, seed: int = 0, features: str = "he_normal", excess: float | None = None, progress: Progress | None = None
) -> Demo:
    """Trains on the digits, rebuilds every layer, saves and loads the network, and compares on the test images."""
    start = time.perf_counter()
    status = _stages(progress, first=0)
    wide = Wide(features=features, excess=excess, activation=nn.ReLU())

    status("planning: features, memory, conditioning, time")  # first, so that invalid arguments raise before training
    target = make_target(seed=seed)
    planned = plan(target, torch.zeros(1, 64), wide, seed=seed)
    if not planned.is_feasible:
        raise MemoryLimitError(
            f"the demo needs a plan that fits into memory; {planned.remarks[0].rstrip('.')}. Use a smaller excess."
        )

    status("training a small convolutional network on the digits")
    data = digits(seed=seed)
    train(target, data, seed=seed).double().eval()

    status("rebuilding every layer from frozen random weights")
    result = reconstruct(target, data.train_inputs[:CALIBRATION].double(), wide, seed=seed)

    status("saving the norms to a file and loading the network from it")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digits.safetensors"
        save(result, path)
        file_size = path.stat().st_size
        network = load(path, like=make_target(seed=seed).double().eval())

    status("comparing both networks on the test images")
    comparison = compare(target, network, data.test_inputs.double(), labels=data.test_labels)
    n_frozen = planned.total.costs.n_frozen if planned.total.costs is not None else 0
    with torch.no_grad():
        shown = data.test_inputs[:N_SHOWN].double()
        outputs = torch.stack((target(shown), network(shown)), -1).flatten(0, 1)
    return Demo(
        data=str(data),
        plan=planned,
        result=result,
        comparison=comparison,
        file_size=file_size,
        whole_size=file_size + 8 * n_frozen,
        target_size=len(to_bytes(target.state_dict())),
        seconds=time.perf_counter() - start,
        outputs=tuple((a, b) for a, b in outputs.tolist()),
    )


def make_target(*, seed: int) -> nn.Sequential:
    """Three convolutions with batch norms and a linear layer, for flattened images of 8 x 8 pixels."""
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *vgg([[8, 8], [16]], in_channels=1, image_size=8, seed=seed))


def train(network: nn.Sequential, data: Split, *, seed: int, epochs: int = 8, batch: int = 64) -> nn.Sequential:
    """Trains the network with Adam on the training set and returns it."""
    generator = seeded(seed)
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
    network.train()
    for _ in range(epochs):
        for chunk in torch.randperm(len(data.train_inputs), generator=generator).split(batch):
            loss = nn.functional.cross_entropy(network(data.train_inputs[chunk]), data.train_labels[chunk])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return network


def _stages(progress: Progress | None, *, first: int) -> Callable[[str], None]:
    numbers = itertools.count(first)

    def status(message: str) -> None:
        if progress is not None:
            progress(next(numbers), STAGES, message)

    return status


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.1f} %"


def _print_part(heading: str, lines: dict[str, str]) -> None:
    """Prints a part of the demo: a heading, and lines with a word in front."""
    screen.print(f"\n[bold]{heading}[/]")
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in lines.items():
        grid.add_row(f"  {name}", escape(text))
    screen.print(grid, highlight=False)


def _print_repair(deep: RepairDemo) -> None:
    before, after = deep.accuracies
    old, new = deep.repaired.before.verdict, deep.repaired.after.verdict
    how = f"after {SCHEDULE.epochs} epochs of SGD"
    _print_part(
        f"1. A network of {deep.repaired.before.n_layers} layers that does not learn",
        {
            "as it is": f"{_percent(before)} of the test images correct {how}",
            "diagnosis": f"{old.word}, score {old.score:.2f}: {old.findings[0]}",
            "repair": f"{deep.repaired.remark} ({deep.repaired.seconds:.1f} s)",
            "diagnosis now": f"{new.word}, score {new.score:.2f}",
            "repaired": f"{_percent(after)} of the test images correct {how}",
        },
    )


def _print_rebuilding(made: Demo) -> None:
    check, seconds = made.comparison.check, sum(layer.seconds for layer in made.result.layers)
    n_features = sum(layer.n_features for layer in made.result.layers)
    word = "same function" if made.is_same_function else "NOT the same function"
    _print_part(
        "2. A trained network, rebuilt from random weights by its norms",
        {
            "trained": f"{_percent(made.comparison.target_accuracy)} of the test images correct",
            "planned": f"{n_features:,} frozen features in {len(made.plan.layers)} layers",
            "rebuilt": f"in {seconds:.1f} s; {made.result.n_norm_parameters:,} norm parameters were chosen, "
            f"{check.n_frozen:,} frozen weights come from the seed",
            "saved": f"{readable(made.file_size)} with the seed and the norms, instead of "
            f"{readable(made.whole_size)} with the frozen weights",
            "verified": f"{word}: {made._agreement.lower()}, outputs differ by {check.relative_error:.0e}",
        },
    )
    for warning in made.result.warnings:
        screen.print(f"[yellow]warning:[/] {escape(warning)}", highlight=False)


@app.command(rich_help_panel=START, epilog=examples("onlynorm demo", "onlynorm demo --features ortho_cond"))
def demo(
    seed: Annotated[int, option(FEATURES, "N", "Seed of the data split, the training and the frozen weights.")] = 0,
    features: FeaturesName = "he_normal",
    excess: Excess = None,
    out: Annotated[Path, option(OUTPUT, "FOLDER", "Folder of the page.")] = Path("onlynorm-out"),
    as_json: AsJson = False,
) -> None:
    """Repair a deep network that does not learn, and rebuild a trained one from random weights.

    Takes less than a minute, and ends with a page of figures. Exits with 1 if the repaired network does not learn, or
    if the rebuilt network does not compute the same function.
    """
    need_folder(out, what="pages")
    page = out / "demo.html"
    with spinner("demo", hidden=as_json) as status:

        def progress(done: int, total: int, message: str) -> None:
            status(f"{message} ({done + 1} of {total})")

        made = run_demo(seed=seed, features=features, excess=excess, progress=progress)
        deep = run_repair(seed=seed, progress=progress)
    write_page(page, [deep, made], title="What norms can do", text="Made by onlynorm demo on the embedded digits data.")
    if as_json:
        print_json(made.as_dict() | {"repair": deep.as_dict(), "page": str(page)})
    else:
        _print_repair(deep)
        _print_rebuilding(made)
        screen.print(f"\nPage with figures: {escape(str(page))}", soft_wrap=True)
    if not (made.is_same_function and deep.has_learned):
        raise typer.Exit(1)
