"""What a reconstruction hands back: the network and the evidence for every layer."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn

from onlynorm.errors import FormatError
from onlynorm.reconstruction.blocks import find_blocks
from onlynorm.reconstruction.recipe import Recipe
from onlynorm.reconstruction.target import Left
from onlynorm.solvers.memory import readable


@dataclass(frozen=True)
class LayerResult:
    """The evidence for one rebuilt layer. `residual` is that of its weight, `error` that of its outputs, measured."""

    name: str
    shape: tuple[int, ...]
    n_features: int
    method: str
    residual: float
    window_error: float
    seconds: float
    shortfall: str = ""
    error: float = 0.0

    @classmethod
    def from_dict(cls, written: dict[str, Any]) -> LayerResult:
        """The evidence that a file holds."""
        if set(written) != {field.name for field in fields(cls)} or not isinstance(written["shape"], list):
            raise FormatError("a finished layer needs its evidence; the file has other fields. Start anew.")
        return cls(**{**written, "shape": tuple(written["shape"])})

    def __str__(self) -> str:
        return (
            f"{self.name} {self.shape}: {self.n_features} features by {self.method}, residual {self.residual:.1e}, "
            f"window {self.window_error:.1e}, output error {self.error:.1e}, {self.seconds:.2g} s"
            + (f"; {self.shortfall}" if self.shortfall else "")
        )


@dataclass(frozen=True)
class Reconstruction:
    """The rebuilt network, the evidence layer by layer, what was left as it is, and which norms were folded.

    `error` is the relative error of the network's output on a few calibration samples, in float64, where an error was
    asked for. `partial` is the folder of finished layers, which `save` removes.
    """

    network: nn.Module
    layers: tuple[LayerResult, ...]
    left: tuple[Left, ...]
    recipe: Recipe
    folded: tuple[str, ...] = ()
    error: float | None = None
    partial: Path | None = None

    @property
    def n_norm_parameters(self) -> int:
        """Parameters of the norms that were chosen: all that has to be kept beside the seed."""
        return sum(p.numel() for block in set(find_blocks(self.network).values()) for p in block.parameters())

    def __str__(self) -> str:
        kept = readable(4 * self.n_norm_parameters)
        head = (
            f"{len(self.layers)} layers from {self.recipe.features} features, seed {self.recipe.seed}: "
            f"{self.n_norm_parameters:,} norm parameters ({kept} in float32)"
            + (f", relative output error {self.error:.1e}" if self.error is not None else "")
        )
        folded = [f"  folded: {', '.join(self.folded)}"] if self.folded else []
        left = (f"  left: {item}" for item in self.left)
        return "\n".join([head, *(f"  {layer}" for layer in self.layers), *folded, *left])
