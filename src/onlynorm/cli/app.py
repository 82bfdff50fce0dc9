"""Where the command line begins: the application, the options that commands share, and how errors end it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.markup import escape

import onlynorm
from onlynorm.cli.terminal import errors
from onlynorm.errors import OnlynormError, StorageError, ToleranceError
from onlynorm.features import names

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with `onlynorm demo`. Each command has its own --help with examples.",
)
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]
Excess = Annotated[
    float | None,
    typer.Option(max=1e6, help="Features per equation; a layer has one per weight (1.25 if left out)."),
]
FeaturesName = Annotated[str, typer.Option(help=f"Distribution of the frozen weights: {', '.join(names())}.")]


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


def need_folder(out: Path, *, what: str = "records") -> None:
    """Raises where nothing can be written, before hours of computing are lost to it; creates nothing."""
    there = next(place for place in (out.absolute(), *out.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise StorageError(f"{what} need a writable folder; got {out}, but {there} is none. Choose another --out.")


@contextmanager
def kept_in(folder: Path) -> Iterator[None]:
    """A run whose finished parts are kept in a folder: that is checked before it, and told where it is stopped."""
    need_folder(folder)
    try:
        yield
    except KeyboardInterrupt:
        if folder.exists():
            told = f"What is finished is in {escape(str(folder))}: the same command resumes from there."
            errors.print(told, highlight=False)
        raise
