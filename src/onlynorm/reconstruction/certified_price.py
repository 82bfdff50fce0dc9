"""`certified_price`: what certified ranges cost, layer by layer, before anything is solved.

Intervals widen with depth, wider ranges need larger shifts, and a shift a thousand times larger than the numbers it
carries costs three digits of them. The price is measured on a sample of random features: that takes one run of the
network on the box and no solving.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onlynorm.features import draw
from onlynorm.frozen.pair import NormOnlyBlock
from onlynorm.intervals.tensor import Box
from onlynorm.modules import need_model
from onlynorm.modules.layers import TargetLayer, find_layers, layer_options
from onlynorm.modules.validate import need_batch
from onlynorm.modules.walk import as_inputs, cast, copy_network
from onlynorm.reconstruction.ranges import Seen, find_ranges, see
from onlynorm.validate import need_instance, need_integer


@dataclass(frozen=True)
class LayerPrice:
    """How much wider the certified ranges of a layer are than the calibrated ones, each with its margin."""

    name: str
    ratio: float

    @property
    def digits(self) -> float:
        """Decimal digits that the wider ranges cost; negative where certified ranges are the narrower ones."""
        return math.log10(self.ratio)

    def __str__(self) -> str:
        return f"{self.name}: {self.ratio:.3g} times as wide, {self.digits:+.1f} digits"


@dataclass(frozen=True)
class CertifiedPrice:
    """The price of certified ranges for every layer of a network."""

    layers: tuple[LayerPrice, ...]

    @property
    def worst(self) -> LayerPrice:
        """The layer that loses most."""
        return max(self.layers, key=lambda layer: layer.ratio)

    def __str__(self) -> str:
        lines = [f"certified ranges cost up to {self.worst.digits:.1f} digits, at {self.worst.name}"]
        return "\n".join([*lines, *(f"  {layer}" for layer in self.layers)])


def certified_price(
    network: nn.Module,
    inputs: Tensor,
    *,
    box: Box,
    activation: nn.Module | None = None,
    n_features: int = 64,
    seed: int = 0,
) -> CertifiedPrice:
    """The price of ranges that hold all inputs in the box, against those calibrated on `inputs` with their margin.

    Per layer, the ratio is the median over `n_features` random features of each group.
    """
    network = need_model("certified_price", network)
    given = cast(as_inputs("certified_price", inputs), torch.float64)
    need_batch("certified_price", network, given)
    need_instance("box", box, Box, cure="Pass Box(low, high).")
    if activation is not None:
        need_instance("activation", activation, nn.Module, cure="Pass a module such as torch.nn.Tanh(), or None.")
        need_model("activation", activation)
    n_features = need_integer("n_features", n_features, low=1, cure="64 are enough for a median.")
    copied = copy_network(network).double().eval()
    layers = find_layers(copied).layers
    seen = see(copied, layers, given, box)
    prices = []
    for target in layers:
        block = _sample(target, copied.get_submodule(target.name), activation, n_features, seed)
        certified = find_ranges(block, seen[target.name])
        calibrated = find_ranges(block, Seen(seen[target.name].inputs))
        ratio = (certified.high - certified.low) / (calibrated.high - calibrated.low).clamp(min=1e-300)
        prices.append(LayerPrice(target.name, float(ratio.median())))
    return CertifiedPrice(tuple(prices))


def _sample(
    target: TargetLayer, layer: nn.Module, activation: nn.Module | None, n_features: int, seed: int
) -> NormOnlyBlock:
    """A block of a few features in the layer's place; its norms are not chosen."""
    features = [
        draw("he_normal", target.group_shape, n_features=n_features, seed=seed, layer=f"{target.name}/group {group}")
        for group in range(target.groups)
    ]
    block = NormOnlyBlock(layer_options(layer), features, activation=activation)
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return block.to(weight.device)
