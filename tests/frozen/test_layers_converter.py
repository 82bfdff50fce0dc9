"""Any model with norm-only layers: what is converted, what is left and why, ties, and files that hold seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from onlynorm.errors import (
    AccuracyWarning,
    ConversionError,
    FormatError,
    InsufficientFeaturesError,
    MemoryLimitError,
    UnknownNameError,
    ValueRangeError,
)
from onlynorm.frozen import (
    NormOnlyConv2d,
    NormOnlyLayer,
    NormOnlyLinear,
    converted,
    load_norm_only,
    norm_only,
    save_norm_only,
)
from onlynorm.frozen.checkpoint import FORMAT, KIND
from onlynorm.models import cifar_resnet
from onlynorm.seeds import own_randomness
from onlynorm.storage import read_tensors, write_tensors


def images(n: int = 2) -> Tensor:
    return torch.randn(n, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def resnet(seed: int = 0) -> nn.Module:
    return cifar_resnet(8, width=4, seed=seed).eval()


class Tied(nn.Module):
    """An embedding tied to the head, two linear layers of one weight, one module at two places, and attention."""

    def __init__(self) -> None:
        super().__init__()
        with own_randomness(0):
            self.embed = nn.Embedding(11, 8)
            self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
            self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
            self.conv = nn.Conv1d(8, 8, 1)
            self.head = nn.Linear(8, 11, bias=False)
        self.other.weight = self.one.weight
        self.again = self.one
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.attend(x, x, x)[0]
        return self.head(self.again(torch.tanh(self.other(torch.tanh(self.one(x))))))


# ------------------------------------------------------------------------------- what becomes what


@pytest.mark.parametrize("features", ["id_cond", "id_cond_minimal", "ortho_cond", "he_normal"])
def test_a_converted_resnet_computes_the_same_and_trains_only_norms(features: str) -> None:
    model = resnet()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    mine = norm_only(model, features=features, seed=1)
    x = images()
    assert torch.allclose(mine(x), model(x), atol=1e-4)
    norms = (nn.BatchNorm2d, NormOnlyLayer)
    inside = {id(p) for m in mine.modules() if isinstance(m, norms) for p in m.parameters(recurse=False)}
    assert {id(p) for p in mine.parameters()} == inside
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), (
        "the model is left alone"
    )
    assert converted(mine).left == ()
    kinds = {layer.kind for layer in converted(mine).layers}
    assert kinds == {"NormOnlyLinear", "NormOnlyConv2d"}
    assert not any(isinstance(m, nn.Linear | nn.Conv2d) for m in mine.modules())


def test_layers_draw_from_streams_of_their_own() -> None:
    mine = norm_only(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), density=0.5, seed=3)
    masks = [layer.weight.detach() != 0 for layer in mine]
    assert not torch.equal(*masks)
    again = norm_only(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), density=0.5, seed=3)
    assert all(torch.equal(layer.weight.detach() != 0, mask) for layer, mask in zip(again, masks, strict=True))
    assert not torch.equal(norm_only(nn.Sequential(nn.Linear(8, 8)), density=0.5, seed=4)[0].weight != 0, masks[0])


def test_modes_precision_and_frozen_parameters_are_kept() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double().eval()
    model[0].weight.requires_grad_(False)
    mine = norm_only(model)
    assert mine[0].gamma.dtype == torch.float64
    assert not mine[0].training
    assert [mine[0].gamma.requires_grad, mine[0].beta.requires_grad, mine[1].gamma.requires_grad] == [False, True, True]


def test_a_single_layer_becomes_a_single_layer() -> None:
    assert isinstance(norm_only(nn.Linear(3, 2)), NormOnlyLinear)
    assert isinstance(norm_only(nn.Conv2d(3, 2, 1)), NormOnlyConv2d)


def test_ties_stay_and_what_is_left_is_listed_with_the_reason() -> None:
    model = Tied()
    mine = norm_only(model)
    assert mine.again is mine.one
    assert mine.other.gamma is mine.one.gamma
    assert mine.other.beta is not mine.one.beta
    assert mine.head.weight is mine.embed.weight
    tokens = torch.arange(6).reshape(2, 3)
    assert torch.equal(mine(tokens), model(tokens))
    found = converted(mine)
    assert [layer.names for layer in found.layers] == [("one", "again"), ("other",), ("conv",)]
    assert {item.name: item.reason for item in found.left} == {
        "embed": "neither linear nor convolutional",
        "attend": "reads its weights itself, packed, so they cannot be swapped",
        "head": "shares a tensor with 'embed', which stays as it is",
    }
    assert "one = again (NormOnlyLinear): id_cond, weight 8 x 8, 64 features, 0 frozen numbers" in str(found)
    assert "conv (NormOnlyConv1d): id_cond" in str(found)


def test_tied_layers_train_together() -> None:
    model = Tied()
    mine = norm_only(model)
    tokens = torch.arange(6).reshape(2, 3)
    for m in (model, mine):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        m(tokens).square().sum().backward()
        optimizer.step()
    assert torch.allclose(mine.one.weight, model.one.weight, rtol=1e-6, atol=1e-7)
    assert torch.equal(mine.one.weight, mine.other.weight)


def test_layers_can_be_kept_by_name_by_container_and_by_pattern() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 3), nn.Linear(3, 2))
    mine = norm_only(model, keep=("0", "1"))
    assert [layer.names for layer in converted(mine).layers] == [("2",)]
    assert [(item.name, item.reason) for item in converted(mine).left] == [
        ("0.0", "kept as asked"), ("0.1", "kept as asked"), ("1", "kept as asked"),
    ]  # fmt: skip
    assert [layer.names for layer in converted(norm_only(model, keep="0.*")).layers] == [("1",), ("2",)]
    assert type(norm_only(model, keep="2", strict=True)[2]) is nn.Linear
    with pytest.raises(UnknownNameError, match="keep needs a known name; got 'head'"):
        norm_only(model, keep="head")


@pytest.mark.parametrize("features", ["id_cond", "ortho_cond", "id_cond_minimal", "he_normal"])
def test_convolutions_in_groups_are_converted(features: str) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 2, 1)).double()
    mine = norm_only(model, features=features, strict=True)
    assert converted(mine).left == ()
    x = torch.rand(2, 4, 5, 5, dtype=torch.float64)
    assert torch.allclose(mine(x), model(x), rtol=0.0, atol=1e-8)


# ------------------------------------------------------------------------------- how exactly layers start


def test_a_layer_that_does_not_start_with_its_weight_is_warned_of() -> None:
    # At this density many weights have no feature of their own: no solver can reach them.
    with own_randomness(0):
        model = nn.Sequential(nn.Linear(40, 40)).double()
    with pytest.warns(AccuracyWarning, match=r"layer '0' needs to start within 1.5e-08 .*e-01 off it, 2000") as got:
        mine = norm_only(model, features="er_sign", density=0.05)
    error = float((mine[0].weight - model[0].weight).norm().detach() / model[0].weight.norm().detach())
    assert f"start {error:.1e} off it, 2000 of them for 1600 weights" in str(got[0].message)
    assert converted(mine).warnings == (str(got[0].message).removesuffix("."),)
    assert "warning: layer '0' needs to start within" in str(converted(mine))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", ["he_normal", "er_sign", "ortho_cond", "id_cond", "id_cond_minimal"])
def test_features_that_reach_the_weight_start_without_a_warning(features: str, dtype: torch.dtype) -> None:
    with own_randomness(0):
        model = nn.Linear(20, 20).to(dtype)
    assert converted(norm_only(model, features=features)).warnings == ()


@pytest.mark.parametrize("choices", [{"features": "he_normal", "excess": 0.5}, {"density": 0.3}], ids=str)
def test_an_approximation_that_was_asked_for_is_stated_and_not_warned_of(choices: dict[str, Any]) -> None:
    with own_randomness(0):
        model = nn.Linear(20, 20)
    mine = norm_only(model, **choices)  # warnings are errors in tests
    error = float((mine.weight - model.weight).norm().detach() / model.weight.norm().detach())
    assert error > 0.1
    (text,) = converted(mine).warnings
    assert f"start {error:.1e} off it" in text


# ------------------------------------------------------------------------------- misuse


def test_errors_name_the_layer_and_the_way_out() -> None:
    model = nn.Sequential(nn.Linear(40, 8), nn.Linear(8, 3))
    with pytest.raises(ValueRangeError, match=r"layer '1': n_blocks needs a divisor of the 3 outputs.*keep="):
        norm_only(model, features="he_normal", n_blocks=4)
    with pytest.raises(InsufficientFeaturesError, match="layer '0': id_cond needs at least one feature"):
        norm_only(model, density=1e-9)
    with pytest.raises(UnknownNameError, match="id_cond"):
        norm_only(model, features="idcond")


@pytest.mark.parametrize("density", [0.0, 1.01, -1.0])
def test_a_density_outside_its_range_is_refused(density: float) -> None:
    with pytest.raises(ValueRangeError, match=r"density needs .*number in \(0, 1\]"):
        norm_only(nn.Linear(3, 2), density=density)


@pytest.mark.usefixtures("unchecked")
def test_numpy_numbers_are_numbers() -> None:
    model = nn.Linear(10, 10)
    assert norm_only(model, features="he_normal", excess=np.float32(1.1)).gamma.numel() == 110
    same = norm_only(model, density=np.float64(0.5)), norm_only(model, density=0.5)
    assert torch.equal(same[0].gamma, same[1].gamma)


def test_absurd_sizes_and_devices_are_refused() -> None:
    with pytest.raises(MemoryLimitError, match=r"layer '': one gamma for each of 1e\+300 features needs .* GB; got"):
        norm_only(nn.Linear(10, 10), features="he_normal", excess=1e300)
    with pytest.raises(UnknownNameError, match="option of a norm-only layer needs a known name; got 'device'"):
        norm_only(nn.Linear(10, 10), device="nope")


def test_models_without_anything_to_convert_are_refused() -> None:
    with pytest.raises(ConversionError, match="at least one Linear or Conv layer"):
        norm_only(nn.Sequential(nn.BatchNorm2d(3)))
    with pytest.raises(ConversionError, match=r"at least one layer to convert.*all layers are in keep"):
        norm_only(nn.Sequential(nn.Linear(3, 3)), keep="0")
    with pytest.raises(ConversionError, match="on the meta device"):
        norm_only(nn.Linear(3, 2, device="meta"))


# ------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    "choices",
    [
        {"features": "id_cond", "density": 0.2},
        {"features": "id_cond_minimal"},
        {"features": "ortho_cond"},
        {"features": "he_normal", "n_blocks": 2},
        {"features": "id_cond", "condition": 100.0},
    ],
    ids=lambda choices: " ".join(map(str, choices.values())),
)
def test_a_saved_model_comes_back_to_the_last_bit(tmp_path: Path, choices: dict[str, Any]) -> None:
    mine = norm_only(resnet(), seed=7, **choices).train()
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
    mine(images()).square().sum().backward()
    optimizer.step()
    save_norm_only(mine, tmp_path / "model.safetensors")
    again = load_norm_only(tmp_path / "model.safetensors", into=resnet(seed=5))
    assert torch.equal(again.eval()(images()), mine.eval()(images()))


def test_a_file_holds_the_seed_and_not_the_mask(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    mine = norm_only(nn.Sequential(nn.Linear(100, 100, bias=False)), density=0.1, seed=7)
    save_norm_only(mine, path)
    n_features = mine[0].gamma.numel()
    assert path.stat().st_size < 4 * n_features + 1500, "gammas in float32 and a header"
    with safe_open(path, framework="pt") as file:
        assert list(file.keys()) == ["0.gamma"]
        document = json.loads(file.metadata()["onlynorm"])
    assert document["layers"][0]["choice"]["seed"] == 7
    assert document["layers"][0]["choice"]["density"] == 0.1
    save_norm_only(mine, tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def test_a_spectrum_that_was_given_is_kept_in_the_file(tmp_path: Path) -> None:
    mine = nn.Sequential(NormOnlyLinear(4, 3, spectrum=torch.linspace(0.5, 2.0, 12)), nn.ReLU(), nn.Linear(3, 2))
    save_norm_only(mine, tmp_path / "model.safetensors")
    fresh = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    again = load_norm_only(tmp_path / "model.safetensors", into=fresh)
    x = torch.ones(2, 4)
    assert torch.equal(again(x), mine(x))


def test_ties_come_back(tmp_path: Path) -> None:
    mine = norm_only(Tied(), density=0.5)
    save_norm_only(mine, tmp_path / "model.safetensors")
    again = load_norm_only(tmp_path / "model.safetensors", into=Tied())
    assert again.other.gamma is again.one.gamma
    assert again.again is again.one
    assert again.head.weight is again.embed.weight
    tokens = torch.arange(6).reshape(2, 3)
    assert torch.equal(again(tokens), mine(tokens))


def test_precision_is_the_file_s(tmp_path: Path) -> None:
    mine = norm_only(nn.Sequential(nn.Linear(5, 4)).double(), features="he_normal")
    save_norm_only(mine, tmp_path / "model.safetensors")
    again = load_norm_only(tmp_path / "model.safetensors", into=nn.Sequential(nn.Linear(5, 4)))
    x = torch.ones(2, 5, dtype=torch.float64)
    assert torch.equal(again(x), mine(x))


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(ConversionError, match="needs a model with norm-only layers"):
        save_norm_only(nn.Linear(3, 2), path)
    save_norm_only(norm_only(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2)), density=0.5), path)
    with pytest.raises(FormatError, match=r"layer at '0' needs a Linear or Conv with a weight of \(4, 5\)"):
        load_norm_only(path, into=nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)))
    with pytest.raises(FormatError, match=r"layer at '0' needs .* the model has ReLU"):
        load_norm_only(path, into=nn.Sequential(nn.ReLU()))
    with pytest.raises(FormatError, match="architecture that was saved"):
        load_norm_only(path, into=nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2), nn.BatchNorm1d(2)))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    (tmp_path / "altered.safetensors").write_bytes(data)
    with pytest.raises(FormatError, match="does not match its checksum"):
        load_norm_only(tmp_path / "altered.safetensors", into=nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2)))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"seed": 1}, "gammas; the file has|frozen features with the digest"),
        ({"features": "nonsense"}, "features needs a known name"),
        ({"features": "he_normal", "density": None, "excess": 1e9}, "gammas; the file has"),
        ({"surprise": 1}, "option of a norm-only layer"),
    ],
)
def test_forged_settings_are_refused(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    path = tmp_path / "model.safetensors"
    save_norm_only(norm_only(nn.Sequential(nn.Linear(5, 4)), density=0.5), path)
    document, tensors = read_tensors(path, kind=KIND, format=FORMAT, cure="")
    document["layers"][0]["choice"].update(change)
    kept = {name: document[name] for name in ("layers", "aliases", "dtype")}
    write_tensors(path, tensors, kind=KIND, format=FORMAT, document=kept)
    with pytest.raises(FormatError, match=match):
        load_norm_only(path, into=nn.Sequential(nn.Linear(5, 4)))
    write_tensors(path, tensors, kind=KIND, format=FORMAT, document={"layers": []})
    with pytest.raises(FormatError, match="lacks some"):
        load_norm_only(path, into=nn.Sequential(nn.Linear(5, 4)))
