"""Every code block of the documentation runs as it stands, block after block of a page in an empty folder."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch
import typer
from commands import RunCli
from sybil import Document, Example, Region, Sybil
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer

from onlynorm import cli
from onlynorm.features import distributions

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = RawFencedCodeBlockLexer(re.compile(r'(?P<language>\w*)(?: title="(?P<title>[^"]+)")?[ \t]*$\n', re.MULTILINE))

NOT_RUN = {
    "reads a file or network that the reader has": (
        "resnet18", "photos", "my.models:make", "weight.npy", "own.npz", "net.safetensors",
    ),
    "takes longer than this test may": (
        "demo", "bench", "reproduce", "--check", "report", "memorize",
    ),
}  # fmt: skip
"""Words of commands that are only parsed: names, options and the types of their values are checked."""


def parser(document: Document) -> Iterator[Region]:
    for region in FENCE(document):
        region.parsed = region.lexemes["source"]
        region.evaluator = RUN[region.lexemes["language"]]
        yield region


def run_python(example: Example) -> None:
    """Executes the block; one with a title is the file of that name as well."""
    title = example.region.lexemes["title"]
    if title:
        write(title, example.parsed)
    padded = "\n" * (example.line + example.parsed.line_offset) + example.parsed
    exec(compile(padded, example.path, "exec", dont_inherit=True), example.namespace)


def write_file(example: Example) -> None:
    title = example.region.lexemes["title"]
    if title:
        write(title, example.parsed)


def write(name: str, text: str) -> None:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def run_shell(example: Example) -> None:
    for line in example.parsed.replace("\\\n", " ").splitlines():
        run_line(shlex.split(line, comments=True), example)


def run_console(example: Example) -> None:
    """Runs the lines after a dollar; what follows them is their output, but for numbers and the width of columns."""
    command, shown = "", []
    for line in example.parsed.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            assert not command, "a console block has one command"
            command = line[2:]
        else:
            shown.append(line)
    printed = run_line(shlex.split(command, comments=True), example)
    if printed is not None:
        assert [line for line in shown if without_numbers(line) not in without_numbers(printed)] == []


def without_numbers(text: str) -> str:
    return " ".join(re.sub(r"-?\d[\d,.]*(e[+-]?\d+)?", "#", text).split())


def run_line(words: list[str], example: Example) -> str | None:
    """Runs a line of a shell block as far as a test can; returns what it printed."""
    if not words:
        return None
    program, *arguments = words
    if program == "onlynorm":
        return run_onlynorm(arguments, example)
    if program == "make":
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    elif program == "python":
        assert (ROOT / arguments[0]).is_file()
    else:
        assert program in ("pip", "export", "git", "cd", "python3", "source"), (
            f"the test does not know how to run {program}"
        )
    return None


def run_onlynorm(arguments: list[str], example: Example) -> str | None:
    parse(arguments)
    fetched = example.namespace.setdefault("fetched", set())
    if arguments[:2] == ["data", "get"]:
        fetched |= {name.replace("-", "_") for name in arguments[2:]}
        return None
    if set(arguments) & {word for words in NOT_RUN.values() for word in words}:
        return None
    ran = example.namespace["run"](*arguments)
    needed = re.search(r"onlynorm data get (\w+)", ran.err)
    if needed is not None:  # a command before it on the page says how to get the data
        assert needed[1] in fetched, f"onlynorm {shlex.join(arguments)} needs {needed[1]}"
        return None
    assert ran.code in (0, 1), f"onlynorm {shlex.join(arguments)}: {ran.err}"
    return str(ran.stdout)


def parse(arguments: list[str]) -> None:
    """Checks the names and values of a command line without running it."""
    command = typer.main.get_command(cli.app.app)
    rest = list(arguments)
    while rest and hasattr(command, "commands"):
        name = rest.pop(0)
        command = command.get_command(None, name)
        assert command is not None, f"there is no command {name}"
    if not hasattr(command, "commands"):
        with contextlib.suppress(typer.Exit):  # --help
            command.make_context("onlynorm", rest)


def skip(example: Example) -> None:
    """Output, and text that is no code."""


RUN = {
    "python": run_python, "bash": run_shell, "console": run_console, "toml": write_file, "json": skip, "text": skip,
}  # fmt: skip


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks may import their own files, draw figures, and register features; the next page knows none of it."""
    monkeypatch.delenv("ONLYNORM_DATA", raising=False)
    monkeypatch.syspath_prepend(".")
    monkeypatch.setattr(distributions, "_REGISTRY", dict(distributions._REGISTRY))
    before = set(sys.modules)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    yield
    torch.set_rng_state(state)
    plt.close("all")
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("my", "my_study"):
            del sys.modules[name]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_block_of_a_page_runs(page: Path, run: RunCli) -> None:
    document = Sybil(parsers=[parser]).parse(page)
    document.namespace["run"] = run
    for example in document:
        example.evaluate()


@pytest.mark.parametrize("line", ["diagnose mlp --dta digits", "plan resnet20 --excess much", "explain mlp"])
def test_a_command_that_is_not_run_is_still_parsed(line: str) -> None:
    with pytest.raises(Exception, match=r"No such option|valid number|no command explain"):
        parse(line.split())


def test_shown_output_is_compared_but_for_numbers() -> None:
    assert without_numbers("score 0.05 of 1,  rank 1e-3\n-  2") == without_numbers("score 0.91 of 1, rank 7.3\n- 11")
    assert without_numbers("healthy, 0.9") != without_numbers("unhealthy, 0.9")
