"""`onlynorm bench text`: a text classifier by its norms alone, beside the other ways of tuning."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from onlynorm.bench.text import TextSizes, bench_text
from onlynorm.cli.entry import AsJson, kept_in
from onlynorm.cli.measure import OUT, AsMarkdown, Force, Out, Quick, benches, show
from onlynorm.screen import errors, spinner


@benches.command("text", epilog="Example: `onlynorm bench text --seeds 5 --markdown`")
def measure_text(
    quick: Quick = False,
    seeds: Annotated[
        int | None, typer.Option(help="Trainings that are judged, for each way; 3, and 2 if quick.", min=2)
    ] = None,
    texts: Annotated[int | None, typer.Option(help="Texts to train on; 1024, and 64 if quick.", min=1)] = None,
    out: Out = OUT,
    force: Force = False,
    markdown: AsMarkdown = False,
    as_json: AsJson = False,
) -> None:
    """MiniLM on film reviews by its norms, its head, all of it, and PEFT; resumes after a kill."""
    usual = TextSizes.quick() if quick else TextSizes()
    sizes = dataclasses.replace(usual, seeds=seeds or usual.seeds, train=texts or usual.train)
    with kept_in(out), spinner("bench text", hidden=False) as say:
        result = bench_text(
            sizes=sizes, quick=quick, out=out, force=force, progress=say,
            on_row=lambda row: errors.print(
                f"{row.way}: {100 * row.accuracy:.2f} ± {100 * row.interval:.2f} %", highlight=False
            ),
        )  # fmt: skip
    show(result, markdown=markdown, as_json=as_json)
