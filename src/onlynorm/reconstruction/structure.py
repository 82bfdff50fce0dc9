"""What a network computes beside its tensors: classes, hyperparameters and hooks of its modules, in JSON types.

A file of norms is loaded onto a network that the caller makes. Strides, padding modes, slopes and numbers of heads are
in no tensor, so the file holds them, and a network with others is refused.
"""

from __future__ import annotations

import types
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn

from onlynorm.reconstruction.blocks import Block
from onlynorm.reconstruction.fast_paths import plain_kind
from onlynorm.reconstruction.folding import FoldedNorm
from onlynorm.storage import to_plain

SKIPPED = frozenset({"training", "inplace", "gradient_checkpointing", "name_or_path", "activation_relu_or_gelu"})
"""Attributes that do not change what a module computes in evaluation, or follow from others."""
LONGEST = 1000
"""Lists with more items than this are data, not hyperparameters."""


def describe_structure(network: nn.Module) -> dict[str, dict[str, Any]]:
    """Class and plain attributes of every module by its first place; blocks and folded norms are left out."""
    found: dict[str, dict[str, Any]] = {}
    inside: list[str] = []
    for place, module in network.named_modules():
        if isinstance(module, Block | FoldedNorm):
            inside.append(f"{place}." if place else "")
        elif not place.startswith(tuple(inside)) or not inside:
            found[place] = _describe(module)
    return found


def count_hooks(network: nn.Module) -> dict[str, list[int]]:
    """Forward pre-hooks and forward hooks of every module that has any: they may change what it computes."""
    counts = ((p, [len(m._forward_pre_hooks), len(m._forward_hooks)]) for p, m in network.named_modules())
    return {place: numbers for place, numbers in counts if any(numbers)}


def differences(
    stored: Mapping[str, Mapping[str, Any]], own: Mapping[str, Mapping[str, Any]], *, replaced: Collection[str]
) -> Iterable[str]:
    """What differs between two structures, in words; places that are replaced are left out."""
    for place in sorted(stored.keys() | own.keys()):
        if place in replaced:
            continue
        theirs, mine = stored.get(place), own.get(place)
        if theirs is None or mine is None:
            yield f"{place!r} is {'missing' if mine is None else mine['class']} in the network"
            continue
        for name in sorted(theirs.keys() | mine.keys()):
            if theirs.get(name) != mine.get(name):
                values = [f"{side.get(name, 'not set')!r:.40}" for side in (mine, theirs)]
                yield f"{name} of {place!r} is {values[0]} in the network and {values[1]} in the file"


def _describe(module: nn.Module) -> dict[str, Any]:
    if "_orig_mod" in module._modules:  # a wrapper of torch.compile, which changes no function
        return {"class": type(module).__name__}
    values = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    if "makes_nested" in values:
        values["use_nested_tensor"] = values.pop("makes_nested")
    values.pop("fast_activation", None)
    plain = {name: _plain(value) for name, value in values.items() if name not in SKIPPED}
    return {
        "class": plain_kind(module).__name__,
        **{name: value for name, value in plain.items() if value is not _NOT_PLAIN},
    }


_NOT_PLAIN = object()


def _plain(value: object) -> Any:
    """A hyperparameter in JSON types; functions by their name, as in activation=torch.nn.functional.relu."""
    if value is None or isinstance(value, bool | int | float | str):
        return to_plain(value)
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType):
        return value.__name__
    if isinstance(value, tuple | list) and len(value) <= LONGEST:
        items = [_plain(item) for item in value]
        return _NOT_PLAIN if _NOT_PLAIN in items else items
    return _NOT_PLAIN
