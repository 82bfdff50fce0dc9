"""How results look in a terminal: tables, facts, progress bars, and plain JSON for machines.

Names of tensors, files and attributes come from elsewhere and may hold sequences that command a terminal. All that the
consoles of this file print goes through `visible`, so that such characters are shown instead of obeyed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Table

from onlynorm.display import Table as TextTable
from onlynorm.errors import visible
from onlynorm.reconstruction.plan import COLUMNS as PLAN_COLUMNS
from onlynorm.reconstruction.plan import Plan
from onlynorm.reconstruction.result import Reconstruction
from onlynorm.solvers.prepare import DEFAULT_TOLERANCE

if TYPE_CHECKING:  # evidence is loaded by the commands that show it
    from onlynorm.evidence.papers.reproduce import Progress as Stage
    from onlynorm.evidence.records import Record
    from onlynorm.evidence.registry import Finding, Statement


class Console(RichConsole):
    """A console that shows control characters of what it prints instead of sending them to the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """The segments of what is printed; the console's own commands are segments of control and stay."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


screen = Console()
errors = Console(stderr=True)
WIDE = 110
"""Columns of a terminal from which on a plan is shown whole."""
CHIPS = {"holds": "green", "holds with a corrected constant": "yellow", "fails": "red", "not yet checked": "dim"}
"""Colours of verdicts."""


def statement_facts(s: Statement, where: str, finding: Finding | None) -> dict[str, Any]:
    """What is known of a statement, where its check is, and the finding if there is one."""
    facts: dict[str, Any] = {
        "key": s.key, "kind": s.kind, "title": s.title, "says": s.says, "assumes": list(s.assumes), "slips": s.slips,
        "restates": s.restates, "check": where,
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


def print_statements(chosen: Sequence[tuple[Statement, str]], found: dict[str, Finding]) -> None:
    """A table of statements and where their checks are, with verdicts where checks were run."""
    grid = make_table("key", "what we call it", "verdict" if found else "check", "evidence" if found else "slips")
    grid.columns[0].no_wrap = True  # a key is there to be copied
    for s, where in chosen:
        title = escape(s.title)
        finding = found.get(s.key)
        if finding is None:
            grid.add_row(s.key, title, where or "-", "yes" if s.slips else "")
        else:
            verdict = str(finding.verdict)
            evidence = "" if verdict == "not yet checked" else escape(finding.evidence)
            grid.add_row(s.key, title, f"[{CHIPS[verdict]}]{verdict}[/]", evidence)
    screen.print(grid)
    verdicts = [str(finding.verdict) for finding in found.values()]
    words = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in CHIPS if verdict in verdicts)
    screen.print(f"{len(chosen)} statements" + (f": {words}" if words else "; `onlynorm theorems KEY` shows one"))


def print_record(record: Record) -> None:
    """A record's verdict and its reasons."""
    screen.print(f"\n[bold]{escape(record.artifact)}[/] {escape(record.title)}: [bold]{record.verdict.value}[/]")
    for reason in record.reasons:
        screen.print(f"  {escape(reason)}", highlight=False)


def print_bench(tables: Sequence[TextTable]) -> None:
    """The tables of a benchmark; the last one is that of its goals."""
    for table in tables:
        grid = make_table(*table.columns)
        for row in table.rows:
            cells = [escape(str(cell)) for cell in row]
            if table is tables[-1]:
                cells[-1] = f"[green]{cells[-1]}[/]" if cells[-1] == "yes" else f"[red]{cells[-1]}[/]"
            grid.add_row(*cells)
        # folded into fewer columns than it needs, a table could not be read
        (Console(width=table.width) if screen.width < table.width else screen).print(grid)


def print_plan(title: str, plan: Plan) -> None:
    """A table of the layers and their total, as wide as the terminal has room for, then what is out of the ordinary."""
    shown = PLAN_COLUMNS if screen.width >= WIDE else PLAN_COLUMNS[:8]
    grid = make_table(*shown)
    grid.title, grid.title_style, grid.padding = escape(f"Plan for {title}"), "bold", (0, 1, 0, 0)
    for column in grid.columns[1:]:
        column.justify = "right"
    for row in (*plan.layers, plan.total):
        grid.add_row(*map(escape, row.cells()[: len(shown)]), style="bold" if row.name == "total" else "")
    screen.print(grid)
    words = "norms/target counts parameters; seconds are of the whole run on this machine"
    screen.print(f"[dim]{words}; {escape(plan.basis)}[/]", highlight=False)
    for remark in plan.remarks:
        screen.print(escape(remark), highlight=False)


def print_layers(result: Reconstruction) -> None:
    """A table of the rebuilt layers with the evidence for each, then what fell short."""
    grid = make_table("layer", "features", "method", "residual", "window", "output error", "seconds")
    for row in result.layers:
        grid.add_row(
            escape(row.name), f"{row.n_features:,}", escape(row.method), f"{row.residual:.1e}",
            f"{row.window_error:.1e}", f"{row.error:.1e}", f"{row.seconds:.2g}",
        )  # fmt: skip
    screen.print(grid)
    for row in result.layers:
        if row.shortfall:
            screen.print(escape(f"{row.name}: {row.shortfall}"), highlight=False)
    for warning in result.warnings:
        screen.print(f"[yellow]warning:[/] {escape(warning)}", highlight=False)


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
        yield lambda text: progress.update(task, description=f"{name}: {escape(text)}")


@contextmanager
def bar(name: str, total: int, *, hidden: bool) -> Iterator[Callable[[str], None]]:
    """Yields a function that counts one more thing as done, on standard error."""
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=errors,
        disable=hidden, transient=True,
    ) as progress:  # fmt: skip
        task = progress.add_task(name, total=total)
        yield lambda text: progress.update(task, description=f"{name}: {escape(text)}", advance=1)


@contextmanager
def counter(name: str, *, hidden: bool) -> Iterator[Callable[[int, int], None]]:
    """Yields a function that shows how many things of how many are done, on standard error."""
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=errors,
        disable=hidden, transient=True,
    ) as progress:  # fmt: skip
        task = progress.add_task(name, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def layer_bars(names: Sequence[str], *, hidden: bool) -> Iterator[Callable[[str, int, float], None]]:
    """Two bars: layers that are done, and the digits of the residual that the present one has gained."""
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn(),
        console=errors, disable=hidden, transient=True,
    ) as progress:  # fmt: skip
        layers = progress.add_task("layers", total=len(names), note=f"0/{len(names)}")
        present = progress.add_task(escape(names[0]) if names else "", total=1.0, note="")
        shown = ""

        def step(name: str, iterations: int, residual: float) -> None:
            nonlocal shown
            if name != shown:
                shown, done = name, names.index(name)
                progress.update(layers, completed=done, note=f"{done}/{len(names)}")
                progress.reset(present, description=escape(name))
            gained = -math.log10(min(max(residual, 1e-300), 1.0)) / -math.log10(DEFAULT_TOLERANCE)
            progress.update(
                present, completed=min(gained, 1.0), note=f"residual {residual:.1e} after {iterations} iterations"
            )

        yield step
        progress.update(layers, completed=len(names), note=f"{len(names)}/{len(names)}")


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
                tasks[stage.artifact],
                completed=stage.done,
                total=total,
                description=escape(f"{stage.artifact} {stage.piece}"),
            )

        yield show
