"""What each feature sees: the range in which its activation must be linear, and the statistics of its norm.

Calibrated ranges come from a batch of inputs, widened by a margin on both sides. Outside, the reconstruction promises
nothing; `share_outside` counts how much of a batch leaves them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onlynorm.errors import ValueRangeError
from onlynorm.reconstruction.blocks import NormOnlyBlock

MARGIN = 0.25
"""Share of the calibrated width that is added on either side."""


@dataclass(frozen=True)
class Ranges:
    """Per feature: lowest and highest value before the norm, margin included, and mean and variance."""

    low: Tensor
    high: Tensor
    mean: Tensor
    variance: Tensor


@torch.no_grad()
def calibrate(block: NormOnlyBlock, inputs: Tensor, *, margin: float = MARGIN) -> Ranges:
    """The ranges and statistics of the block's features on a batch of its inputs."""
    if not margin >= 0.0:
        raise ValueRangeError(f"margin needs a number of at least 0; got {margin}. 0.25 widens by a quarter.")
    parts: list[tuple[Tensor, ...]] = []
    for group, features, seen in block.group_inputs(block.as_batch(inputs)):
        for start, stop in block.chunks(features, seen):
            hidden = block.hidden(seen, features, group, start, stop).movedim(1, 0).flatten(1)
            parts.append((*torch.aminmax(hidden, dim=1), hidden.mean(1), hidden.var(1, correction=0)))
    low, high, mean, variance = (torch.cat(column) for column in zip(*parts, strict=True))
    # A feature that saw one value only (a dead input, a batch of one) still gets room around it.
    width = torch.maximum(high - low, torch.maximum(low.abs(), high.abs()))
    return Ranges(low - margin * width, high + margin * width, mean, variance)


@torch.no_grad()
def share_outside(block: NormOnlyBlock, inputs: Tensor) -> float:
    """The share of the batch's samples for which at least one feature leaves its range."""
    batch = block.as_batch(inputs)
    outside = torch.zeros(len(batch), dtype=torch.bool, device=batch.device)
    for group, features, seen in block.group_inputs(batch):
        for start, stop in block.chunks(features, seen):
            which = block.where(group, start, stop)
            hidden = block.hidden(seen, features, group, start, stop)
            hidden = hidden.reshape(*hidden.shape[:2], -1)
            low, high = block.low[which, None], block.high[which, None]
            outside |= ((hidden < low) | (hidden > high)).flatten(1).any(1)
    return float(outside.double().mean())
