"""What training at every condition number measured: every run, the rates tried, tables and goals."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from onlynorm.bench.goals import Goal, Table, number
from onlynorm.bench.kept import note_of
from onlynorm.papers.scaled_training import SEMICIRCLE
from onlynorm.report.spread import Spread

ROUNDING = 1e-10
"""How far a move may be from s^2 times the ordinary one, in float64, after both went through a whole network."""
COLUMNS = (
    "data", "spectrum", "condition", "test accuracy %", "training accuracy %", "test below ordinary, points", "rate",
    "test accuracy % at the ordinary rate", "seeds", "note",
)  # fmt: skip
LAW_COLUMNS = (
    "data", "spectrum", "condition", "largest s²", "weights with s² < 0.1, %", "weights with s² < 0.01, %",
    "mean change of s² from the condition before", "test accuracy below it, points",
)  # fmt: skip


class Scale(NamedTuple):
    """The law of the singular values and their condition number."""

    law: str
    condition: float

    def __str__(self) -> str:
        return self.law if self == ORDINARY else f"{self.law} {self.condition:g}"


ORDINARY = Scale("ordinary network", 1.0)


@dataclass(frozen=True)
class ScaledSizes:
    """How many images are learned from and how long; `is_quick` leaves out the goals that need a whole training."""

    n_train: int = 10_000
    n_epochs: int = 6
    n_trial_epochs: int = 3
    batch_size: int = 64
    is_quick: bool = False

    @classmethod
    def quick(cls) -> ScaledSizes:
        """A short training."""
        return cls(n_train=1000, n_epochs=2, n_trial_epochs=1, is_quick=True)


@dataclass(frozen=True)
class ScaledRun:
    """One network trained and judged by the test images."""

    data: str
    scale: Scale
    seed: int
    rate: float
    train_accuracy: float
    accuracy: float
    loss: float
    note: str = ""


@dataclass(frozen=True)
class ScaledTrial:
    """One rate tried with a seed that is not judged: the accuracy on images put aside."""

    data: str
    scale: Scale
    rate: float
    accuracy: float
    note: str = ""


@dataclass(frozen=True)
class ScaledLaw:
    """A spectrum over all weights of a network: the largest s^2, and the shares of those below 0.1 and 0.01.

    `change` is the mean by which s^2 differs from the next smaller condition number, `gap` how far the moves of one
    step are from what the spectrum says.
    """

    data: str
    scale: Scale
    largest: float
    slow: float
    stuck: float
    change: float
    gap: float


@dataclass
class ScaledBench:
    """All runs, the trials that chose their rates, the spectra, and where the picture lies."""

    runs: list[ScaledRun] = field(default_factory=list)
    trials: list[ScaledTrial] = field(default_factory=list)
    laws: list[ScaledLaw] = field(default_factory=list)
    sizes: ScaledSizes = field(default_factory=ScaledSizes)
    figure: str = ""

    @property
    def data(self) -> list[str]:
        """The data sets that were learned."""
        return list(dict.fromkeys(run.data for run in self.runs))

    def scales(self, data: str) -> list[Scale]:
        """The spectra measured on this data, in the order in which they were."""
        return list(dict.fromkeys(run.scale for run in self.runs if run.data == data))

    def rate(self, data: str, scale: Scale) -> float:
        """The rate that did best on the images put aside; the lower one of two that did equally well."""
        tried = [trial for trial in self.trials if (trial.data, trial.scale) == (data, scale)]
        return max(tried, key=lambda trial: (trial.accuracy, -trial.rate)).rate if tried else math.nan

    def find(self, data: str, scale: Scale, *, at: float | None = None) -> list[ScaledRun]:
        """The runs at a rate, by default the best of this spectrum, in the order of their seeds."""
        rate = self.rate(data, scale) if at is None else at
        found = [run for run in self.runs if (run.data, run.scale, run.rate) == (data, scale, rate)]
        return sorted(found, key=lambda run: run.seed)

    def test(self, data: str, scale: Scale, *, at: float | None = None) -> Spread:
        """The test accuracy of a spectrum."""
        return Spread.of([run.accuracy for run in self.find(data, scale, at=at)])

    def fall(self, data: str, first: Scale, second: Scale) -> Spread:
        """By how much the test accuracy of the second is below that of the first, seed by seed."""
        pairs = zip(self.find(data, first), self.find(data, second), strict=True)
        return Spread.of([one.accuracy - other.accuracy for one, other in pairs])

    @property
    def goals(self) -> list[Goal]:
        """What is expected of scaled features, as far as this run measured it."""
        return [goal for data in self.data for goal in _goals(self, data)]

    def tables(self) -> list[Table]:
        """Accuracies, spectra, and the rates that were tried."""
        rows = [self._cells(data, scale) for data in self.data for scale in self.scales(data)]
        rates = sorted({trial.rate for trial in self.trials})
        tried = {(trial.data, trial.scale, trial.rate): f"{100 * trial.accuracy:.1f}" for trial in self.trials}
        tries = [
            (data, str(scale), *(tried.get((data, scale, rate), "-") for rate in rates))
            for data, scale in dict.fromkeys((trial.data, trial.scale) for trial in self.trials)
        ]
        heads = ("data", "accuracy % on images put aside, at a rate of", *(f"{rate:g}" for rate in rates))
        return [Table(COLUMNS, rows, 160), Table(LAW_COLUMNS, list(self._law_rows()), 140), Table(heads, tries)]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        parts: dict[str, Sequence[ScaledRun | ScaledTrial | ScaledLaw]] = {
            "runs": self.runs, "trials": self.trials, "laws": self.laws,
        }  # fmt: skip
        return {
            "sizes": asdict(self.sizes),
            **{name: [{**asdict(row), "scale": row.scale._asdict()} for row in rows] for name, rows in parts.items()},
            "goals": [asdict(goal) for goal in self.goals],
            "figure": self.figure,
        }

    def _cells(self, data: str, scale: Scale) -> tuple[str, ...]:
        runs = self.find(data, scale)
        return (
            data, scale.law, f"{scale.condition:g}", self.test(data, scale).percent(),
            Spread.of([run.train_accuracy for run in runs]).percent(),
            "-" if scale == ORDINARY else self.fall(data, ORDINARY, scale).percent(),
            number(self.rate(data, scale), "g"), self.test(data, scale, at=self.rate(data, ORDINARY)).percent(),
            str(len(runs)), note_of([run.note for run in runs]),
        )  # fmt: skip

    def _law_rows(self) -> Iterator[tuple[str, ...]]:
        last: dict[tuple[str, str], Scale] = {}
        for law in self.laws:
            above = last.get((law.data, law.scale.law), ORDINARY)
            yield (
                law.data, law.scale.law, f"{law.scale.condition:g}", f"{law.largest:.3g}", f"{100 * law.slow:.1f}",
                f"{100 * law.stuck:.2f}", number(law.change, ".2g"), self.fall(law.data, above, law.scale).percent(),
            )  # fmt: skip
            last[law.data, law.scale.law] = law.scale


def _goals(bench: ScaledBench, data: str) -> Iterator[Goal]:
    """Condition 1 is the ordinary network to the last bit; the largest one of a law is worse by more than chance."""
    usual = bench.rate(data, ORDINARY)
    ordinary, first = bench.find(data, ORDINARY), bench.find(data, Scale(SEMICIRCLE, 1.0), at=usual)
    if ordinary and first:
        pairs = zip(ordinary, first, strict=True)
        n_equal = sum(_numbers(one) == _numbers(other) for one, other in pairs)
        yield Goal(
            f"{data}: condition 1 trains exactly as the ordinary network",
            f"{n_equal} of {len(ordinary)} seeds agree to the last bit",
            n_equal == len(ordinary),
        )
    gaps = [law.gap for law in bench.laws if law.data == data]
    if gaps:
        aim = f"{data}: a step moves each weight by s² times the ordinary step, to {ROUNDING:g} in float64"
        yield Goal(aim, f"{max(gaps):.1e}", max(gaps) <= ROUNDING)
    if bench.sizes.is_quick or len(ordinary) < 2:
        return
    for scale in {scale.law: scale for scale in bench.scales(data) if scale.condition > 1.0}.values():
        best, last = bench.test(data, ORDINARY), bench.test(data, scale)
        yield Goal(
            f"{data}, {scale.law}: the interval of accuracy at condition {scale.condition:g} lies below that at 1",
            f"{last.percent()} % beside {best.percent()} %; {bench.fall(data, ORDINARY, scale).percent()} points lower "
            "seed by seed",
            last.mean + last.half < best.mean - best.half,
        )


def _numbers(run: ScaledRun) -> tuple[float, ...]:
    return run.seed, run.accuracy, run.train_accuracy, run.loss
