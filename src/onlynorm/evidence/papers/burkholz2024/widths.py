"""Checks of the number of features a target needs: exact at the stated width, and not with one feature less."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from onlynorm.evidence.registry import EPS, Evidence, normal, relative, verdict
from onlynorm.features import draw
from onlynorm.solvers import KhatriRao, minimum_features, solve_features

EXACT = 1e-10
"""The largest relative residual of an exact solution; a system without a solution has 1e-2 and more."""


def _pivoted(matrix: Tensor, target: Tensor) -> Tensor:
    """Rows (i, j), j not the pivot, of M minus T_ij / T_i,pivot times its pivot row."""
    out, inp = target.shape
    rows = matrix.unflatten(0, (out, inp))
    pivot = target.abs().argmax(1)
    at_pivot = rows[torch.arange(out), pivot]
    ratio = target / target.gather(1, pivot[:, None])
    others = torch.ones_like(target, dtype=torch.bool).scatter_(1, pivot[:, None], False)
    return (rows - ratio[:, :, None] * at_pivot[:, None, :])[others]


def a_null_vector_of_the_pivoted_system_is_the_target(seed: int) -> Evidence:
    shape = (6, 3, 3)
    few = minimum_features(6, 9)
    features = draw("he_normal", shape, n_features=few, seed=seed)
    target = features.as_matrix(normal(seed, "target", 6, 9).reshape(shape))
    matrix = KhatriRao(features.left(), features.right()).materialise()
    system = _pivoted(matrix, target)
    gamma = torch.linalg.svd(system)[2][-1]
    made = (matrix @ gamma).reshape(target.shape)
    pivot = target.abs().argmax(1, keepdim=True)
    output_gamma = target.gather(1, pivot) / made.gather(1, pivot)
    error = relative(output_gamma * made, target)
    # With more features than weights, a null vector of the features themselves solves the system with output zero.
    wide = draw("he_normal", shape, n_features=56, seed=seed)
    all_features = KhatriRao(wide.left(), wide.right()).materialise()
    empty = torch.linalg.svd(all_features)[2][-1]
    solves = float((_pivoted(all_features, target) @ empty).norm())
    makes = float((all_features @ empty).norm())
    return Evidence(
        verdict(error <= EXACT, as_printed=makes > 1e3 * solves + EXACT),
        f"6 x 3 x 3, {few} features, {system.shape[0]} equations: the null vector gives the target up to {error:.1e}. "
        f"With 56 features a null vector (equations hold to {solves:.1e}) may give zero (|output| = {makes:.1e}): "
        "nonzero pivots are needed",
        {"error": error, "equation": solves, "output of an empty null vector": makes},
    )


def both_norms_save_one_feature_per_output(seed: int) -> Evidence:
    worst, smallest, pivot = 0.0, 1.0, 1.0
    for i, (out, inp) in enumerate([(12, 10), (5, 30), (30, 5), (1, 12), (12, 1)]):
        target = normal(seed, f"target{i}", out, inp)
        few = minimum_features(out, inp)
        features = draw("he_normal", (out, inp), n_features=few, seed=seed)
        found = solve_features(features, target, minimum_width=True)
        assert found.output_gamma is not None
        worst = max(worst, found.residual)
        factors = 1.0 / found.output_gamma
        pivot = min(pivot, float(factors.abs().min() / factors.abs().max()))
        if few > 1:  # one feature fewer: the pivoted system is square, and a null vector would be a zero singular value
            matrix = KhatriRao(features.left(0, few - 1), features.right(0, few - 1)).materialise()
            values = torch.linalg.svdvals(_pivoted(matrix, target))
            smallest = min(smallest, float(values[-1] / values[0]))
    return Evidence(
        verdict(worst <= EXACT and pivot > EPS and smallest > 1e3 * EPS),
        f"five shapes from 12 to 150 weights: worst residual {worst:.1e} at c1 = N - c2 + 1, smallest pivot "
        f"{pivot:.1e} of the largest; with one feature fewer the smallest singular value is {smallest:.1e} of the "
        "largest, so there is no null vector",
        {"residual": worst, "pivot": pivot, "smallest singular value below": smallest},
    )


def one_draw_of_features_serves_every_target(seed: int) -> Evidence:
    shape, n = (6, 4, 3, 3), 216
    features = draw("he_normal", shape, n_features=n, seed=seed)
    x = normal(seed, "input", 4, 64).reshape(1, 4, 8, 8)
    worst, network = 0.0, 0.0
    for i in range(8):
        weight = normal(seed + i, "target", 6, 36).reshape(shape)
        found = solve_features(features, weight)
        worst = max(worst, found.residual)
        hidden = conv2d(x, features.first_weight(), padding=1) * found.gamma[:, None, None]
        made = conv2d(hidden, features.second_weight())
        network = max(network, relative(made, conv2d(x, weight, padding=1)))
    matrix = KhatriRao(features.left(), features.right()).materialise()
    below = int(torch.linalg.matrix_rank(matrix[:, :-1]))
    return Evidence(
        verdict(worst <= EXACT and network <= 1e-9 and below == n - 1),
        f"one draw of {n} features, eight 6 x 4 x 3 x 3 targets: worst residual {worst:.1e}, worst difference of the "
        f"two frozen convolutions from the target's {network:.1e}; with one feature fewer the rank is {below} of {n}",
        {"residual": worst, "difference of outputs": network, "rank below": below},
    )
