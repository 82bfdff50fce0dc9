"""The multilayer construction: one target layer from L = `n_layers` frozen layers in a row, by their L norms.

A wide construction needs one layer with a feature per weight; here the same number of features is spread over L - 1
hidden layers of about weights / (L - 1) features each: far narrower layers, at more multiplications per input, because
the layers between them are dense (`tradeoff` shows both). Widths follow `solvers.multilayer.widths_for`; `excess` is
the number of gammas over equations + L, 1.1 by default.

`features` may be any random distribution. "orthogonal" needs the fewest steps, but a Haar matrix of n features takes
n^3 operations to draw; for few and wide layers "he_normal" is as good.

Read on in multilayer_block (the layers), multilayer_norms (their norms), solvers.multilayer (their gammas).

Theory: burkholz2024:thm-2.5, burkholz2024:thm-2.4
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import nn

from onlynorm.errors import ValueRangeError
from onlynorm.features import Features, draw
from onlynorm.features.registry import STRUCTURED
from onlynorm.reconstruction.blocks import CHUNK_BYTES, layer_options
from onlynorm.reconstruction.costs import (
    ALONE,
    LAYER_SECONDS,
    SCRATCH,
    VECTORS,
    Costs,
    Load,
    add_costs,
    draw_bytes,
    draw_seconds,
    hidden_costs,
)
from onlynorm.reconstruction.multilayer_block import MultilayerBlock
from onlynorm.reconstruction.multilayer_norms import choose_norms
from onlynorm.reconstruction.ranges import Seen
from onlynorm.reconstruction.recipe import Rebuilt, Recipe, construction
from onlynorm.reconstruction.target import TargetLayer, weight_of
from onlynorm.solvers.choose import RATES
from onlynorm.solvers.krylov import Progress
from onlynorm.solvers.multilayer import DEFAULT_EXCESS, DENSE, solve_multilayer, widths_for
from onlynorm.solvers.needs import need_tolerance
from onlynorm.solvers.spectrum import condition_number

STEPS = 20
"""Steps of a solve, and below, inner iterations over the condition number at the start: medians of what was measured at
1,024 to 9,216 equations and 3 to 10 layers, where the worst took three times as many."""
ITERATIONS = 80
STEP_SECONDS = 2e-3
"""Python's own time for a step."""


def estimate(target: TargetLayer, recipe: Recipe, load: Load = ALONE) -> Costs:
    """What the multilayer construction of this layer takes; steps and seconds are rough, from what was measured."""
    drawn = draw_layers(target, recipe)
    costs = add_costs(_group_costs(layers, recipe) for layers in drawn)
    groups, widths = len(drawn), [one.n_features * len(drawn) for one in drawn[0]]
    inp = drawn[0][0].cols
    is_stored = recipe.storage == "dense"
    stored = VECTORS * sum(widths) + 8 * costs.n_frozen * is_stored
    largest = max(8 * one.n_features * one.cols * groups for one in drawn[0])
    seconds, calibrating = costs.seconds + LAYER_SECONDS, 0
    for width in widths[:-1]:
        hidden = hidden_costs(
            inp, width, groups, load, axes=len(target.shape) - 2, n_kernel=math.prod(target.shape[2:]),
            n_channels=target.shape[1] * groups,
        )  # fmt: skip
        values = min(CHUNK_BYTES, 8 * load.n_samples * load.n_positions * width)
        # What a layer carries of the inputs, and the same one layer on.
        seconds, calibrating = seconds + hidden.seconds, max(calibrating, hidden.memory + values + 24 * width * inp)
    for layers in drawn:
        seconds += sum(draw_seconds(one, n_left=0, n_right=1 if is_stored else 4) for one in layers)
    # The frozen weights of all groups are joined as they are drawn, and solved for one group at a time.
    memory = stored + max(costs.memory, calibrating + (1 - is_stored) * 2 * largest, largest + draw_bytes(largest // 8))
    return dataclasses.replace(costs, memory=memory + SCRATCH * sum(widths), stored=stored, seconds=seconds)


def draw_layers(target: TargetLayer, recipe: Recipe, *, device: torch.device | str = "cpu") -> list[list[Features]]:
    """The frozen layers of every group, from the input on; nothing is computed yet."""
    if recipe.features in STRUCTURED:
        raise ValueRangeError(
            f"the multilayer construction needs random features; got {recipe.features!r}, which fix their own number. "
            "Use features='orthogonal' or 'he_normal'."
        )
    excess = DEFAULT_EXCESS if recipe.excess is None else recipe.excess
    widths = widths_for(target.group_shape, n_layers=recipe.n_layers, excess=excess)
    shapes = [(1, *target.group_shape[1:]), *((1, width) for width in widths)]
    drawn = []
    for group in range(target.groups):
        name = f"{target.name}/group {group}" if target.groups > 1 else target.name
        drawn.append([
            draw(
                recipe.features, shape, n_features=width, seed=recipe.seed, layer=f"{name}/source {i}",
                density=recipe.density, device=device,
            )
            for i, (shape, width) in enumerate(zip(shapes, (*widths, target.group_shape[0]), strict=True), 1)
        ])  # fmt: skip
    return drawn


@construction("multilayer", estimate=estimate, fields=("n_layers",))
def build(
    target: TargetLayer, layer: nn.Module, seen: Seen, recipe: Recipe, progress: Progress | None = None
) -> Rebuilt:
    """The block that computes the layer from frozen layers in a row. Theory: burkholz2024:thm-2.5"""
    weight, bias = weight_of(layer)
    block = MultilayerBlock(
        layer_options(layer), draw_layers(target, recipe, device=weight.device), activation=recipe.activation,
        norms=recipe.norms, storage=recipe.storage,
    ).to(weight.device)  # fmt: skip
    frozen = zip(*(block.weight(i).chunk(target.groups) for i in range(block.n_layers)), strict=True)
    solutions = [
        solve_multilayer(layers, part.flatten(1), tolerance=recipe.tolerance, progress=progress)
        for layers, part in zip(frozen, weight.chunk(target.groups), strict=True)
    ]
    gammas = [torch.cat(parts) for parts in zip(*(solution.gammas for solution in solutions), strict=True)]
    error = choose_norms(block, gammas, bias, seen=seen, window=recipe.window, margin=recipe.margin)
    worst = max(solutions, key=lambda solution: solution.residual)
    seconds = sum(solution.seconds for solution in solutions)
    return Rebuilt(block, worst.method, worst.residual, error, seconds, worst.shortfall)


def _group_costs(layers: list[Features], recipe: Recipe) -> Costs:
    out, inp = layers[-1].n_features, layers[0].cols
    widths = [one.n_features for one in layers]
    equations, n_gammas = out * inp, sum(widths)
    n_frozen = sum(one.n_features * one.cols for one in layers)
    wanted = need_tolerance(recipe.tolerance)
    condition = condition_number(equations, n_gammas)
    # The factors of the Jacobian, and all frozen matrices once per step.
    flops, factors = 4.0 * STEPS * (out + inp) * n_frozen, n_gammas * (out + inp)
    if equations <= DENSE:
        method, memory = "dense", 24 * equations**2 + 16 * factors
        flops += STEPS * equations**2 * (2.0 * n_gammas + equations / 3.0)
        seconds = flops / RATES[torch.float64]
    else:
        method, memory = "matrix-free", 52 * factors + 64 * equations
        inner = 4.0 * ITERATIONS * condition * equations * n_gammas / RATES[torch.float32]
        seconds = flops / RATES[torch.float64] + inner
    seconds += STEPS * STEP_SECONDS
    missing = equations + len(layers) - 1 - n_gammas
    note = f"{missing} features too few: the closest product" if missing > 0 else ""
    return Costs(
        equations, n_gammas - out, 2 * n_gammas, n_frozen, memory, condition,
        math.sqrt(missing / equations) if missing > 0 else wanted, seconds, n_frozen, method, note,
    )  # fmt: skip
