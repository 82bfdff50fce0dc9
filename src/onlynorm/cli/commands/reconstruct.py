"""`onlynorm reconstruct`: rebuilds a network by its norms and writes it to a file."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from torch import Tensor, nn

from onlynorm.cli.app import AsJson, Excess, FeaturesName, app, need_folder
from onlynorm.cli.arguments import (
    ActivationName,
    ConstructionName,
    Data,
    Density,
    Fields,
    Seed,
    Weights,
    recipe_choices,
)
from onlynorm.cli.datasets import find_split
from onlynorm.cli.terminal import counter, errors, layer_bars, print_facts, print_json, print_layers, screen
from onlynorm.errors import AccuracyWarning, StorageError, UnknownNameError, ValueRangeError
from onlynorm.memory import readable
from onlynorm.models import BUILT_IN, load_model
from onlynorm.modules import find_layers
from onlynorm.reconstruction import reconstruct, save
from onlynorm.reconstruction.verify import Comparison, compare
from onlynorm.storage import claiming

SAME = {"float64": 1e-8, "float32": 1e-2}
"""Relative error of the outputs up to which two networks count as the same function, by the precision they run in."""
Dtype = Annotated[str, typer.Option(help="Precision in which both networks run: float32 or float64.")]


@app.command(
    "reconstruct",
    epilog="Examples: `onlynorm reconstruct resnet20 --excess 1.25 --out net.safetensors`, "
    "`onlynorm reconstruct mlp --weights mlp.pt --data digits --features ortho_cond`, "
    "`onlynorm reconstruct my.models:make --data batch.npy --activation tanh --set kernel=second`",
)
@claiming("out")
def reconstruct_command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A built-in name such as resnet20, or package.module:factory.")
    ],
    out: Annotated[Path, typer.Option(help="The file to write: the seed and the norms.")] = Path("net.safetensors"),
    weights: Weights = None,
    data: Data = None,
    calibration: Annotated[
        int | None, typer.Option(min=1, help="Training samples that set ranges and statistics (up to 64 if left out).")
    ] = None,
    images: Annotated[
        int | None, typer.Option(min=0, help="Test samples to verify on (up to 64 if left out); 0 leaves it out.")
    ] = None,
    features: FeaturesName = "he_normal",
    excess: Excess = None,
    density: Density = None,
    seed: Seed = 0,
    activation: ActivationName = "relu",
    construction: ConstructionName = "wide",
    tolerance: Annotated[float | None, typer.Option(help="Residual every layer must reach, or else fail.")] = None,
    error: Annotated[float | None, typer.Option(help="Relative error of the outputs to reach, or else fail.")] = None,
    fold_norms: Annotated[bool, typer.Option("--fold-norms", help="Fold batch norms into their layers first.")] = False,
    dtype: Dtype = "float64",
    fields: Fields = None,
    as_json: AsJson = False,
) -> None:
    """Rebuild a trained network from frozen random weights, by its norms only, and verify it.

    Finished layers are stored in a folder beside the output, so that the same command resumes after an interruption.
    """
    kind = parse_dtype(dtype)
    choices = recipe_choices(
        fields, activation=activation, construction=construction, features=features, excess=excess, density=density,
        seed=seed, tolerance=tolerance,
    )  # fmt: skip
    if out.is_dir():
        raise StorageError(f"--out needs the name of a file; {out} is a folder. Try {out / 'net.safetensors'}.")
    need_folder(out.parent, what="networks")
    target = load_target(model, weights).to(kind)
    split = find_split(data, model)
    batch = first_samples(split.train_inputs, calibration, usual=64).to(kind)
    test = first_samples(split.test_inputs, images, usual=64)
    partial = out.with_name(f"{out.name}.partial")
    try:
        names = [layer.name for layer in find_layers(target).layers]
        with layer_bars(names, hidden=as_json) as step, warnings.catch_warnings():
            warnings.simplefilter("ignore", AccuracyWarning)  # the result lists the layers
            result = reconstruct(
                target, inputs=batch, error=error, fold_norms=fold_norms, partial=partial, step=step, **choices
            )
    except KeyboardInterrupt:
        if partial.exists():
            errors.print(f"Finished layers are in {escape(str(partial))}: the same command resumes from there.")
        raise
    save(result, out)
    comparison = None
    if len(test):
        with counter("verifying", hidden=as_json) as step:
            comparison = compare(target, result.network, inputs=test, labels=split.test_labels[: len(test)], step=step)
    facts: dict[str, Any] = {
        "file": str(out),
        "size": readable(out.stat().st_size),
        "norm parameters": result.n_norm_parameters,
        "seconds of solving": sum(layer.seconds for layer in result.layers),
        "largest residual": max(layer.residual for layer in result.layers),
        "left as it is": [str(item) for item in result.left],
        "calibration": "" if result.calibration is None else str(result.calibration),
    } | (comparison_facts(comparison, SAME[dtype]) if comparison is not None else {})
    if as_json:
        calibration_check = None if result.calibration is None else result.calibration.as_dict()
        rows = [dataclasses.asdict(row) for row in result.layers]
        print_json(
            facts
            | {"bytes": out.stat().st_size, "layers": rows, "calibration": calibration_check}
            | {"warnings": list(result.warnings)}
        )
    else:
        print_layers(result)
        print_facts(f"{model} from {result.recipe.features} features, seed {result.recipe.seed}", facts)
    exit_unless_same(comparison, SAME[dtype], as_json)


def load_target(model: str, weights: Path | None) -> nn.Module:
    """The network to rebuild; says so where it is a built-in one that nobody has trained."""
    if weights is None and model in BUILT_IN and not BUILT_IN[model].weights:
        errors.print(f"{model} has its initial random weights; --weights FILE gives it trained ones.", highlight=False)
    return load_model(model, weights)


def comparison_facts(comparison: Comparison, tolerance: float) -> dict[str, Any]:
    """What a comparison measured, by name."""
    check = comparison.check
    facts: dict[str, Any] = {
        "samples": check.n_samples,
        "relative error of the outputs": check.relative_error,
        "accepted": tolerance,
        "largest error of an output": check.max_error,
        "samples with NaN or infinity": check.n_not_finite,
        "same prediction": check.agreement,
        "outside the calibrated range": check.outside,
        "every frozen weight comes from the seed": check.is_reproducible,
        "seconds of comparing": comparison.seconds,
    }
    if comparison.target_accuracy is not None and comparison.network_accuracy is not None:
        facts |= {
            "accuracy of the target": comparison.target_accuracy,
            "accuracy of the network": comparison.network_accuracy,
        }
    return facts | {"same function": _is_same(comparison, tolerance)}


def _is_same(comparison: Comparison, tolerance: float) -> bool:
    return comparison.check.relative_error <= tolerance and comparison.check.is_reproducible


def exit_unless_same(comparison: Comparison | None, tolerance: float, as_json: bool) -> None:
    """Ends with code 1 where the two networks differ by more than the tolerance."""
    if comparison is None:
        return
    is_same = _is_same(comparison, tolerance)
    if not as_json:
        screen.print(f"\nThe network {'computes' if is_same else 'does NOT compute'} the same function as the target.")
    if not is_same:
        raise typer.Exit(1)


def first_samples(samples: Tensor, asked: int | None, *, usual: int) -> Tensor:
    """So many samples from the front; an error where there are fewer than were asked for."""
    if asked is not None and asked > len(samples):
        raise ValueRangeError(f"{asked} samples need as many in the data; got {len(samples)}. Ask for fewer.")
    return samples[: usual if asked is None else asked]


def parse_dtype(name: str) -> torch.dtype:
    """The torch dtype of this name."""
    if name not in SAME:
        raise UnknownNameError("dtype", name, SAME)
    dtype: torch.dtype = getattr(torch, name)
    return dtype
