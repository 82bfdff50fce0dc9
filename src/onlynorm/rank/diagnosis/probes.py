"""`Probes`: hooks that measure every signal of a forward pass once, and its gradient in the backward pass.

Signals are the outputs of all layers that compute, the inputs of layers with weights, and the outputs of blocks, which
include skip connections and functional activations. A tensor is measured again only if it was changed in place since.
Signals are measured when they are computed, before in-place layers change them, and activations are not stored.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from onlynorm.frozen import NormOnlyLinear
from onlynorm.frozen.form import FrozenLayer, find_frozen
from onlynorm.modules import tensors_in
from onlynorm.modules.norms import channel_axis, norm_kind
from onlynorm.modules.untouched import full_precision
from onlynorm.rank.diagnosis.signals import Layer, Signal, read_signal

SHAPES_ONLY = (nn.Identity, nn.Flatten, nn.Unflatten, nn.modules.dropout._DropoutNd)
"""Layers whose output is not measured."""
CHANNELS_FIRST = (
    nn.modules.conv._ConvNd, nn.modules.pooling._MaxPoolNd, nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd, nn.modules.pooling._AdaptiveMaxPoolNd,
)  # fmt: skip
LINEAR = (nn.Linear, NormOnlyLinear)
WEIGHTY = (
    nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, FrozenLayer,
)  # fmt: skip
CHANNELS_LAST = (nn.Linear, nn.Bilinear, nn.Embedding, nn.RNNBase, nn.MultiheadAttention)
INPUT, BLOCK = "input", "block"


@dataclass
class Reading:
    """The measures of a signal, completed in the backward pass, and the module that computed it."""

    name: str
    kind: str
    call: int
    depth: int
    signal: Signal
    shape: tuple[int, ...]
    module: nn.Module | None = None
    is_layer_input: bool = False
    gradient: float | None = None
    signal_gradient: float | None = None

    def layer(self) -> Layer:
        """The `Layer`, without the module."""
        has_weights = self.module is not None and is_weighty(self.module)
        return Layer(
            **vars(self.signal), name=self.name, kind=self.kind, call=self.call, depth=self.depth,
            has_weights=has_weights, is_layer_input=self.is_layer_input, shape=self.shape, gradient=self.gradient,
            signal_gradient=self.signal_gradient,
        )  # fmt: skip


@dataclass(frozen=True)
class LastLayer:
    """Inputs (samples, positions, in) and output gradients (samples, positions, out) of the last linear layer."""

    name: str
    inputs: Tensor
    deltas: Tensor


@dataclass
class Probes:
    """A context manager that registers hooks on a model and collects their measures.

    Without `is_reading` only the gradient of the last linear layer is recorded. `watched` are the modules whose inputs
    and outputs are measured, all by default.
    """

    model: nn.Module
    inputs: Sequence[Tensor]
    max_columns: int | None
    generator: torch.Generator
    is_reading: bool = True
    watched: Container[nn.Module] | None = None
    readings: list[Reading] = field(default_factory=list)
    last: LastLayer | None = None

    def __post_init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._calls: dict[str, int] = {}
        self._seen: dict[int, tuple[weakref.ref[Tensor], int, Reading | None]] = {}
        self._channels, self._n_units = 1, 0
        self.called: set[nn.Module] = set()
        self._depth = 0
        self._is_forward = self._is_recording = True

    def __enter__(self) -> Probes:
        frozen = {part for layer in find_frozen(self.model).values() for part in layer.modules() if part is not layer}
        for name, module in self.model.named_modules():
            if "parametrizations" in name.split(".") or module in frozen:
                continue  # computes a weight, not a signal
            if isinstance(module, LINEAR) or (self.is_reading and not isinstance(module, SHAPES_ONLY)):
                self._handles.append(module.register_forward_hook(self._hook(name), with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def end_forward(self) -> None:
        """Stops measuring, because checkpointed layers run again in the backward pass."""
        self._is_forward = False

    def end_backward(self) -> None:
        """Stops recording gradients of signals, before further backward passes."""
        self._is_recording = False

    def add_gradients(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Sets the norm of the parameter gradients in the readings of all layers."""
        for reading in self.readings:
            if reading.module is not None and reading.kind != BLOCK:
                found = [gradients[p] for p in reading.module.parameters() if p in gradients]
                reading.gradient = math.hypot(*map(norm_of, found)) if found else None

    def unobserved(self) -> float:
        """The fraction of the model's parameters outside the layers that were called."""
        observed = {p for module in self.called if _kind_of(module) != BLOCK for p in module.parameters()}
        sizes = {p: p.numel() for p in self.model.parameters()}
        total = sum(sizes.values())
        return sum(size for p, size in sizes.items() if p not in observed) / total if total else 0.0

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
            if not self._is_forward:
                return
            if isinstance(module, LINEAR):
                self._record_last(name, next(tensors_in((args, kwargs)), None), output)
            if self.is_reading:
                with full_precision():
                    self._layer(name, module, (args, kwargs), output)

        return hook

    def _layer(self, name: str, module: nn.Module, given: Any, output: Any) -> None:
        is_weighted = is_weighty(module)
        self._channels = _channels(module, self._channels)
        is_watched = self.watched is None or module in self.watched
        if is_weighted:
            received = next(tensors_in(given), None)  # other inputs may be masks
            is_first = any(received is tensor for tensor in self.inputs)
            called = "input" if is_first else f"input of {name}"
            reading = None if received is None else self._read(called, INPUT, received, is_watched=is_watched)
            if reading is not None:
                reading.is_layer_input = True
            self._depth += 1
        made = next(tensors_in(output), None)  # other outputs, such as the states of an LSTM, repeat it
        if made is not None:
            self._read(name or type(module).__name__, _kind_of(module), made, module, is_watched=is_watched)

    def _read(
        self, name: str, kind: str, tensor: Tensor, module: nn.Module | None = None, *, is_watched: bool = True
    ) -> Reading | None:
        """The reading of the tensor, None if it is not watched; measured only once unless it was changed in place."""
        if tensor.ndim < 2 or tensor.numel() == 0:
            return None
        known = self._seen.get(id(tensor))
        # the id alone may belong to a tensor that was freed
        is_known = known is not None and known[0]() is tensor and known[1] == tensor._version
        if known is not None and is_known and (known[2] is not None or not is_watched):
            return known[2]
        if module is not None and not is_known:
            self.called.add(module)
        # a block may have transposed the output of its layers
        is_transposed = kind == BLOCK and tensor.shape[self._channels] != self._n_units == tensor.shape[-self._channels]
        channels = -self._channels if is_transposed else self._channels
        if not is_watched:
            self._n_units = tensor.shape[channels]
            self._seen[id(tensor)] = (weakref.ref(tensor), tensor._version, None)
            return None
        call = self._calls[name] = self._calls.get(name, 0) + 1
        signal = read_signal(tensor, channels=channels, max_columns=self.max_columns, generator=self.generator)
        self._n_units = signal.n_units
        reading = Reading(name, kind, call, self._depth, signal, tuple(tensor.shape), module)
        self.readings.append(reading)
        self._seen[id(tensor)] = (weakref.ref(tensor), tensor._version, reading)
        if tensor.requires_grad:
            tensor.register_hook(self._record_gradient(reading))
        return reading

    def _record_gradient(self, reading: Reading) -> Callable[[Tensor], None]:
        def record(gradient: Tensor) -> None:
            if self._is_recording:
                reading.signal_gradient = norm_of(gradient)

        return record

    def _record_last(self, name: str, inputs: Tensor | None, output: Any) -> None:
        """Records inputs and output gradients of the last linear layer, whose gradient is computed first."""
        if inputs is None or inputs.ndim < 2 or not isinstance(output, Tensor) or not output.requires_grad:
            return

        def record(delta: Tensor) -> None:
            if self.last is None:
                shaped = (t.detach().flatten(1, -2) if t.ndim > 2 else t.detach()[:, None] for t in (inputs, delta))
                self.last = LastLayer(name, *shaped)

        output.register_hook(record)


def is_weighty(module: nn.Module) -> bool:
    """Whether the module is a layer with weights: one of torch, or any module with a parameter of two or more axes."""
    if isinstance(module, WEIGHTY):
        return True
    if next(module.children(), None) is not None or isinstance(module, nn.Embedding) or norm_kind(module) is not None:
        return False
    return any(p.ndim > 1 for p in module.parameters(recurse=False))


def _kind_of(module: nn.Module) -> str:
    return _kind(module) if is_weighty(module) or next(module.children(), None) is None else BLOCK


def norm_of(values: Tensor) -> float:
    """The norm, in float64 (with a copy) only if squares may overflow or underflow in float32."""
    found = float(torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32)))
    return found if 1e-15 < found < math.inf else float(torch.linalg.vector_norm(values, dtype=torch.float64))


def _channels(module: nn.Module, before: int) -> int:
    """The channel axis of the module's output: its own convention, or that of the layers before it."""
    if isinstance(module, CHANNELS_FIRST):
        return 1
    if isinstance(module, FrozenLayer):
        return 1 if getattr(module, "axes", 0) else -1
    return -1 if isinstance(module, CHANNELS_LAST) else channel_axis(module) or before


def _kind(module: nn.Module) -> str:
    norm = None if isinstance(module, FrozenLayer) else norm_kind(module)
    return f"{norm} norm" if norm is not None else type(module).__name__
