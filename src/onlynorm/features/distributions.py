"""The registry of random distributions.

Scales follow He et al. (2015): variance 2 / fan_in, where fan_in is the number of inputs of a neuron:
inp * kernel positions in the first source layer, features * kernel positions in the second.

A distribution is a function `fill(side, start, stop)` that returns the entries of features [start, stop) of one side as
a (stop - start, side.width) float64 array. A row must depend only on `side` and the index of its feature, so that
blocks can be generated independently.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onlynorm.errors import ValueRangeError, shown
from onlynorm.features.orthogonal import haar_columns
from onlynorm.features.streams import Stream, check_density
from onlynorm.validate import need_callable, need_choice, need_flag

Array = npt.NDArray[np.float64]
STRUCTURED = ("id_cond", "id_cond_minimal", "ortho_cond", "fast_ortho_cond", "kron_normal")
ORTHOGONAL = ("ortho_cond", "fast_ortho_cond")
"""Structured distributions with two orthogonal factors."""
FACTORED = (*ORTHOGONAL, "kron_normal")
"""Structured distributions with two factors, M = U2 (x) U1."""


@dataclass(frozen=True)
class Side:
    """One source layer, the input of a distribution: `width` entries per feature.

    `part` is "right" (first layer, one row per feature) or "left" (second layer, one column per feature). `fan_in` is
    the number of inputs of a neuron of that layer, `density` the probability of a nonzero entry (None: dense).
    """

    part: str
    width: int
    fan_in: int
    n_features: int
    seed: int
    layer: str
    density: float | None = None

    def stream(self, name: str = "") -> Stream:
        """The random stream of this side, or a further stream with the given name."""
        return Stream(self.seed, self.layer, f"{self.part}/{name}" if name else self.part)

    def normals(self, start: int, stop: int) -> Array:
        """Standard normal entries of features [start, stop)."""
        return self.stream().normals(start * self.width, stop * self.width).reshape(-1, self.width)

    def uniforms(self, start: int, stop: int) -> Array:
        """Uniform entries in (0, 1) of features [start, stop)."""
        return self.stream().uniforms(start * self.width, stop * self.width).reshape(-1, self.width)

    def signs(self, start: int, stop: int) -> Array:
        """Random signs, +1.0 or -1.0, of features [start, stop)."""
        return self.stream().signs(start * self.width, stop * self.width).reshape(-1, self.width)

    def mask(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Mask of nonzero entries of features [start, stop), from the stream "<part>/mask"; all True if dense."""
        if self.density is None:
            return np.ones((stop - start, self.width), dtype=np.bool_)
        flat = self.stream("mask").mask(self.density, start * self.width, stop * self.width)
        return flat.reshape(-1, self.width)


Fill = Callable[[Side, int, int], Array]


@dataclass(frozen=True)
class Distribution:
    """A registered distribution. `density` is the default of a sparse one; None means dense.

    With `is_grouped`, `fill` is called for whole groups of `side.width` features where possible.
    """

    name: str
    fill: Fill
    density: float | None = None
    is_grouped: bool = False


def register(name: str, *, density: float | None = None, is_grouped: bool = False) -> Callable[[Fill], Fill]:
    """A decorator that registers `fill(side, start, stop)` as a distribution `name`.

    With `density`, the default for `draw`, entries outside `side.mask` are set to zero. A file that uses a custom
    distribution can only be loaded if it is registered.

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> from onlynorm.features import register
        >>> @register("signs")
        ... def signs(side, start, stop):
        ...     rows = torch.arange(start, stop, dtype=torch.float64)[:, None]
        ...     return torch.sign(torch.sin(1.0 + rows * torch.arange(1, side.width + 1)))
        >>> on.draw("signs", (2, 3)).right().unique()
        tensor([-1.,  1.], dtype=torch.float64)
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
    """The names of all distributions, sorted.

    Examples:
        >>> from onlynorm.features import names
        >>> "he_normal" in names(), "id_cond" in names()
        (True, True)
    """
    return tuple(sorted((*_REGISTRY, *STRUCTURED)))


def lookup(name: str) -> Distribution | None:
    """The registered distribution, or None for a structured one; raises for an unknown name."""
    return _REGISTRY.get(need_choice("features", name, names()))


def he_normal(side: Side, start: int, stop: int) -> Array:
    """Normal entries of variance 2 / fan_in."""
    return side.normals(start, stop) * math.sqrt(2.0 / side.fan_in)


def he_uniform(side: Side, start: int, stop: int) -> Array:
    """Uniform entries on +-sqrt(6 / fan_in), of variance 2 / fan_in."""
    return uniform(side, start, stop) * math.sqrt(6.0 / side.fan_in)


def uniform(side: Side, start: int, stop: int) -> Array:
    """Uniform entries on (-1, 1), not scaled: 2 u - 1, exact in float64."""
    numbers = side.uniforms(start, stop)
    numbers -= 0.5
    numbers += numbers
    return numbers


def orthogonal(side: Side, start: int, stop: int) -> Array:
    """Groups of `width` consecutive features, each the columns of an independent Haar matrix; the last is truncated.

    Scaled by sqrt(2 width / fan_in), so that entries have variance 2 / fan_in.
    """
    return haar_columns(side.stream(), side.width, start, stop) * math.sqrt(2.0 * side.width / side.fan_in)


def sparse_he_normal(side: Side, start: int, stop: int) -> Array:
    """Normal entries of variance 2 / (density fan_in) that are nonzero with probability `density`.

    Including the zeros the variance is 2 / fan_in for any density.
    """
    density = 1.0 if side.density is None else side.density
    return side.normals(start, stop) * math.sqrt(2.0 / (density * side.fan_in))


def er_normal(side: Side, start: int, stop: int) -> Array:
    """Standard normal entries that are nonzero with probability `density` (Erdos-Renyi mask), not scaled."""
    return side.normals(start, stop)


def er_sign(side: Side, start: int, stop: int) -> Array:
    """Random signs that are nonzero with probability `density` (Erdos-Renyi mask), not scaled."""
    return side.signs(start, stop)


_REGISTRY: dict[str, Distribution] = {
    one.name: one
    for one in (
        Distribution("he_normal", he_normal),
        Distribution("he_uniform", he_uniform),
        Distribution("uniform", uniform),
        Distribution("orthogonal", orthogonal, is_grouped=True),
        Distribution("sparse_he_normal", sparse_he_normal, density=0.5),
        Distribution("er_normal", er_normal, density=0.5),
        Distribution("er_sign", er_sign, density=0.5),
    )
}
