"""`fold_network`: batch norms that directly follow a layer become part of it.

    weight' = scale weight,    bias' = scale bias + shift

Which norm follows which layer is seen in a forward pass: the norm receives the very tensor that the layer returned.
What a layer returned may be used elsewhere too, so a fold is kept only if the network's output stays the same.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from onlynorm.errors import ConversionError, ShapeError
from onlynorm.modules import need_model
from onlynorm.reconstruction.calls import (
    Inputs,
    as_inputs,
    cast,
    copy_network,
    need_batch,
    need_evaluation,
    outputs_of,
    precision,
    relative_difference,
    run,
)
from onlynorm.reconstruction.norms import BatchNorm, fold
from onlynorm.reconstruction.places import has_hooks, places_of, swap
from onlynorm.reconstruction.target import CONVOLUTIONS, LINEAR

Pair: TypeAlias = tuple[str, str]
"""The places of a layer and of the norm that follows it."""
SAME = 1e-10
"""Largest relative change of the output, in float64, that a fold may leave: rounding, with room for depth."""
NOT_BEHIND = "what it receives is not what a Linear or Conv returned"


class FoldedNorm(nn.Identity):
    """Where a norm was before it became part of the layer in front of it.

    `n_axes` is how many axes its input has, if the norm would work along another one with more: behind a Linear.
    """

    def __init__(self, n_axes: int | None = None) -> None:
        super().__init__()
        self.n_axes = n_axes

    def forward(self, x: Tensor) -> Tensor:
        """The input, which the layer has already scaled and shifted."""
        if self.n_axes is not None and x.ndim != self.n_axes:
            raise ShapeError(
                f"a norm folded into a Linear needs inputs with {self.n_axes} axes; got {tuple(x.shape)}, which the "
                "norm would have scaled along another axis. Unfold the network, or reshape the inputs."
            )
        return x


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


def folded_places(network: nn.Module) -> list[str]:
    """Every place of the network at which a norm was folded away."""
    return [n for n, module in network.named_modules(remove_duplicate=False) if isinstance(module, FoldedNorm)]


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
    map = fold(copy.deepcopy(norm).double())
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
            # Channels second in both: a norm behind a Linear with leading axes works along another axis.
            reasons[norm] = f"it works along another axis than {name}"
        else:
            pairs.append((name, norm))
    return pairs, reasons
