"""What each layer of a network receives on a batch, and in which box it lies if the network's inputs lie in one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.errors import ConversionError, ShapeError, ValueRangeError
from onlynorm.reconstruction.calls import run
from onlynorm.reconstruction.intervals import propagate
from onlynorm.reconstruction.ranges import Box, Seen
from onlynorm.reconstruction.target import CONVOLUTIONS, TargetLayer


def see(
    network: nn.Module, layers: tuple[TargetLayer, ...], inputs: tuple[Tensor, ...], box: Box | None
) -> dict[str, Seen]:
    """What every layer sees, by name; layers that the batch does not reach, or reach with NaN, are refused."""
    received = record_inputs(network, layers, inputs)
    for layer in layers:
        if layer.name not in received:
            raise ConversionError(
                f"a layer needs to be called by the network to be calibrated; {layer.name!r} was not on this batch. "
                "Remove the unused layer, or pass inputs that reach it."
            )
        if not bool(torch.isfinite(received[layer.name]).all()):
            raise ValueRangeError(
                f"a layer needs finite inputs to be calibrated; {layer.name!r} receives NaN or infinity on this batch. "
                "Check the network's output on it: something in front of that layer overflows."
            )
    if box is None:
        return {name: Seen(values) for name, values in received.items()}
    if len(inputs) != 1:
        raise ValueRangeError(f"a box needs a network with one input; got {len(inputs)}. Leave box out.")
    if bool(is_outside(inputs[0], box).any()):
        raise ValueRangeError(
            "certified ranges need a box that holds the calibration batch; got inputs outside. Widen the box, or pass "
            "inputs from inside it."
        )
    boxes = propagate(network, [layer.name for layer in layers], box)
    return {name: Seen(values, boxes[name]) for name, values in received.items()}


def record_inputs(network: nn.Module, layers: tuple[TargetLayer, ...], inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """What each layer receives on the batch; the calls of a layer that is used several times are joined."""
    seen: dict[str, list[Tensor]] = {}
    hooks = []
    for layer in layers:

        def keep(_: nn.Module, args: tuple[Tensor, ...], named: dict[str, Any], name: str = layer.name) -> None:
            if not args:
                raise ConversionError(
                    f"a layer needs its input as a positional argument; {name!r} is called with "
                    f"{', '.join(named) or 'nothing'}. Call it as layer(x): a block takes its place."
                )
            seen.setdefault(name, []).append(args[0].detach())

        hooks.append(network.get_submodule(layer.name).register_forward_pre_hook(keep, with_kwargs=True))
    try:
        run(network, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: _join(network.get_submodule(name), calls) for name, calls in seen.items()}


def _join(layer: nn.Module, calls: list[Tensor]) -> Tensor:
    """The inputs of several calls as one batch."""
    if len(calls) == 1:
        return calls[0]
    if not isinstance(layer, CONVOLUTIONS):
        return torch.cat([call.reshape(-1, call.shape[-1]) for call in calls])
    axes = layer.weight.ndim - 2
    batches = [call if call.ndim == axes + 2 else call[None] for call in calls]
    largest = [max(batch.shape[2 + axis] for batch in batches) for axis in range(axes)]
    # Smaller images get zeros behind them: the features then see everything they see in either call, and some zeros.
    padded = []
    for batch in batches:
        missing = [most - size for most, size in zip(largest, batch.shape[2:], strict=True)]
        padded.append(functional.pad(batch, [n for behind in reversed(missing) for n in (0, behind)]))
    return torch.cat(padded)


def is_outside(inputs: Tensor, box: Box) -> Tensor:
    """Per sample: whether any of its numbers lies outside the box."""
    if inputs.shape[1:] != box.low.shape or box.high.shape != box.low.shape:
        raise ShapeError(
            f"a box needs the shape of one sample, {tuple(inputs.shape[1:])}; got {tuple(box.low.shape)} and "
            f"{tuple(box.high.shape)}. Pass Box(low, high) without the axis of the samples."
        )
    low, high = (bound.to(inputs.device, inputs.dtype) for bound in (box.low, box.high))
    return ((inputs < low) | (inputs > high)).reshape(len(inputs), -1).any(1)
