"""Accuracy against the condition number of the features: what conditioning alone costs a network.

A ResNet-8 on CIFAR-10 and a fully connected network on Fashion-MNIST are trained from scratch with ID cond features
whose singular values have mean square one and follow a law at a chosen condition number (`papers/scaled_training.py`):
the semi-circle of random features, which hardly changes between large condition numbers, as only the smallest of its
values know them; and, to see conditioning without that limit, a geometric one. Each spectrum has its own rate, the one
of a common grid with the best accuracy on images put aside, and is also judged at the ordinary network's rate. Each run
and each try of a rate is kept as a record.

Theory: random_features:thm-3.1

What training at every condition number measured: every run, the rates tried, tables and goals.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from onlynorm.display import Curve, Figure, Panel
from onlynorm.evidence.arguments import listener, need_counts, need_names
from onlynorm.evidence.cache import Rows, Say, fields_of, note_of
from onlynorm.evidence.goals import Goal, Table, number
from onlynorm.evidence.papers.random_features.scaled_training import (
    GEOMETRIC,
    LAWS,
    SEMICIRCLE,
    SUBJECTS,
    images_of,
    spectrum_change,
    squared_spectrum,
    step_gap,
    train,
)
from onlynorm.evidence.spread import Spread
from onlynorm.evidence.validation import TRIAL_SEED
from onlynorm.storage import tensors_digest
from onlynorm.validate import need_integer, need_path

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


CONDITIONS: Mapping[str, Sequence[float]] = {
    SEMICIRCLE: (1.0, 3.0, 10.0, 30.0, 100.0, 1000.0, 1e6),
    GEOMETRIC: (10.0, 1000.0, 1e6),
}
"""Condition numbers of each law, ascending; the geometric law of condition 1 is the ordinary network too."""
RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
"""Peak rates that are tried, the same for every spectrum."""
N_SEEDS: Mapping[str, int] = {"cifar10": 3, "fashion_mnist": 10}
"""Networks of each kind unless told otherwise; the fully connected ones are ten times cheaper."""
KIND = "onlynorm-bench-scaled"
_QUICK_CONDITIONS: Mapping[str, Sequence[float]] = {SEMICIRCLE: (1.0, 1e6), GEOMETRIC: (1e6,)}


def bench_scaled(
    *,
    data: Sequence[str] | None = None,
    laws: Sequence[str] | None = None,
    n_seeds: int | None = None,
    sizes: ScaledSizes | None = None,
    quick: bool = False,
    out: Path | str = "onlynorm-out/bench",
    force: bool = False,
    progress: Say | None = None,
    on_row: Callable[[ScaledRun], None] | None = None,
) -> ScaledBench:
    """Trains every network with every spectrum; what an earlier run with the same sizes did is read again.

    `force` makes it anew. `quick` takes few spectra and two seeds, and trains too shortly for accuracies to mean much.
    """
    data = need_names("data", tuple(SUBJECTS) if data is None else data, SUBJECTS)
    laws = need_names("law of a spectrum", LAWS if laws is None else laws, LAWS)
    if n_seeds is not None:
        n_seeds = need_integer("n_seeds", n_seeds, low=1, high=TRIAL_SEED, cure="Rates are tried with seeds beyond.")
    say, on_row = listener("progress", progress), listener("on_row", on_row)
    folder = need_path("out", out) / "scaled"
    sizes = need_counts(sizes or (ScaledSizes.quick() if quick else ScaledSizes()), ScaledSizes)
    bench = ScaledBench(sizes=sizes)
    lab = _Lab(bench.sizes, Rows(folder, kind=KIND, module=__name__, force=force, say=say), say)
    conditions = {law: (_QUICK_CONDITIONS if quick else CONDITIONS)[law] for law in laws}
    for name in data:
        scales = [ORDINARY, *(Scale(law, condition) for law in laws for condition in conditions[law])]
        bench.laws += [law for one in laws for law in lab.laws(name, one, conditions[one])]
        bench.trials += [lab.trial(name, scale, rate) for scale in scales for rate in RATES]
        for scale, seed in itertools.product(scales, range(n_seeds or (2 if quick else N_SEEDS[name]))):
            for rate in dict.fromkeys((bench.rate(name, scale), bench.rate(name, ORDINARY))):
                bench.runs.append(lab.run(name, scale, seed, rate))
                if on_row is not None:
                    on_row(bench.runs[-1])
    bench.figure = str(draw_scaled(bench).write(folder, "accuracy")[0])
    return bench


def draw_scaled(bench: ScaledBench) -> Figure:
    """Accuracy over the condition number, at the learning rate of each spectrum and at that of the ordinary network."""
    curves = []
    for data in bench.data:
        usual = bench.rate(data, ORDINARY)
        for place, (law, at) in enumerate((law, at) for law in LAWS for at in (None, usual)):
            scales = [ORDINARY, *(s for s in bench.scales(data) if s.law == law and s.condition > 1.0)]
            found = [bench.test(data, scale, at=at) for scale in scales]
            if len(scales) > 1:
                # Side by side, or one interval would hide another.
                x = [scale.condition * 1.07**place for scale in scales]
                label = f"{law}, " + ("rates of its own" if at is None else "the ordinary rate")
                y, halves = [100 * one.mean for one in found], [100 * one.half for one in found]
                curves.append(Curve(label, x, y, "line+points", data, y_error=halves))
    panels = [Panel(data, data, "condition number", "test accuracy, %", x_log=True) for data in bench.data]
    return Figure(curves, panels)


class _Lab:
    """The sizes and the records that all runs share."""

    def __init__(self, sizes: ScaledSizes, rows: Rows, say: Say) -> None:
        self.sizes, self.rows, self.say = sizes, rows, say
        self.digests: dict[str, str] = {}

    def laws(self, data: str, law: str, conditions: Sequence[float]) -> list[ScaledLaw]:
        """What the spectra of a law do to the weights of the network."""
        made = []
        for before, condition in itertools.pairwise((1.0, *conditions)):
            self.say(f"{data}, {law} {condition:g}: one step beside the ordinary one")
            squares = squared_spectrum(data, condition=condition, law=law)
            made.append(ScaledLaw(
                data, Scale(law, condition), largest=float(squares.max()),
                slow=float((squares < 0.1).double().mean()), stuck=float((squares < 0.01).double().mean()),
                change=spectrum_change(data, before, second=condition, law=law),
                gap=step_gap(data, condition=condition, law=law, seed=TRIAL_SEED, n_images=self.sizes.batch_size),
            ))  # fmt: skip
        return made

    def trial(self, data: str, scale: Scale, rate: float) -> ScaledTrial:
        """One rate, judged by the images put aside."""
        found = self._find(data, scale, TRIAL_SEED, rate, n_epochs=self.sizes.n_trial_epochs, is_trial=True)
        return ScaledTrial(data, scale, rate, found["accuracy"], found["note"])

    def run(self, data: str, scale: Scale, seed: int, rate: float) -> ScaledRun:
        """One network, trained and judged by the test images."""
        found = self._find(data, scale, seed, rate, n_epochs=self.sizes.n_epochs, is_trial=False)
        return ScaledRun(data, scale, seed, rate, **found)

    def _find(self, data: str, scale: Scale, seed: int, rate: float, **how: Any) -> dict[str, Any]:
        spectrum = {"condition": None} if scale == ORDINARY else scale._asdict()
        settings = {"data": data, **spectrum, "rate": rate, "seed": seed, **how,
                    "n_train": self.sizes.n_train, "batch_size": self.sizes.batch_size}  # fmt: skip
        name = f"{data}, {scale}, rate {rate:g}, seed {seed}"
        self.say(name + (", a trial" if how["is_trial"] else ""))
        if data not in self.digests:
            self.digests[data] = tensors_digest(vars(images_of(data)))
        made_of, fields = (
            {**settings, "images": self.digests[data]},
            fields_of(ScaledRun, "data", "scale", "seed", "rate"),
        )
        return self.rows.find(name, made_of, lambda: train(**settings), fields=fields)
