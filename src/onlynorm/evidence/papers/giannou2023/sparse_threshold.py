"""A figure for remark 3 of giannou2023: the density at which sparse frozen weights can represent every target."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from onlynorm.display import Curve, Panel, Table
from onlynorm.evidence.papers.giannou2023 import sparse
from onlynorm.evidence.papers.reproduce import Outcome, Run

_N_PLACES = 120


def thresholds(*, d: int, excess: float, n_patterns: int, seed: int) -> dict[str, list[float]]:
    """The smallest densities at which random d x d patterns are full, and at which they have no dead features."""
    shape, seeds = (d, d), range(seed * 100_000, seed * 100_000 + n_patterns)
    return {
        "full": [sparse.density_full(shape, seed=i, excess=excess, layer="remark 3") for i in seeds],
        "alive": [sparse.density_alive(shape, seed=i, layer="remark 3") for i in seeds] if excess == 1.0 else [],
    }


def n_features(d: int, excess: float) -> int:
    """The number of features of a d x d target at this excess."""
    return sparse.random_pattern((d, d), 1.0, seed=0, excess=excess).n_features


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
    law = {(d, e): sparse.predicted_density((d, d), n_features=n_features(d, e)) for d, e in full}
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
    chances = np.array([sparse.chance_full((d, d), float(p), n_features=d * d) for p in full])
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
        chances = [sparse.chance_full((d, d), float(p), n_features=d * d) for p in places]
        curves.append(Curve(f"law, d = {d}", (places / unit).tolist(), chances, panel="fractions", style="law"))
    units = {d: math.log(d) / d for d in sizes}
    for excess in excesses[:2]:  # the others are in the table
        measured = [half[d, excess] / units[d] for d in sizes]
        predicted = [law[d, excess] / units[d] for d in sizes]
        curves.append(Curve(f"excess {excess:g}", list(sizes), measured, kind="points", panel="halves"))
        curves.append(Curve(f"law, excess {excess:g}", list(sizes), predicted, panel="halves", style="law"))
    order = [math.sqrt(units[d]) / units[d] for d in sizes]
    return [*curves, Curve("sqrt(log d / d), the order of theorem 3", list(sizes), order, panel="halves", style="law")]
