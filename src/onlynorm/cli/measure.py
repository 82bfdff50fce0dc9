"""Commands that show and measure: the demo, and the benchmarks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from onlynorm.bench import (
    RECIPES,
    Bench,
    ReconstructBench,
    Sizes,
    TuneBench,
    bench_reconstruct,
    bench_solve,
    bench_tune,
)
from onlynorm.cli.entry import AsJson, Excess, FeaturesName, app, need_folder
from onlynorm.demo import run_demo
from onlynorm.errors import UnknownNameError
from onlynorm.screen import (
    bench_markdown,
    errors,
    print_bench,
    print_facts,
    print_json,
    print_layers,
    print_plan,
    screen,
    spinner,
)
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


@app.command(
    epilog="Examples: `onlynorm bench solve --quick`, `onlynorm bench solve --markdown`, `onlynorm bench reconstruct "
    "--features he_normal --images 100`, `onlynorm bench tune`"
)
def bench(
    which: Annotated[str, typer.Argument(help="Which benchmark: solve, reconstruct or tune.")] = "solve",
    quick: Annotated[bool, typer.Option("--quick", help="Leave out what takes long.")] = False,
    repeats: Annotated[
        int | None, typer.Option(help="solve, tune: best of how many turns; 3 and 20 if left out.", min=1)
    ] = None,
    features: Annotated[
        list[str] | None, typer.Option(help="reconstruct: kinds of features; all six if left out.")
    ] = None,
    images: Annotated[int | None, typer.Option(help="reconstruct: test images in float32.", min=1)] = None,
    calibration: Annotated[int | None, typer.Option(help="reconstruct: training images.", min=1)] = None,
    out: Annotated[Path, typer.Option(help="reconstruct: folder for records and networks.")] = Path(
        "onlynorm-out/bench"
    ),
    force: Annotated[bool, typer.Option("--force", help="reconstruct: make finished rows again.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables for a README.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure onlynorm beside its competitors, in the same run; `reconstruct` resumes after a kill."""
    result: Bench | ReconstructBench | TuneBench
    if which == "solve":
        with spinner("bench solve", hidden=False) as say:
            result = bench_solve(quick=quick, repeats=repeats or 3, progress=say)
    elif which == "tune":
        with spinner("bench tune", hidden=False) as say:
            result = bench_tune(quick=quick, repeats=repeats or 20, progress=say)
    elif which == "reconstruct":
        need_folder(out)
        usual = Sizes.quick() if quick else Sizes()
        sizes = dataclasses.replace(usual, images=images or usual.images, calibration=calibration or usual.calibration)
        with spinner("bench reconstruct", hidden=False) as say:
            result = bench_reconstruct(
                features=features or tuple(RECIPES), sizes=sizes, quick=quick, out=out, force=force, progress=say,
                on_row=lambda row: errors.print(f"{row.features}: {row.goal.measured}", highlight=False),
            )  # fmt: skip
    else:
        raise UnknownNameError("benchmark", which, ("reconstruct", "solve", "tune"))
    if as_json:
        print_json(result.as_dict())
    elif markdown:
        print(bench_markdown(result))
    else:
        print_bench(result)
    if not result.is_met:
        raise typer.Exit(1)
