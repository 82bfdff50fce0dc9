"""Bounds of what layers stretch: never below the largest singular value of the layer as a matrix, nor far above."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import normal
from torch import Tensor, nn

from onlynorm.intervals import tensor
from onlynorm.intervals.tensor import Stretch


def as_matrix(layer: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """The layer as a matrix: a column for every number of its input."""
    units = torch.eye(math.prod(shape), dtype=torch.float64).reshape(-1, *shape)
    with torch.no_grad():
        return layer(units).flatten(1).mT


def seeded(layer: nn.Module, seed: int = 0) -> Any:
    """The layer with random weights and without bias."""
    with torch.no_grad():
        layer.weight.copy_(torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(seed)))
        if layer.bias is not None:
            layer.bias.zero_()
    return layer.double().requires_grad_(False)


@given(
    st.integers(1, 4), st.sampled_from([1, 2, 3, (2, 3), 4]), st.integers(1, 3), st.integers(0, 3), st.integers(1, 2),
    st.sampled_from([1, 2]), st.integers(0, 2**31),
)  # fmt: skip
@settings(max_examples=60)
def test_a_convolution_never_stretches_more_than_its_bound(
    channels: int, kernel: Any, stride: int, padding: int, dilation: int, groups: int, seed: int
) -> None:
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "bias": False}
    layer = seeded(nn.Conv2d(2 * channels, 4, kernel, **options), seed)
    matrix = as_matrix(layer, (2 * channels, 8, 7))
    assert Stretch(layer.weight, groups).bound() >= float(torch.linalg.matrix_norm(matrix, 2))


def test_on_a_large_image_the_bound_is_tight() -> None:
    layer = seeded(nn.Conv2d(3, 4, 3, padding=1))
    truth = float(torch.linalg.matrix_norm(as_matrix(layer, (3, 16, 16)), 2))
    # The border lowers the norm by a few percent at this size, the grid of frequencies adds one.
    assert truth <= Stretch(layer.weight).bound() <= 1.1 * truth


def test_a_linear_layer_is_bounded_by_its_largest_singular_value() -> None:
    weight = normal(5, 9)
    truth = float(torch.linalg.matrix_norm(weight, 2))
    assert truth <= Stretch(weight).bound() <= truth * (1 + 2 * tensor.SLACK)
    assert Stretch(weight.mT).bound() == pytest.approx(truth)


def test_three_axes_and_one_are_bounded_too() -> None:
    for layer, shape in ((nn.Conv1d(2, 3, 5, padding=2), (2, 9)), (nn.Conv3d(2, 2, 2, padding=1), (2, 3, 3, 4))):
        truth = float(torch.linalg.matrix_norm(as_matrix(seeded(layer), shape), 2))
        assert truth <= Stretch(layer.weight).bound() <= 2 * truth


def test_beyond_the_work_allowed_patches_bound_it(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = seeded(nn.Conv2d(3, 4, 3, padding=1))
    narrow = Stretch(layer.weight).bound()
    monkeypatch.setattr(tensor, "LARGEST_WORK", 0.0)
    wide = Stretch(layer.weight).bound()
    weight = layer.weight.flatten(1)
    truth = float(torch.linalg.matrix_norm(weight, 2))
    assert truth <= Stretch(weight).bound() <= 2 * truth
    assert narrow < wide <= 3 * float(torch.linalg.vector_norm(layer.weight)) * (1 + 2 * tensor.SLACK)


def test_a_norm_behind_the_layer_is_part_of_it() -> None:
    weight = normal(4, 3, 3, 3, seed=1)
    scale = torch.tensor([0.0, 1.0, -2.0, 0.5], dtype=torch.float64)
    together = Stretch(weight).scaled(scale).bound()
    assert together == pytest.approx(Stretch(weight * scale[:, None, None, None]).bound())
    assert together < 2.0 * Stretch(weight).bound()
