"""Files of repaired models: the state dict, the inserted modules, and both diagnoses.

Without inserted modules the file can be loaded as a state dict of the architecture. It is a safetensors file with a
checksum, written atomically (see `storage`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onlynorm.errors import ConversionError, FormatError
from onlynorm.frozen.checkpoint import describe_structure, mixed_precision, structure_differences
from onlynorm.frozen.options import PRECISIONS
from onlynorm.modules import need_model, unwrap
from onlynorm.modules.walk import copy_network, replace_module
from onlynorm.rank.coverage import is_layer, tie_like
from onlynorm.rank.repairs.insert_norms import NORMS, WithNorm, add_norm
from onlynorm.rank.repairs.repair import Repaired
from onlynorm.rank.repairs.rescale import Skip
from onlynorm.storage import read_tensors, tensors_digest, write_tensors

KIND = "onlynorm-repaired"
FORMAT = 1
CURE = "Save it again from the result of repair."


def save_repaired(result: Repaired, path: Path) -> None:
    """Saves the tensors of the model and the result of the repair; equal results give equal bytes."""
    model = unwrap(result.model)
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            raise ConversionError(
                f"save needs a state_dict of dense tensors; got {type(value).__name__} at {name!r}. Keep such state "
                "outside the model."
            )
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    document = {
        **result.as_dict(), "inserted": _inserted(model), **describe_structure(model),
    }  # fmt: skip
    write_tensors(path, tensors, kind=KIND, format=FORMAT, document=document)


def load_repaired(path: Path, *, like: nn.Module, device: torch.device | None = None) -> nn.Module:
    """The repaired model in the dtype of the file; `like` is a model of the architecture before the repair.

    `like` is copied, and its weights are not used. Norms and skip connections are inserted again. Raises unless
    classes, hyperparameters and forward hooks of the modules, and names and shapes of all tensors, match the file.
    """
    document, tensors = read_tensors(path, kind=KIND, format=FORMAT, cure=CURE)
    given = unwrap(need_model("load", like))
    network = copy_network(given)
    tie_like(network, given)
    try:
        for entry in document.get("inserted", []):
            _insert(network, entry)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(
            f"a repaired model needs layers of `like` where modules were inserted; {path.name} does not fit "
            f"({error!s:.200}). Pass a new model of the repaired architecture as like=."
        ) from error
    _need_same(network, document, tensors)
    _fill(network, tensors)
    return network if device is None else network.to(device)


def _inserted(model: nn.Module) -> list[dict[str, Any]]:
    """The inserted modules, outermost first."""
    found: list[dict[str, Any]] = []
    for place, module in model.named_modules():
        if isinstance(module, WithNorm):
            found.append({"place": place, "module": type(module[1]).__name__})
        elif isinstance(module, Skip):
            found.append({"place": place, "module": "Skip", "scale": module.scale})
    return found


def _insert(network: nn.Module, entry: Mapping[str, Any]) -> None:
    """Inserts a norm or a skip at the layer of a place, unless it exists; raises ValueError if there is no layer."""
    place, kind = entry["place"], entry["module"]
    old = network.get_submodule(place)
    if kind == "Skip":
        scale = entry["scale"]
        if type(scale) is not float or not math.isfinite(scale):
            raise ValueError(f"a skip of scale {scale!r:.40}")
        if isinstance(old, Skip):
            return
        made: nn.Module = Skip(old, scale)
    else:
        norm = {one.__name__: one for one in NORMS.values()}[kind]
        if isinstance(old, WithNorm):
            return
        made = add_norm(old, norm) if is_layer(old) else old
    if not place or not is_layer(old):
        raise ValueError(f"{type(old).__name__} at {place!r:.60}")
    replace_module(network, old, new=made)


def _need_same(network: nn.Module, document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raises if a module has another class, other hyperparameters or hooks, or if a tensor does not fit."""
    wrong = structure_differences(document, network)
    state = network.state_dict()
    for name in sorted(state.keys() | tensors.keys()):
        held, value = state.get(name), tensors.get(name)
        if held is None or value is None or held.shape != value.shape or not _fits(value.dtype, held.dtype):
            wrong.append(f"{name!r} is {_form(held)} in the model and {_form(value)} in the file")
    wrong += mixed_precision(state, tensors)
    if wrong:
        more = f"; and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise FormatError(
            f"load needs a model of the repaired architecture; {'; '.join(wrong[:4])}{more}. Pass a new model of the "
            "repaired architecture, with the same forward hooks, as like=."
        )


def _fits(value: torch.dtype, held: torch.dtype) -> bool:
    return value == held or (held.is_floating_point and value in PRECISIONS.values())


def _form(value: Tensor | None) -> str:
    return "missing" if value is None else f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"


@torch.no_grad()
def _fill(network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    for name, held in network.state_dict(keep_vars=True).items():
        if held.dtype != tensors[name].dtype:
            held.data = held.data.to(tensors[name].dtype)
        held.copy_(tensors[name])
    state = network.state_dict()
    now, stored = ({name: held[name] for name in sorted(tensors)} for held in (state, tensors))
    if tensors_digest(now) != tensors_digest(stored):
        raise FormatError(f"a repaired model needs equal values of tensors tied in `like`; got different ones. {CURE}")
