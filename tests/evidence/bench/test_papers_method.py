"""The baseline of the papers: it works, it never makes things worse, and it stays far from our tolerance."""

from __future__ import annotations

import torch
from tensors import normal

import onlynorm as on
from onlynorm.evidence.bench.papers_method import lbfgs, solve_as_papers


def _system(excess: float, *, seed: int = 0) -> tuple[on.solvers.KhatriRao, torch.Tensor]:
    features = on.draw("he_normal", (12, 10), excess=excess, seed=seed)
    target = normal(12, 10, seed=seed)
    return on.solvers.KhatriRao(features.left(), features.right()), target


def _residual(operator: on.solvers.KhatriRao, target: torch.Tensor, gamma: torch.Tensor) -> float:
    return float((operator.apply(gamma.double()) - target).norm() / target.norm())


def test_polishing_lowers_the_error_and_leaves_its_start_alone() -> None:
    operator, target = _system(1.5)
    start = torch.zeros(operator.n_features, dtype=torch.float64)
    gamma, evaluations = lbfgs(operator.apply, operator.transpose, target, start, max_iterations=100)
    assert _residual(operator, target, gamma) < 1e-2
    assert evaluations > 1
    assert not bool(start.any())
    assert not gamma.requires_grad


def test_polishing_a_solution_does_not_spoil_it() -> None:
    operator, target = _system(1.5)
    exact = on.solve(*operator.dense(), target, method="svd").gamma
    gamma, _ = lbfgs(operator.apply, operator.transpose, target, exact, max_iterations=20)
    # The best is chosen by the mean of the squares, and judged here by their norm: sums of so many numbers, rounded.
    slack = 4 * target.numel() * torch.finfo(torch.float64).eps
    assert _residual(operator, target, gamma) <= _residual(operator, target, exact) * (1 + slack)


def test_the_papers_solve_stops_where_float32_stops() -> None:
    operator, target = _system(1.0)
    gamma, evaluations = solve_as_papers(operator, target, max_iterations=50)
    reached = _residual(operator, target, gamma)
    ours = on.solve(*operator.dense(), target).residual
    eps32 = torch.finfo(torch.float32).eps
    assert gamma.dtype == torch.float32
    assert evaluations >= 1
    assert eps32 / 10 < reached < 1e-2
    assert ours < 1e-4 * reached


def test_other_shapes_start_from_zero() -> None:
    for excess in (0.5, 1.5):
        operator, target = _system(excess)
        gamma, _ = solve_as_papers(operator, target)
        best = on.solve(*operator.dense(), target).residual
        assert best - 1e-6 <= _residual(operator, target, gamma) <= best + 0.05
