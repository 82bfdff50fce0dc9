"""Intervals of single functions: every value lies inside, the ends are outside the exact ones, and not far."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from boxes import WIDTHS, assert_holds, assert_network_holds, points_in, random_box, seeded
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.intervals.propagate import propagate
from onlynorm.intervals.tensor import Ball, Box, Interval
from onlynorm.models import mlp

# --------------------------------------------------------------------------------------------------- single functions


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda x: 1 - x * 2 + x / -3 - (0.5 * x - x) + (-x),
    "product": lambda x: x * x.flip(-1) + x * x,
    "quotient": lambda x: x / (x.abs() + 1) + 1 / (2 + x.square()) + torch.reciprocal(x.exp() + 1e-3),
    "powers": lambda x: x**2 - x.pow(3) + (x * x + 1) ** 0.5,
    "alpha": lambda x: torch.add(x, x, alpha=3) + torch.sub(x, x.flip(0), alpha=0.5),
    "scaled channels": lambda x: x * torch.linspace(-2, 3, 6, dtype=torch.float64),
    "added image": lambda x: x + torch.linspace(-2, 3, 6, dtype=torch.float64),
    "broadcast": lambda x: x[:, :1] * x + x.mean(-1, keepdim=True),
    "exponential": lambda x: x.clamp(max=5).exp() + torch.expm1(x.clamp(max=3)),
    "logarithm": lambda x: (x.relu() + 0.1).log() + torch.log1p(x.abs()),
    "roots": lambda x: (x.relu() + 0.1).sqrt() - (x.square() + 1).rsqrt(),
    "saturating": lambda x: torch.erf(x) + x.atan() + functional.softsign(x) + functional.hardsigmoid(x),
    "units": lambda x: functional.elu(x, 2.0) + functional.celu(x, 0.5) + functional.selu(x) + functional.mish(x),
    "gelu": lambda x: functional.gelu(x) - functional.gelu(x, approximate="tanh"),
    "negative leak": lambda x: functional.leaky_relu(x, -0.7) + functional.logsigmoid(x),
    "softplus": lambda x: functional.softplus(x, 5, 3) + functional.softplus(x * 10),
    "channel leak": lambda x: functional.prelu(x, torch.tensor([0.3, -2.0, 1.5], dtype=torch.float64)),
    "clamps": lambda x: functional.relu6(x) + torch.clamp(x, -0.3, 0.2) + functional.hardtanh(x, -0.1, 4.0),
    "extremes": lambda x: x.amax(1) + x.amin(1) + torch.maximum(x, -x)[:, 0] + x.max() - torch.min(x, x.flip(1))[:, 1],
    "sums": lambda x: x.sum(-1) + torch.mean(x, dim=(1, 2), keepdim=True)[..., 0] + x.mean(),
    "softmax": lambda x: x.softmax(-1) - functional.softmax(3 * x, dim=1),
    "log softmax": lambda x: torch.log_softmax(x, -1),
    "masked softmax": lambda x: x.masked_fill(torch.eye(6)[:3] > 0, -math.inf).softmax(-1),
    "gated": lambda x: x[..., :3] * x[..., 3:].sigmoid(),
    "pieces": lambda x: torch.cat(x.split((1, 5), dim=2)[::-1], 2) + torch.cat((*x.chunk(3, 1)[1:], x[:, :1]), 1),
    "doubled": lambda x: torch.cat([x, x], 1),
    "listed": lambda x: torch.stack(list(x[0]))[None],
    "stacked": lambda x: torch.stack([x, x.detach(), torch.zeros_like(x)], 1).flatten(1, 2).unbind(1)[2],
    "turned": lambda x: x.permute(0, 2, 1).mT.unsqueeze(1).squeeze(1).transpose(1, 2).reshape(-1, 18).view(-1, 3, 6),
    "indexed": lambda x: x[:, [0, 2, 2]] + x[:, torch.tensor([1, 1, 0])] + x[:, :, :1] + x[..., None][..., 0],
    "expanded": lambda x: x[:, :1].expand(-1, 3, -1) + x[:, :1].repeat(1, 3, 1) + x.roll(1, 2),
    "padded": lambda x: functional.pad(x, (1, 2), value=2.0)[..., :-3]
    + functional.pad(x, (2, 1), mode="reflect")[..., 3:] + functional.pad(x, (1, 1), mode="replicate")[..., 2:],
    "where": lambda x: torch.where(torch.eye(6)[:3] > 0, x, 0.0),
    "matrices": lambda x: x @ x.mT @ torch.ones(3, 6, dtype=torch.float64) + torch.ones(3, 3, dtype=torch.float64) @ x,
    "fused": lambda x: torch.addcmul(x, x, torch.ones(6, dtype=torch.float64), value=-2)
    + torch.baddbmm(x, x @ x.mT, x, beta=2, alpha=0.5) + x.clamp_min(0) + x.clamp_max(0.1),
    "einsum": lambda x: torch.einsum("bij,bkj->bik", x, x),
    "attention": lambda x: functional.scaled_dot_product_attention(x, x.flip(1), x, is_causal=True),
    "interpolated": lambda x: functional.interpolate(x, scale_factor=2, mode="linear", align_corners=True),
    "cast": lambda x: x.float().to(torch.float64).contiguous().clone().type_as(x),
    "disjoint windows": lambda x: functional.max_pool1d(x, 2) + functional.max_pool1d(x, 2, stride=2)
    - functional.adaptive_avg_pool1d(x, 3) + functional.avg_pool1d(x, 2),
    "norm far from zero": lambda x: functional.layer_norm(x + 1e7, (6,)) + functional.rms_norm(x - 1e5, (3, 6)),
    "group norm": lambda x: functional.group_norm(x, 3) + functional.instance_norm(x),
}  # fmt: skip


def written_in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y += 1
    y *= -2
    y.relu_()
    y -= x
    y /= 4
    y[:, 0] = x[:, 1]
    y[:, 1] = 0.5
    view = y.view(y.shape[0], -1)
    functional.leaky_relu(view, 0.1, inplace=True)
    return y + view.view_as(y)


FUNCTIONS["in place"] = written_in_place


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
@given(st.sampled_from(WIDTHS), st.integers(0, 2**31))
@settings(max_examples=6)
def test_the_values_of_a_function_lie_in_its_interval(
    function: Callable[[Tensor], Tensor], width: float, seed: int
) -> None:
    # A layer in front gives the interval a ball, so that the rules for balls are tried as well.
    mixed = torch.randn(6, 6, dtype=torch.float64, generator=seeded(seed))
    box = random_box((3, 6), seed, width)
    with torch.no_grad():
        made = function(functional.linear(Interval(box.low[None], box.high[None]), mixed))
        assert isinstance(made, Interval)
        for point in points_in(box, seed + 1):
            value = function(functional.linear(point[None], mixed))
            assert value.shape == made.shape
            known = None if made.ball is None else Ball(made.ball.centre[0], made.ball.radius)
            assert_holds(Box(made.low[0], made.high[0], known), value)


def test_a_monotone_function_is_exact_at_the_ends_to_rounding() -> None:
    low, high = torch.tensor([-2.0, 0.5], dtype=torch.float64), torch.tensor([-1.0, 3.0], dtype=torch.float64)
    made = torch.tanh(Interval(low, high))
    assert torch.allclose(made.low, torch.tanh(low), rtol=1e-14, atol=1e-14)
    assert torch.allclose(made.high, torch.tanh(high), rtol=1e-14, atol=1e-14)


def test_the_minimum_of_a_function_that_turns_is_found() -> None:
    around = Interval(torch.tensor([-3.0], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64))
    grid = torch.linspace(-3, 1, 400_001, dtype=torch.float64)
    for function in (functional.gelu, functional.silu, functional.mish, functional.hardswish, torch.square):
        made = function(around)
        # A grid of step 1e-5 misses the minimum of a function with curvature up to 2 by at most 1e-10.
        assert 0.0 <= float(function(grid).min() - made.low) <= 1e-10


def test_softplus_is_followed_over_its_drop() -> None:
    """Torch takes x itself above threshold / beta = 0.6, where the true function is still 0.0097 higher."""
    made = functional.softplus(
        Interval(*(torch.tensor([end], dtype=torch.float64) for end in (0.5999, 0.6001))), 5.0, 3.0
    )
    points = torch.linspace(0.5999, 0.6001, 101, dtype=torch.float64)
    values = functional.softplus(points, 5.0, 3.0)
    assert float(values.max() - values.min()) > 0.009
    assert float(made.low) <= float(values.min())
    assert float(made.high) >= float(values.max())


def test_a_norm_over_tokens_is_not_taken_for_one_over_outputs() -> None:
    """Only output 0 and token 3 count; folded into the layer in front, the norm would switch all of it off."""
    linear, norm = nn.Linear(4, 4, bias=False).double(), nn.BatchNorm1d(4).double().eval()
    with torch.no_grad():
        linear.weight.zero_()[0, 0] = 1.0
        norm.weight.copy_(torch.tensor([0.0, 0.0, 0.0, 1.0]))
    network = nn.Sequential(linear, norm, nn.ReLU(), nn.Linear(4, 1))
    assert_network_holds(network, ["3"], random_box((4, 4), 0, 1.0), seed=1)


def test_softmax_is_as_tight_as_its_corners() -> None:
    box = random_box((4,), 5, 3.0)
    made = torch.softmax(Interval(box.low, box.high), 0)
    best = box.low.clone()
    best[1] = box.high[1]
    assert abs(float(made.high[1]) - float(best.softmax(0)[1])) <= 1e-13


# ----------------------------------------------------------------------------------------- how tight, and how rounded


def test_one_linear_layer_is_exact() -> None:
    network = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 1)).double()
    box = random_box((5,), 0, 2.0)
    weight = network[0].weight.detach()
    wanted = [
        (weight * torch.where(weight > 0, first, second)).sum(1) + network[0].bias.detach()
        for first, second in ((box.low, box.high), (box.high, box.low))
    ]
    made = propagate(network, ["1"], box)["1"]
    assert torch.allclose(made.low, wanted[0], rtol=1e-13, atol=1e-13)
    assert torch.allclose(made.high, wanted[1], rtol=1e-13, atol=1e-13)


@given(st.integers(0, 2**31), st.integers(1, 40))
@settings(max_examples=30)
def test_bounds_are_outside_the_exact_ones(seed: int, n: int) -> None:
    """Numbers of very different sizes cancel, so that floating sums miss the exact ones, computed in fractions."""
    generator = seeded(seed)
    spread = 10.0 ** torch.randint(-8, 9, (2, n), generator=generator)
    weight, centre = torch.randn(2, n, generator=generator).double() * spread
    low, high = centre, centre + centre.abs() * 1e-9
    layer = nn.Sequential(nn.Linear(n, 1, bias=False), nn.Linear(1, 1)).double()
    with torch.no_grad():
        layer[0].weight.copy_(weight)
    box = propagate(layer, ["1"], Box(low, high))["1"]
    pairs = list(zip(weight.tolist(), low.tolist(), high.tolist(), strict=True))
    least = sum((Fraction(w) * Fraction(a if w > 0 else b) for w, a, b in pairs), Fraction(0))
    most = sum((Fraction(w) * Fraction(b if w > 0 else a) for w, a, b in pairs), Fraction(0))
    assert Fraction(float(box.low)) <= least
    assert Fraction(float(box.high)) >= most


def test_single_operations_are_outside_the_exact_ones() -> None:
    a, b = 0.1, 0.2
    point = Interval(*(torch.tensor([a], dtype=torch.float64) for _ in range(2)))
    exact = {
        "sum": (point + b, Fraction(a) + Fraction(b)),
        "product": (point * b, Fraction(a) * Fraction(b)),
        "quotient": (point / 3.0, Fraction(a) / 3),
        "square": (point**2, Fraction(a) ** 2),
    }
    for name, (made, value) in exact.items():
        assert Fraction(float(made.low)) < value < Fraction(float(made.high)), name


def test_the_ball_beats_plain_intervals_in_deep_networks() -> None:
    """Widths by hand without the ball, on six layers of 64: there it is narrower, and never wider before."""
    network = mlp([64] * 7, seed=1).double()
    low, high = torch.zeros(64, dtype=torch.float64), torch.ones(64, dtype=torch.float64)
    names = [str(i) for i in range(0, 11, 2)]
    boxes = propagate(network, names, Box(low, high))
    ratios = []
    with torch.no_grad():
        for name in names:
            width = boxes[name].high - boxes[name].low
            assert bool((width <= (high - low) * (1 + 1e-9) + 1e-12).all())
            ratios.append(float(width.mean() / (high - low).mean()))
            layer = network.get_submodule(name)
            centre, radius = layer((low + high) / 2), layer.weight.abs() @ (high - low) / 2
            low, high = torch.relu(centre - radius), torch.relu(centre + radius)
    assert ratios[0] == pytest.approx(1.0)
    assert ratios[-1] < 0.75
