"""The wide construction: one target layer from two frozen layers, by its two norms.

    gamma            with left diag(gamma) right = weight          (solvers)
    s, b, m, c       with phi(s x + b) = m (s x + b) + c           (linearize)
    norm1            scale s gamma, shift b
    norm2            scale 1 / (m s), shift bias - sum over features and positions of left (m b + c) / (m s)

Theory: giannou2023:thm-1, burkholz2024:thm-2.3, burkholz2024:thm-2.4
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from onlynorm.features import Features, draw
from onlynorm.reconstruction.blocks import NormOnlyBlock, layer_options
from onlynorm.reconstruction.costs import Costs, add_costs, pair_costs
from onlynorm.reconstruction.linearize import Window, linearize
from onlynorm.reconstruction.norms import affine, set_affine
from onlynorm.reconstruction.ranges import Ranges, Seen, find_ranges
from onlynorm.reconstruction.recipe import Rebuilt, Recipe, construction
from onlynorm.reconstruction.target import TargetLayer, weight_of
from onlynorm.solvers import Solution, solve_features
from onlynorm.solvers.krylov import Progress

FIELDS = ("kernel", "width")


def estimate(target: TargetLayer, recipe: Recipe) -> Costs:
    """What the wide construction of this layer takes."""
    return add_costs(pair_costs(one, tolerance=recipe.tolerance) for one in draw_groups(target, recipe))


def draw_groups(target: TargetLayer, recipe: Recipe) -> list[Features]:
    """The frozen features of a layer, group by group; nothing is computed yet."""
    names = [f"{target.name}/group {group}" for group in range(target.groups)]
    return [
        draw(
            recipe.features, target.group_shape, excess=recipe.excess, seed=recipe.seed, layer=name,
            kernel=recipe.kernel, density=recipe.density,
        )
        for name in (names if target.groups > 1 else [target.name])
    ]  # fmt: skip


@construction("wide", estimate=estimate, fields=FIELDS)
def build(
    target: TargetLayer, layer: nn.Module, seen: Seen, recipe: Recipe, progress: Progress | None = None
) -> Rebuilt:
    """The block that computes the layer, from two frozen layers per group. Theory: giannou2023:thm-1"""
    weight, bias = weight_of(layer)
    drawn = draw_groups(target, recipe)
    parts = weight.chunk(target.groups)
    solutions = [
        solve_features(
            one, part, tolerance=recipe.tolerance, minimum_width=recipe.width == "minimum", progress=progress
        )
        for one, part in zip(drawn, parts, strict=True)
    ]
    block = NormOnlyBlock(
        layer_options(layer), drawn, activation=recipe.activation, norms=recipe.norms, storage=recipe.storage
    )
    ranges = find_ranges(block, seen, margin=recipe.margin)
    window = choose_norms(block, solutions, bias, ranges, window=recipe.window)
    worst = max(solutions, key=lambda solution: solution.residual)
    return Rebuilt(
        block, worst.method, worst.residual, float(window.error_in_input.max()),
        sum(s.seconds for s in solutions), worst.shortfall,
    )  # fmt: skip


def choose_norms(
    block: NormOnlyBlock, solutions: list[Solution], bias: Tensor | None, ranges: Ranges, *, window: float
) -> Window:
    """Sets both norms of the block; returns the window in which the activation was placed."""
    gamma = torch.cat([solution.gamma for solution in solutions])
    ends = torch.stack([gamma * ranges.low, gamma * ranges.high])
    low, high = ends.amin(0), ends.amax(0)
    reach = float((high - low).max())
    linear = linearize(block.activation, low, high, tolerance=window * max(reach, 1e-300), shared=True)
    scale = linear.scale.expand_as(gamma) * gamma
    set_affine(block.first_norm, scale, linear.shift.expand_as(gamma), mean=ranges.mean, variance=ranges.variance)
    gain = linear.gain.flatten()[0]
    block.low.copy_(ranges.low)
    block.high.copy_(ranges.high)
    block.slope.copy_(linear.slope.expand_as(gamma))
    block.offset.copy_(linear.offset.expand_as(gamma))
    # The constant is taken from the norm as it was stored, so that its rounding cancels too.
    _, shift = affine(block.first_norm)
    constant = block.slope * shift + block.offset
    added = torch.cat(
        [
            _row_sums(block, group, constant[block.where(group, 0, one.n_features)])
            for group, one in enumerate(block.features)
        ]
    )
    output_gamma = torch.cat([_output_gamma(*pair) for pair in zip(block.features, solutions, strict=True)])
    out_scale = output_gamma / gain
    out_shift = (torch.zeros_like(added) if bias is None else bias) - out_scale * added
    set_affine(block.second_norm, out_scale, out_shift)
    return linear


def _output_gamma(features: Features, solution: Solution) -> Tensor:
    """The scale per output that the minimum width adds; one otherwise."""
    if solution.output_gamma is not None:
        return solution.output_gamma
    return torch.ones(features.shape[0], dtype=solution.gamma.dtype)


def _row_sums(block: NormOnlyBlock, group: int, constant: Tensor) -> Tensor:
    """What the constants of all features add to each output, summed over kernel positions."""
    features = block.features[group]
    total = torch.zeros(features.rows, dtype=constant.dtype)
    step = max(1, 2**22 // features.rows)
    for start in range(0, features.n_features, step):
        stop = min(start + step, features.n_features)
        total += features.left(start, stop).to(constant.dtype) @ constant[start:stop]
    return total.reshape(features.shape[0], -1).sum(1)
