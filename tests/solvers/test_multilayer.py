"""Gammas of several frozen layers in a row: exact at the theorem's width, by factored and by matrix-free steps."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import normal
from torch import Tensor

from onlynorm.data import find_data
from onlynorm.errors import (
    InsufficientFeaturesError,
    MissingDataError,
    ShapeError,
    ToleranceError,
    UnknownNameError,
    ValueRangeError,
)
from onlynorm.features import draw
from onlynorm.models import CifarResNet, load_weights
from onlynorm.solvers import solve_multilayer, widths_for
from onlynorm.solvers.multilayer.damped import DenseDamped, KroneckerDamped
from onlynorm.solvers.multilayer.product import LayerProduct, product
from onlynorm.solvers.operator import KhatriRao

EPS = torch.finfo(torch.float64).eps
EXACT = 1e-10
"""What the solver aims at when no tolerance is given."""


def layers(widths: tuple[int, ...], *, features: str = "he_normal", seed: int = 0) -> list[Tensor]:
    """Frozen matrices between layers of these widths, inputs and outputs included."""
    return [
        draw(features, (1, before), n_features=after, seed=seed, layer=f"source {i}").right()
        for i, (before, after) in enumerate(itertools.pairwise(widths), 1)
    ]


def frozen(
    shape: tuple[int, int], n_layers: int, *, excess: float = 1.1, features: str = "he_normal", seed: int = 0
) -> list[Tensor]:
    hidden = widths_for(shape, n_layers=n_layers, excess=excess)
    return layers((shape[1], *hidden, shape[0]), features=features, seed=seed)


def left_over(weights: list[Tensor], gammas: tuple[Tensor, ...], target: Tensor) -> float:
    """The residual as written in the theorem: layer by layer, with diagonal matrices."""
    made = torch.eye(target.shape[1], dtype=torch.float64)
    for weight, gamma in zip(weights, gammas, strict=True):
        made = torch.diag(gamma) @ weight @ made
    return float((made - target).norm() / target.norm())


# ------------------------------------------------------------------------------- exact at the bound


@pytest.mark.parametrize("features", ["he_normal", "orthogonal"])
@pytest.mark.parametrize("n_layers", [2, 3, 4, 6])
def test_256_equations_are_solved_at_the_bound_plus_a_tenth(features: str, n_layers: int) -> None:
    weights, target = frozen((16, 16), n_layers, features=features), normal(16, 16)
    assert sum(len(w) for w in weights) == math.ceil(1.1 * (256 + n_layers))
    solution = solve_multilayer(weights, target, tolerance=EXACT)
    assert solution.residual <= EXACT
    assert left_over(weights, solution.gammas, target) <= EXACT + 100 * EPS
    assert [len(g) for g in solution.gammas] == [len(w) for w in weights]


@pytest.mark.parametrize("n_layers", [3, 10])
def test_1024_equations_are_solved_matrix_free(n_layers: int) -> None:
    weights, target = frozen((32, 32), n_layers, features="orthogonal"), normal(32, 32)
    solution = solve_multilayer(weights, target, tolerance=EXACT)
    assert solution.method == "matrix-free"
    assert left_over(weights, solution.gammas, target) <= EXACT + 100 * EPS


@pytest.mark.slow
def test_a_real_layer_of_9216_equations_is_solved_matrix_free() -> None:
    try:
        network = load_weights(CifarResNet(20), find_data("weights/resnet20_cifar10.safetensors"))
    except MissingDataError as error:
        pytest.skip(f"no real data: {error}")
    target = network.get_submodule("layer2.1.conv1").weight.detach().double().flatten(1)
    weights = frozen((32, 288), 10, features="orthogonal")
    assert sum(len(w) for w in weights) == math.ceil(1.1 * (9216 + 10))
    assert solve_multilayer(weights, target, tolerance=1e-8).residual <= 1e-8


@given(st.integers(1, 8), st.integers(1, 8), st.integers(2, 6), st.integers(0, 999))
@settings(max_examples=20)
def test_targets_of_any_shape_are_reached(out: int, inp: int, n_layers: int, seed: int) -> None:
    weights = frozen((out, inp), n_layers, features="orthogonal", seed=seed)
    solution = solve_multilayer(weights, normal(out, inp, seed=seed))
    assert solution.is_exact, solution.shortfall


def test_a_target_of_rank_one_is_reached_through_many_layers() -> None:
    target = normal(12, 1) @ normal(1, 14, seed=1)
    solution = solve_multilayer(frozen((12, 14), 8, features="orthogonal"), target)
    assert solution.residual <= EXACT


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_the_size_of_the_target_does_not_matter(size: float) -> None:
    weights, target = frozen((4, 5), 3), normal(4, 5)
    plain, extreme = (solve_multilayer(weights, factor * target) for factor in (1.0, size))
    assert extreme.residual <= EXACT
    assert torch.allclose(extreme.gammas[-1] / size, plain.gammas[-1], rtol=1e-9)


def test_outputs_that_are_zero_are_switched_off() -> None:
    weights, target = frozen((5, 4), 3), normal(5, 4)
    target[[0, 3]] = 0.0
    solution = solve_multilayer(weights, target)
    assert solution.residual <= EXACT
    assert solution.gammas[-1][[0, 3]].tolist() == [0.0, 0.0]
    nothing = solve_multilayer(weights, torch.zeros(5, 4, dtype=torch.float64), tolerance=EXACT)
    assert nothing.residual == 0.0
    assert not bool(nothing.gammas[-1].any())


# ------------------------------------------------------------------------------- the parts


def test_the_jacobian_is_the_derivative_of_the_product() -> None:
    weights = layers((3, 5, 6, 4))
    chain = LayerProduct.of(weights, tilt=1.3)
    values = [normal(len(w), seed=i) for i, w in enumerate(weights)]
    slow = torch.autograd.functional.jacobian(lambda *v: chain.product(list(v)).flatten(), tuple(values))
    made = chain.jacobian(values).materialise()
    assert torch.allclose(made, torch.cat(slow, 1), rtol=0, atol=100 * EPS * float(made.abs().max()))


@pytest.mark.parametrize("shape", [(3, 7), (7, 3)])
def test_the_product_is_the_same_from_either_side(shape: tuple[int, int]) -> None:
    weights = layers((shape[1], 9, 8, shape[0]))
    gammas = [normal(len(w), seed=i) for i, w in enumerate(weights)]
    target = product(weights, gammas)
    assert left_over(weights, tuple(gammas), target) <= 100 * EPS


@pytest.mark.parametrize("shift", [1e-8, 1e-2, 10.0])
def test_matrix_free_steps_agree_with_factored_ones(shift: float) -> None:
    weights = frozen((6, 9), 4)
    jacobian = LayerProduct.of(weights, tilt=1.2).jacobian(
        [1.0 + 0.3 * normal(len(w), seed=i) for i, w in enumerate(weights)]
    )
    rest = normal(6, 9, seed=9)
    slow = DenseDamped(jacobian).solve(rest, shift=shift, tolerance=1e-12)
    fast = KroneckerDamped(jacobian, dtype=torch.float64).solve(rest, shift=shift, tolerance=1e-12)
    assert slow is not None
    assert fast is not None
    # Errors of y grow by the condition number of the preconditioned system, below 1e3 here.
    for mine, theirs in zip(fast, slow, strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) <= 1e-8
    single = KroneckerDamped(jacobian).solve(rest, shift=shift, tolerance=1e-3)
    assert single is not None
    assert float((single[0] - slow[0]).norm() / slow[0].norm()) <= 0.1


def test_the_iteration_goes_on_in_float64_where_float32_does_not_suffice() -> None:
    # Two features that are nearly the same leave a direction that float32 cannot tell from nothing.
    left, right = normal(6, 36), normal(36, 6, seed=1)
    left[:, 1], right[1] = left[:, 0] + 1e-5 * left[:, 2], right[0] + 1e-5 * right[2]
    operator = KhatriRao(left, right)
    rest = torch.linalg.svd(operator.materialise())[0][:, -1].reshape(6, 6)
    system = KroneckerDamped(operator)
    solved = system.solve(rest, shift=1e-16, tolerance=1e-3)
    assert solved is not None
    assert system.dtype == torch.float64
    assert float((solved[1] - rest).norm() / rest.norm()) <= 0.1


def test_the_preconditioner_removes_what_the_factors_share() -> None:
    stretch = torch.logspace(0, 3, 12, dtype=torch.float64)
    left, right = stretch[:, None] * normal(12, 300), normal(300, 12, seed=1) * stretch
    plain = KroneckerDamped(KhatriRao(left / stretch[:, None], right / stretch))
    stretched = KroneckerDamped(KhatriRao(left, right))
    rest = normal(12, 12, seed=2)
    for system in (plain, stretched):
        assert system.solve(rest, shift=1e-10, tolerance=1e-3) is not None
    assert stretched.iterations <= 3 * plain.iterations


@pytest.mark.parametrize("method", ["dense", "matrix-free"])
def test_both_methods_reach_the_same_target(method: str) -> None:
    weights, target = frozen((9, 11), 4), normal(9, 11)
    solution = solve_multilayer(weights, target, method=method)
    assert solution.method == method
    assert solution.residual <= EXACT
    assert (solution.iterations == 0) == (method == "dense")


def test_progress_tells_steps_and_residuals() -> None:
    told: list[tuple[int, float]] = []
    solution = solve_multilayer(frozen((6, 6), 3), normal(6, 6), on_step=lambda *news: told.append(news))
    assert told[0][0] == 0
    assert told[-1][0] == solution.steps
    assert told[-1][1] <= EXACT < told[0][1]
    assert "gammas of 3 layers" in str(solution)


# ------------------------------------------------------------------------------- widths


@given(
    st.integers(1, 40), st.integers(1, 40), st.integers(1, 3), st.integers(2, 12), st.sampled_from([1.0, 1.1, 1.25, 2])
)
def test_widths_are_the_narrowest_equal_ones(out: int, inp: int, kernel: int, n_layers: int, excess: float) -> None:
    widths = widths_for((out, inp, kernel), n_layers=n_layers, excess=excess)
    wanted, floor = excess * (out * inp * kernel + n_layers), 1.5 * max(out, inp * kernel)
    assert len(widths) == n_layers - 1
    assert sum(widths) + out >= wanted - 1e-9
    assert min(widths) >= floor
    assert max(widths) - min(widths) <= 1
    assert sum(widths) + out < wanted + 1 or max(widths) < floor + 1


def test_too_few_features_are_refused_or_reported() -> None:
    weights, target = layers((6, 9, 9, 6)), normal(6, 6)
    with pytest.raises(InsufficientFeaturesError, match=r"needs 38 gammas for 36 equations.*got 24.*Widen.*by 14"):
        solve_multilayer(weights, target, tolerance=EXACT)
    solution = solve_multilayer(weights, target)
    assert 0.01 < solution.residual < 1.0
    assert "14 more features" in solution.shortfall
    assert solution.residual == pytest.approx(left_over(weights, solution.gammas, target))


def test_a_layer_that_is_too_narrow_for_the_target_is_named() -> None:
    weights, target = layers((6, 40, 3, 40, 6)), normal(6, 6)
    with pytest.raises(ToleranceError, match=r"relative residual of 1e-10.*layer of 3 features is too narrow"):
        solve_multilayer(weights, target, tolerance=EXACT)


def test_layers_that_pass_nothing_on_end_without_a_solution() -> None:
    first, second = torch.zeros(4, 3, dtype=torch.float64), torch.zeros(3, 4, dtype=torch.float64)
    first[0], second[:, 1] = 1.0, 1.0
    assert solve_multilayer([first, second], normal(3, 3)).residual == pytest.approx(1.0)


def test_bad_input_is_refused(unchecked: None) -> None:
    weights, target = frozen((4, 4), 3), normal(4, 4)
    with pytest.raises(ValueRangeError, match=r"n_layers .* from 2 .*; got 1"):
        widths_for((4, 4), n_layers=1)
    with pytest.raises(ValueRangeError, match=r"excess needs a positive finite number; got 0"):
        widths_for((4, 4), n_layers=3, excess=0)
    with pytest.raises(ShapeError, match=r"at least two matrices.*from input"):
        solve_multilayer(weights[::-1], normal(4, 5))
    with pytest.raises(ShapeError, match=r"at least two matrices"):
        solve_multilayer(weights[:1], target)
    with pytest.raises(UnknownNameError, match=r"method needs a known name; got 'lu'"):
        solve_multilayer(weights, target, method="lu")
    with pytest.raises(ValueRangeError, match=r"target .*finite"):
        solve_multilayer(weights, target * torch.nan)
    with pytest.raises(ValueRangeError, match=r"W_2 needs entries"):
        solve_multilayer([weights[0], 0.0 * weights[1], weights[2]], target)
