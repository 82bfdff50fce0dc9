"""Errors of the command line name its options, not arguments of Python functions."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from commands import RunCli

from onlynorm import cli
from onlynorm.cli.messages import in_options, naming_options
from onlynorm.errors import StorageError, ToleranceError, UnknownNameError, ValueRangeError

TOP = typer.main.get_command(cli.app.app).commands  # type: ignore[attr-defined]
OPTIONS = {
    "excess": "--excess", "batch_size": "--batch-size", "force": "--force", "fields": "--set", "steps": "--steps",
    "which": "--which", "method": "--method", "seed": "--seed",
}  # fmt: skip


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("excess must be positive; got 0. Pass excess=1.25.", "--excess must be positive; got 0. Pass --excess 1.25."),
        ("batch_size must be an integer from 1", "--batch-size must be an integer from 1"),
        ("layer '0': excess needs to lie in (0, 1)", "layer '0': --excess needs to lie in (0, 1)"),
        ("needs less; got excess must be 1", "needs less; got --excess must be 1"),
        ("method needs a name. Use method='auto'.", "--method needs a name. Use --method auto."),
        ("a trained network. Pass force=True to change it.", "a trained network. Pass --force to change it."),
        ("n_steps must be whole. Omit n_steps, or pass 5.", "--steps must be whole. Omit --steps, or pass 5."),
        ("kernel needs a known name; got 'third'.", "--set kernel needs a known name; got 'third'."),
        ("Draw with kernel='first'.", "Draw with --set kernel=first."),
        ("Write --set kernel=second.", "Write --set kernel=second."),
        ("Exclude it with which=.", "Exclude it with --which."),
        ("seed must be small. Reduce it: seed=hash_value % 2**64.", "--seed must be small. Try --seed 0."),
        ("16 features; a larger excess is slower", "16 features; a larger excess is slower"),
        ("the excess=1 file", "the --excess 1 file"),
        ("needs a file; got 'excess=1.npy'", "needs a file; got 'excess=1.npy'"),
        ("Create it with track_running_stats=True.", "Create it with track_running_stats=True."),
    ],
)  # fmt: skip
def test_arguments_become_options(message: str, shown: str) -> None:
    with naming_options(OPTIONS):
        assert in_options(message) == shown
    assert in_options(message) == message  # outside a command


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ValueRangeError("excess must be positive"), "--excess must be positive"),
        (UnknownNameError("method", "nope", ["auto"]), "--method needs a known name; got 'nope'. Known: auto."),
        (ToleranceError("excess needs to grow"), "--excess needs to grow"),
        (StorageError("which needs a file"), "--which needs a file"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_errors_raised_in_a_command_name_its_options(error: Exception, shown: str) -> None:
    with pytest.raises(type(error), match=f"^{re.escape(shown)}"), naming_options(OPTIONS):
        raise error
    assert str(error) == shown


# ------------------------------------------------------------------------------- bad values of every option

BASE = {
    "plan": "mlp", "spectrum": "4,4", "reconstruct": "mlp --images 4", "verify": "none.safetensors --model mlp",
    "tune": "mlp_bn", "diagnose": "mlp", "repair": "mlp", "factorize": "--random 4", "memorize": "digits --points 20",
    "theorems": "", "demo": "", "reproduce": "hardt_ma2017",
}  # fmt: skip


BAD = [
    (name, base, one.opts[0])
    for name, base in BASE.items()
    for one in TOP[name].params
    if one.metavar in ("N", "X", "NAME", "DTYPE") and one.name not in ("name", "also", "strategy")
]


@pytest.mark.parametrize(("name", "base", "option"), BAD)
def test_the_error_about_a_bad_value_names_the_option(run: RunCli, name: str, base: str, option: str) -> None:
    ran = run(name, *base.split(), option, "-1.5e")
    assert ran.code == 2
    assert ran.stdout == ""
    assert option in ran.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("tune mlp_bn --epochs 0", "--epochs must be an integer from 1; got 0"),
        ("tune mlp_bn --epochs -3", "--epochs must be an integer from 1; got -3"),
        ("tune mlp_bn --batch-size 0", "Invalid value for '--batch-size'"),
        ("tune mlp_bn --batch-size -1", "Invalid value for '--batch-size'"),
        ("tune mlp_bn --patience 0", "Invalid value for '--patience'"),
        ("tune mlp_bn --lr -1", "--lr must be a number"),
        ("tune mlp_bn --warmup 1.5", "--warmup must be a number in [0, 1); got 1.5"),
        ("tune mlp_bn --label-smoothing 2", "--label-smoothing must be"),
        ("tune mlp_bn --also nope", "--also needs a known name; got 'nope'"),
        ("repair mlp --steps -1", "Invalid value for '--steps'"),
        ("repair mlp --target-rank 0", "--target-rank must be a number in [1, inf); got 0.0"),
        ("repair mlp --max-ratio 0", "--max-ratio must be a number in (0, inf); got 0.0"),
        ("diagnose mlp --batch 0", "Invalid value for '--batch'"),
        ("plan mlp --set kernel=third", "--set kernel needs a known name; got 'third'"),
        ("plan mlp --density 2", "--density must be a number in (0, 1]; got 2.0"),
        ("spectrum 4,4 --excess 0", "--excess needs a positive finite number"),
        ("spectrum 4,4 --excess 0", "Pass --excess 1.25."),
        ("factorize --random 4 --tolerance 0", "--tolerance must be a number"),
        ("memorize digits --noise -1", "--noise must be a number"),
        ("memorize digits --width 0", "--width must be an integer"),
        ("reconstruct mlp --calibration 99999", "--calibration: 99999 samples need as many in the data"),
        ("reconstruct mlp --seed -1", "--seed must be an integer in [0, 2^64); got -1. Try --seed 0."),
    ],
)
def test_values_out_of_range_are_refused_under_the_name_of_their_option(run: RunCli, args: str, message: str) -> None:
    ran = run(*args.split())
    assert (ran.code, ran.stdout) == (2, "")
    assert message in ran.err


# ------------------------------------------------------------------------------- files and folders


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("tune mlp_bn --data photos", "there is no file or folder photos. Check the path."),
        ("tune mlp_bn --data photos", "--data needs the name of a data set (digits, "),
        ("diagnose mlp --data ./photos/train", "there is no file or folder ./photos/train"),
        ("repair mlp --data photos", "or a folder of images; there is no file or folder photos"),
        ("plan mlp --data photos", "there is no file or folder photos"),
        ("reconstruct mlp --data pictures", "pictures is a folder. Only tune, diagnose and repair read folders"),
        ("reconstruct mlp --data notes.txt", "got notes.txt. Save it as notes.safetensors."),
        ("memorize photos", "there is no file or folder photos"),
        ("memorize batch.npy", "batch.npy needs labels in a second"),
        ("diagnose mlp --weights none.pt", "--weights need a file; got none at none.pt"),
        (
            "diagnose pictures",
            "resnet20, or package.module:factory; got the folder pictures",
        ),
        ("plan batch.npy", "got the file batch.npy. Weights are passed as --weights batch.npy."),
        ("tune net.py", "got net.py. Write net:NAME for a function NAME in net.py."),
        ("tune nowhere/net.py", "got nowhere/net.py, and there is no such file"),
        ("tune nowhere/net.pt", "got nowhere/net.pt, and there is no such file"),
        ("verify none.safetensors --model net.pt", "got net.pt, and there is no such file"),
    ],
)
def test_a_path_that_leads_nowhere_or_to_something_else_is_named(
    run: RunCli, tmp_path: Path, args: str, message: str
) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "notes.txt").write_text("notes")
    (tmp_path / "net.py").write_text("")
    np.save(tmp_path / "batch.npy", torch.zeros(4, 64).numpy())
    ran = run(*args.split())
    assert (ran.code, ran.stdout) == (2, "")
    assert message in ran.err
