"""Measured singular values beside their law: one spectrum, and the double descent of the condition number.

The law (see `spectrum`) is about features of unit length, which is what the solver works with and what is measured here
unless asked otherwise. Features as drawn have random lengths; how much these vary is reported beside the spectrum.

`Spectrum.follows_law` is a test at the 1 % level. The null hypothesis: features are unit-length products of two
independent Gaussian vectors. The statistic: the Kolmogorov distance between the singular values and the law. Singular
values repel each other, so that the distance of n values is of order log(n) / n, not 1 / sqrt(n), and ordinary
Kolmogorov-Smirnov tables do not apply.

Over the excess l the condition number (1 + sqrt l) / |1 - sqrt l| rises to a peak of the order of N at l = 1, where the
system just becomes solvable, and falls again beyond: a double descent.

Theory: random_features:thm-2.2
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onlynorm.errors import ValueRangeError
from onlynorm.features import Features, draw
from onlynorm.solvers.memory import memory_limit, need_memory
from onlynorm.solvers.spectrum import Prediction, cumulative, density, edges, empirical_spectrum, predict_condition

LEVEL = 0.01
"""How often `follows_law` rejects features that do follow, at most."""
LIMIT, LIMIT_SLOPE = 1.2, 0.55
"""The distance of n singular values is below (1.2 + 0.55 log n) / n for 99 % of draws. Fitted to simulated quantiles of
shapes 2 x 2 to 24 x 24, 2 x 32 and 4 x 64 with normal and uniform entries and excess 0.5 to 2, 120 to 3,000 draws each:
99 % of the distances times n were below 2.6 at n = 16, 3.4 at 64, 3.8 at 144, 4.2 at 256 and 4.4 at 576."""
DENSE = ("he_normal", "he_uniform", "uniform", "orthogonal")
"""Dense distributions that were compared with the law; of your own, heavy-tailed ones need not follow it."""
EQUAL_LENGTHS = 0.01
"""Features as drawn have the spectrum of unit length where their lengths vary by at most this."""
MIN_VALUES = 4
"""With fewer singular values a distance says nothing."""
RESOLVED = 1e-7
"""Singular values below this share of the largest are rounding: they come from a Gram matrix in float64."""
EXCESSES = (0.25, 0.5, 0.75, 0.9, 0.96, 1.0, 1.04, 1.1, 1.25, 1.5, 2.0, 4.0)

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Spectrum:
    """The singular values of a feature matrix, ascending, at entries of variance 1 / equations; the law beside them.

    `is_random` says whether the law is about these features: structured ones have singular values by design.
    `is_unit_length` says whether every feature was divided by its length; `length_spread` is the standard deviation of
    these lengths over their mean.
    """

    features: Features
    values: Array
    is_unit_length: bool = True
    length_spread: float = 0.0

    @property
    def is_random(self) -> bool:
        """Whether the law is about these features."""
        return not self.features.is_structured

    @property
    def n_unresolved(self) -> int:
        """How many singular values are zero, or too small to be told from it."""
        return int((self.values <= RESOLVED * self.values[-1]).sum())

    @property
    def condition(self) -> float:
        """The largest over the smallest singular value that is resolved."""
        return float(self.values[-1] / self.values[self.n_unresolved])

    @property
    def law_condition(self) -> float:
        """The predicted condition number, or a bound where it is unknown; the measured one for structured features."""
        return self.prediction.condition

    @property
    def prediction(self) -> Prediction:
        """What the law predicts of the condition number; nothing for features as drawn whose lengths vary."""
        if not self.is_random:
            return Prediction(self.condition, True, "measured")
        if not self.is_unit_length and self.length_spread > EQUAL_LENGTHS:
            return Prediction(1.0, False, "unknown")
        return predict_features(self.features)

    @property
    def distance(self) -> float:
        """The largest gap between the share of singular values up to x and the law's, over all x."""
        law = cumulative(self.values, self.features.equations, self.features.n_features)
        steps = np.arange(len(self.values) + 1) / len(self.values)
        return float(max(np.max(law - steps[:-1]), np.max(steps[1:] - law)))

    @property
    def limit(self) -> float:
        """The distance that 99 of 100 draws of Gaussian features of this size stay below."""
        n = len(self.values)
        return (LIMIT + LIMIT_SLOPE * math.log(n)) / n

    @property
    def follows_law(self) -> bool | None:
        """Whether the distance is within the limit: a test at the 1 % level.

        None where there is nothing to test: structured features, and fewer than four singular values.
        """
        if not self.is_random or len(self.values) < MIN_VALUES:
            return None
        return self.distance <= self.limit

    def histogram(self, n_bins: int) -> tuple[Array, Array, Array]:
        """Bin edges, the share of singular values per bin, and the law's share."""
        n, c = self.features.equations, self.features.n_features
        top = max(float(self.values[-1]), edges(n, c)[1] if self.is_random else 0.0) * (1.0 + 1e-9)
        counts, bins = np.histogram(self.values, bins=n_bins, range=(0.0, top))
        law = np.diff(cumulative(bins, n, c)) if self.is_random else np.full(n_bins, np.nan)
        return bins, counts / len(self.values), law

    def law_curve(self, n_points: int) -> tuple[Array, Array]:
        """Places and heights of the law's density, dense at its edges, where it rises like a square root."""
        n, c = self.features.equations, self.features.n_features
        low, high = edges(n, c)
        x = low + (high - low) * (1.0 - np.cos(np.linspace(0.01, np.pi, n_points))) / 2
        return x, density(x, n, c)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for machines."""
        low, high = edges(self.features.equations, self.features.n_features)
        bins, shares, law = self.histogram(24)
        facts: dict[str, Any] = {
            "features": self.features.name,
            "shape": list(self.features.shape),
            "equations": self.features.equations,
            "number of features": self.features.n_features,
            "excess": self.features.excess,
            "smallest": float(self.values[0]),
            "largest": float(self.values[-1]),
            "unresolved": self.n_unresolved,
            "condition number": self.condition,
            "unit length": self.is_unit_length,
            "spread of lengths": self.length_spread,
            "histogram": {"edges": bins.tolist(), "share": shares.tolist()},
        }
        if self.is_random:
            facts["histogram"]["law"] = law.tolist()
            facts["law"] = {
                "smallest": low, "largest": high, "condition number": self.law_condition,
                "known": self.prediction.is_known, "distance": self.distance, "limit": self.limit, "level": LEVEL,
                "follows": self.follows_law,
            }  # fmt: skip
        return facts

    def __str__(self) -> str:
        zeros = f", {self.n_unresolved} of them zero or unresolved" if self.n_unresolved else ""
        head = (
            f"{len(self.values)} singular values in [{self.values[0]:.4g}, {self.values[-1]:.4g}]{zeros}, condition "
            f"number {self.condition:.4g}"
        )
        if not self.is_random:
            return f"{head}, by design"
        low, high = edges(self.features.equations, self.features.n_features)
        of = "features of unit length" if self.is_unit_length else "features as drawn"
        if self.follows_law is None:
            verdict = "too few values for a test"
        else:
            verdict = f"{'within' if self.follows_law else 'above'} the limit {self.limit:.4f} at the {LEVEL:.0%} level"
        return (
            f"{of}: {head}; the law says [{low:.4g}, {high:.4g}], {self.prediction}. Distance to the law "
            f"{self.distance:.4f}, {verdict}. Lengths vary by {self.length_spread:.1%}"
        )


@dataclass(frozen=True)
class Descent:
    """Condition numbers over the excess: measured for several seeds, and the law's."""

    equations: int
    n_features: tuple[int, ...]
    measured: tuple[tuple[float, ...], ...]
    law: tuple[float, ...]

    @property
    def excesses(self) -> tuple[float, ...]:
        """Features per equation."""
        return tuple(n / self.equations for n in self.n_features)

    @property
    def medians(self) -> tuple[float, ...]:
        """The median over the seeds, at each excess."""
        return tuple(statistics.median(values) for values in self.measured)

    @property
    def peak(self) -> float:
        """The excess at which the median condition number is largest."""
        return self.excesses[self.medians.index(max(self.medians))]

    def __str__(self) -> str:
        lines = [
            f"  {excess:6.3g}  {median:10.4g}  {law:10.4g}"
            for excess, median, law in zip(self.excesses, self.medians, self.law, strict=True)
        ]
        return "\n".join(["  excess   condition         law", *lines])


def predict_features(features: Features) -> Prediction:
    """What the law predicts of the condition number at unit length; unknown for distributions of your own."""
    if features.density is None and features.name not in DENSE:
        return Prediction(1.0, False, "unknown")
    return predict_condition(
        features.rows,
        features.cols,
        features.n_features,
        density=features.density,
        is_orthogonal=features.name == "orthogonal",
    )


def measure_spectrum(features: Features, *, unit_length: bool = True) -> Spectrum:
    """The singular values of these features. One matrix of features or equations squared is held, the fewer of both.

    Features are scaled to unit length first, as the solver does. `unit_length=False` measures them as drawn.
    """
    n = min(features.equations, features.n_features)
    if features.name in ("id_cond", "ortho_cond"):  # orthonormal columns: nothing to compute
        return Spectrum(features, np.ones(n))
    need_memory(
        f"the spectrum of {features.equations} x {features.n_features}",
        3 * 8 * n**2,
        memory_limit(),
        "Take a smaller layer: the law depends on the excess, not on the size.",
    )
    left, right = features.left(), features.right()
    values = empirical_spectrum(left, right, unit_length=unit_length and not features.is_structured)
    lengths = (left.double().norm(dim=0) * right.double().norm(dim=1)).cpu().numpy()
    return Spectrum(features, np.sort(values.cpu().numpy()), unit_length, float(lengths.std() / lengths.mean()))


def sweep_excess(
    name: str,
    shape: Sequence[int],
    *,
    excesses: Sequence[float] = EXCESSES,
    seeds: Sequence[int] = (0, 1, 2),
    density: float | None = None,
    unit_length: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Descent:
    """Condition numbers of random features over the excess. Theory: random_features:thm-2.2

    `law` of the result is NaN where the law does not apply.
    """
    if not seeds or not excesses:
        raise ValueRangeError("a sweep needs at least one excess and one seed; got none. Leave them out for the usual.")
    rows: list[tuple[float, ...]] = []
    counts: list[int] = []
    predictions: list[Prediction] = []
    for excess in excesses:
        drawn = [draw(name, shape, excess=excess, seed=seed, density=density) for seed in seeds]
        if progress is not None:
            progress(f"excess {excess:g}")
        counts.append(drawn[0].n_features)
        spectra = [measure_spectrum(features, unit_length=unit_length) for features in drawn]
        rows.append(tuple(one.condition for one in spectra))
        predictions.append(spectra[0].prediction)
    law = tuple(one.condition if one.is_known else math.nan for one in predictions)
    return Descent(drawn[0].equations, tuple(counts), tuple(rows), law)
