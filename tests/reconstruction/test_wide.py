"""Two frozen layers for one: at either width, with larger and sparse sources, exact or with the size of the error."""

from __future__ import annotations

import contextlib
import json
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rebuilding import reconstruct_with, split_options
from tensors import normal
from torch import Tensor, nn

from onlynorm import Ranges, Wide
from onlynorm.errors import (
    AccuracyWarning,
    InsufficientFeaturesError,
    ShapeError,
    ToleranceError,
    UnknownNameError,
    ValueRangeError,
)
from onlynorm.frozen.form import FrozenBlock
from onlynorm.models import mlp
from onlynorm.modules import find_layers
from onlynorm.modules.affine import affine
from onlynorm.reconstruction import Settings, reconstruct, verify
from onlynorm.reconstruction.constructions.wide import draw_groups, estimate

EXACT = 1e-9
"""The solver leaves 1e-10 per layer; a few layers and their shifts may add up to ten times that."""

LAYERS = {
    "linear": lambda: nn.Linear(5, 4),
    "conv1d": lambda: nn.Conv1d(3, 4, 3, stride=2, padding=1),
    "mixed": lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2),
    "reflect": lambda: nn.Conv2d(2, 3, 3, padding="same", padding_mode="reflect", bias=False),
    "circular": lambda: nn.Conv2d(2, 3, 3, padding=2, padding_mode="circular"),
    "depthwise": lambda: nn.Conv1d(3, 3, 3, padding=1, groups=3, padding_mode="replicate"),
    "conv3d": lambda: nn.Conv3d(2, 2, 2, padding=1),
}
CHOICES: dict[str, dict[str, Any]] = {
    "minimum": {"width": "minimum"},
    "minimum, linear": {"width": "minimum", "activation": None},
    "larger kernel": {"source_kernel": 4},
    "larger second kernel": {"source_kernel": 3, "kernel": "second"},
    "larger kernel, minimum": {"source_kernel": 3, "width": "minimum"},
    "id_cond_minimal": {"features": "id_cond_minimal", "width": "minimum"},
    "id_cond_minimal, larger second kernel": {"features": "id_cond_minimal", "source_kernel": 4, "kernel": "second"},
}


def layer_and_inputs(name: str) -> tuple[nn.Sequential, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(len(name))
        layer = LAYERS[name]()
    shape = layer.weight.shape
    inputs = normal(5, shape[1] * getattr(layer, "groups", 1), *(7 if len(shape) < 5 else 4,) * (len(shape) - 2))
    return nn.Sequential(layer).double().eval(), inputs


def rebuilt(network: nn.Module, inputs: Tensor, **choices: Any) -> Any:
    return reconstruct_with(network.double().eval(), inputs, **choices)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES)
def test_every_layer_is_rebuilt_as_chosen(name: str, choices: dict[str, Any]) -> None:
    network, inputs = layer_and_inputs(name)
    choices = {"activation": nn.ReLU(), **choices}
    made = rebuilt(network, inputs, **choices)
    check = verify(network, made.network, inputs)
    assert check.relative_error <= EXACT
    assert check.is_reproducible
    assert check.outside == 0.0
    assert made.layers[0].shortfall == ""
    block = made.network[0]
    assert verify(network, nn.Sequential(block.to_plain()), inputs).relative_error <= EXACT

    construction, _ = split_options(**choices)
    costs = estimate(find_layers(network).layers[0], construction, Settings())
    assert costs.n_features == block.n_features
    assert costs.n_norm_parameters == sum(p.numel() for p in block.parameters())
    assert costs.n_frozen == sum(one.n_frozen for one in block.sources())
    assert costs.equations == sum(one.equations for one in block.sources())
    # At square systems the predicted condition may promise little, but never nothing.
    assert costs.error <= 1e-6

    words = json.loads(json.dumps(block.settings()))
    again = type(block).from_settings(words, activation=choices["activation"], storage="seed")
    again.load_state_dict(block.state_dict())
    assert torch.equal(again(inputs), block(inputs))


@given(
    widths=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    seed=st.integers(0, 2**32),
    width=st.sampled_from(["maximum", "minimum"]),
    activation=st.sampled_from([None, nn.ReLU()]),
)
@settings(max_examples=16)
def test_an_mlp_of_any_widths_is_rebuilt(
    widths: list[int], seed: int, width: str, activation: nn.Module | None
) -> None:
    network, inputs = mlp(widths, seed=seed % 1000), normal(20, widths[0])
    made = rebuilt(network, inputs, seed=seed, activation=activation, width=width)
    assert verify(network, made.network, inputs).relative_error <= EXACT


def test_the_minimum_width_draws_one_feature_per_weight_less_one_per_output_but_one() -> None:
    layer = find_layers(nn.Conv2d(4, 6, 3, groups=2)).layers[0]
    construction, _ = split_options(width="minimum")
    assert [one.n_features for one in draw_groups(layer, construction, Settings())] == [3 * 18 - 3 + 1] * 2
    construction, _ = split_options(width="minimum", excess=2.0)
    assert [one.n_features for one in draw_groups(layer, construction, Settings())] == [2 * 3 * 18] * 2
    construction, _ = split_options(width="minimum", source_kernel=5)
    assert [one.n_features for one in draw_groups(layer, construction, Settings())] == [3 * 50 - 3 + 1] * 2


@pytest.mark.parametrize("features", ["he_normal", "id_cond_minimal"])
def test_outputs_that_are_zero_are_switched_off(features: str) -> None:
    layer, inputs = nn.Linear(6, 5), normal(20, 6)
    with torch.no_grad():
        layer.weight[[0, 3]] = 0.0
    network = nn.Sequential(layer).double()
    made = rebuilt(network, inputs, features=features, width="minimum", activation=nn.ReLU(), tolerance=1e-9)
    scale, _ = affine(made.network[0].second_norm)
    assert (scale == 0).tolist() == [True, False, False, True, False]
    assert verify(network, made.network, inputs).relative_error <= EXACT
    assert torch.equal(made.network(inputs)[:, 0], layer.bias.double()[0].expand(20))


@pytest.mark.parametrize("width", ["maximum", "minimum"])
def test_a_layer_of_zeros_is_rebuilt(width: str) -> None:
    layer, inputs = nn.Linear(4, 3), normal(10, 4)
    nn.init.zeros_(layer.weight)
    made = rebuilt(nn.Sequential(layer), inputs, width=width, activation=nn.ReLU(), tolerance=1e-9)
    assert torch.equal(made.network(inputs), layer.bias.expand(10, 3))


def test_too_few_features_give_the_least_squares_weight_and_its_error() -> None:
    layer, inputs = nn.Conv1d(3, 4, 3), normal(6, 3, 9)
    network = nn.Sequential(layer).double()
    made = rebuilt(network, inputs, excess=0.7, activation=nn.ReLU())
    block = made.network[0]
    features = block.features[0]
    M = torch.einsum("if,fj->ijf", features.left(), features.right()).flatten(0, 1)
    t = layer.weight.detach().reshape(-1, 1)
    best = M @ torch.linalg.lstsq(M, t).solution
    error = float((best - t).norm() / t.norm())
    assert made.layers[0].residual == pytest.approx(error, rel=1e-6)
    assert torch.allclose(block.to_plain().weight.reshape(-1, 1), best, rtol=0, atol=1e-8)
    assert verify(nn.Sequential(block.to_plain()), made.network, inputs).relative_error <= EXACT
    assert "more dense features make the system solvable" in made.layers[0].shortfall
    with pytest.raises(InsufficientFeaturesError, match=r"needs 36 features.*got 26.*tolerance"):
        rebuilt(network, inputs, excess=0.7, tolerance=1e-8)


def test_below_the_minimum_width_the_scales_of_the_outputs_stay_one() -> None:
    network, inputs = nn.Sequential(nn.Linear(6, 5)).double(), normal(20, 6)
    made = rebuilt(network, inputs, excess=0.8, width="minimum")
    # 24 features and 5 scales fall one short of 30 equations and one normalisation.
    assert "minimum width needs 2 more features" in made.layers[0].shortfall
    assert made.layers[0].residual == rebuilt(network, inputs, excess=0.8).layers[0].residual
    with pytest.raises(InsufficientFeaturesError, match=r"minimum width needs 26 features.*Draw 2 more"):
        rebuilt(network, inputs, excess=0.8, width="minimum", tolerance=1e-8)


@given(st.lists(st.integers(2, 9), min_size=2, max_size=3), st.integers(0, 2**32), st.sampled_from([None, nn.ReLU()]))
@settings(max_examples=12)
def test_sparse_features_are_exact_or_say_what_they_miss(
    widths: list[int], seed: int, activation: nn.Module | None
) -> None:
    network, inputs = mlp(widths, seed=seed % 1000), normal(20, widths[0])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        made = rebuilt(network, inputs, features="sparse_he_normal", density=0.5, seed=seed, activation=activation)
    for layer in made.layers:
        assert (layer.residual <= 1e-9) == (layer.shortfall == "")
    assert bool(warned) == any(layer.shortfall for layer in made.layers)
    if not any(layer.shortfall for layer in made.layers):
        assert verify(network, made.network, inputs).relative_error <= EXACT


@pytest.mark.parametrize(("features", "activation"), [("sparse_he_normal", nn.ReLU()), ("er_normal", None)])
@pytest.mark.parametrize("width", ["maximum", "minimum"])
def test_half_of_the_weights_are_enough_for_layers_that_are_not_tiny(
    features: str, width: str, activation: nn.Module | None
) -> None:
    # At the minimum width every feature is needed: one whose half of 16 weights are all zero would be missed.
    for seed in range(2):
        network, inputs = mlp((16, 18, 15), seed=seed), normal(20, 16)
        made = rebuilt(network, inputs, features=features, width=width, seed=seed, activation=activation)
        assert verify(network, made.network, inputs).relative_error <= EXACT


@pytest.mark.parametrize("kernel", ["first", "second"])
def test_sparse_features_that_cannot_reach_the_target_name_weights_and_density(kernel: str) -> None:
    network, inputs = nn.Sequential(nn.Conv1d(4, 4, 3, groups=2)).double(), normal(8, 4, 9)
    choices: dict[str, Any] = {"features": "er_normal", "density": 0.2, "kernel": kernel}
    with pytest.warns(AccuracyWarning, match=r"1 of 1 fell short. '0': residual .* 0.2"):
        made = rebuilt(network, inputs, **choices)
    layer = made.layers[0]
    assert layer.residual > 1e-3
    assert f"layer '0' fell short: residual {layer.residual:.1e}" in made.warnings[0]
    assert f"residual {layer.residual:.1e}" in layer.shortfall
    assert "weights have no feature at density 0.2: (output, input, kernel position)" in layer.shortfall
    enough = float(layer.shortfall.split("with this seed density ")[1].split()[0])
    with pytest.raises(InsufficientFeaturesError, match=r"'0/group 0' needs a feature for every weight; \d+ of 12"):
        rebuilt(network, inputs, tolerance=1e-8, **choices)
    # The density named is that of the worst group; the other may need a little more.
    assert rebuilt(network, inputs, **{**choices, "density": min(1.0, enough + 0.3)}).layers[0].residual <= 1e-9


def test_sparse_id_cond_features_name_the_weights_that_are_missing() -> None:
    network, inputs = nn.Sequential(nn.Linear(5, 4)).double(), normal(20, 5)
    layer = rebuilt(network, inputs, features="id_cond", density=0.7).layers[0]
    assert "weights have no feature at density 0.7: (output, input)" in layer.shortfall
    with pytest.raises(InsufficientFeaturesError, match=r"needs a feature for every weight.*Raise the density"):
        rebuilt(network, inputs, features="id_cond", density=0.7, tolerance=1e-8)
    construction, _ = split_options(features="id_cond", density=0.7)
    costs = estimate(find_layers(network).layers[0], construction, Settings())
    assert "without a feature" in costs.note
    assert costs.error > 0.1


def test_choices_that_do_not_fit_are_refused() -> None:
    network, inputs = nn.Sequential(nn.Conv1d(2, 3, 3)).double(), normal(6, 2, 9)
    with pytest.raises(ShapeError, match=r"source_kernel .*the target's kernel \(3,\).*got 2"):
        rebuilt(network, inputs, source_kernel=2)
    with pytest.raises(ValueRangeError, match=r"needs random features or id_cond_minimal; got ortho_cond"):
        rebuilt(network, inputs, features="ortho_cond", width="minimum")
    with pytest.raises(ValueRangeError, match=r"needs the kernel in the first frozen layer.*Leave kernel out"):
        rebuilt(network, inputs, width="minimum", kernel="second")
    reflecting = nn.Sequential(nn.Conv1d(2, 3, 3, padding=1, padding_mode="reflect")).double()
    with pytest.raises(ShapeError, match=r"'reflect' needs inputs larger than the padding; got .*4.* 4"):
        rebuilt(reflecting, normal(6, 2, 4), source_kernel=9)
    with pytest.raises(ToleranceError, match=r"needs a relative residual of 1e-16"):
        rebuilt(nn.Sequential(nn.Linear(20, 20)), normal(30, 20), tolerance=1e-16)


def test_a_network_of_convolutions_takes_every_choice_at_once() -> None:
    network = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 1, stride=2), nn.Flatten(), nn.Linear(36, 3)
    )
    inputs = normal(8, 2, 6, 6)
    made = rebuilt(network, inputs, source_kernel=(3, 4), width="minimum", activation=nn.LeakyReLU(0.1), storage="seed")
    assert verify(network, made.network, inputs).relative_error <= EXACT
    assert all(isinstance(made.network[i], FrozenBlock) for i in (0, 2, 4))
    assert verify(network, made.network, 20.0 * inputs).outside == 1.0


def test_windows_are_chosen_for_the_precision_of_the_network() -> None:
    # Half-width h of a sigmoid's window: the cubic term costs h^2 / 12, rounding its offset eps / h. Both are about
    # eps^(2/3) = 2.4e-5 at the best h, times the shares of some 20 features and three layers; a window made for float64
    # drowns in rounding.
    network, inputs = mlp((16, 24, 24, 10)).eval(), torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    errors = {}
    for precision in ("float64", None):
        warned = pytest.warns(AccuracyWarning, match=r"output differs") if precision else contextlib.nullcontext()
        with warned:
            result = reconstruct(network, inputs, Wide(activation=nn.Sigmoid()), ranges=Ranges(precision=precision))
        errors[precision] = verify(network, result.network, inputs).relative_error
    assert errors[None] <= 1e-2 < errors["float64"]
    with pytest.raises(UnknownNameError, match=r"precision.*'float16'"):
        reconstruct(network, inputs, ranges=Ranges(precision="float16"))
