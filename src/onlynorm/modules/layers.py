"""`find_layers`: the linear and convolutional layers of a network, which can be rebuilt.

Layers are found by iterating over modules, not by tracing, so skip connections, pooling, attention and functional calls
are allowed. Norm layers of the target are not replaced. Other modules with weights are listed with the reason.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from onlynorm.display import Result
from onlynorm.errors import ConversionError, UnknownNameError, ValueRangeError
from onlynorm.modules.norms import NORMS
from onlynorm.modules.walk import need_model, need_open, places_of
from onlynorm.validate import need_callable, need_flag, need_items

LINEAR = (nn.Linear,)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class TargetLayer(Result):
    """A layer to rebuild. `names` lists all places of the module (a tied layer has several)."""

    names: tuple[str, ...]
    kind: str
    shape: tuple[int, ...]
    groups: int
    has_bias: bool

    @property
    def name(self) -> str:
        """The first place, which also names the random streams of the layer."""
        return self.names[0]

    @property
    def group_shape(self) -> tuple[int, ...]:
        """The shape of the weight of one group; groups are rebuilt separately."""
        return (self.shape[0] // self.groups, *self.shape[1:])

    @property
    def n_weights(self) -> int:
        """Number of weights, without the bias."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Left(Result):
    """A module with parameters that is not replaced, and why."""

    name: str
    kind: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}): {self.reason}"


@dataclass(frozen=True)
class Target(Result):
    """The layers of a network to rebuild, in the order of its modules, and the modules that are not replaced."""

    layers: tuple[TargetLayer, ...]
    left: tuple[Left, ...]


def find_layers(
    model: nn.Module,
    *,
    strict: bool = False,
    keep: Iterable[str] | str = (),
    call: Callable[[], object] | None = None,
    is_trained: bool = False,
    what: str = "a reconstruction",
) -> Target:
    """All Linear and Conv1d/2d/3d layers of the network, and all other modules with weights as `left`.

    `strict` raises if modules other than norms and those that `keep` names would be left. `keep` names layers to
    keep, with wildcards: "head", "blocks.11.*". `call` runs the network once, to find layers whose weight is read
    from outside their forward; these cannot be replaced. With `is_trained`, layers whose weight or bias is shared with
    a module that is not replaced are left too, because training would separate the two. `what` names the caller in
    errors.

    Examples:
        >>> from onlynorm.models import mlp
        >>> from onlynorm.modules import find_layers
        >>> [layer.name for layer in find_layers(mlp((8, 16, 4), norm="batch")).layers]
        ['0', '3']
    """
    model, kinds = need_model("find_layers", model), LINEAR + CONVOLUTIONS
    need_open(what, model)
    need_flag("strict", strict)
    need_flag("is_trained", is_trained)
    if call is not None:
        need_callable("call", call, cure="It runs the network once.")
    read = set() if call is None else find_read([one for one in model.modules() if type(one) in kinds], call)
    layers: list[TargetLayer] = []
    left: list[Left] = []
    closed: list[str] = []
    for module, names in places_of(model).items():
        name = names[0]
        if any(name.startswith(f"{outer}.") for outer in closed):
            continue
        own = list(module.parameters(recurse=False))
        if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            closed.append(name)
            left.append(Left(name, type(module).__name__, "uses packed weights, which cannot be replaced"))
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
            left.append(Left(name, type(module).__name__, "a subclass that overrides forward"))
        else:
            left.append(Left(name, type(module).__name__, "neither linear nor convolutional"))
    kept = _kept([name for layer in layers for name in layer.names], keep)
    asked = [Left(layer.name, layer.kind, KEPT) for layer in layers if kept.intersection(layer.names)]
    layers = [layer for layer in layers if not kept.intersection(layer.names)]
    if is_trained:
        tied = _tied_elsewhere(model, layers)
        left += [Left(layer.name, layer.kind, tied[layer.name]) for layer in layers if layer.name in tied]
        layers = [layer for layer in layers if layer.name not in tied]
    listed = "; ".join(str(item) for item in left[:5])
    if strict and left:
        raise ConversionError(
            f"strict needs a network of linear layers, convolutions and norms; got {len(left)} other modules with "
            f"weights: {listed}. Leave strict out to leave them unchanged."
        )
    if not layers:
        why = " outside keep=" if asked else ""
        raise ConversionError(
            f"a conversion needs at least one Linear or Conv layer; got none in {type(model).__name__}{why}"
            f"{listed and ': '}{listed}. Pass the whole network, not one of its norms or activations."
        )
    return Target(tuple(layers), (*left, *asked))


KEPT = "kept as asked"


def _kept(names: list[str], keep: Iterable[str] | str) -> set[str]:
    """The layers that the patterns name, themselves or by a module around them."""
    kept: set[str] = set()
    cure = "Write keep='head' or keep=['blocks.1.*']."
    for pattern in [keep] if isinstance(keep, str) else need_items("keep", keep, cure=cure):
        if not isinstance(pattern, str):
            raise ConversionError(f"keep needs names of layers; got a {type(pattern).__name__}. {cure}")
        hits = [name for name in names if fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")]
        if not hits:
            raise UnknownNameError("keep", pattern, names)
        kept.update(hits)
    return kept


def _tied_elsewhere(network: nn.Module, layers: list[TargetLayer]) -> dict[str, str]:
    """The layers whose weight or bias also belongs to a module that stays, with the reason."""
    chosen = {layer.name: network.get_submodule(layer.name) for layer in layers}
    inside = set(chosen.values())
    owners = {
        parameter: name
        for name, module in network.named_modules()
        if module not in inside
        for parameter in module.parameters(recurse=False)
    }
    found = {}
    for name, layer in chosen.items():
        owner = next((owners[p] for p in layer.parameters(recurse=False) if p in owners), None)
        if owner is not None:
            found[name] = f"shares a tensor with {owner!r}, which stays as it is"
    return found


def find_read(layers: Iterable[nn.Module], call: Callable[[], object]) -> set[nn.Module]:
    """The layers whose weight or bias is read outside of their forward while `call` runs."""
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
    """Why a Linear or Conv cannot be replaced; empty if it can."""
    if any(callable(value) and callable(getattr(type(layer), name, None)) for name, value in vars(layer).items()):
        return "its forward is overridden on the instance"
    if any(name not in layer._parameters for name in ("weight", "bias")):
        return "its weight is computed by a hook (weight_norm, spectral_norm, prune); remove the hook to rebuild it"
    if any(p is not None and type(p) is not nn.Parameter for p in layer._parameters.values()):
        return f"its weight is a {type(layer.weight).__name__}"
    return "its weight is read directly, by a hook or by another module" if is_read else ""


def weight_of(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """(weight, bias) of a target layer in float64; raises if they are not finite."""
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor)
    for what, values in (("weight", weight), ("bias", bias)):
        if isinstance(values, Tensor) and not bool(torch.isfinite(values).all()):
            raise ValueRangeError(
                f"a target layer needs finite weights; got NaN or infinity in the {what} of {layer}. "
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
    """Values per output, reshaped to broadcast with a weight (out, inp, *kernel)."""
    return values.reshape(-1, *(1,) * (weight.ndim - 1))


def plain_layer(weight: Tensor, bias: Tensor | None, options: dict[str, Any]) -> nn.Module:
    """A Linear, or a Conv with these options, with this weight and bias."""
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
    """The options of a convolution except its channels; empty for a linear layer."""
    names = ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
    return {name: getattr(layer, name) for name in names} if hasattr(layer, "stride") else {}


def options_from_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Options of a convolution from JSON, with lists converted to tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
