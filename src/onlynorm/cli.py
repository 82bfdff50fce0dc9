"""The command line. Every command prints a table for people, or one JSON document with --json for machines.

Exit codes: 0 done, 1 a check failed, 2 wrong use. Progress and messages go to standard error, results to standard
output, so that both can be piped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.markup import escape

import onlynorm
from onlynorm import theorems as registry
from onlynorm.bench import bench_solve
from onlynorm.demo import run_demo
from onlynorm.errors import OnlynormError, ShapeError, StorageError, ToleranceError, UnknownNameError
from onlynorm.features import draw
from onlynorm.papers import reproduce
from onlynorm.report import Verdict as Outcome
from onlynorm.report import read_records, write_report
from onlynorm.screen import (
    bar,
    bench_markdown,
    errors,
    make_table,
    print_bench,
    print_facts,
    print_json,
    print_record,
    print_statements,
    record_facts,
    screen,
    spinner,
    stages,
    statement_facts,
)
from onlynorm.solvers import choose
from onlynorm.solvers.memory import memory_limit, readable
from onlynorm.solvers.needs import need_tolerance
from onlynorm.theorems import Finding, Statement, Verdict

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with `onlynorm demo`. Each command has its own --help with examples.",
)
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]
Excess = Annotated[float | None, typer.Option(max=1e6, help="Features per equation (1.25 if left out).")]
RECORDS = Path("onlynorm-out/records")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"onlynorm {onlynorm.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Build, tune and explain neural networks through **only their normalization layers**."""


@app.command(epilog="Example: `onlynorm demo --features ortho_cond`")
def demo(
    seed: Annotated[int, typer.Option(help="Seed of the data split, the training and the frozen weights.")] = 0,
    features: Annotated[str, typer.Option(help="Distribution of the frozen weights.")] = "he_normal",
    excess: Excess = None,
    as_json: AsJson = False,
) -> None:
    """Rebuild one layer of a trained network from random weights, by its norms only, and compare."""
    with spinner("demo", hidden=as_json) as say:
        result = run_demo(seed=seed, features=features, excess=excess, step=say)
    s = result.solution
    facts = {
        "data": result.data,
        "features": str(result.features),
        "plan": str(result.choice or s.reason),
        "method": s.method,
        "relative residual of the layer": s.residual,
        "seconds": s.seconds,
        "iterations": s.iterations,
        "accuracy of the trained network": result.target_accuracy,
        "accuracy of the norm-only network": result.network_accuracy,
        "same prediction on the test images": result.agreement,
        "relative error of the outputs": result.relative_error,
        "frozen numbers, kept as one seed": result.features.n_features * (result.features.rows + result.features.cols),
        "norm parameters, kept": 2 * result.features.n_features + 2 * result.features.rows,
        "SHA-256 of the frozen weights": result.digest,
        "same function": result.is_same_function,
    }
    if as_json:
        print_json(facts)
    else:
        print_facts("One layer from random weights, by its norms only", facts)
        word = "computes the same function" if result.is_same_function else "does NOT compute the same function"
        screen.print(f"\nThe network whose first layer is random and frozen {word} as the trained one.")
    if not result.is_same_function:
        raise typer.Exit(1)


@app.command(epilog="Example: `onlynorm plan 64,64,3,3 --excess 1.1 --tolerance 1e-12`")
def plan(
    shape: Annotated[str, typer.Argument(help="Shape of the target weight, as in 64,64,3,3 or 512x512.")],
    features: Annotated[str, typer.Option(help="Distribution of the frozen weights.")] = "he_normal",
    excess: Excess = None,
    tolerance: Annotated[float, typer.Option(help="Relative residual to reach.")] = 1e-10,
    as_json: AsJson = False,
) -> None:
    """Width, memory, conditioning and time of one layer, before anything is computed."""
    need_tolerance(tolerance)
    drawn = draw(features, _parse_shape(shape), excess=excess)
    numbers = drawn.n_features * (drawn.rows + drawn.cols)
    facts: dict[str, Any] = {
        "features": drawn.name,
        "equations": drawn.equations,
        "number of features": drawn.n_features,
        "excess": drawn.excess,
        "norm parameters": drawn.n_features,
        "frozen numbers": numbers,
        "memory of the features (float64)": readable(8 * numbers),
        "memory of the dense matrix, never built": readable(8.0 * drawn.n_features * drawn.equations),
    }
    if drawn.is_structured:
        facts |= {"method": "closed form", "condition number": 1.0}
        options = []
    else:
        choice = choose(drawn.rows, drawn.cols, drawn.n_features, tolerance=tolerance, memory=memory_limit())
        facts |= {"method": choice.method, "condition number": choice.condition, "reason": choice.reason}
        options = [o for o in choice.options if o.method != "svd"]
    if as_json:
        listed = [
            {"method": o.method, "seconds": o.seconds, "memory": o.memory, "iterations": o.iterations,
             "obstacle": o.obstacle} for o in options
        ]  # fmt: skip
        print_json(facts | {"options": listed})
        return
    print_facts(f"Plan for a layer of shape {tuple(drawn.shape)}", facts)
    if options:
        grid = make_table("method", "predicted seconds", "extra memory", "iterations", "obstacle")
        for o in options:
            grid.add_row(o.method, f"{o.seconds:.2g}", readable(o.memory), str(o.iterations), o.obstacle or "-")
        screen.print(grid)


@app.command(
    epilog="Examples: `onlynorm theorems giannou2023:thm-1`, `onlynorm theorems --paper random_features --check`"
)
def theorems(
    key: Annotated[str | None, typer.Argument(help="Key of one statement, as in giannou2023:thm-1.")] = None,
    paper: Annotated[str | None, typer.Option(help="Only the statements of one paper.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Run the checks and print a verdict each.")] = False,
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
    "reproduce", epilog="Examples: `onlynorm reproduce random_features:fig-3`, `onlynorm reproduce --scale paper`"
)
def reproduce_command(
    ids: Annotated[list[str] | None, typer.Argument(help="Artifacts or papers; everything if left out.")] = None,
    scale: Annotated[str, typer.Option(help="quick, or paper for the paper's own size.")] = "quick",
    out: Annotated[Path, typer.Option(help="Folder for records and figures.")] = RECORDS,
    force: Annotated[bool, typer.Option("--force", help="Compute finished pieces again.")] = False,
    as_json: AsJson = False,
) -> None:
    """Redraw figures and tables of the papers with the paper's number beside ours; resumes after a kill."""
    if scale not in ("quick", "paper"):
        raise UnknownNameError("scale", scale, ("quick", "paper"))
    _need_folder(out)
    with stages(hidden=as_json) as show:
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


@app.command(epilog="Examples: `onlynorm bench solve --quick`, `onlynorm bench solve --markdown`")
def bench(
    which: Annotated[str, typer.Argument(help="Which benchmark: solve.")] = "solve",
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the large systems.")] = False,
    repeats: Annotated[int, typer.Option(help="Best of how many turns.", min=1)] = 3,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table for a README.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure onlynorm beside its competitors, in the same run."""
    if which != "solve":
        raise UnknownNameError("benchmark", which, ("solve",))
    with spinner("bench solve", hidden=False) as say:
        result = bench_solve(quick=quick, repeats=repeats, progress=say)
    if as_json:
        print_json(result.as_dict())
    elif markdown:
        print(bench_markdown(result))
    else:
        print_bench(result)
    if not result.is_met:
        raise typer.Exit(1)


def main() -> NoReturn:
    """Runs the command line; our own errors become one line and an exit code."""
    try:
        app()
    except ToleranceError as error:
        errors.print(f"[red]failed:[/] {escape(str(error))}", highlight=False)
        sys.exit(1)
    except OnlynormError as error:
        errors.print(f"[red]error:[/] {escape(str(error))}", highlight=False)
        sys.exit(2)
    sys.exit(0)


def _run_checks(chosen: Sequence[Statement], seed: int, *, hidden: bool) -> tuple[Finding, ...]:
    with bar("checks", len(chosen), hidden=hidden) as advance:
        return registry.run_checks([s.key for s in chosen], seed=seed, progress=lambda f: advance(f.key))


def _exit_if_one_fails(findings: Iterable[Finding]) -> None:
    if any(f.verdict is Verdict.FAILS for f in findings):
        raise typer.Exit(1)


def _need_folder(out: Path) -> None:
    """Raises where records cannot be written, before hours of computing are lost to it; creates nothing."""
    there = next(place for place in (out.absolute(), *out.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise StorageError(f"records need a writable folder; got {out}, but {there} is none. Choose another --out.")


def _parse_shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        raise ShapeError(
            f"a shape needs whole numbers as in 64,64,3,3; got {text!r}. Separate them by commas."
        ) from None
    if max(shape) >= 2**31:
        raise ShapeError(f"a shape needs sizes below 2^31; got {text!r}. No layer is larger.")
    return shape
