"""Interval arithmetic: whatever a network does, what its layers see lies inside the boxes, rounding included."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from boxes import WIDTHS, assert_holds, assert_network_holds, points_in, random_box, shaken
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.errors import ConversionError, ShapeError, ValueRangeError
from onlynorm.intervals.propagate import propagate
from onlynorm.intervals.rules import interval_rule
from onlynorm.intervals.tensor import Box, Interval
from onlynorm.models import mlp

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
        (branching, ConversionError, r"in module '1': .*data-dependent.*; got torch.Tensor.gt"),
        (lambda x: x * float(x[0, 0]), ConversionError, r"data-dependent.*; got torch.Tensor.__float__"),
        (lambda x: x.argmax(1), ConversionError, r"data-dependent.*; got torch.Tensor.argmax"),
        (lambda x: x.max(1), ConversionError, r"amax or amin over .*Use torch.amax"),
        (written_elsewhere, ConversionError, r"write .*Use torch.cat"),
        (lambda x: torch.zeros(1, 3).add_(x), ConversionError, r"does not write .*Write y = f\(x\)"),
        (lambda x: 1 / x, ConversionError, r"divisors.*Add a positive"),
        (torch.log, ValueRangeError, r"defined on the whole interval; got torch.log.*Shrink the box"),
        (torch.sqrt, ValueRangeError, r"defined on the whole interval; got torch.sqrt"),
        (lambda x: x**-1, ConversionError, r"got torch.pow, which has none"),
        (lambda x: (1e300 * x) ** 2, ValueRangeError, r"in module '2': .*finite bounds; got an overflow"),
        (lambda x: functional.dropout(x, training=True), ConversionError, r"dropout in evaluation mode.*network.eval"),
        (lambda x: torch.dropout(x, 0.5, True), ConversionError, r"got torch.dropout, which has none"),
        (lambda x: functional.batch_norm(x, None, None, training=True), ConversionError, r"running statistics"),
        (lambda x: x.to(torch.int64), ConversionError, r"got torch.Tensor.to, which has none"),
        (
            lambda x: x.reshape(1, 5),
            ConversionError,
            r"in module '1': it needs to .* one sample.*invalid for input of size",
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
    zeros, ones = torch.zeros(3), torch.ones(3)
    with pytest.raises(ShapeError, match=r"shape; got \(3,\) and \(4,\)"):
        Box(zeros, torch.ones(4))
    with pytest.raises(ShapeError, match=r"shape; got \(\) and \(3,\)"):
        Box(0.0, ones)  # type: ignore[arg-type]
    with pytest.raises(ValueRangeError, match=r"low <= high, both finite; got 3 .*of 3 entries"):
        Box(ones, zeros)
    for bad in (ones / 0, ones * float("nan")):
        with pytest.raises(ValueRangeError, match=r"both finite; got 3 .*of 3"):
            Box(zeros, bad)
    with pytest.raises(ValueRangeError, match=r"high of a box must be real"):
        Box(zeros, ones.to(torch.complex64))
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


@pytest.mark.usefixtures("unchecked")
def test_a_box_takes_numpy_arrays_and_refuses_what_is_no_tensor() -> None:
    box = Box(np.zeros(3), np.ones(3))
    assert torch.equal(box.high, torch.ones(3, dtype=torch.float64))
    with pytest.raises(ConversionError, match=r"low of a box .*; got None"):
        Box(None, torch.ones(3))  # type: ignore[arg-type]


def test_boxes_with_equal_bounds_are_equal() -> None:
    box = Box(torch.zeros(3), torch.ones(3))
    same = Box(torch.zeros(3).double(), torch.ones(3))
    assert box == same
    assert len({box, same, Box(torch.zeros(3), 2 * torch.ones(3)), Box(torch.zeros(2), torch.ones(2))}) == 3
    assert box != (box.low, box.high)
