"""The block of the multilayer construction: L frozen layers in a row, a norm behind each, an activation between them.

    y = norm_L( W_L phi( norm_(L-1)( W_(L-1) ... phi( norm_1( W_1 x ) ) ) ) )

The kernel of a convolution sits in W_1, with the target's padding, stride and dilation; all other layers are 1 x 1, so
that what shifts add is the same at every position. Groups run side by side in every layer. Layers are narrow, so the
forward pass holds whole layers, of as many samples at a time as fit.

Theory: burkholz2024:thm-2.5
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.features import Features
from onlynorm.reconstruction.blocks import (
    CHUNK_BYTES,
    Block,
    explicit_padding,
    options_from_settings,
    pad_inputs,
    plain_layer,
    source_from_settings,
    source_settings,
)
from onlynorm.reconstruction.norms import Norm, affine, make_norm, normalise
from onlynorm.reconstruction.streaming import whole_lines

"""Hidden activations of the widest layer alive at one time."""


class MultilayerBlock(Block):
    """A layer rebuilt by frozen layers in a row: called like the Linear or Conv it replaces.

    `groups[g][l]` is frozen layer l of group g, of which only `right` is used. `layer_norms` has a pair of numbers per
    feature of each layer, group by group. `low` and `high` bound what the features of all hidden layers may see before
    their norms, one layer behind the other; inside, the activation is slope * z + offset.
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
        if storage == "dense":
            for i in range(self.n_layers):
                self.register_buffer(f"weight_{i}", self._draw(i).to(dtype), persistent=False)

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
        """The norm behind frozen layer i, counted from 0."""
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

    def is_reproducible(self) -> bool:
        if self.storage != "dense":
            return True
        return all(torch.equal(self.weight(i), self._draw(i).to(self.weight(i))) for i in range(self.n_layers))

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
