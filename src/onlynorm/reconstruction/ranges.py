"""What each feature sees: the range in which its activation must be linear, and the statistics of its norm.

Calibrated ranges come from a batch of inputs, widened by a margin on both sides. Certified ranges hold every input in a
box: what the features see is computed on the box itself, by interval arithmetic. They cost digits where they are wider,
see `certified_price`. Outside its ranges a reconstruction promises nothing; `watching` counts how much of a batch is.

The margins were measured on a pretrained ResNet-20 (CIFAR-10, he_normal features, five layers, eight batches of 64
images): on 500 test images the farthest of all 336,000 features leaves its range by up to 1.5 times the range's width,
extrapolated from the tail of thousands (1.0 for batches of 128, 0.8 for 256; 0.81 where all 46,080 features of a layer
were tried); beyond a margin of 2 went none that was sampled, but some on 0.03 % of the images for batches of 32 and on
0.65 % for 16. A margin of 2 instead of 0.25 costs a ReLU block a factor of 3.3 in float32 (a relative error of 6e-6 to
9e-6) and nothing in float64, where the solver's residual hides margins up to 1,000; tanh and hardtanh pay nothing.

What each layer of a network receives on a batch, and in which box it lies if the network's inputs lie in one.

Calibrated ranges are checked by leave-one-out (`HeldBack`), for which every row of a layer's input must be assigned to
the sample it comes from. Layers may see samples on any axis, several rows of each, or several calls, so the assignment
is not assumed: the last sample is passed through the network alone, and the axis along which its rows are found again
in the batch is the axis of the samples. Exact copies of a sample count as one, since a copy would hide its absence.
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
from onlynorm.frozen.form import Block
from onlynorm.frozen.pair import NormOnlyBlock
from onlynorm.intervals.propagate import propagate
from onlynorm.intervals.tensor import Box, Interval
from onlynorm.memory import release_free_memory
from onlynorm.modules import without_autocast
from onlynorm.modules.activations import Cubic, Ray, Segment, known
from onlynorm.modules.layers import CONVOLUTIONS, LINEAR, TargetLayer
from onlynorm.modules.walk import carry_hooks, carry_sizes, run, swap

MARGIN = 1.0
"""Share of the calibrated width that is added on either side, where room costs precision (a sigmoid block loses 0.2
digits against a quarter) and an input outside only adds to the error of a smooth activation."""
FREE_MARGIN = 2.0
"""The same where the activation is a line up to a point at which it breaks, and room costs only a larger shift."""
CERTIFIED_MARGIN = 2.0**-10
"""The same for certified ranges: room for the errors of the layers in front, and for float32."""
N_BOUNDS = 12
"""Tensors of the size of the hidden activations that are alive while their bounds are computed."""


class HeldBack:
    """Leave-one-out over the calibration samples: how far each one lies outside the ranges of all the others.

    `samples` numbers the sample that every row of a layer's input belongs to. The ranges of all samples but one follow
    from the two lowest and the two highest values of a feature, so that every sample is held back once and the layer is
    still calibrated on all of them, in one pass. `needed` is the margin (see `widen`) with which the ranges of the
    other samples hold this one too, the largest over all features noted so far.

    A new input leaves the ranges of n samples at most as often as one of n samples leaves those of the other n - 1: the
    fraction of `outside` estimates that rate, slightly too high and never too low on average.
    """

    def __init__(self, samples: Int[Tensor, " rows"], n_samples: int) -> None:
        self.samples, self.n_samples = samples, n_samples
        self.needed = torch.zeros(n_samples, dtype=torch.float64, device=samples.device)

    def extremes(
        self, lows: Float[Tensor, "rows feat"], highs: Float[Tensor, "rows feat"], *, first_row: int = 0
    ) -> tuple[Float[Tensor, "samples feat"], Float[Tensor, "samples feat"]]:
        """Lowest and highest value of every sample over its rows; infinite for samples that have none among them."""
        which = self.samples[first_row : first_row + len(lows), None].expand_as(lows)
        shape = (self.n_samples, lows.shape[1])
        low = lows.new_full(shape, torch.inf).scatter_reduce_(0, which, lows, "amin")
        high = highs.new_full(shape, -torch.inf).scatter_reduce_(0, which, highs, "amax")
        return low, high

    def note(self, low: Float[Tensor, "samples feat"], high: Float[Tensor, "samples feat"]) -> None:
        """Takes account of some features, given the extremes of every sample."""
        lowest, highest = low.topk(2, 0, largest=False), high.topk(2, 0)
        at_bottom, at_top = lowest.indices[0], highest.indices[0]
        is_both = at_bottom == at_top
        # Only the sample with the lowest value can lie below the others, and only the one with the highest above.
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
            margins = torch.where(rest > 0.0, rest / room(low_of_others, high_of_others), 0.0)
            self.needed.scatter_reduce_(0, which, margins.to(self.needed), "amax")

    def outside(self, margin: float) -> tuple[int, ...]:
        """The samples that leave the ranges of the others, widened by the margin."""
        return tuple((self.needed > margin).nonzero().flatten().tolist())


@dataclass(frozen=True)
class Seen:
    """What a layer receives: the calibration batch, and a box that holds every input if ranges are certified.

    `held_back` measures how often samples leave calibrated ranges, where rows are known to belong to samples.
    """

    inputs: Tensor
    box: Box | None = None
    held_back: HeldBack | None = None


@dataclass(frozen=True)
class Ranges:
    """Per feature: lowest and highest value before the norm, margin included, and mean and variance."""

    low: Float[Tensor, " feat"]
    high: Float[Tensor, " feat"]
    mean: Float[Tensor, " feat"]
    variance: Float[Tensor, " feat"]


def find_ranges(block: NormOnlyBlock, seen: Seen, *, margin: float | None = None) -> Ranges:
    """The ranges of the block's features: calibrated on the batch, or certified if a box is given.

    Without a margin it is `CERTIFIED_MARGIN` for a box, else `default_margin`.
    """
    if seen.box is not None:
        _need_inside(block, seen.inputs.double(), seen.box)
        bounds = certify(block, seen.box, margin=CERTIFIED_MARGIN if margin is None else margin)
        statistics = calibrate(block, seen.inputs.double(), margin=0.0)
        return Ranges(*bounds, statistics.mean, statistics.variance)
    chosen = default_margin(block.activation) if margin is None else margin
    return calibrate(block, seen.inputs.double(), margin=chosen, held_back=seen.held_back)


def default_margin(activation: nn.Module) -> float:
    """`FREE_MARGIN` where room is cheap or leaving is dear (on a line, or a tangent without offset), else `MARGIN`."""
    found = known(activation)
    is_free = isinstance(found, Ray | Segment) or (isinstance(found, Cubic) and found.offset == 0.0)
    return FREE_MARGIN if is_free else MARGIN


@torch.inference_mode(False)
@torch.no_grad()
def certify(
    block: NormOnlyBlock, box: Box, *, margin: float = CERTIFIED_MARGIN
) -> tuple[Float[Tensor, " feat"], Float[Tensor, " feat"]]:
    """Bounds of what every feature can see, at all positions, for all inputs of the block in the box."""
    lows: list[Tensor] = []
    highs: list[Tensor] = []
    inputs = Interval(box.low.double().clone(), box.high.double().clone(), ball=box.ball)
    for group, features, seen in block.group_inputs(block.as_batch(inputs)):
        taken = torch.empty((N_BOUNDS * seen.shape[0], *seen.shape[1:]), dtype=torch.float64, device="meta")
        for start, stop in block.chunks(features, taken):
            hidden = block.hidden(seen, features, group, start, stop)
            assert isinstance(hidden, Interval)
            lows.append(hidden.low.movedim(1, 0).flatten(1).amin(1))
            highs.append(hidden.high.movedim(1, 0).flatten(1).amax(1))
    return widen(torch.cat(lows), torch.cat(highs), margin)


@torch.no_grad()
def calibrate(
    block: NormOnlyBlock, inputs: Tensor, *, margin: float = MARGIN, held_back: HeldBack | None = None
) -> Ranges:
    """The ranges and statistics of the block's features on a batch of its inputs; `held_back` notes them too."""
    parts: list[tuple[Tensor, ...]] = []
    for group, features, seen in block.group_inputs(block.as_batch(inputs)):
        for start, stop in block.chunks(features, seen):
            release_free_memory()  # one chunk is gone before the next is made, for the system too
            parts.append(_statistics(block.hidden(seen, features, group, start, stop), held_back))
    low, high, mean, variance = (torch.cat(column) for column in zip(*parts, strict=True))
    return Ranges(*widen(low, high, margin), mean, variance)


def _statistics(hidden: Float[Tensor, "rows feat ..."], held_back: HeldBack | None) -> tuple[Tensor, ...]:
    """Lowest and highest value, mean and variance of every feature."""
    lows, highs = extremes_of_rows(hidden)
    if held_back is not None:
        held_back.note(*held_back.extremes(lows, highs))
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
    """The range with a share of its width added on either side."""
    width = room(low, high)
    return low - margin * width, high + margin * width


def room(low: Float[Tensor, "*shape"], high: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The width that a margin of one adds on either side of a range."""
    # A feature that saw one value only (a dead input, a batch of one) still gets room around it.
    return torch.maximum(high - low, torch.maximum(low.abs(), high.abs()))


def _need_inside(block: NormOnlyBlock, inputs: Tensor, box: Box) -> None:
    """Raises where the calibration batch leaves the box by more than a certified range has room for."""
    low, high = (block.as_batch(bound.to(inputs)) for bound in (box.low, box.high))
    if not block.axes:  # samples and positions are one axis here
        low, high = low.amin(0), high.amax(0)
    low, high = widen(low, high, CERTIFIED_MARGIN)
    batch = block.as_batch(inputs)
    outside = (batch < low) | (batch > high)
    if bool(outside.any()):
        raise ValueRangeError(
            f"certified ranges need a box that holds the calibration batch; got {int(outside.sum())} of "
            f"{outside.numel()} numbers outside the box of {block.features[0].layer!r}. Widen the box of the network's "
            "inputs, or pass inputs from inside it."
        )


class Outside:
    """Which samples left the range of at least one feature, block by block and call by call."""

    def __init__(self) -> None:
        self._calls: dict[Block, list[Tensor]] = {}

    @property
    def share(self) -> float:
        """The largest share of samples, over the blocks, for which some feature left its range."""
        return max((float(torch.cat(calls).double().mean()) for calls in self._calls.values()), default=0.0)

    def see(self, block: Block, hidden: Tensor, low: Tensor, high: Tensor, *, is_first: bool) -> None:
        """A chunk of features of a call, the first chunk or a later one."""
        by_sample = hidden[..., None].flatten(2)
        lowest, highest = by_sample.amin(2), by_sample.amax(2)  # many times faster than aminmax on a CPU
        samples = ((lowest < low) | (highest > high)).any(1).cpu()
        calls = self._calls.setdefault(block, [])
        if is_first:
            calls.append(samples)
        else:
            calls[-1] |= samples


@contextlib.contextmanager
def watching(network: nn.Module) -> Iterator[Outside]:
    """Counts, during forward passes inside the `with`, which samples leave the range of a block."""
    outside = Outside()
    blocks = [module for module in network.modules() if isinstance(module, Block)]
    for block in blocks:
        block.watch = functools.partial(outside.see, block)
    try:
        yield outside
    finally:
        for block in blocks:
            block.watch = None


CLOSE = 1e-6
"""Relative difference up to which rows of the batch are those of a sample that was passed alone."""


Visit = Callable[[TargetLayer, nn.Module, "Seen"], nn.Module | None]
"""Called with a layer, its module and what it sees; may return the module that takes its place after the call."""


@dataclass
class Calls:
    """How often every linear layer and convolution is called on a batch, by its first name, and with what."""

    counts: dict[str, int] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)
    not_finite: set[str] = field(default_factory=set)

    def count(self, network: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Passes the batch through the network."""

        def note(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            release_free_memory()
            self.counts[name] = self.counts.get(name, 0) + 1
            if not args:
                self.named[name] = ", ".join(named) or "nothing"
            elif isinstance(args[0], Tensor) and not bool(torch.isfinite(args[0]).all()):
                self.not_finite.add(name)

        modules = {name: one for name, one in network.named_modules() if isinstance(one, LINEAR + CONVOLUTIONS)}
        with _pre_hooks(modules, note):
            run(network, inputs)

    def need(self, layers: tuple[TargetLayer, ...]) -> None:
        """Raises for layers that the batch does not reach, or reaches in a way that cannot be calibrated."""
        for name in (layer.name for layer in layers):
            if name in self.named:
                raise ConversionError(
                    f"a layer needs its input as a positional argument; {name!r} is called with {self.named[name]}. "
                    "Call it as layer(x): a block takes its place."
                )
            if name not in self.counts:
                raise ConversionError(
                    f"a layer needs to be called by the network to be calibrated; {name!r} was not on this batch. "
                    "Remove the unused layer, or pass inputs that reach it."
                )
            if name in self.not_finite:
                raise ValueRangeError(
                    f"a layer needs finite inputs to be calibrated; {name!r} receives NaN or infinity on this batch. "
                    "Check the network's output on it: something in front of that layer overflows."
                )


def see(
    network: nn.Module,
    layers: tuple[TargetLayer, ...],
    inputs: tuple[Tensor, ...],
    box: Box | None,
    *,
    hold_back: bool = False,
) -> dict[str, Seen]:
    """What every layer sees, by name, all of it held in memory: `visit_layers` hands it on one by one."""
    found: dict[str, Seen] = {}

    def hold(layer: TargetLayer, _: nn.Module, seen: Seen) -> None:
        found[layer.name] = dataclasses.replace(seen, inputs=seen.inputs.clone())  # the network may change it in place

    visit_layers(network, layers, inputs, box, visit=hold, hold_back=hold_back)
    return found


def visit_layers(
    network: nn.Module,
    layers: tuple[TargetLayer, ...],
    inputs: tuple[Tensor, ...],
    box: Box | None,
    *,
    visit: Visit,
    calls: Calls | None = None,
    hold_back: bool = False,
) -> nn.Module:
    """Passes the batch through the network once and visits every layer when it has received all that it will.

    Only what the network itself holds at that point of the pass is in memory, beside the inputs of earlier calls of a
    layer that is called several times. A layer is called as it is; what its visit returned takes its place afterwards,
    so that every layer receives what it receives in the network as it was given. Returns the network, which is another
    module only where it is a layer itself.

    `calls` are those of an earlier pass of this batch. Layers that the batch does not reach, or reaches with NaN, are
    refused before the first visit. `hold_back` prepares the check of calibrated ranges; certified ones need none.
    """
    if calls is None:
        calls = Calls()
        calls.count(network, inputs)
    calls.need(layers)
    boxes = {} if box is None else _boxes(network, layers, inputs, box)
    hold = _Holding(network, layers, inputs) if hold_back and box is None else None
    by_name = {layer.name: layer for layer in layers}
    modules = {name: network.get_submodule(name) for name in by_name}
    waiting: dict[str, list[Tensor]] = {name: [] for name in by_name}
    made: dict[str, nn.Module] = {}
    failures: list[Exception] = []
    learns = torch.is_grad_enabled()

    def receive(name: str, args: tuple[Tensor, ...], _: dict[str, Any]) -> None:
        if name not in waiting:  # called by its own visit
            return
        # The network may have switched on inference, autocast or no_grad around the layer.
        with torch.inference_mode(False), torch.set_grad_enabled(learns), without_autocast(args[0].device):
            received, is_last = args[0].detach(), len(waiting[name]) + 1 == calls.counts[name]
            if received.is_inference() or not is_last:
                received = received.clone()
            waiting[name].append(received)
            if not is_last:
                return
            listed, module = waiting.pop(name), modules[name]
            held = None if hold is None else hold.back(name, module, listed)
            try:
                block = visit(by_name[name], module, Seen(_join(module, listed), boxes.get(name), held))
            except Exception as error:  # no handler inside the network shall catch it
                failures.append(error)
                raise _Halt from error
            if block is not None:
                made[name] = block

    def replace(name: str) -> None:
        nonlocal network
        if name in made and name not in waiting:
            carry_hooks(modules[name], made[name])
            carry_sizes(modules[name], made[name])
            for place in by_name[name].names:
                network = swap(network, place, made[name])
            del made[name], modules[name]

    root = network
    try:
        with _pre_hooks(modules, receive, after=replace):
            run(root, inputs)
    except _Halt:
        raise failures[0] from failures[0].__cause__
    return network


class _Halt(BaseException):
    """Ends a pass of the network from inside."""


@contextlib.contextmanager
def _pre_hooks(
    modules: Mapping[str, nn.Module],
    note: Callable[[str, tuple[Any, ...], dict[str, Any]], None],
    *,
    after: Callable[[str], None] | None = None,
) -> Iterator[None]:
    """Calls `note` with (name, arguments) before every call of these modules, and `after` with the name after it."""
    hooks = []
    for name, module in modules.items():

        def before(_: nn.Module, args: Any, named: Any, name: str = name) -> None:
            note(name, args, named)

        def behind(_: nn.Module, args: Any, output: Any, name: str = name) -> None:
            assert after is not None
            after(name)

        hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
        if after is not None:
            hooks.append(module.register_forward_hook(behind))
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
            "certified ranges need a box that holds the calibration batch; got inputs outside. Widen the box, or pass "
            "inputs from inside it."
        )
    return propagate(network, [layer.name for layer in layers], box)


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


class _Holding:
    """Assigns what layers receive to samples, with the help of one sample that is passed alone and held."""

    def __init__(self, network: nn.Module, layers: tuple[TargetLayer, ...], inputs: tuple[Tensor, ...]) -> None:
        self.distinct, self.n_samples = _distinct(inputs), len(inputs[0]) if inputs[0].ndim else 1
        self.alone: dict[str, list[Tensor]] = {}
        if self.distinct.n_distinct < 2:
            return
        last = tuple(x[-1:] if x.ndim and len(x) == self.n_samples else x for x in inputs)

        def keep(name: str, args: tuple[Tensor, ...], _: dict[str, Any]) -> None:
            self.alone.setdefault(name, []).append(args[0].detach().clone())

        try:
            with _pre_hooks({layer.name: network.get_submodule(layer.name) for layer in layers}, keep):
                run(network, last)
        except OnlynormError:  # the first axis is not that of the samples
            self.alone = {}

    def back(self, name: str, layer: nn.Module, calls: list[Tensor]) -> HeldBack | None:
        """The leave-one-out check of a layer, if its rows can be assigned to samples."""
        singles = self.alone.pop(name, [])
        if len(singles) != len(calls):
            return None
        rows = [_sample_of_rows(layer, *pair, self.n_samples) for pair in zip(calls, singles, strict=True)]
        known = [row for row in rows if row is not None]
        if len(known) < len(rows):
            return None
        return HeldBack(self.distinct.numbers[torch.cat(known)], self.distinct.n_distinct)


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
