"""`fit`: one training loop for all of onlynorm, on Lightning Fabric.

Whatever requires a gradient is trained: after `only_norms` the norms and the heads, else the whole model. Runs are
functions of their seed, and a run that was killed resumes from its checkpoint with the numbers of one that was not.
Models made by `norm_only` step on gamma, or with `follow_weights` on the weights that their gammas then follow.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from onlynorm.errors import ConversionError, TrainingError, UnknownNameError, ValueRangeError
from onlynorm.optim import follow_weights, release
from onlynorm.tuning.batches import Pairs, TensorPairs, augment, collate, epoch_batches, n_batches
from onlynorm.tuning.training_state import Progress, load_state, save_state, settle

OPTIMIZERS = ("sgd", "adamw")
Loss = Callable[[Any, Tensor], Tensor]


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
        if self.optimizer not in OPTIMIZERS:
            raise UnknownNameError("optimizer", self.optimizer, OPTIMIZERS)
        for name, value, is_fine, cure in (
            ("epochs", self.epochs, self.epochs >= 0, "Try 10."),
            ("batch_size", self.batch_size, self.batch_size >= 1, "Try 128."),
            ("lr", self.lr, 0.0 <= self.lr < math.inf, "Try 0.1 for sgd, 1e-3 for adamw."),
            ("warmup", self.warmup, 0.0 <= self.warmup < 1.0, "It is a share of all steps: try 0.05."),
            ("drops", self.drops, all(0.0 < share < 1.0 for share in self.drops or ()), "Try (0.5, 0.8)."),
            ("label_smoothing", self.label_smoothing, 0.0 <= self.label_smoothing < 1.0, "Leave it out."),
        ):
            if not is_fine:
                raise ValueRangeError(f"{name} needs a sensible value; got {value}. {cure}")

    def lr_at(self, step: int, n_steps: int) -> float:
        """The learning rate of a step: a line up to the peak, then a cosine down to zero or a tenth at every drop."""
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
    """Trains, in place, what requires a gradient; returns the history.

    `data` and `test` are (inputs, labels) or datasets of such pairs. `checkpoint` names the file from which a killed
    run resumes; it is written after every epoch, every `save_every` steps too if given, and stays when the run ends.
    `logs` is a folder for a CSV table and TensorBoard events. `step` is called with (step, steps in all, loss).
    """
    from lightning_fabric import Fabric

    schedule = schedule or Schedule()
    pairs, judged = _pairs(data), None if test is None else _pairs(test)
    if not any(p.requires_grad for p in model.parameters()):
        raise ConversionError(
            "training needs parameters that require gradients; got none in "
            f"{type(model).__name__}. Call only_norms(model), or unfreeze what should learn."
        )
    fabric = Fabric(accelerator=accelerator, devices=devices, strategy=strategy, precision=precision,  # type: ignore[arg-type]
                    loggers=_loggers(logs))  # fmt: skip
    fabric.launch()
    if schedule.follow_weights and fabric.world_size > 1:
        raise ValueRangeError(
            f"follow_weights needs one process, since the weights it steps on are no parameters that processes share; "
            f"got {fabric.world_size}. Pass devices=1."
        )
    started = time.perf_counter()
    with torch.random.fork_rng():
        torch.manual_seed(schedule.seed)
        release(model)  # weights that an optimizer of the caller holds would hide the gammas
        try:
            wrapped, moved = _set_up(fabric, model, schedule)
            run = _Run(fabric, model, wrapped, moved, schedule, pairs, judged, loss or _cross_entropy(schedule))
            run.begin(Path(checkpoint) if checkpoint is not None else None)
            reason = run.train(save_every, step)
        finally:
            release(model)
    for logger in fabric.loggers:
        logger.finalize("success")
    return Fit(tuple(run.progress.history), run.progress.step, time.perf_counter() - started, reason)


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


@torch.no_grad()
def accuracy(model: nn.Module, data: Pairs | tuple[Tensor, Tensor], *, batch_size: int = 500) -> float:
    """The share of samples whose largest logit is at their label, in evaluation mode."""
    pairs = _pairs(data)
    modes = {m: m.training for m in model.modules()}
    device = next(model.parameters()).device
    model.eval()
    right = 0
    try:
        for start in range(0, len(pairs), batch_size):
            inputs, labels = collate(pairs, range(start, min(start + batch_size, len(pairs))))
            right += int((logits_of(model(inputs.to(device))).argmax(1) == labels.to(device)).sum())
    finally:
        for module, mode in modes.items():
            module.training = mode
    return right / len(pairs)


def logits_of(output: Any) -> Tensor:
    """The logits in what a model returns: a tensor, or an object, dict or tuple that holds them."""
    if isinstance(output, Tensor):
        return output
    if hasattr(output, "logits"):
        return output.logits
    if isinstance(output, dict) and "logits" in output:
        return output["logits"]
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        return output[0]
    raise ConversionError(
        f"training needs a model that returns logits; got {type(output).__name__}. Pass loss= that knows what to do."
    )


class _Run:
    """One run of the loop: the parts it needs and where it stands."""

    def __init__(self, fabric: Any, model: nn.Module, wrapped: nn.Module, optimizer: Any, schedule: Schedule,
                 pairs: Pairs, test: Pairs | None, loss: Loss) -> None:  # fmt: skip
        self.fabric, self.model, self.wrapped, self.optimizer = fabric, model, wrapped, optimizer
        self.schedule, self.pairs, self.test, self.loss = schedule, pairs, test, loss
        self.progress = Progress()
        self.checkpoint: Path | None = None
        self.per_epoch = n_batches(len(pairs), schedule.batch_size)
        self.n_steps = schedule.epochs * self.per_epoch

    def begin(self, checkpoint: Path | None) -> None:
        self.checkpoint = checkpoint
        if checkpoint is not None and checkpoint.exists():
            self.progress = load_state(checkpoint, self.model, self._inner, settings=self._settings)

    def train(self, save_every: int | None, step: Callable[[int, int, float], None] | None) -> str:
        while self.progress.epoch < self.schedule.epochs:
            if self.schedule.patience is not None and self.progress.stale >= self.schedule.patience:
                return f"no better score for {self.progress.stale} epochs"
            started = time.perf_counter()
            mean = self._epoch(save_every, step)
            self._close_epoch(mean, time.perf_counter() - started)
        return "all epochs done"

    def _epoch(self, save_every: int | None, step: Callable[[int, int, float], None] | None) -> float:
        now, schedule = self.progress, self.schedule
        self.wrapped.train()
        losses: list[float] = []
        batches = epoch_batches(
            self.pairs, batch_size=schedule.batch_size, seed=schedule.seed, epoch=now.epoch, skip=now.batch,
            rank=self.fabric.global_rank, world=self.fabric.world_size,
        )  # fmt: skip
        for number, inputs, labels in batches:
            for group in self.optimizer.param_groups:
                group["lr"] = schedule.lr_at(now.step, self.n_steps)
            inputs = augment(inputs, schedule.augmentation, seed=schedule.seed, step=now.step)
            inputs, labels = self.fabric.to_device((inputs, labels))
            self.optimizer.zero_grad(set_to_none=True)
            value = self.loss(self.wrapped(inputs), labels)
            self._need_finite(float(value.detach()))
            self.fabric.backward(value)
            if schedule.clip is not None:
                self.fabric.clip_gradients(self.wrapped, self.optimizer, max_norm=schedule.clip)
            self.optimizer.step()
            losses.append(float(value.detach()))
            now.step, now.batch = now.step + 1, number + 1
            if step is not None:
                step(now.step, self.n_steps, losses[-1])
            if save_every is not None and now.step % save_every == 0:
                self._save()
        return sum(losses) / max(1, len(losses))

    def _close_epoch(self, mean: float, seconds: float) -> None:
        now = self.progress
        row = {"epoch": float(now.epoch), "loss": mean, "seconds": seconds}
        if self.test is not None:
            row["test_accuracy"] = accuracy(self.model, self.test)
        score = row.get("test_accuracy", -mean)
        now.stale = 0 if score > now.best else now.stale + 1
        now.best = max(now.best, score)
        now.history.append(row)
        self.fabric.log_dict({k: v for k, v in row.items() if k != "epoch"}, step=now.epoch)
        now.epoch, now.batch = now.epoch + 1, 0
        self._save()

    def _need_finite(self, value: float) -> None:
        if not math.isfinite(value):
            kept = f"the last good state is in {self.checkpoint.name}" if self.checkpoint else "no checkpoint was kept"
            raise TrainingError(
                f"training needs a finite loss; got {value} at step {self.progress.step} ({kept}). Lower lr, clip "
                "gradients, or look for bad inputs."
            )

    def _save(self) -> None:
        settle(self.model)  # whether or not a file is written: the numbers do not depend on it
        if self.checkpoint is not None and self.fabric.is_global_zero:
            save_state(self.checkpoint, self.model, self._inner, self.progress, settings=self._settings)

    @property
    def _inner(self) -> Optimizer:
        inner: Optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return inner

    @property
    def _settings(self) -> dict[str, Any]:
        drops = self.schedule.drops  # a list, as it comes back from JSON
        return {**asdict(self.schedule), "drops": None if drops is None else list(drops), "n_samples": len(self.pairs)}


def _set_up(fabric: Any, model: nn.Module, schedule: Schedule) -> tuple[nn.Module, Any]:
    """The model and its optimizer as Fabric wraps them."""
    if schedule.follow_weights:  # the model first: the weights to step on are made where and as precise as it then is
        wrapped = fabric.setup_module(model)
        return wrapped, fabric.setup_optimizers(make_optimizer(model, schedule))
    both: tuple[nn.Module, Any] = fabric.setup(model, make_optimizer(model, schedule))
    return both


def _cross_entropy(schedule: Schedule) -> Loss:
    smoothing = schedule.label_smoothing
    return lambda output, labels: functional.cross_entropy(logits_of(output), labels, label_smoothing=smoothing)


def _pairs(data: Pairs | tuple[Tensor, Tensor]) -> Pairs:
    if isinstance(data, tuple):
        return TensorPairs(*data)
    if not len(data):
        raise ValueRangeError("training needs at least one sample; got none. Pass another dataset.")
    return data


def _loggers(folder: Path | str | None) -> list[Any]:
    if folder is None:
        return []
    from lightning_fabric.loggers.csv_logs import CSVLogger
    from lightning_fabric.loggers.tensorboard import TensorBoardLogger

    folder = Path(folder)
    return [CSVLogger(folder, name="csv", flush_logs_every_n_steps=1), TensorBoardLogger(folder, name="tensorboard")]
