"""`look`: rank and scale of the signal in every layer, and the gradient that reaches it. What repairs are judged by.

The gradient of a layer is the norm of the gradient of the loss with respect to its output. Without targets the loss is
a random projection of the outputs: it says as well how gradients grow or shrink on their way back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onlynorm.errors import ConversionError, ShapeError, ValueRangeError
from onlynorm.modules import Loss, Output, default_loss, find_output
from onlynorm.modules.walk import outputs_of
from onlynorm.rank.measures import rank_ratio
from onlynorm.rank.repairs.rescale import root_mean_square
from onlynorm.rank.repairs.visits import LayerModule, Route, as_trained, signal
from onlynorm.seeds import seeded


@dataclass(frozen=True)
class LayerState:
    """What one layer gives: the ratio r of its output, its root mean square, and the gradient that reaches it."""

    name: str
    r: float
    scale: float
    gradient: float


@dataclass(frozen=True)
class Lesson:
    """The loss of a model's outputs: `default_loss` or a given one; without both, a projection drawn by the seed."""

    targets: Any = None
    loss: Loss | None = None
    seed: int = 0
    output: Output = find_output

    def value(self, returned: Any) -> Tensor:
        """The loss of what a model returned."""
        if self.targets is not None or self.loss is not None:
            return _need_scalar((self.loss or default_loss)(self.output(returned), self.targets))
        outputs = [output for output in outputs_of(returned) if output.requires_grad]
        if not outputs:
            raise ConversionError(
                f"a repair needs a model that returns tensors; got {type(returned).__name__} without one that "
                "depends on its weights. Return them in a tuple or a dict."
            )
        dice = seeded(self.seed)
        parts = [(x * torch.randn(x.shape, generator=dice).to(x)).sum() / max(1, *x.shape[:1]) for x in outputs]
        return torch.stack(parts).sum()


def _need_scalar(value: Any) -> Tensor:
    if isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad and value.is_floating_point():
        return value
    got = f"shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
    raise ShapeError(
        f"a repair needs a loss that is one real number and depends on the weights; got {got}. Take its mean, and "
        "do not detach it."
    )


def look(route: Route, lesson: Lesson) -> tuple[LayerState, ...]:
    """The state of every layer, from one forward and one backward pass; the model is left as it was."""
    found: dict[str, tuple[float, float]] = {}
    squares = {place.name: 0.0 for place in route.places}
    hooks = []
    for place in route.places:

        def read(layer: LayerModule, _: Any, output: Tensor, name: str = place.name) -> None:
            def collect(gradient: Tensor) -> None:
                squares[name] += float(gradient.double().square().sum())

            if name not in found:
                found[name] = _measure(layer, output.detach(), name)
            if output.requires_grad:
                output.register_hook(collect)

        hooks.append(place.layer.register_forward_hook(read))
    try:
        with as_trained(route.model, route.inputs):
            value = lesson.value(route.model(*route.inputs))
            torch.autograd.grad(value, [place.layer.weight for place in route.places], allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    return tuple(LayerState(name, *found[name], math.sqrt(squares[name])) for name in found)


def gradient_ratio(states: Sequence[LayerState]) -> float:
    """The gradient at the first layer over that at the last hidden one; one is ideal, NaN with fewer than two."""
    hidden = states[:-1]
    if len(hidden) < 2:
        return math.nan
    first, last = hidden[0].gradient, hidden[-1].gradient
    return first / last if last > 0.0 else (math.inf if first > 0.0 else 0.0)


def harm(states: Sequence[LayerState], route: Route) -> float:
    """How far a network is from passing everything on: |ln(gradient ratio)| plus the worst loss of rank, ln(r0 / r).

    r0 is what the first layer gives, at most the root of the width: more rank than that is not asked for. Zero is
    ideal; a signal or a gradient that has died counts as infinitely bad.
    """
    hidden = list(zip(states, route.places, strict=True))[:-1]
    ratio = gradient_ratio(states)
    if len(hidden) < 2:
        return 0.0
    if ratio in (0.0, math.inf) or any(math.isnan(state.r) for state, _ in hidden):
        return math.inf
    lost = [math.log(min(hidden[0][0].r, place.weight.shape[0] ** 0.5) / state.r) for state, place in hidden]
    return abs(math.log(ratio)) + max(0.0, *lost)


def _measure(layer: LayerModule, output: Tensor, name: str) -> tuple[float, float]:
    """(r, root mean square) of an output; r is NaN where all of it is zero."""
    if not bool(torch.isfinite(output).all()):
        raise ValueRangeError(
            f"a repair needs finite signals; layer {name!r} gives NaN or infinity. Look at its weights and at the "
            "layers before it: a repair starts from finite ones."
        )
    H = signal(layer, output)
    return (float(rank_ratio(H)) if bool(H.any()) else math.nan), root_mean_square(H)
