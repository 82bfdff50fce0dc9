"""Running the command line inside the tests' own process."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from onlynorm import cli
from onlynorm.cli.terminal import screen


@dataclass(frozen=True)
class Ran:
    """What a run of the command line left: its exit code and both streams, folded lines joined."""

    code: int
    stdout: str
    stderr: str

    @property
    def out(self) -> str:
        return " ".join(self.stdout.split())

    @property
    def err(self) -> str:
        return " ".join(re.sub("[│╭╮╰╯─]", " ", self.stderr).split())

    def json(self) -> Any:
        """The whole of standard output as one JSON document; NaN and Infinity are none."""

        def refuse(word: str) -> None:
            raise AssertionError(f"{word} is no JSON")

        return json.loads(self.stdout, parse_constant=refuse)


RunCli = Callable[..., Ran]


def runner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path, *command: str) -> RunCli:
    """A function that runs `onlynorm COMMAND ARGS` in this folder; a traceback is a failure."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(screen, "width", 300)  # wide enough that no cell is folded
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # typer sets its own

    def call(*args: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["onlynorm", *command, *map(str, args)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        seen = capsys.readouterr()
        assert "Traceback" not in seen.out + seen.err
        return Ran(int(stopped.value.code or 0), seen.out, seen.err)

    return call
