"""`solve` end to end: every method against float64 references, storage, memory, and honest words."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from systems import column_lengths, draw_system, least_squares, materialise, rebuild
from tensors import normal, relative

import onlynorm as on
from onlynorm.errors import (
    InsufficientFeaturesError,
    MemoryLimitError,
    ShapeError,
    ToleranceError,
    UnknownNameError,
    ValueRangeError,
)
from onlynorm.solvers import solve_operator
from onlynorm.solvers.choose import krylov_memory
from onlynorm.solvers.operator import KhatriRao

EPS = torch.finfo(torch.float64).eps
SHAPES = [(1, 1), (1, 7), (7, 1), (3, 9), (9, 3), (6, 6)]


# Every method against the reference


@pytest.mark.parametrize("method", ["auto", "cholesky", "krylov", "qr", "svd"])
@pytest.mark.parametrize(("out", "inp"), SHAPES)
@pytest.mark.parametrize("batch", [(), (3,)])
def test_wide_systems_give_the_solution_of_least_norm(method: str, out: int, inp: int, batch: tuple[int, ...]) -> None:
    left, right, target = draw_system(out, inp, 2 * out * inp + 1, *batch, seed=out)
    kappa = float(torch.linalg.cond(materialise(left, right)))
    solution = on.solve(left, right, target, tolerance=1e-10, method=method)
    assert solution.gamma.shape == (*batch, left.shape[1])
    assert relative(solution.gamma, least_squares(left, right, target)) <= 2 * kappa * 1e-10
    assert relative(rebuild(left, right, solution.gamma), target) <= 1e-10
    assert solution.is_exact
    if method != "auto":
        assert solution.method == method


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize(("out", "inp"), [*SHAPES, (1, 300), (20, 20)])
def test_any_solution_is_exact_and_may_use_as_many_features_as_equations(
    out: int, inp: int, batch: tuple[int, ...]
) -> None:
    n = out * inp
    left, right, target = draw_system(out, inp, 2 * n, *batch, seed=out)
    solution = on.solve(left, right, target, tolerance=1e-10, least_norm=False)
    assert relative(rebuild(left, right, solution.gamma), target) <= 1e-10
    if n >= 300:
        assert solution.method == "lu"
        assert not bool(solution.gamma[..., n:].any())
        assert relative(solution.gamma[..., :n], least_squares(left[:, :n], right[:n], target)) <= 1e-6


def test_any_solution_is_the_one_of_least_norm_where_the_first_features_are_dependent() -> None:
    left, right, target = draw_system(20, 20, 800, seed=0)
    left[:, 1], right[1] = left[:, 0], right[0]
    solution = on.solve(left, right, target, tolerance=1e-10, least_norm=False)
    assert relative(solution.gamma, on.solve(left, right, target).gamma) <= 1e-7
    assert relative(rebuild(left, right, solution.gamma), target) <= 1e-10


@pytest.mark.parametrize("choices", [{"near": 1.0}, {"minimum_width": True}])
def test_any_solution_cannot_be_asked_for_beside_a_definite_one(choices: dict[str, Any]) -> None:
    with pytest.raises(ValueRangeError, match="least_norm=False"):
        on.solve(*draw_system(3, 3, 18, seed=0), least_norm=False, **choices)


@pytest.mark.parametrize("method", ["auto", "lu", "svd"])
@pytest.mark.parametrize(("out", "inp"), SHAPES)
def test_square_systems_give_the_only_solution(method: str, out: int, inp: int) -> None:
    left, right, target = draw_system(out, inp, out * inp, seed=3)
    matrix = materialise(left, right)
    kappa = float(torch.linalg.cond(matrix))
    solution = on.solve(left, right, target, tolerance=1e-10, method=method)
    expected = torch.linalg.solve(matrix, target.flatten())
    assert relative(solution.gamma, expected) <= 2 * kappa * 1e-10


@pytest.mark.parametrize("method", ["auto", "cholesky", "krylov", "qr", "svd"])
@pytest.mark.parametrize(("out", "inp"), [(1, 7), (3, 9), (9, 3), (6, 6)])
@pytest.mark.parametrize("batch", [(), (2, 2)])
def test_tall_systems_give_the_least_squares_solution(method: str, out: int, inp: int, batch: tuple[int, ...]) -> None:
    left, right, target = draw_system(out, inp, max(1, out * inp // 2), *batch, seed=5)
    kappa = float(torch.linalg.cond(materialise(left, right)))
    solution = on.solve(left, right, target, method=method)
    expected = least_squares(left, right, target)
    assert relative(solution.gamma, expected) <= 2e-10 * kappa**2
    worst = max(
        relative(rebuild(left, right, g), t)
        for g, t in zip(expected.reshape(-1, left.shape[1]), target.reshape(-1, out, inp), strict=True)
    )
    assert solution.residual == pytest.approx(worst, rel=1e-6)
    assert not solution.is_exact
    assert f"{out * inp - left.shape[1]} more dense features make the system solvable" in solution.shortfall


@given(st.integers(1, 6), st.integers(1, 6), st.floats(0.2, 3.0), st.integers(0, 10_000))
@settings(max_examples=60)
def test_auto_is_never_worse_than_the_reference(out: int, inp: int, excess: float, seed: int) -> None:
    left, right, target = draw_system(out, inp, max(1, round(excess * out * inp)), seed=seed)
    solution = on.solve(left, right, target)
    best = relative(rebuild(left, right, least_squares(left, right, target)), target)
    assert solution.residual <= best * (1 + 1e-6) + 1e-10


@pytest.mark.parametrize("method", ["auto", "cholesky", "krylov", "qr", "svd"])
def test_no_other_solution_is_shorter(method: str) -> None:
    left, right, target = draw_system(5, 6, 50)
    gamma = on.solve(left, right, target, method=method).gamma
    lengths = column_lengths(left, right)
    unit, gamma = materialise(left, right) / lengths, gamma * lengths
    null = torch.linalg.svd(unit)[2][30:]
    kappa = float(torch.linalg.cond(unit))
    assert float((null @ gamma).norm()) <= 100 * 50 * EPS * kappa**2 * float(gamma.norm())


@pytest.mark.parametrize("method", ["auto", "krylov", "svd"])
@pytest.mark.parametrize("near", [1.0, "vector"])
def test_near_gives_the_closest_solution(method: str, near: float | str) -> None:
    left, right, target = draw_system(5, 6, 60)
    centre = torch.ones(60, dtype=torch.float64) if near == 1.0 else normal(60, seed=9)
    solution = on.solve(left, right, target, near=1.0 if near == 1.0 else centre, method=method, tolerance=1e-10)
    expected = centre + torch.linalg.pinv(materialise(left, right)) @ (target - rebuild(left, right, centre)).flatten()
    assert relative(solution.gamma, expected) <= 1e-9
    plain = on.solve(left, right, target).gamma
    assert float((solution.gamma - centre).norm()) < float((plain - centre).norm())


def test_near_holds_the_tolerance_of_the_target_and_not_of_the_larger_rest() -> None:
    left, right, target = draw_system(5, 6, 60)
    solution = on.solve(left, right, 1e-3 * target, near=1.0, method="krylov", tolerance=1e-10)
    assert relative(rebuild(left, right, solution.gamma), 1e-3 * target) <= 1e-10


def test_near_a_solution_is_that_solution() -> None:
    left, right, _ = draw_system(5, 6, 60)
    gamma = normal(60, seed=4)
    made = KhatriRao(left, right).apply(gamma)
    for method in ("auto", "krylov", "cholesky"):
        assert torch.equal(on.solve(left, right, made, near=gamma, method=method).gamma, gamma)


def test_near_with_a_zero_target_is_the_projection_on_the_null_space() -> None:
    left, right, target = draw_system(5, 6, 60)
    solution = on.solve(left, right, 0 * target, near=1.0)
    ones = torch.ones(60, dtype=torch.float64)
    expected = ones - torch.linalg.pinv(materialise(left, right)) @ rebuild(left, right, ones).flatten()
    assert relative(solution.gamma, expected) <= 1e-9
    assert solution.is_exact


# Storage, memory, inputs and words


@pytest.mark.parametrize("excess", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("shape", [(6, 8), (4, 3, 3)])
def test_features_from_the_seed_give_the_same_gamma_as_stored_ones(shape: tuple[int, ...], excess: float) -> None:
    features = on.draw("he_normal", shape, excess=excess, seed=1)
    target = normal(*shape)
    dense, seed = (on.solve_features(features, target, storage=storage) for storage in ("dense", "seed"))
    direct = on.solve(features.left(), features.right(), features.as_matrix(target))
    kappa = float(torch.linalg.cond(materialise(features.left(), features.right())))
    assert relative(seed.gamma, dense.gamma) <= 4e-10 * kappa**2
    assert relative(direct.gamma, dense.gamma) <= 4e-10 * kappa**2


def test_single_precision_features_are_solved_as_the_numbers_they_are() -> None:
    features = on.draw("he_normal", (6, 5), dtype=torch.float32)
    for storage in ("dense", "seed"):
        solution = on.solve_features(features, normal(6, 5).float(), storage=storage, tolerance=1e-10)
        made = rebuild(features.left().double(), features.right().double(), solution.gamma)
        assert relative(made, normal(6, 5).float().double()) <= 1e-10


def test_under_a_tight_limit_nothing_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    features = on.draw("he_normal", (5, 5), n_features=100)
    operator = KhatriRao.regenerating(features, block=20)
    whole, limit = krylov_memory(5, 5, 100), krylov_memory(5, 5, 100, block=20)
    assert limit < whole
    stored = solve_operator(operator, normal(5, 5), tolerance=1e-10, memory=whole, method="krylov")
    monkeypatch.setattr(KhatriRao, "to", lambda self, dtype: pytest.fail("a copy is stored"))
    solution = solve_operator(operator, normal(5, 5), tolerance=1e-10, memory=limit, method="krylov")
    assert relative(solution.gamma, stored.gamma) <= 1e-8


def test_too_little_memory_is_an_error() -> None:
    left, right, target = draw_system(12, 12, 200)
    message = r"solving 144 equations with 200 features needs at least .* the limit is 1 kB\. Raise memory"
    with pytest.raises(MemoryLimitError, match=message):
        on.solve(left, right, target, memory=1000)
    with pytest.raises(ValueRangeError, match=r"positive number of bytes; got -1"):
        on.solve(left, right, target, memory=-1)


@pytest.mark.parametrize("method", ["cholesky", "krylov", "qr", "svd"])
def test_a_method_asked_for_holds_the_memory_limit_too(method: str) -> None:
    left, right, target = draw_system(12, 12, 200)
    with pytest.raises(MemoryLimitError, match=rf"{method} for 144 .* needs .* the limit is 20 kB\. Raise memory"):
        on.solve(left, right, target, method=method, memory=20_000)
    assert on.solve(left, right, target, method=method, memory=2e6, tolerance=1e-10).method == method


def test_parameters_and_other_precisions_are_taken_as_they_come() -> None:
    left, right, target = draw_system(4, 3, 12)
    expected = on.solve(left, right, target).gamma
    trained = [torch.nn.Parameter(x) for x in (left, right, target)]
    found = on.solve(*trained, tolerance=1e-10).gamma
    assert not found.requires_grad
    assert torch.equal(found, expected)
    half = on.solve(left.float(), right.half().double(), target.bfloat16())
    assert half.gamma.dtype == torch.float64
    strided = on.solve(left.mT.contiguous().mT, right.mT.contiguous().mT, target.mT.contiguous().mT)
    assert torch.equal(strided.gamma, expected)
    weight = torch.nn.Linear(3, 4).weight
    assert on.solve_features(on.draw("he_normal", (4, 3)), weight, tolerance=1e-10).is_exact


@pytest.mark.parametrize("shape", [(2, 333), (13, 60), (40, 40)])
def test_the_layout_of_the_target_in_memory_does_not_change_a_bit(shape: tuple[int, int]) -> None:
    left, right, target = draw_system(*shape, 2000)
    expected = on.solve(left, right, target).gamma
    turned, sliced = target.mT.contiguous().mT, torch.stack([target, target], -1)[..., 1]
    assert torch.equal(on.solve(left, right, turned).gamma, expected)
    assert torch.equal(on.solve(left, right, sliced).gamma, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_operator_of_any_precision_is_solved_in_float64(dtype: torch.dtype) -> None:
    left, right, target = draw_system(5, 6, 60)
    left, right = left.to(dtype), right.to(dtype)
    solution = solve_operator(KhatriRao(left, right), target, tolerance=1e-10)
    assert relative(rebuild(left.double(), right.double(), solution.gamma), target) <= 1e-10


def test_the_arguments_are_left_as_they_were() -> None:
    system = draw_system(4, 3, 12)
    before = [x.clone() for x in system]
    on.solve(*system, near=1.0)
    assert all(torch.equal(a, b) for a, b in zip(system, before, strict=True))


def test_progress_is_reported_while_iterating() -> None:
    left, right, target = draw_system(6, 6, 60)
    heard: list[float] = []
    on.solve(left, right, target, method="krylov", on_step=lambda n, error: heard.append(error))
    assert heard[0] == 1.0
    assert heard[-1] <= 1e-10


def test_a_solution_reads_well() -> None:
    left, right, target = draw_system(6, 6, 50)
    solution = on.solve(left, right, target, method="krylov")
    text = str(solution)
    assert text.startswith(f"50 gammas by krylov: relative residual {solution.residual:.1e} (tolerance 1e-10), ")
    assert f"{solution.iterations} iterations, condition " in text
    assert text.endswith("reason: requested")
    assert solution.seconds > 0
    assert solution.peak_memory >= 0
    short = on.solve(left[:, :30], right[:30], target)
    assert str(short).splitlines()[-1].startswith("tolerance missed: residual ")
    assert "6 more dense features make the system solvable" in str(short)


def test_a_method_that_took_over_says_why() -> None:
    left, right, _ = draw_system(16, 16, 200)
    left, right = left.repeat(1, 2), right.repeat(2, 1)
    solution = on.solve(left, right, rebuild(left, right, torch.ones(400, dtype=torch.float64)))
    assert "was used" in solution.reason


def test_a_factorization_asked_for_that_cannot_work_says_so() -> None:
    ones = torch.ones(3, 12, dtype=torch.float64)
    solution = on.solve(ones, ones.mT, normal(3, 3), method="cholesky")
    assert solution.reason == "cholesky cannot factorize this system"
    assert (solution.residual, float(solution.gamma.norm())) == (1.0, 0.0)
    assert solution.shortfall


def test_a_missed_tolerance_raises_with_size_and_cure() -> None:
    left, right, target = draw_system(6, 6, 36)
    message = r"residual of 1e-17; \w+ reached .* on 36 equations with 36 features; tried: .*Cure: .*tolerance"
    with pytest.raises(ToleranceError, match=message):
        on.solve(left, right, target, tolerance=1e-17)


@pytest.mark.usefixtures("unchecked")
def test_misuse_is_refused_with_need_got_and_cure() -> None:
    left, right, target = draw_system(4, 3, 12)
    with pytest.raises(ShapeError, match=r"equal feat; got \(4, 12\) and \(3, 12\)\. If right is stored.*right\.mT"):
        on.solve(left, right.mT, target)
    with pytest.raises(ShapeError, match=r"a target \(\.\.\., 4, 3\).*got \(3, 4\)\. Flatten"):
        on.solve(left, right, target.mT)
    with pytest.raises(ShapeError, match=r"method='lu' needs as many features as equations .*; got 11 for 12"):
        on.solve(left[:, :11], right[:11], target, method="lu")
    with pytest.raises(UnknownNameError, match=r"method needs a known name; got 'krilov'\. Did you mean 'krylov'"):
        on.solve(left, right, target, method="krilov")
    with pytest.raises(InsufficientFeaturesError, match=r"needs 12 features for 4 x 3 weights; got 11.*Draw 1 more"):
        on.solve(left[:, :11], right[:11], target, tolerance=1e-10)
    with pytest.raises(ValueRangeError, match=r"tolerance needs to lie in \(0, 1\); got 2"):
        on.solve(left, right, target, tolerance=2)
    for position, name in enumerate(("left", "right", "target")):
        broken = [x.clone() for x in (left, right, target)]
        broken[position][0, 0] = math.nan
        with pytest.raises(ValueRangeError, match=rf"{name} .*finite.*; got 1 NaN.*first at \(0, 0\)"):
            on.solve(*broken)
    with pytest.raises(ValueRangeError, match=r"storage .* 'dense' or 'seed'; got 'disk'\. 'seed' saves"):
        on.solve_features(on.draw("he_normal", (4, 3)), target, storage="disk")
