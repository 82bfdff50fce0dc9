"""`onlynorm demo`: its exit codes, its options, and what it tells of the rebuilt network."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from commands import RunCli

from onlynorm.cli.commands import demo as demonstrating
from onlynorm.cli.commands.demo import Demo
from onlynorm.errors import ToleranceError
from onlynorm.reconstruction import Verification, plan, reconstruct
from onlynorm.reconstruction.verify import Comparison

# ------------------------------------------------------------------------------- stand-ins for what takes long


def a_demo(**changes: Any) -> Demo:
    """The demo of a single layer, compared with itself; `changes` are those of the verification."""
    target, inputs = torch.nn.Sequential(torch.nn.Linear(3, 2)).double(), torch.ones(4, 3, dtype=torch.float64)
    check = Verification(0.0, 1e-12, 1.0, 0.0, True, 4, n_frozen=40)
    comparison = Comparison(dataclasses.replace(check, **changes), 0.96, 0.95, 0.1)
    planned, made = plan(target, inputs), reconstruct(target, inputs)
    return Demo("toy data", planned, made, comparison, 2000, 5000, 300, 1.5)


# ------------------------------------------------------------------------------- demo


@pytest.mark.parametrize(("agreement", "code", "word"), [(1.0, 0, "computes the same"), (0.9, 1, "does NOT compute")])
def test_demo_exits_with_1_when_the_functions_differ(
    run: RunCli, monkeypatch: pytest.MonkeyPatch, agreement: float, code: int, word: str
) -> None:
    monkeypatch.setattr(demonstrating, "run_demo", lambda **_: a_demo(agreement=agreement))
    told, plain = run("demo"), run("demo", "--json")
    assert (told.code, plain.code) == (code, code)
    assert word in told.out
    assert plain.json()["is_same_function"] is (code == 0)
    assert plain.stderr == ""


def test_demo_hands_its_options_on_and_shows_its_steps_on_standard_error(
    run: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_options: dict[str, Any] = {}

    def remember(**options: Any) -> Demo:
        given_options.update(options)
        options["progress"](0, 5, "a step")
        return a_demo()

    monkeypatch.setattr(demonstrating, "run_demo", remember)
    ran = run("demo", "--seed", 3, "--features", "orthogonal", "--excess", 1.5)
    assert {name: given_options[name] for name in ("seed", "features", "excess")} == {
        "seed": 3,
        "features": "orthogonal",
        "excess": 1.5,
    }
    assert "a step" not in ran.out


def test_demo_tells_what_it_keeps(run: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demonstrating, "run_demo", lambda **_: a_demo())
    facts = run("demo", "--json").json()
    assert facts["n_frozen"] == 40
    assert facts["target_accuracy"] == 0.96
    assert facts["network_accuracy"] == 0.95
    assert facts["file_bytes"] == 2000
    assert [layer["name"] for layer in facts["layers"]] == [row["name"] for row in facts["plan"]["layers"]] == ["0"]
    told = run("demo")
    assert re.search("layer equations features .* total .* Rebuilt layers .* toy data", told.out)


def test_a_missed_tolerance_exits_with_1_and_its_message(run: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    def miss(**_: Any) -> Demo:
        raise ToleranceError("needs 1e-10; got [1e-3]. Draw more features.")

    monkeypatch.setattr(demonstrating, "run_demo", miss)
    ran = run("demo")
    assert (ran.code, ran.stdout) == (1, "")
    assert ran.err == "failed: needs 1e-10; got [1e-3]. Draw more features."
