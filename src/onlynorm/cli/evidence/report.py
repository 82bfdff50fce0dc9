"""`onlynorm report`: one HTML page with all records and findings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rich.markup import escape

from onlynorm.cli.app import AsJson, app
from onlynorm.cli.evidence.reproduce import RECORDS
from onlynorm.cli.evidence.theorems import exit_if_one_fails, show_checks
from onlynorm.cli.help import OUTPUT, PAPERS, RUN, examples, flag, option
from onlynorm.cli.terminal import errors, print_json, screen, spinner
from onlynorm.errors import StorageError
from onlynorm.memory import readable
from onlynorm.storage import claiming


@app.command(rich_help_panel=PAPERS, epilog=examples("onlynorm report", "onlynorm report --check --out report.html"))
@claiming("out")
def report(
    records: Annotated[Path, option(RUN, "FOLDER", "Folder with the records of `onlynorm reproduce`.")] = RECORDS,
    check: Annotated[bool, flag(RUN, "Run the checks of the statements first.", "--check")] = False,
    out: Annotated[Path, option(OUTPUT, "FILE", "The HTML file to write.")] = Path("onlynorm-out/report.html"),
    as_json: AsJson = False,
) -> None:
    """Write all records and verdicts to one self-contained HTML page."""
    from onlynorm.evidence import registry
    from onlynorm.evidence.records import read_records
    from onlynorm.evidence.report.page import write_report

    if out.is_dir():
        raise StorageError(f"a report needs a file name; {out} is a folder. Try {out / 'report.html'}.")
    findings = show_checks(registry.statements(), 0, hidden=as_json) if check else ()
    with spinner("report", hidden=as_json) as status:
        status(f"writing {out}")
        path = write_report(records, out, findings=findings)
    size, n_records = path.stat().st_size, len(read_records(records))
    if not n_records:
        errors.print(f"{escape(str(records))} has no records yet; run `onlynorm reproduce`.", highlight=False)
    if as_json:
        print_json({"page": str(path), "bytes": size, "records": n_records, "checked": len(findings)})
    else:
        words = f"{readable(size)}, {n_records} record{'s' * (n_records != 1)}"
        screen.print(f"{escape(str(path))} ({words}): open it in a browser.")
    exit_if_one_fails(findings)
