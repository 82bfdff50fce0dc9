"""`fold`: a tuned model for inference, its batch norms part of the layers before them, and `unfold` the way back.

    folded = fold(model.eval())          # or fold(model, inputs) with a batch
    print(folded)                        # what was folded, what was not, and why
    folded.network(x)
    model = unfold(folded.network)       # the same bits as before

Without inputs the wiring is read from a symbolic trace of the model. With inputs it is seen in a pass, which works for
every model, and the outputs on that batch are compared in float64. The folded copy carries the original numbers of what
was folded, outside its state dict, so that the way back is exact.
"""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass
from typing import Any, overload

import torch
from jaxtyping import Float
from torch import Tensor, fx, nn

from onlynorm.errors import ConversionError, ShapeError
from onlynorm.modules import as_tensor
from onlynorm.reconstruction import Affine
from onlynorm.reconstruction.calls import Inputs, cast, copy_network, need_batch, need_evaluation
from onlynorm.reconstruction.folding import (
    NOT_BEHIND,
    FoldedNorm,
    Pair,
    find_pairs,
    fold_pairs,
    folded_numbers,
    same_pairs,
)
from onlynorm.reconstruction.norms import BatchNorm
from onlynorm.reconstruction.norms import fold as fold_norm
from onlynorm.reconstruction.norms import unfold as unfold_norm
from onlynorm.reconstruction.places import places_of, swap
from onlynorm.reconstruction.target import CONVOLUTIONS, LINEAR
from onlynorm.tuning.norms import need_module, norm_kind

KEPT, TUNING = "onlynorm_folded", "onlynorm_tuning"
"""Where a folded model keeps its original numbers, and where `only_norms` keeps its choice."""
FORWARDS = (BatchNorm.forward, nn.SyncBatchNorm.forward)
Wiring = tuple[list[Pair], dict[str, str]]


@dataclass(frozen=True)
class KeptNorm:
    """A norm that was not folded, and why."""

    name: str
    class_name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.class_name}): {self.reason}"


@dataclass(frozen=True)
class FoldedModel:
    """A copy of a model for inference; `folded` has (layer, norm) of every norm that is part of its layer now."""

    network: nn.Module
    folded: tuple[Pair, ...]
    kept: tuple[KeptNorm, ...]

    def __str__(self) -> str:
        lines = [f"{len(self.folded)} of {len(self.folded) + len(self.kept)} norms are part of the layers before them"]
        lines += [f"  {norm} in {layer}" for layer, norm in self.folded]
        return "\n".join([*lines, *(f"  kept: {norm}" for norm in self.kept)])


@dataclass(frozen=True)
class _Original:
    """What a fold replaced."""

    layer: str
    weight: Tensor
    bias: Tensor | None
    places: tuple[str, ...]
    norm: BatchNorm


@overload
def fold(model: BatchNorm) -> Affine:  # type: ignore[overload-overlap]
    """The map that a batch norm is in evaluation mode."""


@overload
def fold(model: nn.Module, inputs: Tensor | tuple[Tensor, ...] | None = None) -> FoldedModel:
    """A copy of a model whose batch norms are part of the layers before them."""


def fold(model: nn.Module, inputs: Tensor | tuple[Tensor, ...] | None = None) -> Affine | FoldedModel:
    """A copy of a model whose batch norms are part of the layers before them; of one batch norm, the map that it is.

    A norm is folded if it directly follows a Linear or Conv, both are called once, and nothing else sees what is
    between them. All others stay, and are listed with the reason. `inputs` is a batch, or a tuple of batches, for a
    model that cannot be traced. The model is in evaluation mode and is left alone.

    Theory: giannou2023:prop-1
    """
    model = need_module("folding", model)
    if isinstance(model, BatchNorm):
        return fold_norm(model)
    need_evaluation("folding", model)
    if model.__dict__.get(KEPT, {}).get("originals"):
        raise ConversionError(
            "folding needs a model that is not folded; this one is already. Call unfold(model) first."
        )
    if inputs is not None:
        inputs = tuple(as_tensor("inputs", x) for x in (inputs if isinstance(inputs, tuple) else (inputs,)))
    pairs, reasons = _trace(model) if inputs is None else _observe(model, inputs)
    obstacles = {norm: _obstacle(model, layer, norm) for layer, norm in pairs}
    pairs = [pair for pair in pairs if not obstacles[pair[1]]]
    network = copy_network(model)
    places = places_of(network)
    originals = [_original(network, layer, norm, places) for layer, norm in pairs]
    # The choice of norms to train names tensors that are gone: it comes back with them.
    network.__dict__[KEPT] = {"originals": originals, TUNING: network.__dict__.pop(TUNING, None) if pairs else None}
    fold_pairs(network, pairs)
    folded = {norm for _, norm in pairs}
    kept = [
        KeptNorm(name, type(norm).__name__, _own_reason(norm) or obstacles.get(name) or reasons.get(name, NOT_BEHIND))
        for name, norm in model.named_modules()
        if norm_kind(norm) is not None and name not in folded and not isinstance(norm, FoldedNorm)
    ]
    return FoldedModel(network, tuple(pairs), tuple(kept))


@overload
def unfold(
    model: Affine, *, mean: Float[Tensor, " feat"], variance: Float[Tensor, " feat"], axes: int = 2
) -> BatchNorm:
    """A batch norm with these statistics that is the map."""


@overload
def unfold(model: nn.Module | FoldedModel) -> nn.Module:
    """A copy of a folded model with its norms and layers as they were, to the last bit."""


def unfold(
    model: nn.Module | FoldedModel,
    *,
    mean: Float[Tensor, " feat"] | None = None,
    variance: Float[Tensor, " feat"] | None = None,
    axes: int = 2,
) -> nn.Module:
    """A copy of a folded model with its norms and layers as they were, to the last bit.

    Of an `Affine` map, a batch norm with these statistics over `axes` axes of positions that is the map.
    """
    if isinstance(model, Affine):
        if mean is None or variance is None:
            raise ShapeError("unfold needs a mean and a variance to make a batch norm of a map; got none. Pass both.")
        return unfold_norm(model, mean=mean, variance=variance, axes=axes)
    network = copy_network(need_module("unfold", model.network if isinstance(model, FoldedModel) else model))
    kept = network.__dict__.pop(KEPT, None)
    if kept is None:
        raise ConversionError(
            f"unfold needs a model that fold made; got {type(network).__name__} without its original numbers. A state "
            "dict does not hold them: load it into a model folded anew, or take the model that was folded."
        )
    for original in kept["originals"]:
        _put_back(network, original)
    if kept[TUNING] is not None:
        network.__dict__[TUNING] = kept[TUNING]
    return network


def _original(network: nn.Module, layer: str, norm: str, places: dict[nn.Module, tuple[str, ...]]) -> _Original:
    module, follower = network.get_submodule(layer), network.get_submodule(norm)
    assert isinstance(module, LINEAR + CONVOLUTIONS)
    assert isinstance(follower, BatchNorm)
    return _Original(layer, module.weight, module.bias, places[follower], follower)


def _put_back(network: nn.Module, original: _Original) -> None:
    layer = network.get_submodule(original.layer)
    assert isinstance(layer, LINEAR + CONVOLUTIONS)
    weight, bias = folded_numbers(original.weight, original.bias, norm=original.norm)
    room = 8.0 * torch.finfo(layer.weight.dtype).eps
    for now, then in ((layer.weight, weight), (layer.bias, bias)):
        if now is None or not torch.allclose(
            now.detach().to(then), then, rtol=room, atol=room * float(then.abs().max())
        ):
            raise ConversionError(
                f"unfold needs layers as fold left them; {original.layer} was changed since, and the change would be "
                "lost. Unfold first, then train or load."
            )
    like = layer.weight
    dtype = like.dtype if like.dtype != original.weight.dtype else None
    norm = original.norm.to(like.device, dtype)
    norm.train(layer.training)
    for place in original.places:
        swap(network, place, norm)
    layer.weight, layer.bias = original.weight, original.bias
    layer.to(like.device, dtype)


def _own_reason(norm: nn.Module) -> str:
    """Why a norm can be folded nowhere, or nothing."""
    if not isinstance(norm, BatchNorm):
        is_batch = norm_kind(norm) == "batch"
        return "it is none of torch's batch norms" if is_batch else "it takes its statistics from every input"
    if norm.running_var is None or norm.running_mean is None:
        return "it has no running statistics"
    return "" if type(norm).forward in FORWARDS else "its class has a forward of its own"


def _obstacle(model: nn.Module, layer: str, norm: str) -> str:
    """What keeps two modules that follow each other apart, or nothing."""
    for name in (layer, norm):
        module: Any = model.get_submodule(name)
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{name} has hooks, which would see other numbers"
    return _own_reason(model.get_submodule(norm))


def _observe(model: nn.Module, inputs: Inputs) -> Wiring:
    """The wiring as it is seen in a pass over the batch."""
    need_batch("folding", model, inputs)
    plain, given = copy_network(model).double(), cast(inputs, torch.float64)
    pairs, reasons = find_pairs(plain, given)
    kept = same_pairs(plain, given, pairs=pairs)
    lost = {norm: f"the output would change: what {layer} returned is used elsewhere too" for layer, norm in pairs}
    return kept, reasons | {norm: why for norm, why in lost.items() if norm not in {n for _, n in kept}}


class _Tracer(fx.Tracer):
    """Looks only into modules that hold batch norms: what others do inside does not matter."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, BatchNorm) or not any(isinstance(child, BatchNorm) for child in m.modules())


def _trace(model: nn.Module) -> Wiring:
    """The wiring of a call with the default arguments, without numbers."""
    copied = copy_network(model)  # a forward may write to its module
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(copied.forward).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of defaults that a trace cannot assert
            nodes = list(_Tracer().trace(copied, concrete_args=defaults).nodes)
    except Exception as error:  # whatever a forward does to what is no tensor
        raise ConversionError(
            f"folding without inputs needs a model that can be traced; {type(model).__name__} cannot: {error}. Pass a "
            "batch: fold(model, inputs)."
        ) from error
    names = {module: name for name, module in copied.named_modules()}
    calls: dict[str, list[fx.Node]] = {}
    for node in nodes:
        if node.op == "call_module":
            calls.setdefault(names[copied.get_submodule(str(node.target))], []).append(node)
    used = {str(node.target).rpartition(".")[0] for node in nodes if node.op == "get_attr"}
    places = places_of(copied)
    pairs: list[Pair] = []
    reasons: dict[str, str] = {}
    for name, module in copied.named_modules():
        if not isinstance(module, BatchNorm):
            continue
        found = calls.get(name, [])
        before = found[0].args[0] if len(found) == 1 and found[0].args else None
        layer = _called(copied, before)
        if len(found) != 1:
            reasons[name] = f"it is called {len(found)} times"
        elif layer is None or not isinstance(before, fx.Node):
            reasons[name] = NOT_BEHIND
        elif len(calls[names[layer]]) != 1 or len(places[layer]) != 1:
            reasons[name] = f"its layer {names[layer]} is used more than once"
        elif len(before.users) != 1 or names[layer] in used:
            reasons[name] = f"{names[layer]} or what it returned is used elsewhere too"
        elif len(layer.weight) != module.num_features:
            reasons[name] = f"it works along another axis than {names[layer]}"
        else:
            pairs.append((names[layer], name))
    return pairs, reasons


def _called(model: nn.Module, node: object) -> nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d | None:
    """The layer whose call the node is."""
    if not isinstance(node, fx.Node) or node.op != "call_module":
        return None
    module = model.get_submodule(str(node.target))
    return module if isinstance(module, LINEAR + CONVOLUTIONS) and type(module) in LINEAR + CONVOLUTIONS else None
