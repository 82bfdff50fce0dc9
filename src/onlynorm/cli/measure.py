"""`onlynorm bench`: everything that is promised, measured beside its competitors and judged by code."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from onlynorm.bench import (
    FAMILIES,
    RECIPES,
    AdaptSizes,
    FrozenSizes,
    Measured,
    Sizes,
    bench_adapt,
    bench_chain,
    bench_frozen,
    bench_reconstruct,
    bench_solve,
    bench_tune,
    is_met,
)
from onlynorm.cli.entry import AsJson, app, kept_in
from onlynorm.data import CORRUPTIONS
from onlynorm.screen import bench_markdown, errors, print_bench, print_json, spinner

benches = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    epilog="Examples: `onlynorm bench solve --quick`, `onlynorm bench tune --markdown`. Exit code 1: a goal is missed.",
)
app.add_typer(benches, name="bench")
AsMarkdown = Annotated[bool, typer.Option("--markdown", help="Print the tables for a README.")]
Quick = Annotated[bool, typer.Option("--quick", help="A small run: what takes long is left out or shrunk.")]
Out = Annotated[Path, typer.Option(help="Folder for records and what was made.")]
Force = Annotated[bool, typer.Option("--force", help="Make finished rows again.")]
Epochs = Annotated[int | None, typer.Option(help="Epochs of training; its own number if left out.", min=1)]
Images = Annotated[int | None, typer.Option(help="Training images; its own number if left out.", min=1)]
OUT = Path("onlynorm-out/bench")


@benches.callback()
def describe() -> None:
    """Measure onlynorm beside its competitors, in the same run."""


def show(result: Measured, *, markdown: bool, as_json: bool) -> None:
    """Prints what a benchmark measured; ends with 1 where a goal was missed."""
    if as_json:
        print_json(result.as_dict())
    elif markdown:
        print(bench_markdown(result))
    else:
        print_bench(result)
    if not is_met(result):
        raise typer.Exit(1)


@benches.command("solve", epilog="Example: `onlynorm bench solve --quick --families flat`")
def measure_solve(
    quick: Quick = False,
    families: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(FAMILIES)}; may be repeated, all if left out.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Best of how many turns; slow methods have fewer.", min=1)] = 20,
    markdown: AsMarkdown = False,
    as_json: AsJson = False,
) -> None:
    """The solver beside LU, Cholesky, QR, lstsq and LSMR, on one thread."""
    with spinner("bench solve", hidden=False) as say:
        result = bench_solve(
            quick=quick, families=families or FAMILIES, repeats=repeats, progress=say,
            on_duel=lambda duel: errors.print(str(duel), highlight=False, markup=False),
        )  # fmt: skip
    show(result, markdown=markdown, as_json=as_json)


@benches.command("reconstruct", epilog="Example: `onlynorm bench reconstruct --features he_normal --images 100`")
def measure_reconstruct(
    quick: Quick = False,
    features: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(RECIPES)}; may be repeated, all six if left out.")
    ] = None,
    images: Annotated[int | None, typer.Option(help=f"Test images in float32 ({Sizes().images}).", min=1)] = None,
    calibration: Annotated[
        int | None, typer.Option(help=f"Training images for the ranges ({Sizes().calibration}).", min=1)
    ] = None,
    out: Out = OUT,
    force: Force = False,
    markdown: AsMarkdown = False,
    as_json: AsJson = False,
) -> None:
    """A trained ResNet-20 from six kinds of frozen features; resumes after a kill."""
    usual = Sizes.quick() if quick else Sizes()
    sizes = dataclasses.replace(usual, images=images or usual.images, calibration=calibration or usual.calibration)
    with kept_in(out), spinner("bench reconstruct", hidden=False) as say:
        result = bench_reconstruct(
            features=features or tuple(RECIPES), sizes=sizes, quick=quick, out=out, force=force, progress=say,
            on_row=lambda row: errors.print(f"{row.features}: {row.goal.measured}", highlight=False),
        )  # fmt: skip
    show(result, markdown=markdown, as_json=as_json)


@benches.command("tune", epilog="Example: `onlynorm bench tune --repeats 50`")
def measure_tune(
    quick: Quick = False,
    repeats: Annotated[int, typer.Option(help="Best of how many turns.", min=1)] = 20,
    markdown: AsMarkdown = False,
    as_json: AsJson = False,
) -> None:
    """A step of norm-only tuning beside full tuning, head only and PEFT."""
    with spinner("bench tune", hidden=False) as say:
        result = bench_tune(quick=quick, repeats=repeats, progress=say)
    show(result, markdown=markdown, as_json=as_json)


@benches.command("adapt", epilog="Example: `onlynorm bench adapt --corruptions blur --seeds 3`")
def measure_adapt(
    quick: Quick = False,
    corruptions: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(CORRUPTIONS)}; may be repeated, all four if left out.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Runs of each way; 5, and 3 if quick.", min=1)] = None,
    severity: Annotated[float, typer.Option(help="Severity of the corruptions, from 0 to 5.")] = 3.0,
    epochs: Epochs = None,
    images: Images = None,
    out: Out = OUT,
    force: Force = False,
    markdown: AsMarkdown = False,
    as_json: AsJson = False,
) -> None:
    """A trained ResNet-20 adapted to corrupted images in six ways; resumes after a kill."""
    usual = AdaptSizes.quick() if quick else AdaptSizes()
    sizes = dataclasses.replace(usual, epochs=epochs or usual.epochs, n_train=images or usual.n_train)
    with kept_in(out), spinner("bench adapt", hidden=False) as say:
        result = bench_adapt(
            corruptions=corruptions or CORRUPTIONS, n_seeds=seeds or (3 if quick else 5), severity=severity,
            sizes=sizes, out=out, force=force, progress=say,
            on_row=lambda run: _tell(f"{run.images}, {run.way}, seed {run.seed}", run.accuracy),
        )  # fmt: skip
    show(result, markdown=markdown, as_json=as_json)


@benches.command("frozen", epilog="Example: `onlynorm bench frozen --epochs 40 --images 20000`")
def measure_frozen(
    quick: Quick = False,
    seeds: Annotated[int, typer.Option(help="Runs of each way.", min=1)] = 3,
    epochs: Epochs = None,
    images: Images = None,
    out: Out = OUT,
    force: Force = False,
    markdown: AsMarkdown = False,
    as_json: AsJson = False,
) -> None:
    """Frozen random ResNets that learn by their norms alone; resumes after a kill."""
    usual = FrozenSizes.quick() if quick else FrozenSizes()
    sizes = dataclasses.replace(usual, epochs=epochs or usual.epochs, n_train=images or usual.n_train)
    with kept_in(out), spinner("bench frozen", hidden=False) as say:
        result = bench_frozen(
            n_seeds=seeds, sizes=sizes, quick=quick, out=out, force=force, progress=say,
            on_row=lambda run: _tell(
                f"ResNet-{run.depth}, width {run.width}, {run.way}, seed {run.seed}", run.accuracy
            ),
        )  # fmt: skip
    errors.print(f"the histogram of the scales: {result.figure}", highlight=False)
    show(result, markdown=markdown, as_json=as_json)


def _tell(what: str, share: float) -> None:
    errors.print(f"{what}: {100 * share:.1f} %", highlight=False)


@benches.command("chain", epilog="Example: `onlynorm bench chain --quick`")
def measure_chain(
    quick: Quick = False,
    repeats: Annotated[int, typer.Option(help="Best of how many turns.", min=1)] = 40,
    markdown: AsMarkdown = False,
    as_json: AsJson = False,
) -> None:
    """Random networks as batched chains beside the obvious loop with singular values."""
    with spinner("bench chain", hidden=False) as say:
        result = bench_chain(quick=quick, repeats=repeats, progress=say)
    show(result, markdown=markdown, as_json=as_json)
