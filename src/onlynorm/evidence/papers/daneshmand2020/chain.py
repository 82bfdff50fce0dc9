"""Checks of daneshmand2020 on one step of the chain, and on chains without norms or of rank one."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onlynorm.evidence.papers.daneshmand2020.eigenvalues import frobenius_drift, with_eigenvalues
from onlynorm.evidence.registry import Evidence, normal, verdict
from onlynorm.rank import Chain, exact_rank, rank_ratio, second_moments, simulate, unit_rows, walk

Z = 5.0
"""Tolerance of Monte Carlo means in standard errors; random errors exceed it once in two million."""


def mean_change(H: Tensor, *, gamma: float, n_pairs: int, seed: int) -> tuple[float, float, float]:
    """E |M+|_F^2 - |M|_F^2 and its standard error over pairs W, -W, and the mean change of the largest eigenvalue.

    Odd powers of gamma cancel within a pair, which removes almost all noise.
    """
    chunk = 4096
    chain = Chain(len(H), gamma, n_samples=H.shape[1], n_chains=chunk, seed=seed, dtype="float64")
    weights, many = chain.draw_weights(), H.expand(chunk, *H.shape)
    before = second_moments(H)
    changes, tops = [], []
    for W in weights.steps(0, n_pairs // chunk):
        both = [second_moments(chain.step(many, sign * W, scale=weights.scale)) for sign in (1.0, -1.0)]
        changes.append(sum(M.square().sum((1, 2)) for M in both) / 2 - before.square().sum())
        tops += [float(torch.linalg.eigvalsh(M[:256])[:, -1].mean()) for M in both]
    change = torch.cat(changes)
    top = sum(tops) / len(tops) - float(torch.linalg.eigvalsh(before)[-1])
    return float(change.mean()), float(change.std()) / math.sqrt(len(change)), top


def the_change_of_the_frobenius_norm_has_the_stated_mean(seed: int) -> Evidence:
    d, gamma = 6, 0.01
    starts = [unit_rows(normal(seed, "wide", d, 9)), unit_rows(normal(seed, "narrow", d, 2) @ normal(seed, "x", 2, 7))]
    starts.append(unit_rows(1.0 + 0.5 * normal(seed, "near", d, 8)))
    worst, sharpest, shown = 0.0, [0.0] * 4, []
    for i, H in enumerate(starts):
        M = second_moments(H)
        squares = M.square().sum(1)
        parts = (squares.sum() / 4, ((M @ M) * M).sum(), squares.square().sum())
        terms = [2.0 * d * d, *(8 * float(part) for part in parts)]
        mean, error, _ = mean_change(H, gamma=gamma, n_pairs=2**16, seed=seed + i)
        mean, error, expected = mean / gamma**2, error / gamma**2, float(frobenius_drift(M))
        # The next term is of order gamma^2 with constants of the size of d^2 times the largest term.
        error = math.hypot(error, gamma**2 * d**2 * max(terms) / Z)
        worst = max(worst, abs(mean - expected) / error)
        sharpest = [max(best, 0.1 * term / error) for best, term in zip(sharpest, terms, strict=True)]
        shown.append(f"{mean:.2f} +- {error:.2f} (formula {expected:.2f})")
    return Evidence(
        verdict(worst <= Z and min(sharpest) > Z),
        f"d = {d}, gamma = {gamma}, 65,536 pairs of weights: {', '.join(shown)}. A change of any of the four "
        f"constants by a tenth would be {min(sharpest):.0f} standard errors or more",
        {"largest distance in errors": worst, "errors for a tenth on the least visible constant": min(sharpest)},
    )


def nearly_collapsed_signals_recover(seed: int) -> Evidence:
    gamma, ok, shown = 0.02, True, []
    measured: dict[str, float] = {}
    for d in (4, 8):
        eigenvalues = torch.full((d,), gamma**2, dtype=torch.float64)
        eigenvalues[0] = d - gamma**2 * (d - 1)
        change, error, top = mean_change(with_eigenvalues(eigenvalues), gamma=gamma, n_pairs=2**15, seed=seed)
        change, error = change / gamma**4, error / gamma**4
        leading = -4.0 * d * (d - 1) * (2 * d - 1)
        # To leading order: the next term is smaller by a factor of d^2 gamma^2.
        agrees = abs(change - leading) <= Z * error + 2 * d * d * gamma**2 * abs(leading)
        ok = ok and agrees and change + Z * error < -d * d and top < 0
        shown.append(f"d = {d}: {change:.0f} +- {error:.0f} gamma^4 (ours {leading:.0f}, stated: below {-d * d})")
        measured |= {f"change over gamma^4, d = {d}": change, f"leading term, d = {d}": leading}
    return Evidence(verdict(ok), f"gamma = {gamma}: {'; '.join(shown)}; the largest eigenvalue falls in both", measured)


def products_of_random_matrices_become_rank_one(seed: int) -> Evidence:
    d, shown, ok = 8, [], True
    measured: dict[str, float] = {}
    for gamma, depth in ((0.2, 4000), (0.5, 1500), (0.9, 1500)):
        chain = Chain(d, gamma, norm="none", n_chains=16, dtype="float64", seed=seed)
        (_, H), *_ = walk(chain, [depth])
        sigma = torch.linalg.svdvals(H)
        ratio = float((sigma[:, 1] / sigma[:, 0]).max())
        measured[f"second over first singular value, gamma = {gamma}"] = ratio
        shown.append(f"{ratio:.0e} after {depth} layers at gamma = {gamma}")
        ok = ok and ratio < 1e-6
    # For small gamma the exponents of the singular values differ by gamma^2 per layer (Brownian motion on matrices).
    (_, H), *_ = walk(Chain(d, 0.1, norm="none", n_chains=128, dtype="float64", seed=seed), [600])
    sigma = torch.linalg.svdvals(H)
    gap = float((sigma[:, 0] / sigma[:, 1]).log().mean()) / 600
    Q = torch.eye(d, dtype=torch.float64)
    for i in range(200):
        Q = torch.linalg.qr(normal(seed + i, "Q", d, d))[0] @ Q
    flat = torch.linalg.svdvals(Q)
    control = float(flat[1] / flat[0])
    ok = ok and 0.7 < gap / 0.01 < 1.5 and abs(control - 1) < 1e-9
    normed = simulate(Chain(d, 0.5, n_chains=16, dtype="float64", seed=seed), 400, quantities=("r",), burn_in=200)["r"]
    measured |= {
        "gap of exponents over gamma^2": gap / 0.01,
        "orthogonal factors": control,
        "r with norms": normed.value,
    }
    return Evidence(
        verdict(ok and normed.value > 1.5),
        f"largest ratio of second to first singular value in 16 products, d = {d}: {', '.join(shown)}; the logarithm "
        f"falls by {gap / 0.01:.2f} gamma^2 per layer at gamma = 0.1. With orthogonal factors, which do not contract, "
        f"it is {control:.3f}; with batch norms r stays at {normed.value:.2f}",
        measured,
    )


def rank_one_is_absorbing_for_linear_networks(seed: int) -> Evidence:
    d, n = 6, 10
    gamma = 1 / (8 * d)
    H = unit_rows(normal(seed, "s", d, 1) @ normal(seed, "v", 1, n))
    before = second_moments(H)
    signs = float((before.abs() - 1).abs().max())
    moved: dict[str, list[Tensor]] = {}
    for activation in ("linear", "tanh"):
        chain = Chain(d, gamma, n_samples=n, activation=activation, n_chains=8, dtype="float64", seed=seed)
        moved[activation] = [found for _, found in walk(chain, [1, 2000], inputs=H)]
    stays = float((second_moments(moved["linear"][1]) - before).abs().max())
    sigma = torch.linalg.svdvals(moved["tanh"][0])
    second = float((sigma[:, 1] / sigma[:, 0]).min())
    later = rank_ratio(moved["tanh"][1])
    return Evidence(
        verdict(signs <= 1e-12 and stays <= 1e-9, as_printed=second <= 1e-9),
        f"d = {d}, gamma = 1/(8d): entries of M are +-1 to {signs:.0e}, and 2000 linear layers change them by "
        f"{stays:.0e}. With tanh, which the text includes, one layer gives a second singular value of at least "
        f"{second:.1e} of the first, and 2000 layers r = {float(later.mean()):.2f} and rank "
        f"{int(exact_rank(moved['tanh'][1]).min())}",
        {"change of M": stays, "second singular value with tanh": second, "r with tanh": float(later.mean())},
    )


def odd_activations_keep_rank_two(seed: int) -> Evidence:
    d, n = 6, 10
    gamma = 1 / (8 * d)
    least, shown = math.inf, []
    depths = (1, 10, 100, 1000, 2000, 4000)
    start = normal(seed, "s", d, 1) @ normal(seed, "v", 1, n)
    for name, inputs in (("full rank", None), ("nearly rank one", start + 1e-3 * normal(seed, "noise", d, n))):
        for activation in ("tanh", "sin"):
            chain = Chain(d, gamma, n_samples=n, activation=activation, n_chains=16, dtype="float64", seed=seed)
            for _, H in walk(chain, depths, inputs=inputs):
                sigma = torch.linalg.svdvals(H)
                least = min(least, float((sigma[:, 1] / sigma[:, 0]).min()))
            shown.append(f"r = {float(rank_ratio(H).mean()):.2f} ({activation} from {name})")
    fixed = torch.outer(normal(seed, "a", d, 1)[:, 0].sign(), normal(seed, "b", n, 1)[:, 0].sign())
    chain = Chain(d, gamma, n_samples=n, activation="tanh", n_chains=4, dtype="float64", seed=seed)
    (_, H), *_ = walk(chain, [100], inputs=fixed)
    stuck = float((H - fixed).abs().max())
    return Evidence(
        verdict(least > 1e-5 and stuck <= 1e-9),
        f"d = {d}, gamma = 1/(8d): the second singular value is never below {least:.1e} of the first at depths up to "
        f"4000, where {', '.join(shown)}. Matrices of signs s w^T do not change (to {stuck:.0e} in 100 layers), so "
        "uniqueness must be read as in theorem 3",
        {"least second singular value": least, "change of a matrix of signs": stuck},
    )
