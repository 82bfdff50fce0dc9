"""How results look in a terminal: tables, facts, progress bars, and plain JSON for machines."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from onlynorm import theorems as registry
from onlynorm.bench import Bench, Row
from onlynorm.papers import Progress as Stage
from onlynorm.papers import Record
from onlynorm.solvers.memory import readable
from onlynorm.theorems import Finding, Verdict

screen = Console()
errors = Console(stderr=True)

BENCH_COLUMNS = (
    "system", "excess", "method", "seconds", "times ours", "extra memory", "residual", "iterations", "note",
)  # fmt: skip
CHIPS = {
    Verdict.HOLDS: "green",
    Verdict.CORRECTED: "yellow",
    Verdict.FAILS: "red",
    Verdict.UNCHECKED: "dim",
}


def statement_facts(s: registry.Statement, finding: Finding | None) -> dict[str, Any]:
    """What is known of a statement, with the finding of its check if there is one."""
    facts: dict[str, Any] = {
        "key": s.key, "kind": s.kind, "title": s.title, "says": s.says, "assumes": list(s.assumes), "slips": s.slips,
        "restates": s.restates, "check": registry.where(s.key),
    }  # fmt: skip
    if finding is not None:
        facts |= {"verdict": str(finding.verdict), "evidence": finding.evidence, "measured": finding.measured,
                  "seconds": finding.seconds}  # fmt: skip
    return facts


def record_facts(record: Record) -> dict[str, Any]:
    """What a record says, without its curves."""
    return {
        "artifact": record.artifact, "scale": record.scale, "verdict": str(record.verdict.value),
        "reasons": list(record.reasons), "values": dict(record.values), "seconds": record.seconds,
    }  # fmt: skip


def print_statements(chosen: list[registry.Statement], found: dict[str, Finding]) -> None:
    """A table of statements, with verdicts where checks were run."""
    grid = make_table("key", "what we call it", "verdict" if found else "check", "evidence" if found else "slips")
    grid.columns[0].no_wrap = True  # a key is there to be copied
    for s in chosen:
        title = escape(s.title)
        finding = found.get(s.key)
        if finding is None:
            where = registry.where(s.key)
            grid.add_row(s.key, title, where or "-", "yes" if s.slips else "")
        else:
            chip = f"[{CHIPS[finding.verdict]}]{finding.verdict}[/]"
            grid.add_row(s.key, title, chip, escape(finding.evidence) if finding.verdict != Verdict.UNCHECKED else "")
    screen.print(grid)
    counts = {v: sum(f.verdict is v for f in found.values()) for v in Verdict}
    words = ", ".join(f"{n} {v}" for v, n in counts.items() if n)
    screen.print(f"{len(chosen)} statements" + (f": {words}" if words else "; `onlynorm theorems KEY` shows one"))


def print_record(record: Record) -> None:
    """A record's verdict and its reasons."""
    screen.print(f"\n[bold]{escape(record.artifact)}[/] {escape(record.title)}: [bold]{record.verdict.value}[/]")
    for reason in record.reasons:
        screen.print(f"  {escape(reason)}", highlight=False)


def print_bench(result: Bench) -> None:
    """A table of the rows and one of the goals."""
    grid = make_table(*BENCH_COLUMNS)
    for row in result.rows:
        grid.add_row(*map(escape, _bench_cells(row)))
    screen.print(grid)
    goals = make_table("goal", "measured", "met")
    for goal in result.goals:
        goals.add_row(escape(goal.aim), escape(goal.measured), "[green]yes[/]" if goal.is_met else "[red]no[/]")
    screen.print(goals)


def _bench_cells(row: Row) -> tuple[str, ...]:
    def number(value: float, pattern: str) -> str:
        return "-" if math.isnan(value) else format(value, pattern)

    return (
        row.system, f"{row.excess:g}", row.method, number(row.seconds, ".3g"), number(row.ratio, ".3g"),
        readable(row.memory), number(row.residual, ".1e"), str(row.iterations or "-"), row.note,
    )  # fmt: skip


def bench_markdown(result: Bench) -> str:
    """The same two tables as text for a README."""
    lines = ["| " + " | ".join(BENCH_COLUMNS) + " |", "|" + " --- |" * len(BENCH_COLUMNS)]
    lines += ["| " + " | ".join(_bench_cells(row)) + " |" for row in result.rows]
    lines += ["", "| goal | measured | met |", "| --- | --- | --- |"]
    lines += [f"| {g.aim} | {g.measured} | {'yes' if g.is_met else 'no'} |" for g in result.goals]
    return "\n".join(lines)


def print_facts(title: str, facts: dict[str, Any]) -> None:
    """A title and one line per fact that is not empty."""
    grid = Table(
        title=escape(title), show_header=False, title_justify="left", title_style="bold", box=None, padding=(0, 2)
    )
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for name, value in facts.items():
        if value not in ("", [], {}):
            grid.add_row(name, _readable_value(value))
    screen.print(grid)


def _readable_value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return "\n".join(escape(str(item)) for item in value)
    if isinstance(value, dict):
        return "\n".join(f"{escape(str(name))}: {_readable_value(item)}" for name, item in value.items())
    return escape(str(value))


def make_table(*columns: str) -> Table:
    """An empty table whose cells fold instead of being cut."""
    grid = Table(header_style="bold", box=None, padding=(0, 2, 0, 0), title_justify="left")
    for column in columns:
        grid.add_column(column, overflow="fold")
    return grid


def print_json(value: object) -> None:
    """One JSON document; numbers that JSON does not have become null."""

    def clean(item: object) -> object:
        if isinstance(item, float) and not math.isfinite(item):
            return None
        if isinstance(item, dict):
            return {key: clean(v) for key, v in item.items()}
        return [clean(v) for v in item] if isinstance(item, list | tuple) else item

    print(json.dumps(clean(value), indent=2))


@contextmanager
def spinner(name: str, *, hidden: bool) -> Iterator[Callable[[str], None]]:
    """Yields a function that shows what is being done, on standard error."""
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=errors, disable=hidden,
        transient=True,
    ) as progress:  # fmt: skip
        task = progress.add_task(name)
        yield lambda text: progress.update(task, description=f"{name}: {text}")


@contextmanager
def bar(name: str, total: int, *, hidden: bool) -> Iterator[Callable[[str], None]]:
    """Yields a function that counts one more thing as done, on standard error."""
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=errors,
        disable=hidden, transient=True,
    ) as progress:  # fmt: skip
        task = progress.add_task(name, total=total)
        yield lambda text: progress.update(task, description=f"{name}: {text}", advance=1)


@contextmanager
def stages(*, hidden: bool) -> Iterator[Callable[[Stage], None]]:
    """One bar per artifact, which learns its length when the artifact has counted its pieces."""
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=errors,
        disable=hidden,
    ) as progress:  # fmt: skip
        tasks: dict[str, Any] = {}

        def show(stage: Stage) -> None:
            if stage.artifact not in tasks:
                tasks[stage.artifact] = progress.add_task(stage.artifact, total=None)
            total = stage.total if stage.state != "finished" else stage.done
            progress.update(
                tasks[stage.artifact], completed=stage.done, total=total, description=f"{stage.artifact} {stage.piece}"
            )

        yield show
