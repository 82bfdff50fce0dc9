"""Where modules sit in a network: one module may have several places."""

from __future__ import annotations

from torch import nn


def swap(network: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """The network with the module at this place; the module itself where the place is the network's own."""
    if not name:
        return module
    parent, _, child = name.rpartition(".")
    setattr(network.get_submodule(parent), child, module)
    return network


def places_of(network: nn.Module) -> dict[nn.Module, tuple[str, ...]]:
    """Every module of the network with all its places, in the order of the first."""
    places: dict[nn.Module, tuple[str, ...]] = {}
    for name, module in network.named_modules(remove_duplicate=False):
        places[module] = (*places.get(module, ()), name)
    return places
