"""What training after every repair measured: every run, the rates tried, tables and goals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from onlynorm.bench.goals import Goal, Table, number
from onlynorm.bench.kept import note_of
from onlynorm.report.spread import Spread

NOTHING, NORMS, OURS = "as it is", "batch norms put in", "repair, by default settings"
MAIN = (32, "relu")
"""The paper's network that does not learn."""
COLUMNS = (
    "depth", "activation", "repair", "training accuracy %", "test accuracy %", "rank first / middle / last",
    "gradient first / last", "rate", "seeds", "seconds to repair", "note",
)  # fmt: skip


@dataclass(frozen=True)
class RepairSizes:
    """How wide networks are, how long they are trained, and by how many images they are repaired and judged."""

    width: int = 128
    n_steps: int = 1000
    n_trial_steps: int = 250
    batch_size: int = 32
    n_repair: int = 256
    n_put_aside: int = 2000
    n_judged: int = 5000

    @classmethod
    def quick(cls) -> RepairSizes:
        """A short training."""
        return cls(n_steps=120, n_trial_steps=60, n_put_aside=500, n_judged=1000)


@dataclass(frozen=True)
class RepairRun:
    """One network repaired and trained. Ranks and the gradient ratio are those before training."""

    depth: int
    activation: str
    way: str
    seed: int
    rate: float
    train_accuracy: float
    test_accuracy: float
    loss: float
    ranks: tuple[float, float, float]
    ratio: float
    method: str
    seconds: float
    note: str = ""


@dataclass(frozen=True)
class RateTrial:
    """One rate tried for one way with a seed that is not judged: the accuracy on images put aside."""

    depth: int
    activation: str
    way: str
    rate: float
    accuracy: float
    note: str = ""


@dataclass
class RepairBench:
    """All runs, and the trials that chose their rates."""

    runs: list[RepairRun] = field(default_factory=list)
    trials: list[RateTrial] = field(default_factory=list)
    sizes: RepairSizes = field(default_factory=RepairSizes)

    @property
    def networks(self) -> list[tuple[int, str]]:
        """(depth, activation) of the networks that were trained."""
        return list(dict.fromkeys((run.depth, run.activation) for run in self.runs))

    def ways(self, network: tuple[int, str]) -> list[str]:
        """The ways in which a network was repaired."""
        return list(dict.fromkeys(run.way for run in self.runs if (run.depth, run.activation) == network))

    def find(self, network: tuple[int, str], way: str) -> list[RepairRun]:
        """The runs of one way of repairing one network."""
        return [run for run in self.runs if (run.depth, run.activation, run.way) == (*network, way)]

    def rate(self, network: tuple[int, str], way: str) -> float:
        """The rate that did best on the images put aside; the lower one of two that did equally well."""
        tried = [one for one in self.trials if (one.depth, one.activation, one.way) == (*network, way)]
        return max(tried, key=lambda one: (one.accuracy, -one.rate)).rate if tried else math.nan

    def lead(self, network: tuple[int, str], part: str) -> Spread:
        """By how much our accuracy on the part, "training" or "test", exceeds that with batch norms, seed by seed."""
        pairs = zip(self.find(network, OURS), self.find(network, NORMS), strict=True)
        return Spread.of([_accuracy(ours, part) - _accuracy(theirs, part) for ours, theirs in pairs])

    @property
    def goals(self) -> list[Goal]:
        """What the repair promises, as far as this run measured it."""
        return list(_goals(self))

    def tables(self) -> list[Table]:
        """Every way of repairing every network, and the rates that were tried."""
        rows = [self._cells(network, way) for network in self.networks for way in self.ways(network)]
        rates = sorted({trial.rate for trial in self.trials})
        tried = []
        for network in self.networks:
            for way in self.ways(network):
                found = {t.rate: t.accuracy for t in self.trials if (t.depth, t.activation, t.way) == (*network, way)}
                cells = (f"{100 * found[rate]:.1f}" if rate in found else "-" for rate in rates)
                tried.append((str(network[0]), network[1], way, *cells))
        heads = (
            "depth",
            "activation",
            "accuracy % on images put aside, at a rate of",
            *(f"{rate:g}" for rate in rates),
        )
        return [Table(COLUMNS, rows, 160), Table(heads, tried)]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        return {
            "sizes": asdict(self.sizes),
            "runs": [asdict(run) for run in self.runs],
            "trials": [asdict(trial) for trial in self.trials],
            "goals": [asdict(goal) for goal in self.goals],
        }

    def _cells(self, network: tuple[int, str], way: str) -> tuple[str, ...]:
        runs = self.find(network, way)
        methods = ", ".join(dict.fromkeys(run.method for run in runs))
        ranks = (statistics.fmean(run.ranks[place] for run in runs) for place in range(3))
        return (
            str(network[0]), network[1], f"{way}: {methods}" if way == OURS else way,
            Spread.of([run.train_accuracy for run in runs]).percent(),
            Spread.of([run.test_accuracy for run in runs]).percent(), " / ".join(f"{r:.3g}" for r in ranks),
            number(statistics.median(run.ratio for run in runs), ".2g"), number(runs[0].rate, "g"), str(len(runs)),
            f"{statistics.fmean(run.seconds for run in runs):.1f}", note_of([run.note for run in runs]),
        )  # fmt: skip


def _goals(bench: RepairBench) -> Iterator[Goal]:
    """The paper's network has to be ahead by more than chance, the others may not fall behind by more than chance."""
    for network in bench.networks:
        leads = {part: bench.lead(network, part) for part in ("training", "test")}
        if leads["test"].n < 2:
            continue
        sign = -1.0 if network == MAIN else 1.0
        aim = "is at least as good as batch norms" if network == MAIN else "is not worse than batch norms"
        yield Goal(
            f"depth {network[0]}, {network[1]}: after {bench.sizes.n_steps} steps the default repair {aim}",
            "ahead by " + ", ".join(f"{lead.percent()} points ({part})" for part, lead in leads.items()),
            all(lead.mean + sign * lead.half >= 0.0 for lead in leads.values()),
        )


def _accuracy(run: RepairRun, part: str) -> float:
    return run.train_accuracy if part == "training" else run.test_accuracy
