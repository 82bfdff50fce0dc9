"""Repairs by gradient ascent on the rank ratio r: as in the paper, with a bound on the gradient ratio, or jointly.

A step moves a weight W along the gradient of r by a fixed fraction of its norm: r does not depend on the scale of W, so
the size of its gradient does not give a step size. Rank alone is not enough: the higher the rank of ReLU layers, the
faster gradients grow in the backward pass. `rank_ascent` therefore lowers the target until the gradient ratio is within
its bound.

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
from onlynorm.rank.repairs.visits import LayerModule, Route, RouteLayer, output_with, signal
from onlynorm.seeds import seeded

PAPER_STEP, STEP = 0.02, 0.005
"""Step sizes, as fractions of the norm of the weight."""
MAX_STEPS = 100
N_TARGETS = 8
"""Number of targets that are tried; each halves the rank above one."""


def paper_ascent(route: Route, *, n_steps: int, seed: int) -> None:
    """Takes `n_steps` stochastic ascent steps on r in every hidden layer, one layer after the other, without rescaling.

    Each step uses half of the batch. The paper gives the number of steps, 25 or 75, but not the step size.
    """
    generator = seeded(seed)

    def change(layer: RouteLayer, received: Tensor) -> None:
        n = len(received)
        for _ in range(0 if layer.is_last else n_steps):
            chosen = torch.randperm(n, generator=generator)[: max(2, n // 2)]
            _, gradient = _rank_and_gradient(layer.module, received[chosen.to(received.device)])
            _move(layer.module.weight, gradient, PAPER_STEP)

    route.visit(change)


def rank_ascent(
    route: Route,
    *,
    target: float | None,
    max_ratio: float,
    n_steps: int,
    ratio: Callable[[], float],
) -> tuple[float, float]:
    """(fraction, gradient ratio): the fraction of the target rank at which the gradient ratio is within its bound.

    Layer by layer: zero bias, steps until r reaches its target (by default the square root of the width), unit scale.
    If the gradient ratio of the first to the last hidden layer then exceeds `max_ratio`, this is repeated with half the
    rank above one.
    """
    start = [layer.module.weight.detach().clone() for layer in route.free]
    fraction, reached = 1.0, math.nan
    for attempt in range(N_TARGETS):
        fraction = 0.5**attempt if attempt < N_TARGETS - 1 else 0.0
        with torch.no_grad():
            for layer, weight in zip(route.free, start, strict=True):
                layer.module.weight.copy_(weight)
        change = functools.partial(_ascend, target=target, fraction=fraction, n_steps=n_steps)
        route.visit(change)
        reached = ratio()
        if reached <= max_ratio:
            break
    return fraction, reached


def whole_ascent(
    route: Route,
    *,
    target: float | None,
    max_ratio: float,
    n_steps: int,
    ratio: Callable[[], float],
) -> tuple[int, float]:
    """(steps, gradient ratio) of a joint ascent of all layers, from unit scales, up to their targets or `max_ratio`.

    The objective is the sum of ln r over the hidden layers below their targets. The ascent stops before the step that
    exceeds `max_ratio`.
    """
    with torch.no_grad():
        for layer in route.free:
            clear_bias(layer.module)
    scale_layers(route)
    reached = ratio()
    for step in range(n_steps):
        gradients = _joint_gradients(route, target)
        if not gradients:
            return step, reached
        before = [layer.module.weight.detach().clone() for layer in route.free]
        with torch.no_grad():
            for layer in route.free:
                if layer.name in gradients:
                    _move(layer.module.weight, gradients[layer.name], STEP)
        scale_layers(route)
        now = ratio()
        if now > max_ratio:
            with torch.no_grad():
                for layer, weight in zip(route.free, before, strict=True):
                    layer.module.weight.copy_(weight)
            return step, reached
        reached = now
    return n_steps, reached


def _ascend(layer: RouteLayer, received: Tensor, *, target: float | None, fraction: float, n_steps: int) -> None:
    clear_bias(layer.module)
    for _ in range(0 if layer.is_last else n_steps):
        r, gradient = _rank_and_gradient(layer.module, received)
        if r >= _target_rank(layer, target, fraction):
            break
        _move(layer.module.weight, gradient, STEP)
    set_scale(layer, received)


def _target_rank(layer: RouteLayer, target: float | None, fraction: float) -> float:
    return 1.0 + fraction * ((layer.weight.shape[0] ** 0.5 if target is None else target) - 1.0)


def _rank_and_gradient(module: LayerModule, received: Tensor) -> tuple[float, Tensor]:
    """r of the layer's output, and its gradient with respect to the weight."""
    weight = module.weight.detach().requires_grad_(True)
    with torch.enable_grad():
        r = rank_ratio(signal(module, output_with(module, weight, received)))
        (gradient,) = torch.autograd.grad(r, weight)
    return r.item(), gradient


def _move(weight: Tensor, gradient: Tensor, fraction: float) -> None:
    size = torch.linalg.vector_norm(gradient)
    if float(size) > 0.0:
        weight.add_(gradient * (fraction * torch.linalg.vector_norm(weight) / size))


def _joint_gradients(route: Route, target: float | None) -> dict[str, Tensor]:
    """The gradient of the sum of ln r over hidden layers below their targets, by layer; empty if there are none."""
    ranks: dict[str, Tensor] = {}
    hooks = []
    for layer in route.hidden:

        def read(module: LayerModule, _: object, output: Tensor, name: str = layer.name) -> None:
            ranks.setdefault(name, rank_ratio(signal(module, output)))

        hooks.append(layer.module.register_forward_hook(read))
    try:
        with untouched(route.model, is_training=True, tensors=route.inputs):
            route.model(*route.inputs)
            low = [ranks[p.name].log() for p in route.hidden if ranks[p.name].item() < _target_rank(p, target, 1.0)]
            if not low:
                return {}
            gradients = torch.autograd.grad(
                torch.stack(low).sum(), [layer.module.weight for layer in route.hidden], allow_unused=True
            )
    finally:
        for hook in hooks:
            hook.remove()
    return {
        layer.name: gradient for layer, gradient in zip(route.hidden, gradients, strict=True) if gradient is not None
    }
