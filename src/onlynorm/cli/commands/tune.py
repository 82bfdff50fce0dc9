"""`onlynorm tune`: trains only the norms of a model and saves them as an adapter."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from torch import Tensor, nn

from onlynorm.cli.app import AsJson, app, need_folder
from onlynorm.cli.arguments import ModelName, Weights
from onlynorm.cli.datasets import AnyData, ImageSize, TrainTest, corrupt_split, find_parts
from onlynorm.cli.help import MODEL_AND_DATA, OUTPUT, RUN, TRAIN, TRAINED, TRAINING, examples, flag, option
from onlynorm.cli.terminal import counter, errors, print_facts, print_json, spinner
from onlynorm.data import CORRUPTIONS
from onlynorm.errors import (
    ConversionError,
    OnlynormError,
    ShapeError,
    StorageError,
    TrainingError,
    UnknownNameError,
    ValueRangeError,
)
from onlynorm.frozen import PRECISIONS as DTYPES
from onlynorm.models import BUILT_IN, load_model
from onlynorm.modules import find_output
from onlynorm.storage import claiming, digest
from onlynorm.tuning import (
    OPTIMIZERS,
    STATISTICS,
    Fit,
    NormHandle,
    Schedule,
    accuracy,
    batches,
    fingerprint,
    fit,
    load_adapter,
    make_fabric,
    only_norms,
    save_adapter,
)

RATES = {"sgd": 0.1, "adamw": 1e-3}
"""Default learning rates."""
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
"""Precisions that do not change the weights of the base model, which an adapter must fit."""
SAVE_EVERY = 25
"""Steps between checkpoints."""


@dataclass(frozen=True, kw_only=True)
class RunSettings(Schedule):
    """A schedule with all other settings of a run, so that a run with other settings does not resume it."""

    base: str
    data: str
    statistics: str
    trained: str


@app.command(
    "tune",
    rich_help_panel=TRAIN,
    epilog=examples(
        "onlynorm tune digits_cnn --corrupt contrast",
        "onlynorm tune digits_cnn --corrupt blur --statistics recalibrate --which 5 --also 13 "
        "--adapter blur.safetensors",
        "onlynorm tune onlynorm.models:digits_cnn --data onlynorm.data:digits --dtype float16 --json",
        "onlynorm tune resnet20 --corrupt noise --epochs 3",
        note="The last one needs `onlynorm data get resnet20 cifar10` first.",
    ),
)
@claiming("adapter")
def tune_command(
    model: ModelName,
    data: AnyData = None,
    weights: Weights = None,
    corruption: Annotated[
        str | None,
        option(
            MODEL_AND_DATA,
            "NAME",
            f"Tune and test on corrupted images: {', '.join(CORRUPTIONS)}.",
            "--corrupt",
            choices=CORRUPTIONS,
        ),
    ] = None,
    severity: Annotated[
        float, option(MODEL_AND_DATA, "X", "Severity of the corruption, from 0 to 5.", min=0.0, max=5.0)
    ] = 3.0,
    image_size: ImageSize = None,
    skip_unreadable: Annotated[
        bool, flag(MODEL_AND_DATA, "Skip images that cannot be read.", "--skip-unreadable")
    ] = False,
    which: Annotated[str | None, option(TRAINED, "PATTERN", "Pattern of the norms to train, as in 'layer4.*'.")] = None,
    also: Annotated[
        list[str] | None,
        option(
            TRAINED,
            "NAME",
            "Module or parameter to train in addition to the norms, as in --also head; can be repeated.",
        ),
    ] = None,
    statistics: Annotated[
        str,
        option(TRAINED, "NAME", f"Running statistics: {', '.join(STATISTICS)}.", choices=STATISTICS),
    ] = "track",
    epochs: Annotated[int, option(TRAINING, "N", "Number of epochs.")] = 10,
    batch_size: Annotated[int, option(TRAINING, "N", "Samples per step.", min=1)] = 128,
    optimizer: Annotated[str, option(TRAINING, "NAME", f"One of {', '.join(OPTIMIZERS)}.", choices=OPTIMIZERS)] = "sgd",
    lr: Annotated[float | None, option(TRAINING, "X", "Peak learning rate (0.1 for sgd, 0.001 for adamw).")] = None,
    warmup: Annotated[
        float, option(TRAINING, "X", "Fraction of steps with rising learning rate; a cosine follows.")
    ] = 0.05,
    weight_decay: Annotated[float, option(TRAINING, "X", "Weight decay of the trained parameters.", min=0.0)] = 0.0,
    label_smoothing: Annotated[float, option(TRAINING, "X", "Label smoothing of the cross entropy.")] = 0.0,
    augmentation: Annotated[
        str,
        option(
            TRAINING,
            "NAME",
            f"Augmentation of images: {', '.join(batches.AUGMENTATIONS)}.",
            choices=batches.AUGMENTATIONS,
        ),
    ] = "none",
    patience: Annotated[
        int | None, option(TRAINING, "N", "Stop after this many epochs without a smaller training loss.", min=1)
    ] = None,
    seed: Annotated[int, option(TRAINING, "N", "Seed of the order of samples, augmentation and splits.", min=0)] = 0,
    devices: Annotated[str, option(RUN, "N", "Number of devices, or auto.")] = "1",
    precision: Annotated[str, option(RUN, "NAME", f"One of {', '.join(PRECISIONS)}.", choices=PRECISIONS)] = "32-true",
    strategy: Annotated[str, option(RUN, "NAME", "Strategy of Lightning Fabric, such as ddp.")] = "auto",
    checkpoint: Annotated[
        Path | None, option(RUN, "FILE", "Checkpoint of the run; by default a temporary file next to the adapter.")
    ] = None,
    logs: Annotated[Path | None, option(RUN, "FOLDER", "Folder for a CSV table and TensorBoard events.")] = None,
    adapter: Annotated[Path, option(OUTPUT, "FILE", "Output file with the norms, and the heads if any.")] = Path(
        "adapter.safetensors"
    ),
    dtype: Annotated[
        str | None,
        option(OUTPUT, "DTYPE", "Dtype of the tensors in the file, such as float16.", choices=DTYPES),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train only the norms of a model, with all other parameters frozen, and save them as an adapter.

    The same command resumes after an interruption, with identical results. A folder of images has one subfolder per
    class, or train and test with one subfolder per class each. Exits with 1 if the loss is NaN or infinite.
    """
    started = time.perf_counter()
    for kind, name, known in (
        ("optimizer", optimizer, OPTIMIZERS), ("augmentation", augmentation, batches.AUGMENTATIONS),
        ("precision", precision, PRECISIONS), ("dtype", dtype, DTYPES), ("corruption", corruption, CORRUPTIONS),
    ):  # fmt: skip
        if name is not None and name not in known:
            raise UnknownNameError(kind, name, known)
    alter = None if corruption is None else partial(corrupt_split, kind=corruption, severity=severity, seed=seed)
    if epochs < 1 and not (epochs == 0 and statistics == "recalibrate"):
        raise ValueRangeError(
            f"--epochs must be an integer from 1; got {epochs}. Try 10; only --statistics recalibrate changes a model "
            "in 0 epochs."
        )
    plain = Schedule(
        epochs=epochs, batch_size=batch_size, optimizer=optimizer, lr=RATES[optimizer] if lr is None else lr,
        weight_decay=weight_decay, warmup=warmup, label_smoothing=label_smoothing, augmentation=augmentation,
        patience=patience, seed=seed,
    )  # fmt: skip
    shared: dict[str, Any] = {"devices": _parse_devices(devices), "strategy": strategy, "precision": precision}
    _need_fabric(shared)
    _need_files(adapter, checkpoint)
    with spinner("tune", hidden=as_json) as status:
        status("loading model and data")
        network, base = _load_twice(model, weights)
        parts = find_parts(data, model, image_size=image_size, seed=seed, skip_unreadable=skip_unreadable, alter=alter)
    handle = only_norms(network, also=also or (), statistics=statistics, which=which)
    corrupted = "" if corruption is None else f" {corruption} {severity}"
    schedule = RunSettings(
        **vars(plain), base=digest(fingerprint.fingerprint(base, ())), data=f"{data} {image_size}{corrupted}",
        statistics=statistics,
        trained=digest([name for name, _ in handle.named_parameters()]),
    )  # fmt: skip
    _need_outputs(network, parts, model)
    for path in parts.unreadable:
        errors.print(f"skipped, cannot be read: {escape(str(path))}", highlight=False)
    with spinner("tune", hidden=as_json) as status:
        status(f"accuracy on {len(parts.test):,} test samples")
        before = accuracy(network, parts.test)
        if statistics == "recalibrate":
            status("recalibrating the running statistics")
            handle.recalibrate(_inputs(parts.train, schedule))
    saved = adapter.with_name(f"{adapter.name}.run") if checkpoint is None else checkpoint
    result = _train(network, parts, schedule=schedule, saved=saved, logs=logs, hidden=as_json, shared=shared)
    if any(os.environ.get(rank, "0") != "0" for rank in ("RANK", "NODE_RANK", "LOCAL_RANK")):
        return  # only the first of several processes writes and prints
    save_adapter(network, adapter, dtype=None if dtype is None else DTYPES[dtype])
    load_adapter(base, adapter)  # the accuracy is that of the base model with the saved file
    with spinner("tune", hidden=as_json) as status:
        status(f"accuracy on {len(parts.test):,} test samples")
        after = accuracy(base, parts.test)
    facts = _facts(handle, adapter) | {
        "accuracy_before": before,
        "accuracy_after": after,
        "n_test_samples": len(parts.test),
        "n_epochs": len(result.history),
        "n_steps": result.n_steps,
        "stop_reason": result.reason,
        "n_images_skipped": len(parts.unreadable),
        "seconds": time.perf_counter() - started,
    }
    if checkpoint is None:
        saved.unlink(missing_ok=True)
    if as_json:
        print_json(facts | {"history": list(result.history)})
    else:
        print_facts(f"{model}, tuned by its norms", facts)


def _need_files(adapter: Path, checkpoint: Path | None) -> None:
    if adapter.is_dir():
        raise StorageError(f"--adapter needs a file name; {adapter} is a folder. Try {adapter / 'a.safetensors'}.")
    for name, path in (("--adapter", adapter), ("--checkpoint", checkpoint)):
        if path is not None:
            need_folder(path.parent, what="adapters", option=name)


def _train(
    network: nn.Module,
    parts: TrainTest,
    *,
    schedule: Schedule,
    saved: Path,
    logs: Path | None,
    hidden: bool,
    shared: dict[str, Any],
) -> Fit:
    """Trains with a progress bar; prints the path of the checkpoint if interrupted."""
    try:
        with counter("tuning", hidden=hidden, shows_message=True) as show:
            return fit(
                network, parts.train, schedule=schedule, checkpoint=saved, save_every=SAVE_EVERY, logs=logs,
                on_step=lambda done, total, loss: show(done, total, f"loss {loss:.3g}"), **shared,
            )  # fmt: skip
    except KeyboardInterrupt:
        if saved.exists():
            errors.print(f"The run is in {escape(str(saved))}: run the same command again to resume.", highlight=False)
        raise
    except TrainingError as error:
        errors.print(f"[red]failed:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from error


def _load_twice(model: str, weights: Path | None) -> tuple[nn.Module, nn.Module]:
    """The model to train and a second copy, to test the adapter on."""
    if weights is None and model in BUILT_IN and not BUILT_IN[model].is_trained:
        errors.print(f"{model} has untrained random weights; pass --weights FILE for trained ones.", highlight=False)
    network, base = (load_model(model, weights) for _ in range(2))
    if base is network:
        raise ConversionError(f"tuning needs a function that returns a new model; {model} is a model. Pass a function.")
    if fingerprint.fingerprint(network, ()) != fingerprint.fingerprint(base, ()):
        raise ConversionError(
            f"an adapter needs a reproducible base model; {model} has different weights each time. Pass "
            "--weights FILE, or set a seed."
        )
    return network, base


@torch.no_grad()
def _need_outputs(network: nn.Module, parts: TrainTest, model: str) -> None:
    """Raises unless the model accepts the samples and has one output per class."""
    sample = torch.as_tensor(parts.train[0][0])
    try:
        logits = find_output(network.eval()(sample[None]))
    except OnlynormError:
        raise
    except Exception as error:  # any error of the model is shown with the shape of the sample
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ShapeError(
            f"{model} needs samples of a fitting shape; got {tuple(sample.shape)} ({reason}). "
            "Pass other --data, or another --image-size."
        ) from error
    if logits.ndim != 2 or logits.shape[1] < parts.n_classes:
        raise ShapeError(
            f"{model} needs an output for each of {parts.n_classes} classes; got outputs of shape "
            f"{tuple(logits.shape[1:])}. Use a model with a head of that size, and train it with --also."
        )


def _facts(handle: NormHandle, adapter: Path) -> dict[str, Any]:
    return {
        "file": str(adapter),
        "bytes": adapter.stat().st_size,
        "n_norms": len(handle.norms),
        "n_trained": handle.n_trainable,
        "n_parameters": handle.n_total,
        "skipped": [str(item) for item in handle.skipped],
    }


def _inputs(pairs: batches.Pairs, schedule: Schedule) -> Iterator[Tensor]:
    for _, inputs, _ in batches.epoch_batches(pairs, batch_size=schedule.batch_size, seed=schedule.seed, epoch=0):
        yield inputs


def _parse_devices(text: str) -> int | str:
    if text != "auto" and not (text.isdecimal() and int(text) > 0):
        raise ValueRangeError(f"--devices needs a positive number or auto; got {text!r}. Try 1.")
    return text if text == "auto" else int(text)


def _need_fabric(shared: dict[str, Any]) -> None:
    """Raises if the devices or the strategy are not available, before anything is loaded."""
    try:
        make_fabric("auto", **shared, loggers=[])
    except ValueRangeError as error:
        raise ValueRangeError(f"--devices and --strategy need to be available; got {error}") from error
