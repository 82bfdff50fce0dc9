"""What each feature sees: the range in which its activation must be linear, and the statistics of its norm.

Calibrated ranges come from a batch of inputs, widened by a margin on both sides. Outside, the reconstruction promises
nothing; `watching` counts how much of a batch leaves them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from onlynorm.reconstruction.activations import Ray, known
from onlynorm.reconstruction.blocks import Block, NormOnlyBlock

MARGIN = 0.25
"""Share of the calibrated width that is added on either side, where room in the activation costs precision."""
FREE_MARGIN = 1.0
"""The same where the activation is a line on a whole half-axis, so that room costs only a larger shift."""


@dataclass(frozen=True)
class Box:
    """Every input of a layer lies between `low` and `high`, elementwise; both have the shape of one sample."""

    low: Float[Tensor, "*sample"]
    high: Float[Tensor, "*sample"]


@dataclass(frozen=True)
class Seen:
    """What a layer receives: the calibration batch, and a box that holds every input if ranges are certified."""

    inputs: Tensor
    box: Box | None = None


@dataclass(frozen=True)
class Ranges:
    """Per feature: lowest and highest value before the norm, margin included, and mean and variance."""

    low: Float[Tensor, " feat"]
    high: Float[Tensor, " feat"]
    mean: Float[Tensor, " feat"]
    variance: Float[Tensor, " feat"]


def find_ranges(block: NormOnlyBlock, seen: Seen, *, margin: float | None = None) -> Ranges:
    """The ranges of the block's features: calibrated on the batch, or certified if a box is given.

    Without a margin it is `FREE_MARGIN` where the activation is a line on a half-axis, else `MARGIN`.
    """
    if margin is None:
        is_free = isinstance(block.activation, nn.Identity) or isinstance(known(block.activation), Ray)
        margin = FREE_MARGIN if is_free else MARGIN
    return calibrate(block, seen.inputs.double(), margin=margin)


@torch.no_grad()
def calibrate(block: NormOnlyBlock, inputs: Tensor, *, margin: float = MARGIN) -> Ranges:
    """The ranges and statistics of the block's features on a batch of its inputs."""
    parts: list[tuple[Tensor, ...]] = []
    for group, features, seen in block.group_inputs(block.as_batch(inputs)):
        for start, stop in block.chunks(features, seen):
            hidden = block.hidden(seen, features, group, start, stop).movedim(1, 0).flatten(1)
            parts.append((*torch.aminmax(hidden, dim=1), hidden.mean(1), hidden.var(1, correction=0)))
    low, high, mean, variance = (torch.cat(column) for column in zip(*parts, strict=True))
    return Ranges(*widen(low, high, margin), mean, variance)


def widen(
    low: Float[Tensor, " feat"], high: Float[Tensor, " feat"], margin: float
) -> tuple[Float[Tensor, " feat"], Float[Tensor, " feat"]]:
    """The range with a share of its width added on either side."""
    # A feature that saw one value only (a dead input, a batch of one) still gets room around it.
    width = torch.maximum(high - low, torch.maximum(low.abs(), high.abs()))
    return low - margin * width, high + margin * width


class Outside:
    """Which samples left the range of at least one feature, block by block and call by call."""

    def __init__(self) -> None:
        self._calls: dict[Block, list[Tensor]] = {}

    @property
    def share(self) -> float:
        """The largest share of samples, over the blocks, for which some feature left its range."""
        return max((float(torch.cat(calls).double().mean()) for calls in self._calls.values()), default=0.0)

    def see(self, block: Block, hidden: Tensor, low: Tensor, high: Tensor, *, is_first: bool) -> None:
        """A chunk of features of a call, the first chunk or a later one."""
        shape = (-1, *(1,) * (hidden.ndim - 2))
        outside = (hidden < low.reshape(shape)) | (hidden > high.reshape(shape))
        samples = outside.flatten(1).any(1).cpu()
        calls = self._calls.setdefault(block, [])
        if is_first:
            calls.append(samples)
        else:
            calls[-1] |= samples


@contextlib.contextmanager
def watching(network: nn.Module) -> Iterator[Outside]:
    """Counts, during forward passes inside the `with`, which samples leave the range of a block."""
    outside = Outside()
    blocks = [module for module in network.modules() if isinstance(module, Block)]
    for block in blocks:
        block.watch = functools.partial(outside.see, block)
    try:
        yield outside
    finally:
        for block in blocks:
            block.watch = None
