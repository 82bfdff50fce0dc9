"""`solve` on extreme and degenerate input: any scale, dead rows, repeated and mixed features."""

from __future__ import annotations

import math

import pytest
import torch
from systems import draw_system, least_squares, materialise, normal, rebuild, relative
from torch import Tensor

import onlynorm as on
from onlynorm.errors import InsufficientFeaturesError, ToleranceError, ValueRangeError


def _mixing(n: int, spread: float, seed: int) -> Tensor:
    basis, _ = torch.linalg.qr(normal(n, n, seed=seed))
    return basis * torch.logspace(0, -math.log10(spread), n, dtype=torch.float64) @ basis.mT


@pytest.mark.parametrize("method", ["auto", "lu", "cholesky", "krylov", "svd"])
@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1e30, 1e300])
def test_targets_of_any_size_reach_the_tolerance(method: str, scale: float) -> None:
    left, right, target = draw_system(5, 6, 30 if method == "lu" else 50)
    solution = on.solve(left, right, target * scale, tolerance=1e-10, method=method)
    assert relative(rebuild(left, right, solution.gamma) / scale, target * scale / scale) <= 1e-10


@pytest.mark.parametrize("method", ["auto", "lu", "cholesky", "krylov"])
@pytest.mark.parametrize("scale", [1e-310, 1e-150, 1e-20, 1e20, 1e150])
def test_features_of_any_size_reach_the_tolerance(method: str, scale: float) -> None:
    left, right, target = draw_system(5, 6, 30 if method == "lu" else 50)
    tiny = left * scale  # at 1e-310 denormal: as given numbers they are still exact
    solution = on.solve(tiny, right, target * scale, tolerance=1e-10, method=method)
    assert relative(rebuild(tiny / scale, right, solution.gamma), target * scale / scale) <= 1e-9


def test_gammas_beyond_float64_are_an_error_with_a_cure() -> None:
    left, right, target = draw_system(3, 3, 12)
    with pytest.raises(ValueRangeError, match=r"gamma needs to fit into float64; it overflows.*Rescale the features"):
        on.solve(left * 1e-200, right * 1e-200, target)


@pytest.mark.parametrize("near", [None, 0.0])
def test_a_zero_target_needs_nothing(near: float | None) -> None:
    left, right, target = draw_system(4, 3, 20)
    solution = on.solve(left, right, 0 * target, tolerance=1e-12, near=near)
    assert not bool(solution.gamma.any())
    assert (solution.residual, solution.shortfall) == (0.0, "")


@pytest.mark.parametrize("method", ["auto", "cholesky", "krylov", "svd"])
def test_a_zero_member_of_a_batch_gets_zero(method: str) -> None:
    left, right, target = draw_system(4, 3, 20, 3)
    target[1] = 0.0
    solution = on.solve(left, right, target, method=method, tolerance=1e-10)
    assert float(solution.gamma[1].norm()) == 0.0


@pytest.mark.parametrize("method", ["auto", "cholesky", "krylov", "svd"])
@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
def test_weights_that_no_feature_reaches_are_the_residual(method: str, scale: float) -> None:
    left, right, target = draw_system(5, 6, 60)
    left[2], right[:, 4] = 0.0, 0.0
    lost = target.clone()
    lost[[0, 1, 3, 4]] *= (torch.arange(6) == 4).double()
    solution = on.solve(left, right, target * scale, method=method)
    assert solution.residual == pytest.approx(float(lost.norm() / target.norm()), rel=1e-8)
    with pytest.raises(InsufficientFeaturesError, match=r"none at 10 of them, first in outputs 0, 1, 2, 3, 4.*Draw"):
        on.solve(left, right, target, method=method, tolerance=1e-10)


@pytest.mark.parametrize("method", ["auto", "cholesky", "krylov", "svd"])
def test_dead_rows_do_no_harm_where_the_target_is_zero(method: str) -> None:
    left, right, target = draw_system(5, 6, 60)
    left[2], right[:, 4], target[2], target[:, 4] = 0.0, 0.0, 0.0, 0.0
    assert on.solve(left, right, target, method=method, tolerance=1e-10).is_exact


@pytest.mark.parametrize("method", ["auto", "krylov", "svd"])
def test_features_that_reach_nothing_say_so(method: str) -> None:
    left, right, target = draw_system(4, 3, 20)
    nothing = on.solve(0 * left, right, target, method=method)
    assert (nothing.residual, float(nothing.gamma.norm())) == (1.0, 0.0)
    assert nothing.shortfall
    left[1] = 0.0
    only = 0 * target
    only[1] = 1.0
    assert on.solve(left, right, only, method=method).residual == 1.0


@pytest.mark.parametrize("reachable", [True, False])
@pytest.mark.parametrize(("distinct", "copies"), [(15, 2), (10, 2), (12, 4), (30, 2)])
def test_repeated_features_give_the_minimum_norm_answer(distinct: int, copies: int, reachable: bool) -> None:
    left, right, target = draw_system(6, 5, distinct)
    left, right = left.repeat(1, copies), right.repeat(copies, 1)
    if reachable:
        target = rebuild(left, right, normal(distinct * copies, seed=8))
    solution = on.solve(left, right, target)
    expected = torch.linalg.pinv(materialise(left, right), rtol=1e-10) @ target.flatten()
    values = torch.linalg.svdvals(materialise(left, right))
    kappa = float(values[0] / values[min(distinct, 30) - 1])
    assert relative(solution.gamma, expected) <= 1e-9 * kappa**2
    best = relative(rebuild(left, right, expected), target)
    assert solution.residual == pytest.approx(best, rel=1e-6, abs=1e-10)
    assert bool(solution.shortfall) == (best > 1e-10)
    if best > 1e-10 and distinct * copies >= 30:
        assert "not generic (repeated, sparse or of deficient rank)" in solution.shortfall


def test_large_repeated_features_give_the_least_squares_answer_and_say_so() -> None:
    features = on.draw("he_normal", (40, 40), n_features=1000)
    left, right = features.left().repeat(1, 2), features.right().repeat(2, 1)
    target = normal(40, 40)
    solution = on.solve(left, right, target)
    assert solution.residual == pytest.approx(relative(rebuild(left, right, solution.gamma), target), rel=1e-9)
    matrix = materialise(features.left(), features.right())
    half = torch.linalg.lstsq(matrix, target.flatten()[:, None]).solution[:, 0] / 2
    assert solution.residual == pytest.approx(relative(matrix @ (2 * half), target.flatten()), rel=1e-6)
    assert relative(solution.gamma, half.repeat(2)) <= 1e-7
    assert "not generic" in solution.shortfall
    with pytest.raises(
        ToleranceError, match=r"needs a relative residual of 1e-10; least squares reached .* on 1600 equations"
    ):
        on.solve(left, right, target, tolerance=1e-10)


def test_whitening_cures_mixed_features() -> None:
    left, right, target = draw_system(10, 10, 150)
    left, right = _mixing(10, 30.0, 7) @ left, right @ _mixing(10, 30.0, 8)
    on_, off = (on.solve(left, right, target, method="krylov", precondition=p) for p in (True, False))
    assert on_.residual <= 1e-10
    assert 5 * on_.iterations < off.iterations
    default = on.solve(left, right, target, method="krylov", tolerance=1e-10)
    assert default.iterations == on_.iterations, "mixed features are whitened unasked"
    kappa = float(torch.linalg.cond(materialise(left, right)))
    assert relative(on_.gamma, least_squares(left, right, target)) <= 1e-10 * kappa
