"""`onlynorm tune`: train only the norms of a model and keep what was learned as an adapter."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from torch import Tensor, nn

from onlynorm.cli.app import AsJson, app, need_folder
from onlynorm.cli.arguments import Weights
from onlynorm.cli.datasets import AnyData, Parts, find_parts
from onlynorm.cli.terminal import counter, errors, print_facts, print_json
from onlynorm.errors import (
    ConversionError,
    OnlynormError,
    ShapeError,
    StorageError,
    TrainingError,
    UnknownNameError,
    ValueRangeError,
)
from onlynorm.memory import readable
from onlynorm.models import BUILT_IN, load_model
from onlynorm.modules import find_output
from onlynorm.storage import claiming, digest
from onlynorm.tuning import Fit, NormHandle, Schedule, accuracy, fit, load_adapter, only_norms, save_adapter
from onlynorm.tuning.adapter import DTYPES
from onlynorm.tuning.batches import AUGMENTATIONS, Pairs, epoch_batches
from onlynorm.tuning.fingerprint import fingerprint
from onlynorm.tuning.only_norms import STATISTICS
from onlynorm.tuning.train import OPTIMIZERS, make_fabric

RATES = {"sgd": 0.1, "adamw": 1e-3}
"""Learning rates that are taken where none is asked for."""
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
"""Those that leave the weights of the base model as they are: an adapter has to fit them."""
SAVE_EVERY = 25
"""Steps that are lost at most to an interruption."""


@dataclass(frozen=True, kw_only=True)
class Command(Schedule):
    """A schedule with everything else that makes a run what it is, so that no other run resumes it."""

    base: str
    data: str
    statistics: str
    trained: str


@app.command(
    "tune",
    epilog="Examples: `onlynorm tune resnet20 --data photos --also linear --adapter photos.safetensors`, "
    "`onlynorm tune mlp_bn --data digits --epochs 5 --json`, "
    "`onlynorm tune my.models:make --weights base.pt --data own.safetensors --statistics freeze --which 'layer4.*' "
    "--optimizer adamw --lr 0.002 --dtype float16`, "
    "`onlynorm tune my.models:make --data my.data:train_and_test`",
)
@claiming("adapter")
def tune_command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A built-in name such as resnet20, or package.module:factory.")
    ],
    adapter: Annotated[Path, typer.Option(help="The file to write: the norms, and the heads if there are any.")] = Path(
        "adapter.safetensors"
    ),
    data: AnyData = None,
    weights: Weights = None,
    also: Annotated[
        list[str] | None, typer.Option(help="Module or parameter to train beside the norms, as in --also head.")
    ] = None,
    statistics: Annotated[str, typer.Option(help=f"What running statistics do: {', '.join(STATISTICS)}.")] = "track",
    which: Annotated[str | None, typer.Option(help="Pattern of the norms to train, as in 'layer4.*'.")] = None,
    epochs: Annotated[int, typer.Option(help="Passes over the training samples.")] = 10,
    batch_size: Annotated[int, typer.Option(help="Samples of one step.")] = 128,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate (0.1 for sgd, 0.001 for adamw).")] = None,
    optimizer: Annotated[str, typer.Option(help=f"One of {', '.join(OPTIMIZERS)}.")] = "sgd",
    weight_decay: Annotated[float, typer.Option(min=0.0, help="Decay of what is trained.")] = 0.0,
    warmup: Annotated[float, typer.Option(help="Share of the steps in which the rate rises; a cosine follows.")] = 0.05,
    label_smoothing: Annotated[float, typer.Option(help="Share of each label that goes to all classes.")] = 0.0,
    augmentation: Annotated[str, typer.Option(help=f"Of images: {', '.join(AUGMENTATIONS)}.")] = "none",
    patience: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many epochs without a smaller training loss.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the order of samples, augmentation and splits.")] = 0,
    devices: Annotated[str, typer.Option(help="How many devices, or auto.")] = "1",
    precision: Annotated[str, typer.Option(help=f"One of {', '.join(PRECISIONS)}.")] = "32-true",
    strategy: Annotated[str, typer.Option(help="How devices share the work, as Lightning names it: ddp.")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="Round the numbers in the file: float16.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Where the run is kept; beside the adapter until it is written if left out.")
    ] = None,
    logs: Annotated[Path | None, typer.Option(help="Folder for a CSV table and TensorBoard events.")] = None,
    image_size: Annotated[
        int | None, typer.Option(min=1, help="Side to which images of a folder are scaled (the model's own, or 32).")
    ] = None,
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="Leave out images that cannot be read instead of stopping.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train only the norms of a model, everything else frozen, and write them as an adapter.

    Interrupted, the same command resumes, with the results of a run that was not interrupted. A folder of images
    has one subfolder per class, or train and test with the classes below. Exits with 1 if the loss is NaN or infinite.
    """
    started = time.perf_counter()
    for kind, name, known in (
        ("optimizer", optimizer, OPTIMIZERS), ("augmentation", augmentation, AUGMENTATIONS),
        ("precision", precision, PRECISIONS), ("dtype", dtype or "float32", DTYPES),
    ):  # fmt: skip
        if name not in known:
            raise UnknownNameError(kind, name, known)
    plain = Schedule(
        epochs=epochs, batch_size=batch_size, optimizer=optimizer, lr=RATES[optimizer] if lr is None else lr,
        weight_decay=weight_decay, warmup=warmup, label_smoothing=label_smoothing, augmentation=augmentation,
        patience=patience, seed=seed,
    )  # fmt: skip
    shared: dict[str, Any] = {"devices": _parse_devices(devices), "strategy": strategy, "precision": precision}
    _need_fabric(shared)
    if adapter.is_dir():
        raise StorageError(
            f"--adapter needs the name of a file; {adapter} is a folder. Try {adapter / 'a.safetensors'}."
        )
    for path in (adapter, *(() if checkpoint is None else (checkpoint,))):
        need_folder(path.parent, what="adapters")
    network, base = _load_twice(model, weights)
    handle = only_norms(network, also=also or (), statistics=statistics, which=which)
    schedule = Command(
        **vars(plain), base=digest(fingerprint(base, ())), data=f"{data} {image_size}", statistics=statistics,
        trained=digest([name for name, _ in handle.named_parameters()]),
    )  # fmt: skip
    parts = find_parts(data, model, image_size=image_size, seed=seed, skip_unreadable=skip_unreadable)
    _need_outputs(network, parts, model)
    for path in parts.unreadable:
        errors.print(f"left out, cannot be read: {escape(str(path))}", highlight=False)
    before = accuracy(network, parts.test)
    if statistics == "recalibrate":
        handle.recalibrate(_inputs(parts.train, schedule))
    kept = adapter.with_name(f"{adapter.name}.run") if checkpoint is None else checkpoint
    result = _train(network, parts, schedule=schedule, kept=kept, logs=logs, hidden=as_json, shared=shared)
    if any(os.environ.get(rank, "0") != "0" for rank in ("RANK", "NODE_RANK", "LOCAL_RANK")):
        return  # the first of several processes writes and tells
    save_adapter(network, adapter, dtype=dtype)
    load_adapter(base, adapter)  # what counts is the base model with the file as it now is
    facts = _facts(handle, adapter) | {
        "accuracy before": before,
        "accuracy after": accuracy(base, parts.test),
        "test samples": len(parts.test),
        "epochs": len(result.history),
        "steps": result.n_steps,
        "stopped because": result.reason,
        "images left out": len(parts.unreadable),
        "seconds": time.perf_counter() - started,
    }
    if checkpoint is None:
        kept.unlink(missing_ok=True)
    if as_json:
        print_json(facts | {"bytes": adapter.stat().st_size, "history": list(result.history)})
    else:
        print_facts(f"{model}, tuned by its norms", facts)


def _train(
    network: nn.Module,
    parts: Parts,
    *,
    schedule: Schedule,
    kept: Path,
    logs: Path | None,
    hidden: bool,
    shared: dict[str, Any],
) -> Fit:
    """What training gave, under a bar; says where the run is if it was interrupted."""
    try:
        with counter("tuning", hidden=hidden) as show:
            return fit(
                network, parts.train, schedule=schedule, checkpoint=kept, save_every=SAVE_EVERY, logs=logs,
                step=lambda done, total, loss: show(done, total), **shared,
            )  # fmt: skip
    except KeyboardInterrupt:
        if kept.exists():
            errors.print(f"The run is in {escape(str(kept))}: the same command resumes from there.", highlight=False)
        raise
    except TrainingError as error:
        errors.print(f"[red]failed:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from error


def _load_twice(model: str, weights: Path | None) -> tuple[nn.Module, nn.Module]:
    """The model to train and the same once more, on which the adapter will have to fit."""
    if weights is None and model in BUILT_IN and not BUILT_IN[model].weights:
        errors.print(f"{model} has its initial random weights; --weights FILE gives it trained ones.", highlight=False)
    network, base = (load_model(model, weights) for _ in range(2))
    if base is network:
        raise ConversionError(f"tuning needs a function that makes the model; {model} is a model. Write a function.")
    if fingerprint(network, ()) != fingerprint(base, ()):
        raise ConversionError(
            f"an adapter needs a base model that comes out the same each time; {model} gives other weights. Pass "
            "--weights FILE, or draw them from a seed."
        )
    return network, base


@torch.no_grad()
def _need_outputs(network: nn.Module, parts: Parts, model: str) -> None:
    """Raises unless the model takes the samples and has an output for each class."""
    sample = torch.as_tensor(parts.train[0][0])
    try:
        logits = find_output(network.eval()(sample[None]))
    except OnlynormError:
        raise
    except Exception as error:  # whatever the model says belongs beside the shape it was given
        told = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ShapeError(
            f"{model} needs samples it can take; got one of shape {tuple(sample.shape)} ({told}). "
            "Pass other --data, or another --image-size."
        ) from error
    if logits.ndim != 2 or logits.shape[1] < parts.n_classes:
        raise ShapeError(
            f"{model} needs an output for each of {parts.n_classes} classes; got outputs of shape "
            f"{tuple(logits.shape[1:])}. Make the model with a head of that size, and train it along by --also."
        )


def _facts(handle: NormHandle, adapter: Path) -> dict[str, Any]:
    return {
        "file": str(adapter),
        "size": readable(adapter.stat().st_size),
        "norms": len(handle.norms),
        "trained numbers": handle.n_trainable,
        "of all numbers": handle.n_total,
        "left as they are": [str(item) for item in handle.skipped],
    }


def _inputs(pairs: Pairs, schedule: Schedule) -> Iterator[Tensor]:
    for _, inputs, _ in epoch_batches(pairs, batch_size=schedule.batch_size, seed=schedule.seed, epoch=0):
        yield inputs


def _parse_devices(text: str) -> int | str:
    if text != "auto" and not (text.isdecimal() and int(text) > 0):
        raise ValueRangeError(f"--devices needs a positive number or auto; got {text!r}. Try 1.")
    return text if text == "auto" else int(text)


def _need_fabric(shared: dict[str, Any]) -> None:
    """Raises what this machine or Lightning has against the devices and the strategy before anything is loaded."""
    try:
        make_fabric("auto", **shared, loggers=[])
    except ValueRangeError as error:
        raise ValueRangeError(f"--devices and --strategy need what this machine has; got {error}") from error
