"""The multilayer construction: one target layer from L = `n_layers` frozen layers in sequence, by their L norms.

The wide construction needs one layer with a feature per weight. Here the same number of features is distributed over
L - 1 hidden layers of about weights / (L - 1) features each. Layers are much narrower, but need more multiplications
per input, because the layers between them are dense. Widths are those of `solvers.multilayer.widths_for`; `excess` is
the number of gammas divided by equations + L, 1.1 by default.

`features` may be any random distribution. "orthogonal" needs the fewest steps, but drawing a Haar matrix of n features
takes n^3 operations; for few and wide layers "he_normal" is as good.

See also `frozen.sequence` (the layers) and `solvers.multilayer` (their gammas).

Theory: burkholz2024:thm-2.5, burkholz2024:thm-2.4

The norms of a multilayer block, from its gammas: every activation is in its linear range, and all constants cancel.

Layer i is one linear map of the input, R_i = W_i diag(gamma_(i-1)) R_(i-1), so its range follows from the input
directly and does not widen with depth. With u = R_i x, the output of the frozen layer is g u + c, where g is the gain
of the activation before it and c the sum of the constants:

    s, b, m, o       with phi(s gamma u + b) = m (s gamma u + b) + o for all features of the layer    (linearize)
    norm_i           scale s gamma / g, shift b - scale c
    norm_L           scale gamma_L / g, shift bias - scale c

Each norm removes the constants before it, so they do not grow from layer to layer.

Theory: burkholz2024:thm-2.4, burkholz2024:thm-2.5
"""

from __future__ import annotations

import dataclasses
import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from onlynorm.features import Features, draw
from onlynorm.frozen.pair import CHUNK_BYTES
from onlynorm.frozen.sequence import MultilayerBlock
from onlynorm.memory import release_free_memory
from onlynorm.modules.affine import affine, set_affine
from onlynorm.modules.layers import TargetLayer, layer_options, weight_of
from onlynorm.reconstruction.constructions.base import Rebuilt
from onlynorm.reconstruction.constructions.options import Multilayer, Settings
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
from onlynorm.reconstruction.linearize import linearize
from onlynorm.reconstruction.ranges import (
    CERTIFIED_MARGIN,
    FeatureRanges,
    LayerInputs,
    default_margin,
    extremes_of_rows,
    widen,
)
from onlynorm.solvers.choose import RATES
from onlynorm.solvers.multilayer.gammas import DEFAULT_EXCESS, DENSE, solve_multilayer, widths_for
from onlynorm.solvers.operator import OnStep
from onlynorm.solvers.prepare import need_tolerance
from onlynorm.solvers.spectrum import condition_number


@torch.no_grad()
def choose_norms(
    block: MultilayerBlock,
    gammas: list[Tensor],
    bias: Float[Tensor, " out"] | None,
    *,
    received: LayerInputs,
    window: float,
    margin: float | None = None,
) -> float:
    """Sets all norms of the block; returns the largest certified error of an activation, in the units of its input.

    The error `window`, relative to the widest range of each layer, is divided among the activations of a block.
    """
    last, error = block.n_layers - 1, 0.0
    carried = block.weight(0).double()
    constant = torch.zeros_like(carried[:, 0])
    gain = carried.new_ones(())
    for i, gamma in enumerate(gammas[:-1]):
        release_free_memory()
        ranges = _ranges(block, carried, received, margin)
        ends = torch.stack([gamma * ranges.low, gamma * ranges.high])
        low, high = ends.amin(0), ends.amax(0)
        tolerance = window * max(float((high - low).max()), 1e-300) / last
        line = linearize(block.activation, low, high, tolerance=tolerance, shared=True)
        scale = line.scale * gamma / gain
        mean, variance = gain * ranges.mean + constant, gain.square() * ranges.variance
        set_affine(block.norm(i), scale, line.shift - scale * constant, mean=mean, variance=variance)
        which = block.feature_slice(i)
        block.slope[which], block.offset[which] = line.slope, line.offset
        if not isinstance(block.activation, nn.Identity):
            ends = torch.stack([gain * ranges.low + constant, gain * ranges.high + constant])
            block.low[which], block.high[which] = ends.amin(0), ends.amax(0)
        # Constants are computed from the stored norm, so that its rounding errors cancel too.
        stored_scale, stored_shift = affine(block.norm(i))
        constant = block.mapped(i + 1, line.slope * (stored_scale * constant + stored_shift) + line.offset)
        carried = block.mapped(i + 1, gamma[:, None] * carried)
        gain = line.gain.flatten()[0]
        error = max(error, float(line.error_in_input.max()))
    scale = gammas[-1] / gain
    shift = -scale * constant
    set_affine(block.norm(last), scale, shift if bias is None else bias + shift)
    return error


def _ranges(
    block: MultilayerBlock, carried: Float[Tensor, "feat cols"], received: LayerInputs, margin: float | None
) -> FeatureRanges:
    """The ranges of a layer, on the batch with a margin or for the box, and its statistics."""
    parts: list[tuple[Tensor, ...]] = []
    of_samples: tuple[Tensor, Tensor] | None = None
    count = n_rows = 0
    for part in block.samples(block.padded(received.inputs.double())):
        values = block.project(part, carried, is_first=True)
        count += values.numel() // values.shape[1]
        parts.append(_statistics(values))
        if received.leave_one_out is not None:
            found = received.leave_one_out.extremes(*extremes_of_rows(values), first_row=n_rows)
            if of_samples is not None:
                found = torch.minimum(found[0], of_samples[0]), torch.maximum(found[1], of_samples[1])
            of_samples = found
        n_rows += len(values)
        del values  # before the next part is computed
        release_free_memory()  # the C library would keep it beside the next part, which is not of the same size
    if received.leave_one_out is not None and of_samples is not None:
        received.leave_one_out.update(*of_samples)
    del of_samples
    lows, highs, sums, squares = (torch.stack(column) for column in zip(*parts, strict=True))
    low, high = lows.amin(0), highs.amax(0)
    mean = sums.sum(0) / count
    variance = (squares.sum(0) / count - mean.square()).clamp(min=0.0)
    if received.box is None:
        return FeatureRanges(
            *widen(low, high, default_margin(block.activation) if margin is None else margin), mean, variance
        )
    bounds = block.padded(received.box.low.double()), block.padded(received.box.high.double())
    centre = block.project((bounds[0] + bounds[1]) / 2, carried, is_first=True).movedim(1, 0).flatten(1)
    radius = block.project((bounds[1] - bounds[0]) / 2, carried.abs(), is_first=True).movedim(1, 0).flatten(1)
    low, high = (centre - radius).amin(1), (centre + radius).amax(1)
    return FeatureRanges(*widen(low, high, CERTIFIED_MARGIN if margin is None else margin), mean, variance)


def _statistics(values: Float[Tensor, "samples feat ..."]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Lowest and highest value of every feature, its sum and its sum of squares, without copies of the values."""
    step = max(1, MEASURED_BYTES // max(1, values[:, 0].numel() * values.element_size()))
    # Allocated first: small tensors between large ones would keep the memory of those from being used again.
    low, high, sums, squares = values.new_empty(4, values.shape[1])
    for start in range(0, values.shape[1], step):
        which = slice(start, start + step)
        lows, highs = extremes_of_rows(values[:, which])
        low[which], high[which] = lows.amin(0), highs.amax(0)
        flat = values[:, which].movedim(1, 0).flatten(1)
        sums[which] = flat.sum(1)
        squares[which] = flat.square().sum(1)
    return low, high, sums, squares


MEASURED_BYTES = 2**22
"""Hidden values that are measured at a time."""
STEPS = 20
"""Steps of a solve, and below, inner iterations divided by the initial condition number: medians measured at 1,024 to
9,216 equations and 3 to 10 layers; the maximum was three times as large."""
ITERATIONS = 80
STEP_SECONDS = 2e-3
"""Python overhead per step, and below, per step without the matrix of the system."""
FREE_STEP_SECONDS = 8e-3


def estimate(target: TargetLayer, construction: Multilayer, settings: Settings, load: Load = ALONE) -> Costs:
    """The cost of the multilayer construction of this layer; seconds are rough estimates from measurements."""
    drawn = draw_layers(target, construction, settings)
    costs = add_costs(_group_costs(layers, settings) for layers in drawn)
    groups, widths = len(drawn), [one.n_features * len(drawn) for one in drawn[0]]
    inp = drawn[0][0].cols
    is_stored = settings.storage == "dense"
    stored = VECTORS * sum(widths) + 8 * costs.n_frozen * is_stored
    largest = max(8 * one.n_features * one.cols * groups for one in drawn[0])
    seconds, calibrating = costs.seconds + LAYER_SECONDS, 0
    for width in widths[:-1]:
        hidden = hidden_costs(
            inp, width, groups, load, axes=len(target.shape) - 2, n_kernel=math.prod(target.shape[2:]),
            n_channels=target.shape[1] * groups,
        )  # fmt: skip
        # Slices of the hidden values, the two lowest and highest of every feature, and the linear maps from the inputs
        # to a layer and to the next one.
        values = 8 * load.n_samples * load.n_positions * width
        working = hidden.memory + min(3 * MEASURED_BYTES, values) + 16 * load.n_samples * width + 24 * width * inp
        if len(target.shape) > 2 and values <= CHUNK_BYTES:
            working -= values  # `hidden` has a copy of the values of a convolution
        seconds, calibrating = seconds + hidden.seconds, max(calibrating, working)
    for layers in drawn:
        seconds += sum(draw_seconds(one, n_left=0, n_right=1 if is_stored else 4) for one in layers)
    # The frozen weights of all groups are concatenated; the gammas are solved for one group at a time. Weights that are
    # not stored are drawn for all solves together, and then layer by layer.
    drawing = draw_bytes(largest // 8) + largest * (groups > 1)
    solving, drawn_again = costs.memory, 0
    if not is_stored:
        solving, drawing = 8 * costs.n_frozen + solving, 8 * costs.n_frozen + drawing
        drawn_again = 2 * largest + draw_bytes(largest // 8)
    memory = stored + max(solving, drawing, calibrating + drawn_again)
    return dataclasses.replace(costs, memory=memory + SCRATCH * sum(widths), stored=stored, seconds=seconds)


def draw_layers(
    target: TargetLayer, construction: Multilayer, settings: Settings, *, device: torch.device | str = "cpu"
) -> list[list[Features]]:
    """The frozen layers of every group, first layer first; their weights are not drawn yet."""
    excess = DEFAULT_EXCESS if construction.excess is None else construction.excess
    widths = widths_for(target.group_shape, n_layers=construction.n_layers, excess=excess)
    shapes = [(1, *target.group_shape[1:]), *((1, width) for width in widths)]
    drawn = []
    for group in range(target.groups):
        name = f"{target.name}/group {group}" if target.groups > 1 else target.name
        drawn.append([
            draw(
                construction.features, shape, n_features=width, seed=settings.seed, layer=f"{name}/source {i}",
                density=construction.density, device=device,
            )
            for i, (shape, width) in enumerate(zip(shapes, (*widths, target.group_shape[0]), strict=True), 1)
        ])  # fmt: skip
    return drawn


def build(
    target: TargetLayer,
    layer: nn.Module,
    received: LayerInputs,
    construction: Multilayer,
    settings: Settings,
    on_step: OnStep | None = None,
) -> Rebuilt:
    """The block of the layer from frozen layers in sequence. Theory: burkholz2024:thm-2.5"""
    weight, bias = weight_of(layer)
    block = MultilayerBlock(
        layer_options(layer), draw_layers(target, construction, settings, device=weight.device),
        activation=construction.activation, norms=construction.norms, storage=settings.storage,
    ).to(weight.device)  # fmt: skip
    release_free_memory()
    frozen = zip(*(block.weight(i).chunk(target.groups) for i in range(block.n_layers)), strict=True)
    solutions = [
        solve_multilayer(layers, part.flatten(1), tolerance=settings.tolerance, on_step=on_step)
        for layers, part in zip(frozen, weight.chunk(target.groups), strict=True)
    ]
    gammas = [torch.cat(parts) for parts in zip(*(solution.gammas for solution in solutions), strict=True)]
    del frozen  # zip holds the last weights
    release_free_memory()
    error = choose_norms(block, gammas, bias, received=received, window=settings.window, margin=settings.ranges.margin)
    worst = max(solutions, key=lambda solution: solution.residual)
    seconds = sum(solution.seconds for solution in solutions)
    return Rebuilt(block, worst.method, worst.residual, error, seconds, worst.shortfall)


def _group_costs(layers: list[Features], settings: Settings) -> Costs:
    out, inp = layers[-1].n_features, layers[0].cols
    widths = [one.n_features for one in layers]
    equations, n_gammas = out * inp, sum(widths)
    n_frozen = sum(one.n_features * one.cols for one in layers)
    wanted = need_tolerance(settings.tolerance)
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
        seconds = flops / RATES[torch.float64] + inner + STEPS * FREE_STEP_SECONDS
    seconds += STEPS * STEP_SECONDS
    missing = equations + len(layers) - 1 - n_gammas
    note = f"{missing} features too few: the closest product" if missing > 0 else ""
    return Costs(
        equations, n_gammas - out, 2 * n_gammas, n_frozen, memory, condition,
        math.sqrt(missing / equations) if missing > 0 else wanted, seconds, n_frozen, method, note,
    )  # fmt: skip
