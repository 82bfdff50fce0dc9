"""Checks of burkholz2024 on other sources: residual blocks, and deeper, narrower networks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from onlynorm.evidence.papers.giannou2023.wide_networks import EXACT
from onlynorm.evidence.registry import Evidence, normal, relative, verdict
from onlynorm.features import draw
from onlynorm.reconstruction import Residual, reconstruct, verify
from onlynorm.solvers import KhatriRao, solve_multilayer


def _chain(widths: Sequence[int], *, seed: int) -> list[Tensor]:
    """Random W_1, ..., W_L of these widths, from the input to the output."""
    pairs = enumerate(itertools.pairwise(widths))
    return [normal(seed, f"W{i} of {list(widths)}", out, inp) / inp**0.5 for i, (inp, out) in pairs]


def jacobian_rank(weights: Sequence[Tensor], *, seed: int) -> int:
    """Rank of the derivative of diag(g_L) W_L ... diag(g_1) W_1 with respect to all gammas, at random ones."""
    gammas = [normal(seed, f"gamma {i}", len(w), 1) for i, w in enumerate(weights)]
    rights = [weights[0]]
    for w, gamma in zip(weights[1:], gammas, strict=False):
        rights.append(w @ (gamma * rights[-1]))
    left = torch.eye(len(weights[-1]), dtype=torch.float64)
    lefts = [left]
    for w, gamma in zip(weights[:0:-1], gammas[::-1], strict=False):
        left = left @ (gamma * w)
        lefts.insert(0, left)
    jacobian = KhatriRao(torch.cat(lefts, 1), torch.cat(rights)).materialise()
    return int(torch.linalg.matrix_rank(jacobian, rtol=1e-10))


def _even(total: int, n_parts: int) -> list[int]:
    return [total // n_parts + (part < total % n_parts) for part in range(n_parts)]


def _solved(shape: tuple[int, int], n_gammas: int, n_layers: int, *, seeds: Sequence[int]) -> float:
    """The fraction of draws in which layers of equal width with this many gammas are solved for a random target."""
    out, inp = shape
    widths = [inp, *_even(n_gammas - out, n_layers - 1), out]
    residuals = (solve_multilayer(_chain(widths, seed=i), normal(i, "target", out, inp)).residual for i in seeds)
    return sum(residual <= 1e-10 for residual in residuals) / len(seeds)


def deeper_sources_may_be_narrower(seed: int) -> Evidence:
    measured: dict[str, float] = {}
    at_bound, above, is_right = [], [], True
    # 6 x 9 is a convolution of 3 inputs and 3 positions, with the kernel in the first layer.
    for (out, inp), n_layers, n_draws in (((8, 8), 3, 4), ((8, 8), 4, 4), ((6, 9), 3, 4), ((8, 8), 6, 1)):
        n, name, seeds = out * inp, f"{out} x {inp}, L = {n_layers}", range(seed, seed + n_draws)
        at_bound.append(_solved((out, inp), n + n_layers, n_layers, seeds=seeds))
        above.append(_solved((out, inp), math.ceil(1.1 * (n + n_layers)), n_layers, seeds=seeds))
        measured |= {f"solved at the bound, {name}": at_bound[-1], f"solved 10 % above, {name}": above[-1]}
        for lost in (1, 2):
            widths = [inp, *_even(n + n_layers - lost - out, n_layers - 1), out]
            rank = jacobian_rank(_chain(widths, seed=seed), seed=seed)
            measured[f"missing rank with N + L - {lost} gammas, {name}"] = n - rank
            is_right &= rank == n + 1 - lost
    # Six layers at exactly the bound are left out: the root finder may end in a local minimum.
    is_right &= min(*at_bound[:3], *above) >= 0.5
    uneven = [jacobian_rank(_chain(widths, seed=seed), seed=seed) for widths in ([2, 100, 2, 10], [36, 8, 300, 4])]
    return Evidence(
        verdict(is_right, as_printed=uneven == [20, 144]),
        "even widths that sum to N + L, targets 8 x 8 (L = 3, 4) and 6 x 3 x 3 (L = 3): solved to 1e-10 in "
        + ", ".join(f"{fraction:.2f}" for fraction in at_bound[:3])
        + f" of the draws, for L = 6 in {at_bound[3]:.2f}; with 10 % more in {min(above):.2f} and more. The derivative "
        "has full rank from N + L - 1 gammas on, and one less with N + L - 2. Widths that the text allows, "
        "(2, 100, 2, 10) and (4, 8, 300, 4) with nine positions in the first layer, reach rank "
        f"{uneven[0]} of 20 and {uneven[1]} of 144",
        measured | {"rank of (2, 100, 2, 10)": uneven[0], "rank of (4, 8, 300, 4)": uneven[1]},
    )


def _solve_outside(matrix: Tensor, target: Tensor, skip: Tensor, *, as_printed: bool) -> float:
    """The error with the norm around the sum, from the pivoted system with our right-hand side or the printed one."""
    pivot = target.abs().argmax(1, keepdim=True)
    ratio = target / target.gather(1, pivot)
    side = ratio * skip.gather(1, pivot) - (0.0 if as_printed else skip)
    others = torch.ones_like(target, dtype=torch.bool).scatter_(1, pivot, False)
    rows = matrix.unflatten(0, target.shape)
    at_pivot = rows[torch.arange(len(target)), pivot[:, 0]]
    system = (rows - ratio[:, :, None] * at_pivot[:, None])[others]
    gamma = torch.linalg.solve(system, side[others])
    made = (matrix @ gamma).reshape(target.shape) + skip
    return relative(target.gather(1, pivot) / made.gather(1, pivot) * made, target)


def residual_blocks_serve_as_sources(seed: int) -> Evidence:
    shape, ours, printed = (4, 5), 0.0, torch.inf
    for i in range(8):
        target, skip = normal(seed + i, "target", *shape), normal(seed + i, "skip", *shape)
        # The right-hand side is not zero, so a square system suffices: one feature fewer than in theorem 2.2.
        features = draw("he_normal", shape, n_features=20 - 4, seed=seed + i)
        matrix = KhatriRao(features.left(), features.right()).materialise()
        ours = max(ours, _solve_outside(matrix, target, skip, as_printed=False))
        printed = min(printed, _solve_outside(matrix, target, skip, as_printed=True))
    layer = nn.Conv1d(3, 4, 3, padding=1).double()
    layer.weight.data = normal(seed, "kernel", 4, 9).reshape(4, 3, 3)
    layer.bias = nn.Parameter(normal(seed, "bias", 4, 1)[:, 0])
    x = normal(seed, "inputs", 48, 30).reshape(48, 3, 10)
    errors = {}
    for place in ("inside", "outside"):
        made = reconstruct(layer, x[:32], Residual(skip=place, activation=nn.ReLU()), seed=seed)
        errors[place] = verify(layer, made.network, x[32:]).relative_error
    is_exact = max(ours, *errors.values()) <= EXACT
    return Evidence(
        verdict(is_exact, as_printed=printed <= EXACT),
        f"norm around the sum, 4 x 5 with a dense skip and N - c2 = 16 features, 8 draws: our right-hand side has "
        f"error {ours:.1e}, the printed one {printed:.1e} and more. Convolutions of 3 positions from residual blocks "
        f"with ReLU: norm inside the sum {errors['inside']:.1e}, outside {errors['outside']:.1e}",
        {"error": ours, "error as printed": printed, **{f"convolution, {place}": e for place, e in errors.items()}},
    )
