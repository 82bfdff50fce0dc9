"""Windows: the certified bound holds for every activation and range, rounding included, and exact ones are exact."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.modules.activations import Cubic, chart
from onlynorm.reconstruction.linearize import Window, linearize

Activation = Callable[[Tensor], Tensor]
EPS = torch.finfo(torch.float64).eps

EXACT: dict[str, Activation | None] = {
    "none": None,
    "identity": nn.Identity(),
    "relu": torch.relu,
    "leaky_relu": nn.LeakyReLU(),
    "leaky_relu_0.3": nn.LeakyReLU(0.3),
    "prelu": nn.PReLU(init=0.2).double(),
    "elu": nn.ELU(1.7),
    "celu": nn.CELU(0.5),
    "selu": nn.SELU(),
    "hardswish": nn.Hardswish(),
    "gelu": functional.gelu,
    "gelu_tanh": nn.GELU("tanh"),
    "silu": nn.SiLU(),
    "mish": nn.Mish(),
    "softplus": nn.Softplus(),
    "softplus_steep": nn.Softplus(beta=5.0, threshold=3.0),
    "logsigmoid": nn.LogSigmoid(),
    "hardtanh": nn.Hardtanh(-0.5, 2.0),
    "relu6": nn.ReLU6(),
    "hardsigmoid": nn.Hardsigmoid(),
}
SAMPLED_EXACT: dict[str, Activation] = {
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "negated_relu": lambda x: -torch.relu(-x - 2.0) + 1.0,
    "jump": lambda x: torch.where(x >= 1.0, 3.0 * x, -7.0),
}
CURVED: dict[str, Activation] = {"tanh": torch.tanh, "sigmoid": nn.Sigmoid()}
SAMPLED: dict[str, Activation] = {
    "wave": lambda x: torch.sin(x) + 0.2 * torch.cos(3 * x),
    "bump": lambda x: torch.exp(-x * x),
    "softsign": nn.Softsign(),
    "exp": torch.exp,
    "round": torch.round,
}
CHEAP = {**EXACT, **CURVED}
COSTLY = {**SAMPLED_EXACT, **SAMPLED}


@st.composite
def ranges(draw: st.DrawFn) -> tuple[float, float]:
    """Widths from 1e-6 to 1e6 around 0 or around points up to 1e6 away."""
    width = 10.0 ** draw(st.floats(-6, 6))
    centre = draw(st.sampled_from([-1.0, 0.0, 1.0])) * 10.0 ** draw(st.floats(-6, 6))
    return centre - width / 2, centre + width / 2


TOLERANCES = st.floats(-14, 1).map(lambda power: 10.0**power)


def _points(low: float, high: float) -> Tensor:
    dense = low + (high - low) * torch.linspace(0.0, 1.0, 10_001, dtype=torch.float64)
    random = low + (high - low) * torch.rand(2_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return torch.cat([dense, random]).clamp(low, high)


def _apply(activation: Activation | None, t: Tensor) -> Tensor:
    with torch.no_grad():
        return t if activation is None else activation(t)


def _measured(activation: Activation | None, window: Window, x: Tensor) -> float:
    """The largest error after undoing the line, in the units of x."""
    t = window.scale * x + window.shift
    back = ((_apply(activation, t) - window.offset) / window.slope - window.shift) / window.scale
    return float((back - x).abs().max())


def _check(activation: Activation | None, low: float, high: float, tolerance: float) -> Window:
    window = linearize(activation, low, high, tolerance=tolerance)
    x = _points(low, high)
    t = window.scale * x + window.shift
    line = window.slope * t + window.offset
    allowed = window.error + window.rounding * window.gain.abs()
    assert bool(((_apply(activation, t) - line).abs() <= allowed).all())
    assert _measured(activation, window, x) <= float(window.bound)
    assert float(window.scale) > 0
    assert float(window.slope) != 0
    assert window.is_met == (float(window.bound) <= tolerance)
    return window


@pytest.mark.parametrize("name", CHEAP)
@settings(max_examples=20)
@given(ranges(), TOLERANCES)
def test_bound_holds_where_it_is_proven(name: str, span: tuple[float, float], tolerance: float) -> None:
    _check(CHEAP[name], *span, tolerance)


@pytest.mark.parametrize("name", COSTLY)
@settings(max_examples=4)
@given(ranges(), TOLERANCES)
def test_bound_holds_where_it_is_sampled(name: str, span: tuple[float, float], tolerance: float) -> None:
    _check(COSTLY[name], *span, tolerance)


@pytest.mark.parametrize("name", {**EXACT, **SAMPLED_EXACT})
@settings(max_examples=5)
@given(ranges())
def test_exact_windows_lose_a_few_units_of_the_shifted_magnitude(name: str, span: tuple[float, float]) -> None:
    activation = {**EXACT, **SAMPLED_EXACT}[name]
    low, high = span
    window = linearize(activation, low, high, tolerance=1e-3)
    assert window.is_exact
    ends = [abs(float(window.scale) * x + float(window.shift)) for x in span]
    magnitude = max(ends) / float(window.scale) + max(abs(low), abs(high))
    magnitude += abs(float(window.offset / window.gain))
    assert _measured(activation, window, _points(low, high)) <= 4 * EPS * magnitude
    # The price of shifting is in proportion to the range, whatever its size and the place of the line.
    assert float(window.bound) <= EPS * (64 * (high - low) + 32 * max(abs(low), abs(high)))


@pytest.mark.parametrize("name", {**CURVED, **SAMPLED})
def test_curved_windows_are_not_called_exact(name: str) -> None:
    assert not linearize({**CURVED, **SAMPLED}[name], -10.0, 10.0, tolerance=1e-6).is_exact


def test_slight_curvature_above_the_rounding_is_seen() -> None:
    """On the narrowest window that may be exact, h = 1/16, sinh(k x) / k errs by k^2 h^2 / 6: 100 eps, or far less."""
    for dtype in (torch.float64, torch.float32):
        unseen = torch.finfo(dtype).eps ** 0.5
        slight, none = (lambda x, k=k: torch.sinh(k * x) / k for k in (400 * unseen, unseen / 1000))
        assert not linearize(slight, -1.0, 1.0, tolerance=1e-2, dtype=dtype).is_exact
        assert linearize(none, -1.0, 1.0, tolerance=1e-2, dtype=dtype).is_exact


@pytest.mark.parametrize("name", {**CURVED, "wave": SAMPLED["wave"], "relu": torch.relu, "leaky": nn.LeakyReLU()})
def test_features_together_equal_features_alone(name: str) -> None:
    activation = {**CHEAP, **COSTLY, "leaky": nn.LeakyReLU()}[name]
    low = torch.tensor([-10.0, -1e-3, 5.0, 0.0, -7.0], dtype=torch.float64)
    high = torch.tensor([10.0, 2e3, 6.0, 0.0, -6.5], dtype=torch.float64)
    tolerance = torch.tensor([1e-6, 1e-9, 1e-3, 1e-6, 1e-14], dtype=torch.float64)
    together = linearize(activation, low, high, tolerance=tolerance)
    for i in range(5):
        alone = linearize(activation, float(low[i]), float(high[i]), tolerance=float(tolerance[i]))
        for field in ("scale", "shift", "slope", "offset", "error", "rounding", "tolerance"):
            assert float(getattr(together, field)[i]) == pytest.approx(float(getattr(alone, field)), rel=8 * EPS)


@pytest.mark.parametrize("name", {**CHEAP, **COSTLY})
def test_shared_windows_have_one_gain_and_keep_the_bound(name: str) -> None:
    activation = {**CHEAP, **COSTLY}[name]
    low = torch.tensor([-10.0, -1e-2, 5.0, 3.0, -7.0], dtype=torch.float64)
    high = torch.tensor([12.0, 2e-2, 6.0, 3.0, -6.5], dtype=torch.float64)
    window = linearize(activation, low, high, tolerance=1e-6, shared=True)
    assert torch.allclose(window.gain, window.gain[0], rtol=4 * EPS, atol=0)
    back = [_apply(activation, window.scale * x + window.shift) for x in (low, low + (high - low) / 3, high)]
    for x, y in zip((low, low + (high - low) / 3, high), back, strict=True):
        assert bool((((y - window.constant) / window.gain - x).abs() <= window.bound).all())
    widest = linearize(activation, -10.0, 12.0, tolerance=1e-6)
    assert float(window.error_in_input.max()) <= float(widest.error_in_input) * (1 + 1e-6)


def test_relu_shifts_each_feature_just_above_zero() -> None:
    low = torch.tensor([-3.0, -0.5, 0.0, 2.0], dtype=torch.float64)
    window = linearize(nn.ReLU(), low, low + 4, tolerance=1e-12)
    assert window.shift.tolist() == [3.0, 0.5, 0.0, 0.0]
    assert window.scale.tolist() == window.slope.tolist() == window.gain.tolist() == [1.0] * 4
    assert window.error.tolist() == window.offset.tolist() == [0.0] * 4


def test_leaky_relu_takes_the_side_with_the_smaller_shift() -> None:
    low = torch.tensor([-3.0, -1.0, -5.0], dtype=torch.float64)
    high = torch.tensor([1.0, 3.0, -2.0], dtype=torch.float64)
    window = linearize(nn.LeakyReLU(0.25), low, high, tolerance=1e-12)
    assert window.slope.tolist() == [0.25, 1.0, 0.25]
    assert window.shift.tolist() == [-4.0, 1.0, 0.0]
    assert window.gain.tolist() == [1.0] * 3
    flat = linearize(nn.LeakyReLU(1e-9), low, high, tolerance=1e-12)
    assert flat.slope.tolist() == [1.0] * 3


def test_prelu_has_a_slope_per_feature() -> None:
    activation = nn.PReLU(3)
    with torch.no_grad():
        activation.weight.copy_(torch.tensor([0.5, -0.25, 0.0]))
    low, high = torch.full((3,), -2.0, dtype=torch.float64), torch.full((3,), 1.0, dtype=torch.float64)
    window = linearize(activation, low, high, tolerance=1e-12)
    assert window.slope.tolist() == [0.5, 1.0, 1.0]
    assert window.shift.tolist() == [-2.0, 2.0, 2.0]
    x = low + (high - low) * torch.linspace(0, 1, 50, dtype=torch.float64)[:, None]
    made = (activation.double()(window.scale * x + window.shift) - window.constant) / window.gain
    assert bool(((made - x).abs() <= window.rounding).all())


def test_functions_of_torch_are_known_as_their_modules() -> None:
    pairs = [
        (functional.relu, nn.ReLU()),
        (functional.leaky_relu, nn.LeakyReLU()),
        (functional.silu, nn.SiLU()),
        (functional.softplus, nn.Softplus()),
        (torch.selu, nn.SELU()),
        (functional.hardtanh, nn.Hardtanh()),
        (torch.sigmoid, nn.Sigmoid()),
    ]
    for function, module in pairs:
        assert str(linearize(function, -3.0, 2.0, tolerance=1e-6)) == str(linearize(module, -3.0, 2.0, tolerance=1e-6))


def test_subclass_of_a_known_module_is_measured_not_trusted() -> None:
    class Doubled(nn.ReLU):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * torch.relu(input + 1)

    window = _check(Doubled(), -10.0, 10.0, 1e-9)
    assert float(window.slope) == pytest.approx(2.0, rel=8 * EPS)
    assert window.is_exact


@settings(max_examples=50)
@given(st.floats(-6, 6), st.floats(-9, -1))
def test_tanh_and_sigmoid_scales_are_the_closed_forms(log_half: float, log_share: float) -> None:
    """s = sqrt(3 tolerance / r^3) and sqrt(12 tolerance / r^3): theorem 2.4 with the factor the paper leaves out."""
    half = 10.0**log_half
    tolerance = half * 10.0**log_share
    for activation, factor in ((nn.Tanh(), 3.0), (nn.Sigmoid(), 12.0)):
        window = linearize(activation, -half, half, tolerance=tolerance)
        # rounding takes eps (10 + 8 / h) of the half-width from the tolerance before the scale is chosen
        share = EPS * (10 + 8 / float(window.scale * half)) / 10.0**log_share
        wanted = min(math.sqrt(factor * tolerance / half**3), 1 / half)
        assert float(window.scale) == pytest.approx(wanted, rel=1e-8 + share)
        assert window.is_met


def test_printed_scale_of_the_paper_misses_its_own_tolerance() -> None:
    half, allowed = 3.0, 1e-3
    x = _points(-half, half)
    for activation, factor in ((torch.tanh, 3.0), (torch.sigmoid, 12.0)):
        ours = linearize(activation, -half, half, tolerance=allowed)
        printed = min(math.sqrt(factor * allowed), 1 / half)
        error = (activation(printed * x) - float(ours.slope) * printed * x - float(ours.offset)).abs().max()
        assert float(error) / (printed * float(ours.slope)) > 10 * allowed
        assert 0.9 * allowed < _measured(activation, ours, x) <= allowed


def test_out_of_reach_the_sum_of_error_and_rounding_is_least() -> None:
    window = linearize(nn.Sigmoid(), -10.0, 10.0, tolerance=1e-13)
    assert not window.is_met
    best = float(window.scale * 10.0)

    def cost(h: float) -> float:
        return h**2 / 12 + EPS * (8 + 8 / h)

    assert all(cost(best) <= cost(best * factor) for factor in (0.5, 0.9, 1.1, 2.0))
    assert float(window.bound) == pytest.approx(10.0 * (cost(best) + 2 * EPS), rel=1e-3)
    text = str(window)
    assert "approximate" in text
    assert "short: 1 features above their tolerance" in text
    assert "short" not in str(linearize(nn.Sigmoid(), -10.0, 10.0, tolerance=1e-6))


@settings(max_examples=100)
@given(st.floats(-17, 1), st.sampled_from([Cubic(1.0, 0.0, 1 / 3), Cubic(0.25, 0.5, 1 / 48)]))
@example(-14.734375, Cubic(1.0, 0.0, 1 / 3))  # a budget just above the rounding, 8 eps
def test_reach_is_the_largest_within_the_budget(power: float, cubic: Cubic) -> None:
    budget, a, k = 10.0**power, cubic.factor / cubic.slope, 4 * cubic.offset / cubic.slope
    h = float(cubic.reach(torch.tensor(budget, dtype=torch.float64), EPS))

    def cost(reach: float) -> float:
        return a * reach**2 + EPS * (8 + k / reach)

    if cost(h) <= budget:
        assert h == 1.0 or cost(h * (1 + 1e-6)) > budget * (1 - 1e-6)
    elif k == 0:  # a smaller reach is always cheaper: it ends where the error is a eps, below the rounding of 8 eps
        assert a * h**2 <= a * EPS * (1 + 1e-6)
        assert budget < cost(h)
        assert EPS * (8 + a) * (1 + 1e-6) >= cost(h)
    else:
        assert all(cost(other) > budget for other in (0.25 * h, 0.5 * h, 2 * h, 4 * h))


def test_tails_are_as_small_as_stated() -> None:
    for step in range(200):
        t = 9.0 + step / 4
        assert t * math.erfc(t / math.sqrt(2)) / 2 < 1.1e-18
        assert t / (1 + math.exp(min(2 * math.sqrt(2 / math.pi) * (t + 0.044715 * t**3), 700.0))) < 1.1e-18
        t = 40.0 + step / 4
        assert t * math.exp(-t) < 1.8e-16
        assert math.log1p(math.exp(-t)) < 4.3e-18
        t = 20.0 + step / 4
        assert t * 2 / ((1 + math.exp(t)) ** 2 + 1) < 1.8e-16


@pytest.mark.parametrize(("name", "function"), [("tanh", torch.tanh), ("sigmoid", torch.sigmoid)])
def test_sampled_windows_agree_with_the_proven_ones(name: str, function: Activation) -> None:
    proven = linearize(CURVED[name], -3.0, 4.0, tolerance=1e-6)
    sampled = linearize(lambda x: function(x), -3.0, 4.0, tolerance=1e-6)
    assert sampled.is_met
    assert 0.5 <= float(sampled.scale / proven.scale) <= 1.01
    assert float(sampled.slope) == pytest.approx(float(proven.slope), rel=1e-6)


def test_sampled_errors_hold_on_a_denser_grid_for_all_windows() -> None:
    for name in ("wave", "bump", "round"):
        table = chart(SAMPLED[name], torch.device("cpu"))
        pick = torch.randperm(len(table.centre), generator=torch.Generator().manual_seed(1))[:300]
        centre, reach, slope, offset, error = (value[pick, None] for value in table)
        t = centre + reach * (
            2 * torch.rand(300, 4_000, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) - 1
        )
        residual = (SAMPLED[name](t) - slope * t - offset).abs()
        noise = 8 * EPS * ((slope * t).abs() + offset.abs() + 1)
        assert bool((residual <= error + noise).all())


@pytest.mark.parametrize("name", ["relu", "gelu", "silu", "selu", "tanh", "sigmoid", "hardtanh", "quick_gelu"])
def test_bound_holds_for_a_network_that_runs_in_float32(name: str) -> None:
    activation = {**CHEAP, **COSTLY}[name]
    for low, high in ((-10.0, 10.0), (-1e-3, 5e-3), (100.0, 101.0), (-3e4, 1e3)):
        window = linearize(activation, low, high, tolerance=1e-2 * (high - low), dtype=torch.float32)
        x = _points(low, high).float()
        y = _apply(activation, window.scale.float() * x + window.shift.float())
        back = (y.double() - window.constant) / window.gain
        assert bool(((back - x.double()).abs() <= window.bound).all())
        assert window.is_met


def test_precision_of_the_network_moves_the_balance() -> None:
    fine, coarse = (
        linearize(nn.Sigmoid(), -1.0, 1.0, tolerance=1e-14, dtype=d) for d in (torch.float64, torch.float32)
    )
    assert float(coarse.scale) > 100 * float(fine.scale)
    assert float(coarse.bound) > 1e4 * float(fine.bound)


def test_rounding_does_not_carry_a_feature_across_a_jump_at_the_end_of_its_window() -> None:
    """The windows on offer have half-widths 2^(k/2): one ends at the first jump, one 0.1 % before the second."""
    for edge in (1.0, 0.708):
        for low, high in ((0.1, 0.7), (100.0, 100.7), (1e6, 1e6 + 1e-9), (-1e9 - 1e-6, -1e9)):
            window = _check(lambda x, edge=edge: torch.where(x.abs() <= edge, x, 1e9), low, high, 1e-3)
            assert window.is_exact


def test_all_slopes_have_one_sign() -> None:
    low = -torch.logspace(-3, 3, 20, dtype=torch.float64)
    for activation, sign in ((torch.cos, 1.0), (lambda x: -torch.tanh(x) - x, -1.0), (lambda x: -x, -1.0)):
        window = linearize(activation, low, -low, tolerance=1e-6)
        assert bool((window.gain.sign() == sign).all())


def test_constant_features_and_partly_undefined_activations_have_windows() -> None:
    for value in (0.0, -1e-300, 3.0, -1e6):
        for activation in (nn.ReLU(), nn.SiLU(), nn.Tanh(), nn.Sigmoid(), nn.ReLU6(), SAMPLED["wave"]):
            window = linearize(activation, value, value, tolerance=1e-3)
            assert bool(torch.isfinite(window.scale))
            assert _measured(activation, window, torch.tensor([value], dtype=torch.float64)) <= float(window.bound)
    assert linearize(torch.log, -10.0, 10.0, tolerance=1e-5).is_met
    assert linearize(functional.relu_, -10.0, 10.0, tolerance=1e-12).is_exact
