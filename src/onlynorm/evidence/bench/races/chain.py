"""Layers of random networks per second: many chains in one tensor against a simple loop.

The loop simulates one chain, layer by layer, with the singular values of every layer. `onlynorm.simulate` has many
chains in one tensor, counts eigenvalues by inertia, and observes every 64th layer. The goal counts layers only: at
width 32 an average over the same layers has 2 to 3 times the error if only every 64th is observed. The row that
observes every layer has equal accuracy. Both compute rank_1/2 and r. They run alternately for a few milliseconds on one
thread; the best processor time counts, which excludes the time of other processes. The time for a million layers of
figure 2 is predicted from the rates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from onlynorm.evidence.harness import Goal, Session, Sizes, setting
from onlynorm.evidence.race import Race, RaceResult
from onlynorm.evidence.timing import one_thread
from onlynorm.evidence.timing import race as take_turns
from onlynorm.rank import Chain, ChainState

LOOP = "one chain, SVD of every layer"
EACH = "onlynorm, every layer observed"
OURS = "onlynorm"
EVERY = 64
QUANTITIES = ("r", "soft_rank 0.5")
FACTOR = 50.0
HOURS = 2.0
N_LAYERS = 1_000_000
WIDTHS = (8, 16, 32, 64, 128, 256)
GAMMAS = (0.1, 0.5, 1.0, math.inf)
"""Settings of figure 2 of daneshmand2020: a million layers for each width and gamma."""
Slice = Callable[[], int]


def chains_for(width: int) -> int:
    """Number of chains of this width that run in parallel in figure 2: more narrow ones, which cost less."""
    return max(1, 256 // width)


@dataclass(frozen=True)
class ChainSizes(Sizes):
    """Repeats; a quick run omits widths 128 and 256."""

    repeats: int = setting(40, help="Number of repeats; the best one counts.")


@dataclass(frozen=True)
class ChainRow:
    """One method of simulation; `ratio` is our rate divided by its rate at the same width (above one: ours is faster).

    `hours` is the time for a million layers of all gammas at that rate, in sequence.
    """

    width: int
    n_chains: int
    method: str
    layers_per_second: float
    ratio: float
    hours: float


race = Race(
    "chain", "Random networks as batched chains against a loop with singular values.", ChainSizes,
    columns={"rows": {
        "width": "width", "chains": "n_chains", "method": "method", "layers/s": "layers_per_second:,.0f",
        "ours is x faster": "ratio:,.1f", "hours for a million layers of all gammas": "hours:.2f",
    }},
)  # fmt: skip


@race.measure
def measure(sizes: ChainSizes, session: Session) -> Iterator[tuple[str, list[ChainRow]]]:
    """Times three methods at width 32, then the chains of figure 2."""
    session.status("width 32: three methods")
    methods = {
        (64, OURS): our_slice(Chain(32, 0.5, n_chains=64)),
        (64, EACH): our_slice(Chain(32, 0.5, n_chains=64), every=1),
        (1, LOOP): loop_slice(32, 0.5),
    }
    rows = _race(32, methods, sizes.repeats)
    for width in WIDTHS[:4] if sizes.quick else WIDTHS:
        session.status(f"width {width}: the chains of figure 2")
        n_chains = chains_for(width)
        alone = {
            (n_chains, OURS): our_slice(Chain(width, 0.5, n_chains=n_chains)),
            (1, LOOP): loop_slice(width, 0.5, n_layers=max(1, 1024 // width)),
        }
        found = _race(width, alone, sizes.repeats if width < 128 else -(-sizes.repeats // 4))
        done = {(row.width, row.n_chains, row.method) for row in rows}
        rows += [row for row in found if (row.width, row.n_chains, row.method) not in done]
    yield "rows", rows


@race.goals
def goals(result: RaceResult[ChainSizes]) -> Iterator[Goal]:
    """Fifty times the rate of the loop, and figure 2 within two hours."""
    ours = result.find(width=32, n_chains=64, method=OURS)
    loop = result.find(width=32, n_chains=1, method=LOOP)
    if ours and loop:
        times = ours.layers_per_second / loop.layers_per_second
        yield Goal(
            f"width 32, 64 chains: {FACTOR:g} times the layers per second of the loop with SVD",
            f"{times:.0f} times, {ours.layers_per_second:,.0f} layers per second", times >= FACTOR,
        )  # fmt: skip
    runs = [result.find(width=width, n_chains=chains_for(width), method=OURS) for width in WIDTHS]
    if all(runs):
        hours = sum(row.hours for row in runs if row)
        yield Goal(
            f"a million layers for widths 8 to 256 and {len(GAMMAS)} gammas within {HOURS:g} hours in all",
            f"{hours:.2f} hours at these rates", hours <= HOURS,
        )  # fmt: skip


def our_slice(chain: Chain, *, every: int = EVERY) -> Slice:
    """A function that advances all chains by 64 layers and returns the total number of layers."""
    state = ChainState(chain, inputs=None, quantities=QUANTITIES, every=every, burn_in=0)

    def run() -> int:
        state.advance(EVERY)
        return EVERY * chain.chains

    return run


def loop_slice(width: int, gamma: float, *, n_layers: int = 32) -> Slice:
    """The same for the loop: advances its one chain by `n_layers` layers."""
    generator = torch.Generator().manual_seed(0)
    state = [torch.randn(width, width, generator=generator)]

    def run() -> int:
        state[0], _, _ = plain_layers(state[0], gamma, n_layers=n_layers, generator=generator)
        return n_layers

    return run


def plain_layers(
    H: Tensor, gamma: float, *, n_layers: int, generator: torch.Generator
) -> tuple[Tensor, list[int], list[float]]:
    """H after `n_layers` layers of one chain, with rank_1/2 and r of every layer: a direct implementation."""
    d, n = H.shape
    ranks, ratios = [], []
    for _ in range(n_layers):
        W = (2 * torch.rand(d, d, generator=generator) - 1) * math.sqrt(3)
        H = H + gamma * W @ H
        H = H / torch.sqrt(torch.diag(H @ H.T) / n)[:, None]
        eigenvalues = torch.linalg.svdvals(H) ** 2 / n
        ranks.append(int((eigenvalues >= 0.5).sum()))
        ratios.append(float(eigenvalues.sum() ** 2 / (eigenvalues**2).sum()))
    return H, ranks, ratios


def _race(width: int, methods: dict[tuple[int, str], Slice], repeats: int) -> list[ChainRow]:
    """A row for every method, ours first."""
    with one_thread():
        times = take_turns(methods, rounds=repeats)
    rates = {method: timing.result / timing.seconds for method, timing in times.items()}
    ours = next(iter(rates.values()))
    return [
        ChainRow(width, n_chains, method, rate, ours / rate, N_LAYERS * n_chains * len(GAMMAS) / rate / 3600)
        for (n_chains, method), rate in rates.items()
    ]
