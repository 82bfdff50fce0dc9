"""Layers rebuilt by many narrow frozen layers with skips: exact at every width, and honest where they are not."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rebuilding import reconstruct_with
from tensors import normal
from torch import Tensor, nn

from onlynorm import Deep
from onlynorm.errors import AccuracyWarning, ConversionError, ToleranceError, ValueRangeError
from onlynorm.frozen.sequence import DeepBlock
from onlynorm.intervals.tensor import Box
from onlynorm.models import mlp
from onlynorm.modules import find_layers
from onlynorm.modules.affine import affine
from onlynorm.reconstruction import Settings, collapse, reconstruct, verify
from onlynorm.reconstruction.constructions.deep import estimate
from onlynorm.reconstruction.ranges import count_outside

EXACT = 1e-9
"""What every default must reach; the law aims the default excess at 1e-11."""
ACTIVATIONS = [None, nn.ReLU(), nn.LeakyReLU(0.1)]


def linear(out: int, inp: int, *, seed: int = 3) -> nn.Sequential:
    layer = nn.Linear(inp, out, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(normal(out, inp, seed=seed) / inp**0.5)
        layer.bias.copy_(normal(out, seed=seed + 1))
    return nn.Sequential(layer).eval()


def deep(network: nn.Module, inputs: Tensor, **choices: Any) -> tuple[nn.Module, DeepBlock]:
    """The rebuilt network and its first block."""
    made = reconstruct_with(network.double().eval(), inputs, construction="deep", **choices).network
    return made, next(block for block in made.modules() if isinstance(block, DeepBlock))


@pytest.mark.parametrize("count", range(1, 17))
def test_sixteen_dimensions_are_exact_for_every_k(count: int) -> None:
    target, inputs = linear(16, 16), normal(40, 16)
    made, block = deep(target, inputs, inputs_per_slice=count, features="orthogonal", activation=nn.ReLU())
    check = verify(target, made, inputs)
    assert check.relative_error <= EXACT
    assert check.outside == 0.0
    assert check.is_reproducible
    assert len(block.layers) == math.ceil(16 / count)
    assert verify(target, collapse(made), inputs).relative_error <= EXACT


@pytest.mark.slow
def test_sixty_four_dimensions_are_exact_at_k_one_and_excess_four() -> None:
    target, inputs = linear(64, 64), normal(64, 64)
    result = reconstruct(target, inputs, Deep(features="orthogonal", excess=4.0, activation=nn.ReLU()))
    assert result.layers[0].n_features == 64 * 256
    assert result.layers[0].residual <= EXACT
    assert verify(target, result.network, inputs).relative_error <= EXACT


@given(
    st.integers(1, 9), st.integers(1, 9), st.integers(1, 10), st.integers(0, 2**32), st.sampled_from(ACTIVATIONS)
)  # fmt: skip
@settings(max_examples=15)
def test_layers_of_any_shape_are_exact(out: int, inp: int, count: int, seed: int, activation: nn.Module | None) -> None:
    target, inputs = linear(out, inp, seed=seed % 1000), normal(20, inp)
    made, block = deep(target, inputs, inputs_per_slice=count, seed=seed, activation=activation)
    assert verify(target, made, inputs).relative_error <= EXACT
    assert [one.shape[1] for one in block.layers[:-1]] == [min(count, inp)] * (len(block.layers) - 1)
    assert sum(one.shape[1] for one in block.layers) == inp


@pytest.mark.parametrize(
    "activation",
    [nn.ReLU(), nn.SELU(), nn.PReLU(), nn.GELU(), nn.SiLU(), nn.Softplus(), nn.Hardtanh(), nn.Tanh(), nn.LogSigmoid()],
    ids=lambda activation: type(activation).__name__,
)
def test_activations_may_stand_between_the_layers(activation: nn.Module) -> None:
    target, inputs = linear(6, 7), normal(30, 7)
    made, block = deep(target, inputs, inputs_per_slice=2, activation=activation)
    check = verify(target, made, inputs)
    # The window of 1e-10 is shared by three activations, and their errors pass through layers of about unit gain.
    assert check.relative_error <= EXACT
    assert check.outside == 0.0
    has_other_gain = type(activation) not in (nn.ReLU, nn.SELU, nn.PReLU)
    assert (block.input_norm is not None) == has_other_gain


def test_norms_without_statistics_compute_the_same() -> None:
    target, inputs = linear(6, 7), normal(30, 7)
    made, _ = deep(target, inputs, inputs_per_slice=2, activation=nn.Tanh(), norms="affine")
    assert verify(target, made, inputs).relative_error <= EXACT


def test_sigmoid_is_as_exact_as_its_offset_allows() -> None:
    # Its slope of 1/4 beside an offset of 1/2 costs the window's smallness in digits.
    target, inputs = linear(6, 7), normal(30, 7)
    made, _ = deep(target, inputs, inputs_per_slice=2, activation=nn.Sigmoid())
    assert verify(target, made, inputs).relative_error <= 1e-6


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(3, 4, 3, stride=2, padding=1),
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.Conv2d(4, 5, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)),
        nn.Conv2d(2, 3, 3, padding="same", padding_mode="reflect"),
        nn.Conv2d(3, 2, 1, padding="valid"),
        nn.Conv3d(2, 2, 2, padding=1),
    ],
    ids=lambda layer: type(layer).__name__,
)
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh()], ids=["relu", "tanh"])
def test_convolutions_are_cut_by_channels(layer: nn.Module, activation: nn.Module) -> None:
    target = nn.Sequential(layer)
    inputs = normal(5, layer.in_channels, *(6,) * (layer.weight.ndim - 2))
    made, block = deep(target, inputs, activation=activation)
    assert verify(target, made, inputs).relative_error <= EXACT
    assert verify(target, collapse(made), inputs).relative_error <= EXACT
    assert len(block.layers) == layer.in_channels
    assert made(inputs[0]).shape == target(inputs[0]).shape


def test_a_whole_network_is_rebuilt_with_one_k_for_layers_of_all_widths() -> None:
    network, inputs = mlp((7, 12, 3, 5)), normal(30, 7)
    made, _ = deep(network, inputs, inputs_per_slice=4, activation=nn.ReLU())
    assert verify(network, made, inputs).relative_error <= EXACT


def test_the_layers_are_those_of_the_theorem() -> None:
    target, inputs = linear(3, 5), normal(10, 5)
    made, block = deep(target, inputs, inputs_per_slice=2, activation=nn.ReLU(), excess=2.0)
    n = 2 * 3 * 2
    W, W1 = block.layers[0].left(), block.layers[0].right()
    assert (W.shape, W1.shape) == ((3, n), (n, 2))
    values: Tensor | None = None
    for i, (one, x) in enumerate(zip(block.layers, inputs.split(2, 1), strict=True)):
        scale, shift = affine(block.norm(i))
        before = x @ W1.mT if values is None else (values + x @ one.right().mT) @ one.left().mT
        values = scale * before + shift
        values = values if i == 2 else torch.relu(values)
        assert before.shape == (10, n)
        assert i == 2 or bool((values > 0).all())
    assert torch.allclose(made(inputs), values @ W.mT, rtol=0, atol=1e-12)
    assert {name.split(".")[1] for name, _ in made.named_parameters()} == {"layer_norms"}


def test_target_columns_that_are_zero_do_not_erase_the_slices_before_them() -> None:
    target, inputs = linear(4, 6), normal(20, 6)
    with torch.no_grad():
        target[0].weight[:, 3:] = 0.0
        target[0].weight[1] = 0.0
    made, _ = deep(target, inputs, activation=nn.ReLU())
    assert verify(target, made, inputs).relative_error <= EXACT
    with torch.no_grad():
        target[0].weight.zero_()
    result = reconstruct(target, inputs, Deep())
    assert result.layers[0].residual <= EXACT
    assert not result.layers[0].shortfall
    assert verify(target, result.network, inputs).relative_error <= EXACT


@pytest.mark.parametrize("activation", [None, nn.ReLU(), nn.Tanh()], ids=["none", "relu", "tanh"])
@pytest.mark.parametrize("layer", [nn.Linear(7, 5), nn.Conv2d(4, 3, 3)], ids=["linear", "conv"])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_the_estimate_counts_what_is_built(layer: nn.Module, activation: nn.Module | None, count: int) -> None:
    target = nn.Sequential(layer)
    costs = estimate(
        find_layers(target).layers[0], Deep(inputs_per_slice=count, activation=activation), Settings()
    )  # fmt: skip
    made, block = deep(
        target,
        normal(4, *((7,) if layer.weight.ndim == 2 else (4, 5, 5))),
        inputs_per_slice=count,
        activation=activation,
    )
    assert costs.n_features == block.n_features
    assert costs.n_norm_parameters == sum(p.numel() for p in made.parameters())
    assert costs.n_frozen == block.n_frozen == sum(held.numel() for one in block.maps for held in one.stored_tensors())
    assert costs.equations == layer.weight.numel()
    assert not costs.note


def test_a_shortfall_is_predicted_and_reported_with_its_cure() -> None:
    target, inputs = linear(16, 16), normal(30, 16)
    options = Deep(features="orthogonal", excess=1.1)
    costs = estimate(find_layers(target).layers[0], options, Settings())
    assert costs.error > 1e-6
    assert costs.note == "cure: excess=1.5, or inputs_per_slice=2"
    with pytest.warns(AccuracyWarning, match=r"relative error .* at condition .*excess=1.5"):
        result = reconstruct(target, inputs, options)
    layer = result.layers[0]
    assert layer.residual > 1e-10
    assert layer.shortfall.endswith(costs.note)
    # What is reported is what the block does, up to the difference between a weight and its action on a batch.
    assert verify(target, result.network, inputs).relative_error == pytest.approx(layer.residual, rel=2.0)
    with pytest.raises(
        ToleranceError, match=r"needs a relative error of 1e-10.*cure: excess=1.5.*leave the tolerance out"
    ):
        reconstruct(target, inputs, options, tolerance=1e-10)
    for cure in ({"excess": 1.5}, {"inputs_per_slice": 2}):
        reconstruct(target, inputs, dataclasses.replace(options, **cure), tolerance=1e-10)


def test_too_few_features_leave_the_least_squares_error() -> None:
    target, inputs = linear(8, 8), normal(30, 8)
    result = reconstruct(target, inputs, Deep(inputs_per_slice=4, excess=0.75))
    assert 0.1 < result.layers[0].residual < 1.0
    assert "cure: excess=1.25" in result.layers[0].shortfall


def test_settings_make_the_same_block_again() -> None:
    for layer, shape in ((nn.Linear(5, 4), (5,)), (nn.Conv2d(3, 2, 3, padding=1), (3, 5, 5))):
        inputs = normal(9, *shape)
        _, block = deep(nn.Sequential(layer), inputs, inputs_per_slice=2, activation=nn.Tanh(), features="orthogonal")
        written = json.loads(json.dumps(block.settings()))
        for storage in ("dense", "seed"):
            again = DeepBlock.from_settings(written, activation=nn.Tanh(), storage=storage).eval()
            again.load_state_dict(block.state_dict())
            assert torch.equal(again(inputs), block(inputs))
            assert again.is_reproducible()
        assert again.sources() == block.sources()
        assert "slices of 2" in repr(block)


def test_seed_storage_gives_the_same_bits_and_keeps_no_frozen_weights() -> None:
    target, inputs = linear(4, 6), normal(20, 6)
    dense, _ = deep(target, inputs, inputs_per_slice=2, activation=nn.ReLU())
    seeded, block = deep(target, inputs, inputs_per_slice=2, activation=nn.ReLU(), storage="seed")
    assert torch.equal(dense(inputs), seeded(inputs))
    assert all(one.stored_tensors() == [] for one in block.maps)


def test_a_changed_frozen_weight_is_noticed() -> None:
    _, block = deep(linear(4, 6), normal(20, 6), inputs_per_slice=2)
    assert block.is_reproducible()
    block.maps[1].left[3, 2] += 1e-9
    assert not block.is_reproducible()


@pytest.mark.parametrize("count", [1, 6])
def test_leading_axes_are_taken_as_the_layer_took_them(count: int) -> None:
    target = linear(4, 6)
    rows = normal(3, 5, 6)
    made, _ = deep(target, rows, inputs_per_slice=count, activation=nn.ReLU())
    wanted = target(rows).detach()
    assert torch.allclose(made(rows), wanted, rtol=0, atol=EXACT * float(wanted.abs().max()))
    assert torch.allclose(made(rows[0, 0]), wanted[0, 0], rtol=0, atol=EXACT * float(wanted.abs().max()))


def test_samples_that_leave_the_range_of_any_layer_are_counted_once() -> None:
    target, inputs = linear(5, 6), normal(20, 6)
    made, _ = deep(target, inputs, activation=nn.ReLU())
    far = inputs.clone()
    far[:3] *= 50.0
    assert verify(target, made, far).outside == pytest.approx(3 / 20)
    images = normal(4, 2, 5, 5)
    made, _ = deep(nn.Sequential(nn.Conv2d(2, 3, 3)), images, activation=nn.ReLU())
    images[1] *= 50.0
    with count_outside(made) as outside:
        made(images)
    assert outside.fraction == pytest.approx(1 / 4)


def test_without_an_activation_no_input_leaves_the_range() -> None:
    target, inputs = linear(5, 6), normal(20, 6)
    made, _ = deep(target, inputs)
    check = verify(target, made, 1000.0 * inputs)
    assert check.outside == 0.0
    assert check.relative_error <= EXACT


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh()], ids=["relu", "tanh"])
def test_certified_ranges_hold_at_every_corner_of_the_box(activation: nn.Module) -> None:
    target = linear(5, 6)
    box = Box(torch.full((6,), -1.0), torch.tensor([2.0, 1.0, 1.0, 1.0, 1.0, 3.0]))
    inside = normal(10, 6).clamp(-1.0, 1.0)
    made, block = deep(target, inside, box=box, activation=activation)
    corners = torch.cartesian_prod(*torch.stack([box.low, box.high], 1).double())
    check = verify(target, made, corners)
    assert check.outside == 0.0
    assert check.relative_error <= EXACT
    # The ranges are reached: some corner comes within a thousandth of the width to every bound.
    values: Tensor | None = None
    batch_, width = block.as_batch(corners), (block.high - block.low)[:-1]
    for i in range(len(block.layers) - 1):
        seen = block.normalised(i, block.hidden(i, batch_, values))
        assert bool((seen.amin(0) - block.low[i] <= 1e-3 * width[i]).all())
        assert bool((block.high[i] - seen.amax(0) <= 1e-3 * width[i]).all())
        values = block.activated(i, seen)


def test_float32_networks_stay_float32() -> None:
    network, inputs = mlp((6, 5, 4)).eval(), normal(30, 6).float()
    result = reconstruct(network, inputs, Deep(features="orthogonal", activation=nn.ReLU()))
    check = verify(network, result.network, inputs)
    assert next(result.network.parameters()).dtype == torch.float32
    assert check.relative_error <= 1e-3
    assert check.is_reproducible


def test_a_batch_of_one_sample_still_calibrates() -> None:
    target, inputs = linear(4, 6), normal(1, 6)
    made, _ = deep(target, inputs, activation=nn.ReLU())
    assert verify(target, made, inputs).relative_error <= EXACT


def test_what_cannot_be_cut_is_refused() -> None:
    grouped = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2))
    with pytest.raises(ConversionError, match=r"one group; got 2 at '0'.*Wide\(\)"):
        deep(grouped, normal(3, 4, 5, 5))
    with pytest.raises(ValueRangeError, match=r"random features; got 'id_cond'.*features='orthogonal'"):
        deep(linear(4, 6), normal(3, 6), features="id_cond")
    with pytest.raises(ValueRangeError, match=r"inputs_per_slice .*got 0. Try inputs_per_slice=1"):
        deep(linear(4, 6), normal(3, 6), inputs_per_slice=0)
    with pytest.raises(ValueRangeError, match=r"excess .* number in \(0, inf\); got -1"):
        Deep(excess=-1.0)
