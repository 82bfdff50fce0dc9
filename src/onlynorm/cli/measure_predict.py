"""`onlynorm bench predict`: whether the verdict on an untrained network foretells that it learns."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from onlynorm.bench.predict import PredictSizes, bench_predict
from onlynorm.bench.predict_subjects import FIRST_SEEDS
from onlynorm.cli.entry import AsJson, kept_in
from onlynorm.cli.measure import OUT, AsMarkdown, Force, Out, Quick, benches, show
from onlynorm.errors import UnknownNameError
from onlynorm.screen import errors, spinner


@benches.command("predict", epilog="Example: `onlynorm bench predict --networks calibration --markdown`")
def measure_predict(
    networks: Annotated[
        str, typer.Option(help="test, or calibration: the networks on which thresholds were set.")
    ] = "test",
    quick: Quick = False,
    steps: Annotated[int | None, typer.Option(help="Steps of each training; 250, and 20 if quick.", min=5)] = None,
    out: Out = OUT,
    force: Force = False,
    markdown: AsMarkdown = False,
    as_json: AsJson = False,
) -> None:
    """Networks of many kinds: the verdict at the start against what training made of them; resumes after a kill."""
    if networks not in FIRST_SEEDS:
        raise UnknownNameError("set of networks", networks, FIRST_SEEDS)
    usual = PredictSizes.quick() if quick else PredictSizes()
    sizes = dataclasses.replace(usual, n_steps=steps or usual.n_steps)
    with kept_in(out), spinner("bench predict", hidden=False) as say:
        result = bench_predict(
            networks, sizes=sizes, quick=quick, out=out, force=force, progress=say,
            on_row=lambda row: errors.print(
                f"{row.name}: score {row.score:.3g}, best loss {row.loss:.3f}", highlight=False
            ),
        )  # fmt: skip
    errors.print(f"the curve: {result.figure}", highlight=False)
    show(result, markdown=markdown, as_json=as_json)
