"""The block of the deep construction: many narrow frozen layers, each with a skip connection from a slice of the input.

    v_1 = phi(norm_1(W_1 x_1)),   v_i = phi(norm_i(W_i (v_{i-1} + A_i x_i))),   y = W norm_L(W_L (v_{L-1} + A_L x_L))

x_i is the i-th slice of the input's channels, L the number of slices. There is no activation after the last norm, and
no norm after the last frozen layer W: the shift of norm_L gives the bias. The product W_1 A_1 of the paper is one
frozen W_1 here, because it has no layer in between. W_1 and the skips A_i have the kernel, stride and padding of the
target; every other frozen layer is 1 x 1.

An activation that is linear with gain one in its range (identity, ReLU, LeakyReLU, PReLU, ELU, CELU, SELU) needs
nothing else. Any other activation scales v_i relative to the skips, so the block then starts with a norm of the input
that gives the skips the same gain. The papers treat ReLU only and do not need it.

Theory: giannou2023:thm-2, giannou2023:remark-2, giannou2023:remark-9

The block of the multilayer construction: L frozen layers in sequence, each with a norm, and activations between them.

    y = norm_L( W_L phi( norm_(L-1)( W_(L-1) ... phi( norm_1( W_1 x ) ) ) ) )

W_1 has the kernel, padding, stride and dilation of the target; all other layers are 1 x 1, so that shifts add the same
constant at every position. Layers are narrow, so the forward pass computes whole layers, for as many samples at a time
as fit into memory.

Theory: burkholz2024:thm-2.5
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.features import Features
from onlynorm.frozen.form import FrozenBlock
from onlynorm.frozen.maps import FrozenMap, features_from_settings, make_maps
from onlynorm.frozen.pair import CHUNK_BYTES
from onlynorm.frozen.streaming import align_step
from onlynorm.modules.activations import Ray, known
from onlynorm.modules.affine import Norm, affine, make_norm, normalise
from onlynorm.modules.convolution import convolve, explicit_padding, pad_inputs
from onlynorm.modules.layers import options_from_settings, plain_layer

Weights = Callable[[str, int], Tensor]
"""Called with ("left" or "right", layer index); returns its frozen weights, (rows, feat) or (feat, cols)."""


def whole_map(
    weights: Weights,
    gains: Float[Tensor, "layers feat"],
    basis: Float[Tensor, "cols any"],
    *,
    constants: Float[Tensor, "layers feat"] | None = None,
) -> Float[Tensor, "out any"]:
    """The output W E_L of all layers for the inputs in `basis`, see `linear_maps`."""
    last = deque(linear_maps(weights, gains, basis, constants=constants), maxlen=1).pop()
    return weights("left", 0).to(last) @ last


def linear_maps(
    weights: Weights,
    gains: Float[Tensor, "layers feat"],
    basis: Float[Tensor, "cols any"],
    *,
    constants: Float[Tensor, "layers feat"] | None = None,
) -> Iterator[Float[Tensor, "feat any"]]:
    """The output of each layer for the inputs in `basis`: E_i = gains_i (W_i (E_{i-1} + A_i basis_i)).

    `constants` are added to the last column.
    """
    made = basis.new_zeros(gains.shape[1], basis.shape[1])
    start = 0
    for i, gain in enumerate(gains):
        right = weights("right", i).to(basis)
        made = made + right @ basis[start : start + right.shape[1]]
        start += right.shape[1]
        made = gain[:, None] * (weights("left", i).to(basis) @ made if i else made)
        if constants is not None:
            made[:, -1] += constants[i]
        yield made


EVERYTHING = slice(None)


class SequenceBlock(FrozenBlock):
    """Frozen layers in sequence with a norm after each.

    `low` and `high` are the ranges of the inputs of each activation. Inside them it is slope * z + offset.
    """

    low: Tensor
    high: Tensor
    slope: Tensor
    offset: Tensor

    def __init__(
        self,
        options: dict[str, Any],
        axes: int,
        *,
        widths: list[int],
        shape: tuple[int, ...],
        activation: nn.Module | None,
        norms: str,
        storage: str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.options, self.axes, self.norms, self.storage = options, axes, norms, storage
        self.activation = nn.Identity() if activation is None else activation
        self.padding = explicit_padding(options) if axes else ()
        self.layer_norms = nn.ModuleList(make_norm(norms, width, axes=axes, dtype=dtype) for width in widths)
        for name, value in (("low", -torch.inf), ("high", torch.inf), ("slope", 1.0), ("offset", 0.0)):
            self.register_buffer(name, torch.full(shape, value, dtype=dtype))

    def norm(self, i: int) -> Norm:
        """The norm after frozen layer i, starting at 0."""
        norm: Any = self.layer_norms[i]
        return norm

    def padded(self, x: Tensor) -> Tensor:
        """The input as (samples, channels, *positions), with the target's padding."""
        return pad_inputs(x, axes=self.axes, padding=self.padding, options=self.options)


class DeepBlock(SequenceBlock):
    """A Linear or Conv layer rebuilt from narrow frozen layers with skip connections.

    `layers[0]` holds W (left) and W_1 (right), `layers[i]` the next W_i (left) and A_i (right). `input_norm` is None
    if all gains are one.
    """

    kind = "deep"

    def __init__(
        self,
        options: dict[str, Any],
        layers: list[Features],
        *,
        activation: nn.Module | None = None,
        norms: str = "batch",
        storage: str = "dense",
        dtype: torch.dtype = torch.float64,
    ) -> None:
        width = layers[0].n_features
        super().__init__(
            options, len(layers[0].shape) - 2, widths=[width] * len(layers), shape=(len(layers), width),
            activation=activation, norms=norms, storage=storage, dtype=dtype,
        )  # fmt: skip
        self.layers, self.width, self.n_inputs = layers, width, sum(one.shape[1] for one in layers)
        self.frozen = make_maps(layers, storage=storage, dtype=dtype)
        self.input_norm: Norm | None = None
        if needs_input_norm(self.activation, len(layers)):
            self.input_norm = make_norm(norms, self.n_inputs, axes=self.axes, dtype=dtype)

    def extra_repr(self) -> str:
        first = self.layers[0]
        return (
            f"{first.name}, {len(self.layers)} layers of {self.width} features, slices of {first.shape[1]}, "
            f"seed={first.seed}, layer={first.layer!r}, storage={self.storage!r}"
        )

    def settings(self) -> dict[str, Any]:
        layers = [one.settings() for one in self.maps]
        return {"options": self.options, "layers": layers, "norms": self.norms}

    @classmethod
    def from_settings(cls, settings: dict[str, Any], *, activation: nn.Module | None, storage: str) -> DeepBlock:
        layers = [features_from_settings(one) for one in settings["layers"]]
        options = options_from_settings(settings["options"])
        return cls(options, layers, activation=activation, norms=settings["norms"], storage=storage)

    def compute(self, x: Tensor) -> Tensor:
        batch = self.as_batch(x)
        values: Tensor | None = None
        for i in range(len(self.layers)):
            values = self.normalised(i, self.hidden(i, batch, values))
            if self.observer is not None:
                self.observer(values.movedim(-1, 1), self.low[i], self.high[i], is_first=i == 0)
            values = self.activated(i, values)
        assert values is not None
        return self.as_output(self._times_left(0, values).movedim(-1, 1), x)

    def as_batch(self, x: Tensor) -> Tensor:
        """The padded input, normalised if there is an input norm."""
        batch = self.padded(x)
        return batch if self.input_norm is None else normalise(self.input_norm, batch, EVERYTHING)

    def hidden(self, i: int, batch: Tensor, values: Tensor | None) -> Float[Tensor, "samples *positions feat"]:
        """The input of norm i, from the padded batch and the output of the layer before; features last."""
        start = sum(one.shape[1] for one in self.layers[:i])
        inputs = batch.narrow(1, start, self.layers[i].shape[1])
        made = [self.project(inputs, self._part("right", i, which)) for which in self._parts(i)]
        skip = made[0] if len(made) == 1 else torch.cat(made, -1)
        return skip if values is None else self._times_left(i, values + skip)

    def _times_left(self, i: int, values: Float[Tensor, "*rows feat"]) -> Float[Tensor, "*rows out"]:
        """The product of values, features last, with `left` of layer i."""
        total: Tensor | None = None
        for which in self._parts(i):
            made = values[..., which] @ self._part("left", i, which).to(values.dtype).mT
            total = made if total is None else total + made
        assert total is not None
        return total

    def _parts(self, i: int) -> Iterator[slice]:
        """Slices of the features of layer i whose frozen weights fit into `CHUNK_BYTES`."""
        one = self.layers[i]
        step = align_step(max(1, CHUNK_BYTES // (8 * (one.rows + one.cols))))
        for start in range(0, one.n_features, step):
            yield slice(start, min(start + step, one.n_features))

    def _part(self, side: str, i: int, which: slice) -> Tensor:
        """One side of the frozen weights of some features of layer i."""
        one: Any = self.frozen[i]
        made: Tensor = one.rows(side, which.start, which.stop)
        return made if side == "right" else made.mT

    def project(self, batch: Tensor, weight: Float[Tensor, "feat cols"]) -> Float[Tensor, "samples *positions feat"]:
        """A linear map of a padded batch with the target's kernel, stride and dilation; features last."""
        weight = weight.to(batch.dtype)
        if not self.axes:
            return batch @ weight.mT
        kernel = weight.reshape(len(weight), batch.shape[1], *self.options["kernel_size"])
        made = convolve(batch, kernel, stride=self.options["stride"], dilation=self.options["dilation"])
        return made.movedim(1, -1)

    def normalised(self, i: int, hidden: Tensor) -> Tensor:
        """The output of norm i, features last."""
        return normalise(self.norm(i), hidden.reshape(-1, self.width), EVERYTHING).reshape(hidden.shape)

    def activated(self, i: int, values: Tensor) -> Tensor:
        """The output of the activation after norm i; the last norm has none."""
        made: Tensor = self.activation(values) if i < len(self.layers) - 1 else values
        return made

    def weights(self, side: str, i: int) -> Tensor:
        """Frozen weights of layer i: `left` (rows, feat) or `right` (feat, cols)."""
        return self._part(side, i, slice(0, self.width))

    @torch.no_grad()
    def to_plain(self) -> nn.Module:
        """The layer with weight W E_L, E_i = slope_i scale_i (W_i (E_{i-1} + A_i S_i)), and the bias."""
        pairs = [affine(self.norm(i)) for i in range(len(self.layers))]
        scale, shift = (torch.stack(values).double() for values in zip(*pairs, strict=True))
        slope, offset = self.slope.double(), self.offset.double()
        basis = torch.eye(sum(one.cols for one in self.layers)).to(scale)
        constant = basis.new_zeros(len(basis), 1)
        if self.input_norm is not None:
            pair = torch.stack(affine(self.input_norm)).double()
            factor, constant = pair.repeat_interleave(self.layers[0].n_kernel, 1)[..., None]
            basis = basis * factor
        basis = torch.cat([basis, constant], 1)
        made = whole_map(self.weights, slope * scale, basis, constants=slope * shift + offset)
        weight = made[:, :-1].reshape(len(made), -1, *self.layers[0].shape[2:])
        return plain_layer(weight, made[:, -1], self.options).to(self.low)


def needs_input_norm(activation: nn.Module | None, n_layers: int) -> bool:
    """Whether the activations have another gain than the skip connections."""
    line = known(activation)
    return n_layers > 1 and not (isinstance(line, Ray) and line.edge in (0.0, -math.inf))


class MultilayerBlock(SequenceBlock):
    """A Linear or Conv layer rebuilt from frozen layers in sequence.

    `groups[g][l]` is frozen layer l of group g, of which only `right` is used. `layer_norms` has a scale and a shift
    per feature of each layer, group by group. Ranges and lines are concatenated over the hidden layers.
    """

    kind = "multilayer"

    def __init__(
        self,
        options: dict[str, Any],
        groups: list[list[Features]],
        *,
        activation: nn.Module | None = None,
        norms: str = "batch",
        storage: str = "dense",
        dtype: torch.dtype = torch.float64,
    ) -> None:
        widths = [sum(one.n_features for one in layers) for layers in zip(*groups, strict=True)]
        super().__init__(
            options, len(groups[0][0].shape) - 2, widths=widths, shape=(sum(widths[:-1]),), activation=activation,
            norms=norms, storage=storage, dtype=dtype,
        )  # fmt: skip
        self.groups, self.widths, self.n_inputs = groups, widths, sum(layers[0].shape[1] for layers in groups)
        drawn = (make_maps(layers, storage=storage, dtype=dtype, sides=("right",)) for layers in groups)
        self.frozen = nn.ModuleList(drawn)

    def extra_repr(self) -> str:
        first = self.groups[0][0]
        widths = ", ".join(map(str, self.widths[:-1]))
        return (
            f"{first.name}, {self.n_layers} layers ({widths} features), groups={len(self.groups)}, seed={first.seed}, "
            f"layer={first.layer!r}, storage={self.storage!r}"
        )

    @property
    def n_layers(self) -> int:
        """Number of frozen layers, including the output layer."""
        return len(self.widths)

    @property
    def n_features(self) -> int:
        return sum(self.widths[:-1])

    def map(self, group: int, i: int) -> FrozenMap:
        """Frozen layer i of a group."""
        layers: Any = self.frozen[group]
        one: FrozenMap = layers[i]
        return one

    def settings(self) -> dict[str, Any]:
        groups = [[self.map(g, i).settings() for i in range(self.n_layers)] for g in range(len(self.groups))]
        return {"options": self.options, "groups": groups, "norms": self.norms}

    @classmethod
    def from_settings(cls, settings: dict[str, Any], *, activation: nn.Module | None, storage: str) -> MultilayerBlock:
        groups = [[features_from_settings(one) for one in layers] for layers in settings["groups"]]
        options = options_from_settings(settings["options"])
        return cls(options, groups, activation=activation, norms=settings["norms"], storage=storage)

    def feature_slice(self, i: int) -> slice:
        """The features of hidden layer i in the concatenation of all hidden layers."""
        start = sum(self.widths[:i])
        return slice(start, start + self.widths[i])

    def weight(self, i: int) -> Float[Tensor, "feat cols"]:
        """Frozen layer i, a row per feature, group by group."""
        made = [self.map(group, i).rows("right") for group in range(len(self.groups))]
        return made[0] if len(made) == 1 else torch.cat(made)

    def compute(self, x: Tensor) -> Tensor:
        parts = [self._run(part) for part in self.samples(self.padded(x))]
        return self.as_output(parts[0] if len(parts) == 1 else torch.cat(parts), x)

    def _run(self, values: Tensor) -> Tensor:
        for i in range(self.n_layers - 1):
            hidden = self._apply_layer(values, i)
            if self.observer is not None:
                which = self.feature_slice(i)
                self.observer(hidden, self.low[which], self.high[which], is_first=i == 0)
            values = self.activation(normalise(self.norm(i), hidden, slice(None)))
        last = self.n_layers - 1
        return normalise(self.norm(last), self._apply_layer(values, last), slice(None))

    def _apply_layer(self, values: Tensor, i: int) -> Tensor:
        """The output of frozen layer i for (samples, channels, *positions), in parts if its weights are large."""
        one = self.groups[0][i]
        step = align_step(max(1, CHUNK_BYTES // (8 * one.cols)))
        if one.n_features * len(self.groups) <= step:
            return self.project(values, self.weight(i), is_first=i == 0)
        made = []
        for group, part in enumerate(values.chunk(len(self.groups), 1)):
            for start in range(0, one.n_features, step):
                stop = min(start + step, one.n_features)
                weight = self.map(group, i).rows("right", start, stop)
                made.append(self.project(part, weight, is_first=i == 0, n_groups=1))
                del weight  # or it would stay while the next part is drawn
        return torch.cat(made, 1)

    def samples(self, batch: Tensor) -> tuple[Tensor, ...]:
        """A padded batch split into parts whose hidden activations fit into `CHUNK_BYTES`; not split in training."""
        if self.training or not len(batch):
            return (batch,)
        positions = batch[0, 0].numel()  # an upper bound, since a stride leaves fewer
        return batch.split(max(1, CHUNK_BYTES // (max(self.widths) * positions * batch.element_size())))

    def project(
        self, batch: Tensor, weight: Float[Tensor, "feat cols"], *, is_first: bool = False, n_groups: int | None = None
    ) -> Tensor:
        """A linear map of (samples, channels, *positions), group by group, with the kernel if `is_first`."""
        n_groups = len(self.groups) if n_groups is None else n_groups
        weight = weight.to(batch.dtype)
        if not self.axes:
            return functional.linear(batch, weight)
        if not is_first:
            return convolve(batch, weight.reshape(*weight.shape, *(1,) * self.axes), groups=n_groups)
        kernel = weight.reshape(len(weight), *self.groups[0][0].shape[1:])
        stride, dilation = self.options["stride"], self.options["dilation"]
        return convolve(batch, kernel, stride=stride, dilation=dilation, groups=n_groups)

    def mapped(self, i: int, values: Float[Tensor, "before ..."]) -> Float[Tensor, "feat ..."]:
        """Frozen layer i applied to rows of values, one per feature of the layer before, group by group."""
        weights = self.weight(i).to(values.dtype).chunk(len(self.groups))
        parts = values.chunk(len(self.groups))
        return torch.cat([weight @ part for weight, part in zip(weights, parts, strict=True)])

    @torch.no_grad()
    def to_plain(self) -> nn.Module:
        """The layer with weight scale_L W_L slope scale_(L-1) ... W_1, and the bias."""
        made = self.weight(0).double()
        constant = torch.zeros_like(made[:, 0])
        for i in range(self.n_layers):
            if i:
                made, constant = self.mapped(i, made), self.mapped(i, constant)
            scale, shift = (values.double() for values in affine(self.norm(i)))
            made, constant = scale[:, None] * made, scale * constant + shift
            if i < self.n_layers - 1:
                slope, offset = self.slope[self.feature_slice(i)].double(), self.offset[self.feature_slice(i)].double()
                made, constant = slope[:, None] * made, slope * constant + offset
        weight = made.reshape(len(made), *self.groups[0][0].shape[1:])
        return plain_layer(weight, constant, self.options).to(self.low)
