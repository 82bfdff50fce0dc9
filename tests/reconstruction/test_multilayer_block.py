"""Layers and networks rebuilt from frozen layers in a row: the same function, known by seed and norms alone."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rebuilding import reconstruct_with, split_options
from tensors import normal
from torch import Tensor, nn

import onlynorm as on
from onlynorm import Multilayer, Ranges
from onlynorm.errors import InsufficientFeaturesError, ShapeError, ValueRangeError
from onlynorm.evidence.papers.burkholz2024.depth import tradeoff
from onlynorm.frozen.sequence import MultilayerBlock
from onlynorm.intervals import Box
from onlynorm.models import mlp
from onlynorm.modules.layers import find_layers
from onlynorm.reconstruction import Reconstruction, Settings, collapse, reconstruct, verify
from onlynorm.reconstruction.constructions.multilayer import draw_layers, estimate

EXACT = 1e-9
"""The solver leaves 1e-10 per layer; a few layers and their shifts may add up to ten times that."""


def rebuilt(network: nn.Module, inputs: Tensor, **options: object) -> Reconstruction:
    options = {"construction": "multilayer", **options}
    return reconstruct_with(network.double().eval(), inputs, **options)  # type: ignore[arg-type]


def fixed(layer: nn.Module) -> nn.Module:
    """The layer with weights that are the same in every run."""
    with torch.no_grad():
        for i, values in enumerate(layer.double().parameters()):
            values.copy_(0.3 * normal(*values.shape, seed=i))
    return layer


def one_block(layer: nn.Module, inputs: Tensor, **options: object) -> MultilayerBlock:
    block = rebuilt(nn.Sequential(fixed(layer)), inputs, **options).network[0]
    assert isinstance(block, MultilayerBlock)
    return block


# ------------------------------------------------------------------------------- the same function


@pytest.mark.parametrize(("n_layers", "activation"), [(2, nn.ReLU()), (4, None), (4, nn.ReLU()), (6, nn.ReLU())])
def test_a_network_is_rebuilt_by_layers_in_a_row(n_layers: int, activation: nn.Module | None) -> None:
    network, inputs = mlp((8, 7, 6, 5)), normal(40, 8)
    result = rebuilt(network, inputs, n_layers=n_layers, activation=activation)
    check = verify(network, result.network, inputs)
    assert check.relative_error <= EXACT
    assert check.outside == 0.0
    assert check.is_reproducible
    assert verify(network, collapse(result.network), inputs).relative_error <= EXACT


@given(st.lists(st.integers(1, 7), min_size=2, max_size=3), st.integers(2, 5), st.integers(0, 999))
@settings(max_examples=8)
def test_an_mlp_of_any_widths_is_rebuilt(widths: list[int], n_layers: int, seed: int) -> None:
    network, inputs = mlp(widths, seed=seed), normal(20, widths[0])
    result = rebuilt(network, inputs, n_layers=n_layers, seed=seed, features="orthogonal", activation=nn.ReLU())
    assert verify(network, result.network, inputs).relative_error <= EXACT


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(3, 4, 3, stride=2, padding=1),
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2),
        nn.Conv2d(2, 3, 3, padding="same", padding_mode="reflect"),
        nn.Conv2d(3, 3, 3, padding=1, groups=3),
        nn.Conv2d(3, 2, 1, padding="valid"),
        nn.Conv3d(2, 2, 2, padding=1),
        nn.Linear(5, 3),
    ],
    ids=lambda layer: type(layer).__name__,
)
@pytest.mark.parametrize("activation", [None, nn.ReLU()])
def test_every_kind_of_layer_is_rebuilt(layer: nn.Module, activation: nn.Module | None) -> None:
    axes = {"Linear": 0, "Conv1d": 1, "Conv2d": 2, "Conv3d": 3}[type(layer).__name__]
    inputs = normal(6, 5 if axes == 0 else layer.in_channels, *(7,) * axes)
    target = nn.Sequential(fixed(layer))
    result = rebuilt(target, inputs, activation=activation)
    assert verify(target, result.network, inputs).relative_error <= EXACT
    assert verify(target, collapse(result.network), inputs).relative_error <= EXACT


@pytest.mark.parametrize(
    ("activation", "error"),
    [(nn.LeakyReLU(0.1), EXACT), (nn.GELU(), EXACT), (nn.Hardtanh(), EXACT), (nn.Tanh(), EXACT), (nn.Sigmoid(), 1e-6)],
    ids=lambda value: type(value).__name__,
)
def test_every_activation_may_stand_between_the_layers(activation: nn.Module, error: float) -> None:
    network, inputs = mlp((6, 5, 4)), normal(30, 6)
    result = rebuilt(network, inputs, n_layers=4, activation=activation)
    assert verify(network, result.network, inputs).relative_error <= error


@pytest.mark.parametrize("features", ["he_uniform", "orthogonal", "sparse_he_normal"])
def test_every_random_distribution_serves(features: str) -> None:
    network, inputs = mlp((9, 8)), normal(30, 9)
    result = rebuilt(network, inputs, features=features, activation=nn.ReLU())
    assert verify(network, result.network, inputs).relative_error <= EXACT


def test_constants_do_not_grow_with_the_layers() -> None:
    block = one_block(nn.Linear(8, 8), normal(40, 8), n_layers=10, features="orthogonal", activation=nn.ReLU())
    # A shift is at most half a range; passed on without being taken away, they would double from layer to layer.
    size = torch.maximum(block.low.abs(), block.high.abs()) / (block.high - block.low)
    assert float(size.max()) <= 10.0


def test_float32_networks_stay_float32() -> None:
    network, inputs = mlp((8, 7, 6)).eval(), normal(40, 8).float()
    result = reconstruct(network, inputs, Multilayer(n_layers=6, activation=nn.ReLU()))
    check = verify(network, result.network, inputs)
    assert next(result.network.parameters()).dtype == torch.float32
    assert check.relative_error <= 1e-3
    assert check.is_reproducible


def test_certified_ranges_hold_for_every_corner_of_the_box() -> None:
    network, inputs = mlp((4, 3)).double().eval(), normal(30, 4).sigmoid()
    box = Box(torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64))
    result = reconstruct(network, inputs, Multilayer(activation=nn.ReLU()), ranges=Ranges(box=box))
    corners = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * 4)
    check = verify(network, result.network, corners)
    assert check.outside == 0.0
    assert check.relative_error <= EXACT


def test_inputs_that_leave_the_range_are_counted_in_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    network, inputs = mlp((6, 5)), normal(30, 6)
    result = rebuilt(network, inputs, activation=nn.ReLU())
    monkeypatch.setattr("onlynorm.frozen.sequence.CHUNK_BYTES", 2000)
    mixed = torch.cat([inputs, 100.0 * inputs])
    assert verify(network, result.network, mixed).outside == pytest.approx(0.5)


# ------------------------------------------------------------------------------- the block


def test_settings_and_norms_make_the_same_block_again() -> None:
    layer, inputs = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), normal(6, 4, 7, 7)
    block = one_block(layer, inputs, n_layers=4, activation=nn.ReLU())
    again = MultilayerBlock.from_settings(
        json.loads(json.dumps(block.settings())), activation=nn.ReLU(), storage="seed"
    ).eval()
    again.load_state_dict(block.state_dict())
    assert torch.equal(again(inputs), block(inputs))
    assert [str(one) for one in again.sources()] == [str(one) for one in block.sources()]


def test_a_saved_network_is_read_back(tmp_path: Path) -> None:
    network, inputs = mlp((6, 5, 4)), normal(30, 6)
    result = rebuilt(network, inputs, n_layers=4, activation=nn.ReLU())
    on.save(result, tmp_path / "net.safetensors")
    read = on.load(tmp_path / "net.safetensors", like=mlp((6, 5, 4)).double())
    assert torch.equal(read(inputs), result.network(inputs))


def test_seed_storage_gives_the_same_bits_as_dense_storage() -> None:
    network, inputs = mlp((6, 5, 4)), normal(30, 6)
    dense, seeded = (
        rebuilt(network, inputs, activation=nn.ReLU(), storage=storage).network for storage in ("dense", "seed")
    )
    assert torch.equal(dense(inputs), seeded(inputs))
    assert not any("weight" in name for name, _ in seeded.named_buffers())


def test_parts_of_the_batch_do_not_change_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, inputs = nn.Conv2d(3, 4, 3, padding=1), normal(9, 3, 6, 6)
    whole_block = one_block(layer, inputs, activation=nn.ReLU())
    whole = whole_block(inputs)
    monkeypatch.setattr("onlynorm.frozen.sequence.CHUNK_BYTES", 50_000)
    assert len(whole_block.samples(whole_block.padded(inputs))) > 2
    assert torch.allclose(whole_block(inputs), whole, rtol=1e-10, atol=1e-10)
    assert torch.allclose(one_block(layer, inputs, activation=nn.ReLU())(inputs), whole, rtol=1e-9, atol=1e-9)


def test_unbatched_images_and_leading_axes_are_taken_as_the_layer_took_them() -> None:
    conv, linear = fixed(nn.Conv2d(2, 3, 3)), fixed(nn.Linear(4, 2))
    image, rows = normal(2, 6, 6), normal(3, 5, 4)
    for layer, x, calibration in ((conv, image, normal(8, 2, 6, 6)), (linear, rows, rows)):
        wanted = layer(x).detach()
        made = one_block(layer, calibration)(x)
        assert torch.allclose(made, wanted, rtol=0, atol=EXACT * float(wanted.abs().max()))


def test_only_norms_are_parameters_and_a_changed_weight_is_noticed() -> None:
    block = one_block(nn.Linear(6, 5), normal(30, 6), n_layers=3)
    assert {name for name, _ in block.named_parameters()} == {
        f"layer_norms.{i}.{part}" for i in range(3) for part in ("weight", "bias")
    }
    assert block.is_reproducible()
    weight = block.weight(1)
    weight[2, 3] += 1e-9
    assert not block.is_reproducible()
    assert "3 layers" in repr(block)


# ------------------------------------------------------------------------------- what it takes


def test_the_estimate_counts_what_is_built() -> None:
    layer, inputs = nn.Conv2d(4, 6, 3, groups=2), normal(6, 4, 7, 7)
    construction, _ = split_options(construction="multilayer", n_layers=4)
    (target,) = find_layers(nn.Sequential(layer)).layers
    costs, block = estimate(target, construction, Settings()), one_block(layer, inputs, n_layers=4)
    assert costs.equations == layer.weight.numel()
    assert costs.n_features == block.n_features
    assert costs.n_norm_parameters == sum(p.numel() for p in block.parameters())
    assert costs.n_frozen == sum(block.weight(i).numel() for i in range(4)) == costs.multiplications
    assert costs.method == "dense"
    assert costs.note == ""
    assert costs.error == 1e-10


def test_the_estimate_tells_of_too_few_features() -> None:
    construction, _ = split_options(construction="multilayer", n_layers=3, excess=0.5, features="orthogonal")
    (target,) = find_layers(nn.Sequential(nn.Linear(40, 40))).layers
    costs = estimate(target, construction, Settings())
    assert costs.method == "matrix-free"
    assert "features too few" in costs.note
    assert 0.5 < costs.error < 1.0


def test_deeper_sources_are_narrower_and_dearer() -> None:
    found = tradeoff((32, 32, 3, 3), measured=(8, 8))
    assert [row.n_layers for row in found.rows] == [2, 3, 4, 6, 10]
    widths = [row.width for row in found.rows]
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] == math.ceil((1.1 * (9216 + 10) - 32) / 9)
    # The L that scales cost times the excess, and rounding, two numbers each.
    parameters = [row.n_norm_parameters for row in found.rows]
    assert max(parameters) - min(parameters) <= 2 * (1.1 * 8 + 1)
    assert found.rows[1].n_multiplications > 2 * found.rows[0].n_multiplications
    assert all(row.residual is not None and row.residual <= 1e-10 for row in found.rows)
    assert "10 layers: 1,125 wide" in str(found)
    assert tradeoff((4, 4), (3,)).rows[0].seconds is None


def test_the_layers_are_independent_and_named_by_the_target() -> None:
    construction, _ = split_options(construction="multilayer", n_layers=4)
    (target,) = find_layers(nn.Sequential(nn.Conv1d(4, 4, 3, groups=2))).layers
    drawn = draw_layers(target, construction, Settings())
    assert [one.layer for one in drawn[1]] == [f"0/group 1/source {i}" for i in (1, 2, 3, 4)]
    assert not torch.equal(drawn[0][1].right(), drawn[1][1].right())
    assert not torch.equal(drawn[0][1].right(), drawn[0][2].right())


def test_bad_options_are_refused() -> None:
    network, inputs = mlp((6, 5)), normal(30, 6)
    with pytest.raises(ValueRangeError, match=r"n_layers .* integer.*; got 1"):
        rebuilt(network, inputs, n_layers=1)
    with pytest.raises(ValueRangeError, match=r"multilayer construction needs random features; got 'id_cond'"):
        rebuilt(network, inputs, features="id_cond")
    with pytest.raises(InsufficientFeaturesError, match=r"needs 146 gammas for 144 equations.*Widen the hidden layers"):
        rebuilt(mlp((12, 12)), normal(30, 12), n_layers=3, excess=0.5, tolerance=1e-10)
    with pytest.raises(ShapeError, match=r"shape needs 2 to 5 positive integers, \(out, inp"):
        tradeoff((5,))
