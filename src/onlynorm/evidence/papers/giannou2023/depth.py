"""Theorem 2 of giannou2023: deep, narrow sources with slices of the input fed through skip connections.

The checks use rational numbers, where equations hold exactly: in floating point, the rounding error of the unique
solution is too large. A table and a figure compare its errors with those of `on.Deep`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

import onlynorm as on
from onlynorm.display import Curve, Panel, Table
from onlynorm.errors import AccuracyWarning
from onlynorm.evidence.papers.giannou2023.wide_networks import EXACT, rebuild, relu_network, unit_ball
from onlynorm.evidence.papers.reproduce import Outcome, Run
from onlynorm.evidence.registry import Evidence, relative, verdict
from onlynorm.features import check_shape, draw
from onlynorm.frozen import find_blocks
from onlynorm.models import mlp
from onlynorm.reconstruction import Deep, deep, slices
from onlynorm.validate import as_real, need_free_memory, need_integer, need_items, need_number, need_seed, need_sizes

Matrix = list[list[Fraction]]


def _whole(seed: int, name: str, rows: int, cols: int) -> Matrix:
    """Random integers up to a million in absolute value: fast, and practically never singular."""
    numbers = draw("uniform", (rows, 1), n_features=cols, seed=seed, layer=name).left()
    return [[Fraction(int(1e6 * x)) for x in row] for row in numbers.tolist()]


def _product(a: Matrix, b: Matrix) -> Matrix:
    columns = list(zip(*b, strict=True))
    return [[sum((x * y for x, y in zip(row, column, strict=True)), Fraction(0)) for column in columns] for row in a]


def _solve(matrix: Matrix, side: list[Fraction]) -> list[Fraction] | None:
    """The solution of a square system by elimination, None if it is singular."""
    rows = [[*row, value] for row, value in zip(matrix, side, strict=True)]
    for i in range(len(rows)):
        pivot = next((k for k in range(i, len(rows)) if rows[k][i]), None)
        if pivot is None:
            return None
        rows[i], rows[pivot] = rows[pivot], rows[i]
        rows[i] = [x / rows[i][i] for x in rows[i]]
        for k in range(len(rows)):
            if k != i and (factor := rows[k][i]):
                rows[k] = [x - factor * y for x, y in zip(rows[k], rows[i], strict=True)]
    return [row[-1] for row in rows]


def is_rebuilt_exactly(target: Matrix, k: int, *, seed: int) -> bool:
    """Whether the unique gammas of theorem 2 exist, from the last slice to the first, and give exactly the target.

    `k` is the number of columns per slice; it divides the width of the target.
    """
    d, width = len(target), len(target) * k
    n_layers = len(target[0]) // k
    last = _whole(seed, "last", d, width)
    layers = [(_whole(seed, f"W{i}", width, width), _whole(seed, f"A{i}", width, k)) for i in range(n_layers)]
    gammas: list[list[Fraction]] = []
    later = last
    for i in reversed(range(n_layers)):
        W, A = layers[i]
        seen = _product(W, A)
        system = [[later[row][f] * seen[f][col] for f in range(width)] for row in range(d) for col in range(k)]
        gamma = _solve(system, [target[row][i * k + col] for row in range(d) for col in range(k)])
        if gamma is None:
            return False
        gammas.insert(0, gamma)
        later = _product([[x * g for x, g in zip(row, gamma, strict=True)] for row in later], W)
    # The forward pass of the network: every layer adds its slice and scales.
    made = [[Fraction(0)] * (n_layers * k) for _ in range(width)]
    for i, ((W, A), gamma) in enumerate(zip(layers, gammas, strict=True)):
        for row in range(width):
            made[row][i * k : (i + 1) * k] = A[row]
        made = [[g * x for x in row] for g, row in zip(gamma, _product(W, made), strict=True)]
    return _product(last, made) == target


def deep_and_narrow_layers_with_skips_make_any_layer(seed: int) -> Evidence:
    d = 4
    cases = [(i, k) for i in range(3) for k in (1, 2, 4)]
    exact = sum(is_rebuilt_exactly(_whole(seed + i, "target", d, d), k, seed=seed + i) for i, k in cases)
    columns = _whole(seed, "target", d, d)
    zero = [[Fraction(0) if j == 2 else x for j, x in enumerate(row)] for row in columns]
    first = [[row[j] for j in (2, 0, 1, 3)] for row in zero]
    is_broken, is_cured = (not is_rebuilt_exactly(zero, 1, seed=seed), is_rebuilt_exactly(first, 1, seed=seed))
    narrow, eased, is_as_said = _deep_networks(5, seed)
    # In float64 the unique solution loses digits with every layer; the limit is therefore well above rounding.
    is_right = exact == len(cases) and is_cured and is_as_said and narrow <= 1e-6 and eased <= EXACT
    return Evidence(
        verdict(is_right, as_printed=not is_broken),
        f"d = {d}, k = 1, 2, 4 in rational numbers: the unique gammas give exactly the target in {exact} of "
        f"{len(cases)} cases; with its third column zero (k = 1), which the text allows, the next system is "
        f"{'singular' if is_broken else 'regular'}, and with the zero column fed first it is "
        f"{'regular' if is_cured else 'singular'}. ReLU networks of width 5 in float64, k = 1 to 5, ceil(d/k) layers "
        f"of d k features each: error {narrow:.1e}; with the excess of the deep construction {eased:.1e}",
        {"exact": exact, "tried": len(cases), "broken by a zero slice": is_broken, "error": narrow,
         "error with excess": eased},
    )  # fmt: skip


def _deep_networks(d: int, seed: int) -> tuple[float, float, bool]:
    """Largest errors over all k, with d k features and with more; whether layers and widths match the theorem."""
    target = relu_network([d, d, d], seed=seed)
    narrow, eased, is_as_said = 0.0, 0.0, True
    for k in range(1, d + 1):
        made, error = rebuild(target, Deep(inputs_per_slice=k, excess=1.0, activation=nn.ReLU()), seed=seed)
        blocks: list[Any] = list(find_blocks(made.network).values())
        sizes = [(len(block.layers), {one.n_features for one in block.layers}) for block in blocks]
        is_as_said &= sizes == [(math.ceil(d / k), {d * k})] * 2
        narrow = max(narrow, error)
        eased = max(eased, rebuild(target, Deep(inputs_per_slice=k, activation=nn.ReLU()), seed=seed)[1])
    return narrow, eased, is_as_said


def no_activation_follows_the_last_layer(seed: int) -> Evidence:
    target = relu_network([5, 5, 5], seed=seed)
    made, error = rebuild(target, Deep(inputs_per_slice=2, activation=nn.ReLU()), seed=seed)
    x = unit_ball(256, 5, seed=seed)
    with torch.no_grad():
        wanted, cut = target(x), made.network(x).relu()
    negative = float((wanted < 0).double().mean())
    with_relu = relative(cut, wanted)
    return Evidence(
        verdict(error <= EXACT and with_relu > 1e3 * EXACT),
        f"the error of a deep source of a network with a fraction of {negative:.2f} negative outputs is {error:.1e}; "
        f"with a ReLU after its last layer it is {with_relu:.1e}",
        {"error": error, "error with a last ReLU": with_relu, "fraction of negative outputs": negative},
    )


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
