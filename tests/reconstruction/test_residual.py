"""Source blocks with a frozen skip: the norm inside the branch or outside the sum, at either width."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rebuilding import reconstruct_with, split_options
from tensors import normal
from torch import Tensor, nn

from onlynorm.errors import InsufficientFeaturesError, ValueRangeError
from onlynorm.frozen.residual import SkipBlock
from onlynorm.models import mlp
from onlynorm.modules import find_layers
from onlynorm.modules.affine import affine
from onlynorm.modules.layers import layer_options
from onlynorm.reconstruction import Settings, collapse, verify
from onlynorm.reconstruction.constructions.residual import estimate

EXACT = 1e-9
"""The solver leaves 1e-10 per layer; a few layers and their shifts may add up to ten times that."""

LAYERS = {
    "linear": lambda: nn.Linear(6, 5),
    "square": lambda: nn.Linear(5, 5, bias=False),
    "conv1d": lambda: nn.Conv1d(3, 4, 3, stride=2, padding=1),
    "same": lambda: nn.Conv2d(3, 3, (3, 5), padding="same", padding_mode="reflect"),
    "mixed": lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2),
    "grouped": lambda: nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=2),
    "conv3d": lambda: nn.Conv3d(2, 2, 2, padding=1, padding_mode="circular"),
}
CHOICES: dict[str, dict[str, Any]] = {
    "maximum": {},
    "linear": {"activation": None},
    "minimum": {"width": "minimum"},
    "larger": {"source_kernel": 5},
    "id_cond": {"features": "id_cond", "kernel": "second"},
}
IDENTITY = ("square", "same", "grouped")
"""The layers whose inputs keep their shape."""


def layer_and_inputs(name: str) -> tuple[nn.Sequential, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(len(name))
        layer = LAYERS[name]()
    shape = layer.weight.shape
    inputs = normal(5, shape[1] * getattr(layer, "groups", 1), *(7 if len(shape) < 5 else 4,) * (len(shape) - 2))
    return nn.Sequential(layer).double().eval(), inputs


def rebuilt(network: nn.Module, inputs: Tensor, **choices: Any) -> Any:
    return reconstruct_with(network.double().eval(), inputs, construction="residual", **choices)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("skip", ["inside", "outside"])
@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES)
def test_every_layer_is_rebuilt(name: str, skip: str, choices: dict[str, Any]) -> None:
    network, inputs = layer_and_inputs(name)
    choices = {"activation": nn.ReLU(), **choices}
    made = rebuilt(network, inputs, skip=skip, **choices)
    check = verify(network, made.network, inputs)
    assert check.relative_error <= EXACT
    assert check.is_reproducible
    assert check.outside == 0.0
    assert made.layers[0].residual <= EXACT
    block = made.network[0]
    assert isinstance(block, SkipBlock)
    assert (block.skips == []) == (name in IDENTITY)

    plain = collapse(made.network)
    assert verify(network, plain, inputs).relative_error <= EXACT
    if "source_kernel" not in choices:
        assert layer_options(plain[0]) == layer_options(network[0])

    construction, _ = split_options(construction="residual", skip=skip, **choices)
    costs = estimate(find_layers(network).layers[0], construction, Settings())
    assert costs.n_features == block.n_features
    assert costs.n_norm_parameters == sum(p.numel() for p in block.parameters())
    if block.skips or name == "square":
        n_skip = sum(one.right().numel() for one in block.skips)
        assert costs.n_frozen == n_skip + sum(one.n_frozen for one in block.features)

    for storage in ("dense", "seed"):
        words = json.loads(json.dumps(block.settings()))
        again = SkipBlock.from_settings(words, activation=choices["activation"], storage=storage)
        again.load_state_dict(block.state_dict())
        assert torch.equal(again(inputs), block(inputs))


@given(
    widths=st.lists(st.integers(1, 8), min_size=2, max_size=4),
    seed=st.integers(0, 2**32),
    skip=st.sampled_from(["inside", "outside"]),
    activation=st.sampled_from([None, nn.ReLU()]),
)
@settings(max_examples=16)
def test_an_mlp_of_any_widths_is_rebuilt(widths: list[int], seed: int, skip: str, activation: nn.Module | None) -> None:
    network, inputs = mlp(widths, seed=seed % 1000), normal(20, widths[0])
    made = rebuilt(network, inputs, seed=seed, skip=skip, activation=activation)
    assert verify(network, made.network, inputs).relative_error <= EXACT


@pytest.mark.parametrize("width", ["maximum", "minimum"])
@torch.no_grad()
def test_the_norm_outside_scales_branch_and_skip_alike(width: str) -> None:
    network, inputs = layer_and_inputs("linear")
    block = rebuilt(network, inputs, skip="outside", width=width).network[0]
    features = block.features[0]
    assert features.n_features == (30 - 5 + 1 if width == "minimum" else 38)
    gamma, _ = affine(block.first_norm)
    g2, _ = affine(block.second_norm)
    T, S = network[0].weight, block.skips[0].right()
    branch = features.left() @ (gamma[:, None] * features.right())
    assert torch.allclose(g2[:, None] * (branch + S), T, rtol=0, atol=EXACT)
    # Without the skip the branch makes something else: the skip is really there.
    assert float((g2[:, None] * branch - T).norm() / T.norm()) > 0.1
    if width == "maximum":
        assert torch.allclose(g2, T.norm(dim=1) / S.norm(dim=1), rtol=1e-9)


def test_inside_the_skip_passes_as_it_is() -> None:
    network, inputs = layer_and_inputs("linear")
    block = rebuilt(network, inputs, skip="inside").network[0]
    block.second_norm.weight.data.zero_()
    block.second_norm.bias.data.zero_()
    assert torch.allclose(block(inputs), inputs @ block.skips[0].right().mT, rtol=0, atol=1e-12)


@pytest.mark.parametrize("skip", ["inside", "outside"])
@pytest.mark.parametrize("size", [1e-6, 1e6])
def test_targets_much_smaller_or_larger_than_the_skip_are_rebuilt(skip: str, size: float) -> None:
    network, inputs = layer_and_inputs("square")
    with torch.no_grad():
        network[0].weight *= size
    made = rebuilt(network, inputs, skip=skip, activation=nn.ReLU(), tolerance=1e-8)
    assert made.layers[0].residual <= 1e-8
    # Inside, the branch must cancel a skip that is a million times larger than what is left.
    assert verify(network, made.network, inputs).relative_error <= (1e-6 if skip == "inside" else EXACT)


@pytest.mark.parametrize("skip", ["inside", "outside"])
@pytest.mark.parametrize("width", ["maximum", "minimum"])
def test_outputs_that_are_zero_are_rebuilt(skip: str, width: str) -> None:
    layer, inputs = nn.Linear(6, 5), normal(20, 6)
    with torch.no_grad():
        layer.weight[[0, 3]] = 0.0
    network = nn.Sequential(layer)
    made = rebuilt(network, inputs, skip=skip, width=width, activation=nn.ReLU())
    assert verify(network, made.network, inputs).relative_error <= EXACT
    scale, _ = affine(made.network[0].second_norm)
    if skip == "outside":
        assert (scale == 0).tolist() == [True, False, False, True, False]
    nn.init.zeros_(layer.weight)
    made = rebuilt(network, inputs, skip=skip, width=width, activation=nn.ReLU(), tolerance=1e-9)
    assert torch.allclose(made.network(inputs), layer.bias.expand(20, 5), rtol=0, atol=1e-12)


@pytest.mark.parametrize("activation", [nn.GELU(), nn.SELU(), nn.LogSigmoid(), nn.LeakyReLU(0.1)])
def test_every_activation_with_a_half_axis_serves_outside(activation: nn.Module) -> None:
    network, inputs = layer_and_inputs("linear")
    made = rebuilt(network, inputs, skip="outside", activation=activation)
    assert verify(network, made.network, inputs).relative_error <= EXACT


def test_other_activations_serve_inside_only() -> None:
    network, inputs = layer_and_inputs("linear")
    made = rebuilt(network, inputs, skip="inside", activation=nn.Tanh())
    assert verify(network, made.network, inputs).relative_error <= 1e-7
    with pytest.raises(ValueRangeError, match=r"half-axis.*got Tanh\(\). Use skip='inside'"):
        rebuilt(network, inputs, skip="outside", activation=nn.Tanh())


def test_features_with_scales_of_their_own_serve_inside_only() -> None:
    network, inputs = layer_and_inputs("linear")
    made = rebuilt(network, inputs, skip="inside", features="id_cond_minimal")
    assert verify(network, made.network, inputs).relative_error <= EXACT
    with pytest.raises(ValueRangeError, match=r"without a scale per output; got id_cond_minimal"):
        rebuilt(network, inputs, skip="outside", features="id_cond_minimal")


@pytest.mark.parametrize("skip", ["inside", "outside"])
@pytest.mark.parametrize("width", ["maximum", "minimum"])
@torch.no_grad()
def test_too_few_features_report_their_error_or_raise(skip: str, width: str) -> None:
    network, inputs = layer_and_inputs("linear")
    made = rebuilt(network, inputs, skip=skip, width=width, excess=0.7)
    layer = made.layers[0]
    assert re.search(r"\d+ more (dense )?features", layer.shortfall)
    plain = collapse(made.network)[0].weight
    error = float((plain - network[0].weight).norm() / network[0].weight.norm())
    assert layer.residual == pytest.approx(error, rel=1e-6)
    assert layer.residual > 0.01
    with pytest.raises(InsufficientFeaturesError, match=r"features"):
        rebuilt(network, inputs, skip=skip, width=width, excess=0.7, tolerance=1e-8)


def test_sparse_sources_have_dense_skips() -> None:
    network, inputs = mlp((12, 10, 12)), normal(20, 12)
    for skip in ("inside", "outside"):
        made = rebuilt(network, inputs, skip=skip, features="sparse_he_normal", activation=nn.ReLU())
        assert verify(network, made.network, inputs).relative_error <= EXACT
        assert bool((made.network[0].skips[0].right() != 0).all())


def test_samples_outside_the_range_are_counted() -> None:
    network, inputs = layer_and_inputs("conv1d")
    made = rebuilt(network, inputs, skip="outside", activation=nn.ReLU())
    assert verify(network, made.network, 20.0 * inputs).outside == 1.0


def test_unbatched_inputs_and_leading_axes_pass_the_skip_as_well() -> None:
    for name, inputs in (("square", normal(3, 4, 5)), ("linear", normal(2, 3, 6)), ("same", normal(3, 7, 7))):
        network, calibration = layer_and_inputs(name)
        made = rebuilt(network, calibration, skip="inside").network
        wanted = network(inputs).detach()
        assert torch.allclose(made(inputs), wanted, rtol=0, atol=EXACT * float(wanted.abs().max()))
