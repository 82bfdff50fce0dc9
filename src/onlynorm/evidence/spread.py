"""A number measured with several seeds: its mean, and an interval that says how far the mean can be trusted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

LEVEL = 0.95
"""How often an interval like ours holds the mean of all seeds, if seeds scatter normally."""


@dataclass(frozen=True)
class Spread:
    """The mean of n measurements and half the width of its interval, which one measurement does not have (NaN)."""

    mean: float
    half: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Student's interval: mean +- t s / sqrt(n) with n - 1 degrees of freedom."""
        n = len(values)
        if n == 0:
            return cls(math.nan, math.nan, 0)
        if n == 1:
            return cls(values[0], math.nan, 1)
        quantile = float(stdtrit(n - 1, 0.5 + LEVEL / 2.0))
        return cls(float(np.mean(values)), quantile * float(np.std(values, ddof=1)) / math.sqrt(n), n)

    def percent(self) -> str:
        """Mean and half width in percent, as text."""
        if math.isnan(self.mean):
            return "-"
        return f"{100 * self.mean:.1f}" + ("" if math.isnan(self.half) else f" ± {100 * self.half:.1f}")
