"""Base classes of frozen layers, and functions that find them in a network."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from onlynorm.errors import ConversionError, ShapeError
from onlynorm.features import Features
from onlynorm.frozen.maps import LOWEST, FrozenMap, at_least_float32
from onlynorm.modules import is_autocast, need_model, without_autocast
from onlynorm.validate import need_instance


class RangeObserver(Protocol):
    """Called with the hidden values (samples, channels, *positions) of every chunk and their range."""

    def __call__(self, hidden: Tensor, low: Tensor, high: Tensor, *, is_first: bool) -> None: ...


class FrozenLayer(nn.Module):
    """A replacement of a Linear or Conv layer: frozen maps, and norms as its only parameters.

    The layer can be rebuilt from its `settings` and its state dict.
    """

    kind: ClassVar[str]
    options: dict[str, Any]

    @property
    def maps(self) -> list[FrozenMap]:
        """The frozen maps of the layer, in the order of the settings."""
        return [module for module in self.modules() if isinstance(module, FrozenMap)]

    @property
    def n_features(self) -> int:
        """Number of frozen features in all maps and groups."""
        return sum(one.n_features for one in self.maps)

    @property
    def n_frozen(self) -> int:
        """Number of frozen entries, which are drawn from the seed."""
        return sum(one.n_frozen for one in self.maps)

    def is_reproducible(self) -> bool:
        """Whether the stored frozen weights are bit-identical to those drawn from the seed; True if none are stored."""
        return all(one.is_reproducible() for one in self.maps)

    def digest(self) -> str:
        """SHA-256 of the digests of all maps."""
        return hashlib.sha256("".join(one.digest() for one in self.maps).encode()).hexdigest()

    @abstractmethod
    def to_plain(self) -> nn.Module:
        """The Linear or Conv layer with the same outputs; for a block, inside its range."""

    def plain_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that each determine one parameter of `to_plain`, by its name; used to keep layers tied."""
        return {}

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """The arguments of `from_settings`, as JSON types and tensors."""

    @classmethod
    @abstractmethod
    def from_settings(cls, settings: dict[str, Any], *, activation: nn.Module | None, storage: str) -> FrozenLayer:
        """The layer with these settings; its norms are loaded from a state dict afterwards."""

    def needs_float32(self, tensor: Tensor) -> bool:
        """Whether this tensor stays in float32 when the network is cast to half precision."""
        return True

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FrozenLayer:
        def apply(values: Tensor) -> Tensor:
            made = fn(values)
            return at_least_float32(made, values) if self.needs_float32(values) else made

        super()._apply(apply, recurse)  # type: ignore[no-untyped-call]
        return self


class FrozenBlock(FrozenLayer):
    """Base class of blocks, which replace a Linear or Conv layer and have norms with computed parameters.

    A block computes in float32 or float64, because large terms cancel in it. `half()`, `bfloat16()` and `to(dtype)`
    leave its tensors in float32 (the device changes), and autocast is disabled inside. Inputs of lower precision are
    cast up. The output is cast to the dtype of the replaced layer's output: that of autocast, else of the input. This
    rounds each entry once, by a relative error of at most 2^-9 (bfloat16) or 2^-12 (float16).
    """

    keeps_precision: ClassVar[bool] = True  # not counted in the precision of a network
    axes: int
    n_inputs: int  # channels, or features of a linear layer
    observer: RangeObserver | None = None

    def forward(self, x: Tensor) -> Tensor:
        """The output of the replaced layer, for inputs inside the calibrated range."""
        if need_instance("a block", x, Tensor, cure="Call it with one tensor, as the replaced layer.").is_nested:
            parts = x.unbind()
            made = self.forward(torch.cat(parts)).split([len(part) for part in parts])
            return torch.nested.as_nested_tensor(list(made), layout=x.layout)
        axes = self.axes
        if x.ndim <= axes or x.shape[-axes - 1] != self.n_inputs or (axes and x.ndim > axes + 2):
            expected = f"({'samples' if axes else '...'}, {self.n_inputs}{', positions' * axes})"
            raise ShapeError(
                f"a block needs inputs of shape {expected}; got {tuple(x.shape)}. Pass inputs of the replaced layer."
            )
        own = next(p.dtype for p in self.parameters())
        is_low = x.is_floating_point() and x.dtype.itemsize < LOWEST.itemsize
        if own.itemsize < LOWEST.itemsize or not (x.dtype == own or is_low or is_autocast(x)):
            raise ConversionError(
                "a block needs norms in float32 or float64 and inputs in the same or a lower precision; got "
                f"norms in {own} and inputs in {x.dtype}. Call block.float(), or cast the inputs."
            )
        # Autocast does not cast float64.
        returned = torch.get_autocast_dtype(x.device.type) if is_autocast(x) and own == LOWEST else x.dtype
        with without_autocast(x.device):
            return self.compute(x.to(own)).to(returned)

    @abstractmethod
    def compute(self, x: Tensor) -> Tensor:
        """The output for an input in the precision of the block."""

    def as_output(self, made: Tensor, x: Tensor) -> Tensor:
        """Outputs (samples, out, *positions) in the shape that the replaced layer returns for `x`."""
        if not self.axes:
            return made.reshape(*x.shape[:-1], made.shape[1])
        return made if x.ndim == self.axes + 2 else made[0]

    def sources(self) -> list[Features]:
        """The features of every frozen map of the block."""
        return [one.features for one in self.maps]


def find_frozen(network: nn.Module) -> dict[str, FrozenLayer]:
    """The frozen layers of a network by place, without those inside other frozen layers."""
    found: dict[str, FrozenLayer] = {}
    for name, module in network.named_modules(remove_duplicate=False):
        # named_modules lists a module before its children.
        if isinstance(module, FrozenLayer) and not any(name.startswith(f"{outer}.") or not outer for outer in found):
            found[name] = module
    return found


def find_blocks(network: nn.Module) -> dict[str, FrozenBlock]:
    """The blocks of a network by place, without those inside other frozen layers.

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> from onlynorm.frozen import find_blocks
        >>> from onlynorm.models import mlp
        >>> rebuilt = on.reconstruct(mlp((8, 16, 4)), torch.rand(64, 8))
        >>> sorted(find_blocks(rebuilt.network))
        ['0', '2']
    """
    found = find_frozen(need_model("find_blocks", network))
    return {name: layer for name, layer in found.items() if isinstance(layer, FrozenBlock)}
