"""What foretelling came to: a row for each network, the receiver operating characteristic and the area under it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from onlynorm.bench.goals import Goal, Table
from onlynorm.bench.predict_subjects import CIFAR, FASHION, N_CLASSES
from onlynorm.report.figure import COLOURS, STYLE, write_pictures

LEARNED = 0.95
"""Of the loss of guessing: a network that ends below has learned something."""
LIMITS = (0.98, LEARNED, 0.9, 0.8, 0.6)
"""Other readings of learned, for the table."""
AIM = 0.95
"""Of the area under the curve."""
LEAST = 60
"""Networks that a claim needs."""


@dataclass(frozen=True)
class PredictRow:
    """A network: the verdict at its start and what it rests on, and the best loss that training brought it to."""

    name: str
    data: str
    score: float
    verdict: str
    sign: str
    loss: float
    rate: float
    note: str = ""

    @property
    def learned(self) -> bool:
        """Whether it did better than guessing."""
        return self.loss < LEARNED * math.log(N_CLASSES)


@dataclass
class PredictBench:
    """All networks, the name of their set, and where the picture of the curve lies."""

    rows: list[PredictRow] = field(default_factory=list)
    networks: str = "test"
    figure: str = ""

    @property
    def curve(self) -> tuple[list[float], list[float]]:
        """(share of the hopeless that pass, share of the able that pass) as the least score falls from 1 to 0."""
        return receiver_curve([row.score for row in self.rows], [row.learned for row in self.rows])

    @property
    def area(self) -> float:
        """How often a network that learns has the higher score than one that does not; a tie counts half."""
        return area_below(*self.curve)

    def area_at(self, limit: float) -> float:
        """The area if a network has learned whose loss is below this share of that of guessing."""
        learned = [row.loss < limit * math.log(N_CLASSES) for row in self.rows]
        return area_below(*receiver_curve([row.score for row in self.rows], learned))

    @property
    def goals(self) -> list[Goal]:
        """What was promised, as far as this run measured it."""
        return list(_goals(self))

    def tables(self) -> list[Table]:
        """Every network, those with the least score first."""
        rows = [
            (row.name, row.data, f"{row.score:.3g}", row.verdict, row.sign, f"{row.loss:.3f}", f"{row.rate:g}",
             "yes" if row.learned else "no", row.note)
            for row in sorted(self.rows, key=lambda row: row.score)
        ]  # fmt: skip
        limits = [(f"{limit:g}", f"{self.area_at(limit):.3f}") for limit in LIMITS]
        columns = ("network", "data", "score", "verdict", "least sign", "best loss", "rate", "learned", "note")
        return [
            Table(columns, rows, 140),
            Table(("loss over that of guessing that counts as learned", "area under the curve"), limits),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        return {
            "networks": self.networks,
            "rows": [{**asdict(row), "learned": row.learned} for row in self.rows],
            "area": self.area,
            "areas": {f"{limit:g}": self.area_at(limit) for limit in LIMITS},
            "figure": self.figure,
            "goals": [asdict(goal) for goal in self.goals],
        }


def receiver_curve(scores: Sequence[float], passed: Sequence[bool]) -> tuple[list[float], list[float]]:
    """Shares of those that failed and that passed with at least each score, from none to all; ties go at once."""
    values, truth = np.asarray(scores), np.asarray(passed)
    false, true = [0.0], [0.0]
    for least in sorted(set(scores), reverse=True):
        above = values >= least
        false.append(float(above[~truth].mean()) if (~truth).any() else math.nan)
        true.append(float(above[truth].mean()) if truth.any() else math.nan)
    return false, true


def area_below(false: Sequence[float], true: Sequence[float]) -> float:
    """The area below the curve, by trapezia."""
    steps = zip(itertools.pairwise(false), itertools.pairwise(true), strict=True)
    return sum((right - left) * (high + low) / 2.0 for (left, right), (low, high) in steps)


def write_curve(bench: PredictBench, folder: Path) -> Path:
    """The path of the picture of the curve and of loss over score, as PNG; the same as SVG lies beside it."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.0, 3.8), layout="constrained")
        FigureCanvasAgg(figure)
        curve, cloud = figure.subplots(1, 2)
        curve.plot(*bench.curve, color=COLOURS[0])
        curve.plot([0, 1], [0, 1], color=COLOURS[-1], linestyle=":")
        curve.set(
            title=f"area {bench.area:.3f}, {len(bench.rows)} networks of the {bench.networks} set",
            xlabel="of those that do not learn, passed", ylabel="of those that learn, passed",
        )  # fmt: skip
        for number, data in enumerate((FASHION, CIFAR)):
            rows = [row for row in bench.rows if row.data == data]
            top = [min(row.loss, 1.1 * math.log(N_CLASSES)) for row in rows]
            cloud.scatter([max(row.score, 1e-12) for row in rows], top, s=12, color=COLOURS[number], label=data)
        cloud.axhline(LEARNED * math.log(N_CLASSES), color=COLOURS[-1], linestyle=":")
        cloud.set(xscale="log", xlabel="score at the start", ylabel="best loss after training")
        cloud.legend(frameon=False)
        return write_pictures(figure, folder, f"receiver_{bench.networks}")[0]


def _goals(bench: PredictBench) -> Iterator[Goal]:
    n_learned = sum(row.learned for row in bench.rows)
    counts = f"{len(bench.rows)} networks, of which {n_learned} learn"
    yield Goal(
        f"{LEAST} networks or more, a quarter or more of either kind", counts,
        len(bench.rows) >= LEAST and 4 * min(n_learned, len(bench.rows) - n_learned) >= len(bench.rows),
    )  # fmt: skip
    yield Goal(
        f"the area under the curve is above {AIM:g}: the verdict at the start foretells learning",
        f"{bench.area:.3f}", bench.area > AIM,
    )  # fmt: skip
