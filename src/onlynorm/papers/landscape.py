"""The landscape of hardt_ma2017, drawn: level lines and descents with layers I + A beside layers A."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from onlynorm.identity import Landscape, factorize, random_matrix
from onlynorm.papers.artifact import artifact
from onlynorm.papers.run import Outcome, Run
from onlynorm.report.records import Curve, Panel, Table

RESIDUAL, STANDARD = "layers I + A", "layers A"
LEVELS = (0.02, 0.2, 0.7, 1.6, 3.0, 5.5, 9.0)
DEEP_LEVELS = (0.05, 0.2, 0.5, 0.8, 0.95, 1.05, 1.5, 4.0, 20.0)
"""In units of the risk at zero."""


def positive(matrix: Tensor) -> Tensor:
    """The matrix, with two rows exchanged where its determinant is negative."""
    return matrix if torch.linalg.slogdet(matrix)[0] > 0 else matrix[[1, 0, *range(2, len(matrix))]]


def two_layers(*, target: float, is_residual: bool, reach: float, n_places: int, n_starts: int, n_steps: int) -> Any:
    """The risk of two layers of one number each on a square, and descents from a ring around zero."""
    landscape = Landscape(torch.tensor([[target]], dtype=torch.float64), is_residual=is_residual)
    across, up = torch.eye(2, dtype=torch.float64)[:, :, None, None]
    places, risks = landscape.on_plane(across, up, reach=reach, n_places=n_places)
    angles = [2.0 * math.pi * (place + 0.25) / n_starts for place in range(n_starts)]
    starts = [torch.tensor([[[math.cos(a)]], [[math.sin(a)]]], dtype=torch.float64) * 0.25 for a in angles]
    paths = [landscape.descend(start, n_steps=n_steps, keep_path=True).path for start in starts]
    return {"places": places, "risks": risks, "paths": [path.flatten(1) for path in paths if path is not None]}


def descent(*, dim: int, depth: int, scale: float, is_residual: bool, n_steps: int, seed: int) -> dict[str, Any]:
    """A descent from layers of this scale towards a random target: its risks, and how it obeys inequality 2.3."""
    landscape = Landscape(_target(dim, seed), is_residual=is_residual)
    layers = torch.stack([random_matrix(dim, seed=seed, name=f"layer {place}") for place in range(depth)])
    at_zero = landscape.dominance(torch.zeros_like(layers))
    down = landscape.descend(scale * layers, n_steps=n_steps)
    return {
        "risks": down.risks,
        "ratios": down.ratios,
        # A step gains at least half the rate times |gradient|^2, and inequality 2.3 says how large that is.
        "promised": math.prod(
            1.0 - 0.5 * down.rate * bound / risk for bound, risk in zip(down.bounds[:-1], down.risks[:-1], strict=True)
        ),
        "norm": max(down.norms),
        "gradient at zero": at_zero.gradient,
        "at zero over 4 l times the risk": at_zero.gradient
        / (4 * depth * float(landscape.risk(torch.zeros_like(layers)))),
    }


def deep_plane(*, dim: int, depth: int, is_residual: bool, n_places: int, seed: int) -> dict[str, Any]:
    """The risk of a deep network, over that at zero, on the plane of zero, a global minimum and a random direction."""
    target = _target(dim, seed)
    landscape = Landscape(target, is_residual=is_residual)
    goal = factorize(target, depth).factors() + (0.0 if is_residual else torch.eye(dim, dtype=torch.float64))
    aside = torch.stack([random_matrix(dim, seed=seed, name=f"aside {place}") for place in range(depth)])
    aside = aside - (aside * goal).sum() / goal.square().sum() * goal
    places, risks = landscape.on_plane(goal, aside * (goal.norm() / aside.norm()), reach=1.5, n_places=n_places)
    shares = risks / landscape.risk(torch.zeros_like(goal))
    return {"places": places, "risks": shares, "flat": float(((shares - 1.0).abs() <= 0.1).double().mean())}


def _target(dim: int, seed: int) -> Tensor:
    return positive(torch.eye(dim, dtype=torch.float64) + 0.7 * random_matrix(dim, seed=seed))


@artifact("hardt_ma2017:landscape")
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
        "layers I + A, end over start of the risk, largest": max(one["risks"][-1] / one["risks"][0] for one in near),
        "layers I + A, that over what inequality 2.3 promises, largest": max(
            one["risks"][-1] / one["risks"][0] / one["promised"] for one in near
        ),
        "layers A, risk over its start when layers I + A have lost 99 %, smallest": min(
            map(_left_when_near, near, plain)
        ),
        "layers A, end over start of the risk, smallest": min(one["risks"][-1] / one["risks"][0] for one in plain),
        "inequality 2.3 along the descents, smallest ratio": min(min(one["ratios"]) for one in near),
        "layers I + A, |gradient|^2 at zero over 4 l times the risk, largest distance from one": max(
            abs(one["at zero over 4 l times the risk"] - 1.0) for one in near
        ),
        "layers A, largest |gradient|^2 at zero": max(one["gradient at zero"] for one in plain),
        "layers I + A, share of the deep plane within 10 % of the risk at zero": deep[RESIDUAL]["flat"],
        "layers A, share of the deep plane within 10 % of the risk at zero": deep[STANDARD]["flat"],
        "layers I + A, largest |A| along the descents": max(one["norm"] for one in near),
    }
    rows = [
        [name, depth, one["risks"][0], one["risks"][-1], min(one["ratios"], default=math.nan), one["norm"]]
        for (name, depth), one in found.items()
    ]
    columns = [
        "parameterization",
        "depth",
        "risk at the start",
        "risk at the end",
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
    """The share of its risk that one descent has left at the step at which the other has left one hundredth."""
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
    """What one of the two square panels shows; laws in the order in which they get darker colours."""
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
    """(x, y) of the level lines of a risk on a grid, one behind the other with a gap of NaN between."""
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
