"""The help of every command: panels of options, examples that can be pasted, completion by the shell, --debug."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from commands import RunCli
from typer.testing import CliRunner

from onlynorm import cli
from onlynorm.cli.help import OUTPUT, WIDTH, completing, examples

TOP = typer.main.get_command(cli.app.app).commands  # type: ignore[attr-defined]
BENCHES = {f"bench {name}": TOP["bench"].get_command(None, name) for name in TOP["bench"].list_commands(None)}
DATA = {f"data {name}": command for name, command in TOP["data"].commands.items()}
COMMANDS = TOP | BENCHES | DATA
LONG = ("bench", "demo", "report", "reproduce", "spectrum", "theorems")
"""Commands with tests of their own, which take minutes or hours at their full size."""
PLACEHOLDERS = re.compile(r"<(bool|str|int|float|path|list\[\w+\]|(int|float) range)>|\[x>|<=x")


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def help_of(name: str) -> str:
    result = CliRunner().invoke(cli.app.app, [*name.split(), "--help"])
    assert result.exit_code == 0
    return result.stdout


def options_of(command: Any) -> Iterator[Any]:
    context = typer.Context(command)
    yield from (one for one in command.get_params(context) if one.param_type_name == "option")


def examples_in(text: str) -> list[str]:
    """The lines of the code block, as the shell joins them."""
    (block,) = re.findall(r"```text\n(.*?)```", text, flags=re.DOTALL)
    return [line for line in block.replace("\\\n", "").splitlines() if line]


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_80_columns_and_names_what_is_typed_instead_of_types(name: str) -> None:
    shown = help_of(name)
    assert max(map(len, shown.splitlines())) <= 80
    assert PLACEHOLDERS.search(shown) is None
    assert "--help" in shown


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_in_a_panel_and_says_what_follows_it(name: str) -> None:
    for one in options_of(COMMANDS[name]):
        if name in ("bench", "data"):
            continue
        assert one.rich_help_panel, one.name
        assert one.help, one.name
        assert one.metavar == "" if one.is_flag else re.fullmatch("[A-Z]+(=[A-Z]+)?", one.metavar), one.name
        assert one.rich_help_panel == OUTPUT or one.name not in ("help", "as_json", "out")


def test_every_command_is_in_a_panel() -> None:
    assert all(command.rich_help_panel for command in TOP.values())


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_shown_line_by_line_as_they_are_typed(name: str) -> None:
    shown = [line.strip() for line in help_of(name).splitlines()]
    (block,) = re.findall(r"```text\n(.*?)```", COMMANDS[name].epilog, flags=re.DOTALL)
    for line in block.splitlines():
        assert line.strip() in shown
        assert len(line) <= WIDTH


@pytest.mark.parametrize("name", COMMANDS)
def test_every_example_is_a_line_the_command_understands(name: str) -> None:
    found = examples_in(COMMANDS[name].epilog)
    assert found
    for line in found:
        program, *words = shlex.split(line)
        assert program == "onlynorm"
        known = words[:2] if words[0] in ("bench", "data") else words[:1]
        command = COMMANDS[" ".join(known)]
        command.make_context(name, words[len(known) :])
    assert any(line.startswith(f"onlynorm {name}") for line in found)  # some need the file of another command


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in COMMANDS if name.split()[0] not in LONG])
def test_examples_run_in_order_without_data_but_what_they_say_to_get(
    run: RunCli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setenv("ONLYNORM_DATA", str(tmp_path / "none"))
    epilog = COMMANDS[name].epilog
    for line in examples_in(epilog):
        words = shlex.split(line)[1:]
        if words[:2] == ["data", "get"] or "table.csv" in words:
            continue
        ran = run(*words)
        needed = re.search(r"onlynorm data get (\w+)", ran.err)
        if needed is None:
            assert ran.code in ((0, 1) if name == "diagnose" else (0,)), f"{line}: {ran.err}"
        else:
            assert re.search(rf"onlynorm data get [\w ]*{needed[1]}", epilog), f"{line} needs {needed[1]}"


def test_a_long_example_is_continued_before_an_option_and_joined_by_the_shell() -> None:
    line = "onlynorm tune my.models:make --weights base.pt --data own.safetensors --which 'layer4 *' --optimizer adamw"
    written = examples(line, "onlynorm demo")
    assert "own.safetensors \\\n    --which 'layer4 *' --optimizer adamw\nonlynorm demo\n" in written
    joined, second = examples_in(written)
    assert shlex.split(joined) == shlex.split(line)
    assert second == "onlynorm demo"


def test_completions_start_with_what_is_typed() -> None:
    complete = completing(["resnet18", "resnet20", "vgg"])
    assert complete("res") == ["resnet18", "resnet20"]
    assert complete("") == ["resnet18", "resnet20", "vgg"]
    assert complete("./data/") == []


COMPLETED = {
    "onlynorm rec": ["reconstruct"],
    "onlynorm tune resnet2": ["resnet20"],
    "onlynorm diagnose mlp --data fash": ["fashion_mnist"],
    "onlynorm plan mlp --features id_cond_": ["id_cond_minimal"],
    "onlynorm reconstruct mlp --construction lo": ["low_rank"],
    "onlynorm memorize dig": ["digits"],
    "onlynorm bench scaled --law ": ["semi-circle", "geometric"],
    "onlynorm tune mlp --weights ./": [""],  # left to the shell, which knows the files
}


@pytest.mark.parametrize("typed", COMPLETED)
def test_the_shell_completes_commands_models_data_and_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: str
) -> None:
    words = typed.split(" ")
    monkeypatch.setenv("_ONLYNORM_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    monkeypatch.setattr(sys, "argv", ["onlynorm"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert not stopped.value.code
    assert capsys.readouterr().out.rstrip("\n").split("\n") == COMPLETED[typed]


# ------------------------------------------------------------------------------- --debug


@pytest.mark.parametrize(("args", "variable"), [(("--debug",), ""), ((), "1")])
def test_debug_shows_the_traceback_before_the_same_error(tmp_path: Path, args: tuple[str, ...], variable: str) -> None:
    command = (sys.executable, "-m", "onlynorm", *args, "plan", "mlp", "--excess", "0")
    env = os.environ | {"ONLYNORM_DEBUG": variable or "0"}
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert ran.stderr.startswith("Traceback (most recent call last):")
    assert "in parse_rebuilding\n" in ran.stderr
    assert "\nerror: --excess must be a number" in ran.stderr


def test_without_debug_no_traceback_is_shown(run: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONLYNORM_DEBUG", raising=False)
    ran = run("plan", "mlp", "--excess", 0)  # fails if there is a traceback
    assert ran.err.startswith("error: --excess must be a number")
