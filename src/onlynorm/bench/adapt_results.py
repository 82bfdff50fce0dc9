"""What adapting to corrupted images measured: every run, the rates tried, tables and goals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from onlynorm.bench.adapt_ways import HEAD, NORMS, NOTHING, STATISTICS, TRAINED, WAYS
from onlynorm.bench.goals import Goal, Table, number
from onlynorm.bench.kept import note_of
from onlynorm.report.spread import Spread

CLEAN = "clean"
LEAST_SEEDS = 3
COLUMNS = ("images", "way", "accuracy %", "recovered %", "kept", "rate", "seeds", "seconds", "note")


@dataclass(frozen=True)
class AdaptSizes:
    """Images to adapt with, to choose the rate with and to judge by, and how long to train."""

    n_train: int = 2000
    n_put_aside: int = 1000
    n_test: int = 5000
    epochs: int = 3
    batch_size: int = 128

    @classmethod
    def quick(cls) -> AdaptSizes:
        """Few of each."""
        return cls(n_train=128, n_put_aside=50, n_test=100, epochs=1, batch_size=16)


@dataclass(frozen=True)
class AdaptRun:
    """One network adapted in one way. `is_exact`: it came back from its file with the same outputs to the last bit."""

    images: str
    way: str
    seed: int
    rate: float
    accuracy: float
    file_size: int
    is_exact: bool
    seconds: float
    note: str = ""


@dataclass(frozen=True)
class Trial:
    """One rate tried for one way: the accuracy on images put aside, with one seed."""

    images: str
    way: str
    rate: float
    accuracy: float
    note: str = ""


@dataclass
class AdaptBench:
    """All runs, and the trials that chose their rates."""

    runs: list[AdaptRun] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    sizes: AdaptSizes = field(default_factory=AdaptSizes)

    @property
    def corruptions(self) -> list[str]:
        """The corruptions that were measured."""
        return list(dict.fromkeys(run.images for run in self.runs if run.images != CLEAN))

    def find(self, images: str, way: str) -> list[AdaptRun]:
        """The runs of one way on one kind of images."""
        return [run for run in self.runs if (run.images, run.way) == (images, way)]

    def recovered(self, images: str, way: str) -> Spread:
        """The share of the accuracy lost by the corruption that the way wins back, run by run."""
        (clean,), (corrupted,) = self.find(CLEAN, NOTHING), self.find(images, NOTHING)
        lost = clean.accuracy - corrupted.accuracy
        if lost <= 0.0:
            return Spread.of([])
        return Spread.of([(run.accuracy - corrupted.accuracy) / lost for run in self.find(images, way)])

    def tried(self, way: str, rate: float) -> float:
        """The mean accuracy of a rate over all corruptions, on the images put aside."""
        return statistics.fmean(trial.accuracy for trial in self.trials if (trial.way, trial.rate) == (way, rate))

    def rate(self, way: str) -> float:
        """The rate that was chosen for a way; NaN where nothing is trained."""
        rates = dict.fromkeys(trial.rate for trial in self.trials if trial.way == way)
        return max(rates, key=lambda rate: self.tried(way, rate)) if rates else math.nan

    @property
    def goals(self) -> list[Goal]:
        """What adapting norms promises, as far as this run measured it."""
        return list(_goals(self))

    def tables(self) -> list[Table]:
        """Every way on every corruption, and the rates that were tried."""
        rows = [_cells(self, images, way) for images in (CLEAN, *self.corruptions) for way in WAYS]
        ways = [way for way in TRAINED if any(trial.way == way for trial in self.trials)]
        rates = list(dict.fromkeys(trial.rate for trial in self.trials))
        tried = [
            (way, *(f"{100 * self.tried(way, rate):.1f}" for rate in rates), f"{self.rate(way):g}") for way in ways
        ]
        heads = ("accuracy % on images put aside, at a rate of", *(f"{rate:g}" for rate in rates), "chosen")
        return [Table(COLUMNS, [row for row in rows if row]), Table(heads, tried)]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        return {
            "sizes": asdict(self.sizes),
            "runs": [asdict(run) for run in self.runs],
            "trials": [asdict(trial) for trial in self.trials],
            "recovered": {
                images: {way: asdict(self.recovered(images, way)) for way in WAYS} for images in self.corruptions
            },
            "goals": [asdict(goal) for goal in self.goals],
        }


def _cells(bench: AdaptBench, images: str, way: str) -> tuple[str, ...]:
    runs = bench.find(images, way)
    if not runs:
        return ()
    recovered = "-" if images == CLEAN else bench.recovered(images, way).percent()
    return (
        images, way, Spread.of([run.accuracy for run in runs]).percent(), recovered, f"{runs[0].file_size:,} B",
        number(runs[0].rate, "g"), str(len(runs)) if way != NOTHING else "-",
        f"{statistics.fmean(run.seconds for run in runs):.1f}", note_of([run.note for run in runs]),
    )  # fmt: skip


def _goals(bench: AdaptBench) -> Iterator[Goal]:
    adapted = [len(bench.find(images, way)) for images in bench.corruptions for way in WAYS if way != NOTHING]
    if not adapted:
        return
    yield Goal(
        f"every way is measured on every corruption with {LEAST_SEEDS} seeds or more",
        f"{min(adapted)} or more in {len(adapted)} cells",
        min(adapted) >= LEAST_SEEDS,
    )
    n_exact = sum(run.is_exact for run in bench.runs)
    yield Goal(
        "every adapted network comes back from its file with the same outputs to the last bit",
        f"{n_exact} of {len(bench.runs)}",
        n_exact == len(bench.runs),
    )
    for other in (HEAD, STATISTICS):
        gains = {
            images: Spread.of([
                ours.accuracy - theirs.accuracy
                for ours, theirs in zip(bench.find(images, NORMS), bench.find(images, other), strict=True)
            ])
            for images in bench.corruptions
        }  # fmt: skip
        yield Goal(
            f"{NORMS} wins back more than {other}, on every corruption",
            ", ".join(f"{images}: {gain.percent()} points" for images, gain in gains.items()),
            all(gain.mean > 0.0 for gain in gains.values()),
        )
