"""What of a trained network can be rebuilt: its linear and convolutional layers, wherever they sit.

Layers are found by walking the modules, not by tracing, so skips, pooling, attention and functional calls between
layers do not matter. Norm layers of the target stay as they are: they are norms. What has weights but cannot be
swapped is listed with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from onlynorm.errors import ConversionError, ValueRangeError
from onlynorm.modules.norms import NORMS
from onlynorm.modules.validate import need_model
from onlynorm.modules.walk import places_of
from onlynorm.validate import need_callable, need_flag

LINEAR = (nn.Linear,)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


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


def find_layers(network: nn.Module, *, strict: bool = False, call: Callable[[], object] | None = None) -> Target:
    """Every Linear and Conv1d/2d/3d of the network, and every other module with weights, listed as left.

    `strict` refuses a network of which anything but norms would be left. `call` runs the network once, to find layers
    whose weight is read by others than the layer itself: nothing can take their place.
    """
    network, kinds = need_model("find_layers", network), LINEAR + CONVOLUTIONS
    need_open(network)
    need_flag("strict", strict)
    if call is not None:
        need_callable("call", call, cure="It runs the network once.")
    read = set() if call is None else find_read([one for one in network.modules() if type(one) in kinds], call)
    layers: list[TargetLayer] = []
    left: list[Left] = []
    closed: list[str] = []
    for module, names in places_of(network).items():
        name = names[0]
        if any(name.startswith(f"{outer}.") for outer in closed):
            continue
        own = list(module.parameters(recurse=False))
        if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            closed.append(name)
            left.append(
                Left(name, type(module).__name__, "reads its weights itself, packed, so they cannot be swapped")
            )
        elif type(module) in kinds and (reason := _why_not(module, is_read=module in read)):
            left.append(Left(name, type(module).__name__, reason))
        elif type(module) in kinds:
            layers.append(_describe(names, module))
        elif isinstance(module, NORMS) or not (own or (isinstance(module, kinds) and is_parametrized(module))):
            continue
        elif isinstance(module, torch.jit.ScriptModule):
            left.append(Left(name, module.original_name, "compiled by torch.jit"))
        elif isinstance(module, kinds) and is_parametrized(module):
            closed.append(name)
            left.append(Left(name, type(module).__name__, "parametrized; remove_parametrizations makes it ordinary"))
        elif isinstance(module, kinds):
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


def need_open(network: nn.Module) -> None:
    """Raises for a network that torch.jit made, whose layers cannot be swapped."""
    if isinstance(network, torch.jit.ScriptModule):
        raise ConversionError(
            f"a reconstruction needs layers that Python calls; got a traced or scripted {type(network).__name__}, "
            "which hides them. Pass the model that it was made from."
        )


def find_read(layers: Iterable[nn.Module], call: Callable[[], object]) -> set[nn.Module]:
    """The layers whose weight or bias is read from outside their own forward while `call` runs."""
    read: set[nn.Module] = set()
    running: list[nn.Module] = []
    kinds = [(layer, type(layer)) for layer in layers]

    def watched(kind: type[nn.Module]) -> type[nn.Module]:
        def look_up(self: nn.Module, name: str) -> Any:
            if name in ("weight", "bias") and self not in running:
                read.add(self)
            return kind.__getattr__(self, name)

        def forward(self: nn.Module, *args: Any, **named: Any) -> Any:
            running.append(self)
            try:
                return kind.forward(self, *args, **named)
            finally:
                running.pop()

        return type(kind.__name__, (kind,), {"__getattr__": look_up, "forward": forward})

    watching = {kind: watched(kind) for _, kind in kinds}
    try:
        for layer, kind in kinds:
            object.__setattr__(layer, "__class__", watching[kind])
        call()
    finally:
        for layer, kind in kinds:
            object.__setattr__(layer, "__class__", kind)
    return read


def _why_not(layer: nn.Module, *, is_read: bool) -> str:
    """Why a Linear or Conv cannot be swapped for a block; empty if it can."""
    if any(callable(value) and callable(getattr(type(layer), name, None)) for name, value in vars(layer).items()):
        return "its forward is replaced on the instance"
    if any(name not in layer._parameters for name in ("weight", "bias")):
        return "its weight is computed by a hook (weight_norm, spectral_norm, prune); remove the hook to make it one"
    if any(p is not None and type(p) is not nn.Parameter for p in layer._parameters.values()):
        return f"its weight is a {type(layer.weight).__name__}"
    return "its weight is read directly, by a hook or by another module" if is_read else ""


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


def per_output(values: Tensor, weight: Tensor) -> Tensor:
    """One number per output, shaped to multiply a weight (out, inp, *kernel)."""
    return values.reshape(-1, *(1,) * (weight.ndim - 1))


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


def layer_options(layer: nn.Module) -> dict[str, Any]:
    """What a convolution was made with, apart from its channels; nothing for a linear layer."""
    names = ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
    return {name: getattr(layer, name) for name in names} if hasattr(layer, "stride") else {}


def options_from_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Options of a convolution as its constructor takes them: JSON has lists where torch wants tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
