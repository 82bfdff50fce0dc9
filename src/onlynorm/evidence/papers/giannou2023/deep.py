"""Checks of theorem 2 of giannou2023: deep, narrow sources with slices of the input fed through skip connections.

The theorem is checked in rational numbers, where equations hold exactly: in floating point, the rounding error of its
unique solution is too large.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from onlynorm.evidence.papers.giannou2023.wide_networks import EXACT, rebuild, relu_network, unit_ball
from onlynorm.evidence.registry import Evidence, relative, verdict
from onlynorm.features import draw
from onlynorm.frozen import find_blocks
from onlynorm.reconstruction import Deep

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
