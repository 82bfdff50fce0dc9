"""Sparse frozen weights in giannou2023: the density they need, with a figure, and lemmas about sparse matrices.

By lemma 9, only the pattern of nonzero weights matters. A pattern is full if a matching assigns a different feature to
every equation. Random patterns are not full almost only for two reasons:

    dead features       features without a nonzero input or output; the probability that a feature is alive is
                        a = (1 - (1-p)^out) (1 - (1-p)^inp)
    empty equations     (i, j) for which no feature has output i and input j: with probability (1 - p^2)^features each

    probability of a full pattern = P(Binomial(features, a) >= equations) * exp(-equations (1 - p^2)^features)

With as many features as equations, no feature may be dead: half of the patterns are full at the density
p = (2 log d + log(2 / log 2)) / d, which has the order that giannou2023 conjectures. With excess l > 1 some features
may be dead, and p = sqrt(2 log d / l) / d is enough for large d.

Theory: giannou2023:thm-3, giannou2023:remark-3, giannou2023:lemma-9
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from scipy.special import bdtrc, lambertw
from torch import nn

from onlynorm.display import Curve, Panel, Table
from onlynorm.evidence.papers.giannou2023.wide_networks import rebuild_error, relu_network
from onlynorm.evidence.papers.reproduce import Outcome, Run
from onlynorm.evidence.registry import EPS, Evidence, verdict
from onlynorm.features import Features, draw, is_generically_invertible
from onlynorm.reconstruction import Wide

STEP = 2.0**-14
"""The accuracy of densities."""


def random_pattern(
    shape: Sequence[int], density: float, *, seed: int, excess: float = 1.0, layer: str = ""
) -> Features:
    """Features whose pattern of nonzeros is used; with equal seeds, the patterns are nested as the density grows."""
    return draw("er_normal", shape, excess=excess, density=min(1.0, density), seed=seed, layer=layer)


def is_full(features: Features) -> bool:
    """Whether almost all weights with these nonzeros can represent every target."""
    return is_generically_invertible(features.mask_left(), features.mask_right())


def is_alive(features: Features) -> bool:
    """Whether every feature has a nonzero input and a nonzero output."""
    return bool(features.mask_left().any(0).all()) and bool(features.mask_right().any(1).all())


def chance_full(shape: Sequence[int], density: float, *, n_features: int) -> float:
    """The predicted probability that a random pattern is full: enough features are alive, and no equation is empty."""
    out, inp = shape[0], math.prod(shape[1:])
    alive = (1.0 - (1.0 - density) ** out) * (1.0 - (1.0 - density) ** inp)
    enough = float(bdtrc(out * inp - 1, n_features, alive)) if n_features >= out * inp else 0.0
    return enough * math.exp(-out * inp * (1.0 - density**2) ** n_features)


def predicted_density(shape: Sequence[int], *, n_features: int, chance: float = 0.5) -> float:
    """The density at which the predicted probability of a full pattern is `chance`, or 1 if there is none."""
    return smallest_enough(lambda density: chance_full(shape, density, n_features=n_features) >= chance)


def smallest_enough(is_enough: Callable[[float], bool], *, low: float = 0.0, high: float = 1.0) -> float:
    """The smallest number between `low` and `high` that meets a monotone condition, with accuracy `STEP`."""
    while high - low > STEP:
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def density_alive(shape: Sequence[int], *, seed: int, excess: float = 1.0, layer: str = "") -> float:
    """The smallest density at which the pattern of this seed has no dead feature."""
    return smallest_enough(lambda p: is_alive(random_pattern(shape, p, seed=seed, excess=excess, layer=layer)))


def density_full(shape: Sequence[int], *, seed: int, excess: float = 1.0, layer: str = "") -> float:
    """The smallest density at which the pattern of this seed is full."""

    def is_enough(density: float) -> bool:
        return is_full(random_pattern(shape, density, seed=seed, excess=excess, layer=layer))

    if excess == 1.0:  # not below the density without dead features, and mostly equal to it
        low = density_alive(shape, seed=seed, layer=layer)
        return low if is_enough(low) else smallest_enough(is_enough, low=low)
    return smallest_enough(is_enough)


ENOUGH = 1.5
"""Multiple of sqrt(log d / d) at which theorem 3 is tested: the probability that d layers fail is below 1/d."""


def fraction_full(d: int, density: float, n_patterns: int, *, seed: int, layer: str) -> float:
    """The fraction of d x d patterns of this density that are full."""
    found = (is_full(random_pattern((d, d), density, seed=seed, layer=f"{layer} {i}")) for i in range(n_patterns))
    return sum(found) / n_patterns


def frozen_weights_may_be_sparse(seed: int) -> Evidence:
    failing: dict[int, float] = {}
    for d in (8, 16):  # networks of d layers: a network fails if one of its layers is not full
        density = ENOUGH * math.sqrt(math.log(d) / d)
        names = ([f"network {i} layer {k}" for k in range(d)] for i in range(3 * d))
        whole = sum(all(is_full(random_pattern((d, d), density, seed=seed, layer=n)) for n in net) for net in names)
        failing[d] = 1.0 - whole / (3 * d)
    holds = all(fraction <= 1 / d for d, fraction in failing.items())
    measured = {f"fraction of networks that fail, d = {d}": fraction for d, fraction in failing.items()}
    for factor in (0.75, 1.0):  # single layers: if the order suffices, a fixed factor works better for larger d
        fractions = []
        for d in (8, 16, 32):
            fractions.append(fraction_full(d, factor * math.sqrt(math.log(d) / d), 40, seed=seed, layer="single"))
            measured[f"full at {factor} sqrt(log d / d), d = {d}"] = fractions[-1]
        holds &= fractions[0] < fractions[-1]
    density = ENOUGH * math.sqrt(math.log(12) / 12)
    wide = Wide(features="sparse_he_normal", density=density, excess=1.0, activation=nn.ReLU())
    error = rebuild_error(relu_network([12, 12, 12, 12], seed=seed), wide, seed=seed)
    return Evidence(
        verdict(holds and error <= 1e-8),
        f"p = {ENOUGH} sqrt(log d / d): of 3 d networks of d layers the fraction "
        + ", ".join(f"{fraction:.3f} fails at d = {d}" for d, fraction in failing.items())
        + ", where 1/d is allowed. At the factor 1 single layers are full with "
        + ", ".join(f"{measured[f'full at 1.0 sqrt(log d / d), d = {d}']:.2f} at d = {d}" for d in (8, 16, 32))
        + f". A ReLU network of three layers of width 12, rebuilt at p = {density:.2f} from 144 features each, has "
        f"error {error:.1e}",
        measured | {"error of a network": error},
    )


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
            f"fraction full at log d / d, d = {d}": float((full <= unit).mean()),
            f"fraction full at 3 log d / d, d = {d}": float((full <= 3.0 * unit).mean()),
            f"nonzeros at 3 log d / d over d^2 log d, d = {d}": nonzeros / (d * d * math.log(d)),
        }
        n_late = int((full > 3.0 * unit).sum())
        late += n_late
        # So many would be late by chance once in a thousand times at least, were it 1/d of all patterns.
        holds &= bool((full > unit).all()) and float(bdtrc(n_late - 1, n_seeds, 1 / d)) >= 1e-3
        holds &= abs(ratios[-1] * unit / law - 1.0) <= 0.1 and abs(nonzeros / (d * d * math.log(d)) - 6.0) <= 0.6
    growth = ratios[-1] / ratios[0]
    limit = math.sqrt((64 / math.log(64)) / (8 / math.log(8)))  # of the ratio if the order were that of theorem 3
    return Evidence(
        verdict(holds and growth < 1.0 + (limit - 1.0) / 2),
        f"d = {', '.join(map(str, sizes))} with d^2 features: half of the patterns are full at "
        + ", ".join(f"{ratio:.2f}" for ratio in ratios)
        + f" times log d / d (growth {growth:.2f}; {limit:.1f} in the order of theorem 3), none at log d / d, "
        f"{tried - late} of {tried} at 3 log d / d, where 6 d^2 log d weights are left. {at_once} of {tried} are full "
        "at the smallest density without dead features, whose law (1 - (1 - p)^d)^(2 d^2) has the constant 2: "
        "evidence for the conjecture, not a proof",
        measured | {"growth": growth, "full as soon as no feature is dead": at_once / tried},
    )


def a_sparse_product_covers_no_less_than_independent_entries(seed: int) -> Evidence:
    products = [0.001, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0]  # values of 2 q d
    close = 32 * EPS
    holds, squeezed, printed_unfit, ours_unfit, n_sets = True, 0.0, 0, 0, 0
    for d in (3, 4):
        sets = _all_sets(d)
        rows = -np.sort(-_bits(sets, d).sum(2), axis=1)  # entries per row, in descending order
        packed = (1 << rows) - 1  # the same rows moved to the left, where they overlap most
        holds &= all(_covers(sets, d, two_q_d=one, factor=1.0) for one in products)
        for one in products:
            gap = _chance_of_zeros(sets, d, math.sqrt(one)) - _chance_of_zeros(packed, d, math.sqrt(one))
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
    needed = smallest_enough(lambda factor: all(_covers(sets, 3, two_q_d=one, factor=factor) for one in products))
    return Evidence(
        verdict(holds and squeezed <= close and not ours_unfit),
        f"exact probabilities for all {n_sets} sets at d = 3 and 4 and eight values of q: the inequality "
        f"{'holds' if holds else 'fails'}, and moving the rows of a set to the left lowers the probability by at most "
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
        ones = [i for i in range(d) if u >> i & 1]
        needed = np.bitwise_or.reduce(sets[:, ones], axis=1) if ones else np.zeros(len(sets), dtype=np.int64)
        total += p ** len(ones) * (1.0 - p) ** (d - len(ones)) * (1.0 - p) ** _bits(needed, d).sum(1)
    return total


def _covers(sets: npt.NDArray[np.int64], d: int, *, two_q_d: float, factor: float) -> bool:
    """Whether the lemma's inequality holds for all sets at p = factor sqrt(2 q d)."""
    independent = (1.0 - two_q_d / (2 * d)) ** _bits(sets, d).sum((1, 2))
    return bool((_chance_of_zeros(sets, d, factor * math.sqrt(two_q_d)) <= independent + 32 * EPS).all())


SIZES = (25, 50, 100, 200)
CONSTANTS = (0.5, 0.1, 0.5)
"""(c1, C, c) of theorem 4, which states that such constants exist; these are valid for all sizes here."""


class Squares(NamedTuple):
    """Smallest singular values of random matrices of zeros and ones, and their zero rows and columns."""

    smallest: npt.NDArray[np.float64]
    is_singular: npt.NDArray[np.bool_]
    has_zero_line: npt.NDArray[np.bool_]


@functools.cache
def squares(n: int, density: float, *, seed: int) -> Squares:
    """Singular values of 100 to 400 random n x n matrices of this density; a zero line is a zero row or column."""
    n_matrices = min(400, 20_000 // n)
    mask = draw("er_sign", (n, 1), n_features=n * n_matrices, density=density, seed=seed, layer="square").mask_left()
    matrices = mask.reshape(n, n_matrices, n).movedim(1, 0)
    values = torch.linalg.svdvals(matrices.double())
    is_singular = values[:, -1] <= n * EPS * values[:, 0]
    has_zero_line = ~(matrices.any(1).all(1) & matrices.any(2).all(1))
    return Squares(values[:, -1].numpy(), is_singular.numpy(), has_zero_line.numpy())


def smallest_singular_values_of_sparse_matrices(seed: int) -> Evidence:
    c1, C, c = CONSTANTS
    measured: dict[str, float] = {}
    fullest = 0.0
    for n in SIZES:
        for factor in (1, 2):
            density = factor * math.log(n) / n
            found = squares(n, density, seed=seed)
            scale = math.exp(-C * math.log(1 / density) / math.log(n * density)) * math.sqrt(density / n)
            for eps in (1e-9, 0.05, 0.1, 0.2, 0.5):
                fraction = float(((found.smallest <= c1 * eps * scale) & ~found.has_zero_line).mean())
                fullest = max(fullest, fraction / (eps + n**-c))
            measured[f"singular at {factor} log n / n, n = {n}"] = float(found.is_singular.mean())
            measured[f"with a zero line at {factor} log n / n, n = {n}"] = float(found.has_zero_line.mean())
    singular = [measured[f"singular at 1 log n / n, n = {n}"] for n in SIZES]
    return Evidence(
        verdict(fullest <= 1.0, as_printed=all(s <= n**-c for s, n in zip(singular, SIZES, strict=True))),
        f"n = 25 to 200, density log n / n and twice that: with c1 = {c1}, C = {C}, c = {c} the probability reaches "
        f"{fullest:.2f} of its bound. The conclusion at log n / n leaves out zero rows and columns: "
        + ", ".join(f"{fraction:.2f}" for fraction in singular)
        + f" of the matrices are singular; at 2 log n / n it is {measured['singular at 2 log n / n, n = 200']:.2f} for "
        "n = 200",
        measured | {"largest fraction of the bound": fullest},
    )


def from_the_smallest_singular_value_to_invertibility(seed: int) -> Evidence:
    rest, right, tried = 0.0, 0, 0
    for n in (10.0**k for k in range(2, 9)):
        threshold, log, loglog = float(lambertw(n).real), math.log(n), math.log(math.log(n))
        rest = max(rest, (threshold - (log - loglog)) / (loglog / log))
        for density in (factor * threshold / n for factor in (0.5, 0.9, 1.1, 2.0)):
            right += (n * density >= math.log(1 / density)) == (density >= log / n - loglog)
            tried += 1
    c = CONSTANTS[2]
    found = {n: squares(n, math.log(n) / n, seed=seed) for n in SIZES}
    fractions = {n: float((one.is_singular & ~one.has_zero_line).mean()) for n, one in found.items()}
    regular = 1.0 - float(found[200].is_singular.mean())
    is_small = all(fraction <= n**-c for n, fraction in fractions.items())
    return Evidence(
        # W(n), the root of n rho = log(1/rho) times n, lies at most e / (e - 1) log log n / log n above.
        verdict(rest <= math.e / (math.e - 1.0) and is_small, as_printed=right == tried),
        f"n rho = log(1/rho) at rho = (log n - log log n + r) / n with r up to {rest:.2f} log log n / log n, for n "
        f"from 1e2 to 1e8; the printed threshold is correct for {right} of {tried} densities. At log n / n, the "
        "fraction of singular matrices without a zero row or column is "
        + ", ".join(f"{fraction:.3f}" for fraction in fractions.values())
        + f" for n = {', '.join(map(str, SIZES))}, below n^-{c}; at n = 200 the fraction {regular:.2f} is regular",
        {"rest": rest, "printed threshold right": right, "tried": tried, "regular at n = 200": regular}
        | {f"singular without a zero line, n = {n}": fraction for n, fraction in fractions.items()},
    )


_N_PLACES = 120


def thresholds(*, d: int, excess: float, n_patterns: int, seed: int) -> dict[str, list[float]]:
    """The smallest densities at which random d x d patterns are full, and at which they have no dead features."""
    shape, seeds = (d, d), range(seed * 100_000, seed * 100_000 + n_patterns)
    return {
        "full": [density_full(shape, seed=i, excess=excess, layer="remark 3") for i in seeds],
        "alive": [density_alive(shape, seed=i, layer="remark 3") for i in seeds] if excess == 1.0 else [],
    }


def n_features(d: int, excess: float) -> int:
    """The number of features of a d x d target at this excess."""
    return random_pattern((d, d), 1.0, seed=0, excess=excess).n_features


def sparse_threshold(run: Run) -> Outcome:
    """Fractions of full patterns against the density, the density of one half against d, and their laws.

    Theory: giannou2023:remark-3, giannou2023:thm-3
    """
    sizes, excesses, n_patterns = run.sizes["widths"], run.sizes["excesses"], run.sizes["n_patterns"]
    (seed,) = run.seeds
    run.announce(len(sizes) * len(excesses))
    found: dict[tuple[int, float], Mapping[str, Sequence[float]]] = {
        (d, excess): run.piece(
            f"d={d} excess={excess}", thresholds, d=d, excess=excess, n_patterns=n_patterns, seed=seed
        )
        for d in sizes
        for excess in excesses
    }
    full = {key: np.sort(np.asarray(one["full"])) for key, one in found.items()}
    half = {key: float(np.median(one)) for key, one in full.items()}
    law = {(d, e): predicted_density((d, d), n_features=n_features(d, e)) for d, e in full}
    unit = {d: math.log(d) / d for d in sizes}
    multiples = [half[d, 1.0] / unit[d] for d in sizes]
    at_once = np.mean([np.mean(np.asarray(found[d, 1.0]["full"]) == found[d, 1.0]["alive"]) for d in sizes])
    values = {
        "half full, smallest multiple of log d / d": min(multiples),
        "half full, largest multiple of log d / d": max(multiples),
        "growth of the multiple from the smallest to the largest d": multiples[-1] / multiples[0],
        "full at log d / d, largest fraction": max(float((full[d, 1.0] <= unit[d]).mean()) for d in sizes),
        "full at 3 log d / d, smallest fraction": min(float((full[d, 1.0] <= 3 * unit[d]).mean()) for d in sizes),
        "full as soon as no feature is dead, fraction": float(at_once),
        "largest distance of the fractions from the law": max(_distance(full[d, 1.0], d) for d in sizes),
    }  # fmt: skip
    for excess in excesses:
        ratios = [half[d, excess] / law[d, excess] for d in sizes]
        values[f"half full over the law, excess {excess:g}"] = max(ratios, key=lambda ratio: abs(ratio - 1.0))
    most = max(excesses)
    roots = [half[d, most] * d / math.sqrt(2.0 * math.log(d) / most) for d in sizes]
    values[f"half full over sqrt(2 log d / l) / d, largest d, excess l = {most:g}"] = roots[-1]
    rows = [
        [d, excess, half[d, excess], half[d, excess] / unit[d], half[d, excess] * d, law[d, excess]]
        for excess in excesses
        for d in sizes
    ]
    columns = ["d", "excess", "half full at p", "p / (log d / d)", "p d", "p by the law"]
    return Outcome(
        values=values, curves=_curves(full, half, law, sizes, excesses), panels=_PANELS, table=Table(columns, rows)
    )


_PANELS = (
    Panel("fractions", "d^2 features: full patterns", "density p / (log d / d)", "fraction of full patterns"),
    Panel("halves", "Density at which half of the patterns are full", "d", "density p / (log d / d)"),
)


def _distance(full: Float[np.ndarray, " patterns"], d: int) -> float:
    """The Kolmogorov distance between the ascending densities and the law for d^2 features."""
    chances = np.array([chance_full((d, d), float(p), n_features=d * d) for p in full])
    steps = np.arange(len(full) + 1) / len(full)
    return float(max(np.max(chances - steps[:-1]), np.max(steps[1:] - chances)))


def _curves(
    full: Mapping[tuple[int, float], Float[np.ndarray, " patterns"]],
    half: Mapping[tuple[int, float], float],
    law: Mapping[tuple[int, float], float],
    sizes: Sequence[int],
    excesses: Sequence[float],
) -> list[Curve]:
    curves = []
    for d in (sizes[0], sizes[len(sizes) // 2], sizes[-1]):  # more curves would overlap
        unit, sample = math.log(d) / d, full[d, 1.0]
        fractions = (np.arange(len(sample)) + 1) / len(sample)
        curves.append(Curve(f"d = {d}", (sample / unit).tolist(), fractions.tolist(), kind="points", panel="fractions"))
        places = np.linspace(0.5 * unit, min(1.0, 3.5 * unit), _N_PLACES)
        chances = [chance_full((d, d), float(p), n_features=d * d) for p in places]
        curves.append(Curve(f"law, d = {d}", (places / unit).tolist(), chances, panel="fractions", style="law"))
    units = {d: math.log(d) / d for d in sizes}
    for excess in excesses[:2]:  # the others are in the table
        measured = [half[d, excess] / units[d] for d in sizes]
        predicted = [law[d, excess] / units[d] for d in sizes]
        curves.append(Curve(f"excess {excess:g}", list(sizes), measured, kind="points", panel="halves"))
        curves.append(Curve(f"law, excess {excess:g}", list(sizes), predicted, panel="halves", style="law"))
    order = [math.sqrt(units[d]) / units[d] for d in sizes]
    return [*curves, Curve("sqrt(log d / d), the order of theorem 3", list(sizes), order, panel="halves", style="law")]
