"""`reconstruct`: rebuilds a trained network from frozen random layers by choosing their norms.

Each Linear and Conv layer is replaced by a block with the same signature; all other modules are unchanged. The work is
done on a float64 copy; with `in_place` the target is changed at the end. Layers are rebuilt one by one during a forward
pass of the calibration batch, each when all its inputs are known.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from onlynorm.errors import (
    AccuracyWarning,
    ConversionError,
    OnlynormError,
    ToleranceError,
    UnknownNameError,
    ValueRangeError,
    first_line,
)
from onlynorm.frozen.fast_paths import set_fast_paths
from onlynorm.frozen.form import FrozenBlock, FrozenLayer, find_blocks, find_frozen
from onlynorm.memory import aligned, release_free_memory
from onlynorm.modules import without_autocast
from onlynorm.modules.fold import cast_network, find_pairs, fold_pairs, same_pairs
from onlynorm.modules.layers import CONVOLUTIONS, LINEAR, TargetLayer, find_layers
from onlynorm.modules.norms import NORMS, folded_places
from onlynorm.modules.walk import (
    Inputs,
    accepted_samples,
    as_inputs,
    carry_hooks,
    cast,
    copy_network,
    counting_samples,
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
from onlynorm.reconstruction.plan import need_room
from onlynorm.reconstruction.ranges import Calls, LayerInputs, count_samples, default_margin, visit_layers
from onlynorm.reconstruction.result import Calibration, LayerResult, Reconstruction, as_network
from onlynorm.reconstruction.resume import Partial, fingerprint
from onlynorm.solvers.prepare import DEFAULT_TOLERANCE
from onlynorm.storage import claiming
from onlynorm.validate import Progress, need_callable, need_flag, need_number, need_path, need_progress

OnLayerStep = Callable[[str, int, float], None]
"""Called with (layer, iterations so far, relative residual); once with 0 iterations for a resumed layer."""
N_MEASURED = 4
"""Samples on which errors are measured: a forward pass of blocks costs as much as hundreds of the target's."""
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
    - `progress`: True for a bar, or a function that is called with (layers done, total layers, layer).

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
    with without_autocast(inputs[0].device):
        result = _reconstruct(
            model, inputs, construction, settings, error=error, fold_norms=fold_norms, partial=folder, strict=strict,
            in_place=in_place, on_step=on_step, progress=progress,
        )  # fmt: skip
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
    given = tuple(aligned(x) for x in cast(inputs, torch.float64))
    rebuilt = set_fast_paths(copy_network(model).double().eval(), calibrating=True)
    few = given if error is None else accepted_samples(rebuilt, given, N_MEASURED)
    calls = Calls()
    with counting_samples(rebuilt, given) as n_given:
        found = find_layers(rebuilt, strict=strict, call=lambda: calls.count(rebuilt, given))
    n_samples = min(n_given(), count_samples(given))
    need_room(found.layers, construction, settings)
    folded: tuple[str, ...] = ()
    if fold_norms:
        places = {name for target in found.layers for name in target.names}
        pairs = [pair for pair in find_pairs(rebuilt, given)[0] if pair[0] in places]
        pairs = same_pairs(rebuilt, given, pairs=pairs)
        rebuilt, folded = fold_pairs(rebuilt, pairs), tuple(norm for _, norm in pairs)
        found = dataclasses.replace(found, layers=_with_biases(rebuilt, found.layers))
    layer_error = None if error is None else _need_positive(error) / len(found.layers)
    settings = _resolve(settings, layer_error, precision(model))
    saved = None
    if partial is not None:
        run_of = fingerprint(construction, settings, model, inputs, error=error, fold_norms=fold_norms)
        saved = Partial(partial, run_of)
    wanted = [] if error is None else _need_tensors(outputs_of(run(rebuilt, few)))
    sample = accepted_samples(model, cast(inputs, precision(model)), 1)
    same = outputs_of(run(model, sample))
    release_free_memory()
    box = settings.ranges.box
    is_calibrated = box is None and not isinstance(construction.activation, nn.Identity | None)
    working = dataclasses.replace(construction, activation=_copy_activation(construction, given[0].device))
    numbers = {target.name: number for number, target in enumerate(found.layers)}
    finished: dict[int, LayerResult] = {}

    def visit(target: TargetLayer, layer: nn.Module, received: LayerInputs) -> FrozenBlock:
        release_free_memory()  # returns the memory of earlier layers to the system
        number = numbers[target.name]
        resumed = None
        if saved is not None:
            resumed = saved.load(number, target, layer, storage=settings.storage, activation=working.activation)
        if resumed is None:
            block, result = _rebuild(target, layer, received, working, settings, on_step)
            if saved is not None:
                saved.save(number, target, block, dataclasses.asdict(result))
        else:
            block, result = resumed[0].to(given[0].device), LayerResult.from_dict(resumed[1])
            if on_step is not None:
                on_step(target.name, 0, result.residual)
        _need_layer_error(result, layer_error)
        finished[number] = result
        if progress is not None:
            progress(len(finished), len(found.layers), target.name)
        return block

    rebuilt = visit_layers(
        rebuilt, found.layers, given, box, visit=visit, calls=calls, with_leave_one_out=is_calibrated
    )
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
    if is_calibrated:
        checked = Calibration.of(results, n_samples=n_samples, margin=_margin(construction, settings))
    return Reconstruction(
        rebuilt, tuple(results), found.left, construction, settings, folded, reached, folder, checked, mismatch
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


def _with_biases(network: nn.Module, layers: tuple[TargetLayer, ...]) -> tuple[TargetLayer, ...]:
    """The layers with `has_bias` updated after norms were folded into some of them."""
    has_bias = (network.get_submodule(layer.name).bias is not None for layer in layers)
    return tuple(dataclasses.replace(layer, has_bias=bias) for layer, bias in zip(layers, has_bias, strict=True))


def _rebuild(
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
    return received.leave_one_out.outside(_margin(construction, settings)), float(received.leave_one_out.needed.max())


def _margin(construction: Construction, settings: Settings) -> float:
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
