"""What all frozen layers and blocks share: base classes, how they are found, how features are described."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from onlynorm.errors import ConversionError
from onlynorm.features import Features, draw
from onlynorm.modules import is_autocast, without_autocast

LOWEST = torch.float32
"""The lowest precision of a block."""


class Watch(Protocol):
    """Told of every chunk of a forward pass: hidden values (samples, channels, *positions) and their range."""

    def __call__(self, hidden: Tensor, low: Tensor, high: Tensor, *, is_first: bool) -> None: ...


class FrozenLayer(nn.Module):
    """A module in the place of a Linear or Conv: frozen numbers from a seed, and norms as its only parameters."""

    @property
    @abstractmethod
    def n_features(self) -> int:
        """Frozen features, over all layers and groups."""

    @property
    @abstractmethod
    def n_frozen(self) -> int:
        """Numbers that come from the seed."""

    @abstractmethod
    def is_reproducible(self) -> bool:
        """Whether the stored frozen numbers equal, bit for bit, what the seed gives; nothing stored is always true."""

    @abstractmethod
    def to_plain(self) -> nn.Module:
        """An ordinary layer that computes the same; for a block, inside its range."""


class Block(FrozenLayer):
    """What all blocks share: called like the Linear or Conv they replace, with norms as their only parameters.

    `settings` holds all that is needed to make the block again except the numbers in its norms and buffers.

    A block computes in its own precision, float32 or float64: the large terms that cancel in it leave nothing of the
    eight bits of bfloat16. So `half()`, `bfloat16()` and `to(dtype)` leave the numbers of a block in float32 (devices
    change as ever), and autocast is off inside. Inputs in a lower precision are cast up, exactly; the output is cast
    to the precision that the replaced layer would have returned, that of autocast or else of the input. It has then
    been rounded once, by at most 2^-9 (bfloat16) or 2^-12 (float16) of each entry. Frozen weights that are stored are
    drawn again where the precision rises, so that float32 and back loses nothing of them.
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

        before = {name: getattr(self, name).dtype for name in self.frozen()}
        super()._apply(keep_digits, recurse)  # type: ignore[no-untyped-call]
        for name, draw_again in self.frozen().items():
            now: Tensor = getattr(self, name)
            if now.dtype.itemsize > before[name].itemsize and not now.is_meta:
                setattr(self, name, draw_again().to(now))
        return self

    def frozen(self) -> dict[str, Callable[[], Tensor]]:
        """The buffers that hold frozen weights, and how each is drawn; none where they are made on every pass."""
        return {}

    def store(self, dtype: torch.dtype) -> None:
        """Draws the frozen weights that are stored and are not there yet."""
        for name, draw_now in self.frozen().items():
            if name not in self._buffers:
                self.register_buffer(name, draw_now().to(dtype), persistent=False)

    def is_reproducible(self) -> bool:
        blocks = [module for module in self.modules() if isinstance(module, Block)]
        return all(
            torch.equal(getattr(block, name), draw_again().to(getattr(block, name)))
            for block in blocks
            for name, draw_again in block.frozen().items()
        )

    @property
    def n_frozen(self) -> int:
        return sum(one.n_frozen for one in self.sources())

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


def find_frozen(network: nn.Module) -> dict[str, FrozenLayer]:
    """Every place of the network at which a frozen layer sits, with that layer; what is inside it is its own affair."""
    found: dict[str, FrozenLayer] = {}
    for name, module in network.named_modules(remove_duplicate=False):
        # A module is listed before what it holds.
        if isinstance(module, FrozenLayer) and not any(name.startswith(f"{outer}.") or not outer for outer in found):
            found[name] = module
    return found


def find_blocks(network: nn.Module) -> dict[str, Block]:
    """The blocks among the frozen layers of a network."""
    return {name: layer for name, layer in find_frozen(network).items() if isinstance(layer, Block)}


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
