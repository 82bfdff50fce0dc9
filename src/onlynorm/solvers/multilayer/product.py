"""The product of frozen layers as a function of their gammas, and Levenberg-Marquardt to a target.

    P(g) = diag(g_L) W_L diag(g_(L-1)) W_(L-1) ... diag(g_1) W_1

The derivative with respect to g_l[f] is the outer product of column f of the product to its left and row f of the
product to its right. The Jacobian is therefore a Khatri-Rao operator of the concatenated features of all layers, and a
Levenberg-Marquardt step is one damped solve with it (`damped`).

Theory: burkholz2024:thm-2.5
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from onlynorm.features.streams import Stream
from onlynorm.solvers.multilayer.damped import Damped, DenseDamped, KroneckerDamped
from onlynorm.solvers.operator import KhatriRao, OnStep

GENTLE, STEEP = 2.0, 1.4
"""Ratios of step sizes: steps of the first layer are twice as large as those of the last, which saves steps, or steps
of each layer are 1.4 times as large as those of the next. For targets of low rank, equal steps shrink the other
singular values in every layer until the Jacobian is nearly singular and convergence is slow; the larger ratio avoids
this."""
REACH = 4.0
"""Norm of the target's rows relative to the product at gamma = 1. At about one the initial product dominates and the
Jacobian is several times worse conditioned; between 2 and 16 the value makes no difference."""
PATIENCE = 15
STALLED = 0.2
"""A descent stops if `PATIENCE` steps reduce the residual by less than this fraction."""


@dataclass(frozen=True)
class LayerProduct:
    """The product of the layers, with one unit per layer in which its gamma is measured."""

    weights: list[Tensor]
    isometric: list[float]
    units: list[float]

    @classmethod
    def of(cls, weights: list[Tensor], *, tilt: float) -> LayerProduct:
        """The chain of W_1, ..., W_L; units decrease by the factor `tilt` from layer to layer."""
        isometric = [math.sqrt(min(w.shape)) / float(torch.linalg.vector_norm(w)) for w in weights]
        return cls(weights, isometric, [size * tilt**-layer for layer, size in enumerate(isometric)])

    def start(self, seed: int) -> list[Tensor]:
        """Initial values: gamma = 1 for layers scaled to isometries, with random signs for a seed above 0."""
        values = []
        for layer, (weight, size, unit) in enumerate(zip(self.weights, self.isometric, self.units, strict=True)):
            signs = torch.ones_like(weight[:, 0])
            if seed:
                drawn = Stream(seed, "multilayer", f"start {layer}").signs(0, len(weight))
                signs = torch.from_numpy(drawn).to(weight)
            values.append((size / unit) * signs)
        return values

    def gammas(self, values: list[Tensor]) -> list[Tensor]:
        """Gammas for the unscaled frozen weights."""
        return [unit * value for unit, value in zip(self.units, values, strict=True)]

    def product(self, values: list[Tensor]) -> Float[Tensor, "out inp"]:
        """The product of the layers."""
        return product(self.weights, self.gammas(values))

    def jacobian(self, values: list[Tensor]) -> KhatriRao:
        """The derivative of the product: the outer products of all features of all layers."""
        gammas = self.gammas(values)
        rights = [self.weights[0]]
        for weight, gamma in zip(self.weights[1:], gammas[:-1], strict=True):
            rights.append(weight @ (gamma[:, None] * rights[-1]))
        lefts = [torch.diag(torch.ones_like(gammas[-1]))]
        for weight, gamma in zip(self.weights[:0:-1], gammas[:0:-1], strict=True):
            lefts.append((lefts[-1] * gamma) @ weight)
        pairs = [
            _balanced(unit * left, right) for unit, left, right in zip(self.units, lefts[::-1], rights, strict=True)
        ]
        return KhatriRao(torch.cat([left for left, _ in pairs], 1), torch.cat([right for _, right in pairs]))


@dataclass(frozen=True)
class ProductSolution:
    """Result of a descent: gammas, relative residual, number of steps and of inner iterations."""

    gammas: list[Tensor]
    residual: float
    steps: int
    iterations: int


def starts(n_layers: int, target: Float[Tensor, "out inp"]) -> list[tuple[float, int]]:
    """(tilt, seed of the signs or 0 for gamma = 1) of the first descent and of the restarts."""
    gentle = GENTLE ** (1.0 / (n_layers - 1))
    listed = [(gentle, 0), (STEEP, 0), (1.0 / STEEP, 1), (STEEP, 2), *((gentle, seed) for seed in range(3, 9))]
    has_low_rank = 2 * int(torch.linalg.matrix_rank(target)) <= min(target.shape)
    return [listed[1], listed[0], *listed[2:]] if has_low_rank else listed


def descend(
    chain: LayerProduct,
    target: Float[Tensor, "out inp"],
    *,
    seed: int,
    tolerance: float,
    method: str,
    max_steps: int,
    steps: int = 0,
    on_step: OnStep | None = None,
) -> ProductSolution:
    """Levenberg-Marquardt from gamma = 1, or from the signs of this seed; no row of the target may be zero.

    The rows of the target are scaled to norm `REACH` times that of the initial product, with the sign of their inner
    product with it; the gammas of the outputs are divided by these factors at the end. `method` is "dense" or
    "matrix-free". `steps` is the number of steps taken before.
    """
    values = chain.start(seed)
    made = chain.product(values)
    reached = float(torch.linalg.vector_norm(made)) / math.sqrt(len(made))
    factor = REACH * (reached if reached > 0 else 1.0) / torch.linalg.vector_norm(target, dim=1)
    factor = torch.where((made * target).sum(1) < 0, -factor, factor)[:, None]
    scaled = factor * target

    def relative_error(rest: Tensor) -> float:
        # Steps weight all rows equally, the final residual by their norm: both must reach the tolerance.
        return max(relative(rest, scaled), relative(rest / factor, target))

    rest = made - scaled
    damping, growth, iterations = 0.3, 2.0, 0
    history = [relative_error(rest)]
    system: Damped | None = None
    while history[-1] > tolerance and steps < max_steps:
        if on_step is not None:
            on_step(steps, history[-1])
        if system is None:
            jacobian = chain.jacobian(values)
            mean = float(jacobian.column_squares().sum()) / jacobian.equations
            if not mean > 0:  # sparse layers whose product is zero
                break
            system = DenseDamped(jacobian) if method == "dense" else KroneckerDamped(jacobian)
        forcing = min(1e-2, max(1e-3, 0.3 * history[-1]))
        before = system.iterations
        solved = system.solve(rest, shift=damping * mean, tolerance=forcing)
        steps, iterations = steps + 1, iterations + system.iterations - before
        gain = -1.0
        if solved is not None:
            moved = [v - s for v, s in zip(values, solved[0].split([len(v) for v in values]), strict=True)]
            new = chain.product(moved) - scaled
            gain = _gain(rest, new, rest - solved[1])
        if gain > 1e-3:
            values, rest, system = moved, new, None
            # Close to the solution the linear model is accurate and damping only slows convergence.
            least = 0.1 if relative_error(rest) > 1e-3 else 1e-3
            damping, growth = damping * max(least, 1.0 - (2.0 * gain - 1.0) ** 3), 2.0
        else:
            damping, growth = damping * growth, 2.0 * growth
        history.append(relative_error(rest))
        if len(history) > PATIENCE and history[-1] > (1.0 - STALLED) * history[-1 - PATIENCE]:
            break
    if on_step is not None:
        on_step(steps, history[-1])
    gammas = chain.gammas(values)
    gammas[-1] = gammas[-1] / factor[:, 0]
    return ProductSolution(gammas, history[-1], steps, iterations)


def product(weights: Sequence[Tensor], gammas: Sequence[Tensor]) -> Float[Tensor, "out inp"]:
    """diag(g_L) W_L ... diag(g_1) W_1, multiplied from the narrower end."""
    if len(weights[-1]) <= weights[0].shape[1]:
        made = gammas[-1][:, None] * weights[-1]
        for weight, gamma in zip(weights[-2::-1], gammas[-2::-1], strict=True):
            made = (made * gamma) @ weight
        return made
    made = gammas[0][:, None] * weights[0]
    for weight, gamma in zip(weights[1:], gammas[1:], strict=True):
        made = gamma[:, None] * (weight @ made)
    return made


def relative(rest: Tensor, target: Tensor) -> float:
    """|rest| / |target|, or |rest| for a zero target."""
    size = float(torch.linalg.vector_norm(target))
    return float(torch.linalg.vector_norm(rest)) / (size if size > 0 else 1.0)


def _gain(rest: Tensor, new: Tensor, predicted: Tensor) -> float:
    """Actual over predicted decrease of the squared residual; -1 if not finite."""
    before, after, expected = (float(x.square().sum()) for x in (rest, new, predicted))
    if not math.isfinite(after) or not before > expected:
        return -1.0
    return (before - after) / (before - expected)


def _balanced(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """The same outer products with factors of equal norm, comparable across layers."""
    sizes = float(torch.linalg.vector_norm(left)), float(torch.linalg.vector_norm(right))
    ratio = math.sqrt(sizes[1] / sizes[0]) if min(sizes) > 0 else 1.0
    return left * ratio, right / ratio
