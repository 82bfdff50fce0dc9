"""`onlynorm bench diagnose`: what a diagnosis costs, beside a plain pass and delve."""

from __future__ import annotations

from typing import Annotated

import typer

from onlynorm.bench.diagnose import bench_diagnose
from onlynorm.cli.entry import AsJson
from onlynorm.cli.measure import AsMarkdown, Quick, benches, show
from onlynorm.screen import spinner


@benches.command("diagnose", epilog="Example: `onlynorm bench diagnose --quick`")
def measure_diagnose(
    quick: Quick = False,
    repeats: Annotated[int, typer.Option(help="Best of how many turns.", min=1)] = 3,
    markdown: AsMarkdown = False,
    as_json: AsJson = False,
) -> None:
    """A diagnosis of ResNet-18 and ResNet-50 in passes forward and backward, beside delve."""
    with spinner("bench diagnose", hidden=False) as say:
        result = bench_diagnose(quick=quick, repeats=repeats, progress=say)
    show(result, markdown=markdown, as_json=as_json)
