"""`onlynorm reconstruct`: rebuilds a network from frozen random weights and saves it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from torch import Tensor, nn

from onlynorm.cli.app import AsJson, ClusterName, Excess, FeaturesName, Threads, Workers, app, need_folder
from onlynorm.cli.arguments import (
    ActivationName,
    ConstructionName,
    Data,
    Density,
    Fields,
    ModelName,
    Seed,
    Weights,
    parse_rebuilding,
)
from onlynorm.cli.datasets import find_split
from onlynorm.cli.help import CONSTRUCTION, MODEL_AND_DATA, OUTPUT, REBUILD, RUN, examples, flag, option
from onlynorm.cli.terminal import (
    counter,
    errors,
    layer_bars,
    print_crowding,
    print_facts,
    print_json,
    print_layers,
    screen,
    spinner,
)
from onlynorm.errors import AccuracyWarning, StorageError, UnknownNameError, ValueRangeError
from onlynorm.files import save
from onlynorm.models import BUILT_IN, load_model
from onlynorm.modules import find_layers
from onlynorm.reconstruction import Comparison, compare, reconstruct
from onlynorm.storage import claiming

SAME = {"float64": 1e-8, "float32": 1e-2}
"""Default tolerance of the relative error of the outputs, per dtype."""
Dtype = Annotated[str, option(RUN, "DTYPE", "Dtype of both networks: float32 or float64.", choices=SAME)]


@app.command(
    "reconstruct",
    rich_help_panel=REBUILD,
    epilog=examples(
        "onlynorm reconstruct digits_cnn --excess 1.25 --out net.safetensors",
        "onlynorm reconstruct digits_cnn --features ortho_cond --activation tanh --set kernel=second "
        "--out ortho.safetensors",
        "onlynorm reconstruct onlynorm.models:digits_cnn --data digits --out random.safetensors",
        "onlynorm reconstruct resnet20 --out net20.safetensors",
        note="The last one needs `onlynorm data get resnet20 cifar10` first.",
    ),
)
@claiming("out")
def reconstruct_command(
    model: ModelName,
    weights: Weights = None,
    data: Data = None,
    calibration: Annotated[
        int | None, option(MODEL_AND_DATA, "N", "Number of calibration samples (default: up to 64).", min=1)
    ] = None,
    images: Annotated[
        int | None,
        option(MODEL_AND_DATA, "N", "Number of test samples (default: up to 64); 0 skips verification.", min=0),
    ] = None,
    features: FeaturesName = "he_normal",
    excess: Excess = None,
    density: Density = None,
    seed: Seed = 0,
    construction: ConstructionName = "wide",
    activation: ActivationName = "relu",
    fold_norms: Annotated[
        bool, flag(CONSTRUCTION, "Fold batch norms into their layers first.", "--fold-norms")
    ] = False,
    fields: Fields = None,
    dtype: Dtype = "float64",
    tolerance: Annotated[
        float | None, option(RUN, "X", "Maximum residual of every layer; fails if it is larger.")
    ] = None,
    error: Annotated[
        float | None, option(RUN, "X", "Maximum relative error of the outputs; fails if it is larger.")
    ] = None,
    workers: Workers = None,
    cluster: ClusterName = None,
    threads: Threads = 1,
    out: Annotated[Path, option(OUTPUT, "FILE", "Output file with the seed and the norms.")] = Path("net.safetensors"),
    as_json: AsJson = False,
) -> None:
    """Rebuild a trained network from frozen random weights and trained norms, and verify it.

    Finished layers are stored in a folder next to the output file; the same command resumes after an interruption.
    """
    kind = parse_dtype(dtype)
    how = parse_rebuilding(
        construction, fields, features=features, excess=excess, density=density, activation=activation
    )
    if out.is_dir():
        raise StorageError(f"--out needs a file name; {out} is a folder. Try {out / 'net.safetensors'}.")
    need_folder(out.parent, what="networks")
    print_crowding(workers, cluster, threads)
    with spinner("reconstruct", hidden=as_json) as status:
        status("loading model and data")
        target = load_target(model, weights).to(kind)
        split = find_split(data, model)
    batch = first_samples(split.train_inputs, calibration, default=64, option="--calibration").to(kind)
    test = first_samples(split.test_inputs, images, default=64, option="--images")
    partial = out.with_name(f"{out.name}.partial")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AccuracyWarning)  # the result lists the layers
            with _bars(target, hidden=as_json, is_parallel=workers not in (None, 1) or cluster is not None) as shown:
                result = reconstruct(
                    target, batch, how.construction, seed=seed, ranges=how.ranges, tolerance=tolerance, error=error,
                    storage=how.storage, fold_norms=fold_norms, partial=partial, workers=workers, cluster=cluster,
                    threads=threads, **shown,
                )  # fmt: skip
    except KeyboardInterrupt:
        if partial.exists():
            errors.print(f"Finished layers are in {escape(str(partial))}: run the same command again to resume.")
        raise
    save(result, out)
    comparison = None
    if len(test):
        with counter("verifying", hidden=as_json) as progress:
            labels = split.test_labels[: len(test)]
            comparison = compare(target, result.network, test, labels=labels, progress=progress)
    facts: dict[str, Any] = {
        "file": str(out),
        "bytes": out.stat().st_size,
        "n_norm_parameters": result.n_norm_parameters,
        "threads": result.threads,
        "solve_seconds": sum(layer.seconds for layer in result.layers),
        "max_residual": max(layer.residual for layer in result.layers),
        "left": [str(item) for item in result.left],
        "calibration": "" if result.calibration is None else str(result.calibration),
    } | (comparison_facts(comparison, SAME[dtype]) if comparison is not None else {})
    if as_json:
        calibration_check = None if result.calibration is None else result.calibration.as_dict()
        rows = [row.as_dict() for row in result.layers]
        print_json(facts | {"layers": rows, "calibration": calibration_check, "warnings": list(result.warnings)})
    else:
        print_layers(result)
        print_facts(f"{model} from {result.construction.features} features, seed {seed}", facts)
        print_rounding(comparison, dtype)
    exit_unless_same(comparison, SAME[dtype], as_json)


@contextmanager
def _bars(target: nn.Module, *, hidden: bool, is_parallel: bool) -> Iterator[dict[str, Any]]:
    """Keyword arguments of `reconstruct` that show its progress: layers at work on all workers, or the residual."""
    if is_parallel:
        with counter("layers", hidden=hidden, shows_message=True) as progress:
            yield {"progress": progress}
    else:
        with layer_bars([layer.name for layer in find_layers(target).layers], hidden=hidden) as on_step:
            yield {"on_step": on_step}


def load_target(model: str, weights: Path | None) -> nn.Module:
    """The network to rebuild; prints a message if its weights are not trained."""
    if weights is None and model in BUILT_IN and not BUILT_IN[model].is_trained:
        errors.print(f"{model} has untrained random weights; pass --weights FILE for trained ones.", highlight=False)
    return load_model(model, weights)


def comparison_facts(comparison: Comparison, tolerance: float) -> dict[str, Any]:
    """The result of a comparison as a dictionary."""
    check = comparison.check
    facts: dict[str, Any] = {
        "n_samples": check.n_samples,
        "relative_error": check.relative_error,
        "tolerance": tolerance,
        "max_error": check.max_error,
        "n_not_finite": check.n_not_finite,
        "agreement": check.agreement,
        "outside": check.outside,
        "is_reproducible": check.is_reproducible,
        "compare_seconds": comparison.seconds,
    }
    if comparison.target_accuracy is not None and comparison.network_accuracy is not None:
        facts |= {
            "target_accuracy": comparison.target_accuracy,
            "network_accuracy": comparison.network_accuracy,
        }
    return facts | {"is_same_function": _is_same(comparison, tolerance)}


def _is_same(comparison: Comparison, tolerance: float) -> bool:
    return comparison.check.relative_error <= tolerance and comparison.check.is_reproducible


def print_rounding(comparison: Comparison | None, dtype: str) -> None:
    """Says in one line why errors in float32 and in float64 differ."""
    if comparison is None:
        return
    ratio = f"{torch.finfo(torch.float32).eps / torch.finfo(torch.float64).eps:.0e}".replace("e+0", "e")
    effect = ", hence the larger error" if dtype == "float32" else " and would show larger errors"
    screen.print(f"float32 rounds {ratio} times as coarsely as float64{effect}.", highlight=False)


def exit_unless_same(comparison: Comparison | None, tolerance: float, as_json: bool) -> None:
    """Exits with 1 if the two networks differ by more than the tolerance."""
    if comparison is None:
        return
    is_same = _is_same(comparison, tolerance)
    if not as_json:
        screen.print(f"\nThe network {'computes' if is_same else 'does NOT compute'} the same function as the target.")
    if not is_same:
        raise typer.Exit(1)


def first_samples(samples: Tensor, n_samples: int | None, *, default: int, option: str) -> Tensor:
    """The first `n_samples` samples, by default up to `default`; raises if there are fewer than `n_samples`."""
    if n_samples is not None and n_samples > len(samples):
        raise ValueRangeError(
            f"{option}: {n_samples} samples need as many in the data; got {len(samples)}. Pass fewer."
        )
    return samples[: default if n_samples is None else n_samples]


def parse_dtype(name: str) -> torch.dtype:
    """The torch dtype of this name."""
    if name not in SAME:
        raise UnknownNameError("dtype", name, SAME)
    dtype: torch.dtype = getattr(torch, name)
    return dtype
