"""The benchmark: every competitor solves the same systems, ratios are ratios, and goals can be missed."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from onlynorm.bench import DENSE, FIRST, LSMR, OURS, PAPERS, TOLERANCE, Bench, Goal, Row, bench_solve, is_met
from onlynorm.bench import solve as bench_module
from onlynorm.features import draw
from onlynorm.solvers import KhatriRao

EPS = torch.finfo(torch.float64).eps
SINGLE_EPS = torch.finfo(torch.float32).eps
SMALL = {"linear 4x4": (4, 4), "conv 3x3, 3 ch": (3, 3, 3, 3), "linear 5x6": (5, 6)}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "SYSTEMS", SMALL)
    monkeypatch.setattr(bench_module, "QUICK", ("linear 4x4",))
    monkeypatch.setattr(bench_module, "EXCESSES", (1.0, 1.25))


def system(shape: tuple[int, ...], excess: float) -> tuple[Tensor, Tensor, Tensor]:
    features = draw("he_normal", shape, excess=excess, seed=0, layer="test")
    target = torch.from_numpy(np.random.default_rng(1).standard_normal((features.rows, features.cols)))
    return features.left(), features.right(), target


def residual(left: Tensor, right: Tensor, target: Tensor, gamma: Tensor) -> float:
    """The slow way: through the materialised matrix."""
    matrix = KhatriRao(left, right).materialise()[:, : len(gamma)]
    rest = matrix @ gamma.double() - target.flatten()
    return float(torch.linalg.vector_norm(rest) / torch.linalg.vector_norm(target))


def row(system: str, excess: float, method: str, **rest: Any) -> Row:
    usual = {"equations": 9216, "seconds": 1.0, "ratio": 1.0, "memory": 1, "residual": 1e-12, "iterations": 1}
    return Row(system, excess=excess, method=method, **(usual | rest))


# ---------------------------------------------------------------------------------------------- measuring


@pytest.mark.usefixtures("small")
def test_every_competitor_has_a_row_for_every_system_and_excess() -> None:
    said: list[str] = []
    bench = bench_solve(repeats=2, progress=said.append)
    places = [(r.system, r.excess, r.method) for r in bench.rows]
    methods = {1.0: (OURS, DENSE, PAPERS, LSMR), 1.25: (OURS, DENSE, FIRST, PAPERS, LSMR)}
    assert places == [(name, excess, method) for name in SMALL for excess in methods for method in methods[excess]]
    assert {r.system: r.equations for r in bench.rows} == {name: math.prod(shape) for name, shape in SMALL.items()}
    assert said[0] == "linear 4x4, excess 1.0"
    for r in bench.rows:
        ours = bench.find(r.system, r.excess, OURS)
        assert ours is not None
        assert r.ratio == r.seconds / ours.seconds
        assert r.seconds > 0.0
        assert r.memory >= 0
        assert (r.note == "normal equations") == (r.method == DENSE and r.excess > 1.0)
    assert all(r.residual <= TOLERANCE for r in bench.rows if r.method == OURS)
    assert all(r.ratio == 1.0 for r in bench.rows if r.method == OURS)


@pytest.mark.usefixtures("small")
def test_the_residual_of_a_row_is_that_of_the_gamma_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, tuple[float, float]] = {}

    def half(left: Tensor, right: Tensor, target: Tensor) -> tuple[Tensor, int]:
        gamma = torch.linspace(-1.0, 1.0, target.numel(), dtype=torch.float32)
        seen["half"] = residual(left, right, target, gamma), float(len(gamma))
        return gamma, 7

    monkeypatch.setattr(bench_module, "_dense", half)
    rows = bench_module._measure_system("conv 3x3, 3 ch", 1.25, 1)
    made = next(r for r in rows if r.method == DENSE)
    wanted, n_features = seen["half"]
    assert abs(made.residual - wanted) <= n_features * EPS * wanted
    assert made.iterations == 7


@pytest.mark.usefixtures("small")
def test_quick_leaves_out_the_large_systems() -> None:
    assert {r.system for r in bench_solve(quick=True, repeats=1).rows} == {"linear 4x4"}


@pytest.mark.usefixtures("small")
def test_dense_competitors_beyond_the_limit_are_rows_that_say_what_they_would_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_module, "DENSE_LIMIT", 25)
    bench = bench_solve(repeats=1)
    assert bench.find("linear 4x4", 1.25, DENSE).note == "normal equations"  # type: ignore[union-attr]
    for name, equations in (("linear 5x6", 30), ("conv 3x3, 3 ch", 81)):
        dense = bench.find(name, 1.25, DENSE)
        assert dense is not None
        assert dense.memory == 8 * equations**2
        assert math.isnan(dense.seconds)
        assert math.isnan(dense.ratio)
        assert math.isnan(dense.residual)
        assert dense.note.startswith("not run: the matrix alone is ")
        assert bench.find(name, 1.25, PAPERS) is None
        assert bench.find(name, 1.25, LSMR) is not None
        assert bench.find(name, 1.0, LSMR) is None


@pytest.mark.usefixtures("small")
def test_lsmr_is_left_out_far_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "DENSE_LIMIT", 20)
    methods = [r.method for r in bench_module._measure_system("conv 3x3, 3 ch", 1.25, 1)]
    assert methods == [OURS, DENSE]


@pytest.mark.usefixtures("small")
def test_lsmr_says_so_when_it_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    def note(steps: int) -> str:
        monkeypatch.setattr(bench_module, "LSMR_STEPS", steps)
        return next(r.note for r in bench_module._measure_system("linear 5x6", 1.25, 1) if r.method == LSMR)

    assert note(2) == "stopped"
    assert note(10_000) == ""


def test_large_systems_are_measured_at_one_excess_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "SYSTEMS", {"wide": (100, 2)})
    monkeypatch.setattr(bench_module, "DENSE_LIMIT", 1)
    assert {r.excess for r in bench_solve(repeats=1).rows} == {1.25}


def test_turns_keep_the_best_time_and_the_highest_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 5.0, 10.0, 12.0, 20.0, 23.0])
    peaks = iter([10, 30, 20])

    class Meter:
        def __enter__(self) -> Meter:
            self.peak = next(peaks)
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(bench_module.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(bench_module, "MemoryMeter", Meter)
    solver = lambda *_: (torch.ones(1), 3)  # noqa: E731
    best = bench_module._take_turns({"a": solver}, (torch.ones(1, 1),) * 3, 3)["a"]
    assert (best.seconds, best.memory, best.iterations) == (2.0, 30, 3)


# ---------------------------------------------------------------------------------------------- competitors


@pytest.mark.parametrize("shape", [(4, 4), (3, 3, 3, 3)])
@pytest.mark.parametrize("excess", [1.0, 1.25])
def test_dense_lu_without_the_excess_solves_the_square_system(shape: tuple[int, ...], excess: float) -> None:
    left, right, target = system(shape, excess)
    gamma, _ = bench_module._first(left, right, target)
    n = target.numel()
    matrix = KhatriRao(left, right).materialise()[:, :n]
    assert gamma.shape == (n,)
    # Backward stability of LU with partial pivoting, with a growth factor of at most n here.
    kappa = float(torch.linalg.cond(matrix))
    assert residual(left, right, target, gamma) <= n**2 * EPS * kappa


@pytest.mark.parametrize("excess", [1.0, 1.25])
def test_dense_lu_finds_the_solution_of_least_norm(excess: float) -> None:
    left, right, target = system((3, 3, 3, 3), excess)
    gamma, _ = bench_module._dense(left, right, target)
    matrix = KhatriRao(left, right).materialise()
    wanted = torch.linalg.pinv(matrix) @ target.flatten()
    kappa = float(torch.linalg.cond(matrix))
    n = target.numel()
    assert torch.linalg.vector_norm(gamma - wanted) <= n * EPS * kappa**2 * torch.linalg.vector_norm(wanted)


@pytest.mark.parametrize("excess", [1.25, 1.5])
def test_lsmr_solves_a_small_system_to_its_tolerance(excess: float) -> None:
    left, right, target = system((4, 5), excess)
    gamma, iterations = bench_module._lsmr(left, right, target)
    assert 0 < iterations < bench_module.LSMR_STEPS
    kappa = float(torch.linalg.cond(KhatriRao(left, right).materialise()))
    assert residual(left, right, target, gamma) <= TOLERANCE * kappa


@pytest.mark.parametrize("excess", [1.0, 1.5])
def test_the_papers_way_solves_a_small_system_to_single_precision(excess: float) -> None:
    left, right, target = system((4, 5), excess)
    gamma, evaluations = bench_module._papers(left, right, target)
    assert gamma.dtype == torch.float32
    assert evaluations > 0
    kappa = float(torch.linalg.cond(KhatriRao(left, right).materialise()))
    assert residual(left, right, target, gamma) <= target.numel() * SINGLE_EPS * kappa


# ---------------------------------------------------------------------------------------------- goals

CONV32, CONV64, CONV100, LINEAR = "conv 3x3, 32 ch", "conv 3x3, 64 ch", "conv 3x3, 100 ch", "linear 64x64"
DENSE_ROW = {"seconds": 10.0, "memory": 20_000_000, "residual": 1e-11}


@pytest.mark.parametrize(
    ("ours", "is_met"),
    [
        ({"seconds": 1.0, "memory": 1_000_000, "residual": 1e-10}, True),
        ({"seconds": 1.01, "memory": 1_000_000, "residual": 1e-10}, False),
        ({"seconds": 1.0, "memory": 1_000_001, "residual": 1e-10}, False),
        ({"seconds": 1.0, "memory": 1_000_000, "residual": 1.1e-10}, False),
        ({"seconds": 1.0, "memory": 1_000_000, "residual": math.nan}, False),
        ({"seconds": 1.0, "memory": 0, "residual": 1e-10}, True),
    ],
)
def test_the_goal_against_dense_lu(ours: dict[str, float], is_met: bool) -> None:
    bench = Bench(
        [row(CONV32, 1.25, OURS, **ours), row(CONV32, 1.25, DENSE, **DENSE_ROW), row(CONV32, 1.25, FIRST, **DENSE_ROW)]
    )
    (goal,) = bench_module._solve_goals(bench)
    assert goal.is_met is is_met
    assert "10 times faster" in goal.aim


@pytest.mark.parametrize("slow", [DENSE, FIRST])
def test_the_goal_is_judged_by_the_faster_dense_method(slow: str) -> None:
    seconds = {DENSE: 7.0, FIRST: 7.0, slow: 30.0}
    rivals = [row(CONV32, 1.25, m, seconds=seconds[m], memory=20_000_000, residual=1e-11) for m in (DENSE, FIRST)]
    (goal,) = bench_module._solve_goals(
        Bench([row(CONV32, 1.25, OURS, seconds=1.0, memory=1, residual=1e-11), *rivals])
    )
    assert not goal.is_met


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
    (goal,) = bench_module._solve_goals(Bench([row(name, excess, OURS, memory=memory, residual=left_over)]))
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
    bench = Bench([row(name, 1.0, OURS, **ours), row(name, 1.0, DENSE, **DENSE_ROW)])
    (goal,) = bench_module._solve_goals(bench)
    assert goal.is_met is is_met


@pytest.mark.parametrize("excess", [1.0, 1.25])
def test_a_dense_run_without_measurable_memory_divides_nothing_by_zero(excess: float) -> None:
    bench = Bench(
        [row(CONV32, excess, OURS), row(CONV32, excess, DENSE, memory=0), row(CONV32, excess, FIRST, memory=0)]
    )
    assert [goal.is_met for goal in bench_module._solve_goals(bench)] == [False]


def test_what_was_not_measured_has_no_goal() -> None:
    assert list(bench_module._solve_goals(Bench([row(CONV32, 1.25, OURS), row(LINEAR, 1.25, OURS)]))) == []


@pytest.mark.parametrize(("power", "is_met"), [(1.0, True), (2.0, True), (2.25, True), (2.5, False), (3.0, False)])
def test_the_exponent_of_exact_powers_is_found_and_judged(power: float, is_met: bool) -> None:
    sizes = (256, 1024, 4096, 9216)
    bench = Bench([row(f"n={n}", 1.25, OURS, equations=n, seconds=1e-9 * n**power) for n in sizes])
    exponent = bench_module._exponent(bench, OURS)
    assert exponent is not None
    # A straight line through four exact points: rounding of logarithms of size 20, over a spread of 3.6.
    assert abs(exponent - power) <= 100 * EPS * 20
    (goal,) = bench_module._growth_goals(bench)
    assert goal.is_met is is_met
    assert goal.measured == f"N^{power:.2f}"


@pytest.mark.parametrize(("power", "is_met"), [(2.0, False), (2.6, True), (3.0, True)])
def test_dense_lu_is_expected_to_grow_like_a_cube(power: float, is_met: bool) -> None:
    bench = Bench([row(f"n={n}", 1.25, DENSE, equations=n, seconds=1e-9 * n**power) for n in (256, 1024, 4096)])
    assert [goal.is_met for goal in bench_module._growth_goals(bench)] == [is_met]


def test_the_exponent_needs_three_finite_points_at_excess_1_25() -> None:
    rows = [row(f"n={n}", 1.25, OURS, equations=n) for n in (16, 64)]
    others = [row("a", 1.1, OURS), row("b", 1.25, DENSE), row("c", 1.25, OURS, seconds=math.nan)]
    assert bench_module._exponent(Bench(rows + others), OURS) is None


@pytest.mark.usefixtures("small")
def test_every_system_has_a_goal_for_the_rate_of_one_iteration() -> None:
    goals = list(bench_module._rate_goals(SMALL, None))
    assert [goal.aim.split(":")[0] for goal in goals] == list(SMALL)


# ---------------------------------------------------------------------------------------------- results


def test_a_bench_is_met_when_every_goal_is() -> None:
    met, missed = Goal("a", "b", True), Goal("a", "b", False)
    assert is_met(Bench())
    assert is_met(Bench(goals=[met, met]))
    assert not is_met(Bench(goals=[met, missed]))


def test_find_returns_the_row_or_none() -> None:
    bench = Bench([row("a", 1.0, OURS), row("a", 1.25, OURS, seconds=2.0)])
    assert bench.find("a", 1.25, OURS) is bench.rows[1]
    assert bench.find("a", 1.5, OURS) is None


def test_a_bench_as_plain_data_holds_every_field() -> None:
    bench = Bench([row("a", 1.0, OURS)], [Goal("aim", "measured", True)])
    plain = json.loads(json.dumps(bench.as_dict()))
    assert Row(**plain["rows"][0]) == bench.rows[0]
    assert Goal(**plain["goals"][0]) == bench.goals[0]
