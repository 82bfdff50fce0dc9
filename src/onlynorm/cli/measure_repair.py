"""`onlynorm bench repair`: deep networks that do not learn, repaired in every way and trained."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from onlynorm.bench.repair import bench_repair
from onlynorm.bench.repair_results import RepairSizes
from onlynorm.cli.entry import AsJson, kept_in
from onlynorm.cli.measure import OUT, AsMarkdown, Force, Out, Quick, benches, show
from onlynorm.screen import errors, spinner


@benches.command("repair", epilog="Example: `onlynorm bench repair --seeds 5 --markdown`")
def measure_repair(
    quick: Quick = False,
    seeds: Annotated[int | None, typer.Option(help="Networks of each kind; 5, and 3 if quick.", min=1)] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of training; 1000, and 120 if quick.", min=1)] = None,
    out: Out = OUT,
    force: Force = False,
    markdown: AsMarkdown = False,
    as_json: AsJson = False,
) -> None:
    """Deep networks on Fashion-MNIST after every repair, beside batch norms; resumes after a kill."""
    usual = RepairSizes.quick() if quick else RepairSizes()
    sizes = dataclasses.replace(usual, n_steps=steps or usual.n_steps)
    with kept_in(out), spinner("bench repair", hidden=False) as say:
        result = bench_repair(
            n_seeds=seeds, sizes=sizes, quick=quick, out=out, force=force, progress=say,
            on_row=lambda run: errors.print(
                f"depth {run.depth}, {run.activation}, {run.way}, seed {run.seed}: {100 * run.test_accuracy:.1f} %",
                highlight=False,
            ),
        )  # fmt: skip
    show(result, markdown=markdown, as_json=as_json)
