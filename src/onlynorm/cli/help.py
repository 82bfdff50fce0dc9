"""The help of a command: panels of options, and examples that can be copied line by line.

Every command is a `Command` of the `App`. Its options name their panel and what is to be written after them
(`metavar="FILE"`); flags show nothing there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from onlynorm.cli.messages import naming_options

MODEL_AND_DATA, DATA, FEATURES, CONSTRUCTION = "Model and data", "Data", "Features", "Construction"
NETWORK, METHOD, TRAINED, TRAINING, RUN, OUTPUT = ("Network", "Method", "What is trained", "Training", "Run", "Output")
"""Panels of options."""
START, REBUILD, TRAIN, CONSTRUCT, PAPERS = (
    "Start here", "Rebuild a network from frozen random weights", "Train, diagnose and repair a network",
    "Construct networks near the identity", "Check the papers, compare with other methods",
)  # fmt: skip
"""Panels of commands."""
WIDTH = 76
"""Columns of an example: those that a terminal of 80 columns has room for."""


class _ReadableHelp:
    """Base class of commands and groups with a table of options in their help that is easy to read."""

    def get_params(self, ctx: Any) -> Any:
        """All parameters including --help."""
        return _readable(super().get_params(ctx))  # type: ignore[misc]


class Command(_ReadableHelp, TyperCommand):
    """A command whose errors name its options instead of arguments of Python functions."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command."""
        with naming_options({one.name: one.opts[-1] for one in self.params if one.opts[-1].startswith("--")}):
            return super().invoke(ctx)


class Group(_ReadableHelp, TyperGroup):
    """A group of commands."""


class App(typer.Typer):
    """An application of such commands; help texts are Markdown."""

    def __init__(self, **options: Any) -> None:
        usual: dict[str, Any] = {"cls": Group, "rich_markup_mode": "markdown", "add_completion": False}
        super().__init__(**(usual | options))

    def command(self, *args: Any, **options: Any) -> Callable[[Any], Any]:
        """Registers the decorated function as a command."""
        return super().command(*args, **({"cls": Command} | options))


def _readable(parameters: Sequence[Any]) -> Sequence[Any]:
    """The parameters with their defaults after the help text, and without "<bool>", "<str>" and "[x>=1]".

    A minimum is checked all the same, and named in the error. --help is listed with the output.
    """
    for one in parameters:
        is_flag = getattr(one, "is_flag", False) or one.name in ("install_completion", "show_completion")
        if is_flag:
            one.metavar = ""
        elif one.param_type_name == "argument":
            one.display_type_rich = _no_type
        if one.name == "help" and any(other.rich_help_panel for other in parameters):
            one.rich_help_panel = OUTPUT
        if one.help and one.show_default is True and one.default is not None and not is_flag:
            default = f"{one.default:g}" if isinstance(one.default, float) else str(one.default)
            one.help, one.show_default = f"{one.help} [default: {default}]", False
        one.min = one.max = None
    return parameters


def _no_type(ctx: Any) -> str:
    return ""


def option(panel: str, metavar: str, help: str, *names: str, choices: Iterable[str] = (), **more: Any) -> Any:
    """An option of this panel; `metavar` stands for its value, `choices` are completed by the shell."""
    complete = completing(choices) if choices else None
    return typer.Option(
        *names, rich_help_panel=panel, metavar=metavar, help=help, autocompletion=complete, **more
    )  # fmt: skip


def flag(panel: str, help: str, *names: str) -> Any:
    """An option of this panel without a value."""
    return typer.Option(*names, rich_help_panel=panel, help=help)


def examples(*lines: str, note: str = "") -> str:
    """An epilog of one example per line; lines of more than 76 columns are continued with a backslash."""
    written = "\n".join(_continued(line) for line in lines)
    return f"Examples:\n\n```text\n{written}\n```" + (f"\n\n{note}" if note else "")


def _continued(line: str) -> str:
    """The line, broken before options so that every row with its backslash fits."""
    rows = [""]
    for word in re.split(r" (?=--)", line):
        if rows[-1] and len(rows[-1]) + len(word) + len(" " + " \\") > WIDTH:
            rows.append(f"    {word}")
        else:
            rows[-1] += f" {word}" if rows[-1] else word
    return " \\\n".join(rows)


def completing(known: Iterable[str]) -> Callable[[str], list[str]]:
    """The names that start with what is typed so far; a shell completes paths where there is none."""
    found = list(known)

    def complete(incomplete: str) -> list[str]:
        return [name for name in found if name.startswith(incomplete)]

    return complete
