"""Memory of the activations during the calibration pass, measured on one or two samples.

The lifetime of every tensor that an operation allocates is tracked, including those of skip connections, attention and
functional calls. The difference of two small passes is the part that grows with the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from onlynorm.errors import OnlynormError
from onlynorm.modules.layers import TargetLayer
from onlynorm.modules.walk import Inputs, cast, copy_network, run
from onlynorm.reconstruction.costs import Load


@dataclass(frozen=True)
class Activations:
    """Memory of the activations on the calibration batch, in bytes of float64.

    `alive` is the memory when each layer is called for the last time and rebuilt, including its input, in the order of
    these calls. `peak` is the maximum during a pass.
    """

    loads: dict[str, Load]
    alive: dict[str, int]
    peak: int


def measure_activations(
    network: nn.Module, layers: tuple[TargetLayer, ...], inputs: Inputs, n_samples: int, *, n_given: int | None = None
) -> Activations:
    """The activations of a batch of `n_samples`, extrapolated from passes of one and two samples.

    `n_given` is the number of samples of `inputs`, by default the length of the first axis.
    """
    # A copy in evaluation mode, so that the statistics of the target do not change.
    copied = copy_network(network).float().eval()
    given = cast(inputs, torch.float32)
    counted = len(given[0]) if given[0].ndim else 1
    by_sample = [x.ndim > 0 and len(x) == counted for x in given]
    one = tuple(x[:1] if own else x for x, own in zip(given, by_sample, strict=True))
    two = tuple(torch.cat([x, x]) if own else x for x, own in zip(one, by_sample, strict=True))
    try:
        single, double = _pass(copied, layers, one), _pass(copied, layers, two)
        if list(single.alive) != list(double.alive):
            raise OnlynormError("the calls depend on the batch")
    except OnlynormError:  # the first axis is not the batch axis, so the whole batch is measured
        whole = _pass(copied, layers, given)
        counted = counted if n_given is None else n_given
        return whole.scaled(n_samples / counted, n_samples, counted)
    return single.extrapolated(double, n_samples)


@dataclass(frozen=True)
class _Pass:
    """The sizes of one pass, in entries."""

    positions: dict[str, int]
    inputs: dict[str, int]
    alive: dict[str, int]
    peak: int

    def scaled(self, factor: float, n_samples: int, counted: int) -> Activations:
        """The sizes for another number of samples, scaled proportionally."""
        loads = {
            name: Load(n_samples, max(1, positions // counted), self.inputs[name] // counted)
            for name, positions in self.positions.items()
        }
        alive = {name: int(8 * factor * size) for name, size in self.alive.items()}
        return Activations(loads, alive, int(8 * factor * self.peak))

    def extrapolated(self, double: _Pass, n_samples: int) -> Activations:
        """The sizes for `n_samples`, extrapolated from one sample (self) and two (`double`)."""

        def grow(once: int, twice: int) -> int:
            return 8 * max(0, once + (n_samples - 1) * (twice - once))

        loads = {name: Load(n_samples, n, self.inputs[name]) for name, n in self.positions.items()}
        alive = {name: grow(size, double.alive[name]) for name, size in self.alive.items()}
        return Activations(loads, alive, grow(self.peak, double.peak))


def _pass(network: nn.Module, layers: tuple[TargetLayer, ...], inputs: tuple[Tensor, ...]) -> _Pass:
    positions: dict[str, int] = {}
    sizes: dict[str, int] = {}
    alive: dict[str, int] = {}
    counted = (*inputs, *network.parameters(), *network.buffers())  # not activations
    live = _LiveMemory({x.untyped_storage()._cdata for x in counted})
    hooks = []
    for layer in layers:

        def record(_: nn.Module, args: tuple[Any, ...], name: str = layer.name) -> None:
            sizes[name] = sizes.get(name, 0) + sum(x.numel() for x in args[:1] if isinstance(x, Tensor))
            alive.pop(name, None)  # ordered by the last call
            alive[name] = live.now()

        def count(_: nn.Module, args: object, output: Tensor, layer: TargetLayer = layer) -> None:
            positions[layer.name] = positions.get(layer.name, 0) + output.numel() // layer.shape[0]

        module = network.get_submodule(layer.name)
        hooks += [module.register_forward_pre_hook(record), module.register_forward_hook(count)]
    try:
        with live, torch.no_grad():
            run(network, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return _Pass(positions, sizes, alive, live.peak)


class _LiveMemory(TorchDispatchMode):
    """Tracks the memory that operations allocate; `peak` is the maximum, in entries.

    Storages in `own` are ignored.
    """

    def __init__(self, own: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own = own
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # importing torch._dynamo takes seconds

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        tensors = [x for x in tree_iter(made) if isinstance(x, Tensor)]
        for x in tensors:
            storage = StorageWeakRef(x.untyped_storage())
            if storage.cdata not in self._own:
                self._alive.setdefault(storage.cdata, (storage, _n_entries(x)))
        self.peak = max(self.peak, self.now() + _unfolded(function, args, tensors))
        return made

    def now(self) -> int:
        """Entries of all live tensors."""
        self._alive = {key: pair for key, pair in self._alive.items() if not pair[0].expired()}
        return sum(size for _, size in self._alive.values())


def _n_entries(x: Tensor) -> int:
    """The size of a tensor's storage in float64 entries: integers keep their size, floats are cast."""
    n_bytes = x.untyped_storage().nbytes()
    return n_bytes // x.element_size() if x.is_floating_point() else -(-n_bytes // 8)


def _unfolded(function: Any, args: Any, made: list[Tensor]) -> int:
    """Entries of the patches that a float64 convolution unfolds, one group at a time."""
    if function is not torch.ops.aten.convolution.default or not made:
        return 0
    weight, out = args[1], made[0]
    kernel = math.prod(weight.shape[2:])
    return 0 if kernel == 1 else out[:, 0].numel() * weight.shape[1] * kernel
