"""Repairs that scale: every layer to unit output, LSUV, and the branches of residual networks.

All of them work in place, in one visit of the layers in the order of the signal.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from onlynorm.errors import ConversionError, ValueRangeError
from onlynorm.modules.untouched import untouched
from onlynorm.modules.walk import replace_module
from onlynorm.rank.repairs.visits import LayerModule, Place, Route, find_route, run_hooked
from onlynorm.seeds import seeded


def set_scale(place: Place, received: Tensor, *, scale: float = 1.0) -> None:
    """Multiplies weight and bias of the layer so that its output has this root mean square over the batch."""
    own = root_mean_square(place.layer.forward(received))
    if own == 0.0:
        raise ValueRangeError(
            f"a repair needs a signal in every layer; {place.name!r} ({place.number + 1} of {place.n_layers}) gives "
            "only zeros. Are all units before it dead? Try method='batch_norm', or another batch."
        )
    place.layer.weight.mul_(scale / own)
    if place.layer.bias is not None:
        place.layer.bias.mul_(scale / own)


def root_mean_square(values: Tensor) -> float:
    """The root of the mean of the squares, which may themselves be too large or too small for float64."""
    largest = float(values.abs().max())
    return largest * float((values.double() / largest).square().mean().sqrt()) if largest > 0.0 else 0.0


def clear_bias(layer: LayerModule) -> None:
    """Sets the bias to zero: it is the same for all samples, and so it pulls them together."""
    if layer.bias is not None:
        layer.bias.zero_()


def scale_layers(route: Route) -> None:
    """Scales every layer to unit output, in place; directions of weights stay as they are."""
    route.visit(set_scale)


def lsuv(route: Route, *, seed: int) -> None:
    """Orthogonal weights, zero biases, every output scaled to unit root mean square (Mishkin and Matas, 2016)."""
    dice = seeded(seed)

    def change(place: Place, received: Tensor) -> None:
        draw_orthogonal(place.weight, dice)
        clear_bias(place.layer)
        set_scale(place, received)

    route.visit(change)


def draw_orthogonal(weight: Tensor, dice: torch.Generator) -> None:
    """Draws a weight (out, ...) with orthonormal rows, or columns if it has fewer of them, in place."""
    drawn = torch.empty(weight.shape)  # on the CPU, so that a seed means the same on every device
    weight.copy_(nn.init.orthogonal_(drawn, generator=dice))


class Skip(nn.Module):
    """A layer with a skip around it: x + scale * layer(x)."""

    def __init__(self, layer: nn.Module, scale: float) -> None:
        super().__init__()
        self.layer, self.scale = layer, scale

    def forward(self, x: Tensor) -> Tensor:
        """x plus the scaled output of the layer."""
        return x + self.scale * self.layer(x)

    def extra_repr(self) -> str:
        """The scale of the branch."""
        return f"scale={self.scale:.4g}"


def rescale_residuals(route: Route) -> int:
    """How many residual branches there are, each scaled by the root of that number, in place.

    A network without residual blocks gets skips around the layers that keep the shape of their input, the first and
    the last aside; each branch has unit output before it is scaled.
    """
    branches = find_branches(route.model, route.inputs)
    if branches:
        fixed = {id(parameter) for place in route.places if place.is_fixed for parameter in place.layer.parameters()}
        with torch.no_grad():
            for end in branches:
                for parameter in (end.weight, getattr(end, "bias", None)):
                    is_free = isinstance(parameter, Tensor) and parameter.requires_grad and id(parameter) not in fixed
                    if isinstance(parameter, Tensor) and is_free:
                        parameter.div_(math.sqrt(len(branches)))
        return len(branches)
    inner = [place for place in route.hidden[1:] if place.input_shape == place.output_shape]
    if not inner:
        raise ConversionError(
            "method='residual' needs residual blocks, or layers that keep the shape of their input; this network has "
            "neither. Try method='mirrored'."
        )
    for place in inner:
        replace_module(route.model, place.layer, new=Skip(place.layer, 1.0 / math.sqrt(len(inner))))
    scale_layers(find_route(route.model, route.inputs))
    return len(inner)


def find_branches(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[nn.Module]:
    """The last layer or norm of every residual branch.

    A block is residual if it keeps the shape of its input and, with its last layer or norm set to zero, returns its
    input, or the positive part of it. Blocks that change the shape are not found.
    """
    found: dict[nn.Module, None] = {}
    for block, received in _blocks(model, inputs):
        ends = [module for module in block.modules() if isinstance(getattr(module, "weight", None), Tensor)]
        if ends and _is_residual(block, ends[-1], received):
            found[ends[-1]] = None
    return list(found)


def _blocks(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[tuple[nn.Module, Tensor]]:
    """Every module with children that keeps the shape of its one input, with what it received first."""
    seen: dict[nn.Module, Tensor] = {}

    def note(module: nn.Module, given: tuple[object, ...], output: object) -> None:
        received = given[0] if len(given) == 1 else None
        if isinstance(received, Tensor) and isinstance(output, Tensor) and received.shape == output.shape:
            seen.setdefault(module, received.detach().clone())

    hooks = [m.register_forward_hook(note) for m in model.modules() if next(m.children(), None) is not None]
    run_hooked(model, inputs, hooks)
    return list(seen.items())


@torch.no_grad()
def _is_residual(block: nn.Module, end: nn.Module, received: Tensor) -> bool:
    kept = {name: parameter.clone() for name, parameter in end.named_parameters(recurse=False)}
    try:
        with untouched(block, is_training=True, tensors=(received,)), torch.no_grad():
            for parameter in end.parameters(recurse=False):
                parameter.zero_()
            output = block(received.clone())
    finally:
        for name, parameter in end.named_parameters(recurse=False):
            parameter.copy_(kept[name])
    return torch.equal(output, received) or torch.equal(output, received.clamp(min=0.0))
