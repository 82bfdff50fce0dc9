"""`solve` on extreme and degenerate input: any scale, dead rows, repeated and mixed features."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from systems import column_lengths, draw_system, least_squares, materialise, rebuild
from tensors import normal, relative
from torch import Tensor

import onlynorm as on
from onlynorm.errors import InsufficientFeaturesError, MemoryLimitError, ToleranceError, ValueRangeError
from onlynorm.seeds import seeded
from onlynorm.solvers import fallback


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


@pytest.mark.parametrize("n_features", [12, 20])
@pytest.mark.parametrize("is_batch", [False, True])
def test_the_residual_is_that_of_a_gamma_rounded_to_subnormal_numbers(n_features: int, is_batch: bool) -> None:
    left, right, target = draw_system(3, 4, n_features)
    tiny = 1e-316 * target
    solution = on.solve(left, right, torch.stack([target, tiny]) if is_batch else tiny)
    gamma = 2.0**1000 * solution.gamma.reshape(-1, n_features)[-1]
    assert solution.residual == pytest.approx(relative(left @ (gamma[:, None] * right), 2.0**1000 * tiny), rel=1e-6)
    assert solution.residual > 1e-9
    assert "scale the target up" in solution.shortfall
    assert on.solve(left, right, 2.0**1000 * tiny).is_exact


def test_gammas_beyond_float64_are_an_error_with_a_cure() -> None:
    left, right, target = draw_system(3, 3, 12)
    with pytest.raises(ValueRangeError, match=r"gamma needs to fit into float64; got an overflow.*Rescale"):
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
    assert nothing.residual == pytest.approx(1.0, abs=1e-12)
    assert float(nothing.gamma.norm()) == 0.0
    assert nothing.shortfall
    left[1] = 0.0
    only = 0 * target
    only[1] = 1.0
    assert on.solve(left, right, only, method=method).residual == pytest.approx(1.0, abs=1e-12)


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
        assert f"{30 - min(distinct, 30)} more dense features" in solution.shortfall
        assert f"their rank is {distinct}" in solution.shortfall


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
    assert "the least-squares optimum" in solution.shortfall
    assert "600 more dense features make the system solvable (their rank is 1000)" in solution.shortfall
    with pytest.raises(ToleranceError, match=r"needs a relative residual of 1e-10; qr reached .* on 1600 equations"):
        on.solve(left, right, target, tolerance=1e-10)


@pytest.mark.parametrize("method", ["auto", "krylov", "cholesky", "qr", "svd"])
def test_the_lengths_of_features_do_not_matter(method: str) -> None:
    left, right, target = draw_system(8, 9, 110)
    lengths = torch.logspace(-6, 6, 110, dtype=torch.float64)[torch.randperm(110, generator=seeded(0))]
    plain = on.solve(left, right, target, method=method, tolerance=1e-10).gamma
    scaled = on.solve(left * lengths, right, target, method=method, tolerance=1e-10).gamma
    assert relative(scaled * lengths, plain) <= 1e-8


@pytest.mark.parametrize("power", [12, 60])
@pytest.mark.parametrize("shape", [(8, 9), (9, 8), (1, 30)])
def test_lengths_far_apart_do_not_matter_on_either_side(power: int, shape: tuple[int, int]) -> None:
    left, right, target = draw_system(*shape, 110)
    lengths = torch.logspace(-power, power, 110, dtype=torch.float64)[torch.randperm(110, generator=seeded(0))]
    plain = on.solve(left, right, target, tolerance=1e-10).gamma
    assert relative(on.solve(left * lengths, right, target, tolerance=1e-10).gamma * lengths, plain) <= 1e-8
    assert relative(on.solve(left, right * lengths[:, None], target, tolerance=1e-10).gamma * lengths, plain) <= 1e-8


@pytest.mark.parametrize("method", ["auto", "krylov", "cholesky"])
def test_targets_of_a_batch_are_solved_each_at_its_own_size(method: str) -> None:
    left, right, target = draw_system(5, 6, 60)
    scales = [1.0, 1e300, 1e-300, 0.0]
    solution = on.solve(left, right, torch.stack([scale * target for scale in scales]), method=method, tolerance=1e-10)
    expected = on.solve(left, right, target).gamma
    for scale, gamma in zip(scales[:3], solution.gamma, strict=False):
        assert relative(gamma / scale, expected) <= 1e-8
    assert not bool(solution.gamma[3].any())


def test_features_of_unequal_length_are_solved_at_once() -> None:
    left, right, target = draw_system(40, 40, 2000)
    solution = on.solve(left * torch.logspace(-2, 2, 2000, dtype=torch.float64), right, target, tolerance=1e-10)
    assert "was used" not in solution.reason
    assert solution.condition < 30


@pytest.mark.parametrize("side", [36, 40])
def test_heavy_tailed_features_reach_the_tolerance(side: int) -> None:
    left, right = _cauchy(side, round(1.25 * side**2), seed=0)
    assert on.solve(left, right, normal(side, side), tolerance=1e-10).is_exact


@pytest.mark.parametrize("power", [3, 6])
@pytest.mark.parametrize("axis", [0, 1])
def test_too_few_features_with_extreme_rows_still_give_the_least_squares_optimum(power: int, axis: int) -> None:
    left, right, target = draw_system(8, 9, 40, seed=2)
    scales = torch.logspace(-power, power, (8, 9)[axis], dtype=torch.float64)
    left, right = (left * scales[:, None], right) if axis == 0 else (left, right * scales)
    solution = on.solve(left, right, target)
    matrix = materialise(left, right) / column_lengths(left, right)
    best = relative(matrix @ torch.linalg.lstsq(matrix, target.flatten()[:, None], driver="gelsd").solution[:, 0],
                    target.flatten())  # fmt: skip
    assert solution.is_least_squares
    assert solution.residual <= best * (1 + 1e-6)
    assert "the least-squares optimum" in solution.shortfall
    n = _named(solution, REACH if power == 6 else r"(\d+) more (?:dense|reach)")
    assert on.solve(*_more(left, right, n), target, tolerance=1e-10).is_exact


@pytest.mark.parametrize("seed", [0, 3, 5])
def test_the_features_it_names_reach_the_tolerance_with_rows_of_unequal_size(seed: int) -> None:
    left, right, target = draw_system(14, 14, 166, seed=seed)
    left = left * torch.logspace(-4, 4, 14, dtype=torch.float64)[:, None]
    solution = on.solve(left, right, target)
    n = _named(solution, REACH)
    assert on.solve(*_more(left, right, n), target, tolerance=1e-10).is_exact


def test_a_huge_gamma_that_seems_to_leave_less_is_not_preferred() -> None:
    target = normal(3, 4)
    small = fallback.SolverRun(normal(12), "qr", 1, 1e16, "", 0.4)
    huge = fallback.SolverRun(1e16 * normal(12), "lu", 1, 1e17, "", 0.2, is_singular=True)
    assert fallback._is_better(small, huge, target, 1e-10)
    assert not fallback._is_better(huge, small, target, 1e-10)
    assert fallback._is_better(replace(small, error=0.1), replace(small, error=0.2), target, 1e-10)


def test_a_result_that_is_no_optimum_says_so() -> None:
    left, right, target = draw_system(8, 9, 40)
    left = left * torch.logspace(-9, 9, 8, dtype=torch.float64)[:, None]
    solution = on.solve(left, right, target, method="krylov")
    assert not solution.is_least_squares
    assert "not the least-squares optimum" in solution.shortfall


# Cures that are followed

REACH = r"(\d+) more (?:dense features )?reach 1e-10"


def _cauchy(side: int, n_features: int, seed: int) -> tuple[Tensor, Tensor]:
    """Features whose entries have no variance: a few of them outweigh all others."""
    left = torch.tan(math.pi * (torch.rand(side, n_features, generator=seeded(seed), dtype=torch.float64) - 0.5))
    right = torch.tan(math.pi * (torch.rand(n_features, side, generator=seeded(seed + 1), dtype=torch.float64) - 0.5))
    return left, right


def _more(left: Tensor, right: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The features with n dense ones added."""
    return torch.cat([left, normal(len(left), n, seed=91)], 1), torch.cat([right, normal(n, right.shape[1], seed=92)])


def _named(solution: on.solvers.Solution, pattern: str) -> int:
    """The number that a shortfall names."""
    found = re.search(pattern, solution.shortfall)
    assert found, solution.shortfall
    return int(found[1])


@pytest.mark.parametrize("n_features", [1, 4, 30])
@pytest.mark.parametrize("dead", ["features", "outputs", "inputs", "all"])
def test_the_features_it_names_solve_systems_with_zeros(n_features: int, dead: str) -> None:
    left, right, target = draw_system(3, 4, n_features)
    if dead in ("features", "all"):
        left[:, :: 2 if dead == "features" else 1] = 0
    if dead == "outputs":
        left[1] = 0
    if dead == "inputs":
        right[:, 2] = 0
    solution = on.solve(left, right, target)
    if not solution.is_exact:
        assert solution.is_least_squares
        assert "up to rounding" not in solution.shortfall
        n = _named(solution, r"(\d+) more dense features make the system solvable")
        assert on.solve(*_more(left, right, n), target, tolerance=1e-10).is_exact
        assert n == 1 or not on.solve(*_more(left, right, n - 1), target).is_exact


def test_features_that_miss_each_other_have_rank_zero() -> None:
    left, right = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0], [1.0]])
    shortfall = on.solve(left, right, torch.ones(1, 1)).shortfall
    assert shortfall.endswith("1 more dense features make the system solvable (their rank is 0).")


def test_a_target_that_needs_unreached_weights_only_names_features_that_solve_it() -> None:
    left, right, target = draw_system(3, 4, 20)
    left[1] = 0
    target[[0, 2]] = 0
    n = _named(on.solve(left, right, target), r"(\d+) more dense features")
    assert on.solve(*_more(left, right, n), target, tolerance=1e-10).is_exact


def test_nearly_repeated_features_name_as_many_as_reach_the_tolerance() -> None:
    left, right, target = draw_system(8, 8, 10)
    left, right = left.repeat(1, 2), right.repeat(2, 1)
    left[:, 10:] += 1e-9 * normal(8, 10, seed=5)
    solution = on.solve(left, right, target)
    n = _named(solution, REACH)
    assert on.solve(*_more(left, right, n), target, tolerance=1e-10).is_exact


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("axis", [0, 1])
def test_the_first_number_it_names_reaches_the_tolerance_with_rows_of_extreme_size(axis: int, seed: int) -> None:
    """Completing the rank would leave a residual of up to one half."""
    left, right, target = draw_system(5, 9, 40, seed=seed)
    scales = torch.logspace(-8, 8, (5, 9)[axis], dtype=torch.float64)
    left, right = (left * scales[:, None], right) if axis == 0 else (left, right * scales)
    left[:, 30:], right[30:] = left[:, :10], right[:10]
    n = _named(on.solve(left, right, target), r"(\d+) more dense features")
    assert on.solve(*_more(left, right, n), target, tolerance=1e-10).is_exact
    assert not on.solve(*_more(left, right, 15), target).is_exact


@pytest.mark.parametrize("near", [1e7, 1e9])
@pytest.mark.parametrize("lack", ["repeated", "output", "all"])
def test_features_that_lack_directions_are_not_blamed_on_near(lack: str, near: float) -> None:
    left, right, target = draw_system(4, 6, 40)
    if lack == "repeated":
        left, right = left[:, :10].repeat(1, 4), right[:10].repeat(4, 1)
    elif lack == "output":
        left[1] = 0
    else:
        right = 0 * right
    shortfall = on.solve(left, right, target, near=near).shortfall
    assert "without near" in shortfall
    n = int(re.search(r"(\d+) more dense features", shortfall)[1])
    more = _more(left, right, n)
    assert on.solve(*more, target, tolerance=1e-10).is_exact
    assert not on.solve(*more, target, near=near).is_exact


@pytest.mark.parametrize("options", [{}, {"near": 1e9}, {"method": "krylov"}, {"least_norm": False}])
@pytest.mark.parametrize("n_features", [3, 18, 60])
def test_features_that_are_all_zero_in_one_factor_each_are_solved(n_features: int, options: dict[str, object]) -> None:
    left, right, target = draw_system(4, 9, n_features)
    left[:, ::2], right[1::2] = 0, 0
    solution = on.solve(left, right, target, **options)
    assert solution.residual == 1.0
    assert solution.is_least_squares
    assert torch.equal(solution.gamma, torch.full_like(solution.gamma, options.get("near", 0.0)))
    assert _named(solution, r"(\d+) more dense features") == 36


def test_more_features_than_equations_need_another_method_than_lu() -> None:
    left, right, target = draw_system(2, 3, 6)
    solution = on.solve(0 * left, right, target, method="lu")
    assert "6 more dense features and method='auto'" in solution.shortfall
    assert on.solve(*_more(0 * left, right, 6), target, tolerance=1e-10).is_exact


def test_a_small_near_is_not_blamed() -> None:
    left, right, target = draw_system(4, 6, 20)
    solution = on.solve(left, right, target, near=0.5)
    assert "near" not in solution.shortfall
    n = _named(solution, r"(\d+) more dense features")
    assert n == 4
    assert on.solve(*_more(left, right, n), target, near=0.5, tolerance=1e-10).is_exact


@pytest.mark.parametrize("method", ["auto", "krylov"])
def test_features_of_unknown_rank_name_a_number_for_any_rank(method: str) -> None:
    left, right, target = draw_system(6, 6, 8)
    solution = on.solve(left.repeat(1, 4), right.repeat(4, 1), target, method=method)
    n = _named(solution, r"(\d+) more otherwise" if method == "krylov" else r"(\d+) more dense features")
    more = _more(left.repeat(1, 4), right.repeat(4, 1), n)
    assert on.solve(*more, target, method=method, tolerance=1e-10).is_exact


def test_the_memory_that_more_features_need_is_named() -> None:
    left, right, target = draw_system(4, 40, 80)
    solution = on.solve(left, right, target, memory=40e3)
    n, memory = re.search(r"(\d+) more dense features and memory=(\S+) or more", solution.shortfall).groups()
    with pytest.raises(MemoryLimitError, match="needs at least"):
        on.solve(*_more(left, right, int(n)), target, memory=40e3)
    assert on.solve(*_more(left, right, 160), target, memory=float(memory)).is_exact


def test_a_refusal_of_too_few_features_names_a_number_for_any_rank() -> None:
    left, right, target = draw_system(4, 5, 6)
    left, right = left.repeat(1, 3), right.repeat(3, 1)
    with pytest.raises(InsufficientFeaturesError, match=r"Draw 2 more features if .*, 20 more dense ones otherwise"):
        on.solve(left, right, target, tolerance=1e-10)
    assert not on.solve(*_more(left, right, 2), target).is_exact
    assert on.solve(*_more(left, right, 20), target, tolerance=1e-10).is_exact
    with pytest.raises(InsufficientFeaturesError, match="20 more dense ones without near otherwise"):
        on.solve(left, right, target, near=1e9, tolerance=1e-10)


@pytest.mark.parametrize("method", ["lu", "cholesky", "krylov"])
@pytest.mark.parametrize("is_minimum_width", [False, True])
def test_a_method_that_finds_no_factors_is_to_be_left_out(method: str, is_minimum_width: bool) -> None:
    n = 13 if is_minimum_width else 16
    left, right, target = draw_system(4, 4, n)
    left, right = (torch.cat([x[:7], x[: n - 7]]) for x in (left.mT, right))
    left = left.mT
    solution = on.solve(left, right, target, method=method, minimum_width=is_minimum_width)
    assert f"method='{method}'" in solution.shortfall
    assert on.solve(left, right, target, minimum_width=is_minimum_width).residual < solution.residual


@pytest.mark.parametrize("n_features", [20, 45, 60])
def test_near_far_beyond_the_target_is_not_called_an_optimum(n_features: int) -> None:
    left, right, target = draw_system(5, 9, n_features)
    solution = on.solve(left, right, target, near=1e100)
    assert solution.residual > 1e80
    assert not solution.is_least_squares
    assert "near" in solution.shortfall
    assert on.solve(left, right, target).is_least_squares


def test_two_equal_features_share_the_target() -> None:
    for seed in range(40):
        left, right, _ = draw_system(1, 2, 1, seed=seed)
        gamma = on.solve(left.repeat(1, 2), right.repeat(2, 1), left @ right).gamma
        assert torch.allclose(gamma, torch.full_like(gamma, 0.5), atol=1e-9)


def test_a_loose_tolerance_does_not_make_an_optimum() -> None:
    left, right, target = draw_system(6, 6, 60)
    solution = on.solve(left, right, target, method="krylov", tolerance=0.5)
    assert solution.is_exact
    assert solution.is_least_squares == (solution.residual <= 1e-6)


@pytest.mark.parametrize("density", [None, 0.05, 0.1, 0.3, 0.5])
@pytest.mark.parametrize("excess", [0.5, 0.9, 1.0, 1.25])
@pytest.mark.parametrize("shape", [(12, 12), (3, 40)])
def test_as_many_more_features_as_it_says_solve_the_system(
    density: float | None, excess: float, shape: tuple[int, int]
) -> None:
    name = "he_normal" if density is None else "sparse_he_normal"
    for seed in range(3):
        features = on.draw(name, shape, excess=excess, seed=seed, density=density)
        left, right, target = features.left(), features.right(), normal(*shape, seed=seed)
        solution = on.solve(left, right, target)
        if solution.is_exact:
            continue
        n = int(re.search(r"(\d+) more dense features", solution.shortfall)[1])
        assert on.solve(*_more(left, right, n), target, tolerance=1e-10).is_exact
        assert on.solve(*_more(left, right, n - 1), target).is_exact is False


def test_the_tolerance_it_names_can_be_met() -> None:
    left, right, target = draw_system(6, 6, 50)
    short = on.solve(left, right, target, method="auto")
    assert short.is_exact
    with pytest.raises(ToleranceError, match=r"a tolerance of 1e-\d+ can be reached") as failed:
        on.solve(left, right, target, tolerance=1e-18)
    met = float(re.search(r"a tolerance of (1e-\d+) can be reached", str(failed.value))[1])
    assert on.solve(left, right, target, tolerance=met).is_exact


def test_the_memory_it_names_is_enough() -> None:
    left, right, target = draw_system(12, 12, 60)
    copies = torch.arange(160) % 60  # nearly equal features: no iteration resolves how they differ
    left = left[:, copies] * (1.0 + 1e-4 * normal(12, 160, seed=7))
    right = right[copies] * (1.0 + 1e-4 * normal(160, 12, seed=8))
    short = on.solve(left, right, target, memory=100_000)
    assert not short.is_exact
    memory = float(re.search(r"memory=([\d.e+]+)", short.shortfall)[1])
    assert on.solve(left, right, target, memory=2 * memory).residual < 0.1 * short.residual


@pytest.mark.parametrize("memory", [10_000, 20_000])
def test_the_memory_it_names_holds_the_next_method(memory: int) -> None:
    left, right, target = draw_system(6, 6, 36)
    left = left * torch.logspace(-5, 5, 6, dtype=torch.float64)[:, None]
    short = on.solve(left, right, target, memory=memory)
    named = re.search(r"memory=([\d.e+]+)", short.shortfall)[1]
    more = on.solve(left, right, target, memory=float(named))
    assert f"memory={named} " not in more.shortfall


def test_leaving_the_method_out_helps_where_it_says_so() -> None:
    left, right, target = draw_system(8, 9, 80)
    left = left * torch.logspace(-2, 2, 8, dtype=torch.float64)[:, None]
    with pytest.raises(ToleranceError, match=r"method='krylov'"):
        on.solve(left, right, target, method="krylov", precondition=False, tolerance=1e-10)
    assert on.solve(left, right, target, tolerance=1e-10).is_exact


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


@pytest.mark.parametrize("excess", [1.25, 2.0])
def test_sparse_features_that_cover_a_layer_are_solved_at_the_first_attempt(excess: float) -> None:
    features = on.draw("sparse_he_normal", (30, 30), excess=excess, density=0.2, layer="30 x 30, density 0.2")
    solution = on.solve(features.left(), features.right(), normal(30, 30))
    assert solution.is_exact
    assert "was used" not in solution.reason


@pytest.mark.parametrize("excess", [1.0, 1.25, 2.0])
@pytest.mark.parametrize("near", [None, 0.5])
def test_zero_features_leave_the_system_and_keep_gamma_zero(excess: float, near: float | None) -> None:
    features = on.draw("sparse_he_normal", (3, 60), excess=excess, density=0.2)
    left, right, target = features.left().double(), features.right().double(), normal(3, 60)
    is_zero = ~(left.any(0) & right.any(1))
    assert bool(is_zero.any())
    solution = on.solve(left, right, target, near=near)
    assert bool((solution.gamma[is_zero] == (near or 0.0)).all())
    assert solution.is_least_squares
    assert near is not None or excess != 1.25 or "was used" not in solution.reason
    matrix = materialise(left, right)
    made = matrix @ torch.linalg.lstsq(matrix, target.flatten()[:, None], driver="gelsd").solution
    assert relative(rebuild(left, right, solution.gamma), made.view(3, 60)) <= 1e-8
    named = on.solve(left, right, target, method="svd", near=near)
    assert relative(solution.gamma, named.gamma) <= 1e-7


def test_lu_of_a_square_system_keeps_its_zero_features() -> None:
    left, right, target = draw_system(4, 5, 20)
    left[:, ::4] = 0.0
    assert on.solve(left, right, target, method="lu").gamma.shape == (20,)
    assert on.solve(left, right, target).is_least_squares


def test_rows_of_unequal_size_are_factored_in_double_precision_at_once() -> None:
    left, right, target = draw_system(40, 40, 800)
    left = left * torch.logspace(-3, 3, 40, dtype=torch.float64)[:, None]
    solution = on.solve(left, right, target)
    assert solution.is_least_squares
    assert "was used" not in solution.reason
    turned = on.solve(right.mT, left.mT, target.mT)
    assert turned.is_least_squares
    assert "was used" not in turned.reason


@pytest.mark.parametrize("decades", [30, 80, 100, 130])
@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("n_features", [115, 150])
def test_lengths_of_features_do_not_matter_where_their_squares_underflow(
    decades: int, side: str, n_features: int
) -> None:
    left, right, target = draw_system(12, 12, n_features)
    lengths = torch.logspace(-decades, decades, n_features, dtype=torch.float64)
    split = {"left": (lengths, 1.0), "right": (1.0, lengths), "both": (lengths.sqrt(), lengths.sqrt())}[side]
    unit = on.solve(left, right, target)
    found = on.solve(left * split[0], (right.mT * split[1]).mT, target)
    assert found.residual == pytest.approx(unit.residual, rel=1e-6, abs=1e-9)
    assert found.is_least_squares == unit.is_least_squares
