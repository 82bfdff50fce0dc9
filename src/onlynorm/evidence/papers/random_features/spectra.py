"""Figure 3 of random_features: singular values of feature matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float
from scipy import integrate

import onlynorm as on
from onlynorm.display import Curve, Panel, Table
from onlynorm.evidence.papers.reproduce import Outcome, Run

_N_BINS = 48


def singular_values(*, distribution: str, n_channels: int, n_features: int, seed: int) -> list[float]:
    """The singular values, ascending, of the feature matrix of an (n_channels, n_channels) layer.

    Entries are scaled to variance 1/N, where N = n_channels^2 is the number of equations.
    """
    layer = f"fig-3 {distribution}"  # with equal layer and seed, distributions would use the same random stream
    features = on.draw(distribution, (n_channels, n_channels), n_features=n_features, seed=seed, layer=layer)
    values = on.spectrum.empirical_spectrum(features.left(), features.right())
    return sorted(values.tolist())


def figure_3(run: Run) -> Outcome:
    """Histograms of singular values with the law, and the scale of the law that fits best.

    Theory: random_features:thm-2.2
    """
    n_channels, n_equations = run.sizes["channels"], run.sizes["channels"] ** 2
    heavy = run.sizes["heavy_tailed"]
    distributions = [*run.sizes["distributions"], *heavy]
    panels = {"exact": n_equations, "excess": round(run.sizes["excess"] * n_equations)}
    run.announce(len(panels) * len(distributions) * len(run.seeds))
    spectra = {
        (panel, name): [
            np.asarray(
                run.piece(
                    f"{name} c1={n_features} seed={seed}",
                    singular_values,
                    distribution=name,
                    n_channels=n_channels,
                    n_features=n_features,
                    seed=seed,
                )
            )
            for seed in run.seeds
        ]
        for panel, n_features in panels.items()
        for name in distributions
    }

    values: dict[str, float] = {}
    for (panel, name), samples in spectra.items():
        far = max(distance(sample, n_equations, panels[panel]) for sample in samples)
        values[f"distance to the law, {name}, {panel}"] = far
    for panel, n_features in panels.items():
        low, high = on.spectrum.edges(n_equations, n_features)
        for group, names in (("light tails", run.sizes["distributions"]), ("heavy tails", heavy)):
            drawn = [sample for name in names for sample in spectra[panel, name]]
            values[f"largest singular value, {group}, {panel}"] = _farthest([s[-1] for s in drawn], high)
            if panel == "excess":
                values[f"smallest singular value, {group}, {panel}"] = _farthest([s[0] for s in drawn], low)

    light = [sample for name in run.sizes["distributions"] for sample in spectra["excess", name]]
    table, gains = _compare_scales(light, n_equations, panels["excess"])
    values.update(gains)
    return Outcome(
        values=values,
        curves=_curves(spectra, panels, n_equations),
        panels=[
            Panel(
                name=panel,
                title=f"{panel}: c0 = c2 = {n_channels}, c1 = {n_features}",
                x_label="singular value of M",
                y_label="density",
            )
            for panel, n_features in panels.items()
        ],
        table=table,
    )


def distance(sample: Float[np.ndarray, " values"], n_equations: int, n_features: int) -> float:
    """The Kolmogorov distance between ascending values and the law of this many equations and features."""
    law = np.asarray(on.spectrum.cumulative(sample, n_equations, n_features))
    return _gap(sample, law)


def printed_density(x: Float[np.ndarray, "*shape"], *, scale: float) -> Float[np.ndarray, "*shape"]:
    """The density of Theorem 2.2 exactly as printed, whose upper edge squared is 1 + sqrt(scale)."""
    low, high_squared = 1 - math.sqrt(scale), 1 + math.sqrt(scale)
    inside = np.clip((x**2 - low**2) * (high_squared - x**2), 0, None)
    return np.asarray(np.sqrt(inside) / (scale * math.pi * x))


def _compare_scales(
    samples: Sequence[Float[np.ndarray, " values"]], n_equations: int, n_features: int
) -> tuple[Table, dict[str, float]]:
    """Distances of the data from each candidate law, with entries of variance 1/N (as in the theorem) and 1/c1.

    The law with scale N/c1 is that of the transposed problem with c1 equations and N features, for entries of
    variance 1/c1. At variance 1/N the same data follow the law with scale c1/N.
    """
    factors = {"1/N": 1.0, "1/c1": math.sqrt(n_equations / n_features)}
    grid = np.linspace(1e-9, 3, 60_001)
    height = printed_density(grid, scale=n_features / n_equations)
    printed = integrate.cumulative_trapezoid(height, grid, initial=0.0)
    candidates: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "scale c1/N (ours)": lambda x: on.spectrum.cumulative(x, n_equations, n_features),
        "scale N/c1 (red in the paper)": lambda x: on.spectrum.cumulative(x, n_features, n_equations),
        "scale 1 (black in the paper)": lambda x: on.spectrum.cumulative(x, n_equations, n_equations),
        "Theorem 2.2 as printed": lambda x: np.interp(x, grid, printed),
    }
    gaps = {
        (label, variance): float(np.mean([_gap(sample * factor, law(sample * factor)) for sample in samples]))
        for label, law in candidates.items()
        for variance, factor in factors.items()
    }
    ours, red, black, literal = candidates
    masses = {ours: 1.0, red: 1.0, black: 1.0, literal: float(printed[-1])}
    closest = {variance: min(candidates, key=lambda label: gaps[label, variance]) for variance in factors}
    rows: list[list[float | str]] = [
        [
            label,
            *(gaps[label, variance] for variance in factors),
            masses[label],
            ", ".join(variance for variance in factors if closest[variance] == label) or "-",
        ]
        for label in candidates
    ]
    heads = [f"distance at variance {variance}" for variance in factors]
    columns = ["candidate law, excess features", *heads, "mass", "closest at variance"]
    gains = {
        "gain of scale N/c1 over scale 1, entries of variance 1/c1": gaps[black, "1/c1"] - gaps[red, "1/c1"],
        "gain of scale N/c1 over scale 1, entries of variance 1/N": gaps[black, "1/N"] - gaps[red, "1/N"],
        "gain of scale c1/N over scale N/c1, entries of variance 1/N": gaps[red, "1/N"] - gaps[ours, "1/N"],
        "mass of the printed density, excess": masses[literal],
    }
    return Table(columns=columns, rows=rows), gains


def _gap(sample: Float[np.ndarray, " values"], law: Float[np.ndarray, " values"]) -> float:
    """The largest distance between the empirical distribution of an ascending sample and a cumulative law."""
    steps = np.arange(len(sample) + 1) / len(sample)
    return float(max(np.max(law - steps[:-1]), np.max(steps[1:] - law)))


def _farthest(numbers: Sequence[float], goal: float) -> float:
    return float(max(numbers, key=lambda number: abs(number - goal)))


def _curves(
    spectra: dict[tuple[str, str], list[Float[np.ndarray, " values"]]], panels: dict[str, int], n_equations: int
) -> list[Curve]:
    curves = []
    for (panel, name), samples in spectra.items():
        pooled = np.concatenate(samples)
        heights, bins = np.histogram(pooled, bins=_N_BINS, range=(0.0, float(pooled.max())), density=True)
        curves.append(Curve(name, bins.tolist(), heights.tolist(), kind="histogram", panel=panel))
    for panel, n_features in panels.items():
        laws = {"law, scale c1/N": (n_equations, n_features)}
        if n_features != n_equations:
            laws["paper's red, scale N/c1"] = (n_features, n_equations)
            laws["paper's black, scale 1"] = (n_equations, n_equations)
        for label, shape in laws.items():
            low, high = on.spectrum.edges(*shape)
            # Chebyshev points: the density grows like a square root at its edges.
            x = low + (high - low) * (1 - np.cos(np.linspace(0.01, math.pi, 300))) / 2
            y = np.asarray(on.spectrum.density(x, *shape))
            curves.append(Curve(label, x.tolist(), y.tolist(), panel=panel, style="law"))
    return curves
