"""Interval rules for arithmetic, elementwise functions and softmax.

Elementwise functions are monotone between a few known turning points, so their extremes on an interval are at its ends
or at a turning point inside. For Lipschitz functions a ball is propagated too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from onlynorm.intervals.tensor import (
    EPS,
    Ball,
    Interval,
    IntervalError,
    ball_of,
    enclose,
    ends,
    no_rule,
    norm,
    size,
)

Plain = Callable[..., Any]


# ---------------------------------------------------------------------------------------------- elementwise functions


class PiecewiseMonotone(NamedTuple):
    """An elementwise function, monotone between its `turns`; `slope` is its Lipschitz constant, or a function for it.

    Computed values have errors of a few units in the last place; with `cancels`, relative to one.
    """

    function: Plain
    turns: tuple[float, ...] = ()
    slope: float | Callable[..., float] | None = None
    is_exact: bool = False
    cancels: bool = False

    def error(self, values: Tensor) -> Tensor:
        """Bound of the rounding error of computed values."""
        return 0.0 * values if self.is_exact else 16 * EPS * (values.abs() + float(self.cancels))


def elementwise(curve: PiecewiseMonotone, x: Interval, *args: Any, **options: Any) -> Interval:
    """Applies an elementwise function with these options to an interval."""
    if any(isinstance(value, Interval) for value in (*args, *options.values())):
        raise no_rule(curve.function)
    args = tuple(value.detach().double() if isinstance(value, Tensor) else value for value in args)

    def value(at: Tensor) -> Tensor:
        made: Tensor = curve.function(at, *args, **options)
        return made

    low, high = _extremes([value(x.low), value(x.high)])
    for turn in curve.turns:
        at = value(torch.full_like(x.low, turn))
        is_inside = (x.low < turn) & (turn < x.high)
        low = torch.where(is_inside, torch.minimum(low, at), low)
        high = torch.where(is_inside, torch.maximum(high, at), high)
    ball, known = None, x.ball
    if curve.slope is not None and known is not None:
        slope = curve.slope if isinstance(curve.slope, float) else curve.slope(*args, **options)
        centre = value(known.centre)
        ball = Ball(centre, known.radius * slope, extra=norm(curve.error(size(low, high)) + curve.error(centre)))
    if curve.is_exact:
        return Interval(low, high, ball=ball)
    return enclose(low - curve.error(low), high + curve.error(high), ball=ball)


def _leak(negative_slope: float = 0.01) -> float:
    return max(1.0, abs(negative_slope))


def _channel_leak(weight: Tensor) -> float:
    return max(1.0, float(weight.abs().max()))


def _steepest(alpha: float = 1.0) -> float:
    return max(1.0, abs(alpha))


# The turns of both forms of GELU, of SiLU and of Mish are the only zeros of their derivatives; slopes are rounded up.
CURVES = {
    "sigmoid": PiecewiseMonotone(torch.sigmoid, slope=0.25),
    "tanh": PiecewiseMonotone(torch.tanh, slope=1.0),
    "logsigmoid": PiecewiseMonotone(functional.logsigmoid, slope=1.0),
    "softsign": PiecewiseMonotone(functional.softsign, slope=1.0),
    "hardsigmoid": PiecewiseMonotone(functional.hardsigmoid, slope=0.16667, cancels=True),
    "leaky_relu": PiecewiseMonotone(functional.leaky_relu, (0.0,), _leak),
    "prelu": PiecewiseMonotone(functional.prelu, (0.0,), _channel_leak),
    "elu": PiecewiseMonotone(functional.elu, (0.0,), _steepest, cancels=True),
    "celu": PiecewiseMonotone(functional.celu, (0.0,), 1.0, cancels=True),
    "selu": PiecewiseMonotone(functional.selu, (0.0,), 1.7581, cancels=True),
    "gelu": PiecewiseMonotone(functional.gelu, (-0.7517915246935645, -0.7524614220710162), 1.129, cancels=True),
    "silu": PiecewiseMonotone(functional.silu, (-1.278464542761074,), 1.0999),
    "mish": PiecewiseMonotone(functional.mish, (-1.1924312145154956,), 1.0885),
    "hardswish": PiecewiseMonotone(functional.hardswish, (-1.5,), 1.5, cancels=True),
    "exp": PiecewiseMonotone(torch.exp),
    "expm1": PiecewiseMonotone(torch.expm1),
    "log": PiecewiseMonotone(torch.log),
    "log1p": PiecewiseMonotone(torch.log1p),
    "sqrt": PiecewiseMonotone(torch.sqrt),
    "rsqrt": PiecewiseMonotone(torch.rsqrt),
    "erf": PiecewiseMonotone(torch.erf, slope=1.1284),
    "atan": PiecewiseMonotone(torch.atan, slope=1.0),
    "square": PiecewiseMonotone(torch.square, (0.0,)),
    "relu": PiecewiseMonotone(torch.relu, slope=1.0, is_exact=True),
    "relu6": PiecewiseMonotone(functional.relu6, slope=1.0, is_exact=True),
    "hardtanh": PiecewiseMonotone(functional.hardtanh, slope=1.0, is_exact=True),
    "clamp": PiecewiseMonotone(torch.clamp, slope=1.0, is_exact=True),
    "clip": PiecewiseMonotone(torch.clip, slope=1.0, is_exact=True),
    "clamp_min": PiecewiseMonotone(torch.clamp_min, slope=1.0, is_exact=True),
    "clamp_max": PiecewiseMonotone(torch.clamp_max, slope=1.0, is_exact=True),
    "abs": PiecewiseMonotone(torch.abs, (0.0,), 1.0, is_exact=True),
}


def softplus(x: Interval, beta: float = 1.0, threshold: float = 20.0) -> Interval:
    """log(1 + exp(beta x)) / beta; torch returns x above the threshold, and is slightly smaller there."""
    made = elementwise(PiecewiseMonotone(functional.softplus, slope=1.0, cancels=True), x, beta, threshold)
    room = 8 * EPS * abs(threshold)
    is_passed = (beta * x.low <= threshold + room) & (beta * x.high >= threshold - room)
    drop = torch.where(is_passed, math.log1p(math.exp(room - threshold)) / beta, 0.0)
    ball = made.ball
    if ball is not None:
        ball = Ball(ball.centre, ball.radius + norm(drop))
    return enclose(made.low, made.high, error=drop, ball=ball)


def power(x: Any, exponent: Any) -> Any:
    """x to the power of a positive integer or 0.5."""
    if not isinstance(x, Interval) or not isinstance(exponent, int | float):
        raise no_rule(torch.pow)
    if exponent == 0.5:
        return x.sqrt()
    if exponent != int(exponent) or exponent < 1:
        raise no_rule(torch.pow)
    turns = (0.0,) if int(exponent) % 2 == 0 else ()
    return elementwise(PiecewiseMonotone(torch.pow, turns), x, exponent)


# --------------------------------------------------------------------------------------------------------- arithmetic


def add(x: Any, y: Any, *, alpha: float = 1) -> Interval:
    """x + alpha y."""
    y = y if alpha == 1 else y * alpha
    (x_low, x_high), (y_low, y_high) = ends(x), ends(y)
    low, high = x_low + y_low, x_high + y_high
    parts = [part for part in (x, y) if isinstance(part, Interval)]
    if all(part.ball is None for part in parts) or any(part.low.shape != low.shape for part in parts):
        return enclose(low, high)
    balls = [ball_of(part) for part in parts]
    constants = [ends(part)[0] for part in (x, y) if not isinstance(part, Interval)]
    centre = functools.reduce(torch.add, [*(ball.centre for ball in balls), *constants])
    inexact = norm(4 * EPS * (size(low, high) + centre.abs()))
    return enclose(low, high, ball=Ball(centre, sum(ball.radius for ball in balls), extra=inexact))


def subtract(x: Any, y: Any, *, alpha: float = 1) -> Interval:
    """x - alpha y."""
    return add(x, -y if alpha == 1 else y * -alpha)


def subtract_from(x: Any, y: Any) -> Interval:
    """y - x."""
    return add(y, -x)


def negate(x: Interval) -> Interval:
    """-x, exactly."""
    ball = x.ball
    return Interval(-x.high, -x.low, ball=None if ball is None else Ball(-ball.centre, ball.radius))


def multiply(x: Any, y: Any) -> Any:
    """x y elementwise."""
    if x is y:
        return x.square()
    if not isinstance(x, Interval):
        x, y = y, x
    made = enclose(*_extremes([a * b for a in ends(x) for b in ends(y)]))
    return made if isinstance(y, Interval) else _scaled(x, ends(y)[0], made)


def add_product(x: Any, y: Any, z: Any, *, value: float = 1) -> Any:
    """x + value y z."""
    return y * z * value + x


def divide(x: Any, y: Any, *, rounding_mode: str | None = None) -> Interval:
    """x / y elementwise, for nonzero y."""
    low, high = ends(y)
    if rounding_mode is not None or bool(((low <= 0) & (high >= 0)).any()):
        raise IntervalError(
            "certified ranges need nonzero divisors and no rounding_mode; got a divisor whose interval contains zero, "
            "or a rounding_mode. Add a positive constant to it, or use calibrated ranges."
        )
    made = enclose(*_extremes([a / b for a in ends(x) for b in (low, high)]))
    return made if isinstance(y, Interval) else _scaled(x, 1.0 / low, made)


def divide_into(x: Interval, y: Any = 1.0) -> Interval:
    """y / x."""
    return divide(y, x)


def maximum(x: Any, y: Any) -> Interval:
    """The larger of x and y, exactly."""
    return Interval(*(torch.maximum(a, b) for a, b in zip(ends(x), ends(y), strict=True)))


def minimum(x: Any, y: Any) -> Interval:
    """The smaller of x and y, exactly."""
    return Interval(*(torch.minimum(a, b) for a, b in zip(ends(x), ends(y), strict=True)))


# ------------------------------------------------------------------------------------------------------------ softmax


def softmax(x: Interval, dim: int, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Interval:
    """Softmax: increasing in its own input and decreasing in all others."""
    low, high = (torch.sigmoid(bound) for bound in _logit_bounds(x, dim))
    made = enclose(low, high, error=16 * EPS * torch.ones_like(low))
    return Interval(made.low.clamp(min=0.0), made.high.clamp(max=1.0 + 16 * EPS))


def log_softmax(x: Interval, dim: int, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Interval:
    """The logarithm of softmax."""
    low, high = (functional.logsigmoid(bound) for bound in _logit_bounds(x, dim))
    return enclose(low, high, error=16 * EPS * (1.0 + size(low, high)))


def _logit_bounds(x: Interval, dim: int) -> tuple[Tensor, Tensor]:
    """Bounds of z_i = x_i - log(sum over j != i of exp x_j); softmax is sigmoid(z)."""
    finite = torch.where(torch.isfinite(x.low) & torch.isfinite(x.high), size(x.low, x.high), 0.0)
    # Error bound of the logarithms of sums.
    inexact = 16 * EPS * (x.low.shape[dim] + finite.amax(dim, keepdim=True))
    least, most = (torch.logsumexp(bound, dim, keepdim=True) for bound in (x.low, x.high))
    own = (x.low - least + inexact).clamp(max=0.0), (x.high - most - inexact).clamp(max=0.0)
    rest = least + torch.log1p(-torch.exp(own[0])) - inexact, most + torch.log1p(-torch.exp(own[1])) + inexact
    return x.low - rest[1] - inexact, x.high - rest[0] + inexact


def _extremes(corners: list[Tensor]) -> tuple[Tensor, Tensor]:
    return functools.reduce(torch.minimum, corners), functools.reduce(torch.maximum, corners)


def _scaled(x: Interval, factor: Tensor, made: Interval) -> Interval:
    """The product of x and a constant, with the ball of x scaled by the largest factor."""
    if x.ball is not None and x.low.shape == made.low.shape:
        centre = x.ball.centre * factor
        inexact = norm(8 * EPS * (size(made.low, made.high) + centre.abs()))
        made.ball = Ball(centre, x.ball.radius * float(factor.abs().max()), extra=inexact)
    return made
