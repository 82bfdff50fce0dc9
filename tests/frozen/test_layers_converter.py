"""Any model with norm-only layers: what is converted, what is left and why, ties, and files that hold seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from earlier_files import FOLDER, NORM_ONLY, norm_only_target
from safetensors import safe_open
from tensors import single_normal
from torch import Tensor, nn

import onlynorm as on
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
    to_norm_only,
)
from onlynorm.frozen.checkpoint import EARLIER_KIND, FORMAT, KIND
from onlynorm.models import cifar_resnet
from onlynorm.seeds import own_randomness
from onlynorm.storage import read_tensors, write_tensors


def images(n: int = 2) -> Tensor:
    return single_normal(n, 3, 16, 16)


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


@pytest.mark.parametrize(
    "features", ["id_cond", "id_cond_minimal", "ortho_cond", "fast_ortho_cond", "kron_normal", "he_normal"]
)
def test_a_converted_resnet_computes_the_same_and_trains_only_norms(features: str) -> None:
    model = resnet()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    mine = to_norm_only(model, features=features, seed=1)
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
    mine = to_norm_only(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), density=0.5, seed=3)
    masks = [layer.weight.detach() != 0 for layer in mine]
    assert not torch.equal(*masks)
    again = to_norm_only(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), density=0.5, seed=3)
    assert all(torch.equal(layer.weight.detach() != 0, mask) for layer, mask in zip(again, masks, strict=True))
    assert not torch.equal(to_norm_only(nn.Sequential(nn.Linear(8, 8)), density=0.5, seed=4)[0].weight != 0, masks[0])


def test_modes_precision_and_frozen_parameters_are_kept() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double().eval()
    model[0].weight.requires_grad_(False)
    mine = to_norm_only(model)
    assert mine[0].gamma.dtype == torch.float64
    assert not mine[0].training
    assert [mine[0].gamma.requires_grad, mine[0].beta.requires_grad, mine[1].gamma.requires_grad] == [False, True, True]


def test_a_single_layer_becomes_a_single_layer() -> None:
    assert isinstance(to_norm_only(nn.Linear(3, 2)), NormOnlyLinear)
    assert isinstance(to_norm_only(nn.Conv2d(3, 2, 1)), NormOnlyConv2d)


def test_ties_stay_and_what_is_left_is_listed_with_the_reason() -> None:
    model = Tied()
    mine = to_norm_only(model)
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
        "attend": "uses packed weights, which cannot be replaced",
        "head": "shares a tensor with 'embed', which stays as it is",
    }
    assert "one = again (NormOnlyLinear): id_cond, weight 8 x 8, 64 features, 0 frozen entries" in str(found)
    assert "conv (NormOnlyConv1d): id_cond" in str(found)


def test_tied_layers_train_together() -> None:
    model = Tied()
    mine = to_norm_only(model)
    tokens = torch.arange(6).reshape(2, 3)
    for m in (model, mine):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        m(tokens).square().sum().backward()
        optimizer.step()
    assert torch.allclose(mine.one.weight, model.one.weight, rtol=1e-6, atol=1e-7)
    assert torch.equal(mine.one.weight, mine.other.weight)


def test_layers_can_be_kept_by_name_by_container_and_by_pattern() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 3), nn.Linear(3, 2))
    mine = to_norm_only(model, keep=("0", "1"))
    assert [layer.names for layer in converted(mine).layers] == [("2",)]
    assert [(item.name, item.reason) for item in converted(mine).left] == [
        ("0.0", "kept as asked"), ("0.1", "kept as asked"), ("1", "kept as asked"),
    ]  # fmt: skip
    assert [layer.names for layer in converted(to_norm_only(model, keep="0.*")).layers] == [("1",), ("2",)]
    assert type(to_norm_only(model, keep="2", strict=True)[2]) is nn.Linear
    with pytest.raises(UnknownNameError, match="keep needs a known name; got 'head'"):
        to_norm_only(model, keep="head")


@pytest.mark.parametrize(
    "features", ["id_cond", "ortho_cond", "fast_ortho_cond", "kron_normal", "id_cond_minimal", "he_normal"]
)
def test_convolutions_in_groups_are_converted(features: str) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 2, 1)).double()
    mine = to_norm_only(model, features=features, strict=True)
    assert converted(mine).left == ()
    x = torch.rand(2, 4, 5, 5, dtype=torch.float64)
    assert torch.allclose(mine(x), model(x), rtol=0.0, atol=1e-8)


# ------------------------------------------------------------------------------- how exactly layers start


def test_a_layer_that_does_not_start_with_its_weight_is_warned_of() -> None:
    # At this density many weights have no feature of their own: no solver can reach them.
    with own_randomness(0):
        model = nn.Sequential(nn.Linear(40, 40)).double()
    with pytest.warns(AccuracyWarning, match=r"layer '0' needs .*within 1.5e-08; got .*e-01 with 2000") as got:
        mine = to_norm_only(model, features="er_sign", density=0.05)
    error = float((mine[0].weight - model[0].weight).norm().detach() / model[0].weight.norm().detach())
    assert f"error of {error:.1e} with 2000" in str(got[0].message)
    assert converted(mine).warnings == (str(got[0].message).removesuffix("."),)
    assert "warning: layer '0' needs" in str(converted(mine))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "features", ["he_normal", "er_sign", "ortho_cond", "fast_ortho_cond", "kron_normal", "id_cond", "id_cond_minimal"]
)
def test_features_that_reach_the_weight_start_without_a_warning(features: str, dtype: torch.dtype) -> None:
    with own_randomness(0):
        model = nn.Linear(20, 20).to(dtype)
    assert converted(to_norm_only(model, features=features)).warnings == ()


@pytest.mark.parametrize("choices", [{"features": "he_normal", "excess": 0.5}, {"density": 0.3}], ids=str)
def test_an_approximation_that_was_asked_for_is_stated_and_not_warned_of(choices: dict[str, Any]) -> None:
    with own_randomness(0):
        model = nn.Linear(20, 20)
    mine = to_norm_only(model, **choices)  # warnings are errors in tests
    error = float((mine.weight - model.weight).norm().detach() / model.weight.norm().detach())
    assert error > 0.1
    (text,) = converted(mine).warnings
    assert f"error of {error:.1e}" in text


# ------------------------------------------------------------------------------- misuse


def test_errors_name_the_layer_and_the_way_out() -> None:
    model = nn.Sequential(nn.Linear(40, 8), nn.Linear(8, 3))
    with pytest.raises(ValueRangeError, match=r"layer '1': n_blocks needs a divisor of the 3 outputs.*keep="):
        to_norm_only(model, features="he_normal", n_blocks=4)
    with pytest.raises(InsufficientFeaturesError, match="layer '0': id_cond needs at least one feature"):
        to_norm_only(model, density=1e-9)
    with pytest.raises(UnknownNameError, match="id_cond"):
        to_norm_only(model, features="idcond")


@pytest.mark.parametrize("density", [0.0, 1.01, -1.0])
def test_a_density_outside_its_range_is_refused(density: float) -> None:
    with pytest.raises(ValueRangeError, match=r"density .*number in \(0, 1\]"):
        to_norm_only(nn.Linear(3, 2), density=density)


@pytest.mark.usefixtures("unchecked")
def test_numpy_numbers_are_numbers() -> None:
    model = nn.Linear(10, 10)
    assert to_norm_only(model, features="he_normal", excess=np.float32(1.1)).gamma.numel() == 110
    same = to_norm_only(model, density=np.float64(0.5)), to_norm_only(model, density=0.5)
    assert torch.equal(same[0].gamma, same[1].gamma)


def test_absurd_sizes_and_devices_are_refused() -> None:
    with pytest.raises(MemoryLimitError, match=r"layer '': one gamma for each of 1e\+300 features needs .* GB; got"):
        to_norm_only(nn.Linear(10, 10), features="he_normal", excess=1e300)


def test_models_without_anything_to_convert_are_refused() -> None:
    with pytest.raises(ConversionError, match="at least one Linear or Conv layer"):
        to_norm_only(nn.Sequential(nn.BatchNorm2d(3)))
    with pytest.raises(ConversionError, match=r"at least one Linear or Conv layer.* outside keep="):
        to_norm_only(nn.Sequential(nn.Linear(3, 3)), keep="0")
    with pytest.raises(ConversionError, match="on the meta device"):
        to_norm_only(nn.Linear(3, 2, device="meta"))


# ------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    "choices",
    [
        {"features": "id_cond", "density": 0.2},
        {"features": "id_cond_minimal"},
        {"features": "ortho_cond"},
        {"features": "fast_ortho_cond"},
        {"features": "kron_normal"},
        {"features": "he_normal", "n_blocks": 2},
        {"features": "id_cond", "spectrum": 100.0},
    ],
    ids=lambda choices: " ".join(map(str, choices.values())),
)
def test_a_saved_model_comes_back_to_the_last_bit(tmp_path: Path, choices: dict[str, Any]) -> None:
    mine = to_norm_only(resnet(), seed=7, **choices).train()
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
    mine(images()).square().sum().backward()
    optimizer.step()
    on.save(mine, tmp_path / "model.safetensors")
    again = on.load(tmp_path / "model.safetensors", like=resnet(seed=5))
    assert torch.equal(again.eval()(images()), mine.eval()(images()))


def test_a_file_holds_the_seed_and_not_the_mask(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    mine = to_norm_only(nn.Sequential(nn.Linear(100, 100, bias=False)), density=0.1, seed=7)
    on.save(mine, path)
    n_features = mine[0].gamma.numel()
    assert path.stat().st_size < 4 * n_features + 1500, "gammas in float32 and a header"
    with safe_open(path, framework="pt") as file:
        assert list(file.keys()) == ["0.gamma"]
        document = json.loads(file.metadata()["onlynorm"])
    assert document["blocks"][0]["settings"]["frozen"]["seed"] == 7
    assert document["blocks"][0]["settings"]["frozen"]["density"] == 0.1


def test_a_spectrum_that_was_given_is_kept_in_the_file(tmp_path: Path) -> None:
    mine = nn.Sequential(NormOnlyLinear(4, 3, spectrum=torch.linspace(0.5, 2.0, 12)), nn.ReLU(), nn.Linear(3, 2))
    on.save(mine, tmp_path / "model.safetensors")
    fresh = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    again = on.load(tmp_path / "model.safetensors", like=fresh)
    x = torch.ones(2, 4)
    assert torch.equal(again(x), mine(x))


def test_ties_come_back(tmp_path: Path) -> None:
    mine = to_norm_only(Tied(), density=0.5)
    on.save(mine, tmp_path / "model.safetensors")
    again = on.load(tmp_path / "model.safetensors", like=Tied())
    assert again.other.gamma is again.one.gamma
    assert again.again is again.one
    assert again.head.weight is again.embed.weight
    tokens = torch.arange(6).reshape(2, 3)
    assert torch.equal(again(tokens), mine(tokens))


def test_precision_is_the_file_s(tmp_path: Path) -> None:
    mine = to_norm_only(nn.Sequential(nn.Linear(5, 4)).double(), features="he_normal")
    on.save(mine, tmp_path / "model.safetensors")
    again = on.load(tmp_path / "model.safetensors", like=nn.Sequential(nn.Linear(5, 4)))
    x = torch.ones(2, 5, dtype=torch.float64)
    assert torch.equal(again(x), mine(x))


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    on.save(to_norm_only(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2)), density=0.5), path)
    with pytest.raises(FormatError, match=r"layer at '0' .* Linear\(in_features=6"):
        on.load(path, like=nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)))
    with pytest.raises(FormatError, match=r"'0' is ReLU instead of Linear or Conv"):
        on.load(path, like=nn.Sequential(nn.ReLU()))
    with pytest.raises(FormatError, match="architecture"):
        on.load(path, like=nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2), nn.BatchNorm1d(2)))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"seed": 1}, "needs exactly|frozen weights with the digest"),
        ({"name": "nonsense"}, "features needs a known name"),
        ({"name": "he_normal", "density": None, "n_features": 10**12}, "1000000000000 features"),
        ({"n_copies": 2}, "has shape"),
        ({"spectrum": 0.5}, "a spectrum needs"),
        ({"name": "er_sign", "n_features": 14, "spectrum": 9.0}, "a spectrum needs id_cond"),
    ],
    ids=str,
)
def test_forged_settings_are_refused(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    path = tmp_path / "model.safetensors"
    on.save(to_norm_only(nn.Sequential(nn.Linear(5, 4)), density=0.5), path)
    document, tensors = read_tensors(path, kind=KIND, format=FORMAT, cure="")
    document["blocks"][0]["settings"]["frozen"].update(change)
    forged = {name: value for name, value in document.items() if name not in ("kind", "format")}
    write_tensors(path, tensors, kind=KIND, format=FORMAT, document=forged)
    with pytest.raises(FormatError, match=match):
        on.load(path, like=nn.Sequential(nn.Linear(5, 4)))
    write_tensors(path, tensors, kind=KIND, format=FORMAT, document={"blocks": []})
    with pytest.raises(FormatError, match="needs a precision"):
        on.load(path, like=nn.Sequential(nn.Linear(5, 4)))


@pytest.mark.parametrize("storage", ["dense", "seed"])
@pytest.mark.parametrize("name", NORM_ONLY)
def test_files_that_held_norm_only_layers_alone_still_load(name: str, storage: str) -> None:
    model = on.load(FOLDER / f"{name}.safetensors", like=NORM_ONLY[name](), storage=storage)
    for number, (layer, plain) in enumerate(zip(on.collapse(model), norm_only_target(name), strict=True)):
        if (name, number) == ("norm_only_linear", 0):  # a mask, which leaves weights out
            features = on.draw("id_cond", (4, 4), density=0.5, seed=3, layer="0")
            plain.weight.data *= features.structure.grid(torch.ones(features.n_features))
        error = float((layer.weight - plain.weight).abs().max().detach())
        assert error <= (4e-3 if layer.weight.dtype.itemsize == 2 else 1e-5), number


def test_an_earlier_file_keeps_ties_and_precisions() -> None:
    model = on.load(FOLDER / "norm_only_conv.safetensors", like=NORM_ONLY["norm_only_conv"]())
    assert model[1].gamma is model[3].gamma
    assert model[0].weight.dtype == torch.float16
    assert model[0].gamma.dtype == torch.float32
    assert model[2].weight.dtype == torch.bfloat16
    with pytest.raises(FormatError, match=r"layer at '0' needs a Linear or Conv with a weight of \[6, 2, 3, 3\]"):
        on.load(FOLDER / "norm_only_conv.safetensors", like=nn.Sequential(nn.Conv2d(4, 6, 5)))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"seed": 1}, "has shape|needs exactly|frozen weights with the digest"),
        ({"features": "nonsense"}, "features needs a known name"),
        ({"features": "he_normal", "density": None, "excess": 1e9}, "one gamma for each|features for"),
        ({"surprise": 1}, "surprise"),
    ],
    ids=str,
)
def test_forged_settings_of_earlier_files_are_refused(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    document, tensors = read_tensors(FOLDER / "norm_only_linear.safetensors", kind=EARLIER_KIND, format=1, cure="")
    document["layers"][0]["choice"].update(change)
    forged = {name: document[name] for name in ("layers", "aliases", "dtype")}
    path = tmp_path / "model.safetensors"
    write_tensors(path, tensors, kind=EARLIER_KIND, format=1, document=forged)
    with pytest.raises(FormatError, match=match):
        on.load(path, like=NORM_ONLY["norm_only_linear"]())
