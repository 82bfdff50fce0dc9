"""The norms of a multilayer block, from its gammas: every activation on its linear piece, every constant cancelled.

What layer i carries is one linear map of the input, R_i = W_i diag(gamma_(i-1)) R_(i-1), so its range comes from the
input directly and does not widen with depth. With u = R_i x, the frozen layer gives g u + c, where g is the gain of the
activations in front and c what their constants add:

    s, b, m, o       with phi(s gamma u + b) = m (s gamma u + b) + o for all features of the layer    (linearize)
    norm_i           scale s gamma / g, shift b - scale c
    norm_L           scale gamma_L / g, shift bias - scale c

Each norm takes away what came before it, so constants do not grow from layer to layer.

Theory: burkholz2024:thm-2.4, burkholz2024:thm-2.5
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from onlynorm.reconstruction.linearize import linearize
from onlynorm.reconstruction.multilayer_block import MultilayerBlock
from onlynorm.reconstruction.norms import affine, set_affine
from onlynorm.reconstruction.ranges import CERTIFIED_MARGIN, Ranges, Seen, default_margin, extremes_of_rows, widen


@torch.no_grad()
def choose_norms(
    block: MultilayerBlock,
    gammas: list[Tensor],
    bias: Float[Tensor, " out"] | None,
    *,
    seen: Seen,
    window: float,
    margin: float | None = None,
) -> float:
    """Sets all norms of the block; returns the certified error of its worst activation, in the units it carries.

    The activations of a block share the error `window`, which is relative to the widest range of each layer.
    """
    last, error = block.n_layers - 1, 0.0
    carried = block.weight(0).double()
    constant = torch.zeros_like(carried[:, 0])
    gain = carried.new_ones(())
    for i, gamma in enumerate(gammas[:-1]):
        ranges = _ranges(block, carried, seen, margin)
        ends = torch.stack([gamma * ranges.low, gamma * ranges.high])
        low, high = ends.amin(0), ends.amax(0)
        tolerance = window * max(float((high - low).max()), 1e-300) / last
        line = linearize(block.activation, low, high, tolerance=tolerance, shared=True)
        scale = line.scale * gamma / gain
        mean, variance = gain * ranges.mean + constant, gain.square() * ranges.variance
        set_affine(block.norm(i), scale, line.shift - scale * constant, mean=mean, variance=variance)
        which = block.where(i)
        block.slope[which], block.offset[which] = line.slope, line.offset
        if not isinstance(block.activation, nn.Identity):
            ends = torch.stack([gain * ranges.low + constant, gain * ranges.high + constant])
            block.low[which], block.high[which] = ends.amin(0), ends.amax(0)
        # Constants are taken from the norm as it was stored, so that its rounding cancels too.
        stored_scale, stored_shift = affine(block.norm(i))
        constant = block.mapped(i + 1, line.slope * (stored_scale * constant + stored_shift) + line.offset)
        carried = block.mapped(i + 1, gamma[:, None] * carried)
        gain = line.gain.flatten()[0]
        error = max(error, float(line.error_in_input.max()))
    scale = gammas[-1] / gain
    shift = -scale * constant
    set_affine(block.norm(last), scale, shift if bias is None else bias + shift)
    return error


def _ranges(block: MultilayerBlock, carried: Float[Tensor, "feat cols"], seen: Seen, margin: float | None) -> Ranges:
    """What a layer carries: its range on the batch with a margin, or in the whole box, and its statistics."""
    parts: list[tuple[Tensor, ...]] = []
    held: list[tuple[Tensor, Tensor]] = []
    count = n_rows = 0
    for part in block.samples(block.padded(seen.inputs.double())):
        values = block.project(part, carried, is_first=True)
        of_rows = extremes_of_rows(values)
        if seen.held_back is not None:
            held.append(seen.held_back.extremes(*of_rows, first_row=n_rows))
        n_rows += len(values)
        flat = values.movedim(1, 0).flatten(1)
        count += flat.shape[1]
        parts.append((of_rows[0].amin(0), of_rows[1].amax(0), flat.sum(1), flat.square().sum(1)))
    if seen.held_back is not None:
        of_samples = [torch.stack(column) for column in zip(*held, strict=True)]
        seen.held_back.note(of_samples[0].amin(0), of_samples[1].amax(0))
    lows, highs, sums, squares = (torch.stack(column) for column in zip(*parts, strict=True))
    low, high = lows.amin(0), highs.amax(0)
    mean = sums.sum(0) / count
    variance = (squares.sum(0) / count - mean.square()).clamp(min=0.0)
    if seen.box is None:
        return Ranges(*widen(low, high, default_margin(block.activation) if margin is None else margin), mean, variance)
    bounds = block.padded(seen.box.low.double()), block.padded(seen.box.high.double())
    centre = block.project((bounds[0] + bounds[1]) / 2, carried, is_first=True).movedim(1, 0).flatten(1)
    radius = block.project((bounds[1] - bounds[0]) / 2, carried.abs(), is_first=True).movedim(1, 0).flatten(1)
    low, high = (centre - radius).amin(1), (centre + radius).amax(1)
    return Ranges(*widen(low, high, CERTIFIED_MARGIN if margin is None else margin), mean, variance)
