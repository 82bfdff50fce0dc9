"""`onlynorm bench`: everything that is promised, measured beside its competitors and judged by code."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from onlynorm.bench import RECIPES, Measured, Sizes, bench_reconstruct, bench_solve, bench_tune, is_met
from onlynorm.cli.entry import AsJson, app, need_folder
from onlynorm.screen import bench_markdown, errors, print_bench, print_json, spinner

benches = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    epilog="Examples: `onlynorm bench solve --quick`, `onlynorm bench tune --markdown`. Exit code 1: missed.",
)
app.add_typer(benches, name="bench")
AsMarkdown = Annotated[bool, typer.Option("--markdown", help="Print the tables for a README.")]
Quick = Annotated[bool, typer.Option("--quick", help="Leave out what takes long.")]


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


@benches.command("solve", epilog="Example: `onlynorm bench solve --quick`")
def measure_solve(
    quick: Quick = False,
    repeats: Annotated[int, typer.Option(help="Best of how many turns.", min=1)] = 3,
    markdown: AsMarkdown = False,
    as_json: AsJson = False,
) -> None:
    """The solver beside dense LU, the papers' method and LSMR."""
    with spinner("bench solve", hidden=False) as say:
        result = bench_solve(quick=quick, repeats=repeats, progress=say)
    show(result, markdown=markdown, as_json=as_json)


@benches.command("reconstruct", epilog="Example: `onlynorm bench reconstruct --features he_normal --images 100`")
def measure_reconstruct(
    quick: Quick = False,
    features: Annotated[list[str] | None, typer.Option(help="Kinds of features; all six if left out.")] = None,
    images: Annotated[int | None, typer.Option(help="Test images in float32.", min=1)] = None,
    calibration: Annotated[int | None, typer.Option(help="Training images for the ranges.", min=1)] = None,
    out: Annotated[Path, typer.Option(help="Folder for records and networks.")] = Path("onlynorm-out/bench"),
    force: Annotated[bool, typer.Option("--force", help="Make finished rows again.")] = False,
    markdown: AsMarkdown = False,
    as_json: AsJson = False,
) -> None:
    """A trained ResNet-20 from six kinds of frozen features; resumes after a kill."""
    need_folder(out)
    usual = Sizes.quick() if quick else Sizes()
    sizes = dataclasses.replace(usual, images=images or usual.images, calibration=calibration or usual.calibration)
    with spinner("bench reconstruct", hidden=False) as say:
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
