"""The named distributions, and `draw`, which turns a name and a target's shape into frozen features.

Scales follow He et al. (2015): variance 2 / fan_in, where fan_in counts the inputs of a neuron of the source
layer at hand, inp * kernel positions for the first and features * kernel positions for the second.

The distributions by name, and what one of them is handed: one side of a layer.

A distribution is a function `fill(side, start, stop)` that returns the numbers of features [start, stop) of
one side as a (stop - start, side.width) float64 array. It must depend on nothing but `side` and the feature's
own number, so that any block alone equals the same block of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from onlynorm.errors import ValueRangeError, shown
from onlynorm.features.orthogonal import haar_columns
from onlynorm.features.streams import Stream, check_density
from onlynorm.validate import need_callable, need_choice, need_flag

if TYPE_CHECKING:
    pass

Array = npt.NDArray[np.float64]
STRUCTURED = ("id_cond", "id_cond_minimal", "ortho_cond")


@dataclass(frozen=True)
class Side:
    """One source layer as a distribution sees it: `width` numbers per feature, laid out feature by feature.

    `part` is "right" (first layer, a row per feature) or "left" (second layer, a column per feature),
    `fan_in` the number of inputs of one neuron of that layer, `density` the chance of an entry to stay (None:
    dense).
    """

    part: str
    width: int
    fan_in: int
    n_features: int
    seed: int
    layer: str
    density: float | None = None

    def stream(self, name: str = "") -> Stream:
        """The side's stream, or a second one of that name."""
        return Stream(self.seed, self.layer, f"{self.part}/{name}" if name else self.part)

    def normals(self, start: int, stop: int) -> Array:
        """Standard normals of features [start, stop)."""
        return self.stream().normals(start * self.width, stop * self.width).reshape(-1, self.width)

    def uniforms(self, start: int, stop: int) -> Array:
        """Uniforms in (0, 1) of features [start, stop)."""
        return self.stream().uniforms(start * self.width, stop * self.width).reshape(-1, self.width)

    def signs(self, start: int, stop: int) -> Array:
        """Random signs, +1.0 or -1.0, of features [start, stop)."""
        return self.stream().signs(start * self.width, stop * self.width).reshape(-1, self.width)

    def mask(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Which entries of features [start, stop) stay, from the stream "<part>/mask"; all if dense."""
        if self.density is None:
            return np.ones((stop - start, self.width), dtype=np.bool_)
        flat = self.stream("mask").mask(self.density, start * self.width, stop * self.width)
        return flat.reshape(-1, self.width)


Fill = Callable[[Side, int, int], Array]


@dataclass(frozen=True)
class Distribution:
    """A registered distribution. `density` is the default of a sparse one; None means it is dense.

    `is_grouped` asks to be called for whole groups of `side.width` features where possible.
    """

    name: str
    fill: Fill
    density: float | None = None
    is_grouped: bool = False


_REGISTRY: dict[str, Distribution] = {}


def register(name: str, *, density: float | None = None, is_grouped: bool = False) -> Callable[[Fill], Fill]:
    """A decorator that adds `fill(side, start, stop)` to the distributions under `name`.

    Give `density` to accept one in `draw` (this is its default); the entries outside `side.mask` are then set
    to zero for you. A file that uses your distribution can only be read where it is registered.
    """
    if not isinstance(name, str) or not name or name in names():
        raise ValueRangeError(
            f"register needs a new, non-empty name; got {shown(name)}. Choose one not in {', '.join(names())}."
        )
    default = None if density is None else check_density(density)
    need_flag("is_grouped", is_grouped)

    def add(fill: Fill) -> Fill:
        need_callable("a distribution", fill, cure="Write a function fill(side, start, stop).")
        _REGISTRY[name] = Distribution(name, fill, default, is_grouped)
        return fill

    return add


def names() -> tuple[str, ...]:
    """The names `draw` knows, sorted."""
    return tuple(sorted((*_REGISTRY, *STRUCTURED)))


def lookup(name: str) -> Distribution | None:
    """The registered distribution, None for a structured name, or an error that suggests the nearest name."""
    return _REGISTRY.get(need_choice("features", name, names()))


@register("he_normal")
def he_normal(side: Side, start: int, stop: int) -> Array:
    """Normal entries of variance 2 / fan_in."""
    return side.normals(start, stop) * math.sqrt(2.0 / side.fan_in)


@register("he_uniform")
def he_uniform(side: Side, start: int, stop: int) -> Array:
    """Uniform entries on +-sqrt(6 / fan_in), of variance 2 / fan_in."""
    return uniform(side, start, stop) * math.sqrt(6.0 / side.fan_in)


@register("uniform")
def uniform(side: Side, start: int, stop: int) -> Array:
    """Uniform entries on (-1, 1), without a scale: 2 u - 1, exact in float64."""
    numbers = side.uniforms(start, stop)
    numbers -= 0.5
    numbers += numbers
    return numbers


@register("orthogonal", is_grouped=True)
def orthogonal(side: Side, start: int, stop: int) -> Array:
    """Groups of `width` consecutive features, each the columns of its own Haar matrix; the last one is cut.

    Scaled by sqrt(2 width / fan_in), so that entries have the variance 2 / fan_in of He's.
    """
    return haar_columns(side.stream(), side.width, start, stop) * math.sqrt(2.0 * side.width / side.fan_in)


@register("sparse_he_normal", density=0.5)
def sparse_he_normal(side: Side, start: int, stop: int) -> Array:
    """Normal entries that stay with probability `density`, of variance 2 / (density fan_in) where they stay.

    Counted with the zeros the variance is He's 2 / fan_in: the signal keeps its size at any density.
    """
    density = 1.0 if side.density is None else side.density
    return side.normals(start, stop) * math.sqrt(2.0 / (density * side.fan_in))


@register("er_normal", density=0.5)
def er_normal(side: Side, start: int, stop: int) -> Array:
    """Standard normal entries that stay with probability `density` (Erdos-Renyi mask), without a scale."""
    return side.normals(start, stop)


@register("er_sign", density=0.5)
def er_sign(side: Side, start: int, stop: int) -> Array:
    """Random signs that stay with probability `density` (Erdos-Renyi mask), without a scale."""
    return side.signs(start, stop)
