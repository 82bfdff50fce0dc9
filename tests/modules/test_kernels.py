"""Larger source kernels leave the function of a convolution as it was, whatever its padding, stride and dilation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import normal
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.errors import ShapeError
from onlynorm.modules.convolution import embed, explicit_padding, kernel_margins, need_room, plain_kernel, source_shape
from onlynorm.modules.layers import layer_options, plain_layer

ROUNDING = 1e-13
"""Sums of a few dozen products of order one, in another order."""


@given(
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    more=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    padding=st.one_of(st.sampled_from(["valid", "same"]), st.tuples(st.integers(0, 2), st.integers(0, 2))),
    stride=st.integers(1, 2),
    dilation=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    mode=st.sampled_from(["zeros", "reflect", "replicate", "circular"]),
)
@settings(max_examples=80)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_a_larger_kernel_with_more_padding_is_the_same_convolution(
    kernel: tuple[int, int],
    more: tuple[int, int],
    padding: str | tuple[int, int],
    stride: int,
    dilation: tuple[int, int],
    mode: str,
) -> None:
    stride = 1 if padding == "same" else stride
    layer = nn.Conv2d(2, 3, kernel, stride, padding, dilation, padding_mode=mode, dtype=torch.float64)
    larger = (kernel[0] + more[0], kernel[1] + more[1])
    inputs, options = normal(2, 2, 19, 20), layer_options(layer)
    wanted = layer(inputs)

    padded = functional.pad(inputs, explicit_padding(options, larger), mode="constant" if mode == "zeros" else mode)
    weight = embed(layer.weight, larger)
    assert weight.shape[2:] == larger
    made = functional.conv2d(padded, weight, layer.bias, stride=stride, dilation=dilation)
    assert torch.allclose(made, wanted, rtol=0, atol=ROUNDING)

    weight, options = plain_kernel(weight, options)
    plain = plain_layer(weight, layer.bias, options)
    assert torch.allclose(plain(inputs), wanted, rtol=0, atol=ROUNDING)


def test_weights_outside_the_targets_kernel_count_in_the_plain_layer_as_well() -> None:
    layer = nn.Conv1d(1, 1, 2, padding=1, padding_mode="circular", dtype=torch.float64)
    weight, inputs, options = normal(1, 1, 5), normal(1, 1, 9), layer_options(layer)
    padded = functional.pad(inputs, explicit_padding(options, (5,)), mode="circular")
    plain = plain_layer(*_with_bias(*plain_kernel(weight, options)))
    assert torch.allclose(plain(inputs), functional.conv1d(padded, weight), rtol=0, atol=ROUNDING)


def _with_bias(weight: Tensor, options: dict[str, object]) -> tuple[Tensor, None, dict[str, object]]:
    return weight, None, options


def test_the_target_sits_in_the_middle() -> None:
    assert kernel_margins((3, 2), (3, 2)) == ((0, 0), (0, 0))
    assert kernel_margins((3, 2), (5, 5)) == ((1, 1), (1, 2))
    assert embed(torch.ones(1, 1, 2), (5,)).tolist() == [[[0.0, 1.0, 1.0, 0.0, 0.0]]]


def test_the_source_kernel_is_taken_for_every_axis_and_a_smaller_one_is_refused() -> None:
    assert source_shape((4, 3, 3, 2), None) == (4, 3, 3, 2)
    assert source_shape((4, 3, 3, 2), 5) == (4, 3, 5, 5)
    assert source_shape((4, 3, 3, 2), (3, 4)) == (4, 3, 3, 4)
    assert source_shape((4, 3), 5) == (4, 3)  # a linear layer has no kernel
    with pytest.raises(ShapeError, match=r"target's kernel \(3, 3\).*got 2"):
        source_shape((4, 3, 3, 3), 2)
    with pytest.raises(ShapeError, match=r"; got \(3,\)"):
        source_shape((4, 3, 3, 3), (3,))


def test_a_reflection_wider_than_the_input_is_refused_with_the_cure() -> None:
    options = layer_options(nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"))
    need_room((3, 3, 3, 3), options, (1, 2, 4, 4))
    with pytest.raises(ShapeError, match=r"'reflect' needs inputs larger.*got size 3 .*padding 3"):
        need_room((3, 3, 3, 3), options, (1, 2, 4, 3))
    need_room((4, 4), layer_options(nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular")), (1, 2, 4))
    need_room((9, 9), layer_options(nn.Conv1d(2, 2, 3, padding=1)), (1, 2, 4))
