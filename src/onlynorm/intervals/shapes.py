"""Interval rules for functions that reshape, select, average or compare entries.

Such functions are monotone in every entry, so they are applied to both bounds. If no entry is used twice, the ball is
propagated too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from onlynorm.intervals.linear import rounding
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


def move(function: Plain, *args: Any, **options: Any) -> Any:
    """Applies the function to bounds and ball, for functions that use every entry at most once."""
    made = copy(function, *args, **options)
    given = list(_intervals((args, options)))
    if all(one.ball is None for one in given):
        return made
    balls = {id(one): ball_of(one) for one in given}
    centres = _each(function, args, options, lambda one: balls[id(one)].centre)
    # An interval passed twice counts twice.
    radius = math.hypot(*(balls[id(one)].radius for one in given)) * (1.0 + 4 * EPS)
    for one, centre in zip(made if isinstance(made, tuple) else (made,), centres, strict=True):
        one.ball = Ball(centre, radius)
    return made


def copy(function: Plain, *args: Any, **options: Any) -> Any:
    """Applies the function to the bounds, for exact functions that are monotone in every entry."""
    low, high = (_each(function, args, options, end) for end in (lambda one: one.low, lambda one: one.high))
    made = tuple(Interval(*bounds) for bounds in zip(low, high, strict=True))
    return made[0] if len(made) == 1 and not _returns_many(function) else made


def _returns_many(function: Plain) -> bool:
    return getattr(function, "__name__", "") in ("chunk", "split", "tensor_split", "unbind")


def _each(
    function: Plain, args: tuple[Any, ...], options: dict[str, Any], replace: Callable[[Interval], Tensor]
) -> tuple[Tensor, ...]:
    made = function(*_replaced(args, replace), **_replaced(options, replace))
    return tuple(made) if _returns_many(function) else (made,)


def _replaced(tree: Any, replace: Callable[[Interval], Tensor]) -> Any:
    if isinstance(tree, Interval):
        return replace(tree)
    if isinstance(tree, dict):
        return {key: _replaced(value, replace) for key, value in tree.items()}
    if isinstance(tree, list | tuple) and not isinstance(tree, torch.Size):
        return type(tree)(_replaced(value, replace) for value in tree)
    return tree


def _intervals(tree: Any) -> Iterator[Interval]:
    if isinstance(tree, Interval):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _intervals(value)


def select(x: Any, index: Any) -> Any:
    """The entries at an index, which must not be an interval."""
    if not isinstance(x, Interval) or any(_intervals(index)):
        raise no_rule(Tensor.__getitem__)
    parts = index if isinstance(index, tuple) else (index,)
    may_repeat = any(isinstance(part, Tensor | list) for part in parts)
    return (copy if may_repeat else move)(Tensor.__getitem__, x, index)


def rows(x: Interval) -> Iterator[Interval]:
    """The slices of x along its first dimension."""
    return iter(move(torch.unbind, x))


def assign(x: Any, index: Any, value: Any) -> None:
    """Assigns entries of x in place."""
    if not isinstance(x, Interval):
        raise IntervalError(
            "certified ranges need a network that does not write intervals into other tensors; got an assignment to a "
            "part of a constant. Use torch.cat or functional.pad, or use calibrated ranges."
        )
    x.low[index], x.high[index] = ends(value)


def dropout(x: Interval, p: float = 0.5, training: bool = True) -> Interval:
    """x itself, in evaluation mode."""
    if training:
        raise IntervalError(
            "certified ranges need dropout in evaluation mode; got it in training mode. Call network.eval()."
        )
    return x


def same(x: Interval, *_: Any) -> Interval:
    """x itself."""
    return x


def cast(x: Interval, *args: Any, **options: Any) -> Any:
    """x, widened by the rounding of a lower precision; later operations are bounded as in float64."""
    given = (*args, *options.values())
    dtypes = [value.dtype if isinstance(value, Tensor) else value for value in given]
    dtypes = [value for value in dtypes if isinstance(value, torch.dtype)]
    if any(not dtype.is_floating_point for dtype in dtypes):
        raise no_rule(Tensor.to)
    if dtypes == [torch.float64] or (given and not dtypes):
        return x
    coarse = torch.finfo(dtypes[0] if dtypes else torch.float32)
    return enclose(x.low, x.high, error=coarse.eps * size(x.low, x.high) + coarse.tiny)


def like(function: Plain, x: Interval, *args: Any, **options: Any) -> Any:
    """A constant with the shape, dtype and device of x."""
    return function(x.low, *args, **options)


def pad(x: Interval, pad: Any, mode: str = "constant", value: float | None = None) -> Any:
    """x padded with a constant or with its own entries."""
    rule = move if mode == "constant" else copy
    return rule(functional.pad, x, pad, mode=mode, value=value)


def where(condition: Tensor, x: Any, y: Any) -> Interval:
    """torch.where with a constant condition."""
    if isinstance(condition, Interval):
        raise no_rule(torch.where)
    return Interval(*(torch.where(condition, a, b) for a, b in zip(ends(x), ends(y), strict=True)))


def masked_fill(x: Any, mask: Tensor, value: Any) -> Interval:
    """x with a constant where the mask is True."""
    return where(mask, value, x)


# ------------------------------------------------------------------------------------------- sums, averages, extremes


def average(function: Plain, x: Interval, *args: Any, **options: Any) -> Interval:
    """A weighted sum with nonnegative weights, on both bounds."""
    low, high = (function(bound, *args, **options) for bound in (x.low, x.high))
    n_terms = x.low.numel() // max(1, x.low.shape[0] if x.low.ndim > 1 else 1)
    error = rounding(n_terms) * function(size(x.low, x.high), *args, **options)
    ball = None
    if x.ball is not None and (stretch := _stretch(function, x.low, low)) is not None:
        centre = function(x.ball.centre, *args, **options)
        inexact = norm(error + rounding(n_terms) * function(x.ball.centre.abs(), *args, **options))
        ball = Ball(centre, x.ball.radius * stretch, extra=inexact)
    return enclose(low, high, error=error, ball=ball)


def _stretch(function: Plain, x: Tensor, made: Tensor) -> float | None:
    """The norm of a sum or mean over groups of equal size; None if entries may be used twice."""
    n = x.numel() / max(1, made.numel())
    name = function.__name__
    if name == "sum":
        return math.sqrt(n)
    is_whole = name.startswith("adaptive") and made[0].numel() == x.shape[1]
    return 1 / math.sqrt(n) if name == "mean" or is_whole else None


def interpolate(x: Interval, *args: Any, **options: Any) -> Interval:
    """Interpolation; weights are nonnegative except in bicubic mode."""
    if options.get("mode") == "bicubic":
        raise no_rule(functional.interpolate)
    return average(functional.interpolate, x, *args, **options)


def largest_in_windows(
    function: Plain, x: Interval, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> Any:  # fmt: skip
    """Max pooling; disjoint windows do not increase distances, so the ball is propagated."""
    if return_indices:
        raise no_rule(function)
    axes = int(function.__name__[-2])
    kernel, steps, spread = (
        value if isinstance(value, tuple | list) else (value,) * axes for value in (kernel_size, stride, dilation)
    )
    is_disjoint = not stride or all(d * (k - 1) < s for k, s, d in zip(kernel, steps, spread, strict=True))
    rule = move if is_disjoint and set(spread) == {1} else copy
    return rule(function, x, kernel_size, stride, padding, dilation, ceil_mode)


def extreme(pairwise: Plain, over: Plain, x: Any, *args: Any, **options: Any) -> Any:
    """The maximum or minimum of x, or of x and y elementwise; raises with a dimension, which returns indices."""
    if not args and not options:
        return copy(over, x)
    if len(args) == 1 and isinstance(args[0], Tensor):
        return pairwise(x, args[0])
    raise IntervalError(
        "certified ranges need amax or amin over a dimension; got max or min, which return indices too. Use torch.amax "
        "or torch.amin, or use calibrated ranges."
    )
