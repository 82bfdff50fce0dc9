"""`save_norm_only` and `load_norm_only`: a model of norm-only layers as one file of norms, seeds and digests.

The file holds every parameter and buffer of the model: gammas, shifts, and what was not converted. Frozen features and
masks are not in it; they are made from the seed again, and their digest is compared. It is a safetensors file, written
whole or not at all and sealed by a checksum (see `storage`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onlynorm.errors import ConversionError, FormatError, MemoryLimitError, StorageError
from onlynorm.layers.choice import Choice, make_choice
from onlynorm.layers.frozen import count_features
from onlynorm.layers.modules import NormOnlyLayer, wrap
from onlynorm.modules import need_model, need_path, unwrap
from onlynorm.reconstruction.calls import copy_network, precision
from onlynorm.reconstruction.places import places_of, swap
from onlynorm.storage import read_tensors, write_tensors

FORMAT = 1
KIND = "norm-only model"
CURE = "Save it again from the model."
PRECISIONS = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SPECTRUM = "frozen.spectrum"


def save_norm_only(model: nn.Module, path: Path | str) -> None:
    """Writes a model of norm-only layers to one file, in its own precision; equal models make equal bytes."""
    model, path = unwrap(need_model("save_norm_only", model)), need_path("path", path)
    if path.is_dir():
        raise StorageError(f"save_norm_only needs the name of a file; {path} is a folder. Add a name.")
    layers = {module: places for module, places in places_of(model).items() if isinstance(module, NormOnlyLayer)}
    if not layers:
        raise ConversionError(
            f"save_norm_only needs a model with norm-only layers; got none in {type(model).__name__}. Pass the result "
            "of norm_only, or save an ordinary model with torch."
        )
    tensors, aliases = _tensors_of(model)
    entries = []
    for layer, places in layers.items():
        choice, frozen = layer.frozen.choice, layer.frozen
        if choice.spectrum is not None:
            tensors[_join(places[0], _SPECTRUM)] = choice.spectrum.detach().cpu().double().reshape(-1).clone()
        entry = {"places": list(places), "shape": list(frozen.shape), "choice": choice.settings()}
        entry["dtype"] = str(frozen.like.dtype).removeprefix("torch.")  # gamma may be more precise
        entries.append({**entry, "digest": frozen.digest()})
    dtype = str(precision(model)).removeprefix("torch.")
    write_tensors(
        path, tensors, kind=KIND, format=FORMAT, document={"layers": entries, "aliases": aliases, "dtype": dtype}
    )


def load_norm_only(path: Path | str, *, into: nn.Module) -> nn.Module:
    """The saved model on the architecture of `into`, an ordinary model as `norm_only` was given.

    `into` is copied, never changed; its weights do not matter. Everything is checked before anything is returned:
    checksum, format, architecture, and the digests of all frozen features.
    """
    into, path = unwrap(need_model("load_norm_only", into)), need_path("path", path)
    document, tensors = read_tensors(path, kind=KIND, format=FORMAT, cure=CURE)
    entries, aliases, dtype = document.get("layers"), document.get("aliases"), document.get("dtype")
    is_known = isinstance(dtype, str) and dtype in PRECISIONS
    if not isinstance(entries, list) or not isinstance(aliases, dict) or not is_known:
        raise FormatError(f"a {KIND} needs its layers, tied tensors and precision; {path} lacks some. {CURE}")
    if odd := [name for name, t in tensors.items() if t.is_floating_point() and t.dtype not in PRECISIONS.values()]:
        raise FormatError(f"a {KIND} needs tensors in {', '.join(PRECISIONS)}; {odd[0]!r} has another type. {CURE}")
    network = copy_network(into).to(PRECISIONS[str(dtype)])
    try:
        full = {**tensors, **{name: tensors[first] for name, first in aliases.items()}}
        _cast(network, full)
        for entry in entries:
            layer = _make(entry, network, full)
            for place in entry["places"]:
                network = swap(network, place, layer)
        for name, first in aliases.items():
            _tie(network, name, first)
        network.load_state_dict({name: value for name, value in full.items() if not name.endswith(_SPECTRUM)})
    except (FormatError, MemoryLimitError):
        raise
    except Exception as error:  # whatever forged fields set off, it is the file's fault
        raise FormatError(
            f"{path} needs a model of the architecture that was saved, and features known here; it does not fit: "
            f"{error!s:.400}. Pass into= a fresh model, made as the one that was converted."
        ) from error
    return network


def _cast(network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Gives every module the precision of its numbers in the file, where one model has several."""
    precisions = {name.rpartition(".")[0]: t.dtype for name, t in tensors.items() if t.is_floating_point()}
    for name, module in network.named_modules():  # from the outside in: a cast takes what is inside along
        if name in precisions:
            module.to(precisions[name])


def _make(entry: Mapping[str, Any], network: nn.Module, tensors: Mapping[str, Tensor]) -> NormOnlyLayer:
    """The layer of one entry with its frozen features, checked before and after they are made; gamma is not filled."""
    name = entry["places"][0]
    plain = network.get_submodule(name)
    got = tuple(getattr(plain, "weight", torch.empty(0)).shape)
    if type(plain) not in (nn.Linear, nn.Conv2d) or list(got) != entry["shape"]:
        raise FormatError(
            f"the layer at {name!r} needs a Linear or Conv2d with a weight of {tuple(entry['shape'])}; the model has "
            f"{type(plain).__name__} with {got}. Pass into= a fresh model, made as the one that was converted."
        )
    assert isinstance(plain, nn.Linear | nn.Conv2d)
    choice = _choice(entry, tensors)
    n_stored = tensors[_join(name, "gamma")].numel()
    try:
        n_features = count_features(got, choice)
    except MemoryLimitError as error:  # far more than the file has
        raise FormatError(f"the layer at {name!r} needs too many gammas; the file has {n_stored}. {CURE}") from error
    if n_features != n_stored:
        raise FormatError(f"the layer at {name!r} needs {n_features} gammas; the file has {n_stored}. {CURE}")
    if entry.get("dtype", "float32") not in PRECISIONS:
        raise FormatError(f"the layer at {name!r} needs a known precision; got {entry['dtype']!r:.40}. {CURE}")
    if "dtype" in entry:
        plain = plain.to(PRECISIONS[entry["dtype"]])
    layer = wrap(plain, choice, is_filled=False)
    if layer.frozen.digest() != entry["digest"]:
        raise FormatError(
            f"the layer at {name!r} needs frozen features with the digest {entry['digest']:.16}; its seed gives "
            f"{layer.frozen.digest():.16} here. The file was forged, or these features changed."
        )
    return layer


def _choice(entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Choice:
    fields = dict(entry["choice"])
    has_spectrum = fields.pop("spectrum")
    choice = make_choice(**fields)
    if not has_spectrum:
        return choice
    return dataclasses.replace(choice, spectrum=tensors[_join(entry["places"][0], _SPECTRUM)])


def _tensors_of(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor of the model once, and the other names under which tied ones are known."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[Tensor, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise ConversionError(f"save_norm_only needs a state of tensors; got {type(value).__name__} at {name!r}.")
        if value in first:
            aliases[name] = first[value]
        else:
            first[value] = name
            tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    return tensors, aliases


def _tie(network: nn.Module, name: str, first: str) -> None:
    """Puts the parameter of one name under the other too."""
    (parent, _, child), (other, _, own) = name.rpartition("."), first.rpartition(".")
    setattr(network.get_submodule(parent), child, getattr(network.get_submodule(other), own))


def _join(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name
