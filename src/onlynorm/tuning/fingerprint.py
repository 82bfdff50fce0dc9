"""Fingerprints: hashes that identify the base model of an adapter, and name the tensors that differ.

A hash of sixteen bytes covers the names, shapes, dtypes and values of all tensors that the adapter does not set. Three
more bytes per tensor, one for its layout and two for its values, identify the tensors that differ. Quantized tensors,
tensor subclasses and other entries of a state dict are hashed part by part.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from onlynorm.errors import ConversionError, FormatError
from onlynorm.modules.norms import is_statistic, plain_name

_WHOLE, _LAYOUT, _VALUES = 16, 1, 2
"""Bytes of the hash of all tensors, and of the two short hashes (marks) of each tensor."""
Digests: TypeAlias = dict[str, tuple[bytes, bytes]]
"""Hashes of the layout and of the values of every tensor, by name."""
_PLAIN = (str, bytes, bool, int, float, complex, type(None), torch.dtype, torch.device, torch.Size)


def fingerprint(model: nn.Module, without: Iterable[str]) -> str:
    """The fingerprint of all tensors of the model except those named in `without`, as text."""
    return encode(digests(base_tensors(model, without)))


def encode(found: Digests) -> str:
    """The fingerprint of these digests, base64 encoded."""
    return base64.b64encode(_marks(found)).decode()


def state_of(model: nn.Module) -> dict[str, Any]:
    """The state dict of the model, without the prefix of torch.compile and with parameters as values.

    It includes running statistics in non-persistent buffers, since training changes them.
    """
    state = {plain_name(name): value for name, value in model.state_dict(keep_vars=True).items()}
    buffers = ((plain_name(name), value) for name, value in model.named_buffers(remove_duplicate=False))
    return state | {name: value for name, value in buffers if is_statistic(name) and name not in state}


def hidden_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Non-persistent buffers other than running statistics, such as caches."""
    known = state_of(model)
    buffers = ((plain_name(name), value) for name, value in model.named_buffers(remove_duplicate=False))
    return {name: value for name, value in buffers if name not in known and is_plain(value)}


def base_tensors(model: nn.Module, without: Iterable[str]) -> dict[str, Any]:
    """The tensors of the model except those named in `without`, sorted by name."""
    taken = set(without)
    return {name: t for name, t in sorted(state_of(model).items()) if name not in taken}


def digests(state: Mapping[str, Any]) -> Digests:
    """The hashes of all entries of a state dict; tied tensors are hashed once."""
    read: dict[int, bytes] = {}
    found: Digests = {}
    for name, value in state.items():
        layout, pieces = _describe(name, value)
        if id(value) not in read:
            values = hashlib.blake2b(digest_size=_WHOLE)
            for piece in pieces:
                values.update(piece)
            read[id(value)] = values.digest()
        found[name] = hashlib.blake2b(f"{name} {layout}".encode(), digest_size=_WHOLE).digest(), read[id(value)]
    return found


def need_same_base(found: Digests, expected: str) -> None:
    """Raises ConversionError, with the names of tensors that differ, unless these digests have this fingerprint."""
    size = _LAYOUT + _VALUES
    found = dict(sorted(found.items()))
    try:
        marks = base64.b64decode(expected, validate=True)
        n_marked, rest = divmod(len(marks) - _WHOLE, size)
        if n_marked < 0 or rest:
            raise ValueError("marks are truncated")
    except ValueError as error:
        raise FormatError("an adapter needs a readable fingerprint; got a damaged one. Save it again.") from error
    if n_marked != len(found):
        raise ConversionError(
            f"the adapter needs a base model with {n_marked} other tensors; got {len(found)}. Load it into its base "
            "model."
        )
    own = _marks(found)
    if own[:_WHOLE] == marks[:_WHOLE]:
        return
    pairs = [(name, marks[i : i + size], own[i : i + size])
             for name, i in zip(found, range(_WHOLE, len(own), size), strict=True)]  # fmt: skip
    layout = [name for name, a, b in pairs if a[:_LAYOUT] != b[:_LAYOUT]]
    values = [name for name, a, b in pairs if a[:_LAYOUT] == b[:_LAYOUT] and a != b]
    kinds = (("with another name, shape or dtype", layout), ("with other values", values))
    differences = "; ".join(f"{len(names)} {what} ({few(names)})" for what, names in kinds if names)
    raise ConversionError(
        f"the adapter needs the base model it was trained on; got {len(pairs)} tensors, "
        f"{differences or 'some of them different'}. Load the original weights first, or disable other adapters."
    )


def few(names: Iterable[str]) -> str:
    """The first three names, for a message."""
    listed = list(names)
    return ", ".join(listed[:3]) + (", ..." if len(listed) > 3 else "")


def is_plain(value: Any) -> bool:
    """Whether this is a dense tensor with storage: not quantized, sparse, on the meta device or a wrapper subclass."""
    return (
        isinstance(value, Tensor)
        and not _is_wrapper(value)
        and not value.is_quantized
        and value.layout == torch.strided
        and not value.is_meta
    )


def ties(state: Mapping[str, Any]) -> list[list[str]]:
    """Groups of names of the same tensor."""
    groups: dict[Any, list[str]] = {}
    for name, value in state.items():
        if is_plain(value) and value.numel():
            place = value.untyped_storage().data_ptr(), value.storage_offset()
            groups.setdefault((*place, value.shape, value.stride(), value.dtype), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def _marks(found: Digests) -> bytes:
    """The hash of all tensors, followed by the marks of each tensor."""
    hashes = [found[name] for name in sorted(found)]
    whole = hashlib.blake2b(b"".join(layout + values for layout, values in hashes), digest_size=_WHOLE).digest()
    return whole + b"".join(layout[:_LAYOUT] + values[:_VALUES] for layout, values in hashes)


def _describe(name: str, value: Any) -> tuple[str, Iterator[memoryview]]:
    """(layout, chunks of bytes) of an entry of a state dict."""
    if is_plain(value):
        return f"{tuple(value.shape)} {value.dtype}", _bytes(value)
    parts = list(_flatten(name, value))
    return "; ".join(layout for layout, _ in parts), (piece for _, pieces in parts for piece in pieces)


def _flatten(name: str, value: Any) -> Iterator[tuple[str, Iterator[memoryview]]]:
    """(layout, chunks of bytes) of all parts of a value, recursively."""
    if is_plain(value):
        yield f"{tuple(value.shape)} {value.dtype}", _bytes(value)
        return
    if isinstance(value, _PLAIN):
        yield f"{type(value).__name__} {value!r}", iter(())
        return
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield f"{value.shape} {value.dtype}", iter([np.ascontiguousarray(value).data.cast("B")])
        return
    inner = _inside(name, value)
    yield f"{type(value).__name__} of {len(inner)}", iter(())
    for item in inner:
        yield from _flatten(name, item)


def _inside(name: str, value: Any) -> list[Any]:
    """The parts of a container, a quantized, sparse or wrapped tensor, or an object of torch's C++ code."""
    if isinstance(value, Mapping):
        return [part for item in value.items() for part in item]
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, io.BytesIO):
        return [value.getvalue()]
    try:
        if isinstance(value, Tensor) and _is_wrapper(value):
            if hasattr(value, "full_tensor"):
                raise TypeError("it is sharded across processes; gather the model first")
            names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
            return [tuple(value.shape), value.dtype, repr(context), *(getattr(value, key) for key in names)]
        if isinstance(value, Tensor) and value.is_meta:
            raise TypeError("it is on the meta device and has no values")
        if isinstance(value, Tensor) and value.is_quantized:
            return [tuple(value.shape), value.dtype, *_quantized(value.detach())]
        if isinstance(value, Tensor):
            return [tuple(value.shape), value.dtype, str(value.layout), value.detach().to_dense()]
        if isinstance(value, torch.ScriptObject):
            return [getattr(value, "__getstate__")()]  # noqa: B009 (not in the stubs of Python 3.10)
        raise TypeError(f"it is a {type(value).__name__}")
    except Exception as error:  # other classes may raise anything
        raise ConversionError(
            f"a fingerprint needs readable values; {name!r} ({type(value).__name__}) cannot be read: {error}. Create "
            "the adapter before the model is quantized or sharded."
        ) from error


def _quantized(value: Tensor) -> list[Any]:
    """Integer values, scales and zero points of a quantized tensor."""
    if value.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return [value.int_repr(), value.q_scale(), value.q_zero_point()]
    return [
        value.int_repr(), value.q_per_channel_scales(), value.q_per_channel_zero_points(), value.q_per_channel_axis()
    ]  # fmt: skip


def _is_wrapper(value: Tensor) -> bool:
    """Whether the class of the tensor overrides `__torch_dispatch__`, so that it may have no storage."""
    return type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__


def _bytes(value: Tensor) -> Iterator[memoryview]:
    with torch._C.DisableTorchFunctionSubclass():
        dense = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        yield dense.view(torch.uint8).numpy().data
