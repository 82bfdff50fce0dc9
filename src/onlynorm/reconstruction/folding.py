"""`fold_network`: batch norms that directly follow a layer become part of it.

    weight' = scale weight,    bias' = scale bias + shift

Which norm follows which layer is seen in a forward pass: the norm receives the very tensor that the layer returned.
What a layer returned may be used elsewhere too, so a fold is kept only if the network's output stays the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onlynorm.errors import ConversionError
from onlynorm.reconstruction.calls import (
    Inputs,
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
from onlynorm.reconstruction.places import places_of, swap
from onlynorm.reconstruction.target import CONVOLUTIONS, LINEAR

SAME = 1e-10
"""Largest relative change of the output, in float64, that a fold may leave: rounding, with room for depth."""


class FoldedNorm(nn.Identity):
    """Where a norm was before it became part of the layer in front of it."""


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
    need_evaluation("folding", network)
    need_batch("folding", network, inputs)
    dtype, given = precision(network), cast(inputs, torch.float64)
    plain = copy_network(network).double()
    before = outputs_of(run(plain, given))
    if not before:
        raise ConversionError("folding needs a network that returns tensors to compare; got none. Return its logits.")

    def is_same(pairs: list[tuple[str, str]]) -> bool:
        return relative_difference(outputs_of(run(_fold_pairs(plain, pairs), given)), before) <= SAME

    kept = _find_pairs(plain, given)
    if not is_same(kept):  # some output is used elsewhere as well: find out which
        found, kept = kept, []
        for pair in found:
            if is_same([*kept, pair]):
                kept.append(pair)
    return Folded(_fold_pairs(plain, kept).to(dtype), tuple(norm for _, norm in kept))


def folded_places(network: nn.Module) -> list[str]:
    """Every place of the network at which a norm was folded away."""
    return [n for n, module in network.named_modules(remove_duplicate=False) if isinstance(module, FoldedNorm)]


def _fold_pairs(network: nn.Module, pairs: list[tuple[str, str]]) -> nn.Module:
    """A copy with the norms of these (layer, norm) folded."""
    folded = copy_network(network)
    places = places_of(folded)
    for name, norm_name in pairs:
        layer, norm = folded.get_submodule(name), folded.get_submodule(norm_name)
        assert isinstance(layer, LINEAR + CONVOLUTIONS)
        assert isinstance(norm, BatchNorm)
        map = fold(norm)
        scale, shift = map.weight.detach(), map.bias.detach()
        weight = scale.reshape(-1, *(1,) * (layer.weight.ndim - 1)) * layer.weight.detach()
        bias = shift if layer.bias is None else shift + scale * layer.bias.detach()
        layer.weight, layer.bias = nn.Parameter(weight), nn.Parameter(bias)
        for place in places[norm]:
            swap(folded, place, FoldedNorm())
    return folded


def _find_pairs(network: nn.Module, inputs: tuple[Tensor, ...]) -> list[tuple[str, str]]:
    """(layer, norm) wherever a norm receives what a layer returned, unchanged, and both are called once."""
    returned: dict[str, list[tuple[Tensor, int]]] = {}
    received: dict[str, list[tuple[Tensor, int]]] = {}
    hooks = []
    for name, module in network.named_modules():
        if type(module) in LINEAR + CONVOLUTIONS:

            def leave(layer: nn.Module, _: Any, output: Tensor, name: str = name) -> None:
                returned.setdefault(name, []).append((output, output._version))

            hooks.append(module.register_forward_hook(leave))
        elif isinstance(module, BatchNorm) and module.running_var is not None:

            def enter(norm: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
                received.setdefault(name, []).append((args[0], args[0]._version))

            hooks.append(module.register_forward_pre_hook(enter))
    try:
        run(network, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    left = {id(calls[0][0]): (name, *calls[0]) for name, calls in returned.items() if len(calls) == 1}
    pairs = []
    for norm, calls in received.items():
        name, tensor, version = left.get(id(calls[0][0]), ("", None, 0))
        # An activation that works in place would hand on the same tensor with other numbers, hence the version.
        if tensor is None or len(calls) != 1 or calls[0][1] != version:
            continue
        # Channels second in both: a norm behind a Linear with leading axes works along another axis.
        layer = network.get_submodule(name)
        if tensor.ndim == layer.weight.ndim:
            pairs.append((name, norm))
    return pairs
