"""The distributions by name, and what one of them is handed: one side of a layer.

A distribution is a function `fill(side, start, stop)` that returns the numbers of features [start, stop) of
one side as a (stop - start, side.width) float64 array. It must depend on nothing but `side` and the feature's
own number, so that any block alone equals the same block of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onlynorm.errors import ValueRangeError, shown
from onlynorm.features.streams import Stream, check_density
from onlynorm.modules import need_callable, need_choice, need_flag

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
