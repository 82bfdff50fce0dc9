"""`onlynorm bench layers`: what norm-only layers cost beside ordinary ones."""

from __future__ import annotations

from typing import Annotated

import typer

from onlynorm.bench.layers import bench_layers
from onlynorm.cli.entry import AsJson
from onlynorm.cli.measure import AsMarkdown, Quick, benches, show
from onlynorm.screen import spinner


@benches.command("layers", epilog="Example: `onlynorm bench layers --quick`")
def measure_layers(
    quick: Quick = False,
    repeats: Annotated[int, typer.Option(help="Best of how many turns.", min=1)] = 15,
    markdown: AsMarkdown = False,
    as_json: AsJson = False,
) -> None:
    """Norm-only layers beside ordinary ones, preconditioned steps, and features in blocks."""
    with spinner("bench layers", hidden=False) as say:
        result = bench_layers(quick=quick, repeats=repeats, progress=say)
    show(result, markdown=markdown, as_json=as_json)
