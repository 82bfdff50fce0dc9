"""A sweep and an artifact that workers import: their results depend on rounding, and calls are counted in a file."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from onlynorm.display import Curve
from onlynorm.evidence.harness import Goal, Sizes, setting
from onlynorm.evidence.papers.reproduce import Outcome, Run
from onlynorm.evidence.sweep import Results, Sweep, TrainingRun, percent

LOG = "ONLYNORM_TEST_LOG"
"""Environment variable with the file to which every call adds a line."""


def note(*words: object) -> None:
    """Adds a line to the log."""
    if LOG in os.environ:
        with Path(os.environ[LOG]).open("a") as file:
            file.write(" ".join(map(str, words)) + "\n")


def rounded(seed: int) -> float:
    """A number whose last digits depend on the number of threads."""
    A = torch.randn(200, 200, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return float(torch.linalg.solve(A, A.sum(1)).sum() + torch.linalg.eigvalsh(A @ A.T).sum())


@dataclass(frozen=True)
class ToySizes(Sizes):
    """Of the toy sweep."""

    seeds: int = setting(2, quick=1, help="Seeds.", is_key=False)
    failing: str = setting("none", choices=("none", "bad"), is_key=False)


class Case(NamedTuple):
    """A case of the grid."""

    kind: str


@dataclass(frozen=True)
class Row:
    """What is measured."""

    accuracy: float
    exact: float


sweep: Sweep[ToySizes, Case] = Sweep(
    "parallel", "A toy.", ToySizes, cases=lambda _: [Case("good"), Case("bad")],
    columns={"accuracy": percent("accuracy")}, lrs=(0.001, 0.01, 0.1, 1.0), start=(0.01, 0.1),
)  # fmt: skip


@sweep.trial
def validate(case: Case, run: TrainingRun, sizes: ToySizes) -> float:
    """Best at 0.1 for good cases, else at the lower end of the grid."""
    note("trial", case.kind, run.lr, run.seed)
    return 1.0 - abs(math.log10(run.lr / (0.1 if case.kind == "good" else 0.001))) / 10


@sweep.measure
def train(case: Case, run: TrainingRun, sizes: ToySizes) -> Row:
    """A number that shows every bit of the run."""
    note("run", case.kind, run.lr, run.seed)
    if case.kind == sizes.failing:
        raise ArithmeticError(f"{case.kind} diverged")
    return Row(0.9, rounded(run.seed) + run.lr)


@sweep.goals
def goals(results: Results[ToySizes, Case]) -> Iterator[Goal]:
    """One that is met."""
    yield Goal("all runs", str(len(results.runs)), True)


def first_step(*, k: int) -> dict[str, float]:
    """The first piece of a pair."""
    note("first", k)
    return {"value": rounded(k)}


def second_step(*, k: int, start: float) -> list[float]:
    """The second piece, which depends on the first."""
    note("second", k)
    if k == 99:
        raise ArithmeticError("99 is too many")
    return [start, start + rounded(k)]


def figure(run: Run) -> Outcome:
    """Pairs of pieces in one loop, whose second piece depends on the first."""
    ks = range(run.sizes["n"])
    pairs = {}
    for k in ks:
        start = run.piece(f"first {k}", first_step, k=k)["value"]
        pairs[k] = run.piece(f"second {k}", second_step, k=run.sizes.get("last", k), start=start)
    ends = [pairs[k][1] for k in ks]
    values: dict[str, Any] = {"sum": sum(ends)}
    return Outcome(values=values, curves=[Curve("ends", list(ks), ends)])
