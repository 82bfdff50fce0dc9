"""Ranges of features, in which the activation must be linear, and statistics of their norms.

Calibrated ranges are those of a batch of inputs, widened by a margin on both sides. Certified ranges are computed by
interval arithmetic and hold for every input in a box. They lose precision where they are wider, see `certified_price`.
Outside its ranges the output of a reconstruction has no error bound; `count_outside` counts such samples.

The margins were measured on a pretrained ResNet-20 (CIFAR-10, he_normal features, five layers, eight batches of 64
images). On 500 test images the features leave their range by up to 1.5 times its width, extrapolated to all 336,000
features from a sample of thousands (1.0 for batches of 128, 0.8 for 256; 0.81 measured on all 46,080 features of one
layer). No sampled feature exceeded a margin of 2, but some did on 0.03 % of the images for batches of 32 and on 0.65 %
for 16. A margin of 2 instead of 0.25 increases the error of a ReLU block by a factor of 3.3 in float32 (a relative
error of 6e-6 to 9e-6). There is no effect in float64, where the residual of the solver dominates for margins up to
1,000, or for tanh and hardtanh.

Inputs of each layer of a network on a batch, and their box if the inputs of the network lie in a box.

Calibrated ranges are checked by leave-one-out (`LeaveOneOut`), which needs the sample of every row of a layer's input.
Layers may have the samples on any axis, several rows per sample, or several calls. So the last sample is passed through
the network alone, and the axis along which its rows are found in the batch is the batch axis. Identical samples count
as one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.errors import ConversionError, OnlynormError, ShapeError, ValueRangeError
from onlynorm.frozen.form import FrozenBlock
from onlynorm.frozen.pair import NormOnlyBlock
from onlynorm.intervals.propagate import propagate
from onlynorm.intervals.tensor import Box, Interval
from onlynorm.memory import release_free_memory
from onlynorm.modules import without_autocast
from onlynorm.modules.activations import Cubic, Ray, Segment, known
from onlynorm.modules.layers import CONVOLUTIONS, LINEAR, TargetLayer
from onlynorm.modules.walk import replace_layer, run

MARGIN = 1.0
"""Fraction of the calibrated width added on either side for smooth activations. A wider range costs precision there (a
sigmoid block loses 0.2 digits compared with 0.25), and an input outside only increases the error."""
FREE_MARGIN = 2.0
"""The same for piecewise linear activations, where a wider range costs only a larger shift."""
CERTIFIED_MARGIN = 2.0**-10
"""The same for certified ranges, for the errors of earlier layers and of float32."""
N_BOUNDS = 12
"""Number of temporary tensors of the size of the hidden activations while their bounds are computed."""


class LeaveOneOut:
    """Leave-one-out over the calibration samples: how far each sample is outside the ranges of all others.

    `samples` is the sample index of every row of a layer's input. The ranges without a sample follow from the two
    lowest and the two highest values of a feature, so one pass is enough. `needed` is the margin (see `widen`) by which
    the ranges of the other samples include each sample, the maximum over all features so far.

    A new input leaves the ranges of n samples at most as often as one of n samples leaves those of the other n - 1. The
    fraction of `outside` estimates that rate; its expected value is an upper bound.
    """

    def __init__(self, samples: Int[Tensor, " rows"], n_samples: int) -> None:
        self.samples, self.n_samples = samples, n_samples
        self.needed = torch.zeros(n_samples, dtype=torch.float64, device=samples.device)

    def extremes(
        self, lows: Float[Tensor, "rows feat"], highs: Float[Tensor, "rows feat"], *, first_row: int = 0
    ) -> tuple[Float[Tensor, "samples feat"], Float[Tensor, "samples feat"]]:
        """Lowest and highest value of every sample over its rows; infinite for samples without rows."""
        which = self.samples[first_row : first_row + len(lows), None].expand_as(lows)
        shape = (self.n_samples, lows.shape[1])
        low = lows.new_full(shape, torch.inf).scatter_reduce_(0, which, lows, "amin")
        high = highs.new_full(shape, -torch.inf).scatter_reduce_(0, which, highs, "amax")
        return low, high

    def update(self, low: Float[Tensor, "samples feat"], high: Float[Tensor, "samples feat"]) -> None:
        """Updates `needed` with some features, given the extremes of every sample."""
        lowest, highest = low.topk(2, 0, largest=False), high.topk(2, 0)
        at_bottom, at_top = lowest.indices[0], highest.indices[0]
        is_both = at_bottom == at_top
        # Only the sample with the lowest value can be below the others, and only the one with the highest above.
        for which, rest, low_of_others, high_of_others in (
            (
                at_bottom, lowest.values[1] - lowest.values[0], lowest.values[1],
                torch.where(is_both, highest.values[1], highest.values[0]),
            ),
            (
                at_top, highest.values[0] - highest.values[1],
                torch.where(is_both, lowest.values[1], lowest.values[0]), highest.values[1],
            ),
        ):  # fmt: skip
            margins = torch.where(rest > 0.0, rest / margin_unit(low_of_others, high_of_others), 0.0)
            self.needed.scatter_reduce_(0, which, margins.to(self.needed), "amax")

    def outside(self, margin: float) -> tuple[int, ...]:
        """Indices of the samples outside the ranges of the others, widened by the margin."""
        return tuple((self.needed > margin).nonzero().flatten().tolist())


@dataclass(frozen=True)
class LayerInputs:
    """Inputs of a layer on the calibration batch, and their box if ranges are certified.

    `leave_one_out` measures how often samples leave calibrated ranges; None if rows could not be assigned to samples.
    """

    inputs: Tensor
    box: Box | None = None
    leave_one_out: LeaveOneOut | None = None


@dataclass(frozen=True)
class FeatureRanges:
    """Per feature: lowest and highest value before the norm, including the margin, mean and variance."""

    low: Float[Tensor, " feat"]
    high: Float[Tensor, " feat"]
    mean: Float[Tensor, " feat"]
    variance: Float[Tensor, " feat"]


def find_ranges(block: NormOnlyBlock, received: LayerInputs, *, margin: float | None = None) -> FeatureRanges:
    """The ranges of the block's features: calibrated on the batch, or certified if a box is given.

    The default margin is `CERTIFIED_MARGIN` for a box, else `default_margin`.
    """
    if received.box is not None:
        _need_inside(block, received.inputs.double(), received.box)
        bounds = certify(block, received.box, margin=CERTIFIED_MARGIN if margin is None else margin)
        statistics = calibrate(block, received.inputs.double(), margin=0.0)
        return FeatureRanges(*bounds, statistics.mean, statistics.variance)
    chosen = default_margin(block.activation) if margin is None else margin
    return calibrate(block, received.inputs.double(), margin=chosen, leave_one_out=received.leave_one_out)


def default_margin(activation: nn.Module) -> float:
    """`FREE_MARGIN` for piecewise linear activations and tangents without offset, else `MARGIN`."""
    found = known(activation)
    is_free = isinstance(found, Ray | Segment) or (isinstance(found, Cubic) and found.offset == 0.0)
    return FREE_MARGIN if is_free else MARGIN


@torch.inference_mode(False)
@torch.no_grad()
def certify(
    block: NormOnlyBlock, box: Box, *, margin: float = CERTIFIED_MARGIN
) -> tuple[Float[Tensor, " feat"], Float[Tensor, " feat"]]:
    """Bounds of every feature, over all positions and all inputs of the block in the box."""
    lows: list[Tensor] = []
    highs: list[Tensor] = []
    inputs = Interval(box.low.double().clone(), box.high.double().clone(), ball=box.ball)
    for group, features, part in block.group_inputs(block.as_batch(inputs)):
        needed = torch.empty((N_BOUNDS * part.shape[0], *part.shape[1:]), dtype=torch.float64, device="meta")
        for start, stop in block.chunks(features, needed):
            hidden = block.hidden(part, features, group, start, stop)
            assert isinstance(hidden, Interval)
            lows.append(hidden.low.movedim(1, 0).flatten(1).amin(1))
            highs.append(hidden.high.movedim(1, 0).flatten(1).amax(1))
    return widen(torch.cat(lows), torch.cat(highs), margin)


@torch.no_grad()
def calibrate(
    block: NormOnlyBlock, inputs: Tensor, *, margin: float = MARGIN, leave_one_out: LeaveOneOut | None = None
) -> FeatureRanges:
    """The ranges and statistics of the block's features on a batch of its inputs; updates `leave_one_out`."""
    parts: list[tuple[Tensor, ...]] = []
    for group, features, part in block.group_inputs(block.as_batch(inputs)):
        for start, stop in block.chunks(features, part):
            release_free_memory()  # returns the memory of a chunk before the next is computed
            parts.append(_statistics(block.hidden(part, features, group, start, stop), leave_one_out))
    low, high, mean, variance = (torch.cat(column) for column in zip(*parts, strict=True))
    return FeatureRanges(*widen(low, high, margin), mean, variance)


def _statistics(hidden: Float[Tensor, "rows feat ..."], leave_one_out: LeaveOneOut | None) -> tuple[Tensor, ...]:
    """Lowest and highest value, mean and variance of every feature."""
    lows, highs = extremes_of_rows(hidden)
    if leave_one_out is not None:
        leave_one_out.update(*leave_one_out.extremes(lows, highs))
    flat = hidden.movedim(1, 0).flatten(1)
    return lows.amin(0), highs.amax(0), flat.mean(1), flat.var(1, correction=0)


def extremes_of_rows(hidden: Float[Tensor, "rows feat ..."]) -> tuple[Tensor, Tensor]:
    """Lowest and highest value of every row and feature over the positions."""
    if hidden.ndim == 2:
        return hidden, hidden
    by_row = hidden.flatten(2)
    return by_row.amin(2), by_row.amax(2)  # many times faster than aminmax on a CPU


def widen(
    low: Float[Tensor, "*shape"], high: Float[Tensor, "*shape"], margin: float
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """The range with a fraction of its width added on either side."""
    width = margin_unit(low, high)
    return low - margin * width, high + margin * width


def margin_unit(low: Float[Tensor, "*shape"], high: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The width that a margin of one adds on either side of a range."""
    # Not zero for a feature with only one value (a dead input, a batch of one).
    return torch.maximum(high - low, torch.maximum(low.abs(), high.abs()))


def _need_inside(block: NormOnlyBlock, inputs: Tensor, box: Box) -> None:
    """Raises if the calibration batch is outside the box by more than the margin of certified ranges."""
    low, high = (block.as_batch(bound.to(inputs)) for bound in (box.low, box.high))
    if not block.axes:  # samples and positions are one axis
        low, high = low.amin(0), high.amax(0)
    low, high = widen(low, high, CERTIFIED_MARGIN)
    batch = block.as_batch(inputs)
    outside = (batch < low) | (batch > high)
    if bool(outside.any()):
        raise ValueRangeError(
            f"certified ranges need a box that contains the calibration batch; got {int(outside.sum())} of "
            f"{outside.numel()} values outside the box of {block.features[0].layer!r}. Widen the box of the network's "
            "inputs, or pass inputs inside it."
        )


class Outside:
    """Samples with at least one feature outside its range, by block and call."""

    def __init__(self) -> None:
        self._calls: dict[FrozenBlock, list[Tensor]] = {}

    @property
    def fraction(self) -> float:
        """The fraction of samples outside a range, the maximum over the blocks."""
        return max((float(torch.cat(calls).double().mean()) for calls in self._calls.values()), default=0.0)

    def record(self, block: FrozenBlock, hidden: Tensor, low: Tensor, high: Tensor, *, is_first: bool) -> None:
        """Records a chunk of features; `is_first` starts a new call."""
        by_sample = hidden[..., None].flatten(2)
        lowest, highest = by_sample.amin(2), by_sample.amax(2)  # many times faster than aminmax on a CPU
        samples = ((lowest < low) | (highest > high)).any(1).cpu()
        calls = self._calls.setdefault(block, [])
        if is_first:
            calls.append(samples)
        else:
            calls[-1] |= samples


@contextlib.contextmanager
def count_outside(network: nn.Module) -> Iterator[Outside]:
    """A context manager that records which samples are outside the range of a block in forward passes."""
    outside = Outside()
    blocks = [module for module in network.modules() if isinstance(module, FrozenBlock)]
    for block in blocks:
        block.observer = functools.partial(outside.record, block)
    try:
        yield outside
    finally:
        for block in blocks:
            block.observer = None


CLOSE = 1e-6
"""Maximum relative difference between the rows of a sample in the batch and alone."""


Visit = Callable[[TargetLayer, nn.Module, "LayerInputs"], nn.Module | None]
"""Called with a layer, its module and its inputs; may return a module that replaces it after the call."""


@dataclass
class Calls:
    """Number of calls of every linear layer and convolution on a batch, by its first name.

    `named` lists layers that are called with keyword arguments only, `not_finite` those with NaN or infinity as input.
    """

    counts: dict[str, int] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)
    not_finite: set[str] = field(default_factory=set)

    def count(self, network: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Counts the calls in a forward pass of the batch."""

        def record(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            release_free_memory()
            self.counts[name] = self.counts.get(name, 0) + 1
            if not args:
                self.named[name] = ", ".join(named) or "nothing"
            elif isinstance(args[0], Tensor) and not bool(torch.isfinite(args[0]).all()):
                self.not_finite.add(name)

        modules = {name: one for name, one in network.named_modules() if isinstance(one, LINEAR + CONVOLUTIONS)}
        with _pre_hooks(modules, record):
            run(network, inputs)

    def need(self, layers: tuple[TargetLayer, ...]) -> None:
        """Raises if a layer is not called on the batch, or cannot be calibrated."""
        for name in (layer.name for layer in layers):
            if name in self.named:
                raise ConversionError(
                    f"a layer needs its input as a positional argument; {name!r} is called with {self.named[name]}. "
                    "Call it as layer(x)."
                )
            if name not in self.counts:
                raise ConversionError(
                    f"calibration needs every layer to be called by the network; {name!r} was not on this batch. "
                    "Remove the unused layer, or pass inputs that reach it."
                )
            if name in self.not_finite:
                raise ValueRangeError(
                    f"calibration needs finite inputs of every layer; {name!r} receives NaN or infinity on this batch. "
                    "Check the layers before it for overflow."
                )


def collect_inputs(
    network: nn.Module,
    layers: tuple[TargetLayer, ...],
    inputs: tuple[Tensor, ...],
    box: Box | None,
    *,
    with_leave_one_out: bool = False,
) -> dict[str, LayerInputs]:
    """The inputs of all layers by name, all in memory at once; `visit_layers` uses less."""
    found: dict[str, LayerInputs] = {}

    def store(layer: TargetLayer, _: nn.Module, received: LayerInputs) -> None:
        found[layer.name] = dataclasses.replace(
            received, inputs=received.inputs.clone()
        )  # the network may change it in place

    visit_layers(network, layers, inputs, box, visit=store, with_leave_one_out=with_leave_one_out)
    return found


def visit_layers(
    network: nn.Module,
    layers: tuple[TargetLayer, ...],
    inputs: tuple[Tensor, ...],
    box: Box | None,
    *,
    visit: Visit,
    calls: Calls | None = None,
    with_leave_one_out: bool = False,
) -> nn.Module:
    """Passes the batch through the network once and visits every layer at its last call; returns the network.

    Only activations that are alive at that point are in memory, and the inputs of earlier calls of the layer. The
    original layer is called, and replaced by the result of its visit afterwards, so that every layer receives the
    inputs of the original network. The returned network is another module only if the network is a layer itself.

    `calls` are those of an earlier pass of this batch. Raises before the first visit if a layer is not called, or has
    NaN as input. `with_leave_one_out` adds the check of calibrated ranges.
    """
    if calls is None:
        calls = Calls()
        calls.count(network, inputs)
    calls.need(layers)
    boxes = {} if box is None else _boxes(network, layers, inputs, box)
    assignment = _SampleAssignment(network, layers, inputs) if with_leave_one_out and box is None else None
    by_name = {layer.name: layer for layer in layers}
    modules = {name: network.get_submodule(name) for name in by_name}
    waiting: dict[str, list[Tensor]] = {name: [] for name in by_name}
    made: dict[str, nn.Module] = {}
    failures: list[Exception] = []
    learns = torch.is_grad_enabled()

    def receive(name: str, args: tuple[Tensor, ...], _: dict[str, Any]) -> None:
        if name not in waiting:  # called during its own visit
            return
        # The network may have enabled inference mode, autocast or no_grad around the layer.
        with torch.inference_mode(False), torch.set_grad_enabled(learns), without_autocast(args[0].device):
            received, is_last = args[0].detach(), len(waiting[name]) + 1 == calls.counts[name]
            if received.is_inference() or not is_last:
                received = received.clone()
            waiting[name].append(received)
            if not is_last:
                return
            listed, module = waiting.pop(name), modules[name]
            check = None if assignment is None else assignment.find(name, module, listed)
            try:
                block = visit(by_name[name], module, LayerInputs(_join(module, listed), boxes.get(name), check))
            except Exception as error:  # raised as _Halt, so that the network does not catch it
                failures.append(error)
                raise _Halt from error
            if block is not None:
                made[name] = block

    def replace(name: str) -> None:
        nonlocal network
        if name in made and name not in waiting:
            network = replace_layer(network, by_name[name].names, made[name])
            del made[name], modules[name]

    root = network
    try:
        with _pre_hooks(modules, receive, after=replace):
            run(root, inputs)
    except _Halt:
        raise failures[0] from failures[0].__cause__
    return network


class _Halt(BaseException):
    """Stops a forward pass of the network."""


@contextlib.contextmanager
def _pre_hooks(
    modules: Mapping[str, nn.Module],
    record: Callable[[str, tuple[Any, ...], dict[str, Any]], None],
    *,
    after: Callable[[str], None] | None = None,
) -> Iterator[None]:
    """Calls `record` with (name, args, kwargs) before each call of a module, and `after` with the name after it."""
    hooks = []
    for name, module in modules.items():

        def before(_: nn.Module, args: Any, named: Any, name: str = name) -> None:
            record(name, args, named)

        def call_after(_: nn.Module, args: Any, output: Any, name: str = name) -> None:
            assert after is not None
            after(name)

        hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
        if after is not None:
            hooks.append(module.register_forward_hook(call_after))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _boxes(network: nn.Module, layers: tuple[TargetLayer, ...], inputs: tuple[Tensor, ...], box: Box) -> dict[str, Box]:
    if len(inputs) != 1:
        raise ValueRangeError(f"a box needs a network with one input; got {len(inputs)}. Leave box out.")
    if bool(is_outside(inputs[0], box).any()):
        raise ValueRangeError(
            "certified ranges need a box that contains the calibration batch; got inputs outside. Widen the box, or "
            "pass inputs inside it."
        )
    return propagate(network, [layer.name for layer in layers], box)


def count_samples(inputs: tuple[Tensor, ...]) -> int:
    """Number of distinct samples of a batch."""
    return _distinct(inputs).n_distinct


@dataclass(frozen=True)
class _Distinct:
    """The index of every sample among the distinct ones."""

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


class _SampleAssignment:
    """Assigns the rows of layer inputs to samples, by comparison with a pass of one sample."""

    def __init__(self, network: nn.Module, layers: tuple[TargetLayer, ...], inputs: tuple[Tensor, ...]) -> None:
        self.distinct, self.n_samples = _distinct(inputs), len(inputs[0]) if inputs[0].ndim else 1
        self.alone: dict[str, list[Tensor]] = {}
        if self.distinct.n_distinct < 2:
            return
        last = tuple(x[-1:] if x.ndim and len(x) == self.n_samples else x for x in inputs)

        def store(name: str, args: tuple[Tensor, ...], _: dict[str, Any]) -> None:
            self.alone.setdefault(name, []).append(args[0].detach().clone())

        try:
            with _pre_hooks({layer.name: network.get_submodule(layer.name) for layer in layers}, store):
                run(network, last)
        except OnlynormError:  # the first axis is not the batch axis
            self.alone = {}

    def find(self, name: str, layer: nn.Module, calls: list[Tensor]) -> LeaveOneOut | None:
        """The leave-one-out check of a layer; None if its rows cannot be assigned to samples."""
        singles = self.alone.pop(name, [])
        if len(singles) != len(calls):
            return None
        rows = [_sample_of_rows(layer, *pair, self.n_samples) for pair in zip(calls, singles, strict=True)]
        known = [row for row in rows if row is not None]
        if len(known) < len(rows):
            return None
        return LeaveOneOut(self.distinct.numbers[torch.cat(known)], self.distinct.n_distinct)


def _sample_of_rows(layer: nn.Module, batch: Tensor, alone: Tensor, n_samples: int) -> Tensor | None:
    """The sample of each row of one call; None if the rows of the last sample are not found in the batch."""
    if batch.ndim != alone.ndim:
        return None
    axes = range(batch.ndim - 1)
    if isinstance(layer, CONVOLUTIONS):
        axes = range(1 if batch.ndim == layer.weight.ndim else 0)
    tolerance = CLOSE * float(alone.abs().max())
    for axis in axes:
        size = alone.shape[axis]
        if batch.shape[axis] != n_samples * size or not alone.numel():
            continue
        for sizes, part in (((n_samples, size), axis), ((size, n_samples), axis + 1)):
            rows = batch.unflatten(axis, sizes).select(part, n_samples - 1)
            if rows.shape == alone.shape and torch.allclose(rows, alone, rtol=CLOSE, atol=tolerance):
                along = torch.arange(n_samples, device=batch.device)
                along = along.repeat_interleave(size) if part == axis else along.repeat(size)
                if isinstance(layer, CONVOLUTIONS):
                    return along
                shape = [-1 if i == axis else 1 for i in range(batch.ndim - 1)]
                return along.reshape(shape).expand(batch.shape[:-1]).flatten()
    return None


def _join(layer: nn.Module, calls: list[Tensor]) -> Tensor:
    """The inputs of several calls as one batch."""
    if len(calls) == 1:
        return calls[0]
    if not isinstance(layer, CONVOLUTIONS):
        return torch.cat([call.reshape(-1, call.shape[-1]) for call in calls])
    axes = layer.weight.ndim - 2
    batches = [call if call.ndim == axes + 2 else call[None] for call in calls]
    largest = [max(batch.shape[2 + axis] for batch in batches) for axis in range(axes)]
    # Smaller images are padded with zeros: this only adds zeros to the inputs of the features.
    padded = []
    for batch in batches:
        missing = [most - size for most, size in zip(largest, batch.shape[2:], strict=True)]
        padded.append(functional.pad(batch, [n for size in reversed(missing) for n in (0, size)]))
    return torch.cat(padded)


def is_outside(inputs: Tensor, box: Box) -> Tensor:
    """Per sample: whether any of its values is outside the box."""
    if inputs.shape[1:] != box.low.shape:
        raise ShapeError(
            f"a box needs the shape of one sample, {tuple(inputs.shape[1:])}; got {tuple(box.low.shape)}. Pass "
            "Box(low, high) without the batch axis."
        )
    low, high = (bound.to(inputs.device, inputs.dtype) for bound in (box.low, box.high))
    return ((inputs < low) | (inputs > high)).reshape(len(inputs), -1).any(1)
