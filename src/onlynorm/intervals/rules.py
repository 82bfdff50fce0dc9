"""The rules for intervals: which function of this room answers which torch functions.

A rule takes what the torch function takes and returns an `Interval` that holds every value the function can have. What
is not in `RULES` is refused by name; `interval_rule` adds a rule of your own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from onlynorm.intervals import elementwise, linear, shapes
from onlynorm.intervals.tensor import aliases

Rule = Callable[..., Any]
_Rule = TypeVar("_Rule", bound=Rule)

# Functions that keep every number at most once, that may repeat numbers, that act in training only, that need a shape.
MOVES = (
    "reshape", "flatten", "unflatten", "ravel", "permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis",
    "squeeze", "unsqueeze", "t", "chunk", "split", "tensor_split", "unbind", "narrow", "select", "contiguous", "cat",
    "concat", "concatenate", "stack", "hstack", "vstack", "flip", "roll", "pixel_shuffle", "pixel_unshuffle",
    "channel_shuffle", "clone",
)  # fmt: skip
COPIES = (
    "expand", "expand_as", "broadcast_to", "repeat", "tile", "repeat_interleave", "index_select", "unfold", "amax",
    "amin", "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d",
)  # fmt: skip
AVERAGES = (
    "sum", "mean", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
)  # fmt: skip
DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
LIKE = ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_tensor")


def _for(rule: Rule, *functions: Any) -> dict[Any, Rule]:
    """One rule for all of these functions."""
    return dict.fromkeys(functions, rule)


def _each(rule: Rule, *names: str) -> dict[Any, Rule]:
    """A rule that is given the torch function itself, for every torch function of these names."""
    return {function: partial(rule, function) for name in names for function in aliases(name, in_place=False)}


RULES: dict[Any, Rule] = {
    # linear maps and norms
    **_for(linear.linear, functional.linear),
    functional.conv1d: partial(linear.convolve, functional.conv1d, 1),
    functional.conv2d: partial(linear.convolve, functional.conv2d, 2),
    functional.conv3d: partial(linear.convolve, functional.conv3d, 3),
    functional.conv_transpose1d: partial(linear.convolve_transposed, functional.conv_transpose1d, 1),
    functional.conv_transpose2d: partial(linear.convolve_transposed, functional.conv_transpose2d, 2),
    functional.conv_transpose3d: partial(linear.convolve_transposed, functional.conv_transpose3d, 3),
    **_for(linear.matmul, *aliases("matmul", "mm", "bmm", "mv", "dot", in_place=False)),
    **_for(linear.add_matmul, *aliases("addmm", "baddbmm")),
    **_for(linear.einsum, torch.einsum),
    **_for(linear.attention, functional.scaled_dot_product_attention),
    **_for(linear.batch_norm, functional.batch_norm),
    **_for(linear.layer_norm, *aliases("layer_norm", in_place=False)),
    **_for(linear.group_norm, *aliases("group_norm", in_place=False)),
    **_for(linear.instance_norm, functional.instance_norm),
    **_for(linear.rms_norm, *aliases("rms_norm", in_place=False)),
    # functions of one number, arithmetic, softmax
    **{
        function: partial(elementwise.elementwise, curve)
        for name, curve in elementwise.CURVES.items()
        for function in aliases(name)
    },
    **_for(elementwise.softplus, functional.softplus),
    **_for(elementwise.power, *aliases("pow"), Tensor.__pow__),
    **_for(elementwise.add, *aliases("add"), Tensor.__radd__),
    **_for(elementwise.subtract, *aliases("sub", "subtract")),
    **_for(elementwise.subtract_from, Tensor.__rsub__, torch.rsub),
    **_for(elementwise.negate, *aliases("neg", "negative")),
    **_for(elementwise.multiply, *aliases("mul", "multiply"), Tensor.__rmul__),
    **_for(elementwise.add_product, *aliases("addcmul")),
    **_for(elementwise.divide, *aliases("div", "divide", "true_divide")),
    **_for(elementwise.divide_into, Tensor.__rdiv__, torch.reciprocal, Tensor.reciprocal),
    **_for(elementwise.maximum, *aliases("maximum", in_place=False)),
    **_for(elementwise.minimum, *aliases("minimum", in_place=False)),
    **_for(elementwise.softmax, functional.softmax, torch.softmax, Tensor.softmax),
    **_for(elementwise.log_softmax, functional.log_softmax, torch.log_softmax, Tensor.log_softmax),
    # moving, selecting, averaging, comparing
    **_each(shapes.move, *MOVES),
    **_each(shapes.copy, *COPIES),
    **{
        function: partial(shapes.move, function)
        for function in (getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH"))
    },
    # Bounds may have another memory layout than the tensors of the network, for which a view is always possible.
    Tensor.view: partial(shapes.move, Tensor.reshape),
    Tensor.view_as: partial(shapes.move, Tensor.reshape_as),
    Tensor.reshape_as: partial(shapes.move, Tensor.reshape_as),
    **_for(shapes.select, Tensor.__getitem__),
    **_for(shapes.rows, Tensor.__iter__),
    **_for(shapes.assign, Tensor.__setitem__),
    **_for(shapes.dropout, *(getattr(functional, name) for name in DROPOUTS)),
    **_for(shapes.same, Tensor.detach, torch.detach, Tensor.double, Tensor.requires_grad_),
    **_for(shapes.cast, *aliases("to", "type", "type_as", "float", "half", "bfloat16", in_place=False)),
    **_each(shapes.like, *LIKE),
    **_for(shapes.pad, *aliases("pad", in_place=False)),
    **_for(shapes.where, torch.where),
    **_for(shapes.masked_fill, *aliases("masked_fill")),
    **_each(shapes.average, *AVERAGES),
    **_for(shapes.interpolate, functional.interpolate),
    **_for(partial(shapes.largest_in_windows, functional.max_pool1d), *aliases("max_pool1d", in_place=False)),
    **_for(partial(shapes.largest_in_windows, functional.max_pool2d), *aliases("max_pool2d", in_place=False)),
    **_for(partial(shapes.largest_in_windows, functional.max_pool3d), *aliases("max_pool3d", in_place=False)),
    **_for(partial(shapes.extreme, elementwise.maximum, torch.amax), *aliases("max", in_place=False)),
    **_for(partial(shapes.extreme, elementwise.minimum, torch.amin), *aliases("min", in_place=False)),
}


def interval_rule(*functions: Any) -> Callable[[_Rule], _Rule]:
    """A decorator that makes a function the rule for these torch functions on intervals.

    The rule takes what the torch function takes and returns an `Interval(low, high)` that holds every value the
    function can have on tensors between the bounds of its arguments, rounding included.

    Examples:
        >>> import torch
        >>> from onlynorm.intervals import interval_rule
        >>> from onlynorm.intervals.tensor import Interval
        >>> @interval_rule(torch.asinh)  # increasing: its values are between those at the bounds
        ... def bounds(x):
        ...     return Interval(torch.asinh(x.low) - 1e-12, torch.asinh(x.high) + 1e-12)
    """

    def register(rule: _Rule) -> _Rule:
        RULES.update(_for(rule, *functions))
        return rule

    return register
