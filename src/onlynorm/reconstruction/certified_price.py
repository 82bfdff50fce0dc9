"""`certified_price`: the loss of precision by certified ranges, layer by layer, without solving.

Intervals widen with depth, and wider ranges need larger shifts. A shift a thousand times larger than the values costs
three digits. The price is measured on a sample of random features, with one interval pass of the network on the box.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onlynorm.display import Curve, Figure, Panel, Result, ShownResult, Table, View
from onlynorm.features import draw
from onlynorm.frozen.pair import NormOnlyBlock
from onlynorm.intervals.tensor import Box
from onlynorm.modules import need_model
from onlynorm.modules.layers import TargetLayer, find_layers, layer_options
from onlynorm.modules.walk import as_inputs, cast, copy_network, need_batch
from onlynorm.reconstruction.ranges import LayerInputs, collect_inputs, find_ranges
from onlynorm.validate import need_instance, need_integer


@dataclass(frozen=True)
class LayerPrice(Result):
    """The width of a layer's certified ranges relative to the calibrated ones, each with its margin."""

    name: str
    ratio: float

    @property
    def digits(self) -> float:
        """Decimal digits lost by the wider ranges; negative if the certified ranges are narrower."""
        return math.log10(self.ratio)

    def __str__(self) -> str:
        return f"{self.name}: {self.ratio:.3g} times as wide, {self.digits:+.1f} digits"


@dataclass(frozen=True, repr=False)
class CertifiedPrice(ShownResult):
    """The price of certified ranges for every layer of a network."""

    layers: tuple[LayerPrice, ...]

    @property
    def worst(self) -> LayerPrice:
        """The layer with the largest loss."""
        return max(self.layers, key=lambda layer: layer.ratio)

    def plot(self) -> Figure:
        """The digits that certified ranges cost in every layer."""
        if not self.layers:
            return Figure()
        digits = [layer.digits for layer in self.layers]
        panel = Panel("", "Digits that certified ranges cost", x_names=[layer.name for layer in self.layers])
        return Figure([Curve("", range(1, len(digits) + 1), digits, "bars")], [panel])

    def view(self) -> View:
        """Every layer with its ratio."""
        columns = ("layer", "times as wide", "digits")
        rows = [(layer.name, f"{layer.ratio:.3g}", f"{layer.digits:+.1f}") for layer in self.layers]
        lines = [f"Up to {self.worst.digits:.1f} digits, at {self.worst.name}."] if self.layers else []
        return View("Price of certified ranges", lines=lines, tables={"Layers": Table(columns, rows)})

    def __str__(self) -> str:
        lines = [f"certified ranges cost up to {self.worst.digits:.1f} digits, at {self.worst.name}"]
        return "\n".join([*lines, *(f"  {layer}" for layer in self.layers)])


def certified_price(
    model: nn.Module,
    inputs: Tensor,
    *,
    box: Box,
    activation: nn.Module | None = None,
    n_features: int = 64,
    seed: int = 0,
) -> CertifiedPrice:
    """The price of ranges certified for all inputs in the box, compared with ranges calibrated on `inputs`.

    The ratio of a layer is the median over `n_features` random features of each group.

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> from onlynorm.models import mlp
        >>> from onlynorm.reconstruction import certified_price
        >>> inputs, box = torch.rand(64, 8), on.Box(torch.full((8,), -4.0), torch.full((8,), 4.0))
        >>> price = certified_price(mlp((8, 16, 4)), inputs, box=box)
        >>> price.worst.ratio > 2.0  # twice as wide as on the calibration batch
        True
    """
    model = need_model("certified_price", model)
    given = cast(as_inputs("certified_price", inputs), torch.float64)
    need_batch("certified_price", model, given)
    need_instance("box", box, Box, cure="Pass Box(low, high).")
    if activation is not None:
        need_instance("activation", activation, nn.Module, cure="Pass a module such as torch.nn.Tanh(), or None.")
        need_model("activation", activation)
    n_features = need_integer("n_features", n_features, low=1, cure="64 are enough for a median.")
    copied = copy_network(model).double().eval()
    layers = find_layers(copied, what="certified_price").layers
    received = collect_inputs(copied, layers, given, box)
    prices = []
    for target in layers:
        block = _sample(target, copied.get_submodule(target.name), activation, n_features, seed)
        certified = find_ranges(block, received[target.name])
        calibrated = find_ranges(block, LayerInputs(received[target.name].inputs))
        ratio = (certified.high - certified.low) / (calibrated.high - calibrated.low).clamp(min=1e-300)
        prices.append(LayerPrice(target.name, float(ratio.median())))
    return CertifiedPrice(tuple(prices))


def _sample(
    target: TargetLayer, layer: nn.Module, activation: nn.Module | None, n_features: int, seed: int
) -> NormOnlyBlock:
    """A block with a few features for the layer, without its norms."""
    features = [
        draw("he_normal", target.group_shape, n_features=n_features, seed=seed, layer=f"{target.name}/group {group}")
        for group in range(target.groups)
    ]
    block = NormOnlyBlock(layer_options(layer), features, activation=activation)
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return block.to(weight.device)
