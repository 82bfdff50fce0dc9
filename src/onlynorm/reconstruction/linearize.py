"""`linearize`: windows in which an activation is linear, and norms that map features into them.

A feature x in [low, high] with half-width r passes a norm and an activation phi. The window is chosen such that

    |phi(s x + b) - (m (s x + b) + c)| <= error   for all x in [low, high],   s > 0,   m != 0

so phi(s x + b) = gain x + constant up to `error`, with gain = m s and constant = m b + c; undone by the layers
after, the error in x is error / (|m| s). With z the centre and h the half-width of the window in the input of phi,
s = h / r, and this is r times error / (|m| h): the best windows of an activation are the same for all ranges.

- Exact windows, known by type: the half-axis or segment where phi is linear (ReLU, LeakyReLU, PReLU, ELU, CELU, SELU,
  Hardtanh, ReLU6, Hardsigmoid, Hardswish), or the tail where the nonlinear rest is provably below the rounding error
  (GELU, SiLU, Mish, Softplus, LogSigmoid).
- tanh and sigmoid: at 0, by |tanh t - t| <= |t|^3 / 3 and |sigmoid t - 1/2 - t/4| <= |t|^3 / 48, proven for all t.
- Other activations: windows of all sizes and positions are sampled; see `activations.chart` for the assumptions.

The line is the tangent at the centre of the window, not the best approximation: its largest error is up to four times
larger, but occurs at the ends of the range. Near the centre, where most data lie, the error is far smaller.

Theory: burkholz2024:thm-2.4, burkholz2024:activations
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from onlynorm.display import Result
from onlynorm.errors import ShapeError, ValueRangeError
from onlynorm.modules.activations import Activation, Cubic, Ray, Segment, chart, known, leak
from onlynorm.validate import as_real, need_callable, need_flag, need_float_dtype

STEEP = 1e-3
"""The minimum slope of a used side of a leaky activation: a smaller one would need a scale above a thousand."""
LARGEST = 1e200
"""Larger ranges would overflow when scaled; half-widths below its inverse count as constant."""


@dataclass(frozen=True)
class Window(Result):
    """The scale, shift and line of each feature, with error bounds.

    `error` is the certified bound in the units of phi's output. `rounding`, in the units of x, models the rounding
    error of s x + b, phi and the inverse map, for a phi accurate to a few units in the last place:
    eps (max |x| + (|b| + 4 (2 max |t| + (|c| + error) / |m|)) / s) with t = s x + b. With `is_exact`, phi is linear on
    the windows up to rounding.
    """

    scale: Float[Tensor, "*feat"]
    shift: Float[Tensor, "*feat"]
    slope: Float[Tensor, "*feat"]
    offset: Float[Tensor, "*feat"]
    error: Float[Tensor, "*feat"]
    rounding: Float[Tensor, "*feat"]
    tolerance: Float[Tensor, "*feat"]
    is_exact: bool

    @property
    def gain(self) -> Float[Tensor, "*feat"]:
        """The factor of x, slope * scale; its sign is the same for all features."""
        return self.slope * self.scale

    @property
    def constant(self) -> Float[Tensor, "*feat"]:
        """The constant added to gain * x, slope * shift + offset."""
        return self.slope * self.shift + self.offset

    @property
    def error_in_input(self) -> Float[Tensor, "*feat"]:
        """The certified error in the units of x: error / |gain|."""
        return self.error / self.gain.abs()

    @property
    def bound(self) -> Float[Tensor, "*feat"]:
        """Certified error plus rounding, in the units of x."""
        return self.error_in_input + self.rounding

    @property
    def is_met(self) -> bool:
        """Whether the error of every feature, including rounding, is within its tolerance."""
        return bool((self.bound <= self.tolerance).all())

    def __str__(self) -> str:
        lines = [
            f"window of {self.scale.numel()} features: {'exact' if self.is_exact else 'approximate'}, "
            f"error at most {float(self.error_in_input.max()):.1e} + {float(self.rounding.max()):.1e} rounding, "
            f"|gain| {float(self.gain.abs().min()):.3g} to {float(self.gain.abs().max()):.3g}, "
            f"shifts up to {float(self.shift.abs().max()):.3g}"
        ]
        if not self.is_met:
            excess = self.bound / self.tolerance
            lines.append(
                f"short: {int((excess > 1).sum())} features above their tolerance, by a factor of up to "
                f"{float(excess.max()):.3g}. Narrow the ranges, raise the tolerance, or use a piecewise linear "
                "activation such as ReLU."
            )
        return "\n".join(lines)


def linearize(
    activation: Activation | None,
    low: Float[Tensor, "*feat"] | float,
    high: Float[Tensor, "*feat"] | float,
    *,
    tolerance: Float[Tensor, "*feat"] | float,
    shared: bool = False,
    among: Extent | None = None,
    dtype: torch.dtype = torch.float64,
) -> Window:
    """The window of every feature, from the range [low, high] of its pre-activation.

    Exact windows are used if they exist. Otherwise it is the largest window whose error and rounding are within the
    `tolerance` in x, or the one with the smallest sum (`is_met` is then False). `shared` gives all features the same
    gain, for the widest range and the smallest tolerance: this is required before a frozen dense layer, whose norm has
    one scale per output. For a subset of the features, `among` is the extent of all. `dtype` is the precision of the
    network and determines `rounding`. The window itself is float64.

    Examples:
        >>> import torch
        >>> from onlynorm.reconstruction import linearize
        >>> window = linearize(torch.nn.Tanh(), -1.0, 1.0, tolerance=1e-6)
        >>> window.is_met, window.is_exact
        (True, False)
    """
    if activation is not None:
        need_callable("activation", activation, cure="Pass a module such as torch.nn.Tanh(), or None.")
    low, high, allowed = _checked(low, high, tolerance)
    shared = need_flag("shared", shared)
    eps = torch.finfo(need_float_dtype("dtype", dtype)).eps
    half, size = _half_and_size(low, high, eps)
    all_features = Extent(half.max(), size.max()) if among is None else among
    spread = all_features.half if shared else half
    budget = ((allowed.min() - 2 * eps * all_features.size) if shared else (allowed - 2 * eps * size)) / spread

    found = known(activation)
    is_exact = isinstance(found, Ray | Segment)
    if isinstance(found, Ray):
        line = _on_ray(found, low, high, spread)
        if (slopes := leak(activation)) is not None:
            line = _nearer(line, _on_ray(Ray(0.0, -1, _per_feature(slopes, low)), low, high, spread))
    else:
        if isinstance(found, Segment):
            centre, reach, slope, offset = (_like(value, spread) for value in found)
            error = torch.zeros_like(half)
        elif isinstance(found, Cubic):
            centre, slope, offset = (_like(value, spread) for value in (0.0, found.slope, found.offset))
            reach = found.reach(budget, eps)
            error = found.factor * (reach * half / spread) ** 3
        else:
            assert activation is not None
            windows, is_exact = chart(activation, low.device).choose(budget, eps)
            centre, reach, slope, offset, error = windows
        scale = reach / spread
        line = _Line(scale, centre - scale * (low / 2 + high / 2), slope, offset, error)

    scale, shift, slope, offset, error = (value.expand(half.shape).clone() for value in line)
    largest = torch.maximum((scale * low + shift).abs(), (scale * high + shift).abs())
    after = 2 * largest + (offset.abs() + error) / slope.abs()
    rounding = eps * (size + (shift.abs() + 4 * after) / scale)
    return Window(scale, shift, slope, offset, error, rounding, allowed, is_exact)


class Extent(NamedTuple):
    """The largest half-width of a range, as used by `linearize`, and the largest absolute value in a range."""

    half: Tensor
    size: Tensor


def extent(low: Float[Tensor, "*feat"], high: Float[Tensor, "*feat"], *, dtype: torch.dtype) -> Extent:
    """The extent of these ranges for a network in this precision."""
    half, size = _half_and_size(low, high, torch.finfo(dtype).eps)
    return Extent(half.max(), size.max())


def _half_and_size(low: Tensor, high: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    size = torch.maximum(low.abs(), high.abs())
    # A minimum half-width relative to the values, so that rounding errors stay inside the window.
    half = torch.maximum((high - low) / 2, 4096 * eps * size)
    return torch.where(half < 1 / LARGEST, 1.0, half), size


class _Line(NamedTuple):
    """phi(scale x + shift) = slope * (scale x + shift) + offset up to `error`; each broadcasts to the features."""

    scale: Tensor
    shift: Tensor
    slope: Tensor
    offset: Tensor
    error: Tensor


def _on_ray(ray: Ray, low: Tensor, high: Tensor, spread: Tensor) -> _Line:
    """The line with the smallest shift into the ray; zero if the range is already inside.

    |gain| is one, so that features may use different rays. For a distant edge it is |edge| / r, so that the range is
    not smaller than the shift.
    """
    slope = _like(ray.slope, low)
    gain = (abs(ray.edge) / spread).clamp(min=1.0) if math.isfinite(ray.edge) else torch.ones_like(spread)
    scale = gain / slope
    missing = ray.side * (ray.edge - scale * (low if ray.side > 0 else high))
    return _Line(scale, ray.side * missing.clamp(min=0.0), slope, torch.zeros_like(low), _like(ray.error, low))


def _nearer(line: _Line, other: _Line) -> _Line:
    """Per feature the line with the smaller shift of x, if it is steep enough."""
    better = (other.slope >= STEEP) & (other.shift.abs() / other.scale < line.shift.abs() / line.scale)
    return _Line(*(torch.where(better, new, old) for old, new in zip(line, other, strict=True)))


def _per_feature(slopes: Tensor, low: Tensor) -> Tensor:
    if slopes.ndim and slopes.shape != low.shape:
        raise ShapeError(
            f"linearize needs one PReLU slope for all features or one for each; got {slopes.numel()} slopes for ranges "
            f"of shape {tuple(low.shape)}. Pass the ranges of all channels of the layer at once."
        )
    return slopes.to(low)


def _checked(low: Tensor | float, high: Tensor | float, tolerance: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
    low, high, tolerance = (
        as_real(name, value, cure="Pass a number, or one per feature.").detach().double()
        for name, value in (("low", low), ("high", high), ("tolerance", tolerance))
    )
    high, tolerance = high.to(low.device), tolerance.to(low.device)
    if not low.numel() or low.shape != high.shape or tolerance.shape not in (low.shape, ()):
        raise ShapeError(
            "linearize needs low and high of one shape, not empty, and a tolerance of that shape or a number; got "
            f"{tuple(low.shape)}, {tuple(high.shape)} and {tuple(tolerance.shape)}. Pass one of each per feature."
        )
    bad = ~((low <= high) & (low > -LARGEST) & (high < LARGEST))
    if bool(bad.any()):
        raise ValueRangeError(
            f"linearize needs ranges with low <= high, finite and below {LARGEST:.0e}; got {int(bad.sum())} others, "
            f"the first [{float(low[bad][0])}, {float(high[bad][0])}]. Check for swapped bounds or NaN in the inputs."
        )
    if not bool((tolerance > 0).all()):
        raise ValueRangeError(
            f"linearize needs tolerances above 0; got {float(tolerance.min())}. Rounding is never 0: try 1e-10."
        )
    return low, high, tolerance.expand(low.shape).clone()


def _like(value: float | Tensor, other: Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=other.dtype, device=other.device).expand(other.shape)
