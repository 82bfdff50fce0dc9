"""The gammas of narrow frozen layers with skip connections, slice by slice of the target's inputs, last layer first.

    P_L = W,    P_i gamma_i (W_i A_i) = T_i,    P_{i-1} = P_i gamma_i W_i        (W_1 in place of W_i A_i for i = 1)

T_i are the columns of the target in slice i: a system of `out * cols_i` equations for every layer, with one unknown per
feature. Earlier slices pass through P_i, so the relative error of the weight is about eps times the largest condition
number of a P_i. With as many features as equations the solution is unique, gammas vary strongly, and the condition
number grows by orders of magnitude per layer. Three measures keep it small:

- orthogonal frozen weights, which have condition number 1;
- more features than equations, and among all solutions the one nearest to gamma = 1 (where W_i has unit scale);
- the sign of a gamma does not matter: after solving near 1, the layer is solved again near the signs found.

The last layer has the scale of the target, so that the accuracy does not depend on it.

Theory: giannou2023:thm-2, giannou2023:thm-9
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from onlynorm.features import Features, draw
from onlynorm.frozen.sequence import Weights, whole_map
from onlynorm.solvers import Solution, solve
from onlynorm.solvers.choose import SMALL
from onlynorm.solvers.operator import OnStep

SIGN_ROUNDS = 2
"""Number of times a layer is solved again near the signs found; the first improves most."""
DENSE = 8192
"""Maximum number of equations for solving a layer by one factorization, to full precision."""
LOST = 1e-3
"""Relative error of a layer above which the solution of the recombined equations is rejected."""


@dataclass(frozen=True)
class Slices:
    """The gammas of all layers and their accuracy.

    `residual` is the relative error of the effective weight, the product of all layers; `condition` the largest
    condition number of the layers after a slice.
    """

    gammas: Float[Tensor, "layers feat"]
    residual: float
    condition: float
    method: str
    seconds: float

    def __str__(self) -> str:
        n_layers, width = self.gammas.shape
        return (
            f"{n_layers} layers of {width} features by {self.method}: relative error {self.residual:.1e}, condition "
            f"{self.condition:.2g}, {self.seconds:.2g} s"
        )


def draw_layers(
    name: str,
    shape: Sequence[int],
    *,
    inputs_per_slice: int,
    n_features: int,
    seed: int = 0,
    layer: str = "",
    density: float | None = None,
) -> list[Features]:
    """The frozen layers for a target of `shape` (out, inp, *kernel), with `inputs_per_slice` inputs per slice.

    The first has the final map W (left) and W_1 (right), each other one W_i (left) and the skip A_i (right).
    """
    out, inp, *kernel = shape
    sizes = [min(inputs_per_slice, inp - start) for start in range(0, inp, inputs_per_slice)]
    return [
        draw(
            name, (n_features if i else out, size, *kernel), n_features=n_features, seed=seed,
            layer=f"{layer}/layer {i + 1}", density=density,
        )
        for i, size in enumerate(sizes)
    ]  # fmt: skip


def draw_weights(layers: list[Features]) -> Weights:
    """The frozen weights of all layers, drawn once."""
    drawn = {"left": [one.left() for one in layers], "right": [one.right() for one in layers]}
    return lambda side, i: drawn[side][i]


def solve_slices(
    layers: list[Features],
    target: Float[Tensor, "out inp *kernel"],
    *,
    weights: Weights | None = None,
    is_near: bool = True,
    on_step: OnStep | None = None,
) -> Slices:
    """The gammas with which the frozen layers compute the target.

    `weights` returns the frozen weights; by default they are drawn. `is_near` selects the solution nearest to plus or
    minus one, else the minimum-norm solution, which is the unique one of the paper if there are as many features as
    equations.
    """
    matrix = target.detach().double().flatten(1)
    parts = matrix.split([one.cols for one in layers], dim=1)
    weights = draw_weights(layers) if weights is None else weights
    product = weights("left", 0).to(matrix)
    size = torch.linalg.matrix_norm(matrix) / len(matrix) ** 0.5
    size = torch.where(size > 0, size, 1.0)
    found: list[Solution] = []
    condition = 1.0
    for i in reversed(range(len(layers))):
        condition = max(condition, condition_of(product))
        right = weights("right", i).to(matrix)
        left = weights("left", i).to(matrix) if i else None
        if left is not None:
            right = left @ right
        if not is_near:
            solution = _solve_plain(product, right, parts[i], None, on_step)
        elif left is None:
            # No slice passes through the first layer, so the smallest gammas are best there.
            solution = _solve_recombined(product, right, parts[i], 0.0, on_step)
        else:
            unit = len(left) ** 0.5 / torch.linalg.matrix_norm(left)
            near = unit * size if i == len(layers) - 1 else unit
            solution = _solve_near(product, right, parts[i], near, on_step)
        found.insert(0, solution)
        if left is not None:
            product = (product * solution.gamma) @ left
    gammas = torch.stack([solution.gamma for solution in found])
    made = whole_map(weights, gammas, torch.eye(matrix.shape[1]).to(matrix))
    return Slices(
        gammas, _relative(made, matrix), condition,
        ", ".join(dict.fromkeys(solution.method for solution in found)), sum(solution.seconds for solution in found),
    )  # fmt: skip


def _solve_near(left: Tensor, right: Tensor, target: Tensor, near: Tensor, on_step: OnStep | None) -> Solution:
    """Gamma nearest to plus or minus `near`, by repeated solves."""
    signs = torch.ones_like(left[0])
    solution = _solve_recombined(left, right, target, near * signs, on_step)
    seconds = solution.seconds
    for _ in range(SIGN_ROUNDS if left.shape[1] > target.numel() else 0):
        before, signs = signs, torch.where(solution.gamma < 0, -1.0, 1.0).to(signs)
        if torch.equal(before, signs):
            break
        solution = _solve_recombined(left, right, target, near * signs, on_step)
        seconds += solution.seconds
    return replace(solution, seconds=seconds)


def _solve_recombined(
    left: Tensor, right: Tensor, target: Tensor, near: Tensor | float, on_step: OnStep | None
) -> Solution:
    """Gamma nearest to `near`, with the equations recombined so that the rows of `left` are orthonormal.

    The solutions are the same, but the system is better conditioned. If recombining loses the target, or there are too
    few features, the original system is solved.
    """
    if target.numel() <= left.shape[1] and target.numel() <= DENSE:
        basis, factor = torch.linalg.qr(left.mT)
        recombined = torch.linalg.solve_triangular(factor.mT, target, upper=False)
        if bool(torch.isfinite(recombined).all()):
            solution = solve(basis.mT, right, recombined, near=near, method="cholesky", on_step=on_step)
            made = (left * solution.gamma) @ right
            if solution.is_exact and _relative(made, target) <= LOST:
                return solution
    return _solve_plain(left, right, target, near, on_step)


def _solve_plain(
    left: Tensor, right: Tensor, target: Tensor, near: Tensor | float | None, on_step: OnStep | None
) -> Solution:
    """Gamma nearest to `near`, by an SVD if the system is small, since it may be singular."""
    method = "svd" if max(target.numel(), left.shape[1] // 4) <= SMALL else "auto"
    return solve(left, right, target, near=near, method=method, on_step=on_step)


def _relative(made: Tensor, target: Tensor) -> float:
    """|made - target| / |target|, or |made| if the target is zero."""
    size = float(torch.linalg.matrix_norm(target))
    rest = float(torch.linalg.matrix_norm(made - target)) / (size or 1.0)
    return math.inf if math.isnan(rest) else rest


def condition_of(product: Float[Tensor, "out feat"]) -> float:
    """Condition number of the product of later layers; infinite if it is not finite."""
    if not bool(torch.isfinite(product).all()):
        return math.inf
    values = torch.linalg.svdvals(product)
    return float(values[0] / values[-1]) if float(values[-1]) > 0 else math.inf
