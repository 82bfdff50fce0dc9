"""The block that takes a layer's place: frozen layer, norm, activation, frozen layer, norm.

    y = norm2( left . phi( norm1( right . x ) ) )

`right` and `left` are random and frozen, known by their seed; the two norms are real BatchNorm layers and hold all
that was chosen. The forward pass streams over the features in chunks: hidden activations of one chunk at a time, added
up at once, so that peak memory does not grow with the number of features. Chunks are kept (`storage="dense"`) or made
from the seed on each pass (`"seed"`).

The kernel of a convolution sits in the first frozen layer by default: padding and stride are then the target's own, and
what the shift of norm1 adds is the same at every output position, borders included. With the kernel in the second layer
the *input* is padded, not the hidden layer, for the same reason.

Theory: giannou2023:thm-1, burkholz2024:thm-2.4, giannou2023:prop-1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.features import Features

CHUNK_BYTES = 64 * 2**20
"""Hidden activations alive at one time."""

_CONVOLVE: dict[int, Callable[..., Tensor]] = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
_NORMS: dict[int, type[nn.modules.batchnorm._BatchNorm]] = {
    0: nn.BatchNorm1d,
    1: nn.BatchNorm1d,
    2: nn.BatchNorm2d,
    3: nn.BatchNorm3d,
}


class NormOnlyBlock(nn.Module):
    """A layer rebuilt from frozen random features: called like the Linear or Conv it replaces.

    Its parameters are those of `first_norm` (one pair per feature) and `second_norm` (one pair per output). `low` and
    `high` bound what each feature may see before its norm; inside, the activation is slope * z + offset.
    """

    low: Tensor
    high: Tensor
    slope: Tensor
    offset: Tensor
    right: Tensor
    left: Tensor

    def __init__(
        self,
        layer: nn.Module,
        features: list[Features],
        *,
        activation: nn.Module | None = None,
        storage: str = "dense",
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        self.features = features
        self.activation = activation or nn.Identity()
        self.storage = storage
        self.axes = len(features[0].shape) - 2
        self.options = layer_options(layer)
        self.padding = _explicit_padding(self.options) if self.axes else ()
        n_features = sum(f.n_features for f in features)
        norm = _NORMS[self.axes]
        self.first_norm = identity_norm(norm(n_features, dtype=dtype))
        self.second_norm = identity_norm(norm(sum(f.shape[0] for f in features), dtype=dtype))
        self.register_buffer("low", torch.full((n_features,), -torch.inf, dtype=dtype))
        self.register_buffer("high", torch.full((n_features,), torch.inf, dtype=dtype))
        self.register_buffer("slope", torch.ones(n_features, dtype=dtype))
        self.register_buffer("offset", torch.zeros(n_features, dtype=dtype))
        if storage == "dense":
            self.register_buffer("right", torch.cat([f.right() for f in features]).to(dtype), persistent=False)
            self.register_buffer("left", torch.cat([f.left().mT for f in features]).to(dtype), persistent=False)

    def extra_repr(self) -> str:
        first = self.features[0]
        return (
            f"{first.name}, {self.first_norm.num_features} features, shape={first.shape}, groups={len(self.features)}, "
            f"seed={first.seed}, layer={first.layer!r}, storage={self.storage!r}"
        )

    def forward(self, x: Tensor) -> Tensor:
        """The same output as the replaced layer's, for inputs inside the calibrated range."""
        batch = self.as_batch(x)
        outputs = []
        for group, features, inputs in self.group_inputs(batch):
            total: Tensor | None = None
            for start, stop in self.chunks(features, inputs):
                which = self.where(group, start, stop)
                hidden = normalise(self.first_norm, self.hidden(inputs, features, group, start, stop), which)
                made = self._second(self.activation(hidden), features, group, start, stop)
                total = made if total is None else total + made
            assert total is not None
            outputs.append(total)
        whole = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
        whole = normalise(self.second_norm, whole, slice(None))
        if not self.axes:
            return whole.reshape(*x.shape[:-1], whole.shape[1])
        return whole if x.ndim == self.axes + 2 else whole[0]

    def as_batch(self, x: Tensor) -> Tensor:
        """The input as (samples, channels, *positions), whatever the replaced layer would have taken."""
        if not self.axes:
            return x.reshape(-1, x.shape[-1])
        return x if x.ndim == self.axes + 2 else x[None]

    def where(self, group: int, start: int, stop: int) -> slice:
        """The channels of `first_norm` that belong to features [start, stop) of a group."""
        offset = sum(f.n_features for f in self.features[:group])
        return slice(offset + start, offset + stop)

    def chunks(self, features: Features, inputs: Tensor) -> Iterator[tuple[int, int]]:
        """Ranges of features whose hidden activations fit into `CHUNK_BYTES`."""
        positions = inputs.numel() // max(1, inputs.shape[1])
        step = max(1, CHUNK_BYTES // max(1, positions * inputs.element_size()))
        for start in range(0, features.n_features, step):
            yield start, min(start + step, features.n_features)

    def group_inputs(self, x: Tensor) -> Iterator[tuple[int, Features, Tensor]]:
        """(group, its features, its padded inputs) of a batch."""
        n_inputs = self.features[0].shape[1]
        if any(self.padding):
            mode = self.options["padding_mode"]
            x = functional.pad(x, self.padding, mode="constant" if mode == "zeros" else mode)
        for group, features in enumerate(self.features):
            yield group, features, x.narrow(1, group * n_inputs, n_inputs)

    def hidden(self, inputs: Tensor, features: Features, group: int, start: int, stop: int) -> Tensor:
        """What features [start, stop) of a group see, before their norm."""
        right = self._weights("right", features, group, start, stop).to(inputs.dtype)
        if not self.axes:
            return inputs @ right.mT
        if features.kernel == "second":
            weight = right.reshape(stop - start, features.shape[1], *(1,) * self.axes)
            return _CONVOLVE[self.axes](inputs, weight)
        weight = right.reshape(stop - start, *features.shape[1:])
        stride, dilation = self.options["stride"], self.options["dilation"]
        return _CONVOLVE[self.axes](inputs, weight, stride=stride, dilation=dilation)

    def _second(self, hidden: Tensor, features: Features, group: int, start: int, stop: int) -> Tensor:
        left = self._weights("left", features, group, start, stop).to(hidden.dtype)
        if not self.axes:
            return hidden @ left
        if features.kernel == "second":
            weight = left.mT.reshape(features.shape[0], features.n_kernel, stop - start).mT
            weight = weight.reshape(features.shape[0], stop - start, *features.shape[2:])
            stride, dilation = self.options["stride"], self.options["dilation"]
            return _CONVOLVE[self.axes](hidden, weight, stride=stride, dilation=dilation)
        weight = left.mT.reshape(features.shape[0], stop - start, *(1,) * self.axes)
        return _CONVOLVE[self.axes](hidden, weight)

    def _weights(self, side: str, features: Features, group: int, start: int, stop: int) -> Tensor:
        """A chunk of frozen weights, a row per feature."""
        if self.storage == "dense":
            kept: Tensor = getattr(self, side)
            return kept[self.where(group, start, stop)]
        made = features.right(start, stop) if side == "right" else features.left(start, stop).mT
        return made.to(self.first_norm.weight.device)


def identity_norm(norm: nn.modules.batchnorm._BatchNorm) -> nn.modules.batchnorm._BatchNorm:
    """The norm with statistics (0, 1), so that in evaluation mode it is x -> weight * x + bias."""
    assert norm.running_var is not None
    norm.running_var.fill_(1.0 - norm.eps)
    return norm.eval()


def affine(norm: nn.modules.batchnorm._BatchNorm) -> tuple[Tensor, Tensor]:
    """(scale, shift) of a norm in evaluation mode: x -> scale * x + shift. Theory: giannou2023:prop-1"""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    return scale, norm.bias - scale * norm.running_mean


def set_affine(
    norm: nn.modules.batchnorm._BatchNorm, scale: Tensor, shift: Tensor, *, mean: Tensor, variance: Tensor
) -> None:
    """Gives the norm these statistics and the parameters with which it is x -> scale * x + shift.

    Theory: giannou2023:prop-1
    """
    assert norm.running_mean is not None
    assert norm.running_var is not None
    with torch.no_grad():
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(variance)
        norm.weight.copy_(scale * torch.sqrt(norm.running_var + norm.eps))
        norm.bias.copy_(shift + scale * norm.running_mean)


def normalise(norm: nn.modules.batchnorm._BatchNorm, x: Tensor, which: slice) -> Tensor:
    """The norm's channels `which` applied to x (samples, channels, *positions)."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    return functional.batch_norm(
        x, norm.running_mean[which], norm.running_var[which], norm.weight[which], norm.bias[which],
        training=norm.training, momentum=norm.momentum or 0.0, eps=norm.eps,
    )  # fmt: skip


def layer_options(layer: nn.Module) -> dict[str, Any]:
    """What a convolution was made with, apart from its channels; nothing for a linear layer."""
    names = ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
    return {name: getattr(layer, name) for name in names} if hasattr(layer, "stride") else {}


def _explicit_padding(options: dict[str, Any]) -> tuple[int, ...]:
    """Padding for functional.pad, last axis first, from numbers, "same" or "valid"."""
    kernel, dilation, padding = options["kernel_size"], options["dilation"], options["padding"]
    pairs: list[int] = []
    for axis in reversed(range(len(kernel))):
        if padding == "valid":
            pairs += [0, 0]
        elif padding == "same":
            total = dilation[axis] * (kernel[axis] - 1)
            pairs += [total // 2, total - total // 2]
        else:
            pairs += [padding[axis], padding[axis]]
    return tuple(pairs)
