"""The page of all commands with their options, made from the command line application itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer

from onlynorm import cli

INTRODUCTION = """# Commands and options

Every command with its arguments and options; [Command line](cli.md) explains how they work together. In a terminal,
`onlynorm COMMAND --help` prints the same.
"""


def write_commands(folder: Path) -> None:
    """Writes `commands.md`."""
    (folder / "commands.md").write_text(commands_page(), encoding="utf-8")


def commands_page() -> str:
    """The page as Markdown."""
    sections = [INTRODUCTION]
    for path, command, context in all_commands():
        sections.append(_section(path, command, context))
    return "\n".join(sections)


def all_commands() -> list[tuple[str, Any, Any]]:
    """(path, command, context) of every command, as `onlynorm bench solve`, in the order of the help."""
    found: list[tuple[str, Any, Any]] = []

    def visit(command: Any, path: str, parent: Any) -> None:
        context = command.context_class(command, info_name=path.split()[-1], parent=parent)
        if parent is not None:
            found.append((path, command, context))
        if hasattr(command, "list_commands"):
            for name in command.list_commands(context):
                visit(command.get_command(context, name), f"{path} {name}", context)

    visit(typer.main.get_command(cli.app.app), "onlynorm", None)
    return found


def _section(path: str, command: Any, context: Any) -> str:
    level = "#" * len(path.split())
    usage = f"{path} {' '.join(command.collect_usage_pieces(context))}"
    lines = [f"{level} {path}", "", "```text", usage, "```", "", _paragraphs(command.help or ""), ""]
    panels: dict[str, list[Any]] = {}
    for parameter in command.get_params(context):
        if getattr(parameter, "hidden", False) or "--help" in parameter.opts:
            continue
        is_argument = parameter.param_type_name == "argument"
        default = "Arguments" if is_argument else "Options"
        panels.setdefault(getattr(parameter, "rich_help_panel", None) or default, []).append(parameter)
    for panel, parameters in panels.items():
        lines += [f"| {panel} | | default |", "| --- | --- | --- |"]
        lines += [_row(parameter, context) for parameter in parameters]
        lines.append("")
    if command.epilog:
        lines += [_paragraphs(command.epilog), ""]
    return "\n".join(lines)


def _row(parameter: Any, context: Any) -> str:
    if parameter.param_type_name == "argument":
        name = f"`{parameter.metavar or parameter.name.upper()}`"
    else:
        name = ", ".join(f"`{option}`" for option in [*parameter.opts, *parameter.secondary_opts])
    value = parameter.get_default(context, call=False) if not parameter.required else None
    is_shown = value not in (None, (), [], "") and value is not False and not callable(value)
    shown = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    default = f"`{shown}`" if is_shown else "required" if parameter.required else ""
    return f"| {name} | {_cell(getattr(parameter, 'help', '') or '')} | {default} |"


def _paragraphs(text: str) -> str:
    return re.sub(r"(?<!\n)\n(?!\n)", " ", text.replace("\b\n", "").replace("\f", "")).strip()


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
