"""A trained ResNet-20 adapted to corrupted images in six ways: what each wins back, and for how many bytes.

Seeds change which training images are drawn, their noise and their order; the test images and their noise stay. Ways
that train have one learning rate each, the one of a grid with the best mean accuracy over all corruptions on images
put aside for this. The interval is over seeds: what another choice of test images would change is not in it.
Each run and each try of a rate is kept as a record, so a killed benchmark goes on where it stopped.

What adapting to corrupted images measured: every run, the rates tried, tables and goals.

The ways of adapting a trained image network to other images: what each trains, keeps in a file, and loads again.

Each keeps no more than what it changed: statistics only the running statistics, head only the last layer, norms only
scales, shifts and statistics, full training the whole network.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from onlynorm.data import CIFAR_MEAN, CIFAR_STD, CORRUPTIONS, Split, cifar10, corrupt
from onlynorm.errors import TrainingError
from onlynorm.evidence.arguments import listener, need_counts, need_names
from onlynorm.evidence.bench.races.reconstruct import make_target
from onlynorm.evidence.cache import Rows, Say, fields_of, note_of
from onlynorm.evidence.goals import Goal, Table, number
from onlynorm.evidence.spread import Spread
from onlynorm.evidence.timing import warm_up_training
from onlynorm.seeds import seeded
from onlynorm.storage import tensors_digest
from onlynorm.tuning import Schedule, accuracy, fit, load_adapter, only_norms, save_adapter, take_adapter, write_adapter
from onlynorm.validate import need_integer, need_number, need_path

NOTHING, STATISTICS, HEAD = "nothing", "statistics only", "head only"
NORMS, BOTH, FULL = "norms only", "norms and head", "full training"
TRAINED = (HEAD, NORMS, BOTH, FULL)
"""Ways with a learning rate."""
WAYS = (NOTHING, STATISTICS, *TRAINED)
_LAST = "linear"
_FILE = "kept.safetensors"
_MOVED = ("running_mean", "running_var", "num_batches_tracked")
Step = Callable[[int, int, float], None]


def adapt(
    base: nn.Module, way: str, *, data: tuple[Tensor, Tensor], schedule: Schedule, step: Step | None = None
) -> nn.Module:
    """A copy of the base adapted in this way to images and labels, of which statistics only sees the images."""
    network = copy.deepcopy(base)
    if way == STATISTICS:
        handle = only_norms(network, statistics="recalibrate")
        handle.recalibrate(data[0].split(schedule.batch_size))
    elif way != NOTHING:
        train_only(network, way)
        fit(network, data, schedule=schedule, step=step)
    return network.eval()


def train_only(network: nn.Module, way: str) -> None:
    """Lets gradients reach what this way trains. Statistics stay with the head alone, else they follow the batches."""
    if way == FULL:
        network.requires_grad_(True)
    elif way == HEAD:
        only_norms(network, also=(_LAST,), which=lambda _: False, statistics="freeze")
    else:
        only_norms(network, also=(_LAST,) if way == BOTH else (), statistics="track")


def keep(network: nn.Module, way: str, *, folder: Path) -> int:
    """Bytes of the file in which what was learned is kept, none for nothing."""
    path = folder / _FILE
    if way == NOTHING:
        return 0
    if way == FULL:
        save_file(network.state_dict(), path)
    elif way == STATISTICS:
        adapter = take_adapter(network)
        moved = {name: value for name, value in adapter.tensors.items() if name.rpartition(".")[2] in _MOVED}
        others = tuple(sorted(adapter.tensors.keys() - moved.keys()))
        write_adapter(dataclasses.replace(adapter, tensors=moved, free=others), path)
    else:
        save_adapter(network, path)
    return path.stat().st_size


def reload(base: nn.Module, way: str, *, folder: Path) -> nn.Module:
    """The adapted network again, from a copy of the base and the file."""
    network = copy.deepcopy(base)
    if way == FULL:
        network.load_state_dict(load_file(folder / _FILE))
    elif way != NOTHING:
        load_adapter(network, folder / _FILE)
    return network.eval()


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


RATES = (0.003, 0.01, 0.03, 0.1, 0.3)
"""Learning rates that are tried, the same for every way."""
KIND = "onlynorm-bench-adapt"
_PUT_ASIDE = 2**32
"""Seed of the images put aside and of the runs that try rates: not one a user would ask for."""
_PROBE = 100


def bench_adapt(
    *,
    corruptions: Sequence[str] = CORRUPTIONS,
    n_seeds: int = 5,
    severity: float = 3.0,
    sizes: AdaptSizes | None = None,
    quick: bool = False,
    out: Path | str = "onlynorm-out/bench",
    force: bool = False,
    progress: Say | None = None,
    on_row: Callable[[AdaptRun], None] | None = None,
) -> AdaptBench:
    """Adapts the network in every way to every corruption; what an earlier run with the same sizes did is read again.

    `force` makes it anew. `quick` takes few images and a short training: it shows that all works, in a few minutes.
    """
    corruptions = need_names("corruption", corruptions, CORRUPTIONS)
    n_seeds = need_integer("n_seeds", n_seeds, low=1, high=_PUT_ASIDE, cure="Take 5.")
    severity = need_number("severity", severity, low=0.0, cure="Take 1 for mild and 5 for strong corruptions.")
    say, on_row = listener("progress", progress), listener("on_row", on_row)
    sizes = need_counts(sizes or (AdaptSizes.quick() if quick else AdaptSizes()), AdaptSizes)
    rows = Rows(need_path("out", out) / "adapt", kind=KIND, module=__name__, force=force, say=say)
    bench, lab = AdaptBench(sizes=sizes), _Lab(make_base(), cifar10(), sizes, severity, rows)
    tries = [(images, way, rate) for images in corruptions for way in TRAINED for rate in RATES]
    for place, (images, way, rate) in enumerate(tries):
        say(f"rate {place + 1} of {len(tries)}: {images}, {way}, {rate:g}")
        bench.trials.append(lab.trial(images, way, rate))
    plan = [(CLEAN, NOTHING, 0), *((images, NOTHING, 0) for images in corruptions)]
    plan += [(images, way, seed) for seed in range(n_seeds) for images in corruptions for way in WAYS[1:]]
    for place, (images, way, seed) in enumerate(plan):
        say(f"run {place + 1} of {len(plan)}: {images}, {way}, seed {seed}")
        bench.runs.append(lab.run(images, way, seed, bench.rate(way)))
        if on_row is not None:
            on_row(bench.runs[-1])
    return bench


def make_base() -> nn.Module:
    """The trained ResNet-20 of the data folder."""
    return make_target(quick=False)


class _Lab:
    """The network, the images and the records that all runs share."""

    def __init__(self, base: nn.Module, split: Split, sizes: AdaptSizes, severity: float, rows: Rows) -> None:
        self.base, self.split, self.sizes, self.severity, self.rows = base, split, sizes, severity, rows
        order = torch.randperm(len(split.train_inputs), generator=seeded(_PUT_ASIDE))
        self.put_aside, self.pool = order[: sizes.n_put_aside], order[sizes.n_put_aside :]
        self.made_of = {
            "base": tensors_digest(base.state_dict()), "data": tensors_digest(vars(split)), "sizes": asdict(sizes),
            "severity": severity,
        }  # fmt: skip

    def trial(self, images: str, way: str, rate: float) -> Trial:
        """One rate, tried on the images put aside; a training that diverges has no accuracy."""
        name = f"{images}, {way}, rate {rate:g}"

        def measure() -> dict[str, Any]:
            try:
                network = self._adapted(images, way, _PUT_ASIDE, rate)
            except TrainingError:
                return {"accuracy": 0.0}
            judged = self._corrupted(self.split.train_inputs[self.put_aside], images, seed=1)
            return {"accuracy": accuracy(network, (judged, self.split.train_labels[self.put_aside]))}

        made_of = {**self.made_of, "images": images, "way": way, "rate": rate}
        fields = fields_of(Trial, "images", "way", "rate")
        return Trial(images, way, rate, **self.rows.find(name, made_of, measure, fields=fields))

    def run(self, images: str, way: str, seed: int, rate: float) -> AdaptRun:
        """One network adapted, judged, kept in a file and loaded again."""

        def measure() -> dict[str, Any]:
            warm_up_training()
            start = time.perf_counter()
            network = self._adapted(images, way, seed, rate)
            seconds = time.perf_counter() - start
            n = self.sizes.n_test
            judged = self._corrupted(self.split.test_inputs[:n], images, seed=0)
            with tempfile.TemporaryDirectory() as folder:
                size = keep(network, way, folder=Path(folder))
                again = reload(self.base, way, folder=Path(folder))
            return {
                "accuracy": accuracy(again, (judged, self.split.test_labels[:n])), "file_size": size,
                "is_exact": torch.equal(_outputs(network, judged), _outputs(again, judged)), "seconds": seconds,
            }  # fmt: skip

        made_of = {**self.made_of, "images": images, "way": way, "rate": rate, "seed": seed}
        fields = fields_of(AdaptRun, "images", "way", "seed", "rate")
        row = self.rows.find(f"{images}, {way}, seed {seed}", made_of, measure, fields=fields)
        return AdaptRun(images, way, seed, rate, **row)

    def _adapted(self, images: str, way: str, seed: int, rate: float) -> nn.Module:
        """The base, adapted to images drawn by the seed."""
        order = torch.randperm(len(self.pool), generator=seeded(seed))
        chosen = self.pool[order[: self.sizes.n_train]]
        inputs = self._corrupted(self.split.train_inputs[chosen], images, seed=seed + 2)
        schedule = Schedule(
            epochs=self.sizes.epochs, batch_size=self.sizes.batch_size, lr=0.0 if math.isnan(rate) else rate, seed=seed
        )
        return adapt(self.base, way, data=(inputs, self.split.train_labels[chosen]), schedule=schedule)

    def _corrupted(self, inputs: Tensor, images: str, *, seed: int) -> Tensor:
        if images == CLEAN:
            return inputs
        return corrupt(inputs, images, severity=self.severity, seed=seed, mean=CIFAR_MEAN, std=CIFAR_STD)


@torch.no_grad()
def _outputs(network: nn.Module, inputs: Tensor) -> Tensor:
    device = next(network.parameters()).device
    return network.eval()(inputs[:_PROBE].to(device)).cpu()
