"""Checks of sources other than two wide layers: low rank, unequal widths, residual blocks."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from onlynorm.evidence.papers.giannou2023.wide_networks import EXACT, rebuild, rebuild_error, relu_network
from onlynorm.evidence.registry import Evidence, normal, verdict
from onlynorm.frozen import find_blocks
from onlynorm.reconstruction import Deep, LowRank, Wide


def _widths(network: nn.Module) -> list[int]:
    """The number of features of each pair of frozen layers of a network."""
    return [one.n_features for block in find_blocks(network).values() for one in block.sources()]


def _layer(weight: Tensor, *, seed: int) -> nn.Sequential:
    layer = nn.Linear(weight.shape[1], weight.shape[0]).double()
    layer.weight.data = weight.clone()
    layer.bias.data = 0.3 * normal(seed, "bias", weight.shape[0], 1)[:, 0]
    return nn.Sequential(layer)


def low_rank_needs_fewer_features(seed: int) -> Evidence:
    d, worst, least, is_narrow = 10, 0.0, 1.0, True
    for rank in (1, 2, 4, 9):
        weight = normal(seed, f"A {rank}", d, rank) @ normal(seed, f"B {rank}", rank, d) / d
        target = _layer(weight, seed=seed)
        made, error = rebuild(target, LowRank(rank=rank, excess=1.0, activation=nn.ReLU()), seed=seed)
        is_narrow &= _widths(made.network) == [d * rank, d * rank]
        worst = max(worst, error)
        if rank > 1:
            fewer = rebuild_error(target, LowRank(rank=rank - 1, excess=1.0, activation=nn.ReLU()), seed=seed)
            least = min(least, fewer)
    return Evidence(
        verdict(worst <= EXACT and is_narrow and least > 1e3 * EXACT),
        f"layers of width {d} and rank 1, 2, 4, 9 from four frozen layers with ReLUs, d r features in each of the two "
        f"feature layers: error {worst:.1e}; with one rank less at least {least:.1e}",
        {"error": worst, "error with one rank less": least},
    )


def the_rank_of_the_scaled_target_counts(seed: int) -> Evidence:
    d, n_on = 10, 3
    weight = normal(seed, "weight", d, d) / d
    gamma = normal(seed, "gamma", d, 1)
    gamma[torch.arange(d) % 4 != 0] = 0.0
    full, scaled = (int(torch.linalg.matrix_rank(one)) for one in (weight, gamma * weight))
    target = _layer(gamma * weight, seed=seed)
    made, error = rebuild(target, LowRank(excess=1.0, activation=nn.ReLU()), seed=seed)
    widths = _widths(made.network)
    return Evidence(
        verdict(error <= EXACT and full == d and scaled == n_on and widths == [d * n_on, d * n_on]),
        f"a target of width {d} and rank {full} with {d - n_on} outputs of gamma = 0: as one matrix it has rank "
        f"{scaled}, and {' and '.join(map(str, widths))} features instead of {d * d} rebuild it to {error:.1e}",
        {"error": error, "rank of the weight": full, "rank of the scaled weight": scaled, "features": sum(widths)},
    )


def layers_may_have_unequal_widths(seed: int) -> Evidence:
    sizes = [5, 9, 3, 7]
    products = [a * b for a, b in itertools.pairwise(sizes)]
    target = relu_network(sizes, seed=seed)
    made, wide = rebuild(target, Wide(excess=1.0, activation=nn.ReLU()), seed=seed)
    fewer = rebuild_error(target, Wide(excess=0.95, activation=nn.ReLU()), seed=seed)
    sources = [Deep(inputs_per_slice=k, activation=nn.ReLU()) for k in (1, 2, 3)]
    deep = max(rebuild_error(target, source, seed=seed) for source in sources)
    return Evidence(
        verdict(max(wide, deep) <= EXACT and _widths(made.network) == products and fewer > 1e3 * EXACT),
        f"widths {', '.join(map(str, sizes))}: from {', '.join(map(str, products))} features, n m for a layer from n "
        f"to m, the wide network errs by {wide:.1e} (by {fewer:.1e} with 5 % fewer), deep ones with k = 1, 2, 3 by "
        f"{deep:.1e}",
        {"error, wide": wide, "error with fewer features": fewer, "error, deep": deep},
    )
