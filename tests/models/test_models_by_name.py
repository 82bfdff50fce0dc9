"""Networks by name, of one's own code, and their weights from files that cannot run any."""

from __future__ import annotations

import importlib.resources
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from onlynorm.data import digits, find_data
from onlynorm.errors import ConversionError, FormatError, MissingDataError, UnknownNameError
from onlynorm.models import BUILT_IN, CifarResNet, load_model, load_weights, make_model, mlp
from onlynorm.seeds import own_randomness
from onlynorm.tuning import accuracy

# ---------------------------------------------------------------------------------------------- by name


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name != "resnet56"])
def test_a_built_in_network_takes_the_inputs_it_says(name: str) -> None:
    before = torch.get_rng_state()
    network = make_model(name)
    assert torch.equal(torch.get_rng_state(), before)
    assert not network.training
    n_classes = 1000 if name in ("resnet18", "resnet50") else 10
    assert network(torch.zeros(1, *BUILT_IN[name].input_shape)).shape == (1, n_classes)
    again = make_model(name)
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in network.state_dict().items())


def test_resnet20_comes_with_its_trained_weights_where_the_data_folder_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        path = find_data("weights/resnet20_cifar10.safetensors")
    except MissingDataError as error:
        pytest.skip(f"no real data: {error}")
    trained = load_weights(make_model("resnet20"), path).state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in load_model("resnet20").state_dict().items())
    monkeypatch.setenv("ONLYNORM_DATA", str(tmp_path))
    with pytest.raises(
        MissingDataError, match=r"resnet20-12fca82f.th needs to be in the data folder.*data get resnet20"
    ):
        load_model("resnet20")


def test_resnet20_takes_the_file_of_its_author(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is of PyTorch's old format, saved from a DataParallel wrapper with the accuracy beside the weights."""
    monkeypatch.setenv("ONLYNORM_DATA", str(tmp_path))
    with own_randomness(1):
        trained = CifarResNet()
    saved = {"state_dict": nn.DataParallel(trained).state_dict(), "best_prec1": 91.73}
    assert all(name.startswith("module.") for name in saved["state_dict"])
    (tmp_path / "weights").mkdir()
    for is_zip in (False, True):
        torch.save(saved, tmp_path / "weights/resnet20-12fca82f.th", _use_new_zipfile_serialization=is_zip)
        found = load_model("resnet20").state_dict()
        assert all(torch.equal(value, found[name]) for name, value in trained.state_dict().items())
    save_file(make_model("resnet20").state_dict(), tmp_path / "weights/resnet20_cifar10.safetensors")
    found = load_model("resnet20").state_dict()  # the file of the author comes first
    assert torch.equal(found["linear.weight"], trained.linear.weight)


def test_the_shipped_network_is_trained() -> None:
    network, data = load_model("digits_cnn"), digits()
    assert not network.training
    assert sum(one.numel() for one in network.parameters()) == 7514
    # 99.4 % where it was trained; a picture or two may change sides where sums are rounded in another order
    assert accuracy(network, (data.test_inputs, data.test_labels)) >= 0.99
    assert BUILT_IN["digits_cnn"].is_trained
    assert BUILT_IN["resnet20"].is_trained
    assert not BUILT_IN["mlp"].is_trained


def test_the_shipped_weights_are_part_of_the_package() -> None:
    file = importlib.resources.files("onlynorm.models").joinpath("digits_cnn.safetensors")
    assert 0 < len(file.read_bytes()) < 50_000


def test_names_of_no_network_are_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"model needs a known name; got 'resnet'\. Did you mean 'resnet"):
        make_model("resnet")


USER_CODE = """
import torch
from torch import nn

def make(): return nn.Linear(3, 2).train()
def needs(width): return nn.Linear(3, width)
def breaks(): raise RuntimeError("out of luck")
def nothing(): return 7
network = nn.Linear(4, 1)
number = 5
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current folder, which no search path knows."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_module_of_this_test.py").write_text(USER_CODE)
    (tmp_path / "broken_module_of_this_test.py").write_text("import nothing_of_that_name")
    monkeypatch.delitem(sys.modules, "own_module_of_this_test", raising=False)
    return "own_module_of_this_test"


def test_a_function_or_a_network_of_your_own_is_imported_from_the_current_folder(own_module: str) -> None:
    before = list(sys.path)
    made = make_model(f"{own_module}:make")
    assert isinstance(made, nn.Linear)
    assert not made.training
    assert make_model(f"{own_module}:network").in_features == 4
    assert sys.path == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("needs", r"code that imports and runs; .*:needs gave TypeError.*called without arguments"),
        ("breaks", r"gave RuntimeError: out of luck"),
        ("nothing", r"returns a torch Module; got a int from .*:nothing"),
        ("number", r"returns a torch Module; got a int from"),
        ("missing", r"returns a torch Module; got no such name from .*Write package.module:factory"),
        ("", r"got no such name from"),
    ],
)
def test_code_that_makes_no_network_is_refused(own_module: str, name: str, message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        make_model(f"{own_module}:{name}")


@pytest.mark.usefixtures("own_module")
def test_code_that_does_not_import_is_refused_with_what_it_said() -> None:
    with pytest.raises(ConversionError, match=r"gave ModuleNotFoundError: No module named 'nowhere'"):
        make_model("nowhere:make")
    with pytest.raises(ConversionError, match=r"gave ModuleNotFoundError: No module named 'nothing_of_that_name'"):
        make_model("broken_module_of_this_test:make")
    with pytest.raises(ConversionError, match=r"gave ValueError: Empty module name"):
        make_model(":make")


# ---------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("kind", ["safetensors", "torch", "nested", "parallel"])
def test_weights_are_read_from_safetensors_and_from_pytorch_files(tmp_path: Path, kind: str) -> None:
    trained = mlp((64, 32, 10), seed=5)
    state = trained.state_dict()
    path = tmp_path / ("net.safetensors" if kind == "safetensors" else "net.pt")
    if kind == "safetensors":
        save_file(state, path)
    elif kind == "nested":
        torch.save({"state_dict": state, "epoch": 3}, path)
    else:
        torch.save({f"module.{name}": value for name, value in state.items()} if kind == "parallel" else state, path)
    made = load_model("mlp", path)
    assert not made.training
    assert all(torch.equal(value, state[name]) for name, value in made.state_dict().items())


class Harmful:
    """Unpickling it would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_file_that_could_run_code_is_refused_unread(tmp_path: Path) -> None:
    torch.save({"0.weight": Harmful(tmp_path / "ran")}, tmp_path / "net.pt")
    with pytest.raises(FormatError, match=r"net.pt needs to be .*file of tensors.*could run code"):
        load_model("mlp", tmp_path / "net.pt")
    assert not (tmp_path / "ran").exists()


def test_files_that_hold_no_weights_of_this_network_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"weights need a file; got none at"):
        load_model("mlp", tmp_path / "none.pt")
    for name in ("net.pt", "net.safetensors"):
        (tmp_path / name).write_bytes(b"neither nor")
        with pytest.raises(FormatError, match=f"{name} needs .*(file of tensors|safetensors file); got "):
            load_model("mlp", tmp_path / name)
    torch.save([1, 2], tmp_path / "net.pt")
    with pytest.raises(FormatError, match=r"net.pt needs a state dict of tensors; got others"):
        load_model("mlp", tmp_path / "net.pt")
    torch.save(mlp((64, 31, 10)).state_dict(), tmp_path / "net.pt")
    with pytest.raises(FormatError, match=r"needs 0.weight of shape \(32, 64\); got \(31, 64\)"):
        load_model("mlp", tmp_path / "net.pt")
