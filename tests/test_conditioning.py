"""Measured spectra against the materialised matrix and against the law; the double descent of the condition number."""

from __future__ import annotations

import math

import numpy as np
import pytest

from onlynorm.errors import MemoryLimitError, ValueRangeError
from onlynorm.features import draw
from onlynorm.solvers import KhatriRao
from onlynorm.solvers import conditioning as module
from onlynorm.solvers.conditioning import RESOLVED, measure_spectrum, sweep_excess
from onlynorm.solvers.spectrum import condition_number, edges

SIDE = 24
DENSE, MASKED = ("he_normal", "he_uniform", "orthogonal"), ("er_sign", "er_normal", "sparse_he_normal")


@pytest.mark.parametrize("name", ["he_normal", "er_sign", "id_cond", "ortho_cond", "id_cond_minimal"])
def test_values_are_those_of_the_materialised_matrix(name: str) -> None:
    features = draw(name, (5, 6), seed=1, n_features=40 if name in ("he_normal", "er_sign") else None)
    found = measure_spectrum(features)
    matrix = KhatriRao(features.left(), features.right()).materialise().numpy()
    matrix = matrix / math.sqrt(30 * np.mean(matrix**2))
    expected = np.sort(np.linalg.svd(matrix, compute_uv=False))
    # Roots of Gram eigenvalues: errors below sqrt(n eps) of the largest.
    scale = 1.0 if name not in ("id_cond", "ortho_cond") else 1.0 / expected[-1]  # by design: unit columns
    np.testing.assert_allclose(found.values, expected * scale, atol=math.sqrt(40 * 2.3e-16) * expected[-1])


@pytest.mark.parametrize("name", [*DENSE, *MASKED])
@pytest.mark.parametrize("excess", [0.5, 1.0, 1.5])
def test_every_distribution_follows_the_law_within_the_stated_distance(name: str, excess: float) -> None:
    found = measure_spectrum(draw(name, (SIDE, SIDE), excess=excess, seed=3))
    assert found.follows_law, str(found)
    assert found.tolerance == pytest.approx((1.5 if name in DENSE else 3.0) / SIDE)


@pytest.mark.parametrize("excess", [0.5, 1.5])
def test_half_as_many_features_again_would_be_noticed(excess: float) -> None:
    features = draw("he_normal", (SIDE, SIDE), excess=excess, seed=3)
    found = measure_spectrum(features)
    other = draw("he_normal", (SIDE, SIDE), excess=1.5 * excess, seed=3)
    assert not module.Spectrum(other, found.values).follows_law


@pytest.mark.parametrize("excess", [0.5, 2.0])
def test_the_condition_number_is_the_laws_within_a_quarter(excess: float) -> None:
    found = measure_spectrum(draw("he_uniform", (SIDE, SIDE), excess=excess, seed=0))
    assert found.condition / found.law_condition == pytest.approx(1.0, abs=0.25)


def test_a_convolution_is_measured_as_its_matrix() -> None:
    found = measure_spectrum(draw("he_normal", (8, 4, 3, 3), excess=1.5, seed=0))
    assert len(found.values) == 8 * 36
    low, high = edges(288, 432)
    assert found.values[0] > 0.5 * low
    assert found.values[-1] < 1.3 * high


@pytest.mark.parametrize(
    ("name", "expected"), [("id_cond", 1.0), ("ortho_cond", 1.0), ("id_cond_minimal", math.sqrt(6))]
)
def test_structured_features_have_their_condition_by_design(name: str, expected: float) -> None:
    found = measure_spectrum(draw(name, (6, 7)))
    assert found.condition == pytest.approx(expected, rel=1e-12)
    assert not found.is_random
    assert not found.follows_law
    assert "by design" in str(found)
    assert "law" not in found.as_dict()


def test_sparse_id_cond_keeps_its_condition() -> None:
    features = draw("id_cond", (6, 7), density=0.5)
    assert len(measure_spectrum(features).values) == features.n_features


def test_histogram_and_law_are_shares_of_one() -> None:
    found = measure_spectrum(draw("he_normal", (12, 12), excess=1.2))
    bins, shares, law = found.histogram(20)
    assert len(bins) == 21
    assert shares.sum() == pytest.approx(1.0)
    assert law.sum() == pytest.approx(1.0, abs=1e-9)
    x, y = found.law_curve(2000)
    assert np.trapezoid(y, x) == pytest.approx(1.0, abs=1e-3)
    assert found.as_dict()["law"]["follows"] is found.follows_law


def test_dead_features_are_counted_and_do_not_make_the_condition_infinite() -> None:
    features = draw("er_normal", (4, 4), n_features=12, density=0.3, seed=0)
    found = measure_spectrum(features)
    rank = int(np.linalg.matrix_rank(KhatriRao(features.left(), features.right()).materialise().numpy()))
    assert rank < 12, "the case has dead features"
    assert found.n_unresolved == 12 - rank
    assert found.condition < 1 / RESOLVED
    assert "zero or unresolved" in str(found)


def test_the_condition_number_descends_twice() -> None:
    found = sweep_excess("he_normal", (16, 16), excesses=(0.5, 0.9, 1.0, 1.1, 2.0))
    below, near_below, peak, near_above, above = found.medians
    assert below < near_below < peak > near_above > above
    assert found.peak == 1.0
    # Symmetric in l and 1 / l away from the peak, where fluctuations of finite size are small.
    assert below / above == pytest.approx(1.0, abs=0.25)
    # At the peak the order of N: the median of a heavy-tailed ratio, within a factor of four of the law's typical one.
    assert found.law[2] / 4 < peak < found.law[2] * 4
    assert "excess" in str(found)


def test_the_law_of_a_sweep_is_the_prediction() -> None:
    found = sweep_excess("er_sign", (8, 8), excesses=(0.5, 2.0), seeds=(0,), density=0.8)
    assert found.law == (condition_number(64, 32), condition_number(64, 128))
    assert found.n_features == (32, 128)
    assert [len(row) for row in found.measured] == [1, 1]


def test_a_sweep_tells_its_steps() -> None:
    said: list[str] = []
    sweep_excess("he_normal", (4, 4), excesses=(0.5, 2.0), seeds=(0,), progress=said.append)
    assert said == ["excess 0.5", "excess 2"]


def test_a_sweep_over_nothing_is_refused() -> None:
    with pytest.raises(ValueRangeError, match="at least one excess"):
        sweep_excess("he_normal", (4, 4), seeds=())


def test_a_layer_that_does_not_fit_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "memory_limit", lambda: 10_000)
    with pytest.raises(MemoryLimitError, match="Take a smaller layer"):
        measure_spectrum(draw("he_normal", (10, 10)))
