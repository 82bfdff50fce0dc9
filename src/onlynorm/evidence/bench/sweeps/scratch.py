"""Norms trained from scratch beside the ordinary network, on real images with tuned learning rates.

Small VGGs with batch norms, SGD with momentum, the rate on a cosine, as many epochs for every way. The rate of a way is
the one with the best accuracy on training images put aside, the mean of several networks that are not judged: all ways
begin with the same four rates and go on to their neighbours while the best lies at an end. Then every seed is judged on
test images. Below the width bound features reach only a part of the weights: accuracy against their share is drawn.
Each run and each try of a rate is kept as a record.

The picture of training from scratch: accuracy against features per weight, on gamma and on the weights.

What training from scratch measured: every run, the rates tried, tables and goals.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from onlynorm.display import Curve, Figure, Panel
from onlynorm.evidence.arguments import listener, need_names
from onlynorm.evidence.cache import Rows, Say, fields_of, note_of
from onlynorm.evidence.goals import NARROW, Goal, Table, number
from onlynorm.evidence.papers.random_features.scratch_training import (
    RATES,
    Training,
    Way,
    best_rate,
    images,
    lesson,
    train,
    try_rates,
)
from onlynorm.evidence.spread import Spread
from onlynorm.evidence.validation import TRIAL_SEED
from onlynorm.storage import tensors_digest
from onlynorm.validate import need_integer, need_path

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


_NAMES: dict[str, Callable[[float], str]] = {
    "he_normal, steps on weights": followed,
    "he_normal, steps on gamma": plain,
}


def draw_shares(bench: ScratchBench) -> Figure:
    """Accuracy against features per weight, a panel for every data set."""
    places, curves = (*SHARES, BOUND, ABOVE), []
    for data in bench.data:
        ordinary = bench.accuracy(data, ORDINARY)
        level = [100 * ordinary.mean] * len(places)
        curves.append(
            Curve(ORDINARY, places, level, panel=data, style="law", y_error=[100 * ordinary.half] * len(places))
        )
        for label, name in _NAMES.items():
            found = [bench.accuracy(data, name(place)) for place in places]
            y, halves = [100 * one.mean for one in found], [100 * one.half for one in found]
            curves.append(Curve(label, places, y, "line+points", data, y_error=halves))
    return Figure(curves, [Panel(data, data, "features per weight", "test accuracy, %") for data in bench.data])


TRAININGS = {
    "fashion_mnist": Training(
        "fashion_mnist", ((8, 8), (16,)), image_size=14, n_train=8000, n_put_aside=10_000, n_test=10_000, epochs=8
    ),
    "cifar10": Training(
        "cifar10", ((8, 8), (16, 16)), image_size=16, n_train=8000, n_put_aside=5000, n_test=10_000, epochs=8
    ),
}
"""Networks, images and schedules by data set."""
QUICK = {
    name: replace(one, stages=((4,), (8,)), n_train=1024, n_put_aside=500, n_test=1000, epochs=2, batch_size=32)
    for name, one in TRAININGS.items()
}
KIND = "onlynorm-bench-scratch"


def bench_scratch(
    *,
    data: Sequence[str] | None = None,
    n_seeds: int = 5,
    n_trials: int = 3,
    epochs: int | None = None,
    trainings: dict[str, Training] | None = None,
    quick: bool = False,
    out: Path | str = "onlynorm-out/bench",
    force: bool = False,
    progress: Say | None = None,
    on_row: Callable[[ScratchRun], None] | None = None,
) -> ScratchBench:
    """Trains every way on each of these data sets; what an earlier run with the same sizes did is read again.

    `n_trials` networks choose the rate of a way, `n_seeds` others are judged.
    `force` makes it anew. The picture of accuracy against the share of features lies in the folder of the records.
    """
    n_seeds = need_integer("n_seeds", n_seeds, low=1, high=TRIAL_SEED, cure="Rates are tried with seeds beyond.")
    n_trials = need_integer("n_trials", n_trials, low=1, cure="Rates are tried on so many networks; take 3.")
    if epochs is not None:
        epochs = need_integer("epochs", epochs, low=1, cure="Leave it out for those of each data set.")
    known = trainings or (QUICK if quick else TRAININGS)
    data = need_names("data", tuple(known) if data is None else data, known)
    say, on_row = listener("progress", progress), listener("on_row", on_row)
    folder = need_path("out", out) / "scratch"
    rows = Rows(folder, kind=KIND, module=__name__, force=force, say=say)
    chosen = {name: replace(known[name], epochs=epochs or known[name].epochs) for name in data}
    bench = ScratchBench(trainings=chosen)
    for name, training in chosen.items():
        lab = _Lab(training, rows, say, range(TRIAL_SEED, TRIAL_SEED + n_trials))
        for way in WAYS:
            bench.trials += lab.trials(way)
            rate = best_rate(bench.tried(name, way))
            for seed in range(n_seeds):
                bench.runs.append(lab.run(way, seed, rate))
                if on_row is not None:
                    on_row(bench.runs[-1])
    bench.figure = str(draw_shares(bench).write(folder, "-".join(("shares", *bench.data)))[0])
    return bench


class _Lab:
    """One data set and the records of its runs."""

    def __init__(self, training: Training, rows: Rows, say: Say, trial_seeds: Sequence[int]) -> None:
        self.training, self.rows, self.say, self.trial_seeds = training, rows, say, trial_seeds
        split = images(training.data, training.image_size)
        lesson(training, 0)  # says now what would fail after the trials
        self.made_of = {"data": tensors_digest(vars(split)), "training": asdict(training)}

    def trials(self, way: str) -> list[ScratchTrial]:
        """Every rate that was tried for this way."""
        found: list[ScratchTrial] = []

        def attempt(rate: float) -> float:
            for seed in self.trial_seeds:
                row = self._find(way, seed, rate, f"trying rate {rate:g}, seed {seed}", is_trial=True)
                found.append(ScratchTrial(self.training.data, way, seed, rate, row["accuracy"], row["note"]))
            return statistics.fmean(trial.accuracy for trial in found if trial.rate == rate)

        try_rates(attempt)
        return found

    def run(self, way: str, seed: int, rate: float) -> ScratchRun:
        """One network, trained and judged."""
        row = self._find(way, seed, rate, f"seed {seed}", is_trial=False)
        return ScratchRun(self.training.data, way, seed, rate, **{**row, "losses": tuple(row["losses"])})

    def _find(self, way: str, seed: int, rate: float, what: str, *, is_trial: bool) -> dict[str, Any]:
        told = f"{self.training.data}, {way}: {what}"
        self.say(told)
        chosen = asdict(WAYS[way])

        def measure() -> dict[str, Any]:
            return train(
                way=chosen, training=asdict(self.training), rate=rate, seed=seed, is_trial=is_trial,
                step=lambda now, n_steps, _: self.say(f"{told}: step {now} of {n_steps}"),
            )  # fmt: skip

        made_of = {**self.made_of, "way": chosen, "rate": rate, "seed": seed, "is_trial": is_trial}
        fields = fields_of(ScratchRun, "data", "way", "seed", "rate")
        return self.rows.find(
            f"{self.training.data}, {way}, rate {rate:g}, seed {seed}", made_of, measure, fields=fields
        )
