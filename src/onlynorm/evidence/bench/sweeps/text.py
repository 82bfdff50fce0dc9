"""A text classifier by its norms alone: how much of full fine-tuning's accuracy, for how many numbers.

MiniLM with a linear head on the mean of its outputs learns to tell film reviews in favour from others, in five ways:
the head alone, norms and head, everything, and PEFT's LN tuning and LoRA with the head beside them. All are trained by
`fit` with the same schedule but for the learning rate, which each chooses on one grid by held-out texts with seed 0.
The seeds that are judged come after; each draws its own training texts, head and order, the same for all ways, and all
are judged by the same test texts. Intervals are Student's over the seeds. Finished runs are kept as records.
"""

from __future__ import annotations

import copy
import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from onlynorm.errors import TrainingError
from onlynorm.evidence.arguments import listener, need_counts
from onlynorm.evidence.bench.races.tune import keep
from onlynorm.evidence.bench.sweeps.reviews import (
    PaddedClassifier,
    Parts,
    Reader,
    Texts,
    divide,
    make_reader,
    read_reviews,
)
from onlynorm.evidence.bench.tuners import FULL, HEAD, NORMS, PEFT_LN, WAYS, PeftLN, Subject, Tuner
from onlynorm.evidence.cache import Rows, Say, fields_of, note_of
from onlynorm.evidence.goals import NARROW, Goal, Table, number
from onlynorm.evidence.spread import Spread
from onlynorm.evidence.timing import warm_up_training
from onlynorm.seeds import own_randomness
from onlynorm.storage import tensors_digest
from onlynorm.tuning import Schedule, accuracy, fit
from onlynorm.validate import need_integer, need_path

GRID = (1e-4, 7e-4, 5e-3, 3e-2)
"""Learning rates of AdamW, a factor of seven apart: full fine-tuning wants the low ones, few parameters the high."""
SMALL = 0.01
"""What an adapter may take of the bytes of full fine-tuning."""
KIND = "onlynorm-bench-text"
COLUMNS = ("way", "lr", "accuracy %", "95 % ±", "of the gain %", "trained", "kept", "drift", "seconds", "note")


@dataclass(frozen=True)
class TextSizes:
    """How many texts train, choose the learning rate and judge; their tokens, how often they are seen, the seeds."""

    train: int = 1024
    held_out: int = 500
    test: int = 2000
    tokens: int = 64
    epochs: int = 3
    batch_size: int = 32
    seeds: int = 3

    def __post_init__(self) -> None:
        need_integer("seeds", self.seeds, low=2, cure="An interval needs two; take 3 or more.")

    @classmethod
    def quick(cls) -> TextSizes:
        """Few of each."""
        return cls(train=64, held_out=32, test=64, tokens=16, epochs=1, batch_size=16, seeds=2)


@dataclass(frozen=True)
class TextRun:
    """One training. `accuracy` is on held-out texts for seed 0, which chooses the learning rate, else on test texts."""

    way: str
    lr: float
    seed: int
    accuracy: float
    n_trained: int
    file_size: int
    drift: float
    seconds: float
    note: str = ""


@dataclass(frozen=True)
class TextRow:
    """One way over all seeds. `share` is the part of full fine-tuning's gain over the head alone."""

    way: str
    lr: float
    accuracy: float
    interval: float
    share: float
    n_trained: int
    file_size: int
    drift: float
    seconds: float
    note: str = ""


@dataclass
class TextBench:
    """All judged runs of one benchmark; rows and goals follow from them.

    Accuracies of a network that `is_trained` has seen language before; those of a random one promise nothing.
    """

    is_trained: bool = True
    runs: list[TextRun] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)

    def accuracies(self, way: str) -> list[float]:
        """The test accuracy of every seed, in order."""
        return [run.accuracy for run in self.runs if run.way == way]

    @property
    def rows(self) -> list[TextRow]:
        """A row for each way."""
        return [_row(self, way) for way in dict.fromkeys(run.way for run in self.runs)]

    @property
    def goals(self) -> list[Goal]:
        """What norms promise beside the other ways, as far as this run measured it."""
        return _goals(self)

    def tables(self) -> list[Table]:
        """One table of all ways."""
        absent = [(way, *("-",) * (len(COLUMNS) - 2), why) for way, why in self.not_run.items()]
        return [Table(COLUMNS, [*(_cells(row) for row in self.rows), *absent], 120)]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        return {
            "rows": [asdict(row) for row in self.rows],
            "runs": [asdict(run) for run in self.runs],
            "goals": [asdict(goal) for goal in self.goals],
            "not_run": self.not_run,
        }


def bench_text(
    *,
    sizes: TextSizes | None = None,
    quick: bool = False,
    out: Path | str = "onlynorm-out/bench",
    force: bool = False,
    progress: Say | None = None,
    on_row: Callable[[TextRow], None] | None = None,
) -> TextBench:
    """Tunes MiniLM on film reviews in every way; runs that are on record are read again unless `force`.

    `quick` takes a tiny random BERT and few texts: it shows that all works, not what norms can do.
    """
    sizes = need_counts(sizes or (TextSizes.quick() if quick else TextSizes()), TextSizes)
    say, on_row, out = listener("progress", progress), listener("on_row", on_row), need_path("out", out)
    say("reading the texts")
    return measure_texts(
        read_reviews(), make_reader(quick=quick), sizes=sizes, out=out, force=force, say=say, on_row=on_row
    )


def measure_texts(
    texts: Texts, reader: Reader, *, sizes: TextSizes, out: Path, force: bool = False, say: Say = lambda _: None,
    on_row: Callable[[TextRow], None] | None = None,
) -> TextBench:  # fmt: skip
    """Every way on these texts; `on_row` is told of each as it is done."""
    parts = divide(texts, reader, n_held_out=sizes.held_out, n_test=sizes.test, n_tokens=sizes.tokens)
    made_of: dict[str, Any] = {
        "sizes": asdict(sizes), "body": tensors_digest(reader.body.state_dict()),
        "data": tensors_digest({f"{name}-{i}": t for name, pair in vars(parts).items() for i, t in enumerate(pair)}),
    }  # fmt: skip
    del made_of["sizes"]["seeds"]  # more seeds go on from fewer
    bench, records = TextBench(reader.is_trained), Rows(out, kind=KIND, module=__name__, force=force, say=say)
    for kind in WAYS:
        if issubclass(kind, PeftLN) and importlib.util.find_spec("peft") is None:
            bench.not_run[kind.name] = "not run: peft is not installed (`pip install onlynorm[bench]`)"
            continue

        def run(lr: float, seed: int, kind: type[Tuner] = kind) -> TextRun:
            def measure() -> dict[str, Any]:
                made = train_once(kind, reader, parts=parts, sizes=sizes, lr=lr, seed=seed, say=say)
                return {name: value for name, value in asdict(made).items() if name != "note"}

            key = made_of | {"way": kind.name, "lr": lr, "seed": seed}
            return TextRun(**records.find(f"text {kind.name} {lr:g} {seed}", key, measure, fields=fields_of(TextRun)))

        lr = choose_lr([run(lr, 0) for lr in GRID])
        bench.runs += [run(lr, seed) for seed in range(1, sizes.seeds + 1)]
        if on_row is not None:
            on_row(bench.rows[-1])
    return bench


def choose_lr(runs: Sequence[TextRun]) -> float:
    """The learning rate with the best accuracy, the smaller of two that are equally good."""
    finite = [run for run in runs if not math.isnan(run.accuracy)]
    if not finite:
        raise TrainingError(
            f"a choice of the learning rate needs a run with a finite loss; got none for {runs[0].way}. Lower the grid."
        )
    return max(finite, key=lambda run: (run.accuracy, -run.lr)).lr


def train_once(
    kind: type[Tuner], reader: Reader, *, parts: Parts, sizes: TextSizes, lr: float, seed: int, say: Say
) -> TextRun:
    """One way, trained from the start with one seed."""
    train, judged = parts.draw(sizes.train, seed=seed), parts.held_out if seed == 0 else parts.test
    with own_randomness(seed):
        base = PaddedClassifier(copy.deepcopy(reader.body), reader.n_features).eval()
    tuner = kind(Subject(reader.name, base, *train, judged[0][:16], "head", ("LayerNorm",), ("query", "value")))
    schedule = Schedule(
        epochs=sizes.epochs, batch_size=sizes.batch_size, optimizer="adamw", lr=lr, warmup=0.1, clip=1.0, seed=seed
    )
    title = f"{kind.name}, lr {lr:g}, seed {seed}"
    warm_up_training()
    try:
        fitted = fit(
            tuner.network, train, schedule=schedule, accelerator="cpu",
            step=lambda step, n_steps, loss: say(f"{title}: step {step} of {n_steps}, loss {loss:.3f}"),
        )  # fmt: skip
    except TrainingError:  # too high a learning rate: the choice falls on another
        return TextRun(kind.name, lr, seed, math.nan, 0, 0, math.nan, math.nan)
    n_trained = sum(p.numel() for p in tuner.parameters())
    say(f"{title}: judging")
    right = accuracy(tuner.network, judged, batch_size=100)
    size, drift = keep(tuner)
    return TextRun(kind.name, lr, seed, right, n_trained, size, drift, fitted.seconds)


def _row(bench: TextBench, way: str) -> TextRow:
    runs = [run for run in bench.runs if run.way == way]
    spread, low, high = (Spread.of(bench.accuracies(name)) for name in (way, HEAD, FULL))
    gain = high.mean - low.mean
    notes = ["lr at the edge of the grid" if runs[0].lr in (GRID[0], GRID[-1]) else "", note_of([r.note for r in runs])]
    return TextRow(
        way, runs[0].lr, spread.mean, spread.half, (spread.mean - low.mean) / gain if gain > 0.0 else math.nan,
        runs[0].n_trained, max(run.file_size for run in runs), max(run.drift for run in runs),
        Spread.of([run.seconds for run in runs]).mean, ", ".join(note for note in notes if note),
    )  # fmt: skip


def _cells(row: TextRow) -> tuple[str, ...]:
    return (
        row.way, f"{row.lr:g}", f"{100 * row.accuracy:.2f}", f"{100 * row.interval:.2f}",
        number(100 * row.share, ".0f"), f"{row.n_trained:,}", f"{row.file_size:,} B", f"{row.drift:.1e}",
        f"{row.seconds:.0f}", row.note,
    )  # fmt: skip


def _goals(bench: TextBench) -> list[Goal]:
    """Differences are taken seed by seed: both ways had the same training texts, head and order."""
    rows = {row.way: row for row in bench.rows}
    if NORMS not in rows:
        return []
    ours = rows[NORMS]
    goals = [Goal("a reloaded classifier gives the same outputs to the last bit", f"drift {ours.drift:.1e}",
                  ours.drift == 0.0)]  # fmt: skip

    def ahead(way: str) -> Spread:
        gaps = zip(bench.accuracies(NORMS), bench.accuracies(way), strict=True)
        return Spread.of([100 * (ours - other) for ours, other in gaps])

    if HEAD in rows and bench.is_trained:
        gap = ahead(HEAD)
        goals.append(Goal("norms and head are more accurate than the head alone, beyond the interval",
                          f"{gap.mean:+.2f} ± {gap.half:.2f} points", gap.mean - gap.half > 0.0))  # fmt: skip
    if PEFT_LN in rows and bench.is_trained:
        gap = ahead(PEFT_LN)
        is_equal = -gap.mean <= gap.half <= 100 * NARROW
        goals.append(Goal("they are no less accurate than PEFT's LN tuning, within the interval",
                          f"{gap.mean:+.2f} ± {gap.half:.2f} points", is_equal))  # fmt: skip
    if FULL in rows:
        part = ours.file_size / rows[FULL].file_size
        goals.append(Goal(f"the adapter takes under {100 * SMALL:.0f} % of the bytes of full fine-tuning",
                          f"{ours.file_size:,} B, {100 * part:.3f} %", part < SMALL))  # fmt: skip
    return goals
