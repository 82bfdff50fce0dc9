"""`to_norm_only`: a copy of a model whose Linear and Conv layers have norms as their only parameters.

The copy is for training from scratch and starts as the same function, or the closest that its features can represent.
Tied modules and weights stay tied. Modules that cannot be converted are unchanged and listed:

    model = to_norm_only(model, features="id_cond", density=0.2, seed=0)
    print(converted(model))
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onlynorm.display import Result
from onlynorm.errors import AccuracyWarning, ConversionError, OnlynormError, UnknownNameError
from onlynorm.frozen.norm_only import PLAIN, NormOnlyLayer, Plain, wrap
from onlynorm.frozen.options import FrozenOptions
from onlynorm.modules import need_model, unwrap
from onlynorm.modules.layers import Left, find_layers
from onlynorm.modules.walk import copy_network, places_of, replace_layer
from onlynorm.validate import need_flag, need_seed

_NOTE = "_onlynorm_left"  # hyperparameters do not begin with an underscore
_SHORT = "_onlynorm_short"


@dataclass(frozen=True)
class ConvertedLayer(Result):
    """One norm-only layer: its places, class, features, the shape of its weight, and its sizes."""

    names: tuple[str, ...]
    kind: str
    features: str
    shape: tuple[int, ...]
    n_features: int
    n_frozen: int

    def __str__(self) -> str:
        return (
            f"{' = '.join(self.names)} ({self.kind}): {self.features}, weight {' x '.join(map(str, self.shape))}, "
            f"{self.n_features:,} features, {self.n_frozen:,} frozen entries"
        )


@dataclass(frozen=True)
class Conversion(Result):
    """The norm-only layers of a model, and the modules with weights that were not converted.

    `warnings` lists layers whose initial weight differs from that of the model, with the error.
    """

    layers: tuple[ConvertedLayer, ...]
    left: tuple[Left, ...]
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [f"{len(self.layers)} norm-only layers", *(f"  {layer}" for layer in self.layers)]
        left = (f"left: {item}" for item in self.left)
        return "\n".join([*rows, *left, *(f"warning: {text}" for text in self.warnings)])


def to_norm_only(
    model: nn.Module,
    *,
    features: str = "id_cond",
    excess: float | None = None,
    density: float | None = None,
    n_blocks: int = 1,
    spectrum: float | Tensor | None = None,
    shared_column: int = 0,
    seed: int = 0,
    keep: Iterable[str] | str = (),
    strict: bool = False,
) -> nn.Module:
    """A copy of the model whose Linear and Conv layers train only norms, with the same outputs.

    `features` to `shared_column` are the fields of `FrozenOptions`. Every layer has independent frozen features, drawn
    from `seed` and its name. `keep` names layers that are not converted, with wildcards: "head", "blocks.11.*".
    `strict` raises if other modules with weights than norms would be left. With fewer features than weights, or a
    `density`, the copy starts with the closest weights that the features can represent. Forward hooks of a layer are
    moved to its replacement.

    If the relative error of a layer's initial weight exceeds sqrt(eps) of its dtype, it is listed in
    `converted(copy).warnings`. An `AccuracyWarning` is also issued, unless the options give fewer features than weights
    (`excess` below 1, or a mask): the features are then too sparse, too heavy-tailed or too few.

    Theory: random_features:thm-3.1, random_features:conclusion

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> from onlynorm.models import mlp
        >>> model, inputs = mlp((8, 16, 4)), torch.rand(5, 8)
        >>> norm_only = on.to_norm_only(model)
        >>> torch.allclose(norm_only(inputs), model(inputs), atol=1e-5)
        True
        >>> type(norm_only[0]).__name__
        'NormOnlyLinear'
    """
    options = FrozenOptions(
        features=features, excess=excess, density=density, n_blocks=n_blocks, spectrum=spectrum,
        shared_column=shared_column,
    )  # fmt: skip
    seed, model = need_seed(seed), unwrap(need_model("to_norm_only", model))
    _need_ordinary(model)
    network = copy_network(model)
    found = find_layers(network, strict=need_flag("strict", strict), keep=keep, is_trained=True, what="to_norm_only")
    made: dict[Tensor, NormOnlyLayer] = {}
    shifts: dict[Tensor, nn.Parameter | None] = {}
    short: list[str] = []
    missed: list[str] = []
    for target in found.layers:
        plain: Any = network.get_submodule(target.name)
        layer = _convert(target.name, plain, options, seed, made.get(plain.weight))
        if plain.weight not in made:
            made[plain.weight] = layer
            text = _shortfall(target.name, layer, plain.weight)
            short += [text] if text else []
            missed += [text] if text and not _is_approximate(layer) else []
        if plain.bias is not None:
            layer.beta = shifts.setdefault(plain.bias, layer.beta)
        network = replace_layer(network, target.names, layer)
    network.__dict__[_NOTE], network.__dict__[_SHORT] = found.left, tuple(short)
    if missed:
        more = f"; and {len(missed) - 3} more layers" if len(missed) > 3 else ""
        warnings.warn(f"{'; '.join(missed[:3])}{more}.", AccuracyWarning, stacklevel=2)
    return network


def converted(model: nn.Module) -> Conversion:
    """The norm-only layers of a model, and what `to_norm_only` left as it was.

    Examples:
        >>> import onlynorm as on
        >>> from onlynorm.frozen import converted
        >>> from onlynorm.models import mlp
        >>> model = on.to_norm_only(mlp((8, 16, 4)), keep="2")
        >>> [layer.names for layer in converted(model).layers]
        [('0',)]
    """
    model = unwrap(need_model("converted", model))
    layers = [
        ConvertedLayer(
            places, type(module).__name__, module.frozen.features.name, module.frozen.shape,
            module.frozen.n_features, module.frozen.n_frozen,
        )
        for module, places in places_of(model).items()
        if isinstance(module, NormOnlyLayer)
    ]  # fmt: skip
    left: tuple[Left, ...] = model.__dict__.get(_NOTE, ())
    return Conversion(tuple(layers), left, model.__dict__.get(_SHORT, ()))


def _convert(name: str, plain: Plain, options: FrozenOptions, seed: int, twin: NormOnlyLayer | None) -> NormOnlyLayer:
    """The norm-only layer of one place; it shares gammas and features with `twin`, a layer with the same weight."""
    try:
        layer = wrap(plain, options, seed=seed, layer=name, is_filled=twin is None)
    except UnknownNameError:
        raise
    except OnlynormError as why:
        raise type(why)(f"layer {name!r}: {why} Or name it in keep=.") from why
    if twin is not None:
        layer.frozen, layer.gamma, layer.output_gamma = twin.frozen, twin.gamma, twin.output_gamma
    for gamma in layer.gammas:
        gamma.requires_grad_(plain.weight.requires_grad)
    if layer.beta is not None and plain.bias is not None:
        layer.beta.requires_grad_(plain.bias.requires_grad)
    return layer


def _is_approximate(layer: NormOnlyLayer) -> bool:
    """Whether the layer has fewer features than weights."""
    return layer.frozen.n_features < layer.frozen.equations and layer.output_gamma is None


@torch.no_grad()
def _shortfall(name: str, layer: NormOnlyLayer, weight: Tensor) -> str:
    """A message with the error of the initial weight; empty if it is only rounding."""
    frozen = layer.frozen
    if weight.is_meta:
        return ""
    wanted = weight.detach().double()
    size = float(torch.linalg.vector_norm(wanted))
    error = float(torch.linalg.vector_norm(layer.weight.double() - wanted)) / (size if size > 0.0 else 1.0)
    allowed = torch.finfo(weight.dtype).eps ** 0.5
    if error <= allowed:
        return ""
    return (
        f"layer {name!r} needs an initial weight within {allowed:.1e}; got a relative error of {error:.1e} with "
        f"{frozen.n_features} {frozen.features.name} features for {frozen.equations} weights. Use a larger excess or "
        "density, or other features such as id_cond"
    )


def _need_ordinary(model: nn.Module) -> None:
    """Raises if the model is norm-only already."""
    modules = list(model.modules())
    if any(isinstance(m, NormOnlyLayer) for m in modules) and not any(type(m) in PLAIN for m in modules):
        raise ConversionError(
            f"to_norm_only needs Linear or Conv layers; got a {type(model).__name__} that is norm-only already. "
            "Convert the original model, or train this one."
        )
