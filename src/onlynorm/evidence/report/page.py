"""The report: one self-contained HTML file that works without a network connection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from onlynorm.display import render, seconds
from onlynorm.evidence.records import Record, RecordVerdict, read_records
from onlynorm.evidence.registry import Finding, Statement, Verdict, papers
from onlynorm.evidence.registry import statements as every_statement
from onlynorm.storage import write_atomically
from onlynorm.validate import need_instance, need_items, need_path

TONES = {
    RecordVerdict.REPRODUCED.value: ("good", "✓"),
    RecordVerdict.CAVEAT.value: ("warn", "~"),
    RecordVerdict.NOT_REPRODUCED.value: ("bad", "✕"),
}
STATEMENT_TONES = {
    Verdict.HOLDS.value: ("good", "✓"),
    Verdict.CORRECTED.value: ("warn", "~"),
    Verdict.FAILS.value: ("bad", "✕"),
    Verdict.UNCHECKED.value: ("", "·"),
}
_T = TypeVar("_T")


def write_report(records_dir: Path | str, out: Path | str, *, findings: Iterable[Finding] = ()) -> Path:
    """The path of a self-contained HTML page with all statements and the records in `records_dir`."""
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
    records = _need_all("records", records, Record, "Pass the result of read_records.")
    statements = _need_all("statements", statements, Statement, "Pass the result of theorems.statements().")
    found = {f.key: f for f in _need_all("findings", findings, Finding, "Pass the result of theorems.run_checks().")}
    titles = {paper.key: paper.title for paper in papers()}
    groups: dict[str, list[tuple[Statement, Finding | None]]] = {}
    for one in statements:
        groups.setdefault(one.paper, []).append((one, found.get(one.key)))
    present = {Verdict.UNCHECKED if f is None else f.verdict for group in groups.values() for _, f in group}
    return render(
        "evidence/report/report.html",
        scripts=[resources.files(__package__).joinpath("page.js").read_text(encoding="utf-8")],
        title="reproduction report", summary=_summary(records), records=records, tones=TONES,
        figures=[record.figure.responsive_svg() if record.curves else "" for record in records],
        details=[_details(record) for record in records], unchecked=[_unchecked(record) for record in records],
        groups=[(titles.get(key, key), key, group) for key, group in groups.items()], n_statements=len(statements),
        verdicts=[verdict.value for verdict in Verdict if verdict in present],
        statement_tones=STATEMENT_TONES, unchecked_verdict=Verdict.UNCHECKED.value,
    )  # fmt: skip


def _need_all(name: str, values: object, kind: type[_T], cure: str) -> list[_T]:
    return [need_instance(name, value, kind, cure=cure) for value in need_items(name, values, cure=cure)]


def _summary(records: Sequence[Record]) -> str:
    counts = Counter(record.verdict for record in records)
    words = " · ".join(f"{counts[verdict]} {verdict.value}" for verdict in RecordVerdict if counts[verdict])
    latest = max((record.created for record in records), default="")[:10]
    line = f"{len(records)} record{'s' * (len(records) != 1)}" + (f": {words}." if words else ".")
    return line + (f" Measured {latest}." if latest else "")


def _details(record: Record) -> dict[str, Any]:
    return {
        "sizes": ", ".join(f"{name} = {value}" for name, value in record.sizes.items()),
        "seeds": record.seeds,
        "date": record.created,
        "time": seconds(record.seconds),
        "versions": ", ".join(f"{name} {value}" for name, value in record.versions.items()),
        "machine": ", ".join(f"{name} {value}" for name, value in record.platform.items()),
        "code": record.code[:16],
    }


def _unchecked(record: Record) -> dict[str, float]:
    checked = {item.name for item in record.checks}
    return {name: value for name, value in record.values.items() if name not in checked}
