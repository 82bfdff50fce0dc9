"""The deep construction: one target layer from ceil(inp / k) narrow frozen layers with skips, by their norms.

The inputs are cut into slices of k = `narrow`, and every slice enters at a layer of its own; a layer has
out * k * excess features. k = inp is a wide construction without activation; where a layer has fewer inputs than k, all
of them are one slice. Inputs and outputs may differ in number. In a convolution slices are channels.

`features` may be any random distribution. "orthogonal" is recommended: by the law of `deep_law` it loses half the
digits that "he_normal" loses, the default of all recipes. Without `excess` the smallest is taken for which that law
promises an error of 1e-11, so that either comes out well below 1e-9.

Read on in deep_block (the layers), deep_slices (their gammas), deep_norms (their norms), deep_law (what to expect).

Theory: giannou2023:thm-2, giannou2023:thm-9, giannou2023:remark-2, giannou2023:remark-9
"""

from __future__ import annotations

from torch import nn

from onlynorm.errors import ConversionError, ToleranceError, ValueRangeError
from onlynorm.features import Features, draw
from onlynorm.features.registry import STRUCTURED
from onlynorm.reconstruction.blocks import layer_options
from onlynorm.reconstruction.costs import ALONE, LAYER_SECONDS, SCRATCH, VECTORS, Costs, Load, draw_bytes, hidden_costs
from onlynorm.reconstruction.deep_block import DeepBlock, needs_input_norm
from onlynorm.reconstruction.deep_law import Law
from onlynorm.reconstruction.deep_norms import choose_norms
from onlynorm.reconstruction.deep_slices import DENSE, SIGN_ROUNDS, draw_layers, solve_slices
from onlynorm.reconstruction.ranges import Seen
from onlynorm.reconstruction.recipe import Rebuilt, Recipe, construction
from onlynorm.reconstruction.target import TargetLayer, weight_of
from onlynorm.solvers import choose
from onlynorm.solvers.krylov import Progress
from onlynorm.solvers.memory import memory_budget

AIM = 1e-10
"""Relative error that counts as exact where the recipe names none."""
SOLVE_SECONDS = 1.5e-3
"""Time of a solve whose system is small."""
HAAR_SECONDS = 2e-9
"""Time per n^3 of an orthogonal n x n matrix, which is drawn without LAPACK: 2 s for n = 1,024 on one core."""


def estimate(target: TargetLayer, recipe: Recipe, load: Load = ALONE) -> Costs:
    """What the deep construction of this layer takes; condition and error as `deep_law` predicts them."""
    layers = draw_target(target, recipe)
    law = law_of(target, recipe)
    first, width, n_layers = layers[0], layers[0].n_features, len(layers)
    n_frozen = sum(width * (one.rows + one.cols) for one in layers)
    n_inputs = target.shape[1] if needs_input_norm(recipe.activation, n_layers) else 0
    method = "cholesky" if first.equations <= DENSE else "auto"
    choice = choose(first.rows, first.cols, width, tolerance=AIM, memory=memory_budget(), method=method)
    seconds = n_layers * (1 + SIGN_ROUNDS) * (choice.option.seconds + SOLVE_SECONDS)
    if recipe.features == "orthogonal":
        seconds += (n_layers - 1) * HAAR_SECONDS * width**3
    error = law.error(first.excess)
    is_stored = recipe.storage == "dense"
    stored = VECTORS * n_layers * width + 8 * n_frozen * is_stored
    largest = 8 * width * (width if n_layers > 1 else first.rows + first.cols)
    # What a layer makes of all inputs, as a matrix, and the inputs' own; products of frozen layers on the way.
    maps = 8 * (3 * width * law.n_columns + law.n_columns**2) + 2 * largest
    solving = choice.option.memory + 16 * width * (first.rows + first.cols) + 8 * width * target.shape[0]
    values = 8 * load.n_samples * load.n_positions * width
    unfolded = 8 * load.n_samples * load.n_positions * law.n_columns if len(target.shape) > 2 else 0
    calibrating = 7 * values + unfolded + 9 * load.n_samples * load.n_inputs
    memory = stored + maps + max(solving, calibrating, largest + draw_bytes(largest // 8)) + SCRATCH * n_layers * width
    # Ranges from the map of all inputs to a layer, then statistics layer by layer.
    for cols, times in ((law.n_columns, n_layers - 1), (width + first.cols, n_layers)):
        hidden = hidden_costs(cols, width, 1, load, axes=len(target.shape) - 2, n_kernel=1, n_channels=1)
        seconds += times * hidden.seconds
    return Costs(
        target.n_weights, n_layers * width, 2 * n_layers * width + 2 * n_inputs, n_frozen, memory,
        law.condition(first.excess), error, seconds + LAYER_SECONDS, n_frozen, choice.method,
        "" if error <= AIM else law.cure(first.excess, error=AIM), stored,
    )  # fmt: skip


def law_of(target: TargetLayer, recipe: Recipe) -> Law:
    """The law for this layer; layers that the construction cannot do are refused here."""
    if target.groups > 1:
        raise ConversionError(
            f"the deep construction needs layers of one group; got {target.groups} at {target.name!r}, whose slices "
            "would be channels of different groups. Rebuild it with construction='wide', 'low_rank' or 'residual'."
        )
    if recipe.features in STRUCTURED:
        raise ValueRangeError(
            f"the deep construction needs random features; got {recipe.features!r}, which fix their own number and "
            "form no square layer. Use features='orthogonal'."
        )
    if recipe.narrow < 1 or recipe.narrow != int(recipe.narrow):
        raise ValueRangeError(
            f"narrow needs a positive whole number, the inputs to a slice; got {recipe.narrow}. Try narrow=1."
        )
    narrow = min(int(recipe.narrow), target.shape[1])
    return Law(target.shape, narrow, is_orthogonal=recipe.features == "orthogonal")


def draw_target(target: TargetLayer, recipe: Recipe) -> list[Features]:
    """The frozen layers for a target layer; nothing is computed yet."""
    law = law_of(target, recipe)
    excess = law.choose_excess() if recipe.excess is None else recipe.excess
    slice_shape = (target.shape[0], law.narrow, *target.shape[2:])
    n_features = draw(recipe.features, slice_shape, excess=excess, density=recipe.density).n_features
    return draw_layers(
        recipe.features, target.shape, narrow=law.narrow, n_features=n_features, seed=recipe.seed, layer=target.name,
        density=recipe.density,
    )  # fmt: skip


@construction("deep", estimate=estimate, fields=("narrow",))
def build(
    target: TargetLayer, layer: nn.Module, seen: Seen, recipe: Recipe, progress: Progress | None = None
) -> Rebuilt:
    """The block that computes the layer from narrow frozen layers with skips. Theory: giannou2023:thm-2"""
    weight, bias = weight_of(layer)
    layers = draw_target(target, recipe)
    block = DeepBlock(
        layer_options(layer), layers, activation=recipe.activation, norms=recipe.norms, storage=recipe.storage
    ).to(weight.device)
    found = solve_slices(layers, weight, weights=block.weights, progress=progress)
    short = ""
    if not found.residual <= (AIM if recipe.tolerance is None else recipe.tolerance):
        cure = law_of(target, recipe).cure(layers[0].excess, error=AIM)
        short = f"relative error {found.residual:.1e} at condition {found.condition:.1e}; {cure}"
    if short and recipe.tolerance is not None:
        raise ToleranceError(
            f"the deep construction needs a relative error of {recipe.tolerance:.0e} at {target.name!r}; got {short}. "
            "Or leave the tolerance out to take the best there is."
        )
    error = choose_norms(block, found.gammas, bias, seen=seen, window=recipe.window, margin=recipe.margin)
    return Rebuilt(block, found.method, found.residual, error, found.seconds, short)
