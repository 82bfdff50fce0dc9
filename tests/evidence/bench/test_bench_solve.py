"""`bench solve`: rivals that solve the same systems, rows that are judged by what was measured, goals that can fail."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from systems import materialise, residual
from threadpoolctl import threadpool_info
from torch import Tensor

from onlynorm.cli.terminal import print_json
from onlynorm.errors import UnknownNameError, ValueRangeError
from onlynorm.evidence.bench.competitors import (
    ANY,
    CHOLESKY,
    GELSD,
    GELSY,
    LSMR,
    LU,
    OURS,
    PAPERS,
    QR,
    SOLVERS,
    Found,
)
from onlynorm.evidence.bench.duels import FIT_TOLERANCE, METERED, TOLERANCE, WIDTH, Row, duel_goal, duels
from onlynorm.evidence.bench.races import solve as bench_module
from onlynorm.evidence.bench.races.solve import RateRow, SolveSizes, from_dict, race
from onlynorm.evidence.bench.systems import FAMILIES, GRID, GROWING, System
from onlynorm.evidence.harness import Goal, is_met
from onlynorm.evidence.race import RaceResult, time_text

EPS = torch.finfo(torch.float64).eps
SMALL = (
    System("flat", "1 x 6", (1, 6), 0.5),
    System("flat", "1 x 6", (1, 6), 1.25),
    System("square", "4 x 4", (4, 4), 1.25),
    System("sparse", "4 x 5", (4, 5), 2.0, "sparse_he_normal", 0.5),
    System("convolution", "conv 3x3, 2 ch", (2, 2, 3, 3), 1.0),
    System("convolution", "conv 3x3, 2 ch", (2, 2, 3, 3), 1.25),
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "GRID", SMALL)
    monkeypatch.setattr(bench_module, "iteration_rate", lambda shape: 0.9)


def row(system: str, excess: float, method: str, **rest: Any) -> Row:
    usual = {"equations": 9216, "seconds": 1.0, "ratio": 1.0, "memory": 1, "residual": 1e-12, "iterations": 1}
    return Row(system, excess=excess, method=method, **({"error": 1e-12} | usual | rest))


def bench_of(rows: Sequence[Row], rates: dict[str, float] | None = None) -> RaceResult[SolveSizes]:
    return race.result([*(("rows", r) for r in rows), *(("rates", RateRow(*one)) for one in (rates or {}).items())])


def duel(ours: dict[str, float], *others: dict[str, float]) -> Goal:
    """The goal of a family of one system, ours beside rivals a, b, ..."""
    rows = [row("s", 1.25, OURS, family="flat", **ours)]
    rows += [row("s", 1.25, name, family="flat", **other) for name, other in zip("abc", others, strict=False)]
    (goal,) = duel_goal("flat", duels(rows))
    return goal


# ---------------------------------------------------------------------------------------------- measuring


@pytest.mark.parametrize("family", FAMILIES)
def test_a_quick_run_has_systems_of_every_family(family: str) -> None:
    chosen = [one for one in GRID if one.family == family and bench_module.is_quick(one)]
    assert chosen
    assert all(one.equations <= 9216 for one in chosen)


@pytest.mark.usefixtures("small")
def test_every_solver_has_a_row_for_every_system_it_is_meant_for() -> None:
    said: list[str] = []
    bench: Any = race.run(SolveSizes(repeats=2), progress=said.append)
    expected = []
    for one in SMALL:
        methods = [
            m
            for m in SOLVERS
            if (m != LU or one.excess >= 1) and (m != ANY or one.excess > 1) and (m != PAPERS or one.family in GROWING)
        ]
        expected += [(one.family, one.name, one.excess, one.equations, method) for method in methods]
    assert [(r.family, r.system, r.excess, r.equations, r.method) for r in bench.parts["rows"]] == expected
    assert said == [f"{one.name}, excess {one.excess:g}" for one in SMALL]
    for r in bench.parts["rows"]:
        ours = bench.find(system=r.system, excess=r.excess, method=OURS)
        assert ours is not None
        assert r.ratio == r.seconds / ours.seconds
        assert r.seconds > 0.0
        assert r.tolerance == (TOLERANCE if r.excess >= 1 else FIT_TOLERANCE)
        assert r.method != OURS or (r.is_exact and r.norm == 1.0)


@pytest.mark.usefixtures("small")
def test_all_libraries_have_one_thread_while_times_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def count(left: Tensor, right: Tensor, target: Tensor) -> Found:
        seen.extend([torch.get_num_threads(), *(pool["num_threads"] for pool in threadpool_info())])
        return Found(left.new_zeros(1))

    monkeypatch.setitem(SOLVERS, CHOLESKY, count)
    race.run(SolveSizes(families=("flat",), repeats=1))
    assert set(seen) == {1}


@pytest.mark.usefixtures("small")
def test_only_the_families_that_were_asked_for_are_measured() -> None:
    told: list[str] = []
    bench: Any = race.run(SolveSizes(families=("square", "sparse"), repeats=1), on_row=told.append)
    rows = bench.parts["rows"]
    assert sorted(told) == sorted(map(str, duels(rows) + duels(rows, ANY)))
    assert {r.family for r in rows} == {"square", "sparse"}
    assert {goal.aim.split(",")[0] for goal in bench.goals} == {"square", "sparse", "an iteration"}


@pytest.mark.parametrize("excess", [0.5, 1.25])
def test_errors_are_of_the_gamma_in_float64(excess: float, monkeypatch: pytest.MonkeyPatch) -> None:
    one = System("flat", "3 x 4", (3, 4), excess)
    left, right, target = one.make()
    gamma = torch.linspace(-1.0, 1.0, 5, dtype=torch.float32)
    monkeypatch.setitem(SOLVERS, GELSD, lambda *_: Found(gamma, 7, "a note"))
    (made,) = (r for r in bench_module.measure_system(one, repeats=1, quick=False) if r.method == GELSD)
    wanted = residual(left, right, target, gamma)
    assert made.residual == pytest.approx(wanted, rel=100 * EPS)
    assert (made.iterations, made.note) == (7, "a note")
    if excess < 1:  # the residual of least squares and the distance from it are orthogonal
        least = residual(left, right, target, torch.linalg.pinv(materialise(left, right)) @ target.flatten())
        wanted = math.sqrt(wanted**2 - least**2)
    assert made.error == pytest.approx(wanted, rel=1e-8)
    assert not made.is_exact


def test_features_of_deficient_rank_are_judged_by_the_least_squares_fit() -> None:
    one = System("sparse", "3 x 20", (3, 20), 1.25, "sparse_he_normal", 0.2)
    left, right, _ = one.make()
    assert torch.linalg.matrix_rank(materialise(left, right)) < one.equations
    rows = {r.method: r for r in bench_module.measure_system(one, repeats=1, quick=False)}
    assert rows[OURS].tolerance == FIT_TOLERANCE
    assert rows[OURS].residual > 0.01
    assert rows[GELSY].is_exact
    assert rows[GELSD].is_exact
    assert rows[CHOLESKY].note.startswith("failed: pivot")
    assert math.isnan(rows[CHOLESKY].error)
    assert not rows[CHOLESKY].is_exact


@pytest.mark.parametrize("quick", [False, True])
def test_a_rival_that_would_take_too_long_is_a_row_that_says_so(quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {GELSD: 31.0, QR: 5.0, LU: 59.0, LSMR: 61.0}
    monkeypatch.setattr(bench_module, "predicted_seconds", lambda method, *_: seconds.get(method, 0.0))
    one = System("flat", "3 x 4", (3, 4), 1.25)
    rows = {r.method: r for r in bench_module.measure_system(one, repeats=1, quick=quick)}
    left_out = {method: r.note for method, r in rows.items() if math.isnan(r.seconds)}
    assert left_out == {GELSD: "31 s", LSMR: "61 s"} | ({QR: "5 s"} if quick else {})
    assert math.isfinite(rows[LU].seconds)
    (table,) = bench_of(list(rows.values())).tables()[1:]
    assert [cells[:2] for cells in table.rows] == [("3 x 4", "1.25")]
    assert all(f"{method} ({note})" in table.rows[0][2] for method, note in left_out.items())


@pytest.mark.parametrize("repeats", [0, -1, "3", 1.5])
def test_turns_are_a_positive_count(repeats: Any) -> None:
    with pytest.raises(ValueRangeError, match=r"repeats .* from 1"):
        SolveSizes(repeats=repeats)


def test_an_unknown_family_is_refused_with_those_there_are() -> None:
    with pytest.raises(UnknownNameError, match=r"got 'round'.* Known: convolution, flat"):
        SolveSizes(families=("round",))


# ---------------------------------------------------------------------------------------------- goals of families


@pytest.mark.parametrize(
    ("ours", "rival", "is_met"),
    [
        ({"seconds": 1.19}, {"seconds": 1.0}, True),
        ({"seconds": 1.21}, {"seconds": 1.0}, False),
        ({"seconds": 0.0014}, {"seconds": 0.0005}, True),
        ({"seconds": 0.0016}, {"seconds": 0.0005}, False),
        ({"error": 2e-10}, {"seconds": 9.0}, False),
        ({"error": math.nan}, {"seconds": 9.0}, False),
        ({"error": 5e-7, "tolerance": 1e-6}, {"error": 1e-9, "tolerance": 1e-6}, True),
        ({"error": 2e-6, "tolerance": 1e-6}, {"error": 1e-9, "tolerance": 1e-6}, False),
    ],
)
def test_a_family_is_met_by_time_and_by_accuracy(ours: dict[str, float], rival: dict[str, float], is_met: bool) -> None:
    goal = duel(ours, rival)
    assert goal.is_met is is_met
    assert goal.aim.startswith("flat, 1 systems: ")
    assert goal.measured.startswith("worst" if is_met else "1 of 1 missed; worst")


def test_the_rival_is_the_fastest_of_those_within_the_tolerance() -> None:
    slow, wrong, left_out = {"seconds": 0.9}, {"seconds": 0.1, "error": 1e-3}, {"seconds": math.nan, "error": math.nan}
    goal = duel({"seconds": 1.0}, slow, wrong, left_out)
    assert goal.is_met
    assert goal.measured == "worst 1.11 at s at 1.25: 1 s, a 900 ms"
    assert not duel({"seconds": 1.0}, slow, {"seconds": 0.5}).is_met


def test_lu_of_the_first_features_does_not_count_among_rivals_of_least_norm() -> None:
    times = {OURS: 1.0, ANY: 0.2, LU: 0.1, CHOLESKY: 0.9}
    for excess, expected in ((1.25, CHOLESKY), (1.0, LU)):
        rows = [row("s", excess, method, family="flat", seconds=time) for method, time in times.items()]
        assert [(duel.ours.method, duel.rival.method) for duel in duels(rows) if duel.rival] == [(OURS, expected)]
        assert [(duel.ours.method, duel.rival.method) for duel in duels(rows, ANY) if duel.rival] == [(ANY, LU)]


def test_a_family_in_which_no_rival_meets_the_tolerance_has_no_goal() -> None:
    rows = [row("s", 1.25, OURS, family="flat"), row("s", 1.25, "a", family="flat", error=1.0)]
    assert list(duel_goal("flat", duels(rows))) == []


def test_the_worst_system_is_one_that_misses_the_tolerance_before_one_that_is_slow() -> None:
    rows = []
    for name, ours in (
        ("slow", {"seconds": 9.0}),
        ("wrong", {"error": 1e-3}),
        ("good", {}),
        ("nan", {"error": math.nan}),
    ):
        rows += [row(name, 1.25, OURS, family="flat", **ours), row(name, 1.25, "a", family="flat")]

    def worst(kept: Callable[[Row], bool]) -> str:
        (goal,) = duel_goal("flat", duels([r for r in rows if kept(r)]))
        return goal.measured

    assert worst(lambda r: True) == "3 of 4 missed; worst nan at 1.25: error nan, a 1.0e-12"
    assert worst(lambda r: r.system != "nan") == "2 of 3 missed; worst wrong at 1.25: error 1.0e-03, a 1.0e-12"
    assert worst(lambda r: r.system in ("slow", "good")) == "1 of 2 missed; worst 9.00 at slow at 1.25: 9 s, a 1 s"
    assert worst(lambda r: r.system == "good") == "worst 1.00 at good at 1.25: 1 s, a 1 s"


# ---------------------------------------------------------------------------------------------- goals of large systems

CONV32, CONV64, CONV100, LINEAR = "conv 3x3, 32 ch", "conv 3x3, 64 ch", "conv 3x3, 100 ch", "64 x 64"
DENSE_ROW = {"seconds": 10.0, "memory": 20_000_000, "residual": 1e-11}


def test_the_goals_name_systems_of_the_grid() -> None:
    assert {CONV32, CONV64, CONV100, LINEAR} <= {one.name for one in GRID}


@pytest.mark.parametrize("excess", [1.25, 1.5, 2.0])
@pytest.mark.parametrize(
    ("ours", "is_met"),
    [
        ({"seconds": 2.0, "memory": 1_000_000, "residual": 1e-10}, True),
        ({"seconds": 2.01, "memory": 1_000_000, "residual": 1e-10}, False),
        ({"seconds": 2.0, "memory": 1_000_001, "residual": 1e-10}, False),
        ({"seconds": 2.0, "memory": 1_000_000, "residual": 1.1e-10}, False),
        ({"seconds": 2.0, "memory": 1_000_000, "residual": math.nan}, False),
        ({"seconds": 2.0, "memory": 0, "residual": 1e-10}, True),
    ],
)
def test_the_goal_against_lu(excess: float, ours: dict[str, float], is_met: bool) -> None:
    bench = bench_of([row(CONV32, excess, OURS, **ours), row(CONV32, excess, LU, **DENSE_ROW)])
    (goal,) = bench_module.large_goals(bench)
    assert goal.is_met is is_met
    assert "5 times faster than LU" in goal.aim


@pytest.mark.parametrize(
    ("name", "excess", "memory", "left_over", "is_met"),
    [
        (CONV64, 1.25, 999_999_999, 1e-10, True),
        (CONV64, 1.25, 1_000_000_000, 1e-10, False),
        (CONV64, 1.25, 1, 2e-10, False),
        (CONV64, 1.1, 1, 1e-10, True),
        (CONV64, 1.1, 1, 1e-9, False),
        (CONV100, 1.25, 2_999_999_999, 1e-10, True),
        (CONV100, 1.25, 3_000_000_000, 1e-10, False),
    ],
)
def test_the_goals_of_memory(name: str, excess: float, memory: int, left_over: float, is_met: bool) -> None:
    (goal,) = bench_module.large_goals(bench_of([row(name, excess, OURS, memory=memory, residual=left_over)]))
    assert goal.is_met is is_met


@pytest.mark.parametrize("name", [LINEAR, CONV32])
@pytest.mark.parametrize(
    ("ours", "is_met"),
    [
        ({"seconds": 7.0, "memory": 12_000_000, "residual": 1e-9}, True),
        ({"seconds": 7.1, "memory": 12_000_000, "residual": 1e-9}, False),
        ({"seconds": 7.0, "memory": 12_000_001, "residual": 1e-9}, False),
        ({"seconds": 7.0, "memory": 12_000_000, "residual": 1.1e-9}, False),
    ],
)
def test_the_goals_of_square_systems(name: str, ours: dict[str, float], is_met: bool) -> None:
    (goal,) = bench_module.large_goals(bench_of([row(name, 1.0, OURS, **ours), row(name, 1.0, LU, **DENSE_ROW)]))
    assert goal.is_met is is_met


@pytest.mark.parametrize("excess", [1.0, 1.25])
def test_a_dense_run_without_measurable_memory_divides_nothing_by_zero(excess: float) -> None:
    bench = bench_of([row(CONV32, excess, OURS), row(CONV32, excess, LU, memory=0)])
    assert [goal.is_met for goal in bench_module.large_goals(bench)] == [False]


def test_what_was_not_measured_has_no_goal() -> None:
    assert list(bench_module.large_goals(bench_of([row(CONV32, 1.25, OURS), row(LINEAR, 1.25, OURS)]))) == []
    assert bench_of([]).goals == []


@pytest.mark.parametrize(("rates", "is_met"), [((0.9, 0.81), True), ((0.9, 0.79), False)])
def test_the_slowest_iteration_is_judged(rates: tuple[float, ...], is_met: bool) -> None:
    (goal,) = bench_of([], dict(zip("ab", rates, strict=True))).goals
    assert goal.is_met is is_met
    assert goal.measured == f"worst {rates[1]} (b)"


@pytest.mark.parametrize(("power", "is_met"), [(1.0, True), (2.0, True), (2.25, True), (2.5, False), (3.0, False)])
def test_the_exponent_of_exact_powers_is_found_and_judged(power: float, is_met: bool) -> None:
    sizes = (256, 1024, 4096, 9216)
    rows = [row(f"n={n}", 1.25, OURS, equations=n, seconds=1e-9 * n**power, family="square") for n in sizes]
    exponent = bench_module.growth(rows, OURS)
    assert exponent is not None
    # A straight line through four exact points: rounding of logarithms of size 20, over a spread of 3.6.
    assert abs(exponent - power) <= 100 * EPS * 20
    (goal,) = bench_of(rows).goals
    assert goal.is_met is is_met
    assert goal.measured == f"N^{power:.2f}"


@pytest.mark.parametrize(("power", "is_met"), [(2.0, False), (2.6, True), (3.0, True)])
def test_lu_is_expected_to_grow_like_a_cube(power: float, is_met: bool) -> None:
    sizes = (256, 1024, 4096)
    rows = [row(f"n={n}", 1.25, LU, equations=n, seconds=1e-9 * n**power, family="convolution") for n in sizes]
    assert [goal.is_met for goal in bench_of(rows).goals] == [is_met]


def test_the_exponent_needs_three_finite_points_of_growing_families_at_excess_1_25() -> None:
    rows = [row(f"n={n}", 1.25, OURS, equations=n, family="square") for n in (16, 64)]
    others = [
        row("a", 1.1, OURS, family="square"),
        row("b", 1.25, LU, family="square"),
        row("d", 1.25, OURS, family="flat"),
    ]
    others += [row("c", 1.25, OURS, seconds=math.nan, family="square")]
    assert bench_module.growth(rows + others, OURS) is None


# ---------------------------------------------------------------------------------------------- results


def test_a_bench_is_met_when_every_goal_is() -> None:
    assert is_met(bench_of([]))
    assert is_met(bench_of([], {"a": 0.9}))
    assert not is_met(bench_of([], {"a": 0.7}))


def test_find_returns_the_row_or_none() -> None:
    bench = bench_of([row("a", 1.0, OURS), row("a", 1.25, OURS, seconds=2.0)])
    assert bench.find(system="a", excess=1.25, method=OURS) is bench.rows[1]
    assert bench.find(system="a", excess=1.5, method=OURS) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(24.4e-6, "24 us"), (999e-6, "999 us"), (9.996e-4, "1 ms"), (0.0123, "12.3 ms"), (77.04, "77 s")],
)
def test_times_are_written_in_the_unit_that_fits(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


def test_a_family_is_a_table_with_a_row_per_system() -> None:
    rows = [
        row("1 x 6", 0.5, OURS, family="flat", note="cholesky", seconds=0.01, error=2e-7, tolerance=1e-6, memory=0),
        row("1 x 6", 0.5, "a", family="flat", seconds=0.005, error=1e-9, tolerance=1e-6),
        row("1 x 6", 2.0, OURS, family="flat", note="krylov", memory=0),
        row("4 x 4", 2.0, OURS, family="tiny", note="lu", memory=2_000_000),
        row("4 x 4", 2.0, "b", family="tiny", seconds=2.0),
    ]
    flat, tiny = bench_of(rows).tables()
    assert flat.columns == ("flat", "excess", "ours by", "time", "error", "rival", "time", "error", "ratio")
    assert list(flat.rows) == [
        ("1 x 6", "0.5", "cholesky", "10 ms", "2e-07", "a", "5 ms", "1e-09", "2.00 !"),
        ("1 x 6", "2", "krylov", "1 s", "1e-12", "none", "-", "-", "-"),
    ]
    assert tiny.columns == ("tiny", *flat.columns[1:], "memory")
    assert list(tiny.rows) == [("4 x 4", "2", "lu", "1 s", "1e-12", "b", "2 s", "1e-12", "0.50", "2 MB")]


def test_the_tables_of_the_grid_fit_into_100_columns() -> None:
    rows = []
    for one in GRID:
        memory = 123_456_789 if one.equations >= METERED else 0
        ours = {"note": "least squares", "seconds": 0.00234, "memory": memory}
        rows.append(row(one.name, one.excess, OURS, family=one.family, **ours))
        rows.append(row(one.name, one.excess, LU, family=one.family, seconds=0.000123))
    for table in bench_of(rows).tables():
        widths = [max(map(len, column)) for column in zip(table.columns, *table.rows, strict=True)]
        assert sum(widths) + 2 * (len(widths) - 1) <= WIDTH == 100


def test_a_bench_as_plain_data_holds_every_field() -> None:
    bench = bench_of([row("a", 1.0, OURS, norm=1.0)], {"a": 0.9})
    plain = json.loads(json.dumps(bench.as_dict()))
    assert Row(**plain["rows"][0]) == bench.rows[0]
    assert Goal(**plain["goals"][0]) == bench.goals[0]


def test_what_json_printed_makes_the_same_tables_again(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row("a", 1.0, OURS, family="flat"), row("a", 1.0, LU, family="flat", seconds=math.nan, note="40 s")]
    bench = bench_of(rows, {"a": 0.9})
    print_json(bench.as_dict())
    again = from_dict(json.loads(capsys.readouterr().out))
    assert again.tables() == bench.tables()
    assert again.goals == bench.goals
