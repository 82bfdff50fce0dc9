"""`norm_only`: any model -> a copy whose Linear and Conv layers have norms as their only parameters.

The copy is for training from scratch: it starts as the function the model is, as far as its features reach. Modules and
weights that are tied stay tied. What cannot be converted stays as it is, with its parameters, and is listed:

    model = norm_only(model, features="id_cond", density=0.2, seed=0)
    print(converted(model))
"""

from __future__ import annotations

import dataclasses
import fnmatch
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onlynorm.errors import AccuracyWarning, ConversionError, OnlynormError, UnknownNameError, ValueRangeError, shown
from onlynorm.frozen.norm_only import PLAIN, NormOnlyLayer, Plain, wrap
from onlynorm.frozen.options import Choice, make_choice
from onlynorm.modules import need_model, unwrap
from onlynorm.modules.layers import Left, find_layers
from onlynorm.modules.walk import copy_network, places_of, swap
from onlynorm.validate import need_flag, need_items

_NOTE = "onlynorm_left"
_SHORT = "onlynorm_short"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class ConvertedLayer:
    """One norm-only layer: its places, the shape of its weight, and what it trains and keeps."""

    names: tuple[str, ...]
    kind: str
    features: str
    shape: tuple[int, ...]
    n_features: int
    n_frozen: int

    def __str__(self) -> str:
        return (
            f"{' = '.join(self.names)} ({self.kind}): {self.features}, weight {' x '.join(map(str, self.shape))}, "
            f"{self.n_features:,} features, {self.n_frozen:,} frozen numbers"
        )


@dataclass(frozen=True)
class Conversion:
    """The norm-only layers of a model, and the modules with weights that stayed as they were.

    `warnings` name the layers that do not start with their weight, and how far off they are.
    """

    layers: tuple[ConvertedLayer, ...]
    left: tuple[Left, ...]
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [str(layer) for layer in self.layers]
        left = (f"left: {item}" for item in self.left)
        return "\n".join([*rows, *left, *(f"warning: {text}" for text in self.warnings)])


def norm_only(
    model: nn.Module,
    *,
    features: str = "id_cond",
    density: float | None = None,
    seed: int = 0,
    keep: Iterable[str] | str = (),
    strict: bool = False,
    **choices: Any,
) -> nn.Module:
    """A copy of the model whose Linear and Conv layers train only norms; it computes what the model does.

    `density` lets only a random part of the features exist: for id_cond, random masks from (seed, layer). `keep` names
    layers that stay ordinary, with wildcards: "head", "blocks.11.*". `strict` refuses a model of which anything else
    but norms would be left. Further `choices` are fields of `Choice`: excess, condition, n_blocks and so on. Features
    below the width bound, or a mask, reach the model's weights only in part; the copy starts with the nearest.

    Where a layer starts off its weight by more than half of the digits of its precision (sqrt(eps), relative),
    `converted(copy).warnings` says by how much. An `AccuracyWarning` says so too, unless fewer features than weights
    were asked for (`excess` below 1, a mask): the features are too sparse, too heavy-tailed or too few above the bound.

    Theory: random_features:thm-3.1, random_features:conclusion
    """
    if "layer" in choices:
        raise ValueRangeError(
            "norm_only names the features of each layer by its place in the model; got "
            f"layer={shown(choices['layer'])}. Leave it out, and change the seed for other features."
        )
    choice = make_choice(features=features, density=density, seed=seed, **choices)
    model, strict = unwrap(need_model("norm_only", model)), need_flag("strict", strict)
    _need_ordinary(model)
    network = copy_network(model)
    found = find_layers(network)
    kept = _kept(tuple(name for layer in found.layers for name in layer.names), keep)
    left = list(found.left)
    chosen: dict[str, Plain] = {}
    for target in found.layers:
        module = network.get_submodule(target.name)
        why = "kept as asked" if kept.intersection(target.names) else _refusal(module)
        if why:
            left.append(Left(target.name, target.kind, why))
        else:
            assert isinstance(module, Plain)
            chosen[target.name] = module
    for name, why in _tied_elsewhere(network, chosen).items():
        left.append(Left(name, type(chosen.pop(name)).__name__, why))
    _need_enough(model, chosen, [item for item in left if item.reason != "kept as asked"], strict)
    places = places_of(network)
    made: dict[Tensor, NormOnlyLayer] = {}
    shifts: dict[Tensor, nn.Parameter | None] = {}
    short: list[str] = []
    approximate: set[str] = set()  # those that were asked for
    for name, plain in chosen.items():
        layer = _convert(name, plain, choice, made.get(plain.weight))
        if plain.weight not in made:
            made[plain.weight] = layer
            found_short = _shortfall(name, layer, plain.weight)
            short += found_short
            if _is_approximate(layer):
                approximate.update(found_short)
        if plain.bias is not None:
            layer.beta = shifts.setdefault(plain.bias, layer.beta)
        for place in places[plain]:
            network = swap(network, place, layer)
    network.__dict__[_NOTE], network.__dict__[_SHORT] = tuple(left), tuple(short)
    missed = [text for text in short if text not in approximate]
    if missed:
        more = f"; and {len(missed) - 3} more layers" if len(missed) > 3 else ""
        warnings.warn(f"{'; '.join(missed[:3])}{more}.", AccuracyWarning, stacklevel=2)
    return network


def converted(model: nn.Module) -> Conversion:
    """The norm-only layers of a model, and what `norm_only` left as it was."""
    model = unwrap(need_model("converted", model))
    layers = [
        ConvertedLayer(
            places, type(module).__name__, module.frozen.choice.features, module.frozen.shape,
            module.frozen.n_features, module.frozen.n_frozen,
        )
        for module, places in places_of(model).items()
        if isinstance(module, NormOnlyLayer)
    ]  # fmt: skip
    left: tuple[Left, ...] = model.__dict__.get(_NOTE, ())
    return Conversion(tuple(layers), left, model.__dict__.get(_SHORT, ()))


def _convert(name: str, plain: Plain, choice: Choice, twin: NormOnlyLayer | None) -> NormOnlyLayer:
    """The layer for one place; a twin, whose weight was the same tensor, lends its gammas and frozen features."""
    try:
        if twin is None:
            layer = wrap(plain, dataclasses.replace(choice, layer=name))
        else:
            layer = wrap(plain, twin.frozen.choice, is_filled=False)
            layer.frozen, layer.gamma, layer.output_gamma = twin.frozen, twin.gamma, twin.output_gamma
    except UnknownNameError:
        raise
    except OnlynormError as why:
        raise type(why)(f"layer {name!r}: {why} Or name it in keep=.") from why
    for gamma in layer.gammas:
        gamma.requires_grad_(plain.weight.requires_grad)
    if layer.beta is not None and plain.bias is not None:
        layer.beta.requires_grad_(plain.bias.requires_grad)
    return layer


def _is_approximate(layer: NormOnlyLayer) -> bool:
    """Whether the layer was asked to have fewer features than weights."""
    return layer.frozen.n_features < layer.frozen.equations and layer.output_gamma is None


@torch.no_grad()
def _shortfall(name: str, layer: NormOnlyLayer, weight: Tensor) -> list[str]:
    """How far the layer starts from its weight, where that is more than rounding."""
    frozen = layer.frozen
    if weight.is_meta:
        return []
    wanted = weight.detach().double()
    size = float(torch.linalg.vector_norm(wanted))
    error = float(torch.linalg.vector_norm(layer.weight.double() - wanted)) / (size if size > 0.0 else 1.0)
    allowed = torch.finfo(weight.dtype).eps ** 0.5
    if error <= allowed:
        return []
    return [
        f"layer {name!r} needs to start within {allowed:.1e} of its weight; {frozen.choice.features} features start "
        f"{error:.1e} off it, {frozen.n_features} of them for {frozen.equations} weights. Take a larger excess or "
        "density, or other features such as id_cond"
    ]


def _kept(names: tuple[str, ...], keep: Iterable[str] | str) -> set[str]:
    """The layers that the patterns name, themselves or by a module around them."""
    kept: set[str] = set()
    cure = "Write keep='head' or keep=['blocks.1.*']."
    patterns = [keep] if isinstance(keep, str) else need_items("keep", keep, cure=cure)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ConversionError(f"keep needs names of layers; got a {type(pattern).__name__}. {cure}")
        hits = [name for name in names if fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")]
        if not hits:
            raise UnknownNameError("keep", pattern, names)
        kept.update(hits)
    return kept


def _refusal(module: nn.Module) -> str:
    """Why this layer cannot be converted; empty if it can."""
    if any(getattr(module, hooks) for hooks in _HOOKS):
        return "has hooks, which may change what it computes and would be lost"
    return ""


def _tied_elsewhere(network: nn.Module, chosen: dict[str, Plain]) -> dict[str, str]:
    """The chosen layers whose weight or bias also belongs to a module that stays, with the reason."""
    inside = set(chosen.values())
    owners = {
        parameter: name
        for name, module in network.named_modules()
        if module not in inside
        for parameter in module.parameters(recurse=False)
    }
    found = {}
    for name, plain in chosen.items():
        owner = next((owners[p] for p in plain.parameters(recurse=False) if p in owners), None)
        if owner is not None:
            found[name] = f"shares a tensor with {owner!r}, which stays as it is"
    return found


def _need_ordinary(model: nn.Module) -> None:
    """Raises where all layers are norm-only already, which a missing Linear alone would not tell."""
    modules = list(model.modules())
    if any(isinstance(m, NormOnlyLayer) for m in modules) and not any(type(m) in PLAIN for m in modules):
        raise ConversionError(
            f"norm_only needs Linear or Conv layers; got a {type(model).__name__} that is norm-only already. "
            "Convert the ordinary model, or train this one."
        )


def _need_enough(model: nn.Module, chosen: dict[str, Plain], left: list[Left], strict: bool) -> None:
    if not chosen or (strict and left):
        listed = "; ".join(str(item) for item in left[:5]) or "all layers are in keep="
        what = "a model of Linear and Conv layers and norms" if chosen else "at least one layer to convert"
        raise ConversionError(
            f"norm_only needs {what}; got {type(model).__name__} with {len(left)} other modules with weights: "
            f"{listed}. Leave strict and keep out, or pass another model."
        )
