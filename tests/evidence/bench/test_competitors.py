"""The grid and the rivals of `bench solve`: each solves what it is meant to solve, as exactly as its kind can."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from systems import bench_system, materialise, residual

from onlynorm.evidence.bench import competitors
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
)
from onlynorm.evidence.bench.duels import TOLERANCE
from onlynorm.evidence.bench.systems import FAMILIES, GRID, System

EPS = torch.finfo(torch.float64).eps
SINGLE_EPS = torch.finfo(torch.float32).eps
DENSE = (LU, CHOLESKY, QR, GELSY, GELSD)


# ---------------------------------------------------------------------------------------------- the grid


def test_the_grid_has_every_family_and_each_system_once() -> None:
    assert FAMILIES == ("flat", "tall", "tiny", "square", "sparse", "unequal", "convolution")
    places = [(one.name, one.excess) for one in GRID]
    assert len(set(places)) == len(places)
    assert {one.excess for one in GRID} >= {0.5, 0.9, 1.0, 1.02, 1.1, 1.25, 1.5, 2.0, 4.0}


@pytest.mark.parametrize("one", [one for one in GRID if one.equations <= 1000], ids=str)
def test_a_system_has_the_features_that_its_excess_says(one: System) -> None:
    left, right, target = one.make()
    assert left.dtype == right.dtype == target.dtype == torch.float64
    assert (len(left), right.shape[1]) == tuple(target.shape)
    assert left.shape[1] == len(right) == math.ceil(one.excess * one.equations)


def test_lengths_of_features_and_rows_of_left_range_over_their_decades() -> None:
    plain, _, _ = bench_system((3, 4), 1.25)
    features, _, _ = bench_system((3, 4), 1.25, decades=(2.0, 0.0))
    rows, _, _ = bench_system((3, 4), 1.25, decades=(0.0, 3.0))
    torch.testing.assert_close(features / plain, torch.logspace(-2, 2, 15).double().expand(3, 15))
    torch.testing.assert_close(rows / plain, torch.logspace(-3, 3, 3).double()[:, None].expand(3, 15))


def test_cauchy_features_have_the_quartiles_of_the_cauchy_distribution() -> None:
    left, right, _ = bench_system((40, 40), 1.25, features="cauchy")
    for part in (left, right):
        # Half of a standard Cauchy distribution lies within 1; two layers of equal variance leave no other scale.
        share = float((part.abs() < 1.0).double().mean())
        assert abs(share - 0.5) <= 5 * 0.5 / math.sqrt(part.numel())


# ---------------------------------------------------------------------------------------------- rivals


@pytest.mark.parametrize(("method", "excess"), [*itertools.product(DENSE, (1.0, 1.25)), (LSMR, 1.25), (LSMR, 1.5)])
@pytest.mark.parametrize("shape", [(4, 5), (1, 20), (20, 1), (2, 3, 3, 3)])
def test_rivals_solve_a_solvable_system(method: str, shape: tuple[int, ...], excess: float) -> None:
    left, right, target = bench_system(shape, excess)
    found = SOLVERS[method](left, right, target)
    matrix = materialise(left, right)
    n = target.numel()
    kappa = float(torch.linalg.cond(matrix[:, :n] if method == LU else matrix))
    # The normal equations square the condition number; one step of refinement gives back what they lost.
    bound = TOLERANCE * kappa if method == LSMR else n**2 * EPS * kappa
    assert residual(left, right, target, found.gamma) <= bound


@pytest.mark.parametrize("method", [CHOLESKY, QR, GELSY, GELSD, LSMR])
@pytest.mark.parametrize(("shape", "excess"), [((4, 5), 0.5), ((1, 20), 0.5), ((20, 1), 0.9), ((4, 5), 2.0)])
def test_rivals_find_the_least_squares_solution_of_least_norm(
    method: str, shape: tuple[int, ...], excess: float
) -> None:
    left, right, target = bench_system(shape, excess)
    if method == LSMR and excess > 1:  # features of unit length: least norm in the scaled gamma
        left = left / torch.linalg.vector_norm(left, dim=0)
        right = right / torch.linalg.vector_norm(right, dim=1, keepdim=True)
    matrix = materialise(left, right)
    gamma = SOLVERS[method](left, right, target).gamma
    wanted = torch.linalg.pinv(matrix) @ target.flatten()
    kappa = float(torch.linalg.cond(matrix))
    bound = (competitors.EXACT + competitors.FIT if method == LSMR else target.numel() * EPS) * 10 * kappa**2
    assert torch.linalg.vector_norm(gamma - wanted) <= bound * torch.linalg.vector_norm(wanted)


def test_lsmr_says_so_when_it_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    given = bench_system((5, 6), 1.25)
    assert competitors.lsmr(*given).note == ""
    monkeypatch.setattr(competitors, "LSMR_STEPS", 2)
    assert competitors.lsmr(*given).note == "stopped"


def test_lsmr_does_not_see_the_lengths_of_features() -> None:
    plain, scaled = bench_system((5, 6), 1.5), bench_system((5, 6), 1.5, decades=(4.0, 0.0))
    assert abs(competitors.lsmr(*plain).iterations - competitors.lsmr(*scaled).iterations) <= 1


@pytest.mark.parametrize("excess", [1.0, 1.5])
def test_the_papers_method_solves_a_small_system_to_single_precision(excess: float) -> None:
    left, right, target = bench_system((4, 5), excess)
    gamma, evaluations, _ = competitors.papers(left, right, target)
    assert gamma.dtype == torch.float32
    assert evaluations > 0
    kappa = float(torch.linalg.cond(materialise(left, right)))
    assert residual(left, right, target, gamma) <= target.numel() * SINGLE_EPS * kappa


@pytest.mark.parametrize("solver", [competitors.lu, competitors.cholesky])
def test_a_singular_matrix_is_a_failure_with_a_note(solver: competitors.Solver) -> None:
    left, right, target = torch.zeros(2, 4).double(), torch.ones(4, 2).double(), torch.ones(2, 2).double()
    found = competitors.without_failure(solver, left, right, target)
    assert found.note.startswith("failed: pivot")
    assert bool(found.gamma.isnan().all())


@pytest.mark.parametrize("excess", [0.5, 2.0])
def test_the_least_squares_fit_is_the_projection_of_the_target(excess: float) -> None:
    left, right, target = bench_system((4, 5), excess)
    left[:, ::3] = 0.0  # features that are zero take no part
    matrix = materialise(left, right)
    wanted = (matrix @ torch.linalg.pinv(matrix) @ target.flatten()).reshape(target.shape)
    torch.testing.assert_close(competitors.least_squares_fit(left, right, target), wanted)


# ---------------------------------------------------------------------------------------------- rates


def test_predictions_grow_with_the_work_and_leave_ours_and_the_papers_in() -> None:
    for method in SOLVERS:
        times = [competitors.predicted_seconds(method, (side, side), 2 * side**2, 1e10) for side in (8, 16)]
        if method in (OURS, ANY, PAPERS):
            assert times == [0.0, 0.0]
        else:
            assert math.log2(times[1] / times[0]) == pytest.approx(4.0 if method == LSMR else 6.0)
    few, square = (competitors.predicted_seconds(CHOLESKY, (1, 1000), n, 1e10) for n in (500, 1000))
    assert few < square / 3


def test_the_rate_of_an_iteration_is_measured_on_wide_and_tall_shapes() -> None:
    assert all(0.0 < competitors.iteration_rate(shape) < 100.0 for shape in ((4, 6), (6, 4), (2, 2, 3, 3)))
