"""`save_network` and `load_network`: a network with frozen layers as one file of norms, seeds and digests.

The file contains every persistent tensor that is not frozen: the norms and ranges of frozen layers, the norms of the
target, and the parameters and buffers of all other modules. Frozen weights are not saved; loading draws them again from
the seed and compares their digest. The file is a safetensors file with a checksum, written atomically (see `storage`).

For each frozen layer the file contains its places, kind, settings, activation and the digest of its frozen weights.
Files are not trusted: shapes are checked on the meta device before a layer is created, and any error that the settings
raise is reported as `FormatError`.

The file is loaded into a network that the caller creates. Strides, padding modes, slopes and numbers of heads are not
tensors, so the file also describes the classes, hyperparameters and hooks of all modules. They must match.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from onlynorm.errors import (
    ConversionError,
    FormatError,
    MemoryLimitError,
    UnknownNameError,
    ValueRangeError,
)
from onlynorm.frozen.fast_paths import plain_kind, set_fast_paths
from onlynorm.frozen.form import FrozenBlock, FrozenLayer, find_frozen
from onlynorm.frozen.maps import LOWEST, make_map
from onlynorm.frozen.norm_only import NormOnlyLayer
from onlynorm.frozen.options import PRECISIONS, STORAGES, FrozenOptions, need_precision
from onlynorm.frozen.pair import LowRankBlock, NormOnlyBlock
from onlynorm.frozen.residual import SkipBlock
from onlynorm.frozen.sequence import DeepBlock, MultilayerBlock
from onlynorm.memory import memory_limit, need_memory
from onlynorm.modules import need_model, structure, unwrap
from onlynorm.modules.affine import Sharing
from onlynorm.modules.convolution import explicit_padding
from onlynorm.modules.layers import CONVOLUTIONS, LINEAR, layer_options
from onlynorm.modules.norms import FoldedNorm, folded_places
from onlynorm.modules.walk import copy_network, precision, replace_layer, swap
from onlynorm.storage import read_tensors, write_tensors
from onlynorm.validate import Progress, need_choice, need_device, need_path, need_progress

FORMAT = 1
KIND = "network of norms"
EARLIER_KIND = "norm-only model"
"""Earlier kind of files, for networks with norm-only layers."""
CURE = "Save it again from the network."
KINDS: dict[str, type[FrozenLayer]] = {
    "wide": NormOnlyBlock, "low_rank": LowRankBlock, "residual": SkipBlock, "deep": DeepBlock,
    "multilayer": MultilayerBlock, "norm_only": NormOnlyLayer,
}  # fmt: skip
"""The classes of frozen layers by their kind in a file."""


def save_network(
    network: nn.Module,
    path: Path | str,
    *,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> None:
    """Saves a network with frozen layers to one file, without its frozen weights; equal networks give equal bytes.

    Tensors have the dtype of the network unless `dtype` is given. Tensors of blocks, and gammas other than those of
    id_cond, are stored in float32 at least. If saving fails, the previous file is unchanged. Of an activation that is
    not a class of torch.nn only the name is stored.
    """
    if dtype is not None:
        need_precision("dtype", dtype)
    network, path = unwrap(need_model("save", network)), need_path("save", path)
    progress = need_progress(progress)
    places: dict[FrozenLayer, list[str]] = {}
    for name, layer in find_frozen(network).items():
        places.setdefault(layer, []).append(name)
    if not places:
        raise ConversionError(
            f"save needs a network with frozen layers; got none in {type(network).__name__}. Pass the result of "
            "reconstruct or to_norm_only, or use torch.save."
        )
    for layer, names in places.items():
        if text := _not_finite(names[0], layer.state_dict()):
            raise ValueRangeError(f"{text}. Save a network from before its training diverged.")
    tensors, aliases = _collect_tensors(network, dtype)
    entries = []
    for number, (layer, names) in enumerate(places.items()):
        entry, constants = describe_layer(layer, names, dtype=dtype)
        entries.append(entry.as_dict())
        tensors |= {_join(names[0], name): value for name, value in constants.items()}
        if progress is not None:
            progress(number + 1, len(places), names[0])
    document = {
        "blocks": entries, "folded": folded_places(network), "aliases": aliases,
        "dtype": str(dtype or precision(network)).removeprefix("torch."),
        "folded_axes": {place: network.get_submodule(place).n_axes for place in folded_places(network)},
        **describe_structure(network, casts={} if dtype is None else {precision(network): dtype}),
    }  # fmt: skip
    write_tensors(path, tensors, kind=KIND, format=FORMAT, document=document)


def load_network(
    path: Path | str,
    *,
    like: nn.Module,
    storage: str = "dense",
    activation: nn.Module | None = None,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
) -> nn.Module:
    """The saved network with the architecture of `like`, in evaluation mode and the dtype of the file.

    `like` is a new network of the target's architecture. It is copied, and its weights are not used. Its classes,
    hyperparameters (strides, padding modes, slopes, numbers of heads, ...), ties and numbers of forward hooks must
    match the saved network. Hooks on layers of `like` are moved to the frozen layers. `requires_grad` is that of
    `like`: a weight decides for the norms of its layer, a bias for the last shift. `storage` is "dense" (frozen weights
    in memory) or "seed" (drawn again on every forward pass). `activation` is required if it is not a class of torch.nn.
    The network is moved to `device`, by default that of `like`. Checksum, format, architecture, shapes and the digests
    of all frozen weights are checked first; the digests take as long as drawing the weights.
    """
    like = unwrap(need_model("load", like))
    need_choice("storage", storage, STORAGES)
    progress = need_progress(progress)
    target = None if device is None else need_device("device", device)
    document, tensors = _read(need_path("load", path), like)
    entries, folded, full, aliases, dtype = _parse(document, tensors)
    need_activation(entries, activation)
    replaced = [place for entry in entries for place in entry.places]
    _need_architecture(like, entries, folded, full)
    _need_structure(like, document, [*replaced, *folded])
    _need_ties(_outside(like.state_dict(keep_vars=True), [*replaced, *folded]), full, aliases)
    network, given = copy_network(like), precision(like)
    for tensor in (*network.parameters(), *network.buffers()):  # not complex ones, nor those in a dtype of their own
        if tensor.dtype == given:
            tensor.data = tensor.data.to(dtype)
    for number, entry in enumerate(entries):
        prefix = _join(entry.name, "")
        own = {name.removeprefix(prefix): value for name, value in full.items() if name.startswith(prefix)}
        plain: Any = like.get_submodule(entry.name)
        layer = make_layer(entry, own, layer=plain, storage=storage, activation=activation)
        for name, parameter in layer.named_parameters():
            is_shift = plain.bias is not None and name in ("beta", "second_norm.bias")
            parameter.requires_grad_((plain.bias if is_shift else plain.weight).requires_grad)
        network = replace_layer(network, entry.places, layer)
        if progress is not None:
            progress(number + 1, len(entries), entry.name)
    for place in folded:
        n_axes = _as_dict(document.get("folded_axes")).get(place)
        swap(network, place, FoldedNorm(n_axes if isinstance(n_axes, int) else None))
    for name, value in _outside(network.state_dict(keep_vars=True), replaced).items():
        value.data = full[name].to(value.device)  # in place, so that tied tensors stay tied
    _tie_layers(network, aliases, replaced)
    if target is None:
        target = next((p.device for p in like.parameters()), torch.device("cpu"))
    return set_fast_paths(network.to(target).eval())


def _read(path: Path, like: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Document and tensors of a file, in the current format."""
    document, tensors = read_tensors(path, kind=(KIND, EARLIER_KIND), format=FORMAT, cure=CURE)
    if document["kind"] == KIND:
        return document, tensors
    try:
        blocks = [_upgrade_entry(entry, like) for entry in document["layers"]]
        return {"blocks": blocks, "folded": [], "aliases": document["aliases"], "dtype": document["dtype"]}, tensors
    except FormatError:
        raise
    except Exception as error:  # a forged file may raise any error
        raise FormatError(f"{path.name} needs valid settings of layers; got {error!s:.300}. {CURE}") from error


def _upgrade_entry(entry: Mapping[str, Any], like: nn.Module) -> dict[str, Any]:
    """The entry of a norm-only layer in the current format, from a file of `EARLIER_KIND`."""
    plain, words = like.get_submodule(entry["places"][0]), {**entry["choice"]}
    condition, is_given, seed, name = (words.pop(key) for key in ("condition", "spectrum", "seed", "layer"))
    if not isinstance(plain, (*LINEAR, *CONVOLUTIONS)) or list(plain.weight.shape) != entry["shape"]:
        raise FormatError(
            f"the layer at {entry['places'][0]!r} needs a Linear or Conv with a weight of {entry['shape']!s:.60}; the "
            f"model has {type(plain).__name__}. Pass a new model of the converted architecture as like=."
        )
    frozen = make_map(
        tuple(entry["shape"]), FrozenOptions(**words, spectrum=condition), seed=seed, layer=name,
        groups=getattr(plain, "groups", 1), is_stored=False,
    ).settings()  # fmt: skip
    settings = {
        "options": layer_options(plain), "frozen": frozen | ({"spectrum": GIVEN} if is_given else {}),
        "has_bias": plain.bias is not None, "dtype": entry.get("dtype", "float32"),
    }  # fmt: skip
    weights = hashlib.sha256(entry["digest"].encode()).hexdigest()
    return {
        "places": entry["places"],
        "kind": "norm_only",
        "settings": settings,
        "activation": None,
        "weights": weights,
    }


def _collect_tensors(network: nn.Module, dtype: torch.dtype | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(each tensor that is not frozen once, a mapping of other names of tied tensors to it).

    Floating-point tensors are cast to `dtype`, or to float32 if they need it.
    """
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    layers = find_frozen(network)
    for name, value in network.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            raise ConversionError(
                f"save needs a state_dict of dense tensors; got {type(value).__name__} at {name!r}. Keep such state "
                "outside the network."
            )
        if id(value) in first:
            aliases[name] = first[id(value)]
            continue
        first[id(value)] = name
        stored = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        if dtype is not None and value.is_floating_point():
            owner = next((layer for place, layer in layers.items() if name.startswith(_join(place, ""))), None)
            is_precise = owner is not None and owner.needs_float32(value) and dtype.itemsize < LOWEST.itemsize
            cast = stored.to(LOWEST if is_precise else dtype)
            if not torch.equal(torch.isfinite(cast), torch.isfinite(stored)):
                raise ValueRangeError(f"{name!r} needs to fit into {dtype}; it overflows. Save it as torch.float64.")
            stored = cast
        tensors[name] = stored
    return tensors, aliases


def _tie_layers(network: nn.Module, aliases: Mapping[str, str], replaced: list[str]) -> None:
    """Ties the parameters of frozen layers that were tied when the network was saved."""
    known = network.state_dict(keep_vars=True)
    for name, first in aliases.items():
        if name in known and name not in _outside({name: known[name]}, replaced):
            (parent, _, child), (other, _, own) = name.rpartition("."), first.rpartition(".")
            setattr(network.get_submodule(parent), child, getattr(network.get_submodule(other), own))


def _join(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "ReLU": (), "LeakyReLU": ("negative_slope",), "PReLU": ("num_parameters",), "ELU": ("alpha",), "CELU": ("alpha",),
    "SELU": (), "GELU": ("approximate",), "SiLU": (), "Mish": (), "Softplus": ("beta", "threshold"), "LogSigmoid": (),
    "Hardtanh": ("min_val", "max_val"), "ReLU6": (), "Hardsigmoid": (), "Hardswish": (), "Tanh": (), "Sigmoid": (),
    "Softsign": (), "Tanhshrink": (),
}  # fmt: skip
"""Supported activations of torch.nn and their arguments."""


GIVEN = {"stored": "spectrum"}
"""Placeholder in the settings for a spectrum that the file stores as a tensor."""


@dataclass(frozen=True)
class LayerEntry:
    """The description of a frozen layer in a file; `weights` is the digest of its frozen weights."""

    places: tuple[str, ...]
    kind: str
    settings: dict[str, Any]
    activation: dict[str, Any] | None
    weights: str

    @property
    def name(self) -> str:
        """The first place, which prefixes the names of the stored tensors."""
        return self.places[0]

    def as_dict(self) -> dict[str, Any]:
        """The entry in JSON types."""
        return {**vars(self), "places": list(self.places)}


def describe_layer(
    layer: FrozenLayer, places: Iterable[str], *, dtype: torch.dtype | None = None
) -> tuple[LayerEntry, dict[str, Tensor]]:
    """The entry of a layer at these places, and the tensors of its settings; `dtype` as in `save_network`.

    Frozen weights that are not stored are drawn once for the digest.
    """
    settings = layer.settings()
    constants: dict[str, Tensor] = {}
    if isinstance(settings.get("frozen", {}).get("spectrum"), Tensor):
        constants["frozen.spectrum"] = settings["frozen"]["spectrum"].detach().cpu().double().clone()
        settings["frozen"]["spectrum"] = GIVEN
    if dtype is not None and "dtype" in settings:
        settings["dtype"] = str(dtype).removeprefix("torch.")
    activation = describe_activation(_activation_of(layer))
    return LayerEntry(tuple(places), layer.kind, settings, activation, layer.digest()), constants


def parse_entry(written: object) -> LayerEntry:
    """The entry in a file; raises FormatError for wrong fields or types."""
    wanted = {"places": list, "kind": str, "settings": dict, "activation": dict | None, "weights": str}
    if not isinstance(written, dict) or set(written) != set(wanted):
        raise FormatError(f"a frozen layer needs the fields {', '.join(wanted)}; got others. Save it again.")
    for field, kind in wanted.items():
        if not isinstance(written[field], kind):
            got = type(written[field]).__name__
            raise FormatError(f"a frozen layer needs another type of the field {field!r}; got {got}. Save it again.")
    places = written["places"]
    if not places or not all(isinstance(place, str) for place in places):
        raise FormatError(f"a frozen layer needs names of its places; got {places!r:.60}. Save it again.")
    activation = written["activation"]
    if activation is not None:
        name, arguments = activation.get("name"), activation.get("arguments")
        if not isinstance(name, str) or not isinstance(arguments, dict | None):
            raise FormatError(f"an activation needs a name and arguments; got {activation!r:.60}. Save it again.")
    return LayerEntry(**{**written, "places": tuple(places)})


def describe_activation(activation: nn.Module | None) -> dict[str, Any] | None:
    """Name and arguments of an activation; the arguments are None if it is not a class of torch.nn."""
    if activation is None or type(activation) is nn.Identity:
        return None
    name = type(activation).__name__
    if type(activation) is not getattr(nn, name, None) or name not in ACTIVATIONS:
        return {"name": name, "arguments": None}
    return {"name": name, "arguments": {argument: getattr(activation, argument) for argument in ACTIVATIONS[name]}}


def need_activation(entries: Iterable[LayerEntry], given: nn.Module | None) -> None:
    """Raises if the activation of the blocks is required and missing, or is another one."""
    named = {entry.activation.get("name"): entry.activation for entry in entries if entry.activation is not None}
    own = next((name for name, written in named.items() if written.get("arguments") is None), None)
    if given is None and own is not None:
        raise ValueRangeError(
            f"the file needs the custom activation {own!r:.60}; got none. Pass it as load(..., activation=...)."
        )
    if given is not None and (type(given).__name__ not in named or own not in (None, type(given).__name__)):
        raise ValueRangeError(
            f"the file needs the activation {', '.join(map(str, named)) or 'left out'}; got {type(given).__name__}. "
            "Pass the activation of the network, or leave it out if it is a class of torch.nn."
        )


def _make_activation(written: dict[str, Any] | None, given: nn.Module | None) -> nn.Module | None:
    if written is None:
        return None
    name, arguments = written["name"], written["arguments"]
    if arguments is None:
        return copy.deepcopy(given)
    if set(arguments) != set(ACTIVATIONS[name]):
        raise FormatError(f"{name} needs the arguments {ACTIVATIONS[name]}; the file has {sorted(arguments)}.")
    made: nn.Module = getattr(nn, name)(**arguments)
    made(torch.zeros(1, arguments.get("num_parameters", 1)))  # some check their arguments in forward
    return made


def make_layer(
    entry: LayerEntry,
    tensors: Mapping[str, Tensor],
    *,
    layer: nn.Module,
    storage: str,
    activation: nn.Module | None = None,
) -> FrozenLayer:
    """The layer of an entry with its tensors; raises unless it matches the digest and the layer that it replaces.

    `tensors` is the state dict of the layer.
    """

    def make(storage: str) -> FrozenLayer:
        if entry.kind not in KINDS:
            raise UnknownNameError("a frozen layer", entry.kind, KINDS)
        phi = _make_activation(entry.activation, activation)
        return KINDS[entry.kind].from_settings(copy.deepcopy(settings), activation=phi, storage=storage)

    if text := _not_finite(entry.name, tensors):
        raise FormatError(f"{text}. Save the file again, from a network with finite norms.")
    try:
        settings, tensors = _with_constants(entry.settings, tensors)
        n_stored = sum(tensor.numel() for tensor in tensors.values())
        longest = max(n_stored, *(size for tensor in layer.parameters() for size in tensor.shape))
        _need_plausible(settings, n_stored, longest)
        with torch.device("meta"):
            empty = make("seed")
        tensors = _upgraded(empty, tensors)
        wanted = {name: tuple(value.shape) for name, value in empty.state_dict().items()}
        stored = {name: tuple(value.shape) for name, value in tensors.items()}
        if wanted != stored:
            odd = min(name for name in wanted | stored if wanted.get(name) != stored.get(name))
            raise FormatError(f"{odd} has shape {stored.get(odd)}; the settings need {wanted.get(odd)}")
        if storage == "dense":
            cure = "Load with storage='seed', which stores no frozen weights."
            need_memory(f"the layer at {entry.name!r}", 8 * empty.n_frozen, memory_limit(), cure)
        made = make(storage)
        if isinstance(made, FrozenBlock):
            dtype = next((value.dtype for value in tensors.values() if value.is_floating_point()), torch.float64)
            if dtype.itemsize < LOWEST.itemsize:
                raise FormatError(f"its tensors are {dtype}; blocks need float32 or float64")
            made = made.to(dtype)
        made = made.eval()
        made.load_state_dict(dict(tensors))
        digest = made.digest()
    except MemoryLimitError:
        raise
    except Exception as error:  # a forged file may raise any error
        raise FormatError(
            f"the layer at {entry.name!r} needs valid settings; got {str(error) or repr(error):.300}. Register the "
            "features it uses, update onlynorm, or save it again."
        ) from error
    if digest != entry.weights:
        raise FormatError(
            f"the layer at {entry.name!r} needs frozen weights with the digest {entry.weights:.16}; its seed gives "
            f"{digest:.16}. The file was altered, or the features changed: use the version of onlynorm that wrote it."
        )
    _need_fit(made, entry.name, layer)
    return made


def _with_constants(
    settings: dict[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The settings with their tensors, and the remaining tensors."""
    frozen, rest = settings.get("frozen"), dict(tensors)
    if isinstance(frozen, dict) and frozen.get("spectrum") == GIVEN:
        settings = {**settings, "frozen": {**frozen, "spectrum": rest.pop("frozen.spectrum")}}
    return settings, rest


def _not_finite(place: str, tensors: Mapping[str, Tensor]) -> str:
    """What a norm needs that contains NaN or infinity, empty if there is none; only ranges may be infinite."""
    for name, value in tensors.items():
        is_norm = name.endswith(("weight", "bias", "running_mean", "running_var", "gamma", "beta"))
        is_real = value.dtype in PRECISIONS.values()  # isfinite raises for float8
        if is_norm and not (is_real and bool(value.isfinite().all())):
            got = "NaN or infinity" if is_real else str(value.dtype)
            return f"{name} of the layer at {place!r} needs finite values; got {got}"
    return ""


def _upgraded(layer: FrozenLayer, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a block in the current format.

    Earlier versions stored statistics, range and line of every feature. Now features with the same input share them,
    and the two lines of an activation are stored once. The scales and shifts of all norms are unchanged.
    """
    made = dict(tensors)
    for place, module in layer.named_modules():
        prefix = _join(place, "")
        if not isinstance(module, NormOnlyBlock) or f"{prefix}slope" not in made:
            continue
        own = {name.removeprefix(prefix): made.pop(name) for name in tensors if name.startswith(prefix)}
        slope, offset = own.pop("slope"), own.pop("offset")
        for name in ("low", "high", "first_norm.weight", "first_norm.bias"):
            if own[name].shape != slope.shape or slope.shape != offset.shape or len(slope) != module.n_features:
                raise FormatError(f"{name} has shape {tuple(own[name].shape)} for {module.n_features} features")
        low, high, scale, shift = (own[name].double() for name in (*_RANGE, "first_norm.weight", "first_norm.bias"))
        statistics = [own[name].double() for name in _STATISTICS if name in own]
        if statistics:
            mean, deviation = statistics[0], torch.sqrt(statistics[1] + _EPS)
            scale = scale / deviation
            shift = shift - scale * mean
        is_second = scale * (low + high) / 2 + shift < 0.0
        first, second = ((~is_second).int().argmax(), is_second.int().argmax())
        own["lines"] = torch.stack([torch.stack([slope[i], offset[i]]) for i in (first, second)])
        if module.sharing is not None:
            _share(own, module.sharing, scale, shift)
        made.update({prefix + name: value for name, value in own.items()})
    return made


def _share(own: dict[str, Tensor], sharing: Sharing, scale: Tensor, shift: Tensor) -> None:
    """Stores statistics and ranges once per input; adjusts weight and bias so that scales and shifts stay the same."""
    n_inputs = sum(sharing.n_inputs)
    index = sharing.spread(torch.arange(n_inputs))
    chosen = torch.full((n_inputs,), -1).scatter(0, index, torch.arange(len(index)))
    for name, unused in zip((*_RANGE, *_STATISTICS), (-math.inf, math.inf, 0.0, 1.0), strict=True):
        if name in own:
            own[name] = torch.where(chosen < 0, unused, own[name][chosen]).to(own[name])
    if _STATISTICS[0] in own:
        mean, variance = (sharing.spread(own[name].double()) for name in _STATISTICS)
        weight = scale * torch.sqrt(variance + _EPS)
        own["first_norm.weight"] = weight.to(own["first_norm.weight"])
        own["first_norm.bias"] = (shift + scale * mean).to(own["first_norm.bias"])


_RANGE, _STATISTICS = ("low", "high"), ("first_norm.running_mean", "first_norm.running_var")
_EPS = nn.BatchNorm1d(1).eps


def _activation_of(layer: FrozenLayer) -> nn.Module | None:
    """The activation of the block, or of the blocks inside it."""
    for module in layer.modules():
        if isinstance(module, FrozenBlock) and isinstance(activation := getattr(module, "activation", None), nn.Module):
            return activation
    return None


def _need_plausible(settings: object, n_stored: int, longest: int) -> None:
    """Raises if there are more features than the stored norms allow, before they are drawn.

    Every feature has a gamma, so there are at most as many features as stored entries. No axis of a weight is longer
    than that of the layer or of a norm.
    """
    inner = settings if isinstance(settings, list) else settings.values() if isinstance(settings, dict) else ()
    for item in inner:
        _need_plausible(item, n_stored, longest)
    if isinstance(settings, dict) and "n_features" in settings and "shape" in settings:
        n_features, shape = settings["n_features"], settings["shape"]
        if n_features > n_stored or max(shape) > longest or 8 * math.prod(shape) > memory_limit():
            raise FormatError(f"{n_features!s:.40} features for {shape!s:.80} with {n_stored} entries in the norms")


def _need_fit(block: FrozenLayer, name: str, layer: nn.Module) -> None:
    """Raises unless the block has the input and output shapes of the layer.

    Both are called on the meta device, without the activation. A block ignores extra channels, so it must also fail for
    an input with one channel less.
    """
    options = (getattr(module, "options", None) for module in block.modules())
    try:
        theirs = _normalised(next((one for one in options if isinstance(one, dict)), {}))
    except Exception as error:  # a forged file may raise any error
        raise FormatError(
            f"the layer at {name!r} needs the options of a convolution, or none; got invalid ones "
            f"({type(error).__name__}: {error!s:.100}). Save it again."
        ) from error
    mine = _normalised(layer_options(layer))
    if isinstance(block, NormOnlyLayer):
        theirs, mine = theirs | {"bias": block.beta is not None}, mine | {"bias": layer.bias is not None}
    for option in theirs | mine:
        if theirs.get(option) != mine.get(option):
            raise FormatError(
                f"the network needs a layer at {name!r} with the {option} of {layer}, {mine.get(option)}; the file has "
                f"{theirs.get(option)}. Pass a network of the saved architecture."
            )
    inner = [module for module in block.modules() if isinstance(module, FrozenBlock) and hasattr(module, "activation")]
    activations = [module.activation for module in inner]
    try:
        for module in inner:
            module.activation = nn.Identity()
        made: object = _output_shape(block, layer)
        with contextlib.suppress(Exception):
            _output_shape(block, layer, n_missing=1)
            made = "an output without the last channel of the input"
    except Exception as error:
        made = error
    finally:
        for module, activation in zip(inner, activations, strict=True):
            module.activation = activation
    if made != (wanted := _output_shape(layer, layer)):
        raise FormatError(
            f"the network needs a layer at {name!r} with the inputs of {layer} and output {wanted}; the file has one "
            f"with weights of {', '.join(str(one.shape) for one in block.maps[:3])} that gives {made!r:.200}. Pass a "
            "network of the saved architecture."
        )


def _normalised(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a convolution with explicit padding, and no padding mode without padding."""
    if not options:
        return {}
    if any(isinstance(one, list | tuple) and len(one) != len(options["kernel_size"]) for one in options.values()):
        raise ValueError("one size per axis")
    padding = explicit_padding(options)
    return {**options, "padding": padding, "padding_mode": options["padding_mode"] if any(padding) else None}


def _output_shape(module: nn.Module, layer: nn.Module, *, n_missing: int = 0) -> tuple[int, ...]:
    """The output shape of the module for one input of the layer, with the last `n_missing` channels removed."""
    if isinstance(layer, CONVOLUTIONS):
        sizes = []
        for kernel, stride, dilation in zip(layer.kernel_size, layer.stride, layer.dilation, strict=True):
            padding = 0 if isinstance(layer.padding, str) else max(layer.padding)
            sizes.append(dilation * (kernel + 16) + stride + padding)  # large enough for a larger source kernel
        shape = (1, layer.in_channels - n_missing, *sizes)
    else:
        assert isinstance(layer, nn.Linear)
        shape = (1, layer.in_features - n_missing)
    tensors = {
        name: torch.empty_like(value, device="meta")
        for name, value in (*module.named_parameters(), *module.named_buffers())
    }
    dtype = module.maps[0].like.dtype if isinstance(module, FrozenLayer) else next(module.parameters()).dtype
    output: Tensor = functional_call(module, tensors, torch.empty(shape, dtype=dtype, device="meta"))
    return tuple(output.shape)


def describe_structure(
    network: nn.Module, *, casts: Mapping[torch.dtype, torch.dtype] | None = None
) -> dict[str, dict[str, Any]]:
    """Classes, hyperparameters and hooks of the modules, except frozen layers and folded norms, as JSON types."""
    return structure.describe(network, opaque=_OPAQUE, kind_of=plain_kind, casts=casts)


def structure_differences(
    document: Mapping[str, object], network: nn.Module, *, replaced: Collection[str] = ()
) -> list[str]:
    """How the structure of the network differs from that in a file, except at replaced places."""
    return structure.differences(document, network, replaced=replaced, opaque=_OPAQUE, kind_of=plain_kind)


def mixed_precision(state: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> list[str]:
    """Floating-point dtypes of the network that are several in the file: its layers could not call each other."""
    dtypes: dict[torch.dtype, dict[torch.dtype, str]] = {}
    for name in sorted(state.keys() & tensors.keys()):
        if state[name].is_floating_point():
            dtypes.setdefault(state[name].dtype, {}).setdefault(tensors[name].dtype, name)
    return [
        f"{held} tensors of the model have several dtypes in the file "
        f"({', '.join(f'{dtype} at {name!r}' for dtype, name in list(found.items())[:3])})"
        for held, found in dtypes.items()
        if len(found) > 1
    ]


_OPAQUE = (FrozenLayer, FoldedNorm)


def _parse(
    document: Mapping[str, object], tensors: Mapping[str, Tensor]
) -> tuple[list[LayerEntry], list[str], dict[str, Tensor], dict[str, str], torch.dtype]:
    """(layers, folded places, tensors under all their names, tied names, dtype); raises FormatError for wrong types."""
    blocks, folded, aliases, dtype = (document.get(name) for name in ("blocks", "folded", "aliases", "dtype"))
    kind = next((one for one in PRECISIONS.values() if str(one) == f"torch.{dtype}"), None)
    if kind is None:
        raise FormatError(f"a {KIND} needs a precision; got {dtype!r:.40}. {CURE}")
    if not isinstance(blocks, list) or not isinstance(folded, list) or not isinstance(aliases, dict):
        raise FormatError(f"a {KIND} needs its layers, folded norms and tied tensors; the file lacks some. {CURE}")
    if not all(isinstance(name, str) for name in (*folded, *aliases.values())) or not {*aliases.values()} <= {*tensors}:
        raise FormatError(f"a {KIND} needs names of folded norms and tied tensors; got others. {CURE}")
    full = {**tensors, **{name: tensors[first] for name, first in aliases.items()}}
    return [parse_entry(block) for block in blocks], folded, full, aliases, kind


def _need_architecture(
    like: nn.Module, entries: list[LayerEntry], folded: list[str], tensors: Mapping[str, Tensor]
) -> None:
    """Raises unless the network has a layer at every place of a block, and all other tensors with the same shape."""
    modules = dict(like.named_modules(remove_duplicate=False))
    blocks = [place for entry in entries for place in entry.places]
    wrong = []
    for place in (*blocks, *folded):
        is_batch_norm = isinstance(modules.get(place), nn.modules.batchnorm._BatchNorm)
        is_plain = type(modules.get(place)) in (*LINEAR, *CONVOLUTIONS)  # a subclass may override forward
        if not (is_batch_norm if place in folded else is_plain):
            got = type(modules[place]).__name__ if place in modules else "nothing"
            wrong.append(f"{place!r} is {got} instead of {'a batch norm' if place in folded else 'Linear or Conv'}")
    if not blocks or len({*blocks, *folded}) < len([*blocks, *folded]):
        wrong.append("the file has no frozen layers, or two at one place")
    replaced = (*blocks, *folded)
    own = {name: _form(value) for name, value in _outside(like.state_dict(), replaced).items()}
    stored = {name: _form(value) for name, value in _outside(tensors, replaced).items()}
    for name in sorted(own.keys() | stored.keys()):
        if own.get(name) != stored.get(name):
            mine, theirs = own.get(name, "missing"), stored.get(name, "missing")
            wrong.append(f"{name!r} is {mine} in the network and {theirs} in the file")
    wrong += mixed_precision(_outside(like.state_dict(), replaced), tensors)
    if wrong:
        more = f"; and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise FormatError(
            f"load needs a network of the saved architecture; {'; '.join(wrong[:4])}{more}. Pass a new network of the "
            "target's architecture as like=."
        )


def _need_ties(own: Mapping[str, Tensor], stored: Mapping[str, Tensor], aliases: Mapping[str, str]) -> None:
    """Raises unless the same parameters are tied in the network and in the file, outside frozen layers.

    Buffers with equal values need no tie: a cast of the network unties them.
    """
    here: dict[object, str] = {}
    there: dict[object, str] = {}
    for name, value in own.items():
        mine, theirs = here.setdefault(id(value), name), there.setdefault(aliases.get(name, name), name)
        one, other = stored[name], stored[mine]
        is_equal = mine == theirs or (one.dtype == other.dtype and torch.equal(one, other))
        if mine != theirs and (isinstance(value, nn.Parameter) or not is_equal):
            texts = [f"tied to {first!r}" if first != name else "not tied" for first in (mine, theirs)]
            raise FormatError(
                f"load needs a network with the tied tensors of the saved one; {name!r} is {texts[0]} in the network "
                f"and {texts[1]} in the file. Tie the same tensors in like= as in the saved network."
            )


def _need_structure(like: nn.Module, document: Mapping[str, object], replaced: list[str]) -> None:
    """Raises if a module has another class, other hyperparameters or other hooks than in the file."""
    wrong = structure_differences(document, like, replaced=replaced)
    if wrong:
        more = f"; and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise FormatError(
            f"load needs a network of the saved architecture; {'; '.join(wrong[:4])}{more}. Pass a new network of the "
            "target's architecture, with the same forward hooks, as like=."
        )


def _as_dict(value: object) -> dict[str, Any]:
    """A dict in the file; empty if it is missing."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise FormatError(f"a {KIND} needs a dict of modules; got {type(value).__name__}. {CURE}")
    return value


def _outside(tensors: Mapping[str, Tensor], places: Iterable[str]) -> dict[str, Tensor]:
    """The tensors that do not belong to a module at one of these places."""
    inside = tuple(f"{place}." if place else "" for place in places)
    return {name: value for name, value in tensors.items() if not name.startswith(inside)}


def _form(value: object) -> str:
    """The shape of a tensor, and the dtype unless it is floating-point."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{tuple(value.shape)}" if value.is_floating_point() else f"{tuple(value.shape)} {value.dtype}"
