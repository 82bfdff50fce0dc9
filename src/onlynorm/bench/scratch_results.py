"""What training from scratch measured: every run, the rates tried, tables and goals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from onlynorm.bench.goals import NARROW, Goal, Table, number
from onlynorm.bench.kept import note_of
from onlynorm.papers.scratch_training import RATES, Training, Way, best_rate
from onlynorm.report.spread import Spread

SHARES = (0.25, 0.5, 0.75)
"""Features per weight below the width bound."""
BOUND, ABOVE = 1.0, 1.25
ORDINARY, ID_COND, ORTHO_COND, SPARSE = "ordinary network", "id_cond", "ortho_cond", "id_cond, density 0.2"


def plain(excess: float) -> str:
    """The name of the way that steps on the gammas of so many he_normal features per weight."""
    return f"he_normal {excess:g}"


def followed(excess: float) -> str:
    """The name of the way whose gammas, of so many he_normal features per weight, follow the weights."""
    return f"he_normal {excess:g}, follow_weights"


WAYS: dict[str, Way] = {
    ORDINARY: Way(), ID_COND: Way("id_cond"), ORTHO_COND: Way("ortho_cond"), SPARSE: Way("id_cond", density=0.2),
    **{plain(excess): Way("he_normal", excess) for excess in (*SHARES, BOUND, ABOVE)},
    **{followed(excess): Way("he_normal", excess, follow_weights=True) for excess in (*SHARES, BOUND, ABOVE)},
}  # fmt: skip
"""What is trained, by name."""
COLUMNS = (
    "data", "way", "trained numbers", "test accuracy %", "behind ordinary, points", "last loss", "rate", "seeds",
    "seconds", "note",
)  # fmt: skip


@dataclass(frozen=True)
class ScratchRun:
    """One network trained and judged on test images; `losses` are those of the epochs."""

    data: str
    way: str
    seed: int
    rate: float
    accuracy: float
    losses: tuple[float, ...]
    is_finite: bool
    n_trained: int
    seconds: float
    note: str = ""


@dataclass(frozen=True)
class ScratchTrial:
    """One rate tried for one way with a seed that is not judged: the accuracy on images put aside."""

    data: str
    way: str
    seed: int
    rate: float
    accuracy: float
    note: str = ""


@dataclass
class ScratchBench:
    """All runs, the trials that chose their rates, and where the picture lies."""

    runs: list[ScratchRun] = field(default_factory=list)
    trials: list[ScratchTrial] = field(default_factory=list)
    trainings: dict[str, Training] = field(default_factory=dict)
    figure: str = ""

    @property
    def data(self) -> list[str]:
        """The data sets that were trained on."""
        return list(dict.fromkeys(run.data for run in self.runs))

    def find(self, data: str, way: str) -> list[ScratchRun]:
        """The runs of one way on one data set, in the order of their seeds."""
        return sorted((r for r in self.runs if (r.data, r.way) == (data, way)), key=lambda run: run.seed)

    def accuracy(self, data: str, way: str) -> Spread:
        """The accuracy of one way over its seeds."""
        return Spread.of([run.accuracy for run in self.find(data, way)])

    def gap(self, data: str, way: str) -> Spread:
        """By how much a way lies behind the ordinary network, seed by seed."""
        ordinary = {run.seed: run.accuracy for run in self.find(data, ORDINARY)}
        return Spread.of([ordinary[r.seed] - r.accuracy for r in self.find(data, way) if r.seed in ordinary])

    def tried(self, data: str, way: str) -> dict[float, float]:
        """Accuracies on the images put aside, by rate: means of the seeds on which it was tried."""
        found: dict[float, list[float]] = {}
        for trial in self.trials:
            if (trial.data, trial.way) == (data, way):
                found.setdefault(trial.rate, []).append(trial.accuracy)
        return {rate: statistics.fmean(accuracies) for rate, accuracies in found.items()}

    @property
    def goals(self) -> list[Goal]:
        """What was promised, as far as this run measured it."""
        return [goal for data in self.data for goal in _goals(self, data)]

    def tables(self) -> list[Table]:
        """Every way on every data set, and the rates that were tried."""
        pairs = [(data, way) for data in self.data for way in WAYS if self.find(data, way)]
        rates = sorted({trial.rate for trial in self.trials})
        heads = ("data", "accuracy % on images put aside, at a rate of", *(f"{rate:g}" for rate in rates))
        tried = []
        for data, way in pairs:
            found = self.tried(data, way)
            tried.append((data, way, *(f"{100 * found[rate]:.1f}" if rate in found else "-" for rate in rates)))
        return [Table(COLUMNS, [self._cells(*pair) for pair in pairs], 160), Table(heads, tried, 120)]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        return {
            "trainings": {data: asdict(training) for data, training in self.trainings.items()},
            "runs": [asdict(run) for run in self.runs],
            "trials": [asdict(trial) for trial in self.trials],
            "figure": self.figure,
            "goals": [asdict(goal) for goal in self.goals],
        }

    def _cells(self, data: str, way: str) -> tuple[str, ...]:
        runs = self.find(data, way)
        losses = [run.losses[-1] if run.losses else math.nan for run in runs]
        behind = "-" if way == ORDINARY else self.gap(data, way).percent()
        return (
            data, way, f"{runs[0].n_trained:,}", self.accuracy(data, way).percent(), behind,
            number(statistics.fmean(losses), ".3f"), self._rate_cell(data, way, runs[0].rate), str(len(runs)),
            f"{statistics.fmean(run.seconds for run in runs):.1f}", note_of([run.note for run in runs]),
        )  # fmt: skip

    def _rate_cell(self, data: str, way: str, rate: float) -> str:
        tried = self.tried(data, way)
        is_edge = len(tried) > 0 and best_rate(tried) in (RATES[0], RATES[-1])
        return f"{rate:g}" + (", the end of the grid" if is_edge else "")


def _goals(bench: ScratchBench, data: str) -> Iterator[Goal]:
    pairs = list(zip(bench.find(data, ID_COND), bench.find(data, ORDINARY), strict=False))
    if pairs:
        n_equal = sum((a.seed, a.accuracy, a.losses) == (b.seed, b.accuracy, b.losses) for a, b in pairs)
        yield Goal(
            f"{data}: id_cond trains as the ordinary network does, to the last digit",
            f"accuracy and the losses of all epochs equal for {n_equal} of {len(pairs)} seeds", n_equal == len(pairs),
        )  # fmt: skip
    ordinary = bench.accuracy(data, ORDINARY)
    for way in (ORTHO_COND, followed(BOUND), followed(ABOVE)):
        gap = bench.gap(data, way)
        if gap.n > 1:
            yield Goal(
                f"{data}: {way} is as accurate as the ordinary network, within the interval of its seeds",
                f"behind by {100 * gap.mean:.2f} points, interval ± {100 * ordinary.half:.2f}",
                abs(gap.mean) <= ordinary.half <= NARROW,
            )
    for excess in (BOUND, ABOVE):
        gap = bench.gap(data, plain(excess))
        if gap.n > 1:
            yield Goal(
                f"{data}: the paper's finding that {plain(excess)} trails the ordinary network",
                f"behind by {gap.percent()} points: {_decided(gap)}", gap.mean - gap.half > 0.0,
            )  # fmt: skip


def _decided(gap: Spread) -> str:
    """What an interval says about a gap that should be positive."""
    if gap.mean - gap.half > 0.0:
        return "confirmed"
    return "refuted" if gap.mean + gap.half < 0.0 else "neither confirmed nor refuted"
