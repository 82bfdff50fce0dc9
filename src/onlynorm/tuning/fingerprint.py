"""Fingerprints: is this the base model that an adapter was trained on, and if not, what differs?

One short hash of (name, shape, type) and one of the values for every tensor that adapters leave alone: eight bytes a
tensor, enough to name the tensors that differ without a copy of the model.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from onlynorm.errors import ConversionError, FormatError

_BYTES = 4


def fingerprint(model: nn.Module, without: Iterable[str]) -> str:
    """The hashes of all tensors of the model except those named `without` and those that norms own, as text."""
    return base64.b64encode(b"".join(_hash(name, t) for name, t in base_tensors(model, without).items())).decode()


def base_tensors(model: nn.Module, without: Iterable[str]) -> dict[str, Tensor]:
    """The tensors of the model that adapters of this kind leave alone, in the order of their names."""
    taken = set(without)
    return {name: t for name, t in sorted(model.state_dict().items()) if name not in taken}


def need_same_base(model: nn.Module, without: Iterable[str], wanted: str) -> None:
    """Raises ConversionError, naming what differs, unless the model has the fingerprint."""
    found = base_tensors(model, without)
    try:
        marks = base64.b64decode(wanted, validate=True)
    except ValueError as error:
        raise FormatError("an adapter needs a readable fingerprint; this one has none. Save it again.") from error
    size = 2 * _BYTES
    if len(marks) != size * len(found):
        raise ConversionError(
            f"the adapter needs a base model with {len(marks) // size} tensors beside its own; this one has "
            f"{len(found)}. Load it onto the model it was trained on."
        )
    pairs = [(name, marks[size * i : size * (i + 1)], _hash(name, t)) for i, (name, t) in enumerate(found.items())]
    layout = [name for name, a, b in pairs if a[:_BYTES] != b[:_BYTES]]
    values = [name for name, a, b in pairs if a[:_BYTES] == b[:_BYTES] and a[_BYTES:] != b[_BYTES:]]
    if layout or values:
        kinds = (("of another name, shape or type", layout), ("of other values", values))
        told = "; ".join(f"{len(names)} {what} ({_few(names)})" for what, names in kinds if names)
        raise ConversionError(
            f"the adapter needs the base model it was trained on; of {len(pairs)} tensors of this one {told}. "
            "Load the original weights first, or disable other adapters."
        )


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _hash(name: str, tensor: Tensor) -> bytes:
    layout = f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode()
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return _short(layout) + _short(memoryview(values))


def _short(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=_BYTES).digest()
