"""What training frozen random networks measured: every run, tables, goals, and the histogram of the scales."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from onlynorm.bench.goals import Goal, Table
from onlynorm.bench.kept import note_of
from onlynorm.report.figure import COLOURS, write_pictures
from onlynorm.report.spread import Spread

NORMS, NORMS_FROM_ONES, HEAD, FULL = "norms only", "norms only, from ones", "head only", "everything"
WAYS = (NORMS, NORMS_FROM_ONES, HEAD, FULL)
SMALL = (0.01, 0.05)
"""Magnitudes below which a scale counts as close to zero."""
LEAST_SEEDS = 3
COLUMNS = (
    "depth", "width", "trained", "numbers", "of", "accuracy %", *(f"below {size:g}, %" for size in SMALL), "seeds",
    "seconds", "note",
)  # fmt: skip
EDGES = np.linspace(-1.0, 2.0, 61)
"""Bins of the histogram; scales beyond the ends are counted in the outermost ones."""


@dataclass(frozen=True)
class FrozenSizes:
    """Images, averaged down to `side`, and the schedule: SGD with momentum, its rate falling on a cosine.

    Norms alone take the higher of the two rates.
    """

    n_train: int = 8000
    n_test: int = 5000
    side: int = 16
    epochs: int = 8
    batch_size: int = 32
    rate: float = 0.1
    norm_rate: float = 0.5
    weight_decay: float = 1e-4

    @classmethod
    def quick(cls) -> FrozenSizes:
        """Few of each."""
        return cls(n_train=256, n_test=100, epochs=1, batch_size=64, side=8)


@dataclass(frozen=True)
class FrozenRun:
    """One network trained in one way. `is_frozen`: what was not to be trained is as it was, to the last bit."""

    depth: int
    width: int
    way: str
    seed: int
    accuracy: float
    n_trained: int
    n_total: int
    gammas: Sequence[float]
    is_frozen: bool
    seconds: float
    note: str = ""


def share_below(runs: Sequence[FrozenRun], size: float) -> Spread:
    """The share of scales below this magnitude, run by run."""
    return Spread.of([float(np.mean(np.abs(run.gammas) < size)) for run in runs])


@dataclass
class FrozenBench:
    """All runs, and where the histogram of their scales lies."""

    runs: list[FrozenRun] = field(default_factory=list)
    sizes: FrozenSizes = field(default_factory=FrozenSizes)
    figure: str = ""

    @property
    def networks(self) -> list[tuple[int, int]]:
        """(depth, width) of the networks, in the order in which they were measured."""
        return list(dict.fromkeys((run.depth, run.width) for run in self.runs))

    def find(self, network: tuple[int, int] | None, way: str) -> list[FrozenRun]:
        """The runs of one way on one network, or on all of them."""
        return [run for run in self.runs if run.way == way and network in (None, (run.depth, run.width))]

    @property
    def goals(self) -> list[Goal]:
        """What was promised, as far as this run measured it."""
        return list(_goals(self))

    def tables(self) -> list[Table]:
        """Every network in every way, and what became of the scales over all networks."""
        rows = [_cells(runs) for net in self.networks for way in WAYS if (runs := self.find(net, way))]
        zeros = [
            (way, *(share_below(runs, size).percent() for size in SMALL), f"{sum(len(r.gammas) for r in runs):,}")
            for way in WAYS
            if way != HEAD and (runs := self.find(None, way))
        ]
        heads = ("scales of all networks", *(f"below {size:g}, %" for size in SMALL), "scales")
        start = [("uniform, before training", *(f"{100 * size:.1f}" for size in SMALL), "-")]
        return [Table(COLUMNS, rows), Table(heads, [*zeros, *start])]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        return {
            "sizes": asdict(self.sizes),
            "runs": [_plain(run) for run in self.runs],
            "figure": self.figure,
            "goals": [asdict(goal) for goal in self.goals],
        }


def _plain(run: FrozenRun) -> dict[str, Any]:
    """The run with counts in place of its scales, which are in its record."""
    facts = {name: value for name, value in asdict(run).items() if name != "gammas"}
    return facts | {f"below {size:g}": share_below([run], size).mean for size in SMALL}


def _cells(runs: list[FrozenRun]) -> tuple[str, ...]:
    first = runs[0]
    shares = ["-" if first.way == HEAD else share_below(runs, size).percent() for size in SMALL]
    return (
        str(first.depth), str(first.width), first.way, f"{first.n_trained:,}", f"{first.n_total:,}",
        Spread.of([run.accuracy for run in runs]).percent(), *shares, str(len(runs)),
        f"{statistics.fmean(run.seconds for run in runs):.0f}", note_of([run.note for run in runs]),
    )  # fmt: skip


def _goals(bench: FrozenBench) -> Iterator[Goal]:
    if not bench.runs:
        return
    fewest = min(len(runs) for net in bench.networks for way in WAYS if (runs := bench.find(net, way)))
    yield Goal(
        f"every way is measured on every network with {LEAST_SEEDS} seeds or more", f"{fewest} or more",
        fewest >= LEAST_SEEDS,
    )  # fmt: skip
    n_frozen = sum(run.is_frozen for run in bench.runs)
    yield Goal(
        "what is frozen is as it was drawn, to the last bit", f"{n_frozen} of {len(bench.runs)} runs",
        n_frozen == len(bench.runs),
    )  # fmt: skip
    for what, place in (("width", 1), ("depth", 0)):
        sweep = _sweep(bench.networks, place)
        if len(sweep) < 2:
            continue
        found = [Spread.of([run.accuracy for run in bench.find(net, NORMS)]) for net in (sweep[0], sweep[-1])]
        yield Goal(
            f"{NORMS}: accuracy grows with the {what}, {sweep[0][place]} to {sweep[-1][place]}",
            f"{found[0].percent()} % to {found[1].percent()} %",
            found[1].mean > found[0].mean,
        )


def _sweep(networks: Sequence[tuple[int, int]], place: int) -> list[tuple[int, int]]:
    """The longest series of networks that differ only at this place, in rising order."""
    series: dict[int, list[tuple[int, int]]] = {}
    for network in networks:
        series.setdefault(network[1 - place], []).append(network)
    longest = max(series.values(), key=len)
    return sorted(longest)


def write_histogram(bench: FrozenBench, folder: Path) -> Path:
    """The path of the picture of all scales after training, as PNG; the same as SVG lies beside it."""
    figure = Figure(figsize=(13.0, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    wider, deeper, ways = figure.subplots(1, 3)
    for axes, place, what in ((wider, 1, "width"), (deeper, 0, "depth")):
        for number, net in enumerate(_sweep(bench.networks, place)):
            _draw(axes, bench.find(net, NORMS), f"{what} {net[place]}", number)
        axes.set_title(f"{NORMS}, by {what}")
    for number, way in enumerate((NORMS, NORMS_FROM_ONES, FULL)):
        _draw(ways, bench.find(None, way), way, number)
    ways.set_title("all networks")
    for axes in (wider, deeper, ways):
        axes.set(xlabel="scale after training; the last bins hold all beyond", ylabel="share of scales")
        axes.legend(frameon=False, fontsize=8)
    return write_pictures(figure, folder, "gammas")[0]


def _draw(axes: Axes, runs: Sequence[FrozenRun], label: str, number: int) -> None:
    if not runs:
        return
    values = np.concatenate([np.asarray(run.gammas) for run in runs])
    heights, _ = np.histogram(np.clip(values, EDGES[0], EDGES[-1]), EDGES)
    axes.stairs(heights / len(values), EDGES, label=label, color=COLOURS[number])
