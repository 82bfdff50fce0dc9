"""`save` and `load`: one pair of functions for every kind of file that onlynorm writes.

    on.save(result, "net.safetensors");  network = on.load("net.safetensors", like=make_network())
    on.save(factors, "factors.safetensors");  factors = on.load("factors.safetensors")

All files are safetensors files with one JSON document in their metadata and a checksum (see `storage`). The header
names the kind, and `KINDS` maps each kind to its reader. A file with weights but no architecture needs `like`, a new
model of the same architecture.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, overload

import torch
from torch import nn

from onlynorm.errors import ConversionError, FormatError, StorageError, ValueRangeError, shown
from onlynorm.frozen import checkpoint as networks
from onlynorm.frozen.form import find_frozen
from onlynorm.frozen.options import STORAGES, need_precision
from onlynorm.identity.factorization import factors
from onlynorm.identity.factorization.factors import Factorization
from onlynorm.identity.memorization import by_norms, memorizer
from onlynorm.identity.memorization.by_norms import NormMemorizer
from onlynorm.identity.memorization.memorizer import Memorizer
from onlynorm.modules import need_model, unwrap
from onlynorm.progress import with_progress
from onlynorm.rank.chains import simulate
from onlynorm.rank.repairs import checkpoint as repaired
from onlynorm.rank.repairs.repair import Repaired
from onlynorm.reconstruction import resume
from onlynorm.reconstruction.result import Reconstruction
from onlynorm.storage import read_kind
from onlynorm.tuning import adapter, training_state
from onlynorm.tuning.adapter import Adapter
from onlynorm.validate import Progress, need_choice, need_device, need_path, need_progress

Content: TypeAlias = Factorization | Memorizer | NormMemorizer | Adapter
"""Results that are loaded without `like`."""


@dataclass(frozen=True)
class FileKind:
    """The content of a kind of file, its reader, whether it needs `like`, and the options of `load` it supports."""

    holds: str
    read: Callable[..., Any]
    needs_like: bool = False
    options: tuple[str, ...] = ()


_NETWORK_OPTIONS = ("storage", "activation", "device", "progress")
KINDS: Mapping[str, FileKind] = {
    networks.KIND: FileKind(
        "a network with frozen layers", networks.load_network, needs_like=True, options=_NETWORK_OPTIONS
    ),
    networks.EARLIER_KIND: FileKind(
        "a norm-only model", networks.load_network, needs_like=True, options=_NETWORK_OPTIONS
    ),
    repaired.KIND: FileKind("a repaired model", repaired.load_repaired, needs_like=True, options=("device",)),
    factors.KIND: FileKind("a factorization", factors.load_factors),
    memorizer.KIND: FileKind("a memorizer", memorizer.load_memorizer, options=("device",)),
    by_norms.KIND: FileKind("a memorizer by norms", by_norms.load_norm_memorizer, options=("device",)),
    adapter.KIND: FileKind("an adapter", adapter.read_adapter),
}  # fmt: skip
"""The kinds of files that `load` reads, by the name in the header."""
RESUMED: Mapping[str, str] = {
    resume.KIND: "reconstruct(partial=...)",
    training_state.KIND: "fit(checkpoint=...)",
    simulate.KIND: "simulate(checkpoint=...)",
}
"""Kinds of files of unfinished runs, and the call that resumes from them."""
WRITERS: Mapping[type, Callable[[Any, Path], None]] = {
    Factorization: factors.save_factors,
    Memorizer: memorizer.save_memorizer,
    NormMemorizer: by_norms.save_norm_memorizer,
    Repaired: repaired.save_repaired,
}
"""The writer of each class, except networks with frozen layers and adapters, whose writers have options."""
_CURE = "Pass a file written by onlynorm.save; load other weights with safetensors or torch.load."


@with_progress
def save(
    obj: nn.Module | Reconstruction | Repaired | Factorization | Adapter,
    path: Path | str,
    *,
    dtype: torch.dtype | None = None,
    progress: Progress | bool | None = None,
) -> None:
    """Saves a result or a network to one file, atomically; `load` reads it.

    `obj` is a `Reconstruction` or a network with frozen layers, a `Memorizer`, a `NormMemorizer`, a `Repaired`, a
    `Factorization` or an `Adapter`. Frozen weights are not saved; the file contains their seed and digest. Networks
    with frozen layers and adapters can be stored in another `dtype`. Norms of rebuilt layers are stored in float32 at
    least. `progress=True` shows a bar; a function is called with (layers done, total layers, layer).

    If saving fails, the previous file is unchanged. Equal objects give equal bytes. The folder `partial` of a
    reconstruction is deleted after the file is written.

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> factors = on.factorize(torch.eye(4) * 2, depth=3)
        >>> on.save(factors, "factors.safetensors")
        >>> on.load("factors.safetensors").depth
        3
    """
    path = need_path("save", path)
    progress = need_progress(progress)
    if dtype is not None:
        need_precision("dtype", dtype)
    if os.path.isdir(path):
        raise StorageError(f"save needs a file name; {path} is a folder. Try {path / 'file.safetensors'}.")
    content = unwrap(need_model("save", obj)) if isinstance(obj, nn.Module) else obj
    network = content.network if isinstance(content, Reconstruction) else content
    if isinstance(network, nn.Module) and (isinstance(content, Reconstruction) or find_frozen(network)):
        networks.save_network(network, path, dtype=dtype, progress=progress)
    elif isinstance(content, Adapter):
        adapter.write_adapter(content, path, dtype=dtype)
    else:
        write = next((write for kind, write in WRITERS.items() if isinstance(content, kind)), None)
        if write is None:
            raise _no_writer(content)
        if dtype is not None:
            raise ValueRangeError(
                f"dtype needs a network with frozen layers or an adapter; got {dtype} for a {type(content).__name__}. "
                "Leave it out."
            )
        write(content, path)
    if isinstance(content, Reconstruction) and content.partial is not None:
        resume.remove(content.partial)


@overload
def load(path: Path | str, like: None = None, *, device: torch.device | str | None = None) -> Content: ...


@overload
def load(
    path: Path | str,
    like: nn.Module,
    *,
    storage: str = "dense",
    activation: nn.Module | None = None,
    device: torch.device | str | None = None,
    progress: Progress | bool | None = None,
) -> nn.Module: ...


@with_progress
def load(
    path: Path | str,
    like: nn.Module | None = None,
    *,
    storage: str = "dense",
    activation: nn.Module | None = None,
    device: torch.device | str | None = None,
    progress: Progress | bool | None = None,
) -> nn.Module | Content:
    """The content of a file written by `save` or `save_adapter`; its kind is read from the file.

    A `Factorization`, a `Memorizer`, a `NormMemorizer` and an `Adapter` need only the path. A network with frozen
    layers and a repaired model need `like`, a new model of the architecture that was rebuilt, converted or repaired. It
    is copied, and its weights are not used. Its classes, hyperparameters and shapes must match the file.

    For networks with frozen layers, `storage` is "dense" (frozen weights in memory) or "seed" (drawn again on every
    forward pass). `activation` is required if it is not a class of torch.nn. `progress=True` shows a bar; a function is
    called with (layers done, total layers, layer). Modules are moved to `device`, by default that of `like`. Checksum,
    format, shapes and the digests of frozen weights are checked first; the digests take as long as drawing the weights.
    The checksum shows that a file is undamaged, not who wrote it. Nothing in a file is executed. To load an adapter
    into a model, call `load_adapter(model, path)`.

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> from onlynorm.models import mlp
        >>> model, inputs = mlp((8, 16, 4)), torch.rand(64, 8)
        >>> on.save(on.reconstruct(model, inputs), "rebuilt.safetensors")
        >>> rebuilt = on.load("rebuilt.safetensors", like=mlp((8, 16, 4)))
        >>> on.verify(model, rebuilt, inputs).agreement
        1.0
    """
    path = need_path("load", path)
    need_choice("storage", storage, STORAGES)
    progress = need_progress(progress)
    target = None if device is None else need_device("device", device)
    if like is not None:
        like = unwrap(need_model("load", like))
    kind = read_kind(path, known=KINDS, cure=_CURE)
    found = KINDS.get(kind)
    if found is None:
        raise _no_reader(path, kind)
    _need_like(path, kind, found, like)
    given: dict[str, Any] = {"activation": activation, "device": target, "progress": progress}
    given = {name: value for name, value in given.items() if value is not None}
    given |= {} if storage == "dense" else {"storage": storage}
    if unused := [name for name in given if name not in found.options and name != "progress"]:
        raise ValueRangeError(
            f"{path.name} holds {found.holds}, which has no {unused[0]}; got {shown(given[unused[0]])}. Leave it out."
        )
    options = {name: value for name, value in given.items() if name in found.options}
    if like is not None:
        return found.read(path, like=like, **options)
    content = found.read(path)
    return content if target is None else content.to(target)


def _need_like(path: Path, kind: str, found: FileKind, like: nn.Module | None) -> None:
    if found.needs_like and like is None:
        raise ConversionError(
            f"{path.name} holds {found.holds} without its architecture: load needs like=; got none. Pass a new model "
            "of the same architecture as like=."
        )
    if not found.needs_like and like is not None:
        cure = "Leave like= out, or pass another file."
        if kind == adapter.KIND:
            cure = "Call load_adapter(model, path) to load it into a model, or leave like= out to inspect it."
        raise ConversionError(f"like= needs a file with weights of a model; {path.name} holds {found.holds}. {cure}")


def _no_reader(path: Path, kind: str) -> FormatError:
    if kind in RESUMED:
        return FormatError(f"load needs a finished result; {path.name} is a {kind}. {RESUMED[kind]} resumes from it.")
    return FormatError(
        f"load needs a file of a known kind, {', '.join(map(repr, KINDS))}; {path.name} is of kind {kind!r:.60}. "
        "Update onlynorm, or pass another file."
    )


def _no_writer(obj: object) -> ConversionError:
    known = ", ".join(kind.__name__ for kind in (Reconstruction, Adapter, *WRITERS))
    cure = "Pass the result of reconstruct, to_norm_only, memorize, factorize or repair."
    if isinstance(obj, nn.Module):
        cure = "Save the state_dict of other models with safetensors or torch.save, and norms with save_adapter."
    return ConversionError(f"save needs a network with frozen layers, or {known}; got {shown(obj)}. {cure}")
