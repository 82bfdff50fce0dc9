"""Checks of what hardt_ma2017 says about the risk of linear residual networks: formula, gradient, critical points."""

from __future__ import annotations

import itertools
import math

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

from onlynorm.identity.landscape import Landscape
from onlynorm.solvers.checks import EPS, normal, relative, verdict
from onlynorm.theorems import Evidence, check


def layers_within(tau: float, *, depth: int, dim: int, seed: int) -> Tensor:
    """Random layers (depth, dim, dim), each of spectral norm tau."""
    layers = normal(seed, f"layers {depth} {dim}", depth * dim, dim).reshape(depth, dim, dim)
    return tau * layers / torch.linalg.matrix_norm(layers, 2)[:, None, None]


def covariance(dim: int, seed: int, *, rank: int | None = None) -> Tensor:
    """A random covariance of this rank, full if left out."""
    half = normal(seed, "covariance", dim, rank or 2 * dim)
    return half @ half.mT / half.shape[1]


@check("hardt_ma2017:claim-2.3")
def the_risk_is_a_distance_of_matrices(seed: int) -> Evidence:
    dim, depth, worst, without = 4, 3, 0.0, math.inf
    x = normal(seed, "inputs", 7, dim)  # a distribution on seven points, so that expectations are finite sums
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
        f"of the noise; with I in place of Sigma it is {without:.2g} or more",
        {"relative difference": worst, "with another covariance": without},
    )


@check("hardt_ma2017:lemma-2.4")
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
    """2 (I + A_l^T) ... (I + A_(i+1)^T) E Sigma (I + A_(i-1)^T) ... (I + A_1^T), as the paper has it."""
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


@check("hardt_ma2017:ineq-2.3")
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


@check("hardt_ma2017:thm-2.2")
def critical_points_near_the_identity_are_minima(seed: int) -> Evidence:
    dim, inside, inside_negative, outside, bad, worst = 2, 0, 0, 0, 0, 0.0
    full, thin = covariance(dim, seed), covariance(dim, seed, rank=1)
    for (depth, sigma), i in itertools.product(((2, full), (3, full), (3, thin)), range(6)):
        target = torch.eye(dim).double() + 0.6 * normal(seed + i, "target", dim, dim)
        landscape = Landscape(target, covariance=sigma)
        start = layers_within(0.5, depth=depth, dim=dim, seed=seed + i)
        if i % 2:  # from where a descent leads; from elsewhere the search mostly finds bad points, if far away
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
        f"end inside tau < 1, with a risk of at most {worst:.1e} above the least; {outside} end outside, {bad} of them "
        f"at bad critical points. tau = 1 is the limit: at A_1 = A_2 = -I the gradient is {slope:g} and the risk "
        f"{height:.2f}",
        {"inside": inside, "largest risk inside": worst, "outside": outside, "bad outside": bad,
         "gradient at -I": slope, "risk at -I": height},
    )  # fmt: skip


def critical_point(landscape: Landscape, start: Tensor) -> Tensor | None:
    """A zero of the gradient near `start`, whatever its risk, by least squares on the gradient; None if none is met."""

    def slope(flat: np.ndarray) -> np.ndarray:
        return landscape.gradient(torch.from_numpy(flat).reshape(start.shape)).flatten().numpy()

    found = scipy.optimize.least_squares(
        slope, start.flatten().numpy(), xtol=1e-15, ftol=1e-15, gtol=1e-15, max_nfev=100
    )
    return torch.from_numpy(found.x).reshape(start.shape) if np.abs(found.fun).max() <= 1e-9 else None
