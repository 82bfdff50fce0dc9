"""Depth instead of width: what narrow frozen layers reach, and what they cost. Neither paper draws it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

import onlynorm as on
from onlynorm.data import digits
from onlynorm.errors import AccuracyWarning
from onlynorm.models import mlp
from onlynorm.papers.artifact import artifact
from onlynorm.papers.run import Outcome, Run
from onlynorm.reconstruction import deep_table, tradeoff
from onlynorm.report.records import Curve, Panel, Table


def deep_rows(*, d: int, k: int, excesses: Sequence[float], seed: int) -> list[dict[str, Any]]:
    """What theorem 2 reaches for d x d targets in slices of k, at every excess, beside the unique solution.

    `relu_error` is that of the outputs, through frozen layers with a ReLU after each, on normal inputs.
    """
    rows = deep_table([d], [k], excesses=excesses, seed=seed)
    return [asdict(row) | {"relu_error": _relu_error(d, k, excess=row.excess, seed=seed)} for row in rows]


def _relu_error(d: int, k: int, *, excess: float, seed: int) -> float:
    target = mlp([d, d], seed=seed).double().eval()
    inputs = torch.randn(256, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AccuracyWarning)  # how far it falls short is what is measured
        result = on.reconstruct(
            target, inputs=inputs, construction="deep", narrow=k, excess=excess, features="orthogonal",
            activation=nn.ReLU(), seed=seed,
        )  # fmt: skip
    return on.verify(target, result.network, inputs).relative_error


@artifact("giannou2023:thm-2-errors")
def deep_errors(run: Run) -> Outcome:
    """The error of the deep construction over the excess, beside the paper's unique solution.

    Theory: giannou2023:thm-2
    """
    cases, excesses = [tuple(case) for case in run.sizes["cases"]], run.sizes["excesses"]
    run.announce(len(cases))
    found: dict[tuple[int, int], Sequence[Mapping[str, Any]]] = {
        (d, k): run.piece(f"d={d} k={k}", deep_rows, d=d, k=k, excesses=excesses, seed=run.seeds[0]) for d, k in cases
    }
    values: dict[str, float] = {
        "d = 16, largest error over k at excess 2": max(
            row["error"] for (d, _), rows in found.items() for row in rows if d == 16 and row["excess"] == 2.0
        ),
        "d = 16, largest error over k at excess 2, with ReLUs": max(
            row["relu_error"] for (d, _), rows in found.items() for row in rows if d == 16 and row["excess"] == 2.0
        ),
        "d = 16, k = 1, error of the unique solution": found[16, 1][0]["unique_error"],
    }
    if (64, 1) in found:
        widest = next(row for row in found[64, 1] if row["excess"] == 4.0)
        values["d = 64, k = 1, error at excess 4"] = widest["error"]
        values["d = 64, k = 1, error at excess 4, with ReLUs"] = widest["relu_error"]
    curves = [
        Curve(f"d = {d}, k = {k}", [row["excess"] for row in rows], [row["error"] for row in rows], kind="points")
        for (d, k), rows in found.items()
    ]
    columns = ["d", "k", "excess", "layers", "features", "error", "with ReLUs", "predicted", "unique solution"]
    keys = [
        "width",
        "narrow",
        "excess",
        "n_layers",
        "n_features",
        "error",
        "relu_error",
        "predicted_error",
        "unique_error",
    ]
    table = Table(columns, [[row[key] for key in keys] for rows in found.values() for row in rows])
    panel = Panel("", "Deep and narrow sources", "excess", "relative error of the weight", x_log=True, y_log=True)
    return Outcome(values=values, curves=curves, panels=(panel,), table=table)


def depth_rows(*, shape: Sequence[int], n_layers: int, measured: Sequence[int], seed: int) -> dict[str, Any]:
    """What L frozen layers take for a layer of this shape, with residual and seconds at a smaller one."""
    (row,) = tradeoff(tuple(shape), [n_layers], measured=tuple(measured), seed=seed).rows
    return asdict(row)


def whole_network(*, widths: Sequence[int], n_layers: int, seed: int) -> dict[str, float]:
    """How far a network trained on digits is from one whose every layer is L frozen layers, on the test images."""
    split = digits(seed=seed)
    target = mlp(list(widths), seed=seed)
    on.fit(target, (split.train_inputs, split.train_labels), schedule=on.Schedule(epochs=30, seed=seed))
    target = target.double().eval()
    images = split.test_inputs.double()
    result = on.reconstruct(
        target, inputs=split.train_inputs.double(), construction="multilayer", n_layers=n_layers,
        activation=nn.ReLU(), seed=seed,
    )  # fmt: skip
    check = on.verify(target, result.network, images)
    right = float((target(images).argmax(1) == split.test_labels).double().mean())
    return {"error": check.relative_error, "agreement": check.agreement, "accuracy": right}


@artifact("burkholz2024:width-depth")
def width_depth(run: Run) -> Outcome:
    """Width, frozen numbers and norm parameters over the number of frozen layers, at equal exactness.

    Theory: burkholz2024:thm-2.5
    """
    shape, measured, layers = run.sizes["shape"], run.sizes["measured"], run.sizes["n_layers"]
    deeper = [n for n in layers if n > 2]
    run.announce(len(layers) + len(deeper))
    rows: list[Mapping[str, Any]] = [
        run.piece(f"L={n}", depth_rows, shape=shape, n_layers=n, measured=measured, seed=run.seeds[0]) for n in layers
    ]
    networks: list[Mapping[str, float]] = [
        run.piece(f"network L={n}", whole_network, widths=run.sizes["network"], n_layers=n, seed=run.seeds[0])
        for n in deeper
    ]
    first, last = rows[0], rows[-1]
    values = {
        "largest residual": max(float(row["residual"]) for row in rows),
        "a whole network on digits: largest error of its outputs": max(float(one["error"]) for one in networks),
        "a whole network on digits: lowest share of equal predictions": min(one["agreement"] for one in networks),
        "a whole network on digits: its accuracy": float(networks[0]["accuracy"]),
        "widest layer of the deepest source over that of two layers": last["width"] / first["width"],
        "norm parameters of the deepest source over those of two layers": (
            last["n_norm_parameters"] / first["n_norm_parameters"]
        ),
        "multiplications of the deepest source over those of two layers": last["n_frozen"] / first["n_frozen"],
    }
    names = (("width of a layer", "width"), ("norm parameters", "n_norm_parameters"), ("multiplications", "n_frozen"))
    curves = [Curve(name, list(layers), [row[key] for row in rows], kind="points") for name, key in names]
    columns = ["layers", "width", "norm parameters", "frozen numbers", "residual", "seconds"]
    keys = ["n_layers", "width", "n_norm_parameters", "n_frozen", "residual", "seconds"]
    panel = Panel("", "Depth instead of width", "frozen layers", "numbers per output position", y_log=True)
    table = Table(columns, [[row[key] for key in keys] for row in rows])
    return Outcome(values=values, curves=curves, panels=(panel,), table=table)
