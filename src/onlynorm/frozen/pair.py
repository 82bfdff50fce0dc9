"""The blocks that take a layer's place.

    y = norm2( left . phi( norm1( right . x ) ) )

`right` and `left` are random and frozen, known by their seed; the two norms hold all that was chosen. The forward pass
streams over the features in chunks: hidden activations of one chunk at a time, added up at once, so that peak memory
does not grow with the number of features. Chunks are kept (`storage="dense"`) or made from the seed on each pass
(`"seed"`). Structured features share what they see, and with it the statistics and the range: `first_norm` has one of
each per distinct input, and the forward pass costs what the structure costs (see `streaming`).

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
from onlynorm.features.draw import factor_rows, shape_weight
from onlynorm.frozen.form import Block, source_from_settings, source_settings
from onlynorm.frozen.streaming import (
    PATCH_BYTES,
    Chunk,
    Patches,
    Rows,
    find_sharing,
    fold_kernel,
    missing_features,
    n_rows,
    stream,
    sum_features,
    whole_lines,
)
from onlynorm.intervals.tensor import Interval
from onlynorm.modules.activations import leak
from onlynorm.modules.affine import Affine, affine, make_norm, normalise, normalise_inputs
from onlynorm.modules.convolution import explicit_padding, plain_kernel
from onlynorm.modules.layers import options_from_settings, per_output, plain_layer

CHUNK_BYTES = 64 * 2**20
"""Hidden activations alive at one time."""
SEEN_BYTES = 8 * 2**20
"""The same of distinct inputs that are picked from the patches, which takes no frozen weights."""
PART = 2**15
"""Norm parameters that are worked on at one time."""
DRAWN = torch.float64
"""The precision in which frozen weights are drawn."""
_CONVOLVE: dict[int, Callable[..., Tensor]] = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}


class NormOnlyBlock(Block):
    """A layer rebuilt from frozen random features: called like the Linear or Conv it replaces.

    Its parameters are those of `first_norm` (one pair per feature) and `second_norm` (one pair per output). `low` and
    `high` bound what each distinct input of the features may be before the norm; inside, the activation is
    slope * z + offset. `lines` has two pairs of slope and offset: the first for features whose range has a centre that
    is not negative after the norm, the second for the others.
    """

    kind = "wide"
    low: Tensor
    high: Tensor
    lines: Tensor
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
        n_features, n_seen = sum(f.n_features for f in features), sum(f.n_seen for f in features)
        self.sharing = find_sharing(features)
        self.first_norm = make_norm(norms, n_features, axes=self.axes, dtype=dtype, sharing=self.sharing)
        self.second_norm = make_norm(norms, sum(f.shape[0] for f in features), axes=self.axes, dtype=dtype)
        self.register_buffer("low", torch.full((n_seen,), -torch.inf, dtype=dtype))
        self.register_buffer("high", torch.full((n_seen,), torch.inf, dtype=dtype))
        self.register_buffer("lines", torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=dtype))
        self.store(dtype)

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

    def frozen(self) -> dict[str, Callable[[], Tensor]]:
        if self.storage != "dense" or not self.features[0].has_factors:
            return {}
        return {side: functools.partial(self._draw, side) for side in ("right", "left")}

    def _draw(self, side: str) -> Tensor:
        return torch.cat([factor_rows(one, side) for one in self.features])

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
            if features.is_structured:
                outputs.append(self._through_grid(inputs, features, group))
                continue
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

    def _through_grid(self, inputs: Tensor, features: Features, group: int) -> Tensor:
        """What the second layer of a group of structured features returns."""
        norm = self.first_norm
        trains = norm.training and not isinstance(norm, Affine)
        if self.watch is not None:
            for start, stop in self.chunks(features, inputs):
                seen, where = self.hidden(inputs, features, group, start, stop), self.seen_where(group, start, stop)
                self.watch(seen, self.low[where], self.high[where], is_first=where.start == 0)
        rows = self._grid_rows(features, group, trains=trains)
        if isinstance(self.activation, nn.Identity) and not trains:
            weight, constant = self._as_one_layer(features, group, rows)
            return self.convolve(inputs, weight) + constant.reshape(-1, *(1,) * self.axes)
        learns = torch.is_grad_enabled() and (inputs.requires_grad or norm.weight.requires_grad)
        n_parts = 1
        if not trains and len(self.features) == 1:
            n_parts = max(1, min(len(inputs), -(-self._n_patch_bytes(inputs, features) // PATCH_BYTES)))
        missing = missing_features(features, inputs)
        made = []
        for part in inputs.tensor_split(n_parts):
            seen, positions = self._patch_rows(part, features)
            if features.has_factors:
                seen = seen @ self._weights("right", features, group, 0, features.cols).to(seen.dtype).mT
            if trains:
                assert not isinstance(norm, Affine)
                seen = normalise_inputs(norm, seen, self.seen_where(group, 0, features.cols))
            total = sum_features(
                seen, rows, features.rows, activation=self.activation, missing=missing, learns=learns or trains
            )
            if features.has_factors:
                total = total @ self._weights("left", features, group, 0, features.rows).to(seen.dtype)
            made.append(total.view(len(part), *positions, features.rows).movedim(-1, 1))
        whole = torch.cat(made)
        if features.kernel == "second" and self.axes:
            return fold_kernel(whole, features.shape[2:], self.options["stride"], self.options["dilation"])
        return whole

    def _patch_rows(self, part: Tensor, features: Features) -> tuple[Tensor, list[int]]:
        """What the first frozen layer reads, a row for every sample and position, and the positions on every axis."""
        if self.axes and features.kernel == "first":
            patches = self._patches(features)
            return patches.rows(part), patches.positions(part)
        return part.movedim(1, -1).flatten(0, -2), list(part.shape[2:])

    def _n_patch_bytes(self, inputs: Tensor, features: Features) -> int:
        if self.axes and features.kernel == "first":
            return self._patches(features).n_bytes(inputs)
        return inputs.numel() * inputs.element_size()

    def _grid_rows(self, features: Features, group: int, *, trains: bool) -> Rows:
        """Scale and shift of the features in rows of the grid, for inputs as they are or, in training, normalised."""

        def lines(which: slice) -> tuple[Tensor, Tensor]:
            norm = self.first_norm
            return (norm.weight[which], norm.bias[which]) if trains else affine(norm, which)

        if features.is_full_grid:
            cols = features.cols

            def rows(start: int, stop: int) -> tuple[Tensor, Tensor]:
                scale, shift = lines(self.where(group, start * cols, stop * cols))
                return scale.view(-1, cols), shift.view(-1, cols)

            return rows
        structure = features.structure
        assert structure is not None
        scale, shift = (structure.grid(values) for values in lines(self.where(group, 0, features.n_features)))
        return lambda start, stop: (scale[start:stop], shift[start:stop])

    def _as_one_layer(self, features: Features, group: int, rows: Rows) -> tuple[Tensor, Tensor]:
        """The weight U2 scale U1 of a group without activation, and what its shifts add to each output."""
        step, like = max(1, PART // features.cols), self.first_norm.weight
        made, constant = like.new_empty(features.rows, features.cols), like.new_empty(features.rows)
        for start in range(0, features.rows, step):
            scale, shift = rows(start, min(start + step, features.rows))
            made[start : start + step], constant[start : start + step] = scale, shift.sum(1)
        if features.has_factors:
            left = self._weights("left", features, group, 0, features.rows).to(made)
            made = left.mT @ made @ self._weights("right", features, group, 0, features.cols).to(made)
            constant = constant @ left
        return shape_weight(features, made), constant.reshape(features.shape[0], -1).sum(1)

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

    def seen_where(self, group: int, start: int, stop: int) -> slice:
        """The entries of `low` and `high` that belong to distinct inputs [start, stop) of a group."""
        offset = sum(f.n_seen for f in self.features[:group])
        return slice(offset + start, offset + stop)

    def spread(self, values: Tensor, which: slice) -> Tensor:
        """A value per distinct input as one per feature, for some of the features."""
        return values[which] if self.sharing is None else self.sharing.spread(values, which)

    def chunks(self, features: Features, inputs: Tensor) -> Iterator[tuple[int, int]]:
        """Ranges of distinct inputs of the features that, with their frozen weights, fit into `CHUNK_BYTES`."""
        positions = inputs.numel() // max(1, inputs.shape[1])
        # Frozen weights are drawn in float64, whatever the precision of the inputs.
        widest = max(positions * inputs.element_size(), (features.rows + features.cols) * DRAWN.itemsize)
        if not features.has_factors:
            widest = positions * inputs.element_size()
        step = whole_lines(max(1, (CHUNK_BYTES if features.has_factors else SEEN_BYTES) // max(1, widest)))
        for start in range(0, features.n_seen, step):
            yield start, min(start + step, features.n_seen)

    def group_inputs(self, x: Tensor) -> Iterator[tuple[int, Features, Tensor]]:
        """(group, its features, its padded inputs) of a batch."""
        n_inputs = self.features[0].shape[1]
        if any(self.padding):
            mode = self.options["padding_mode"]
            x = functional.pad(x, self.padding, mode="constant" if mode == "zeros" else mode)
        for group, features in enumerate(self.features):
            yield group, features, x.narrow(1, group * n_inputs, n_inputs)

    def hidden(self, inputs: Tensor, features: Features, group: int, start: int, stop: int) -> Tensor:
        """Distinct inputs [start, stop) of the features of a group, before their norm."""
        if features.is_structured and not features.has_factors and not isinstance(inputs, Interval):
            if not self.axes or features.kernel == "second":
                return inputs[:, start:stop]
            first, last = start // features.n_kernel, -(-stop // features.n_kernel)
            seen = self._patches(features).channels(inputs[:, first:last])
            return seen[:, start - first * features.n_kernel : stop - first * features.n_kernel]
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
        """A chunk of frozen weights, a row per feature; of structured features one factor, see `Features.factor`."""
        if self.storage == "dense" and features.has_factors:
            kept: Tensor = getattr(self, side)
            offset = group * (len(kept) // len(self.features))
            return kept[offset + start : offset + stop]
        # Laid out as a kept chunk is, so that products round alike.
        return factor_rows(features, side, start, stop).to(self.first_norm.weight.device).contiguous()

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
        weights, added = [], []
        for group, one in enumerate(self.features):
            gamma, beta = (values.double().cpu() for values in self.line(self.where(group, 0, one.n_features)))
            if one.structure is not None:
                weights.append(one.as_weight(one.structure.apply(gamma)))
                added.append(one.structure.constant(beta).reshape(one.shape[0], -1).sum(1))
                continue
            matrix = torch.zeros(one.rows, one.cols, dtype=torch.float64)
            constant = torch.zeros(one.rows, dtype=torch.float64)
            chunk = max(1, 2**22 // (one.rows + one.cols))
            for start in range(0, one.n_features, chunk):
                part = slice(start, min(start + chunk, one.n_features))
                left = one.left(part.start, part.stop).double().cpu()
                matrix += (left * gamma[part]) @ one.right(part.start, part.stop).double().cpu()
                constant += left @ beta[part]
            weights.append(one.as_weight(matrix))
            added.append(constant.reshape(one.shape[0], -1).sum(1))
        return torch.cat(weights), torch.cat(added)

    @torch.no_grad()
    def line(self, which: slice) -> tuple[Tensor, Tensor]:
        """Gain and constant of features inside their range, norm and activation together, in float64."""
        scale, shift = (values.double() for values in affine(self.first_norm, which))
        is_second = scale * self.spread((self.low + self.high).double() / 2, which) + shift < 0.0
        slope, offset = (torch.where(is_second, second, first) for first, second in self.lines.double().mT)
        own = leak(self.activation)
        if own is not None and own.ndim:  # a PReLU with a slope for every feature
            slope = torch.where(is_second, own[which].to(slope), slope)
        return slope * scale, slope * shift + offset


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
