"""The theorem section: every statement, what its check found, and filters by words and verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from onlynorm.evidence.registry import Finding, Statement, Verdict
from onlynorm.evidence.report.markup import anchor, chip, definitions, escape, seconds

TONES = {
    Verdict.HOLDS.value: ("good", "✓"),
    Verdict.CORRECTED.value: ("warn", "~"),
    Verdict.FAILS.value: ("bad", "✕"),
    Verdict.UNCHECKED.value: ("", "·"),
}


def statement_section(statements: Iterable[Statement], findings: Iterable[Finding], titles: Mapping[str, str]) -> str:
    """The section, or nothing when there is no statement; `titles` names the papers by key."""
    found = {finding.key: finding for finding in findings}
    groups: dict[str, list[Statement]] = {}
    for statement in statements:
        groups.setdefault(statement.key.partition(":")[0], []).append(statement)
    if not groups:
        return ""
    total = sum(len(group) for group in groups.values())
    present = {_verdict(found.get(one.key)) for group in groups.values() for one in group}
    verdicts = [verdict.value for verdict in Verdict if verdict.value in present]
    buttons = '<button type="button" data-verdict="" aria-pressed="true">all</button>' + "".join(
        f'<button type="button" data-verdict="{escape(name)}" aria-pressed="false">{escape(name)}</button>'
        for name in verdicts
    )
    papers = "".join(
        f'<section class="statements" id="{anchor("paper", key)}"><h3>'
        f"{escape(titles.get(key, key))}</h3>"
        + "".join(_statement(one, found.get(one.key)) for one in group)
        + "</section>"
        for key, group in groups.items()
    )
    return f"""<section id="statements"><h2>Statements</h2>
<p class="quiet">Every numbered statement of the papers in our words, and what its check found.</p>
<div class="filter">
<input id="filter-text" type="search" placeholder="Filter by words" aria-label="Filter statements">
{buttons}<span class="quiet" id="filter-count" aria-live="polite">{total} of {total} shown</span></div>
{papers}</section>"""


def _verdict(finding: Finding | None) -> str:
    return (Verdict.UNCHECKED if finding is None else finding.verdict).value


def _statement(one: Statement, finding: Finding | None) -> str:
    verdict = _verdict(finding)
    parts = [f"<p>{escape(one.says)}</p>"]
    if one.restates:
        parts.append(f'<p class="quiet">Restates {escape(one.restates)}.</p>')
    if one.assumes:
        parts.append(f'<p class="quiet">Assumes: {escape("; ".join(one.assumes))}.</p>')
    if one.slips:
        parts.append(f"<p><strong>Where we read it differently.</strong> {escape(one.slips)}</p>")
    if finding is not None:
        parts.append(f"<p><strong>Evidence.</strong> {escape(finding.evidence)}</p>")
        if finding.measured:
            parts.append(definitions(finding.measured))
        parts.append(f'<p class="quiet">Checked in {seconds(finding.seconds)}.</p>')
    label = f"{one.kind} {one.number}".strip()
    return (
        f'<details class="statement" id="{anchor("statement", one.key)}" data-verdict="{escape(verdict)}">'
        "<summary>"
        f'<span class="number">{escape(label)}</span><span class="name">{escape(one.title)}</span>'
        f"{chip(verdict, TONES)}</summary>"
        f'<div><span class="key">{escape(one.key)}</span>{"".join(parts)}</div></details>'
    )
