"""Checks of random_features on widths: as many features as weights, and ID cond at the minimum width."""

from __future__ import annotations

import torch

from onlynorm.errors import ValueRangeError
from onlynorm.evidence.papers.burkholz2024.widths import EXACT
from onlynorm.evidence.registry import EPS, Evidence, normal, relative, verdict
from onlynorm.features import draw
from onlynorm.solvers import KhatriRao, minimum_features, solve, solve_features


def as_many_features_as_weights_suffice(seed: int) -> Evidence:
    shape, n = (12, 11), 132
    target = normal(seed, "target", *shape)
    exact = solve_features(draw("he_normal", shape, n_features=n, seed=seed), target).residual
    fewer = solve_features(draw("he_normal", shape, n_features=n - 1, seed=seed), target).residual
    features = draw("he_normal", shape, n_features=n + 60, seed=seed)
    matrix = KhatriRao(features.left(), features.right()).materialise()
    gamma = solve(features.left(), features.right(), target, near=0.0).gamma
    least = relative(gamma, torch.linalg.pinv(matrix) @ target.flatten())
    lengths = torch.linalg.vector_norm(matrix, dim=0)  # without `near`, contributions have the least norm
    scaled = relative(
        solve_features(features, target).gamma * lengths, torch.linalg.pinv(matrix / lengths) @ target.flatten()
    )
    few = minimum_features(*shape)
    both = solve_features(draw("he_normal", shape, n_features=few, seed=seed), target, minimum_width=True).residual
    # Both factors have full rank, as in the text, but no gamma gives the target.
    W1 = torch.eye(2, dtype=torch.float64).repeat(2, 1)
    rank = int(torch.linalg.matrix_rank(KhatriRao(W1.mT, W1).materialise()))
    missed = solve(W1.mT, W1, torch.ones(2, 2, dtype=torch.float64)).residual
    holds = max(exact, both) <= EXACT and max(least, scaled) <= 1e-8 and fewer > 1e3 * EXACT
    return Evidence(
        verdict(holds, as_printed=missed <= EXACT),
        f"12 x 11: residual {exact:.1e} with {n} features, {fewer:.1e} with one fewer, {both:.1e} with {few} and both "
        f"norms; with {n + 60} gamma is pinv(M) vec(T) to {least:.1e}, or {scaled:.1e} for features of unit length. "
        "Full rank of W1 and W2 alone is not enough: "
        f"[e1; e2; e1; e2] gives rank {rank} of 4 and a residual of {missed:.2f}",
        {
            "exact": exact, "one fewer": fewer, "both norms": both, "pinv": least, "pinv at unit length": scaled,
            "rank": rank, "missed": missed,
        },
    )  # fmt: skip


def id_cond_at_minimum_width_reads_the_target_off(seed: int) -> Evidence:
    shape = (24, 20)
    features = draw("id_cond_minimal", shape, seed=seed)
    target = normal(seed, "target", *shape)
    found = solve_features(features, target)
    assert found.output_gamma is not None
    operator = KhatriRao(features.left(), features.right())
    error = relative(found.output_gamma[:, None] * operator.apply(found.gamma), target)
    scaled = relative((found.output_gamma / 3.0)[:, None] * operator.apply(3.0 * found.gamma), target)
    target[5, 0] = 0.0
    try:
        solve_features(features, target)
        is_blocked = False
    except ValueRangeError:
        is_blocked = True
    target[5, 0] = 1e-8  # close to it, which gives gammas of the inverse size
    price = float(solve_features(features, target).gamma.abs().max())
    right_width = features.n_features == minimum_features(*shape)
    return Evidence(
        verdict(right_width and max(error, scaled) <= 16 * EPS, as_printed=not is_blocked),
        f"24 x 20 with {features.n_features} features: error {error:.1e}, {scaled:.1e} with the free scale set to 3; a "
        f"row with T[i,1] = 0, which the text allows, is {'impossible' if is_blocked else 'possible'}, and at "
        f"T[i,1] = 1e-8 the largest gamma is {price:.1e}",
        {"error": error, "error at another scale": scaled, "is blocked": is_blocked, "largest gamma near it": price},
    )
