"""`onlynorm reproduce`: reproduces figures and tables of the papers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from onlynorm.cli.app import AsJson, ClusterName, Threads, Workers, app, resumable
from onlynorm.cli.help import OUTPUT, PAPERS, RUN, examples, flag, option
from onlynorm.cli.terminal import print_crowding, print_json, print_record, record_facts, screen, stages
from onlynorm.errors import UnknownNameError

RECORDS = Path("onlynorm-out/records")


@app.command(
    "reproduce",
    rich_help_panel=PAPERS,
    epilog=examples(
        "onlynorm reproduce random_features:fig-3",
        "onlynorm reproduce hardt_ma2017 --workers 2",
        "onlynorm reproduce random_features:fig-3 --scale paper",
    ),
)
def reproduce_command(
    ids: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ID",
            help="Figures or tables, as in random_features:fig-3, or papers, as in hardt_ma2017; all by default.",
        ),
    ] = None,
    scale: Annotated[
        str,
        option(
            RUN,
            "NAME",
            "quick, or paper for sizes as close to the paper's as feasible on a CPU: up to hours.",
            choices=("quick", "paper"),
        ),
    ] = "quick",
    force: Annotated[bool, flag(RUN, "Compute finished parts again.", "--force")] = False,
    workers: Workers = None,
    cluster: ClusterName = None,
    threads: Threads = 1,
    out: Annotated[Path, option(OUTPUT, "FOLDER", "Folder for records and figures.")] = RECORDS,
    as_json: AsJson = False,
) -> None:
    """Reproduce figures and tables of the papers and compare with the published values; resumes if interrupted."""
    from onlynorm.evidence.papers.reproduce import reproduce

    if scale not in ("quick", "paper"):
        raise UnknownNameError("scale", scale, ("quick", "paper"))
    print_crowding(workers, cluster, threads)
    with resumable(out), stages(hidden=as_json) as show:
        records = reproduce(
            ids or None, scale=scale, out=out, force=force, workers=workers, cluster=cluster,  # type: ignore[arg-type]
            threads=threads, progress=show,
        )  # fmt: skip
    if as_json:
        print_json([record_facts(r) for r in records])
    else:
        for record in records:
            print_record(record)
        screen.print(f"Records and figures are in {escape(str(out))}; `onlynorm report` writes them to one page.")
    if any(str(r.verdict) == "not reproduced" for r in records):
        raise typer.Exit(1)
