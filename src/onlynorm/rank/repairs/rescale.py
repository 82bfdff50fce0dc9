"""Repairs that rescale layers to unit output, LSUV, and the branches of residual networks; all in place.

Layers are visited once, in the order of the forward pass.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from onlynorm.errors import ConversionError, ValueRangeError
from onlynorm.modules.untouched import untouched
from onlynorm.modules.walk import replace_module
from onlynorm.rank.repairs.visits import LayerModule, Route, RouteLayer, find_route, run_hooked
from onlynorm.seeds import seeded


def set_scale(layer: RouteLayer, received: Tensor, *, scale: float = 1.0) -> None:
    """Multiplies weight and bias of the layer so that its output has this root mean square over the batch."""
    own = root_mean_square(layer.module.forward(received))
    if own == 0.0:
        raise ValueRangeError(
            f"a repair needs a signal in every layer; {layer.name!r} ({layer.number + 1} of {layer.n_layers}) gives "
            "only zeros. Check for dead units before it, try method='batch_norm', or another batch."
        )
    layer.module.weight.mul_(scale / own)
    if layer.module.bias is not None:
        layer.module.bias.mul_(scale / own)


def root_mean_square(values: Tensor) -> float:
    """The root mean square, without overflow or underflow of the squares."""
    largest = float(values.abs().max())
    return largest * float((values.double() / largest).square().mean().sqrt()) if largest > 0.0 else 0.0


def clear_bias(module: LayerModule) -> None:
    """Sets the bias to zero, since it increases the similarity of samples."""
    if module.bias is not None:
        module.bias.zero_()


def scale_layers(route: Route) -> None:
    """Scales every layer to unit output, in place."""
    route.visit(set_scale)


def lsuv(route: Route, *, seed: int) -> None:
    """Draws orthogonal weights and zero biases, scaled to unit root mean square outputs (Mishkin and Matas, 2016)."""
    generator = seeded(seed)

    def change(layer: RouteLayer, received: Tensor) -> None:
        draw_orthogonal(layer.weight, generator)
        clear_bias(layer.module)
        set_scale(layer, received)

    route.visit(change)


def draw_orthogonal(weight: Tensor, generator: torch.Generator) -> None:
    """Draws a weight (out, ...) with orthonormal rows, or columns if there are fewer, in place."""
    drawn = torch.empty(weight.shape)  # on the CPU, so that a seed gives the same weight on every device
    weight.copy_(nn.init.orthogonal_(drawn, generator=generator))


class Skip(nn.Module):
    """A layer with a skip connection: x + scale * layer(x)."""

    def __init__(self, module: nn.Module, scale: float) -> None:
        super().__init__()
        self.layer, self.scale = module, scale

    def forward(self, x: Tensor) -> Tensor:
        """x plus the scaled output of the layer."""
        return x + self.scale * self.layer(x)

    def extra_repr(self) -> str:
        """The scale of the branch."""
        return f"scale={self.scale:.4g}"


def rescale_residuals(route: Route) -> int:
    """Divides residual branches by the square root of their number, in place, and returns that number.

    In a network without residual blocks, skip connections are added to layers with equal input and output shapes,
    except the first and the last; each branch has unit output before it is scaled.
    """
    branches = find_branches(route.model, route.inputs)
    if branches:
        fixed = {id(parameter) for layer in route.layers if layer.is_fixed for parameter in layer.module.parameters()}
        with torch.no_grad():
            for end in branches:
                for parameter in (end.weight, getattr(end, "bias", None)):
                    is_free = isinstance(parameter, Tensor) and parameter.requires_grad and id(parameter) not in fixed
                    if isinstance(parameter, Tensor) and is_free:
                        parameter.div_(math.sqrt(len(branches)))
        return len(branches)
    inner = [layer for layer in route.hidden[1:] if layer.input_shape == layer.output_shape]
    if not inner:
        raise ConversionError(
            "method='residual' needs residual blocks, or layers that keep the shape of their input; got neither. Try "
            "method='mirrored'."
        )
    for layer in inner:
        replace_module(route.model, layer.module, new=Skip(layer.module, 1.0 / math.sqrt(len(inner))))
    scale_layers(find_route(route.model, route.inputs))
    return len(inner)


def find_branches(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[nn.Module]:
    """The last layer or norm of every residual branch.

    A block is residual if its output has the shape of its input and, with its last layer or norm set to zero, equals
    the input or its positive part. Blocks that change the shape are not found.
    """
    found: dict[nn.Module, None] = {}
    for block, received in _blocks(model, inputs):
        ends = [module for module in block.modules() if isinstance(getattr(module, "weight", None), Tensor)]
        if ends and _is_residual(block, ends[-1], received):
            found[ends[-1]] = None
    return list(found)


def _blocks(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[tuple[nn.Module, Tensor]]:
    """All modules with children, one input and an output of the same shape, with their first input."""
    found: dict[nn.Module, Tensor] = {}

    def record(module: nn.Module, given: tuple[object, ...], output: object) -> None:
        received = given[0] if len(given) == 1 else None
        if isinstance(received, Tensor) and isinstance(output, Tensor) and received.shape == output.shape:
            found.setdefault(module, received.detach().clone())

    hooks = [m.register_forward_hook(record) for m in model.modules() if next(m.children(), None) is not None]
    run_hooked(model, inputs, hooks)
    return list(found.items())


@torch.no_grad()
def _is_residual(block: nn.Module, end: nn.Module, received: Tensor) -> bool:
    saved = {name: parameter.clone() for name, parameter in end.named_parameters(recurse=False)}
    try:
        with untouched(block, is_training=True, tensors=(received,)), torch.no_grad():
            for parameter in end.parameters(recurse=False):
                parameter.zero_()
            output = block(received.clone())
    finally:
        for name, parameter in end.named_parameters(recurse=False):
            parameter.copy_(saved[name])
    return torch.equal(output, received) or torch.equal(output, received.clamp(min=0.0))
