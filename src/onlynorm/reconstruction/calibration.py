"""What each layer of a network receives on a batch, and in which box it lies if the network's inputs lie in one.

Calibrated ranges are checked by leave-one-out (`HeldBack`), for which every row of a layer's input must be assigned to
the sample it comes from. Layers may see samples on any axis, several rows of each, or several calls, so the assignment
is not assumed: the last sample is passed through the network alone, and the axis along which its rows are found again
in the batch is the axis of the samples. Exact copies of a sample count as one, since a copy would hide its absence.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.errors import ConversionError, OnlynormError, ShapeError, ValueRangeError
from onlynorm.reconstruction.calls import run
from onlynorm.reconstruction.intervals import propagate
from onlynorm.reconstruction.ranges import Box, HeldBack, Seen
from onlynorm.reconstruction.target import CONVOLUTIONS, TargetLayer

CLOSE = 1e-6
"""Relative difference up to which rows of the batch are those of a sample that was passed alone."""


def see(
    network: nn.Module,
    layers: tuple[TargetLayer, ...],
    inputs: tuple[Tensor, ...],
    box: Box | None,
    *,
    hold_back: bool = False,
) -> dict[str, Seen]:
    """What every layer sees, by name; layers that the batch does not reach, or reach with NaN, are refused.

    `hold_back` prepares the check of calibrated ranges; certified ones need none.
    """
    calls = record_calls(network, layers, inputs)
    received = _join_calls(network, calls)
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
        held = _held_back(network, layers, inputs, calls) if hold_back else {}
        return {name: Seen(values, held_back=held.get(name)) for name, values in received.items()}
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
    return _join_calls(network, record_calls(network, layers, inputs))


def record_calls(
    network: nn.Module, layers: tuple[TargetLayer, ...], inputs: tuple[Tensor, ...], *, copies: bool = False
) -> dict[str, list[Tensor]]:
    """What each layer receives on the batch, call by call; `copies` of it, or else the tensors themselves.

    Where the network changes one of these in place later on, it is run again for copies.
    """
    seen: dict[str, list[Tensor]] = {}
    versions: list[tuple[Tensor, int]] = []
    hooks = []
    for layer in layers:

        def keep(_: nn.Module, args: tuple[Tensor, ...], named: dict[str, Any], name: str = layer.name) -> None:
            if not args:
                raise ConversionError(
                    f"a layer needs its input as a positional argument; {name!r} is called with "
                    f"{', '.join(named) or 'nothing'}. Call it as layer(x): a block takes its place."
                )
            received = args[0].detach()
            copies_now = copies or received.is_inference()
            seen.setdefault(name, []).append(received.clone() if copies_now else received)
            if not copies_now:
                versions.append((received, received._version))

        hooks.append(network.get_submodule(layer.name).register_forward_pre_hook(keep, with_kwargs=True))
    try:
        run(network, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    if any(received._version != version for received, version in versions):
        return record_calls(network, layers, inputs, copies=True)
    return seen


def count_samples(inputs: tuple[Tensor, ...]) -> int:
    """Distinct samples of a batch: those that differ in at least one input."""
    return _distinct(inputs).n_distinct


@dataclass(frozen=True)
class _Distinct:
    """Every sample's number among the distinct ones."""

    numbers: Tensor
    n_distinct: int


def _distinct(inputs: tuple[Tensor, ...]) -> _Distinct:
    n_samples = len(inputs[0]) if inputs[0].ndim else 1
    by_sample = [x for x in inputs if x.ndim and len(x) == n_samples]
    found: dict[bytes, int] = {}
    numbers = []
    for i in range(n_samples):
        digest = hashlib.sha256()
        for x in by_sample:
            digest.update(x[i].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        numbers.append(found.setdefault(digest.digest(), len(found)))
    return _Distinct(torch.tensor(numbers, device=inputs[0].device), len(found))


def _held_back(
    network: nn.Module, layers: tuple[TargetLayer, ...], inputs: tuple[Tensor, ...], calls: dict[str, list[Tensor]]
) -> dict[str, HeldBack]:
    """The leave-one-out check of every layer whose rows can be assigned to samples."""
    distinct = _distinct(inputs)
    if distinct.n_distinct < 2:
        return {}
    n_samples = len(inputs[0])
    last = tuple(x[-1:] if x.ndim and len(x) == n_samples else x for x in inputs)
    try:
        alone = record_calls(network, layers, last)
    except OnlynormError:  # the first axis is not that of the samples
        return {}
    held = {}
    for name, batches in calls.items():
        layer, singles = network.get_submodule(name), alone.get(name, [])
        if len(singles) != len(batches):
            continue
        rows = [_sample_of_rows(layer, *pair, n_samples) for pair in zip(batches, singles, strict=True)]
        known = [row for row in rows if row is not None]
        if len(known) == len(rows):
            held[name] = HeldBack(distinct.numbers[torch.cat(known)], distinct.n_distinct)
    return held


def _sample_of_rows(layer: nn.Module, batch: Tensor, alone: Tensor, n_samples: int) -> Tensor | None:
    """The sample of each row of one call, or None where the rows of the last sample are not found in the batch."""
    if batch.ndim != alone.ndim:
        return None
    axes = range(batch.ndim - 1)
    if isinstance(layer, CONVOLUTIONS):
        axes = range(1 if batch.ndim == layer.weight.ndim else 0)
    room = CLOSE * float(alone.abs().max())
    for axis in axes:
        size = alone.shape[axis]
        if batch.shape[axis] != n_samples * size or not alone.numel():
            continue
        for sizes, part in (((n_samples, size), axis), ((size, n_samples), axis + 1)):
            rows = batch.unflatten(axis, sizes).select(part, n_samples - 1)
            if rows.shape == alone.shape and torch.allclose(rows, alone, rtol=CLOSE, atol=room):
                along = torch.arange(n_samples, device=batch.device)
                along = along.repeat_interleave(size) if part == axis else along.repeat(size)
                if isinstance(layer, CONVOLUTIONS):
                    return along
                shape = [-1 if i == axis else 1 for i in range(batch.ndim - 1)]
                return along.reshape(shape).expand(batch.shape[:-1]).flatten()
    return None


def _join_calls(network: nn.Module, calls: dict[str, list[Tensor]]) -> dict[str, Tensor]:
    return {name: _join(network.get_submodule(name), listed) for name, listed in calls.items()}


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
