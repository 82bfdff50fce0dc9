"""`reconstruct`: a trained network -> the same function from frozen random layers whose norms were chosen.

Each Linear and Conv layer is swapped in place for a block with the same signature; everything between them stays. The
work is done on a copy in float64; the target is not touched unless `in_place`, and then only when all is done. Layers
are rebuilt one by one while the calibration batch passes through the copy, each when its input has come.
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
)
from onlynorm.frozen import NormOnlyLayer
from onlynorm.frozen.fast_paths import set_fast_paths
from onlynorm.frozen.form import Block, FrozenLayer, find_blocks, find_frozen
from onlynorm.intervals.tensor import Box
from onlynorm.memory import aligned, release_free_memory
from onlynorm.modules import without_autocast
from onlynorm.modules.fold import find_pairs, fold_pairs, same_pairs
from onlynorm.modules.layers import CONVOLUTIONS, LINEAR, TargetLayer, find_layers, need_open
from onlynorm.modules.norms import NORMS, folded_places
from onlynorm.modules.validate import need_batch, need_evaluation
from onlynorm.modules.walk import (
    Inputs,
    accepted_samples,
    as_inputs,
    carry_hooks,
    cast,
    copy_network,
    outputs_of,
    precision,
    relative_difference,
    run,
    swap,
)
from onlynorm.reconstruction.constructions.base import Construction, Recipe, make_recipe
from onlynorm.reconstruction.plan import need_room
from onlynorm.reconstruction.ranges import Calls, Seen, count_samples, default_margin, visit_layers
from onlynorm.reconstruction.result import Calibration, LayerResult, Reconstruction, as_network
from onlynorm.reconstruction.resume import Partial, fingerprint
from onlynorm.solvers.prepare import DEFAULT_TOLERANCE
from onlynorm.storage import claiming, tensors_digest
from onlynorm.validate import need_callable, need_flag, need_instance, need_number, need_path

Step = Callable[[str, int, float], None]
"""Called with (layer, iterations so far, relative residual); once with 0 iterations for a layer that was resumed."""
N_MEASURED = 4
"""Samples on which errors are measured: a forward pass of blocks costs as much as hundreds of the target's."""
NOTICEABLE = 0.01
"""Relative difference of the network's output, in its own precision, from which on it is looked for a cause."""
AMPLIFIED = 1000.0
"""Growth of the errors of single layers on their way to the output that surprises nobody."""


@claiming("partial")
def reconstruct(
    network: nn.Module | Reconstruction,
    *,
    inputs: Inputs | NDArray[Any],
    error: float | None = None,
    box: Box | None = None,
    fold_norms: bool = False,
    partial: Path | str | None = None,
    strict: bool = False,
    in_place: bool = False,
    step: Step | None = None,
    **choices: Any,
) -> Reconstruction:
    """The network rebuilt from frozen random features; `inputs` is a batch that calibrates ranges and statistics.

    `choices` are the fields of a `Recipe`: `features`, `excess`, `seed`, `activation`, `construction` and so on. The
    result has the precision of the target and is in evaluation mode. The target itself is rebuilt only if `in_place`.
    It is a function of the target, the inputs and the options: equal calls on one machine give equal bits.

    Hooks on the calls of a layer go over to the block that takes its place; layers are calibrated on what their
    pre-hooks return. Hooks on its state dict, which know the weights by name, do not. Layers whose weight is read
    directly (by a hook, say, or by a tied decoder) stay as they are and are listed in `result.left`.

    - `inputs`: a batch, or a tuple of batches for a network that takes several.
    - `error`: relative error of the network's output that must be reached in float64. Every layer gets an equal share,
      which sets its solver tolerance and its window unless they are given, and is measured on a few samples.
    - `box`: certifies the ranges for every input inside, by interval arithmetic, in place of the calibrated ones.
    - `fold_norms`: batch norms that directly follow a layer become part of it first.
    - `partial`: folder that keeps every finished layer; the same call resumes after the last one. It stays until
      `save(result, path)` has written the whole.

    A layer that ends above its tolerance of 1e-10 is listed in `result.warnings`, with its residual. An
    `AccuracyWarning` says so too, unless the recipe asks for an approximation (`excess` below 1, a `rank`, or a
    `density` of structured features). A `tolerance` that was given and is missed raises. An `AccuracyWarning` also says
    where the rebuilt network fails, or differs, on a calibration sample although its layers do not.

    Theory: giannou2023:thm-1, burkholz2024:thm-2.3, burkholz2024:composition
    """
    recipe, construction = make_recipe(**choices)
    network = as_network("a reconstruction", network)
    inputs = as_inputs("calibration", inputs)
    for name, flag in (("fold_norms", fold_norms), ("strict", strict), ("in_place", in_place)):
        need_flag(name, flag)
    if box is not None:
        need_instance("box", box, Box, cure="Pass Box(low, high).")
    if step is not None:
        need_callable("step", step, cure="It is called with (layer, iterations so far, relative residual).")
    _need_ready(network, inputs, in_place)
    folder = None if partial is None else need_path("partial", partial)
    with without_autocast(inputs[0].device):
        result = _reconstruct(
            network, inputs, recipe, construction, choices, error=error, box=box, fold_norms=fold_norms,
            partial=folder, strict=strict, in_place=in_place, step=step,
        )  # fmt: skip
    short = [f"{layer.name!r}: {layer.shortfall}" for layer in result.layers if layer.shortfall]
    if short and not result.is_approximate:
        warnings.warn(
            f"reconstruct needs a residual of at most {DEFAULT_TOLERANCE:.0e} in every layer; {len(short)} of "
            f"{len(result.layers)} fell short. {'. '.join(short[:3])}. Pass tolerance= to have it refused.",
            AccuracyWarning,
            stacklevel=3,
        )
    if result.mismatch:
        warnings.warn(result.mismatch, AccuracyWarning, stacklevel=3)
    return result


def _reconstruct(
    network: nn.Module,
    inputs: tuple[Tensor, ...],
    recipe: Recipe,
    construction: Construction,
    choices: dict[str, Any],
    *,
    error: float | None,
    box: Box | None,
    fold_norms: bool,
    partial: Path | None,
    strict: bool,
    in_place: bool,
    step: Step | None,
) -> Reconstruction:
    given = tuple(aligned(x) for x in cast(inputs, torch.float64))
    rebuilt = set_fast_paths(copy_network(network).double().eval(), calibrating=True)
    few = given if error is None else accepted_samples(rebuilt, given, N_MEASURED)
    calls = Calls()
    found = find_layers(rebuilt, strict=strict, call=lambda: calls.count(rebuilt, given))
    need_room(found.layers, recipe, construction)
    folded: tuple[str, ...] = ()
    if fold_norms:
        places = {name for target in found.layers for name in target.names}
        pairs = [pair for pair in find_pairs(rebuilt, given)[0] if pair[0] in places]
        pairs = same_pairs(rebuilt, given, pairs=pairs)
        rebuilt, folded = fold_pairs(rebuilt, pairs), tuple(norm for _, norm in pairs)
        found = dataclasses.replace(found, layers=_with_biases(rebuilt, found.layers))
    share = None if error is None else _need_positive(error) / len(found.layers)
    recipe = _with_share(recipe, share, choices)
    recipe = dataclasses.replace(recipe, precision=recipe.precision or str(precision(network)).removeprefix("torch."))
    kept = None
    if partial is not None:
        bounds = None if box is None else tensors_digest({"low": box.low, "high": box.high})
        ways = {"error": error, "fold_norms": fold_norms, "box": bounds}
        kept = Partial(partial, fingerprint(recipe, network, inputs, **ways))
    wanted = [] if error is None else _need_tensors(outputs_of(run(rebuilt, few)))
    sample = accepted_samples(network, cast(inputs, precision(network)), 1)
    same = outputs_of(run(network, sample))
    release_free_memory()
    is_calibrated = box is None and not isinstance(recipe.activation, nn.Identity | None)
    working = dataclasses.replace(recipe, activation=_copy_activation(recipe, given[0].device))
    numbers = {target.name: number for number, target in enumerate(found.layers)}
    finished: dict[int, LayerResult] = {}

    def visit(target: TargetLayer, layer: nn.Module, seen: Seen) -> Block:
        release_free_memory()  # what earlier work freed would else stay resident beside this layer's
        number = numbers[target.name]
        resumed = None if kept is None else kept.find(number, target, layer, working)
        if resumed is None:
            block, result = _rebuild(target, layer, seen, working, construction, step)
            if kept is not None:
                kept.keep(number, target, block, dataclasses.asdict(result))
        else:
            block, result = resumed[0].to(given[0].device), LayerResult.from_dict(resumed[1])
            if step is not None:
                step(target.name, 0, result.residual)
        _need_share(result, share)
        finished[number] = result
        return block

    rebuilt = visit_layers(rebuilt, found.layers, given, box, visit=visit, calls=calls, hold_back=is_calibrated)
    results = [finished[number] for number in range(len(found.layers))]
    reached = None
    if error is not None:
        reached = relative_difference(outputs_of(run(rebuilt, few)), wanted, scale=list(few))
        _need_reached(reached, error)
    rebuilt = set_fast_paths(rebuilt.to(precision(network)).eval())
    if in_place:
        for name, block in find_blocks(rebuilt).items():
            carry_hooks(network.get_submodule(name), block)
        for name in (*find_blocks(rebuilt), *folded_places(rebuilt)):
            swap(network, name, rebuilt.get_submodule(name))
        rebuilt = set_fast_paths(network.eval())
    mismatch = _mismatch(rebuilt, sample, same, results)
    folder = None if kept is None else kept.folder
    checked = _calibration(results, given, recipe) if is_calibrated else None
    return Reconstruction(rebuilt, tuple(results), found.left, recipe, folded, reached, folder, checked, mismatch)


def _mismatch(network: nn.Module, sample: tuple[Tensor, ...], wanted: list[Tensor], layers: list[LayerResult]) -> str:
    """What differs between the outputs of target and network although it does in no layer; empty if nothing does."""
    cure = (
        "Look for hooks and other code that test for nn.Linear or nn.Conv2d or read attributes of such layers, and for "
        "values beyond the range of the precision."
    )
    try:
        made = outputs_of(run(network, sample))
        difference = relative_difference(made, wanted, scale=list(sample))
    except Exception as error:  # whatever code of the target raises where it finds a block
        return f"the rebuilt network fails on a calibration sample with {type(error).__name__}: {error}. {cure}"
    explained = AMPLIFIED * max(layer.error for layer in layers)
    if difference <= max(NOTICEABLE, explained):
        return ""
    return (
        f"the output differs by {difference:.1e} of its size from the target's on a calibration sample, though that of "
        f"no layer differs by more than {explained / AMPLIFIED:.1e}. {cure}"
    )


def collapse(network: nn.Module | Reconstruction) -> nn.Module:
    """A copy in which every frozen layer is an ordinary one again, with the weights that its norms encode.

    Norm-only layers that share their gammas become layers that share their weight.
    """
    plain = copy_network(as_network("collapse", network))
    made: dict[FrozenLayer, nn.Module] = {}
    tied: dict[nn.Parameter, nn.Parameter] = {}
    for name, layer in find_frozen(plain).items():
        if layer not in made:
            made[layer] = layer.to_plain()
            carry_hooks(layer, made[layer])
            if isinstance(layer, NormOnlyLayer):
                for own, place in ((layer.gamma, "weight"), (layer.beta, "bias")):
                    if own is not None:
                        setattr(made[layer], place, tied.setdefault(own, made[layer].get_parameter(place)))
        plain = swap(plain, name, made[layer])
    return set_fast_paths(plain)


def _with_biases(network: nn.Module, layers: tuple[TargetLayer, ...]) -> tuple[TargetLayer, ...]:
    """The layers as they are after norms were folded into some of them, which gave those a bias."""
    has_bias = (network.get_submodule(layer.name).bias is not None for layer in layers)
    return tuple(dataclasses.replace(layer, has_bias=bias) for layer, bias in zip(layers, has_bias, strict=True))


def _rebuild(
    target: TargetLayer, layer: nn.Module, seen: Seen, recipe: Recipe, construction: Construction, step: Step | None
) -> tuple[Block, LayerResult]:
    """The block of one layer, and its evidence; errors name the layer."""

    def say(iterations: int, residual: float) -> None:
        assert step is not None
        step(target.name, iterations, residual)

    try:
        made = construction.build(target, layer, seen, recipe, None if step is None else say)
    except UnknownNameError:
        raise
    except OnlynormError as why:
        if repr(target.name) in str(why):
            raise
        raise type(why)(f"layer {target.name!r}: {why}") from why
    is_batch = seen.inputs.ndim >= len(target.shape)
    few = seen.inputs[:N_MEASURED] if is_batch else seen.inputs
    release_free_memory()
    with torch.no_grad():
        # Without the layer's hooks: what it received has been through them already.
        measured = relative_difference([made.block(few)], [layer.forward(few)], scale=[few])
    result = LayerResult(
        target.name, target.shape, made.block.n_features, made.method, made.residual, made.window_error, made.seconds,
        made.shortfall, measured, *_outside(seen, recipe),
    )  # fmt: skip
    return made.block, result


def _outside(seen: Seen, recipe: Recipe) -> tuple[tuple[int, ...] | None, float]:
    """The calibration samples that leave the ranges of the others, and the margin that would hold them."""
    if seen.held_back is None:
        return None, 0.0
    return seen.held_back.outside(_margin(recipe)), float(seen.held_back.needed.max())


def _margin(recipe: Recipe) -> float:
    assert recipe.activation is not None
    return default_margin(recipe.activation) if recipe.margin is None else recipe.margin


def _calibration(results: list[LayerResult], inputs: tuple[Tensor, ...], recipe: Recipe) -> Calibration:
    return Calibration.of(results, n_samples=count_samples(inputs), margin=_margin(recipe))


def _copy_activation(recipe: Recipe, device: torch.device) -> nn.Module | None:
    """The activation that all blocks share: a copy, so that the caller's own is neither cast nor moved."""
    if recipe.activation is None:
        return None
    return copy.deepcopy(recipe.activation).to(device, torch.float64)


def _with_share(recipe: Recipe, share: float | None, choices: dict[str, Any]) -> Recipe:
    """The recipe for a share of the error: a quarter of it to the solver, one to the window, half to rounding."""
    if share is None:
        return recipe
    tolerance, window = (choices.get(name) or share / 4 for name in ("tolerance", "window"))
    return dataclasses.replace(recipe, tolerance=tolerance, window=window)


def _need_positive(error: float) -> float:
    cure = "It is relative to the output; try 1e-8."
    return need_number("error", error, low=0.0, high=1.0, open_low=True, open_high=True, cure=cure)


def _need_tensors(outputs: list[Tensor]) -> list[Tensor]:
    if not outputs:
        raise ConversionError("error needs a network that returns tensors to compare; got none. Return its logits.")
    return outputs


def _need_share(result: LayerResult, share: float | None) -> None:
    if share is not None and not result.error <= share:
        raise ToleranceError(
            f"layer {result.name!r} needs an output error of at most {share:.1e}, its share of the error; measured "
            f"{result.error:.1e} on the calibration batch, with a residual of {result.residual:.1e} and a window error "
            f"of {result.window_error:.1e}. Ask for a larger error, pass a smaller window, or take an activation that "
            "is a line on a half-axis (ReLU)."
        )


def _need_reached(reached: float, error: float) -> None:
    if not reached <= error:
        raise ToleranceError(
            f"the network needs a relative output error of at most {error:.1e}; measured {reached:.1e} on the "
            "calibration batch although every layer kept its share: the layers after amplify it. Ask for an error "
            f"smaller by {reached / error:.1g} to give each layer less."
        )


def _need_ready(network: nn.Module, inputs: Inputs, in_place: bool) -> None:
    """Raises unless the target is a fixed function of finite real numbers that can be calibrated on the inputs."""
    numbers = [p for p in network.parameters() if p.is_floating_point() or p.is_complex()]
    need_open(network)
    need_evaluation("a reconstruction", network)
    dtypes = sorted({str(p.dtype) for p in numbers})
    if dtypes not in (["torch.float32"], ["torch.float64"]):
        cure = "Call network.float() first; the work is done in float64 anyway."
        if not numbers:
            cure = "Pass a network with layers."
        elif any(p.is_complex() for p in numbers):
            cure = "Write complex layers as real ones."
        raise ConversionError(
            "a reconstruction needs a float32 or float64 network; got "
            f"{' and '.join(dtypes) or 'no parameters'}. {cure}"
        )
    for place, module in network.named_modules():
        # Buffers of other modules may well be infinite: masks of attention are.
        own = [*module.named_parameters(recurse=False), *(module.named_buffers() if isinstance(module, NORMS) else ())]
        for name, values in own:
            if not bool(torch.isfinite(values).all()):
                raise ValueRangeError(
                    f"a reconstruction needs finite numbers; got NaN or infinity in the {name} of {place!r}. Load a "
                    "checkpoint from before the training diverged."
                )
    need_batch("calibration", network, inputs)
    if in_place and type(network) in LINEAR + CONVOLUTIONS:
        raise ConversionError(
            f"in_place needs a network around its layers; got a single {type(network).__name__}, which cannot turn "
            "into another module. Leave in_place out and take result.network."
        )
