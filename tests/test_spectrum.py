"""The law of the singular values: right as a formula, right for real draws, right about iterations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate

import onlynorm as on
from onlynorm import spectrum
from onlynorm.errors import ValueRangeError
from onlynorm.solvers.krylov import solve_krylov

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
    assert spectrum.condition_number(10**7, 12_500_000) == pytest.approx((1 + root) / (root - 1), rel=1e-9)
    assert spectrum.condition_number(2000, 2000) == pytest.approx(2 * spectrum.condition_number(1000, 1000))
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
        matrix = on.KhatriRao(features.left(), features.right()).materialise()
        exact = torch.linalg.svdvals(matrix) / matrix.square().mean().sqrt() / math.sqrt(48)
        found = spectrum.empirical_spectrum(features.left(), features.right())
        # through the Gram matrix, so the error of a value is that of its square
        assert torch.allclose(found.square(), exact.square(), rtol=0, atol=100 * EPS * float(exact[0]) ** 2)


def test_square_draws_have_the_expected_smallest_value() -> None:
    """N s_min has mean 0.656 and standard deviation 0.48 (Edelman), so the mean of 40 draws has 0.48 / sqrt(40)."""
    side, found = 10, []
    for seed in range(40):
        features = on.draw("he_normal", (side, side), excess=1.0, seed=seed)
        matrix = on.KhatriRao(features.left(), features.right()).materialise()
        scaled = matrix / (matrix.square().mean().sqrt() * side)
        found.append(side**2 * float(torch.linalg.svdvals(scaled)[-1]))
    assert np.mean(found) == pytest.approx(spectrum.SQUARE_CONSTANT, abs=3 * 0.48 / math.sqrt(40))


@pytest.mark.parametrize("excess", [1.1, 1.25, 1.5, 2.0])
@pytest.mark.parametrize("shape", [(28, 28), (16, 64)])
def test_predicted_iterations_are_within_a_quarter_of_the_measured(shape: tuple[int, int], excess: float) -> None:
    features = on.draw("he_normal", shape, excess=excess, seed=1)
    operator = on.KhatriRao(features.left(), features.right())
    target = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    predicted = spectrum.predicted_iterations(operator.equations, operator.n_features, tolerance=1e-10)
    measured = solve_krylov(
        operator, target, tolerance=1e-10, max_iterations=5000, inner_dtype=torch.float64
    ).iterations
    assert 0.75 <= measured / predicted <= 1.25


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
    with pytest.raises(ValueRangeError, match=rf"at least one equation.*got {n} equations and {c} features\. Leave"):
        spectrum.edges(n, c)


def test_impossible_numbers_are_refused() -> None:
    with pytest.raises(ValueRangeError, match=r"tolerance in \(0, 1\); got 0\.0\. Try 1e-10"):
        spectrum.iterations_for(10.0, 0.0)
    with pytest.raises(ValueRangeError, match=r"condition number above 1; got 1\.0\. Only id_cond and ortho_cond"):
        spectrum.features_for_condition(10, 1.0)
