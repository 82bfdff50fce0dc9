"""`fit`: one training loop for all of onlynorm, on Lightning Fabric.

Whatever requires a gradient is trained: after `only_norms` the norms and the heads, else the whole model. Runs are
functions of their seed, and a run that was killed resumes from its checkpoint with the numbers of one that was not.
Models made by `norm_only` step on gamma, or with `follow_weights` on the weights that their gammas then follow.
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

from onlynorm.errors import (
    ConversionError,
    OnlynormError,
    ShapeError,
    StorageError,
    TrainingError,
    ValueRangeError,
    shown,
)
from onlynorm.modules import Loss, default_loss, find_output, is_class_labels, without_autocast
from onlynorm.modules.norms import is_statistic, need_module
from onlynorm.optim import follow_weights, release
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
    Progress,
    Randomness,
    load_state,
    save_state,
    settle,
    state_tensors,
    stepped_on,
)
from onlynorm.validate import (
    need_callable,
    need_choice,
    need_flag,
    need_integer,
    need_items,
    need_number,
    need_path,
    need_seed,
    need_text,
)

OPTIMIZERS = ("sgd", "adamw")
_IGNORED = -100
"""The label of positions that cross entropy leaves out."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How a model is trained. `lr` falls from its peak to zero on a cosine, after `warmup` (a share of all steps).

    With `drops`, shares of all steps such as (0.5, 0.8), it stays at its peak instead and falls tenfold at each.
    `follow_weights` steps on the weights of norm-only layers, and their gammas follow (`onlynorm.optim`).
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
        """The learning rate of a step: a line up to the peak, then a cosine down to zero or a tenth at every drop."""
        step = need_integer("step", step, low=0, cure="Steps are counted from 0.")
        n_steps = need_integer("n_steps", n_steps, low=0, cure="Pass the number of all steps.")
        rising = max(1, round(self.warmup * n_steps)) if self.warmup else 0
        if step < rising:
            return self.lr * (step + 1) / rising
        if self.drops is not None:
            return self.lr / 10.0 ** sum(step >= round(share * n_steps) for share in self.drops)
        return self.lr * 0.5 * (1.0 + math.cos(math.pi * (step - rising) / max(1, n_steps - rising)))


@dataclass(frozen=True)
class Fit:
    """What training gave: a row per epoch (loss, accuracy, seconds), and where it stopped."""

    history: tuple[dict[str, float], ...]
    n_steps: int
    seconds: float
    reason: str

    def __str__(self) -> str:
        last = self.history[-1] if self.history else {}
        told = ", ".join(f"{key.replace('_', ' ')} {value:.4g}" for key, value in last.items() if key != "epoch")
        return f"{len(self.history)} epochs, {self.n_steps} steps in {self.seconds:.1f} s ({self.reason}): {told}"


@claiming("checkpoint")
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
    step: Callable[[int, int, float], None] | None = None,
    accelerator: str = "auto",
    devices: int | str = 1,
    strategy: str = "auto",
    precision: str = "32-true",
) -> Fit:
    """Trains, in place, what requires a gradient; returns the history. Modes (train, eval) are left as they were.

    `data` and `test` are (inputs, targets) or datasets of such pairs. Without `loss`, whole-number targets are class
    labels and the loss is their cross entropy; floating-point targets are real values and it is the mean squared error.
    A test set gives the accuracy of each epoch, or the test loss for real targets. `checkpoint` names the file from
    which a killed run resumes, with the same data and the same frozen weights; it is written after every epoch, every
    `save_every` steps too if given, and stays when the run ends. `logs` is a folder for a CSV table and, where
    tensorboard is installed, its events. `step` is called with (step, steps in all, loss). Runs in several threads
    take turns, step by step, and are each a function of their seed, as long as no thread draws from torch's
    global generator meanwhile: make the models, whose layers draw their weights, before the threads start.
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
    _need_function("step", step, 3)
    pairs, judged = as_pairs(data), None if test is None else as_pairs(test)
    if loss is not None and schedule.label_smoothing:
        raise ValueRangeError(
            f"label_smoothing needs the default loss; got {schedule.label_smoothing} and a loss of your own. Smooth "
            "the labels in that loss, or leave one of the two out."
        )
    if schedule.label_smoothing and not _has_classes(pairs):
        raise ValueRangeError(
            f"label_smoothing needs class labels; got {schedule.label_smoothing} and floating-point targets. Leave it "
            "out, or pass whole numbers as labels."
        )
    if any(p.is_inference() for p in model.parameters()):
        raise ConversionError(
            f"training needs parameters that autograd can follow; got a {type(model).__name__} made inside "
            "torch.inference_mode(). Make it outside."
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ConversionError(
            "training needs parameters that require gradients; got none in "
            f"{type(model).__name__}. Call only_norms(model), or unfreeze what should learn."
        )
    fabric = make_fabric(accelerator, devices, strategy, precision, loggers=_loggers(logs))
    fabric.launch()
    if fabric.world_size > 1:
        atexit.register(_leave_process_group)
    if schedule.follow_weights and fabric.world_size > 1:
        raise ValueRangeError(
            f"follow_weights needs one process, since the weights it steps on are no parameters that processes share; "
            f"got {fabric.world_size}. Pass devices=1."
        )
    started = time.perf_counter()
    modes = {module: module.training for module in model.modules()}
    release(model)  # weights that an optimizer of the caller holds would hide the gammas
    try:
        wrapped, moved = _set_up(fabric, given if _is_compiled(given) else model, model, schedule)
        run = _Run(fabric, model, wrapped, moved, schedule, pairs, judged, loss or _default(schedule))
        run.named = {"precision": precision, "loss": "default" if loss is None else _name_of(loss)}
        run.begin(None if checkpoint is None else need_path("checkpoint", checkpoint))
        # Whatever the caller is inside of: training needs gradients, and `precision` alone decides on autocast.
        with torch.inference_mode(False), torch.enable_grad(), without_autocast(fabric.device):
            reason = run.train(save_every, step)
    finally:
        release(model)
        for module, mode in modes.items():
            module.training = mode
    with _writing_logs():
        for logger in fabric.loggers:
            logger.finalize("success")
    return Fit(tuple(run.progress.history), run.progress.step, time.perf_counter() - started, reason)


def make_fabric(accelerator: str, devices: int | str, strategy: str, precision: str, *, loggers: list[Any]) -> Any:
    """Lightning Fabric for these devices; on a CPU there are at most as many processes as cores."""
    from lightning_fabric import Fabric

    accelerator = need_text("accelerator", accelerator, cure="Leave it out, or pass cpu or gpu.")
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    is_cpu = accelerator == "cpu" or (
        accelerator == "auto" and not (torch.cuda.is_available() or torch.backends.mps.is_available())
    )
    asked = str(devices).strip()
    most = max(2, n_cores)  # two can always be tried, on one core as well
    if is_cpu and asked.lstrip("-").isdecimal() and not 1 <= int(asked) <= most:
        raise ValueRangeError(
            f"devices needs 1 to {most} processes on a CPU with {n_cores} cores; got {devices}. Pass devices=1, and "
            "let torch.set_num_threads use the cores."
        )
    try:
        return Fabric(accelerator=accelerator, devices=devices, strategy=strategy, precision=precision,  # type: ignore[arg-type]
                      loggers=loggers)  # fmt: skip
    except Exception as error:  # it raises its own and several built-in ones
        raise ValueRangeError(
            "accelerator, devices, strategy and precision need what this machine has; got "
            f"{' '.join(str(error).split()):.200}. Leave them out for one device."
        ) from error


def _leave_process_group() -> None:
    """Ends the communication with the other processes, if any.

    Fabric does this for NCCL only. The threads of gloo must not outlive the interpreter either: one that still needs
    Python then aborts the process.
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def make_optimizer(model: nn.Module, schedule: Schedule) -> Optimizer:
    """The optimizer of a schedule for what the model trains, or for the weights that its gammas follow."""
    kind: Callable[..., Optimizer] = torch.optim.SGD
    options = {"lr": schedule.lr, "weight_decay": schedule.weight_decay}
    if schedule.optimizer == "adamw":
        kind = torch.optim.AdamW
    else:
        options["momentum"] = schedule.momentum
    if schedule.follow_weights:
        return follow_weights(kind, model, **options)
    return kind([p for p in model.parameters() if p.requires_grad], **options)


def accuracy(model: nn.Module, data: Pairs | tuple[Tensor, Tensor], *, batch_size: int = 500) -> float:
    """The fraction of class labels at which the model's output is largest, in evaluation mode."""
    model, pairs = need_module("accuracy", model), as_pairs(data)
    batch_size = need_integer("batch_size", batch_size, low=1, cure="Try 500.")
    if not _has_classes(pairs):
        raise ValueRangeError(
            "accuracy needs class labels, whole numbers; got floating-point targets. Compare outputs and targets by "
            "their mean squared error."
        )
    n_right = n_labels = 0
    for output, labels, _ in _evaluate(model, pairs, batch_size):
        right, counted = _is_right(find_output(output), labels)
        n_right, n_labels = n_right + int(right.sum()), n_labels + int(counted.sum())
    return n_right / max(1, n_labels)


def _evaluate(model: nn.Module, pairs: Pairs, batch_size: int) -> Iterator[tuple[Any, Tensor, int]]:
    """(output, targets, number of samples) of each batch, in evaluation mode and without gradients."""
    numbers = (*model.parameters(), *model.buffers())
    device = next((t.device for t in numbers), torch.device("cpu"))
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
    """What the model returns; its own errors name the shape it was given."""
    try:
        return model(inputs)
    except (OnlynormError, MemoryError, Warning, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:
        if "more than 1 value per channel" in str(error):
            raise ValueRangeError(
                f"batch norms need two samples or more in every batch; got one of shape {tuple(inputs.shape)}. Choose "
                "another batch_size, or freeze the statistics."
            ) from error
        raise ShapeError(
            f"training needs inputs that the model takes; got {tuple(inputs.shape)} of {inputs.dtype}, and the model "
            f"failed with {type(error).__name__}: {error}. Pass inputs of the shape and type that forward expects."
        ) from error


def _is_right(output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(which labels are met, which count), for classes on axis 1 or on the last axis."""
    if output.ndim == labels.ndim + 1 and output.ndim > 1:
        axes = (1, -1) if (output.shape[0], *output.shape[2:]) == tuple(labels.shape) else (-1,)
        for axis in axes:
            best = output.argmax(axis)
            if best.shape == labels.shape:
                labels = labels.long()  # torch does not compare wide unsigned integers
                counted = labels != _IGNORED
                return (best == labels) & counted, counted
    raise ShapeError(
        f"accuracy needs one class for each sample of an output (samples, classes, ...); got output "
        f"{tuple(output.shape)} and labels {tuple(labels.shape)}. Pick the logits by a model that returns them."
    )


def _has_classes(pairs: Pairs) -> bool:
    """Whether the targets are class labels."""
    return is_class_labels(collate(pairs, [0])[1])


class _Run:
    """One run of the loop: the parts it needs and where it stands."""

    def __init__(self, fabric: Any, model: nn.Module, wrapped: nn.Module, optimizer: Any, schedule: Schedule,
                 pairs: Pairs, test: Pairs | None, loss: Loss) -> None:  # fmt: skip
        self.fabric, self.model, self.wrapped, self.optimizer = fabric, model, wrapped, optimizer
        self.schedule, self.pairs, self.test, self.loss = schedule, pairs, test, loss
        self.progress = Progress()
        self.randomness = Randomness(schedule.seed, fabric.device)
        self.has_classes = test is None or _has_classes(test)
        self.checkpoint: Path | None = None
        self.named: dict[str, str] = {}  # further settings that a resumed run must share
        self.odd: set[str] = set()  # running statistics that were NaN or infinite before
        self.odd = {name for name, value in self._watched().items() if not bool(torch.isfinite(value).all())}
        self.per_epoch = n_batches(len(pairs), schedule.batch_size)
        self.n_steps = schedule.epochs * self.per_epoch

    def begin(self, checkpoint: Path | None) -> None:
        self.checkpoint = checkpoint
        if checkpoint is not None and checkpoint.exists():
            self.progress = load_state(
                checkpoint, self.model, self._inner, settings=self._settings, randomness=self.randomness
            )

    def train(self, save_every: int | None, step: Callable[[int, int, float], None] | None) -> str:
        while self.progress.epoch < self.schedule.epochs:
            if self.schedule.patience is not None and self.progress.stale >= self.schedule.patience:
                return f"no better score for {self.progress.stale} epochs"
            started = time.perf_counter()
            self._epoch(save_every, step)
            self._close_epoch(time.perf_counter() - started)
        return "all epochs done"

    def _epoch(self, save_every: int | None, step: Callable[[int, int, float], None] | None) -> None:
        now, schedule = self.progress, self.schedule
        self.wrapped.train()
        batches = epoch_batches(
            self.pairs, batch_size=schedule.batch_size, seed=schedule.seed, epoch=now.epoch, skip=now.batch,
            rank=self.fabric.global_rank, world=self.fabric.world_size,
        )  # fmt: skip
        while True:
            with self.randomness.own():
                batch = next(batches, None)
                if batch is None:
                    break
                number, inputs, targets = batch
                loss = self._step(inputs, targets)
            now.step, now.batch = now.step + 1, number + 1
            now.total, now.n_losses = now.total + loss, now.n_losses + 1
            if step is not None:
                step(now.step, self.n_steps, loss)
            if save_every is not None and now.step % save_every == 0:
                self._save()

    def _step(self, inputs: Tensor, targets: Tensor) -> float:
        """One step of the optimizer; returns the loss before it."""
        now, schedule = self.progress, self.schedule
        for group in self.optimizer.param_groups:
            group["lr"] = schedule.lr_at(now.step, self.n_steps)
        inputs = augment(inputs, schedule.augmentation, seed=schedule.seed, step=now.step)
        inputs, targets = self.fabric.to_device((inputs, targets))
        self.optimizer.zero_grad(set_to_none=True)
        value = self.loss(_call(self.wrapped, inputs), targets)
        if not isinstance(value, Tensor) or value.numel() != 1:
            what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ShapeError(f"training needs a loss that is one number; got {what}. Return its mean from loss=.")
        self._need_finite("loss", float(value.detach()))
        if not value.requires_grad:
            raise ConversionError(
                "training needs a loss that depends on what is trained; got one without a gradient. Use the trained "
                "layers in forward, and detach nothing on the way to the loss."
            )
        self.fabric.backward(value)
        if schedule.clip is not None:
            norm = self.fabric.clip_gradients(
                self.wrapped, self.optimizer, max_norm=schedule.clip, error_if_nonfinite=False
            )
            if getattr(self.fabric._precision, "scaler", None) is None:  # which skips such a step, and goes on
                self._need_finite("norm of the gradient", float(norm))
        self.optimizer.step()
        return float(value.detach())

    def _close_epoch(self, seconds: float) -> None:
        now = self.progress
        mean = now.total / max(1, now.n_losses)
        row = {"epoch": float(now.epoch), "loss": mean, "seconds": seconds}
        if self.test is not None:
            with self.randomness.own():
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
                total += n * float(self.loss(output, targets))
        return {"test_loss": total / len(self.test)}

    def _need_finite(self, what: str, value: float) -> None:
        if not math.isfinite(value):
            saved = "there is no checkpoint"
            if self.checkpoint is not None and self.checkpoint.exists():
                saved = f"the last good state is in {self.checkpoint.name}"
            raise TrainingError(
                f"training needs a finite {what}; got {value} at step {self.progress.step} ({saved}). Lower lr, clip "
                "gradients, or look for bad inputs."
            )

    def _need_finite_state(self) -> None:
        """Raises if a step with a finite loss left a NaN or infinity in what is trained or in running statistics."""
        for name, value in self._watched().items():
            if not bool(torch.isfinite(value).all()):
                self._need_finite(f"value of {name}", float(value[~torch.isfinite(value)][0]))

    def _watched(self) -> dict[str, Tensor]:
        """The trained tensors, and the running statistics that were finite before the run."""
        state = state_tensors(self.model, set())
        moved = {name: value for name, value in state.items() if is_statistic(name) and name not in self.odd}
        return moved | {name: value.detach() for name, value in stepped_on(self.model).items()}

    def _save(self) -> None:
        self._need_finite_state()
        settle(self.model)  # whether or not a file is written: the numbers do not depend on it
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
        drops = self.schedule.drops  # a list, as it comes back from JSON
        return {
            **asdict(self.schedule), "drops": None if drops is None else list(drops), "n_samples": len(self.pairs),
            **self.named, **self._identity,
        }  # fmt: skip

    @functools.cached_property
    def _identity(self) -> dict[str, str]:
        """Digests of what a run does not change and a resumed one must share: the data, and all that is frozen.

        Only data in tensors have one: the samples of other data sets may differ from one look to the next.
        """
        saved = state_tensors(self.model, set(stepped_on(self.model)))
        trained = {id(p) for p in self.model.parameters() if p.requires_grad}  # a tied one is saved under one name
        frozen = {name: t for name, t in base_tensors(self.model, saved).items() if id(t) not in trained}
        found = {"frozen_digest": encode(digests(frozen))}
        if isinstance(self.pairs, TensorPairs):
            found["data_digest"] = encode(digests({"inputs": self.pairs.inputs, "labels": self.pairs.labels}))
        return found


def _set_up(fabric: Any, given: nn.Module, model: nn.Module, schedule: Schedule) -> tuple[nn.Module, Any]:
    """The model, compiled if it was given so, and its optimizer as Fabric wraps them."""
    if schedule.follow_weights:  # the model first: the weights to step on are made where and as precise as it then is
        wrapped = fabric.setup_module(given)
        return wrapped, fabric.setup_optimizers(make_optimizer(model, schedule))
    both: tuple[nn.Module, Any] = fabric.setup(given, make_optimizer(model, schedule))
    return both


def _name_of(function: Callable[..., Any]) -> str:
    """The name of a function, or of the class of a callable object."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _is_compiled(model: nn.Module) -> bool:
    """Whether this is what torch.compile returned for a model, and not for another wrapper."""
    inner = getattr(model, "_orig_mod", None)
    return isinstance(inner, nn.Module) and need_module("fit", model) is inner


def _need_own_processes(model: nn.Module) -> None:
    """Raises for a model that other processes share already: each would train its own copy."""
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel) and module.process_group.size() > 1:
            raise ConversionError(
                f"fit needs the model itself to share it among processes; got DistributedDataParallel over "
                f"{module.process_group.size()}. Pass model.module with devices= and strategy='ddp'."
            )


def _need_function(name: str, function: Callable[..., Any] | None, n_arguments: int) -> None:
    """Raises unless this is None, or a function that can be called with so many arguments."""
    if function is None:
        return
    need_callable(name, function, cure="Leave it out.")
    if isinstance(function, type):
        raise ConversionError(f"{name} needs a function; got {shown(function)}. Make an instance of it: {name}=...().")
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        inspect.signature(called).bind(*[None] * n_arguments)
    except TypeError as error:
        raise ConversionError(
            f"{name} needs a function of {n_arguments} arguments; got {shown(function)} ({error}). Leave it out."
        ) from error
    except ValueError:
        pass  # functions written in C do not say what they take


def _default(schedule: Schedule) -> Loss:
    smoothing = schedule.label_smoothing
    return lambda output, targets: default_loss(find_output(output), targets, label_smoothing=smoothing)


@contextlib.contextmanager
def _writing_logs() -> Iterator[None]:
    """Lightning's loggers write files themselves: what their disk refuses is our error too."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            f"logs need a writable folder with space; got {error.strerror or error}. Free space there, or choose "
            "another folder; the checkpoint is as it was."
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
