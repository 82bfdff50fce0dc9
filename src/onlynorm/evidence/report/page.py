"""The report: one HTML file that needs no network, opens from disk, and may be mailed to anyone."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from plotly.offline import get_plotlyjs

from onlynorm.evidence.records import Record, Verdict, read_records
from onlynorm.evidence.registry import Finding, Statement, papers
from onlynorm.evidence.registry import statements as every_statement
from onlynorm.evidence.report.article import article, record_anchor
from onlynorm.evidence.report.markup import chip, escape, script_json, seconds, table
from onlynorm.evidence.report.plots import plot_panels
from onlynorm.evidence.report.statements import statement_section
from onlynorm.storage import write_atomically
from onlynorm.validate import need_instance, need_items, need_path

_T = TypeVar("_T")


def write_report(records_dir: Path | str, out: Path | str, *, findings: Iterable[Finding] = ()) -> Path:
    """The path of a self-contained HTML page about the records below `records_dir` and every statement."""
    folder, path = need_path("records_dir", records_dir), need_path("out", out)
    page = render_page(read_records(folder), statements=every_statement(), findings=findings)
    write_atomically(path, page.encode())
    return path


def render_page(
    records: Sequence[Record],
    *,
    statements: Sequence[Statement] = (),
    findings: Iterable[Finding] = (),
) -> str:
    """The page as text."""
    records = _need_all("records", records, Record, "Pass those of read_records.")
    statements = _need_all("statements", statements, Statement, "Pass those of theorems.statements().")
    findings = _need_all("findings", findings, Finding, "Pass those of theorems.run_checks().")
    plots: list[dict[str, Any]] = []
    articles = []
    for record in records:
        start = len(plots)
        plots += plot_panels(record)
        articles.append(article(record, plots=range(start, len(plots))))
    plotly, own = get_plotlyjs(), _asset("page.js")
    theorems = statement_section(statements, findings, {paper.key: paper.title for paper in papers()})
    links = '<a href="#artifacts">Artifacts</a>' + ('<a href="#statements">Statements</a>' if theorems else "")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_policy(plotly, own)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>onlynorm: reproduction report</title>
<link rel="icon" href="data:,">
<style>{_asset("page.css")}</style>
</head>
<body>
<header><div class="mark"><span>onlynorm</span><nav>{links}</nav></div>
<h1>What the papers say, and what we measured</h1>
{_summary(records)}</header>
<noscript><p>Plots and filters need JavaScript; every number here is readable without it.</p></noscript>
<main>
<section id="artifacts"><h2>Artifacts</h2>
{"".join(articles) or '<p class="quiet">No records yet. Run <code>onlynorm reproduce</code>.</p>'}
</section>
{theorems}
</main>
<script type="application/json" id="plots">{script_json(plots)}</script>
<script>{plotly}</script>
<script>{own}</script>
</body>
</html>
"""


def _need_all(name: str, values: object, kind: type[_T], cure: str) -> list[_T]:
    return [need_instance(name, value, kind, cure=cure) for value in need_items(name, values, cure=cure)]


def _summary(records: Sequence[Record]) -> str:
    counts = Counter(record.verdict for record in records)
    words = " · ".join(f"{counts[verdict]} {escape(verdict.value)}" for verdict in Verdict if counts[verdict])
    latest = max((record.created for record in records), default="")[:10]
    line = f"{len(records)} record{'s' * (len(records) != 1)}" + (f": {words}." if words else ".")
    rows = [
        [
            f'<a href="#{record_anchor(record)}">{escape(record.title)}</a>'
            f'<span class="note key">{escape(record.artifact)} · {escape(record.scale)}</span>',
            chip(record.verdict.value),
            f"{sum(item.is_met for item in record.checks)} of {len(record.checks)}",
            escape(record.scale),
            seconds(sum(piece.seconds for piece in record.pieces)),
        ]
        for record in records
    ]
    listed = table(["artifact", "verdict", "expectations met", "scale", "computing"], rows, numeric=(2, 4))
    dated = f" Measured {escape(latest)}." if latest else ""
    return f'<p class="quiet">{line}{dated}</p><div class="summary">{listed if rows else ""}</div>'


def _policy(*scripts: str) -> str:
    """No request may leave the page, and only the scripts we put there may run, whatever a record says."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts
    )
    allowed = f"script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
