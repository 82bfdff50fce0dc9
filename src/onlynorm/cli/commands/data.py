"""`onlynorm data`: gets data sets and trained weights, and lists those in the data folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from onlynorm.cli.app import AsJson, app
from onlynorm.cli.help import RUN, START, App, examples, option
from onlynorm.cli.terminal import byte_bars, errors, make_table, print_json, screen
from onlynorm.data import SOURCES, DataState, data_folder, get_data, list_data
from onlynorm.memory import readable

STATES = {"present": "green", "incomplete": "yellow", "missing": "dim"}
"""Colors of states."""
group = App(
    no_args_is_help=True,
    epilog=examples(
        "onlynorm data list", "onlynorm data get fashion_mnist", "onlynorm data get cifar10 --from /media/usb"
    ),
)


@group.callback()
def describe() -> None:
    """Get data sets and trained weights, and list those in the data folder."""


app.add_typer(group, name="data", rich_help_panel=START)


@group.command(
    "get",
    epilog=examples(
        "onlynorm data get cifar10",
        "onlynorm data get fashion_mnist resnet20",
        "onlynorm data get fashion_mnist --from /media/usb",
    ),
)
def get_command(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help=f"One or more of {', '.join(SOURCES)}.")],
    source: Annotated[
        Path | None, option(RUN, "FOLDER", "Copy from this folder instead of downloading.", "--from")
    ] = None,
    timeout: Annotated[
        float, option(RUN, "X", "Seconds without data after which a connection is closed and opened again.")
    ] = 30.0,
    as_json: AsJson = False,
) -> None:
    """Download data sets or weights into the data folder, or copy them from another folder.

    The data folder is ONLYNORM_DATA, else onlynorm in the user's cache folder. Checksums are verified. The same command
    resumes after an interruption.
    """
    states: list[DataState] = []
    try:
        with byte_bars(hidden=as_json) as progress:
            for name in names:
                states.append(get_data(name, source=source, timeout=timeout, progress=progress))
    except KeyboardInterrupt:
        errors.print("Interrupted: run the same command again to resume.", highlight=False)
        raise
    if as_json:
        print_json({"folder": str(data_folder()), "data": [state.as_dict() for state in states]})
    else:
        _print(states)


@group.command("list", epilog=examples("onlynorm data list", "onlynorm data list --json"))
def list_command(as_json: AsJson = False) -> None:
    """List what `onlynorm data get` knows, and whether it is in the data folder."""
    states = list_data()
    if as_json:
        print_json({"folder": str(data_folder()), "data": [state.as_dict() for state in states]})
        return
    _print(states)
    screen.print(
        f"\nThe data folder is {escape(str(data_folder()))}. `onlynorm data get NAME` gets what is missing; digits, "
        "teacher and the network digits_cnn need no files.",
        highlight=False,
    )


def _print(states: list[DataState] | tuple[DataState, ...]) -> None:
    grid = make_table("name", "state", "size", "to download", "in the data folder")
    for state in states:
        download = "" if state.is_present else readable(state.n_download) if state.n_download else "unknown"
        color = STATES[state.state]
        grid.add_row(
            state.name, f"[{color}]{state.state}[/]", readable(state.n_bytes) if state.n_bytes else "", download,
            escape(str(state.path.relative_to(data_folder()))),
        )  # fmt: skip
    screen.print(grid)
