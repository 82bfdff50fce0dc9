"""Norm-only layers in the hands of code that was written for ordinary ones: attributes, state dicts, odd numbers."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensors import single_normal
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onlynorm as on
from onlynorm.errors import (
    ConversionError,
    FormatError,
    InsufficientFeaturesError,
    MemoryLimitError,
    ShapeError,
    ValueRangeError,
)
from onlynorm.features import draw_blocks, semicircle_spectrum
from onlynorm.frozen import (
    FrozenOptions,
    NormOnlyConv2d,
    NormOnlyLinear,
    converted,
    maps,
    to_norm_only,
    wrap,
)
from onlynorm.seeds import own_randomness

SEEDED: list[dict[str, Any]] = [
    {"features": "he_normal"},
    {"features": "he_normal", "n_blocks": 2},
    {"features": "er_sign", "density": 0.8},
    {"features": "ortho_cond"},
    {"features": "fast_ortho_cond"},
    {"features": "kron_normal"},
    {"features": "id_cond", "spectrum": 10.0},
]


# ------------------------------------------------------------------------------- as an ordinary layer


@pytest.mark.parametrize("features", ["id_cond", "id_cond_minimal", "he_normal"])
def test_torch_s_own_transformer_layer_reads_weight_and_bias(features: str) -> None:
    with own_randomness(0):
        model = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True).eval()  # takes its fast way without gradients
    mine = to_norm_only(model, features=features)
    with torch.no_grad():
        assert torch.allclose(mine(single_normal(2, 3, 6)), model(single_normal(2, 3, 6)), atol=1e-5)
    assert torch.allclose(mine(single_normal(2, 3, 6)), model(single_normal(2, 3, 6)), atol=1e-5)


def test_sizes_have_the_names_of_the_ordinary_layers() -> None:
    linear, conv = NormOnlyLinear(3, 4, bias=False), NormOnlyConv2d(4, 6, kernel_size=3, groups=2)
    assert (linear.in_features, linear.out_features, linear.bias) == (3, 4, None)
    assert (conv.in_channels, conv.out_channels, conv.bias is conv.beta) == (4, 6, True)


@pytest.mark.parametrize(
    "features", ["id_cond", "id_cond_minimal", "ortho_cond", "fast_ortho_cond", "kron_normal", "he_normal", "er_sign"]
)
def test_a_layer_can_be_made_on_meta(features: str) -> None:
    layer = NormOnlyLinear(3, 4, features=features, device="meta")
    assert layer(torch.empty(2, 3, device="meta")).shape == (2, 4)


def test_a_weight_of_another_shape_is_not_set() -> None:
    with pytest.raises(ShapeError, match=r"shape \(4, 3\); got \(3, 4\)"):
        NormOnlyLinear(3, 4).set_weight(single_normal(3, 4))


# ------------------------------------------------------------------------------- state dicts


@pytest.mark.parametrize("choices", SEEDED, ids=str)
def test_gammas_of_other_frozen_features_are_refused(choices: dict[str, Any]) -> None:
    layer, file = NormOnlyLinear(3, 4, seed=1, **choices), io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    same = NormOnlyLinear(3, 4, seed=1, **choices).double()
    same.load_state_dict(state)
    assert torch.allclose(same.weight, layer.weight.double(), atol=1e-5)
    for other in ({"seed": 2}, {"seed": 1, "layer": "head"}):
        with pytest.raises(FormatError, match=r"needs gammas .*seed 1, layer ''"):
            NormOnlyLinear(3, 4, **choices, **other).load_state_dict(state, strict=False)


def test_spectra_and_shared_columns_are_told_apart() -> None:
    state = NormOnlyLinear(3, 4, spectrum=torch.linspace(1, 2, 12)).state_dict()
    NormOnlyLinear(3, 4, spectrum=torch.linspace(1, 2, 12)).load_state_dict(state)
    with pytest.raises(FormatError, match="spectrum"):
        NormOnlyLinear(3, 4, spectrum=torch.linspace(1, 3, 12)).load_state_dict(state)
    state = NormOnlyLinear(3, 4, features="id_cond_minimal").state_dict()
    with pytest.raises(FormatError, match=r"shared column 1.*shared column 0"):
        NormOnlyLinear(3, 4, features="id_cond_minimal", shared_column=1).load_state_dict(state)


def test_features_without_a_seed_and_bare_dictionaries_load_anywhere() -> None:
    layer, other = NormOnlyLinear(3, 4, seed=1), NormOnlyLinear(3, 4, seed=2)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.weight, layer.weight)
    random = NormOnlyLinear(3, 4, seed=1, features="he_normal")
    NormOnlyLinear(3, 4, seed=2, features="he_normal").load_state_dict(dict(random.state_dict()))


# ------------------------------------------------------------------------------- conversion


def test_hooks_on_a_layer_go_over_to_the_one_in_its_place() -> None:
    with own_randomness(0):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    plain = model(single_normal(5, 3))
    model[0].register_forward_hook(lambda module, inputs, output: 2.0 * output)
    mine = to_norm_only(model)
    assert torch.allclose(mine(single_normal(5, 3)), model(single_normal(5, 3)))
    assert not torch.allclose(mine(single_normal(5, 3)), plain)
    assert len(converted(mine).layers) == 2


def test_an_old_spectral_norm_is_left_with_its_parameters() -> None:
    with own_randomness(0):
        model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 4)), nn.Linear(4, 2)).eval()
    mine = to_norm_only(model)
    assert torch.allclose(mine(single_normal(5, 3)), model(single_normal(5, 3)))
    assert "0.weight_orig" in mine.state_dict()


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (None, "needs a model, .*got None"),
        (nn.Linear, "needs a model, .*got the class Linear"),
        (nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2)), "got a lazy layer"),
        (nn.Sequential(nn.LazyBatchNorm1d(), nn.Linear(4, 2)), "got a lazy layer"),
        (nn.Sequential(NormOnlyLinear(3, 4)), "norm-only already"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_has_no_ordinary_layers_with_weights_is_refused(model: Any, match: str) -> None:
    with pytest.raises(ConversionError, match=match):
        to_norm_only(model)


@pytest.mark.parametrize("keep", [3, [2], None, [nn.ReLU()]])
@pytest.mark.usefixtures("unchecked")
def test_layers_are_kept_by_name_only(keep: Any) -> None:
    with pytest.raises(ConversionError, match=r"keep .*(names of layers|a list or tuple); got"):
        to_norm_only(nn.Sequential(nn.Linear(3, 4)), keep=keep)


# ------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    "features", ["id_cond", "id_cond_minimal", "ortho_cond", "fast_ortho_cond", "kron_normal", "he_normal"]
)
@pytest.mark.parametrize("what", ["weight", "bias"])
def test_numbers_that_are_none_are_refused_for_all_features(features: str, what: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4))
    with torch.no_grad():
        getattr(model[0], what).view(-1)[1] = torch.nan
    with pytest.raises(ValueRangeError, match=rf"layer '0'.*a NaN or an infinity in the {what} of"):
        to_norm_only(model, features=features)


def test_complex_layers_are_refused() -> None:
    with pytest.raises(ValueRangeError, match=r"got torch.complex64 in the weight"):
        NormOnlyLinear(3, 4, dtype=torch.complex64)


@pytest.mark.parametrize("condition", ["10", True, 1e300, float("inf"), float("nan"), None])
@pytest.mark.usefixtures("unchecked")
def test_a_condition_number_that_cannot_be_is_refused(condition: Any) -> None:
    with pytest.raises(ValueRangeError, match=r"condition of at least 1 and at most 1e\+37"):
        semicircle_spectrum(12, condition=condition)


@pytest.mark.parametrize("n", [0, -1, 1.5, "a", True])
@pytest.mark.usefixtures("unchecked")
def test_a_number_of_values_that_cannot_be_is_refused(n: Any) -> None:
    with pytest.raises(ValueRangeError, match="at least two values"):
        semicircle_spectrum(n, condition=2.0)


def test_gammas_that_the_precision_cannot_hold_are_refused() -> None:
    large = nn.Linear(3, 4)
    with torch.no_grad():
        large.weight.fill_(1e30)
    with pytest.raises(ValueRangeError, match=r"gammas .*torch.float32.*smaller condition"):
        wrap(large, FrozenOptions(spectrum=1e30))


# ------------------------------------------------------------------------------- precision

FEATURES: list[dict[str, Any]] = [
    {"features": "he_normal", "excess": 1.0},
    {"features": "he_normal", "excess": 1.25, "n_blocks": 2},
    {"features": "ortho_cond"},
    {"features": "fast_ortho_cond"},
    {"features": "kron_normal"},
    {"features": "id_cond"},
    {"features": "id_cond", "spectrum": 1e9},
    {"features": "id_cond_minimal"},
]


def error(made: Tensor, wanted: Tensor) -> float:
    made, wanted = made.detach().double(), wanted.detach().double()
    return float(torch.linalg.vector_norm(made - wanted) / torch.linalg.vector_norm(wanted))


def room(dtype: torch.dtype) -> float:
    """Weights and inputs are rounded once each, in an ordinary layer too; a factor of two to spare."""
    return 2.0 * 2.0 * torch.finfo(dtype).eps


@pytest.mark.parametrize("choices", FEATURES, ids=str)
@pytest.mark.parametrize("n_samples", [3, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_a_layer_is_as_precise_as_an_ordinary_one(
    choices: dict[str, Any], n_samples: int, dtype: torch.dtype
) -> None:
    layer = NormOnlyLinear(48, 32, seed=0, **choices)
    x = single_normal(n_samples, 48)
    wanted = layer(x)
    with torch.autocast("cpu", dtype=dtype):
        made = layer(x)
        assert layer.weight.dtype == torch.float32
    assert made.dtype == dtype
    assert error(made, wanted) <= room(dtype)


@pytest.mark.parametrize("choices", FEATURES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_of_half_precision_is_as_precise_as_an_ordinary_one(
    choices: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    plain = nn.Sequential(nn.Linear(48, 32), nn.Linear(32, 8, bias=False))
    model = to_norm_only(plain, seed=0, **choices)
    x = single_normal(5, 48)
    wanted = model(x)
    half = copy.deepcopy(model).to(dtype)
    made = half(x.to(dtype))
    assert made.dtype == half[0].weight.dtype == half[0].beta.dtype == dtype
    assert error(made, wanted) <= 2.0 * room(dtype), "two layers"
    made.sum().backward()
    half.to(dtype).to("cpu")  # gradients are cast along
    assert half[0].gamma.grad is not None
    assert half[0].gamma.grad.dtype == half[0].gamma.dtype
    on.save(half, tmp_path / "half.safetensors")
    loaded = on.load(tmp_path / "half.safetensors", like=plain)
    assert [layer.weight.dtype for layer in loaded] == [dtype, dtype]
    assert torch.equal(loaded(x.to(dtype)), half(x.to(dtype)))
    back = half.float()
    assert error(back(x), wanted) <= 2.0 * room(dtype)
    assert to_norm_only(plain.to(dtype), seed=0, **choices)[0].weight.dtype == dtype


def test_a_layer_made_inside_autocast_has_the_weight_of_the_ordinary_layer() -> None:
    outside = NormOnlyLinear(24, 16, features="he_normal", excess=1.25, n_blocks=2, seed=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = NormOnlyLinear(24, 16, features="he_normal", excess=1.25, n_blocks=2, seed=0)
    assert torch.equal(inside.gamma, outside.gamma)


@pytest.mark.parametrize("choices", FEATURES[:3], ids=str)
def test_checkpointing_under_autocast_gives_the_same_gradients(choices: dict[str, Any]) -> None:
    layer = NormOnlyLinear(12, 8, seed=0, **choices)
    gradients = []
    for call in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        layer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            call(single_normal(5, 12)).float().square().sum().backward()
        gradients.append(layer.gamma.grad.clone())
    assert torch.equal(*gradients)


COMPILED = """
import torch
from onlynorm.frozen import NormOnlyLinear
for choices in ({"features": "he_normal", "excess": 1.25}, {"features": "ortho_cond"}, {"features": "id_cond_minimal"}):
    layer = NormOnlyLinear(12, 8, seed=0, **choices)
    x = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    outputs, gradients = [], []
    for call in (layer, torch.compile(layer, backend="eager", fullgraph=True)):
        layer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs.append(call(x))
        outputs[-1].float().square().sum().backward()
        gradients.append(layer.gamma.grad.clone())
    assert torch.equal(*outputs), choices
    assert torch.equal(*gradients), choices
"""


def test_a_compiled_layer_under_autocast_gives_the_same_outputs_and_gradients() -> None:
    # In a process of its own: the checks of shapes that these tests run with cannot be compiled.
    ran = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.usefixtures("unchecked")
def test_a_spectrum_may_be_any_real_numbers_and_is_copied(tmp_path: Path) -> None:
    layer = NormOnlyLinear(2, 2, spectrum=[1.0, 2.0, 3.0, 4.0])
    on.save(nn.Sequential(layer), tmp_path / "model.safetensors")
    loaded = on.load(tmp_path / "model.safetensors", like=nn.Sequential(nn.Linear(2, 2)))
    assert torch.equal(loaded(single_normal(3, 2)), layer(single_normal(3, 2)))
    given = torch.ones(4)
    layer = NormOnlyLinear(2, 2, spectrum=given)
    before = layer.weight.clone()
    given.mul_(7.0)
    assert torch.allclose(layer.double().weight, before.double())
    for wrong in ("abcd", torch.ones(4, dtype=torch.complex64)):
        with pytest.raises(ValueRangeError, match=r"a spectrum .*real"):
            NormOnlyLinear(2, 2, spectrum=wrong)


def test_a_file_keeps_the_precision_of_every_layer(tmp_path: Path) -> None:
    layers = NormOnlyLinear(3, 4, features="he_normal"), NormOnlyLinear(4, 2, features="ortho_cond").double()
    on.save(nn.Sequential(*layers, nn.BatchNorm1d(2).bfloat16()), tmp_path / "model.safetensors")
    fresh = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.BatchNorm1d(2))
    loaded = on.load(tmp_path / "model.safetensors", like=fresh)
    assert [torch.equal(loaded[i].weight, layers[i].weight) for i in (0, 1)] == [True, True]
    assert [loaded[i].weight.dtype for i in range(3)] == [torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.usefixtures("unchecked")
def test_files_need_models_with_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(ConversionError, match=r"save needs a network .*got None"):
        on.save(None, path)  # type: ignore[arg-type]
    on.save(NormOnlyLinear(3, 4), path)
    with pytest.raises(ConversionError, match=r"load needs .*on the meta device"):
        on.load(path, like=nn.Linear(3, 4, device="meta"))


def test_features_that_are_all_zero_are_refused() -> None:
    with pytest.raises(InsufficientFeaturesError, match="er_sign needs at least one feature that is not zero"):
        NormOnlyLinear(3, 4, features="er_sign", density=1e-9)


@pytest.mark.parametrize("features", ["he_normal", "ortho_cond"])
def test_features_that_do_not_fit_into_memory_are_refused_before_they_are_drawn(
    features: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maps, "memory_limit", lambda: 1000)
    with pytest.raises(MemoryLimitError, match=rf"weight 40 x 30 .*{features} features needs .*Take id_cond"):
        NormOnlyLinear(30, 40, features=features)


@pytest.mark.parametrize("shape", [(), 3, ("a", 3)])
@pytest.mark.usefixtures("unchecked")
def test_blocks_need_a_shape(shape: Any) -> None:
    with pytest.raises(ShapeError, match="2 to 5 positive integers"):
        draw_blocks("he_normal", shape)
