"""Whole networks rebuilt by norms only: the same function, from every kind of layer, with every activation."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rebuilding import reconstruct_with
from tensors import normal
from torch import Tensor, nn

from onlynorm import Wide
from onlynorm.errors import ConversionError, ShapeError, ValueRangeError
from onlynorm.frozen.pair import NormOnlyBlock
from onlynorm.models import mlp
from onlynorm.modules import find_layers
from onlynorm.modules.affine import affine, set_affine
from onlynorm.reconstruction import Reconstruction, collapse, reconstruct, verify

EXACT = 1e-9
"""The solver leaves 1e-10 per layer; a few layers and their shifts may add up to ten times that."""


def rebuilt(network: nn.Module, inputs: Tensor, **options: object) -> Reconstruction:
    return reconstruct_with(network.double().eval(), inputs, **options)  # type: ignore[arg-type]


class Residual(nn.Module):
    """A skip, a functional call, a norm of its own, and one layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.shared = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.again = self.shared
        self.head = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.first(x)))
        h = h + torch.tanh(self.shared(h))
        h = h + self.again(h)
        return self.head(nn.functional.adaptive_avg_pool2d(h, 1).flatten(1))


@given(st.lists(st.integers(1, 9), min_size=2, max_size=4), st.integers(0, 2**32))
@settings(max_examples=15)
def test_an_mlp_of_any_widths_is_rebuilt(widths: list[int], seed: int) -> None:
    network = mlp(widths, seed=seed % 1000)
    inputs = normal(20, widths[0])
    result = rebuilt(network, inputs, seed=seed, activation=nn.ReLU())
    check = verify(network, result.network, inputs)
    assert check.relative_error <= EXACT
    assert check.outside == 0.0
    assert check.is_reproducible


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(3, 4, 3, stride=2, padding=1),
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2),
        nn.Conv2d(2, 3, 3, padding="same", padding_mode="reflect"),
        nn.Conv2d(2, 3, 3, padding=2, padding_mode="circular"),
        nn.Conv2d(3, 3, 3, padding=1, groups=3),
        nn.Conv2d(3, 2, 1, padding="valid"),
        nn.Conv3d(2, 2, 2, padding=1),
        nn.Linear(5, 3),
    ],
    ids=lambda layer: type(layer).__name__,
)
@pytest.mark.parametrize("kernel", ["first", "second"])
@pytest.mark.parametrize("activation", [None, nn.ReLU()])
def test_every_kind_of_layer_is_rebuilt(layer: nn.Module, kernel: str, activation: nn.Module | None) -> None:
    axes = {"Linear": 0, "Conv1d": 1, "Conv2d": 2, "Conv3d": 3}[type(layer).__name__]
    channels = 5 if axes == 0 else layer.in_channels
    inputs = normal(6, channels, *(7,) * axes)
    target = nn.Sequential(layer)
    result = rebuilt(target, inputs, kernel=kernel, activation=activation)
    assert verify(target, result.network, inputs).relative_error <= EXACT
    assert verify(target, collapse(result.network), inputs).relative_error <= EXACT


@pytest.mark.parametrize(
    "activation",
    [nn.ReLU(), nn.LeakyReLU(0.1), nn.GELU(), nn.SiLU(), nn.ELU(), nn.Softplus(), nn.Hardtanh(), nn.Tanh()],
    ids=lambda activation: type(activation).__name__,
)
def test_every_activation_may_stand_in_the_middle(activation: nn.Module) -> None:
    network, inputs = mlp((6, 5, 4)), normal(30, 6)
    result = rebuilt(network, inputs, activation=activation)
    assert verify(network, result.network, inputs).relative_error <= 1e-7


def test_sigmoid_is_as_exact_as_its_offset_allows() -> None:
    network, inputs = mlp((6, 5, 4)), normal(30, 6)
    result = rebuilt(network, inputs, activation=nn.Sigmoid())
    assert verify(network, result.network, inputs).relative_error <= 1e-5


@pytest.mark.parametrize(
    "features",
    [
        "he_normal",
        "he_uniform",
        "orthogonal",
        "sparse_he_normal",
        "id_cond",
        "ortho_cond",
        "fast_ortho_cond",
        "kron_normal",
    ],
)
def test_every_distribution_serves(features: str) -> None:
    network, inputs = Residual(), normal(8, 2, 6, 6)
    with torch.no_grad():
        network.double().train()(inputs)
    result = rebuilt(network, inputs, features=features, activation=nn.ReLU())
    assert verify(network, result.network, inputs).relative_error <= EXACT
    assert len(result.layers) == 3
    assert result.network.shared is result.network.again
    assert features in str(result)


def test_the_target_is_not_modified() -> None:
    network, inputs = Residual().double().eval(), normal(8, 2, 6, 6)
    before = copy.deepcopy(network.state_dict())
    reconstruct(network, inputs)
    assert isinstance(network.first, nn.Conv2d)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_seed_storage_gives_the_same_bits_as_dense_storage() -> None:
    network, inputs = mlp((6, 5, 4)), normal(30, 6)
    dense = rebuilt(network, inputs, activation=nn.ReLU()).network
    seeded = rebuilt(network, inputs, activation=nn.ReLU(), storage="seed").network
    assert torch.equal(dense(inputs), seeded(inputs))
    assert not any(name.endswith(("left", "right")) for name, _ in seeded.named_buffers())


def test_chunks_do_not_change_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    network, inputs = Residual(), normal(8, 2, 6, 6)
    result = rebuilt(network, inputs)
    whole = result.network(inputs)
    monkeypatch.setattr("onlynorm.frozen.pair.CHUNK_BYTES", 40_000)
    assert torch.allclose(result.network(inputs), whole, rtol=1e-10, atol=1e-10)


def test_unbatched_images_and_leading_axes_are_taken_as_the_layer_took_them() -> None:
    conv, linear = nn.Conv2d(2, 3, 3), nn.Linear(4, 2)
    image, rows = normal(2, 6, 6), normal(3, 5, 4)
    made = rebuilt(nn.Sequential(conv), normal(8, 2, 6, 6)).network
    assert made(image).shape == conv(image).shape
    wanted = linear.double()(rows).detach()
    made = rebuilt(nn.Sequential(linear), rows).network
    assert torch.allclose(made(rows), wanted, rtol=0, atol=1e-9 * float(wanted.abs().max()))


def test_inputs_that_leave_the_range_are_counted() -> None:
    network, inputs = mlp((6, 5, 4)), normal(30, 6)
    result = rebuilt(network, inputs, activation=nn.ReLU())
    assert verify(network, result.network, 10.0 * inputs).outside > 0.9


def test_a_changed_frozen_weight_is_noticed() -> None:
    network, inputs = mlp((6, 5, 4)), normal(30, 6)
    result = rebuilt(network, inputs)
    block = result.network[0]
    assert isinstance(block, NormOnlyBlock)
    block.map(0).right[3, 2] += 1e-9
    assert not verify(network, result.network, inputs).is_reproducible


def test_only_norms_are_parameters_of_a_block() -> None:
    result = rebuilt(mlp((6, 5, 4)), normal(30, 6))
    names = {name for name, _ in result.network.named_parameters()}
    assert names == {f"{i}.{n}.{p}" for i in (0, 2) for n in ("first_norm", "second_norm") for p in ("weight", "bias")}


def test_folded_statistics_leave_the_function_alone() -> None:
    norm = nn.BatchNorm1d(3, dtype=torch.float64).eval()
    scale, shift, x = normal(3), normal(3, seed=1), normal(5, 3, seed=2)
    set_affine(norm, scale, shift, mean=normal(3, seed=3), variance=normal(3, seed=4).square())
    assert torch.allclose(norm(x), scale * x + shift, rtol=1e-12, atol=1e-12)
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(affine(norm), (scale, shift), strict=True))


def test_what_cannot_be_swapped_is_listed_or_refused() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.attention = nn.MultiheadAttention(4, 2)
            self.norm = nn.LayerNorm(4)
            self.head = nn.Linear(4, 2)

    found = find_layers(Mixed())
    assert [layer.name for layer in found.layers] == ["head"]
    assert [item.name for item in found.left] == ["embed", "attention"]
    with pytest.raises(ConversionError, match=r"got 2 other modules.*Leave strict out"):
        find_layers(Mixed(), strict=True)
    with pytest.raises(ConversionError, match=r"at least one Linear or Conv layer; got none"):
        find_layers(nn.ReLU())


def test_bad_input_is_refused() -> None:
    network, inputs = mlp((6, 5, 4)).double(), normal(30, 6)
    with pytest.raises(ConversionError, match=r"float32 or float64 model; got torch.float16.*model.float"):
        reconstruct(copy.deepcopy(network).half(), inputs)
    with pytest.raises(ValueRangeError, match=r"evaluation mode.*network.eval"):
        reconstruct(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), inputs)
    with pytest.raises(ValueRangeError, match=r"batch of finite inputs"):
        reconstruct(network, inputs / 0.0)
    broken = copy.deepcopy(network)
    with torch.no_grad():
        broken[0].weight[0, 0] = torch.nan
    with pytest.raises(ValueRangeError, match=r"NaN or infinity in the weight.*before the training diverged"):
        reconstruct(broken, inputs)
    with pytest.raises(ShapeError, match=r"one tensor of the same shape.*return their logits"):
        verify(network, nn.Linear(6, 3), inputs)


def test_a_batch_of_one_sample_still_calibrates() -> None:
    network = mlp((6, 5, 4))
    result = rebuilt(network, normal(1, 6), activation=nn.ReLU())
    assert verify(network, result.network, normal(1, 6)).relative_error <= EXACT


def test_float32_networks_stay_float32() -> None:
    network, inputs = mlp((6, 5, 4)).eval(), normal(30, 6).float()
    result = reconstruct(network, inputs, Wide(activation=nn.ReLU()))
    check = verify(network, result.network, inputs)
    assert next(result.network.parameters()).dtype == torch.float32
    assert check.relative_error <= 1e-3
    assert check.agreement == 1.0
