"""The gammas of narrow frozen layers with skips, slice by slice of the target's inputs, from the last layer back.

    P_L = W,    P_i gamma_i (W_i A_i) = T_i,    P_{i-1} = P_i gamma_i W_i        (W_1 in place of W_i A_i for i = 1)

T_i are the columns of the target that belong to slice i: a system of `out * cols_i` equations for every layer, with one
unknown per feature. P_i is all that the earlier slices have to pass, so whatever it squeezes is lost for them: the
relative error of the whole is about eps times the condition number of the worst P_i. With as many features as equations
there is one solution only, gammas differ wildly, and the condition number grows by orders of magnitude per layer. Three
things keep it small:

- orthogonal frozen weights, which squeeze nothing themselves;
- more features than equations, and among all solutions the one nearest to gamma = 1 (where W_i has unit scale), so that
  layers pass on what they get;
- gammas of either sign pass on equally well: after solving near 1, the layer is solved again near the signs found.

The last layer has the scale of the target, so that small and large targets are solved alike.

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
from onlynorm.solvers.operator import Progress

SIGN_ROUNDS = 2
"""How often a layer is solved again near the signs it found; most of the gain comes from the first."""
DENSE = 8192
"""Equations up to which a layer is solved by one factorization, to the last digits."""
LOST = 1e-3
"""Relative error of a layer from which on its recombined equations no longer count."""


@dataclass(frozen=True)
class Slices:
    """The gammas of all layers and what they reach.

    `residual` is the relative error of the effective weight, multiplied out from the first layer on; `condition` that
    of the worst product of layers after a slice.
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
    narrow: int,
    n_features: int,
    seed: int = 0,
    layer: str = "",
    density: float | None = None,
) -> list[Features]:
    """The frozen layers for a target of `shape` (out, inp, *kernel), `narrow` inputs to a slice.

    The first holds the final map W (left) and W_1 (right), each other one W_i (left) and the skip A_i (right).
    """
    out, inp, *kernel = shape
    sizes = [min(narrow, inp - start) for start in range(0, inp, narrow)]
    return [
        draw(
            name, (n_features if i else out, size, *kernel), n_features=n_features, seed=seed,
            layer=f"{layer}/layer {i + 1}", density=density,
        )
        for i, size in enumerate(sizes)
    ]  # fmt: skip


def keep_weights(layers: list[Features]) -> Weights:
    """The frozen weights of all layers, made once."""
    kept = {"left": [one.left() for one in layers], "right": [one.right() for one in layers]}
    return lambda side, i: kept[side][i]


def solve_slices(
    layers: list[Features],
    target: Float[Tensor, "out inp *kernel"],
    *,
    weights: Weights | None = None,
    is_near: bool = True,
    progress: Progress | None = None,
) -> Slices:
    """The gammas with which the frozen layers compute the target.

    `weights` gives frozen weights that exist already; they are made otherwise. `is_near` takes the solution nearest to
    one, sign by sign; without it the one of least norm, which is the paper's unique solution where there are as many
    features as equations.
    """
    matrix = target.detach().double().flatten(1)
    parts = matrix.split([one.cols for one in layers], dim=1)
    weights = keep_weights(layers) if weights is None else weights
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
            solution = _solve_plain(product, right, parts[i], None, progress)
        elif left is None:
            # Nothing passes through the first layer, so the smallest gammas are best there.
            solution = _solve_recombined(product, right, parts[i], 0.0, progress)
        else:
            unit = len(left) ** 0.5 / torch.linalg.matrix_norm(left)
            near = unit * size if i == len(layers) - 1 else unit
            solution = _solve_near(product, right, parts[i], near, progress)
        found.insert(0, solution)
        if left is not None:
            product = (product * solution.gamma) @ left
    gammas = torch.stack([solution.gamma for solution in found])
    made = whole_map(weights, gammas, torch.eye(matrix.shape[1]).to(matrix))
    return Slices(
        gammas, _relative(made, matrix), condition,
        ", ".join(dict.fromkeys(solution.method for solution in found)), sum(solution.seconds for solution in found),
    )  # fmt: skip


def _solve_near(left: Tensor, right: Tensor, target: Tensor, near: Tensor, progress: Progress | None) -> Solution:
    """Gamma nearest to a number of either sign, found in rounds."""
    signs = torch.ones_like(left[0])
    solution = _solve_recombined(left, right, target, near * signs, progress)
    seconds = solution.seconds
    for _ in range(SIGN_ROUNDS if left.shape[1] > target.numel() else 0):
        before, signs = signs, torch.where(solution.gamma < 0, -1.0, 1.0).to(signs)
        if torch.equal(before, signs):
            break
        solution = _solve_recombined(left, right, target, near * signs, progress)
        seconds += solution.seconds
    return replace(solution, seconds=seconds)


def _solve_recombined(
    left: Tensor, right: Tensor, target: Tensor, near: Tensor | float, progress: Progress | None
) -> Solution:
    """Gamma nearest to `near`, with the equations recombined so that the rows of `left` are orthonormal.

    The solutions are the same, and what the later layers squeeze no longer slows or stops the solver. Where they
    squeeze so much that recombining loses the target, or features are too few, the plain system is solved as well as
    it can be.
    """
    if target.numel() <= left.shape[1] and target.numel() <= DENSE:
        basis, factor = torch.linalg.qr(left.mT)
        recombined = torch.linalg.solve_triangular(factor.mT, target, upper=False)
        if bool(torch.isfinite(recombined).all()):
            solution = solve(basis.mT, right, recombined, near=near, method="cholesky", progress=progress)
            made = (left * solution.gamma) @ right
            if solution.is_exact and _relative(made, target) <= LOST:
                return solution
    return _solve_plain(left, right, target, near, progress)


def _solve_plain(
    left: Tensor, right: Tensor, target: Tensor, near: Tensor | float | None, progress: Progress | None
) -> Solution:
    """Gamma nearest to `near`, by singular values where they are cheap: these systems may be singular."""
    method = "svd" if max(target.numel(), left.shape[1] // 4) <= SMALL else "auto"
    return solve(left, right, target, near=near, method=method, progress=progress)


def _relative(made: Tensor, target: Tensor) -> float:
    """|made - target| / |target|, absolute for a target of zeros."""
    size = float(torch.linalg.matrix_norm(target))
    rest = float(torch.linalg.matrix_norm(made - target)) / (size or 1.0)
    return math.inf if math.isnan(rest) else rest


def condition_of(product: Float[Tensor, "out feat"]) -> float:
    """Largest over smallest singular value of what the later layers make of a layer; infinite if not finite."""
    if not bool(torch.isfinite(product).all()):
        return math.inf
    values = torch.linalg.svdvals(product)
    return float(values[0] / values[-1]) if float(values[-1]) > 0 else math.inf
