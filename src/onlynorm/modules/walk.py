"""What a module returns, and the module inside wrappers such as DistributedDataParallel."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from onlynorm.errors import ConversionError

Output = Callable[[Any], Any]
GLOBAL_GENERATORS = threading.RLock()
"""Held while a function of onlynorm has lent torch's global generators another state: threads take turns."""


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
    """A context in which parts that `torch.compile` made run as ordinary Python, hooks that come and go included."""
    set_stance = getattr(torch.compiler, "set_stance", None)  # since torch 2.6
    if set_stance is None or "torch._dynamo" not in sys.modules:  # nothing was compiled; loading it takes seconds
        return contextlib.nullcontext()
    stance: AbstractContextManager[object] = set_stance("force_eager")
    return stance
