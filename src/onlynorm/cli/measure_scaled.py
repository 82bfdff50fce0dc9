"""`onlynorm bench scaled`: accuracy against the condition number of the features."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from onlynorm.bench.scaled import bench_scaled
from onlynorm.bench.scaled_results import ScaledSizes
from onlynorm.cli.entry import AsJson, kept_in
from onlynorm.cli.measure import OUT, AsMarkdown, Epochs, Force, Images, Out, Quick, benches, show
from onlynorm.screen import errors, spinner


@benches.command("scaled", epilog="Example: `onlynorm bench scaled --data fashion_mnist --seeds 3 --markdown`")
def measure_scaled(
    quick: Quick = False,
    data: Annotated[
        list[str] | None, typer.Option(help="cifar10 or fashion_mnist, may be repeated; both if left out.")
    ] = None,
    law: Annotated[
        list[str] | None, typer.Option(help="semi-circle or geometric, may be repeated; both if left out.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Networks of each kind; 3 and 10 by data, 2 if quick.", min=1)
    ] = None,
    epochs: Epochs = None,
    images: Images = None,
    out: Out = OUT,
    force: Force = False,
    markdown: AsMarkdown = False,
    as_json: AsJson = False,
) -> None:
    """Networks with features of growing condition number, trained from scratch; resumes after a kill."""
    usual = ScaledSizes.quick() if quick else ScaledSizes()
    sizes = dataclasses.replace(usual, n_epochs=epochs or usual.n_epochs, n_train=images or usual.n_train)
    with kept_in(out), spinner("bench scaled", hidden=False) as say:
        result = bench_scaled(
            data=data, laws=law, n_seeds=seeds, sizes=sizes, quick=quick, out=out, force=force, progress=say,
            on_row=lambda run: errors.print(
                f"{run.data}, {run.scale}, rate {run.rate:g}, seed {run.seed}: {100 * run.accuracy:.1f} %",
                highlight=False,
            ),
        )  # fmt: skip
    show(result, markdown=markdown, as_json=as_json)
