"""`onlynorm bench scratch`: norms trained from scratch beside the ordinary network."""

from __future__ import annotations

from typing import Annotated

import typer

from onlynorm.bench.scratch import bench_scratch
from onlynorm.cli.entry import AsJson, kept_in
from onlynorm.cli.measure import OUT, AsMarkdown, Epochs, Force, Out, Quick, benches, show
from onlynorm.screen import errors, spinner


@benches.command("scratch", epilog="Example: `onlynorm bench scratch --data cifar10 --seeds 5`")
def measure_scratch(
    quick: Quick = False,
    data: Annotated[
        list[str] | None, typer.Option(help="fashion_mnist or cifar10, may be repeated; both if left out.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Networks of each way.", min=1)] = 5,
    trials: Annotated[int, typer.Option(help="Other networks by which the rate of a way is chosen.", min=1)] = 3,
    epochs: Epochs = None,
    out: Out = OUT,
    force: Force = False,
    markdown: AsMarkdown = False,
    as_json: AsJson = False,
) -> None:
    """Norms trained from scratch, on gamma and on weights, beside the ordinary network; resumes after a kill."""
    with kept_in(out), spinner("bench scratch", hidden=False) as say:
        result = bench_scratch(
            data=data, n_seeds=seeds, n_trials=trials, epochs=epochs, quick=quick, out=out, force=force,
            progress=say,
            on_row=lambda run: errors.print(
                f"{run.data}, {run.way}, seed {run.seed}: {100 * run.accuracy:.1f} %", highlight=False
            ),
        )  # fmt: skip
    errors.print(f"accuracy against the share of features: {result.figure}", highlight=False)
    show(result, markdown=markdown, as_json=as_json)
