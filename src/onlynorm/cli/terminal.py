"""Terminal output: tables, progress bars and JSON.

Names of tensors, files and attributes are untrusted and may contain terminal escape sequences. The consoles of this
module escape control characters with `visible`.
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
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from onlynorm.cli.messages import in_options
from onlynorm.display import Table as TextTable
from onlynorm.errors import visible
from onlynorm.memory import readable
from onlynorm.reconstruction import Plan, Reconstruction
from onlynorm.solvers import DEFAULT_TOLERANCE

if TYPE_CHECKING:  # evidence is imported only by the commands that need it
    from onlynorm.evidence.papers.reproduce import PieceProgress
    from onlynorm.evidence.records import Record
    from onlynorm.evidence.registry import Finding, Statement


class Console(RichConsole):
    """A console that escapes control characters in printed text."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """The rendered segments with escaped text; control segments of the console itself are unchanged."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


screen = Console()
errors = Console(stderr=True)
WIDE = 110
"""Terminal width from which all columns of a plan, and of the list of statements, are shown."""
LABELS = {
    "agreement": "same prediction", "bytes": "size", "constant": "parameters over n log n + r^2",
    "dense_matrix_bytes": "dense matrix (not built)", "feature_bytes": "features in float64",
    "file_bytes": "file with seed and norms", "file_with_frozen_bytes": "file with frozen weights",
    "is_fitted": "all training points correct", "is_known": "condition number is known",
    "is_reproducible": "all frozen weights from the seed", "left": "layers not rebuilt",
    "max_error": "largest error of an output", "max_residual": "largest residual", "n_features": "number of features",
    "n_frozen": "frozen entries", "n_images_skipped": "images skipped", "n_merged": "repeated points merged",
    "n_not_finite": "samples with NaN or infinity", "n_other": "entries neither frozen nor in norms",
    "n_tilted": "tilted directions", "n_trained": "trained parameters", "n_wrong": "wrong training points",
    "outside": "outside the calibrated range", "relative_error": "relative error of the outputs",
    "rounding": "bound on rounding errors", "skipped": "norms not trained",
    "target_bytes": "file of the trained network", "unresolved": "zero or unresolved",
}  # fmt: skip
"""Labels for keys of --json that need an explanation."""
FRACTIONS = frozenset({
    "accuracy_after", "accuracy_before", "agreement", "network_accuracy", "outside", "target_accuracy",
})  # fmt: skip
"""Keys of --json whose values are shown in percent."""
CHIPS = {"holds": "green", "holds with a corrected constant": "yellow", "fails": "red", "not yet checked": "dim"}
"""Colors of verdicts."""


def statement_facts(s: Statement, where: str, finding: Finding | None) -> dict[str, Any]:
    """A statement, the location of its check, and the finding if there is one, as a dictionary."""
    facts: dict[str, Any] = {
        "key": s.key, "kind": s.kind, "title": s.title, "says": s.says, "assumes": list(s.assumes), "slips": s.slips,
        "restates": s.restates, "check": where,
    }  # fmt: skip
    if finding is not None:
        facts |= {"verdict": str(finding.verdict), "evidence": finding.evidence, "measured": finding.measured,
                  "seconds": finding.seconds}  # fmt: skip
    return facts


def record_facts(record: Record) -> dict[str, Any]:
    """A record without its curves, as a dictionary."""
    return {
        "artifact": record.artifact, "scale": record.scale, "verdict": str(record.verdict.value),
        "reasons": list(record.reasons), "values": dict(record.values), "seconds": record.seconds,
    }  # fmt: skip


def print_statements(chosen: Sequence[tuple[Statement, str]], found: dict[str, Finding]) -> None:
    """Prints a table of statements with the locations of their checks, or each with its verdict and the evidence."""
    if found:
        for s, _ in chosen:
            _print_finding(s, found.get(s.key))
    else:
        has_room = screen.width >= WIDE
        grid = make_table("key", "title", "corrections", *(["check"] if has_room else []))
        grid.columns[0].no_wrap = True  # so that a key can be copied
        for s, where in chosen:
            place = where.rpartition(f".{s.key.partition(':')[0]}.")[2] or "-"
            grid.add_row(s.key, escape(s.title), "yes" if s.slips else "", *([place] if has_room else []))
        screen.print(grid)
    verdicts = [str(finding.verdict) for finding in found.values()]
    words = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in CHIPS if verdict in verdicts)
    screen.print(f"{len(chosen)} statements" + (f": {words}" if words else "; `onlynorm theorems KEY` shows one"))


def _print_finding(s: Statement, finding: Finding | None) -> None:
    verdict = "not yet checked" if finding is None else str(finding.verdict)
    screen.print(f"[bold]{escape(s.key)}[/]: [{CHIPS[verdict]}]{verdict}[/]", highlight=False)
    evidence = "" if finding is None or verdict == "not yet checked" else finding.evidence
    for text, style in ((s.title, ""), (evidence, "dim")):
        if text:
            screen.print(Padding(Text(text, style=style), (0, 0, 0, 2)))
    screen.print()


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
        # a wrapped table would not be readable
        (Console(width=table.width) if screen.width < table.width else screen).print(grid)


def print_plan(title: str, plan: Plan) -> None:
    """Prints a table of the layers and their total, with fewer columns on a narrow terminal, then the remarks."""
    shown = Plan.columns if screen.width >= WIDE else Plan.columns[:8]
    grid = make_table(*shown)
    grid.title, grid.title_style, grid.padding = escape(f"Plan for {title}"), "bold", (0, 1, 0, 0)
    for column in grid.columns[1:]:
        column.justify = "right"
    for row in (*plan.layers, plan.total):
        grid.add_row(*map(escape, row.cells()[: len(shown)]), style="bold" if row.name == "total" else "")
    screen.print(grid)
    words = "norms/target is a ratio of parameters; seconds are for the whole run on this machine"
    screen.print(f"[dim]{words}; {escape(plan.basis)}[/]", highlight=False)
    for remark in plan.remarks:
        screen.print(escape(in_options(remark)), highlight=False)


def print_layers(result: Reconstruction) -> None:
    """Prints a table of the rebuilt layers with their errors, then shortfalls and warnings."""
    grid = make_table("layer", "features", "method", "residual", "window", "output error", "seconds")
    for row in result.layers:
        grid.add_row(
            escape(row.name), f"{row.n_features:,}", escape(row.method), f"{row.residual:.1e}",
            f"{row.window_error:.1e}", f"{row.error:.1e}", f"{row.seconds:.2g}",
        )  # fmt: skip
    screen.print(grid)
    for row in result.layers:
        if row.shortfall:
            screen.print(escape(in_options(f"{row.name}: {row.shortfall}")), highlight=False)
    for warning in result.warnings:
        screen.print(f"[yellow]warning:[/] {escape(in_options(warning))}", highlight=False)


def print_facts(title: str, facts: dict[str, Any]) -> None:
    """Prints a title and one line per non-empty value; keys are those of --json, shown as labels."""
    screen.print(f"[bold]{escape(title)}[/]", highlight=False)
    grid = Table(show_header=False, box=None, padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for name, value in facts.items():
        if value not in ("", [], {}, None):
            grid.add_row(_label(name), _readable_fact(name, value))
    screen.print(grid)


def _label(name: str) -> str:
    return LABELS.get(name) or name.removeprefix("n_").removeprefix("is_").removesuffix("_bytes").replace("_", " ")


def _readable_fact(name: str, value: Any) -> str:
    if name in FRACTIONS and isinstance(value, int | float) and math.isfinite(value):
        return percent(value)
    return readable(value) if name.endswith("bytes") else _readable_value(value)


def percent(fraction: float) -> str:
    """The fraction in percent, as in 91.4 %; with more digits if it would be rounded to 0 or 100 %."""
    for digits in range(1, 6):
        text = f"{100 * fraction:.{digits}f}"
        if float(text) not in (0.0, 100.0):
            break
    return f"{float(text):g} %" if float(text) in (0.0, 100.0) else f"{text} %"


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
    """An empty table whose cells are wrapped, not truncated."""
    grid = Table(header_style="bold", box=None, padding=(0, 2, 0, 0), title_justify="left")
    for column in columns:
        grid.add_column(column, overflow="fold")
    return grid


def print_json(value: object) -> None:
    """Prints one JSON document; NaN and infinity become null."""

    def clean(item: object) -> object:
        if isinstance(item, float) and not math.isfinite(item):
            return None
        if isinstance(item, dict):
            return {key: clean(v) for key, v in item.items()}
        return [clean(v) for v in item] if isinstance(item, list | tuple) else item

    print(json.dumps(clean(value), indent=2))


def print_crowding(workers: int | None, cluster: str | None, threads: int) -> None:
    """Says so if workers of this machine need more cores than there are."""
    from onlynorm.cluster import crowding

    if cluster is None and workers is not None and workers > 1 and (message := crowding(workers, threads)):
        errors.print(message)


@contextmanager
def spinner(name: str, *, hidden: bool) -> Iterator[Callable[[str], None]]:
    """Yields a function that shows a status message on standard error."""
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=errors, transient=True,
        disable=hidden or not errors.is_terminal,
    ) as progress:  # fmt: skip
        task = progress.add_task(name)
        yield lambda text: progress.update(task, description=f"{name}: {escape(text)}")


@contextmanager
def bar(name: str, total: int, *, hidden: bool) -> Iterator[Callable[[str], None]]:
    """Yields a function that advances a progress bar by one, on standard error."""
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=errors,
        disable=hidden or not errors.is_terminal, transient=True,
    ) as progress:  # fmt: skip
        task = progress.add_task(name, total=total)
        yield lambda text: progress.update(task, description=f"{name}: {escape(text)}", advance=1)


@contextmanager
def counter(name: str, *, hidden: bool, shows_message: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """Yields a function `progress(done, total, message)` that updates a bar on standard error."""
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=errors,
        disable=hidden or not errors.is_terminal, transient=True,
    ) as progress:  # fmt: skip
        task = progress.add_task(name, total=None)
        yield lambda done, total, message: progress.update(
            task, completed=done, total=total, description=f"{name}: {escape(message)}" if shows_message else name
        )


@contextmanager
def byte_bars(*, hidden: bool) -> Iterator[Callable[[int, int, str], None]]:
    """Yields a function `progress(done, total, message)`: a bar of bytes per message, with speed and time left."""
    with Progress(
        TextColumn("{task.description}"), BarColumn(bar_width=20), DownloadColumn(), TransferSpeedColumn(),
        TimeRemainingColumn(), console=errors, disable=hidden, transient=True,
    ) as progress:  # fmt: skip
        tasks: dict[str, Any] = {}

        def show(done: int, total: int, message: str) -> None:
            if message not in tasks:  # what was there before does not count for the speed
                tasks[message] = progress.add_task(escape(message), total=total or None, completed=done)
            progress.update(tasks[message], completed=done, total=total or None)

        yield show


@contextmanager
def layer_bars(names: Sequence[str], *, hidden: bool) -> Iterator[Callable[[str, int, float], None]]:
    """Two progress bars: finished layers, and the residual of the current layer on a log scale."""
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn(),
        console=errors, disable=hidden or not errors.is_terminal, transient=True,
    ) as progress:  # fmt: skip
        layers = progress.add_task("layers", total=len(names), note=f"0/{len(names)}")
        present = progress.add_task(escape(names[0]) if names else "", total=1.0, note="")
        shown = ""

        def on_step(name: str, iterations: int, residual: float) -> None:
            nonlocal shown
            if name != shown:
                shown, done = name, names.index(name)
                progress.update(layers, completed=done, note=f"{done}/{len(names)}")
                progress.reset(present, description=escape(name))
            gained = -math.log10(min(max(residual, 1e-300), 1.0)) / -math.log10(DEFAULT_TOLERANCE)
            progress.update(
                present, completed=min(gained, 1.0), note=f"residual {residual:.1e} after {iterations} iterations"
            )

        yield on_step
        progress.update(layers, completed=len(names), note=f"{len(names)}/{len(names)}")


@contextmanager
def stages(*, hidden: bool) -> Iterator[Callable[[PieceProgress], None]]:
    """One progress bar per artifact; its total is set when the artifact has counted its pieces."""
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=errors,
        disable=hidden,
    ) as progress:  # fmt: skip
        tasks: dict[str, Any] = {}

        def show(stage: PieceProgress) -> None:
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
