"""Repairs by gradient ascent on the ratio r: as in the paper, with a target and a watch, and of all layers at once.

A step moves a weight W along the gradient of r by a fixed share of its norm: r does not depend on the scale of W, so
its raw gradient says nothing about how far to go. Rank alone is not enough: the more of it is forced upon a network
with ReLUs, the faster gradients grow on their way back. Hence the watch: `rank_ascent` asks for less rank until the
gradient ratio is within bounds.

Theory: daneshmand2020:lemma-1
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from onlynorm.modules.untouched import untouched
from onlynorm.rank.measures import rank_ratio
from onlynorm.rank.repairs.rescale import clear_bias, scale_layers, set_scale
from onlynorm.rank.repairs.visits import LayerModule, Place, Route, output_with, signal
from onlynorm.seeds import seeded

PAPER_STEP, STEP = 0.02, 0.005
"""Shares of its norm by which a weight moves in one step."""
MOST_STEPS = 100
N_TARGETS = 8
"""How often the watch halves what a target asks for beyond rank one."""


def paper_ascent(route: Route, *, n_steps: int, seed: int) -> None:
    """So many stochastic steps on r in every hidden layer, one layer after the other, in place; nothing is rescaled.

    Each step sees half of the batch. The paper gives numbers of steps, 25 and 75, but not their size: it is ours.
    """
    dice = seeded(seed)

    def change(place: Place, received: Tensor) -> None:
        n = len(received)
        for _ in range(0 if place.is_last else n_steps):
            chosen = torch.randperm(n, generator=dice)[: max(2, n // 2)]
            _, slope = _rank_and_slope(place.layer, received[chosen.to(received.device)])
            _move(place.layer.weight, slope, PAPER_STEP)

    route.visit(change)


def rank_ascent(
    route: Route,
    *,
    target: float | None,
    max_ratio: float,
    n_steps: int,
    ratio: Callable[[], float],
) -> tuple[float, float]:
    """(share, gradient ratio) of what was reached: the share of the target rank with a gradient ratio within bounds.

    Layer by layer: zero bias, steps until r has reached its target (sqrt of the width if none is given), unit scale.
    If the gradient then grows more than `max_ratio` from the last hidden layer to the first, everything is done again
    with half the rank beyond one.
    """
    start = [place.layer.weight.detach().clone() for place in route.free]
    share, reached = 1.0, math.nan
    for turn in range(N_TARGETS):
        share = 0.5**turn if turn < N_TARGETS - 1 else 0.0
        with torch.no_grad():
            for place, weight in zip(route.free, start, strict=True):
                place.layer.weight.copy_(weight)
        change = functools.partial(_ascend, target=target, share=share, n_steps=n_steps)
        route.visit(change)
        reached = ratio()
        if reached <= max_ratio:
            break
    return share, reached


def whole_ascent(
    route: Route,
    *,
    target: float | None,
    max_ratio: float,
    n_steps: int,
    ratio: Callable[[], float],
) -> tuple[int, float]:
    """(steps, gradient ratio): all layers climb together, from unit scales, up to their targets or `max_ratio`.

    The ascent is on the sum of ln r over the hidden layers that are below their targets; a step that drives the
    gradient ratio beyond `max_ratio` is taken back and ends it.
    """
    with torch.no_grad():
        for place in route.free:
            clear_bias(place.layer)
    scale_layers(route)
    reached = ratio()
    for step in range(n_steps):
        slopes = _whole_slopes(route, target)
        if not slopes:
            return step, reached
        before = [place.layer.weight.detach().clone() for place in route.free]
        with torch.no_grad():
            for place in route.free:
                if place.name in slopes:
                    _move(place.layer.weight, slopes[place.name], STEP)
        scale_layers(route)
        now = ratio()
        if now > max_ratio:
            with torch.no_grad():
                for place, weight in zip(route.free, before, strict=True):
                    place.layer.weight.copy_(weight)
            return step, reached
        reached = now
    return n_steps, reached


def _ascend(place: Place, received: Tensor, *, target: float | None, share: float, n_steps: int) -> None:
    clear_bias(place.layer)
    for _ in range(0 if place.is_last else n_steps):
        r, slope = _rank_and_slope(place.layer, received)
        if r >= _aim(place, target, share):
            break
        _move(place.layer.weight, slope, STEP)
    set_scale(place, received)


def _aim(place: Place, target: float | None, share: float) -> float:
    return 1.0 + share * ((place.weight.shape[0] ** 0.5 if target is None else target) - 1.0)


def _rank_and_slope(layer: LayerModule, received: Tensor) -> tuple[float, Tensor]:
    """r of what the layer gives, and its gradient with respect to the weight."""
    weight = layer.weight.detach().requires_grad_(True)
    with torch.enable_grad():
        r = rank_ratio(signal(layer, output_with(layer, weight, received)))
        (slope,) = torch.autograd.grad(r, weight)
    return r.item(), slope


def _move(weight: Tensor, slope: Tensor, share: float) -> None:
    size = torch.linalg.vector_norm(slope)
    if float(size) > 0.0:
        weight.add_(slope * (share * torch.linalg.vector_norm(weight) / size))


def _whole_slopes(route: Route, target: float | None) -> dict[str, Tensor]:
    """The gradient of the sum of ln r over hidden layers below their targets, by layer; nothing if there is none."""
    ranks: dict[str, Tensor] = {}
    hooks = []
    for place in route.hidden:

        def read(layer: LayerModule, _: object, output: Tensor, name: str = place.name) -> None:
            ranks.setdefault(name, rank_ratio(signal(layer, output)))

        hooks.append(place.layer.register_forward_hook(read))
    try:
        with untouched(route.model, is_training=True, tensors=route.inputs):
            route.model(*route.inputs)
            low = [ranks[p.name].log() for p in route.hidden if ranks[p.name].item() < _aim(p, target, 1.0)]
            if not low:
                return {}
            slopes = torch.autograd.grad(
                torch.stack(low).sum(), [place.layer.weight for place in route.hidden], allow_unused=True
            )
    finally:
        for hook in hooks:
            hook.remove()
    return {place.name: slope for place, slope in zip(route.hidden, slopes, strict=True) if slope is not None}
