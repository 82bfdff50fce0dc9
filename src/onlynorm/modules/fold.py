"""`fold` merges batch norms into the preceding layers for inference; `unfold` reverts it.

    folded = fold(model.eval())          # or fold(model, inputs) with a batch
    print(folded)                        # what was folded, what was not, and why
    folded.network(x)
    model = unfold(folded.network)       # bit-identical to the original

Without inputs, pairs of layers and norms are found by symbolic tracing. With inputs they are found in a forward pass,
which works for every model, and the outputs on that batch are compared in float64. The folded copy stores the original
tensors outside its state dict, so that `unfold` is exact.

`fold_network` merges batch norms that directly follow a layer:

    weight' = scale weight,    bias' = scale bias + shift

A norm follows a layer if its input is the output tensor of the layer in a forward pass. That tensor may be used
elsewhere too, so a norm is folded only if the output of the network stays the same.
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

from onlynorm.display import Result
from onlynorm.errors import ConversionError, ShapeError, first_line
from onlynorm.modules.affine import Affine, BatchNorm, to_affine
from onlynorm.modules.affine import from_affine as unfold_norm
from onlynorm.modules.affine import to_affine as fold_norm
from onlynorm.modules.layers import CONVOLUTIONS, LINEAR
from onlynorm.modules.norms import FoldedNorm, need_module, norm_kind, norm_modules
from onlynorm.modules.walk import (
    Inputs,
    as_inputs,
    cast,
    copy_network,
    has_hooks,
    need_batch,
    need_evaluation,
    need_model,
    need_open,
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
"""Largest relative change of the output by folding, in float64: rounding, with room for depth."""
NOT_AFTER = "its input is not the output of a Linear or Conv"


@dataclass(frozen=True)
class Folded(Result):
    """A copy of a network with folded norms, and the names of those norms."""

    network: nn.Module
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{len(self.names)} norms folded: {', '.join(self.names)}" if self.names else "no norm could be folded"


def fold_network(model: nn.Module, inputs: Inputs) -> Folded:
    """A copy of the network in which every batch norm that directly follows a Linear or Conv is folded into it.

    A norm is folded if layer and norm are called once and the output on the batch changes by at most 1e-10 in float64.

    Theory: giannou2023:prop-1

    Examples:
        >>> import torch
        >>> from onlynorm.models import mlp
        >>> from onlynorm.modules import fold_network
        >>> folded = fold_network(mlp((8, 16, 4), norm="batch").eval(), torch.rand(5, 8))
        >>> folded.names
        ('1',)
    """
    model, inputs = need_model("folding", model), as_inputs("folding", inputs)
    need_evaluation("folding", model)
    need_batch("folding", model, inputs)
    dtype, given = precision(model), cast(inputs, torch.float64)
    plain = copy_network(model).double()
    pairs = same_pairs(plain, given, pairs=find_pairs(plain, given)[0])
    return Folded(cast_network(fold_pairs(plain, pairs), dtype), tuple(norm for _, norm in pairs))


def cast_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The network with its real floating-point tensors in this dtype; `Module.to` would make complex buffers real."""
    network._apply(lambda x: x.to(dtype) if x.is_floating_point() else x)
    return network


def same_pairs(network: nn.Module, inputs: tuple[Tensor, ...], *, pairs: list[Pair]) -> list[Pair]:
    """The pairs that can be folded without changing the output of the network in float64."""
    before = outputs_of(run(network, inputs))
    if not before:
        raise ConversionError("folding needs a network that returns tensors; got none. Return its logits.")

    def is_same(tried: list[Pair]) -> bool:
        folded = fold_pairs(copy_network(network), tried)
        return relative_difference(outputs_of(run(folded, inputs)), before) <= SAME

    if is_same(pairs):
        return pairs
    same: list[Pair] = []  # some layer output is used elsewhere as well
    for pair in pairs:
        if is_same([*same, pair]):
            same.append(pair)
    return same


def fold_pairs(network: nn.Module, pairs: list[Pair]) -> nn.Module:
    """Folds the norms of these pairs in place and returns the network; dtypes do not change."""
    places = places_of(network)
    for name, norm_name in pairs:
        layer, norm = network.get_submodule(name), network.get_submodule(norm_name)
        assert isinstance(layer, LINEAR + CONVOLUTIONS)
        assert isinstance(norm, BatchNorm)
        weight, bias = folded_weights(layer.weight, layer.bias, norm=norm)
        is_trained = layer.weight.requires_grad
        layer.weight, layer.bias = (nn.Parameter(t, requires_grad=is_trained) for t in (weight, bias))
        for place in places[norm]:
            swap(network, place, FoldedNorm(2 if isinstance(layer, LINEAR) else None))
    return network


def folded_weights(weight: Tensor, bias: Tensor | None, *, norm: BatchNorm) -> tuple[Tensor, Tensor]:
    """(weight, bias) of a layer with the norm folded in, computed in float64."""
    map = to_affine(copy.deepcopy(norm).double())
    scale, shift = map.weight.detach(), map.bias.detach()
    new_weight = scale.reshape(-1, *(1,) * (weight.ndim - 1)) * weight.detach().double()
    new_bias = shift if bias is None else shift + scale * bias.detach().double()
    return new_weight.to(weight.dtype), new_bias.to(weight.dtype)


def find_pairs(network: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[list[Pair], dict[str, str]]:
    """(pairs, reasons): layers directly followed by a norm, and for other norms with statistics why they are not.

    Layer and norm are called once, and the tensor between them is not modified.
    """
    returned: dict[str, list[tuple[Tensor, int]]] = {}
    received: dict[str, list[tuple[Tensor, int]]] = {}
    hooks = []
    for name, module in network.named_modules():
        if type(module) in LINEAR + CONVOLUTIONS:

            def record_output(layer: nn.Module, _: Any, output: Tensor, name: str = name) -> None:
                returned.setdefault(name, []).append((output, output._version))

            hooks.append(module.register_forward_hook(record_output))
        elif isinstance(module, BatchNorm) and module.running_var is not None:
            received[name] = []

            def record_input(norm: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
                received[name].append((args[0], args[0]._version))

            hooks.append(module.register_forward_pre_hook(record_input))
    try:
        run(network, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    sources = {id(tensor): (name, version) for name, calls in returned.items() for tensor, version in calls}
    pairs, reasons = [], {}
    for norm, calls in received.items():
        name, version = sources.get(id(calls[0][0]), ("", 0)) if calls else ("", 0)
        if len(calls) != 1:
            reasons[norm] = f"it is called {len(calls)} times"
        elif not name:
            reasons[norm] = NOT_AFTER
        elif len(returned[name]) != 1:
            reasons[norm] = f"its layer {name} is called {len(returned[name])} times"
        elif calls[0][1] != version:  # an in-place activation returns the same tensor with other values
            reasons[norm] = f"the output of {name} is modified in place before it"
        elif has_hooks(network.get_submodule(norm)):
            reasons[norm] = f"{norm} has hooks, which would see other values"
        elif network.get_submodule(name)._forward_hooks:
            reasons[norm] = f"{name} has hooks, which would see other values"
        elif calls[0][0].ndim != network.get_submodule(name).weight.ndim:
            # After a Linear with more than two dimensions the channels of the norm are not the features.
            reasons[norm] = f"it normalizes another dimension than {name}"
        else:
            pairs.append((name, norm))
    return pairs, reasons


KEPT, TUNING = "onlynorm_folded", "onlynorm_tuning"
"""Attributes of a model with its original tensors before folding, and with the selection of `only_norms`."""
FORWARDS = (BatchNorm.forward, nn.SyncBatchNorm.forward)
Wiring = tuple[list[Pair], dict[str, str]]


@dataclass(frozen=True)
class KeptNorm(Result):
    """A norm that was not folded, and why."""

    name: str
    class_name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.class_name}): {self.reason}"


@dataclass(frozen=True)
class FoldedModel(Result):
    """A copy of a model for inference; `folded` has the pairs (layer, norm), `kept` the norms not folded."""

    network: nn.Module
    folded: tuple[Pair, ...]
    kept: tuple[KeptNorm, ...]

    def __str__(self) -> str:
        lines = [f"{len(self.folded)} of {len(self.folded) + len(self.kept)} norms are folded into preceding layers"]
        lines += [f"  {norm} in {layer}" for layer, norm in self.folded]
        return "\n".join([*lines, *(f"  kept: {norm}" for norm in self.kept)])


@dataclass(frozen=True)
class _Original:
    """The original tensors and norm of a folded pair."""

    layer: str
    weight: Tensor
    bias: Tensor | None
    places: tuple[str, ...]
    norm: BatchNorm


@overload
def fold(model: BatchNorm) -> Affine:  # type: ignore[overload-overlap]
    """The affine map equivalent to a batch norm in evaluation mode.

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> from onlynorm.models import mlp
        >>> model, inputs = mlp((8, 16, 4), norm="batch").eval(), torch.rand(5, 8)
        >>> folded = on.fold(model)
        >>> folded.network
        Sequential(
          (0): Linear(in_features=8, out_features=16, bias=True)
          (1): FoldedNorm()
          (2): ReLU()
          (3): Linear(in_features=16, out_features=4, bias=True)
        )
        >>> torch.allclose(folded.network(inputs), model(inputs), atol=1e-5)
        True
    """


@overload
def fold(model: nn.Module, inputs: Tensor | tuple[Tensor, ...] | None = None) -> FoldedModel:
    """A copy of a model with batch norms folded into the preceding layers."""


def fold(model: nn.Module, inputs: Tensor | tuple[Tensor, ...] | None = None) -> Affine | FoldedModel:
    """A copy of a model with batch norms folded into the preceding layers; for a single batch norm, its affine map.

    A norm is folded if it directly follows a Linear or Conv, both are called once, and nothing else uses the tensor
    between them. All other norms are listed with the reason. Pass `inputs`, a batch or a tuple of batches, for a model
    that cannot be traced. The model must be in evaluation mode and is not modified.

    Theory: giannou2023:prop-1

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> from onlynorm.models import mlp
        >>> model, inputs = mlp((8, 16, 4), norm="batch").eval(), torch.rand(5, 8)
        >>> folded = on.fold(model)
        >>> folded.network
        Sequential(
          (0): Linear(in_features=8, out_features=16, bias=True)
          (1): FoldedNorm()
          (2): ReLU()
          (3): Linear(in_features=16, out_features=4, bias=True)
        )
        >>> torch.allclose(folded.network(inputs), model(inputs), atol=1e-5)
        True
    """
    model = need_module("folding", model)
    need_open("folding", model)
    if isinstance(model, BatchNorm):
        return fold_norm(model)
    need_evaluation("folding", model)
    if model.__dict__.get(KEPT, {}).get("originals"):
        raise ConversionError("folding needs a model that is not folded; got a folded one. Call unfold(model) first.")
    if inputs is not None:
        inputs = tuple(as_tensor("inputs", x) for x in (inputs if isinstance(inputs, tuple) else (inputs,)))
    pairs, reasons = _trace(model) if inputs is None else _observe(model, inputs)
    obstacles = {norm: _obstacle(model, layer, norm) for layer, norm in pairs}
    pairs = [pair for pair in pairs if not obstacles[pair[1]]]
    network = copy_network(model)
    places = places_of(network)
    originals = [_original(network, layer, norm, places) for layer, norm in pairs]
    # The selection of `only_norms` names tensors that no longer exist; `unfold` restores it.
    network.__dict__[KEPT] = {"originals": originals, TUNING: network.__dict__.pop(TUNING, None) if pairs else None}
    fold_pairs(network, pairs)
    folded = {norm for _, norm in pairs}
    kept = [
        KeptNorm(name, type(norm).__name__, _own_reason(norm) or obstacles.get(name) or reasons.get(name, NOT_AFTER))
        for name, norm, _ in norm_modules(model)
        if name not in folded and not isinstance(norm, FoldedNorm)
    ]
    return FoldedModel(network, tuple(pairs), tuple(kept))


@overload
def unfold(
    model: Affine, *, mean: Float[Tensor, " feat"], variance: Float[Tensor, " feat"], axes: int = 2
) -> BatchNorm:
    """A batch norm with these statistics, equivalent to the affine map.

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> from onlynorm.models import mlp
        >>> model = mlp((8, 16, 4), norm="batch").eval()
        >>> again = on.unfold(on.fold(model))
        >>> all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters()))
        True
    """


@overload
def unfold(model: nn.Module | FoldedModel) -> nn.Module:
    """A copy of a folded model with the original layers and norms, bit for bit."""


def unfold(
    model: nn.Module | FoldedModel,
    *,
    mean: Float[Tensor, " feat"] | None = None,
    variance: Float[Tensor, " feat"] | None = None,
    axes: int = 2,
) -> nn.Module:
    """A copy of a folded model with the original layers and norms, bit for bit.

    For an `Affine` map, an equivalent batch norm with these statistics and `axes` spatial dimensions.

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> from onlynorm.models import mlp
        >>> model = mlp((8, 16, 4), norm="batch").eval()
        >>> again = on.unfold(on.fold(model))
        >>> all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters()))
        True
    """
    if isinstance(model, Affine):
        if mean is None or variance is None:
            raise ShapeError("unfold needs a mean and a variance to convert an affine map; got none. Pass both.")
        return unfold_norm(model, mean=mean, variance=variance, axes=axes)
    network = copy_network(need_module("unfold", model.network if isinstance(model, FoldedModel) else model))
    kept = network.__dict__.pop(KEPT, None)
    if kept is None:
        raise ConversionError(
            f"unfold needs a model that fold made; got {type(network).__name__} without its original tensors. State "
            "dicts do not contain them: use the folded model itself, or the original model."
        )
    for original in kept["originals"]:
        _restore(network, original)
    if kept[TUNING] is not None:
        network.__dict__[TUNING] = kept[TUNING]
    return network


def _original(network: nn.Module, layer: str, norm: str, places: dict[nn.Module, tuple[str, ...]]) -> _Original:
    module, follower = network.get_submodule(layer), network.get_submodule(norm)
    assert isinstance(module, LINEAR + CONVOLUTIONS)
    assert isinstance(follower, BatchNorm)
    return _Original(layer, module.weight, module.bias, places[follower], follower)


def _restore(network: nn.Module, original: _Original) -> None:
    layer = network.get_submodule(original.layer)
    assert isinstance(layer, LINEAR + CONVOLUTIONS)
    weight, bias = folded_weights(original.weight, original.bias, norm=original.norm)
    tolerance = 8.0 * torch.finfo(layer.weight.dtype).eps
    for now, then in ((layer.weight, weight), (layer.bias, bias)):
        if now is None or not torch.allclose(
            now.detach().to(then), then, rtol=tolerance, atol=tolerance * float(then.abs().max())
        ):
            raise ConversionError(
                f"unfold needs unmodified layers; {original.layer} changed since fold, and the change would be lost. "
                "Unfold first, then train or load."
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
    """Why a norm cannot be folded at all; empty if it can."""
    if not isinstance(norm, BatchNorm):
        is_batch = norm_kind(norm) == "batch"
        return "it is not a batch norm of torch" if is_batch else "it computes its statistics from every input"
    if norm.running_var is None or norm.running_mean is None:
        return "it has no running statistics"
    return "" if type(norm).forward in FORWARDS else "its class overrides forward"


def _obstacle(model: nn.Module, layer: str, norm: str) -> str:
    """Why a norm cannot be folded into this layer; empty if it can."""
    for name in (layer, norm):
        module: Any = model.get_submodule(name)
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{name} has hooks, which would see other values"
    return _own_reason(model.get_submodule(norm))


def _observe(model: nn.Module, inputs: Inputs) -> Wiring:
    """Pairs and reasons from a forward pass on the batch."""
    need_batch("folding", model, inputs)
    plain, given = copy_network(model).double(), cast(inputs, torch.float64)
    pairs, reasons = find_pairs(plain, given)
    same = same_pairs(plain, given, pairs=pairs)
    shared = {norm: f"the output would change: the output of {layer} is used elsewhere too" for layer, norm in pairs}
    return same, reasons | {norm: why for norm, why in shared.items() if norm not in {n for _, n in same}}


class _Tracer(fx.Tracer):
    """Traces only modules that contain batch norms; all others are leaves."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, BatchNorm) or not any(isinstance(child, BatchNorm) for child in m.modules())


def _trace(model: nn.Module) -> Wiring:
    """Pairs and reasons from a symbolic trace with default arguments."""
    copied = copy_network(model)  # forward may modify its module
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(copied.forward).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about defaults that a trace cannot check
            nodes = list(_Tracer().trace(copied, concrete_args=defaults).nodes)
    except Exception as error:  # forward may raise anything on proxies
        raise ConversionError(
            f"folding without inputs needs a traceable model; {type(model).__name__} is not: {first_line(error)}. "
            "Pass a batch: fold(model, inputs)."
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
            reasons[name] = NOT_AFTER
        elif len(calls[names[layer]]) != 1 or len(places[layer]) != 1:
            reasons[name] = f"its layer {names[layer]} is used more than once"
        elif len(before.users) != 1 or names[layer] in used:
            reasons[name] = f"{names[layer]} or its output is used elsewhere too"
        elif len(layer.weight) != module.num_features:
            reasons[name] = f"it normalizes another dimension than {names[layer]}"
        else:
            pairs.append((names[layer], name))
    return pairs, reasons


def _called(model: nn.Module, node: object) -> nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d | None:
    """The layer that this node calls, None for other nodes."""
    if not isinstance(node, fx.Node) or node.op != "call_module":
        return None
    module = model.get_submodule(str(node.target))
    return module if isinstance(module, LINEAR + CONVOLUTIONS) and type(module) in LINEAR + CONVOLUTIONS else None
