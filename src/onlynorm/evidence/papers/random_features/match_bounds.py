"""The probability that sparse features contain a sparse target: bounds of the paper, corrections, and simulations.

Sparse id_cond features are a random mask: output o has a feature for input j with probability p. Row t of a target fits
output o if all its nonzero weights have a feature there, and the target fits if its rows find different outputs: a
bipartite matching.

    bound (thm 4.2)      P(fits) <= product over rows of 1 - (1 - p^d_t)^outputs,  d_t the nonzero weights of row t
    partition (thm 4.3)  k outputs for each row of a random target: P(fits) = (1 - E (1 - p^D)^k)^rows, D ~ Bin(inp, q)

The paper's k for the second takes the expectation inside the power, as if each of the k outputs had a different row; it
is too small. `outputs_per_row` is the correct k, `printed_outputs_per_row` the printed one.

Theory: random_features:thm-4.2, random_features:thm-4.3
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching
from scipy.special import betaincinv, gammaln

from onlynorm.errors import ShapeError, ValueRangeError
from onlynorm.features import streams

Mask = npt.NDArray[np.bool_]
MOST_OUTPUTS = 2**60
"""The largest number of outputs; if a row needs more, an error is raised."""


@dataclass(frozen=True)
class MatchTrials:
    """The number of random masks that contain their target."""

    n_tries: int
    n_fits: int

    @property
    def chance(self) -> float:
        """The fraction of masks that contained the target."""
        return self.n_fits / self.n_tries

    def interval(self, confidence: float = 0.999) -> tuple[float, float]:
        """The Clopper-Pearson interval of the probability; its coverage is at least `confidence`."""
        tail, n, k = (1.0 - confidence) / 2, self.n_tries, self.n_fits
        low = float(betaincinv(k, n - k + 1, tail)) if k else 0.0
        high = float(betaincinv(k + 1, n - k, 1.0 - tail)) if k < n else 1.0
        return low, high

    def __str__(self) -> str:
        low, high = self.interval()
        return f"{self.n_fits} of {self.n_tries} masks contain the target: {self.chance:.4g} ({low:.4g} to {high:.4g})"


def match_bound(degrees: Sequence[int], *, density: float, n_outputs: int | None = None) -> float:
    """Upper bound of the probability that rows with these numbers of nonzero weights fit into a random mask.

    `n_outputs` is by default the number of rows. Theory: random_features:thm-4.2
    """
    streams.check_density(density)
    _need_counts(0, *degrees)
    outputs = len(degrees) if n_outputs is None else n_outputs
    if outputs < len(degrees):
        return 0.0
    # -expm1(log1p) is accurate for probabilities near zero and near one
    return math.prod(-math.expm1(outputs * math.log1p(-(density**degree))) if density < 1.0 and degree else 1.0
                     for degree in degrees)  # fmt: skip


def density_for_match(degree: int, *, n_outputs: int, chance: float) -> float:
    """The density below which rows of this degree, one per output, fit with probability less than `chance`.

    This follows from the bound; the text after the theorem lacks the power 1 / degree. Theory: random_features:thm-4.2
    """
    _need_chance(chance)
    _need_counts(0, degree)
    _need_counts(1, n_outputs)
    each = chance ** (1.0 / n_outputs)
    return float((1.0 - (1.0 - each) ** (1.0 / n_outputs)) ** (1.0 / degree)) if degree else 0.0


def partition_chance(
    n_rows: int, n_inputs: int, *, target_density: float, density: float, outputs_per_row: int
) -> float:
    """The probability that a random target fits if every row has its own outputs, this many.

    Theory: random_features:thm-4.3
    """
    _need_counts(1, n_rows, n_inputs, outputs_per_row)
    _need_density(target_density)
    streams.check_density(density)
    counts = np.arange(n_inputs + 1)
    weights = _binomial(n_inputs, target_density)
    with np.errstate(divide="ignore"):
        fails = np.exp(outputs_per_row * np.log1p(-(density**counts)))
    return float((1.0 - weights @ fails) ** n_rows)


def outputs_per_row(n_rows: int, n_inputs: int, *, target_density: float, density: float, chance: float) -> int:
    """The smallest number of own outputs per row with which a random target fits with this probability.

    Theory: random_features:thm-4.3
    """
    _need_chance(chance)

    def is_enough(k: int) -> bool:
        reached = partition_chance(n_rows, n_inputs, target_density=target_density, density=density, outputs_per_row=k)
        return reached >= chance

    high = 1
    while not is_enough(high):
        high *= 2
        if high > MOST_OUTPUTS:
            raise _too_sparse("outputs_per_row", n_inputs, density, chance)
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def printed_outputs_per_row(n_rows: int, n_inputs: int, *, target_density: float, density: float, chance: float) -> int:
    """The number of outputs per row that the paper states, which is too small. Theory: random_features:thm-4.3"""
    _need_counts(1, n_rows, n_inputs)
    _need_density(target_density)
    streams.check_density(density)
    _need_chance(chance)
    fits = (1.0 - target_density * (1.0 - density)) ** n_inputs
    if fits == 1.0:
        return 1
    needed = math.log1p(-(chance ** (1.0 / n_rows))) / math.log1p(-fits) if fits else math.inf
    if needed > MOST_OUTPUTS:
        raise _too_sparse("printed_outputs_per_row", n_inputs, density, chance)
    return max(1, math.ceil(needed))


def fits_inside(target: Mask, features: Mask) -> bool:
    """Whether the rows of `target` find different rows of `features` that have all their entries."""
    if target.ndim != 2 or features.ndim != 2 or target.shape[1] != features.shape[1]:
        raise ShapeError(
            f"fits_inside needs masks (rows, inp) and (outputs, inp) with equal inp; got {target.shape} and "
            f"{features.shape}. Flatten kernels into inp."
        )
    lacking = target.astype(np.float32) @ (~features).astype(np.float32).T
    matched = maximum_bipartite_matching(csr_array(lacking == 0), perm_type="column")
    return bool((matched >= 0).all())


def simulate_match(
    target: Mask, *, density: float, n_tries: int, seed: int, n_outputs: int | None = None
) -> MatchTrials:
    """Counts the random masks that contain this target with its rows in any order."""
    outputs = len(target) if n_outputs is None else n_outputs
    masks = _masks(seed, "masks", n_tries, (outputs, target.shape[1]), density)
    return MatchTrials(n_tries, sum(fits_inside(target, mask) for mask in masks))


def simulate_random_match(
    n_rows: int,
    n_inputs: int,
    *,
    target_density: float,
    density: float,
    outputs_per_row: int,
    n_tries: int,
    seed: int,
    is_partitioned: bool = True,
) -> MatchTrials:
    """Counts the random masks that contain a random target; each row has its own outputs, or may use all."""
    targets = _masks(seed, "targets", n_tries, (n_rows, n_inputs), target_density)
    masks = _masks(seed, "masks", n_tries, (n_rows * outputs_per_row, n_inputs), density)
    n_fits = 0
    for target, mask in zip(targets, masks, strict=True):
        if is_partitioned:
            groups = mask.reshape(n_rows, outputs_per_row, n_inputs)
            n_fits += bool((groups | ~target[:, None]).all(-1).any(-1).all())
        else:
            n_fits += fits_inside(target, mask)
    return MatchTrials(n_tries, n_fits)


def _masks(seed: int, name: str, n: int, shape: tuple[int, int], density: float) -> Iterator[Mask]:
    """n random masks, drawn in blocks of about a million entries."""
    stream, size = streams.Stream(seed, name, "mask"), math.prod(shape)
    step = max(1, 2**20 // size)
    for start in range(0, n, step):
        stop = min(start + step, n)
        yield from stream.mask(density, start * size, stop * size).reshape(-1, *shape)


def _binomial(n: int, q: float) -> npt.NDArray[np.float64]:
    """The probabilities of 0 to n successes."""
    k = np.arange(n + 1)
    log_counts = gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = log_counts + np.where(k > 0, k * np.log(q), 0.0) + np.where(k < n, (n - k) * np.log1p(-q), 0.0)
    return np.exp(logs)


def _need_chance(chance: float) -> None:
    if not 0.0 < chance < 1.0:
        raise ValueRangeError(f"chance needs to be strictly between 0 and 1; got {chance!r}. Try 0.9.")


def _need_density(density: float) -> None:
    if not 0.0 <= density <= 1.0:
        raise ValueRangeError(f"target_density needs to be between 0 and 1; got {density!r}. Try 0.5.")


def _need_counts(least: int, *counts: int) -> None:
    for count in counts:
        value = streams.as_integer(count)
        if value is None or value < least:
            raise ValueRangeError(
                f"numbers of rows, inputs, outputs and nonzero weights need to be integers of at least {least}; got "
                f"{count!r}. Count them, as in mask.sum(1)."
            )


def _too_sparse(what: str, n_inputs: int, density: float, chance: float) -> ValueRangeError:
    return ValueRangeError(
        f"{what} needs a density at which rows of {n_inputs} inputs can fit; got {density}, where 2^60 outputs are not "
        f"enough for chance {chance}. Raise the density."
    )
