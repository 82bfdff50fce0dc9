"""The blocks that take a layer's place.

    y = norm2( left . phi( norm1( right . x ) ) )

`right` and `left` are random and frozen, known by their seed; the two norms hold all that was chosen. The forward pass
streams over the features in chunks: hidden activations of one chunk at a time, added up at once, so that peak memory
does not grow with the number of features. Chunks are kept (`storage="dense"`) or made from the seed on each pass
(`"seed"`).

The kernel of a convolution sits in the first frozen layer by default: padding and stride are then the target's own, and
what the shift of norm1 adds is the same at every output position, borders included. With the kernel in the second layer
the *input* is padded, not the hidden layer, for the same reason. A frozen kernel may be larger than the target's: the
shape of the features then tells its size, the options the target's.

Theory: giannou2023:thm-1, burkholz2024:thm-2.4
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.features import Features
from onlynorm.frozen.form import Block, source_from_settings, source_settings
from onlynorm.frozen.streaming import PATCH_BYTES, Chunk, Patches, n_rows, stream, whole_lines
from onlynorm.modules.affine import Affine, affine, make_norm, normalise
from onlynorm.modules.convolution import explicit_padding, plain_kernel
from onlynorm.modules.layers import options_from_settings, per_output, plain_layer

CHUNK_BYTES = 64 * 2**20
"""Hidden activations alive at one time."""
DRAWN = torch.float64
"""The precision in which frozen weights are drawn."""
_CONVOLVE: dict[int, Callable[..., Tensor]] = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}


class NormOnlyBlock(Block):
    """A layer rebuilt from frozen random features: called like the Linear or Conv it replaces.

    Its parameters are those of `first_norm` (one pair per feature) and `second_norm` (one pair per output). `low` and
    `high` bound what each feature may see before its norm; inside, the activation is slope * z + offset.
    """

    kind = "wide"
    low: Tensor
    high: Tensor
    slope: Tensor
    offset: Tensor
    right: Tensor
    left: Tensor

    def __init__(
        self,
        options: dict[str, Any],
        features: list[Features],
        *,
        activation: nn.Module | None = None,
        norms: str = "batch",
        storage: str = "dense",
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        self.features = features
        self.activation = activation or nn.Identity()
        self.storage = storage
        self.axes = len(features[0].shape) - 2
        self.options = options
        self.padding = explicit_padding(options, features[0].shape[2:]) if self.axes else ()
        self.norms = norms
        n_features = sum(f.n_features for f in features)
        self.first_norm = make_norm(norms, n_features, axes=self.axes, dtype=dtype)
        self.second_norm = make_norm(norms, sum(f.shape[0] for f in features), axes=self.axes, dtype=dtype)
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

    @property
    def n_features(self) -> int:
        return self.first_norm.num_features

    def sources(self) -> list[Features]:
        return self.features

    def settings(self) -> dict[str, Any]:
        features = [source_settings(one) for one in self.features]
        return {"options": self.options, "features": features, "norms": self.norms}

    @classmethod
    def from_settings(cls, settings: dict[str, Any], *, activation: nn.Module | None, storage: str) -> NormOnlyBlock:
        features = [source_from_settings(one) for one in settings["features"]]
        options = options_from_settings(settings["options"])
        return cls(options, features, activation=activation, norms=settings["norms"], storage=storage)

    def compute(self, x: Tensor) -> Tensor:
        batch = self.as_batch(x)
        outputs = []
        for group, features, inputs in self.group_inputs(batch):
            if self.axes and self._is_fixed_map(inputs, features):
                outputs.append(self._stream(inputs, features, group))
                continue
            total: Tensor | None = None
            for start, stop in self.chunks(features, inputs):
                which = self.where(group, start, stop)
                hidden = self.hidden(inputs, features, group, start, stop)
                if self.watch is not None:
                    self.watch(hidden, self.low[which], self.high[which], is_first=which.start == 0)
                hidden = self.activation(normalise(self.first_norm, hidden, which))
                made = self._second(hidden, features, group, start, stop)
                total = made if total is None else total + made
            assert total is not None
            outputs.append(total)
        whole = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
        whole = self.finish(whole, batch)
        if not self.axes:
            return whole.reshape(*x.shape[:-1], whole.shape[1])
        return whole if x.ndim == self.axes + 2 else whole[0]

    def _is_fixed_map(self, inputs: Tensor, features: Features) -> bool:
        """Whether nothing is learned from this pass, so that a convolution may run as matrix products in place."""
        learns = torch.is_grad_enabled() and (inputs.requires_grad or self.first_norm.weight.requires_grad)
        is_fixed = isinstance(self.first_norm, Affine) or not self.first_norm.training
        fits = self.storage == "dense" or self._patches(features).n_bytes(inputs) <= CHUNK_BYTES
        return features.kernel != "second" and is_fixed and not learns and fits and len(inputs) > 0

    def _patches(self, features: Features) -> Patches:
        return Patches(tuple(features.shape[2:]), self.options["stride"], self.options["dilation"])

    def _stream(self, inputs: Tensor, features: Features, group: int) -> Tensor:
        """The output of a group's second layer; samples go in parts where kept weights make that cheap."""
        seen, n_parts = self._patches(features), 1
        if self.storage == "dense" and len(self.features) == 1:
            n_parts = min(len(inputs), -(-seen.n_bytes(inputs) // PATCH_BYTES))
        made = []
        for part in inputs.tensor_split(n_parts):
            columns = seen.columns(part)
            watch = None if self.watch is None else functools.partial(self._watch_rows, len(part))
            total = stream(columns, self._frozen(features, group, columns), activation=self.activation, watch=watch)
            made.append(total.view(features.shape[0], len(part), *seen.positions(part)).movedim(0, 1))
        return torch.cat(made)

    def _frozen(self, features: Features, group: int, columns: Tensor) -> Iterator[Chunk]:
        scale, shift = affine(self.first_norm)
        step = n_rows(max(columns.shape[1], features.rows + features.cols), columns.element_size())
        for start in range(0, features.n_features, step):
            stop = min(start + step, features.n_features)
            which = self.where(group, start, stop)
            right, left = (self._weights(side, features, group, start, stop) for side in ("right", "left"))
            yield Chunk(right.to(columns.dtype), left.to(columns.dtype), scale[which], shift[which], which)

    def _watch_rows(self, n_samples: int, hidden: Tensor, which: slice) -> None:
        assert self.watch is not None
        by_sample = hidden.view(len(hidden), n_samples, -1).movedim(0, 1)
        self.watch(by_sample, self.low[which], self.high[which], is_first=which.start == 0)

    def finish(self, made: Tensor, batch: Tensor) -> Tensor:
        """The output (samples, out, *positions) from what the second frozen layer made of the batch."""
        return normalise(self.second_norm, made, slice(None))

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
        """Ranges of features whose hidden activations, and whose frozen weights, fit into `CHUNK_BYTES`."""
        positions = inputs.numel() // max(1, inputs.shape[1])
        # Frozen weights are drawn in float64, whatever the precision of the inputs.
        widest = max(positions * inputs.element_size(), (features.rows + features.cols) * DRAWN.itemsize)
        step = whole_lines(max(1, CHUNK_BYTES // widest))
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
        if self.axes and features.kernel == "second":
            weight = right.reshape(stop - start, features.shape[1], *(1,) * self.axes)
            return _CONVOLVE[self.axes](inputs, weight)
        return self.convolve(inputs, right.reshape(stop - start, *features.shape[1:]))

    def convolve(self, inputs: Tensor, weight: Tensor) -> Tensor:
        """The frozen layer that holds the kernel, applied to padded inputs of a group."""
        if not self.axes:
            return inputs @ weight.mT
        return _CONVOLVE[self.axes](inputs, weight, stride=self.options["stride"], dilation=self.options["dilation"])

    def _second(self, hidden: Tensor, features: Features, group: int, start: int, stop: int) -> Tensor:
        left = self._weights("left", features, group, start, stop).to(hidden.dtype)
        if not self.axes:
            return hidden @ left
        if features.kernel == "second":
            weight = left.mT.reshape(features.shape[0], features.n_kernel, stop - start).mT
            return self.convolve(hidden, weight.reshape(features.shape[0], stop - start, *features.shape[2:]))
        weight = left.mT.reshape(features.shape[0], stop - start, *(1,) * self.axes)
        return _CONVOLVE[self.axes](hidden, weight)

    def _weights(self, side: str, features: Features, group: int, start: int, stop: int) -> Tensor:
        """A chunk of frozen weights, a row per feature."""
        if self.storage == "dense":
            kept: Tensor = getattr(self, side)
            return kept[self.where(group, start, stop)]
        made = features.right(start, stop) if side == "right" else features.left(start, stop).mT
        # Laid out as a kept chunk is, so that products round alike.
        return made.to(self.first_norm.weight.device).contiguous()

    def is_reproducible(self) -> bool:
        if self.storage != "dense":
            return True
        for group, one in enumerate(self.features):
            which = self.where(group, 0, one.n_features)
            right, left = self.right[which], self.left[which]
            if not torch.equal(right, one.right().to(right)) or not torch.equal(left, one.left().mT.to(left)):
                return False
        return True

    @torch.no_grad()
    def to_plain(self) -> nn.Module:
        weight, bias = self.effective()
        weight, options = plain_kernel(weight, self.options)
        return plain_layer(weight, bias, options).to(self.first_norm.weight)

    def effective(self) -> tuple[Tensor, Tensor]:
        """W = diag(scale2) left diag(slope scale1) right, with the frozen kernel, and what the shifts add."""
        weight, added = self.branch()
        scale, shift = (values.detach().double().cpu() for values in affine(self.second_norm))
        return per_output(scale, weight) * weight, shift + scale * added

    def branch(self) -> tuple[Tensor, Tensor]:
        """Weight and constant of what reaches the second norm, in float64 on the CPU."""
        scale, shift = (values.detach().double() for values in affine(self.first_norm))
        slope, offset = self.slope.double(), self.offset.double()
        weights, added = [], []
        for group, one in enumerate(self.features):
            which = self.where(group, 0, one.n_features)
            matrix = torch.zeros(one.rows, one.cols, dtype=torch.float64)
            constant = torch.zeros(one.rows, dtype=torch.float64)
            gamma, beta = (slope * scale)[which].cpu(), (slope * shift + offset)[which].cpu()
            chunk = max(1, 2**22 // (one.rows + one.cols))
            for start in range(0, one.n_features, chunk):
                part = slice(start, min(start + chunk, one.n_features))
                left = one.left(part.start, part.stop).double().cpu()
                matrix += (left * gamma[part]) @ one.right(part.start, part.stop).double().cpu()
                constant += left @ beta[part]
            weights.append(one.as_weight(matrix))
            added.append(constant.reshape(one.shape[0], -1).sum(1))
        return torch.cat(weights), torch.cat(added)


class LowRankBlock(Block):
    """Two blocks in sequence that stand for one layer: the first makes the factor B, the second A.

    Each counts by itself which samples leave its range.
    """

    kind = "low_rank"

    def __init__(self, first: NormOnlyBlock, second: NormOnlyBlock) -> None:
        super().__init__()
        self.first = first
        self.second = second

    @property
    def n_features(self) -> int:
        return self.first.n_features + self.second.n_features

    def sources(self) -> list[Features]:
        return [*self.first.sources(), *self.second.sources()]

    def settings(self) -> dict[str, Any]:
        return {"first": self.first.settings(), "second": self.second.settings()}

    @classmethod
    def from_settings(cls, settings: dict[str, Any], *, activation: nn.Module | None, storage: str) -> LowRankBlock:
        first, second = (
            NormOnlyBlock.from_settings(settings[name], activation=activation, storage=storage)
            for name in ("first", "second")
        )
        return cls(first, second)

    def compute(self, x: Tensor) -> Tensor:
        made: Tensor = self.second(self.first(x))
        return made

    def is_reproducible(self) -> bool:
        return self.first.is_reproducible() and self.second.is_reproducible()

    @torch.no_grad()
    def to_plain(self) -> nn.Module:
        """W = A B and bias a + A b, with the options of B's layer."""
        (A, a), (B, b) = self.second.effective(), self.first.effective()
        groups = len(self.second.features)
        parts = zip(A.flatten(1).chunk(groups), B.flatten(1).chunk(groups), b.chunk(groups), strict=True)
        made = [(left @ right, left @ constant) for left, right, constant in parts]
        weight = torch.cat([product for product, _ in made]).reshape(-1, *B.shape[1:])
        bias = a + torch.cat([added for _, added in made])
        weight, options = plain_kernel(weight, self.first.options)
        return plain_layer(weight, bias, options).to(self.first.first_norm.weight)
