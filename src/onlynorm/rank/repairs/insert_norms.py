"""`insert_batch_norms`: a batch norm after every hidden layer that has no norm yet."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from onlynorm.errors import ConversionError
from onlynorm.modules.norms import norm_modules
from onlynorm.modules.walk import replace_module
from onlynorm.rank.repairs.visits import LayerModule, Route, channel_axis, run_hooked

_NORMS: dict[int, type[nn.Module]] = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
"""By the number of axes of a layer's output."""


def insert_batch_norms(route: Route) -> int:
    """The number of batch norms inserted, in place: after every layer but the last and those that have a norm already.

    A layer becomes Sequential(layer, norm) under its old name.
    """
    normalised = _normalised(route)
    hidden = [layer for layer in route.hidden if layer.name not in normalised]
    for layer in hidden:
        if channel_axis(layer.module) == -1 and len(layer.output_shape) != 2:
            raise ConversionError(
                f"a batch norm after a Linear needs outputs (samples, channels); {layer.name!r} gives "
                f"{layer.output_shape}. Tokens have layer norms: try method='mirrored'."
            )
    for layer in hidden:
        n_channels = layer.weight.shape[0]
        norm = _NORMS[len(layer.output_shape)](n_channels)
        norm.to(layer.module.weight.device, layer.module.weight.dtype)
        replace_module(route.model, layer.module, new=nn.Sequential(layer.module, norm))
    return len(hidden)


def _normalised(route: Route) -> set[str]:
    """The names of layers whose output is the input of a norm."""
    makers: dict[int, tuple[Tensor, str]] = {}
    found: set[str] = set()
    hooks = []
    for layer in route.layers:

        def note(_: LayerModule, __: Any, output: Tensor, name: str = layer.name) -> None:
            makers[id(output)] = (output, name)  # stored, so that no other tensor gets its id

        hooks.append(layer.module.register_forward_hook(note))

    def check(_: nn.Module, given: tuple[Any, ...]) -> None:
        if given and id(given[0]) in makers:
            found.add(makers[id(given[0])][1])

    hooks += [norm.register_forward_pre_hook(check) for _, norm, _ in norm_modules(route.model)]
    run_hooked(route.model, route.inputs, hooks)
    return found
