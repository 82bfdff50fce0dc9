"""The minimum-width system: an operator like any other, and a target from out - 1 fewer features."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from systems import draw_system, rebuild
from tensors import normal, relative
from torch import Tensor

import onlynorm as on
from onlynorm.errors import InsufficientFeaturesError, ShapeError, ValueRangeError
from onlynorm.solvers.fallback import solve_with_fallback
from onlynorm.solvers.methods.minimum_width import MinimumWidth, minimum_features
from onlynorm.solvers.operator import KhatriRao, Operator

EPS = torch.finfo(torch.float64).eps


def _features(out: int, inp: int, feat: int, seed: int = 0) -> KhatriRao:
    return KhatriRao(normal(out, feat, seed=seed), normal(feat, inp, seed=seed + 1))


def _made(solution: on.solvers.Solution, operator: KhatriRao) -> Tensor:
    assert solution.output_gamma is not None
    return solution.output_gamma[:, None] * operator.apply(solution.gamma)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 12), st.integers(0, 999), st.sampled_from([(), (2,)]))
@settings(max_examples=60)
def test_the_operator_keeps_the_contract(out: int, inp: int, feat: int, seed: int, batch: tuple[int, ...]) -> None:
    features = _features(out, inp, feat, seed)
    system = MinimumWidth(features, normal(out, inp, seed=seed + 2))
    matrix = system.materialise()
    assert isinstance(system, Operator)
    assert matrix.shape == (system.equations, system.n_features) == (out * inp, feat + out - 1)
    gamma, residual = normal(*batch, system.n_features), normal(*batch, out, inp, seed=3)
    near = 100 * sum(matrix.shape) * EPS * float(matrix.norm())
    assert torch.allclose(system.apply(gamma).flatten(-2), gamma @ matrix.mT, atol=near * 10)
    assert torch.allclose(system.transpose(residual), residual.flatten(-2) @ matrix, atol=near * 10)
    rows = residual.flatten(-2) @ (matrix @ matrix.mT)
    assert torch.allclose(system.row_gram_apply(residual).flatten(-2), rows, atol=near * float(matrix.norm()) * 10)
    assert torch.allclose(system.gram(), matrix.mT @ matrix, atol=near * float(matrix.norm()))
    assert torch.allclose(system.row_gram(), matrix @ matrix.mT, atol=near * float(matrix.norm()))
    assert system.one_norm() == pytest.approx(float(matrix.abs().sum(0).max()))
    single = system.to(torch.float32)
    assert torch.equal(single.materialise(), system.materialise(dtype=torch.float32)) or torch.allclose(
        single.materialise().double(), matrix, atol=8 * torch.finfo(torch.float32).eps * float(matrix.abs().max())
    )
    assert system.to(torch.float64) is system


def test_the_added_columns_scale_rows_and_keep_the_mean() -> None:
    target = normal(5, 4, seed=9)
    system = MinimumWidth(_features(5, 4, 16), target)
    unknowns = normal(system.n_features)
    factors = system.row_factors(unknowns)
    assert float(factors.mean()) == pytest.approx(1.0, abs=100 * EPS * float(factors.abs().max()))
    without = system.features.apply(unknowns[:16])
    expected = without - (factors - 1.0)[:, None] * target
    assert torch.allclose(system.apply(unknowns), expected, atol=1e3 * EPS * float(expected.abs().max()))
    added = system.materialise()[:, 16:].norm(dim=0)
    assert float(added.max() / system.features.column_squares().mean().sqrt()) < 2, "columns of the features' size"


@pytest.mark.parametrize(("out", "inp"), [(1, 1), (1, 6), (6, 1), (2, 2), (5, 8), (8, 5), (24, 20)])
@pytest.mark.parametrize("extra", [0, 3])
def test_the_minimum_number_of_features_reaches_any_target(out: int, inp: int, extra: int) -> None:
    need = minimum_features(out, inp)
    operator = _features(out, inp, need + extra, seed=4)
    target = normal(out, inp, seed=6)
    solution = on.solve(*operator.dense(), target, minimum_width=True, tolerance=1e-10)
    assert need == out * inp - out + 1
    assert relative(_made(solution, operator), target) <= 1e-10
    assert solution.gamma.shape == (need + extra,)


@pytest.mark.parametrize("method", ["lu", "krylov", "svd"])
def test_every_method_solves_it(method: str) -> None:
    operator = _features(4, 3, 9 if method == "lu" else 14)
    target = normal(4, 3, seed=5)
    solution = on.solve(*operator.dense(), target, minimum_width=True, method=method, tolerance=1e-9)
    assert solution.method == method
    assert relative(_made(solution, operator), target) <= 1e-9


def test_scales_of_outputs_that_magnify_what_the_system_left_are_answered_by_a_finer_solve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At a loose tolerance an iterative solve stops early, and the judged residual comes after the outputs' scales."""
    asked: list[float] = []

    def watched(*parts: Any, tolerance: float, **rest: Any) -> Any:
        asked.append(tolerance)
        return solve_with_fallback(*parts, tolerance=tolerance, **rest)

    monkeypatch.setattr(sys.modules["onlynorm.solvers.solve"], "solve_with_fallback", watched)
    for seed in range(20):
        operator = _features(6, 8, minimum_features(6, 8) + 8, seed=seed)
        target = normal(6, 8, seed=100 + seed)
        solution = on.solve(*operator.dense(), target, minimum_width=True, method="krylov", tolerance=1e-4)
        assert relative(_made(solution, operator), target) <= 1e-4
    assert len(asked) > 20, "at least one first solve was not enough"
    assert asked.count(1e-4) == 20


def test_the_solution_is_that_of_the_pivoted_null_vector() -> None:
    """The paper's way: one pivot per row, a null vector of the pivoted system; equal up to one common factor."""
    out, inp = 4, 3
    operator = _features(out, inp, minimum_features(out, inp))
    target = normal(out, inp, seed=5)
    solution = on.solve(*operator.dense(), target, minimum_width=True)
    matrix = operator.materialise().unflatten(0, (out, inp))
    pivot = target.abs().argmax(1)
    rows = []
    for i in range(out):
        ratio = target[i] / target[i, pivot[i]]
        others = [j for j in range(inp) if j != pivot[i]]
        rows.append(matrix[i, others] - ratio[others, None] * matrix[i, pivot[i]])
    null = torch.linalg.svd(torch.cat(rows))[2][-1]
    cosine = float(torch.dot(null, solution.gamma).abs() / solution.gamma.norm())
    assert cosine == pytest.approx(1.0, abs=1e-10)


def test_zero_rows_are_switched_off_and_need_no_features() -> None:
    target = normal(6, 4, seed=5)
    target[[1, 4]] = 0.0
    operator = _features(6, 4, minimum_features(4, 4))
    solution = on.solve(*operator.dense(), target, minimum_width=True, tolerance=1e-10)
    assert solution.output_gamma is not None
    assert torch.equal(solution.output_gamma == 0, target.abs().amax(1) == 0)
    assert relative(_made(solution, operator), target) <= 1e-10


def test_zero_rows_may_be_zero_in_the_features_too() -> None:
    left, right = _features(6, 4, 22).dense()
    left = left.clone()
    left[2] = 0.0
    target = normal(6, 4, seed=5)
    target[2] = 0.0
    solution = on.solve(left, right, target, minimum_width=True, tolerance=1e-10)
    assert relative(_made(solution, KhatriRao(left, right)), target) <= 1e-10


def test_a_zero_target_switches_everything_off() -> None:
    solution = on.solve(*_features(3, 3, 8).dense(), torch.zeros(3, 3), minimum_width=True)
    assert solution.output_gamma is not None
    assert not bool(solution.output_gamma.any())
    assert solution.residual == 0.0


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1e30, 1e300])
def test_extreme_targets_are_reached(scale: float) -> None:
    operator = _features(5, 4, 17)
    target = normal(5, 4, seed=5) * scale
    solution = on.solve(*operator.dense(), target, minimum_width=True, tolerance=1e-10)
    assert relative(_made(solution, operator) / scale, target / scale) <= 1e-10


def test_rows_of_very_different_size_are_reached() -> None:
    operator = _features(5, 4, 17)
    target = normal(5, 4, seed=5)
    target[3] *= 1e-170
    solution = on.solve(*operator.dense(), target, minimum_width=True, tolerance=1e-10)
    assert relative(_made(solution, operator), target) <= 1e-10


def test_fewer_features_than_the_minimum_are_refused() -> None:
    operator = _features(4, 5, 16)
    message = r"minimum width needs 17 features for 4 nonzero outputs of 5 weights; got 16\. Draw 1 more"
    with pytest.raises(InsufficientFeaturesError, match=message):
        on.solve(*operator.dense(), normal(4, 5), minimum_width=True)


def test_what_the_system_cannot_take_is_refused() -> None:
    left, right = _features(3, 3, 9).dense()
    with pytest.raises(
        ShapeError, match=r"one target \(out, inp\) and no near; got a target of shape \(2, 3, 3\)\. Solve"
    ):
        on.solve(left, right, normal(2, 3, 3), minimum_width=True)
    with pytest.raises(ShapeError, match=r"no near; got near\. .*minimum_width"):
        on.solve(left, right, normal(3, 3), minimum_width=True, near=1.0)
    features = on.draw("he_normal", (3, 2, 3), kernel="second")
    message = r"kernel in the first layer.*got 9 rows for 3 outputs\. Draw the features with kernel='first'"
    with pytest.raises(ValueRangeError, match=message):
        on.solve_features(features, normal(3, 2, 3), minimum_width=True)


def test_a_convolution_is_solved_with_its_kernel_in_the_first_layer() -> None:
    features = on.draw("he_normal", (4, 2, 3), n_features=minimum_features(4, 6))
    target = normal(4, 2, 3)
    solution = on.solve_features(features, target, minimum_width=True, tolerance=1e-10)
    made = features.as_weight(_made(solution, KhatriRao(features.left(), features.right())))
    assert relative(made, target) <= 1e-10


@pytest.mark.parametrize("power", [3, 6, 8])
def test_the_scales_of_rows_cost_no_digits(power: int) -> None:
    left, right, target = draw_system(10, 10, 91)
    target = target * torch.logspace(-power, power, 10, dtype=torch.float64)[:, None]
    solution = on.solve(left, right, target, minimum_width=True, tolerance=1e-10)
    made = solution.output_gamma[:, None] * rebuild(left, right, solution.gamma)
    errors = (made - target).norm(dim=1) / target.norm(dim=1)
    assert float(errors.max()) <= 1e-10, "every row by itself"


@pytest.mark.parametrize("power", [4, 8, 100])
@pytest.mark.parametrize("extra", [0, 11])
def test_the_scales_of_rows_of_left_cost_no_digits_either(power: int, extra: int) -> None:
    left, right, target = draw_system(6, 9, 49 + extra)
    scales = torch.logspace(-power, power, 6, dtype=torch.float64)
    plain = on.solve(left, right, target, minimum_width=True)
    solution = on.solve(left * scales[:, None], right, target, minimum_width=True, tolerance=1e-10)
    assert solution.residual <= 100 * max(plain.residual, EPS)
    assert solution.output_gamma is not None
    made = (solution.output_gamma * scales)[:, None] * rebuild(left, right, solution.gamma)
    assert relative(made, target) <= 1e-10


@pytest.mark.parametrize("lack", ["repeated", "output", "input", "target"])
def test_what_cannot_be_reached_names_the_features_that_solve_it(lack: str) -> None:
    left, right, target = draw_system(6, 9, 60)
    if lack == "repeated":
        left, right = left[:, :30].repeat(1, 2), right[:30].repeat(2, 1)
    elif lack == "output":
        left[2] = 0
    elif lack == "input":
        right[:, 3] = 0
    else:
        target[[1, 4]] = 0
        left, right = left[:, :20].repeat(1, 2), right[:20].repeat(2, 1)
    solution = on.solve(left, right, target, minimum_width=True)
    assert solution.residual <= 1.0
    assert "optimum" not in solution.shortfall
    n = int(solution.shortfall.split(" more dense features")[0].split()[-1])
    more = torch.cat([left, normal(6, n, seed=91)], 1), torch.cat([right, normal(n, 9, seed=92)])
    assert on.solve(*more, target, minimum_width=True, tolerance=1e-10).is_exact
    if lack != "output":  # where a row factor of zero solves the system, the number is a safe one
        fewer = more[0][:, :-1], more[1][:-1]
        assert not on.solve(*fewer, target, minimum_width=True).is_exact


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_extreme_size_are_to_be_solved_without_minimum_width(seed: int) -> None:
    left, right, target = draw_system(2, 30, 75, seed=seed)
    left = left[:1] * torch.tensor([[1e-7], [1e7]], dtype=torch.float64)
    solution = on.solve(left.expand(2, 75), right, target, minimum_width=True)
    assert "without minimum_width" in solution.shortfall
    n = int(solution.shortfall.split(" more dense features")[0].split()[-1])
    more = torch.cat([left, normal(2, n, seed=91)], 1), torch.cat([right, normal(n, 30, seed=92)])
    assert on.solve(*more, target, tolerance=1e-10).is_exact


@pytest.mark.parametrize("seed", range(8))
def test_sparse_features_name_as_many_as_solve_it(seed: int) -> None:
    left, right, target = draw_system(4, 5, 21, seed=seed)
    left = left * (torch.rand(4, 21, generator=torch.Generator().manual_seed(seed)) < 0.3)
    right = right * (torch.rand(21, 5, generator=torch.Generator().manual_seed(seed + 100)) < 0.4)
    solution = on.solve(left, right, target, minimum_width=True)
    if not solution.is_exact:
        n = int(solution.shortfall.split(" more dense features")[0].split()[-1])
        more = torch.cat([left, normal(4, n, seed=91)], 1), torch.cat([right, normal(n, 5, seed=92)])
        assert on.solve(*more, target, minimum_width=True, tolerance=1e-10).is_exact


@pytest.mark.parametrize("shape", [(2, 1), (5, 1), (3, 4)])
def test_features_that_are_all_zero_leave_the_target(shape: tuple[int, int]) -> None:
    left, right, target = draw_system(*shape, minimum_features(*shape))
    solution = on.solve(0 * left, right, target, minimum_width=True)
    assert solution.residual == 1.0
    assert "more dense features make the system solvable" in solution.shortfall
