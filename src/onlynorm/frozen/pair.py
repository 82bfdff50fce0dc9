"""Blocks that replace a layer.

    y = norm2( left . phi( norm1( right . x ) ) )

`right` and `left` are random, frozen and determined by a seed; only the two norms are chosen. The forward pass sums
over chunks of features, so that peak memory does not grow with their number. Frozen weights are stored
(`storage="dense"`) or drawn from the seed on each pass (`"seed"`). Structured features with the same input share its
statistics and range: `first_norm` has one of each per distinct input (see `streaming` for the cost).

By default the kernel of a convolution is in the first frozen layer, with the padding and stride of the target. The
shift of norm1 then adds the same constant at every output position, including borders. With the kernel in the second
layer the *input* is padded, not the hidden layer, for the same reason. The frozen kernel may be larger than the
target's: its size is in the shape of the features, that of the target in the options.

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
from onlynorm.features.structured import IdCondMinimal
from onlynorm.frozen.form import FrozenBlock
from onlynorm.frozen.maps import FrozenMap, GridMap, features_from_settings, make_maps
from onlynorm.frozen.streaming import (
    PATCH_BYTES,
    Chunk,
    ConvPatches,
    Rows,
    align_step,
    find_sharing,
    fold_kernel,
    missing_features,
    n_rows,
    stream,
    sum_features,
)
from onlynorm.intervals.tensor import Interval
from onlynorm.modules.activations import leak
from onlynorm.modules.affine import Affine, affine, make_norm, normalise, normalise_inputs
from onlynorm.modules.convolution import convolve, explicit_padding, plain_kernel
from onlynorm.modules.layers import options_from_settings, per_output, plain_layer

CHUNK_BYTES = 64 * 2**20
"""Maximum bytes of the hidden activations of a chunk."""
INPUT_BYTES = 8 * 2**20
"""The same for distinct inputs selected from the patches, without frozen weights."""
PART = 2**15
"""Norm parameters processed at a time."""
DRAWN = torch.float64
"""The dtype in which frozen weights are drawn."""


class NormOnlyBlock(FrozenBlock):
    """A Linear or Conv layer rebuilt from frozen random features.

    Its parameters are those of `first_norm` (one pair per feature) and `second_norm` (one pair per output). `low` and
    `high` are the range of each distinct input of the features before the norm. Inside it the activation is
    slope * z + offset. `lines` has two pairs of slope and offset: the first for features whose range is centred at zero
    or above after the norm, the second for the others.
    """

    kind = "wide"
    low: Tensor
    high: Tensor
    lines: Tensor

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
        self.frozen = make_maps(features, storage=storage, dtype=dtype)
        self.activation = nn.Identity() if activation is None else activation
        self.storage = storage
        self.axes, self.n_inputs = len(features[0].shape) - 2, sum(f.shape[1] for f in features)
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

    def extra_repr(self) -> str:
        first = self.features[0]
        return (
            f"{first.name}, {self.first_norm.num_features} features, shape={first.shape}, groups={len(self.features)}, "
            f"seed={first.seed}, layer={first.layer!r}, storage={self.storage!r}"
        )

    @property
    def n_features(self) -> int:
        return self.first_norm.num_features

    def map(self, group: int) -> FrozenMap:
        """The frozen map of a group."""
        one: Any = self.frozen[group]
        return one

    def grid_map(self, group: int) -> GridMap:
        """The frozen map of a group of structured features."""
        one = self.map(group)
        assert isinstance(one, GridMap)
        return one

    def settings(self) -> dict[str, Any]:
        features = [self.map(group).settings() for group in range(len(self.features))]
        return {"options": self.options, "features": features, "norms": self.norms}

    @classmethod
    def from_settings(cls, settings: dict[str, Any], *, activation: nn.Module | None, storage: str) -> NormOnlyBlock:
        features = [features_from_settings(one) for one in settings["features"]]
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
                which = self.feature_slice(group, start, stop)
                hidden = self.hidden(inputs, features, group, start, stop)
                if self.observer is not None:
                    self.observer(hidden, self.low[which], self.high[which], is_first=which.start == 0)
                hidden = self.activation(normalise(self.first_norm, hidden, which))
                made = self._second(hidden, features, group, start, stop)
                total = made if total is None else total + made
            assert total is not None
            outputs.append(total)
        whole = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
        return self.as_output(self.finish(whole, batch), x)

    def _through_grid(self, inputs: Tensor, features: Features, group: int) -> Tensor:
        """The output of the second layer of a group of structured features."""
        norm = self.first_norm
        trains = norm.training and not isinstance(norm, Affine)
        if self.observer is not None:
            for start, stop in self.chunks(features, inputs):
                hidden, which = self.hidden(inputs, features, group, start, stop), self.input_slice(group, start, stop)
                self.observer(hidden, self.low[which], self.high[which], is_first=which.start == 0)
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
            values, positions = self._rotated_rows(part, features, group)
            if trains:
                assert not isinstance(norm, Affine)
                values = normalise_inputs(norm, values, self.input_slice(group, 0, features.n_seen))
            total = sum_features(
                values,
                rows,
                features.grid_shape[0],
                activation=self.activation,
                missing=missing,
                learns=learns or trains,
            )
            total = self.grid_map(group).rotate_outputs(total)
            made.append(total.view(len(part), *positions, features.rows).movedim(-1, 1))
        whole = torch.cat(made)
        if features.kernel == "second" and self.axes:
            return fold_kernel(whole, features.shape[2:], self.options["stride"], self.options["dilation"])
        return whole

    def _patch_rows(self, part: Tensor, features: Features) -> tuple[Tensor, list[int]]:
        """The inputs of the first frozen layer, a row per sample and position, and the output size along each axis."""
        if self.axes and features.kernel == "first":
            patches = self._patches(features)
            return patches.rows(part), patches.positions(part)
        return part.movedim(1, -1).flatten(0, -2), list(part.shape[2:])

    def _rotated_rows(self, part: Tensor, features: Features, group: int) -> tuple[Tensor, list[int]]:
        """The distinct inputs of the features, a row per sample and position, and the output size along each axis."""
        values, positions = self._patch_rows(part, features)
        can_overwrite = not torch.compiler.is_compiling() and type(values) is Tensor
        is_copy = can_overwrite and values.untyped_storage().data_ptr() != part.untyped_storage().data_ptr()
        return self.grid_map(group).rotate_inputs(values, overwrite=is_copy), positions

    def _n_patch_bytes(self, inputs: Tensor, features: Features) -> int:
        if self.axes and features.kernel == "first":
            return self._patches(features).n_bytes(inputs)
        return inputs.numel() * inputs.element_size()

    def _grid_rows(self, features: Features, group: int, *, trains: bool) -> Rows:
        """Scale and shift of the features in rows of the grid; in training, for normalised inputs."""

        def lines(which: slice) -> tuple[Tensor, Tensor]:
            norm = self.first_norm
            return (norm.weight[which], norm.bias[which]) if trains else affine(norm, which)

        if features.is_full_grid:
            cols = features.n_seen

            def rows(start: int, stop: int) -> tuple[Tensor, Tensor]:
                scale, shift = lines(self.feature_slice(group, start * cols, stop * cols))
                return scale.view(-1, cols), shift.view(-1, cols)

            return rows
        structure = features.structure
        assert structure is not None
        if isinstance(structure, IdCondMinimal):
            return _MinimalRows(structure, lines, self.feature_slice(group, 0, 1).start)
        scale, shift = (structure.grid(values) for values in lines(self.feature_slice(group, 0, features.n_features)))
        return lambda start, stop: (scale[start:stop], shift[start:stop])

    def _as_one_layer(self, features: Features, group: int, rows: Rows) -> tuple[Tensor, Tensor]:
        """The weight U2 scale U1 of a group without activation, and the constant of each output."""
        (height, width), like = features.grid_shape, self.first_norm.weight
        step = max(1, PART // width)
        made, constant = like.new_empty(height, width), like.new_empty(height)
        for start in range(0, height, step):
            scale, shift = rows(start, min(start + step, height))
            made[start : start + step], constant[start : start + step] = scale, shift.sum(1)
        grid = self.grid_map(group)
        made, constant = grid.rotate_grid(made), grid.rotate_outputs(constant)
        return grid.as_weight(made), constant.reshape(features.shape[0], -1).sum(1)

    def _is_fixed_map(self, inputs: Tensor, features: Features) -> bool:
        """Whether no gradients are needed, so that a convolution can be computed by matrix products in place."""
        learns = torch.is_grad_enabled() and (inputs.requires_grad or self.first_norm.weight.requires_grad)
        is_fixed = isinstance(self.first_norm, Affine) or not self.first_norm.training
        fits = self.storage == "dense" or self._patches(features).n_bytes(inputs) <= CHUNK_BYTES
        return features.kernel != "second" and is_fixed and not learns and fits and len(inputs) > 0

    def _patches(self, features: Features) -> ConvPatches:
        return ConvPatches(tuple(features.shape[2:]), self.options["stride"], self.options["dilation"])

    def _stream(self, inputs: Tensor, features: Features, group: int) -> Tensor:
        """The output of a group's second layer; samples are split into parts if frozen weights are stored."""
        patches, n_parts = self._patches(features), 1
        if self.storage == "dense" and len(self.features) == 1:
            n_parts = min(len(inputs), -(-patches.n_bytes(inputs) // PATCH_BYTES))
        made = []
        for part in inputs.tensor_split(n_parts):
            columns = patches.columns(part)
            observer = None if self.observer is None else functools.partial(self._observe_rows, len(part))
            total = stream(
                columns, self._frozen(features, group, columns), activation=self.activation, observer=observer
            )
            made.append(total.view(features.shape[0], len(part), *patches.positions(part)).movedim(0, 1))
        return torch.cat(made)

    def _frozen(self, features: Features, group: int, columns: Tensor) -> Iterator[Chunk]:
        scale, shift = affine(self.first_norm)
        step = n_rows(max(columns.shape[1], features.rows + features.cols), columns.element_size())
        for start in range(0, features.n_features, step):
            stop = min(start + step, features.n_features)
            which = self.feature_slice(group, start, stop)
            right, left = (self.map(group).rows(side, start, stop) for side in ("right", "left"))
            yield Chunk(right.to(columns.dtype), left.to(columns.dtype), scale[which], shift[which], which)

    def _observe_rows(self, n_samples: int, hidden: Tensor, which: slice) -> None:
        assert self.observer is not None
        by_sample = hidden.view(len(hidden), n_samples, -1).movedim(0, 1)
        self.observer(by_sample, self.low[which], self.high[which], is_first=which.start == 0)

    def finish(self, made: Tensor, batch: Tensor) -> Tensor:
        """The output of the block from that of its second frozen layer (samples, out, *positions)."""
        return normalise(self.second_norm, made, slice(None))

    def as_batch(self, x: Tensor) -> Tensor:
        """The input of the replaced layer as (samples, channels, *positions)."""
        if not self.axes:
            return x.reshape(-1, x.shape[-1])
        return x if x.ndim == self.axes + 2 else x[None]

    def feature_slice(self, group: int, start: int, stop: int) -> slice:
        """The channels of `first_norm` for features [start, stop) of a group."""
        offset = sum(f.n_features for f in self.features[:group])
        return slice(offset + start, offset + stop)

    def input_slice(self, group: int, start: int, stop: int) -> slice:
        """The entries of `low` and `high` for distinct inputs [start, stop) of a group."""
        offset = sum(f.n_seen for f in self.features[:group])
        return slice(offset + start, offset + stop)

    def spread(self, values: Tensor, which: slice) -> Tensor:
        """Values per distinct input expanded to the selected features."""
        return values[which] if self.sharing is None else self.sharing.spread(values, which)

    def chunks(self, features: Features, inputs: Tensor) -> Iterator[tuple[int, int]]:
        """Ranges of distinct inputs whose values and frozen weights fit into `CHUNK_BYTES`."""
        positions = inputs.numel() // max(1, inputs.shape[1])
        # Frozen weights are drawn in float64 for any precision of the inputs.
        widest = max(positions * inputs.element_size(), (features.rows + features.cols) * DRAWN.itemsize)
        if not features.has_factors:
            widest = positions * inputs.element_size()
        elif (
            not features.has_dense_factors  # a fast transform computes all at once, and has no interval rule
            and not inputs.is_meta
            and features.cols * positions * inputs.element_size() <= CHUNK_BYTES
        ):
            yield 0, features.n_seen
            return
        step = align_step(max(1, (CHUNK_BYTES if features.has_factors else INPUT_BYTES) // max(1, widest)))
        for start in range(0, features.n_seen, step):
            yield start, min(start + step, features.n_seen)

    def group_inputs(self, x: Tensor) -> Iterator[tuple[int, Features, Tensor]]:
        """(group, features, padded inputs) for each group of a batch."""
        n_inputs = self.features[0].shape[1]
        if any(self.padding):
            mode = self.options["padding_mode"]
            x = functional.pad(x, self.padding, mode="constant" if mode == "zeros" else mode)
        for group, features in enumerate(self.features):
            yield group, features, x.narrow(1, group * n_inputs, n_inputs)

    def hidden(self, inputs: Tensor, features: Features, group: int, start: int, stop: int) -> Tensor:
        """Values of the distinct inputs [start, stop) of a group, before the norm."""
        is_whole = features.is_structured and (start, stop) == (0, features.n_seen)
        if is_whole and features.has_factors and not features.has_dense_factors and not isinstance(inputs, Interval):
            values, positions = self._rotated_rows(inputs, features, group)
            return values.view(len(inputs), *positions, features.cols).movedim(-1, 1)
        if features.is_structured and not features.has_factors and not isinstance(inputs, Interval):
            if not self.axes or features.kernel == "second":
                return inputs[:, start:stop]
            first, last = start // features.n_kernel, -(-stop // features.n_kernel)
            channels = self._patches(features).channels(inputs[:, first:last])
            return channels[:, start - first * features.n_kernel : stop - first * features.n_kernel]
        right = self.map(group).rows("right", start, stop).to(inputs.dtype)
        if self.axes and features.kernel == "second":
            weight = right.reshape(stop - start, features.shape[1], *(1,) * self.axes)
            return convolve(inputs, weight)
        return self.convolve(inputs, right.reshape(stop - start, *features.shape[1:]))

    def convolve(self, inputs: Tensor, weight: Tensor) -> Tensor:
        """The frozen layer with the kernel, applied to padded inputs of a group."""
        if not self.axes:
            return inputs @ weight.mT
        return convolve(inputs, weight, stride=self.options["stride"], dilation=self.options["dilation"])

    def _second(self, hidden: Tensor, features: Features, group: int, start: int, stop: int) -> Tensor:
        left = self.map(group).rows("left", start, stop).to(hidden.dtype)
        if not self.axes:
            return hidden @ left
        if features.kernel == "second":
            weight = left.mT.reshape(features.shape[0], features.n_kernel, stop - start).mT
            return self.convolve(hidden, weight.reshape(features.shape[0], stop - start, *features.shape[2:]))
        weight = left.mT.reshape(features.shape[0], stop - start, *(1,) * self.axes)
        return convolve(hidden, weight)

    @torch.no_grad()
    def to_plain(self) -> nn.Module:
        weight, bias = self.effective()
        weight, options = plain_kernel(weight, self.options)
        return plain_layer(weight, bias, options).to(self.first_norm.weight)

    def effective(self) -> tuple[Tensor, Tensor]:
        """W = diag(scale2) left diag(slope scale1) right, with the frozen kernel, and the bias."""
        weight, added = self.branch()
        scale, shift = (values.detach().double().cpu() for values in affine(self.second_norm))
        return per_output(scale, weight) * weight, shift + scale * added

    def branch(self) -> tuple[Tensor, Tensor]:
        """Weight and constant of the map before the second norm, in float64 on the CPU."""
        weights, added = [], []
        for group, one in enumerate(self.features):
            gamma, beta = (values.double().cpu() for values in self.line(self.feature_slice(group, 0, one.n_features)))
            weights.append(self.map(group).weight(gamma))
            added.append(self.map(group).constant(beta))
        return torch.cat(weights), torch.cat(added)

    @torch.no_grad()
    def line(self, which: slice) -> tuple[Tensor, Tensor]:
        """Gain and constant of norm and activation together, for features inside their range, in float64."""
        scale, shift = (values.double() for values in affine(self.first_norm, which))
        is_second = scale * self.spread((self.low + self.high).double() / 2, which) + shift < 0.0
        slope, offset = (torch.where(is_second, second, first) for first, second in self.lines.double().mT)
        own = leak(self.activation)
        if own is not None and own.ndim:  # a PReLU with one slope per feature
            slope = torch.where(is_second, own[which].to(slope), slope)
        return slope * scale, slope * shift + offset


class _MinimalRows:
    """Scale and shift of features at the minimum width for rows of the grid, computed for some outputs at a time."""

    def __init__(
        self, structure: IdCondMinimal, lines: Callable[[slice], tuple[Tensor, Tensor]], first_feature: int
    ) -> None:
        self.structure, self.lines, self.first_feature = structure, lines, first_feature
        self.computed = range(0)
        self.grids: tuple[Tensor, ...] = ()

    def __call__(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """(scale, shift) of the rows [start, stop), each (rows, cols)."""
        n_rows = self.structure.rows // self.structure.n_outputs
        if start < self.computed.start or stop > self.computed.stop:
            first, n_outputs = start // n_rows, max(1, PART // self.structure.n_positions)
            last = min(max(-(-stop // n_rows), first + n_outputs), self.structure.n_outputs)
            part, own = self.structure.part(first, last)
            shared = self.lines(slice(self.first_feature, self.first_feature + 1))
            others = self.lines(slice(self.first_feature + own.start, self.first_feature + own.stop))
            self.grids = tuple(part.grid(torch.cat(values)) for values in zip(shared, others, strict=True))
            self.computed = range(first * n_rows, last * n_rows)
        scale, shift = (values[start - self.computed.start : stop - self.computed.start] for values in self.grids)
        return scale, shift


class LowRankBlock(FrozenBlock):
    """Two blocks in sequence that replace one layer: the first computes the factor B, the second A.

    Samples outside the range are counted for each block separately.
    """

    kind = "low_rank"

    def __init__(self, first: NormOnlyBlock, second: NormOnlyBlock) -> None:
        super().__init__()
        self.first = first
        self.second = second
        self.axes, self.n_inputs = first.axes, first.n_inputs

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
