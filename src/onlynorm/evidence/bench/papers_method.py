"""The papers' methods for comparison: a dense float32 solve with LBFGS, and the alignment as described.

burkholz2024 solves the materialised system with a library routine in float32 and improves the result with LBFGS;
random_features starts LBFGS from zero, with and without a preconditioner. Its alignment decomposes the feature matrix
and scores one pair of rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from onlynorm.solvers import KhatriRao


def lbfgs(
    apply: Callable[[Tensor], Tensor],
    transpose: Callable[[Tensor], Tensor],
    target: Tensor,
    start: Float[Tensor, " feat"],
    *,
    max_iterations: int = 200,
) -> tuple[Float[Tensor, " feat"], int]:
    """The best gamma of LBFGS on mean((M gamma - target)^2) from `start`, and the number of function evaluations."""
    gamma = start.detach().clone().requires_grad_(True)
    optimizer = torch.optim.LBFGS(
        [gamma], max_iter=max_iterations, history_size=20, tolerance_grad=0.0, tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )  # fmt: skip
    evaluations = 0
    best, lowest = start.detach().clone(), float("inf")

    def closure() -> float:
        nonlocal evaluations, best, lowest
        residual = apply(gamma.detach()) - target
        loss = float(residual.square().mean())
        gamma.grad = transpose(residual) * (2.0 / residual.numel())
        evaluations += 1
        if loss < lowest:
            best, lowest = gamma.detach().clone(), loss
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
    return lbfgs(single.apply, single.transpose, wanted, start, max_iterations=max_iterations)


def missed_as_described(
    left: Float[Tensor, "out feat"], right: Float[Tensor, "feat inp"]
) -> Float[Tensor, "out inp dims"]:
    """The missed directions by a full singular value decomposition of the feature matrix, of full column rank."""
    matrix = KhatriRao(left, right).materialise()
    U = torch.linalg.svd(matrix)[0]
    return U[:, matrix.shape[1] :].reshape(left.shape[0], right.shape[1], -1)


def search_as_described(missed: Float[Tensor, "out inp dims"], target: Float[Tensor, "out inp"]) -> Int[Tensor, " out"]:
    """The greedy search as described: one output after the other, one candidate row at a time."""

    def piece(output: int, row: int) -> Tensor:
        return torch.einsum("jk,j->k", missed[output], target[row])

    n = len(target)
    order, free = torch.arange(n), list(range(n))
    for output in torch.argsort(missed.square().sum((1, 2)), descending=True).tolist():
        total = torch.einsum("ijk,ij->k", missed, target[order])
        row = int(order[output])
        without = total - piece(output, row)
        lowest, best_row, best_seat = float(total.square().sum()), row, output
        for candidate in free:
            seat = int(torch.where(order == candidate)[0])
            swapped = without + piece(output, candidate) + piece(seat, row) - piece(seat, candidate)
            score = float(swapped.square().sum())
            if score < lowest:
                lowest, best_row, best_seat = score, candidate, seat
        order[output] = best_row
        order[best_seat] = row if best_seat != output else best_row
        free.remove(best_row)
    return order


def greedy_as_described(
    left: Float[Tensor, "out feat"], right: Float[Tensor, "feat inp"], target: Float[Tensor, "out inp"]
) -> Int[Tensor, " out"]:
    """The permutation of the greedy search as described, from the features and the target."""
    return search_as_described(missed_as_described(left, right), target)
