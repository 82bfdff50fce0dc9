"""Depth instead of width: accuracy and cost of narrow frozen layers. Neither paper has a figure of it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

import onlynorm as on
from onlynorm.display import Curve, Panel, Table
from onlynorm.errors import AccuracyWarning
from onlynorm.evidence.papers.reproduce import Outcome, Run
from onlynorm.features import check_shape, draw
from onlynorm.models import mlp
from onlynorm.reconstruction import deep, slices
from onlynorm.validate import as_real, need_free_memory, need_integer, need_items, need_number, need_seed, need_sizes


def deep_rows(*, d: int, k: int, excesses: Sequence[float], seed: int) -> list[dict[str, Any]]:
    """Errors of theorem 2 for d x d targets in slices of k, at every excess, and of the unique solution.

    `relu_error` is the error of the outputs for normal inputs, with a ReLU after each frozen layer.
    """
    rows = deep_table([d], [k], excesses=excesses, seed=seed)
    return [asdict(row) | {"relu_error": _relu_error(d, k, excess=row.excess, seed=seed)} for row in rows]


def _relu_error(d: int, k: int, *, excess: float, seed: int) -> float:
    target = mlp([d, d], seed=seed).double().eval()
    inputs = torch.randn(256, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AccuracyWarning)  # the error is measured here
        result = on.reconstruct(
            target, inputs,
            on.Deep(inputs_per_slice=k, excess=excess, features="orthogonal", activation=nn.ReLU()), seed=seed,
        )  # fmt: skip
    return on.verify(target, result.network, inputs).relative_error


def deep_errors(run: Run) -> Outcome:
    """The error of the deep construction against the excess, compared with the paper's unique solution.

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


@dataclass(frozen=True)
class DeepRow:
    """The error at one target width, one k and one excess, compared with the paper's unique solution."""

    width: int
    narrow: int
    excess: float
    n_layers: int
    n_features: int
    error: float
    condition: float
    predicted_error: float
    unique_error: float
    unique_condition: float

    def __str__(self) -> str:
        return (
            f"d={self.width}, k={self.narrow}, excess {self.excess:g}: {self.n_layers} layers of {self.n_features} "
            f"features, error {self.error:.1e} (condition {self.condition:.1e}, predicted {self.predicted_error:.1e}); "
            f"unique solution: error {self.unique_error:.1e} (condition {self.unique_condition:.1e})"
        )


def deep_table(
    widths: Iterable[int],
    ks: Iterable[int],
    *,
    excesses: Iterable[float],
    seed: int = 0,
    features: str = "orthogonal",
) -> list[DeepRow]:
    """The error for a normal target of variance 1 / d, for every width d, k <= d and excess.

    The unique solution is the paper's, with as many he_normal features as equations.
    """
    cure = "Try widths=(16,), ks=(1, 4), excesses=(1.25, 2.0)."
    widths, ks = need_sizes("widths", widths, cure=cure), need_sizes("ks", ks, cure=cure)
    excesses = [
        need_number("an excess", excess, low=0.0, open_low=True, cure=cure)
        for excess in need_items("excesses", excesses, cure=cure)
    ]
    seed = need_seed(seed)
    need_free_memory("a target of the table", 8.0 * max(widths, default=0) ** 2, cure=cure)
    rows = []
    for width in widths:
        generator = torch.Generator().manual_seed(seed)
        target = torch.randn(width, width, dtype=torch.float64, generator=generator) / width**0.5
        for narrow in [k for k in ks if k <= width]:
            unique = unique_solution(target, inputs_per_slice=narrow, seed=seed)
            law = deep.SliceLaw(
                (width, width), narrow, is_orthogonal=isinstance(features, str) and features == "orthogonal"
            )
            for excess in excesses:
                n_features = draw(features, (width, narrow), excess=excess).n_features
                layers = slices.draw_layers(
                    features, (width, width), inputs_per_slice=narrow, n_features=n_features, seed=seed
                )
                found = slices.solve_slices(layers, target)
                rows.append(
                    DeepRow(
                        width, narrow, excess, law.n_layers, n_features, found.residual, found.condition,
                        law.error(n_features / (width * narrow)), unique.residual, unique.condition,
                    )
                )  # fmt: skip
    return rows


def unique_solution(
    target: Float[Tensor, "out inp *kernel"], *, inputs_per_slice: int, features: str = "he_normal", seed: int = 0
) -> slices.Slices:
    """The paper's solution: as many features as equations in every layer, so that the solution is unique.

    It exists with probability one, but rounding in float64 makes it useless for many narrow layers.
    Theory: giannou2023:thm-2
    """
    target = as_real("target", target, is_finite=True, cure="Pass the weight of a layer.").detach()
    check_shape(target.shape)
    count = need_integer("inputs_per_slice", inputs_per_slice, low=1, high=target.shape[1], cure="Try 1.")
    n_features = math.prod((len(target), count, *target.shape[2:]))
    layers = slices.draw_layers(features, tuple(target.shape), inputs_per_slice=count, n_features=n_features, seed=seed)
    return slices.solve_slices(layers, target, is_near=False)
