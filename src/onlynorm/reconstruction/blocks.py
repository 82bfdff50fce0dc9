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
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.errors import ConversionError
from onlynorm.features import Features, draw
from onlynorm.modules import is_autocast, without_autocast
from onlynorm.reconstruction.kernels import kernel_margins, plain_kernel
from onlynorm.reconstruction.norms import Affine, affine, make_norm, normalise
from onlynorm.reconstruction.streaming import PATCH_BYTES, Chunk, Patches, n_rows, stream, whole_lines
from onlynorm.reconstruction.target import CONVOLUTIONS

CHUNK_BYTES = 64 * 2**20
"""Hidden activations alive at one time."""

LOWEST = torch.float32
"""The lowest precision of a block."""

DRAWN = torch.float64
"""The precision in which frozen weights are drawn."""

_CONVOLVE: dict[int, Callable[..., Tensor]] = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}


class Watch(Protocol):
    """Told of every chunk of a forward pass: hidden values (samples, channels, *positions) and their range."""

    def __call__(self, hidden: Tensor, low: Tensor, high: Tensor, *, is_first: bool) -> None: ...


class Block(nn.Module):
    """What all blocks share: called like the Linear or Conv they replace, with norms as their only parameters.

    `settings` holds all that is needed to make the block again except the numbers in its norms and buffers.

    A block computes in its own precision, float32 or float64: the large terms that cancel in it leave nothing of the
    eight bits of bfloat16. So `half()`, `bfloat16()` and `to(dtype)` leave the numbers of a block in float32 (devices
    change as ever), and autocast is off inside. Inputs in a lower precision are cast up, exactly; the output is cast
    to the precision that the replaced layer would have returned, that of autocast or else of the input. It has then
    been rounded once, by at most 2^-9 (bfloat16) or 2^-12 (float16) of each entry.
    """

    kind: ClassVar[str]
    keeps_precision: ClassVar[bool] = True  # the precision of a network is that of its other tensors
    watch: Watch | None = None

    def forward(self, x: Tensor) -> Tensor:
        """The same output as the replaced layer's, for inputs inside the calibrated range."""
        if x.is_nested:
            parts = x.unbind()
            made = self.forward(torch.cat(parts)).split([len(part) for part in parts])
            return torch.nested.as_nested_tensor(list(made), layout=x.layout)
        own = next(p.dtype for p in self.parameters())
        is_low = x.is_floating_point() and x.dtype.itemsize < LOWEST.itemsize
        if own.itemsize < LOWEST.itemsize or not (x.dtype == own or is_low or is_autocast(x)):
            raise ConversionError(
                "a block needs norms in float32 or float64 and inputs in the same precision, or in a lower one; got "
                f"norms in {own} and inputs in {x.dtype}. Call block.float(), or cast the inputs."
            )
        # Autocast leaves float64 alone.
        returned = torch.get_autocast_dtype(x.device.type) if is_autocast(x) and own == LOWEST else x.dtype
        with without_autocast(x.device):
            return self.compute(x.to(own)).to(returned)

    @abstractmethod
    def compute(self, x: Tensor) -> Tensor:
        """The output for an input in the block's own precision."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Block:
        def keep_digits(values: Tensor) -> Tensor:
            made = fn(values)
            is_lower = made.is_floating_point() and made.dtype.itemsize < LOWEST.itemsize
            return values.to(made.device, LOWEST) if is_lower else made

        super()._apply(keep_digits, recurse)  # type: ignore[no-untyped-call]
        return self

    @property
    @abstractmethod
    def n_features(self) -> int:
        """Frozen features, over all layers and groups."""

    @abstractmethod
    def sources(self) -> list[Features]:
        """Where every frozen weight of the block comes from."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What `from_settings` needs, in plain JSON types."""

    @classmethod
    @abstractmethod
    def from_settings(cls, settings: dict[str, Any], *, activation: nn.Module | None, storage: str) -> Block:
        """The block with these settings; its norms are filled from a state dict afterwards."""

    @abstractmethod
    def is_reproducible(self) -> bool:
        """Whether the stored frozen weights equal, bit for bit, what the seed gives; nothing stored is always true."""

    @abstractmethod
    def to_plain(self) -> nn.Module:
        """An ordinary layer that computes what the block computes inside its range."""


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


def find_blocks(network: nn.Module) -> dict[str, Block]:
    """Every place of the network at which a block sits, with that block; blocks inside a block are its own affair."""
    found: dict[str, Block] = {}
    for name, module in network.named_modules(remove_duplicate=False):
        # A module is listed before what it holds.
        if isinstance(module, Block) and not any(name.startswith(f"{outer}.") or not outer for outer in found):
            found[name] = module
    return found


def per_output(values: Tensor, weight: Tensor) -> Tensor:
    """One number per output, shaped to multiply a weight (out, inp, *kernel)."""
    return values.reshape(-1, *(1,) * (weight.ndim - 1))


def pad_inputs(x: Tensor, *, axes: int, padding: tuple[int, ...], options: dict[str, Any]) -> Tensor:
    """What a layer would have taken, as (samples, channels, *positions) with the target's padding around it."""
    if not axes:
        return x.reshape(-1, x.shape[-1])
    batch = x if x.ndim == axes + 2 else x[None]
    mode = options["padding_mode"]
    return functional.pad(batch, padding, mode="constant" if mode == "zeros" else mode)


def plain_layer(weight: Tensor, bias: Tensor | None, options: dict[str, Any]) -> nn.Module:
    """The Linear, or the Conv of these options, with this weight and bias."""
    layer: nn.Module
    if weight.ndim == 2:
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    else:
        channels = weight.shape[1] * options["groups"]
        options = {**options, "kernel_size": tuple(weight.shape[2:])}
        layer = CONVOLUTIONS[weight.ndim - 3](channels, weight.shape[0], bias=bias is not None, **options)
    layer.weight = nn.Parameter(weight)
    layer.bias = None if bias is None else nn.Parameter(bias)
    return layer


def source_settings(features: Features) -> dict[str, Any]:
    """The words that fix frozen features, in plain JSON types."""
    return {
        "name": features.name, "shape": list(features.shape), "n_features": features.n_features,
        "seed": features.seed, "layer": features.layer, "kernel": features.kernel, "density": features.density,
        "shared_column": features.shared_column,
    }  # fmt: skip


def source_from_settings(settings: dict[str, Any]) -> Features:
    """The features that `source_settings` described."""
    return draw(
        settings["name"], settings["shape"], n_features=settings["n_features"], seed=settings["seed"],
        layer=settings["layer"], kernel=settings["kernel"], density=settings["density"],
        shared_column=settings["shared_column"],
    )  # fmt: skip


def layer_options(layer: nn.Module) -> dict[str, Any]:
    """What a convolution was made with, apart from its channels; nothing for a linear layer."""
    names = ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
    return {name: getattr(layer, name) for name in names} if hasattr(layer, "stride") else {}


def options_from_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Options of a convolution as its constructor takes them: JSON has lists where torch wants tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}


def explicit_padding(options: dict[str, Any], source_kernel: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Padding for functional.pad, last axis first, from numbers, "same" or "valid"; more for a larger source kernel."""
    kernel, dilation, padding = options["kernel_size"], options["dilation"], options["padding"]
    margins = kernel_margins(kernel, kernel if source_kernel is None else source_kernel)
    pairs: list[int] = []
    for axis in reversed(range(len(kernel))):
        before, behind = (dilation[axis] * n for n in margins[axis])
        if padding == "same":
            total = dilation[axis] * (kernel[axis] - 1)
            pairs += [before + total // 2, behind + total - total // 2]
        else:
            own = 0 if padding == "valid" else padding[axis]
            pairs += [before + own, behind + own]
    return tuple(pairs)
