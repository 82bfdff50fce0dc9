"""`reconstruct`: rebuilds a trained network from frozen random layers by choosing their norms.

Each Linear and Conv layer is replaced by a block with the same signature; all other modules are unchanged. The work is
done on a float64 copy; with `in_place` the target is changed at the end. Layers are rebuilt one by one during a forward
pass of the calibration batch, each when all its inputs are known.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from onlynorm.cluster import fixed_threads, need_own_folder, open_engine
from onlynorm.errors import (
    AccuracyWarning,
    ConversionError,
    ToleranceError,
    ValueRangeError,
    first_line,
)
from onlynorm.frozen.fast_paths import set_fast_paths
from onlynorm.frozen.form import FrozenBlock, FrozenLayer, find_blocks, find_frozen
from onlynorm.memory import release_free_memory
from onlynorm.modules import without_autocast
from onlynorm.modules.fold import cast_network
from onlynorm.modules.layers import CONVOLUTIONS, LINEAR, TargetLayer
from onlynorm.modules.norms import NORMS, folded_places
from onlynorm.modules.walk import (
    Inputs,
    accepted_samples,
    as_inputs,
    carry_hooks,
    cast,
    copy_network,
    need_batch,
    need_evaluation,
    need_open,
    outputs_of,
    precision,
    relative_difference,
    run,
    swap,
)
from onlynorm.progress import with_progress
from onlynorm.reconstruction.constructions import find_builder
from onlynorm.reconstruction.constructions.options import Construction, Ranges, Settings, Wide
from onlynorm.reconstruction.layerwise import OnLayerStep, margin_of, prepare, rebuild_ahead
from onlynorm.reconstruction.ranges import LayerInputs
from onlynorm.reconstruction.result import Calibration, LayerResult, Reconstruction, as_network
from onlynorm.reconstruction.resume import Partial
from onlynorm.solvers.prepare import DEFAULT_TOLERANCE
from onlynorm.storage import claiming
from onlynorm.validate import Progress, need_callable, need_flag, need_path, need_progress

NOTICEABLE = 0.01
"""Relative difference of the network's output, in its own precision, above which a warning is issued."""
AMPLIFIED = 1000.0
"""Usual amplification of the errors of single layers up to the output."""


@claiming("partial")
@with_progress
def reconstruct(
    model: nn.Module | Reconstruction,
    inputs: Inputs | NDArray[Any],
    construction: Construction | None = None,
    *,
    seed: int = 0,
    ranges: Ranges | None = None,
    tolerance: float | None = None,
    error: float | None = None,
    storage: str = "dense",
    fold_norms: bool = False,
    partial: Path | str | None = None,
    strict: bool = False,
    in_place: bool = False,
    on_step: OnLayerStep | None = None,
    workers: int | None = None,
    cluster: str | None = None,
    threads: int = 1,
    progress: Progress | bool | None = None,
) -> Reconstruction:
    """The model rebuilt from frozen random features, with ranges and statistics calibrated on `inputs`.

    The network has the dtype of the model and is in evaluation mode. The model is unchanged unless `in_place`. Equal
    calls on the same machine give bit-identical networks.

    Forward hooks of a layer are moved to its block, and the layer is calibrated on the inputs that its pre-hooks
    return. State dict hooks are not moved. Layers whose weight is read directly (by a hook or a tied decoder) are
    unchanged and listed in `result.left`.

    - `inputs`: a batch, or a tuple of batches for a model with several inputs.
    - `construction`: how layers are rebuilt and from which features: `Wide(...)` (the default), `LowRank(...)`,
      `Residual(...)`, `Deep(...)` or `Multilayer(...)`.
    - `seed`: seed of the frozen weights.
    - `ranges`: the input ranges for which norms are set, by default `Ranges(window=1e-10)`.
    - `tolerance`: maximum residual of every layer; raises if it is not reached. None aims at 1e-10 and warns.
    - `error`: maximum relative error of the network's output in float64, measured on a few samples. It is divided
      equally among the layers and sets their solver tolerance and window unless these are given.
    - `storage`: "dense" stores the frozen weights, "seed" draws them again in chunks on every forward pass.
    - `fold_norms`: whether batch norms that directly follow a layer are folded into it first.
    - `partial`: folder for finished layers, from which the same call resumes. It is deleted by `save(result, path)`.
    - `strict`: whether to raise if a layer cannot be rebuilt, instead of leaving it unchanged.
    - `on_step`: called with (layer, iterations so far, relative residual).
    - `workers`: number of processes that rebuild layers at the same time; the network is the same to the last bit.
    - `cluster`: "dask:ADDRESS", "dask:local:N", "ray:ADDRESS" or "ray:local:N" for workers of Dask or Ray.
    - `threads`: threads of torch, NumPy and SciPy for each layer, also without workers.
    - `progress`: True for a bar, or a function that is called with (layers done, total layers, layers at work).

    A layer with a residual above 1e-10 is listed in `result.warnings`. An `AccuracyWarning` is also issued, unless the
    options request an approximation (`excess` below 1, a `rank`, or a `density` of structured features). An
    `AccuracyWarning` is also issued if the rebuilt network fails, or differs, on a calibration sample although its
    layers do not.

    Theory: giannou2023:thm-1, burkholz2024:thm-2.3, burkholz2024:composition

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> from onlynorm.models import mlp
        >>> model, inputs = mlp((8, 16, 4)).double(), torch.rand(64, 8).double()
        >>> rebuilt = on.reconstruct(model, inputs, on.Wide(excess=1.5), seed=0)
        >>> [layer.name for layer in rebuilt.layers]
        ['0', '2']
        >>> torch.allclose(rebuilt.network(inputs), model(inputs), atol=1e-6)
        True
    """
    construction = Wide() if construction is None else construction
    find_builder(construction)  # validates the construction first
    settings = Settings(seed=seed, tolerance=tolerance, storage=storage, ranges=Ranges() if ranges is None else ranges)
    model = as_network("a reconstruction", model)
    inputs = as_inputs("calibration", inputs)
    for name, flag in (("fold_norms", fold_norms), ("strict", strict), ("in_place", in_place)):
        need_flag(name, flag)
    if on_step is not None:
        need_callable("on_step", on_step, cure="It is called with (layer, iterations so far, relative residual).")
    progress = need_progress(progress)
    _need_ready(model, inputs, in_place)
    folder = None if partial is None else need_path("partial", partial)
    options: dict[str, Any] = {"error": error, "fold_norms": fold_norms, "strict": strict}
    with (
        open_engine(workers=workers, cluster=cluster, threads=threads) as engine, fixed_threads(engine.threads),
        without_autocast(inputs[0].device), contextlib.ExitStack() as temporary,
    ):  # fmt: skip
        if engine.is_parallel:
            if folder is None:
                need_own_folder(cluster)
                folder = Path(temporary.enter_context(tempfile.TemporaryDirectory(prefix="onlynorm-")))
            rebuild_ahead(
                model, inputs, construction, settings, folder=folder, engine=engine, progress=progress, **options
            )
            progress = None
        result = _reconstruct(
            model, inputs, construction, settings, **options, partial=folder, in_place=in_place, on_step=on_step,
            progress=progress,
        )  # fmt: skip
    result = dataclasses.replace(result, partial=None if partial is None else folder, threads=engine.threads)
    short = [f"{layer.name!r}: {layer.shortfall}" for layer in result.layers if layer.shortfall]
    if short and not result.is_approximate:
        warnings.warn(
            f"reconstruct needs a residual of at most {DEFAULT_TOLERANCE:.0e} in every layer; {len(short)} of "
            f"{len(result.layers)} fell short. {'. '.join(short[:3])}. Pass tolerance= to raise an error instead.",
            AccuracyWarning,
            stacklevel=3,
        )
    if result.mismatch:
        warnings.warn(result.mismatch, AccuracyWarning, stacklevel=3)
    return result


def _reconstruct(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    construction: Construction,
    settings: Settings,
    *,
    error: float | None,
    fold_norms: bool,
    partial: Path | None,
    strict: bool,
    in_place: bool,
    on_step: OnLayerStep | None,
    progress: Progress | None,
) -> Reconstruction:
    shared = prepare(model, inputs, construction, settings, error=error, fold_norms=fold_norms, strict=strict)
    settings, found, few = shared.settings, shared.found, shared.few
    saved = None if partial is None else Partial(partial, shared.run_of)
    wanted = [] if error is None else _need_tensors(outputs_of(run(shared.network, few)))
    sample = accepted_samples(model, cast(inputs, precision(model)), 1)
    same = outputs_of(run(model, sample))
    release_free_memory()
    finished: dict[int, LayerResult] = {}

    def visit(target: TargetLayer, layer: nn.Module, received: LayerInputs) -> FrozenBlock:
        release_free_memory()  # returns the memory of earlier layers to the system
        number = shared.numbers[target.name]
        resumed = None if saved is None else shared.load(saved, target, layer)
        if resumed is None:
            block, result = shared.rebuild(target, layer, received, on_step)
            if saved is not None:
                saved.save(number, target, block, dataclasses.asdict(result))
        else:
            block, result = resumed
            if on_step is not None:
                on_step(target.name, 0, result.residual)
        _need_layer_error(result, shared.layer_error)
        finished[number] = result
        if progress is not None:
            progress(len(finished), len(found.layers), target.name)
        return block

    rebuilt = shared.visit(found.layers, visit)
    results = [finished[number] for number in range(len(found.layers))]
    reached = None
    if error is not None:
        reached = relative_difference(outputs_of(run(rebuilt, few)), wanted, scale=list(few))
        _need_reached(reached, error)
    rebuilt = set_fast_paths(cast_network(rebuilt, precision(model)).eval())
    if in_place:
        rebuilt = _put_into(model, rebuilt)
    mismatch = _mismatch(rebuilt, sample, same, results)
    folder = None if saved is None else saved.folder
    checked = None
    if shared.is_calibrated:
        checked = Calibration.of(results, n_samples=shared.n_samples, margin=margin_of(construction, settings))
    return Reconstruction(
        rebuilt, tuple(results), found.left, construction, settings, shared.folded, reached, folder, checked, mismatch
    )


def _put_into(model: nn.Module, rebuilt: nn.Module) -> nn.Module:
    """The given model, with its layers replaced by the blocks of the rebuilt network."""
    for name, block in find_blocks(rebuilt).items():
        carry_hooks(model.get_submodule(name), block)
    for name in (*find_blocks(rebuilt), *folded_places(rebuilt)):
        swap(model, name, rebuilt.get_submodule(name))
    return set_fast_paths(model.eval())


def _mismatch(network: nn.Module, sample: tuple[Tensor, ...], wanted: list[Tensor], layers: list[LayerResult]) -> str:
    """A warning if the outputs of target and network differ although those of the layers do not; else empty."""
    cure = (
        "Check for hooks and other code that test for nn.Linear or nn.Conv2d or read attributes of such layers, and "
        "for values outside the range of the precision."
    )
    try:
        made = outputs_of(run(network, sample))
        difference = relative_difference(made, wanted, scale=list(sample))
    except Exception as error:  # code of the target may raise any error for a block
        what = f"{type(error).__name__}: {first_line(error)}"
        return f"the rebuilt network fails on a calibration sample with {what}. {cure}"
    explained = AMPLIFIED * max(layer.error for layer in layers)
    if difference <= max(NOTICEABLE, explained):
        return ""
    return (
        f"the output differs by {difference:.1e} (relative) from the target's on a calibration sample, but that of no "
        f"layer by more than {explained / AMPLIFIED:.1e}. {cure}"
    )


def collapse(network: nn.Module | Reconstruction) -> nn.Module:
    """A copy in which every frozen layer is replaced by the Linear or Conv layer with its effective weight.

    Norm-only layers with tied gammas become layers with tied weights.

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> from onlynorm.models import mlp
        >>> model, inputs = mlp((8, 16, 4)), torch.rand(64, 8)
        >>> rebuilt = on.reconstruct(model, inputs)
        >>> print(on.collapse(rebuilt))
        Sequential(
          (0): Linear(in_features=8, out_features=16, bias=True)
          (1): ReLU()
          (2): Linear(in_features=16, out_features=4, bias=True)
        )
    """
    plain = copy_network(as_network("collapse", network))
    made: dict[FrozenLayer, nn.Module] = {}
    tied: dict[nn.Parameter, nn.Parameter] = {}
    for name, layer in find_frozen(plain).items():
        if layer not in made:
            made[layer] = layer.to_plain()
            carry_hooks(layer, made[layer])
            for place, own in layer.plain_parameters().items():
                setattr(made[layer], place, tied.setdefault(own, made[layer].get_parameter(place)))
        plain = swap(plain, name, made[layer])
    return set_fast_paths(plain)


def _need_tensors(outputs: list[Tensor]) -> list[Tensor]:
    if not outputs:
        raise ConversionError("error needs a network that returns tensors to compare; got none. Return its logits.")
    return outputs


def _need_layer_error(result: LayerResult, layer_error: float | None) -> None:
    if layer_error is not None and not result.error <= layer_error:
        raise ToleranceError(
            f"layer {result.name!r} needs an output error of at most {layer_error:.1e}, its part of the error; "
            f"measured {result.error:.1e} on the calibration batch, with a residual of {result.residual:.1e} and a "
            f"window error of {result.window_error:.1e}. Pass a larger error, a smaller window in Ranges, or an "
            "activation that is linear on a half-axis (ReLU)."
        )


def _need_reached(reached: float, error: float) -> None:
    if not reached <= error:
        raise ToleranceError(
            f"the network needs a relative output error of at most {error:.1e}; measured {reached:.1e} on the "
            "calibration batch although every layer is within its part of it: later layers amplify the errors. Pass an "
            f"error smaller by a factor of {reached / error:.1g}."
        )


def _need_ready(model: nn.Module, inputs: Inputs, in_place: bool) -> None:
    """Raises unless the model is in evaluation mode, has finite real tensors, and can be called on the inputs."""
    parameters = [p for p in model.parameters() if p.is_floating_point() or p.is_complex()]
    need_open("a reconstruction", model)
    need_evaluation("a reconstruction", model)
    dtypes = sorted({str(p.dtype) for p in parameters})
    if dtypes not in (["torch.float32"], ["torch.float64"]):
        cure = "Call model.float() first; a reconstruction computes in float64."
        if not parameters:
            cure = "Pass a model with layers."
        elif any(p.is_complex() for p in parameters):
            cure = "Write complex layers as real ones."
        raise ConversionError(
            f"a reconstruction needs a float32 or float64 model; got {' and '.join(dtypes) or 'no parameters'}. {cure}"
        )
    for place, module in model.named_modules():
        # Buffers of other modules may be infinite, such as attention masks.
        own = [*module.named_parameters(recurse=False), *(module.named_buffers() if isinstance(module, NORMS) else ())]
        for name, values in own:
            if not bool(torch.isfinite(values).all()):
                raise ValueRangeError(
                    f"a reconstruction needs finite tensors; got NaN or infinity in the {name} of {place!r}. Load a "
                    "checkpoint from before the training diverged."
                )
    need_batch("calibration", model, inputs)
    if in_place and type(model) in LINEAR + CONVOLUTIONS:
        raise ConversionError(
            f"in_place needs a model that contains its layers; got a single {type(model).__name__}, which cannot be "
            "replaced in place. Leave in_place out and use result.network."
        )
