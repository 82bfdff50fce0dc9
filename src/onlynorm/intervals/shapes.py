"""Rules for intervals in whatever moves, selects, averages or compares numbers without mixing signs.

Such functions are monotone in every entry, so they are applied to both bounds. Where no entry is used twice, the ball
moves along.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from onlynorm.intervals.elementwise import maximum, minimum
from onlynorm.intervals.linear import rounding
from onlynorm.intervals.tensor import (
    EPS,
    Ball,
    Interval,
    IntervalError,
    aliases,
    ball_of,
    enclose,
    ends,
    interval_rule,
    no_rule,
    norm,
    size,
)

Plain = Callable[..., Any]

# Functions that keep every number at most once, that may repeat numbers, that act in training only, that need a shape.
MOVES = (
    "reshape", "flatten", "unflatten", "ravel", "permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis",
    "squeeze", "unsqueeze", "t", "chunk", "split", "tensor_split", "unbind", "narrow", "select", "contiguous", "cat",
    "concat", "concatenate", "stack", "hstack", "vstack", "flip", "roll", "pixel_shuffle", "pixel_unshuffle",
    "channel_shuffle", "clone",
)  # fmt: skip
COPIES = ("expand", "expand_as", "broadcast_to", "repeat", "tile", "repeat_interleave", "index_select", "unfold")
DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
LIKE = ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_tensor")


def move(function: Plain, *args: Any, **options: Any) -> Any:
    """The function on the bounds; numbers keep their distance to the centre of the ball, and none appears twice."""
    made = copy(function, *args, **options)
    given = list(_intervals((args, options)))
    if all(one.ball is None for one in given):
        return made
    balls = {id(one): ball_of(one) for one in given}
    centres = _each(function, args, options, lambda one: balls[id(one)].centre)
    # One that is passed twice counts twice.
    radius = math.hypot(*(balls[id(one)].radius for one in given)) * (1.0 + 4 * EPS)
    for one, centre in zip(made if isinstance(made, tuple) else (made,), centres, strict=True):
        one.ball = Ball(centre, radius)
    return made


def copy(function: Plain, *args: Any, **options: Any) -> Any:
    """The function on the bounds, for functions that are monotone in every entry and exact."""
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


for _names, _rule in ((MOVES, move), (COPIES, copy)):
    for _name in _names:
        for _function in aliases(_name, in_place=False):
            interval_rule(_function)(functools.partial(_rule, _function))
for _property in ("T", "mT", "H", "mH"):
    _function = getattr(Tensor, _property).__get__
    interval_rule(_function)(functools.partial(move, _function))

# Bounds may lie in memory otherwise than the network's own tensors, where a view is always possible.
interval_rule(Tensor.view)(functools.partial(move, Tensor.reshape))
interval_rule(Tensor.view_as)(functools.partial(move, Tensor.reshape_as))
interval_rule(Tensor.reshape_as)(functools.partial(move, Tensor.reshape_as))


@interval_rule(Tensor.__getitem__)
def select(x: Any, index: Any) -> Any:
    """The numbers at an index, which must not be an interval itself."""
    if not isinstance(x, Interval) or any(_intervals(index)):
        raise no_rule(Tensor.__getitem__)
    parts = index if isinstance(index, tuple) else (index,)
    may_repeat = any(isinstance(part, Tensor | list) for part in parts)
    return (copy if may_repeat else move)(Tensor.__getitem__, x, index)


@interval_rule(Tensor.__iter__)
def rows(x: Interval) -> Iterator[Interval]:
    """The parts of x along its first axis."""
    return iter(move(torch.unbind, x))


@interval_rule(Tensor.__setitem__)
def assign(x: Any, index: Any, value: Any) -> None:
    """Numbers of x replaced in place."""
    if not isinstance(x, Interval):
        raise IntervalError(
            "certified ranges need a network that does not write what it computes into other tensors; got an "
            "assignment to a part of a constant. Use torch.cat or functional.pad, or use calibrated ranges."
        )
    x.low[index], x.high[index] = ends(value)


@interval_rule(*(getattr(functional, name) for name in DROPOUTS))
def dropout(x: Interval, p: float = 0.5, training: bool = True) -> Interval:
    """x itself, in evaluation mode."""
    if training:
        raise IntervalError(
            "certified ranges need dropout in evaluation mode; got it in training mode. Call network.eval()."
        )
    return x


@interval_rule(Tensor.detach, torch.detach, Tensor.double, Tensor.requires_grad_)
def same(x: Interval, *_: Any) -> Interval:
    """x itself."""
    return x


@interval_rule(*aliases("to", "type", "type_as", "float", "half", "bfloat16", in_place=False))
def cast(x: Interval, *args: Any, **options: Any) -> Any:
    """x itself; in a lower precision, x widened by its rounding. What is computed there is bounded as in float64."""
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
    """A constant that only takes shape, precision and device from x."""
    return function(x.low, *args, **options)


for _name in LIKE:
    for _function in aliases(_name, in_place=False):
        interval_rule(_function)(functools.partial(like, _function))


@interval_rule(*aliases("pad", in_place=False))
def pad(x: Interval, pad: Any, mode: str = "constant", value: float | None = None) -> Any:
    """x with constants or with some of its own numbers around it."""
    rule = move if mode == "constant" else copy
    return rule(functional.pad, x, pad, mode=mode, value=value)


@interval_rule(torch.where)
def where(condition: Tensor, x: Any, y: Any) -> Interval:
    """x or y, by a condition that does not depend on values."""
    if isinstance(condition, Interval):
        raise no_rule(torch.where)
    return Interval(*(torch.where(condition, a, b) for a, b in zip(ends(x), ends(y), strict=True)))


@interval_rule(*aliases("masked_fill"))
def masked_fill(x: Any, mask: Tensor, value: Any) -> Interval:
    """x with a constant where the mask says so."""
    return where(mask, value, x)


# ------------------------------------------------------------------------------------------- sums, averages, extremes


def average(function: Plain, x: Interval, *args: Any, **options: Any) -> Interval:
    """A sum with weights that are not negative, on both bounds."""
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
    """What sums or means over groups of one size stretch at most; None where numbers may be used twice."""
    n = x.numel() / max(1, made.numel())
    name = function.__name__
    if name == "sum":
        return math.sqrt(n)
    is_whole = name.startswith("adaptive") and made[0].numel() == x.shape[1]
    return 1 / math.sqrt(n) if name == "mean" or is_whole else None


for _name in ("sum", "mean", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
              "adaptive_avg_pool3d"):  # fmt: skip
    for _function in aliases(_name, in_place=False):
        interval_rule(_function)(functools.partial(average, _function))


@interval_rule(functional.interpolate)
def interpolate(x: Interval, *args: Any, **options: Any) -> Interval:
    """An enlarged or reduced image; weights are never negative except in bicubic interpolation."""
    if options.get("mode") == "bicubic":
        raise no_rule(functional.interpolate)
    return average(functional.interpolate, x, *args, **options)


for _name in ("amax", "amin", "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"):
    for _function in aliases(_name, in_place=False):
        interval_rule(_function)(functools.partial(copy, _function))


def largest_in_windows(
    function: Plain, x: Interval, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> Any:  # fmt: skip
    """The largest number in every window; windows that share none move no two tensors apart."""
    if return_indices:
        raise no_rule(function)
    axes = int(function.__name__[-2])
    kernel, steps, spread = (
        value if isinstance(value, tuple | list) else (value,) * axes for value in (kernel_size, stride, dilation)
    )
    is_disjoint = not stride or all(d * (k - 1) < s for k, s, d in zip(kernel, steps, spread, strict=True))
    rule = move if is_disjoint and set(spread) == {1} else copy
    return rule(function, x, kernel_size, stride, padding, dilation, ceil_mode)


for _name in ("max_pool1d", "max_pool2d", "max_pool3d"):
    for _function in aliases(_name, in_place=False):
        interval_rule(_function)(functools.partial(largest_in_windows, getattr(functional, _name)))


def extreme(pairwise: Plain, over: Plain, x: Any, *args: Any, **options: Any) -> Any:
    """The largest or smallest number of x, or of x and y elementwise; with an axis torch returns indices as well."""
    if not args and not options:
        return copy(over, x)
    if len(args) == 1 and isinstance(args[0], Tensor):
        return pairwise(x, args[0])
    raise IntervalError(
        "certified ranges need amax or amin over an axis; got max or min with one, which returns indices that depend "
        "on values. Use torch.amax or torch.amin, or use calibrated ranges."
    )


interval_rule(*aliases("max", in_place=False))(functools.partial(extreme, maximum, torch.amax))
interval_rule(*aliases("min", in_place=False))(functools.partial(extreme, minimum, torch.amin))
