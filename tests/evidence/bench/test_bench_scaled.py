"""Accuracy against condition numbers: cases, learning rates, tables and goals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_benchmarks import TINY

from onlynorm.errors import UnknownNameError, ValueRangeError
from onlynorm.evidence.bench.sweeps.scaled import (
    CONDITIONS,
    N_SEEDS,
    LawFacts,
    cases,
    sweep,
)
from onlynorm.evidence.harness import is_met
from onlynorm.evidence.papers.random_features.scaled import (
    GEOMETRIC,
    LAWS,
    ORDINARY,
    SEMICIRCLE,
    TASKS,
    ScaledCase,
    ScaledOutcome,
    ScaledSizes,
    ordinary,
)
from onlynorm.evidence.sweep import Measured, Results, TrainingRun, Trial

PLAIN, ONE, LAST = (
    ScaledCase("toy", ORDINARY, 1.0),
    ScaledCase("toy", SEMICIRCLE, 1.0),
    ScaledCase("toy", SEMICIRCLE, 1e6),
)


def law(case: ScaledCase = LAST, gap: float = 1e-15) -> dict[str, Any]:
    return vars(LawFacts(*case, 4.0, 0.2, 0.06, 0.1, gap))


def measured(
    last: tuple[float, ...], *, first: tuple[float, ...] = (0.5, 0.51, 0.49), n: int = 3, gap: float = 1e-15,
    quick: bool = False,
) -> Results[ScaledSizes, ScaledCase]:  # fmt: skip
    """An ordinary network at about 50 %, condition 1 and the largest one."""
    given = ((PLAIN, (0.5, 0.51, 0.49)), (ONE, first), (LAST, last))
    trials = [Trial(case, TrainingRun(100, lr), lr) for case, _ in given for lr in (0.03, 0.1)]
    runs = [
        Measured(c, TrainingRun(seed, 0.1), ScaledOutcome(x, x, 1.0))
        for c, values in given
        for seed, x in enumerate(values[:n])
    ]
    return sweep.results(runs, trials, sizes=ScaledSizes(quick=quick), laws=[law(ONE), law(LAST, gap)])


def test_every_spectrum_is_trained_at_its_own_learning_rate_and_at_the_ordinary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: Any = sweep.run(TINY["scaled"](monkeypatch), out=tmp_path)
    assert [case[1:] for case in found.cases] == [
        (ORDINARY, 1.0), (SEMICIRCLE, 1.0), (SEMICIRCLE, 30.0), (GEOMETRIC, 30.0),
    ]  # fmt: skip
    for case in found.cases:
        for lr in (None, found.lr(ordinary(case))):
            assert list(found.of(case, lr=lr)["seed"]) == [0, 1]
    exact, step, *falls = found.goals
    assert exact.is_met
    assert exact.measured == "2 of 2 seeds are bit-identical"
    assert step.is_met
    assert len(falls) == 2


def test_unknown_data_and_laws_and_seeds_of_trials_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="data needs a known name; got 'cifar'"):
        ScaledSizes(data=("cifar",))
    with pytest.raises(UnknownNameError, match="law needs a known name; got 'circle'"):
        ScaledSizes(law=("circle",))
    with pytest.raises(ValueRangeError, match="from 1 to 100; got 101"):
        ScaledSizes(seeds=101)


def test_every_data_set_has_its_seeds_and_every_law_its_conditions() -> None:
    assert set(N_SEEDS) == set(TASKS)
    assert set(CONDITIONS) == set(LAWS)
    assert all(sorted(conditions) == list(conditions) for conditions in CONDITIONS.values())
    assert len(cases(ScaledSizes())) == 2 * (1 + 7 + 3)
    assert [sweep.n_seeds(ScaledCase(data, ORDINARY, 1.0), ScaledSizes()) for data in N_SEEDS] == [3, 10]


def test_the_largest_condition_has_to_lie_below_the_first_by_more_than_chance() -> None:
    below = measured((0.40, 0.41, 0.39))
    assert is_met(below)
    assert not is_met(measured((0.3, 0.6, 0.5)))
    goal = below.goals[-1]
    assert goal.aim == "toy, semi-circle: the interval of accuracy at condition 1e+06 lies below that at 1"
    assert goal.measured == "40.0 ± 2.5 % against 50.0 ± 2.5 %; 10.0 ± 0.0 points lower for equal seeds"
    assert not is_met(measured((0.49, 0.50, 0.48))), "seed by seed the fall is certain, but the intervals overlap"


def test_condition_one_has_to_be_the_ordinary_network_to_the_last_bit() -> None:
    off = measured((0.40, 0.41, 0.39), first=(0.5, 0.51 + 1e-12, 0.49))
    assert [goal.is_met for goal in off.goals] == [False, True, True]
    assert off.goals[0].measured == "2 of 3 seeds are bit-identical"


def test_a_step_that_is_not_the_square_misses_its_goal() -> None:
    assert [goal.is_met for goal in measured((0.40, 0.41, 0.39), gap=1e-9).goals] == [True, False, True]


def test_a_quick_run_or_a_single_seed_says_nothing_of_accuracies() -> None:
    assert len(measured((0.6, 0.6, 0.6), quick=True).goals) == 2
    assert len(measured((0.6, 0.6, 0.6), n=1).goals) == 2


def test_tables_show_accuracies_spectra_and_learning_rates() -> None:
    accuracies, laws, lrs = measured((0.40, 0.41, 0.39)).tables()
    assert accuracies.rows[-1][:6] == ("toy", SEMICIRCLE, "1e+06", "40.0 ± 2.5", "40.0 ± 2.5", "10.0 ± 0.0")
    assert accuracies.rows[0][:6] == ("toy", ORDINARY, "1", "50.0 ± 2.5", "50.0 ± 2.5", "-")
    assert laws.rows[-1] == ("toy", SEMICIRCLE, "1e+06", "4", "20.0", "6.00", "0.1", "10.0 ± 0.0")
    assert lrs.rows[-1] == ("toy, semi-circle, 1e+06", "3.0", "10.0")
