"""The layers of one reconstruction: what they share, one of them, and all of them on several workers.

Every layer receives the inputs of the original network, so layers do not depend on each other. A worker reads the model
and the calibration batch from a file, passes the batch up to its layer, and writes the finished layer into the folder
of the partial reconstruction, from which the calling process resumes.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import pickle
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onlynorm.cluster import Engine, Task, need_results, run_tasks
from onlynorm.errors import ConversionError, OnlynormError, UnknownNameError
from onlynorm.frozen.fast_paths import set_fast_paths
from onlynorm.frozen.form import FrozenBlock
from onlynorm.memory import aligned, release_free_memory
from onlynorm.modules import without_autocast
from onlynorm.modules.fold import find_pairs, fold_pairs, same_pairs
from onlynorm.modules.layers import Target, TargetLayer, find_layers
from onlynorm.modules.walk import (
    accepted_samples,
    cast,
    copy_network,
    counting_samples,
    precision,
    relative_difference,
)
from onlynorm.reconstruction.constructions import find_builder
from onlynorm.reconstruction.constructions.options import Construction, Settings
from onlynorm.reconstruction.plan import need_room
from onlynorm.reconstruction.ranges import Calls, LayerInputs, count_samples, default_margin, visit_layers
from onlynorm.reconstruction.result import LayerResult
from onlynorm.reconstruction.resume import ARGUMENTS, Partial, fingerprint, remove_arguments
from onlynorm.storage import write_atomically
from onlynorm.validate import Progress, need_number

OnLayerStep = Callable[[str, int, float], None]
"""Called with (layer, iterations so far, relative residual); once with 0 iterations for a resumed layer."""
N_MEASURED = 4
"""Samples on which errors are measured: a forward pass of blocks costs as much as hundreds of the target's."""


@dataclasses.dataclass
class Shared:
    """What all layers of a reconstruction share: the float64 copy of the model, its layers, the batch, the settings.

    `few` are samples for the error of the network, `run_of` identifies the run.
    """

    network: nn.Module
    found: Target
    inputs: tuple[Tensor, ...]
    few: tuple[Tensor, ...]
    n_samples: int
    calls: Calls
    construction: Construction
    settings: Settings
    folded: tuple[str, ...]
    layer_error: float | None
    run_of: dict[str, Any]

    @property
    def is_calibrated(self) -> bool:
        """Whether ranges come from the batch, for an activation that needs them."""
        return self.settings.ranges.box is None and not isinstance(self.construction.activation, nn.Identity | None)

    @functools.cached_property
    def numbers(self) -> dict[str, int]:
        """The index of every layer."""
        return {target.name: number for number, target in enumerate(self.found.layers)}

    @functools.cached_property
    def working(self) -> Construction:
        """The construction with a copy of its activation, shared by all blocks."""
        activation = _copy_activation(self.construction, self.inputs[0].device)
        return dataclasses.replace(self.construction, activation=activation)

    def visit(
        self, layers: tuple[TargetLayer, ...], visit: Callable[[TargetLayer, nn.Module, LayerInputs], FrozenBlock]
    ) -> nn.Module:
        """Passes the batch through the network and replaces the layers by what `visit` returns for them."""
        return visit_layers(
            self.network, layers, self.inputs, self.settings.ranges.box, visit=visit, calls=self.calls,
            with_leave_one_out=self.is_calibrated,
        )  # fmt: skip

    def load(self, saved: Partial, target: TargetLayer, layer: nn.Module) -> tuple[FrozenBlock, LayerResult] | None:
        """A finished layer and its evidence; None if it is missing."""
        number, activation = self.numbers[target.name], self.working.activation
        found = saved.load(number, target, layer, storage=self.settings.storage, activation=activation)
        return None if found is None else (found[0].to(self.inputs[0].device), LayerResult.from_dict(found[1]))

    def rebuild(
        self, target: TargetLayer, layer: nn.Module, received: LayerInputs, on_step: OnLayerStep | None = None
    ) -> tuple[FrozenBlock, LayerResult]:
        """The block of one layer, and its evidence."""
        return rebuild(target, layer, received, self.working, self.settings, on_step)


def prepare(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    construction: Construction,
    settings: Settings,
    *,
    error: float | None,
    fold_norms: bool,
    strict: bool,
) -> Shared:
    """Finds the layers of a float64 copy of the model, folds norms, and resolves the settings."""
    given = tuple(aligned(x) for x in cast(inputs, torch.float64))
    network = set_fast_paths(copy_network(model).double().eval(), calibrating=True)
    few = given if error is None else accepted_samples(network, given, N_MEASURED)
    calls = Calls()
    with counting_samples(network, given) as n_given:
        found = find_layers(network, strict=strict, call=lambda: calls.count(network, given))
    n_samples = min(n_given(), count_samples(given))
    need_room(found.layers, construction, settings)
    folded: tuple[str, ...] = ()
    if fold_norms:
        places = {name for target in found.layers for name in target.names}
        pairs = [pair for pair in find_pairs(network, given)[0] if pair[0] in places]
        pairs = same_pairs(network, given, pairs=pairs)
        network, folded = fold_pairs(network, pairs), tuple(norm for _, norm in pairs)
        found = dataclasses.replace(found, layers=_with_biases(network, found.layers))
    layer_error = None if error is None else _need_positive(error) / len(found.layers)
    settings = _resolve(settings, layer_error, precision(model))
    run_of = fingerprint(
        construction, settings, model, inputs, error=error, fold_norms=fold_norms, threads=torch.get_num_threads()
    )
    return Shared(network, found, given, few, n_samples, calls, construction, settings, folded, layer_error, run_of)


# ------------------------------------------------------------------------------- several workers


@dataclasses.dataclass(frozen=True)
class _Arguments:
    """The arguments of a reconstruction, as a file for workers."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    construction: Construction
    settings: Settings
    options: dict[str, Any]


def rebuild_ahead(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    construction: Construction,
    settings: Settings,
    *,
    folder: Path,
    engine: Engine,
    progress: Progress | None,
    **options: Any,
) -> None:
    """Rebuilds the missing layers of a partial reconstruction on the workers; raises after all others are done.

    Layers with many weights come first, so that the workers finish at about the same time.
    """
    shared = prepare(model, inputs, construction, settings, **options)
    saved = Partial(folder, shared.run_of)
    missing = [
        target
        for target in shared.found.layers
        if shared.load(saved, target, shared.network.get_submodule(target.name)) is None
    ]
    missing.sort(key=lambda target: -math.prod(target.shape))
    if not missing:
        return
    n_layers = len(shared.found.layers)
    del shared
    release_free_memory()

    def show(done: int, total: int, names: str) -> None:
        if progress is not None:
            progress(n_layers - total + done, n_layers, names)

    with _written(_Arguments(model, inputs, construction, settings, options), folder) as path:
        tasks = [Task(target.name, rebuild_one, (str(path), str(folder), target.name)) for target in missing]
        need_results(run_tasks(tasks, engine, progress=show))


def rebuild_one(path: str, folder: str, name: str) -> None:
    """Rebuilds one layer in a worker and writes it into the folder."""
    shared = _read(path)
    saved = Partial(Path(folder), shared.run_of)
    (target,) = (one for one in shared.found.layers if one.name == name)

    def visit(target: TargetLayer, layer: nn.Module, received: LayerInputs) -> FrozenBlock:
        release_free_memory()
        if shared.load(saved, target, layer) is None:  # an earlier attempt may have finished it
            block, result = shared.rebuild(target, layer, received)
            saved.save(shared.numbers[name], target, block, dataclasses.asdict(result))
        raise _FinishedError

    with contextlib.suppress(_FinishedError), without_autocast(shared.inputs[0].device):
        shared.visit((target,), visit)


class _FinishedError(Exception):
    """Ends a forward pass whose remaining layers are not needed."""


@contextlib.contextmanager
def _written(arguments: _Arguments, folder: Path) -> Iterator[Path]:
    """The file with the arguments, next to the finished layers, where all workers see it; deleted afterwards."""
    try:
        data = pickle.dumps(arguments)
    except Exception as error:
        raise ConversionError(
            f"workers need a model that can be pickled; got {error}. Define its classes and hooks at the top of a "
            "module, or omit workers."
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    remove_arguments(folder)
    with tempfile.TemporaryDirectory(prefix=ARGUMENTS, dir=folder) as private:  # readable by this user only
        path = Path(private) / "arguments.pickle"
        write_atomically(path, data)
        yield path


@functools.lru_cache(maxsize=1)
def _read(path: str) -> Shared:
    """What the layers share, once per worker."""
    arguments: _Arguments = pickle.loads(Path(path).read_bytes())
    with without_autocast(arguments.inputs[0].device):
        return prepare(
            arguments.model, arguments.inputs, arguments.construction, arguments.settings, **arguments.options
        )


# ------------------------------------------------------------------------------- one layer


def rebuild(
    target: TargetLayer,
    layer: nn.Module,
    received: LayerInputs,
    construction: Construction,
    settings: Settings,
    on_step: OnLayerStep | None,
) -> tuple[FrozenBlock, LayerResult]:
    """The block of one layer, and its evidence; errors name the layer."""

    def report(iterations: int, residual: float) -> None:
        assert on_step is not None
        on_step(target.name, iterations, residual)

    try:
        build = find_builder(construction).build
        made = build(target, layer, received, construction, settings, None if on_step is None else report)
    except UnknownNameError:
        raise
    except OnlynormError as why:
        if repr(target.name) in str(why):
            raise
        raise type(why)(f"layer {target.name!r}: {why}") from why
    is_batch = received.inputs.ndim >= len(target.shape)
    few = received.inputs[:N_MEASURED] if is_batch else received.inputs
    release_free_memory()
    with torch.no_grad():
        # Without the hooks of the layer, which are already applied to its inputs.
        measured = relative_difference([made.block(few)], [layer.forward(few)], scale=[few])
    result = LayerResult(
        target.name, target.shape, made.block.n_features, made.method, made.residual, made.window_error, made.seconds,
        made.shortfall, measured, *_outside(received, construction, settings),
    )  # fmt: skip
    return made.block, result


def _outside(
    received: LayerInputs, construction: Construction, settings: Settings
) -> tuple[tuple[int, ...] | None, float]:
    """The calibration samples outside the ranges of the others, and the margin that would include them."""
    if received.leave_one_out is None:
        return None, 0.0
    return received.leave_one_out.outside(margin_of(construction, settings)), float(received.leave_one_out.needed.max())


def margin_of(construction: Construction, settings: Settings) -> float:
    """The margin of calibrated ranges."""
    assert construction.activation is not None
    margin = settings.ranges.margin
    return default_margin(construction.activation) if margin is None else margin


def _copy_activation(construction: Construction, device: torch.device) -> nn.Module | None:
    """A copy of the activation, shared by all blocks, so that the original is not cast or moved."""
    if construction.activation is None:
        return None
    return copy.deepcopy(construction.activation).to(device, torch.float64)


def _resolve(settings: Settings, layer_error: float | None, dtype: torch.dtype) -> Settings:
    """The settings with defaults filled in: window, precision, and tolerances from the allowed error of a layer.

    A quarter of this error is for the solver, a quarter for the window, and half for rounding.
    """
    tolerance, window = settings.tolerance, settings.window
    if layer_error is not None:
        tolerance, window = tolerance or layer_error / 4, settings.ranges.window or layer_error / 4
    own = settings.ranges.precision or str(dtype).removeprefix("torch.")
    return dataclasses.replace(
        settings, tolerance=tolerance, ranges=dataclasses.replace(settings.ranges, window=window, precision=own)
    )


def _need_positive(error: float) -> float:
    cure = "It is relative to the output; try 1e-8."
    return need_number("error", error, low=0.0, high=1.0, open_low=True, open_high=True, cure=cure)


def _with_biases(network: nn.Module, layers: tuple[TargetLayer, ...]) -> tuple[TargetLayer, ...]:
    """The layers with `has_bias` updated after norms were folded into some of them."""
    has_bias = (network.get_submodule(layer.name).bias is not None for layer in layers)
    return tuple(dataclasses.replace(layer, has_bias=bias) for layer, bias in zip(layers, has_bias, strict=True))
