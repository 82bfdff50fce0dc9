"""Calling a model and walking over its modules: inputs, outputs, wrappers, and the places of a module.

A place is the path of a module in a model, as in `named_modules`; one module may have several.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from onlynorm.errors import ConversionError, OnlynormError, ShapeError
from onlynorm.validate import as_tensor

Output = Callable[[Any], Any]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the floating-point tensors in nested lists, tuples, dicts and the like, in their order."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def find_output(returned: Any) -> Tensor:
    """The logits of what a model returns, or the first floating-point tensor in it."""
    named = returned.get("logits") if isinstance(returned, dict) else getattr(returned, "logits", None)
    found = named if isinstance(named, Tensor) else next(tensors_in(returned), None)
    if found is None:
        raise ConversionError(
            f"a loss needs a tensor in what the model returns; got {type(returned).__name__} without one. Pass as "
            "output= a function that picks it."
        )
    return found


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside `DistributedDataParallel`, `DataParallel`, `torch.compile` and Fabric wrappers, else itself.

    The parameters are shared, so what is changed in the inner model is changed in the wrapper too.
    """
    while True:
        inner = getattr(model, "_orig_mod", None)  # torch.compile, in place of isinstance: the class loads dynamo
        if inner is None and type(model).__name__ == "_FabricModule":
            inner = getattr(model, "_original_module", None)
        if inner is None and isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def is_autocast(x: Tensor) -> bool:
    """Whether autocast is on for the device of this tensor."""
    kind = x.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context in which nothing on this device is computed in the lower precision of an autocast around it."""
    if not torch.amp.is_autocast_available(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def without_compiling() -> AbstractContextManager[object]:
    """A context in which compiled modules run eagerly, with all hooks."""
    set_stance = getattr(torch.compiler, "set_stance", None)  # since torch 2.6
    if set_stance is None or "torch._dynamo" not in sys.modules:  # nothing was compiled; loading it takes seconds
        return contextlib.nullcontext()
    stance: AbstractContextManager[object] = set_stance("force_eager")
    return stance


Inputs: TypeAlias = "Tensor | tuple[Tensor, ...]"
"""A batch, or a tuple of batches for a network that takes several."""


def as_inputs(what: str, inputs: Any) -> tuple[Tensor, ...]:
    """The positional arguments of a network from a batch or a tuple or list of batches, NumPy arrays included."""
    cure = "Pass a batch, or a tuple of batches, as tensors or NumPy arrays with samples first."
    is_several = isinstance(inputs, tuple) or (
        isinstance(inputs, list) and any(hasattr(item, "shape") for item in inputs)
    )
    given = tuple(inputs) if is_several else (inputs,)
    if not given:
        raise ShapeError(f"{what} needs a batch, or a tuple of batches; got nothing. {cure}")
    return tuple(as_tensor(f"{what}: inputs", item, cure=cure) for item in given)


def first_samples(inputs: tuple[Tensor, ...], n_samples: int) -> tuple[Tensor, ...]:
    """The first few samples, if all inputs have as many; else the inputs."""
    if any(x.ndim == 0 or len(x) != len(inputs[0]) for x in inputs):
        return inputs
    return tuple(x[:n_samples] for x in inputs)


def accepted_samples(network: nn.Module, inputs: tuple[Tensor, ...], n_samples: int) -> tuple[Tensor, ...]:
    """The first few samples if the network accepts them; else all inputs."""
    few = first_samples(inputs, n_samples)
    try:
        run(network, few)
    except OnlynormError:
        return inputs
    return few


def as_tuple(inputs: Inputs) -> tuple[Tensor, ...]:
    """The inputs as the positional arguments of the network."""
    return inputs if isinstance(inputs, tuple) else (inputs,)


def cast(inputs: Inputs, dtype: torch.dtype, device: torch.device | str | None = None) -> tuple[Tensor, ...]:
    """The inputs with floating-point tensors in this precision; integers (tokens, masks) are not cast."""
    return tuple(x.to(device, dtype if x.is_floating_point() else x.dtype) for x in as_tuple(inputs))


def precision(network: nn.Module) -> torch.dtype:
    """The precision of the network's inputs: that of its tensors outside blocks, else of its blocks, else float64."""
    kept = (module for module in network.modules() if getattr(module, "keeps_precision", False))
    inner = {id(module) for outer in kept for module in outer.modules()}
    others = [module for module in network.modules() if id(module) not in inner]
    tensors = itertools.chain(
        (p for module in others for p in module.parameters(recurse=False)),
        (b for module in others for b in module.buffers(recurse=False)),
        network.parameters(),
    )
    return next((x.dtype for x in tensors if x.is_floating_point()), torch.float64)


def copy_network(network: nn.Module) -> nn.Module:
    """A copy that shares nothing with the network."""
    try:
        return copy.deepcopy(network)
    except Exception as error:
        raise ConversionError(
            f"the network needs to be copied, so that it is left alone; copy.deepcopy says: {error}. Make a fresh one "
            "and load its weights (old weight_norm hooks have to be removed first)."
        ) from error


@torch.no_grad()
def run(network: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
    """What the network returns for the inputs."""
    try:
        with without_compiling():
            return network(*inputs)
    except OnlynormError:
        raise
    except (RuntimeError, TypeError, IndexError, ValueError) as error:
        shapes = ", ".join(f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}" for x in inputs)
        raise ConversionError(
            f"the network needs to take the inputs in its own precision; got {shapes}, and it failed with: {error}. "
            "Pass inputs as forward takes them, and remove casts to a fixed precision or device from it."
        ) from error


def outputs_of(returned: object) -> list[Tensor]:
    """All tensors in nested lists, tuples and dicts, of any dtype."""
    if isinstance(returned, Tensor):
        return [returned]
    if isinstance(returned, Mapping):
        returned = list(returned.values())
    if isinstance(returned, list | tuple):
        return [tensor for item in returned for tensor in outputs_of(item)]
    return []


def relative_difference(made: list[Tensor], wanted: list[Tensor], *, scale: list[Tensor] | None = None) -> float:
    """|made - wanted| / |wanted| over all tensors; relative to `scale` (or absolute) where wanted is zero."""
    rest = _norm([a.double() - b.double() for a, b in zip(made, wanted, strict=True)])
    return rest / (_norm(wanted) or _norm(scale or []) or 1.0)


def _norm(tensors: list[Tensor]) -> float:
    sizes = [torch.linalg.vector_norm(tensor.double()) for tensor in tensors]
    return float(torch.linalg.vector_norm(torch.stack(sizes))) if sizes else 0.0


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
"""Attributes in which torch stores the hooks on a module's calls; hooks on its state dict are not among them."""
SIZES = ("in_features", "out_features", "in_channels", "out_channels", "kernel_size", "stride", "dilation")
"""Attributes of a layer that code around it reads, as in x.view(-1, self.head.in_features)."""


def swap(network: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """The network with the module at this place; the module itself if the place is ""."""
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


def carry_sizes(old: nn.Module, new: nn.Module) -> None:
    """Gives `new` the sizes of `old` under the names that torch gives them."""
    for name in SIZES:
        if name in vars(old):
            vars(new)[name] = vars(old)[name]


def has_hooks(module: nn.Module) -> bool:
    """Whether a hook on the module's forward pass may change what goes in or comes out."""
    return bool(module._forward_pre_hooks or module._forward_hooks)


def places_of(network: nn.Module) -> dict[nn.Module, tuple[str, ...]]:
    """Every module of the network with all its places, in the order of the first."""
    places: dict[nn.Module, tuple[str, ...]] = {}
    for name, module in network.named_modules(remove_duplicate=False):
        places[module] = (*places.get(module, ()), name)
    return places


def replace_module(model: nn.Module, old: nn.Module, *, new: nn.Module) -> None:
    """Replaces `old` by `new`, in the same mode, at all its places."""
    new.train(old.training)
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is old and parent is not new:
                setattr(parent, name, new)
