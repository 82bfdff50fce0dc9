"""One record as one article: claim, verdict with reasons, plots, the paper's numbers beside ours, details."""

from __future__ import annotations

from onlynorm.evidence.records import Check, Record
from onlynorm.evidence.report.figure import panels_of
from onlynorm.evidence.report.markup import anchor, chip, definitions, escape, number, seconds, table


def record_anchor(record: Record) -> str:
    """Where the article of this record stands on the page."""
    return anchor(record.artifact, record.scale)


def article(record: Record, *, plots: range) -> str:
    """The article; `plots` are the places of its panels in the page's list of plots."""
    return f"""<article id="{record_anchor(record)}">
<div class="head"><div><span class="key">{escape(record.artifact)} · {escape(record.scale)}</span>
<h3>{escape(record.title)}</h3></div>{chip(record.verdict.value)}</div>
<p>{escape(record.claim)}</p>
{_reasons(record)}
{_plots(record, plots)}
{_checks(record)}
{_table(record)}
{_details(record)}
</article>"""


def _reasons(record: Record) -> str:
    return '<ul class="reasons">' + "".join(f"<li>{escape(reason)}</li>" for reason in record.reasons) + "</ul>"


def _plots(record: Record, plots: range) -> str:
    if not plots:
        return ""
    pressed = {axis: any(getattr(panel, f"{axis}_log") for panel in record.panels) for axis in "yx"}
    switches = "".join(
        f'<button type="button" data-axis="{axis}" aria-pressed="{str(is_log).lower()}">log {axis}</button>'
        for axis, is_log in pressed.items()
    )
    panels = "".join(
        f'<div class="panel"><h4>{escape(panel.title)}</h4><div class="plot" data-plot="{place}"></div></div>'
        for panel, place in zip(panels_of(record), plots, strict=True)
    )
    return f'<div class="switches">{switches}</div><div class="panels">{panels}</div>'


def _checks(record: Record) -> str:
    if not record.checks:
        return ""
    columns = ["", "quantity", "paper or law", "ours", "accepted", "source"]
    return table(columns, [_check(item) for item in record.checks], numeric=(2, 3))


def _check(item: Check) -> list[str]:
    met, word = ("good", "✓") if item.is_met else (("warn", "~") if item.is_soft else ("bad", "✕"))
    says = "met" if item.is_met else ("outside, soft" if item.is_soft else "outside")
    note = f'<span class="note">{escape(item.note)}</span>' if item.note else ""
    return [
        f'<span class="chip {met}" title="{says}" aria-label="{says}">{word}</span>',
        escape(item.name) + note,
        number(item.value),
        "missing" if item.ours is None else number(item.ours),
        f'<span class="short">{escape(item.accepted)}</span>',
        escape(item.source),
    ]


def _table(record: Record) -> str:
    if record.table is None:
        return ""
    rows = record.table.rows
    numeric = [
        place
        for place in range(len(record.table.columns))
        if rows and all(not isinstance(row[place], str) for row in rows)
    ]
    return table(record.table.columns, [[number(cell) for cell in row] for row in rows], numeric=numeric)


def _details(record: Record) -> str:
    unchecked = {name: value for name, value in record.values.items() if name not in {c.name for c in record.checks}}
    more = f"<h4>Measured without an expectation</h4>{definitions(unchecked)}" if unchecked else ""
    made = {
        "sizes": ", ".join(f"{name} = {value}" for name, value in record.sizes.items()),
        "seeds": record.seeds,
        "date": record.created,
        "time": seconds(record.seconds),
        "versions": ", ".join(f"{name} {value}" for name, value in record.versions.items()),
        "machine": ", ".join(f"{name} {value}" for name, value in record.platform.items()),
        "code": record.code[:16],
    }
    state = {
        (False, False): "computed",
        (True, False): "reloaded",
        (True, True): "reloaded, other library state",
    }
    pieces = [
        [
            escape(piece.name),
            seconds(piece.seconds),
            state.get((piece.is_reloaded, piece.is_stale), "computed"),
            f'<span class="key">{escape(piece.key[:12])}</span>',
        ]
        for piece in record.pieces
    ]
    listed = table(["piece", "time", "state", "key"], pieces, numeric=(1,)) if pieces else ""
    inside = f"<summary>Configuration, versions, timings</summary>{definitions(made)}{more}{listed}"
    return f"<details>{inside}</details>"
