"""The residual construction: a block with a frozen skip connection, and its second norm inside or outside the sum.

    inside     y = norm2( left phi( norm1( right x ) ) ) + skip x       solve for T - S
    outside    y = norm2( left phi( norm1( right x ) ) + skip x )       solve for diag(1 / g2) T - S

S is the skip as a kernel of the target's shape: the identity if the layer preserves the shape of its input, else frozen
random weights at the middle position of the kernel (a 1 x 1 convolution with the layer's stride).

Outside, any nonzero g2 gives an exact solution. We take g2_i = |T_i| / |S_i|, the scale at which target and skip have
the same norm: |g2_i (T_i / g2_i - S_i)|, which a relative residual multiplies, is then at most twice |T_i| for any
skip, while g2 = 1 would lose precision if the skip is larger than the target. Zero outputs get g2 = 0. At the minimum
width g2 is an unknown too: left diag(gamma) right - diag(1 / g2) T = -S is linear in gamma and 1 / g2, and again a
Khatri-Rao system, with added features for each output (e_i, T_i). (The paper's Eq. 3 with its missing term; it has a
right-hand side already, so one feature less than burkholz2024:thm-2.2 is enough.)

The norm outside scales branch and skip equally, so the gain of the activation must be one: it must be linear on a
half-axis. Inside, any activation is possible.

Theory: burkholz2024:eq-3
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from onlynorm.errors import ValueRangeError
from onlynorm.features import Features, draw
from onlynorm.frozen.residual import SkipBlock, identity_position
from onlynorm.modules.convolution import embed
from onlynorm.modules.layers import TargetLayer, layer_options, per_output, weight_of
from onlynorm.reconstruction.constructions import wide
from onlynorm.reconstruction.constructions.base import Rebuilt
from onlynorm.reconstruction.constructions.options import Residual, Settings
from onlynorm.reconstruction.costs import ALONE, Costs, Load
from onlynorm.reconstruction.ranges import LayerInputs
from onlynorm.solvers import Solution, solve
from onlynorm.solvers.methods.minimum_width import minimum_features
from onlynorm.solvers.operator import OnStep

DENSE = ("he_normal", "he_uniform", "uniform", "orthogonal")
"""Distributions that the skip may use too; others are sparse or have a fixed number of features."""


def estimate(target: TargetLayer, construction: Residual, settings: Settings, load: Load = ALONE) -> Costs:
    """The cost of the residual construction of this layer, with a random skip unless it is a square linear layer."""
    costs = wide.estimate(target, construction, settings, load)
    is_identity = len(target.shape) == 2 and target.shape[0] == target.shape[1]
    n_skip = 0 if is_identity else target.shape[0] * target.shape[1]
    stored = costs.stored + 8 * n_skip * (settings.storage == "dense")
    # The block exists while its system is solved, and is converted to a plain layer at the end.
    solving = wide.solving_costs(wide.draw_groups(target, construction, settings), construction, settings)
    return dataclasses.replace(
        costs, n_frozen=costs.n_frozen + n_skip, multiplications=costs.multiplications + n_skip, stored=stored,
        memory=max(costs.memory, stored + solving.memory) + 24 * costs.equations,
    )  # fmt: skip


def build(
    target: TargetLayer,
    layer: nn.Module,
    received: LayerInputs,
    construction: Residual,
    settings: Settings,
    on_step: OnStep | None = None,
) -> Rebuilt:
    """The block of the layer with a frozen skip connection. Theory: burkholz2024:eq-3"""
    weight, bias = weight_of(layer)
    options = layer_options(layer)
    drawn = wide.draw_groups(target, construction, settings, device=weight.device)
    block = SkipBlock(
        options, drawn, skips=_draw_skips(target, options, construction, settings), place=construction.skip,
        activation=construction.activation, norms=construction.norms, storage=settings.storage,
    ).to(weight.device)  # fmt: skip
    skip = block.skip_weight().to(weight.device)
    wanted = embed(weight, drawn[0].shape[2:])
    if construction.skip == "inside":
        rest = wanted - skip
        solutions = wide.solve_groups(
            drawn, rest, construction, wide.tightened(settings, _growth(wanted, rest)), on_step
        )
    elif construction.width == "minimum" and drawn[0].n_features >= minimum_features(drawn[0].rows, drawn[0].cols):
        parts = zip(drawn, wanted.chunk(len(drawn)), skip.chunk(len(drawn)), strict=True)
        solutions = [_solve_with_scales(*part, settings, on_step) for part in parts]
    else:
        solutions = _solve_outside(drawn, wanted, skip, construction, settings, on_step)
    made = wide.set_norms(block, solutions, bias, received, settings, unit_gain=construction.skip == "outside")
    residual = wide.relative_error(block.to_plain(), weight)
    wide.need_reached(residual, construction, settings, target)
    return dataclasses.replace(made, residual=residual)


def _solve_outside(
    drawn: list[Features],
    wanted: Tensor,
    skip: Tensor,
    construction: Residual,
    settings: Settings,
    on_step: OnStep | None,
) -> list[Solution]:
    """Gamma for diag(1 / g2) T - S with g2 = |T_i| / |S_i| per output, and g2."""
    sizes, skips = (torch.linalg.vector_norm(values.flatten(1), dim=1) for values in (wanted, skip))
    scale = sizes / skips
    is_on = per_output(scale, wanted) > 0
    rest = torch.where(is_on, wanted / torch.where(is_on, per_output(scale, wanted), 1.0) - skip, 0.0)
    tightened = wide.tightened(settings, float(scale.max()) * _growth(wanted, rest))
    solutions = wide.solve_groups(drawn, rest, dataclasses.replace(construction, width="maximum"), tightened, on_step)
    parts = zip(solutions, scale.chunk(len(drawn)), strict=True)
    return [dataclasses.replace(solution, output_gamma=part) for solution, part in parts]


def _solve_with_scales(
    features: Features, wanted: Tensor, skip: Tensor, settings: Settings, on_step: OnStep | None
) -> Solution:
    """Gamma and g2 of one group: left diag(gamma) right - diag(1 / g2) T = -S over the nonzero outputs."""
    T, S = features.as_matrix(wanted), features.as_matrix(skip)
    left, right = features.left().double(), features.right().double()
    sizes = torch.linalg.vector_norm(T, dim=1)
    on = sizes > 0
    if not bool(on.any()):
        reason = "every output of the target is zero and switched off"
        nothing = torch.zeros(features.n_features, dtype=sizes.dtype, device=sizes.device)
        return Solution(nothing, 0.0, "none", 0, 1.0, 0.0, 0, reason, wide.SMALLEST, output_gamma=sizes)
    # The added columns have the mean norm of the features, so that all unknowns have equal weight.
    mean = (left.square().sum(0) * right.square().sum(1)).mean().sqrt()
    rows = mean * T[on] / sizes[on, None]
    scales = -torch.eye(len(rows), dtype=left.dtype, device=left.device)
    solution = solve(
        torch.cat([left[on], scales], 1), torch.cat([right, rows]), -S[on], tolerance=settings.tolerance,
        on_step=on_step,
    )  # fmt: skip
    inverse = solution.gamma[features.n_features :] * mean / sizes[on]
    if not bool((inverse != 0).all()):
        raise ValueRangeError(
            "the minimum width outside the sum needs a nonzero scale for every output; got zeros. Use another seed, or "
            "leave width out."
        )
    output_gamma = torch.zeros_like(sizes)
    output_gamma[on] = 1.0 / inverse
    return dataclasses.replace(solution, gamma=solution.gamma[: features.n_features], output_gamma=output_gamma)


def _draw_skips(
    target: TargetLayer, options: dict[str, Any], construction: Residual, settings: Settings
) -> list[Features]:
    """The random weights of the skip, a row per output, group by group; empty for the identity."""
    n_outputs, n_inputs = target.group_shape[:2]
    if n_outputs == n_inputs and identity_position(options) is not None:
        return []
    name = construction.features if construction.features in DENSE else "he_normal"
    layers = [f"{target.name}/skip {group}" for group in range(target.groups)]
    return [draw(name, (1, n_inputs), n_features=n_outputs, seed=settings.seed, layer=layer) for layer in layers]


def _growth(wanted: Tensor, rest: Tensor) -> float:
    """The norm of the right-hand side relative to the target, by which the tolerance is divided."""
    size, larger = (float(torch.linalg.vector_norm(values)) for values in (wanted, rest))
    return larger / size if size > 0.0 else 1.0
