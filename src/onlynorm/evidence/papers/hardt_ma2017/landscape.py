"""Checks of hardt_ma2017 on the risk of linear residual networks: formula, gradient, critical points.

A figure shows level lines of the risk and gradient descent, for layers I + A and for layers A.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy.optimize
import torch
from matplotlib.figure import Figure
from torch import Tensor

from onlynorm.display import Curve, Panel, Table
from onlynorm.evidence.papers.reproduce import Outcome, Run
from onlynorm.evidence.registry import EPS, Evidence, normal, relative, verdict
from onlynorm.identity import Landscape, factorize, random_matrix


def layers_within(tau: float, *, depth: int, dim: int, seed: int) -> Tensor:
    """Random layers (depth, dim, dim), each of spectral norm tau."""
    layers = normal(seed, f"layers {depth} {dim}", depth * dim, dim).reshape(depth, dim, dim)
    return tau * layers / torch.linalg.matrix_norm(layers, 2)[:, None, None]


def covariance(dim: int, seed: int, *, rank: int | None = None) -> Tensor:
    """A random covariance of this rank, by default of full rank."""
    half = normal(seed, "covariance", dim, rank or 2 * dim)
    return half @ half.mT / half.shape[1]


def the_risk_is_a_distance_of_matrices(seed: int) -> Evidence:
    dim, depth, worst, without = 4, 3, 0.0, math.inf
    x = normal(seed, "inputs", 7, dim)  # a distribution on seven points: expectations are finite sums
    noise = math.sqrt(dim) * torch.cat([torch.eye(dim), -torch.eye(dim)]).to(x)  # mean zero, covariance I
    for i in range(6):
        target, layers = normal(seed + i, "target", dim, dim), layers_within(0.8, depth=depth, dim=dim, seed=seed + i)
        hidden = x
        for layer in layers:
            hidden = hidden + hidden @ layer.mT
        errors = (hidden - x @ target.mT)[:, None, :] - noise
        summed = float(errors.square().sum(-1).mean())
        landscape = Landscape(target, covariance=x.mT @ x / len(x), noise=float(dim))
        worst = max(worst, abs(float(landscape.risk(layers)) / summed - 1.0))
        without = min(without, abs(float(Landscape(target, noise=float(dim)).risk(layers)) / summed - 1.0))
    return Evidence(
        verdict(worst <= 64 * EPS and without > 1e-3),
        f"six networks of {depth} layers on a distribution with {len(x)} inputs and {len(noise)} values of noise, "
        f"summed over all pairs: relative difference {worst:.1e} from the formula with C = d = {dim}, the mean square "
        f"of the noise; with I instead of Sigma it is {without:.2g} or more",
        {"relative difference": worst, "with another covariance": without},
    )


def the_gradient_has_a_closed_form(seed: int) -> Evidence:
    worst, printed = 0.0, math.inf
    for dim, depth in ((2, 5), (5, 4), (3, 8)):
        landscape = Landscape(normal(seed, f"target {dim}", dim, dim), covariance=covariance(dim, seed))
        layers = layers_within(0.7, depth=depth, dim=dim, seed=seed).requires_grad_()
        (expected,) = torch.autograd.grad(landscape.risk(layers), layers)
        layers = layers.detach()
        worst = max(worst, relative(landscape.gradient(layers), expected))
        printed = min(printed, relative(_printed_gradient(landscape, layers), expected))
    return Evidence(
        verdict(worst <= 1e3 * EPS, as_printed=printed <= 1e3 * EPS),
        f"three networks of 4 to 8 layers: relative difference {worst:.1e} from automatic differentiation; with the "
        f"factors in the printed order it is {printed:.2f} or more",
        {"relative difference": worst, "difference of the printed order": printed},
    )


def _printed_gradient(landscape: Landscape, layers: Tensor) -> Tensor:
    """2 (I + A_l^T) ... (I + A_(i+1)^T) E Sigma (I + A_(i-1)^T) ... (I + A_1^T), as printed."""
    eye = torch.eye(layers.shape[-1]).to(layers)
    weights = [eye + layer for layer in layers]
    whole = _chain(weights[::-1], eye) - landscape.target
    made = []
    for i in range(len(weights)):
        left = _chain([w.mT for w in weights[:i:-1]], eye)
        right = _chain([w.mT for w in weights[:i][::-1]], eye)
        made.append(2.0 * left @ whole @ landscape.sigma @ right)
    return torch.stack(made)


def _chain(factors: list[Tensor], start: Tensor) -> Tensor:
    for factor in factors:
        start = start @ factor
    return start


def the_gradient_is_large_where_the_risk_is(seed: int) -> Evidence:
    dim, least, tried = 3, math.inf, 0
    for depth, tau, i in itertools.product((1, 2, 3, 6), (0.1, 0.5, 0.9), range(4)):
        sigma = (covariance(dim, seed + i), 4.0 * torch.eye(dim), covariance(dim, seed + i) * 0.05)[i % 3]
        landscape = Landscape(normal(seed + i, "target", dim, dim), covariance=sigma.double(), noise=2.0)
        least = min(least, landscape.dominance(layers_within(tau, depth=depth, dim=dim, seed=seed + i)).ratio)
        tried += 1
    target = normal(seed, "target", dim, dim)
    down = Landscape(target, covariance=covariance(dim, seed)).descend(torch.zeros(4, dim, dim).double(), n_steps=60)
    wide = Landscape(target, covariance=4.0 * torch.eye(dim).double())
    tight = wide.dominance(-0.4 * torch.eye(dim).double().repeat(5, 1, 1))
    printed = tight.gradient / tight.printed
    holds = least >= 1.0 - 1e-9 and min(down.ratios) >= 1.0 - 1e-9 and abs(tight.ratio - 1.0) <= 1e-9
    return Evidence(
        verdict(holds, as_printed=printed >= 1.0),
        f"left over right side is at least {least:.3g} at {tried} random points with tau up to 0.9, and at least "
        f"{min(down.ratios):.3g} along {len(down.risks) - 1} steps of descent. At A_i = -0.4 I with Sigma = 4 I it is "
        f"{tight.ratio:.6f}: no larger constant holds, and with the printed s_min(Sigma)^2 it is {printed:.3f}",
        {"least ratio": least, "least ratio on the descent": min(down.ratios), "tightest": tight.ratio,
         "with the printed power": printed},
    )  # fmt: skip


def critical_points_near_the_identity_are_minima(seed: int) -> Evidence:
    dim, inside, inside_negative, outside, bad, worst = 2, 0, 0, 0, 0, 0.0
    full, thin = covariance(dim, seed), covariance(dim, seed, rank=1)
    for (depth, sigma), i in itertools.product(((2, full), (3, full), (3, thin)), range(6)):
        target = torch.eye(dim).double() + 0.6 * normal(seed + i, "target", dim, dim)
        landscape = Landscape(target, covariance=sigma)
        start = layers_within(0.5, depth=depth, dim=dim, seed=seed + i)
        if i % 2:  # start at the end of a descent; from other points the search mostly finds distant, bad points
            start = landscape.descend(0.2 * start, n_steps=30).end
        found = critical_point(landscape, start)
        if found is None:
            continue
        tau, gap = float(torch.linalg.matrix_norm(found, 2).max()), float(landscape.risk(found))
        if tau < 1.0 - 1e-6:
            inside += 1
            inside_negative += bool(torch.linalg.det(target) < 0) and sigma is full
            worst = max(worst, gap)
        else:
            outside += 1
            bad += gap > 1e-3
    edge = Landscape(normal(seed, "target", dim, dim))
    point = -torch.eye(dim).double().repeat(2, 1, 1)
    slope, height = float(edge.gradient(point).abs().max()), float(edge.risk(point))
    return Evidence(
        verdict(inside >= 3 and bad >= 3 and worst <= 1e-6 and inside_negative == 0 and slope == 0.0 and height > 0.1),
        f"18 searches for zeros of the gradient from tau = 0.5 and less, a third with a singular covariance: {inside} "
        f"end inside tau < 1, with a risk of at most {worst:.1e} above the minimum; {outside} end outside, {bad} of "
        f"them at bad critical points. tau = 1 is the limit: at A_1 = A_2 = -I the gradient is {slope:g} and the risk "
        f"{height:.2f}",
        {"inside": inside, "largest risk inside": worst, "outside": outside, "bad outside": bad,
         "gradient at -I": slope, "risk at -I": height},
    )  # fmt: skip


def critical_point(landscape: Landscape, start: Tensor) -> Tensor | None:
    """A zero of the gradient near `start`, from least squares on the gradient, or None if the search fails."""

    def slope(flat: np.ndarray) -> np.ndarray:
        return landscape.gradient(torch.from_numpy(flat).reshape(start.shape)).flatten().numpy()

    found = scipy.optimize.least_squares(
        slope, start.flatten().numpy(), xtol=1e-15, ftol=1e-15, gtol=1e-15, max_nfev=100
    )
    return torch.from_numpy(found.x).reshape(start.shape) if np.abs(found.fun).max() <= 1e-9 else None


RESIDUAL, STANDARD = "layers I + A", "layers A"
LEVELS = (0.02, 0.2, 0.7, 1.6, 3.0, 5.5, 9.0)
DEEP_LEVELS = (0.05, 0.2, 0.5, 0.8, 0.95, 1.05, 1.5, 4.0, 20.0)
"""Levels in units of the risk at zero."""


def positive(matrix: Tensor) -> Tensor:
    """The matrix, with two rows exchanged if its determinant is negative."""
    return matrix if torch.linalg.slogdet(matrix)[0] > 0 else matrix[[1, 0, *range(2, len(matrix))]]


def two_layers(*, target: float, is_residual: bool, reach: float, n_places: int, n_starts: int, n_steps: int) -> Any:
    """The risk of two layers of one parameter each on a square, and descents from a circle around zero."""
    landscape = Landscape(torch.tensor([[target]], dtype=torch.float64), is_residual=is_residual)
    across, up = torch.eye(2, dtype=torch.float64)[:, :, None, None]
    places, risks = landscape.on_plane(across, up, reach=reach, n_places=n_places)
    angles = [2.0 * math.pi * (place + 0.25) / n_starts for place in range(n_starts)]
    starts = [torch.tensor([[[math.cos(a)]], [[math.sin(a)]]], dtype=torch.float64) * 0.25 for a in angles]
    paths = [landscape.descend(start, n_steps=n_steps, keep_path=True).path for start in starts]
    return {"places": places, "risks": risks, "paths": [path.flatten(1) for path in paths if path is not None]}


def descent(*, dim: int, depth: int, scale: float, is_residual: bool, n_steps: int, seed: int) -> dict[str, Any]:
    """A descent from layers of this scale to a random target: its risks, and the ratios of inequality 2.3."""
    landscape = Landscape(_target(dim, seed), is_residual=is_residual)
    layers = torch.stack([random_matrix(dim, seed=seed, name=f"layer {place}") for place in range(depth)])
    at_zero = landscape.dominance(torch.zeros_like(layers))
    down = landscape.descend(scale * layers, n_steps=n_steps)
    return {
        "risks": down.risks,
        "ratios": down.ratios,
        # A step lowers the risk by at least half the learning rate times |gradient|^2, which inequality 2.3 bounds.
        "promised": math.prod(
            1.0 - 0.5 * down.rate * bound / risk for bound, risk in zip(down.bounds[:-1], down.risks[:-1], strict=True)
        ),
        "norm": max(down.norms),
        "gradient at zero": at_zero.gradient,
        "at zero over 4 l times the risk": at_zero.gradient
        / (4 * depth * float(landscape.risk(torch.zeros_like(layers)))),
    }


def deep_plane(*, dim: int, depth: int, is_residual: bool, n_places: int, seed: int) -> dict[str, Any]:
    """The risk of a deep network over that at zero, on the plane through zero, a minimum and a random direction."""
    target = _target(dim, seed)
    landscape = Landscape(target, is_residual=is_residual)
    goal = factorize(target, depth).factors() + (0.0 if is_residual else torch.eye(dim, dtype=torch.float64))
    aside = torch.stack([random_matrix(dim, seed=seed, name=f"aside {place}") for place in range(depth)])
    aside = aside - (aside * goal).sum() / goal.square().sum() * goal
    places, risks = landscape.on_plane(goal, aside * (goal.norm() / aside.norm()), reach=1.5, n_places=n_places)
    relative_risks = risks / landscape.risk(torch.zeros_like(goal))
    flat = float(((relative_risks - 1.0).abs() <= 0.1).double().mean())
    return {"places": places, "risks": relative_risks, "flat": flat}


def _target(dim: int, seed: int) -> Tensor:
    return positive(torch.eye(dim, dtype=torch.float64) + 0.7 * random_matrix(dim, seed=seed))


def landscape(run: Run) -> Outcome:
    """Level lines and descents of two layers, and descents of deep networks, in both parameterizations.

    Theory: hardt_ma2017:thm-2.2, hardt_ma2017:ineq-2.3
    """
    sizes, depths, scale = run.sizes, run.sizes["depths"], run.sizes["scale"]
    run.announce(4 + 2 * len(depths))
    small = {name: sizes[name] for name in ("target", "reach", "n_places", "n_starts")} | {"n_steps": sizes["n_small"]}
    planes = {
        name: run.piece(f"two {name}", two_layers, is_residual=name == RESIDUAL, **small)
        for name in (RESIDUAL, STANDARD)
    }
    deep: dict[str, Mapping[str, Any]] = {
        name: run.piece(
            f"deep {name}", deep_plane, dim=sizes["dim"], depth=depths[-1], is_residual=name == RESIDUAL,
            n_places=sizes["n_places"], seed=run.seeds[0],
        )
        for name in (RESIDUAL, STANDARD)
    }  # fmt: skip
    shared = {"dim": sizes["dim"], "scale": scale, "n_steps": sizes["n_steps"], "seed": run.seeds[0]}
    found: dict[tuple[str, int], Mapping[str, Any]] = {
        (name, depth): run.piece(f"{name} l={depth}", descent, depth=depth, is_residual=name == RESIDUAL, **shared)
        for name in (RESIDUAL, STANDARD)
        for depth in depths
    }
    near, plain = ([found[name, depth] for depth in depths] for name in (RESIDUAL, STANDARD))
    values = {
        "layers I + A, final over initial risk, largest": max(one["risks"][-1] / one["risks"][0] for one in near),
        "layers I + A, final risk over the bound from inequality 2.3, largest": max(
            one["risks"][-1] / one["risks"][0] / one["promised"] for one in near
        ),
        "layers A, risk over initial risk when layers I + A have lost 99 %, smallest": min(
            map(_left_when_near, near, plain)
        ),
        "layers A, final over initial risk, smallest": min(one["risks"][-1] / one["risks"][0] for one in plain),
        "inequality 2.3 along the descents, smallest ratio": min(min(one["ratios"]) for one in near),
        "layers I + A, |gradient|^2 at zero over 4 l times the risk, largest distance from one": max(
            abs(one["at zero over 4 l times the risk"] - 1.0) for one in near
        ),
        "layers A, largest |gradient|^2 at zero": max(one["gradient at zero"] for one in plain),
        "layers I + A, fraction of the deep plane within 10 % of the risk at zero": deep[RESIDUAL]["flat"],
        "layers A, fraction of the deep plane within 10 % of the risk at zero": deep[STANDARD]["flat"],
        "layers I + A, largest |A| along the descents": max(one["norm"] for one in near),
    }
    rows = [
        [name, depth, one["risks"][0], one["risks"][-1], min(one["ratios"], default=math.nan), one["norm"]]
        for (name, depth), one in found.items()
    ]
    columns = [
        "parameterization",
        "depth",
        "initial risk",
        "final risk",
        "smallest ratio of 2.3",
        "largest |A|",
    ]
    return Outcome(
        values=values,
        curves=[curve for name in planes for curve in (*_plane(name, planes[name]), *_deep(name, deep[name]))]
        + _descents(found),
        panels=_panels(sizes),
        table=Table(columns, [[cell if cell == cell else "-" for cell in row] for row in rows]),
    )


def _left_when_near(near: Mapping[str, Any], plain: Mapping[str, Any]) -> float:
    """The remaining fraction of the risk of one descent at the step where the other has one hundredth."""
    steps = (step for step, risk in enumerate(near["risks"]) if risk <= 0.01 * near["risks"][0])
    return float(plain["risks"][next(steps, -1)] / plain["risks"][0])


def _panels(sizes: Mapping[str, Any]) -> tuple[Panel, ...]:
    first, second = "A_1", "A_2"
    return (
        Panel(RESIDUAL, f"(1 + A_2)(1 + A_1) = {sizes['target']:g}: no bad point at zero", first, second),
        Panel(STANDARD, f"A_2 A_1 = {sizes['target']:g}: a bad critical point at zero", first, second),
        Panel("risks", f"Descent, {sizes['dim']} x {sizes['dim']}, from scale {sizes['scale']:g}", "step", "risk",
              y_log=True),
        *(
            Panel(f"deep {name}", f"{sizes['depths'][-1]} {name}, {sizes['dim']} x {sizes['dim']}",
                  "towards a global minimum", "in a random direction")
            for name in (RESIDUAL, STANDARD)
        ),
        Panel("ratios", "Inequality 2.3 along these descents", "step", "left side over right side"),
    )  # fmt: skip


def _plane(name: str, plane: Mapping[str, Any]) -> list[Curve]:
    """The curves of one of the two square panels; later laws are drawn in darker colours."""
    reach = plane["places"][-1]
    bad = -1.0 if name == RESIDUAL else 0.0
    square = [-1.0, 1.0, 1.0, -1.0, -1.0], [-1.0, -1.0, 1.0, 1.0, -1.0]
    curves = [Curve("bad critical point", [bad], [bad], kind="points", panel=name, style="law")]
    if name == RESIDUAL:
        curves.append(Curve("|A| = 1, where the theory ends", *square, panel=name, style="law"))
    curves.append(
        Curve("level lines of the risk", *level_lines(plane["places"], plane["risks"], LEVELS), panel=name, style="law")
    )
    paths = [np.asarray(path) for path in plane["paths"]]
    inside = [np.where(np.abs(path).max(1, keepdims=True) <= reach, path, math.nan) for path in paths]
    joined = np.concatenate([np.concatenate([path, [[math.nan, math.nan]]]) for path in inside])
    ends, starts = np.array([path[-1] for path in paths]), np.array([path[0] for path in paths])
    return [
        *curves,
        Curve("gradient descent", joined[:, 0].tolist(), joined[:, 1].tolist(), panel=name),
        Curve("start", starts[:, 0].tolist(), starts[:, 1].tolist(), kind="points", panel=name),
        Curve("end", ends[:, 0].tolist(), ends[:, 1].tolist(), kind="points", panel=name),
    ]


def _deep(name: str, plane: Mapping[str, Any]) -> list[Curve]:
    x, y = level_lines(plane["places"], plane["risks"], DEEP_LEVELS)
    curves = [Curve("level lines of the risk", x, y, panel=f"deep {name}", style="law")]
    if name == STANDARD:
        curves.insert(0, Curve("bad critical point", [0.0], [0.0], kind="points", panel=f"deep {name}", style="law"))
    else:
        curves.append(Curve("start", [0.0], [0.0], kind="points", panel=f"deep {name}"))
    return [*curves, Curve("end", [1.0], [0.0], kind="points", panel=f"deep {name}")]


def level_lines(
    places: Sequence[float], risks: Sequence[Sequence[float]], levels: Sequence[float]
) -> tuple[list[float], list[float]]:
    """(x, y) of the level lines of a risk on a grid, separated by NaN."""
    drawn = Figure().subplots().contour(places, places, risks, levels=levels)
    x: list[float] = []
    y: list[float] = []
    for lines in drawn.allsegs:
        for line in lines:
            x += [*line[:, 0].tolist(), math.nan]
            y += [*line[:, 1].tolist(), math.nan]
    return x, y


def _descents(found: Mapping[tuple[str, int], Mapping[str, Any]]) -> list[Curve]:
    curves = []
    for (name, depth), one in found.items():
        curves.append(Curve(f"{depth} {name}", list(range(len(one["risks"]))), one["risks"], panel="risks"))
        if name == RESIDUAL:
            curves.append(Curve(f"{depth} {name}", list(range(len(one["ratios"]))), one["ratios"], panel="ratios"))
    return curves
