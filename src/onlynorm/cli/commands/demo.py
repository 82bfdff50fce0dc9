"""The shortest whole walk: train a small network, rebuild all of it from random weights by its norms only, compare.

The rebuilt network has no trained weight: its layers are frozen and random, known by one seed. What is kept is the seed
and the norms. They go to a file, come back from it, and the network made of them is judged on images it never saw.

The command that shows everything at once: the demo.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save as to_bytes
from torch import nn

from onlynorm.cli.app import AsJson, Excess, FeaturesName, app
from onlynorm.cli.terminal import print_facts, print_json, print_layers, print_plan, screen, spinner
from onlynorm.data import Split, digits
from onlynorm.errors import MemoryLimitError
from onlynorm.memory import readable
from onlynorm.models import vgg
from onlynorm.reconstruction import Plan, Reconstruction, load, plan, reconstruct, save
from onlynorm.reconstruction.verify import Comparison, compare
from onlynorm.seeds import seeded

Step = Callable[[str], None]
CALIBRATION = 512
"""Training images that show each feature the range it has to cover."""


@dataclass(frozen=True)
class Demo:
    """What the demo did and what came out. Sizes in bytes, in float64: the file that is kept, the same network with its
    frozen weights written out, and the trained network."""

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
        """Whether both networks agree on every test image, with outputs equal to 1e-8, and the seed gives the rest."""
        check = self.comparison.check
        return check.agreement == 1.0 and check.relative_error <= 1e-8 and check.is_reproducible


def run_demo(
    *, seed: int = 0, features: str = "he_normal", excess: float | None = None, step: Step | None = None
) -> Demo:
    """Trains on the digits, rebuilds every layer, sends the norms through a file, and compares on the test images."""
    start, say = time.perf_counter(), step or (lambda _: None)
    choices: dict[str, Any] = {"features": features, "excess": excess, "seed": seed, "activation": nn.ReLU()}

    say("planning: features, memory, conditioning, time")  # first, so that a misspelt name does not wait for training
    target = make_target(seed=seed)
    planned = plan(target, inputs=torch.zeros(1, 64), **choices)
    if not planned.is_feasible:
        raise MemoryLimitError(
            f"the demo needs a plan that fits; {planned.remarks[0].rstrip('.')}. Take a smaller excess."
        )

    say("training a small convolutional network on the digits")
    data = digits(seed=seed)
    train(target, data, seed=seed).double().eval()

    say("rebuilding every layer from frozen random weights")
    result = reconstruct(target, inputs=data.train_inputs[:CALIBRATION].double(), **choices)

    say("writing the norms to a file, and making the network again from it")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digits.safetensors"
        save(result, path)
        file_size = path.stat().st_size
        network = load(path, into=make_target(seed=seed).double().eval())

    say("comparing both networks on the test images")
    comparison = compare(target, network, inputs=data.test_inputs.double(), labels=data.test_labels)
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
    """Three convolutions with batch norms and a linear layer, for images of 8 x 8 pixels in a row."""
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *vgg([[8, 8], [16]], in_channels=1, image_size=8, seed=seed))


def train(network: nn.Sequential, data: Split, *, seed: int, epochs: int = 8, batch: int = 64) -> nn.Sequential:
    """The network after a short Adam run on the training part."""
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


@app.command(epilog="Example: `onlynorm demo --features ortho_cond`")
def demo(
    seed: Annotated[int, typer.Option(help="Seed of the data split, the training and the frozen weights.")] = 0,
    features: FeaturesName = "he_normal",
    excess: Excess = None,
    as_json: AsJson = False,
) -> None:
    """Train a small network, rebuild all of it from random weights by its norms only, and compare."""
    with spinner("demo", hidden=as_json) as say:
        made = run_demo(seed=seed, features=features, excess=excess, step=say)
    check = made.comparison.check
    facts = {
        "data": made.data,
        "accuracy of the trained network": made.comparison.target_accuracy,
        "accuracy of the norm-only network": made.comparison.network_accuracy,
        "same prediction on the test images": check.agreement,
        "relative error of the outputs": check.relative_error,
        "frozen numbers, kept as a seed": check.n_frozen,
        "every one comes from the seed": check.is_reproducible,
        "numbers neither frozen nor in norms": check.n_other,
        "file of the seed and the norms": readable(made.file_size),
        "with the frozen numbers written out": readable(made.whole_size),
        "the trained network": readable(made.target_size),
        "seconds of solving": sum(layer.seconds for layer in made.result.layers),
        "seconds in all": made.seconds,
        "same function": made.is_same_function,
    }
    if as_json:
        layers = [dataclasses.asdict(layer) for layer in made.result.layers]
        print_json(facts | {"plan": made.plan.as_dict(), "layers": layers})
    else:
        print_plan(f"a small convolutional network, from {features} features", made.plan)
        screen.print("\n[bold]What came out, layer by layer[/]")
        print_layers(made.result)
        screen.print()
        print_facts("The trained network and the one that has only norms", facts)
        word = "computes the same function" if made.is_same_function else "does NOT compute the same function"
        screen.print(f"\nThe network whose layers are random and frozen {word} as the trained one.")
    if not made.is_same_function:
        raise typer.Exit(1)
