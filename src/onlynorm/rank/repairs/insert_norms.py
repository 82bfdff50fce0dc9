"""`insert_batch_norms`: a batch norm behind every hidden layer that has none yet."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from onlynorm.errors import ConversionError
from onlynorm.modules.norms import norm_modules
from onlynorm.modules.walk import replace_module
from onlynorm.rank.repairs.visits import LayerModule, Route, channel_axis, run_hooked

_NORMS: dict[int, type[nn.Module]] = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
"""By the number of axes of what a layer gives."""


def insert_batch_norms(route: Route) -> int:
    """How many batch norms were put behind layers, in place: all but the last one, and those that have a norm already.

    A layer becomes Sequential(layer, norm) under its old name.
    """
    normalised = _normalised(route)
    hidden = [place for place in route.hidden if place.name not in normalised]
    for place in hidden:
        if channel_axis(place.layer) == -1 and len(place.output_shape) != 2:
            raise ConversionError(
                f"a batch norm behind a Linear needs outputs (samples, channels); {place.name!r} gives "
                f"{place.output_shape}. Tokens have layer norms: try method='mirrored'."
            )
    for place in hidden:
        n_channels = place.weight.shape[0]
        norm = _NORMS[len(place.output_shape)](n_channels)
        norm.to(place.layer.weight.device, place.layer.weight.dtype)
        replace_module(route.model, place.layer, new=nn.Sequential(place.layer, norm))
    return len(hidden)


def _normalised(route: Route) -> set[str]:
    """The names of layers whose very output a norm receives."""
    makers: dict[int, tuple[Tensor, str]] = {}
    found: set[str] = set()
    hooks = []
    for place in route.places:

        def note(_: LayerModule, __: Any, output: Tensor, name: str = place.name) -> None:
            makers[id(output)] = (output, name)  # kept, so that no other tensor gets its id

        hooks.append(place.layer.register_forward_hook(note))

    def check(_: nn.Module, given: tuple[Any, ...]) -> None:
        if given and id(given[0]) in makers:
            found.add(makers[id(given[0])][1])

    hooks += [norm.register_forward_pre_hook(check) for _, norm, _ in norm_modules(route.model)]
    run_hooked(route.model, route.inputs, hooks)
    return found
