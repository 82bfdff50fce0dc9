"""The command that shows everything at once: the demo."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from onlynorm.cli.entry import AsJson, Excess, FeaturesName, app
from onlynorm.demo import run_demo
from onlynorm.screen import print_facts, print_json, print_layers, print_plan, screen, spinner
from onlynorm.solvers.memory import readable


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
