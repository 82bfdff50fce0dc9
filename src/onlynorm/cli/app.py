"""The command line application: entry point, shared options and exit codes of errors."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.markup import escape

import onlynorm
from onlynorm.cli.help import FEATURES, OUTPUT, RUN, App, flag, option
from onlynorm.cli.terminal import errors
from onlynorm.errors import OnlynormError, StorageError, ToleranceError
from onlynorm.features import names

app = App(
    no_args_is_help=True,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with `onlynorm demo`. `onlynorm COMMAND --help` shows options and examples.",
)
AsJson = Annotated[bool, flag(OUTPUT, "Print one JSON document instead of a table.", "--json")]
Excess = Annotated[
    float | None, option(FEATURES, "X", "Features per equation; one equation per weight (default 1.25).", max=1e6)
]
FeaturesName = Annotated[
    str,
    option(
        FEATURES,
        "NAME",
        f"Distribution of the frozen weights: {', '.join(names())}.",
        choices=names(),
    ),
]

Workers = Annotated[
    int | None, option(RUN, "N", "Number of processes on this machine (default 1); results do not depend on it.", min=1)
]
ClusterName = Annotated[
    str | None,
    option(RUN, "ENGINE", "Run on dask:ADDRESS, dask:local:N, ray:ADDRESS or ray:local:N instead.", "--cluster"),
]
Threads = Annotated[int, option(RUN, "N", "Threads of each task; results can differ in the last digits.", min=1)]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"onlynorm {onlynorm.__version__}")
        raise typer.Exit


@app.callback()
def options(
    ctx: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", envvar="ONLYNORM_DEBUG", help="Show the traceback of an error.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Build, tune and explain neural networks through **only their normalization layers**."""
    if isinstance(ctx.obj, dict):
        ctx.obj["debug"] = debug


def main() -> NoReturn:
    """Runs the command line; library errors are printed as one line and set the exit code."""
    settings = {"debug": False}
    try:
        app(prog_name="onlynorm", obj=settings)
    except OnlynormError as error:
        if settings["debug"]:
            errors.print("".join(traceback.format_exception(error)), highlight=False, markup=False, soft_wrap=True)
        has_failed = isinstance(error, ToleranceError)
        errors.print(f"[red]{'failed' if has_failed else 'error'}:[/] {escape(str(error))}", highlight=False)
        sys.exit(1 if has_failed else 2)
    sys.exit(0)


def need_folder(out: Path, *, what: str = "records", option: str = "--out") -> None:
    """Raises unless the folder can be written to or created; called before a computation starts."""
    existing = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise StorageError(
            f"{what} need a writable folder; got {out}, but {existing} is not writable. Choose another {option}."
        )


@contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """A run that can be resumed from a folder: checks the folder first, and prints it if the run is interrupted."""
    need_folder(folder)
    try:
        yield
    except KeyboardInterrupt:
        if folder.exists():
            message = f"Finished parts are in {escape(str(folder))}: run the same command again to resume."
            errors.print(message, highlight=False)
        raise
