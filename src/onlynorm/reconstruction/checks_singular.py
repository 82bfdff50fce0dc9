"""Checks of what giannou2023 takes from elsewhere about sparse matrices of zeros and ones, and concludes from it."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import lambertw

from onlynorm.features import draw
from onlynorm.solvers.checks import EPS, verdict
from onlynorm.theorems import Evidence, check

SIZES = (25, 50, 100, 200)
CONSTANTS = (0.5, 0.1, 0.5)
"""(c1, C, c) of theorem 4, which says that such constants exist; these serve all sizes here."""


class Squares(NamedTuple):
    """Random matrices of zeros and ones: smallest singular values, and what is wrong with them."""

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


@check("giannou2023:thm-4")
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
                share = float(((found.smallest <= c1 * eps * scale) & ~found.has_zero_line).mean())
                fullest = max(fullest, share / (eps + n**-c))
            measured[f"singular at {factor} log n / n, n = {n}"] = float(found.is_singular.mean())
            measured[f"with a zero line at {factor} log n / n, n = {n}"] = float(found.has_zero_line.mean())
    singular = [measured[f"singular at 1 log n / n, n = {n}"] for n in SIZES]
    return Evidence(
        verdict(fullest <= 1.0, as_printed=all(s <= n**-c for s, n in zip(singular, SIZES, strict=True))),
        f"n = 25 to 200, density log n / n and twice that: with c1 = {c1}, C = {C}, c = {c} the probability reaches "
        f"{fullest:.2f} of its bound. The conclusion drawn at log n / n leaves out zero rows and columns: "
        + ", ".join(f"{share:.2f}" for share in singular)
        + f" of the matrices are singular; at 2 log n / n it is {measured['singular at 2 log n / n, n = 200']:.2f} for "
        "n = 200",
        measured | {"largest share of the bound": fullest},
    )


@check("giannou2023:remark-11")
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
    shares = {n: float((one.is_singular & ~one.has_zero_line).mean()) for n, one in found.items()}
    regular = 1.0 - float(found[200].is_singular.mean())
    is_small = all(share <= n**-c for n, share in shares.items())
    return Evidence(
        # W(n), the root of n rho = log(1/rho) times n, lies at most e / (e - 1) log log n / log n above.
        verdict(rest <= math.e / (math.e - 1.0) and is_small, as_printed=right == tried),
        f"n rho = log(1/rho) at rho = (log n - log log n + r) / n with r up to {rest:.2f} log log n / log n, for n "
        f"from 1e2 to 1e8; the printed threshold is right about {right} of {tried} densities. At log n / n, singular "
        "without a zero row or column are "
        + ", ".join(f"{share:.3f}" for share in shares.values())
        + f" of the matrices for n = {', '.join(map(str, SIZES))}, below n^-{c}; regular are {regular:.2f} at n = 200",
        {"rest": rest, "printed threshold right": right, "tried": tried, "regular at n = 200": regular}
        | {f"singular without a zero line, n = {n}": share for n, share in shares.items()},
    )
