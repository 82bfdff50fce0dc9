"""Conjugate gradients: exact to float64 from float32 steps, honest where they cannot be, fast when whitened."""

from __future__ import annotations

import gc
import itertools
import math

import numpy as np
import pytest
import scipy.integrate
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tensors import normal, relative
from torch import Tensor

import onlynorm as on
from onlynorm.solvers.methods.krylov import Whitening, anisotropy, conjugate_gradients, solve_krylov
from onlynorm.solvers.operator import KhatriRao

EPS = torch.finfo(torch.float64).eps


def _system(out: int, inp: int, feat: int, *batch: int, seed: int = 0) -> tuple[KhatriRao, Tensor]:
    return KhatriRao(normal(out, feat, seed=seed), normal(feat, inp, seed=seed + 1)), normal(
        *batch, out, inp, seed=seed + 2
    )


def _mixed(out: int, inp: int, feat: int, spread: float) -> KhatriRao:
    """Features whose rows were mixed by matrices of condition number `spread`."""

    def mixing(n: int, seed: int) -> Tensor:
        basis, _ = torch.linalg.qr(normal(n, n, seed=seed))
        return basis * torch.logspace(0, -math.log10(spread), n, dtype=torch.float64) @ basis.mT

    return KhatriRao(mixing(out, 7) @ normal(out, feat), normal(feat, inp, seed=1) @ mixing(inp, 8))


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 1000), st.floats(1.5, 4.0), st.booleans())
@settings(max_examples=30)
def test_the_solution_is_the_one_of_least_norm(out: int, inp: int, seed: int, excess: float, whiten: bool) -> None:
    operator, target = _system(out, inp, math.ceil(excess * out * inp) + 1, seed=seed)
    matrix = operator.materialise()
    kappa = float(torch.linalg.cond(matrix))
    found = solve_krylov(operator, target, tolerance=1e-11, max_iterations=5000, whiten=whiten)
    expected = torch.linalg.lstsq(matrix, target.flatten()[:, None], driver="gelsd").solution[:, 0]
    assert found.history[-1] <= 1e-11
    assert relative(found.gamma, expected) <= 2e-11 * kappa
    seen = torch.linalg.pinv(matrix) @ (matrix @ found.gamma)  # gamma without its part in the null space
    assert relative(seen, found.gamma) <= 8 * operator.n_features * EPS * kappa**2


@given(st.integers(2, 6), st.integers(2, 6), st.integers(0, 1000), st.floats(0.1, 0.7))
@settings(max_examples=30)
def test_too_few_features_give_the_least_squares_solution(out: int, inp: int, seed: int, excess: float) -> None:
    operator, target = _system(out, inp, max(1, int(excess * out * inp)), seed=seed)
    matrix = operator.materialise()
    kappa = float(torch.linalg.cond(matrix))
    found = solve_krylov(operator, target, tolerance=1e-11, max_iterations=5000)
    expected = torch.linalg.lstsq(matrix, target.flatten()[:, None], driver="gelsd").solution[:, 0]
    assert relative(found.gamma, expected) <= 2e-11 * kappa**2


def test_float32_rounds_reach_float64_accuracy_at_the_price_of_a_few_more_steps() -> None:
    operator, target = _system(20, 20, 500)
    single = solve_krylov(operator, target, tolerance=1e-12, max_iterations=2000)
    double = solve_krylov(operator, target, tolerance=1e-12, max_iterations=2000, inner_dtype=torch.float64)
    assert relative(operator.apply(single.gamma), target) <= 1e-12
    assert single.rounds > 1
    # Every restart forgets the directions of the round before it. How many steps that costs depends on how the
    # processor rounds (1.17 times as many as in float64 on one); a round that gained nothing would double them.
    assert single.iterations <= 1.5 * double.iterations
    assert all(b < a for a, b in zip(single.history, single.history[1:], strict=False))


@pytest.mark.parametrize("excess", [0.5, 1.5])
def test_the_steps_reveal_the_condition_number(excess: float) -> None:
    operator, target = _system(16, 16, int(excess * 256))
    found = solve_krylov(operator, target, tolerance=1e-12, max_iterations=2000)
    assert found.condition == pytest.approx(float(torch.linalg.cond(operator.materialise())), rel=0.05)


@pytest.mark.parametrize("batch", [(1,), (3,), (2, 2)])
@pytest.mark.parametrize("feat", [12, 60])
def test_a_batch_is_solved_as_each_of_its_members(batch: tuple[int, ...], feat: int) -> None:
    operator, target = _system(5, 6, feat, *batch)
    found = solve_krylov(operator, target, tolerance=1e-11, max_iterations=1000)
    assert found.gamma.shape == (*batch, feat)
    for one, right in zip(found.gamma.reshape(-1, feat), target.reshape(-1, 5, 6), strict=True):
        alone = solve_krylov(operator, right, tolerance=1e-11, max_iterations=1000)
        assert relative(one, alone.gamma) <= 1e-9


def test_a_zero_member_of_a_batch_stays_zero() -> None:
    operator, target = _system(5, 6, 60, 2)
    target[0] = 0.0
    found = solve_krylov(operator, target, tolerance=1e-11, max_iterations=1000)
    assert torch.equal(found.gamma[0], torch.zeros(60, dtype=torch.float64))
    assert relative(operator.apply(found.gamma), target) <= 1e-11


@pytest.mark.parametrize("spread", [10.0, 100.0])
def test_whitening_cures_features_that_are_not_isotropic(spread: float) -> None:
    operator = _mixed(12, 12, 216, spread)
    target = normal(12, 12, seed=5)
    plain = solve_krylov(operator, target, tolerance=1e-9, max_iterations=20_000, inner_dtype=torch.float64)
    white = solve_krylov(operator, target, tolerance=1e-9, max_iterations=20_000, whiten=True)
    assert white.history[-1] <= 1e-9
    assert 5 * white.iterations < plain.iterations
    # Float32 rounds repeat some steps; without whitening there are dozens of times as many.
    assert white.iterations <= 3 * on.spectrum.predict_iterations(on.spectrum.predict_condition(12, 12, 216), 1e-9)
    expected = torch.linalg.lstsq(operator.materialise(), target.flatten()[:, None], driver="gelsd").solution[:, 0]
    assert relative(white.gamma, expected) <= 2e-9 * spread**2 * 10


def test_whitened_factors_are_orthonormal_and_undo_the_mixing() -> None:
    operator = _mixed(6, 4, 100, 50.0)
    whitening = Whitening.of(operator)
    assert whitening is not None
    left, right = whitening.features(operator, torch.float64).dense()
    left, right = left / operator.dense()[0].norm(dim=0), right / operator.dense()[1].norm(dim=1, keepdim=True)
    atol = 1e3 * EPS * 50**2
    assert torch.allclose(left @ left.mT, torch.eye(6, dtype=torch.float64), atol=atol)
    assert torch.allclose(right.mT @ right, torch.eye(4, dtype=torch.float64), atol=atol)
    gamma = normal(100)
    white = whitening.features(operator, torch.float64).apply(gamma)
    assert torch.allclose(whitening.forward(operator.apply(gamma)), white, atol=1e3 * EPS * 50**2)


def test_features_of_deficient_row_rank_cannot_be_whitened_and_are_not() -> None:
    left = normal(4, 30)
    left[3] = left[2]
    operator = KhatriRao(left, normal(30, 3, seed=1))
    assert Whitening.of(operator) is None
    target = operator.apply(torch.ones(30, dtype=torch.float64))
    found = solve_krylov(operator, target, tolerance=1e-10, max_iterations=500, whiten=True)
    assert relative(operator.apply(found.gamma), target) <= 1e-10


@pytest.mark.parametrize(("out", "inp", "feat"), [(8, 8, 80), (32, 32, 1280), (16, 64, 1300), (1, 30, 45), (30, 1, 45)])
def test_isotropic_features_look_isotropic(out: int, inp: int, feat: int) -> None:
    assert anisotropy(KhatriRao(normal(out, feat), normal(feat, inp, seed=1))) < 1.5
    regenerated = on.draw("he_normal", (out, inp), n_features=feat)
    assert anisotropy(KhatriRao.regenerating(regenerated)) < 1.5


def test_features_look_the_same_whichever_factor_holds_their_length() -> None:
    left, right = normal(12, 216), normal(216, 12, seed=1)
    lengths = torch.logspace(-3, 3, 216, dtype=torch.float64)
    moved = KhatriRao(left * lengths, right / lengths[:, None])
    assert anisotropy(moved) == pytest.approx(anisotropy(KhatriRao(left, right)), rel=1e-3)
    target = normal(12, 12, seed=2)
    plain, white = (
        solve_krylov(moved, target, tolerance=1e-10, max_iterations=2000, whiten=whiten) for whiten in (False, True)
    )
    assert white.iterations <= 1.2 * plain.iterations


def test_sparse_features_of_unit_length_are_not_whitened_in_vain() -> None:
    features = on.draw("sparse_he_normal", (30, 30), excess=2.0, density=0.2)
    operator, _ = KhatriRao(features.left().double(), features.right().double()).unit()
    assert anisotropy(operator) < 1.5


def _direction_spread(scales: NDArray[np.float64]) -> float:
    """The square root of the condition number of E[x x^T / |x|^2] for normal x with these standard deviations.

    E[x_i^2 / |x|^2] is the integral over t > 0 of s_i^2 / (1 + 2 t s_i^2) times the product of (1 + 2 t s_j^2)^(-1/2).
    """
    squares = scales**2

    def integrand(log_t: float, square: float) -> float:
        t = math.exp(log_t)
        return float(t * square / (1 + 2 * t * square) / np.prod(np.sqrt(1 + 2 * t * squares)))

    moments = [scipy.integrate.quad(integrand, -30, 30, args=(s,), limit=200)[0] for s in squares]
    assert sum(moments) == pytest.approx(1.0, rel=1e-3)
    return math.sqrt(max(moments) / min(moments))


@pytest.mark.parametrize("spread", [3.0, 30.0, 100.0])
def test_mixed_features_look_as_anisotropic_as_their_directions_are(spread: float) -> None:
    """A sample of n directions changes each spread by at most (1 + r) / (1 - r), by which `anisotropy` divides."""
    expected = _direction_spread(np.logspace(0, -math.log10(spread), 12)) ** 2
    r = math.sqrt(12 / 216)
    chance = ((1 + r) / (1 - r)) ** 2  # both sides
    assert max(1.0, expected / chance**2) <= anisotropy(_mixed(12, 12, 216, spread)) <= expected


def test_features_without_one_direction_are_infinitely_anisotropic() -> None:
    left = normal(4, 30)
    left[3] = 0.0
    assert anisotropy(KhatriRao(left, normal(30, 3))) == math.inf


@pytest.mark.parametrize("whiten", [False, True])
def test_regenerated_features_need_no_copy(whiten: bool) -> None:
    features = on.draw("he_normal", (4, 5), excess=2.0)
    operator = KhatriRao.regenerating(features, block=15)
    target = normal(4, 5)
    found = solve_krylov(operator, target, tolerance=1e-11, max_iterations=500, store=False, whiten=whiten)
    stored = solve_krylov(operator, target, tolerance=1e-11, max_iterations=500)
    assert found.history[-1] <= 1e-11
    assert relative(found.gamma, stored.gamma) <= 1e-9


def test_an_unreachable_target_ends_with_the_best_seen_and_not_with_a_worse_one() -> None:
    left, right = normal(6, 15), normal(15, 5, seed=1)
    operator = KhatriRao(torch.cat([left, left], 1), torch.cat([right, right]))
    target = normal(6, 5, seed=2)
    found = solve_krylov(operator, target, tolerance=1e-10, max_iterations=2000)
    assert bool(torch.isfinite(found.gamma).all())
    assert relative(operator.apply(found.gamma), target) <= 1.0
    assert found.history[-1] == pytest.approx(relative(operator.apply(found.gamma), target))


def test_asked_for_least_squares_an_unreachable_target_is_approached_as_far_as_possible() -> None:
    left, right = normal(6, 15), normal(15, 5, seed=1)
    operator = KhatriRao(torch.cat([left, left], 1), torch.cat([right, right]))
    target = normal(6, 5, seed=2)
    found = solve_krylov(operator, target, tolerance=1e-11, max_iterations=2000, least_squares=True)
    expected = torch.linalg.pinv(operator.materialise(), rtol=1e-10) @ target.flatten()
    # Steps are rounded to float32, and what falls into the null space stays there.
    assert relative(found.gamma, expected) <= 1e-11 * found.condition**2 + 30 * torch.finfo(torch.float32).eps


def test_the_limit_on_iterations_is_kept() -> None:
    operator, target = _system(16, 16, 282)
    found = solve_krylov(operator, target, tolerance=1e-12, max_iterations=17)
    assert found.iterations == 17
    assert found.history[-1] > 1e-12


def test_progress_hears_of_every_round() -> None:
    operator, target = _system(8, 8, 128)
    heard: list[tuple[int, float]] = []
    found = solve_krylov(
        operator, target, tolerance=1e-11, max_iterations=500, on_step=lambda n, error: heard.append((n, error))
    )
    assert [error for _, error in heard] == found.history
    assert heard[0] == (0, 1.0)
    assert heard[-1][0] == found.iterations


def test_an_iteration_holds_no_more_tensors_the_longer_it_runs() -> None:
    # A small tensor per step would keep the memory of the large ones around it from being used again.
    diagonal, alive, steps = torch.logspace(0, 3, 400, dtype=torch.float64), [], itertools.count()

    def gram(p: Tensor) -> Tensor:
        if next(steps) in (2, 100):  # a look at all objects of the process takes a fifth of a second
            alive.append(sum(type(one) is Tensor for one in gc.get_objects()))
        return diagonal * p

    _, n_steps, condition = conjugate_gradients(gram, torch.ones_like(diagonal), 1, tolerance=1e-10, max_iterations=300)
    assert n_steps > 100
    early, late = alive
    assert late <= early + 5
    assert condition == pytest.approx(math.sqrt(1000.0), rel=0.1)
