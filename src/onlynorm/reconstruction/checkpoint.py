"""`save` and `load`: a rebuilt network as one file of norms, seeds and digests.

The file holds the norms of the blocks, the ranges they keep, and every other tensor of the network that is not frozen:
norms of the target, modules that were left, buffers (those that are not persistent are made by the network itself, as
ever). Frozen weights are not in it; loading makes them from the seed and compares their digest. It is a safetensors
file, written whole or not at all and sealed by a checksum (see `storage`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onlynorm.errors import ConversionError, FormatError, ValueRangeError, shown
from onlynorm.frozen.checkpoint import (
    BlockEntry,
    collect_tensors,
    count_hooks,
    describe_block,
    describe_structure,
    differences,
    make_block,
    need_activation,
    parse_entry,
)
from onlynorm.frozen.fast_paths import set_fast_paths
from onlynorm.frozen.form import Block, find_blocks
from onlynorm.frozen.options import STORAGES
from onlynorm.modules.layers import CONVOLUTIONS, LINEAR
from onlynorm.modules.norms import FoldedNorm, folded_places
from onlynorm.modules.walk import carry_hooks, carry_sizes, copy_network, precision, swap
from onlynorm.reconstruction import resume
from onlynorm.reconstruction.result import Reconstruction, as_network
from onlynorm.storage import from_plain, read_tensors, to_plain, write_tensors
from onlynorm.validate import need_callable, need_choice, need_device, need_path

FORMAT = 1
KIND = "network of norms"
CURE = "Save it again from the reconstruction."
PRECISIONS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
Step = Callable[[str, int, int], None]
"""Called with (block, blocks done, blocks in all)."""


def save(
    network: nn.Module | Reconstruction,
    path: Path | str,
    *,
    dtype: torch.dtype | None = None,
    step: Step | None = None,
) -> None:
    """Writes a rebuilt network, or a reconstruction, to one file; frozen weights are kept as seed and digest.

    Numbers keep the precision of the network unless `dtype` is given. Those of blocks are never stored below float32,
    whose digits they need; a lower `dtype` is for what stands outside them. The file is complete or not there: a full
    disk or a kill leaves what was at the path before. A reconstruction's partial folder is removed once the file is on
    the disk. An activation that is not torch's own is stored by name only.
    """
    if dtype is not None and (not isinstance(dtype, torch.dtype) or dtype not in PRECISIONS):
        known = ", ".join(map(str, PRECISIONS))
        raise ValueRangeError(f"dtype needs one of {known}; got {shown(dtype)}. Leave it out.")
    path = need_path("save", path)
    _need_step(step)
    made = as_network("save", network)
    places: dict[Block, list[str]] = {}
    for name, block in find_blocks(made).items():
        places.setdefault(block, []).append(name)
    if not places:
        raise ConversionError(
            f"save needs a network with blocks; got none in {type(made).__name__}. Pass the result of reconstruct, or "
            "torch.save an ordinary network."
        )
    entries = []
    for number, (block, names) in enumerate(places.items()):
        entries.append(describe_block(block, names).as_dict())
        if step is not None:
            step(names[0], number + 1, len(places))
    tensors, aliases = collect_tensors("save", made, dtype=dtype)
    document = {
        "blocks": entries, "folded": folded_places(made), "aliases": aliases,
        "dtype": str(dtype or precision(made)).removeprefix("torch."),
        "folded_axes": {place: made.get_submodule(place).n_axes for place in folded_places(made)},
        "structure": describe_structure(made), "hooks": count_hooks(made),
    }  # fmt: skip
    write_tensors(path, tensors, kind=KIND, format=FORMAT, document=document)
    if isinstance(network, Reconstruction) and network.partial is not None:
        resume.remove(network.partial)


def load(
    path: Path | str,
    *,
    into: nn.Module | Reconstruction,
    storage: str = "dense",
    activation: nn.Module | None = None,
    device: torch.device | str | None = None,
    step: Step | None = None,
) -> nn.Module:
    """The saved network, on the architecture of `into`, in evaluation mode and in the precision of the file.

    `into` is a fresh network of the target's architecture. It is copied, never changed, and its own weights do not
    matter; everything else does: classes, hyperparameters (strides, padding modes, slopes, numbers of heads, ...) and
    the number of forward hooks of its modules are compared with those of the network that was saved. Hooks on the
    layers of `into` go over to the blocks. `storage` is "dense" (frozen weights in memory) or "seed" (made again on
    every pass). `activation` has to be given where the file knows it by name only. The network goes to `device`, or to
    that of `into`. Everything is checked before anything is returned: checksum, format, architecture, sizes, and the
    digests of all frozen weights, which takes as long as making them; `step` tells how far.
    """
    need_choice("storage", storage, STORAGES)
    _need_step(step)
    goal = None if device is None else need_device("device", device)
    document, tensors = read_tensors(need_path("load", path), kind=KIND, format=FORMAT, cure=CURE)
    entries, folded, full, dtype = _parse(document, tensors)
    need_activation(entries, activation)
    into = as_network("load", into)
    _need_architecture(into, entries, folded, full)
    _need_structure(into, document, [*(place for entry in entries for place in entry.places), *folded])
    network = copy_network(into).to(dtype)
    for number, entry in enumerate(entries):
        prefix = f"{entry.name}." if entry.name else ""
        own = {name.removeprefix(prefix): value for name, value in full.items() if name.startswith(prefix)}
        layer = into.get_submodule(entry.name)
        block = make_block(entry, own, layer=layer, storage=storage, activation=activation)
        carry_hooks(network.get_submodule(entry.name), block)
        carry_sizes(network.get_submodule(entry.name), block)
        for place in entry.places:
            network = swap(network, place, block)
        if step is not None:
            step(entry.name, number + 1, len(entries))
    for place in folded:
        n_axes = _as_dict(document.get("folded_axes")).get(place)
        swap(network, place, FoldedNorm(n_axes if isinstance(n_axes, int) else None))
    rest = _outside(network.state_dict(keep_vars=True), [place for entry in entries for place in entry.places])
    for name, value in rest.items():
        value.data = full[name].to(value.device)  # the tensor stays the same, so that what is tied stays tied
    if goal is None:
        goal = next((p.device for p in into.parameters()), torch.device("cpu"))
    return set_fast_paths(network.to(goal).eval())


def _need_step(step: Step | None) -> None:
    if step is not None:
        need_callable("step", step, cure="It is called with (block, blocks done, blocks in all).")


def _parse(
    document: Mapping[str, object], tensors: Mapping[str, Tensor]
) -> tuple[list[BlockEntry], list[str], dict[str, Tensor], torch.dtype]:
    """(blocks, folded places, tensors under all their names, precision), each of its type."""
    blocks, folded, aliases, dtype = (document.get(name) for name in ("blocks", "folded", "aliases", "dtype"))
    kind = next((one for one in PRECISIONS if str(one) == f"torch.{dtype}"), None)
    if kind is None:
        raise FormatError(f"a {KIND} needs a precision; the file has {dtype!r:.40}. {CURE}")
    if not isinstance(blocks, list) or not isinstance(folded, list) or not isinstance(aliases, dict):
        raise FormatError(f"a {KIND} needs its blocks, folded norms and tied tensors; the file lacks some. {CURE}")
    if not all(isinstance(name, str) for name in (*folded, *aliases.values())) or not {*aliases.values()} <= {*tensors}:
        raise FormatError(f"a {KIND} needs names for folded norms and tied tensors; the file has others. {CURE}")
    full = {**tensors, **{name: tensors[first] for name, first in aliases.items()}}
    return [parse_entry(block) for block in blocks], folded, full, kind


def _need_architecture(
    into: nn.Module, entries: list[BlockEntry], folded: list[str], tensors: Mapping[str, Tensor]
) -> None:
    """Raises unless the network has a layer wherever a block belongs, and every other tensor in its shape."""
    modules = dict(into.named_modules(remove_duplicate=False))
    blocks = [place for entry in entries for place in entry.places]
    wrong = []
    for place in (*blocks, *folded):
        kinds = nn.modules.batchnorm._BatchNorm if place in folded else (*LINEAR, *CONVOLUTIONS)
        if not isinstance(modules.get(place), kinds):
            got = type(modules[place]).__name__ if place in modules else "nothing"
            wrong.append(f"{place!r} is {got} instead of {'a batch norm' if place in folded else 'Linear or Conv'}")
    if not blocks or len({*blocks, *folded}) < len([*blocks, *folded]):
        wrong.append("the file has no blocks, or two at one place")
    replaced = (*blocks, *folded)
    own = {name: _form(value) for name, value in _outside(into.state_dict(), replaced).items()}
    stored = {name: _form(value) for name, value in _outside(tensors, replaced).items()}
    for name in sorted(own.keys() | stored.keys()):
        if own.get(name) != stored.get(name):
            mine, theirs = own.get(name, "missing"), stored.get(name, "missing")
            wrong.append(f"{name!r} is {mine} in the network and {theirs} in the file")
    if wrong:
        more = f"; and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise FormatError(
            f"load needs a network of the architecture that was saved; {'; '.join(wrong[:4])}{more}. Pass into= a "
            "fresh network, made as the target was."
        )


def _need_structure(into: nn.Module, document: Mapping[str, object], replaced: list[str]) -> None:
    """Raises where a module that stays is of another class, or has other hyperparameters or hooks than in the file."""
    if "structure" not in document:  # written before files had one
        return
    stored, hooks = _as_dict(document.get("structure")), _as_dict(document.get("hooks"))
    if not all(isinstance(module, dict) for module in stored.values()):
        raise FormatError(f"a {KIND} needs the hyperparameters of its modules; the file has others. {CURE}")
    own = from_plain({place: to_plain(values) for place, values in describe_structure(into).items()})
    wrong = list(differences(stored, own, replaced=replaced))
    if wrong:
        more = f"; and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise FormatError(
            f"load needs a network of the architecture that was saved; {'; '.join(wrong[:4])}{more}. Pass into= a "
            "fresh network, made as the target was."
        )
    present = count_hooks(into)
    for place in sorted(hooks.keys() | present.keys()):
        if hooks.get(place, [0, 0]) != present.get(place, [0, 0]):
            raise FormatError(
                f"load needs the forward hooks of the network that was saved, which may change what it computes: "
                f"[pre-hooks, hooks] at {place!r} are {present.get(place, [0, 0])} in the network and "
                f"{hooks.get(place, [0, 0])!r:.40} in the file. Register the same hooks on into=, or remove them "
                "before saving."
            )


def _as_dict(value: object) -> dict[str, Any]:
    """A table of the file; nothing where it has none."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise FormatError(f"a {KIND} needs tables of modules; the file has {type(value).__name__}. {CURE}")
    return value


def _outside(tensors: Mapping[str, Tensor], places: Iterable[str]) -> dict[str, Tensor]:
    """The tensors that do not belong to a module at one of these places."""
    inside = tuple(f"{place}." if place else "" for place in places)
    return {name: value for name, value in tensors.items() if not name.startswith(inside)}


def _form(value: object) -> str:
    """Shape of a tensor, and its type unless it is floating: precision is the file's."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{tuple(value.shape)}" if value.is_floating_point() else f"{tuple(value.shape)} {value.dtype}"
