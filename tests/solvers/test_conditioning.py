"""Measured spectra against the materialised matrix and against the law; the double descent of the condition number."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from onlynorm.errors import MemoryLimitError, ValueRangeError
from onlynorm.features import draw
from onlynorm.solvers import KhatriRao
from onlynorm.solvers import spectrum as module
from onlynorm.solvers.spectrum import (
    RESOLVED,
    edges,
    empirical_spectrum,
    measure_spectrum,
    predict_condition,
    predict_features,
    sweep_excess,
)

SIDE = 24
DENSE, MASKED = ("he_normal", "he_uniform", "uniform"), ("er_sign", "er_normal", "sparse_he_normal")


@pytest.mark.parametrize(
    "name", ["he_normal", "er_sign", "id_cond", "ortho_cond", "fast_ortho_cond", "kron_normal", "id_cond_minimal"]
)
def test_values_are_those_of_the_materialised_matrix(name: str) -> None:
    features = draw(name, (5, 6), seed=1, n_features=40 if name in ("he_normal", "er_sign") else None)
    found = measure_spectrum(features, unit_length=False)
    matrix = KhatriRao(features.left(), features.right()).materialise().numpy()
    matrix = matrix / math.sqrt(30 * np.mean(matrix**2))
    expected = np.sort(np.linalg.svd(matrix, compute_uv=False))
    # Roots of Gram eigenvalues: errors below sqrt(n eps) of the largest.
    scale = (
        1.0 if name not in ("id_cond", "ortho_cond", "fast_ortho_cond") else 1.0 / expected[-1]
    )  # by design: unit columns
    np.testing.assert_allclose(found.values, expected * scale, atol=math.sqrt(40 * 2.3e-16) * expected[-1])


@pytest.mark.parametrize("name", [*DENSE, *MASKED])
@pytest.mark.parametrize("excess", [0.5, 1.0, 1.5])
def test_dense_and_half_sparse_features_follow_the_law(name: str, excess: float) -> None:
    found = measure_spectrum(draw(name, (SIDE, SIDE), excess=excess, seed=3))
    n = len(found.values)
    assert found.limit == pytest.approx((1.2 + 0.55 * math.log(n)) / n)
    assert found.follows_law is True, str(found)


@pytest.mark.parametrize("shape", [(1, 200), (2, 100), (3, 60), (4, 40), (4, 4)])
def test_flat_and_small_layers_follow_the_law_at_unit_length(shape: tuple[int, int]) -> None:
    assert measure_spectrum(draw("he_normal", shape, excess=0.5, seed=0)).follows_law is True


@pytest.mark.parametrize(("shape", "entries"), [((4, 4), "normal"), ((8, 8), "uniform"), ((2, 32), "normal")])
def test_false_alarms_are_about_as_frequent_as_stated(shape: tuple[int, int], entries: str) -> None:
    """400 draws that follow: more than 3 % of alarms at a level of 1 % has a probability below 1 in 1,000."""
    generator = np.random.default_rng(7)
    (out, inp), excess = shape, 1.25
    features = draw("he_normal", shape, excess=excess)
    alarms = 0
    for _ in range(400):
        sizes = ((out, features.n_features), (features.n_features, inp))
        left, right = (
            generator.standard_normal(size) if entries == "normal" else generator.uniform(-1, 1, size) for size in sizes
        )
        values = empirical_spectrum(torch.from_numpy(left), torch.from_numpy(right), unit_length=True)
        alarms += module.Spectrum(features, np.sort(values.numpy())).follows_law is False
    assert alarms <= 3 * module.LEVEL * 400


def test_alarms_are_not_rarer_than_a_tenth_of_the_level() -> None:
    """The limit is not so wide that nothing can fail: 2 % of the distances are above 0.85 of it."""
    generator = np.random.default_rng(8)
    features = draw("he_normal", (8, 8), excess=1.25)
    ratios = []
    for _ in range(400):
        left, right = generator.standard_normal((8, 80)), generator.standard_normal((80, 8))
        values = empirical_spectrum(torch.from_numpy(left), torch.from_numpy(right), unit_length=True)
        found = module.Spectrum(features, np.sort(values.numpy()))
        ratios.append(found.distance / found.limit)
    assert np.quantile(ratios, 0.98) > 0.8


@pytest.mark.parametrize("seed", range(3))
def test_features_that_do_not_follow_the_law_are_rejected(seed: int) -> None:
    flat = draw("he_normal", (1, 400), excess=0.5, seed=seed)
    as_drawn = measure_spectrum(flat, unit_length=False)
    assert as_drawn.follows_law is False
    assert not as_drawn.prediction.is_known
    assert as_drawn.condition > 20 * measure_spectrum(flat).condition
    assert (
        measure_spectrum(draw("he_normal", (SIDE, SIDE), excess=1.5, seed=seed), unit_length=False).follows_law is False
    )
    sparse = measure_spectrum(draw("er_sign", (SIDE, SIDE), excess=1.5, seed=seed, density=0.1))
    assert sparse.follows_law is False
    assert not sparse.prediction.is_known
    # Groups of orthogonal features are better conditioned than independent ones: a law of their own.
    shape, excess = (8, 48), 1.5
    normal, orthogonal = (draw(name, shape, excess=excess, seed=seed) for name in ("he_normal", "orthogonal"))
    assert module.Spectrum(normal, measure_spectrum(orthogonal).values).follows_law is False
    assert module.Spectrum(orthogonal, measure_spectrum(normal).values).follows_law is False


@pytest.mark.parametrize("excess", [0.5, 0.8, 1.0, 1.25, 2.0])
@pytest.mark.parametrize("shape", [(4, 16), (8, 48), (40, 6), (SIDE, SIDE)])
def test_orthogonal_features_follow_a_law_of_their_own(shape: tuple[int, int], excess: float) -> None:
    found = measure_spectrum(draw("orthogonal", shape, excess=excess, seed=3))
    if found.n_groups == int(found.n_groups) or found.n_groups >= module.MIN_GROUPS:
        assert found.follows_law is True, str(found)
        _, high = edges(found.features.equations, found.features.n_features, n_groups=found.n_groups)
        assert found.as_dict()["law"]["largest"] == high
        _, shares, law = found.histogram(20)
        assert np.abs(shares - law).max() < 0.1
        assert law.sum() == pytest.approx(1.0, abs=1e-6)
    else:
        assert found.follows_law is None


@pytest.mark.parametrize(("shape", "excess"), [((3, 40), 2.0), ((8, 8), 1 / 8), ((5, 30), 0.5)])
def test_orthogonal_features_without_a_known_law_say_so(shape: tuple[int, int], excess: float) -> None:
    found = measure_spectrum(draw("orthogonal", shape, excess=excess, seed=0))
    assert found.is_random
    assert not found.has_law
    assert found.follows_law is None
    assert math.isnan(found.distance)
    assert "law" not in found.as_dict()
    assert "their law is unknown" in str(found)
    assert np.isnan(found.histogram(5)[2]).all()
    assert len(found.plot().curves) == 1
    assert "law" not in " ".join(found.view().facts)
    with pytest.raises(ValueRangeError, match=r"law_curve needs features with a known law; got orthogonal"):
        found.law_curve(10)
    with pytest.raises(ValueRangeError, match=r"law_edges needs features with a known law"):
        found.law_edges()
    with pytest.raises(ValueRangeError, match=r"law_cumulative needs features with a known law"):
        found.law_cumulative(np.ones(1))


@pytest.mark.parametrize("excess", [0.5, 1.5])
def test_repeated_features_are_rejected(excess: float) -> None:
    features = draw("he_normal", (SIDE, SIDE), excess=excess, seed=3)
    left, right = features.left(), features.right()
    n_repeated = features.n_features // 20
    left[:, :n_repeated], right[:n_repeated] = left[:, -n_repeated:], right[-n_repeated:]
    values = empirical_spectrum(left, right, unit_length=True)
    assert module.Spectrum(features, np.sort(values.numpy())).follows_law is False


@pytest.mark.parametrize("excess", [0.5, 1.5])
def test_a_tenth_more_features_would_be_noticed(excess: float) -> None:
    features = draw("he_normal", (SIDE, SIDE), excess=excess, seed=3)
    found = measure_spectrum(features)
    other = draw("he_normal", (SIDE, SIDE), excess=1.1 * excess, seed=3)
    assert module.Spectrum(other, found.values).follows_law is False


def test_three_singular_values_are_too_few_for_a_test() -> None:
    found = measure_spectrum(draw("he_normal", (1, 3), excess=1.0))
    assert found.follows_law is None
    assert "too few values for a test" in str(found)


def test_a_distribution_of_your_own_has_no_prediction() -> None:
    found = measure_spectrum(draw("he_normal", (8, 8), excess=1.5))
    other = dataclasses.replace(found.features, name="made_up")
    assert found.prediction.is_known
    assert not predict_features(other).is_known


@pytest.mark.parametrize("excess", [0.5, 2.0])
def test_the_condition_number_is_the_laws_within_a_tenth(excess: float) -> None:
    found = measure_spectrum(draw("he_uniform", (SIDE, SIDE), excess=excess, seed=0))
    assert found.condition / found.law_condition == pytest.approx(1.0, abs=0.1)


def test_the_spread_of_lengths_is_that_of_the_columns() -> None:
    features = draw("he_normal", (3, 20), excess=1.5, seed=0)
    lengths = KhatriRao(features.left(), features.right()).column_squares().sqrt().numpy()
    assert measure_spectrum(features).length_spread == pytest.approx(lengths.std() / lengths.mean(), rel=1e-9)
    assert measure_spectrum(draw("er_sign", (3, 20), excess=1.5, density=1.0)).length_spread == pytest.approx(
        0, abs=1e-9
    )


def test_a_convolution_is_measured_as_its_matrix() -> None:
    found = measure_spectrum(draw("he_normal", (8, 4, 3, 3), excess=1.5, seed=0))
    assert len(found.values) == 8 * 36
    low, high = edges(288, 432)
    assert found.values[0] > 0.5 * low
    assert found.values[-1] < 1.3 * high


@pytest.mark.parametrize(
    ("name", "expected"),
    [("id_cond", 1.0), ("ortho_cond", 1.0), ("fast_ortho_cond", 1.0), ("id_cond_minimal", math.sqrt(6))],
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
    found = sweep_excess("er_sign", (8, 16), excesses=(0.5, 2.0), seeds=(0,), density=0.8)
    assert found.law == tuple(predict_condition(8, 16, n, density=0.8).condition for n in (64, 256))
    assert found.n_features == (64, 256)
    assert [len(row) for row in found.measured] == [1, 1]


def test_a_sweep_has_no_law_where_nothing_is_predicted() -> None:
    assert math.isnan(sweep_excess("er_sign", (8, 8), excesses=(2.0,), seeds=(0,), density=0.1).law[0])
    assert math.isnan(sweep_excess("he_normal", (8, 8), excesses=(2.0,), seeds=(0,), unit_length=False).law[0])


def test_a_sweep_tells_its_steps() -> None:
    said: list[tuple[int, int, str]] = []
    sweep_excess("he_normal", (4, 4), excesses=(0.5, 2.0), seeds=(0,), progress=lambda *news: said.append(news))
    assert said == [(0, 2, "excess 0.5"), (1, 2, "excess 2")]


def test_a_sweep_over_nothing_is_refused() -> None:
    with pytest.raises(ValueRangeError, match="at least one excess"):
        sweep_excess("he_normal", (4, 4), seeds=())


def test_a_layer_that_does_not_fit_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "memory_limit", lambda: 10_000)
    with pytest.raises(MemoryLimitError, match="smaller layer"):
        measure_spectrum(draw("he_normal", (10, 10)))
