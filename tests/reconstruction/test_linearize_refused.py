"""What is no activation, no range or no tolerance is refused by `linearize` with the cure."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from onlynorm.errors import OnlynormError, ShapeError, ValueRangeError
from onlynorm.reconstruction.linearize import linearize


@pytest.mark.parametrize(
    ("activation", "error", "message"),
    [
        (torch.zeros_like, ValueRangeError, r"nonzero slope somewhere.*slope zero .*constant.*Use another activation"),
        (torch.sign, ValueRangeError, r"nearly linear.*error of "),
        (lambda x: x * math.nan, ValueRangeError, r"got only NaN on \[-3, 3\]\. Pass an elementwise function"),
        (nn.Softmax(dim=-1), ValueRangeError, "got values that change with their count"),
        (lambda x: x.cumsum(0), ValueRangeError, "got values that change with their order"),
        (lambda x: x + torch.rand_like(x), ValueRangeError, r"got values that change with each call.*eval\(\) mode"),
        (nn.Dropout(0.5), ValueRangeError, "got values that change with each call"),
        (lambda x: x.mean(), ShapeError, r"elementwise.*got shape \(\) from \(64,\)"),
        (nn.GLU(), ValueRangeError, "got RuntimeError: Halving dimension"),
        (nn.BatchNorm1d(4), ValueRangeError, r"elementwise.*got \w+Error: .*Pass an elementwise function"),
        (lambda x: 3.0, ValueRangeError, "got AttributeError"),
    ],
)
def test_what_is_no_activation_is_refused(
    activation: Callable[[Tensor], Tensor], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"(?s){message}"):
        linearize(activation, -1.0, 1.0, tolerance=1e-6)


@pytest.mark.usefixtures("unchecked")
def test_misuse_says_what_is_needed() -> None:
    one, two = torch.zeros(1, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    with pytest.raises(ShapeError, match=r"low and high of one shape.*got \(1,\), \(2,\) and \(\)\. Pass one of each"):
        linearize(torch.relu, one, two, tolerance=1e-6)
    with pytest.raises(ShapeError, match=r"got \(2,\), \(2,\) and \(1,\)"):
        linearize(torch.relu, -two, two, tolerance=one + 1)
    with pytest.raises(ShapeError, match="not empty"):
        linearize(torch.relu, one[:0], one[:0], tolerance=1e-6)
    with pytest.raises(ShapeError, match=r"one PReLU slope.*got 3 slopes for ranges of shape \(2,\)\. Pass the ranges"):
        linearize(nn.PReLU(3), -two, two, tolerance=1e-6)
    with pytest.raises(ValueRangeError, match=r"low <= high.*got 2 others, the first \[1\.0, -1\.0\].*swapped"):
        linearize(torch.relu, two, -two, tolerance=1e-6)
    for low, high in ((math.nan, 1.0), (-math.inf, 1.0), (0.0, 1e250)):
        with pytest.raises(ValueRangeError, match=r"finite and below 1e\+200; got 1 others"):
            linearize(torch.relu, low, high, tolerance=1e-6)
    for tolerance in (0.0, -1.0, math.nan):
        with pytest.raises(OnlynormError, match=r"tolerances above 0; got .*try 1e-10"):
            linearize(torch.relu, -1.0, 1.0, tolerance=tolerance)
