"""`fold`: a tuned model for inference, its batch norms part of the layers before them, and `unfold` the way back.

    folded = fold(model.eval())          # or fold(model, inputs) with a batch
    print(folded)                        # what was folded, what was not, and why
    folded.network(x)
    model = unfold(folded.network)       # the same bits as before

Without inputs the wiring is read from a symbolic trace of the model. With inputs it is seen in a pass, which works for
every model, and the outputs on that batch are compared in float64. The folded copy carries the original numbers of what
was folded, outside its state dict, so that the way back is exact.

`fold_network`: batch norms that directly follow a layer become part of it.

    weight' = scale weight,    bias' = scale bias + shift

Which norm follows which layer is seen in a forward pass: the norm receives the very tensor that the layer returned.
What a layer returned may be used elsewhere too, so a fold is kept only if the network's output stays the same.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from dataclasses import dataclass
from typing import Any, TypeAlias, overload

import torch
from jaxtyping import Float
from torch import Tensor, fx, nn

from onlynorm.errors import ConversionError, ShapeError
from onlynorm.modules.affine import Affine, BatchNorm, to_affine
from onlynorm.modules.affine import from_affine as unfold_norm
from onlynorm.modules.affine import to_affine as fold_norm
from onlynorm.modules.layers import CONVOLUTIONS, LINEAR
from onlynorm.modules.norms import FoldedNorm, need_module, norm_kind, norm_modules
from onlynorm.modules.validate import need_batch, need_evaluation, need_model
from onlynorm.modules.walk import (
    Inputs,
    as_inputs,
    cast,
    copy_network,
    has_hooks,
    outputs_of,
    places_of,
    precision,
    relative_difference,
    run,
    swap,
)
from onlynorm.validate import as_tensor

Pair: TypeAlias = tuple[str, str]
"""The places of a layer and of the norm that follows it."""
SAME = 1e-10
"""Largest relative change of the output, in float64, that a fold may leave: rounding, with room for depth."""
NOT_BEHIND = "what it receives is not what a Linear or Conv returned"


@dataclass(frozen=True)
class Folded:
    """A copy of a network without the norms that were folded, and the places where they were."""

    network: nn.Module
    names: tuple[str, ...]


def fold_network(network: nn.Module, inputs: Inputs) -> Folded:
    """A copy in which every batch norm that directly follows a Linear or Conv is folded into it.

    A norm is folded if layer and norm are called once and the output on the batch stays the same to 1e-10 in float64.

    Theory: giannou2023:prop-1
    """
    network, inputs = need_model("folding", network), as_inputs("folding", inputs)
    need_evaluation("folding", network)
    need_batch("folding", network, inputs)
    dtype, given = precision(network), cast(inputs, torch.float64)
    plain = copy_network(network).double()
    kept = same_pairs(plain, given, pairs=find_pairs(plain, given)[0])
    return Folded(fold_pairs(plain, kept).to(dtype), tuple(norm for _, norm in kept))


def same_pairs(network: nn.Module, inputs: tuple[Tensor, ...], *, pairs: list[Pair]) -> list[Pair]:
    """The pairs that can be folded together with the network's output, in float64, left as it is."""
    before = outputs_of(run(network, inputs))
    if not before:
        raise ConversionError("folding needs a network that returns tensors to compare; got none. Return its logits.")

    def is_same(tried: list[Pair]) -> bool:
        folded = fold_pairs(copy_network(network), tried)
        return relative_difference(outputs_of(run(folded, inputs)), before) <= SAME

    if is_same(pairs):
        return pairs
    kept: list[Pair] = []  # some output is used elsewhere as well: find out which
    for pair in pairs:
        if is_same([*kept, pair]):
            kept.append(pair)
    return kept


def fold_pairs(network: nn.Module, pairs: list[Pair]) -> nn.Module:
    """The network itself with the norms of these pairs folded; every layer keeps its precision."""
    places = places_of(network)
    for name, norm_name in pairs:
        layer, norm = network.get_submodule(name), network.get_submodule(norm_name)
        assert isinstance(layer, LINEAR + CONVOLUTIONS)
        assert isinstance(norm, BatchNorm)
        weight, bias = folded_numbers(layer.weight, layer.bias, norm=norm)
        is_trained = layer.weight.requires_grad
        layer.weight, layer.bias = (nn.Parameter(t, requires_grad=is_trained) for t in (weight, bias))
        for place in places[norm]:
            swap(network, place, FoldedNorm(2 if isinstance(layer, LINEAR) else None))
    return network


def folded_numbers(weight: Tensor, bias: Tensor | None, *, norm: BatchNorm) -> tuple[Tensor, Tensor]:
    """(weight, bias) of a layer with the norm folded in, computed in float64 and rounded once."""
    map = to_affine(copy.deepcopy(norm).double())
    scale, shift = map.weight.detach(), map.bias.detach()
    made = scale.reshape(-1, *(1,) * (weight.ndim - 1)) * weight.detach().double()
    moved = shift if bias is None else shift + scale * bias.detach().double()
    return made.to(weight.dtype), moved.to(weight.dtype)


def find_pairs(network: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[list[Pair], dict[str, str]]:
    """(layer, norm) wherever a norm receives what a layer returned, and why each other norm with statistics does not.

    Layer and norm are called once and nothing changes the tensor between them.
    """
    returned: dict[str, list[tuple[Tensor, int]]] = {}
    received: dict[str, list[tuple[Tensor, int]]] = {}
    hooks = []
    for name, module in network.named_modules():
        if type(module) in LINEAR + CONVOLUTIONS:

            def leave(layer: nn.Module, _: Any, output: Tensor, name: str = name) -> None:
                returned.setdefault(name, []).append((output, output._version))

            hooks.append(module.register_forward_hook(leave))
        elif isinstance(module, BatchNorm) and module.running_var is not None:
            received[name] = []

            def enter(norm: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
                received[name].append((args[0], args[0]._version))

            hooks.append(module.register_forward_pre_hook(enter))
    try:
        run(network, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    makers = {id(tensor): (name, version) for name, calls in returned.items() for tensor, version in calls}
    pairs, reasons = [], {}
    for norm, calls in received.items():
        name, version = makers.get(id(calls[0][0]), ("", 0)) if calls else ("", 0)
        if len(calls) != 1:
            reasons[norm] = f"it is called {len(calls)} times"
        elif not name:
            reasons[norm] = NOT_BEHIND
        elif len(returned[name]) != 1:
            reasons[norm] = f"its layer {name} is called {len(returned[name])} times"
        elif calls[0][1] != version:  # an activation that works in place hands on the same tensor with other numbers
            reasons[norm] = f"what {name} returned is changed in place before it"
        elif has_hooks(network.get_submodule(norm)):
            reasons[norm] = f"{norm} has hooks, which would see other numbers"
        elif network.get_submodule(name)._forward_hooks:
            reasons[norm] = f"{name} has hooks, which would see other numbers"
        elif calls[0][0].ndim != network.get_submodule(name).weight.ndim:
            # Channels second in both: a norm after a Linear with leading axes works along another axis.
            reasons[norm] = f"it works along another axis than {name}"
        else:
            pairs.append((name, norm))
    return pairs, reasons


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
        for name, norm, _ in norm_modules(model)
        if name not in folded and not isinstance(norm, FoldedNorm)
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
            "dict does not hold them: load it into a newly folded model, or use the model that was folded."
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
