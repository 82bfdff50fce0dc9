"""`fit`: a training loop on Lightning Fabric.

Trains all parameters that require gradients: after `only_norms` the norms and heads, else the whole model. Runs are
determined by their seed, and an interrupted run resumes from its checkpoint bit for bit. For models made by
`to_norm_only` the optimizer updates gamma, or with `follow_weights` the effective weights.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import inspect
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from onlynorm.display import Curve, Figure, Panel, Result, ShownResult, Table, View
from onlynorm.errors import (
    ConversionError,
    OnlynormError,
    ShapeError,
    StorageError,
    TrainingError,
    ValueRangeError,
    first_line,
    shown,
)
from onlynorm.modules import Loss, default_loss, find_output, is_class_labels, without_autocast
from onlynorm.modules.losses import call_loss
from onlynorm.modules.norms import is_statistic, need_module
from onlynorm.modules.walk import input_cure
from onlynorm.optim import follow_weights, release
from onlynorm.progress import with_progress
from onlynorm.storage import claiming
from onlynorm.tuning.batches import (
    AUGMENTATIONS,
    Pairs,
    TensorPairs,
    as_pairs,
    augment,
    collate,
    epoch_batches,
    n_batches,
)
from onlynorm.tuning.fingerprint import base_tensors, digests, encode
from onlynorm.tuning.training_state import (
    Randomness,
    TrainingProgress,
    drop_remainders,
    load_state,
    optimized_tensors,
    save_state,
    state_tensors,
)
from onlynorm.validate import (
    Progress,
    need_callable,
    need_choice,
    need_flag,
    need_integer,
    need_items,
    need_number,
    need_path,
    need_progress,
    need_seed,
    need_text,
)

OPTIMIZERS = ("sgd", "adamw")
_IGNORED = -100
"""The label that cross entropy ignores."""


@dataclass(frozen=True, kw_only=True)
class Schedule(Result):
    """Training options. After linear `warmup` (a fraction of all steps) the learning rate decays from `lr` on a cosine.

    With `drops`, fractions of all steps such as (0.5, 0.8), it is divided by ten at each of them instead.
    `follow_weights` optimizes the effective weights of norm-only layers (see `onlynorm.optim`).

    Examples:
        >>> import onlynorm as on
        >>> schedule = on.Schedule(epochs=5, lr=0.1, warmup=0.1)
        >>> [round(schedule.lr_at(step, 10), 3) for step in (0, 1, 5, 9)]
        [0.1, 0.1, 0.059, 0.003]
    """

    epochs: int = 10
    batch_size: int = 128
    optimizer: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    warmup: float = 0.05
    drops: tuple[float, ...] | None = None
    label_smoothing: float = 0.0
    augmentation: str = "none"
    patience: int | None = None
    clip: float | None = None
    follow_weights: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        need_choice("optimizer", self.optimizer, OPTIMIZERS)
        need_choice("augmentation", self.augmentation, AUGMENTATIONS)
        fraction = "It is a fraction of all steps: try 0.05."
        checked: dict[str, Any] = {
            "epochs": need_integer("epochs", self.epochs, low=0, cure="Try 10."),
            "batch_size": need_integer("batch_size", self.batch_size, low=1, cure="Try 128."),
            "lr": need_number("lr", self.lr, low=0.0, cure="Try 0.1 for sgd, 1e-3 for adamw."),
            "momentum": need_number("momentum", self.momentum, low=0.0, high=1.0, open_high=True, cure="Try 0.9."),
            "weight_decay": need_number("weight_decay", self.weight_decay, low=0.0, cure="Leave it out."),
            "warmup": need_number("warmup", self.warmup, low=0.0, high=1.0, open_high=True, cure=fraction),
            "label_smoothing": need_number(
                "label_smoothing", self.label_smoothing, low=0.0, high=1.0, open_high=True, cure="Leave it out."
            ),
            "follow_weights": need_flag("follow_weights", self.follow_weights),
            "seed": need_seed(self.seed),
        }
        if self.drops is not None:
            checked["drops"] = tuple(
                need_number("drops", at, low=0.0, high=1.0, open_low=True, open_high=True, cure="Try (0.5, 0.8).")
                for at in need_items("drops", self.drops, cure="Try (0.5, 0.8).")
            )
        if self.patience is not None:
            checked["patience"] = need_integer("patience", self.patience, low=1, cure="Leave it out for no early stop.")
        if self.clip is not None:
            checked["clip"] = need_number("clip", self.clip, low=0.0, open_low=True, cure="Leave it out, or try 1.0.")
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def lr_at(self, step: int, n_steps: int) -> float:
        """The learning rate of a step: linear warmup, then cosine decay to zero, or a factor 0.1 at every drop."""
        step = need_integer("step", step, low=0, cure="Steps are counted from 0.")
        n_steps = need_integer("n_steps", n_steps, low=0, cure="Pass the total number of steps.")
        n_warmup = max(1, round(self.warmup * n_steps)) if self.warmup else 0
        if step < n_warmup:
            return self.lr * (step + 1) / n_warmup
        if self.drops is not None:
            return self.lr / 10.0 ** sum(step >= round(fraction * n_steps) for fraction in self.drops)
        return self.lr * 0.5 * (1.0 + math.cos(math.pi * (step - n_warmup) / max(1, n_steps - n_warmup)))


@dataclass(frozen=True, repr=False)
class Fit(ShownResult):
    """The result of training: a row per epoch (loss, accuracy, seconds), and why it stopped."""

    history: tuple[dict[str, float], ...]
    n_steps: int
    seconds: float
    reason: str

    def plot(self) -> Figure:
        """Everything that was measured in an epoch, over the epochs."""
        curves, panels = [], []
        for name in dict.fromkeys(name for row in self.history for name in row if name not in ("epoch", "seconds")):
            points = [(n, row[name]) for n, row in enumerate(self.history, 1) if math.isfinite(row.get(name, math.nan))]
            if points:
                xs, ys = zip(*points, strict=True)
                label, _, kind = name.rpartition("_")
                curves.append(Curve(label or "training", xs, ys, "line+points", kind))
                panels.append(Panel(kind, kind, "epoch"))
        return Figure(curves, list({panel.name: panel for panel in panels}.values()))

    def view(self) -> View:
        """Why training stopped, and a row per epoch."""
        columns = tuple(dict.fromkeys(name for row in self.history for name in row))
        rows = [[row.get(name, "–") for name in columns] for row in self.history]
        heads = [name.replace("_", " ") for name in columns]
        facts = {"epochs": len(self.history), "steps": self.n_steps, "seconds": self.seconds, "stopped": self.reason}
        return View("Training of the norms", facts=facts, tables={"Epochs": Table(heads, rows)} if rows else {})

    def __str__(self) -> str:
        last = self.history[-1] if self.history else {}
        metrics = ", ".join(f"{key.replace('_', ' ')} {value:.4g}" for key, value in last.items() if key != "epoch")
        return f"{len(self.history)} epochs, {self.n_steps} steps in {self.seconds:.1f} s ({self.reason}): {metrics}"


@claiming("checkpoint")
@with_progress
def fit(
    model: nn.Module,
    data: Pairs | tuple[Tensor, Tensor],
    *,
    schedule: Schedule | None = None,
    test: Pairs | tuple[Tensor, Tensor] | None = None,
    loss: Loss | None = None,
    checkpoint: Path | str | None = None,
    save_every: int | None = None,
    logs: Path | str | None = None,
    on_step: Callable[[int, int, float], None] | None = None,
    progress: Progress | bool | None = None,
    accelerator: str = "auto",
    devices: int | str = 1,
    strategy: str = "auto",
    precision: str = "32-true",
) -> Fit:
    """Trains all parameters that require gradients, in place; returns the history. Module modes are restored.

    `data` and `test` are (inputs, targets) or datasets of such pairs. The default `loss` is the cross entropy for
    integer targets (class labels) and the mean squared error for floating-point targets. With a test set, the history
    has the test accuracy of each epoch, or the test loss for floating-point targets. `checkpoint` is the file from
    which an interrupted run resumes, with the same data and the same frozen weights; it is written after every epoch
    and every `save_every` steps. `logs` is a folder for a CSV table and, if tensorboard is installed, its events.
    `on_step` is called with (step, total steps, loss). `progress=True` shows a bar; a function is called with (steps
    done, total steps, message). Runs in several threads alternate step by step and each depends
    on its seed only, unless another thread draws from torch's global generator: create the models before the threads
    start.

    Examples:
        >>> import onlynorm as on
        >>> from onlynorm.data import digits
        >>> from onlynorm.models import mlp
        >>> data = digits()
        >>> fit = on.fit(mlp((64, 32, 10)), data.train, schedule=on.Schedule(epochs=5), test=data.test)
        >>> len(fit.history), fit.history[-1]["test_accuracy"] > 0.9
        (5, True)
    """
    schedule = Schedule() if schedule is None else schedule
    if not isinstance(schedule, Schedule):
        raise ConversionError(
            f"fit needs a Schedule; got a {type(schedule).__name__}. Write schedule=Schedule(lr=0.1)."
        )
    given, model = model, need_module("fit", model)
    _need_own_processes(given)
    if save_every is not None:
        save_every = need_integer("save_every", save_every, low=1, cure="Leave it out to save after every epoch.")
    _need_function("loss", loss, 2)
    _need_function("on_step", on_step, 3)
    on_step = _with_progress(on_step, need_progress(progress))
    pairs, test_pairs = as_pairs(data), None if test is None else as_pairs(test)
    if loss is not None and schedule.label_smoothing:
        raise ValueRangeError(
            f"label_smoothing needs the default loss; got {schedule.label_smoothing} and a custom loss. Smooth the "
            "labels in that loss, or leave one of the two out."
        )
    if schedule.label_smoothing and not _has_classes(pairs):
        raise ValueRangeError(
            f"label_smoothing needs class labels; got {schedule.label_smoothing} and floating-point targets. Leave it "
            "out, or pass integer labels."
        )
    if any(p.is_inference() for p in model.parameters()):
        raise ConversionError(
            f"training needs parameters with autograd; got a {type(model).__name__} created inside "
            "torch.inference_mode(). Create it outside."
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ConversionError(
            "training needs parameters that require gradients; got none in "
            f"{type(model).__name__}. Call only_norms(model), or unfreeze some parameters."
        )
    fabric = make_fabric(accelerator, devices, strategy, precision, loggers=_loggers(logs))
    fabric.launch()
    if fabric.world_size > 1:
        atexit.register(_leave_process_group)
    if schedule.follow_weights and fabric.world_size > 1:
        raise ValueRangeError(
            f"follow_weights needs one process, since its weights are not parameters of the model and are not "
            f"synchronized; got {fabric.world_size}. Pass devices=1."
        )
    started = time.perf_counter()
    modes = {module: module.training for module in model.modules()}
    release(model)  # the model may still be attached to another optimizer
    try:
        wrapped, moved = _set_up(fabric, given if _is_compiled(given) else model, model, schedule)
        used = _default(schedule) if loss is None else loss  # `or` would ask a compiled loss for its length
        run = _Run(fabric, model, wrapped, moved, schedule, pairs, test_pairs, used)
        run.named = {"precision": precision, "loss": "default" if loss is None else _name_of(loss)}
        run.begin(None if checkpoint is None else need_path("checkpoint", checkpoint))
        # The caller may be inside no_grad or autocast; only `precision` selects autocast here.
        with torch.inference_mode(False), torch.enable_grad(), without_autocast(fabric.device):
            reason = run.train(save_every, on_step)
    finally:
        release(model)
        for module, mode in modes.items():
            module.training = mode
    with _writing_logs():
        for logger in fabric.loggers:
            logger.finalize("success")
    return Fit(tuple(run.progress.history), run.progress.step, time.perf_counter() - started, reason)


def make_fabric(accelerator: str, devices: int | str, strategy: str, precision: str, *, loggers: list[Any]) -> Any:
    """Lightning Fabric for these devices; on a CPU with at most one process per core.

    Examples:
        >>> from onlynorm.tuning import make_fabric
        >>> fabric = make_fabric("cpu", 1, "auto", "32-true", loggers=[])
        >>> fabric.device
        device(type='cpu')
    """
    from lightning_fabric import Fabric

    accelerator = need_text("accelerator", accelerator, cure="Leave it out, or pass cpu or gpu.")
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    is_cpu = accelerator == "cpu" or (
        accelerator == "auto" and not (torch.cuda.is_available() or torch.backends.mps.is_available())
    )
    requested = str(devices).strip()
    most = max(2, n_cores)  # two are allowed on one core as well
    if is_cpu and requested.lstrip("-").isdecimal() and not 1 <= int(requested) <= most:
        raise ValueRangeError(
            f"devices needs 1 to {most} processes on a CPU with {n_cores} cores; got {devices}. Pass devices=1, and "
            "set the number of threads with torch.set_num_threads."
        )
    try:
        return Fabric(accelerator=accelerator, devices=devices, strategy=strategy, precision=precision,  # type: ignore[arg-type]
                      loggers=loggers)  # fmt: skip
    except Exception as error:  # Fabric raises many kinds of errors
        raise ValueRangeError(
            "accelerator, devices, strategy and precision need to be available on this machine; got "
            f"{' '.join(str(error).split()):.200}. Leave them out for one device."
        ) from error


def _leave_process_group() -> None:
    """Destroys the process group, if any.

    Fabric does this for NCCL only. Threads of gloo that outlive the interpreter can abort the process.
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def make_optimizer(model: nn.Module, schedule: Schedule) -> Optimizer:
    """The optimizer of a schedule for the trainable parameters of the model, or for its effective weights."""
    kind: Callable[..., Optimizer] = torch.optim.SGD
    options = {"lr": schedule.lr, "weight_decay": schedule.weight_decay}
    if schedule.optimizer == "adamw":
        kind = torch.optim.AdamW
    else:
        options["momentum"] = schedule.momentum
    if schedule.follow_weights:
        return follow_weights(model, kind, **options)
    return kind([p for p in model.parameters() if p.requires_grad], **options)


def accuracy(model: nn.Module, data: Pairs | tuple[Tensor, Tensor], *, batch_size: int = 500) -> float:
    """The fraction of samples whose largest output is at their label, in evaluation mode.

    Examples:
        >>> from onlynorm.data import digits
        >>> from onlynorm.models import load_model
        >>> from onlynorm.tuning import accuracy
        >>> f"{accuracy(load_model('digits_cnn'), digits().test):.1%}"
        '99.4%'
    """
    model, pairs = need_module("accuracy", model), as_pairs(data)
    batch_size = need_integer("batch_size", batch_size, low=1, cure="Try 500.")
    if not _has_classes(pairs):
        raise ValueRangeError(
            "accuracy needs integer class labels; got floating-point targets. Use the mean squared error instead."
        )
    n_correct = n_labels = 0
    for output, labels, _ in _evaluate(model, pairs, batch_size):
        correct, counted = _is_correct(find_output(output), labels)
        n_correct, n_labels = n_correct + int(correct.sum()), n_labels + int(counted.sum())
    return n_correct / max(1, n_labels)


def _evaluate(model: nn.Module, pairs: Pairs, batch_size: int) -> Iterator[tuple[Any, Tensor, int]]:
    """(output, targets, number of samples) of each batch, in evaluation mode and without gradients."""
    tensors = (*model.parameters(), *model.buffers())
    device = next((t.device for t in tensors), torch.device("cpu"))
    modes = {m: m.training for m in model.modules()}
    model.eval()
    try:
        for start in range(0, len(pairs), batch_size):
            inputs, targets = collate(pairs, range(start, min(start + batch_size, len(pairs))))
            with torch.no_grad():
                output = _call(model, inputs.to(device))
            yield output, targets.to(device), len(inputs)
    finally:
        for module, mode in modes.items():
            module.training = mode


def _call(model: nn.Module, inputs: Tensor) -> Any:
    """The output of the model; errors are raised again with the shape of the inputs."""
    try:
        return model(inputs)
    except (OnlynormError, MemoryError, Warning, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:
        if "more than 1 value per channel" in str(error):
            raise ValueRangeError(
                f"batch norms need at least two samples in every batch; got one of shape {tuple(inputs.shape)}. Change "
                "batch_size, or freeze the statistics."
            ) from error
        cure = "Pass inputs of the shape and dtype that forward expects."
        raise ShapeError(
            f"training needs inputs that the model accepts; got {tuple(inputs.shape)} of {inputs.dtype}, and the model "
            f"failed with {type(error).__name__}: {first_line(error)}. "
            f"{input_cure(model, inputs, error, otherwise=cure)}"
        ) from error


def _is_correct(output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(correct, counted) per label, for classes on axis 1 or on the last axis."""
    if output.ndim == labels.ndim + 1 and output.ndim > 1:
        axes = (1, -1) if (output.shape[0], *output.shape[2:]) == tuple(labels.shape) else (-1,)
        for axis in axes:
            best = output.argmax(axis)
            if best.shape == labels.shape:
                labels = labels.long()  # torch does not compare unsigned integers of several bytes
                counted = labels != _IGNORED
                return (best == labels) & counted, counted
    raise ShapeError(
        f"accuracy needs one class for each sample of an output (samples, classes, ...); got output "
        f"{tuple(output.shape)} and labels {tuple(labels.shape)}. Pass a model that returns the logits."
    )


def _has_classes(pairs: Pairs) -> bool:
    """Whether the targets are class labels."""
    return is_class_labels(collate(pairs, [0])[1])


def _with_progress(
    on_step: Callable[[int, int, float], None] | None, progress: Progress | None
) -> Callable[[int, int, float], None] | None:
    """The function that is called after each step: `on_step`, then `progress` with the loss as its message."""
    if progress is None:
        return on_step

    def report(step: int, n_steps: int, loss: float) -> None:
        if on_step is not None:
            on_step(step, n_steps, loss)
        progress(step, n_steps, f"loss {loss:.4g}")

    return report


class _Run:
    """One training run: its components and its progress."""

    def __init__(self, fabric: Any, model: nn.Module, wrapped: nn.Module, optimizer: Any, schedule: Schedule,
                 pairs: Pairs, test: Pairs | None, loss: Loss) -> None:  # fmt: skip
        self.fabric, self.model, self.wrapped, self.optimizer = fabric, model, wrapped, optimizer
        self.schedule, self.pairs, self.test, self.loss = schedule, pairs, test, loss
        self.progress = TrainingProgress()
        self.randomness = Randomness(schedule.seed, fabric.device)
        self.has_classes = test is None or _has_classes(test)
        self.checkpoint: Path | None = None
        self.named: dict[str, str] = {}  # other settings that must match when the run resumes
        self.nonfinite: set[str] = set()  # running statistics that are NaN or infinite before the run
        self.nonfinite = {name for name, value in self._watched().items() if not bool(torch.isfinite(value).all())}
        self.per_epoch = n_batches(len(pairs), schedule.batch_size)
        self.n_steps = schedule.epochs * self.per_epoch

    def begin(self, checkpoint: Path | None) -> None:
        self.checkpoint = checkpoint
        if checkpoint is not None and checkpoint.exists():
            self.progress = load_state(
                checkpoint, self.model, self._inner, settings=self._settings, randomness=self.randomness
            )

    def train(self, save_every: int | None, on_step: Callable[[int, int, float], None] | None) -> str:
        while self.progress.epoch < self.schedule.epochs:
            if self.schedule.patience is not None and self.progress.stale >= self.schedule.patience:
                return f"no improvement for {self.progress.stale} epochs"
            started = time.perf_counter()
            self._epoch(save_every, on_step)
            self._close_epoch(time.perf_counter() - started)
        return "all epochs done"

    def _epoch(self, save_every: int | None, on_step: Callable[[int, int, float], None] | None) -> None:
        now, schedule = self.progress, self.schedule
        self.wrapped.train()
        batches = epoch_batches(
            self.pairs, batch_size=schedule.batch_size, seed=schedule.seed, epoch=now.epoch, skip=now.batch,
            rank=self.fabric.global_rank, world=self.fabric.world_size,
        )  # fmt: skip
        while True:
            with self.randomness.active():
                batch = next(batches, None)
                if batch is None:
                    break
                index, inputs, targets = batch
                loss = self._step(inputs, targets)
            now.step, now.batch = now.step + 1, index + 1
            now.total, now.n_losses = now.total + loss, now.n_losses + 1
            if on_step is not None:
                on_step(now.step, self.n_steps, loss)
            if save_every is not None and now.step % save_every == 0:
                self._save()

    def _step(self, inputs: Tensor, targets: Tensor) -> float:
        """One optimizer step; returns the loss before it."""
        now, schedule = self.progress, self.schedule
        for group in self.optimizer.param_groups:
            group["lr"] = schedule.lr_at(now.step, self.n_steps)
        inputs = augment(inputs, schedule.augmentation, seed=schedule.seed, step=now.step)
        inputs, targets = self.fabric.to_device((inputs, targets))
        self.optimizer.zero_grad(set_to_none=True)
        value = call_loss("training", self.loss, output=_call(self.wrapped, inputs), targets=targets)
        if not isinstance(value, Tensor) or value.numel() != 1:
            what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ShapeError(f"training needs a scalar loss; got {what}. Return its mean from loss=.")
        self._need_finite("loss", float(value.detach()))
        if not value.requires_grad:
            raise ConversionError(
                "training needs a loss that depends on trainable parameters; got one without a gradient. Use the "
                "trained layers in forward, and do not detach their outputs."
            )
        self.fabric.backward(value)
        if schedule.clip is not None:
            norm = self.fabric.clip_gradients(
                self.wrapped, self.optimizer, max_norm=schedule.clip, error_if_nonfinite=False
            )
            if getattr(self.fabric._precision, "scaler", None) is None:  # a scaler skips such steps
                self._need_finite("norm of the gradient", float(norm))
        self.optimizer.step()
        return float(value.detach())

    def _close_epoch(self, seconds: float) -> None:
        now = self.progress
        mean = now.total / max(1, now.n_losses)
        row = {"epoch": float(now.epoch), "loss": mean, "seconds": seconds}
        if self.test is not None:
            with self.randomness.active():
                row |= {"test_accuracy": accuracy(self.model, self.test)} if self.has_classes else self._test_loss()
        score = row.get("test_accuracy", -row.get("test_loss", mean))
        now.stale = 0 if score > now.best else now.stale + 1
        now.best = max(now.best, score)
        now.history.append(row)
        with _writing_logs():
            self.fabric.log_dict({k: v for k, v in row.items() if k != "epoch"}, step=now.epoch)
        now.epoch, now.batch, now.total, now.n_losses = now.epoch + 1, 0, 0.0, 0
        self._save()

    def _test_loss(self) -> dict[str, float]:
        """The mean loss over the test set."""
        assert self.test is not None
        total = 0.0
        for output, targets, n in _evaluate(self.model, self.test, 500):
            with torch.no_grad():
                total += n * float(call_loss("training", self.loss, output=output, targets=targets))
        return {"test_loss": total / len(self.test)}

    def _need_finite(self, what: str, value: float) -> None:
        if not math.isfinite(value):
            saved = "there is no checkpoint"
            if self.checkpoint is not None and self.checkpoint.exists():
                saved = f"the last finite state is in {self.checkpoint.name}"
            raise TrainingError(
                f"training needs a finite {what}; got {value} at step {self.progress.step} ({saved}). Lower lr, clip "
                "gradients, or check the inputs."
            )

    def _need_finite_state(self) -> None:
        """Raises if trained parameters or running statistics are NaN or infinite."""
        for name, value in self._watched().items():
            if not bool(torch.isfinite(value).all()):
                self._need_finite(f"value of {name}", float(value[~torch.isfinite(value)][0]))

    def _watched(self) -> dict[str, Tensor]:
        """Trained tensors, and running statistics that were finite before the run."""
        state = state_tensors(self.model, set())
        running = {name: value for name, value in state.items() if is_statistic(name) and name not in self.nonfinite}
        return running | {name: value.detach() for name, value in optimized_tensors(self.model).items()}

    def _save(self) -> None:
        self._need_finite_state()
        drop_remainders(self.model)  # with and without a checkpoint, so that results do not depend on it
        if self.checkpoint is not None and self.fabric.is_global_zero:
            save_state(
                self.checkpoint, self.model, self._inner, self.progress, settings=self._settings,
                randomness=self.randomness,
            )  # fmt: skip

    @property
    def _inner(self) -> Optimizer:
        inner: Optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return inner

    @property
    def _settings(self) -> dict[str, Any]:
        drops = self.schedule.drops  # a list, as JSON has no tuples
        return {
            **asdict(self.schedule), "drops": None if drops is None else list(drops), "n_samples": len(self.pairs),
            **self.named, **self._identity,
        }  # fmt: skip

    @functools.cached_property
    def _identity(self) -> dict[str, str]:
        """Digests of the data and of all frozen tensors, which must match when a run resumes.

        Only tensor data are hashed: other datasets may return different samples each time.
        """
        saved = state_tensors(self.model, set(optimized_tensors(self.model)))
        trained = {id(p) for p in self.model.parameters() if p.requires_grad}  # tied ones are saved under one name
        frozen = {name: t for name, t in base_tensors(self.model, saved).items() if id(t) not in trained}
        found = {"frozen_digest": encode(digests(frozen))}
        if isinstance(self.pairs, TensorPairs):
            found["data_digest"] = encode(digests({"inputs": self.pairs.inputs, "labels": self.pairs.labels}))
        return found


def _set_up(fabric: Any, given: nn.Module, model: nn.Module, schedule: Schedule) -> tuple[nn.Module, Any]:
    """The model, compiled if it was passed compiled, and its optimizer, wrapped by Fabric."""
    if schedule.follow_weights:  # the model first: the weights get its device and dtype
        wrapped = fabric.setup_module(given)
        return wrapped, fabric.setup_optimizers(make_optimizer(model, schedule))
    both: tuple[nn.Module, Any] = fabric.setup(given, make_optimizer(model, schedule))
    return both


def _name_of(function: Callable[..., Any]) -> str:
    """The name of a function, or of the class of a callable object."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _is_compiled(model: nn.Module) -> bool:
    """Whether the model was compiled by torch.compile without another wrapper inside."""
    inner = getattr(model, "_orig_mod", None)
    return isinstance(inner, nn.Module) and need_module("fit", model) is inner


def _need_own_processes(model: nn.Module) -> None:
    """Raises if the model is already distributed over processes."""
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel) and module.process_group.size() > 1:
            raise ConversionError(
                f"fit needs an unwrapped model; got DistributedDataParallel over {module.process_group.size()} "
                "processes. Pass model.module with devices= and strategy='ddp'."
            )


def _need_function(name: str, function: Callable[..., Any] | None, n_arguments: int) -> None:
    """Raises unless this is None, or a function that accepts `n_arguments` arguments."""
    if function is None:
        return
    need_callable(name, function, cure="Leave it out.")
    if isinstance(function, type):
        raise ConversionError(f"{name} needs a function; got {shown(function)}. Pass an instance: {name}=...().")
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        inspect.signature(called).bind(*[None] * n_arguments)
    except TypeError as error:
        raise ConversionError(
            f"{name} needs a function of {n_arguments} arguments; got {shown(function)} ({error}). Leave it out."
        ) from error
    except ValueError:
        pass  # functions written in C have no signature


def _default(schedule: Schedule) -> Loss:
    smoothing = schedule.label_smoothing
    return lambda output, targets: default_loss(find_output(output), targets, label_smoothing=smoothing)


@contextlib.contextmanager
def _writing_logs() -> Iterator[None]:
    """Converts OSError of Lightning's loggers to StorageError."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            f"logs need a writable folder with space; got {error.strerror or error}. Free space there, or choose "
            "another folder. The checkpoint is unchanged."
        ) from error


def _loggers(folder: Path | str | None) -> list[Any]:
    if folder is None:
        return []
    from lightning_fabric.loggers.csv_logs import CSVLogger

    folder = need_path("logs", folder)
    with _writing_logs():
        folder.mkdir(parents=True, exist_ok=True)
    loggers: list[Any] = [CSVLogger(folder, name="csv", flush_logs_every_n_steps=1)]
    if importlib.util.find_spec("tensorboard") is not None:
        from lightning_fabric.loggers.tensorboard import TensorBoardLogger

        loggers.append(TensorBoardLogger(folder, name="tensorboard"))
    return loggers
