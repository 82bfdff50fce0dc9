"""The forward pass of frozen layers by matrix products.

Random features of a convolution, without gradients: patches of the input are the columns of a matrix. A chunk of
features is then

    hidden = phi(scale * (right . patches) + shift),    outputs += left . hidden

with features along the rows: two large products with one pass in place between them, over values that are still in the
cache. torch convolutions pack the frozen weights again at every call and allocate memory for the norm and the
activation: they are 1.6 to 2.9 times slower at 16 and 32 channels, excess 1.25, measured on one thread.

Structured features: feature (q, d) has the input z_d = (U1 patches)_d, the same for every q, and feeds column q of U2:

    v_q = sum over d of phi(scale[q, d] z_d + shift[q, d]),    y = U2 v

This takes as many operations as the target layer has multiplications. The only frozen weights are U1 and U2, which are
the identity for ID cond and never built. Without an activation it is one layer with the weight U2 scale U1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from onlynorm.features import Features
from onlynorm.features.structured import Structure
from onlynorm.modules.affine import Sharing

CHUNK_BYTES = 8 * 2**20
"""Maximum bytes of hidden activations, so that they stay in the cache between the products."""
PATCH_BYTES = 16 * 2**20
"""Maximum bytes of patches, if samples can be split into parts."""


@dataclass(frozen=True)
class ConvPatches:
    """The patches of padded inputs (samples, channels, *positions) of a convolution."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]

    def columns(self, x: Float[Tensor, "samples channels *positions"]) -> Float[Tensor, "inp columns"]:
        """A row per channel and kernel position, a column per sample and output position."""
        outputs, places = self._axes()
        return self._view(x).permute(1, *places, 0, *outputs).reshape(x.shape[1] * math.prod(self.kernel), -1)

    def rows(self, x: Float[Tensor, "samples channels *positions"]) -> Float[Tensor, "columns inp"]:
        """The transpose of `columns`: a row per sample and output position."""
        outputs, places = self._axes()
        return self._view(x).permute(0, *outputs, 1, *places).reshape(-1, x.shape[1] * math.prod(self.kernel))

    def channels(self, x: Float[Tensor, "samples channels *positions"]) -> Float[Tensor, "samples inp *outputs"]:
        """The patches as channels, in the order of the rows of `columns`."""
        outputs, places = self._axes()
        return self._view(x).permute(0, 1, *places, *outputs).flatten(1, 1 + len(self.kernel))

    def _view(self, x: Tensor) -> Tensor:
        """A view (samples, channels, *output positions, *kernel positions)."""
        for axis, (size, step, spread) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True)):
            x = x.unfold(axis + 2, (size - 1) * spread + 1, step)[..., ::spread]
        return x

    def _axes(self) -> tuple[range, range]:
        """The axes of output positions and of kernel positions."""
        n = len(self.kernel)
        return range(2, 2 + n), range(2 + n, 2 + 2 * n)

    def positions(self, x: Tensor) -> list[int]:
        """Number of output positions along each axis."""
        sizes = zip(x.shape[2:], self.kernel, self.stride, self.dilation, strict=True)
        return [(length - (size - 1) * spread - 1) // step + 1 for length, size, step, spread in sizes]

    def n_bytes(self, x: Tensor) -> int:
        """Bytes of `columns`."""
        return math.prod((len(x), x.shape[1], *self.kernel, *self.positions(x))) * x.element_size()


def n_rows(columns: int, itemsize: int) -> int:
    """Number of features whose hidden activations fit into `CHUNK_BYTES`, at least 32."""
    return align_step(max(32, CHUNK_BYTES // max(1, columns * itemsize)))


def align_step(step: int) -> int:
    """`step` rounded down to a multiple of 16, so that chunks of stored weights start at a cache line.

    The rounding of matrix products depends on the alignment of their arguments.
    """
    return step // 16 * 16 or step


@dataclass(frozen=True)
class Chunk:
    """Some features: frozen weights with a row per feature, scale and shift of the norm, and their indices."""

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
    observer: Callable[[Tensor, slice], None] | None,
) -> Float[Tensor, "out columns"]:
    """The sum over chunks of left . phi(scale * (right . columns) + shift).

    `observer` is called with every chunk before its norm, and the indices of its features.
    """
    total: Tensor | None = None
    memory = columns.new_empty(0)
    for chunk in chunks:
        n_values = len(chunk.right) * columns.shape[1]
        if memory.numel() < n_values:
            memory = columns.new_empty(n_values)
        hidden = torch.mm(chunk.right, columns, out=memory[:n_values].view(-1, columns.shape[1]))
        if observer is not None:
            observer(hidden, chunk.which)
        hidden.mul_(chunk.scale[:, None]).add_(chunk.shift[:, None])  # four times faster than addcmul
        active = hidden.relu_() if type(activation) is nn.ReLU else activation(hidden)
        total = chunk.left.mT @ active if total is None else total.addmm_(chunk.left.mT, active)
    assert total is not None
    return total


HIDDEN_BYTES = 2**20
"""Maximum bytes of hidden values, so that they stay in the cache between norm, activation and sum."""
Rows = Callable[[int, int], tuple[Tensor, Tensor]]
"""Called with a range of rows of the grid; returns scale and shift of its features, (rows, cols)."""


def find_sharing(groups: Sequence[Features]) -> Sharing | None:
    """Which features of all groups have the same input; None for random features, which have distinct inputs."""
    if not groups[0].is_structured:
        return None
    n_inputs, n_features = (tuple(sizes) for sizes in zip(*((g.n_seen, g.n_features) for g in groups), strict=True))
    if groups[0].is_full_grid:
        return Sharing(sum(n_features), n_inputs)
    structures = [one.structure for one in groups if one.structure is not None]
    return Sharing(sum(n_features), n_inputs, functools.partial(_inputs_of, structures, n_features, n_inputs))


def _inputs_of(
    structures: Sequence[Structure], n_features: Sequence[int], n_inputs: Sequence[int], k: Int[Tensor, " feat"]
) -> Int[Tensor, " feat"]:
    """The inputs of some features of all groups, in ascending order."""
    found, first, first_input = [], 0, 0
    for structure, n, n_seen in zip(structures, n_features, n_inputs, strict=True):
        own = k[(k >= first) & (k < first + n)] - first if len(structures) > 1 else k
        found.append(structure.input_of(own).cpu() + first_input)
        first, first_input = first + n, first_input + n_seen
    return torch.cat(found)


def missing_features(features: Features, like: Tensor) -> Bool[Tensor, "rows cols"] | None:
    """A mask of the grid entries without a feature; None if all have one."""
    if features.density is None:
        return None
    assert features.structure is not None
    return features.structure.grid(like.new_ones(features.n_features)) == 0


def sum_features(
    inputs: Float[Tensor, "n cols"],
    rows: Rows,
    n_rows: int,
    *,
    activation: nn.Module,
    missing: Bool[Tensor, "rows cols"] | None,
    learns: bool,
) -> Float[Tensor, "n rows"]:
    """v_q for every sample and position; with `learns`, for gradients, nothing is overwritten."""
    if learns:
        parts = [
            torch.cat([_summed(part, slice(*ends), rows(*ends), activation, missing, learns) for ends in cuts], 1)
            for part, cuts in _pieces(inputs, n_rows)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    total: Tensor | None = None
    first = 0
    for part, cuts in _pieces(inputs, n_rows):
        for start, stop in cuts:  # small results between large temporary ones would fragment the memory
            made = _summed(part, slice(start, stop), rows(start, stop), activation, missing, learns)
            total = made.new_empty(len(inputs), n_rows) if total is None else total
            total[first : first + len(part), start:stop] = made
        first += len(part)
    assert total is not None
    return total


def _pieces(inputs: Tensor, n_rows: int) -> Iterator[tuple[Tensor, list[tuple[int, int]]]]:
    """Parts of the samples and positions, each with ranges of rows whose hidden values fit into `HIDDEN_BYTES`."""
    each = max(1, inputs.shape[1] * inputs.element_size())
    n_samples = max(1, min(len(inputs), HIDDEN_BYTES // each, 64))
    step = max(1, HIDDEN_BYTES // (n_samples * each))
    cuts = [(start, min(start + step, n_rows)) for start in range(0, n_rows, step)]
    for part in inputs.split(n_samples) if len(inputs) else (inputs,):
        yield part, cuts


def _summed(
    inputs: Tensor,
    which: slice,
    line: tuple[Tensor, Tensor],
    activation: nn.Module,
    missing: Tensor | None,
    learns: bool,
) -> Tensor:
    scale, shift = line
    hidden = inputs[:, None] * scale
    hidden = hidden + shift if learns else hidden.add_(shift)
    flat = hidden.flatten(1)  # one channel per feature, as for an activation after a Linear layer
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
) -> Float[Tensor, "samples out *outputs"]:
    """The output o of a convolution that sums channel (o, k) at kernel position k, over all k."""
    axes = range(len(kernel))
    n_out = [(values.shape[2 + i] - (kernel[i] - 1) * dilation[i] - 1) // stride[i] + 1 for i in axes]
    by_position = values.unflatten(1, (-1, *kernel))
    total: Tensor | None = None
    for place in torch.cartesian_prod(*(torch.arange(size) for size in kernel)).reshape(-1, len(kernel)).tolist():
        at = (slice(None), slice(None), *place)
        part = by_position[at]
        for i, k in enumerate(place):
            first = k * dilation[i]
            part = part[(slice(None),) * (2 + i) + (slice(first, first + (n_out[i] - 1) * stride[i] + 1, stride[i]),)]
        total = part if total is None else total + part
    assert total is not None
    return total
