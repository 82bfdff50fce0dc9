"""Comparison of tuning methods: time and memory of a step, trained parameters, file size, and outputs after loading.

All methods run in one process on the same network and batch. Steps alternate between methods, and the best one of each
counts. Memory is the peak of the first two steps, with gradients and the state of the optimizer, without the network.
The drift is the largest difference between the outputs of the trained network and of one loaded from the file, as a
fraction of the largest output: training changes the statistics of batch norms, which not every file has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from onlynorm.errors import MissingDataError
from onlynorm.evidence.bench.tasks import TuningTask, subjects
from onlynorm.evidence.bench.tuners import (
    FULL,
    HALF,
    NOT_INSTALLED,
    OURS,
    PEFT_LN,
    TUNERS,
    Full,
    OursInHalf,
    Tuner,
    installed,
    save_and_reload,
)
from onlynorm.evidence.harness import Goal, Session, Sizes, setting
from onlynorm.evidence.race import Race, RaceResult
from onlynorm.evidence.timing import race as take_turns
from onlynorm.memory import MemoryMeter, readable, release_free_memory
from onlynorm.modules import find_norms
from onlynorm.seeds import own_randomness

NOISE = 1.05
"""Ratio up to which a step counts as no slower: best times of equal steps differ by a few percent."""


@dataclass(frozen=True)
class TuneSizes(Sizes):
    """Repeats; a quick run has tiny random networks."""

    repeats: int = setting(20, help="Number of repeats; the best one counts.")


@dataclass(frozen=True)
class TuneRow:
    """One method of tuning one network; `ratio` is its time divided by ours (above one: ours is faster).

    `has_statistics` is whether the network has running statistics.
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
    "tune", "A step of norm-only tuning against full tuning, head only and PEFT.", TuneSizes,
    columns={"rows": {
        "model": "model", "method": "method", "step (ms)": "seconds*1e3:,.1f",
        "times ours": "ratio:.2f", "extra memory": "memory:bytes",
        "trained": lambda row: f"{row.n_trained:,}" if row.is_run else "-",
        "file": lambda row: f"{row.file_size:,} B" if row.is_run else "-", "drift": "drift:.1e", "note": "note",
    }},
)  # fmt: skip


@race.measure
def measure(sizes: TuneSizes, session: Session) -> Iterator[tuple[str, TuneRow | list[TuneRow]]]:
    """Tunes every network by every method; a network that is not available gets a row with the reason."""
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
    """Goals for tuning norms on each measured network."""
    for model in dict.fromkeys(row.model for row in result.rows if row.is_run):
        ours, half, theirs, full = (result.find(model=model, method=m) for m in (OURS, HALF, PEFT_LN, FULL))
        aim = f"{model}: a reloaded network has bit-identical outputs"
        yield Goal(aim, f"drift {ours.drift:.1e}", ours.drift == 0.0)
        yield Goal(
            f"{model}: a step needs at most the time and the memory of full fine-tuning",
            f"{ours.seconds / full.seconds:.2f} of the time, {ours.memory / max(full.memory, 1):.2f} of the memory",
            ours.seconds <= NOISE * full.seconds and ours.memory <= full.memory,
        )
        if theirs is None or not theirs.is_run:
            continue
        yield Goal(
            f"{model}: a step needs at most the time of PEFT's LN tuning",
            f"{ours.seconds / theirs.seconds:.2f} of the time (up to {NOISE} counts as noise)",
            ours.seconds <= NOISE * theirs.seconds,
        )
        yield Goal(
            f"{model}: the adapter with statistics is no larger than PEFT's file of tensors",
            f"{readable(ours.file_size)}, {ours.file_size / theirs.file_size:.2f} of it",
            ours.file_size <= theirs.file_size,
        )
        # Without statistics PEFT's file has scales and shifts in float32, and their names: float16 needs half of that.
        note = "" if half.has_statistics else "; half is the minimum, PEFT's file has no statistics"
        yield Goal(
            f"{model}: in float16 without statistics it is under a third of PEFT's file",
            f"{readable(half.file_size)}, {half.file_size / theirs.file_size:.2f} of it{note}",
            half.file_size < theirs.file_size / 3,
        )


def measure_subject(subject: TuningTask, *, repeats: int, status: Callable[[str], None]) -> list[TuneRow]:
    """The rows of one network; competitors that are not installed get a row with the reason."""
    make_step(Full(subject))()  # torch allocates buffers at the first call
    tuners, steps, memory = dict[str, Tuner](), dict[str, Callable[[], None]](), dict[str, int]()
    for kind in installed(TUNERS):
        status(f"{subject.name}: {kind.name}, memory")
        tuners[kind.name] = kind(subject)
        steps[kind.name] = make_step(tuners[kind.name])
        release_free_memory()
        with MemoryMeter() as meter:
            steps[kind.name]()  # creates the state of the optimizer
            steps[kind.name]()
        memory[kind.name] = meter.peak
    times = take_turns(
        steps, rounds=repeats,
        on_turn=lambda name, turn: status(f"{subject.name}: {name}, step {turn} of {repeats}"),
    )  # fmt: skip
    has_statistics = any(norm.has_statistics for norm in find_norms(subject.base).norms)
    rows = []
    for name, tuner in tuners.items():
        size, drift, _ = save_and_reload(tuner)
        rows.append(TuneRow(
            subject.name, name, times[name].seconds, times[name].seconds / times[OURS].seconds, memory[name],
            sum(p.numel() for p in tuner.parameters()), size, drift, has_statistics,
        ))  # fmt: skip
    size, drift, _ = save_and_reload(OursInHalf(tuners[OURS]))
    half = replace(rows[0], method=HALF, seconds=math.nan, ratio=math.nan, memory=0, file_size=size, drift=drift)
    rows.insert(1, replace(half, note="trained as above"))
    missing = (kind.name for kind in TUNERS if kind.name not in tuners)
    return rows + [_not_run(subject.name, name, f"not run: {NOT_INSTALLED}") for name in missing]


def make_step(tuner: Tuner) -> Callable[[], None]:
    """A function that takes one step of AdamW in training mode on the subject's batch."""
    optimizer, network, subject = torch.optim.AdamW(tuner.parameters(), lr=1e-3), tuner.network, tuner.subject

    def step() -> None:
        with own_randomness(0):  # of dropout
            optimizer.zero_grad()
            nn.functional.cross_entropy(network.train()(subject.inputs), subject.labels).backward()
            optimizer.step()

    return step


def _not_run(model: str, method: str, why: str) -> TuneRow:
    return TuneRow(model, method, math.nan, math.nan, 0, 0, 0, math.nan, False, why)
