"""`reconstruct`: a trained network -> the same function from frozen random layers whose norms were chosen.

Each Linear and Conv layer is swapped in place for a block with the same signature; everything between them stays. The
work is done on a copy in float64; the target is not touched unless `in_place`, and then only when all is done. What
every layer receives on the calibration batch is held in memory until its turn.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onlynorm.errors import ConversionError, OnlynormError, ToleranceError, UnknownNameError, ValueRangeError
from onlynorm.reconstruction.blocks import Block, find_blocks
from onlynorm.reconstruction.calibration import see
from onlynorm.reconstruction.calls import (
    Inputs,
    as_tuple,
    cast,
    copy_network,
    need_batch,
    need_evaluation,
    outputs_of,
    precision,
    relative_difference,
    run,
)
from onlynorm.reconstruction.folding import fold_network, folded_places
from onlynorm.reconstruction.partial import Partial, fingerprint, tensors_digest
from onlynorm.reconstruction.places import swap
from onlynorm.reconstruction.ranges import Box, Seen
from onlynorm.reconstruction.recipe import Construction, Recipe, make_recipe
from onlynorm.reconstruction.result import LayerResult
from onlynorm.reconstruction.result import Reconstruction as Reconstruction
from onlynorm.reconstruction.target import CONVOLUTIONS, LINEAR, NORMS, TargetLayer, find_layers

Step = Callable[[str, int, float], None]
"""Called with (layer, iterations so far, relative residual); once with 0 iterations for a layer that was resumed."""
N_MEASURED = 4
"""Samples on which errors are measured: a forward pass of blocks costs as much as hundreds of the target's."""


def reconstruct(
    network: nn.Module,
    *,
    inputs: Inputs,
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

    - `inputs`: a batch, or a tuple of batches for a network that takes several.
    - `error`: relative error of the network's output that must be reached in float64. Every layer gets an equal share,
      which sets its solver tolerance and its window unless they are given, and is measured on a few samples.
    - `box`: certifies the ranges for every input inside, by interval arithmetic, in place of the calibrated ones.
    - `fold_norms`: batch norms that directly follow a layer become part of it first.
    - `partial`: folder that keeps every finished layer; the same call resumes behind the last one. It stays until
      `save(result, path)` has written the whole.

    Theory: giannou2023:thm-1, burkholz2024:thm-2.3, burkholz2024:composition
    """
    recipe, construction = make_recipe(**choices)
    _need_ready(network, inputs, in_place)
    given = cast(inputs, torch.float64)
    rebuilt = copy_network(network).double().eval()
    folded: tuple[str, ...] = ()
    if fold_norms:
        made = fold_network(rebuilt, given)
        rebuilt, folded = made.network, made.names
    found = find_layers(rebuilt, strict=strict)
    share = None if error is None else _need_positive(error) / len(found.layers)
    recipe = _with_share(recipe, share, choices)
    recipe = dataclasses.replace(recipe, precision=recipe.precision or str(precision(network)).removeprefix("torch."))
    kept = None
    if partial is not None:
        bounds = None if box is None else tensors_digest({"low": box.low, "high": box.high})
        ways = {"error": error, "fold_norms": fold_norms, "box": bounds}
        kept = Partial(Path(partial), fingerprint(recipe, network, as_tuple(inputs), **ways))
    few = _first_samples(given)
    wanted = [] if error is None else _need_tensors(outputs_of(run(rebuilt, few)))
    seen = see(rebuilt, found.layers, given, box)
    working = dataclasses.replace(recipe, activation=_copy_activation(recipe, given[0].device))
    results = []
    for number, target in enumerate(found.layers):
        layer, received = rebuilt.get_submodule(target.name), seen.pop(target.name)
        finished = None if kept is None else kept.find(number, target, layer, working)
        if finished is None:
            block, result = _rebuild(target, layer, received, working, construction, step)
            if kept is not None:
                kept.keep(number, target, block, dataclasses.asdict(result))
        else:
            block, result = finished[0].to(given[0].device), LayerResult.from_dict(finished[1])
            if step is not None:
                step(target.name, 0, result.residual)
        _need_share(result, share)
        for name in target.names:
            rebuilt = swap(rebuilt, name, block)
        results.append(result)
    reached = None
    if error is not None:
        reached = relative_difference(outputs_of(run(rebuilt, few)), wanted, scale=list(few))
        _need_reached(reached, error)
    rebuilt = rebuilt.to(precision(network)).eval()
    if in_place:
        for name in (*find_blocks(rebuilt), *folded_places(rebuilt)):
            swap(network, name, rebuilt.get_submodule(name))
        rebuilt = network.eval()
    folder = None if kept is None else kept.folder
    return Reconstruction(rebuilt, tuple(results), found.left, recipe, folded, reached, folder)


def collapse(network: nn.Module) -> nn.Module:
    """A copy in which every block is an ordinary layer again, with the weights that its norms encode."""
    plain = copy_network(network)
    made: dict[Block, nn.Module] = {}
    for name, block in find_blocks(plain).items():
        if block not in made:
            made[block] = block.to_plain()
        plain = swap(plain, name, made[block])
    return plain


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
    with torch.no_grad():
        measured = relative_difference([made.block(few)], [layer(few)], scale=[few])
    result = LayerResult(
        target.name, target.shape, made.block.n_features, made.method, made.residual, made.window_error, made.seconds,
        made.shortfall, measured,
    )  # fmt: skip
    return made.block, result


def _copy_activation(recipe: Recipe, device: torch.device) -> nn.Module | None:
    """The activation that all blocks share: a copy, so that the caller's own is neither cast nor moved."""
    if recipe.activation is None:
        return None
    if not isinstance(recipe.activation, nn.Module):
        raise ValueRangeError(
            f"activation needs a module, which a block can hold; got {recipe.activation!r}. Pass torch.nn.Tanh() for "
            "torch.tanh; wrap a function of your own in a module."
        )
    return copy.deepcopy(recipe.activation).to(device, torch.float64)


def _first_samples(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The first few samples, if all inputs have as many."""
    if any(x.ndim == 0 or len(x) != len(inputs[0]) for x in inputs):
        return inputs
    return tuple(x[:N_MEASURED] for x in inputs)


def _with_share(recipe: Recipe, share: float | None, choices: dict[str, Any]) -> Recipe:
    """The recipe for a share of the error: a quarter of it to the solver, one to the window, half to rounding."""
    if share is None:
        return recipe
    tolerance, window = (choices.get(name) or share / 4 for name in ("tolerance", "window"))
    return dataclasses.replace(recipe, tolerance=tolerance, window=window)


def _need_positive(error: float) -> float:
    if not 0.0 < error < 1.0:
        raise ValueRangeError(f"error needs a number in (0, 1), relative to the output; got {error}. Try 1e-8.")
    return error


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
            "calibration batch although every layer kept its share: the layers behind amplify it. Ask for an error "
            f"smaller by {reached / error:.1g} to give each layer less."
        )


def _need_ready(network: nn.Module, inputs: Inputs, in_place: bool) -> None:
    """Raises unless the target is a fixed function of finite real numbers that can be calibrated on the inputs."""
    numbers = [p for p in network.parameters() if p.is_floating_point() or p.is_complex()]
    if any(p.is_meta for p in numbers):
        raise ConversionError("a reconstruction needs weights; got a network on the meta device. Load its weights.")
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
