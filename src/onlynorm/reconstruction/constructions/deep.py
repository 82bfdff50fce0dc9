"""The deep construction: one target layer from ceil(inp / k) narrow frozen layers with skips, by their norms.

The inputs are cut into slices of k = `narrow`, and every slice enters at a layer of its own; a layer has
out * k * excess features. k = inp is a wide construction without activation; where a layer has fewer inputs than k, all
of them are one slice. Inputs and outputs may differ in number. In a convolution slices are channels.

`features` may be any random distribution. "orthogonal" is recommended: by the law of `deep_law` it loses half the
digits that "he_normal" loses, the default of all recipes. Without `excess` the smallest is taken for which that law
promises an error of 1e-11, so that either comes out well below 1e-9.

Read on in deep_block (the layers), deep_slices (their gammas), deep_norms (their norms), deep_law (what to expect).

Theory: giannou2023:thm-2, giannou2023:thm-9, giannou2023:remark-2, giannou2023:remark-9

How exact narrow layers will be, from their shapes alone, and the table that the law was read from.

    log10 condition = rate (L - 1),    rate = c (r - 1)^-0.6 (1 - 1 / excess)^-0.5
    error           = eps (2 sqrt(equations) + 0.3 condition)

L is the number of layers, r = k * excess the features of a layer per output of the target, c = 0.088 for orthogonal
frozen weights and 0.17 for others. It is a fit, not a theorem. Its form says that no layer may have one solution only
(excess 1), nor be as narrow as the target (r = 1), and that more of either helps. Exponents and constants were read
from targets of 16 and 32 outputs with 24 slices of 1, 2, 3, 4 and 8 inputs at excess 1.1 to 6, two seeds each, where
the rate measured was 0.5 to 1.4 times this one. Bad errors lay between 0.02 and 2 times eps * condition, on average at
0.3. So expect to lose 0.5 to 1.4 times as many digits as predicted; near excess 1.25 seeds differ most.

Theory: giannou2023:thm-2

The norms of a deep block, from its gammas: every activation on its linear piece, every constant cancelled.

    s, b_i, m, c     with phi(s u + b_i) = m (s u + b_i) + c for what layer i carries, m s = g    (linearize)
    norm_i           scale s gamma_i / g (the last one gamma_L / g), shift b_i minus what earlier constants add
    input norm       scale g, where the activation has another gain than one

All layers share the gain g, so that layers and skips stay in proportion. The last shift is the smallest that the final
frozen layer turns into the bias.

Theory: giannou2023:thm-9, burkholz2024:thm-2.4
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from onlynorm.errors import ConversionError, ToleranceError, ValueRangeError
from onlynorm.features import Features, draw
from onlynorm.features.distributions import STRUCTURED
from onlynorm.frozen.sequence import DeepBlock, linear_maps, needs_input_norm
from onlynorm.memory import memory_budget, release_free_memory
from onlynorm.modules.affine import affine, set_affine
from onlynorm.modules.layers import TargetLayer, layer_options, weight_of
from onlynorm.reconstruction.constructions.base import Rebuilt, Recipe, construction
from onlynorm.reconstruction.constructions.slices import DENSE, SIGN_ROUNDS, draw_layers, solve_slices
from onlynorm.reconstruction.costs import (
    ALONE,
    EPS,
    LAYER_SECONDS,
    SCRATCH,
    VECTORS,
    Costs,
    Load,
    draw_bytes,
    hidden_costs,
)
from onlynorm.reconstruction.linearize import Window, linearize
from onlynorm.reconstruction.ranges import Seen, default_margin, extremes_of_rows, widen
from onlynorm.solvers import choose
from onlynorm.solvers.operator import Progress

if TYPE_CHECKING:
    pass

ORTHOGONAL_RATE = 0.088
RANDOM_RATE = 0.17
EXCESSES = (1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0)
"""What the default is chosen from."""
WANTED = 1e-11
"""Predicted error that the default excess aims at: a hundredth of 1e-9, because the law is a fit."""


@dataclass(frozen=True)
class Law:
    """The law for a target of `shape` (out, inp, *kernel) cut into slices of `narrow` inputs."""

    shape: tuple[int, ...]
    narrow: int
    is_orthogonal: bool = True

    @property
    def n_layers(self) -> int:
        """Slices of the input, each with a layer of its own."""
        return -(-self.shape[1] // self.narrow)

    @property
    def n_columns(self) -> int:
        """Input numbers of the target, kernel positions included."""
        return math.prod(self.shape[1:])

    def condition(self, excess: float) -> float:
        """The predicted condition number of what the later layers pass on."""
        if self.n_layers == 1:
            return 1.0
        if not excess > 1.0:
            return math.inf
        per_output = self.narrow * math.prod(self.shape[2:]) * excess
        rate = ORTHOGONAL_RATE if self.is_orthogonal else RANDOM_RATE
        rate *= (per_output - 1.0) ** -0.6 * (1.0 - 1.0 / excess) ** -0.5
        return float(10.0 ** min(rate * (self.n_layers - 1), 300.0))

    def error(self, excess: float) -> float:
        """The predicted relative error of the effective weight, at most one."""
        if excess < 1.0:
            return math.sqrt(1.0 - excess)
        return min(1.0, EPS * (2.0 * math.sqrt(math.prod(self.shape)) + 0.3 * self.condition(excess)))

    def choose_excess(self, *, error: float = WANTED) -> float:
        """The smallest of `EXCESSES` whose predicted error is within `error`, the largest if none is."""
        return next((excess for excess in EXCESSES if self.error(excess) <= error), EXCESSES[-1])

    def choose_narrow(self, excess: float, *, error: float = WANTED) -> int:
        """The smallest number of inputs to a slice whose predicted error is within `error`; all inputs are one."""
        for narrow in range(self.narrow, self.shape[1]):
            if replace(self, narrow=narrow).error(excess) <= error:
                return narrow
        return self.shape[1]

    def cure(self, excess: float, *, error: float) -> str:
        """What to change where the error is larger than wanted, in words."""
        ways = [f"excess={more:g}" for more in EXCESSES if more > excess and self.error(more) <= error][:1]
        if excess >= 1.0 and self.narrow < self.shape[1]:
            ways.append(f"narrow={max(self.narrow + 1, self.choose_narrow(excess, error=error))}")
        if not self.is_orthogonal and replace(self, is_orthogonal=True).error(excess) <= error:
            ways.append("features='orthogonal'")
        return f"cure: {', or '.join(ways or [f'narrow={self.shape[1]} and excess={EXCESSES[0]}'])}"


CERTIFIED = 1e-9
"""Share of the width that is added to certified ranges, for the rounding of the layers."""


@torch.no_grad()
def choose_norms(
    block: DeepBlock,
    gammas: Float[Tensor, "layers feat"],
    bias: Float[Tensor, " out"] | None,
    *,
    seen: Seen,
    window: float,
    margin: float | None = None,
) -> float:
    """Sets all norms of the block; returns the certified error of its worst activation, in the units it carries.

    The activations of a block share the error `window`, which is relative to the widest range.
    """
    scales, shifts, gain, error = gammas.clone(), torch.zeros_like(gammas), gammas.new_ones(()), 0.0
    if len(gammas) > 1:
        line = _place(block, *inner_ranges(block, gammas, seen, margin=margin), window)
        gain, error = line.gain.flatten()[0], float(line.error_in_input.max())
        scales[:-1] *= line.scale.reshape(gammas[:-1].shape)
        shifts[:-1] = line.shift.reshape(gammas[:-1].shape)
    if bias is not None:
        shifts[-1] = torch.linalg.pinv(block.weights("left", 0)) @ bias
    inputs = seen.inputs.double()
    if block.input_norm is not None:
        flat = block.padded(inputs).movedim(1, 0).flatten(1)
        factor = gain.expand(len(flat))
        set_affine(
            block.input_norm, factor, torch.zeros_like(factor), mean=flat.mean(1), variance=flat.var(1, correction=0)
        )
    release_free_memory()  # what the ranges took, in pieces of another size, would else stay resident
    _set_layers(block, scales / gain, shifts, block.as_batch(inputs))
    return error


def _place(block: DeepBlock, low: Tensor, high: Tensor, window: float) -> Window:
    """The windows of all inner layers, with one gain, written into the block's buffers."""
    tolerance = window * max(float((high - low).max()), 1e-300) / len(low)
    line = linearize(block.activation, low.flatten(), high.flatten(), tolerance=tolerance, shared=True)
    block.slope[:-1] = line.slope.reshape(low.shape)
    block.offset[:-1] = line.offset.reshape(low.shape)
    if not isinstance(block.activation, nn.Identity):
        block.low[:-1], block.high[:-1] = (
            line.scale.reshape(low.shape) * end + line.shift.reshape(low.shape) for end in (low, high)
        )
    return line


def _set_layers(block: DeepBlock, scales: Tensor, shifts: Tensor, batch: Tensor) -> None:
    """Norm by norm: statistics from the batch, run through what is built; constants from the norms as stored.

    Stored norms carry rounding; taken from them, the constants cancel to the last digits.
    """
    values: Tensor | None = None
    constant = torch.zeros_like(shifts[0])
    for i, (scale, shift) in enumerate(zip(scales, shifts, strict=True)):
        hidden = block.hidden(i, batch, values)
        flat = hidden.reshape(-1, block.width)
        if i:
            constant = block.weights("left", i) @ constant
        mean, variance = flat.mean(0), flat.var(0, correction=0)
        set_affine(block.norm(i), scale, shift - scale * constant, mean=mean, variance=variance)
        stored_scale, stored_shift = affine(block.norm(i))
        constant = block.slope[i] * (stored_scale * constant + stored_shift) + block.offset[i]
        values = block.activated(i, block.normalised(i, hidden))


def inner_ranges(
    block: DeepBlock, gammas: Float[Tensor, "layers feat"], seen: Seen, *, margin: float | None = None
) -> tuple[Float[Tensor, "inner feat"], Float[Tensor, "inner feat"]]:
    """Lowest and highest value that each layer but the last carries: on the batch with a margin, or for a whole box.

    Layers are linear on their windows, so each is one linear map of the input: intervals do not widen with depth.
    """
    if margin is None:
        margin = default_margin(block.activation)
    basis = torch.eye(sum(one.cols for one in block.layers)).to(gammas)
    lows, highs = [], []
    for made in itertools.islice(linear_maps(block.weights, gammas, basis), len(gammas) - 1):
        if seen.box is None:
            values = block.project(block.padded(seen.inputs.double()), made)
            lows_of_rows, highs_of_rows = extremes_of_rows(values.movedim(-1, 1))
            if seen.held_back is not None:
                seen.held_back.note(*seen.held_back.extremes(lows_of_rows, highs_of_rows))
            low, high = lows_of_rows.amin(0), highs_of_rows.amax(0)
        else:
            bounds = block.padded(seen.box.low.double()), block.padded(seen.box.high.double())
            centre = block.project((bounds[0] + bounds[1]) / 2, made)
            radius = block.project((bounds[1] - bounds[0]) / 2, made.abs())
            low, high = (centre - radius).flatten(0, -2).amin(0), (centre + radius).flatten(0, -2).amax(0)
        low, high = widen(low, high, margin if seen.box is None else CERTIFIED)
        lows.append(low)
        highs.append(high)
    return torch.stack(lows), torch.stack(highs)


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
