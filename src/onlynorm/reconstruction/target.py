"""What of a trained network can be rebuilt: its linear and convolutional layers, wherever they sit.

Layers are found by walking the modules, not by tracing, so skips, pooling, attention and functional calls between
layers do not matter. Norm layers of the target stay as they are: they are norms. What has weights but cannot be
swapped is listed with the reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onlynorm.errors import ConversionError, ValueRangeError

LINEAR = (nn.Linear,)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)


@dataclass(frozen=True)
class TargetLayer:
    """One layer to rebuild. `names` lists every place at which the same module sits (a tied layer has several)."""

    names: tuple[str, ...]
    kind: str
    shape: tuple[int, ...]
    groups: int
    has_bias: bool

    @property
    def name(self) -> str:
        """The first place, which also names the layer's random streams."""
        return self.names[0]

    @property
    def group_shape(self) -> tuple[int, ...]:
        """The weight of one group: groups are rebuilt one by one."""
        return (self.shape[0] // self.groups, *self.shape[1:])

    @property
    def n_weights(self) -> int:
        """Weights of the target, without its bias."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Left:
    """A module with parameters that stays as it is, and why."""

    name: str
    kind: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}): {self.reason}"


@dataclass(frozen=True)
class Target:
    """The layers of a network that will be rebuilt, in the order of its modules, and what is left."""

    layers: tuple[TargetLayer, ...]
    left: tuple[Left, ...]


def find_layers(network: nn.Module, *, strict: bool = False) -> Target:
    """Every Linear and Conv1d/2d/3d of the network, and every other module with weights, listed as left.

    `strict` refuses a network of which anything but norms would be left.
    """
    places: dict[int, list[str]] = {}
    for name, module in network.named_modules(remove_duplicate=False):
        places.setdefault(id(module), []).append(name)
    layers: list[TargetLayer] = []
    left: list[Left] = []
    seen: set[int] = set()
    closed: list[str] = []
    for name, module in network.named_modules():
        if id(module) in seen or any(name.startswith(f"{outer}.") for outer in closed):
            continue
        seen.add(id(module))
        own = list(module.parameters(recurse=False))
        if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            closed.append(name)
            left.append(
                Left(name, type(module).__name__, "reads its weights itself, packed, so they cannot be swapped")
            )
        elif type(module) in LINEAR + CONVOLUTIONS:
            layers.append(_describe(tuple(places[id(module)]), module))
        elif isinstance(module, NORMS) or not own:
            continue
        elif isinstance(module, LINEAR + CONVOLUTIONS):
            left.append(Left(name, type(module).__name__, "a subclass with a forward of its own"))
        else:
            left.append(Left(name, type(module).__name__, "neither linear nor convolutional"))
    if strict and left:
        listed = "; ".join(str(item) for item in left[:5])
        raise ConversionError(
            f"strict reconstruction needs a network of linear layers, convolutions and norms; got {len(left)} other "
            f"modules with weights: {listed}. Leave strict out to keep them as they are."
        )
    if not layers:
        raise ConversionError(
            "a reconstruction needs at least one Linear or Conv layer; got none in "
            f"{type(network).__name__}. Pass the whole network, not one of its norms or activations."
        )
    return Target(tuple(layers), tuple(left))


def weight_of(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a target layer in float64, refused where they are not finite."""
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor)
    for what, values in (("weight", weight), ("bias", bias)):
        if isinstance(values, Tensor) and not bool(torch.isfinite(values).all()):
            raise ValueRangeError(
                f"a target layer needs finite numbers; got NaN or infinity in the {what} of {layer}. "
                "Load a checkpoint from before the training diverged."
            )
    return weight.detach().double(), bias.detach().double() if isinstance(bias, Tensor) else None


def _describe(names: tuple[str, ...], layer: nn.Module) -> TargetLayer:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    if 0 in weight.shape:
        raise ConversionError(
            f"a target layer needs at least one input and one output; got {tuple(weight.shape)} at {names[0]!r}. "
            "Remove the empty layer."
        )
    groups = layer.groups if isinstance(layer, CONVOLUTIONS) else 1
    return TargetLayer(names, type(layer).__name__, tuple(weight.shape), groups, layer.bias is not None)
