"""`onlynorm bench align`: a target's rows aligned with too few features, beside the described greedy."""

from __future__ import annotations

from typing import Annotated

import typer

from onlynorm.bench.align import bench_align
from onlynorm.cli.entry import AsJson
from onlynorm.cli.measure import AsMarkdown, Quick, benches, show
from onlynorm.screen import spinner


@benches.command("align", epilog="Example: `onlynorm bench align --markdown`")
def measure_align(
    quick: Quick = False,
    repeats: Annotated[int, typer.Option(help="Best of how many turns.", min=1)] = 5,
    markdown: AsMarkdown = False,
    as_json: AsJson = False,
) -> None:
    """Rows of a target aligned with too few features, beside the described greedy."""
    with spinner("bench align", hidden=False) as say:
        result = bench_align(quick=quick, repeats=repeats, progress=say)
    show(result, markdown=markdown, as_json=as_json)
