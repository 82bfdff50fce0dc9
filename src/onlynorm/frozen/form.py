"""What all blocks share: their base class, how they are found in a network, and how their features are described."""

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


def find_blocks(network: nn.Module) -> dict[str, Block]:
    """Every place of the network at which a block sits, with that block; blocks inside a block are its own affair."""
    found: dict[str, Block] = {}
    for name, module in network.named_modules(remove_duplicate=False):
        # A module is listed before what it holds.
        if isinstance(module, Block) and not any(name.startswith(f"{outer}.") or not outer for outer in found):
            found[name] = module
    return found


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
