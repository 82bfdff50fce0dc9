"""The residual construction: a source block with a frozen skip path, its second norm inside or outside the sum.

    inside     y = norm2( left phi( norm1( right x ) ) ) + skip x       solve for T - S
    outside    y = norm2( left phi( norm1( right x ) ) + skip x )       solve for diag(1 / g2) T - S

S is the skip as a kernel of the target's shape: the identity where the layer keeps its inputs' shape, else frozen
random weights at the middle position of the kernel (a 1 x 1 convolution with the layer's stride).

Outside, any g2 without zeros gives an exact solution. We take g2_i = |T_i| / |S_i|, the scale at which target and skip
have the same size: the error g2_i |T_i / g2_i - S_i| that a relative residual leaves is then at most twice |T_i| for
skips of any size, where g2 = 1 would lose as many digits as the skip is larger than the target. Outputs that are zero
get g2 = 0. At the minimum width g2 is solved for as well: left diag(gamma) right - diag(1 / g2) T = -S is linear in
gamma and 1 / g2, and is again a Khatri-Rao system, with the features "output i alone" and "T_i" added. (The paper's
Eq. 3 with its missing term; it has a right-hand side already, so one feature less than burkholz2024:thm-2.2 would do.)

The norm outside cannot tell the branch from the skip, so the gain of the activation must be one: it needs an activation
that is a line on a half-axis. Inside, any activation serves.

Theory: burkholz2024:eq-3
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from onlynorm.errors import ValueRangeError
from onlynorm.features import Features, draw
from onlynorm.frozen.residual import ResidualBlock, identity_position
from onlynorm.modules.activations import Ray, known
from onlynorm.modules.convolution import embed
from onlynorm.modules.layers import TargetLayer, layer_options, per_output, weight_of
from onlynorm.reconstruction.constructions import wide
from onlynorm.reconstruction.constructions.base import Rebuilt, Recipe, construction
from onlynorm.reconstruction.costs import ALONE, Costs, Load
from onlynorm.reconstruction.ranges import Seen
from onlynorm.solvers import Solution, solve
from onlynorm.solvers.methods.minimum_width import minimum_features
from onlynorm.solvers.operator import Progress

FIELDS = (*wide.FIELDS, "skip")
DENSE = ("he_normal", "he_uniform", "uniform", "orthogonal")
"""Distributions a skip may share with its block; others leave outputs without a skip, or have a count of their own."""


def estimate(target: TargetLayer, recipe: Recipe, load: Load = ALONE) -> Costs:
    """What the residual construction of this layer takes, with a random skip unless a linear layer is square."""
    costs = wide.estimate(target, recipe, load)
    is_identity = len(target.shape) == 2 and target.shape[0] == target.shape[1]
    n_skip = 0 if is_identity else target.shape[0] * target.shape[1]
    stored = costs.stored + 8 * n_skip * (recipe.storage == "dense")
    # The block is made before its system is solved, and a plain layer of it at the end.
    solving = wide.solving_costs(wide.draw_groups(target, recipe), recipe)
    return dataclasses.replace(
        costs, n_frozen=costs.n_frozen + n_skip, multiplications=costs.multiplications + n_skip, stored=stored,
        memory=max(costs.memory, stored + solving.memory) + 24 * costs.equations,
    )  # fmt: skip


@construction("residual", estimate=estimate, fields=FIELDS)
def build(
    target: TargetLayer, layer: nn.Module, seen: Seen, recipe: Recipe, progress: Progress | None = None
) -> Rebuilt:
    """The block that computes the layer beside its frozen skip. Theory: burkholz2024:eq-3"""
    _need_fit(recipe)
    weight, bias = weight_of(layer)
    options = layer_options(layer)
    drawn = wide.draw_groups(target, recipe, device=weight.device)
    block = ResidualBlock(
        options, drawn, skips=_draw_skips(target, options, recipe), place=recipe.skip, activation=recipe.activation,
        norms=recipe.norms, storage=recipe.storage,
    ).to(weight.device)  # fmt: skip
    skip = block.skip_weight().to(weight.device)
    wanted = embed(weight, drawn[0].shape[2:])
    if recipe.skip == "inside":
        rest = wanted - skip
        solutions = wide.solve_groups(drawn, rest, wide.sharper(recipe, _growth(wanted, rest)), progress)
    elif recipe.width == "minimum" and drawn[0].n_features >= minimum_features(drawn[0].rows, drawn[0].cols):
        parts = zip(drawn, wanted.chunk(len(drawn)), skip.chunk(len(drawn)), strict=True)
        solutions = [_solve_with_scales(*part, recipe, progress) for part in parts]
    else:
        solutions = _solve_outside(drawn, wanted, skip, recipe, progress)
    made = wide.settle(block, solutions, bias, seen, recipe, unit_gain=recipe.skip == "outside")
    residual = wide.relative_error(block.to_plain(), weight)
    wide.need_reached(residual, recipe, target)
    return dataclasses.replace(made, residual=residual)


def _solve_outside(
    drawn: list[Features], wanted: Tensor, skip: Tensor, recipe: Recipe, progress: Progress | None
) -> list[Solution]:
    """Gamma for diag(1 / g2) T - S with g2 = |T_i| / |S_i| per output, and that g2."""
    sizes, skips = (torch.linalg.vector_norm(values.flatten(1), dim=1) for values in (wanted, skip))
    scale = sizes / skips
    is_on = per_output(scale, wanted) > 0
    rest = torch.where(is_on, wanted / torch.where(is_on, per_output(scale, wanted), 1.0) - skip, 0.0)
    sharper = wide.sharper(recipe, float(scale.max()) * _growth(wanted, rest))
    solutions = wide.solve_groups(drawn, rest, dataclasses.replace(sharper, width="maximum"), progress)
    parts = zip(solutions, scale.chunk(len(drawn)), strict=True)
    return [dataclasses.replace(solution, output_gamma=part) for solution, part in parts]


def _solve_with_scales(
    features: Features, wanted: Tensor, skip: Tensor, recipe: Recipe, progress: Progress | None
) -> Solution:
    """Gamma and g2 of one group: left diag(gamma) right - diag(1 / g2) T = -S over the outputs that are not zero."""
    T, S = features.as_matrix(wanted), features.as_matrix(skip)
    left, right = features.left().double(), features.right().double()
    sizes = torch.linalg.vector_norm(T, dim=1)
    on = sizes > 0
    if not bool(on.any()):
        reason = "every output of the target is zero and switched off"
        nothing = torch.zeros(features.n_features, dtype=sizes.dtype, device=sizes.device)
        return Solution(nothing, 0.0, "none", 0, 1.0, 0.0, 0, reason, wide.SMALLEST, output_gamma=sizes)
    # The added columns get the mean size of the features, so that the least norm weighs all unknowns alike.
    mean = (left.square().sum(0) * right.square().sum(1)).mean().sqrt()
    rows = mean * T[on] / sizes[on, None]
    scales = -torch.eye(len(rows), dtype=left.dtype, device=left.device)
    solution = solve(
        torch.cat([left[on], scales], 1), torch.cat([right, rows]), -S[on], tolerance=recipe.tolerance,
        progress=progress,
    )  # fmt: skip
    inverse = solution.gamma[features.n_features :] * mean / sizes[on]
    if not bool((inverse != 0).all()):
        raise ValueRangeError(
            "the minimum width outside the sum needs a nonzero scale for every output; got zeros. Draw with another "
            "seed, or leave width out."
        )
    output_gamma = torch.zeros_like(sizes)
    output_gamma[on] = 1.0 / inverse
    return dataclasses.replace(solution, gamma=solution.gamma[: features.n_features], output_gamma=output_gamma)


def _draw_skips(target: TargetLayer, options: dict[str, Any], recipe: Recipe) -> list[Features]:
    """The random weights of the skip, a row per output, group by group; nothing where the identity serves."""
    n_outputs, n_inputs = target.group_shape[:2]
    if n_outputs == n_inputs and identity_position(options) is not None:
        return []
    name = recipe.features if recipe.features in DENSE else "he_normal"
    layers = [f"{target.name}/skip {group}" for group in range(target.groups)]
    return [draw(name, (1, n_inputs), n_features=n_outputs, seed=recipe.seed, layer=layer) for layer in layers]


def _growth(wanted: Tensor, rest: Tensor) -> float:
    """How much larger than the target is what is solved for: so much sharper must its residual be."""
    size, larger = (float(torch.linalg.vector_norm(values)) for values in (wanted, rest))
    return larger / size if size > 0.0 else 1.0


def _need_fit(recipe: Recipe) -> None:
    """Raises where the norm outside the sum meets an activation or features it cannot serve."""
    if recipe.skip == "inside":
        return
    if not isinstance(known(recipe.activation), Ray):
        raise ValueRangeError(
            "skip='outside' needs an activation that is a line on a half-axis (none, ReLU, LeakyReLU, ELU, GELU, SiLU, "
            f"...), because the norm scales branch and skip alike; got {recipe.activation}. Use skip='inside'."
        )
    if recipe.features == "id_cond_minimal":
        raise ValueRangeError(
            "skip='outside' needs features that make a weight without a scale per output; got id_cond_minimal. Draw "
            "id_cond, or use skip='inside'."
        )
