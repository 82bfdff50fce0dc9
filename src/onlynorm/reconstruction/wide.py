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
from onlynorm.reconstruction.blocks import NormOnlyBlock, affine, set_affine
from onlynorm.reconstruction.linearize import Window, linearize
from onlynorm.reconstruction.ranges import Ranges, calibrate
from onlynorm.reconstruction.target import TargetLayer, weight_of
from onlynorm.solvers import Solution, solve_features
from onlynorm.solvers.krylov import Progress


def rebuild(
    description: TargetLayer,
    layer: nn.Module,
    inputs: Tensor,
    *,
    features: str = "he_normal",
    excess: float | None = None,
    seed: int = 0,
    activation: nn.Module | None = None,
    kernel: str = "first",
    storage: str = "dense",
    tolerance: float | None = None,
    window: float = 1e-10,
    progress: Progress | None = None,
) -> tuple[NormOnlyBlock, list[Solution], Window]:
    """The block that computes the layer, the solutions of its groups, and the window of its activation.

    `inputs` are what the layer receives on the calibration batch. `window` is the error allowed in the linear piece of
    the activation, relative to the widest range of a feature.
    """
    weight, bias = weight_of(layer)
    drawn = [
        draw(features, description.group_shape, excess=excess, seed=seed, layer=name, kernel=kernel)
        for name in group_names(description)
    ]
    parts = weight.chunk(description.groups)
    solutions = [
        solve_features(one, part, tolerance=tolerance, progress=progress)
        for one, part in zip(drawn, parts, strict=True)
    ]
    block = NormOnlyBlock(layer, drawn, activation=activation, storage=storage)
    ranges = calibrate(block, inputs.double())
    return block, solutions, choose_norms(block, solutions, bias, ranges, window=window)


def group_names(description: TargetLayer) -> list[str]:
    """The names of the random streams of a layer's groups."""
    if description.groups == 1:
        return [description.name]
    return [f"{description.name}/group {group}" for group in range(description.groups)]


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
    flat = torch.zeros_like(out_shift)
    set_affine(block.second_norm, out_scale, out_shift, mean=flat, variance=flat + 1.0 - block.second_norm.eps)
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
