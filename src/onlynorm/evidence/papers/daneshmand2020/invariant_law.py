"""Checks of daneshmand2020 on the invariant law: symmetries, Frobenius norm, rank of order sqrt(d)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from onlynorm.evidence.papers.daneshmand2020.chain import Z
from onlynorm.evidence.registry import Evidence, normal, verdict
from onlynorm.rank import Chain, ChainAverages, second_moments, simulate, unit_rows, walk

_D = 6
_PAIRS = torch.triu_indices(_D, _D, 1)


def entries(*, depth: int, seed: int, of: Callable[[Tensor], Tensor], **settings: str | float) -> Tensor:
    """`of` applied to the entries (chains, pairs) above the diagonal of M at this depth, for chains with one input.

    Two rows of the input are almost equal, so that its law is neither symmetric nor the same for all pairs.
    """
    X = unit_rows(normal(seed, "X", _D, 8))
    X[1] = X[0] + 0.1 * X[1]
    chain = Chain(_D, n_samples=8, n_chains=4096, seed=seed, **settings)  # type: ignore[arg-type]
    (_, H), *_ = walk(chain, [depth], inputs=X)
    return of(second_moments(H.double())[:, _PAIRS[0], _PAIRS[1]])


def distances(values: Tensor, centre: Tensor | float) -> float:
    """The largest distance of a column mean from the centre, in standard errors."""
    errors = values.std(0) / math.sqrt(len(values))
    return float(((values.mean(0) - centre).abs() / errors).max())


def signs_of_rows_do_not_matter(seed: int) -> Evidence:
    found = {
        activation: distances(entries(depth=150, seed=seed, of=lambda x: x, gamma=0.7, activation=activation), 0.0)
        for activation in ("linear", "tanh")
    }
    control = float(entries(depth=150, seed=seed, of=lambda x: x, gamma=0.7, weights="asymmetric").mean(0).min())
    return Evidence(
        verdict(max(found.values()) <= Z and control > 0.5),
        f"E M_ij over 4096 chains, d = {_D}: all 15 within {found['linear']:.1f} (linear), {found['tanh']:.1f} (tanh) "
        f"standard errors of zero; with asymmetric weights {control:.3f} or more",
        {**found, "asymmetric weights": control},
    )


def the_order_of_rows_does_not_matter(seed: int) -> Evidence:
    found = {}
    for activation in ("linear", "tanh", "relu"):
        squares = entries(depth=150, seed=seed, of=torch.square, gamma=0.7, activation=activation)
        found[activation] = distances(squares - squares.mean(1, keepdim=True), 0.0)
    early = entries(depth=1, seed=seed, of=torch.square, gamma=0.05)
    control = distances(early - early.mean(1, keepdim=True), 0.0)
    return Evidence(
        verdict(max(found.values()) <= Z and control > 2 * Z),
        f"E M_ij^2 over 4096 chains, d = {_D}: all 15 pairs within {max(found.values()):.1f} standard errors of their "
        f"common mean for linear, tanh and ReLU; {control:.0f} after one small step, which still depends on the input",
        {**found, "after one step": control},
    )


def burnt_in_averages(width: int, gamma: float, *, n_chains: int, n_steps: int, seed: int) -> ChainAverages:
    """Averages of a linear chain after a burn-in."""
    chain = Chain(width, gamma, n_chains=n_chains, seed=seed)
    quantities = ("r", "frobenius", "cube", "squares", "soft_rank 0.25", "soft_rank 0.5")
    return simulate(chain, n_steps, quantities=quantities, every=8, burn_in=n_steps // 3)


def the_frobenius_norm_is_of_order_d_to_three_halves(seed: int) -> Evidence:
    gamma, ok, shown = 0.1, True, []
    measured: dict[str, float] = {}
    for d, n_chains, n_steps in ((8, 64, 1200), (16, 64, 1200), (32, 32, 1200)):
        made = burnt_in_averages(d, gamma, n_chains=n_chains, n_steps=n_steps, seed=seed)
        norm, alpha = made["frobenius"], made["alpha"]
        printed = d**1.5 / math.sqrt(1 - alpha.value)
        # Under the invariant law the mean of the drift of lemma 12 is zero, up to the next order in gamma.
        terms = [2.0 * d * d, -2 * norm.value, -8 * made["cube"].value, 8 * made["squares"].value]
        balance = abs(sum(terms)) / max(map(abs, terms))
        ok = ok and alpha.value + Z * alpha.error < 1 and norm.value + Z * norm.error < printed / 2
        ok = ok and balance < 0.02
        shown.append(f"d = {d}: {norm} (bound {printed:.1f}, ours {printed / 2:.1f}, alpha {alpha.value:.3f})")
        measured |= {f"E |M|_F^2, d = {d}": norm.value, f"bound, d = {d}": printed, f"balance, d = {d}": balance}
    return Evidence(
        verdict(ok),
        f"gamma = {gamma}: {'; '.join(shown)}. Half of the printed bound holds too; the mean drift is zero to "
        f"{max(v for k, v in measured.items() if k.startswith('balance')):.1%} of its largest term",
        measured,
    )


def batch_norms_keep_rank_of_order_sqrt_d(seed: int) -> Evidence:
    ok, shown, ranks = True, [], []
    measured: dict[str, float] = {}
    widths = (8, 16, 32, 64)
    for d in widths:
        made = burnt_in_averages(d, 0.2, n_chains=max(8, 256 // d), n_steps=480, seed=seed)
        r, alpha = made["r"], made["alpha"]
        floor = math.sqrt((1 - alpha.value) * d)
        for tau in (0.25, 0.5):
            soft = made[f"soft_rank {tau}"]
            ok = ok and soft.value + Z * soft.error > (1 - tau) ** 2 * (r.value - Z * r.error)
        ok = ok and r.value - Z * r.error > floor
        ranks.append(r)
        shown.append(f"d = {d}: rank_1/2 {made['soft_rank 0.5'].value:.2f}, r {r} (bound {floor:.2f})")
        measured |= {f"r, d = {d}": r.value, f"bound, d = {d}": floor}
    slope = math.log2(ranks[-1].value / ranks[0].value) / math.log2(widths[-1] / widths[0])
    wrong = math.hypot(*(r.error / r.value for r in (ranks[0], ranks[-1]))) / math.log(widths[-1] / widths[0])
    measured |= {"exponent of r": slope}
    return Evidence(
        verdict(ok and slope + Z * wrong >= 0.5),
        f"gamma = 0.2: {'; '.join(shown)}. r grows like d^{slope:.2f}",
        measured,
    )
