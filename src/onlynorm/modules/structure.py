"""The structure of a network: classes, hyperparameters and hooks of its modules, in a file and compared with it.

`structure` has the class and the plain attributes of every module, `details` the other attributes that can be compared:
dicts, dataclasses, enums, sets, dtypes, slices, partial functions, and tensors and non-persistent buffers by a
fingerprint. Private attributes and objects of other classes are not compared.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import math
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from onlynorm.errors import FormatError
from onlynorm.storage import from_plain, to_plain

SKIPPED = frozenset({"training", "inplace", "gradient_checkpointing", "name_or_path", "activation_relu_or_gelu"})
"""Attributes without effect in evaluation mode, or derived from others."""
LONGEST = 1000
"""Longer lists are data, not hyperparameters."""
N_ENTRIES = 8
"""Entries of a floating-point tensor in its fingerprint."""
FORMER_CLASSES = {"MemorizerBlock": "Block"}
"""Names of classes in files of earlier versions."""
_NOT_PLAIN = object()
_TENSOR = "$tensor"
KindOf = Callable[[nn.Module], type[nn.Module]]


def describe(
    network: nn.Module,
    *,
    opaque: tuple[type[nn.Module], ...] = (),
    kind_of: KindOf = type,
    casts: Mapping[torch.dtype, torch.dtype] | None = None,
) -> dict[str, dict[str, Any]]:
    """Structure, details and hooks by place, as JSON types; modules inside `opaque` ones are left out.

    `casts` are the dtypes to which tensors are cast when they are saved or loaded.
    `hooks` are [forward pre-hooks, forward hooks] of every module with any; they may change its output.
    """
    structure: dict[str, Any] = {}
    details: dict[str, Any] = {}
    inside: list[str] = []
    for place, module in network.named_modules():
        if isinstance(module, opaque):
            inside.append(f"{place}." if place else "")
        elif not place.startswith(tuple(inside)) or not inside:
            structure[place], found = _describe_module(module, kind_of, casts or {})
            if found:
                details[place] = found
    counts = {place: [len(m._forward_pre_hooks), len(m._forward_hooks)] for place, m in network.named_modules()}
    return {
        "structure": to_plain(structure),
        "details": to_plain(details),
        "hooks": {place: numbers for place, numbers in counts.items() if any(numbers)},
    }


def differences(
    document: Mapping[str, object],
    network: nn.Module,
    *,
    replaced: Collection[str] = (),
    opaque: tuple[type[nn.Module], ...] = (),
    kind_of: KindOf = type,
) -> list[str]:
    """How the network differs from the structure in a file, except at replaced places.

    Files of earlier versions have no structure, or no details; what they lack is not compared.
    """
    own = from_plain(describe(network, opaque=opaque, kind_of=kind_of))
    found: list[str] = []
    if "structure" in document:
        found += _compare_modules(_as_dict(document["structure"]), own["structure"], replaced)
    if "details" in document:
        found += _compare_details(_as_dict(document["details"]), own["details"], replaced)
    if document.get("hooks") is not None:
        stored, present = _as_dict(document["hooks"], holds=list), own["hooks"]
        for place in sorted(stored.keys() | present.keys()):
            mine, theirs = present.get(place, [0, 0]), stored.get(place, [0, 0])
            if mine != theirs:
                found.append(
                    f"[pre-hooks, hooks] at {place!r} are {mine} in the network and {theirs!r:.40} in the file"
                )
    return found


def _compare_modules(
    stored: Mapping[str, Mapping[str, Any]], own: Mapping[str, Mapping[str, Any]], replaced: Collection[str]
) -> Iterator[str]:
    for place in sorted(stored.keys() | own.keys()):
        if place in replaced:
            continue
        theirs, mine = stored.get(place), own.get(place)
        if theirs is None or mine is None:
            yield f"{place!r} is {'missing' if mine is None else mine['class']} in the network"
            continue
        for name in sorted(theirs.keys() | mine.keys()):
            is_renamed = name == "class" and FORMER_CLASSES.get(mine["class"]) == theirs.get("class")
            if theirs.get(name) != mine.get(name) and not is_renamed:
                values = [f"{side.get(name, 'not set')!r:.40}" for side in (mine, theirs)]
                yield f"{name} of {place!r} is {values[0]} in the network and {values[1]} in the file"


def _compare_details(
    stored: Mapping[str, Mapping[str, Any]], own: Mapping[str, Mapping[str, Any]], replaced: Collection[str]
) -> Iterator[str]:
    for place in sorted((stored.keys() | own.keys()) - set(replaced)):
        theirs, mine = stored.get(place, {}), own.get(place, {})
        for name in sorted(theirs.keys() | mine.keys()):
            if name not in theirs or name not in mine:
                if _TENSOR not in {**theirs, **mine}[name]:  # a tensor may be left by the last forward pass
                    where = "network" if name in mine else "file"
                    yield f"{name} of {place!r} is set only in the {where}"
            elif not _is_same(mine[name], theirs[name]):
                yield f"{name} of {place!r} has other values in the network than in the file"


def _is_same(mine: Any, theirs: Any) -> bool:
    """Whether two details are equal; floating-point tensors within the rounding of the lower precision."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        if "eps" in mine and mine.keys() == theirs.keys():
            eps, other = mine["eps"], theirs["eps"]
            values, others = mine["values"], theirs["values"]
            is_valid = isinstance(other, float) and isinstance(others, list) and len(others) == len(values)
            if mine[_TENSOR] != theirs[_TENSOR] or not is_valid:
                return False
            allowed = 8 * max(eps, other) * max((abs(v) for v in values if _is_finite(v)), default=0.0)
            return all(a == b or (_is_finite(a) and _is_finite(b) and abs(a - b) <= allowed)
                       for a, b in zip(values, others, strict=True))  # fmt: skip
        return mine.keys() == theirs.keys() and all(_is_same(mine[name], theirs[name]) for name in mine)
    if isinstance(mine, list) and isinstance(theirs, list):
        return len(mine) == len(theirs) and all(_is_same(a, b) for a, b in zip(mine, theirs, strict=True))
    return type(mine) is type(theirs) and bool(mine == theirs)


def _is_finite(value: object) -> bool:
    return isinstance(value, float | int) and math.isfinite(value)


def _describe_module(
    module: nn.Module, kind_of: KindOf, casts: Mapping[torch.dtype, torch.dtype]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(class and plain attributes, details) of a module."""
    if "_orig_mod" in module._modules:  # a wrapper of torch.compile
        return {"class": type(module).__name__}, {}
    values = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    if "makes_nested" in values:
        values["use_nested_tensor"] = values.pop("makes_nested")
    values.pop("fast_activation", None)
    plain = {name: _plain(value) for name, value in values.items() if name not in SKIPPED}
    unclear = {name: values[name] for name, value in plain.items() if value is _NOT_PLAIN}
    for name in module._non_persistent_buffers_set:
        buffer = module._buffers.get(name)
        if buffer is not None:
            unclear[name] = buffer.to(casts.get(buffer.dtype, buffer.dtype))
    details = {name: _detail(value) for name, value in unclear.items()}
    return (
        {"class": kind_of(module).__name__, **{name: v for name, v in plain.items() if v is not _NOT_PLAIN}},
        {name: value for name, value in details.items() if value is not _NOT_PLAIN},
    )


def _plain(value: object) -> Any:
    """A hyperparameter in JSON types; functions, such as torch.nn.functional.relu, by their name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType):
        return value.__name__
    if isinstance(value, tuple | list) and len(value) <= LONGEST:
        items = [_plain(item) for item in value]
        return _NOT_PLAIN if _NOT_PLAIN in items else items
    return _NOT_PLAIN


def _detail(value: Any, depth: int = 0) -> Any:
    """An attribute that is not plain, in JSON types."""
    plain = _plain(value)
    if plain is not _NOT_PLAIN or depth > 8:
        return plain
    if isinstance(value, enum.Enum | torch.dtype | torch.Size | np.dtype | np.generic):
        return str(value)
    if isinstance(value, Tensor | np.ndarray):
        return _fingerprint(_as_tensor(value))
    if isinstance(value, slice):
        return {"slice": [_detail(one, depth + 1) for one in (value.start, value.stop, value.step)]}
    if isinstance(value, functools.partial):
        parts = {"function": value.func, "arguments": list(value.args), "options": value.keywords}
        return _details(parts, depth)
    if isinstance(value, set | frozenset):
        items = [_detail(item, depth + 1) for item in value]
        return _NOT_PLAIN if _NOT_PLAIN in items else {"set": sorted(items, key=repr)}
    if isinstance(value, list | tuple) and len(value) <= LONGEST:
        items = [_detail(item, depth + 1) for item in value]
        return _NOT_PLAIN if _NOT_PLAIN in items else items
    if isinstance(value, Mapping) and len(value) <= LONGEST:
        return _details(value, depth)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        return _details(fields, depth)
    return _NOT_PLAIN


def _details(values: Mapping[Any, Any], depth: int) -> Any:
    """The values that can be compared, by the text of their keys."""
    found = {str(name): _detail(value, depth + 1) for name, value in values.items()}
    return {"dict": {name: value for name, value in found.items() if value is not _NOT_PLAIN}}


def _as_tensor(value: Any) -> Tensor | None:
    """The tensor or array as a dense tensor; None if it has no numbers to compare."""
    if isinstance(value, Tensor):
        return None if value.is_meta or value.layout != torch.strided or value.is_quantized else value
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError):  # strings, objects, negative strides
        return None


@torch.no_grad()
def _fingerprint(tensor: Tensor | None) -> Any:
    """Shape and content of a tensor: a digest of integers, a few sums and entries of floating-point numbers."""
    if tensor is None:
        return _NOT_PLAIN
    flat, shape = tensor.detach().cpu().reshape(-1), list(tensor.shape)
    if not flat.is_floating_point() and not flat.is_complex():
        return {_TENSOR: shape, "sha256": hashlib.sha256(flat.to(torch.int64).numpy().tobytes()).hexdigest()}
    eps = torch.finfo(flat.dtype).eps
    numbers = (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).double()
    weights = 1.0 + torch.arange(len(numbers), dtype=torch.float64) % 7
    size = max(1, len(numbers))
    sums = [float(numbers.abs().sum()) / size, float((weights * numbers).sum()) / size]
    return {_TENSOR: shape, "eps": eps, "values": [*sums, *numbers[:N_ENTRIES].tolist()]}


def _as_dict(value: object, *, holds: type = dict) -> dict[str, Any]:
    """A dict of one entry per place in a file."""
    if not isinstance(value, dict) or not all(isinstance(one, holds) for one in value.values()):
        raise FormatError(
            "a network in a file needs hyperparameters and hooks of its modules by place; got others. Save it again "
            "from the network."
        )
    return value
