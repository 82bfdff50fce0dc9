"""Every command in the documentation and in the help runs without any data, or follows the command that gets it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from commands import RunCli

from onlynorm.cli.app import app
from onlynorm.data import SOURCES

DOCS = Path(__file__).parents[2] / "docs"
GET = ("onlynorm", "data", "get")
LONG = ("bench", "demo", "report", "reproduce", "spectrum", "theorems")
"""Commands with tests of their own, which take minutes or hours at their full size."""


def blocks(page: Path) -> list[list[str]]:
    """The commands of each shell block of a page, with those of the table of commands as a block each."""
    text = page.read_text(encoding="utf-8")
    found = [
        [line.removeprefix("$ ") for line in block.splitlines() if line.removeprefix("$ ").startswith("onlynorm ")]
        for block in re.findall(r"^```(?:bash)?\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    ]
    rows = [[row] for row in re.findall(r"^\| `(onlynorm [^`]+)` \|", text, flags=re.MULTILINE)]
    return [block for block in (*rows, *found) if block]


def helps() -> Iterator[tuple[str, list[str]]]:
    """The examples at the end of the help of each command."""
    commands = dict(typer.main.get_command(app).commands.items())  # type: ignore[attr-defined]
    commands |= {f"data {name}": one for name, one in commands["data"].commands.items()}
    for name, command in commands.items():
        yield name, re.findall(r"`(onlynorm [^`]+)`", command.epilog or "")


def check(run: RunCli, commands: list[str]) -> None:
    """Runs the commands of one block; one that needs data has to follow the command that gets it."""
    gets: set[str] = set()
    for command in commands:
        words = shlex.split(command, comments=True)
        if tuple(words[:3]) == GET:
            names = {word.replace("-", "_") for word in words[3:]} & SOURCES.keys()
            assert names, command
            gets |= names
            continue
        if words[1] in LONG:
            continue
        ran = run(*words[1:])
        needed = re.search(r"onlynorm data get (\w+)", ran.err)
        if needed is None:
            assert ran.code in ((0, 1) if words[1] == "diagnose" else (0,)), f"{command}: {ran.err}"
        else:
            assert needed[1] in gets, f"{command} needs {needed[1]}, which nothing before it gets: {gets}"


@pytest.fixture(autouse=True)
def _without_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ONLYNORM_DATA", str(tmp_path / "none"))


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_commands_of_a_page_run_in_order_without_data(run: RunCli, page: Path) -> None:
    for block in blocks(page):
        check(run, block)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "commands"), list(helps()), ids=lambda one: one if isinstance(one, str) else "")
def test_examples_in_the_help_run_in_order_without_data(run: RunCli, name: str, commands: list[str]) -> None:
    assert commands, f"{name} has no example"
    check(run, commands)


def test_the_pages_with_commands_are_read() -> None:
    found = {page.stem: [line for block in blocks(page) for line in block] for page in DOCS.glob("*.md")}
    named = {command.split()[1] for commands in found.values() for command in commands}
    assert {"data", "diagnose", "factorize", "memorize", "plan", "reconstruct", "repair", "spectrum", "tune"} <= named
    assert {name for name, _ in helps()} >= named
