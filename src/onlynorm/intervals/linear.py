"""Interval rules for linear maps and norms: layers, matrix products, batch, layer, group and RMS norms.

A linear map A maps the centre of an interval to the centre of its image, and the radius r to |A| r. If a ball of radius
d is known too, an output with weights a is within |a| d (Euclidean norm) of the image of its centre.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from onlynorm.intervals.tensor import (
    EPS,
    Ball,
    Interval,
    IntervalError,
    Stretch,
    ball_of,
    enclose,
    ends,
    norm,
    size,
)

Product = Callable[[Tensor, Tensor], Tensor]


def rounding(n_terms: int) -> float:
    """Four times the error bound of a sum of n products, relative to the sum of their absolute values."""
    return 4.0 * (n_terms + 4) * EPS


def bilinear(product: Product, left: Any, right: Any, *, n_terms: int) -> tuple[Tensor, Tensor, Tensor]:
    """(centre, radius, error) of a bilinear product of intervals or constants; n_terms are summed in each output."""
    (a, a_reach), (b, b_reach) = (_centred(*ends(side)) for side in (left, right))
    centre = product(a, b)
    radius = torch.zeros_like(centre)
    if a_reach is not None:
        radius = product(a_reach, b.abs() if b_reach is None else b.abs() + b_reach)
    if b_reach is not None:
        radius = radius + product(a.abs(), b_reach)
    return centre, radius, rounding(n_terms) * (product(a.abs(), b.abs()) + radius)


def layer(product: Product, x: Any, weight: Any, bias: Tensor | None, *, groups: int = 1, axes: int = 0) -> Interval:
    """The output of a linear layer with `axes` spatial dimensions after the channels."""
    shape = (-1, *(1,) * axes)
    if isinstance(bias, Interval):
        plain: Any = layer(product, x, weight, None, groups=groups, axes=axes)
        return plain + bias.reshape(shape)
    n_terms = weight.shape[1:].numel()
    centre, radius, error = bilinear(product, x, weight, n_terms=n_terms)
    added = torch.zeros((), dtype=torch.float64) if bias is None else bias.detach().double().reshape(shape)
    error = error + rounding(n_terms) * added.abs()
    centre = centre + added
    low, high = centre - radius, centre + radius
    if isinstance(weight, Interval) or not isinstance(x, Interval):
        return enclose(low, high, error=error)
    fixed = weight.detach().double()
    held = ball_of(x)
    middle, inexact = centre, error
    if x.ball is not None:
        middle = product(held.centre, fixed) + added
        inexact = error + rounding(n_terms) * (product(held.centre.abs(), fixed.abs()) + added.abs())
        # Cauchy-Schwarz; never narrower for a ball computed from the box.
        row = torch.linalg.vector_norm(fixed.flatten(1), dim=1).reshape(shape) * (1.0 + rounding(n_terms))
        reach = row * held.radius + inexact
        low, high = torch.maximum(low, middle - reach), torch.minimum(high, middle + reach)
    ball = Ball(middle, held.inner, Stretch(fixed, groups), norm(inexact))
    return enclose(low, high, error=error, ball=ball)


def linear(x: Any, weight: Any, bias: Tensor | None = None) -> Interval:
    """A linear layer."""
    return layer(functional.linear, x, weight, bias)


def convolve(
    conv: Callable[..., Tensor], axes: int, x: Any, weight: Any, bias: Tensor | None = None,
    stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
) -> Interval:  # fmt: skip
    """A convolution of any stride, padding, dilation and groups."""
    product = functools.partial(conv, stride=stride, padding=padding, dilation=dilation, groups=groups)
    return layer(product, x, weight, bias, groups=groups, axes=axes)


def convolve_transposed(
    conv: Callable[..., Tensor], axes: int, x: Any, weight: Any, bias: Tensor | None = None,
    stride: Any = 1, padding: Any = 0, output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
) -> Interval:  # fmt: skip
    """A transposed convolution, without a ball."""
    options = {"stride": stride, "padding": padding, "output_padding": output_padding, "groups": groups}
    product = functools.partial(conv, **options, dilation=dilation)
    centre, radius, error = bilinear(product, x, weight, n_terms=weight.numel() // weight.shape[1])
    if bias is not None:
        added = bias.detach().double().reshape(-1, *(1,) * axes)
        centre, error = centre + added, error + rounding(1) * added.abs()
    return enclose(centre - radius, centre + radius, error=error)


def matmul(left: Any, right: Any) -> Interval:
    """A matrix product, with one or both factors intervals."""
    if not isinstance(right, Interval) and right.ndim == 2:
        return linear(left, right.mT)
    centre, radius, error = bilinear(torch.matmul, left, right, n_terms=left.shape[-1])
    return enclose(centre - radius, centre + radius, error=error)


def add_matmul(x: Any, left: Any, right: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    """beta x + alpha left right, by the rules of its parts."""
    return matmul(left, right) * alpha + x * beta


def einsum(equation: str, *operands: Any) -> Interval:
    """An einsum of two tensors."""
    if len(operands) != 2:
        raise IntervalError(
            f"certified ranges need einsum over two tensors; got {len(operands)}. Split it into several, or use "
            "calibrated ranges."
        )
    centre, radius, error = bilinear(
        functools.partial(torch.einsum, equation), *operands, n_terms=max(one.numel() for one in operands)
    )
    return enclose(centre - radius, centre + radius, error=error)


def attention(
    query: Any, key: Any, value: Any, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """softmax(scale query key^T + mask) value, by the rules of its parts."""
    if dropout_p or enable_gqa:
        raise IntervalError(
            "certified ranges need attention without dropout or shared heads; got dropout_p or enable_gqa. Call "
            "network.eval(), or use calibrated ranges."
        )
    scores = torch.matmul(query, key.transpose(-2, -1)) * (1.0 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        is_words = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if is_words else scores + attn_mask
    return torch.matmul(scores.softmax(-1), value)


def batch_norm(
    x: Interval, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5, *_: Any,
) -> Interval:  # fmt: skip
    """A batch norm in evaluation mode, an affine map per channel; merged into the `Stretch` of its layer."""
    if training or running_mean is None or running_var is None:
        raise IntervalError(
            "certified ranges need batch norms with running statistics in evaluation mode; got one that uses batch "
            "statistics. Call network.eval(), or use calibrated ranges."
        )
    mean, variance = running_mean.double(), running_var.double()
    scale = (1.0 if weight is None else weight.detach().double()) / torch.sqrt(variance + eps)
    shift = 0.0 * mean if bias is None else bias.detach().double()
    shape = (-1, *(1,) * (x.low.ndim - 2))
    factor, added, away = (values.reshape(shape) for values in (scale, shift - scale * mean, scale * mean))
    first, second = factor * x.low + added, factor * x.high + added
    rest = shift.abs().reshape(shape) + away.abs()
    error = 16 * EPS * (factor.abs() * size(x.low, x.high) + rest)
    known = x.ball
    ball = None
    if known is not None:
        widest = float(scale.abs().max())
        inexact = norm(error + 16 * EPS * (factor.abs() * known.centre.abs() + rest))
        centre = factor * known.centre + added
        # The channels are the outputs of the preceding layer only if both have the same number of dimensions.
        if known.stretch is not None and known.stretch.weight.ndim == x.low.ndim:
            ball = Ball(centre, known.inner, known.stretch.scaled(scale), known.extra * widest + inexact)
        else:
            ball = Ball(centre, known.radius * widest, extra=inexact)
    return enclose(torch.minimum(first, second), torch.maximum(first, second), error=error, ball=ball)


def layer_norm(x: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any) -> Any:
    """Layer norm over the last dimensions."""
    made = _standardise(x.flatten(-len(normalized_shape)), eps).reshape(x.shape)
    made = made if weight is None else made * weight
    return made if bias is None else made + bias


def group_norm(x: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any) -> Any:
    """Group norm over channels and positions."""
    shape = (-1, *(1,) * (x.ndim - 2))
    made = _standardise(x.reshape(x.shape[0], num_groups, -1), eps).reshape(x.shape)
    made = made if weight is None else made * weight.reshape(shape)
    return made if bias is None else made + bias.reshape(shape)


def instance_norm(
    x: Interval, running_mean: Any = None, running_var: Any = None, weight: Any = None, bias: Any = None,
    use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5, *_: Any,
) -> Any:  # fmt: skip
    """Instance norm over positions, or with running statistics."""
    if not use_input_stats:
        return batch_norm(x, running_mean, running_var, weight, bias, eps=eps)
    return group_norm(x, x.shape[1], weight, bias, eps)


def rms_norm(x: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """x_i / sqrt((x_i^2 + rest) / n + eps), monotone in x_i and in the sum of the other squares, so exact."""
    flat = x.flatten(-len(normalized_shape))
    low, high, n = flat.low, flat.high, flat.shape[-1]
    largest = size(low, high).square()
    smallest = torch.where((low <= 0) & (high >= 0), 0.0, torch.minimum(low.square(), high.square()))
    most = largest.sum(-1, keepdim=True) * (1.0 + rounding(n)) - largest
    least = (smallest.sum(-1, keepdim=True) * (1.0 - rounding(n)) - smallest).clamp(min=0.0)
    room = EPS if eps is None else eps

    def value(at: Tensor, rest: Tensor) -> Tensor:
        return at / torch.sqrt((at.square() + rest) / n + room)

    first = value(low, torch.where(low < 0, least, most))
    second = value(high, torch.where(high > 0, least, most))
    made = enclose(first, second, error=rounding(n) * size(first, second)).reshape(x.shape)
    return made if weight is None else made * weight


def _standardise(x: Interval, eps: float) -> Interval:
    """(x - mean) / sqrt(variance + eps) over the last dimension, at most sqrt(n - 1) in absolute value.

    Numerator and denominator are bounded separately. The smallest variance in the box is the minimum over t of the mean
    squared distance of t to the n intervals, a convex function, bounded below by its tangents.
    """
    low, high, n = x.low, x.high, x.shape[-1]
    largest = size(low, high)
    scale = largest + largest.mean(-1, keepdim=True)
    bottom = (1 - 1 / n) * low - (high.sum(-1, keepdim=True) - high) / n - rounding(n) * scale
    top = (1 - 1 / n) * high - (low.sum(-1, keepdim=True) - low) / n + rounding(n) * scale
    start, stop = low.amin(-1, keepdim=True), high.amax(-1, keepdim=True)
    width = stop - start
    for _ in range(64):
        middle = start / 2 + stop / 2
        is_right = (middle - high).relu().sum(-1, keepdim=True) >= (low - middle).relu().sum(-1, keepdim=True)
        start, stop = torch.where(is_right, start, middle), torch.where(is_right, middle, stop)
    away = (start - high).relu() + (low - start).relu()
    slope = 2 * ((start - high).relu() - (low - start).relu()).mean(-1, keepdim=True)
    inexact = rounding(n) * (away.square().mean(-1, keepdim=True) + 2 * width * away.mean(-1, keepdim=True))
    least = (away.square().mean(-1, keepdim=True) - slope.abs() * width - inexact).clamp(min=0.0)
    centre = (low / 2 + high / 2).mean(-1, keepdim=True)
    most = torch.maximum(high - centre, centre - low).square().mean(-1, keepdim=True) * (1.0 + rounding(n))
    small, large = torch.sqrt(least + eps), torch.sqrt(most + eps)
    limit = math.sqrt(max(0, n - 1))
    first = (bottom / torch.where(bottom < 0, small, large)).clamp(-limit, limit)
    second = (top / torch.where(top > 0, small, large)).clamp(-limit, limit)
    # Mean and variance in the network have errors of n eps times the largest entry, relative to the deviation.
    error = rounding(n) * (1.0 + size(first, second)) * (1.0 + largest.amax(-1, keepdim=True) / small)
    return enclose(first, second, error=error)


def _centred(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor | None]:
    """(centre, radius), with the radius rounded up; None for a constant."""
    if low is high:
        return low, None
    centre = low / 2 + high / 2
    return centre, torch.maximum(high - centre, centre - low) * (1.0 + 2 * EPS)
