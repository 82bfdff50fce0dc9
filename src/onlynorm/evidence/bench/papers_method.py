"""The papers' own way, kept to be measured against: a dense float32 solve, then LBFGS on the squared error.

burkholz2024 solves the materialised system with a library routine in float32 and improves the result with LBFGS;
random_features starts LBFGS from zero, with and without a preconditioner. Nothing else in onlynorm uses it.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from onlynorm.solvers.operator import KhatriRao


def polish_lbfgs(
    operator: KhatriRao,
    target: Float[Tensor, "out inp"],
    start: Float[Tensor, " feat"],
    *,
    max_iterations: int = 200,
    history: int = 20,
) -> tuple[Float[Tensor, " feat"], int]:
    """Gamma after LBFGS on mean((M gamma - target)^2) from `start`, and the function evaluations it took."""
    gamma = start.detach().clone().requires_grad_(True)
    optimizer = torch.optim.LBFGS(
        [gamma],
        max_iter=max_iterations,
        history_size=history,
        tolerance_grad=0.0,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )
    evaluations = 0
    best, lowest = start.detach().clone(), float("inf")

    def closure() -> Tensor:
        nonlocal evaluations, best, lowest
        optimizer.zero_grad()
        residual = operator.apply(gamma.detach()) - target
        loss = residual.square().mean()
        gamma.grad = operator.transpose(residual) * (2.0 / residual.numel())
        evaluations += 1
        if float(loss) < lowest:
            best, lowest = gamma.detach().clone(), float(loss)
        return loss

    optimizer.step(closure)
    return best, evaluations


def solve_as_papers(
    operator: KhatriRao, target: Float[Tensor, "out inp"], *, max_iterations: int = 200
) -> tuple[Float[Tensor, " feat"], int]:
    """The baseline: float32 dense solve of the square system (LBFGS from zero for other shapes), then LBFGS."""
    single = operator.to(torch.float32)
    wanted = target.to(torch.float32)
    if single.n_features == single.equations:
        start = torch.linalg.solve(single.materialise(), wanted.flatten())
    else:
        start = wanted.new_zeros(single.n_features)
    return polish_lbfgs(single, wanted, start, max_iterations=max_iterations)
