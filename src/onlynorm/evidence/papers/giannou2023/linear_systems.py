"""Checks of lemmas for the reconstructions: linear systems, polynomials, norms as affine maps, one layer.

Statements about products of matrices are checked in `products`.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from numpy.polynomial.polynomial import polygrid2d, polyval2d
from torch import Tensor, nn

from onlynorm.evidence.papers.giannou2023.wide_networks import unit_ball
from onlynorm.evidence.registry import EPS, Evidence, normal, relative, verdict
from onlynorm.features import draw
from onlynorm.modules import Affine, from_affine, to_affine
from onlynorm.solvers import KhatriRao


def ranks_decide_how_many_solutions_a_system_has(seed: int) -> Evidence:
    agree, kinds = 0, {"none": 0, "one": 0, "many": 0}
    systems = list(itertools.product(range(5), ((6, 4), (6, 6), (6, 9)), (2, 4, 6), (True, False)))
    for i, (m, n), rank, is_inside in systems:
        inner = min(rank, n)
        name = f"{m} {n} {rank} {is_inside}"
        A = normal(seed + i, f"A {name}", m, inner) @ normal(seed + i, f"B {name}", inner, n)
        b = normal(seed + i, f"b {name}", m, 1)
        b = A @ A.mT @ b if is_inside else b
        of_matrix, of_both = (int(torch.linalg.matrix_rank(one, rtol=1e-10)) for one in (A, torch.cat([A, b], 1)))
        said = "none" if of_matrix != of_both else "one" if of_matrix == n else "many"
        # A test without ranks: the solutions nearest to two distant points are equal if there is only one.
        inverse = torch.linalg.pinv(A, rtol=1e-10)
        starts = normal(seed + i, f"start {name}", n, 2)
        ends = starts + inverse @ (b - A @ starts)
        if relative(A @ ends[:, :1], b) > 1e-8:
            seen = "none"
        else:
            seen = "one" if float((ends[:, 0] - ends[:, 1]).norm()) <= 1e-8 * float(ends.norm()) else "many"
        agree += said == seen
        kinds[seen] += 1
    return Evidence(
        verdict(agree == len(systems) and min(kinds.values()) >= 10),
        f"ranks and solutions agree for {agree} of {len(systems)} systems of 6 equations with 4, 6 or 9 unknowns and "
        f"rank up to 6: {kinds['none']} without a solution, {kinds['one']} with one, {kinds['many']} with many",
        {"agree": agree, "tried": len(systems), **kinds},
    )


def zeros_of_polynomials_fill_no_volume(seed: int) -> Evidence:
    slowest, fullest = 0.0, 0.0
    for i in range(12):
        degree, coefficients = _polynomial(seed + i, is_square=i % 3 == 0)
        volumes = [_cover(coefficients, cells) for cells in (64, 1024)]
        slowest = max(slowest, volumes[1] / (volumes[0] * 16.0 ** (-1.0 / degree)))
        whole = np.rint(8 * coefficients)  # integer coefficients, so that zeros on a grid are exact
        for side in (16, 64):
            grid = np.arange(float(side))
            n_zeros = int((polygrid2d(grid, grid, whole) == 0).sum())
            fullest = max(fullest, n_zeros / (degree * side))
    n_hit, n_zero = (int((_determinants(seed, is_zero=one).abs() <= 64 * EPS).sum()) for one in (False, True))
    return Evidence(
        verdict(slowest <= 1.5 and fullest <= 1.0 and (n_hit, n_zero) == (0, 2000)),
        "12 random polynomials of degree 2 to 4 in two variables: squares that contain all zeros in [-1, 1]^2 shrink "
        f"with their side h at least like h^(1/degree) (at most {slowest:.2f} of it), and integer grids have "
        f"at most degree * side zeros ({fullest:.2f} of that). The determinant of a 3 x 3 layer's feature matrix, of "
        f"degree 18, vanishes in {n_hit} of 2000 draws; with a repeated feature, where it is the zero polynomial, "
        f"in {n_zero}",
        {"slowest shrinking": slowest, "fullest grid": fullest, "random zeros": n_hit, "certain zeros": n_zero},
    )


def _polynomial(seed: int, *, is_square: bool) -> tuple[int, np.ndarray]:
    """(degree, coefficients of x^i y^j) of a random polynomial with a zero at (0.3, -0.2), double if `is_square`."""
    x, y = 0.3, -0.2
    if is_square:  # (a (x - 0.3) + b (y + 0.2))^2
        a, b = normal(seed, "line", 2, 1)[:, 0].tolist()
        c = -(a * x + b * y)
        return 2, np.array([[c * c, 2 * b * c, b * b], [2 * a * c, 2 * a * b, 0.0], [a * a, 0.0, 0.0]])
    degree = 2 + seed % 3
    i, j = np.indices((degree + 1, degree + 1))
    coefficients = np.where(i + j <= degree, normal(seed, "polynomial", degree + 1, degree + 1).numpy(), 0.0)
    coefficients[0, 0] -= polyval2d(x, y, coefficients)
    return degree, coefficients


def _cover(coefficients: np.ndarray, cells: int) -> float:
    """The fraction of cells of [-1, 1]^2 that may contain a zero, from central values and the largest slope."""
    centres = (np.arange(cells) + 0.5) * 2.0 / cells - 1.0
    i, j = np.indices(coefficients.shape)
    reach = float((np.abs(coefficients) * (i + j)).sum()) / cells
    return float((np.abs(polygrid2d(centres, centres, coefficients)) <= reach).mean())


def _determinants(seed: int, *, is_zero: bool) -> Tensor:
    """Determinants of 2000 feature matrices of a 3 x 3 layer with unit columns; `is_zero` repeats a feature."""
    left = normal(seed, "left", 2000 * 3, 9).reshape(2000, 3, 9).clone()
    right = normal(seed, "right", 2000 * 3, 9).reshape(2000, 3, 9).clone()
    if is_zero:
        left[..., 0], right[..., 0] = left[..., 1], right[..., 1]
    columns = (left[:, :, None] * right[:, None]).flatten(1, 2)
    return torch.linalg.det(columns / columns.norm(dim=1, keepdim=True))


def statistics_fold_into_gamma_and_beta(seed: int) -> Evidence:
    n, worst = 12, 0.0
    weight = normal(seed, "weight", n, 7)
    x = normal(seed, "inputs", 64, 7) @ weight.mT
    for i in range(10):
        norm = nn.BatchNorm1d(n).double().eval()
        mean, spread, gamma, beta = (normal(seed + i, name, n, 1)[:, 0] for name in ("mean", "std", "gamma", "beta"))
        assert norm.running_mean is not None
        assert norm.running_var is not None
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(spread**2)
        norm.weight.data, norm.bias.data = gamma, beta
        s = torch.sqrt(spread**2 + norm.eps)
        folded = to_affine(norm)
        back = from_affine(folded, mean=3.0 * beta, variance=gamma**2 + 0.1, axes=1)
        by_hand = x * (gamma / s) + (beta - gamma / s * mean)
        # The rounding error: the terms are larger than their sum where mean and x nearly cancel.
        size = ((gamma / s).abs() * (x.abs() + mean.abs()) + beta.abs()).max()
        with torch.no_grad():
            made = norm(x)
            gaps = [folded(x) - made, back.eval()(x) - made, by_hand - made]
        worst = max(worst, *(float(gap.abs().max() / (EPS * size)) for gap in gaps))
    is_plain = isinstance(folded, Affine) and not list(folded.buffers())
    return Evidence(
        verdict(worst <= 64.0 and is_plain),
        f"10 batch norms of {n} channels in evaluation mode against their folded maps, the formula by hand, and the "
        f"maps unfolded under other statistics: largest difference {worst:.1f} units of rounding",
        {"difference in units of rounding": worst},
    )


def activating_shift(gamma: Tensor, mean: Tensor, scale: float, rows: Tensor) -> Tensor:
    """The shift that makes every feature active for |x| <= 1: (max |mean| + largest row norm) / scale * |gamma|."""
    return (mean.abs().max() + rows.norm(dim=1).max()) / scale * gamma.abs()


def two_layers_with_batch_norms_make_one(seed: int) -> Evidence:
    d, worst, lowest, below = 8, 0.0, torch.inf, torch.inf
    for i in range(10):
        features = draw("uniform", (d, d), excess=1.0, seed=seed + i)
        W, V = features.right(), features.left()
        numbers = draw("uniform", (d * d + d + 2, 1), n_features=1, seed=seed + i, layer="statistics").left()[:, 0]
        mu, mu2, (s, s2) = 3.0 * numbers[: d * d], 3.0 * numbers[d * d : -2], (1.5 + numbers[-2:]).tolist()
        target, gamma_t, beta_t = (normal(seed + i, name, d, n) for name, n in (("W", d), ("gamma", 1), ("beta", 1)))
        gamma = torch.linalg.solve(KhatriRao(V, W).materialise(), target.flatten())
        beta = activating_shift(gamma, mu, s, W)
        gamma2 = s * s2 * gamma_t[:, 0]
        beta2 = gamma2 / s2 * (V @ (gamma * mu / s - beta) + mu2) + beta_t[:, 0]
        # A feature becomes inactive first for inputs along its row.
        x = torch.cat([unit_ball(256, d, seed=seed + i), W / W.norm(dim=1, keepdim=True), -W / W.norm(dim=1)[:, None]])
        first = gamma * (x @ W.mT - mu) / s + beta
        made = (gamma2 * (first.relu() @ V.mT - mu2) / s2 + beta2).relu()
        wanted = (gamma_t[:, 0] * (x @ target.mT) + beta_t[:, 0]).relu()
        worst = max(worst, relative(made, wanted))
        lowest = min(lowest, float((first / beta).min()))
        below = min(below, float(((first - beta / 2) / beta).min()))
    return Evidence(
        verdict(worst <= 1e-9 and lowest >= -64 * EPS and below < 0.0),
        f"d = {d}, ten draws of bounded frozen layers and statistics: {d * d} features with two batch norms differ "
        f"from the layer by {worst:.1e} on the unit ball and on the 128 worst points of the features; the smallest "
        f"pre-activation is {lowest:.2f} of the shift, and {below:.2f} with half the shift",
        {"error": worst, "least active": lowest, "least active at half the shift": below},
    )
