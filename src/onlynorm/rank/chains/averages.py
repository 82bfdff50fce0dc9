"""Averages along chains with standard errors, in memory independent of the number of steps.

Observations of one chain are correlated, so their variance does not give the error of their mean. They are summed in
batches of equal length; when all batches are full, neighbours are merged and the batch length doubles. Batches much
longer than the correlation time of the chain are independent, and so are chains: the standard error follows from the
variance of about `GROUPS` means, over chains and segments of chains. With that many chains, segments are whole chains.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from onlynorm.display import Result

ROOM = 64
GROUPS = 32


@dataclass(frozen=True)
class Estimate(Result):
    """An average with its standard error, and the standard deviation of single observations."""

    value: float
    error: float
    deviation: float = math.nan

    def __str__(self) -> str:
        return f"{self.value:.5g} +- {self.error:.2g}"


class BatchMeans:
    """Sums of observations (chains, quantities) in at most `ROOM` batches of equal length, in float64."""

    def __init__(self, n_chains: int, n_quantities: int) -> None:
        self.sums = torch.zeros(ROOM, n_chains, n_quantities, dtype=torch.float64)
        self.squares = torch.zeros(n_chains, n_quantities, dtype=torch.float64)
        self.length = 1
        self.n_observed = 0

    def add(self, values: Tensor) -> None:
        """Adds observations (observations, chains, quantities), in the order of time.

        They are summed one by one, so that the result does not depend on how many are added at once.
        """
        squares = values.square()
        self.squares = _add_in_order(self.squares, squares)
        while len(values):
            if self.n_observed == ROOM * self.length:
                pairs = self.sums.view(ROOM // 2, 2, *self.sums.shape[1:]).sum(1)
                self.sums.zero_()[: ROOM // 2] = pairs
                self.length *= 2
            batch, filled = divmod(self.n_observed, self.length)
            fitting, values = values[: self.length - filled], values[self.length - filled :]
            self.sums[batch] = _add_in_order(self.sums[batch], fitting)
            self.n_observed += len(fitting)

    def group_means(self) -> tuple[Tensor, float]:
        """(means, n): means (groups, quantities) over segments of chains, and the number of segments in all data."""
        n_chains = self.sums.shape[1]
        n_full = self.n_observed // self.length
        per_chain = max(1, min(-(-GROUPS // n_chains), n_full))
        together = n_full // per_chain  # batches per segment; the rest only enters n
        segments = self.sums[: per_chain * together].view(per_chain, together, *self.sums.shape[1:]).sum(1)
        length = together * self.length
        return (segments / length).flatten(0, 1), n_chains * self.n_observed / length

    def means(self) -> Tensor:
        """(chains, quantities): the mean of each chain over all its observations."""
        return self.sums.sum(0) / self.n_observed

    def estimate(self, place: int) -> Estimate:
        """The estimate of one quantity."""
        value = float(self.means()[:, place].mean())
        spread = float(self.squares[:, place].mean()) / self.n_observed - value * value
        groups, n_groups = self.group_means()
        error = _standard_error(groups[:, place], n_groups)
        return Estimate(value, error, math.sqrt(max(spread, 0.0)))

    def estimate_quotient(self, above: int, below: int) -> Estimate:
        """The quotient of two averages, with its first-order error including correlations."""
        top, bottom = self.means()[:, [above, below]].mean(0).tolist()
        if bottom == 0.0:
            return Estimate(math.nan, math.nan)
        groups, n_groups = self.group_means()
        deviations = (groups[:, above] - top / bottom * groups[:, below]) / bottom
        return Estimate(top / bottom, _standard_error(deviations, n_groups))


def _add_in_order(start: Tensor, values: Tensor) -> Tensor:
    """start + values[0] + values[1] + ..., from left to right; torch.sum and torch.cumsum may use another order."""
    rows = np.concatenate([start.numpy()[None], values.numpy()])
    return torch.from_numpy(np.add.accumulate(rows, axis=0)[-1])


def _standard_error(means: Tensor, n: float) -> float:
    """Standard error of the mean of n independent values; infinite for a single value."""
    return float(means.std() / math.sqrt(n)) if len(means) > 1 else math.inf
