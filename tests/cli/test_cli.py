"""The command line: exit codes, one JSON document, results and messages on their own streams, errors in one line."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from commands import Ran, RunCli
from typer.testing import CliRunner

import onlynorm
from onlynorm import cli

TOP = typer.main.get_command(cli.app.app).commands  # type: ignore[attr-defined]
BENCHES = {f"bench {name}": TOP["bench"].get_command(None, name) for name in TOP["bench"].list_commands(None)}
DATA = {f"data {name}": command for name, command in TOP["data"].commands.items()}
COMMANDS = {name: command for name, command in TOP.items() if name not in ("bench", "data")} | BENCHES | DATA


# ------------------------------------------------------------------------------- help and version


def test_every_command_of_the_module_is_known_here() -> None:
    assert set(TOP) == {
        "demo", "plan", "spectrum", "reconstruct", "verify", "tune", "diagnose", "repair", "factorize", "memorize",
        "data", "theorems", "reproduce", "report", "bench",
    }  # fmt: skip
    assert set(DATA) == {"data get", "data list"}
    assert {name.removeprefix("bench ") for name in BENCHES} == {
        "solve", "reconstruct", "tune", "adapt", "frozen", "text", "chain", "layers", "diagnose", "predict", "repair",
        "align", "scaled", "scratch",
    }  # fmt: skip


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_every_command(flag: str) -> None:
    result = CliRunner().invoke(cli.app.app, [flag])
    assert result.exit_code == 0
    assert "only their normalization" in result.stdout
    assert all(name in result.stdout for name in TOP)


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
            "model needs a known name; got 'abc'. Known: digits_cnn, mlp, mlp_bn, mlp_deep, package.module:factory",
        ),
        ("plan resnet21", "model needs a known name; got 'resnet21'. Did you mean 'resnet32' or 'resnet20'"),
        ("plan 4a,4", "got '4a,4'"),
        ("plan ''", "a shape needs integers"),
        ("plan 4,,4", "a shape needs integers"),
        ("plan 4.5,4", "a shape needs integers"),
        ("plan 64", "shape needs 2 to 5 positive integers"),
        ("plan 0,4", "shape needs 2 to 5 positive integers"),
        ("plan -- -3,4", "shape needs 2 to 5 positive integers"),
        ("plan 2,2,2,2,2,2", "shape needs 2 to 5 positive integers"),
        ("plan 4,4 --features he_norml", "features needs a known name; got 'he_norml'. Did you mean 'he_normal'"),
        ("plan 4,4 --excess 0", "excess needs a positive finite number"),
        ("plan 4,4 --excess -1", "excess needs a positive finite number"),
        ("plan 4,4 --excess nan", "Invalid value for '--excess'"),
        ("plan 4,4 --excess 1e300", "Invalid value for '--excess'"),
        ("plan mlp --excess 1e300", "Invalid value for '--excess'"),
        ("plan mlp --set device=nope", "field of --set needs a known name; got 'device'"),
        ("plan 4,4 --excess inf", "Invalid value for '--excess'"),
        ("plan 4,4 --excess much", "Invalid value for '--excess'"),
        ("plan 4,4 --features id_cond --excess 2", "id_cond needs exactly 16 features"),
        ("plan 4,4 --tolerance 0", "tolerance needs to lie in (0, 1); got 0.0"),
        ("plan 4,4 --tolerance nan", "tolerance needs to lie in (0, 1); got nan"),
        ("plan 4,4 --features id_cond --tolerance 2", "tolerance needs to lie in (0, 1); got 2.0"),
        ("plan 4,4 --excess 1e308", "Invalid value for '--excess'"),
        ("plan 99999999,99999999", "features needs 1e+08 GB"),
        (f"plan 4,{10**400}", "a shape needs sizes below 2^31"),
        (f"plan 4,{'9' * 5000}", "a shape needs integers"),
        ("demo --features ortho_con", "Did you mean 'ortho_cond'"),
        ("demo --excess 0", "a number in (0, inf)"),
        ("demo --excess 1e6", "the run needs"),
        ("demo --excess -0.5", "a number in (0, inf)"),
        ("demo --seed -1", "integer in [0, 2^64); got -1"),
        ("demo --seed 99999999999999999999", "integer in [0, 2^64)"),
        ("demo --seed half", "Invalid value for '--seed'"),
        ("theorems nope", "statement needs a known name; got 'nope'"),
        ("theorems ''", "statement needs a known name; got ''"),
        ("theorems giannou2023:thm-111", "Did you mean 'giannou2023:thm-11'"),
        ("theorems --paper gianou2023", "paper needs a known name; got 'gianou2023'. Did you mean 'giannou2023'"),
        ("theorems giannou2023:thm-1 --paper hardt_ma2017", "statement of hardt_ma2017 needs a known name"),
        ("reproduce random_features:fig-33", "reproduce needs a known name; got 'random_features:fig-33'. Did you"),
        ("reproduce nope", "reproduce needs a known name; got 'nope'"),
        ("reproduce random_featurs", "got 'random_featurs'. Did you mean 'random_features'"),
        ("reproduce --scale big", "scale needs a known name; got 'big'. Known: paper, quick."),
        ("plan mlp --activation rely", "activation needs a known name; got 'rely'. Did you mean 'relu'"),
        ("plan mlp --construction wid", "construction needs a known name; got 'wid'. Did you mean 'wide'"),
        ("plan mlp --set kernel", "--set needs NAME=VALUE with a field that has no option of its own; got 'kernel'"),
        ("plan mlp --set excess=2 --excess 1.5", "--set needs NAME=VALUE with a field that has no option of its own"),
        ("plan mlp --set kernal=second", "field of --set needs a known name; got 'kernal'. Did you mean 'kernel'"),
        ("plan mlp --set activation=tanh --activation none", "--set needs NAME=VALUE with a field that has no option"),
        ("plan mlp --set margin=wide", "--set margin needs float | None; got 'wide'. Write a number, or a list"),
        ("plan mlp --set kernel=3", "--set kernel needs str; got '3'"),
        ("plan mlp --construction low_rank --set rank=true", "--set rank needs int | None; got 'true'"),
        ("plan mlp --set rank=2", "--set rank needs --construction low_rank; got --construction wide"),
        (
            "reconstruct mlp --construction deep --set kernel=second",
            "--set kernel needs --construction low_rank or residual or wide; got --construction deep",
        ),
        ("plan mlp --set kernel=third", "kernel needs a known name; got 'third'"),
        ("plan mlp --input 3,x", "a shape needs integers"),
        ("plan mlp --input 0", "--input needs positive sizes, as in 3,224,224; got '0'"),
        ("plan mlp --input 7", "; got (1, 7)"),
        ("plan mlp --data digit", "data needs a known name; got 'digit'. Did you mean 'digits'"),
        ("plan nowhere:make", "a model needs code that imports and runs; nowhere:make gave ModuleNotFoundError"),
        ("plan json:dumps --input 3", "a model needs code that imports and runs; json:dumps gave TypeError"),
        ("reconstruct", "Missing argument 'MODEL'"),
        ("reconstruct mpl", "model needs a known name; got 'mpl'. Did you mean 'mlp'"),
        ("reconstruct mlp --dtype half", "dtype needs a known name; got 'half'. Known: float32, float64."),
        ("reconstruct mlp --calibration 0", "Invalid value for '--calibration'"),
        ("reconstruct mlp --calibration 9999", "9999 samples need as many in the data; got 1438"),
        ("reconstruct mlp --weights none.pt", "weights need a file; got none at none.pt"),
        ("reconstruct mlp --out .", "--out needs a file name; . is a folder. Try net.safetensors."),
        ("reconstruct mlp --features he_norml", "features needs a known name; got 'he_norml'"),
        ("reconstruct mlp --tolerance 2", "tolerance needs to lie in (0, 1); got 2.0"),
        ("reconstruct mlp --error 2", "a number in (0, 1)"),
        ("verify", "Missing argument 'FILE'"),
        ("verify net.safetensors", "Missing option '--model'"),
        ("verify net.safetensors --model mlp", "net.safetensors"),
        ("verify net.safetensors --model mlp --tolerance 0", "tolerance needs to lie in (0, 1); got 0.0"),
        ("bench slove", "No such command 'slove'. Did you mean 'solve'"),
        ("bench reconstruct --features he_norml", "features needs a known name; got 'he_norml'"),
        ("bench reconstruct --images 0", "Invalid value for '--images'"),
        ("bench solve --repeats 0", "Invalid value for '--repeats'"),
        ("bench solve --families round", "families needs a known name; got 'round'"),
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


# ------------------------------------------------------------------------------- real processes


A_FAILING_CHECK = """
import sys
from onlynorm import cli
from onlynorm.evidence import registry as theorems
from onlynorm.evidence.papers import table
fails = theorems.Evidence(theorems.Verdict.FAILS, "measured")
table.CHECKS = {"giannou2023:lemma-2": lambda seed: fails}
theorems.where = lambda key: ""  # no file, no line
sys.argv = ["onlynorm", "theorems", "giannou2023:lemma-2", "--check", "--json"]
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


@pytest.mark.parametrize("command", ["reconstruct nope", "theorems hardt_ma2017:thm-99 --check", "reproduce nope"])
def test_more_workers_than_cores_are_said(run: RunCli, command: str) -> None:
    ran = run(*command.split(), "--workers", 500)
    assert ran.code == 2
    assert "500 workers with 1 thread each share" in " ".join(ran.err.split())
    assert "share" not in run(*command.split(), "--workers", 1).err
