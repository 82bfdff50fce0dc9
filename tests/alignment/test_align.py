"""Alignment: every fast table against the slow definition, every method against all permutations."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensors import normal
from torch import Tensor

from onlynorm.alignment import METHODS, PerOutput, align, align_within, find_directions, objective_for
from onlynorm.alignment import directions as directions_module
from onlynorm.alignment import objective as objective_module
from onlynorm.alignment.directions import CLEAN, Directions, missed_by_single_factor
from onlynorm.alignment.objective import Objective, Order
from onlynorm.alignment.search import Swaps, best_of_random, greedy, tabu_search, two_opt
from onlynorm.errors import MemoryLimitError, ShapeError, UnknownNameError, ValueRangeError
from onlynorm.evidence.bench.papers_method import greedy_as_described
from onlynorm.features import draw
from onlynorm.solvers import KhatriRao

EPS = torch.finfo(torch.float64).eps
SEARCHES = METHODS[:-1]


def factors(name: str, shape: tuple[int, int], n_features: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    features = draw(name, shape, n_features=n_features, seed=seed)
    return features.left(), features.right()


def missed_by_lstsq(target: Tensor, left: Tensor, right: Tensor) -> float:
    """The least squared error over gamma, from the materialised matrix."""
    matrix = KhatriRao(left, right).materialise().numpy()
    wanted = target.flatten().numpy()
    gamma = np.linalg.lstsq(matrix, wanted, rcond=None)[0]
    return float(np.square(matrix @ gamma - wanted).sum())


def best_by_trying_all(target: Tensor, left: Tensor, right: Tensor) -> float:
    objective = objective_for(target, find_directions(left, right))
    return min(objective.missed(np.array(order)) for order in itertools.permutations(range(len(target))))


# ------------------------------------------------------------------------------- the objective


@pytest.mark.parametrize("name", ["he_normal", "orthogonal", "er_sign", "er_normal"])
@pytest.mark.parametrize("n_features", [4, 17, 25, 29])  # the reached basis, and the missed one by two ways
def test_the_objective_is_the_error_of_least_squares(name: str, n_features: int) -> None:
    left, right = factors(name, (5, 6), n_features, seed=2)
    target = normal(5, 6)
    objective = objective_for(target, find_directions(left, right))
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(5)
        expected = missed_by_lstsq(target[torch.from_numpy(order)], left, right)
        # The square root of the Gram matrix costs half of the digits of the condition number, which is below 1e4 here.
        assert objective.missed(order) == pytest.approx(expected, abs=1e-9 * float(target.square().sum()))


@pytest.mark.parametrize(("name", "n_features"), [("he_normal", 200), ("er_sign", 190), ("he_uniform", 220)])
def test_a_factor_in_single_precision_finds_the_same_directions(name: str, n_features: int) -> None:
    left, right = factors(name, (15, 15), n_features, seed=3)
    unit = KhatriRao(left / KhatriRao(left, right).column_squares().sqrt(), right)
    missed = missed_by_single_factor(unit)
    assert missed is not None
    assert missed.shape == (225, 225 - n_features)
    assert float((missed.mT @ missed - torch.eye(225 - n_features)).abs().max()) <= 1000 * EPS
    # What is verified are random directions, not the basis: three times the bound leaves room for that.
    assert float((unit.materialise().mT @ missed).abs().max()) <= 3 * CLEAN
    target = normal(15, 15)
    expected = missed_by_lstsq(target, left, right)
    energy = float(target.square().sum())
    assert float((missed.mT @ target.flatten()).square().sum()) == pytest.approx(expected, abs=CLEAN * energy)


def test_directions_too_fine_for_single_precision_are_found_in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directions_module, "MANY", 1)
    left, right = factors("he_normal", (8, 8), 50)
    assert missed_by_single_factor(KhatriRao(left, right)) is not None
    near = left.clone(), right.clone()
    near[0][:, 1], near[1][1] = left[:, 0], right[0] + 1e-4 * right[1]  # almost the first feature once more
    lengths = KhatriRao(*near).column_squares().sqrt()
    assert missed_by_single_factor(KhatriRao(near[0] / lengths, near[1])) is None
    found = find_directions(*near)
    assert isinstance(found, Directions)
    assert found.rank == 50
    target = normal(8, 8)
    expected = missed_by_lstsq(target, *near)
    assert objective_for(target, found).missed(np.arange(8)) == pytest.approx(expected, rel=1e-6)


def test_dependent_and_dead_features_change_nothing() -> None:
    left, right = factors("he_normal", (5, 6), 20)
    twice = torch.cat([left, left[:, :4] * 3.0, torch.zeros(5, 2)], 1), torch.cat([right, right[:4], right[:2]])
    once, again = find_directions(left, right), find_directions(*twice)
    assert isinstance(again, Directions)
    assert once.rank == again.rank == 20
    target = normal(5, 6)
    for order in (np.arange(5), np.array([3, 1, 4, 0, 2])):
        expected = objective_for(target, once).missed(order)
        assert objective_for(target, again).missed(order) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("n_features", [30, 36])
def test_enough_features_leave_nothing_to_align(n_features: int) -> None:
    left, right = factors("he_normal", (5, 6), n_features)
    found = align(normal(5, 6), left, right)
    assert found.n_missed == 0
    assert found.objective == found.unaligned == 0.0
    assert found.is_optimal
    assert found.permutation.tolist() == list(range(5))
    assert "nothing to align" in str(found)


def test_many_features_that_share_a_span_are_seen_through() -> None:
    left, right = factors("he_normal", (4, 4), 5)
    left, right = left.repeat(1, 4), right.repeat(4, 1)  # 20 features for 16 equations, of rank 5
    assert find_directions(left, right).rank == 5


def test_directions_of_one_output_each_are_the_general_ones() -> None:
    features = draw("id_cond", (6, 7), density=0.6, seed=1)
    left, right = features.left(), features.right()
    found = find_directions(left, right)
    assert isinstance(found, PerOutput)
    assert found.rank == features.n_features
    assert found.n_missed == 42 - features.n_features
    target = normal(6, 7)
    objective = objective_for(target, found)
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(6)
        expected = missed_by_lstsq(target[torch.from_numpy(order)], left, right)
        assert objective.missed(order) == pytest.approx(expected, abs=100 * EPS * float(target.square().sum()))


# ------------------------------------------------------------------------------- the methods


@pytest.mark.parametrize("name", ["he_normal", "he_uniform", "er_normal"])
@pytest.mark.parametrize("n_features", [90, 40])
def test_greedy_makes_the_choices_of_the_described_one(name: str, n_features: int) -> None:
    left, right = factors(name, (10, 10), n_features, seed=5)
    target = normal(10, 10, seed=1)
    order = greedy(objective_for(target, find_directions(left, right)))
    assert order.tolist() == greedy_as_described(left, right, target).tolist()


def a_problem(n_rows: int, n_dims: int, sign: float, seed: int) -> Objective:
    generator = np.random.default_rng(seed)
    pieces = generator.standard_normal((n_rows, n_rows, n_dims))
    return Objective(pieces, generator.random(n_rows), sign, 0.0 if sign > 0 else 1e6)


def score(objective: Objective, order: Order) -> float:
    total = objective.total(order)
    return objective.sign * float(total @ total)


@given(st.integers(2, 8), st.integers(1, 6), st.sampled_from([1.0, -1.0]), st.integers(0, 1000))
def test_the_table_of_swaps_says_what_each_swap_changes(n_rows: int, n_dims: int, sign: float, seed: int) -> None:
    objective, generator = a_problem(n_rows, n_dims, sign, seed), np.random.default_rng(seed)
    swaps = Swaps(objective, generator.permutation(n_rows))
    for _ in range(4):  # the table is updated, not made anew: errors would pile up here
        first, second = generator.permutation(n_rows)[:2]
        swaps.swap(int(first), int(second))
        changes = swaps.changes()
        for i, k in itertools.product(range(n_rows), repeat=2):
            order = swaps.order.copy()
            order[i], order[k] = order[k], order[i]
            change = score(objective, order) - score(objective, swaps.order)
            assert changes[i, k] == pytest.approx(change, abs=1e-10)
    assert swaps.score == pytest.approx(score(objective, swaps.order), abs=1e-10)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("seed", range(5))
def test_each_method_is_at_least_as_good_as_what_it_starts_from(sign: float, seed: int) -> None:
    objective = a_problem(12, 6, sign, seed)
    start = score(objective, np.arange(12))
    by_greedy = greedy(objective)
    by_swaps = two_opt(objective, by_greedy)
    by_walk = tabu_search(objective, by_swaps, n_steps=200, seed=seed)
    scores = [start, *(score(objective, order) for order in (by_greedy, by_swaps, by_walk))]
    # Equal orders may be scored by sums in another order: 12 rows of numbers of the size of the largest score.
    slack = 12**2 * EPS * max(map(abs, scores))
    assert all(later <= earlier + slack for earlier, later in itertools.pairwise(scores))
    assert score(objective, best_of_random(objective, n_tries=300, seed=seed)) <= start + slack
    for order in (by_greedy, by_swaps, by_walk):
        assert sorted(order.tolist()) == list(range(12))


def test_after_two_opt_no_swap_helps() -> None:
    objective = a_problem(10, 4, 1.0, 3)
    order = two_opt(objective, np.arange(10))
    for i, k in itertools.combinations(range(10), 2):
        other = order.copy()
        other[i], other[k] = other[k], other[i]
        assert score(objective, other) >= score(objective, order) * (1 - 1e-9)


def test_best_of_random_is_the_best_of_those_it_draws() -> None:
    objective = a_problem(5, 4, 1.0, 3)
    lowest = min(score(objective, np.array(order)) for order in itertools.permutations(range(5)))
    # 120 orders, 3000 tries: the best is missed with probability (119/120)^3000, below 1e-10.
    assert score(objective, best_of_random(objective, n_tries=3000, seed=0)) == pytest.approx(lowest)


@pytest.mark.parametrize("n_features", [12, 27])
def test_best_finds_the_optimum_of_small_problems(n_features: int) -> None:
    left, right = factors("he_normal", (6, 5), n_features)
    target = normal(6, 5)
    found = align(target, left, right)
    lowest = best_by_trying_all(target, left, right)
    assert found.objective == pytest.approx(lowest, rel=1e-9)
    assert not found.is_optimal  # found, but not proved
    assert missed_by_lstsq(target[found.permutation], left, right) == pytest.approx(found.objective, rel=1e-6)


@given(st.integers(2, 6), st.integers(2, 5), st.floats(0.3, 0.9), st.integers(0, 100))
def test_assignment_is_the_optimum_where_features_feed_one_output(
    out: int, inp: int, density: float, seed: int
) -> None:
    features = draw("er_normal", (1, inp), n_features=2 * out, seed=seed)  # any rights, not only unit vectors
    kept = torch.rand(2 * out, generator=torch.Generator().manual_seed(seed)) < density
    left = torch.eye(out, dtype=torch.float64).repeat(1, 2)[:, kept]
    right = features.right()[kept]
    target = normal(out, inp, seed=seed)
    if not kept.any():
        return
    found = align(target, left, right)
    assert found.method == "assignment"
    assert found.is_optimal
    assert found.objective == pytest.approx(best_by_trying_all(target, left, right), abs=1e-12)


def test_a_sparse_target_hidden_in_sparse_features_is_found() -> None:
    features = draw("id_cond", (30, 30), density=0.8, seed=4)
    mask = features.structure.apply(torch.ones(features.n_features, dtype=torch.float64))  # type: ignore[union-attr]
    hidden = normal(30, 30) * mask
    target = hidden[torch.randperm(30, generator=torch.Generator().manual_seed(1))]
    found = align(target, features.left(), features.right())
    assert found.unaligned_error > 0.1
    assert found.error < 1e-7
    assert torch.equal(target[found.permutation] * mask, target[found.permutation])


@pytest.mark.parametrize("method", SEARCHES)
def test_one_method_can_be_asked_for(method: str) -> None:
    left, right = factors("he_normal", (8, 8), 50)
    found = align(normal(8, 8), left, right, method=method)
    assert found.method == method
    assert [attempt.method for attempt in found.attempts] == [method]
    assert found.objective <= found.unaligned


def test_best_reports_every_attempt_and_keeps_the_lowest() -> None:
    left, right = factors("he_normal", (12, 12), 120)
    found = align(normal(12, 12), left, right)
    assert tuple(attempt.method for attempt in found.attempts) == SEARCHES
    assert found.objective == min(attempt.objective for attempt in found.attempts)
    assert found.seconds >= found.preparation > 0
    text = str(found)
    assert f"12 rows aligned by {found.method}" in text
    assert "24 directions missed" in text
    assert all(name in text for name in SEARCHES)
    assert found.error == pytest.approx(math.sqrt(found.objective / found.energy))


def test_directions_found_once_serve_many_targets() -> None:
    left, right = factors("he_normal", (8, 8), 50)
    directions = find_directions(left, right)
    for seed in range(3):
        target = normal(8, 8, seed=seed)
        once, again = align(target, left, right, seed=1), align_within(target, directions, seed=1)
        assert torch.equal(once.permutation, again.permutation)
        assert once.objective == again.objective


def test_single_precision_is_solved_in_double() -> None:
    left, right = factors("he_normal", (8, 8), 50)
    target = normal(8, 8).float()
    single, double = align(target, left, right), align(target.double(), left, right)
    assert single.objective == double.objective


def test_one_row_has_one_order() -> None:
    left, right = factors("he_normal", (1, 6), 3)
    found = align(normal(1, 6), left, right)
    assert found.permutation.tolist() == [0]
    assert found.objective == found.unaligned > 0


def test_a_zero_target_is_aligned_already() -> None:
    left, right = factors("he_normal", (4, 4), 10)
    found = align(torch.zeros(4, 4, dtype=torch.float64), left, right)
    assert found.error == found.unaligned_error == 0.0


# ------------------------------------------------------------------------------- the cases of figure 4, small


@pytest.mark.parametrize("rank", [2, 40])
def test_the_walk_ends_lower_than_greedy_on_low_rank_targets(rank: int) -> None:
    gains = []
    for seed in range(4):
        directions = find_directions(*factors("he_normal", (20, 20), 380, seed=seed))
        a, b = factors("he_normal", (20, 20), rank, seed=100 + seed)
        target = a @ b
        gains.append(
            align_within(target, directions, method="tabu").objective
            / align_within(target, directions, method="greedy").objective
        )
    assert max(gains) < 1.0


# ------------------------------------------------------------------------------- what cannot be asked


@pytest.mark.usefixtures("unchecked")
def test_shapes_that_do_not_fit_are_named() -> None:
    left, right = factors("he_normal", (4, 6), 10)
    with pytest.raises(ShapeError, match=r"target \(out, inp\).*got \(6, 4\).*flatten"):
        align(normal(6, 4), left, right)
    with pytest.raises(ShapeError, match=r"got \(4, 6, 3\)"):
        align(normal(4, 6, 3), left, right)


@pytest.mark.parametrize("name", ["he_normal", "id_cond"])
def test_a_target_of_another_shape_than_the_directions_is_named(name: str) -> None:
    features = draw(name, (4, 6), n_features=10) if name == "he_normal" else draw(name, (4, 6), density=0.5)
    directions = find_directions(features.left(), features.right())
    assert directions.shape == (4, 6)
    with pytest.raises(ShapeError, match=r"shape \(4, 6\).*got \(5, 6\)"):
        align_within(normal(5, 6), directions)


def test_an_unknown_method_is_named() -> None:
    left, right = factors("he_normal", (4, 6), 10)
    with pytest.raises(UnknownNameError, match="Did you mean 'greedy'"):
        align(normal(4, 6), left, right, method="gredy")


def test_assignment_needs_features_of_one_output() -> None:
    left, right = factors("he_normal", (4, 6), 10)
    with pytest.raises(ValueRangeError, match="one output each"):
        align(normal(4, 6), left, right, method="assignment")


def test_a_layer_that_does_not_fit_is_refused_before_it_is_decomposed(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = factors("he_normal", (8, 8), 60)
    monkeypatch.setattr(directions_module, "memory_limit", lambda: 10_000)
    with pytest.raises(MemoryLimitError, match="64 equations and 60 features"):
        align(normal(8, 8), left, right)
    monkeypatch.setattr(objective_module, "SMALL", 1000)
    monkeypatch.setattr(objective_module, "memory_limit", lambda: 2000)
    monkeypatch.setattr(directions_module, "memory_limit", lambda: 10**9)
    with pytest.raises(MemoryLimitError, match="tables of 8 x 8 x 4"):
        align(normal(8, 8), left, right)


def test_numbers_that_are_none_are_refused() -> None:
    left, right = factors("he_normal", (4, 6), 10)
    target = normal(4, 6)
    target[1, 2] = math.nan
    with pytest.raises(ValueRangeError, match="finite target"):
        align(target, left, right)
    with pytest.raises(ValueRangeError, match="finite features"):
        align(normal(4, 6), left, right / 0.0)
