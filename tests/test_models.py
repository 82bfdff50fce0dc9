"""Reference networks: their shapes, their seeds, and that building one spends nobody else's random numbers."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from onlynorm.data import find_data
from onlynorm.errors import (
    ConversionError,
    FormatError,
    MissingDataError,
    ShapeError,
    UnknownNameError,
    ValueRangeError,
)
from onlynorm.models import BUILT_IN, load_model, load_weights, make_model, mlp, vgg


@settings(max_examples=30)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.integers(0, 2**64 - 1))
def test_an_mlp_walks_through_its_widths_with_activations_in_between(widths: list[int], seed: int) -> None:
    network = mlp(widths, seed=seed)
    linears, activations = list(network)[::2], list(network)[1::2]
    assert [(layer.in_features, layer.out_features) for layer in linears] == list(itertools.pairwise(widths))
    assert len(activations) == len(linears) - 1
    assert all(isinstance(layer, nn.ReLU) for layer in activations)
    assert network(torch.ones(4, widths[0])).shape == (4, widths[-1])


def test_the_activation_is_the_one_that_was_asked_for() -> None:
    network = mlp((3, 4, 5, 2), activation=nn.Tanh)
    assert [type(layer) for layer in network] == [nn.Linear, nn.Tanh, nn.Linear, nn.Tanh, nn.Linear]
    assert network[1] is not network[3]


def test_equal_seeds_give_equal_networks_and_different_seeds_do_not() -> None:
    first, again, other = (mlp((6, 5, 4), seed=seed) for seed in (1, 1, 2))
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
        assert not torch.equal(weight, other.state_dict()[name])


def test_the_weights_are_those_torch_gives_at_this_seed() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        reference = nn.Linear(6, 5)
    assert torch.equal(mlp((6, 5), seed=11)[0].weight, reference.weight)


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    mlp((6, 5, 4), seed=9)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_generators_of_gpus_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(seed: int) -> None:
        raise AssertionError(f"torch.manual_seed({seed}) seeds every device")

    monkeypatch.setattr(torch, "manual_seed", refuse)
    mlp((6, 5, 4), seed=9)


@pytest.mark.parametrize("widths", [(), (3,), (3, 0), (0, 3), (3, -1, 2)])
def test_widths_that_make_no_network_are_refused(widths: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"mlp needs at least two widths, all positive; got .*Try \(64, 32, 10\)"):
        mlp(widths)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_that_is_no_word_of_64_bits_is_refused(seed: int) -> None:
    with pytest.raises(ValueRangeError, match=r"seed needs a whole number in \[0, 2\^64\); got "):
        mlp((3, 2), seed=seed)


# ---------------------------------------------------------------------------------------------- VGG


def test_the_usual_vgg_has_17_convolutions_of_64_channels_and_one_linear_layer() -> None:
    network = vgg()
    convolutions = [layer for layer in network if isinstance(layer, nn.Conv2d)]
    assert [layer.weight.shape for layer in convolutions] == [(64, 3, 3, 3), *[(64, 64, 3, 3)] * 16]
    assert all(layer.bias is None for layer in convolutions)
    assert [type(layer) for layer in network][-3:] == [nn.AdaptiveAvgPool2d, nn.Flatten, nn.Linear]
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in network) == 17
    assert network.eval()(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


@settings(max_examples=20)
@given(
    st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=3),
    st.booleans(),
    st.integers(1, 3),
    st.integers(4, 9),
)
def test_a_vgg_walks_through_its_stages(stages: list[list[int]], norm: bool, n_inputs: int, image_size: int) -> None:
    network = vgg(stages, activation=nn.Tanh, norm=norm, n_classes=5, in_channels=n_inputs, image_size=image_size)
    widths = [width for stage in stages for width in stage]
    convolutions = [layer for layer in network if isinstance(layer, nn.Conv2d)]
    assert [(c.in_channels, c.out_channels) for c in convolutions] == list(itertools.pairwise([n_inputs, *widths]))
    assert all((c.bias is None) == norm for c in convolutions)
    assert sum(isinstance(layer, nn.Tanh) for layer in network) == len(widths)
    assert sum(isinstance(layer, nn.MaxPool2d) for layer in network) == len(stages) - 1
    assert network.eval()(torch.zeros(2, n_inputs, image_size, image_size)).shape == (2, 5)


def test_a_vgg_is_a_function_of_its_seed_and_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    first, again, other = (vgg([[3, 4]], seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first[0].weight, again[0].weight)
    assert not torch.equal(first[0].weight, other[0].weight)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": []}, r"stages of positive widths.*Try \[\[8, 8\], \[16, 16\]\]"),
        ({"stages": [[4], []]}, r"stages of positive widths"),
        ({"stages": [[4, 0]]}, r"stages of positive widths"),
        ({"stages": [[4]], "n_classes": 0}, r"positive in_channels and n_classes"),
        ({"stages": [[4], [4], [4]], "image_size": 3}, r"halves its images 2 times and needs 4 pixels or more; got "),
    ],
)
def test_stages_that_make_no_network_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        vgg(**options)


# ---------------------------------------------------------------------------------------------- by name


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name != "resnet56"])
def test_a_built_in_network_takes_the_inputs_it_says(name: str) -> None:
    before = torch.get_rng_state()
    network = make_model(name)
    assert torch.equal(torch.get_rng_state(), before)
    assert not network.training
    assert network(torch.zeros(1, *BUILT_IN[name].input_shape)).shape == (1, 10)
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
    with pytest.raises(MissingDataError, match=r"resnet20_cifar10.safetensors needs to lie in the data folder"):
        load_model("resnet20")


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
    with pytest.raises(FormatError, match=r"net.pt needs to be a whole file of tensors.*could run code"):
        load_model("mlp", tmp_path / "net.pt")
    assert not (tmp_path / "ran").exists()


def test_files_that_hold_no_weights_of_this_network_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"weights need a file; there is none at"):
        load_model("mlp", tmp_path / "none.pt")
    for name in ("net.pt", "net.safetensors"):
        (tmp_path / name).write_bytes(b"neither nor")
        with pytest.raises(FormatError, match=f"{name} needs to be a whole file of tensors; got "):
            load_model("mlp", tmp_path / name)
    torch.save([1, 2], tmp_path / "net.pt")
    with pytest.raises(FormatError, match=r"net.pt needs a state dict of tensors; got others"):
        load_model("mlp", tmp_path / "net.pt")
    torch.save(mlp((64, 31, 10)).state_dict(), tmp_path / "net.pt")
    with pytest.raises(FormatError, match=r"needs 0.weight of shape \(32, 64\); got \(31, 64\)"):
        load_model("mlp", tmp_path / "net.pt")
