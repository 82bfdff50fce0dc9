"""Densities at which sparse patterns become full: bisection against a scan, the law against counting and matchings."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from onlynorm.evidence.papers.giannou2023.sparse import (
    STEP,
    chance_full,
    density_alive,
    density_full,
    is_alive,
    is_full,
    predicted_density,
    random_pattern,
    smallest_enough,
)
from onlynorm.features import structural_rank


def test_bisection_finds_where_a_condition_becomes_true() -> None:
    assert 0.3 <= smallest_enough(lambda p: p >= 0.3) <= 0.3 + STEP
    assert smallest_enough(lambda p: False) == 1.0
    assert smallest_enough(lambda p: True, low=0.25) <= 0.25 + STEP


@pytest.mark.parametrize("seed", range(5))
def test_patterns_of_one_seed_are_nested(seed: int) -> None:
    for low, high in itertools.pairwise((0.1, 0.3, 0.31, 0.8, 1.0)):
        few, many = (random_pattern((5, 4), p, seed=seed) for p in (low, high))
        assert bool((few.mask_left() <= many.mask_left()).all())
        assert bool((few.mask_right() <= many.mask_right()).all())


@pytest.mark.parametrize("excess", [1.0, 1.25])
@pytest.mark.parametrize("seed", range(4))
def test_the_density_found_is_the_first_of_a_scan(seed: int, excess: float) -> None:
    found = density_full((6, 5), seed=seed, excess=excess)
    scan = np.arange(0.02, 1.0, 0.02)
    full = [is_full(random_pattern((6, 5), float(p), seed=seed, excess=excess)) for p in scan]
    assert full == sorted(full), "full stays full"
    assert [bool(p >= found) for p in scan] == full


@pytest.mark.parametrize("seed", range(4))
def test_a_pattern_with_a_dead_feature_is_not_full(seed: int) -> None:
    at = density_alive((6, 6), seed=seed)
    alive, dead = (random_pattern((6, 6), p, seed=seed) for p in (at, at - 2 * STEP))
    assert is_alive(alive)
    assert not is_alive(dead)
    assert structural_rank(dead.mask_left(), dead.mask_right()).rank < 36
    assert density_full((6, 6), seed=seed) >= at


def test_the_law_for_as_many_features_as_weights_is_that_of_dead_ones() -> None:
    d, p = 16, 0.35
    no_dead = (1 - (1 - p) ** d) ** (2 * d * d)
    empty = math.exp(-(d**2) * (1 - p * p) ** (d * d))
    assert chance_full((d, d), p, n_features=d * d) == pytest.approx(no_dead * empty, rel=1e-9)
    asymptotic = (2 * math.log(d) + math.log(2 / math.log(2))) / d
    assert 1 - math.exp(-asymptotic) == pytest.approx(predicted_density((d, d), n_features=d * d), rel=0.01)


def test_the_law_knows_its_ends() -> None:
    assert chance_full((4, 3, 3), 1.0, n_features=36) == 1.0
    assert chance_full((4, 3, 3), 1.0, n_features=35) == 0.0
    assert chance_full((4, 3, 3), 0.0, n_features=80) == 0.0
    assert predicted_density((4, 3, 3), n_features=35) == 1.0
    more, fewer = (predicted_density((8, 8), n_features=n) for n in (128, 64))
    assert more < fewer


@pytest.mark.parametrize(("shape", "excess"), [((12, 12), 1.0), ((12, 12), 1.25), ((6, 24), 1.25), ((12, 12), 2.0)])
def test_half_of_the_patterns_are_full_where_the_law_says(shape: tuple[int, int], excess: float) -> None:
    n = random_pattern(shape, 1.0, seed=0, excess=excess).n_features
    law = predicted_density(shape, n_features=n)
    n_full = sum(is_full(random_pattern(shape, law, seed=seed, excess=excess)) for seed in range(100))
    # Six standard deviations of 100 throws of a coin.
    assert abs(n_full - 50) <= 30


def test_with_excess_the_density_falls_below_the_conjectured_order() -> None:
    ratios = [
        predicted_density((d, d), n_features=2 * d * d) / (math.sqrt(math.log(d)) / d) for d in (16, 64, 256, 512)
    ]
    assert max(ratios) / min(ratios) < 1.1, "sqrt(log d) / d for twice as many features as weights"
