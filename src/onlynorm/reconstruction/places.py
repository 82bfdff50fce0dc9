"""Where modules sit in a network: one module may have several places."""

from __future__ import annotations

from torch import nn

HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_is_full_backward_hook",
)
"""What torch keeps of the hooks on a module's calls; hooks on its state dict know its weights by name and are apart."""


def swap(network: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """The network with the module at this place; the module itself where the place is the network's own."""
    if not name:
        return module
    parent, _, child = name.rpartition(".")
    owner = network.get_submodule(parent)
    setattr(owner, child, module)
    if child == "_orig_mod":  # the wrapper of torch.compile keeps a call of the module it was made with
        owner._initialize()  # type: ignore[operator]
    return network


def carry_hooks(old: nn.Module, new: nn.Module) -> None:
    """Gives `new` the hooks on the calls of `old`, the tables themselves: a handle still removes its hook."""
    for name in HOOKS:
        setattr(new, name, getattr(old, name))


def has_hooks(module: nn.Module) -> bool:
    """Whether a hook on the module's forward pass may change what goes in or comes out."""
    return bool(module._forward_pre_hooks or module._forward_hooks)


def places_of(network: nn.Module) -> dict[nn.Module, tuple[str, ...]]:
    """Every module of the network with all its places, in the order of the first."""
    places: dict[nn.Module, tuple[str, ...]] = {}
    for name, module in network.named_modules(remove_duplicate=False):
        places[module] = (*places.get(module, ()), name)
    return places
