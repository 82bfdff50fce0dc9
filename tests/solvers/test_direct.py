"""Factorizations against float64 references, on square, wide, tall and singular systems."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import normal, relative
from torch import Tensor

import onlynorm as on
from onlynorm.errors import ShapeError
from onlynorm.solvers.methods import direct
from onlynorm.solvers.methods.direct import solve_cholesky, solve_lu, solve_svd
from onlynorm.solvers.operator import KhatriRao

EPS = torch.finfo(torch.float64).eps


def _factors(out: int, inp: int, feat: int, seed: int = 0) -> tuple[tuple[Tensor, Tensor], Tensor]:
    operator, target = _system(out, inp, feat, seed=seed)
    return operator.dense(), target


def _system(out: int, inp: int, feat: int, *batch: int, seed: int = 0) -> tuple[KhatriRao, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    left, right, target = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((out, feat), (feat, inp), (*batch, out, inp))
    )
    return KhatriRao(left, right), target


def _condition(matrix: Tensor) -> float:
    return float(torch.linalg.cond(matrix))


def _residual(operator: KhatriRao, target: Tensor, gamma: Tensor) -> float:
    return relative(operator.apply(gamma), target)


@given(st.integers(1, 7), st.integers(1, 7), st.integers(0, 1000), st.sampled_from([torch.float32, torch.float64]))
@settings(max_examples=60)
def test_lu_solves_the_square_system(out: int, inp: int, seed: int, dtype: torch.dtype) -> None:
    operator, target = _system(out, inp, out * inp, seed=seed)
    matrix = operator.materialise()
    kappa, n = _condition(matrix), out * inp
    found = solve_lu(operator, target, tolerance=1e-12, dtype=dtype)
    expected = torch.linalg.solve(matrix, target.flatten())
    size = float(expected.norm() * matrix.norm() / target.norm())
    assert _residual(operator, target, found.gamma) <= 1e-12 + 4 * n * EPS * size
    assert relative(found.gamma, expected) <= kappa * (1e-12 + 8 * n * EPS)
    assert kappa / n <= found.condition * (1 + 1e-3), "the 1-norm condition is at least kappa / n"


def test_lu_in_float32_reaches_float64_accuracy_where_its_own_precision_cannot() -> None:
    operator, target = _system(24, 24, 576, seed=3)
    matrix = operator.materialise()
    single = torch.linalg.solve(matrix.float(), target.flatten().float()).double()
    found = solve_lu(operator, target, tolerance=1e-13)
    assert _residual(operator, target, found.gamma) <= 1e-13
    assert _residual(operator, target, single) > 1e-5


def test_gmres_takes_over_where_refinement_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left rows that are nearly dependent: kappa is far beyond 1 / eps32, and float32 factors alone cannot refine."""
    calls = []
    gmres = direct._gmres
    monkeypatch.setattr(direct, "_gmres", lambda *args: calls.append(1) or gmres(*args))
    operator, _ = _system(6, 6, 36, seed=1)
    left, right = operator.dense()
    left = left.clone()
    left[1] = left[0] + 1e-7 * left[1]
    operator = KhatriRao(left, right)
    target = operator.apply(torch.ones(36, dtype=torch.float64))
    found = solve_lu(operator, target, tolerance=1e-11)
    assert _condition(operator.materialise()) * torch.finfo(torch.float32).eps > 1
    assert calls
    assert _residual(operator, target, found.gamma) <= 1e-11


@pytest.mark.parametrize("n", [1, 5, 256, 257, 600])
def test_float32_factors_substitute_in_float64(n: int) -> None:
    lu = normal(n, n).float() / n + 2.0 * torch.eye(n)
    right = normal(n, 2, seed=1)
    lower = lu.double().tril(-1) + torch.eye(n, dtype=torch.float64)
    made = lower @ (lu.double().triu() @ direct._substitute_in_double(lu, right.clone()))
    assert relative(made, right) <= 10 * n * EPS


def test_gmres_takes_few_steps_beside_one_tiny_singular_value() -> None:
    """Float32 substitutions, which round in a way that is not linear, would take a hundred steps and more."""
    n = 600
    u, _, v = torch.linalg.svd(normal(n, n))
    s = torch.linspace(1.0, 0.02, n, dtype=torch.float64)
    s[-1] = 1e-7
    matrix = u * s @ v
    operator = KhatriRao(torch.ones(1, n, dtype=torch.float64), matrix.mT.contiguous())
    target = normal(1, n, seed=2)
    found = solve_lu(operator, target, tolerance=1e-9)
    assert _residual(operator, target, found.gamma) <= 1e-9
    assert found.iterations <= 40


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 1000), st.floats(1.3, 3.0))
@settings(max_examples=60)
def test_cholesky_gives_the_minimum_norm_solution(out: int, inp: int, seed: int, excess: float) -> None:
    operator, target = _system(out, inp, math.ceil(excess * out * inp), seed=seed)
    matrix = operator.materialise()
    kappa, n = _condition(matrix), operator.n_features
    found = solve_cholesky(operator, target, tolerance=1e-12)
    assert found is not None
    expected = torch.linalg.lstsq(matrix, target.flatten()[:, None], driver="gelsd").solution[:, 0]
    assert relative(found.gamma, expected) <= 8 * n * EPS * kappa**2 + 1e-14
    assert found.condition >= kappa / n


@given(st.integers(2, 6), st.integers(2, 6), st.integers(0, 1000), st.floats(0.1, 0.8))
@settings(max_examples=60)
def test_cholesky_gives_the_least_squares_solution(out: int, inp: int, seed: int, excess: float) -> None:
    operator, target = _system(out, inp, max(1, int(excess * out * inp)), seed=seed)
    matrix = operator.materialise()
    kappa, n = _condition(matrix), operator.equations
    found = solve_cholesky(operator, target, tolerance=1e-12)
    assert found is not None
    expected = torch.linalg.lstsq(matrix, target.flatten()[:, None], driver="gelsd").solution[:, 0]
    bound = 8 * n * EPS * kappa**2 * float(target.norm() / (matrix.norm() * expected.norm()) + 1)
    assert relative(found.gamma, expected) <= bound


@pytest.mark.parametrize("feat", [8, 30, 60])
def test_svd_is_the_pseudo_inverse_for_any_rank(feat: int) -> None:
    operator, target = _system(6, 5, feat)
    left, right = operator.dense()
    for features in (operator, KhatriRao(torch.cat([left, left], 1), torch.cat([right, right]))):
        matrix = features.materialise()
        expected = torch.linalg.pinv(matrix) @ target.flatten()
        found = solve_svd(features, target)
        assert relative(found.gamma, expected) <= 100 * EPS * max(matrix.shape) * found.condition
        values = torch.linalg.svdvals(matrix)
        rank = min(feat, 30)
        assert found.condition == pytest.approx(float(values[0] / values[rank - 1]), rel=1e-9)


def test_svd_of_nothing_is_zero() -> None:
    operator = KhatriRao(torch.zeros(2, 3, dtype=torch.float64), torch.ones(3, 2, dtype=torch.float64))
    found = solve_svd(operator, torch.ones(2, 2, dtype=torch.float64))
    assert torch.equal(found.gamma, torch.zeros(3, dtype=torch.float64))
    assert found.condition == math.inf


@pytest.mark.parametrize("batch", [(1,), (3,), (2, 2)])
def test_every_factorization_serves_a_batch_at_once(batch: tuple[int, ...]) -> None:
    square, target = _system(5, 4, 20, *batch)
    wide, _ = _system(5, 4, 40)
    results = [
        (square, solve_lu(square, target, tolerance=1e-12)),
        (wide, solve_cholesky(wide, target, tolerance=1e-12)),
        (wide, solve_svd(wide, target)),
    ]
    for operator, found in results:
        assert found is not None
        assert found.gamma.shape == (*batch, operator.n_features)
        assert _residual(operator, target, found.gamma) <= 1e-11


def test_a_singular_gram_has_no_cholesky_factor() -> None:
    ones = torch.ones(3, 12, dtype=torch.float64)
    operator = KhatriRao(ones, torch.ones(12, 3, dtype=torch.float64))
    assert solve_cholesky(operator, torch.eye(3, dtype=torch.float64), tolerance=1e-10) is None


def test_lu_of_an_exactly_singular_matrix_leaves_the_residual_and_no_noise() -> None:
    features = on.draw("he_normal", (4, 4), n_features=8)
    left, right = features.left(), features.right()
    operator = KhatriRao(torch.cat([left, left], 1), torch.cat([right, right]))
    found = solve_lu(operator, torch.eye(4, dtype=torch.float64), tolerance=1e-10)
    assert bool(torch.isfinite(found.gamma).all())
    assert _residual(operator, torch.eye(4, dtype=torch.float64), found.gamma) <= 1.0 + 100 * EPS
    assert found.condition > 1 / torch.finfo(torch.float32).eps
    zero = KhatriRao(torch.zeros(2, 4, dtype=torch.float64), torch.ones(4, 2, dtype=torch.float64))
    assert solve_lu(zero, torch.eye(2, dtype=torch.float64), tolerance=1e-10).condition == math.inf


def test_lu_needs_a_square_system() -> None:
    operator, target = _system(2, 2, 5)
    with pytest.raises(ShapeError, match=r"as many features as equations .*; got 5 for 4\. Use method='auto'"):
        solve_lu(operator, target, tolerance=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_pivot_that_is_rounding_makes_no_cholesky_factor(dtype: torch.dtype) -> None:
    for seed in range(20):
        (left, right), target = _factors(12, 12, 40, seed=seed)
        left[:, 7], right[7] = left[:, 30], right[30]  # two equal features, in a system that needs least squares
        operator, _ = KhatriRao(left, right).unit()
        assert solve_cholesky(operator, target, tolerance=1e-10, dtype=dtype) is None
        gamma = on.solve(left, right, target).gamma
        assert float(gamma[7]) == pytest.approx(float(gamma[30]), rel=1e-6)


def test_rows_of_any_size_have_a_cholesky_factor() -> None:
    (left, right), target = _factors(8, 8, 128)
    left = left * torch.logspace(-8, 8, 8, dtype=torch.float64)[:, None]
    found = solve_cholesky(KhatriRao(left, right).unit()[0], target, tolerance=1e-10)
    assert found is not None


@pytest.mark.parametrize("place", [0, -1])
def test_the_condition_number_after_qr_does_not_depend_on_the_target(place: int) -> None:
    left, right = normal(8, 58), normal(58, 8, seed=1)
    left[1] = left[0]  # deficient rank
    matrix = (left[:, None, :] * right.mT[None]).flatten(0, 1)
    u, s, _ = torch.linalg.svd(matrix / matrix.norm(dim=0), full_matrices=False)
    rank = int((s > 1e-10 * s[0]).sum())
    found = on.solve(left, right, u[:, :rank][:, place].reshape(8, 8), method="qr")
    assert found.condition == pytest.approx(float(s[0] / s[rank - 1]), rel=1e-6)
