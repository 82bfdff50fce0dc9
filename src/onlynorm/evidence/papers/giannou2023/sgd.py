"""Figures of giannou2023: SGD on the norms against the construction, for dense and sparse frozen weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onlynorm.display import Curve, Panel, Table
from onlynorm.evidence.papers.giannou2023.norm_training import construct_norms, train_norms
from onlynorm.evidence.papers.reproduce import Outcome, Run

SGD = "SGD on the norms"
FROM_STUDENT = "constructed student"
FROM_TEACHER = "construction from the teacher"
STUDENT = "dense student"
ALGORITHMS = (SGD, FROM_STUDENT, FROM_TEACHER)


@dataclass(frozen=True)
class Trimmed:
    """Mean and range of the losses without the smallest and the largest, which the paper discards."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, losses: Sequence[float]) -> Trimmed:
        """Mean and range of these losses."""
        trimmed = sorted(losses)[1:-1]
        return cls(sum(trimmed) / len(trimmed), trimmed[0], trimmed[-1])


@dataclass(frozen=True)
class Point:
    """One point of a panel: a teacher width, a number of features, and the losses of every method."""

    width: int
    n_features: int
    rates: Mapping[str, float]
    losses: Mapping[str, Trimmed]

    def loss(self, method: str) -> float:
        """The mean loss without the smallest and the largest."""
        return self.losses[method].mean

    def over_sgd(self, method: str) -> float:
        """The loss of a method over that of SGD."""
        return self.loss(method) / self.loss(SGD)

    @property
    def sgd_over_construction(self) -> float:
        """The loss of SGD over that of the better construction."""
        return self.loss(SGD) / min(self.loss(FROM_STUDENT), self.loss(FROM_TEACHER))

    @property
    def student_gap(self) -> float:
        """The loss of the constructed student minus that of the dense student."""
        return self.loss(FROM_STUDENT) - self.loss(STUDENT)

    @property
    def smallest(self) -> float:
        """The smallest loss of the three algorithms."""
        return min(self.loss(method) for method in ALGORITHMS)


def figure_4_left(run: Run) -> Outcome:
    """Losses against the teacher's width d, with d^2 features. Theory: giannou2023:thm-1"""
    run.announce(2 * len(run.sizes["widths"]))
    points = over_widths(run)
    values = {
        "construction from the teacher, largest loss": max(p.loss(FROM_TEACHER) for p in points),
        "construction from the teacher over SGD, largest ratio": max(p.over_sgd(FROM_TEACHER) for p in points),
        "constructed student over SGD, largest ratio": max(p.over_sgd(FROM_STUDENT) for p in points),
        "constructed student against the dense student, largest gap": max(abs(p.student_gap) for p in points),
        "SGD on the norms, largest loss": max(p.loss(SGD) for p in points),
    }
    return _outcome(values, _in_both_scales(points, "width"))


def figure_4_right(run: Run) -> Outcome:
    """Losses against the number of features, for one teacher width. Theory: giannou2023:thm-1"""
    run.announce(1 + len(run.sizes["features"]))
    points = over_features(run)
    fewest, most = points[0], points[-1]
    enough = [p for p in points if p.n_features >= p.width**2]
    teacher_loss = max(p.loss(FROM_TEACHER) for p in enough)
    student_gap = max(abs(p.student_gap) for p in enough)
    values = {
        "SGD over the better construction, fewest features": fewest.sgd_over_construction,
        "SGD on the norms, loss at the fewest features": fewest.loss(SGD),
        "construction from the teacher over SGD, most features": most.over_sgd(FROM_TEACHER),
        "constructed student over SGD, most features": most.over_sgd(FROM_STUDENT),
        "construction from the teacher, largest loss from d^2 features on": teacher_loss,
        "constructed student against the dense student, largest gap from d^2 features on": student_gap,
    }
    return _outcome(values, _in_both_scales(points, "features"))


def figure_5a(run: Run) -> Outcome:
    """Both panels with sparse frozen weights, at a density that suffices for wide layers. Theory: giannou2023:thm-3"""
    left, right = _both_panels(run)
    narrowest, widest, most = left[0], left[-1], right[-1]
    values = {
        "construction from the teacher, loss at the narrowest teacher": narrowest.loss(FROM_TEACHER),
        "construction from the teacher, loss at the widest teacher": widest.loss(FROM_TEACHER),
        "constructed student minus dense student, narrowest teacher": narrowest.student_gap,
        "constructed student minus dense student, widest teacher": widest.student_gap,
        "constructed student over SGD, widest teacher": widest.over_sgd(FROM_STUDENT),
        "constructed student over SGD, most features": most.over_sgd(FROM_STUDENT),
    }
    note = f"density {run.sizes['density']:g}"
    return _outcome(values, [LossPanel(left, "width", note), LossPanel(right, "features", note)])


def figure_5b(run: Run) -> Outcome:
    """Both panels with frozen weights so sparse that the target cannot be represented. Theory: giannou2023:thm-3"""
    left, right = _both_panels(run)
    common = next(p for p in left if p.width == run.sizes["width"])
    worst = max(p.sgd_over_construction for p in left)
    values = {
        "smallest loss of the three algorithms, teacher of the right panel": common.smallest,
        "smallest loss of the three algorithms, left panel": min(p.smallest for p in left),
        "SGD over the better construction, narrowest teacher": left[0].sgd_over_construction,
        "SGD over the better construction, teacher of the right panel": common.sgd_over_construction,
        "SGD over the better construction, left panel, largest ratio": worst,
    }
    note = f"density {run.sizes['density']:g}"
    return _outcome(values, [LossPanel(left, "width", note), LossPanel(right, "features", note)])


def over_widths(run: Run) -> list[Point]:
    """Points of a left panel: teachers of growing width d, with d^2 features."""
    return [point for width in run.sizes["widths"] for point in _points(run, width, [width**2])]


def over_features(run: Run) -> list[Point]:
    """Points of a right panel: one teacher, growing number of features."""
    return _points(run, run.sizes["width"], run.sizes["features"])


def _both_panels(run: Run) -> tuple[list[Point], list[Point]]:
    run.announce(2 * len(run.sizes["widths"]) + 1 + len(run.sizes["features"]))
    return over_widths(run), over_features(run)


def _points(run: Run, width: int, n_features: Sequence[int]) -> list[Point]:
    training = {name: run.sizes[name] for name in ("n_train", "n_test", "batch", "momentum")}
    shared: dict[str, Any] = {
        "density": run.sizes["density"],
        "rates": run.sizes["rates"],
        "task": {"width": width, "seeds": run.seeds, **training},
    }
    made = run.piece(f"construct d={width}", construct_norms, n_features=n_features, **shared)
    points = []
    for place, count in enumerate(n_features):
        trained = run.piece(f"SGD d={width} features={count}", train_norms, n_features=count, **shared)
        losses = {
            SGD: trained["losses"],
            FROM_STUDENT: made["from student"][place],
            FROM_TEACHER: made["from teacher"][place],
            STUDENT: made["student"],
        }
        trimmed = {method: Trimmed.of(of_repeats) for method, of_repeats in losses.items()}
        points.append(Point(width, count, {SGD: trained["rate"], STUDENT: made["rate"]}, trimmed))
    return points


@dataclass(frozen=True)
class LossPanel:
    """One panel of a figure: losses against the teacher's width or the number of features.

    A logarithmic axis ends at 1e-6: down to rounding errors, all other losses would lie on one line.
    """

    points: Sequence[Point]
    over: str
    note: str
    floor: float | None = 1e-6

    @property
    def panel(self) -> Panel:
        """The axes."""
        fixed = "d^2 features" if self.over == "width" else f"teacher of width {self.points[0].width}"
        ending = "" if self.floor is None else f" (at least {self.floor:g})"
        return Panel(
            name=f"{self.over}, {self.note}",
            title=f"{fixed}, {self.note}",
            x_label="teacher's width d" if self.over == "width" else "features",
            y_label=f"relative test loss{ending}",
            y_log=self.floor is not None,
        )

    @property
    def curves(self) -> list[Curve]:
        """The three algorithms, and the dense student, which the constructed one equals if there are enough features.

        A curve connects the means; at each point it also shows the range of the repeats as a vertical line.
        """
        x = [point.width if self.over == "width" else point.n_features for point in self.points]
        fourfold = [place for place in x for _ in range(4)]
        curves = []
        for method in ALGORITHMS:
            ranges = [point.losses[method] for point in self.points]
            y = self._drawn([height for one in ranges for height in (one.mean, one.low, one.high, one.mean)])
            curves.append(Curve(method, fourfold, y, kind="line+points", panel=self.panel.name))
        means = self._drawn([point.loss(STUDENT) for point in self.points])
        return [*curves, Curve(STUDENT, x, means, panel=self.panel.name, style="law")]

    def _drawn(self, heights: Sequence[float]) -> list[float]:
        return [height if self.floor is None else max(height, self.floor) for height in heights]


def _in_both_scales(points: Sequence[Point], over: str) -> list[LossPanel]:
    return [LossPanel(points, over, "linear scale", floor=None), LossPanel(points, over, "logarithmic scale")]


def _outcome(values: Mapping[str, float], views: Sequence[LossPanel]) -> Outcome:
    rows: list[list[float | str]] = []
    for over, points in {view.over: view.points for view in views}.items():
        for method in (*ALGORITHMS, STUDENT):
            for point in points:
                loss, rate = point.losses[method], point.rates.get(method, "-")
                rows.append([over, point.width, point.n_features, method, loss.mean, loss.low, loss.high, rate])
    columns = ["against", "teacher's width", "features", "method", "mean loss", "lowest", "highest", "learning rate"]
    return Outcome(
        values=values,
        curves=[curve for view in views for curve in view.curves],
        panels=[view.panel for view in views],
        table=Table(columns=columns, rows=rows),
    )
