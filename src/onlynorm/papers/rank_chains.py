"""Pieces of daneshmand2020: what chains of random layers do to the rank, as plain numbers."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from onlynorm.rank import Chain, ChainAverages, simulate, top_eigenvalues, unit_rows, walk


def rank_over_depth(
    *, width: int, gamma: float, norm: str, depths: Sequence[int], n_chains: int, threshold: float, seed: int
) -> list[float]:
    """The mean of ln rank at every depth; singular values below `threshold` of the normalised matrix count as zero.

    Normalised means divided by the largest singular value. In float64, whose rounding is far below the threshold.
    """
    chain = Chain(width, gamma, norm=norm, n_chains=n_chains, seed=seed, dtype="float64")
    found = []
    for _, H in walk(chain, depths):
        sigma = torch.linalg.svdvals(H)
        ranks = (sigma > threshold * sigma[:, :1]).sum(1)
        found.append(float(ranks.double().log().mean()))
    return found


def averages_over_depth(
    *,
    width: int,
    gamma: float,
    n_layers: int,
    n_chains: int,
    every: int,
    seed: int,
    activation: str = "linear",
    norm: str = "batch",
    weights: str = "uniform",
    burn_in: int = 0,
    quantities: Sequence[str] = ("r", "soft_rank 0.5"),
) -> dict[str, Any]:
    """Averages over the layers of chains with their errors and spreads; chains are started from Gaussian inputs."""
    chain = Chain(width, gamma, activation=activation, norm=norm, weights=weights, n_chains=n_chains, seed=seed)
    return _plain(simulate(chain, n_layers, quantities=tuple(quantities), every=every, burn_in=burn_in))


def growing_averages(
    *, width: int, gamma: float, activation: str, lengths: Sequence[int], n_chains: int, every: int, seed: int
) -> list[dict[str, Any]]:
    """The same averages over the first L layers of one run, for every L."""
    chain = Chain(width, gamma, activation=activation, n_chains=n_chains, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "chain"
        return [_plain(simulate(chain, n, every=every, quantities=("r",), keep=kept)) for n in sorted(lengths)]


def eigenvalues_over_depth(
    *, width: int, gamma: float, spread: float, depths: Sequence[int], n_chains: int, k: int, seed: int
) -> dict[str, Any]:
    """The k largest eigenvalues of M at every depth, averaged over chains, from inputs whose rows are almost equal.

    Rows are one Gaussian row plus `spread` times Gaussian ones; `cosine` is the smallest between two rows of an input.
    """
    chain = Chain(width, gamma, n_chains=n_chains, seed=seed, dtype="float64")
    noise = chain.draw_inputs()
    X = unit_rows(noise[:, :1] + spread * noise.roll(1, 1))
    cosine = float((X @ X.mT / width).min())
    found = [top_eigenvalues(H, k).mean(0).tolist() for _, H in walk(chain, depths, inputs=X)]
    return {"cosine": cosine, "eigenvalues": found}


def _plain(made: ChainAverages) -> dict[str, Any]:
    numbers = {
        name: {"value": estimate.value, "error": estimate.error, "deviation": estimate.deviation}
        for name, estimate in made.estimates.items()
    }
    return {**numbers, "layers": made.n_steps, "dead": made.n_dead}
