"""`insert_batch_norms`: inserts a batch norm after every hidden layer without a norm."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from onlynorm.errors import ConversionError
from onlynorm.modules.norms import norm_modules
from onlynorm.modules.walk import replace_module
from onlynorm.rank.coverage import weight_of
from onlynorm.rank.repairs.visits import LayerModule, Route, channel_axis, run_hooked

NORMS: dict[int, type[nn.modules.batchnorm._BatchNorm]] = {
    2: nn.BatchNorm1d,
    3: nn.BatchNorm1d,
    4: nn.BatchNorm2d,
    5: nn.BatchNorm3d,
}
"""Batch norm classes by the number of axes of a layer's output."""


class WithNorm(nn.Sequential):
    """A layer and the batch norm inserted after it."""


def add_norm(layer: LayerModule, norm: type[nn.modules.batchnorm._BatchNorm]) -> WithNorm:
    """The layer followed by a new norm of this class, with the device and dtype of the layer."""
    made = norm(weight_of(layer).shape[0])
    return WithNorm(layer, made.to(layer.weight.device, layer.weight.dtype))


def insert_batch_norms(route: Route) -> int:
    """Inserts batch norms in place and returns their number: after all layers except the last and those with a norm.

    A layer is replaced by WithNorm(layer, norm) under its name.
    """
    normalised = _normalised(route)
    hidden = [layer for layer in route.hidden if layer.name not in normalised]
    for layer in hidden:
        if channel_axis(layer.module) == -1 and len(layer.output_shape) != 2:
            raise ConversionError(
                f"a batch norm after a Linear needs outputs (samples, channels); {layer.name!r} gives "
                f"{layer.output_shape}. Try method='mirrored'."
            )
    for layer in hidden:
        norm = NORMS[len(layer.output_shape)]
        replace_module(route.model, layer.module, new=add_norm(layer.module, norm))
    return len(hidden)


def _normalised(route: Route) -> set[str]:
    """Names of layers whose output is the input of a norm."""
    makers: dict[int, tuple[Tensor, str]] = {}
    found: set[str] = set()
    hooks = []
    for layer in route.layers:

        def record(_: LayerModule, __: Any, output: Tensor, name: str = layer.name) -> None:
            makers[id(output)] = (output, name)  # the tensor is stored, so that its id is not reused

        hooks.append(layer.module.register_forward_hook(record))

    def check(_: nn.Module, given: tuple[Any, ...]) -> None:
        if given and id(given[0]) in makers:
            found.add(makers[id(given[0])][1])

    hooks += [norm.register_forward_pre_hook(check) for _, norm, _ in norm_modules(route.model)]
    run_hooked(route.model, route.inputs, hooks)
    return found
