"""Commands about the papers: their statements, their figures and tables, and the page that joins them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from onlynorm import theorems as registry
from onlynorm.cli.entry import AsJson, app, kept_in
from onlynorm.errors import StorageError, UnknownNameError
from onlynorm.papers import reproduce
from onlynorm.report import Verdict as Outcome
from onlynorm.report import read_records, write_report
from onlynorm.screen import (
    bar,
    errors,
    print_facts,
    print_json,
    print_record,
    print_statements,
    record_facts,
    screen,
    stages,
    statement_facts,
)
from onlynorm.solvers.memory import readable
from onlynorm.storage import claiming
from onlynorm.theorems import Finding, Statement, Verdict

RECORDS = Path("onlynorm-out/records")


@app.command(
    epilog="Examples: `onlynorm theorems giannou2023:thm-1`, `onlynorm theorems --paper random_features --check`"
)
def theorems(
    key: Annotated[str | None, typer.Argument(help="Key of one statement, as in giannou2023:thm-1.")] = None,
    paper: Annotated[
        str | None, typer.Option(help=f"Only the statements of one paper: {', '.join(registry.PAPERS)}.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Run the checks, about a minute for all, and print a verdict each.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the checks.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Every numbered statement of the papers: list them, show one, or run their checks."""
    of_paper = registry.statements(paper)
    chosen = [s for s in of_paper if key in (None, s.key)]
    if key is not None and not chosen:
        raise UnknownNameError(f"statement of {paper}" if paper else "statement", key, (s.key for s in of_paper))
    found = {f.key: f for f in _run_checks(chosen, seed, hidden=as_json)} if check else {}
    if as_json:
        print_json([statement_facts(s, found.get(s.key)) for s in chosen])
    elif key is not None:
        print_facts(f"{key}: {chosen[0].title}", statement_facts(chosen[0], found.get(key)))
    else:
        print_statements(chosen, found)
    _exit_if_one_fails(found.values())


@app.command(
    "reproduce",
    epilog="Examples: `onlynorm reproduce random_features:fig-3`, `onlynorm reproduce hardt_ma2017`, "
    "`onlynorm reproduce random_features:fig-3 --scale paper`",
)
def reproduce_command(
    ids: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"Figures or tables, as in random_features:fig-3, or papers ({', '.join(registry.PAPERS)}); "
            "everything if left out."
        ),
    ] = None,
    scale: Annotated[
        str, typer.Option(help="quick, or paper for sizes as near to the paper's as a processor gets: up to hours.")
    ] = "quick",
    out: Annotated[Path, typer.Option(help="Folder for records and figures.")] = RECORDS,
    force: Annotated[bool, typer.Option("--force", help="Compute finished pieces again.")] = False,
    as_json: AsJson = False,
) -> None:
    """Redraw figures and tables of the papers with the paper's number beside ours; resumes after a kill."""
    if scale not in ("quick", "paper"):
        raise UnknownNameError("scale", scale, ("quick", "paper"))
    with kept_in(out), stages(hidden=as_json) as show:
        records = reproduce(ids or None, scale=scale, out=out, force=force, progress=show)  # type: ignore[arg-type]
    if as_json:
        print_json([record_facts(r) for r in records])
    else:
        for record in records:
            print_record(record)
        screen.print(f"Records and figures are in {escape(str(out))}; `onlynorm report` joins them into one page.")
    if any(r.verdict is Outcome.NOT_REPRODUCED for r in records):
        raise typer.Exit(1)


@app.command(epilog="Example: `onlynorm report --check --out report.html`")
@claiming("out")
def report(
    records: Annotated[Path, typer.Option(help="Folder with the records of `onlynorm reproduce`.")] = RECORDS,
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("onlynorm-out/report.html"),
    check: Annotated[bool, typer.Option("--check", help="Run the checks of the statements first.")] = False,
    as_json: AsJson = False,
) -> None:
    """Join records and verdicts into one self-contained HTML page."""
    if out.is_dir():
        raise StorageError(f"a report needs the name of a file; {out} is a folder. Try {out / 'report.html'}.")
    findings = _run_checks(registry.statements(), 0, hidden=as_json) if check else ()
    path = write_report(records, out, findings=findings)
    size, n_records = path.stat().st_size, len(read_records(records))
    if not n_records:
        errors.print(f"{escape(str(records))} has no records yet; `onlynorm reproduce` makes them.", highlight=False)
    if as_json:
        print_json({"page": str(path), "bytes": size, "records": n_records, "checked": len(findings)})
    else:
        words = f"{readable(size)}, {n_records} record{'s' * (n_records != 1)}"
        screen.print(f"{escape(str(path))} ({words}): open it in a browser, it needs no network.")
    _exit_if_one_fails(findings)


def _run_checks(chosen: Sequence[Statement], seed: int, *, hidden: bool) -> tuple[Finding, ...]:
    with bar("checks", len(chosen), hidden=hidden) as advance:
        return registry.run_checks([s.key for s in chosen], seed=seed, progress=lambda f: advance(f.key))


def _exit_if_one_fails(findings: Iterable[Finding]) -> None:
    if any(f.verdict is Verdict.FAILS for f in findings):
        raise typer.Exit(1)
