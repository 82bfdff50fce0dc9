"""Files of networks with frozen layers: what `like` decides, and what is not saved or loaded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onlynorm as on
from onlynorm.errors import FormatError, ValueRangeError
from onlynorm.frozen.checkpoint import FORMAT, KIND
from onlynorm.modules.walk import precision
from onlynorm.seeds import own_randomness
from onlynorm.storage import read_tensors, write_tensors


class TwoNorms(nn.Module):
    """A linear layer between two norms, which may share their scale."""

    def __init__(self, *, is_tied: bool, seed: int = 0) -> None:
        super().__init__()
        with own_randomness(seed):
            self.p, self.layer, self.q = nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4)
            nn.init.normal_(self.p.weight)
            nn.init.normal_(self.q.weight)
        if is_tied:
            self.q.weight = self.p.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.q(self.layer(self.p(x)))
        return out


@pytest.mark.parametrize("is_tied", [True, False])
def test_ties_of_the_file_and_of_the_model_must_be_the_same(tmp_path: Path, is_tied: bool) -> None:
    path = tmp_path / "model.safetensors"
    mine = on.to_norm_only(TwoNorms(is_tied=is_tied))
    on.save(mine, path)
    again: Any = on.load(path, like=TwoNorms(is_tied=is_tied, seed=1))
    x = torch.ones(2, 4).cumsum(1)
    assert torch.equal(again(x), mine(x))
    assert (again.q.weight is again.p.weight) is is_tied
    with pytest.raises(FormatError, match=r"'q.weight' is .*tied.* 'p.weight'"):
        on.load(path, like=TwoNorms(is_tied=not is_tied))


class SharedBuffer(nn.Module):
    """Two modules with one buffer, which a cast to another dtype makes two."""

    def __init__(self, shift: Tensor) -> None:
        super().__init__()
        self.layer, self.p, self.q = nn.Linear(2, 2), nn.Identity(), nn.Identity()
        self.p.register_buffer("shift", shift)
        self.q.register_buffer("shift", shift)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x + self.p.shift) + self.q.shift
        return out


def test_buffers_that_a_cast_untied_load_if_their_values_are_equal(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    mine: Any = on.to_norm_only(SharedBuffer(torch.ones(2))).double()
    assert mine.p.shift is not mine.q.shift
    on.save(mine, path)
    again = on.load(path, like=SharedBuffer(torch.zeros(2)))
    x = torch.ones(1, 2, dtype=torch.float64)
    assert torch.equal(again(x), mine(x))
    mine.q.shift += 1
    on.save(mine, path)
    with pytest.raises(FormatError, match=r"'q.shift' is .*tied.* 'p.shift'"):
        on.load(path, like=SharedBuffer(torch.zeros(2)))


class WithTables(nn.Module):
    """Two linear layers, and non-persistent buffers in three dtypes."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        with own_randomness(0):
            self.first, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 2)
        self.to(dtype)
        self.register_buffer("scale", torch.full((4,), 1 / 3, dtype=dtype), persistent=False)
        self.register_buffer("turn", torch.full((2,), 1 + 2j), persistent=False)
        self.register_buffer("grid", torch.full((2,), 1 / 3, dtype=torch.float64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x * self.scale))
        return out


FLOAT32_GAMMAS = ("ortho_cond", "fast_ortho_cond", "kron_normal", "he_normal", "id_cond_minimal")


@pytest.mark.parametrize("features", FLOAT32_GAMMAS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_norm_only_model_has_the_precision_of_its_weights(features: str, dtype: torch.dtype) -> None:
    model = WithTables(dtype)
    assert precision(on.to_norm_only(model, features=features)) == dtype
    assert precision(on.to_norm_only(nn.Linear(3, 2, bias=False, dtype=dtype), features=features)) == dtype


def test_a_norm_only_model_in_half_precision_is_verified() -> None:
    model = WithTables(torch.bfloat16)
    network = on.to_norm_only(model, features="ortho_cond")
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    assert on.verify(model, network, x).is_same(4 * torch.finfo(torch.bfloat16).eps)


def test_a_loaded_file_of_half_precision_gives_the_same_bytes_again(tmp_path: Path) -> None:
    on.save(on.to_norm_only(WithTables(), features="ortho_cond"), tmp_path / "first", dtype=torch.bfloat16)
    again: Any = on.load(tmp_path / "first", like=WithTables())
    assert again.scale.dtype == torch.bfloat16
    on.save(again, tmp_path / "second")
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_in_another_dtype_than_the_model_are_not_cast(tmp_path: Path, dtype: torch.dtype) -> None:
    model = WithTables()
    on.save(on.to_norm_only(model), tmp_path / "model.safetensors", dtype=dtype)
    again: Any = on.load(tmp_path / "model.safetensors", like=model)
    assert again.scale.dtype == dtype
    assert torch.equal(again.turn, model.turn)
    assert torch.equal(again.grid, model.grid)


def half_frozen(layer: nn.Module) -> nn.Sequential:
    """The layer with a frozen weight, a copy of it with a frozen bias, and one that is trained."""
    model = nn.Sequential(*(copy.deepcopy(layer) for _ in range(3)))
    model[0].weight.requires_grad_(False)
    model[1].bias.requires_grad_(False)
    return model


FLAGS = [False, True, True, False, True, True]


@pytest.mark.parametrize("features", ["id_cond", *FLOAT32_GAMMAS])
@pytest.mark.parametrize("layer", [nn.Linear(4, 4), nn.Conv2d(4, 4, 1)], ids=["linear", "conv"])
def test_frozen_parameters_of_norm_only_layers_stay_frozen(tmp_path: Path, features: str, layer: nn.Module) -> None:
    network = on.to_norm_only(half_frozen(layer), features=features)
    on.save(network, tmp_path / "model.safetensors")
    again: Any = on.load(tmp_path / "model.safetensors", like=half_frozen(layer))
    made = [(p.requires_grad for p in one.parameters()) for one in (network, again)]
    assert list(made[0]) == list(made[1])
    assert [p.requires_grad for p in on.collapse(network).parameters()] == FLAGS


def test_frozen_layers_of_like_are_frozen_in_a_rebuilt_network(tmp_path: Path) -> None:
    model = half_frozen(nn.Linear(4, 4))
    on.save(on.reconstruct(model, torch.eye(4), on.Wide(excess=1.5)), tmp_path / "network.safetensors")
    again: Any = on.load(tmp_path / "network.safetensors", like=model)
    made = [(one.first_norm.weight.requires_grad, one.second_norm.bias.requires_grad) for one in again]
    assert made == [(False, True), (True, False), (True, True)]


def frozen_network(kind: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4))
    if kind == "norm_only":
        return on.to_norm_only(model, features="id_cond_minimal")
    return on.reconstruct(model, torch.eye(4), on.Wide(excess=1.5)).network


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
@pytest.mark.parametrize(
    ("kind", "name"),
    [("norm_only", name) for name in ("gamma", "output_gamma", "beta")]
    + [("wide", name) for name in ("first_norm.weight", "first_norm.running_var", "second_norm.bias")],
)
def test_norms_that_are_not_finite_are_neither_saved_nor_loaded(
    tmp_path: Path, kind: str, name: str, value: float
) -> None:
    path, network = tmp_path / "network.safetensors", frozen_network(kind)
    on.save(network, path)
    before = path.read_bytes()
    with torch.no_grad():
        network.state_dict()[f"0.{name}"][0] = value
    with pytest.raises(ValueRangeError, match=rf"{name} of the layer at '0' needs finite .*diverged"):
        on.save(network, path)
    assert path.read_bytes() == before
    document, tensors = read_tensors(path, kind=KIND, format=FORMAT, cure="")
    finite = tensors[f"0.{name}"]
    tensors[f"0.{name}"] = finite.clone().index_fill_(0, torch.tensor([0]), value)
    document = {key: held for key, held in document.items() if key not in ("kind", "format")}
    write_tensors(path, tensors, kind=KIND, format=FORMAT, document=document)
    with pytest.raises(FormatError, match=rf"{name} of the layer at '0' needs finite .*[Ss]ave"):
        on.load(path, like=nn.Sequential(nn.Linear(4, 4)))
    write_tensors(
        path, tensors | {f"0.{name}": finite.to(torch.float8_e4m3fn)}, kind=KIND, format=FORMAT, document=document
    )
    with pytest.raises(FormatError, match=rf"{name} of the layer at '0' needs .*float8"):
        on.load(path, like=nn.Sequential(nn.Linear(4, 4)))


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize("kind", ["norm_only", "wide"])
def test_a_subclass_with_its_own_forward_is_not_replaced(tmp_path: Path, kind: str) -> None:
    on.save(frozen_network(kind), tmp_path / "network.safetensors")
    with pytest.raises(FormatError, match="'0' is Doubled instead of Linear or Conv"):
        on.load(tmp_path / "network.safetensors", like=nn.Sequential(Doubled(4, 4)))


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_norm_only_layer_needs_the_bias_setting_of_the_layer_it_replaces(tmp_path: Path, has_bias: bool) -> None:
    on.save(on.to_norm_only(nn.Sequential(nn.Linear(4, 4, bias=has_bias))), tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match=f"layer at '0' with the bias of .*{not has_bias}; the file has {has_bias}"):
        on.load(tmp_path / "model.safetensors", like=nn.Sequential(nn.Linear(4, 4, bias=not has_bias)))
