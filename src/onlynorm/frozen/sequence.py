"""The block of the deep construction: many narrow frozen layers, each fed a slice of the input through a skip.

    v_1 = phi(norm_1(W_1 x_1)),   v_i = phi(norm_i(W_i (v_{i-1} + A_i x_i))),   y = W norm_L(W_L (v_{L-1} + A_L x_L))

x_i is the i-th slice of the input's channels, L the number of slices. No activation stands after the last norm, and no
norm after the last frozen layer W: the shift of norm_L brings in the bias. What the paper writes W_1 A_1 is one frozen
W_1 here, because nothing stands between the two. The kernel of a convolution sits in W_1 and in the skips A_i, all with
the target's stride and padding; every other frozen layer is 1 x 1.

An activation that is a line of gain one where it is used (identity, ReLU, LeakyReLU, PReLU, ELU, CELU, SELU) needs
nothing else. Every other one shrinks or stretches v_i against the skips, so the block then begins with a norm of the
input that gives the skips the same gain. The papers treat ReLU only and do not need it.

Theory: giannou2023:thm-2, giannou2023:remark-2, giannou2023:remark-9

The block of the multilayer construction: L frozen layers in a row, a norm after each, an activation between them.

    y = norm_L( W_L phi( norm_(L-1)( W_(L-1) ... phi( norm_1( W_1 x ) ) ) ) )

The kernel of a convolution sits in W_1, with the target's padding, stride and dilation; all other layers are 1 x 1, so
that what shifts add is the same at every position. Groups run side by side in every layer. Layers are narrow, so the
forward pass holds whole layers, of as many samples at a time as fit.

Theory: burkholz2024:thm-2.5
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.features import Features
from onlynorm.frozen.form import Block, source_from_settings, source_settings
from onlynorm.frozen.pair import CHUNK_BYTES
from onlynorm.frozen.streaming import whole_lines
from onlynorm.modules.activations import Ray, known
from onlynorm.modules.affine import Norm, affine, make_norm, normalise
from onlynorm.modules.convolution import explicit_padding, pad_inputs
from onlynorm.modules.layers import options_from_settings, plain_layer

Weights = Callable[[str, int], Tensor]
"""Called with ("left" or "right", number of the layer): its frozen weights, (rows, feat) or (feat, cols)."""


def whole_map(
    weights: Weights,
    gains: Float[Tensor, "layers feat"],
    basis: Float[Tensor, "cols any"],
    *,
    constants: Float[Tensor, "layers feat"] | None = None,
) -> Float[Tensor, "out any"]:
    """What all layers together make of the inputs in `basis`: W E_L, see `linear_maps`."""
    last = deque(linear_maps(weights, gains, basis, constants=constants), maxlen=1).pop()
    return weights("left", 0).to(last) @ last


def linear_maps(
    weights: Weights,
    gains: Float[Tensor, "layers feat"],
    basis: Float[Tensor, "cols any"],
    *,
    constants: Float[Tensor, "layers feat"] | None = None,
) -> Iterator[Float[Tensor, "feat any"]]:
    """What each layer makes of the inputs in `basis`: E_i = gains_i (W_i (E_{i-1} + A_i basis_i)), layer by layer.

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


class DeepBlock(Block):
    """A layer rebuilt by narrow frozen layers with skips: called like the Linear or Conv it replaces.

    `layers[0]` holds W (left) and W_1 (right), `layers[i]` the next W_i (left) and A_i (right). `low` and `high` bound
    what each activation may see, and inside it is slope * z + offset. `input_norm` is None where gains are one.
    """

    kind = "deep"
    low: Tensor
    high: Tensor
    slope: Tensor
    offset: Tensor

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
        super().__init__()
        self.options, self.layers, self.norms, self.storage = options, layers, norms, storage
        self.activation = activation or nn.Identity()
        self.axes = len(layers[0].shape) - 2
        self.padding = explicit_padding(options) if self.axes else ()
        self.width = layers[0].n_features
        made = [make_norm(norms, self.width, axes=self.axes, dtype=dtype) for _ in layers]
        self.layer_norms = nn.ModuleList(made)
        self.input_norm: Norm | None = None
        if needs_input_norm(self.activation, len(layers)):
            n_inputs = sum(one.shape[1] for one in layers)
            self.input_norm = make_norm(norms, n_inputs, axes=self.axes, dtype=dtype)
        shape = (len(layers), self.width)
        for name, value in (("low", -torch.inf), ("high", torch.inf), ("slope", 1.0), ("offset", 0.0)):
            self.register_buffer(name, torch.full(shape, value, dtype=dtype))
        self.store(dtype)

    def extra_repr(self) -> str:
        first = self.layers[0]
        return (
            f"{first.name}, {len(self.layers)} layers of {self.width} features, slices of {first.shape[1]}, "
            f"seed={first.seed}, layer={first.layer!r}, storage={self.storage!r}"
        )

    @property
    def n_features(self) -> int:
        return sum(one.n_features for one in self.layers)

    def sources(self) -> list[Features]:
        return self.layers

    def frozen(self) -> dict[str, Callable[[], Tensor]]:
        if self.storage != "dense":
            return {}
        sides = [(f"left_{i}", one.left) for i, one in enumerate(self.layers)]
        return dict(sides + [(f"right_{i}", one.right) for i, one in enumerate(self.layers)])

    def settings(self) -> dict[str, Any]:
        layers = [source_settings(one) for one in self.layers]
        return {"options": self.options, "layers": layers, "norms": self.norms}

    @classmethod
    def from_settings(cls, settings: dict[str, Any], *, activation: nn.Module | None, storage: str) -> DeepBlock:
        layers = [source_from_settings(one) for one in settings["layers"]]
        options = options_from_settings(settings["options"])
        return cls(options, layers, activation=activation, norms=settings["norms"], storage=storage)

    def norm(self, i: int) -> Norm:
        """The norm of layer i, counted from 0."""
        norm: Any = self.layer_norms[i]
        return norm

    def compute(self, x: Tensor) -> Tensor:
        batch = self.as_batch(x)
        values: Tensor | None = None
        for i in range(len(self.layers)):
            values = self.normalised(i, self.hidden(i, batch, values))
            if self.watch is not None:
                self.watch(values.movedim(-1, 1), self.low[i], self.high[i], is_first=i == 0)
            values = self.activated(i, values)
        assert values is not None
        made = self._times_left(0, values)
        if not self.axes:
            return made.reshape(*x.shape[:-1], made.shape[-1])
        made = made.movedim(-1, 1)
        return made if x.ndim == self.axes + 2 else made[0]

    def as_batch(self, x: Tensor) -> Tensor:
        """The input as the frozen layers take it: padded, and through the input norm if there is one."""
        batch = self.padded(x)
        return batch if self.input_norm is None else normalise(self.input_norm, batch, EVERYTHING)

    def padded(self, x: Tensor) -> Tensor:
        """The input as (samples, channels, *positions), with the target's padding."""
        return pad_inputs(x, axes=self.axes, padding=self.padding, options=self.options)

    def hidden(self, i: int, batch: Tensor, values: Tensor | None) -> Float[Tensor, "samples *positions feat"]:
        """What norm i receives of the padded batch and of the layer before, features last."""
        start = sum(one.shape[1] for one in self.layers[:i])
        inputs = batch.narrow(1, start, self.layers[i].shape[1])
        made = [self.project(inputs, self._part("right", i, which)) for which in self._parts(i)]
        skip = made[0] if len(made) == 1 else torch.cat(made, -1)
        return skip if values is None else self._times_left(i, values + skip)

    def _times_left(self, i: int, values: Float[Tensor, "*rows feat"]) -> Float[Tensor, "*rows out"]:
        """What `left` of layer i makes of values, features last."""
        total: Tensor | None = None
        for which in self._parts(i):
            made = values[..., which] @ self._part("left", i, which).to(values.dtype).mT
            total = made if total is None else total + made
        assert total is not None
        return total

    def _parts(self, i: int) -> Iterator[slice]:
        """The features of layer i, as many at a time as their frozen weights may take."""
        one = self.layers[i]
        step = whole_lines(max(1, CHUNK_BYTES // (8 * (one.rows + one.cols))))
        for start in range(0, one.n_features, step):
            yield slice(start, min(start + step, one.n_features))

    def _part(self, side: str, i: int, which: slice) -> Tensor:
        """The frozen weights of some features of layer i, one side of them."""
        if self.storage == "dense":
            kept: Tensor = getattr(self, f"{side}_{i}")
            return kept[which] if side == "right" else kept[:, which]
        one = self.layers[i]
        made = one.right(which.start, which.stop) if side == "right" else one.left(which.start, which.stop)
        return made.to(self.low.device)

    def project(self, batch: Tensor, weight: Float[Tensor, "feat cols"]) -> Float[Tensor, "samples *positions feat"]:
        """A linear map with the target's kernel, stride and dilation of a padded batch, features last."""
        weight = weight.to(batch.dtype)
        if not self.axes:
            return batch @ weight.mT
        kernel = weight.reshape(len(weight), batch.shape[1], *self.options["kernel_size"])
        convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[self.axes - 1]
        made = convolve(batch, kernel, stride=self.options["stride"], dilation=self.options["dilation"])
        return made.movedim(1, -1)

    def normalised(self, i: int, hidden: Tensor) -> Tensor:
        """Behind norm i, features last."""
        return normalise(self.norm(i), hidden.reshape(-1, self.width), EVERYTHING).reshape(hidden.shape)

    def activated(self, i: int, values: Tensor) -> Tensor:
        """Behind the activation that follows norm i; none follows the last."""
        made: Tensor = self.activation(values) if i < len(self.layers) - 1 else values
        return made

    def weights(self, side: str, i: int) -> Tensor:
        """Frozen weights of layer i: `left` (rows, feat) or `right` (feat, cols)."""
        if self.storage == "dense":
            kept: Tensor = getattr(self, f"{side}_{i}")
            return kept
        one = self.layers[i]
        return (one.right() if side == "right" else one.left()).to(self.low.device)

    @torch.no_grad()
    def to_plain(self) -> nn.Module:
        """W E_L with E_i = slope_i scale_i (W_i (E_{i-1} + A_i S_i)), and what the shifts add."""
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
    """Whether the activations change the size of what they carry against the skips."""
    line = known(activation)
    return n_layers > 1 and not (isinstance(line, Ray) and line.edge in (0.0, -math.inf))


"""Hidden activations of the widest layer alive at one time."""


class MultilayerBlock(Block):
    """A layer rebuilt by frozen layers in a row: called like the Linear or Conv it replaces.

    `groups[g][l]` is frozen layer l of group g, of which only `right` is used. `layer_norms` has a pair of numbers per
    feature of each layer, group by group. `low` and `high` bound what the features of all hidden layers may see before
    their norms, one layer after the other; inside, the activation is slope * z + offset.
    """

    kind = "multilayer"
    low: Tensor
    high: Tensor
    slope: Tensor
    offset: Tensor

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
        super().__init__()
        self.options, self.groups, self.norms, self.storage = options, groups, norms, storage
        self.activation = activation or nn.Identity()
        self.axes = len(groups[0][0].shape) - 2
        self.padding = explicit_padding(options) if self.axes else ()
        self.widths = [sum(layers[i].n_features for layers in groups) for i in range(len(groups[0]))]
        self.layer_norms = nn.ModuleList(make_norm(norms, width, axes=self.axes, dtype=dtype) for width in self.widths)
        for name, value in (("low", -torch.inf), ("high", torch.inf), ("slope", 1.0), ("offset", 0.0)):
            self.register_buffer(name, torch.full((self.n_features,), value, dtype=dtype))
        self.store(dtype)

    def extra_repr(self) -> str:
        first = self.groups[0][0]
        widths = ", ".join(map(str, self.widths[:-1]))
        return (
            f"{first.name}, {self.n_layers} layers ({widths} features), groups={len(self.groups)}, seed={first.seed}, "
            f"layer={first.layer!r}, storage={self.storage!r}"
        )

    @property
    def n_layers(self) -> int:
        """Frozen layers, the last of which makes the outputs."""
        return len(self.widths)

    @property
    def n_features(self) -> int:
        return sum(self.widths[:-1])

    def sources(self) -> list[Features]:
        return [one for layers in self.groups for one in layers]

    def settings(self) -> dict[str, Any]:
        groups = [[source_settings(one) for one in layers] for layers in self.groups]
        return {"options": self.options, "groups": groups, "norms": self.norms}

    @classmethod
    def from_settings(cls, settings: dict[str, Any], *, activation: nn.Module | None, storage: str) -> MultilayerBlock:
        groups = [[source_from_settings(one) for one in layers] for layers in settings["groups"]]
        options = options_from_settings(settings["options"])
        return cls(options, groups, activation=activation, norms=settings["norms"], storage=storage)

    def norm(self, i: int) -> Norm:
        """The norm after frozen layer i, counted from 0."""
        norm: Any = self.layer_norms[i]
        return norm

    def where(self, i: int) -> slice:
        """The features of hidden layer i among those of all."""
        start = sum(self.widths[:i])
        return slice(start, start + self.widths[i])

    def weight(self, i: int) -> Float[Tensor, "feat cols"]:
        """Frozen layer i, a row per feature, group by group."""
        if self.storage == "dense":
            kept: Tensor = getattr(self, f"weight_{i}")
            return kept
        return self._draw(i).to(self.low.device)

    def _draw(self, i: int) -> Tensor:
        return torch.cat([layers[i].right() for layers in self.groups])

    def compute(self, x: Tensor) -> Tensor:
        parts = [self._run(part) for part in self.samples(self.padded(x))]
        made = parts[0] if len(parts) == 1 else torch.cat(parts)
        if not self.axes:
            return made.reshape(*x.shape[:-1], made.shape[1])
        return made if x.ndim == self.axes + 2 else made[0]

    def _run(self, values: Tensor) -> Tensor:
        for i in range(self.n_layers - 1):
            hidden = self._passed(values, i)
            if self.watch is not None:
                which = self.where(i)
                self.watch(hidden, self.low[which], self.high[which], is_first=i == 0)
            values = self.activation(normalise(self.norm(i), hidden, slice(None)))
        last = self.n_layers - 1
        return normalise(self.norm(last), self._passed(values, last), slice(None))

    def _passed(self, values: Tensor, i: int) -> Tensor:
        """What frozen layer i makes of (samples, channels, *positions), in pieces where its weights are large."""
        one = self.groups[0][i]
        step = whole_lines(max(1, CHUNK_BYTES // (8 * one.cols)))
        if one.n_features * len(self.groups) <= step:
            return self.project(values, self.weight(i), is_first=i == 0)
        made = []
        for group, part in enumerate(values.chunk(len(self.groups), 1)):
            for start in range(0, one.n_features, step):
                stop = min(start + step, one.n_features)
                made.append(self.project(part, self._some(i, group, start, stop), is_first=i == 0, n_groups=1))
        return torch.cat(made, 1)

    def _some(self, i: int, group: int, start: int, stop: int) -> Float[Tensor, "feat cols"]:
        """Frozen layer i for some features of a group."""
        one = self.groups[group][i]
        if self.storage == "dense":
            first = group * one.n_features
            return self.weight(i)[first + start : first + stop]
        return one.right(start, stop).to(self.low.device)

    def padded(self, x: Tensor) -> Tensor:
        """The input as (samples, channels, *positions), with the target's padding."""
        return pad_inputs(x, axes=self.axes, padding=self.padding, options=self.options)

    def samples(self, batch: Tensor) -> tuple[Tensor, ...]:
        """A padded batch in parts whose hidden activations fit into `CHUNK_BYTES`; whole while norms learn from it."""
        if self.training or not len(batch):
            return (batch,)
        positions = batch[0, 0].numel()  # a stride makes them fewer, nothing more
        return batch.split(max(1, CHUNK_BYTES // (max(self.widths) * positions * batch.element_size())))

    def project(
        self, batch: Tensor, weight: Float[Tensor, "feat cols"], *, is_first: bool = False, n_groups: int | None = None
    ) -> Tensor:
        """A linear map of (samples, channels, *positions), group by group; the first one has the kernel."""
        n_groups = len(self.groups) if n_groups is None else n_groups
        weight = weight.to(batch.dtype)
        if not self.axes:
            return functional.linear(batch, weight)
        convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[self.axes - 1]
        if not is_first:
            return convolve(batch, weight.reshape(*weight.shape, *(1,) * self.axes), groups=n_groups)
        kernel = weight.reshape(len(weight), *self.groups[0][0].shape[1:])
        stride, dilation = self.options["stride"], self.options["dilation"]
        return convolve(batch, kernel, stride=stride, dilation=dilation, groups=n_groups)

    def mapped(self, i: int, values: Float[Tensor, "before ..."]) -> Float[Tensor, "feat ..."]:
        """Frozen layer i applied to rows of numbers, one per feature of the layer before, group by group."""
        weights = self.weight(i).to(values.dtype).chunk(len(self.groups))
        parts = values.chunk(len(self.groups))
        return torch.cat([weight @ part for weight, part in zip(weights, parts, strict=True)])

    def frozen(self) -> dict[str, Callable[[], Tensor]]:
        if self.storage != "dense":
            return {}
        return {f"weight_{i}": functools.partial(self._draw, i) for i in range(self.n_layers)}

    @torch.no_grad()
    def to_plain(self) -> nn.Module:
        """scale_L W_L slope scale_(L-1) ... W_1, and what the shifts add."""
        made = self.weight(0).double()
        constant = torch.zeros_like(made[:, 0])
        for i in range(self.n_layers):
            if i:
                made, constant = self.mapped(i, made), self.mapped(i, constant)
            scale, shift = (values.double() for values in affine(self.norm(i)))
            made, constant = scale[:, None] * made, scale * constant + shift
            if i < self.n_layers - 1:
                slope, offset = self.slope[self.where(i)].double(), self.offset[self.where(i)].double()
                made, constant = slope[:, None] * made, slope * constant + offset
        weight = made.reshape(len(made), *self.groups[0][0].shape[1:])
        return plain_layer(weight, constant, self.options).to(self.low)
