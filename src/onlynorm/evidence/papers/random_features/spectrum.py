"""Checks of conditioning: the law of the singular values, and features that do not follow it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from onlynorm.evidence.registry import EPS, Evidence, normal, relative, verdict
from onlynorm.features import draw
from onlynorm.solvers import KhatriRao, solve_features, spectrum


def kolmogorov(values: Tensor, n_equations: int, n_features: int) -> float:
    """The largest distance between the distribution of the values and the law for these counts."""
    law = spectrum.cumulative(np.sort(values.numpy()), n_equations, n_features)
    ranks = np.arange(len(law) + 1) / len(law)
    return float(max(np.max(law - ranks[:-1]), np.max(ranks[1:] - law)))


def singular_values_follow_the_law(seed: int) -> Evidence:
    side = 30
    measured: dict[str, float] = {}
    ours, drawn, kappas, limits = [], [], [], []
    for excess in (0.5, 2.0):
        features = draw("he_uniform", (side, side), excess=excess, seed=seed)
        found = spectrum.measure_spectrum(features)
        values = spectrum.empirical_spectrum(features.left(), features.right())
        n, c = features.equations, features.n_features
        ours.append(found.distance)
        limits.append(2.0 * found.limit)  # twice the 1 % limit: the statement must hold for every seed
        drawn.append(kolmogorov(values, n, c))
        kappas.append(found.condition / spectrum.condition_number(n, c))
        if excess < 1:
            # As printed: lambda = max(l, 1/l) in place of l, and a density divided by lambda.
            printed = kolmogorov(values, c, n)
            low, high = spectrum.edges(c, n)
            middle, half = (low + high) / 2, (high - low) / 2
            theta = (np.arange(4000) + 0.5) * np.pi / 4000
            points = middle - half * np.cos(theta)
            mass = float((spectrum.density(points, c, n) * half * np.sin(theta)).sum() * np.pi / 4000) * c / n
            measured |= {"printed distance": printed, "printed mass": mass, "largest value": float(values[0])}
    measured |= {"distance at 1/2": ours[0], "distance at 2": ours[1], "limit at 1/2": limits[0]}
    measured |= {"distance as drawn at 1/2": drawn[0], "distance as drawn at 2": drawn[1]}
    measured |= {"kappa over law at 1/2": kappas[0], "kappa over law at 2": kappas[1]}
    near = all(one <= limit for one, limit in zip(ours, limits, strict=True)) and max(drawn) <= 1.5 / side
    holds = near and all(0.8 <= ratio <= 1.25 for ratio in kappas)
    fits = measured["printed distance"] <= 1.5 / side and abs(measured["printed mass"] - 1.0) < 0.01
    return Evidence(
        verdict(holds, as_printed=fits),
        f"c0 = c2 = {side}: Kolmogorov distance {ours[0]:.4f} at l = 1/2 and {ours[1]:.4f} at l = 2 at unit length, "
        f"{drawn[0]:.3f} and {drawn[1]:.3f} as drawn, kappa {kappas[0]:.2f} and {kappas[1]:.2f} times the law's at "
        "unit length; with the printed lambda = 2 at l = 1/2 the distance is "
        f"{measured['printed distance']:.3f}, the upper edge 2.41 where {measured['largest value']:.2f} is "
        f"measured, and the density integrates to {measured['printed mass']:.3f}",
        measured,
    )


def orthogonal_weights_are_not_well_conditioned(seed: int) -> Evidence:
    side, c = 16, 256
    left = torch.linalg.qr(normal(seed, "left", c, side))[0].mT
    right = torch.linalg.qr(normal(seed, "right", c, side))[0]
    gram = KhatriRao(left, right).gram()
    lengths = gram.diagonal().sqrt()
    cosines = (gram / torch.outer(lengths, lengths)).fill_diagonal_(0.0)
    cosine = float(cosines.abs().max())
    factors = max(float(torch.linalg.cond(left)), float(torch.linalg.cond(right)))
    kappa = float(torch.linalg.cond(KhatriRao(left, right).materialise()))
    return Evidence(
        verdict(factors <= 1.0 + 100 * EPS and kappa > 10.0, as_printed=cosine <= 100 * EPS),
        f"c0 = c2 = {side}, c1 = {c}: kappa(W1) = kappa(W2) = {factors:.6f}, kappa(M) = {kappa:.2e}; the columns of M "
        f"are not orthogonal as the text says: the largest cosine between two is {cosine:.2f}",
        {"kappa of the factors": factors, "kappa": kappa, "largest cosine": cosine},
    )


def ortho_cond_features_are_perfectly_conditioned(seed: int) -> Evidence:
    shape = (20, 24)
    features = draw("ortho_cond", shape, seed=seed)
    matrix = KhatriRao(features.left(), features.right()).materialise()
    eye = torch.eye(len(matrix), dtype=matrix.dtype)
    off = float((matrix.mT @ matrix - eye).abs().max())
    kappa = float(torch.linalg.cond(matrix))
    target = normal(seed, "target", *shape)
    found = solve_features(features, target)
    gamma = relative(found.gamma, matrix.mT @ target.flatten())
    plain = draw("id_cond", shape, seed=seed)
    is_identity = torch.equal(KhatriRao(plain.left(), plain.right()).materialise(), eye)
    close = len(matrix) * EPS
    return Evidence(
        verdict(max(off, abs(kappa - 1.0), gamma, found.residual) <= close and is_identity),
        f"20 x 24: |M^T M - I| = {off:.1e}, kappa - 1 = {kappa - 1.0:.1e}, gamma equals M^T vec(T) to {gamma:.1e} "
        f"and gives the target to {found.residual:.1e}; ID cond gives {'exactly' if is_identity else 'not'} "
        "the identity",
        {"distance from orthogonal": off, "kappa": kappa, "gamma": gamma, "residual": found.residual},
    )
