"""The norms of a deep block, from its gammas: every activation on its linear piece, every constant cancelled.

    s, b_i, m, c     with phi(s u + b_i) = m (s u + b_i) + c for what layer i carries, m s = g    (linearize)
    norm_i           scale s gamma_i / g (the last one gamma_L / g), shift b_i minus what earlier constants add
    input norm       scale g, where the activation has another gain than one

All layers share the gain g, so that layers and skips stay in proportion. The last shift is the smallest that the final
frozen layer turns into the bias.

Theory: giannou2023:thm-9, burkholz2024:thm-2.4
"""

from __future__ import annotations

import itertools

import torch
from jaxtyping import Float
from torch import Tensor, nn

from onlynorm.reconstruction.deep_block import DeepBlock
from onlynorm.reconstruction.deep_slices import linear_maps
from onlynorm.reconstruction.linearize import Window, linearize
from onlynorm.reconstruction.norms import affine, set_affine
from onlynorm.reconstruction.ranges import Seen, default_margin, extremes_of_rows, widen
from onlynorm.solvers.memory import release_free_memory

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
