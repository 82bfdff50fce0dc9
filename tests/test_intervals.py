"""Interval arithmetic: whatever a network does, what its layers see lies inside the boxes, rounding included."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.errors import ConversionError, ShapeError, ValueRangeError
from onlynorm.models import mlp
from onlynorm.reconstruction.interval_tensor import Ball
from onlynorm.reconstruction.intervals import Box, Interval, interval_rule, propagate

WIDTHS = (0.0, 1e-13, 1e-3, 1.0, 30.0)
"""Boxes from a single point, where only the outward rounding makes room, to ones that saturate every activation."""


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_box(shape: tuple[int, ...], seed: int, width: float) -> Box:
    generator = seeded(seed)
    centre = torch.randn(shape, dtype=torch.float64, generator=generator)
    low = centre - width * torch.rand(shape, dtype=torch.float64, generator=generator)
    return Box(low, low + width * torch.rand(shape, dtype=torch.float64, generator=generator))


def points_in(box: Box, seed: int, n: int = 8) -> Tensor:
    """Random points of the box, and corners, and points with some coordinates at a corner; low and high among them."""
    generator = seeded(seed)
    share = torch.rand((n, *box.low.shape), dtype=torch.float64, generator=generator)
    corner = share.round()
    mixed = torch.where(torch.rand(share.shape, generator=generator) < 0.5, share, corner)
    share = torch.cat([share, corner, mixed, torch.zeros_like(share[:1]), torch.ones_like(share[:1])])
    return torch.minimum(torch.maximum(box.low + share * (box.high - box.low), box.low), box.high)


def assert_holds(box: Box, values: Tensor) -> None:
    """Every sample of `values` (samples, *shape of the box) lies in the box and in its ball."""
    assert bool((values >= box.low).all())
    assert bool((values <= box.high).all())
    if box.ball is not None:
        assert float((values - box.ball.centre).flatten(1).norm(dim=1).max()) <= box.ball.radius


def assert_network_holds(network: nn.Module, names: list[str], box: Box, *, seed: int) -> dict[str, Box]:
    """Boxes of the named layers, after a run of the network on points of the box has stayed inside."""
    network = network.double().eval()
    boxes = propagate(network, names, box)
    seen: dict[str, list[Tensor]] = {name: [] for name in names}
    for name in names:
        keep = lambda _, args, name=name: seen[name].append(args[0].detach().clone())  # noqa: E731
        network.get_submodule(name).register_forward_pre_hook(keep)
    with torch.no_grad():
        network(points_in(box, seed))
    for name, values in seen.items():
        assert_holds(boxes[name], torch.cat(values))
    return boxes


def shaken(network: nn.Module, seed: int) -> nn.Module:
    """The network with all numbers drawn at random, statistics of its norms included."""
    generator = seeded(seed)
    for name, values in network.state_dict().items():
        if values.is_floating_point():
            drawn = torch.randn(values.shape, generator=generator)
            values.copy_(drawn.abs() + 0.1 if name.endswith("running_var") else drawn)
    return network


# ---------------------------------------------------------------------------------------------------- whole networks


class Skip(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.branch = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + self.branch(x))


class Attention(nn.Module):
    """Two heads with their own products and softmax; tokens are the second axis."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.packed = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        query, key, value = (
            part.view(batch, tokens, 2, width // 2).transpose(1, 2) for part in self.packed(x).chunk(3, -1)
        )
        weights = (query @ key.mT / math.sqrt(width // 2)).softmax(-1)
        return x + self.out((weights @ value).transpose(1, 2).reshape(batch, tokens, width))


VECTOR: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(5, 5),
    "no bias": lambda: nn.Linear(5, 5, bias=False),
    "batch norm": lambda: nn.BatchNorm1d(5),
    "layer norm": lambda: nn.LayerNorm(5),
    "rms norm": lambda: nn.RMSNorm(5),
    "skip": lambda: Skip(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 5)),
    "relu": nn.ReLU,
    "in place": lambda: nn.ReLU(inplace=True),
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "elu": nn.ELU,
    "sigmoid": nn.Sigmoid,
    "dropout": nn.Dropout,
}
IMAGE: dict[str, Callable[[], nn.Module]] = {
    "same": lambda: nn.Conv2d(4, 4, 3, padding=1),
    "strided": lambda: nn.Conv2d(4, 4, 3, stride=2, padding=2, bias=False),
    "reflected": lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
    "circular": lambda: nn.Conv2d(4, 4, (3, 2), padding="same", padding_mode="circular"),
    "grouped": lambda: nn.Conv2d(4, 4, 2, padding=2, dilation=2, groups=2),
    "batch norm": lambda: nn.BatchNorm2d(4),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "instance norm": lambda: nn.InstanceNorm2d(4, affine=True),
    "skip": lambda: Skip(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1)),
    "max": lambda: nn.MaxPool2d(3, stride=1, padding=1),
    "average": lambda: nn.AvgPool2d(3, stride=1, padding=1),
    "larger": lambda: nn.Sequential(nn.Upsample(scale_factor=2), nn.MaxPool2d(2)),
    "leaky": lambda: nn.LeakyReLU(0.2),
    "hardtanh": nn.Hardtanh,
    "hardswish": nn.Hardswish,
    "softplus": nn.Softplus,
}


@given(
    st.lists(st.sampled_from(sorted(VECTOR)), min_size=1, max_size=5), st.sampled_from(WIDTHS), st.integers(0, 2**31)
)
@settings(max_examples=40)
def test_every_input_of_a_vector_network_lies_in_its_boxes(kinds: list[str], width: float, seed: int) -> None:
    network = shaken(nn.Sequential(*(VECTOR[kind]() for kind in kinds), nn.Linear(5, 2)), seed)
    names = [str(len(kinds)), *(str(i) for i, kind in enumerate(kinds) if kind in ("linear", "no bias"))]
    assert_network_holds(network, names, random_box((5,), seed, width), seed=seed + 1)


@given(st.lists(st.sampled_from(sorted(IMAGE)), min_size=1, max_size=4), st.sampled_from(WIDTHS), st.integers(0, 2**31))
@settings(max_examples=40)
def test_every_input_of_an_image_network_lies_in_its_boxes(kinds: list[str], width: float, seed: int) -> None:
    head = (nn.Conv2d(4, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
    network = shaken(nn.Sequential(*(IMAGE[kind]() for kind in kinds), *head), seed)
    names = [str(len(kinds)), str(len(kinds) + 3)]
    assert_network_holds(network, names, random_box((4, 6, 5), seed, width), seed=seed + 1)


@given(st.sampled_from(WIDTHS), st.integers(0, 2**31))
@settings(max_examples=15)
def test_every_input_of_an_attention_network_lies_in_its_boxes(width: float, seed: int) -> None:
    network = shaken(nn.Sequential(nn.LayerNorm(4), Attention(), nn.RMSNorm(4), nn.Linear(4, 2)), seed)
    names = ["1.packed", "1.out", "3"]
    boxes = assert_network_holds(network, names, random_box((3, 4), seed, width), seed=seed + 1)
    assert boxes["1.out"].low.shape == (3, 4)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_network_of_one_and_of_three_axes_is_followed_too(width: float) -> None:
    lines = nn.Sequential(nn.Conv1d(2, 3, 3, padding=1), nn.MaxPool1d(2), nn.ReLU(), nn.ConvTranspose1d(3, 2, 2))
    volumes = nn.Sequential(nn.Conv3d(2, 2, 2, padding=1), nn.AvgPool3d(2), nn.Mish())
    for layers, shape in ((lines, (2, 6)), (volumes, (2, 3, 3, 3))):
        outputs = layers(torch.zeros(1, *shape)).numel()
        network = shaken(nn.Sequential(layers, nn.Flatten(), nn.Linear(outputs, 1)), 3)
        assert_network_holds(network, ["0.0", "2"], random_box(shape, 1, width), seed=2)


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


# --------------------------------------------------------------------------------------------------- calls and shapes


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.conv = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        x = self.linear(torch.relu(x))
        image = x[:, None].reshape(-1, 1, 1, 3)
        return self.conv(functional.pad(self.conv(image), (0, 2, 1, 0))).sum() + self.linear(x[:, None])


def test_layers_that_are_called_several_times_get_the_box_of_all_calls() -> None:
    network, box = Shared().double().eval(), random_box((3,), 0, 1.0)
    made = propagate(network, ["linear", "conv"], box)
    assert made["linear"].low.shape == (3,)
    assert made["conv"].low.shape == (1, 2, 5)
    assert made["linear"].ball is None
    seen: dict[str, list[Tensor]] = {"linear": [], "conv": []}
    network.linear.register_forward_pre_hook(lambda _, args: seen["linear"].append(args[0].reshape(-1, 3)))
    network.conv.register_forward_pre_hook(
        lambda _, args: seen["conv"].append(functional.pad(args[0], (0, 5 - args[0].shape[3], 0, 2 - args[0].shape[2])))
    )
    with torch.no_grad():
        for point in points_in(box, 1):
            network(point[None])
    assert len(seen["linear"]) > 3
    for name, values in seen.items():
        assert_holds(made[name], torch.cat(values))


def test_positions_moved_to_the_axis_of_samples_are_joined() -> None:
    network = nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Flatten(0, 1), nn.Linear(3, 1)).double()
    box = random_box((6,), 0, 1.0)
    made = propagate(network, ["2"], box)["2"]
    assert torch.equal(made.low, box.low.reshape(2, 3).amin(0))
    assert torch.equal(made.high, box.high.reshape(2, 3).amax(0))


def test_the_network_and_its_hooks_are_left_as_they_were() -> None:
    network = mlp((3, 4, 2)).double()
    propagate(network, ["0", "2"], random_box((3,), 0, 1.0))
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in network.modules())
    assert type(network(torch.zeros(1, 3, dtype=torch.float64))) is Tensor


def test_a_float32_network_has_the_boxes_of_its_float64_copy_and_inference_mode_changes_nothing() -> None:
    layers = (nn.Linear(5, 5), nn.PReLU(5), nn.LayerNorm(5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    network, box = shaken(nn.Sequential(*layers), 0).eval(), random_box((5,), 0, 1.0)
    with torch.inference_mode():
        single = propagate(network, ["0", "4"], Box(box.low.clone(), box.high.clone()))
    double = propagate(network.double(), ["0", "4"], box)
    for name in ("0", "4"):
        assert torch.equal(single[name].low, double[name].low)
        assert torch.equal(single[name].high, double[name].high)


def test_an_operation_in_place_does_not_reach_what_a_layer_saw() -> None:
    class Reused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            made = self.linear(x)
            x.mul_(0.0)
            return made

    box = random_box((2,), 0, 1.0)
    made = propagate(Reused().double(), ["linear"], box)["linear"]
    assert torch.equal(made.low, box.low)
    assert torch.equal(made.high, box.high)


def test_a_ball_does_not_outlive_a_change_through_a_view() -> None:
    with torch.no_grad():
        x = functional.linear(Interval(*(torch.ones(1, 4, dtype=torch.float64) for _ in range(2))), torch.eye(4))
        view = x.view(2, 2)
        assert view.ball is not None
        x.add_(1.0)
        assert view.ball is None
        assert x.ball is not None


# ----------------------------------------------------------------------------------------------------- what is refused


class Doing(nn.Module):
    def __init__(self, what: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Any:
        return self.what(x)


def wrong(what: Callable[[Tensor], Any], width: float = 1.0) -> None:
    network = nn.Sequential(nn.Identity(), Doing(what), nn.Linear(3, 1)).double()
    propagate(network, ["2"], Box(torch.zeros(3) - width, torch.zeros(3) + width))


def branching(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def written_elsewhere(x: Tensor) -> Tensor:
    made = torch.zeros(1, 3, dtype=torch.float64)
    made[:, 0] = x[:, 0]
    return made


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        (torch.sort, ConversionError, r"in module '1': .*got torch.sort, which has none.*interval_rule\(torch.sort\)"),
        (lambda x: torch.fft.fft(x), ConversionError, r"a rule for every operation; got torch.fft"),
        (branching, ConversionError, r"in module '1': .*without looking at its values; got torch.Tensor.gt"),
        (lambda x: x * float(x[0, 0]), ConversionError, r"looking at its values; got torch.Tensor.__float__"),
        (lambda x: x.argmax(1), ConversionError, r"looking at its values; got torch.Tensor.argmax"),
        (lambda x: x.max(1), ConversionError, r"amax or amin over an axis.*Use torch.amax"),
        (written_elsewhere, ConversionError, r"write what it computes.*Use torch.cat"),
        (lambda x: torch.zeros(1, 3).add_(x), ConversionError, r"does not write what it computes.*Write y = f\(x\)"),
        (lambda x: 1 / x, ConversionError, r"divisor is never zero.*Add a positive number"),
        (torch.log, ValueRangeError, r"defined on the whole interval; got torch.log.*Shrink the box"),
        (torch.sqrt, ValueRangeError, r"defined on the whole interval; got torch.sqrt"),
        (lambda x: x**-1, ConversionError, r"got torch.pow, which has none"),
        (lambda x: (1e300 * x) ** 2, ValueRangeError, r"in module '2': .*finite bounds; got an overflow in front"),
        (lambda x: functional.dropout(x, training=True), ConversionError, r"dropout in evaluation mode.*network.eval"),
        (lambda x: torch.dropout(x, 0.5, True), ConversionError, r"got torch.dropout, which has none"),
        (lambda x: functional.batch_norm(x, None, None, training=True), ConversionError, r"running statistics"),
        (lambda x: x.to(torch.int64), ConversionError, r"got torch.Tensor.to, which has none"),
        (
            lambda x: x.reshape(1, 5),
            ConversionError,
            r"in module '1': it needs to take one sample.*invalid for input of size",
        ),
    ],
)
def test_what_cannot_be_followed_is_named_with_its_place(
    what: Callable[[Tensor], Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        wrong(what)


@pytest.mark.usefixtures("unchecked")
def test_bad_boxes_and_unused_layers_are_refused() -> None:
    network = mlp((3, 2)).double()
    zeros, ones = torch.zeros(3), torch.ones(3)
    with pytest.raises(ShapeError, match=r"one shape; got \(3,\) and \(4,\)"):
        propagate(network, ["0"], Box(zeros, torch.ones(4)))
    with pytest.raises(ValueRangeError, match=r"low <= high, both finite; got 3 of 3 numbers without"):
        propagate(network, ["0"], Box(ones, zeros))
    with pytest.raises(ValueRangeError, match=r"both finite; got 3 of 3"):
        propagate(network, ["0"], Box(zeros, ones / 0))
    unused = nn.Sequential(nn.Linear(3, 2))
    unused.register_module("extra", nn.Module())
    unused.extra.layer = nn.Linear(2, 2)
    unused.forward = lambda x: unused[0](x)  # type: ignore[method-assign]
    with pytest.raises(ConversionError, match=r"'extra.layer' was not"):
        propagate(unused.double(), ["0", "extra.layer"], Box(zeros, ones))


def test_a_rule_can_be_added() -> None:
    def cube_root(x: Tensor) -> Tensor:
        if torch.overrides.has_torch_function_unary(x):
            return torch.overrides.handle_torch_function(cube_root, (x,), x)
        return x.sign() * x.abs() ** (1 / 3)

    with pytest.raises(ConversionError, match=r"got .*cube_root"):
        wrong(cube_root)

    @interval_rule(cube_root)
    def bounds(x: Interval) -> Interval:
        return Interval(cube_root(x.low) - 1e-12, cube_root(x.high) + 1e-12)

    network = nn.Sequential(Doing(cube_root), nn.Linear(3, 1)).double()
    made = propagate(network, ["1"], Box(-8 * torch.ones(3), torch.ones(3)))["1"]
    assert torch.allclose(made.low, torch.tensor(-2.0, dtype=torch.float64), atol=1e-11)
    assert torch.allclose(made.high, torch.tensor(1.0, dtype=torch.float64), atol=1e-11)
