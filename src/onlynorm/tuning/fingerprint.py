"""Fingerprints: is this the base model that an adapter was trained on, and if not, what differs?

One hash of sixteen bytes over the names, shapes, types and values of all tensors that adapters leave alone decides.
Three bytes a tensor beside it, one of its layout and two of its values, name the tensors that differ without a copy of
the model.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from onlynorm.errors import ConversionError, FormatError

_WHOLE, _LAYOUT, _VALUES = 16, 1, 2
"""Bytes of the hash that decides, and of the two marks of each tensor."""


def fingerprint(model: nn.Module, without: Iterable[str]) -> str:
    """The hash and the marks of all tensors of the model except those named `without`, as text."""
    return base64.b64encode(_marks(base_tensors(model, without))).decode()


def base_tensors(model: nn.Module, without: Iterable[str]) -> dict[str, Tensor]:
    """The tensors of the model that adapters of this kind leave alone, in the order of their names."""
    taken = set(without)
    return {name: t for name, t in sorted(model.state_dict().items()) if name not in taken}


def need_same_base(model: nn.Module, without: Iterable[str], wanted: str) -> None:
    """Raises ConversionError, naming what differs, unless the model has the fingerprint."""
    found = base_tensors(model, without)
    size = _LAYOUT + _VALUES
    try:
        marks = base64.b64decode(wanted, validate=True)
        n_marked, rest = divmod(len(marks) - _WHOLE, size)
        if n_marked < 0 or rest:
            raise ValueError("marks are cut short")
    except ValueError as error:
        raise FormatError("an adapter needs a readable fingerprint; this one has none. Save it again.") from error
    if n_marked != len(found):
        raise ConversionError(
            f"the adapter needs a base model with {n_marked} tensors beside its own; this one has "
            f"{len(found)}. Load it onto the model it was trained on."
        )
    own = _marks(found)
    if own[:_WHOLE] == marks[:_WHOLE]:
        return
    pairs = [(name, marks[i : i + size], own[i : i + size])
             for name, i in zip(found, range(_WHOLE, len(own), size), strict=True)]  # fmt: skip
    layout = [name for name, a, b in pairs if a[:_LAYOUT] != b[:_LAYOUT]]
    values = [name for name, a, b in pairs if a[:_LAYOUT] == b[:_LAYOUT] and a != b]
    kinds = (("of another name, shape or type", layout), ("of other values", values))
    told = "; ".join(f"{len(names)} {what} ({_few(names)})" for what, names in kinds if names)
    raise ConversionError(
        f"the adapter needs the base model it was trained on; of {len(pairs)} tensors of this one "
        f"{told or 'some are others'}. Load the original weights first, or disable other adapters."
    )


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _marks(tensors: dict[str, Tensor]) -> bytes:
    """The hash of everything, then the marks of each tensor."""
    hashes = [_hashes(name, t) for name, t in tensors.items()]
    whole = hashlib.blake2b(b"".join(layout + values for layout, values in hashes), digest_size=_WHOLE).digest()
    return whole + b"".join(layout[:_LAYOUT] + values[:_VALUES] for layout, values in hashes)


def _hashes(name: str, tensor: Tensor) -> tuple[bytes, bytes]:
    layout = f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode()
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    first, second = (hashlib.blake2b(data, digest_size=_WHOLE).digest() for data in (layout, memoryview(values)))
    return first, second
