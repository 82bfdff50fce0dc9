"""`onlynorm repair`: what it tells, writes and refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from commands import RunCli, runner
from torch import nn

import onlynorm as on
from onlynorm.models import load_model, make_model
from onlynorm.rank.repairs import checkpoint
from onlynorm.storage import read_tensors


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> RunCli:
    """Runs `onlynorm repair` in this process, in a folder with models of one's own."""
    name = f"own_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(
        "from torch import nn\nfrom onlynorm.models import mlp\n"
        "def deep():\n    return mlp((64, *[16] * 10, 10), seed=1)\n"
        "def none():\n    return nn.Softmax(1)\n"
        "class Recurrent(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.first, self.rnn, self.last = nn.Linear(64, 8), nn.GRU(8, 8), nn.Linear(8, 10)\n"
        "    def forward(self, x):\n"
        "        return self.last(self.rnn(self.first(x))[0])\n"
        "def trained():\n"
        "    model = mlp((64, *[16] * 10, 10), seed=1, norm='layer')\n"
        "    for module in model.modules():\n"
        "        if isinstance(module, nn.LayerNorm):\n"
        "            nn.init.normal_(module.weight, 1.0, 0.1), nn.init.normal_(module.bias, 0.0, 0.1)\n"
        "    return model\n"
    )
    call = runner(monkeypatch, capsys, tmp_path, "repair")
    return lambda model, *args: call(model.replace("own", name), *args)


def test_every_layer_is_shown_before_and_after(run: RunCli) -> None:
    ran = run("own:deep", "--data", "digits", "--batch", 64)
    assert ran.code == 0
    assert "rank before" in ran.stdout
    assert len([line for line in ran.stdout.splitlines() if re.match(r"\s*\d+ ", line)]) == 11
    assert "repaired by mirrored" in ran.stdout


def test_the_file_holds_the_repaired_network_and_is_read_as_weights(run: RunCli, tmp_path: Path) -> None:
    out = tmp_path / "repaired.safetensors"
    told = run("mlp", "--out", out, "--json", "--method", "lsuv", "--batch", 64).json()
    assert told["method"] == "lsuv"
    assert told["file"] == str(out)
    scales = [layer["scale"] for layer in told["after"]["layers"] if layer["has_weights"]]
    assert scales == pytest.approx([1.0, 1.0], rel=1e-4)
    document, tensors = read_tensors(out, kind=checkpoint.KIND, format=checkpoint.FORMAT, cure="")
    assert document["method"] == "lsuv"
    loaded, plain = load_model("mlp", out), make_model("mlp")
    assert all(torch.equal(value, tensors[name]) for name, value in loaded.state_dict().items())
    assert not torch.equal(next(loaded.parameters()), next(plain.parameters()))
    again = on.load(out, like=plain)
    assert all(torch.equal(value, tensors[name]) for name, value in again.state_dict().items())


def test_a_file_with_inserted_modules_is_loaded_onto_the_plain_architecture(run: RunCli, tmp_path: Path) -> None:
    out = tmp_path / "repaired.safetensors"
    ran = run("mlp", "--out", out, "--method", "batch_norm", "--batch", 64)
    assert ran.code == 0
    assert "onlynorm.load" in ran.stdout
    assert any(isinstance(module, nn.BatchNorm1d) for module in on.load(out, like=make_model("mlp")).modules())


def test_modules_that_are_not_seen_are_listed(run: RunCli) -> None:
    ran = run("own:Recurrent", "--data", "digits", "--batch", 64)
    assert ran.code == 0
    assert "not seen: 'rnn' (GRU: no repair for this kind of module), 41.5 % of the parameters" in " ".join(
        ran.stdout.split()
    )
    told = run("own:Recurrent", "--data", "digits", "--batch", 64, "--json").json()
    assert told["unseen"][0]["name"] == "rnn"
    assert told["unseen_fraction"] == told["unseen"][0]["n_parameters"] / told["n_parameters"]


def test_a_network_that_looks_trained_is_changed_only_by_force(run: RunCli) -> None:
    args = ("own:trained", "--data", "digits", "--batch", 32, "--method", "lsuv")
    ran = run(*args)
    assert ran.code == 2
    assert "looks trained: scales and shifts of the norm '1' differ" in ran.err
    assert run(*args, "--force", "--json").json()["method"] == "lsuv"


def test_options_reach_the_repair(run: RunCli) -> None:
    told = run("own:deep", "--data", "digits", "--batch", 32, "--method", "paper", "--steps", 3, "--json").json()
    assert told["remark"].startswith("3 ascent steps")


def test_wrong_use_is_one_line_and_code_two(run: RunCli, tmp_path: Path) -> None:
    for args, words in (
        (("mlp", "--method", "miror"), "Did you mean 'mirrored'"),
        (("mlp", "--out", tmp_path), "--out needs a file name"),
        (("own:none", "--data", "digits"), "Softmax, which calls none"),
        (("own:deep",), "needs data to run on"),
        (("resnet32", "--data", "digits"), "resnet32 needs samples of a fitting shape; got (64,)"),
    ):
        ran = run(*args)
        assert ran.code == 2
        assert words in ran.err
        assert ran.stdout == ""


def test_help_has_examples(run: RunCli) -> None:
    ran = run("--help")
    assert ran.code == 0
    assert "onlynorm repair mlp_deep" in " ".join(ran.stdout.split())
