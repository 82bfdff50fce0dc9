"""The deep construction: one target layer from ceil(inp / k) narrow frozen layers with skip connections.

The inputs are split into slices of k = `inputs_per_slice`, and each slice enters at a separate layer with
out * k * excess features. k = inp is a wide construction without activation; a layer with fewer inputs than k has one
slice. The numbers of inputs and outputs may differ. In a convolution the slices are channels.

`features` may be any random distribution. "orthogonal" is recommended: by `SliceLaw` it loses half as many digits as
"he_normal", the default of all constructions. By default `excess` is the smallest for which the law predicts an error
of 1e-11, so that the error is well below 1e-9 with either.

See also `frozen.sequence` (the layers) and `slices` (their gammas).

Theory: giannou2023:thm-2, giannou2023:thm-9, giannou2023:remark-2, giannou2023:remark-9

The predicted accuracy of narrow layers, from their shapes:

    log10 condition = rate (L - 1),    rate = c (r - 1)^-0.6 (1 - 1 / excess)^-0.5
    error           = eps (2 sqrt(equations) + 0.3 condition)

L is the number of layers, r = k * excess the features of a layer per output of the target, c = 0.088 for orthogonal
frozen weights and 0.17 for others. It is a fit, not a theorem. It diverges for layers with a unique solution (excess 1)
and for layers as narrow as the target (r = 1). Exponents and constants were fitted to targets of 16 and 32 outputs with
24 slices of 1, 2, 3, 4 and 8 inputs at excess 1.1 to 6, two seeds each, where the measured rate was 0.5 to 1.4 times
the fit. Large errors were between 0.02 and 2 times eps * condition, 0.3 on average. So the number of lost digits is 0.5
to 1.4 times the prediction; it varies most with the seed near excess 1.25.

Theory: giannou2023:thm-2

The norms of a deep block, from its gammas: every activation is in its linear range, and all constants cancel.

    s, b_i, m, c     with phi(s u + b_i) = m (s u + b_i) + c for the values u of layer i, m s = g    (linearize)
    norm_i           scale s gamma_i / g (the last one gamma_L / g), shift b_i minus the sum of earlier constants
    input norm       scale g, if the gain of the activation is not one

All layers have the same gain g, so that layers and skips have the same scale. The last shift is the smallest one that
the final frozen layer maps to the bias.

Theory: giannou2023:thm-9, burkholz2024:thm-2.4
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from onlynorm.errors import ConversionError, ToleranceError
from onlynorm.features import Features, draw
from onlynorm.frozen.sequence import DeepBlock, linear_maps, needs_input_norm
from onlynorm.memory import memory_budget, release_free_memory
from onlynorm.modules.affine import affine, set_affine
from onlynorm.modules.layers import TargetLayer, layer_options, weight_of
from onlynorm.reconstruction.constructions.base import Rebuilt
from onlynorm.reconstruction.constructions.options import Deep, Settings
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
from onlynorm.reconstruction.ranges import LayerInputs, default_margin, extremes_of_rows, widen
from onlynorm.solvers import choose
from onlynorm.solvers.operator import OnStep

ORTHOGONAL_RATE = 0.088
RANDOM_RATE = 0.17
DENSE_FEATURES = ("he_normal", "he_uniform", "uniform", "orthogonal")
"""Features that the law holds for. Sparse ones, and few random signs, are singular too often."""
EXCESSES = (1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0)
"""Candidates for the default excess."""
WANTED = 1e-11
"""Predicted error for the default excess: a hundredth of 1e-9, because the law is a fit."""
SAFETY = 0.1
"""Predicted over wanted error of a cure: of 1,848 systems with a prediction up to 1e-11, none was above 1e-10."""


@dataclass(frozen=True)
class SliceLaw:
    """The law for a target of `shape` (out, inp, *kernel) split into slices of `inputs_per_slice` inputs."""

    shape: tuple[int, ...]
    inputs_per_slice: int
    is_orthogonal: bool = True
    is_dense: bool = True

    @property
    def n_layers(self) -> int:
        """Number of slices of the input, with one layer each."""
        return -(-self.shape[1] // self.inputs_per_slice)

    @property
    def n_columns(self) -> int:
        """Number of inputs of the target, including kernel positions."""
        return math.prod(self.shape[1:])

    def condition(self, excess: float) -> float:
        """The predicted condition number of the product of later layers."""
        if self.n_layers == 1:
            return 1.0
        if not excess > 1.0:
            return math.inf
        per_output = self.inputs_per_slice * math.prod(self.shape[2:]) * excess
        rate = ORTHOGONAL_RATE if self.is_orthogonal else RANDOM_RATE
        rate *= (per_output - 1.0) ** -0.6 * (1.0 - 1.0 / excess) ** -0.5
        return float(10.0 ** min(rate * (self.n_layers - 1), 300.0))

    def error(self, excess: float) -> float:
        """The predicted relative error of the effective weight, clipped at one."""
        if excess < 1.0:
            return math.sqrt(1.0 - excess)
        return min(1.0, EPS * (2.0 * math.sqrt(math.prod(self.shape)) + 0.3 * self.condition(excess)))

    def choose_excess(self, *, error: float = WANTED) -> float:
        """The smallest of `EXCESSES` with a predicted error of at most `error`, or the largest."""
        return next((excess for excess in EXCESSES if self.error(excess) <= error), EXCESSES[-1])

    def choose_inputs_per_slice(self, excess: float, *, error: float = WANTED) -> int:
        """The smallest number of inputs per slice with a predicted error of at most `error`."""
        for count in range(self.inputs_per_slice, self.shape[1]):
            if replace(self, inputs_per_slice=count).error(excess) <= error:
                return count
        return self.shape[1]

    def cure(self, excess: float, *, error: float) -> str:
        """A message with the options that would reach the error, each predicted with a margin of `SAFETY`.

        The law says nothing about sparse features, so only orthogonal ones are recommended in their place.
        """
        wanted = SAFETY * error
        options = []
        if self.is_dense:
            options += [f"excess={more:g}" for more in EXCESSES if more > excess and self.error(more) <= wanted][:1]
            count = max(self.inputs_per_slice + 1, self.choose_inputs_per_slice(excess, error=wanted))
            if count <= self.shape[1] and replace(self, inputs_per_slice=count).error(excess) <= wanted:
                options.append(f"inputs_per_slice={count}")
        if not self.is_orthogonal:
            other = replace(self, is_orthogonal=True, is_dense=True)
            name = "features='orthogonal'" + ("" if self.is_dense else " (without a density)")
            more = next((one for one in (excess, *EXCESSES) if one >= excess and other.error(one) <= wanted), None)
            if more is not None and (more == excess or not self.is_dense):
                options.append(name if more == excess else f"{name} and excess={more:g}")
        if not options:
            whole = replace(self, inputs_per_slice=self.shape[1], is_orthogonal=True, is_dense=True).error(EXCESSES[0])
            text = f"inputs_per_slice={self.shape[1]} and excess={EXCESSES[0]}"
            text += "" if self.is_dense else " and features='orthogonal' (without a density)"
            options.append(text if whole <= wanted else f"a tolerance of {whole / SAFETY:.0e} or more")
        return f"cure: {', or '.join(options)}"


CERTIFIED = 1e-9
"""Fraction of the width added to certified ranges, for the rounding errors of the layers."""


@torch.no_grad()
def choose_norms(
    block: DeepBlock,
    gammas: Float[Tensor, "layers feat"],
    bias: Float[Tensor, " out"] | None,
    *,
    received: LayerInputs,
    window: float,
    margin: float | None = None,
) -> float:
    """Sets all norms of the block; returns the largest certified error of an activation, in the units of its input.

    The error `window`, relative to the widest range, is divided among the activations of a block.
    """
    scales, shifts, gain, error = gammas.clone(), torch.zeros_like(gammas), gammas.new_ones(()), 0.0
    if len(gammas) > 1:
        line = _place(block, *inner_ranges(block, gammas, received, margin=margin), window)
        gain, error = line.gain.flatten()[0], float(line.error_in_input.max())
        scales[:-1] *= line.scale.reshape(gammas[:-1].shape)
        shifts[:-1] = line.shift.reshape(gammas[:-1].shape)
    if bias is not None:
        shifts[-1] = torch.linalg.pinv(block.weights("left", 0)) @ bias
    inputs = received.inputs.double()
    if block.input_norm is not None:
        flat = block.padded(inputs).movedim(1, 0).flatten(1)
        factor = gain.expand(len(flat))
        set_affine(
            block.input_norm, factor, torch.zeros_like(factor), mean=flat.mean(1), variance=flat.var(1, correction=0)
        )
    release_free_memory()  # returns the memory of the ranges to the system
    _set_layers(block, scales / gain, shifts, block.as_batch(inputs))
    return error


def _place(block: DeepBlock, low: Tensor, high: Tensor, window: float) -> Window:
    """The windows of all inner layers, with one gain; also stored in the block's buffers."""
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
    """Sets the norms one by one, with the statistics of the batch and the constants of the stored norms.

    Stored norms are rounded; using them, the constants cancel to the last digits.
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
    block: DeepBlock, gammas: Float[Tensor, "layers feat"], received: LayerInputs, *, margin: float | None = None
) -> tuple[Float[Tensor, "inner feat"], Float[Tensor, "inner feat"]]:
    """Lowest and highest values of each layer but the last: on the batch with a margin, or for a box.

    Layers are linear in their windows, so each is one linear map of the input: intervals do not widen with depth.
    """
    if margin is None:
        margin = default_margin(block.activation)
    basis = torch.eye(sum(one.cols for one in block.layers)).to(gammas)
    lows, highs = [], []
    for made in itertools.islice(linear_maps(block.weights, gammas, basis), len(gammas) - 1):
        if received.box is None:
            values = block.project(block.padded(received.inputs.double()), made)
            lows_of_rows, highs_of_rows = extremes_of_rows(values.movedim(-1, 1))
            if received.leave_one_out is not None:
                received.leave_one_out.update(*received.leave_one_out.extremes(lows_of_rows, highs_of_rows))
            low, high = lows_of_rows.amin(0), highs_of_rows.amax(0)
        else:
            bounds = block.padded(received.box.low.double()), block.padded(received.box.high.double())
            centre = block.project((bounds[0] + bounds[1]) / 2, made)
            radius = block.project((bounds[1] - bounds[0]) / 2, made.abs())
            low, high = (centre - radius).flatten(0, -2).amin(0), (centre + radius).flatten(0, -2).amax(0)
        low, high = widen(low, high, margin if received.box is None else CERTIFIED)
        lows.append(low)
        highs.append(high)
    return torch.stack(lows), torch.stack(highs)


AIM = 1e-10
"""Relative error that counts as exact if no tolerance is given."""
SOLVE_SECONDS = 1.5e-3
"""Seconds of a small solve."""
HAAR_SECONDS = 2e-9
"""Seconds per n^3 of an orthogonal n x n matrix, which is drawn without LAPACK: 2 s for n = 1,024 on one core."""


def estimate(target: TargetLayer, construction: Deep, settings: Settings, load: Load = ALONE) -> Costs:
    """The cost of the deep construction of this layer; condition number and error are predicted by `SliceLaw`."""
    layers = draw_target(target, construction, settings)
    law = law_of(target, construction)
    first, width, n_layers = layers[0], layers[0].n_features, len(layers)
    n_frozen = sum(width * (one.rows + one.cols) for one in layers)
    n_inputs = target.shape[1] if needs_input_norm(construction.activation, n_layers) else 0
    method = "cholesky" if first.equations <= DENSE else "auto"
    choice = choose(first.rows, first.cols, width, tolerance=AIM, memory=memory_budget(), method=method)
    seconds = n_layers * (1 + SIGN_ROUNDS) * (choice.option.seconds + SOLVE_SECONDS)
    if construction.features == "orthogonal":
        seconds += (n_layers - 1) * HAAR_SECONDS * width**3
    error = law.error(first.excess)
    is_stored = settings.storage == "dense"
    stored = VECTORS * n_layers * width + 8 * n_frozen * is_stored
    largest = 8 * width * (width if n_layers > 1 else first.rows + first.cols)
    # The linear maps from the inputs to a layer, and products of frozen layers.
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
        _note(law, construction, first), stored,
    )  # fmt: skip


def _note(law: SliceLaw, construction: Deep, drawn: Features) -> str:
    cure = law.cure(_kept_excess(construction, drawn), error=AIM)
    if not law.is_dense:
        return f"sparse features often miss the predicted error; {cure}"
    return "" if law.error(drawn.excess) <= AIM else cure


def _kept_excess(construction: Deep, drawn: Features) -> float:
    """The excess of wider slices with the same options; in narrow ones the number of features is rounded up."""
    return drawn.excess if construction.excess is None else min(construction.excess, drawn.excess)


def law_of(target: TargetLayer, construction: Deep) -> SliceLaw:
    """The law for this layer; raises if the construction does not support it."""
    if target.groups > 1:
        raise ConversionError(
            f"the deep construction needs layers of one group; got {target.groups} at {target.name!r}. Rebuild it with "
            "Wide(), LowRank() or Residual()."
        )
    inputs_per_slice = min(construction.inputs_per_slice, target.shape[1])
    return SliceLaw(
        target.shape, inputs_per_slice, is_orthogonal=construction.features == "orthogonal",
        is_dense=construction.features in DENSE_FEATURES,
    )  # fmt: skip


def draw_target(target: TargetLayer, construction: Deep, settings: Settings) -> list[Features]:
    """The frozen layers of a target layer; their weights are not drawn yet."""
    law = law_of(target, construction)
    excess = law.choose_excess() if construction.excess is None else construction.excess
    slice_shape = (target.shape[0], law.inputs_per_slice, *target.shape[2:])
    n_features = draw(construction.features, slice_shape, excess=excess, density=construction.density).n_features
    return draw_layers(
        construction.features, target.shape, inputs_per_slice=law.inputs_per_slice, n_features=n_features,
        seed=settings.seed, layer=target.name, density=construction.density,
    )  # fmt: skip


def build(
    target: TargetLayer,
    layer: nn.Module,
    received: LayerInputs,
    construction: Deep,
    settings: Settings,
    on_step: OnStep | None = None,
) -> Rebuilt:
    """The block of the layer from narrow frozen layers with skip connections. Theory: giannou2023:thm-2"""
    weight, bias = weight_of(layer)
    layers = draw_target(target, construction, settings)
    block = DeepBlock(
        layer_options(layer),
        layers,
        activation=construction.activation,
        norms=construction.norms,
        storage=settings.storage,
    ).to(weight.device)
    found = solve_slices(layers, weight, weights=block.weights, on_step=on_step)
    short = ""
    wanted = AIM if settings.tolerance is None else settings.tolerance
    if not found.residual <= wanted:
        cure = law_of(target, construction).cure(_kept_excess(construction, layers[0]), error=min(wanted, AIM))
        short = f"relative error {found.residual:.1e} at condition {found.condition:.1e}; {cure}"
    if short and settings.tolerance is not None:
        raise ToleranceError(
            f"the deep construction needs a relative error of {settings.tolerance:.0e} at {target.name!r}; got "
            f"{short}. Or leave the tolerance out for the closest solution."
        )
    error = choose_norms(
        block, found.gammas, bias, received=received, window=settings.window, margin=settings.ranges.margin
    )
    return Rebuilt(block, found.method, found.residual, error, found.seconds, short)
