"""`onlynorm bench NAME`: one command per benchmark; its options are the sizes of the benchmark."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onlynorm.cli.app import AsJson, ClusterName, Threads, Workers, app, resumable
from onlynorm.cli.help import OUTPUT, PAPERS, RUN, App, Group, examples, flag, option
from onlynorm.cli.terminal import errors, print_bench, print_json, spinner

if TYPE_CHECKING:
    from onlynorm.evidence.harness import Benchmark, BenchmarkResult

AsMarkdown = Annotated[bool, flag(OUTPUT, "Print Markdown tables.", "--markdown")]
Quick = Annotated[bool, flag(RUN, "A small run with fewer and smaller cases.", "--quick")]
Out = Annotated[
    Path, option(OUTPUT, "FOLDER", "Folder for finished parts and figures; an interrupted run resumes from it.")
]
Force = Annotated[bool, flag(RUN, "Compute finished parts again.", "--force")]

SIZES = "Sizes"


class Benches(Group):
    """The group of benchmark commands, imported on first use."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of the help."""
        from onlynorm.evidence.bench.table import BENCHMARKS

        self.commands.update({name: make_command(one) for name, one in BENCHMARKS.items()})
        return list(self.commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a benchmark, or None."""
        self.list_commands(ctx)
        return super().get_command(ctx, cmd_name)


benches = App(
    cls=Benches,
    no_args_is_help=True,
    epilog=examples(
        "onlynorm bench solve --quick", "onlynorm bench tune --markdown", note="Exit code 1: a goal was not met."
    ),
)


@benches.callback()
def describe() -> None:
    """Compare onlynorm with competing methods in the same run."""


app.add_typer(benches, name="bench", rich_help_panel=PAPERS)


def make_command(one: Benchmark[Any]) -> Any:
    """The command that runs a benchmark."""

    def command(
        *, quick: bool, markdown: bool, as_json: bool, out: Path, force: bool, workers: int | None = None,
        cluster: str | None = None, threads: int = 1, **given: Any,
    ) -> None:  # fmt: skip
        sizes = one.sizes.make(quick=quick, **{name: None if value == [] else value for name, value in given.items()})
        with resumable(out), spinner(f"bench {one.name}", hidden=False) as status:
            result = one.run(
                sizes, out=out, force=force, workers=workers, cluster=cluster, threads=threads, progress=status,
                on_row=lambda text: errors.print(text, highlight=False, markup=False),
            )  # fmt: skip
        show(result, markdown=markdown, as_json=as_json)

    def unstored(**given: Any) -> None:
        command(out=Path(), force=False, **given)

    function: Any = command if one.is_stored else unstored
    fixed: dict[str, tuple[Any, Any]] = {"quick": (Quick, False)}
    last: dict[str, tuple[Any, Any]] = {"markdown": (AsMarkdown, False), "as_json": (AsJson, False)}
    if one.is_stored:
        from onlynorm.evidence.harness import OUT

        last = {"out": (Out, OUT), "force": (Force, False), **last}
    if one.is_parallel:
        fixed |= {"workers": (Workers, None), "cluster": (ClusterName, None), "threads": (Threads, 1)}
    options = fixed | options_of(one.sizes) | last
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, kind, default=d, annotation=a) for name, (a, d) in options.items()]
    function.__signature__ = inspect.Signature(parameters)
    function.__annotations__ = {name: annotation for name, (annotation, _) in options.items()}
    resumes = " Resumes after an interruption." if one.is_stored else ""
    single = App()
    epilog = examples(f"onlynorm bench {one.name} --quick", f"onlynorm bench {one.name} --markdown")
    single.command(one.name, help=one.about.rstrip(".") + "." + resumes, epilog=epilog)(function)
    return typer.main.get_command(single)


def options_of(sizes: type[Any]) -> dict[str, tuple[Any, Any]]:
    """Annotation and default of an option for every size with a help text; None means the default of the benchmark."""
    hints, options = typing.get_type_hints(sizes), dict[str, tuple[Any, Any]]()
    for one in dataclasses.fields(sizes):
        facts = one.metadata
        if not facts.get("help"):
            continue
        hint: Any = list[str] if facts["choices"] and hints[one.name] is not str else _plain(hints[one.name])
        usual = [] if one.default is None or facts["choices"] else [f"{one.default:g}"]
        usual += [] if facts["quick"] is None else [f"{facts['quick']:g} if quick"]
        text = facts["help"].rstrip(".") + (f" ({', '.join(usual)})." if usual else ".")
        low = None if facts["choices"] else facts["low"] or (1 if hint is int else 0)
        metavar = {int: "N", float: "X"}.get(hint, "NAME")
        options[one.name] = (
            Annotated[hint | None, option(SIZES, metavar, text, choices=facts["choices"], min=low)],
            None,
        )
    return options


def _plain(hint: Any) -> Any:
    return next((one for one in typing.get_args(hint) if one is not type(None)), hint)


def show(result: BenchmarkResult, *, markdown: bool, as_json: bool) -> None:
    """Prints the result of a benchmark; exits with 1 if a goal was not met."""
    from onlynorm.evidence.harness import goal_table, is_met

    tables = [*result.tables(), goal_table(result)]
    if as_json:
        print_json(result.as_dict())
    elif markdown:
        print("\n\n".join(table.markdown() for table in tables))
    else:
        print_bench(tables)
    if not is_met(result):
        raise typer.Exit(1)
