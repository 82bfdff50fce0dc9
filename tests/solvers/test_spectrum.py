"""The law of the singular values: right as a formula, right for real draws, right about iterations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate
from tensors import normal

import onlynorm as on
from onlynorm.errors import InsufficientFeaturesError, ValueRangeError
from onlynorm.solvers import spectrum
from onlynorm.solvers.methods.krylov import conjugate_gradients

EPS = np.finfo(np.float64).eps
SHAPES = [(400, 100), (400, 399), (400, 400), (400, 500), (400, 1600), (7, 100_000), (100_000, 7)]


@pytest.mark.parametrize(("n", "c"), SHAPES)
def test_density_integrates_to_one_and_lives_between_the_edges(n: int, c: int) -> None:
    low, high = spectrum.edges(n, c)
    total, error = integrate.quad(lambda x: float(spectrum.density(np.array(x), n, c)), low, high, limit=500)
    assert abs(total - 1.0) <= 10 * error + 1e-12
    outside = spectrum.density(np.array([-1.0, low - 1e-3, high + 1e-3]), n, c)
    assert np.all(outside == 0.0)


@pytest.mark.parametrize(("n", "c"), SHAPES)
def test_cumulative_is_the_integral_of_the_density(n: int, c: int) -> None:
    low, high = spectrum.edges(n, c)
    points = np.linspace(low, high, 9)
    steps = np.diff(spectrum.cumulative(points, n, c))
    for i in range(8):
        part, error = integrate.quad(lambda x: float(spectrum.density(np.array(x), n, c)), points[i], points[i + 1])
        assert abs(steps[i] - part) <= 10 * error + 1e-12
    ends = spectrum.cumulative(np.array([low - 1, low, high, high + 1]), n, c)
    assert ends == pytest.approx([0, 0, 1, 1], abs=1e3 * EPS)


def test_density_at_the_square_case_is_finite_at_zero() -> None:
    found = spectrum.density(np.array([0.0, 1e-12, 2.0]), 50, 50)
    assert found == pytest.approx([2 / math.pi, 2 / math.pi, 0.0], rel=1e-6)
    assert spectrum.density(np.array([0.0]), 50, 60)[0] == 0.0


@given(st.integers(2, 10_000), st.integers(2, 10_000))
def test_condition_number_is_the_same_for_an_excess_and_its_inverse(n: int, c: int) -> None:
    assert spectrum.condition_number(n, c) == pytest.approx(spectrum.condition_number(c, n), rel=100 * EPS)
    low, high = spectrum.edges(n, c)
    assert 1.0 <= spectrum.condition_number(n, c) <= high / low if low else True


def test_condition_number_has_its_limits() -> None:
    root = math.sqrt(1.25)
    assert spectrum.condition_number(10**12, 1_250_000_000_000) == pytest.approx((1 + root) / (root - 1), rel=1e-6)
    assert spectrum.condition_number(2000, 2000) == pytest.approx(2 * spectrum.condition_number(1000, 1000), rel=0.02)
    assert spectrum.condition_number(1, 50) == spectrum.condition_number(50, 1) == 1.0


def _kolmogorov(values: torch.Tensor, n: int, c: int) -> float:
    """The largest distance between the steps of the empirical distribution and the law."""
    law = spectrum.cumulative(np.sort(values.numpy()), n, c)
    ranks = np.arange(len(law) + 1) / len(law)
    return float(max(np.max(law - ranks[:-1]), np.max(ranks[1:] - law)))


@pytest.mark.parametrize("name", ["he_normal", "he_uniform", "orthogonal"])
@pytest.mark.parametrize("excess", [0.5, 0.8, 1.0, 1.25, 2.0])
def test_real_draws_follow_the_law(name: str, excess: float) -> None:
    """Columns of M keep a random length, Gaussian ones with a relative spread of 1 / sqrt(side): law and edges blur."""
    side = 28
    features = on.draw(name, (side, side), excess=excess, seed=5)
    values = spectrum.empirical_spectrum(features.left(), features.right())
    n, c = features.equations, features.n_features
    low, high = spectrum.edges(n, c)
    assert len(values) == min(n, c)
    unit = spectrum.empirical_spectrum(features.left(), features.right(), unit_length=True)
    assert _kolmogorov(unit, n, c) <= max(_kolmogorov(values, n, c), 1e-6) * (1 + 1e-6)
    assert _kolmogorov(values, n, c) <= 1.5 / side
    assert float(values[0]) == pytest.approx(high, rel=(6.0 if name == "he_normal" else 3.0) / side)
    assert float(values[-1]) == pytest.approx(low, abs=2.0 / side)


def test_printed_scale_of_the_paper_does_not_fit() -> None:
    features = on.draw("he_normal", (24, 24), excess=0.5, seed=0)
    values = spectrum.empirical_spectrum(features.left(), features.right())
    swapped = _kolmogorov(values, features.n_features, features.equations)
    assert swapped > 4 * _kolmogorov(values, features.equations, features.n_features)


def test_empirical_spectrum_is_that_of_the_matrix() -> None:
    for c in (30, 48, 60):
        features = on.draw("he_normal", (6, 8), n_features=c, seed=2)
        matrix = on.solvers.KhatriRao(features.left(), features.right()).materialise()
        exact = torch.linalg.svdvals(matrix) / matrix.square().mean().sqrt() / math.sqrt(48)
        found = spectrum.empirical_spectrum(features.left(), features.right())
        # through the Gram matrix, so the error of a value is that of its square
        assert torch.allclose(found.square(), exact.square(), rtol=0, atol=100 * EPS * float(exact[0]) ** 2)


def test_the_spectrum_of_unit_length_is_that_of_the_scaled_matrix() -> None:
    features = on.draw("er_normal", (6, 8), n_features=60, density=0.2, seed=2)
    matrix = on.solvers.KhatriRao(features.left(), features.right()).materialise()
    lengths = matrix.norm(dim=0)
    assert bool((lengths == 0).any()), "the case has features that are zero"
    exact = torch.linalg.svdvals(matrix / lengths.where(lengths > 0, 1.0))
    found = spectrum.empirical_spectrum(features.left(), features.right(), unit_length=True)
    assert torch.allclose(found.square(), exact.square(), rtol=0, atol=100 * EPS * float(exact[0]) ** 2)


def _unit(features: on.features.Features) -> on.solvers.KhatriRao:
    """The operator of these features at unit length."""
    normalize = torch.nn.functional.normalize
    return on.solvers.KhatriRao(normalize(features.left().double(), dim=0), normalize(features.right().double(), dim=1))


def _condition(operator: on.solvers.KhatriRao) -> float:
    """The ratio of the extreme nonzero singular values."""
    values = torch.linalg.svdvals(operator.materialise())
    values = values[values > 1e-7 * values[0]]
    return float(values[0] / values[-1])


def _gaussian_conditions(n: int, c: int, count: int) -> np.ndarray:
    """Condition numbers of n x c Gaussian matrices, from their bidiagonal form with chi-distributed entries."""
    generator = np.random.default_rng(0)
    found = []
    for _ in range(count):
        alpha = np.sqrt(generator.chisquare(c - np.arange(n)))
        beta = np.sqrt(generator.chisquare(n - 1 - np.arange(n - 1)))
        values = np.linalg.svd(np.diag(alpha) + np.diag(beta, -1), compute_uv=False)
        found.append(values[0] / values[-1])
    return np.array(found)


@pytest.mark.parametrize(("n", "c"), [(16, 16), (16, 18), (16, 64), (40, 40), (40, 41), (40, 45), (40, 80)])
def test_the_condition_number_is_the_median_of_gaussian_matrices(n: int, c: int) -> None:
    """The median of 400 draws has a standard error below 10 % at n = c, where the spread is largest."""
    found = _gaussian_conditions(n, c, 400)
    predicted = spectrum.predict_condition(n, 1, c)
    assert np.median(found) / predicted.condition == pytest.approx(1.0, abs=0.3 if n == c else 0.12)
    assert predicted.spread is not None
    assert 0.005 <= np.mean(found > predicted.spread * predicted.condition) <= 0.1


@pytest.mark.parametrize("shape", [(1, 200), (2, 100), (4, 50), (8, 32), (16, 16)])
@pytest.mark.parametrize("excess", [0.5, 0.9, 1.0, 1.1, 1.25, 2.0, 4.0])
def test_flat_and_square_layers_have_the_predicted_condition_number(shape: tuple[int, int], excess: float) -> None:
    drawn = [on.draw("he_normal", shape, excess=excess, seed=seed) for seed in range(9)]
    predicted = spectrum.predict_condition(*shape, drawn[0].n_features)
    assert predicted.is_known
    assert predicted.source == "law"
    median = float(np.median([_condition(_unit(features)) for features in drawn]))
    # The median of nine draws at excess 1 itself varies by a factor of about two.
    factor = 3.0 if excess == 1.0 else 1.25
    assert 1 / factor <= median / predicted.condition <= factor


@pytest.mark.parametrize("excess", [0.5, 0.9, 1.5, 4.0])
def test_orthogonal_features_are_better_conditioned_as_predicted(excess: float) -> None:
    drawn = [on.draw("orthogonal", (4, 48), excess=excess, seed=seed) for seed in range(5)]
    predicted = spectrum.predict_condition(4, 48, drawn[0].n_features, is_orthogonal=True)
    assert predicted.condition < spectrum.predict_condition(4, 48, drawn[0].n_features).condition
    median = float(np.median([_condition(_unit(features)) for features in drawn]))
    assert median / predicted.condition == pytest.approx(1.0, abs=0.25)


def test_features_of_one_orthogonal_matrix_are_perfectly_conditioned() -> None:
    assert spectrum.predict_condition(4, 48, 48, is_orthogonal=True).condition == 1.0
    assert _condition(_unit(on.draw("orthogonal", (4, 48), n_features=48))) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("name", ["er_sign", "er_normal"])
@pytest.mark.parametrize(
    ("shape", "density", "excess"), [((4, 64), 0.3, 2.0), ((8, 32), 0.5, 0.9), ((16, 16), 0.5, 1.25)]
)
def test_sparse_features_follow_the_law_of_those_that_are_not_zero(
    name: str, shape: tuple[int, int], density: float, excess: float
) -> None:
    features = on.draw(name, shape, density=density, excess=excess, seed=1)
    predicted = spectrum.predict_condition(*shape, features.n_features, density=density)
    assert predicted.is_known
    assert 1 / 1.5 <= _condition(_unit(features)) / predicted.condition <= 1.5


@pytest.mark.parametrize(
    ("shape", "n_features", "density"),
    [
        ((24, 24), 720, 0.05),  # two features per equation
        ((4, 64), 273, 0.5),  # 1/16 of the features are zero: as many are left as there are equations
        ((2, 200), 408, 1.0),  # signs of two outputs have two directions only
        ((5, 5), 30, 1.0),  # signs repeat
    ],
)
def test_sparse_features_that_the_law_does_not_cover_are_unknown(
    shape: tuple[int, int], n_features: int, density: float
) -> None:
    predicted = spectrum.predict_condition(*shape, n_features, density=density)
    assert not predicted.is_known
    assert predicted.source == "unknown"
    assert predicted.condition == 1.0
    assert "unknown, at least 1" in str(predicted)


@pytest.mark.parametrize("excess", [0.5, 0.9, 1.0, 1.02, 1.1, 1.25, 2.0, 4.0])
@pytest.mark.parametrize("shape", [(28, 28), (16, 48), (4, 100), (1, 300)])
def test_predicted_iterations_are_within_a_third_of_the_measured(shape: tuple[int, int], excess: float) -> None:
    operator = _unit(on.draw("he_normal", shape, excess=excess, seed=1))
    is_wide = operator.n_features >= operator.equations
    gram = operator.row_gram() if is_wide else operator.gram()
    target = normal(*shape)
    rhs = target.flatten() if is_wide else operator.transpose(target)
    _, measured, _ = conjugate_gradients(lambda p: gram @ p, rhs, 1, tolerance=1e-10, max_iterations=5000)
    predicted = spectrum.predict_iterations(spectrum.predict_condition(*shape, operator.n_features), 1e-10)
    assert 0.75 <= measured / predicted <= 1.33


def test_a_plain_number_has_no_limit_by_size() -> None:
    predicted = spectrum.predict_condition(8, 8, 64)
    assert spectrum.predict_iterations(predicted, 1e-10) < 128
    assert spectrum.predict_iterations(predicted.condition, 1e-10) > 2000
    assert spectrum.predict_iterations(1.0, 1e-10) == 1


@pytest.mark.parametrize("name", ["he_normal", "er_sign", "er_normal"])
@pytest.mark.parametrize("shape", [(1, 200), (8, 32), (16, 16)])
@pytest.mark.parametrize("excess", [0.5, 1.5, 4.0])
def test_a_dozen_products_estimate_a_small_condition_number(name: str, shape: tuple[int, int], excess: float) -> None:
    features = on.draw(name, shape, excess=excess, seed=0, density=None if name == "he_normal" else 0.4)
    operator = _unit(features)
    found, exact = spectrum.estimate_condition(operator), _condition(operator)
    if found.is_known:
        assert found.source == "lanczos"
        assert 1 / 1.5 <= found.condition / exact <= 1.5
    else:
        assert found.source == "unknown"
        assert found.condition <= exact * (1 + 1e-9)
    assert found.is_known or exact > 8.0
    assert spectrum.estimate_condition(operator) == found


@pytest.mark.parametrize("excess", [1.0, 1.02])
def test_a_dozen_products_do_not_claim_to_know_a_large_condition_number(excess: float) -> None:
    operator = _unit(on.draw("he_normal", (16, 16), excess=excess, seed=0))
    found = spectrum.estimate_condition(operator)
    assert not found.is_known
    assert 5.0 < found.condition < _condition(operator) / 5.0


def test_a_run_that_ends_knows_the_condition_number_exactly() -> None:
    tiny = _unit(on.draw("he_normal", (2, 3), n_features=4, seed=0))
    assert spectrum.estimate_condition(tiny).condition == pytest.approx(_condition(tiny), rel=1e-9)
    features = on.draw("ortho_cond", (4, 5))
    found = spectrum.estimate_condition(on.solvers.KhatriRao(features.left(), features.right()))
    assert found.is_known
    assert found.condition == pytest.approx(1.0, abs=1e-6)


@given(st.floats(1.001, 1e6), st.floats(1e-15, 1e-2))
def test_iterations_and_condition_are_inverse_to_each_other(condition: float, tolerance: float) -> None:
    count = spectrum.iterations_for(condition, tolerance)
    rate = (condition - 1) / (condition + 1)
    assert 2 * rate**count <= tolerance * (1 + 1e-6)
    assert count == 1 or 2 * rate ** (count - 1) > tolerance * (1 - 1e-6)
    assert spectrum.condition_for(count, tolerance) >= condition * (1 - 1e-9) or count == 1


def test_one_iteration_solves_a_perfectly_conditioned_system() -> None:
    assert spectrum.iterations_for(1.0, 1e-10) == 1


@given(st.integers(2, 5000), st.floats(1.01, 1e5))
def test_enough_features_reach_the_condition(n: int, condition: float) -> None:
    c = spectrum.features_for_condition(n, condition)
    assert c >= n
    assert spectrum.condition_number(n, c) <= condition * (1 + 1e-9)


@pytest.mark.parametrize(("n", "c"), [(0, 3), (3, 0)])
def test_empty_systems_have_no_law(n: int, c: int) -> None:
    with pytest.raises(ValueRangeError, match=rf"at least one equation.*got {n} equations and {c} features"):
        spectrum.edges(n, c)


@pytest.mark.parametrize(("n", "c", "n_groups"), [(64, 96, 12.0), (64, 32, 4.0), (64, 64, 8.0), (150, 75, 3.7)])
def test_the_law_of_orthogonal_groups_integrates_to_one(n: int, c: int, n_groups: float) -> None:
    low, high = spectrum.edges(n, c, n_groups=n_groups)
    part = c / n / n_groups
    assert low**2 + high**2 == pytest.approx(2 * (1 + c / n - 2 * part))
    total, error = integrate.quad(
        lambda x: float(spectrum.density(np.array(x), n, c, n_groups=n_groups)), low, high, limit=500
    )
    assert total == pytest.approx(1.0, abs=10 * error + 1e-6)
    ends = spectrum.cumulative(np.array([low, high]), n, c, n_groups=n_groups)
    assert ends.tolist() == pytest.approx([0.0, 1.0], abs=1e-9)


def test_many_orthogonal_groups_have_the_law_of_independent_features() -> None:
    x = np.linspace(0.1, 3.0, 30)
    found = spectrum.density(x, 100, 150, n_groups=1e12)
    np.testing.assert_allclose(found, spectrum.density(x, 100, 150), atol=1e-9)


@pytest.mark.parametrize("n_groups", [1.0, 0.0, -3.0, math.nan, math.inf])
def test_a_number_of_groups_that_cannot_be_is_refused(n_groups: float) -> None:
    for call in (spectrum.edges, lambda *sizes, **more: spectrum.density(np.ones(1), *sizes, **more)):
        with pytest.raises(ValueRangeError, match="n_groups must be a number in"):
            call(64, 32, n_groups=n_groups)
    with pytest.raises(ValueRangeError, match="n_groups"):  # more features per group than equations
        spectrum.edges(10, 40, n_groups=3.0)


def test_impossible_numbers_are_refused() -> None:
    with pytest.raises(ValueRangeError, match=r"tolerance in \(0, 1\); got 0\.0\. Try 1e-10"):
        spectrum.iterations_for(10.0, 0.0)
    with pytest.raises(ValueRangeError, match=r"condition number above 1; got 1\.0\. Only id_cond, ortho_cond"):
        spectrum.features_for_condition(10, 1.0)
    with pytest.raises(ValueRangeError, match=r"n_products.*3"):
        spectrum.estimate_condition(on.solvers.KhatriRao(torch.ones(2, 3), torch.ones(3, 2)), n_products=3)
    with pytest.raises(ValueRangeError, match=r"n_outputs.*0"):
        spectrum.predict_condition(0, 4, 4)


@pytest.mark.parametrize("shape", [(3, 4), (1, 2)])
def test_features_that_are_all_zero_have_no_condition_number(shape: tuple[int, int]) -> None:
    left, right = torch.eye(*shape, dtype=torch.float64), torch.eye(*reversed(shape), dtype=torch.float64)
    for operator in (on.solvers.KhatriRao(0 * left, right), on.solvers.KhatriRao(left[:1], right.flip(0)[:, :1] * 0)):
        with pytest.raises(InsufficientFeaturesError, match=r"nonzero feature; got none of [24]"):
            spectrum.estimate_condition(operator)


@pytest.mark.parametrize("excess", [0.3, 0.5, 0.9])
@pytest.mark.parametrize("shape", [(20, 20), (8, 40), (40, 8)])
@pytest.mark.parametrize("decades", [0.0, 1.0, 2.0, 3.0])
def test_rows_of_unequal_size_tell_the_condition_number_of_too_few_features(
    shape: tuple[int, int], excess: float, decades: float
) -> None:
    features = on.draw("he_normal", shape, excess=excess, seed=1)
    scales = torch.logspace(-decades, decades, shape[0], dtype=torch.float64)
    operator, _ = on.solvers.KhatriRao(features.left() * scales[:, None], features.right()).unit()
    exact = _condition(operator)
    assert 1.0 <= spectrum.condition_of_rows(operator) <= 1.5 * exact
    if decades == 0.0:
        assert spectrum.condition_of_rows(operator) < spectrum.predict_condition(*shape, features.n_features).condition
    elif decades == 3.0 and excess == 0.5 and shape[0] > 8:
        assert spectrum.condition_of_rows(operator) > 0.05 * exact
