"""`propagate`: bounds of the inputs of all layers of a network, for all network inputs in a box.

The network is run once on an `Interval`. Every torch function is replaced by a rule that encloses its values, so skip
connections, functional calls and in-place operations work without tracing. Functions without a rule raise an error.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from onlynorm.errors import ConversionError, ValueRangeError, first_line
from onlynorm.intervals.tensor import Ball, Box, Interval, IntervalError, ends
from onlynorm.modules.layers import CONVOLUTIONS
from onlynorm.modules.walk import without_compiling


@torch.inference_mode(False)
@torch.no_grad()
def propagate(network: nn.Module, names: Sequence[str], box: Box) -> dict[str, Box]:
    """The box of the inputs of each named layer, for all network inputs in `box`, with the shape of one sample.

    A layer that is called several times gets the smallest box that contains all calls.
    """
    low, high = (bound.detach().double() for bound in (box.low, box.high))
    seen: dict[str, list[Interval]] = {name: [] for name in names}
    inside: list[str] = []
    hooks = []
    for name, module in network.named_modules():
        if isinstance(module, torch.jit.ScriptModule):  # has no hooks
            continue
        hooks.append(module.register_forward_pre_hook(functools.partial(_enter, inside, name)))
        hooks.append(module.register_forward_hook(functools.partial(_leave, inside)))
    for name in names:
        record = functools.partial(_record, seen[name])
        hooks.append(network.get_submodule(name).register_forward_pre_hook(record, with_kwargs=True))
    try:
        with without_compiling():
            network(Interval(low[None].clone(), high[None].clone()))
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        where = f"module {inside[-1]!r}" if inside and inside[-1] else "the network's own forward"
        if isinstance(error, ValueRangeError):
            raise ValueRangeError(f"in {where}: {error}") from error
        text = (
            error
            if isinstance(error, IntervalError)
            else f"it needs to accept one sample of the box; got: {first_line(error)}"
        )
        raise ConversionError(f"in {where}: {text}") from error
    finally:
        for hook in hooks:
            hook.remove()
    return {name: _box_of(network.get_submodule(name), calls, name) for name, calls in seen.items()}


def _enter(inside: list[str], name: str, *_: Any) -> None:
    inside.append(name)


def _leave(inside: list[str], *_: Any) -> None:
    inside.pop()


def _record(calls: list[Interval], _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = args[0] if args else kwargs["input"]
    # Copied, since later in-place operations may modify it.
    low, high = (end.clone() for end in ends(given))
    if not bool(torch.isfinite(high - low).all()):
        raise ValueRangeError(
            "certified ranges need finite bounds; got an overflow before this layer. Shrink the box, or use "
            "calibrated ranges."
        )
    calls.append(Interval(low, high, ball=given.ball if isinstance(given, Interval) else None))


def _box_of(layer: nn.Module, calls: list[Interval], name: str) -> Box:
    """The box of all calls of a layer, without the batch dimension."""
    if not calls:
        raise ConversionError(
            f"a certified layer needs to be called by the network; {name!r} was not. Remove the unused layer."
        )
    batched = 2 + len(layer.kernel_size) if isinstance(layer, CONVOLUTIONS) else 2
    boxes = []
    for call in calls:
        if call.low.ndim < batched:
            boxes.append(Box(call.low, call.high, call.ball))
        elif call.low.shape[0] == 1:
            ball = call.ball
            known = None if ball is None else Ball(ball.centre[0], ball.radius)
            boxes.append(Box(call.low[0], call.high[0], known))
        else:  # positions in the batch dimension
            boxes.append(Box(call.low.amin(0), call.high.amax(0)))
    return boxes[0] if len(boxes) == 1 else _union(boxes, is_convolution=isinstance(layer, CONVOLUTIONS))


def _union(boxes: list[Box], *, is_convolution: bool) -> Box:
    shapes = [box.low.shape for box in boxes]
    if any(shape != shapes[0] for shape in shapes):
        # Over all positions, including zero padding of smaller images.
        axes = tuple(range(1, len(shapes[0]))) if is_convolution else None
        largest = [max(sizes) for sizes in zip(*shapes, strict=True)] if is_convolution else [shapes[0][-1]]
        boxes = [_hull(box, axes, largest) for box in boxes]
    low, high = torch.stack([box.low for box in boxes]), torch.stack([box.high for box in boxes])
    return Box(low.amin(0), high.amax(0))


def _hull(box: Box, axes: tuple[int, ...] | None, largest: list[int]) -> Box:
    if axes is None:
        return Box(box.low.reshape(-1, largest[0]).amin(0), box.high.reshape(-1, largest[0]).amax(0))
    low, high = box.low.amin(axes, keepdim=True), box.high.amax(axes, keepdim=True)
    return Box(low.clamp(max=0.0).expand(largest).clone(), high.clamp(min=0.0).expand(largest).clone())
