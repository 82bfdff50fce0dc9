"""`onlynorm diagnose`: what it tells and writes, its exit codes, and wrong use in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import RunCli, runner
from PIL import Image
from safetensors.torch import save_file

from onlynorm.cli.commands import diagnose as command
from onlynorm.cli.datasets import draw_indices
from onlynorm.data import digits
from onlynorm.models import make_model
from onlynorm.rank import diagnose
from onlynorm.rank.diagnosis.result import COLUMNS

OWN_MODULE = """
from onlynorm.models import mlp, vgg

def deep(): return mlp((64, *[64] * 23, 10))
def images(): return vgg([[4], [4]], n_classes=2, image_size=8)
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> RunCli:
    """Runs `onlynorm diagnose` in this process, in a folder with a module of its own."""
    monkeypatch.delitem(sys.modules, "own_module_of_diagnose", raising=False)
    (tmp_path / "own_module_of_diagnose.py").write_text(OWN_MODULE)
    return runner(monkeypatch, capsys, tmp_path, "diagnose")


def test_a_healthy_network_ends_with_0_and_the_numbers_of_the_library(run: RunCli) -> None:
    ran = run("mlp_bn", "--batch", 64, "--seed", 1, "--json")
    facts = ran.json()
    assert (ran.code, facts["verdict"], facts["n_samples"], facts["model"]) == (0, "healthy", 64, "mlp_bn")
    chosen = draw_indices(len(digits().train_inputs), 64, 1)
    same = diagnose(make_model("mlp_bn"), digits().train_inputs[chosen], digits().train_labels[chosen], seed=1)
    assert facts["score"] == same.score
    assert [layer["r"] for layer in facts["layers"]] == [layer.r for layer in same.layers]


def test_an_unhealthy_network_ends_with_1_and_says_why(run: RunCli) -> None:
    ran = run("own_module_of_diagnose:deep", "--data", "digits")
    assert ran.code == 1
    for words in (
        "unhealthy",
        "collapses to rank 1.00",
        "of 24",
        "Add batch norms",
        "soft rank",
        "random inputs",
        "Adam may",
    ):
        assert words in ran.stdout
    assert run("own_module_of_diagnose:deep", "--data", "digits", "--json").json()["is_trainable"] is False


def test_a_page_and_a_figure_are_written(run: RunCli, tmp_path: Path) -> None:
    ran = run("mlp_bn", "--batch", 32, "--html", "out.html", "--plot", "depth.svg")
    assert ran.code == 0
    assert "Diagnosis of mlp_bn" in (tmp_path / "out.html").read_text()
    assert (tmp_path / "depth.svg").read_bytes().startswith(b"<?xml")
    assert "out.html is written" in ran.stdout


def test_a_folder_of_images_will_do(run: RunCli, tmp_path: Path) -> None:
    dice = np.random.default_rng(0)
    for name in ("cats", "dogs"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for place in range(5):
            pixels = dice.integers(0, 255, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{place}.png")
    facts = run("own_module_of_diagnose:images", "--data", "photos", "--image-size", 8, "--json").json()
    assert facts["n_samples"] == 8  # a fifth is kept to judge by
    assert facts["layers"][0]["shape"] == [8, 3, 8, 8]


def test_data_without_labels_leave_gradients_out(run: RunCli, tmp_path: Path) -> None:
    save_file({"inputs": torch.rand(20, 64)}, tmp_path / "bare.safetensors")
    ran = run("mlp_bn", "--data", "bare.safetensors", "--json")
    assert ran.code == 0
    assert ran.json()["skipped"] == ["everything about gradients, because no targets were given"]
    assert "bare.safetensors has no labels" in ran.err


def test_wrong_use_ends_with_2_and_one_line(run: RunCli, tmp_path: Path) -> None:
    for args, words in (
        (("resnt20",), "Did you mean 'resnet20'"),
        (("mlp", "--mode", "trian"), "mode needs a known name"),
        (("mlp", "--plot", "depth.gif"), "--plot needs a name that ends in .svg, .png or .pdf"),
        (("mlp", "--html", str(tmp_path)), "--html needs a file name"),
        (("mlp", "--batch", 1), "Invalid value for '--batch'"),
        (("own_module_of_diagnose:images", "--data", "digits"), "needs samples and labels"),
    ):
        ran = run(*args)
        assert (ran.code, words in ran.err) == (2, True), ran.err


def test_the_help_has_an_example(run: RunCli) -> None:
    ran = run("--help")
    assert ran.code == 0
    assert "onlynorm diagnose resnet20" in ran.stdout


def test_a_narrow_screen_does_without_the_columns_that_say_the_least() -> None:
    rows = [("1", "layers.0", "Linear", "128", "5.799", "26", "0.7", "0.57", "0%", "9.1e-13", "2e-14")]
    assert command._fitting(rows, 200) == list(range(len(COLUMNS)))
    kept = command._fitting(rows, 80)
    assert [COLUMNS[place] for place in kept] == [name for name in COLUMNS if name not in command.SPARED[:2]]
    assert sum(2 + max(len(COLUMNS[place]), len(rows[0][place])) for place in kept) <= 80
    assert len(command._fitting(rows, 10)) == len(COLUMNS) - len(command.SPARED)
