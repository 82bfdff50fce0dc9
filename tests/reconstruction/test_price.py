"""The price of certified ranges: what it says is what the ranges cost."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from onlynorm import Ranges, Wide
from onlynorm.errors import ValueRangeError
from onlynorm.intervals.tensor import Box
from onlynorm.models import mlp
from onlynorm.reconstruction import reconstruct, verify
from onlynorm.reconstruction.certified_price import certified_price
from onlynorm.reconstruction.ranges import FREE_MARGIN


def batch(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def unit_box(n: int) -> Box:
    return Box(torch.zeros(n), torch.ones(n))


def test_the_price_of_the_first_layer_is_that_of_its_margins() -> None:
    """The batch has the corners of the box, so that only the margins differ."""
    corner = torch.stack([torch.zeros(1), torch.ones(1)]).double()
    price = certified_price(nn.Sequential(nn.Linear(1, 2)), corner, box=unit_box(1))
    assert price.layers[0].ratio == pytest.approx(1 / (1 + 2 * FREE_MARGIN), rel=3e-3)
    assert price.layers[0].digits == pytest.approx(math.log10(price.layers[0].ratio))


def test_depth_costs_digits_and_a_smaller_box_saves_them() -> None:
    network, inputs = mlp([16] * 6, seed=2), batch(64, 16)
    price = certified_price(network, inputs, box=unit_box(16))
    ratios = [layer.ratio for layer in price.layers]
    assert [layer.name for layer in price.layers] == ["0", "2", "4", "6", "8"]
    assert all(later > earlier for earlier, later in itertools.pairwise(ratios))
    assert price.worst.name == "8"
    assert str(price).splitlines()[0].endswith("digits, at 8")
    near = inputs[:1] + 1e-3 * inputs
    smaller = certified_price(network, near, box=Box(near.amin(0), near.amax(0)))
    assert smaller.worst.ratio < price.worst.ratio / 3


def test_the_digits_are_those_that_float32_loses() -> None:
    """Ortho cond is solved in closed form, so that the ranges make all of the error."""
    network, inputs = mlp([32] * 5, seed=3).eval(), batch(128, 32).float()
    price = certified_price(network, inputs, box=unit_box(32), activation=nn.ReLU())
    errors = []
    for box in (None, unit_box(32)):
        made = reconstruct(network, inputs, Wide(activation=nn.ReLU(), features="ortho_cond"), ranges=Ranges(box=box))
        errors.append(verify(network, made.network, inputs).relative_error)
    lost = math.log10(errors[1] / errors[0])
    # The last layer loses most; the others add to it, and rounding errors scatter.
    assert abs(lost - price.worst.digits) <= 0.5


def test_inputs_outside_the_box_are_refused() -> None:
    with pytest.raises(ValueRangeError, match=r"box .* calibration batch"):
        certified_price(mlp((4, 2)), 2 + batch(8, 4), box=unit_box(4))
