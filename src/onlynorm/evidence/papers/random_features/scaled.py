"""Table 1 of random_features: accuracy of a network against the condition number of its features, scaled down.

The paper trains a ResNet-50 on ImageNet; we train what `scaled_training` has, at the same condition numbers. The paper
mentions no tuning, so one learning rate serves all conditions: the one that suits the ordinary network best.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from onlynorm.display import Curve, Panel, Table
from onlynorm.evidence.harness import best_lr
from onlynorm.evidence.papers.random_features.scaled_training import spectrum_change, train
from onlynorm.evidence.papers.reproduce import Outcome, Run
from onlynorm.evidence.spread import Spread
from onlynorm.evidence.validation import TRIAL_SEED

Accuracies: TypeAlias = Mapping[float | None, Sequence[float]]
"""In percent, seed by seed, by condition number; None is the ordinary network."""
PAPER = {1.0: (81.89, 76.89), 5413.0: (79.06, 75.84), 10123.0: (79.1, 75.6), 1541601.0: (76.28, 73.14)}
"""Condition numbers of table 1, with training and test accuracies in percent."""
_PANEL = Panel(title="ID cond with a spectrum", x_label="condition number", y_label="accuracy, %", x_log=True)


def table_1(run: Run) -> Outcome:
    """Accuracies at the paper's condition numbers, all at the learning rate that suits the ordinary network best."""
    lrs, training = run.sizes["lrs"], run.sizes["training"]
    run.announce(len(lrs) + (1 + len(PAPER)) * len(run.seeds))
    trial = {
        **training,
        "n_epochs": run.sizes["n_trial_epochs"],
        "condition": None,
        "seed": TRIAL_SEED,
        "is_trial": True,
    }
    lr = best_lr({lr: run.piece(f"lr {lr:g}", train, lr=lr, **trial)["accuracy"] for lr in lrs})
    made = {
        condition: [
            run.piece(f"condition {condition} seed {seed}", train, condition=condition, lr=lr, seed=seed, **training)
            for seed in run.seeds
        ]
        for condition in (None, *PAPER)
    }
    test, seen = (
        {c: [100.0 * one[part] for one in runs] for c, runs in made.items()} for part in ("accuracy", "train_accuracy")
    )
    return Outcome(compare(test, seen, training["data"]), _curves(test, seen), [_PANEL], _table(test, seen))


def compare(test: Accuracies, seen: Accuracies, data: str) -> dict[str, float]:
    """What the verdict is made of: falls and rises in percentage points, by the lower ends of their intervals."""
    first, *_, middle, last = sorted(PAPER)
    ordinary = [abs(a - b) for part in (test, seen) for a, b in zip(part[1.0], part[None], strict=True)]
    rises = [_low(fall(test, after, before)) for before, after in itertools.pairwise(sorted(PAPER))]
    return {
        "condition 1 beside the ordinary network, largest difference": max(ordinary),
        "fall of test accuracy, first to last": fall(test, first, last).mean,
        "fall of test accuracy, first to last, lower end": _low(fall(test, first, last)),
        "fall of training accuracy, first to last, lower end": _low(fall(seen, first, last)),
        "largest rise of test accuracy between neighbours, lower end": max(rises),
        "fall of test accuracy, third to last, lower end": _low(fall(test, middle, last)),
        "mean change of s^2, first to last": spectrum_change(data, first, second=last),
        "mean change of s^2, third to last": spectrum_change(data, middle, second=last),
    }


def fall(accuracies: Accuracies, first: float, second: float) -> Spread:
    """By how much the accuracy at the second condition number is below that at the first, seed by seed."""
    return Spread.of([a - b for a, b in zip(accuracies[first], accuracies[second], strict=True)])


def _low(spread: Spread) -> float:
    return spread.mean - spread.half


def _table(test: Accuracies, seen: Accuracies) -> Table:
    rows: list[list[float | str]] = [
        [f"{condition:.7g}", *paper, _tell(Spread.of(seen[condition])), _tell(Spread.of(test[condition]))]
        for condition, paper in PAPER.items()
    ]
    columns = ("condition number", "paper, training %", "paper, test %", "ours, training %", "ours, test %")
    return Table(columns, rows)


def _tell(spread: Spread) -> str:
    return f"{spread.mean:.2f}" + ("" if math.isnan(spread.half) else f" ± {spread.half:.2f}")


def _curves(test: Accuracies, seen: Accuracies) -> list[Curve]:
    conditions = sorted(PAPER)
    curves = [
        Curve(f"ours, {part}", conditions, [Spread.of(made[c]).mean for c in conditions], kind="line+points")
        for part, made in (("training", seen), ("test", test))
    ]
    for place, part in enumerate(("training", "test")):
        y = [PAPER[c][place] for c in conditions]
        curves.append(Curve(f"paper, {part}", conditions, y, style="law"))
    return curves
