"""The forward pass of a frozen convolution as plain matrix products, for when nothing is learned from it.

Patches of the input become the columns of a matrix. A chunk of features is then

    hidden = phi(scale * (right . patches) + shift),    outputs += left . hidden

with features along the rows: two large products, and in between one pass in place over memory that is still in the
cache. Convolutions of a library pack the frozen weights anew at every call, normalise and activate into fresh memory:
1.6 to 2.9 times slower at 16 and 32 channels, excess 1.25, measured side by side on one thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

CHUNK_BYTES = 8 * 2**20
"""Hidden activations alive at one time: they should stay in the cache between the products."""
PATCH_BYTES = 16 * 2**20
"""Patches alive at one time, where samples can be taken in parts."""


@dataclass(frozen=True)
class Patches:
    """What the output positions of a convolution see of padded inputs (samples, channels, *positions)."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]

    def columns(self, x: Float[Tensor, "samples channels *positions"]) -> Float[Tensor, "inp columns"]:
        """A row per channel and place in the kernel, a column per sample and output position."""
        view, axes = x, len(self.kernel)
        for axis, (size, step, spread) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True)):
            view = view.unfold(axis + 2, (size - 1) * spread + 1, step)[..., ::spread]
        outputs, places = range(2, 2 + axes), range(2 + axes, 2 + 2 * axes)
        return view.permute(1, *places, 0, *outputs).reshape(x.shape[1] * math.prod(self.kernel), -1)

    def positions(self, x: Tensor) -> list[int]:
        """Output positions along every axis."""
        sizes = zip(x.shape[2:], self.kernel, self.stride, self.dilation, strict=True)
        return [(length - (size - 1) * spread - 1) // step + 1 for length, size, step, spread in sizes]

    def n_bytes(self, x: Tensor) -> int:
        """The memory of `columns`."""
        return math.prod((len(x), x.shape[1], *self.kernel, *self.positions(x))) * x.element_size()


def n_rows(columns: int, itemsize: int) -> int:
    """Features whose hidden activations fit into `CHUNK_BYTES`, but enough of them to fill a product."""
    return whole_lines(max(32, CHUNK_BYTES // max(1, columns * itemsize)))


def whole_lines(step: int) -> int:
    """So many features, fewer by up to 15: a chunk of kept weights then begins at a cache line, as a fresh one does.

    Products round by the alignment of what they multiply.
    """
    return step // 16 * 16 or step


@dataclass(frozen=True)
class Chunk:
    """Some features: their frozen weights, a row per feature, the affine map of their norm, and which they are."""

    right: Float[Tensor, "feat inp"]
    left: Float[Tensor, "feat out"]
    scale: Float[Tensor, " feat"]
    shift: Float[Tensor, " feat"]
    which: slice


def stream(
    columns: Float[Tensor, "inp columns"],
    chunks: Iterator[Chunk],
    *,
    activation: nn.Module,
    watch: Callable[[Tensor, slice], None] | None,
) -> Float[Tensor, "out columns"]:
    """The sum over chunks of left . phi(scale * (right . columns) + shift).

    `watch` is told of every chunk before its norm, and which features it has.
    """
    total: Tensor | None = None
    memory = columns.new_empty(0)
    for chunk in chunks:
        n_numbers = len(chunk.right) * columns.shape[1]
        if memory.numel() < n_numbers:
            memory = columns.new_empty(n_numbers)
        hidden = torch.mm(chunk.right, columns, out=memory[:n_numbers].view(-1, columns.shape[1]))
        if watch is not None:
            watch(hidden, chunk.which)
        hidden.mul_(chunk.scale[:, None]).add_(chunk.shift[:, None])  # a fourth of the time of addcmul
        active = hidden.relu_() if type(activation) is nn.ReLU else activation(hidden)
        total = chunk.left.mT @ active if total is None else total.addmm_(chunk.left.mT, active)
    assert total is not None
    return total
