"""Structured features: the gamma read off equals the gamma of the materialised system."""

from __future__ import annotations

import pytest
import torch
from tensors import normal

import onlynorm as on
from onlynorm.errors import ToleranceError, ValueRangeError
from onlynorm.solvers.methods.closed_form import solve_closed_form

EPS = torch.finfo(torch.float64).eps


@pytest.mark.parametrize("name", ["id_cond", "ortho_cond", "fast_ortho_cond"])
@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (1, 5), (5, 1), (1, 1)])
def test_gamma_equals_that_of_the_dense_system(name: str, shape: tuple[int, int]) -> None:
    features = on.draw(name, shape, seed=2)
    target = normal(*shape)
    assert features.structure is not None
    gamma, output_gamma, residual = solve_closed_form(features.structure, target)
    dense = torch.linalg.solve(on.solvers.KhatriRao(features.left(), features.right()).materialise(), target.flatten())
    assert output_gamma is None
    assert residual <= 8 * max(shape) * EPS
    assert torch.allclose(gamma, dense, rtol=0, atol=8 * sum(shape) * EPS * float(target.norm()))


def test_batches_share_one_structure() -> None:
    features = on.draw("ortho_cond", (4, 3))
    assert features.structure is not None
    targets = normal(5, 4, 3)
    gamma, _, residual = solve_closed_form(features.structure, targets)
    assert gamma.shape == (5, 12)
    assert residual <= 32 * EPS


def test_minimal_features_use_both_norms() -> None:
    features = on.draw("id_cond_minimal", (5, 4))
    target = normal(5, 4)
    solution = on.solve_features(features, target)
    assert solution.output_gamma is not None
    made = solution.output_gamma[:, None] * on.solvers.KhatriRao(features.left(), features.right()).apply(
        solution.gamma
    )
    assert torch.allclose(made, target, rtol=4 * EPS, atol=0)
    assert (solution.method, features.n_features) == ("closed form", 16)


@pytest.mark.parametrize("name", ["id_cond", "id_cond_minimal", "ortho_cond", "fast_ortho_cond", "kron_normal"])
@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1.0, 1e30, 1e300])
def test_extreme_targets_keep_an_honest_residual(name: str, scale: float) -> None:
    features = on.draw(name, (6, 5), seed=1)
    target = normal(6, 5) * scale
    solution = on.solve_features(features, target, tolerance=64 * EPS)
    made = on.solvers.KhatriRao(features.left(), features.right()).apply(solution.gamma)
    if solution.output_gamma is not None:
        made = solution.output_gamma[:, None] * made
    assert float((made / scale - target / scale).norm()) <= 64 * EPS * float((target / scale).norm())
    assert "known inverse" in solution.reason


def test_a_zero_target_has_no_residual() -> None:
    solution = on.solve_features(on.draw("ortho_cond", (3, 3)), torch.zeros(3, 3), tolerance=1e-10)
    assert solution.residual == 0.0
    assert not bool(solution.gamma.any())


def test_missing_features_leave_exactly_their_weights() -> None:
    features = on.draw("id_cond", (8, 8), density=0.5, seed=4)
    target = normal(8, 8)
    solution = on.solve_features(features, target)
    kept = on.solvers.KhatriRao(features.left(), features.right()).apply(solution.gamma) != 0
    lost = float(target[~kept].norm() / target.norm())
    assert solution.residual == pytest.approx(lost, rel=100 * EPS)
    missing = 64 - features.n_features
    assert f"{missing} weights have no feature" in solution.shortfall
    message = rf"id_cond features need to reach 1e-10; residual .*{missing} weights have no feature"
    with pytest.raises(ToleranceError, match=message):
        on.solve_features(features, target, tolerance=1e-10)


def test_a_tolerance_below_rounding_says_so() -> None:
    with pytest.raises(ToleranceError, match=r"ortho_cond features need to reach 1e-17; .*rounding"):
        on.solve_features(on.draw("ortho_cond", (9, 9)), normal(9, 9), tolerance=1e-17)


def test_a_zero_pivot_is_refused_with_a_cure() -> None:
    target = normal(3, 3)
    target[1, 0] = 0.0
    with pytest.raises(ValueRangeError, match=r"nonzero weight in column 0.*outputs 1\. Draw with shared_column=1"):
        on.solve_features(on.draw("id_cond_minimal", (3, 3)), target)
