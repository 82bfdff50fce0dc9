"""Measured singular values beside their law: one spectrum, and the double descent of the condition number.

The law (see `spectrum`) is a limit. How near a layer of finite size comes to it is stated here, as a Kolmogorov
distance: the columns of M keep a random length, so that it falls like one over the smaller side of the layer, twice as
slowly for sparse weights, whose lengths vary more.

Over the excess l the condition number (1 + sqrt l) / |1 - sqrt l| rises to a peak of the order of N at l = 1, where the
system just becomes solvable, and falls again beyond: a double descent.

Theory: random_features:thm-2.2
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onlynorm.errors import ValueRangeError
from onlynorm.features import Features, draw
from onlynorm.solvers.memory import memory_limit, need_memory
from onlynorm.solvers.spectrum import condition_number, cumulative, density, edges, empirical_spectrum

CLOSE = 1.5
"""Kolmogorov distance to the law, times the smaller side of the layer, that dense weights keep to."""
SPARSE = 2.0
"""How much more sparse weights take."""
RESOLVED = 1e-7
"""Singular values below this share of the largest are rounding: they come from a Gram matrix in float64."""
EXCESSES = (0.25, 0.5, 0.75, 0.9, 0.96, 1.0, 1.04, 1.1, 1.25, 1.5, 2.0, 4.0)

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Spectrum:
    """The singular values of a feature matrix, ascending, at entries of variance 1 / equations; the law beside them.

    `is_random` says whether the law is about these features: structured ones have singular values by design.
    """

    features: Features
    values: Array

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
        """What the law says of the condition number; 1 for features that are orthonormal by design."""
        if not self.is_random:
            return self.condition
        return condition_number(self.features.equations, self.features.n_features)

    @property
    def distance(self) -> float:
        """The largest gap between the share of singular values up to x and the law's, over all x."""
        law = cumulative(self.values, self.features.equations, self.features.n_features)
        steps = np.arange(len(self.values) + 1) / len(self.values)
        return float(max(np.max(law - steps[:-1]), np.max(steps[1:] - law)))

    @property
    def tolerance(self) -> float:
        """The distance within which a layer of this size follows the law."""
        side = min(self.features.rows, self.features.cols)
        return CLOSE * (1.0 if self.features.density is None else SPARSE) / side

    @property
    def follows_law(self) -> bool:
        """Whether the distance is within the tolerance."""
        return self.is_random and self.distance <= self.tolerance

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
            "histogram": {"edges": bins.tolist(), "share": shares.tolist()},
        }
        if self.is_random:
            facts["histogram"]["law"] = law.tolist()
            facts["law"] = {
                "smallest": low, "largest": high, "condition number": self.law_condition, "distance": self.distance,
                "tolerance": self.tolerance, "follows": self.follows_law,
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
        return (
            f"{head}; the law says [{low:.4g}, {high:.4g}] and {self.law_condition:.4g}. Distance to the law "
            f"{self.distance:.3f}, {'within' if self.follows_law else 'beyond'} {self.tolerance:.3f}"
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


def measure_spectrum(features: Features) -> Spectrum:
    """The singular values of these features. One matrix of features or equations squared is held, the fewer of both."""
    n = min(features.equations, features.n_features)
    if features.name in ("id_cond", "ortho_cond"):  # orthonormal columns: nothing to compute
        return Spectrum(features, np.ones(n))
    need_memory(
        f"the spectrum of {features.equations} x {features.n_features}",
        3 * 8 * n**2,
        memory_limit(),
        "Take a smaller layer: the law depends on the excess, not on the size.",
    )
    values = empirical_spectrum(features.left(), features.right())
    return Spectrum(features, np.sort(values.cpu().numpy()))


def sweep_excess(
    name: str,
    shape: Sequence[int],
    *,
    excesses: Sequence[float] = EXCESSES,
    seeds: Sequence[int] = (0, 1, 2),
    density: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Descent:
    """Condition numbers of random features over the excess. Theory: random_features:thm-2.2"""
    if not seeds or not excesses:
        raise ValueRangeError("a sweep needs at least one excess and one seed; got none. Leave them out for the usual.")
    rows: list[tuple[float, ...]] = []
    counts: list[int] = []
    for excess in excesses:
        drawn = [draw(name, shape, excess=excess, seed=seed, density=density) for seed in seeds]
        if progress is not None:
            progress(f"excess {excess:g}")
        counts.append(drawn[0].n_features)
        rows.append(tuple(measure_spectrum(features).condition for features in drawn))
    equations = drawn[0].equations
    return Descent(equations, tuple(counts), tuple(rows), tuple(condition_number(equations, n) for n in counts))
