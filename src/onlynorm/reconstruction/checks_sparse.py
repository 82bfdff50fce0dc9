"""Checks of what giannou2023 says about sparse frozen weights: which densities suffice, and the lemma of the proof.

By lemma 9 the pattern of nonzeros decides alone, so densities are measured by matchings (features.densities). What the
proof takes from elsewhere about random matrices follows in `checks_singular`.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy.special import bdtrc
from torch import nn

from onlynorm.features.densities import (
    density_alive,
    density_full,
    is_full,
    predicted_density,
    random_pattern,
    smallest_enough,
)
from onlynorm.reconstruction.checks import rebuild_error, relu_network
from onlynorm.solvers.checks import EPS, verdict
from onlynorm.theorems import Evidence, check

ENOUGH = 1.5
"""Multiple of sqrt(log d / d) at which theorem 3 is tried: d layers of width d then fail with less than 1/d."""


def share_full(d: int, density: float, n_patterns: int, *, seed: int, layer: str) -> float:
    """The share of d x d patterns of this density that are full."""
    found = (is_full(random_pattern((d, d), density, seed=seed, layer=f"{layer} {i}")) for i in range(n_patterns))
    return sum(found) / n_patterns


@check("giannou2023:thm-3")
def frozen_weights_may_be_sparse(seed: int) -> Evidence:
    failing: dict[int, float] = {}
    for d in (8, 16):  # networks of d layers: one layer that is not full spoils its network
        density = ENOUGH * math.sqrt(math.log(d) / d)
        names = ([f"network {i} layer {k}" for k in range(d)] for i in range(3 * d))
        whole = sum(all(is_full(random_pattern((d, d), density, seed=seed, layer=n)) for n in net) for net in names)
        failing[d] = 1.0 - whole / (3 * d)
    holds = all(share <= 1 / d for d, share in failing.items())
    measured = {f"share of networks that fail, d = {d}": share for d, share in failing.items()}
    for factor in (0.75, 1.0):  # single layers: if the order suffices, a fixed factor serves the better the larger d
        shares = []
        for d in (8, 16, 32):
            shares.append(share_full(d, factor * math.sqrt(math.log(d) / d), 40, seed=seed, layer="single"))
            measured[f"full at {factor} sqrt(log d / d), d = {d}"] = shares[-1]
        holds &= shares[0] < shares[-1]
    density = ENOUGH * math.sqrt(math.log(12) / 12)
    error = rebuild_error(
        relu_network([12, 12, 12, 12], seed=seed), seed=seed, features="sparse_he_normal", density=density, excess=1.0,
        activation=nn.ReLU(),
    )  # fmt: skip
    return Evidence(
        verdict(holds and error <= 1e-8),
        f"p = {ENOUGH} sqrt(log d / d): of 3 d networks of d layers the share "
        + ", ".join(f"{share:.3f} fails at d = {d}" for d, share in failing.items())
        + ", where 1/d is allowed. At the factor 1 single layers are full with "
        + ", ".join(f"{measured[f'full at 1.0 sqrt(log d / d), d = {d}']:.2f} at d = {d}" for d in (8, 16, 32))
        + f". A ReLU network of three layers of width 12, rebuilt at p = {density:.2f} from 144 features each, errs by "
        f"{error:.1e}",
        measured | {"error of a network": error},
    )


@check("giannou2023:remark-3")
def density_of_order_log_d_over_d_suffices(seed: int) -> Evidence:
    sizes = {8: 40, 16: 40, 32: 40, 64: 12}
    measured: dict[str, float] = {}
    ratios, at_once, late, tried, holds = [], 0, 0, 0, True
    for d, n_seeds in sizes.items():
        unit, shape = math.log(d) / d, (d, d)
        seeds = range(1000 * seed, 1000 * seed + n_seeds)
        full = np.zeros(n_seeds)
        for i, own in enumerate(seeds):
            alive = density_alive(shape, seed=own)
            is_there = is_full(random_pattern(shape, alive, seed=own))
            full[i] = alive if is_there else density_full(shape, seed=own)
            at_once, tried = at_once + is_there, tried + 1
        law = predicted_density(shape, n_features=d * d)
        at_three = random_pattern(shape, 3.0 * unit, seed=seed)
        nonzeros = int(at_three.mask_left().sum() + at_three.mask_right().sum())
        ratios.append(float(np.median(full)) / unit)
        measured |= {
            f"half full at this multiple of log d / d, d = {d}": ratios[-1],
            f"the same predicted, d = {d}": law / unit,
            f"share full at log d / d, d = {d}": float((full <= unit).mean()),
            f"share full at 3 log d / d, d = {d}": float((full <= 3.0 * unit).mean()),
            f"nonzeros at 3 log d / d over d^2 log d, d = {d}": nonzeros / (d * d * math.log(d)),
        }
        n_late = int((full > 3.0 * unit).sum())
        late += n_late
        # So many would be late by chance once in a thousand times at least, were it 1/d of all patterns.
        holds &= bool((full > unit).all()) and float(bdtrc(n_late - 1, n_seeds, 1 / d)) >= 1e-3
        holds &= abs(ratios[-1] * unit / law - 1.0) <= 0.1 and abs(nonzeros / (d * d * math.log(d)) - 6.0) <= 0.6
    growth = ratios[-1] / ratios[0]
    limit = math.sqrt((64 / math.log(64)) / (8 / math.log(8)))  # of the ratio, were the order that of theorem 3
    return Evidence(
        verdict(holds and growth < 1.0 + (limit - 1.0) / 2),
        f"d = {', '.join(map(str, sizes))} with d^2 features: half of the patterns are full at "
        + ", ".join(f"{ratio:.2f}" for ratio in ratios)
        + f" times log d / d (growth {growth:.2f}; {limit:.1f} in the order of theorem 3), none at log d / d, "
        f"{tried - late} of {tried} at 3 log d / d, where 6 d^2 log d weights are left. {at_once} of {tried} are full "
        "at the very density at which their last dead feature goes, whose law (1 - (1 - p)^d)^(2 d^2) has the constant "
        "2: evidence for the conjecture, no proof",
        measured | {"growth": growth, "full as soon as no feature is dead": at_once / tried},
    )


@check("giannou2023:lemma-10")
def a_sparse_product_covers_no_less_than_independent_entries(seed: int) -> Evidence:
    shares = [0.001, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0]  # values of 2 q d
    close = 32 * EPS
    holds, squeezed, printed_unfit, ours_unfit, n_sets = True, 0.0, 0, 0, 0
    for d in (3, 4):
        sets = _all_sets(d)
        rows = -np.sort(-_bits(sets, d).sum(2), axis=1)  # entries per row, most first
        packed = (1 << rows) - 1  # the same rows pushed to the left, where they overlap most
        holds &= all(_covers(sets, d, share=share, factor=1.0) for share in shares)
        for share in shares:
            gap = _chance_of_zeros(sets, d, math.sqrt(share)) - _chance_of_zeros(packed, d, math.sqrt(share))
            squeezed = max(squeezed, float(gap.max()))
        heights = np.arange(d + 2)[:, None]
        at_least = np.stack([(rows >= height).sum(1) for height in range(d + 2)])  # rows of that many entries
        printed = (at_least <= heights).argmax(0)
        ours = np.where(at_least >= heights, heights, 0).max(0)
        every, filled = np.arange(len(sets)), rows.any(1)
        printed_unfit += int((at_least[printed, every] < printed)[filled].sum())
        ours_unfit += int(((at_least[ours, every] < ours) | (rows.sum(1) > 2 * d * ours))[filled].sum())
        n_sets += len(sets)
    sets = _all_sets(3)
    needed = smallest_enough(lambda factor: all(_covers(sets, 3, share=share, factor=factor) for share in shares))
    return Evidence(
        verdict(holds and squeezed <= close and not ours_unfit),
        f"exact probabilities for all {n_sets} sets at d = 3 and 4 and eight values of q: the inequality "
        f"{'holds' if holds else 'fails'}, and pushing the rows of a set together lowers the probability by at most "
        f"{squeezed:.1e}; at d = 3 even p = {needed:.2f} sqrt(2 q d) suffices. In the proof, {printed_unfit} sets do "
        f"not contain the square of the printed h, and {ours_unfit} break |S| <= 2 d h for the largest h with h rows "
        "of h entries",
        {"smallest factor of p at d = 3": needed, "sets without the printed square": printed_unfit,
         "sets without ours": ours_unfit, "lowered by": squeezed},
    )  # fmt: skip


def _all_sets(d: int) -> npt.NDArray[np.int64]:
    """Every set of index pairs, one per row, as d numbers of d bits."""
    numbers = np.arange(2 ** (d * d))
    return np.stack([(numbers >> (d * i)) & (2**d - 1) for i in range(d)], 1)


def _bits(numbers: npt.NDArray[np.int64], d: int) -> npt.NDArray[np.int64]:
    return (numbers[..., None] >> np.arange(d)) & 1


def _chance_of_zeros(sets: npt.NDArray[np.int64], d: int, p: float) -> npt.NDArray[np.float64]:
    """For each set the probability that all its u_i v_j vanish, summed over the 2^d values of u."""
    total = np.zeros(len(sets))
    for u in range(2**d):
        kept = [i for i in range(d) if u >> i & 1]
        needed = np.bitwise_or.reduce(sets[:, kept], axis=1) if kept else np.zeros(len(sets), dtype=np.int64)
        total += p ** len(kept) * (1.0 - p) ** (d - len(kept)) * (1.0 - p) ** _bits(needed, d).sum(1)
    return total


def _covers(sets: npt.NDArray[np.int64], d: int, *, share: float, factor: float) -> bool:
    """Whether the lemma's inequality holds for all sets at 2 q d = share and p = factor sqrt(2 q d)."""
    independent = (1.0 - share / (2 * d)) ** _bits(sets, d).sum((1, 2))
    return bool((_chance_of_zeros(sets, d, factor * math.sqrt(share)) <= independent + 32 * EPS).all())
