"""`save_norm_only` and `load_norm_only`: a model of norm-only layers as one file of norms, seeds and digests.

The file holds every parameter and buffer of the model: gammas, shifts, and what was not converted. Frozen features and
masks are not in it; they are made from the seed again, and their digest is compared. It is a safetensors file, written
whole or not at all and sealed by a checksum (see `storage`).

A block as it stands in a file: its places, the words that fix it, and a digest of its frozen weights.

Frozen weights are never written. Reading makes them from the seed again and compares the digest. A file may come from
anywhere, so nothing in it is believed: sizes are compared with the stored norms on a block without memory before a real
one is made, and whatever its words set off is an error of the file.

What a network computes beside its tensors: classes, hyperparameters and hooks of its modules, in JSON types.

A file of norms is loaded onto a network that the caller makes. Strides, padding modes, slopes and numbers of heads are
in no tensor, so the file holds them, and a network with others is refused.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import math
import types
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
    StorageError,
    UnknownNameError,
    ValueRangeError,
)
from onlynorm.features import Features
from onlynorm.frozen.fast_paths import plain_kind
from onlynorm.frozen.form import LOWEST, Block, find_blocks
from onlynorm.frozen.maps import count_features
from onlynorm.frozen.norm_only import PLAIN, NormOnlyLayer, Plain, wrap
from onlynorm.frozen.options import Choice, make_choice
from onlynorm.frozen.pair import NormOnlyBlock
from onlynorm.memory import memory_limit, need_memory
from onlynorm.modules import need_model, unwrap
from onlynorm.modules.affine import Sharing
from onlynorm.modules.convolution import explicit_padding
from onlynorm.modules.layers import CONVOLUTIONS, layer_options
from onlynorm.modules.norms import FoldedNorm
from onlynorm.modules.walk import copy_network, places_of, precision, swap
from onlynorm.storage import read_tensors, to_plain, write_tensors
from onlynorm.validate import need_path

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
    tensors, aliases = collect_tensors("save_norm_only", model)
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
    if type(plain) not in PLAIN or list(got) != entry["shape"]:
        raise FormatError(
            f"the layer at {name!r} needs a Linear or Conv with a weight of {tuple(entry['shape'])}; the model has "
            f"{type(plain).__name__} with {got}. Pass into= a fresh model, made as the one that was converted."
        )
    assert isinstance(plain, Plain)
    choice = _choice(entry, tensors)
    n_stored = tensors[_join(name, "gamma")].numel()
    try:
        n_features = count_features(got, choice, groups=getattr(plain, "groups", 1))
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


def collect_tensors(
    verb: str, network: nn.Module, *, dtype: torch.dtype | None = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor of the network that is not frozen, once, and the other names under which tied ones are known.

    With a `dtype` floating numbers are cast to it, but those of blocks never below float32.
    """
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    inside = tuple(f"{place}." if place else "" for place in find_blocks(network))
    for name, value in network.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            raise ConversionError(
                f"{verb} needs a network whose state is dense tensors; got {type(value).__name__} at {name!r}. Keep "
                "such state outside the network."
            )
        if id(value) in first:
            aliases[name] = first[id(value)]
            continue
        first[id(value)] = name
        stored = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        if dtype is not None and value.is_floating_point():
            cast = stored.to(LOWEST if name.startswith(inside) and dtype.itemsize < LOWEST.itemsize else dtype)
            if not torch.equal(torch.isfinite(cast), torch.isfinite(stored)):
                raise ValueRangeError(f"{name!r} needs to fit into {dtype}; it overflows. Save it as torch.float64.")
            stored = cast
        tensors[name] = stored
    return tensors, aliases


def _tie(network: nn.Module, name: str, first: str) -> None:
    """Puts the parameter of one name under the other too."""
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
"""Activations of torch.nn that a file may name, with the arguments that make them."""


@dataclass(frozen=True)
class BlockEntry:
    """What a file says about one block: where it sits, its class, its settings, its activation, its frozen weights."""

    places: tuple[str, ...]
    kind: str
    settings: dict[str, Any]
    activation: dict[str, Any] | None
    weights: str

    @property
    def name(self) -> str:
        """The first place, under which the block's tensors are stored."""
        return self.places[0]

    def as_dict(self) -> dict[str, Any]:
        """The entry in JSON types."""
        return {**vars(self), "places": list(self.places)}


def describe_block(block: Block, places: Iterable[str]) -> BlockEntry:
    """The entry of a block that sits at these places; its frozen weights are made once for the digest."""
    activation = describe_activation(_activation_of(block))
    return BlockEntry(tuple(places), block.kind, block.settings(), activation, weights_digest(block.sources()))


def parse_entry(written: object) -> BlockEntry:
    """The entry that a file holds, every field of its type."""
    wanted = {"places": list, "kind": str, "settings": dict, "activation": dict | None, "weights": str}
    if not isinstance(written, dict) or set(written) != set(wanted):
        raise FormatError(f"a block needs the fields {', '.join(wanted)}; the file has others. Save it again.")
    for field, kind in wanted.items():
        if not isinstance(written[field], kind):
            raise FormatError(f"the field {field!r} of a block needs another type than the file's. Save it again.")
    places = written["places"]
    if not places or not all(isinstance(place, str) for place in places):
        raise FormatError(f"a block needs places, as names; the file has {places!r:.60}. Save it again.")
    activation = written["activation"]
    if activation is not None:
        name, arguments = activation.get("name"), activation.get("arguments")
        if not isinstance(name, str) or not isinstance(arguments, dict | None):
            raise FormatError(f"an activation needs a name and arguments; got {activation!r:.60}. Save it again.")
    return BlockEntry(**{**written, "places": tuple(places)})


def weights_digest(sources: Iterable[Features]) -> str:
    """SHA-256 over the digests of all frozen features of a block."""
    return hashlib.sha256("".join(features.weights_digest() for features in sources).encode()).hexdigest()


def describe_activation(activation: nn.Module | None) -> dict[str, Any] | None:
    """Name and arguments of an activation; arguments are None for one that is not torch's own."""
    if activation is None or type(activation) is nn.Identity:
        return None
    name = type(activation).__name__
    if type(activation) is not getattr(nn, name, None) or name not in ACTIVATIONS:
        return {"name": name, "arguments": None}
    return {"name": name, "arguments": {argument: getattr(activation, argument) for argument in ACTIVATIONS[name]}}


def need_activation(entries: Iterable[BlockEntry], given: nn.Module | None) -> None:
    """Raises where the caller has to give the activation of the blocks, or gave another than they have."""
    named = {entry.activation.get("name"): entry.activation for entry in entries if entry.activation is not None}
    own = next((name for name, written in named.items() if written.get("arguments") is None), None)
    if given is None and own is not None:
        raise ValueRangeError(
            f"the file needs an activation of your own, known to it by the name {own!r:.60} only; got none. Pass it as "
            "load(..., activation=...)."
        )
    if given is not None and (type(given).__name__ not in named or own not in (None, type(given).__name__)):
        raise ValueRangeError(
            f"the file needs the activation {', '.join(map(str, named)) or 'left out'}; got {type(given).__name__}. "
            "Pass the one that the network was rebuilt with, or none where torch has it."
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
    made(torch.zeros(1, arguments.get("num_parameters", 1)))  # some look at their arguments only when they are called
    return made


def make_block(
    entry: BlockEntry,
    tensors: Mapping[str, Tensor],
    *,
    layer: nn.Module,
    storage: str,
    activation: nn.Module | None = None,
) -> Block:
    """The block of an entry, filled with its tensors and checked against its digest and the layer that it replaces.

    `tensors` are those of the block alone, named as in its state dict.
    """

    def make(storage: str) -> Block:
        phi = _make_activation(entry.activation, activation)
        kinds = _kinds()
        if entry.kind not in kinds:
            raise UnknownNameError("a block", entry.kind, kinds)
        return kinds[entry.kind].from_settings(copy.deepcopy(entry.settings), activation=phi, storage=storage)

    try:
        n_stored = sum(tensor.numel() for tensor in tensors.values())
        longest = max(n_stored, *(size for tensor in layer.parameters() for size in tensor.shape))
        _need_modest(entry.settings, n_stored, longest)
        with torch.device("meta"):
            empty = make("seed")
        tensors = _upgraded(empty, tensors)
        wanted = {name: tuple(value.shape) for name, value in empty.state_dict().items()}
        stored = {name: tuple(value.shape) for name, value in tensors.items()}
        _need_finite(tensors)
        if wanted != stored:
            odd = min(name for name in wanted | stored if wanted.get(name) != stored.get(name))
            raise FormatError(f"{odd} has shape {stored.get(odd)} where the settings ask for {wanted.get(odd)}")
        if storage == "dense":
            need = 8 * sum(one.n_frozen for one in empty.sources())
            cure = "Load with storage='seed', which keeps no frozen weights."
            need_memory(f"the block at {entry.name!r}", need, memory_limit(), cure)
        dtype = next((value.dtype for value in tensors.values() if value.is_floating_point()), torch.float64)
        if dtype.itemsize < LOWEST.itemsize:
            raise FormatError(f"its numbers are in {dtype}, which has too few digits for them")
        block = make(storage).to(dtype).eval()
        block.load_state_dict(dict(tensors))
        digest = weights_digest(block.sources())
    except MemoryLimitError:
        raise
    except Exception as error:  # a forged file may set off anything
        raise FormatError(
            f"the block at {entry.name!r} needs settings that make one; those of the file do not: "
            f"{str(error) or repr(error):.300}. Register the features it uses, update onlynorm, or save it again."
        ) from error
    if digest != entry.weights:
        raise FormatError(
            f"the block at {entry.name!r} needs frozen weights with the digest {entry.weights:.16}; its seed gives "
            f"{digest:.16} here. The file was forged, or these features changed: use the onlynorm that wrote it."
        )
    _need_fit(block, entry.name, layer)
    return block


def _need_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raises where a norm holds NaN or an infinity; only the ranges it was calibrated on may be infinite."""
    for name, value in tensors.items():
        is_norm = name.endswith(("weight", "bias", "running_mean", "running_var"))
        if is_norm and not (value.is_floating_point() and bool(value.isfinite().all())):
            raise FormatError(f"{name} needs finite numbers")


def _upgraded(block: Block, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a block as it holds them now.

    Earlier versions stored statistics, range and line of every feature. Features that see the same input share them
    now, and the two lines of an activation are stored once; the scales and shifts of all norms stay what they were.
    """
    made = dict(tensors)
    for place, module in block.named_modules():
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
    """Gives features of one input the statistics and the range of one of them, and what keeps scales and shifts."""
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


def _activation_of(block: Block) -> nn.Module | None:
    """The activation between the frozen layers, of the block or of the blocks inside it."""
    for module in block.modules():
        if isinstance(module, Block) and isinstance(activation := getattr(module, "activation", None), nn.Module):
            return activation
    return None


def _kinds() -> dict[str, type[Block]]:
    """Every class of blocks by its kind."""
    classes = list(Block.__subclasses__())
    for cls in classes:
        classes += cls.__subclasses__()
    return {cls.kind: cls for cls in classes if "kind" in vars(cls)}


def _need_modest(settings: object, n_stored: int, longest: int) -> None:
    """Refuses features that the stored norms cannot belong to, before anything is made of them.

    Every feature has a gamma, so there are no more features than stored numbers; and no axis of the weights they make
    is longer than the layer's, or than a norm between them.
    """
    inner = settings if isinstance(settings, list) else settings.values() if isinstance(settings, dict) else ()
    for item in inner:
        _need_modest(item, n_stored, longest)
    if isinstance(settings, dict) and "n_features" in settings and "shape" in settings:
        n_features, shape = settings["n_features"], settings["shape"]
        if n_features > n_stored or max(shape) > longest or 8 * math.prod(shape) > memory_limit():
            raise FormatError(f"{n_features!s:.40} features for {shape!s:.80} with {n_stored} numbers in the norms")


def _need_fit(block: Block, name: str, layer: nn.Module) -> None:
    """Raises where the block does not take what the layer takes, or does not return what it returns.

    Both are called without numbers. The activation, which may be anything, is left out. A block reads the channels it
    needs and no more, so it must also refuse an input with one channel less.
    """
    options = (getattr(module, "options", None) for module in block.modules())
    try:
        theirs = _normalised(next((one for one in options if isinstance(one, dict)), {}))
    except Exception as error:  # a forged file may set off anything
        raise FormatError(
            f"the block at {name!r} needs the options of a convolution, or none; those of the file cannot be read "
            f"({type(error).__name__}: {error!s:.100}). Save it again."
        ) from error
    mine = _normalised(layer_options(layer))
    for option in theirs | mine:
        if theirs.get(option) != mine.get(option):
            raise FormatError(
                f"the network needs a block at {name!r} with the {option} of {layer}, {mine.get(option)}; the file's "
                f"has {theirs.get(option)}. Pass a network of the architecture that was saved."
            )
    inner = [module for module in block.modules() if isinstance(module, Block) and hasattr(module, "activation")]
    kept = [module.activation for module in inner]
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
        for module, activation in zip(inner, kept, strict=True):
            module.activation = activation
    if made != (wanted := _output_shape(layer, layer)):
        raise FormatError(
            f"the network needs a block at {name!r} that takes what {layer} takes and returns {wanted}; the file's, "
            f"from features for weights of {', '.join(str(one.shape) for one in block.sources()[:3])}, gives "
            f"{made!r:.200}. Pass a network of the architecture that was saved."
        )


def _normalised(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a convolution, with padding as numbers and without a mode where nothing is padded."""
    if not options:
        return {}
    padding = explicit_padding(options)
    return {**options, "padding": padding, "padding_mode": options["padding_mode"] if any(padding) else None}


def _output_shape(module: nn.Module, layer: nn.Module, *, n_missing: int = 0) -> tuple[int, ...]:
    """The shape of what the module returns for one input that the layer takes, or one with some channels missing."""
    if isinstance(layer, CONVOLUTIONS):
        sizes = []
        for kernel, stride, dilation in zip(layer.kernel_size, layer.stride, layer.dilation, strict=True):
            padding = 0 if isinstance(layer.padding, str) else max(layer.padding)
            sizes.append(dilation * (kernel + 16) + stride + padding)  # room for a source kernel that is larger
        shape = (1, layer.in_channels - n_missing, *sizes)
    else:
        assert isinstance(layer, nn.Linear)
        shape = (1, layer.in_features - n_missing)
    tensors = {
        name: torch.empty_like(value, device="meta")
        for name, value in (*module.named_parameters(), *module.named_buffers())
    }
    dtype = next(value.dtype for value in tensors.values() if value.is_floating_point())
    output: Tensor = functional_call(module, tensors, torch.empty(shape, dtype=dtype, device="meta"))
    return tuple(output.shape)


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
