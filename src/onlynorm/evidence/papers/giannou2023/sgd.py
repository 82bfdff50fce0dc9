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
class Kept:
    """What the repeats amount to: the smallest and the largest loss are discarded, as the paper does."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, losses: Sequence[float]) -> Kept:
        """The kept part of these losses."""
        kept = sorted(losses)[1:-1]
        return cls(sum(kept) / len(kept), kept[0], kept[-1])


@dataclass(frozen=True)
class Point:
    """One place of a panel: a teacher's width, a number of features, and what every method reached there."""

    width: int
    n_features: int
    rates: Mapping[str, float]
    kept: Mapping[str, Kept]

    def loss(self, method: str) -> float:
        """The mean loss of the kept repeats."""
        return self.kept[method].mean

    def over_sgd(self, method: str) -> float:
        """The loss of a method over that of SGD."""
        return self.loss(method) / self.loss(SGD)

    @property
    def sgd_over_construction(self) -> float:
        """The loss of SGD over that of the better construction."""
        return self.loss(SGD) / min(self.loss(FROM_STUDENT), self.loss(FROM_TEACHER))

    @property
    def student_gap(self) -> float:
        """What constructing the student adds to its loss."""
        return self.loss(FROM_STUDENT) - self.loss(STUDENT)

    @property
    def smallest(self) -> float:
        """The smallest loss of the three algorithms."""
        return min(self.loss(method) for method in ALGORITHMS)


def figure_4_left(run: Run) -> Outcome:
    """Losses over the teacher's width d, with d^2 features. Theory: giannou2023:thm-1"""
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
    """Losses over the number of features, for one width of the teacher. Theory: giannou2023:thm-1"""
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
    """Both panels with sparse frozen weights, at a density that wide layers bear. Theory: giannou2023:thm-3"""
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
    return _outcome(values, [View(left, "width", note), View(right, "features", note)])


def figure_5b(run: Run) -> Outcome:
    """Both panels with weights so sparse that no features reach the target. Theory: giannou2023:thm-3"""
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
    return _outcome(values, [View(left, "width", note), View(right, "features", note)])


def over_widths(run: Run) -> list[Point]:
    """Points of a left panel: teachers of growing width d, with d^2 features."""
    return [point for width in run.sizes["widths"] for point in _points(run, width, [width**2])]


def over_features(run: Run) -> list[Point]:
    """Points of a right panel: one teacher, more and more features."""
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
        kept = {method: Kept.of(of_repeats) for method, of_repeats in losses.items()}
        points.append(Point(width, count, {SGD: trained["rate"], STUDENT: made["rate"]}, kept))
    return points


@dataclass(frozen=True)
class View:
    """One panel of a figure: points over the teacher's width or over the features.

    A logarithmic scale ends at 1e-6: down to rounding errors it would squeeze everything else into one line.
    """

    points: Sequence[Point]
    over: str
    note: str
    floor: float | None = 1e-6

    @property
    def panel(self) -> Panel:
        """The axes."""
        fixed = "d^2 features" if self.over == "width" else f"teacher of width {self.points[0].width}"
        ending = "" if self.floor is None else f" (drawn from {self.floor:g} on)"
        return Panel(
            name=f"{self.over}, {self.note}",
            title=f"{fixed}, {self.note}",
            x_label="teacher's width d" if self.over == "width" else "features",
            y_label=f"relative test loss{ending}",
            y_log=self.floor is not None,
        )

    @property
    def curves(self) -> list[Curve]:
        """The three algorithms, and the dense student that the constructed one equals where features suffice.

        A curve runs through the means; it walks down and up the range of the kept repeats at each of them.
        """
        x = [point.width if self.over == "width" else point.n_features for point in self.points]
        fourfold = [place for place in x for _ in range(4)]
        curves = []
        for method in ALGORITHMS:
            ranges = [point.kept[method] for point in self.points]
            y = self._drawn([height for kept in ranges for height in (kept.mean, kept.low, kept.high, kept.mean)])
            curves.append(Curve(method, fourfold, y, kind="line+points", panel=self.panel.name))
        means = self._drawn([point.loss(STUDENT) for point in self.points])
        return [*curves, Curve(STUDENT, x, means, panel=self.panel.name, style="law")]

    def _drawn(self, heights: Sequence[float]) -> list[float]:
        return [height if self.floor is None else max(height, self.floor) for height in heights]


def _in_both_scales(points: Sequence[Point], over: str) -> list[View]:
    return [View(points, over, "linear scale", floor=None), View(points, over, "logarithmic scale")]


def _outcome(values: Mapping[str, float], views: Sequence[View]) -> Outcome:
    rows: list[list[float | str]] = []
    for over, points in {view.over: view.points for view in views}.items():
        for method in (*ALGORITHMS, STUDENT):
            for point in points:
                kept, rate = point.kept[method], point.rates.get(method, "-")
                rows.append([over, point.width, point.n_features, method, kept.mean, kept.low, kept.high, rate])
    columns = ["over", "teacher's width", "features", "method", "mean of the kept", "lowest", "highest", "rate"]
    return Outcome(
        values=values,
        curves=[curve for view in views for curve in view.curves],
        panels=[view.panel for view in views],
        table=Table(columns=columns, rows=rows),
    )
