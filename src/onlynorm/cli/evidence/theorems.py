"""`onlynorm theorems`: the statements of the papers, and their checks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from onlynorm.cli.app import AsJson, ClusterName, Threads, Workers, app
from onlynorm.cli.help import PAPERS, RUN, examples, flag, option
from onlynorm.cli.terminal import bar, print_crowding, print_facts, print_json, print_statements, statement_facts
from onlynorm.errors import UnknownNameError

if TYPE_CHECKING:
    from onlynorm.evidence.registry import Finding, Statement


@app.command(
    rich_help_panel=PAPERS,
    epilog=examples(
        "onlynorm theorems giannou2023:thm-1", "onlynorm theorems --paper random_features --check --workers 2"
    ),
)
def theorems(
    key: Annotated[
        str | None, typer.Argument(metavar="KEY", help="Key of one statement, as in giannou2023:thm-1.")
    ] = None,
    paper: Annotated[str | None, option(RUN, "PAPER", "Only the statements of one paper, as in giannou2023.")] = None,
    check: Annotated[
        bool, flag(RUN, "Run the checks (about a minute for all) and print their verdicts.", "--check")
    ] = False,
    seed: Annotated[int, option(RUN, "N", "Seed of the checks.")] = 0,
    workers: Workers = None,
    cluster: ClusterName = None,
    threads: Threads = 1,
    as_json: AsJson = False,
) -> None:
    """List the numbered statements of the papers, show one, or run their checks."""
    from onlynorm.evidence import registry

    if check:
        print_crowding(workers, cluster, threads)
    of_paper = registry.statements(paper)
    chosen = [s for s in of_paper if key in (None, s.key)]
    if key is not None and not chosen:
        raise UnknownNameError(f"statement of {paper}" if paper else "statement", key, (s.key for s in of_paper))
    found: dict[str, Finding] = {}
    if check:
        made = show_checks(chosen, seed, workers=workers, cluster=cluster, threads=threads, hidden=as_json)
        found = {f.key: f for f in made}
    if as_json:
        print_json([statement_facts(s, registry.where(s.key), found.get(s.key)) for s in chosen])
    elif key is not None:
        print_facts(f"{key}: {chosen[0].title}", statement_facts(chosen[0], registry.where(key), found.get(key)))
    else:
        print_statements([(s, registry.where(s.key)) for s in chosen], found)
    exit_if_one_fails(found.values())


def show_checks(
    chosen: Sequence[Statement], seed: int, *, workers: int | None = None, cluster: str | None = None, threads: int = 1,
    hidden: bool,
) -> tuple[Finding, ...]:  # fmt: skip
    """Runs the checks of these statements with a progress bar."""
    from onlynorm.evidence import registry

    with bar("checks", len(chosen), hidden=hidden) as advance:
        return registry.run_checks(
            [s.key for s in chosen], seed=seed, workers=workers, cluster=cluster, threads=threads,
            progress=lambda f: advance(f.key),
        )  # fmt: skip


def exit_if_one_fails(findings: Iterable[Finding]) -> None:
    """Exits with 1 if a statement fails."""
    if any(str(f.verdict) == "fails" for f in findings):
        raise typer.Exit(1)
