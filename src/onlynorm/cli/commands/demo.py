"""`onlynorm demo`: trains a small network, rebuilds it from random weights and norms, and compares both.

The layers of the rebuilt network are frozen and random, generated from one seed. Only the seed and the norms are saved
to a file. The network loaded from this file is compared with the trained one on test images.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import save as to_bytes
from torch import nn

from onlynorm.cli.app import AsJson, Excess, FeaturesName, app
from onlynorm.cli.help import FEATURES, START, examples, option
from onlynorm.cli.terminal import print_facts, print_json, print_layers, print_plan, screen, spinner
from onlynorm.data import Split, digits
from onlynorm.errors import MemoryLimitError
from onlynorm.files import load, save
from onlynorm.models import vgg
from onlynorm.reconstruction import Comparison, Plan, Reconstruction, Wide, compare, plan, reconstruct
from onlynorm.seeds import seeded
from onlynorm.validate import Progress

N_STAGES = 5
CALIBRATION = 512
"""Number of training images for calibration of the ranges."""


@dataclass(frozen=True)
class Demo:
    """The results of the demo. Sizes in bytes, in float64: the saved file, the same with frozen weights, and the
    trained network."""

    data: str
    plan: Plan
    result: Reconstruction
    comparison: Comparison
    file_size: int
    whole_size: int
    target_size: int
    seconds: float

    @property
    def is_same_function(self) -> bool:
        """Whether predictions agree on all test images, outputs to 1e-8, and all frozen weights come from the seed."""
        check = self.comparison.check
        return check.agreement == 1.0 and check.relative_error <= 1e-8 and check.is_reproducible


def run_demo(
    *, seed: int = 0, features: str = "he_normal", excess: float | None = None, progress: Progress | None = None
) -> Demo:
    """Trains on the digits, rebuilds every layer, saves and loads the network, and compares on the test images."""
    start, stages = time.perf_counter(), itertools.count()

    def status(message: str) -> None:
        if progress is not None:
            progress(next(stages), N_STAGES, message)

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
    return Demo(
        data=str(data),
        plan=planned,
        result=result,
        comparison=comparison,
        file_size=file_size,
        whole_size=file_size + 8 * n_frozen,
        target_size=len(to_bytes(target.state_dict())),
        seconds=time.perf_counter() - start,
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


@app.command(rich_help_panel=START, epilog=examples("onlynorm demo", "onlynorm demo --features ortho_cond"))
def demo(
    seed: Annotated[int, option(FEATURES, "N", "Seed of the data split, the training and the frozen weights.")] = 0,
    features: FeaturesName = "he_normal",
    excess: Excess = None,
    as_json: AsJson = False,
) -> None:
    """Train a small network, rebuild it from frozen random weights and norms only, and compare both."""
    with spinner("demo", hidden=as_json) as status:
        made = run_demo(
            seed=seed, features=features, excess=excess, progress=lambda done, total, message: status(message)
        )
    check = made.comparison.check
    facts = {
        "data": made.data,
        "target_accuracy": made.comparison.target_accuracy,
        "network_accuracy": made.comparison.network_accuracy,
        "agreement": check.agreement,
        "relative_error": check.relative_error,
        "n_frozen": check.n_frozen,
        "is_reproducible": check.is_reproducible,
        "n_other": check.n_other,
        "file_bytes": made.file_size,
        "file_with_frozen_bytes": made.whole_size,
        "target_bytes": made.target_size,
        "solve_seconds": sum(layer.seconds for layer in made.result.layers),
        "seconds": made.seconds,
        "is_same_function": made.is_same_function,
    }
    if as_json:
        layers = [layer.as_dict() for layer in made.result.layers]
        print_json(facts | {"plan": made.plan.as_dict(), "layers": layers})
    else:
        print_plan(f"a small convolutional network, from {features} features", made.plan)
        screen.print("\n[bold]Rebuilt layers[/]")
        print_layers(made.result)
        screen.print()
        print_facts("Trained and rebuilt network", facts)
        word = "computes the same function" if made.is_same_function else "does NOT compute the same function"
        screen.print(f"\nThe rebuilt network with frozen random layers {word} as the trained one.")
    if not made.is_same_function:
        raise typer.Exit(1)
