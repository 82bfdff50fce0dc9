"""Whole networks: error budgets, networks of all kinds, folded norms, and boxes that certify ranges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rebuilding import Branches, X, net, reconstruct_with, with_norm
from tensors import normal
from torch import Tensor, nn

from onlynorm import Ranges, Wide
from onlynorm.errors import AccuracyWarning, ConversionError, InsufficientFeaturesError, ToleranceError, ValueRangeError
from onlynorm.frozen.pair import NormOnlyBlock
from onlynorm.intervals.tensor import Box
from onlynorm.modules.fold import fold_network
from onlynorm.modules.norms import FoldedNorm
from onlynorm.modules.walk import relative_difference
from onlynorm.reconstruction import Reconstruction, collapse, reconstruct, verify

EXACT = 1e-9
"""The solver leaves 1e-10 per layer; a few layers and their shifts may add up to ten times that."""


# ------------------------------------------------------------------------------- error budgets


@pytest.mark.parametrize("error", [1e-4, 1e-8, 1e-11])
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh(), nn.Softsign()], ids=lambda a: type(a).__name__)
def test_an_error_that_is_asked_for_is_reached(error: float, activation: nn.Module) -> None:
    network = net(6, 5, 5, 4)
    result = reconstruct(network, X, Wide(activation=activation), error=error)
    assert verify(network, result.network, X).is_same(error)
    assert result.error is not None
    assert result.error <= error
    assert all(layer.error <= error / 3 for layer in result.layers)
    assert result.settings.window == result.settings.tolerance == error / 12
    assert f"relative output error {result.error:.1e}" in str(result)


def test_a_looser_error_takes_wider_windows() -> None:
    loose, tight = (reconstruct(net(), X, Wide(activation=nn.Tanh()), error=e) for e in (1e-4, 1e-8))
    assert all(a.error > 100 * b.error for a, b in zip(loose.layers, tight.layers, strict=True))


def test_errors_of_layers_are_measured_without_a_budget_too() -> None:
    result = reconstruct(net(), X, Wide(excess=0.5))
    layer, block = net()[0], result.network[0]
    wanted = layer(X[:4]).detach()
    rest = block(X[:4]).detach() - wanted
    assert result.layers[0].error == pytest.approx(float(rest.norm() / wanted.norm()), rel=1e-9)
    assert result.layers[0].error > 0.01
    assert f"output error {result.layers[0].error:.1e}" in str(result)
    assert result.error is None


def test_a_missed_share_names_the_layer() -> None:
    with pytest.raises(ToleranceError, match=r"layer '0' needs an output error of at most 5.0e-13.*measured.*window"):
        reconstruct(net(), X, Wide(activation=nn.Sigmoid()), error=1e-12)


def test_a_missed_residual_names_the_layer() -> None:
    with pytest.raises(InsufficientFeaturesError, match=r"layer '0': "):
        reconstruct(net(), X, Wide(excess=0.5), error=1e-8)
    with pytest.raises(ValueRangeError, match=r"layer '0': .*density"):
        reconstruct(net(), X, Wide(density=0.5))


class Difference(nn.Module):
    """Two layers that nearly cancel: what they leave is a millionth of what either makes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 4), nn.Linear(6, 4)
        self.two.load_state_dict({name: value * (1 + 1e-6) for name, value in self.one.state_dict().items()})

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) - self.two(x)


def test_layers_that_amplify_errors_are_noticed() -> None:
    with pytest.raises(ToleranceError, match=r"network needs a relative output error of at most 1.0e-08.*amplify"):
        reconstruct(Difference().double().eval(), X, Wide(activation=nn.Tanh()), error=1e-8)


@pytest.mark.parametrize("error", [0.0, -1.0, 1.0, float("nan")])
def test_an_error_is_a_positive_number(error: float) -> None:
    with pytest.raises(ValueRangeError, match=r"error .* number in \(0, 1\)"):
        reconstruct(net(), X, error=error)


def test_a_tolerance_and_a_window_of_ones_own_win_over_the_share() -> None:
    settings = reconstruct(net(), X, error=1e-6, tolerance=1e-9, ranges=Ranges(window=1e-8)).settings
    assert (settings.tolerance, settings.window) == (1e-9, 1e-8)


# ------------------------------------------------------------------------------- networks of all kinds


def test_several_inputs_tokens_and_calls_of_several_sizes_are_taken() -> None:
    network = Branches().double().eval()
    tokens = torch.arange(24).reshape(8, 3) % 7
    images = normal(8, 1, 6, 6)
    result = reconstruct(network, (tokens, images), Wide(activation=nn.ReLU()), error=1e-8)
    check = verify(network, result.network, (tokens, images))
    assert check.is_same(1e-8)
    assert check.outside == 0.0
    assert [item.name for item in result.left] == ["embed"]


def test_tokens_alone_are_not_cast() -> None:
    network = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 3)).eval()
    tokens = torch.arange(12).reshape(4, 3) % 7
    result = reconstruct(network, tokens)
    assert verify(network, result.network, tokens).relative_error <= 1e-4  # float32
    assert next(result.network.parameters()).dtype == torch.float32


class Rotary(nn.Module):
    """Rotary position embeddings: a complex buffer between two layers."""

    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("turn", torch.polar(torch.ones(4), torch.arange(4.0)), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.norm(self.up(x)).unflatten(-1, (4, 2)))
        return self.down(torch.view_as_real(pairs * self.turn).flatten(-2))


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_complex_buffers_stay_complex(dtype: torch.dtype, persistent: bool) -> None:
    network = Rotary(persistent=persistent).eval()
    network = network.double() if dtype == torch.float64 else network
    inputs, turn = X.to(dtype), network.turn
    for made in (
        reconstruct(network, inputs).network, reconstruct(network, inputs, fold_norms=True).network,
        fold_network(network, inputs).network,
    ):  # fmt: skip
        assert torch.equal(made.turn, turn)
        assert made.turn.dtype == turn.dtype
        with torch.no_grad():
            difference = relative_difference([made(inputs)], [network(inputs)])
        assert difference <= max(EXACT, 100 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("layer", [nn.Linear(6, 4), nn.Conv1d(6, 4, 3)], ids=["Linear", "Conv1d"])
def test_a_single_layer_is_a_network(layer: nn.Module) -> None:
    layer = layer.double().eval()
    x = normal(30, 6) if isinstance(layer, nn.Linear) else normal(30, 6, 5)
    result = reconstruct(layer, x, Wide(activation=nn.ReLU()))
    assert isinstance(result.network, NormOnlyBlock)
    assert verify(layer, result.network, x).relative_error <= EXACT
    assert type(collapse(result.network)) is type(layer)
    with pytest.raises(ConversionError, match=r"in_place needs a model .*; got a single"):
        reconstruct(layer, x, in_place=True)


def test_a_batch_of_one_sample_works() -> None:
    assert verify(net(), reconstruct(net(), X[:1], Wide(activation=nn.ReLU())).network, X[:1]).is_same(EXACT)


def test_the_activation_of_the_caller_is_left_alone() -> None:
    activation = nn.PReLU()
    result = reconstruct(net(), X, Wide(activation=activation))
    assert activation.weight.dtype == torch.float32
    assert verify(net(), result.network, X).is_same(EXACT)


def test_collapse_gives_tied_layers_back_as_one() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(6, 6)
            self.inner = nn.Sequential(self.one)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(torch.tanh(self.one(x)))

    network = Twice().double().eval()
    result = reconstruct(network, X, Wide(activation=nn.ReLU()))
    assert len(result.layers) == 1
    assert result.network.one is result.network.inner[0]
    plain = collapse(result.network)
    assert isinstance(plain.one, nn.Linear)
    assert plain.one is plain.inner[0]
    assert verify(network, plain, X).is_same(EXACT)


# ------------------------------------------------------------------------------- folding, in place


def test_norms_may_be_folded_first() -> None:
    network = with_norm()
    result = reconstruct(network, X, Wide(activation=nn.ReLU()), fold_norms=True)
    assert result.folded == ("1",)
    assert isinstance(result.network[1], FoldedNorm)
    assert verify(network, result.network, X).is_same(EXACT)
    assert "folded: 1" in str(result)
    assert isinstance(network[1], nn.BatchNorm1d)
    assert reconstruct(network, X).folded == ()


def test_in_place_the_target_becomes_the_result() -> None:
    network = with_norm()
    wanted = network(X).detach()
    result = reconstruct(network, X, fold_norms=True, in_place=True)
    assert result.network is network
    assert isinstance(network[0], NormOnlyBlock)
    assert isinstance(network[1], FoldedNorm)
    assert torch.allclose(network(X), wanted, rtol=EXACT, atol=EXACT)


# ------------------------------------------------------------------------------- ranges and words


def test_a_box_certifies_the_ranges_of_every_input_inside() -> None:
    network = net()
    box = Box(torch.full((6,), -4.0, dtype=torch.float64), torch.full((6,), 4.0, dtype=torch.float64))
    corners = 4.0 * normal(200, 6, seed=1).sign()
    calibrated, certified = (
        verify(
            network,
            reconstruct(network, X, Wide(activation=nn.ReLU()), ranges=Ranges(margin=0.0, box=one)).network,
            corners,
        )
        for one in (None, box)
    )
    assert calibrated.outside > 0.5
    assert certified.outside == 0.0
    assert certified.is_same(EXACT)


def test_a_result_says_what_was_done() -> None:
    result = reconstruct(net(), X, Wide(activation=nn.ReLU()))
    assert isinstance(result, Reconstruction)
    assert str(result).startswith("2 layers from he_normal features, seed 0: 144 norm parameters (576 B in float32)\n")


@pytest.mark.parametrize(
    "choices",
    [{"excess": 0.5}, {"features": "id_cond", "density": 0.5}, {"construction": "low_rank", "rank": 1}],
    ids=str,
)
def test_an_approximation_that_was_asked_for_is_listed_without_a_python_warning(choices: dict[str, Any]) -> None:
    made = reconstruct_with(nn.Sequential(nn.Linear(8, 6)).double().eval(), normal(64, 8), **choices)
    layer = made.layers[0]
    assert layer.residual > 1e-2
    assert made.warnings[0].startswith(f"layer '0' fell short: {layer.shortfall[:8]}")
    assert "warning: layer '0' fell short" in str(made)


def test_an_exact_reconstruction_has_no_warnings() -> None:
    made = reconstruct(nn.Sequential(nn.Linear(8, 6)).double().eval(), normal(64, 8))
    assert made.warnings == ()


# ------------------------------------------------------------------------------- the network as a whole


def test_a_hook_that_tells_a_block_from_its_layer_is_a_warning() -> None:
    network = net()
    network[0].register_forward_hook(lambda layer, _, y: 2.0 * y if isinstance(layer, nn.Linear) else y)
    with pytest.warns(AccuracyWarning, match=r"output differs by"):
        result = reconstruct(network, X)
    assert "output differs by" in result.mismatch
    assert result.mismatch in result.warnings
    assert result.mismatch in str(result)


def test_a_hook_that_fails_on_a_block_is_a_warning() -> None:
    network = net()
    network[0].register_forward_hook(lambda layer, _, y: y * len(layer.state_dict()["weight"]))
    with pytest.warns(AccuracyWarning, match=r"fails on a calibration sample with KeyError"):
        reconstruct(network, X)


def test_values_beyond_the_precision_of_the_network_are_a_warning() -> None:
    network = net().float()
    huge = X.float() * 1e20  # its square is infinite in float32
    with pytest.warns(AccuracyWarning, match=r"range of the precision"):
        reconstruct(network, huge, Wide(activation=nn.ReLU()))


@pytest.mark.parametrize("excess", [0.5, 1.5])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_network_as_good_as_its_layers_has_no_mismatch(excess: float, in_place: bool) -> None:
    assert reconstruct(net(), X, Wide(excess=excess), in_place=in_place).mismatch == ""


class FixedBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4).double()
        self.register_buffer("positions", normal(len(X), 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.positions


def test_an_error_is_measured_on_inputs_that_cannot_be_cut() -> None:
    fixed = reconstruct(FixedBatch().eval(), X, error=1e-8)
    assert fixed.error is not None
    assert fixed.error <= 1e-8
    single = reconstruct(net(), X[0], error=1e-8)
    assert single.error is not None
    assert single.error <= 1e-8


def test_a_traced_network_is_refused_by_name() -> None:
    with pytest.warns(DeprecationWarning, match=r"torch\.jit"):
        traced = torch.jit.trace(net(), X)
    with pytest.raises(ConversionError, match="traced or scripted"):
        reconstruct(traced, X)
