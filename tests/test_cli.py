"""The command line: exit codes, one JSON document, results and messages on their own streams, errors in one line."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from commands import Ran, RunCli, runner
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from typer.testing import CliRunner

import onlynorm
from onlynorm import cli
from onlynorm import theorems as registry
from onlynorm.bench import RECIPES, Bench, Goal, RebuiltRow, ReconstructBench, Row, Sizes
from onlynorm.cli import demo as demonstrating
from onlynorm.cli import evidence
from onlynorm.cli import measure as measuring
from onlynorm.cli import rebuild as rebuilding
from onlynorm.cli.plan import parse_shape
from onlynorm.demo import Demo
from onlynorm.errors import ShapeError, ToleranceError
from onlynorm.papers import Artifact, Curve, Expectation, Outcome, Run
from onlynorm.papers import run as run_module
from onlynorm.reconstruction import Verification, convert, plan, reconstruct
from onlynorm.reconstruction.compare import Comparison
from onlynorm.reconstruction.target import TargetLayer
from onlynorm.theorems import Evidence, Verdict

NAN = float("nan")
FIGURE = "random_features:fig-3"
CHECKED, UNCHECKED = "giannou2023:lemma-2", "giannou2023:lemma-3"
TOP = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
BENCHES = {f"bench {name}": command for name, command in TOP["bench"].commands.items()}
COMMANDS = {name: command for name, command in TOP.items() if name != "bench"} | BENCHES


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> RunCli:
    """Runs `main` in this process, in a folder of its own."""
    return runner(monkeypatch, capsys, tmp_path)


# ------------------------------------------------------------------------------- stand-ins for what takes long


def a_demo(**changes: Any) -> Demo:
    """The demo of a single layer, compared with itself; `changes` are those of the verification."""
    target, inputs = torch.nn.Sequential(torch.nn.Linear(3, 2)).double(), torch.ones(4, 3, dtype=torch.float64)
    check = Verification(0.0, 1e-12, 1.0, 0.0, True, 4, n_frozen=40)
    comparison = Comparison(dataclasses.replace(check, **changes), 0.96, 0.95, 0.1)
    planned, made = plan(target, inputs=inputs), reconstruct(target, inputs=inputs)
    return Demo("toy data", planned, made, comparison, 2000, 5000, 300, 1.5)


def a_bench(*, is_met: bool) -> Bench:
    return Bench(
        [
            Row("linear 4x4", 16, 1.25, "onlynorm", 0.5, 1.0, 1000, 1e-12, 7),
            Row("linear 4x4", 16, 1.25, "dense float64 LU", NAN, NAN, 2000, NAN, 0, "not run"),
        ],
        [Goal("an aim", "a measurement", is_met)],
    )


def square(*, k: int) -> dict[str, float]:
    return {"square": float(k * k)}


def tiny_figure(run: Run) -> Outcome:
    run.announce(2)
    squares = [run.piece(f"k={k}", square, k=k)["square"] for k in (1, 2)]
    return Outcome({"sum": sum(squares), "nothing": NAN}, [Curve("squares", [1.0, 2.0], squares, kind="points")])


def failing_figure(run: Run) -> Outcome:
    raise RuntimeError("a figure that cannot be drawn")


def killed_figure(run: Run) -> Outcome:
    run.piece("k=1", square, k=1)
    raise KeyboardInterrupt


@pytest.fixture
def figure(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces every artifact of the papers by one small one."""

    def replace(function: Callable[[Run], Outcome] = tiny_figure, *, total: float = 5.0) -> None:
        sizes: dict[str, dict[str, int]] = {"quick": {}, "paper": {}}
        expected = Expectation("sum", "arithmetic", value=total, tolerance=0.5)
        one = Artifact(FIGURE, "Squares", "Squares grow.", "figure", (0,), sizes, (expected,), (), function, "digest")
        monkeypatch.setattr(run_module, "artifacts", lambda: {FIGURE: one})

    replace()
    return replace


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Callable[[Verdict], None]:
    """Replaces every registered check by one, for one statement, with the verdict asked for."""

    def replace(verdict: Verdict) -> None:
        def measure(seed: int) -> Evidence:
            return Evidence(verdict, f"measured at seed {seed}", {"gap": NAN, "seed": float(seed)})

        monkeypatch.setattr(registry, "_checks", {CHECKED: measure})

    replace(Verdict.HOLDS)
    return replace


# ------------------------------------------------------------------------------- help and version


def test_every_command_of_the_module_is_known_here() -> None:
    assert set(TOP) == {
        "demo", "plan", "spectrum", "reconstruct", "verify", "tune", "diagnose", "repair", "factorize", "memorize",
        "theorems", "reproduce", "report", "bench",
    }  # fmt: skip
    assert {name.removeprefix("bench ") for name in BENCHES} == {
        "solve", "reconstruct", "tune", "adapt", "frozen", "text", "chain", "layers", "diagnose", "predict", "repair",
        "align", "scaled", "scratch",
    }  # fmt: skip


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_every_command(flag: str) -> None:
    result = CliRunner().invoke(cli.app, [flag])
    assert result.exit_code == 0
    assert "only their normalization" in result.stdout
    assert all(name in result.stdout for name in TOP)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command_shows_an_example(name: str) -> None:
    result = CliRunner().invoke(cli.app, [*name.split(), "--help"])
    assert result.exit_code == 0
    assert re.search(rf"Examples?: onlynorm {name}", " ".join(result.stdout.split()))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_example_of_the_help_is_a_line_the_command_understands(name: str) -> None:
    examples = re.findall(r"`onlynorm ([^`]+)`", COMMANDS[name].epilog)
    assert examples
    for example in examples:
        assert example.startswith(name)
        COMMANDS[name].make_context(name, shlex.split(example.removeprefix(name)))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_can_print_json(name: str) -> None:
    assert any("--json" in parameter.opts for parameter in COMMANDS[name].params)


def test_version_is_that_of_the_package(run: RunCli) -> None:
    assert run("--version") == Ran(0, f"onlynorm {onlynorm.__version__}\n", "")


def test_without_a_command_the_help_is_shown(run: RunCli) -> None:
    ran = run()
    assert ran.code == 2
    assert "Usage:" in ran.out + ran.err


# ------------------------------------------------------------------------------- wrong use


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("nope", "No such command 'nope'"),
        ("plan 4,4 --nope", "No such option: --nope"),
        ("plan", "Missing argument 'MODEL|SHAPE'"),
        (
            "plan abc",
            "model needs a known name; got 'abc'. Known: mlp, mlp_bn, package.module:factory, resnet18, resnet20",
        ),
        ("plan resnet21", "model needs a known name; got 'resnet21'. Did you mean 'resnet32' or 'resnet20'"),
        ("plan 4a,4", "a shape needs whole numbers as in 64,64,3,3; got '4a,4'. Separate them by commas."),
        ("plan ''", "a shape needs whole numbers"),
        ("plan 4,,4", "a shape needs whole numbers"),
        ("plan 4.5,4", "a shape needs whole numbers"),
        ("plan 64", "shape needs 2 to 5 positive whole numbers"),
        ("plan 0,4", "shape needs 2 to 5 positive whole numbers"),
        ("plan -- -3,4", "shape needs 2 to 5 positive whole numbers"),
        ("plan 2,2,2,2,2,2", "shape needs 2 to 5 positive whole numbers"),
        ("plan 4,4 --features he_norml", "features needs a known name; got 'he_norml'. Did you mean 'he_normal'"),
        ("plan 4,4 --excess 0", "excess needs a positive finite number"),
        ("plan 4,4 --excess -1", "excess needs a positive finite number"),
        ("plan 4,4 --excess nan", "Invalid value for '--excess'"),
        ("plan 4,4 --excess inf", "Invalid value for '--excess'"),
        ("plan 4,4 --excess much", "Invalid value for '--excess'"),
        ("plan 4,4 --features id_cond --excess 2", "id_cond needs exactly its own 16 features"),
        ("plan 4,4 --tolerance 0", "tolerance needs to lie in (0, 1); got 0.0"),
        ("plan 4,4 --tolerance nan", "tolerance needs to lie in (0, 1); got nan"),
        ("plan 4,4 --features id_cond --tolerance 2", "tolerance needs to lie in (0, 1); got 2.0"),
        ("plan 4,4 --excess 1e308", "Invalid value for '--excess'"),
        ("plan 99999999,99999999", "needs at least"),
        (f"plan 4,{10**400}", "a shape needs sizes below 2^31"),
        (f"plan 4,{'9' * 5000}", "a shape needs whole numbers"),
        ("demo --features ortho_con", "Did you mean 'ortho_cond'"),
        ("demo --excess 0", "excess needs a positive finite number"),
        ("demo --excess 1e6", "the demo needs a plan that fits; 1: "),
        ("demo --excess -0.5", "excess needs a positive finite number"),
        ("demo --seed -1", "seed needs a whole number in [0, 2^64); got -1"),
        ("demo --seed 99999999999999999999", "seed needs a whole number in [0, 2^64)"),
        ("demo --seed half", "Invalid value for '--seed'"),
        ("theorems nope", "statement needs a known name; got 'nope'"),
        ("theorems ''", "statement needs a known name; got ''"),
        ("theorems giannou2023:thm-111", "Did you mean 'giannou2023:thm-11'"),
        ("theorems --paper gianou2023", "paper needs a known name; got 'gianou2023'. Did you mean 'giannou2023'"),
        ("theorems giannou2023:thm-1 --paper hardt_ma2017", "statement of hardt_ma2017 needs a known name"),
        ("reproduce random_features:fig-33", "reproduce needs a known name; got 'random_features:fig-33'. Did you"),
        ("reproduce nope", "reproduce needs a known name; got 'nope'"),
        ("reproduce --scale big", "scale needs a known name; got 'big'. Known: paper, quick."),
        ("plan mlp --activation rely", "activation needs a known name; got 'rely'. Did you mean 'relu'"),
        ("plan mlp --construction wid", "construction needs a known name; got 'wid'. Did you mean 'wide'"),
        ("plan mlp --set kernel", "--set needs NAME=VALUE with a field that has no option of its own; got 'kernel'"),
        ("plan mlp --set excess=2 --excess 1.5", "--set needs NAME=VALUE with a field that has no option of its own"),
        ("plan mlp --set kernal=second", "field of a recipe needs a known name; got 'kernal'. Did you mean 'kernel'"),
        ("plan mlp --set activation=tanh --activation none", "--set needs NAME=VALUE with a field that has no option"),
        ("plan mlp --set margin=wide", "--set margin needs float | None; got 'wide'. Write a number, or a list"),
        ("plan mlp --set kernel=3", "--set kernel needs str; got '3'"),
        ("plan mlp --set rank=true", "--set rank needs int | None; got 'true'"),
        ("plan mlp --set kernel=third", "kernel needs a known name; got 'third'"),
        ("plan mlp --input 3,x", "a shape needs whole numbers"),
        ("plan mlp --input 0", "--input needs positive sizes, as in 3,224,224; got '0'"),
        ("plan mlp --input 7", "the network needs to take the inputs, (1, 7)"),
        ("plan mlp --data digit", "data needs a known name; got 'digit'. Did you mean 'digits'"),
        ("plan nowhere:make", "a model needs code that imports and runs; nowhere:make gave ModuleNotFoundError"),
        ("plan json:dumps --input 3", "a model needs code that imports and runs; json:dumps gave TypeError"),
        ("reconstruct", "Missing argument 'MODEL'"),
        ("reconstruct mpl", "model needs a known name; got 'mpl'. Did you mean 'mlp'"),
        ("reconstruct mlp --dtype half", "dtype needs a known name; got 'half'. Known: float32, float64."),
        ("reconstruct mlp --calibration 0", "Invalid value for '--calibration'"),
        ("reconstruct mlp --calibration 9999", "9999 samples need as many in the data; got 1438. Ask for fewer."),
        ("reconstruct mlp --weights none.pt", "weights need a file; there is none at none.pt"),
        ("reconstruct mlp --out .", "--out needs the name of a file; . is a folder. Try net.safetensors."),
        ("reconstruct mlp --features he_norml", "features needs a known name; got 'he_norml'"),
        ("reconstruct mlp --tolerance 2", "tolerance needs to lie in (0, 1); got 2.0"),
        ("reconstruct mlp --error 2", "error needs a number in (0, 1)"),
        ("verify", "Missing argument 'FILE'"),
        ("verify net.safetensors", "Missing option '--model'"),
        ("verify net.safetensors --model mlp", "net.safetensors"),
        ("verify net.safetensors --model mlp --tolerance 0", "tolerance needs to lie in (0, 1); got 0.0"),
        ("bench slove", "No such command 'slove'. Did you mean 'solve'"),
        ("bench reconstruct --features he_norml", "features needs a known name; got 'he_norml'"),
        ("bench reconstruct --images 0", "Invalid value for '--images'"),
        ("bench solve --repeats 0", "Invalid value for '--repeats'"),
        ("report --records nowhere", "a report needs a folder of records; there is none at nowhere"),
    ],
    ids=lambda text: text[:40],
)
@pytest.mark.parametrize("as_json", [False, True], ids=["table", "json"])
def test_wrong_use_exits_with_2_and_says_what_was_needed(run: RunCli, args: str, message: str, as_json: bool) -> None:
    parts = shlex.split(args)
    where = 2 if parts[0] == "bench" else 1
    ran = run(*parts[:where], *(["--json"] if as_json and " ".join(parts[:where]) in COMMANDS else []), *parts[where:])
    assert ran.code == 2
    assert ran.stdout == ""
    assert message in ran.err


@pytest.mark.parametrize("out", ["file", "file/deeper", "file/deeper/still"])
def test_records_that_cannot_be_written_are_refused_before_anything_is_computed(
    run: RunCli, figure: Callable[..., None], tmp_path: Path, out: str
) -> None:
    (tmp_path / "file").write_text("in the way")
    figure(lambda run: pytest.fail("computed in vain"))
    ran = run("reproduce", FIGURE, "--out", tmp_path / out)
    assert ran.code == 2
    assert ran.stdout == ""
    assert ran.err.startswith("error: records need a writable folder; got ")


@pytest.mark.usefixtures("figure")
def test_a_disk_that_fails_during_the_run_is_an_error_in_one_line(
    run: RunCli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(evidence, "need_folder", lambda out: None)
    ran = run("reproduce", FIGURE, "--out", tmp_path / "file")
    assert ran.code == 2
    assert "saving results needs a writable folder with space" in ran.err


@pytest.mark.parametrize("out", [".", "folder", "file/report.html"])
def test_a_report_that_cannot_be_written_is_refused(run: RunCli, tmp_path: Path, out: str) -> None:
    (tmp_path / "records").mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("in the way")
    ran = run("report", "--records", "records", "--out", out)
    assert ran.code == 2
    assert ran.stdout == ""
    assert re.search("a report needs the name of a file|saving results needs a writable folder", ran.err)


def test_a_damaged_record_is_refused_with_its_cure(run: RunCli, tmp_path: Path) -> None:
    folder = tmp_path / "records" / "toy" / "fig-1" / "quick"
    folder.mkdir(parents=True)
    (folder / "record.json").write_text("{")
    ran = run("report", "--records", "records", "--out", "page.html")
    assert ran.code == 2
    assert "damaged or cut short. Delete the file" in ran.err
    assert not (tmp_path / "page.html").exists()


# ------------------------------------------------------------------------------- demo


@pytest.mark.parametrize(("agreement", "code", "word"), [(1.0, 0, "computes the same"), (0.9, 1, "does NOT compute")])
def test_demo_exits_with_1_when_the_functions_differ(
    run: RunCli, monkeypatch: pytest.MonkeyPatch, agreement: float, code: int, word: str
) -> None:
    monkeypatch.setattr(demonstrating, "run_demo", lambda **_: a_demo(agreement=agreement))
    told, plain = run("demo"), run("demo", "--json")
    assert (told.code, plain.code) == (code, code)
    assert word in told.out
    assert plain.json()["same function"] is (code == 0)
    assert plain.stderr == ""


def test_demo_hands_its_options_on_and_shows_its_steps_on_standard_error(
    run: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_options: dict[str, Any] = {}

    def remember(**options: Any) -> Demo:
        given_options.update(options)
        options["step"]("a step")
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
    assert facts["frozen numbers, kept as a seed"] == 40
    assert facts["accuracy of the trained network"] == 0.96
    assert facts["accuracy of the norm-only network"] == 0.95
    assert facts["file of the seed and the norms"] == "2 kB"
    assert [layer["name"] for layer in facts["layers"]] == [row["name"] for row in facts["plan"]["layers"]] == ["0"]
    told = run("demo")
    assert re.search("layer equations features .* total .* What came out, layer by layer .* toy data", told.out)


def test_a_missed_tolerance_exits_with_1_and_its_message(run: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    def miss(**_: Any) -> Demo:
        raise ToleranceError("needs 1e-10; got [1e-3]. Draw more features.")

    monkeypatch.setattr(demonstrating, "run_demo", miss)
    ran = run("demo")
    assert (ran.code, ran.stdout) == (1, "")
    assert ran.err == "failed: needs 1e-10; got [1e-3]. Draw more features."


# ------------------------------------------------------------------------------- plan


def test_plan_weighs_every_method_and_names_one(run: RunCli) -> None:
    facts = run("plan", "64,64,3,3", "--excess", 1.1, "--json").json()
    assert facts["equations"] == 36864
    assert facts["number of features"] == 40551
    assert facts["norm parameters"] == facts["number of features"]
    assert {option["method"] for option in facts["options"]} == {"lu", "cholesky", "krylov"}
    assert facts["method"] in {option["method"] for option in facts["options"]}
    assert not next(option for option in facts["options"] if option["method"] == facts["method"])["obstacle"]


@pytest.mark.parametrize("features", ["id_cond", "id_cond_minimal", "ortho_cond"])
def test_plan_knows_the_closed_form_of_structured_features(run: RunCli, features: str) -> None:
    facts = run("plan", "4x5", "--features", features, "--json").json()
    assert facts["method"] == "closed form"
    assert facts["options"] == []
    assert facts["number of features"] == (17 if features == "id_cond_minimal" else 20)


def test_plan_is_a_table_for_people(run: RunCli) -> None:
    ran = run("plan", "64,64")
    assert (ran.code, ran.stderr) == (0, "")
    assert ran.out.startswith("Plan for a layer of shape (64, 64) features he_normal equations 4,096")
    assert "predicted seconds" in ran.out


@pytest.mark.parametrize("args", [(), ("--data", "digits"), ("--input", "64")], ids=str)
def test_plan_of_a_network_has_a_row_per_layer(run: RunCli, args: tuple[str, ...]) -> None:
    ran = run("plan", "mlp", "--features", "ortho_cond", *args)
    assert ran.code == 0
    assert re.search(
        "Plan for mlp layer equations features .* 0 2.05k 2.05k .* 2 320 320 .* total 2.37k 2.37k", ran.out
    )
    facts = run("plan", "mlp", "--excess", 2, "--set", "norms=affine", "--json", *args).json()
    assert [row["n_features"] for row in facts["layers"]] == [4096, 640]
    assert facts["recipe"] == {"activation": "ReLU()", "excess": 2.0, "norms": "affine"}
    assert facts["total"]["n_target_parameters"] == 64 * 32 + 32 + 32 * 10 + 10
    assert facts["left"] == []


def test_plan_needs_no_weights_of_a_built_in_network(
    run: RunCli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ONLYNORM_DATA", str(tmp_path))
    facts = run("plan", "resnet20", "--json").json()
    assert len(facts["layers"]) == 20
    assert facts["total"]["equations"] == 268_336


@pytest.mark.usefixtures("own_code")
def test_a_plan_that_does_not_fit_exits_with_1(run: RunCli) -> None:
    ran = run("plan", "own_code_of_this_test:huge", "--input", "2000")
    assert ran.code == 1
    assert "0: solving 4000000 equations with 5000000 features needs at least" in ran.out


@given(st.lists(st.integers(-99, 10**6), min_size=1, max_size=6), st.sampled_from([",", "x"]))
def test_a_shape_is_read_as_it_is_written(shape: list[int], separator: str) -> None:
    assert parse_shape(separator.join(map(str, shape))) == tuple(shape)


@given(st.text().filter(lambda text: not re.search(r"\d", text)))
def test_text_without_numbers_is_no_shape(text: str) -> None:
    with pytest.raises(ShapeError, match="a shape needs whole numbers"):
        parse_shape(text)


# ------------------------------------------------------------------------------- reconstruct and verify


OWN_CODE = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()

def huge():
    return nn.Sequential(nn.Linear(2000, 2000))
"""
OWN = ("own_code_of_this_test:make", "--data", "own.safetensors")


@pytest.fixture
def own_code(run: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model and data of one's own in the current folder."""
    (tmp_path / "own_code_of_this_test.py").write_text(OWN_CODE)
    monkeypatch.delitem(sys.modules, "own_code_of_this_test", raising=False)
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(80, 4, generator=generator), torch.randint(0, 3, (80,), generator=generator)
    save_file({"inputs": inputs, "labels": labels}, tmp_path / "own.safetensors")


@pytest.mark.usefixtures("own_code")
def test_a_network_is_rebuilt_verified_and_written_whole(run: RunCli, tmp_path: Path) -> None:
    ran = run("reconstruct", *OWN, "--out", "net.safetensors", "--seed", 3, "--activation", "leaky_relu")
    assert ran.code == 0
    assert re.search("layer features method residual .* 0 25 .* 2 19 ", ran.out)
    assert "from he_normal features, seed 3" in ran.out
    assert ran.out.endswith("The network computes the same function as the target.")
    assert sorted(path.name for path in tmp_path.glob("net*")) == ["net.safetensors"]
    facts = run("reconstruct", *OWN, "--features", "id_cond", "--json").json()
    assert [layer["n_features"] for layer in facts["layers"]] == [20, 15]
    assert facts["same function"] is True
    assert facts["accuracy of the target"] == facts["accuracy of the network"]
    assert facts["samples"] == 64
    assert facts["bytes"] == (tmp_path / "net.safetensors").stat().st_size


@pytest.mark.usefixtures("own_code")
def test_every_field_of_the_recipe_reaches_the_reconstruction(run: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def remember(network: torch.nn.Module, **options: Any) -> Any:
        seen.update(options)
        return reconstruct(network, **{name: value for name, value in options.items() if name != "error"})

    monkeypatch.setattr(rebuilding, "reconstruct", remember)
    words = (
        "--features sparse_he_normal --density 0.8 --excess 2 --seed 7 --activation none --tolerance 1e-9 "
        "--error 1e-3 --calibration 12 --images 0 --fold-norms --set kernel=second --set margin=0.5 --out o.safetensors"
    )
    ran = run("reconstruct", *OWN, *words.split())
    assert ran.code == 0
    assert "same function" not in ran.out
    assert len(seen.pop("inputs")) == 12
    assert str(seen.pop("partial")) == "o.safetensors.partial"
    seen.pop("step")
    assert seen == {
        "features": "sparse_he_normal", "density": 0.8, "excess": 2.0, "seed": 7, "tolerance": 1e-9, "error": 1e-3,
        "construction": "wide", "fold_norms": True, "kernel": "second", "margin": 0.5,
    }  # fmt: skip


@pytest.mark.usefixtures("own_code")
@pytest.mark.parametrize("args", [(), ("--json",)], ids=["table", "json"])
def test_a_reconstruction_that_is_not_the_same_function_exits_with_1(run: RunCli, args: tuple[str, ...]) -> None:
    ran = run("reconstruct", *OWN, "--excess", 0.5, *args)
    assert ran.code == 1
    assert "does NOT compute the same function" in ran.out or ran.json()["same function"] is False


@pytest.mark.usefixtures("own_code")
def test_a_missed_tolerance_of_a_layer_fails_by_its_name(run: RunCli) -> None:
    ran = run("reconstruct", *OWN, "--tolerance", 1e-9, "--excess", 0.5)
    assert ran.code == 2  # too few features are wrong use, known before anything is solved
    assert "layer '0'" in ran.err


def test_an_interrupted_reconstruction_goes_on_where_it_stopped(
    run: RunCli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    build = convert._rebuild

    def stop_at_the_second(target: TargetLayer, *rest: Any) -> Any:
        if target.name == "2":
            raise KeyboardInterrupt
        return build(target, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(convert, "_rebuild", stop_at_the_second)
        stopped = run("reconstruct", "mlp")
    assert stopped.code == 130
    assert stopped.stdout == ""
    assert "Finished layers are in net.safetensors.partial: the same command goes on from there." in stopped.err
    assert not (tmp_path / "net.safetensors").exists()
    (kept,) = (tmp_path / "net.safetensors.partial").iterdir()

    refused = run("reconstruct", "mlp", "--seed", 1)
    assert refused.code == 2
    assert "resuming needs the arguments of the run" in refused.err
    assert kept.exists()

    told: list[str] = []

    @contextlib.contextmanager
    def watch(names: list[str], *, hidden: bool) -> Iterator[Callable[[str, int, float], None]]:
        yield lambda name, iterations, residual: told.append(f"{name} after {iterations}")

    monkeypatch.setattr(rebuilding, "layer_bars", watch)
    assert run("reconstruct", "mlp").code == 0
    assert [text for text in told if text.startswith("0 ")] == ["0 after 0"]  # read, not solved again
    assert not kept.exists()


VERIFY = ("verify", "net.safetensors", "--images", 70, "--model", *OWN)


@pytest.mark.usefixtures("own_code")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("collapsed", [(), ("--collapsed",)], ids=["blocks", "collapsed"])
def test_verify_finds_the_network_of_a_file_the_same(run: RunCli, dtype: str, collapsed: tuple[str, ...]) -> None:
    run("reconstruct", *OWN)
    facts = run(*VERIFY, "--dtype", dtype, *collapsed, "--json").json()
    assert facts["same function"] is True
    assert facts["samples"] == 70
    # One layer of 25 features after another, in float32 with shifts about the size of the features.
    assert facts["relative error of the outputs"] <= (1e-9 if dtype == "float64" else 1e-4)
    told = run(*VERIFY, "--dtype", dtype, *collapsed)
    assert told.code == 0
    assert told.out.startswith("net.safetensors beside own_code_of_this_test:make, ")
    assert ("collapsed" in told.out) == bool(collapsed)


@pytest.mark.usefixtures("own_code")
def test_verify_exits_with_1_when_the_functions_differ(run: RunCli, tmp_path: Path) -> None:
    run("reconstruct", *OWN)
    assert run(*VERIFY, "--dtype", "float64", "--tolerance", 1e-16).code == 1
    other = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    torch.save(other.state_dict(), tmp_path / "other.pt")
    ran = run(*VERIFY, "--weights", "other.pt")
    assert ran.code == 1
    assert "The network does NOT compute the same function as the target." in ran.out


@pytest.mark.usefixtures("own_code")
def test_verify_refuses_a_file_that_was_altered(run: RunCli, tmp_path: Path) -> None:
    run("reconstruct", *OWN)
    path = tmp_path / "net.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(bytes(raw))
    ran = run(*VERIFY)
    assert (ran.code, ran.stdout) == (2, "")
    assert "net.safetensors" in ran.err


@pytest.mark.usefixtures("own_code")
def test_fewer_samples_than_usual_are_all_taken(run: RunCli, tmp_path: Path) -> None:
    np.save(tmp_path / "few.npy", np.linspace(-1.0, 1.0, 24).reshape(6, 4))
    ran = run("reconstruct", OWN[0], "--data", "few.npy", "--set", "margin=1", "--json")
    assert ran.json()["samples"] == 6
    assert "accuracy of the target" not in ran.json()
    verified = run("verify", "net.safetensors", "--model", OWN[0], "--data", "few.npy", "--json")
    assert verified.json()["samples"] == 6


def test_a_built_in_network_without_trained_weights_is_named_as_such(run: RunCli) -> None:
    ran = run("reconstruct", "mlp", "--features", "id_cond", "--images", 0)
    assert ran.code == 0
    assert "mlp has its initial random weights; --weights FILE gives it trained ones." in ran.err


# ------------------------------------------------------------------------------- theorems


def test_theorems_lists_every_statement(run: RunCli) -> None:
    listed = run("theorems", "--json").json()
    assert [entry["key"] for entry in listed] == [s.key for s in registry.statements()]
    assert not any("verdict" in entry for entry in listed)
    table = run("theorems")
    assert all(s.key in table.out for s in registry.statements())


def test_theorems_lists_those_of_one_paper(run: RunCli) -> None:
    listed = run("theorems", "--paper", "hardt_ma2017", "--json").json()
    assert [entry["key"] for entry in listed] == [s.key for s in registry.statements("hardt_ma2017")]


@pytest.mark.parametrize("paper", [(), ("--paper", "giannou2023")])
def test_theorems_shows_one_statement_whole(run: RunCli, paper: tuple[str, ...]) -> None:
    statement = registry.statement("giannou2023:thm-1")
    (facts,) = run("theorems", statement.key, *paper, "--json").json()
    assert (facts["key"], facts["says"], facts["assumes"]) == (statement.key, statement.says, list(statement.assumes))
    shown = run("theorems", statement.key, *paper)
    assert shown.out.startswith(f"{statement.key}: {statement.title}")
    assert " ".join(statement.says.split()) in shown.out


@pytest.mark.parametrize(
    ("verdict", "code"),
    [(Verdict.HOLDS, 0), (Verdict.CORRECTED, 0), (Verdict.FAILS, 1)],
)
@pytest.mark.parametrize("args", [(), (CHECKED,), ("--paper", "giannou2023")], ids=["all", "one", "paper"])
def test_a_failing_check_exits_with_1(
    run: RunCli, check: Callable[[Verdict], None], verdict: Verdict, code: int, args: tuple[str, ...]
) -> None:
    check(verdict)
    plain, told = run("theorems", *args, "--check", "--seed", 5, "--json"), run("theorems", *args, "--check")
    assert (plain.code, told.code) == (code, code)
    assert plain.stderr == ""
    facts = {entry["key"]: entry for entry in plain.json()}
    assert facts[CHECKED]["verdict"] == str(verdict)
    assert facts[CHECKED]["measured"] == {"gap": None, "seed": 5.0}
    assert facts[CHECKED]["evidence"] == "measured at seed 5"
    assert "measured at seed 0" in told.out
    assert "checks" not in told.out.split()


@pytest.mark.usefixtures("check")
def test_a_statement_without_a_check_is_no_failure(run: RunCli) -> None:
    ran = run("theorems", UNCHECKED, "--check", "--json")
    assert ran.code == 0
    assert [entry["verdict"] for entry in ran.json()] == ["not yet checked"]


@pytest.mark.usefixtures("check")
def test_a_check_that_breaks_fails_and_says_why(run: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(seed: int) -> Evidence:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(registry, "_checks", {CHECKED: break_down})
    ran = run("theorems", CHECKED, "--check", "--json")
    (facts,) = ran.json()
    assert ran.code == 1
    assert facts["verdict"] == "fails"
    assert facts["evidence"] == "the check raised ZeroDivisionError: a fault of ours"


# ------------------------------------------------------------------------------- reproduce


@pytest.mark.parametrize("ids", [(FIGURE,), ("random_features",), ()], ids=["artifact", "paper", "everything"])
@pytest.mark.usefixtures("figure")
def test_reproduce_prints_the_verdict_and_writes_the_record(run: RunCli, tmp_path: Path, ids: tuple[str, ...]) -> None:
    ran = run("reproduce", *ids, "--out", tmp_path / "out")
    assert ran.code == 0
    assert f"{FIGURE} Squares: " in ran.out
    assert "2/2" in ran.err
    assert "2/2" not in ran.out
    assert (tmp_path / "out" / "random_features" / "fig-3" / "quick" / "record.json").exists()


@pytest.mark.usefixtures("figure")
def test_reproduce_prints_one_json_document(run: RunCli, tmp_path: Path) -> None:
    ran = run("reproduce", FIGURE, "--scale", "paper", "--json")
    assert (ran.code, ran.stderr) == (0, "")
    (facts,) = ran.json()
    assert (facts["artifact"], facts["scale"]) == (FIGURE, "paper")
    assert facts["values"] == {"sum": 5.0, "nothing": None}
    assert (tmp_path / "onlynorm-out" / "records").is_dir()


@pytest.mark.parametrize("function", [tiny_figure, failing_figure])
def test_what_is_not_reproduced_exits_with_1(
    run: RunCli, figure: Callable[..., None], function: Callable[[Run], Outcome]
) -> None:
    figure(function, total=50.0)
    told, plain = run("reproduce", FIGURE), run("reproduce", FIGURE, "--json")
    assert (told.code, plain.code) == (1, 1)
    assert plain.json()[0]["verdict"] == "not reproduced"
    assert "not reproduced" in told.out


def test_a_killed_run_keeps_its_pieces_and_goes_on(run: RunCli, figure: Callable[..., None], tmp_path: Path) -> None:
    figure(killed_figure)
    killed = run("reproduce", FIGURE)
    assert killed.code == 130
    assert killed.stdout == ""
    (first,) = (tmp_path / "onlynorm-out").rglob("pieces/*.json")
    written = first.stat().st_mtime_ns

    empty = run("report", "--json")
    assert empty.json()["records"] == 0
    assert "onlynorm-out/records has no records yet; `onlynorm reproduce` makes them" in empty.err

    figure(tiny_figure)
    assert run("reproduce", FIGURE).code == 0
    assert first.stat().st_mtime_ns == written
    assert run("report", "--json").json()["records"] == 1
    run("reproduce", FIGURE, "--force")
    assert first.stat().st_mtime_ns > written


# ------------------------------------------------------------------------------- report


@pytest.mark.usefixtures("figure", "check")
def test_report_writes_one_page_of_records_and_verdicts(run: RunCli, tmp_path: Path) -> None:
    run("reproduce", FIGURE)
    told = run("report", "--check")
    assert told.code == 0
    page = tmp_path / "onlynorm-out" / "report.html"
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert "Squares" in text
    assert "measured at seed 0" in text
    assert re.match(r"onlynorm-out/report.html \(\S+ MB, 1 record\): open it in a browser", told.out)

    plain = run("report", "--out", "other.html", "--json")
    assert plain.stderr == ""
    size = (tmp_path / "other.html").stat().st_size
    assert plain.json() == {"page": "other.html", "bytes": size, "records": 1, "checked": 0}


@pytest.mark.usefixtures("figure")
def test_report_of_an_empty_folder_is_a_page_that_says_so(run: RunCli, tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    ran = run("report", "--records", "records", "--out", "page.html")
    assert ran.code == 0
    assert "0 records" in ran.out
    assert "records has no records yet" in ran.err
    assert "No records yet" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_report_with_a_failing_check_is_written_and_exits_with_1(
    run: RunCli, check: Callable[[Verdict], None], tmp_path: Path
) -> None:
    check(Verdict.FAILS)
    (tmp_path / "records").mkdir()
    ran = run("report", "--records", "records", "--out", "page.html", "--check", "--json")
    assert ran.code == 1
    assert ran.json()["checked"] == len(registry.statements())
    assert (tmp_path / "page.html").exists()


# ------------------------------------------------------------------------------- bench


@pytest.mark.parametrize("is_met", [True, False])
@pytest.mark.parametrize("args", [(), ("--markdown",), ("--json",)], ids=["table", "markdown", "json"])
def test_bench_exits_with_1_when_a_goal_is_missed(
    run: RunCli, monkeypatch: pytest.MonkeyPatch, is_met: bool, args: tuple[str, ...]
) -> None:
    asked: dict[str, Any] = {}

    def measure(*, quick: bool, repeats: int, progress: Callable[[str], None]) -> Bench:
        asked.update(quick=quick, repeats=repeats)
        progress("a system")
        return a_bench(is_met=is_met)

    monkeypatch.setattr(measuring, "bench_solve", measure)
    ran = run("bench", "solve", "--quick", "--repeats", 2, *args)
    assert ran.code == (0 if is_met else 1)
    assert asked == {"quick": True, "repeats": 2}
    assert "a system" not in ran.out
    if "--json" in args:
        assert [row["seconds"] for row in ran.json()["rows"]] == [0.5, None]
        assert ran.json()["goals"] == [{"aim": "an aim", "measured": "a measurement", "is_met": is_met}]
    if "--markdown" in args:
        assert ran.stdout.startswith("| system | excess | method |")
        assert "| an aim | a measurement |" in ran.stdout


@pytest.mark.parametrize("is_met", [True, False])
@pytest.mark.parametrize("args", [(), ("--markdown",), ("--json",)], ids=["table", "markdown", "json"])
def test_bench_reconstruct_hands_its_options_on_and_shows_both_tables(
    run: RunCli, monkeypatch: pytest.MonkeyPatch, is_met: bool, args: tuple[str, ...]
) -> None:
    asked: dict[str, Any] = {}
    row = RebuiltRow("id_cond", 1.0, 0.0, 1e-12 if is_met else 1.0, 0.0, 1.0, 1.0, 0.9, 0.9, 2000, 3.0, 8, 7, 6)

    def rebuild(*, on_row: Callable[[RebuiltRow], None], progress: Callable[[str], None], **options: Any) -> Any:
        asked.update(options)
        progress("a layer")
        on_row(row)
        return ReconstructBench([row], a_bench(is_met=True).rows)

    monkeypatch.setattr(measuring, "bench_reconstruct", rebuild)
    words = "--quick --features id_cond --features he_normal --images 7 --calibration 5 --out records --force"
    ran = run("bench", "reconstruct", *words.split(), *args)
    assert ran.code == (0 if is_met else 1)
    assert asked == {
        "features": ["id_cond", "he_normal"], "quick": True, "force": True, "out": Path("records"),
        "sizes": dataclasses.replace(Sizes.quick(), images=7, calibration=5),
    }  # fmt: skip
    assert "id_cond: error 1.0e" in ran.err
    assert "a layer" not in ran.out
    if "--json" in args:
        assert ran.json()["rows"][0]["features"] == "id_cond"
        assert [paper["method"] for paper in ran.json()["papers"]] == ["onlynorm", "dense float64 LU"]
    else:
        assert ("| id_cond | 1 | 0.0e+00 |" if args else "id_cond 1 0.0e+00") in ran.out
        assert ("| linear 4x4 |" if args else "linear 4x4") in ran.out


def test_bench_reconstruct_asks_for_everything_by_default(run: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(measuring, "bench_reconstruct", lambda **options: asked.update(options) or ReconstructBench())
    assert run("bench", "reconstruct").code == 0
    assert asked["features"] == tuple(RECIPES)
    assert asked["sizes"] == Sizes()


# ------------------------------------------------------------------------------- real processes


A_FAILING_CHECK = f"""
import sys
from onlynorm import cli, theorems
fails = theorems.Evidence(theorems.Verdict.FAILS, "measured")
theorems._checks = {{"{CHECKED}": lambda seed: fails}}
theorems.where = lambda key: ""  # no file, no line
sys.argv = ["onlynorm", "theorems", "{CHECKED}", "--check", "--json"]
cli.main()
"""


def start(*command: str, cwd: Path) -> subprocess.Popen[str]:
    env = os.environ | {"OMP_NUM_THREADS": "1"}  # they run side by side
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd, env=env)


def test_the_process_exits_with_0_1_and_2_and_never_with_a_traceback(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("onlynorm")
    module = (sys.executable, "-m", "onlynorm")
    assert script.exists()
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="onlynorm")
    assert entry.load() is cli.main

    started = {
        0: start(*module, "plan", "64,64", "--json", cwd=tmp_path),
        1: start(sys.executable, "-c", A_FAILING_CHECK, cwd=tmp_path),
        2: start(str(script), "plan", "64,64", "--features", "he_norml", cwd=tmp_path),
    }
    ran = {code: (*process.communicate(timeout=300), process.returncode) for code, process in started.items()}
    assert {code: returned for code, (_, _, returned) in ran.items()} == {0: 0, 1: 1, 2: 2}
    assert not any("Traceback" in out + err for out, err, _ in ran.values())
    assert json.loads(ran[0][0])["equations"] == 4096
    assert ran[0][1] == ""
    assert json.loads(ran[1][0])[0]["verdict"] == "fails"
    assert ran[2][0] == ""
    assert "Did you mean 'he_normal'" in ran[2][1]


def test_a_reader_who_leaves_early_sees_no_traceback(tmp_path: Path) -> None:
    process = start(sys.executable, "-m", "onlynorm", "theorems", "--json", cwd=tmp_path)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
    process.wait(timeout=300)
