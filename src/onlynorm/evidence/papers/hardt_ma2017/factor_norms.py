"""A figure for hardt_ma2017: norms of near-identity factors against the depth, for the paper's method and ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from onlynorm.display import Curve, Panel, Table
from onlynorm.evidence.papers.hardt_ma2017.landscape import positive
from onlynorm.evidence.papers.reproduce import Outcome, Run
from onlynorm.identity import factorize, paper_bound, random_matrix, spiral_bound

METHODS = ("svd", "polar", "spiral")


def norms_at(*, dim: int, depth: int, seed: int) -> dict[str, Any]:
    """The largest norm of each method for one random matrix, with upper and lower bounds."""
    matrix = positive(random_matrix(dim, seed=seed))
    made = {method: factorize(matrix, depth, method=method) for method in METHODS}
    one = made["spiral"]
    return {
        "norms": {method: found.max_norm for method, found in made.items()},
        "error": max(found.product_error for found in made.values()),
        "bound": paper_bound(one.stretch, depth),
        "smaller": spiral_bound(one.stretch, depth),
        "least": one.least_norm,
        "stretch": one.stretch,
    }


def factor_norms(run: Run) -> Outcome:
    """Largest norm of the factors against the depth, for the paper's construction and ours.

    Theory: hardt_ma2017:thm-2.1
    """
    depths, dim = run.sizes["depths"], run.sizes["dim"]
    run.announce(len(depths))
    rows: list[Mapping[str, Any]] = [
        run.piece(f"d={dim} l={depth}", norms_at, dim=dim, depth=depth, seed=run.seeds[0]) for depth in depths
    ]
    norms = {method: np.array([row["norms"][method] for row in rows]) for method in METHODS}
    bound, least = (np.array([row[name] for row in rows]) for name in ("bound", "least"))
    slope = np.polyfit(np.log(depths[-3:]), np.log(norms["svd"][-3:]), 1)[0]
    values = {
        "svd over the paper's bound, largest ratio": float((norms["svd"] / bound).max()),
        "spiral over the paper's bound, largest ratio": float((norms["spiral"] / bound).max()),
        "spiral over svd, largest ratio": float((norms["spiral"] / norms["svd"]).max()),
        "spiral over the lower bound, largest ratio": float((norms["spiral"] / least).max()),
        "svd, exponent of the depth": float(slope),
        "largest product error": max(float(row["error"]) for row in rows),
        "smallest depth over three times the largest |log singular value|": depths[0] / (3.0 * rows[0]["stretch"]),
    }
    curves = [Curve(method, list(depths), norms[method].tolist(), kind="line+points") for method in METHODS]
    laws = {"the paper's bound": "bound", "bound of the spiral": "smaller", "lower bound": "least"}
    curves += [Curve(label, list(depths), [row[name] for row in rows], style="law") for label, name in laws.items()]
    columns = ["depth", *METHODS, *laws, "product error"]
    table = Table(columns, [
        [depth, *(row["norms"][method] for method in METHODS), *(row[name] for name in laws.values()), row["error"]]
        for depth, row in zip(depths, rows, strict=True)
    ])  # fmt: skip
    panel = Panel(
        "", f"A random {dim} x {dim} matrix as l layers I + A", "depth l", "largest |A|", x_log=True, y_log=True
    )
    return Outcome(values=values, curves=curves, panels=(panel,), table=table)
