"""The forward pass of frozen layers as plain operations, at the least cost.

Random features of a convolution, where nothing is learned. Patches of the input become the columns of a matrix. A chunk
of features is then

    hidden = phi(scale * (right . patches) + shift),    outputs += left . hidden

with features along the rows: two large products, and in between one pass in place over memory that is still in the
cache. Convolutions of a library pack the frozen weights again at every call, normalise and activate into new memory:
1.6 to 2.9 times slower at 16 and 32 channels, excess 1.25, measured side by side on one thread.

Structured features. Feature (q, d) sees z_d = (U1 patches)_d, the same number for every q, and feeds column q of U2:

    v_q = sum over d of phi(scale[q, d] z_d + shift[q, d]),    y = U2 v

This takes as many operations as the plain layer has multiplications, and no frozen weights but U1 and U2, which are the
identity for ID cond and never built. Without an activation all of it is one ordinary layer with the weight U2 scale U1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from onlynorm.features import Features
from onlynorm.modules.affine import Sharing

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
        outputs, places = self._axes()
        return self._view(x).permute(1, *places, 0, *outputs).reshape(x.shape[1] * math.prod(self.kernel), -1)

    def rows(self, x: Float[Tensor, "samples channels *positions"]) -> Float[Tensor, "columns inp"]:
        """The same with a row per sample and output position."""
        outputs, places = self._axes()
        return self._view(x).permute(0, *outputs, 1, *places).reshape(-1, x.shape[1] * math.prod(self.kernel))

    def channels(self, x: Float[Tensor, "samples channels *positions"]) -> Float[Tensor, "samples inp *outputs"]:
        """The same with a channel per row of `columns`."""
        outputs, places = self._axes()
        return self._view(x).permute(0, 1, *places, *outputs).flatten(1, 1 + len(self.kernel))

    def _view(self, x: Tensor) -> Tensor:
        """(samples, channels, *output positions, *places in the kernel), without a copy."""
        for axis, (size, step, spread) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True)):
            x = x.unfold(axis + 2, (size - 1) * spread + 1, step)[..., ::spread]
        return x

    def _axes(self) -> tuple[range, range]:
        """The axes of output positions and of places in the kernel."""
        n = len(self.kernel)
        return range(2, 2 + n), range(2 + n, 2 + 2 * n)

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


HIDDEN_BYTES = 2**20
"""Hidden values alive at one time: they should stay in the cache between the norm, the activation and the sum."""
Rows = Callable[[int, int], tuple[Tensor, Tensor]]
"""Called with a range of rows of the grid: scale and shift of its features, (rows, cols)."""


def find_sharing(groups: Sequence[Features]) -> Sharing | None:
    """Which features of all groups see the same input; None for random features, which see one each."""
    if not groups[0].is_structured:
        return None
    inputs, first = [], 0
    for one in groups:
        if not one.is_full_grid:
            assert one.structure is not None
            inputs.append((one.structure.input_of().cpu() + first).int())
        first += one.n_seen
    n_inputs = tuple(one.n_seen for one in groups)
    return Sharing(sum(one.n_features for one in groups), n_inputs, torch.cat(inputs) if inputs else None)


def missing_features(features: Features, like: Tensor) -> Bool[Tensor, "rows cols"] | None:
    """Where the grid has no feature; None if it has one everywhere."""
    if features.density is None:
        return None
    assert features.structure is not None
    return features.structure.grid(like.new_ones(features.n_features)) == 0


def sum_features(
    seen: Float[Tensor, "n cols"],
    rows: Rows,
    n_rows: int,
    *,
    activation: nn.Module,
    missing: Bool[Tensor, "rows cols"] | None,
    learns: bool,
) -> Float[Tensor, "n rows"]:
    """v_q for every sample and position; `learns` says that gradients are wanted, so that nothing is overwritten."""
    parts = [
        torch.cat([_summed(part, slice(*ends), rows(*ends), activation, missing, learns) for ends in cuts], 1)
        for part, cuts in _pieces(seen, n_rows)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _pieces(seen: Tensor, n_rows: int) -> Iterator[tuple[Tensor, list[tuple[int, int]]]]:
    """Parts of the samples and positions, each with ranges of rows whose hidden values fit into `HIDDEN_BYTES`."""
    each = max(1, seen.shape[1] * seen.element_size())
    n_samples = max(1, min(len(seen), HIDDEN_BYTES // each, 64))
    step = max(1, HIDDEN_BYTES // (n_samples * each))
    cuts = [(start, min(start + step, n_rows)) for start in range(0, n_rows, step)]
    for part in seen.split(n_samples) if len(seen) else (seen,):
        yield part, cuts


def _summed(
    seen: Tensor,
    which: slice,
    line: tuple[Tensor, Tensor],
    activation: nn.Module,
    missing: Tensor | None,
    learns: bool,
) -> Tensor:
    scale, shift = line
    hidden = seen[:, None] * scale
    hidden = hidden + shift if learns else hidden.add_(shift)
    flat = hidden.flatten(1)  # a channel per feature, as the activation of an ordinary network would see it
    active = flat.relu_() if type(activation) is nn.ReLU and not learns else activation(flat)
    active = active.reshape(hidden.shape)
    if missing is not None:
        active = active.masked_fill(missing[which], 0.0)
    return active.sum(2)


def fold_kernel(
    values: Float[Tensor, "samples out_kernel *positions"],
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> Float[Tensor, "samples out *positions"]:
    """What a convolution adds up whose kernel picks channel (o, k) at its own position k for output o."""
    axes = range(len(kernel))
    n_out = [(values.shape[2 + i] - (kernel[i] - 1) * dilation[i] - 1) // stride[i] + 1 for i in axes]
    by_position = values.unflatten(1, (-1, *kernel))
    total: Tensor | None = None
    for place in torch.cartesian_prod(*(torch.arange(size) for size in kernel)).reshape(-1, len(kernel)).tolist():
        part = by_position[(slice(None), slice(None), *place)]
        for i, k in enumerate(place):
            first = k * dilation[i]
            part = part[(slice(None),) * (2 + i) + (slice(first, first + (n_out[i] - 1) * stride[i] + 1, stride[i]),)]
        total = part if total is None else total + part
    assert total is not None
    return total
