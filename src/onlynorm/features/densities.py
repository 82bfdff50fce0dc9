"""How sparse may frozen weights be? At which density random patterns become full, measured and predicted.

A pattern is full if a matching gives every equation a feature of its own. Two things stand in the way, and at random
patterns hardly anything else does:

    dead features       without a nonzero input or output; alive is each with a = (1 - (1-p)^out) (1 - (1-p)^inp)
    empty equations     (i, j) for which no feature has both an output i and an input j: each with (1 - p^2)^features

    chance of a full pattern = P(Binomial(features, a) >= equations) * exp(-equations (1 - p^2)^features)

With as many features as equations none may be dead: p = (2 log d + log(2 / log 2)) / d for one half, in the order that
giannou2023 conjectures. With excess l > 1 some may, and p = sqrt(2 log d / l) / d is enough for large d.

Theory: giannou2023:thm-3, giannou2023:remark-3, giannou2023:lemma-9
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from scipy.special import bdtrc

from onlynorm.features.distributions import draw
from onlynorm.features.matching import is_generically_invertible
from onlynorm.features.weights import Features

STEP = 2.0**-14
"""Densities are found up to this."""


def random_pattern(
    shape: Sequence[int], density: float, *, seed: int, excess: float = 1.0, layer: str = ""
) -> Features:
    """Features of which only the nonzeros matter; those of one seed are nested as the density grows."""
    return draw("er_normal", shape, excess=excess, density=min(1.0, density), seed=seed, layer=layer)


def is_full(features: Features) -> bool:
    """Whether almost all weights with the nonzeros of these features reach every target."""
    return is_generically_invertible(features.mask_left(), features.mask_right())


def is_alive(features: Features) -> bool:
    """Whether every feature has a nonzero input and a nonzero output."""
    return bool(features.mask_left().any(0).all()) and bool(features.mask_right().any(1).all())


def chance_full(shape: Sequence[int], density: float, *, n_features: int) -> float:
    """The predicted probability that a random pattern is full: enough features alive, and no equation empty."""
    out, inp = shape[0], math.prod(shape[1:])
    alive = (1.0 - (1.0 - density) ** out) * (1.0 - (1.0 - density) ** inp)
    enough = float(bdtrc(out * inp - 1, n_features, alive)) if n_features >= out * inp else 0.0
    return enough * math.exp(-out * inp * (1.0 - density**2) ** n_features)


def predicted_density(shape: Sequence[int], *, n_features: int, chance: float = 0.5) -> float:
    """The density at which the predicted probability of a full pattern reaches `chance`; 1 where it never does."""
    return smallest_enough(lambda density: chance_full(shape, density, n_features=n_features) >= chance)


def smallest_enough(is_enough: Callable[[float], bool], *, low: float = 0.0, high: float = 1.0) -> float:
    """The smallest number between `low` and `high` that is enough, up to `STEP`, for a condition that stays true."""
    while high - low > STEP:
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def density_alive(shape: Sequence[int], *, seed: int, excess: float = 1.0, layer: str = "") -> float:
    """The density at which the last dead feature of this seed's pattern goes."""
    return smallest_enough(lambda p: is_alive(random_pattern(shape, p, seed=seed, excess=excess, layer=layer)))


def density_full(shape: Sequence[int], *, seed: int, excess: float = 1.0, layer: str = "") -> float:
    """The density at which this seed's pattern becomes full."""

    def is_enough(density: float) -> bool:
        return is_full(random_pattern(shape, density, seed=seed, excess=excess, layer=layer))

    if excess == 1.0:  # nothing below the density that leaves no dead feature, and mostly that one itself
        low = density_alive(shape, seed=seed, layer=layer)
        return low if is_enough(low) else smallest_enough(is_enough, low=low)
    return smallest_enough(is_enough)
