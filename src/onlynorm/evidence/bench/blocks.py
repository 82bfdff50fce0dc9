"""The cost of one layer against the number of blocks: solving, computing the weight, and frozen parameters.

A layer with the size of those of ResNet-20 is rebuilt from random features with the same accuracy. Each of n blocks has
one n-th of the features, so all three costs should decrease by a factor of n.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from onlynorm.evidence.harness import Goal
from onlynorm.evidence.race import Column
from onlynorm.evidence.timing import race
from onlynorm.features import draw_blocks
from onlynorm.frozen import FrozenOptions, wrap
from onlynorm.seeds import own_randomness
from onlynorm.solvers import KhatriRao, solve_blocks

COUNTS = (1, 2, 4, 8)
EXCESS = 1.25
TOLERANCE = 1e-10
NOISE = 1.1
"""Tolerance of the limits for ratios of times."""


@dataclass(frozen=True)
class BlockRow:
    """Costs for one number of blocks: seconds to solve and to compute the weight, frozen parameters, residual."""

    n_blocks: int
    solve_seconds: float
    weight_seconds: float
    n_frozen: int
    residual: float


BLOCK_COLUMNS: dict[str, Column] = {
    "blocks": "n_blocks", "solve s": "solve_seconds:.3f", "weight ms": "weight_seconds*1e3:.2f",
    "frozen": "n_frozen:,", "residual": "residual:.0e",
}  # fmt: skip
"""Columns of the table with a row per number of blocks."""


def measure_blocks(n_channels: int, *, repeats: int) -> list[BlockRow]:
    """A 3 x 3 convolution with this number of channels from he_normal features in 1, 2, 4 and 8 blocks."""
    with own_randomness(0):
        plain = nn.Conv2d(n_channels, n_channels, 3)
    found = {n: draw_blocks("he_normal", tuple(plain.weight.shape), n_blocks=n, excess=EXCESS) for n in COUNTS}
    operators = {n: KhatriRao(one.base.left(), one.base.right()) for n, one in found.items()}
    targets = {n: found[n].as_blocks(plain.weight.detach().double()) for n in COUNTS}
    options = {n: FrozenOptions(features="he_normal", excess=EXCESS, n_blocks=n) for n in COUNTS}
    layers = {n: wrap(plain, options[n], is_filled=False) for n in COUNTS}
    solves = {n: functools.partial(solve_blocks, operators[n], targets[n]) for n in COUNTS}
    weights = {n: functools.partial(getattr, layers[n], "weight") for n in COUNTS}
    solved, made = race(solves, rounds=repeats), race(weights, rounds=20 * repeats)
    rests = {n: targets[n] - operators[n].apply(solved[n].result) for n in COUNTS}
    sizes = {n: float(torch.linalg.vector_norm(rests[n]) / torch.linalg.vector_norm(targets[n])) for n in COUNTS}
    return [BlockRow(n, solved[n].seconds, made[n].seconds, layers[n].frozen.n_frozen, sizes[n]) for n in COUNTS]


def block_goals(rows: Sequence[BlockRow]) -> Iterator[Goal]:
    """n blocks reduce the costs by a factor of n, compared with one block in the first row."""
    for row in rows[1:]:
        one = rows[0]
        drops = [getattr(one, name) / getattr(row, name) for name in ("solve_seconds", "weight_seconds", "n_frozen")]
        is_exact = max(one.residual, row.residual) <= TOLERANCE
        yield Goal(
            f"{row.n_blocks} blocks: solve, weight and frozen parameters {row.n_blocks} times cheaper, same accuracy",
            f"{drops[0]:.1f}, {drops[1]:.1f} and {drops[2]:.1f} times, residual {row.residual:.0e}",
            is_exact and drops[2] >= row.n_blocks and min(drops[:2]) * NOISE >= row.n_blocks,
        )
