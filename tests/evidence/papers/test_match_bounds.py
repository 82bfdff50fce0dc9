"""Bounds on sparse targets inside sparse features, against every mask there is, and against simulations."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onlynorm.errors import ShapeError, ValueRangeError
from onlynorm.evidence.papers.random_features.match_bounds import (
    Mask,
    MatchTrials,
    density_for_match,
    fits_inside,
    match_bound,
    outputs_per_row,
    partition_chance,
    printed_outputs_per_row,
    simulate_match,
    simulate_random_match,
)


def all_masks(rows: int, cols: int) -> list[Mask]:
    return [
        np.array(bits, dtype=np.bool_).reshape(rows, cols) for bits in itertools.product([0, 1], repeat=rows * cols)
    ]


def exact_chance(target: Mask, density: float, n_outputs: int) -> float:
    """The probability that a random mask contains the target, summed over all masks and all orders."""
    total = 0.0
    for mask in all_masks(n_outputs, target.shape[1]):
        orders = itertools.permutations(range(n_outputs), len(target))
        if any(all((mask[o] | ~row).all() for o, row in zip(order, target, strict=True)) for order in orders):
            n_kept = int(mask.sum())
            total += density**n_kept * (1 - density) ** (mask.size - n_kept)
    return total


@settings(max_examples=25)  # each sums over up to 512 masks
@given(st.integers(0, 2**6 - 1), st.floats(0.05, 0.95), st.sampled_from([2, 3]))
def test_the_bound_is_never_below_the_truth(bits: int, density: float, n_outputs: int) -> None:
    target = np.array([bits >> i & 1 for i in range(6)], dtype=np.bool_).reshape(2, 3)
    truth = exact_chance(target, density, n_outputs)
    bound = match_bound(target.sum(1).tolist(), density=density, n_outputs=n_outputs)
    assert truth <= bound + 1e-12


def test_rows_with_disjoint_inputs_do_not_attain_the_bound() -> None:
    target = np.eye(2, dtype=np.bool_)
    assert exact_chance(target, 0.5, 2) == pytest.approx(7 / 16)
    assert match_bound([1, 1], density=0.5) == pytest.approx(9 / 16)


def test_one_row_attains_the_bound() -> None:
    target = np.array([[True, True, False]])
    assert exact_chance(target, 0.6, 3) == pytest.approx(match_bound([2], density=0.6, n_outputs=3))


def test_bounds_at_the_ends() -> None:
    assert match_bound([3, 3], density=1.0) == 1.0
    assert match_bound([0, 0], density=0.1) == 1.0
    assert match_bound([1, 1, 1], density=0.9, n_outputs=2) == 0.0
    tiny = match_bound([40], density=0.01, n_outputs=5)
    assert tiny == pytest.approx(5e-80, rel=1e-9)  # 5 p^40: a plain difference would say zero


@given(st.integers(1, 20), st.integers(1, 60), st.floats(0.05, 0.95))
def test_the_density_for_a_match_turns_the_bound_round(degree: int, n_outputs: int, chance: float) -> None:
    density = density_for_match(degree, n_outputs=n_outputs, chance=chance)
    assert match_bound([degree] * n_outputs, density=density) == pytest.approx(chance, rel=1e-6)


def test_the_papers_example_needs_a_density_above_four_fifths() -> None:
    assert density_for_match(10, n_outputs=50, chance=0.8) == pytest.approx(0.80, abs=0.01)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_partition_chance_is_the_sum_over_all_targets_and_masks(k: int) -> None:
    q, p, inputs = 0.3, 0.6, 2
    total = 0.0
    for target in all_masks(1, inputs):
        for mask in all_masks(k, inputs):
            if any((row | ~target[0]).all() for row in mask):
                weight = q ** target.sum() * (1 - q) ** (inputs - target.sum())
                total += weight * p ** mask.sum() * (1 - p) ** (mask.size - mask.sum())
    found = partition_chance(1, inputs, target_density=q, density=p, outputs_per_row=k)
    assert found == pytest.approx(total, rel=1e-12)
    three = partition_chance(3, inputs, target_density=q, density=p, outputs_per_row=k)
    assert three == pytest.approx(total**3, rel=1e-12)


def test_the_printed_number_of_outputs_is_too_small_and_ours_is_the_smallest_that_is_not() -> None:
    setting = {"target_density": 0.5, "density": 0.5}
    printed = printed_outputs_per_row(1, 10, chance=0.9, **setting)
    needed = outputs_per_row(1, 10, chance=0.9, **setting)
    assert (printed, needed) == (40, 139)
    assert partition_chance(1, 10, outputs_per_row=printed, **setting) == pytest.approx(0.67, abs=0.005)
    assert partition_chance(1, 10, outputs_per_row=needed, **setting) >= 0.9
    assert partition_chance(1, 10, outputs_per_row=needed - 1, **setting) < 0.9


@given(st.integers(1, 6), st.integers(1, 12), st.floats(0.1, 0.9), st.floats(0.3, 1.0), st.floats(0.1, 0.95))
def test_the_printed_number_never_exceeds_ours(rows: int, inputs: int, q: float, p: float, chance: float) -> None:
    setting = {"target_density": q, "density": p, "chance": chance}
    assert printed_outputs_per_row(rows, inputs, **setting) <= outputs_per_row(rows, inputs, **setting)


@given(st.integers(0, 2**6 - 1), st.integers(0, 2**9 - 1))
def test_a_matching_says_what_trying_all_orders_says(target_bits: int, mask_bits: int) -> None:
    target = np.array([target_bits >> i & 1 for i in range(6)], dtype=np.bool_).reshape(2, 3)
    mask = np.array([mask_bits >> i & 1 for i in range(9)], dtype=np.bool_).reshape(3, 3)
    orders = itertools.permutations(range(3), 2)
    expected = any(all((mask[o] | ~row).all() for o, row in zip(order, target, strict=True)) for order in orders)
    assert fits_inside(target, mask) is expected


def test_simulations_agree_with_the_exact_chances() -> None:
    target = np.array([[1, 1, 0], [0, 1, 1]], dtype=np.bool_)
    trials = simulate_match(target, density=0.7, n_tries=2000, seed=0)
    low, high = trials.interval()
    assert low <= exact_chance(target, 0.7, 2) <= high
    assert high - low < 0.1
    random = simulate_random_match(3, 4, target_density=0.4, density=0.7, outputs_per_row=2, n_tries=2000, seed=0)
    low, high = random.interval()
    assert low <= partition_chance(3, 4, target_density=0.4, density=0.7, outputs_per_row=2) <= high


def test_rows_that_may_use_all_outputs_fit_more_often() -> None:
    alone, shared = (
        simulate_random_match(
            3, 4, target_density=0.4, density=0.7, outputs_per_row=2, n_tries=500, seed=1, is_partitioned=is_partitioned
        )
        for is_partitioned in (True, False)
    )
    assert shared.n_fits > alone.n_fits


def test_the_interval_holds_the_share_and_reaches_the_ends() -> None:
    low, high = MatchTrials(100, 30).interval()
    assert 0 < low < 0.3 < high < 1
    assert MatchTrials(100, 0).interval()[0] == 0.0
    assert MatchTrials(100, 100).interval()[1] == 1.0
    # With no success in n tries the upper end solves (1 - p)^n = tail.
    assert MatchTrials(50, 0).interval(0.9)[1] == pytest.approx(1 - math.pow(0.05, 1 / 50))
    assert "30 of 100 masks" in str(MatchTrials(100, 30))


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueRangeError, match="density needs a number in"):
        match_bound([1], density=0.0)
    with pytest.raises(ValueRangeError, match="strictly between 0 and 1"):
        density_for_match(1, n_outputs=3, chance=1.0)
    with pytest.raises(ValueRangeError, match="Raise the density"):
        outputs_per_row(1, 400, target_density=0.9, density=0.01, chance=0.9)
    with pytest.raises(ShapeError, match="equal inp"):
        fits_inside(np.ones((2, 3), dtype=np.bool_), np.ones((2, 4), dtype=np.bool_))
    with pytest.raises(ValueRangeError, match=r"printed_outputs_per_row needs.*Raise the density"):
        printed_outputs_per_row(1, 4000, target_density=0.9, density=0.01, chance=0.9)
    with pytest.raises(ValueRangeError, match="at least 0; got -1"):
        match_bound([2, -1], density=0.5)
    with pytest.raises(ValueRangeError, match="at least 1; got 0"):
        density_for_match(1, n_outputs=0, chance=0.5)
    with pytest.raises(ValueRangeError, match="at least 1; got -1"):
        partition_chance(3, 4, target_density=0.5, density=0.5, outputs_per_row=-1)
    for needs_share in (outputs_per_row, printed_outputs_per_row):
        with pytest.raises(ValueRangeError, match=r"target_density needs to be between 0 and 1; got 1.5"):
            needs_share(3, 4, target_density=1.5, density=0.5, chance=0.5)
