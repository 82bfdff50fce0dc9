"""`onlynorm demo`: its exit codes, its options, its page, and what it prints of both networks."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import RunCli

from onlynorm.cli.commands import demo as demonstrating
from onlynorm.cli.commands.demo import Demo, RepairDemo
from onlynorm.errors import ToleranceError
from onlynorm.models import mlp
from onlynorm.rank import Repaired, repair
from onlynorm.reconstruction import Verification, plan, reconstruct
from onlynorm.reconstruction.verify import Comparison

# ------------------------------------------------------------------------------- stand-ins for what takes long


def a_demo(**changes: Any) -> Demo:
    """The demo of a single layer, compared with itself; `changes` are those of the verification."""
    target, inputs = torch.nn.Sequential(torch.nn.Linear(3, 2)).double(), torch.ones(4, 3, dtype=torch.float64)
    check = Verification(0.0, 1e-12, 1.0, 0.0, True, 4, n_frozen=40)
    comparison = Comparison(dataclasses.replace(check, **changes), 0.96, 0.95, 0.1)
    planned, made = plan(target, inputs), reconstruct(target, inputs)
    return Demo("toy data", planned, made, comparison, 2000, 5000, 300, 1.5, ((0.5, 0.5), (1.0, 1.0)))


@functools.cache
def a_repair() -> Repaired:
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(32, 8, generator=generator), torch.arange(32) % 4
    return repair(mlp((8, *[8] * 12, 4), seed=0), inputs, labels)


def a_repair_demo(after: float = 0.9) -> RepairDemo:
    """The repair of a small network, with made-up accuracies."""
    return RepairDemo("toy data", a_repair(), ((0, 0.1), (6, 0.1)), ((0, 0.1), (6, after)), 0.5)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both parts of the demo without training, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demonstrating, "run_demo", lambda **_: a_demo())
    monkeypatch.setattr(demonstrating, "run_repair", lambda **_: a_repair_demo())


# ------------------------------------------------------------------------------- demo


@pytest.mark.parametrize(("agreement", "code", "word"), [(1.0, 0, "same function"), (0.9, 1, "NOT the same function")])
def test_demo_exits_with_1_when_the_functions_differ(
    run: RunCli, monkeypatch: pytest.MonkeyPatch, agreement: float, code: int, word: str
) -> None:
    monkeypatch.setattr(demonstrating, "run_demo", lambda **_: a_demo(agreement=agreement))
    told, plain = run("demo"), run("demo", "--json")
    assert (told.code, plain.code) == (code, code)
    assert word in told.out
    assert plain.json()["is_same_function"] is (code == 0)
    assert plain.stderr == ""


@pytest.mark.parametrize(("after", "code"), [(0.81, 0), (0.79, 1)])
def test_demo_exits_with_1_when_the_repaired_network_does_not_learn(
    run: RunCli, monkeypatch: pytest.MonkeyPatch, after: float, code: int
) -> None:
    monkeypatch.setattr(demonstrating, "run_repair", lambda **_: a_repair_demo(after))
    ran = run("demo", "--json")
    assert ran.code == code
    assert ran.json()["repair"]["has_learned"] is (code == 0)
    assert ran.json()["repair"]["accuracy_after"] == after


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
    facts = run("demo", "--json").json()
    assert facts["n_frozen"] == 40
    assert facts["target_accuracy"] == 0.96
    assert facts["network_accuracy"] == 0.95
    assert facts["file_bytes"] == 2000
    assert [layer["name"] for layer in facts["layers"]] == [row["name"] for row in facts["plan"]["layers"]] == ["0"]
    printed = run("demo").out
    assert re.search(r"10.0 % of the test images correct .* 90.0 % of the test images correct", printed)
    assert re.search(r"96.0 % of the test images correct .* same prediction for 4 of 4 test images", printed)


def test_demo_writes_one_page_with_both_figures_and_prints_its_path(run: RunCli, tmp_path: Path) -> None:
    ran = run("demo", "--out", tmp_path / "new" / "folder")
    page = tmp_path / "new" / "folder" / "demo.html"
    assert str(page) in ran.stdout.replace("\n", "")
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == 4, "each for wide pages and for phones"
    assert "A network of 13 layers that does not learn" in text
    assert "rebuilt from random weights" in text
    assert "http://" not in re.sub(r"xmlns[:\w]*=.http://www.w3.org/[\w/]*", "", text)


def test_a_file_as_folder_of_the_page_is_refused_before_any_work(
    run: RunCli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(demonstrating, "run_demo", lambda **_: pytest.fail("ran in vain"))
    (tmp_path / "file").touch()
    ran = run("demo", "--out", tmp_path / "file")
    assert (ran.code, ran.stdout) == (2, "")
    assert "writable folder" in ran.err


def test_a_missed_tolerance_exits_with_1_and_its_message(run: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    def miss(**_: Any) -> Demo:
        raise ToleranceError("needs 1e-10; got [1e-3]. Draw more features.")

    monkeypatch.setattr(demonstrating, "run_demo", miss)
    ran = run("demo")
    assert (ran.code, ran.stdout) == (1, "")
    assert ran.err == "failed: needs 1e-10; got [1e-3]. Draw more features."
