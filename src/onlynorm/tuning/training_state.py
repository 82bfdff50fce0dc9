"""Checkpoints of a training run, from which it resumes bit for bit.

A checkpoint holds the trained tensors and all buffers of the model, the state of the optimizer and of the random
generators, and the progress. Tensors are stored as safetensors, scalars as JSON, without pickle. A file is validated
completely before it is used.

With `follow_weights` (`onlynorm.optim`) the state of the optimizer is saved under the name of gamma, and the weights
are computed from gammas on loading. Their rounding remainder is not saved: every run drops it whenever a checkpoint is
due (`drop_remainders`), so that a resumed run is bit-identical.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from onlynorm.errors import ConversionError, FormatError
from onlynorm.frozen import NormOnlyLayer
from onlynorm.modules.norms import plain_name
from onlynorm.seeds import GLOBAL_GENERATORS
from onlynorm.storage import changed_settings, make_checked, read_tensors, write_tensors
from onlynorm.tuning.adapter import write_values
from onlynorm.tuning.batches import n_batches
from onlynorm.tuning.fingerprint import hidden_buffers, is_plain, state_of

KIND, FORMAT = "training run", 1
_SLOTS = {"SGD": {"momentum_buffer"}, "AdamW": {"step", "exp_avg", "exp_avg_sq"}}
"""State entries per parameter of the optimizers of `fit`."""
_DIGESTS = {"data_digest": "other inputs or labels", "frozen_digest": "other values of what is not trained"}
"""Settings that are digests, with the message if they differ."""


@dataclass
class TrainingProgress:
    """Progress of a run: epoch, batch in the epoch, steps, best score, and epochs without improvement.

    `total` is the sum of the `n_losses` losses of the current epoch.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    total: float = 0.0
    n_losses: int = 0
    best: float = float("-inf")
    stale: int = 0
    history: list[dict[str, float]] = field(default_factory=list)


class Randomness:
    """The state of the random generators of one run, on the CPU and on its device.

    Dropout draws from torch's global generators. `active()` sets them to the state of the run and restores them
    afterwards, so that a run depends on its seed only. A lock ensures that one run at a time uses them: `fit`, the
    models and `diagnose` in other threads wait. It cannot prevent other threads from using the global generators
    directly, as `nn.Linear(...)` does.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self.states = {"generator": torch.Generator().manual_seed(seed).get_state()}
        if device.type != "cpu":
            self.states["device_generator"] = torch.Generator(device).manual_seed(seed).get_state()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Context in which the global generators have the state of the run."""
        with GLOBAL_GENERATORS:
            before = self._current()
            self._set(self.states)
            try:
                yield
            finally:
                self.states = self._current()
                self._set(before)

    def restore(self, states: dict[str, Tensor]) -> None:
        """Sets the saved states; raises RuntimeError, without changes, if they are invalid."""
        for name, state in states.items():
            torch.Generator(self.device if name == "device_generator" else "cpu").set_state(state)
        self.states = {name: states.get(name, own) for name, own in self.states.items()}

    def _current(self) -> dict[str, Tensor]:
        found = {"generator": torch.get_rng_state()}
        if self.device.type != "cpu":
            module = getattr(torch, self.device.type)
            is_single = self.device.type == "mps"
            found["device_generator"] = module.get_rng_state() if is_single else module.get_rng_state(self.device)
        return found

    def _set(self, states: dict[str, Tensor]) -> None:
        torch.set_rng_state(states["generator"])
        if self.device.type != "cpu":
            module = getattr(torch, self.device.type)
            where = () if self.device.type == "mps" else (self.device,)
            module.set_rng_state(states["device_generator"], *where)


def state_tensors(model: nn.Module, trained: set[str]) -> dict[str, Tensor]:
    """The tensors that training changes: trained parameters and all buffers."""
    taken = trained | {plain_name(name) for name, _ in model.named_buffers(remove_duplicate=False)}
    state = state_of(model) | hidden_buffers(model)
    return {name: t.detach() for name, t in state.items() if name in taken and is_plain(t)}


def optimized_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that the optimizer updates, by parameter name: effective weights replace their gammas."""
    weights = {id(layer.gamma): weight for layer, weight in _followed(model)}
    return {plain_name(name): weights.get(id(p), p) for name, p in model.named_parameters() if p.requires_grad}


def drop_remainders(model: nn.Module) -> None:
    """Drops the rounding remainders of `follow_weights`, so that a resumed run is bit-identical."""
    for layer, _ in _followed(model):
        increment_version(layer.gamma)


def _followed(model: nn.Module) -> Iterator[tuple[NormOnlyLayer, Tensor]]:
    """Layers with an effective weight held by an optimizer, and that weight."""
    for layer in model.modules():
        if isinstance(layer, NormOnlyLayer) and layer.held is not None:
            yield layer, layer.held


def save_state(
    path: Path,
    model: nn.Module,
    optimizer: Optimizer,
    progress: TrainingProgress,
    *,
    settings: dict[str, Any],
    randomness: Randomness,
) -> None:
    """Writes a checkpoint atomically."""
    named = optimized_tensors(model)
    tensors = {f"model/{name}": t.cpu() for name, t in state_tensors(model, set(named)).items()}
    numbers: dict[str, float] = {}
    for name, parameter in named.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{name}/{key}"] = value.detach().cpu()
            elif value is not None:
                numbers[f"{name}/{key}"] = value
    tensors |= {name: state.clone() for name, state in randomness.states.items()}
    document = {"progress": progress.__dict__, "settings": settings, "numbers": numbers}
    tensors = {name: t.contiguous() for name, t in tensors.items()}
    write_tensors(path, tensors, kind=KIND, format=FORMAT, document=document)


def load_state(
    path: Path, model: nn.Module, optimizer: Optimizer, *, settings: dict[str, Any], randomness: Randomness
) -> TrainingProgress:
    """Loads a checkpoint; raises, without changes, if the settings or the model differ."""
    cure = "Delete it to start again."
    document, tensors = read_tensors(path, kind=KIND, format=FORMAT, cure=cure)
    saved = document.get("settings")
    if not isinstance(saved, dict):
        raise FormatError(f"a training run needs its settings; {path.name} has none. {cure}")
    changed = changed_settings(saved, settings)
    other = [words for key, words in _DIGESTS.items() if key in changed]
    if changed and len(other) == len(changed):
        raise ConversionError(
            f"resuming needs the model and the data of the run in {path.name}; got {' and '.join(other)}. {cure}"
        )
    if changed:
        listed = ", ".join([text for key, text in changed.items() if key not in _DIGESTS][:4])
        raise ConversionError(
            f"resuming needs the settings of the run in {path.name}; got different ones ({listed}). {cure}"
        )
    named = optimized_tensors(model)
    values: dict[str, Tensor] = {}
    hidden = hidden_buffers(model)
    for name, held in state_tensors(model, set(named)).items():
        value = tensors.get(f"model/{name}")
        if name in hidden and (value is None or value.shape != held.shape):
            continue  # a cache, computed again by forward
        if value is None or value.shape != held.shape or value.dtype != held.dtype:
            raise ConversionError(f"resuming needs the model of the run in {path.name}; {name!r} does not fit. {cure}")
        values[name] = value
    try:
        slots = _optimizer_slots(named, tensors, document["numbers"])
        _need_whole_slots(optimizer, slots)
        progress = _progress(document["progress"], settings)
        states = {name: tensors[name] for name in randomness.states}
        randomness.restore(states)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise FormatError(
            f"a training run needs the state of its optimizer, generators and progress; got an invalid one in "
            f"{path.name} ({error!s:.200}). {cure}"
        ) from error
    write_values(model, values)
    with torch.no_grad():
        for layer, weight in _followed(model):
            weight.copy_(layer.frozen(*layer.gammas))
    for parameter, slot, value in slots:
        optimizer.state[parameter][slot] = value
    return progress


def _optimizer_slots(
    named: dict[str, Tensor], tensors: dict[str, Tensor], numbers: dict[str, Any]
) -> list[tuple[Tensor, str, Any]]:
    """(parameter, name, value) of all entries of the optimizer state."""
    found: list[tuple[Tensor, str, Any]] = []
    for key, value in tensors.items():
        if key.startswith("optimizer/"):
            name, _, slot = key.removeprefix("optimizer/").rpartition("/")
            parameter = named[name]
            layout = (torch.Size(), torch.float32) if slot == "step" else (parameter.shape, parameter.dtype)
            if (value.shape, value.dtype) != layout:
                raise ValueError(f"{key} has the shape {tuple(value.shape)} and the type {value.dtype}")
            # Adam stores its step on the CPU; moments are on the device of their parameter.
            found.append((parameter, slot, value.to(parameter.device if value.ndim else torch.device("cpu"))))
    for key, number in numbers.items():
        name, _, slot = key.rpartition("/")
        if not isinstance(number, int | float):
            raise TypeError(f"{key} is not a number")
        found.append((named[name], slot, number))
    return found


def _need_whole_slots(optimizer: Optimizer, slots: list[tuple[Tensor, str, Any]]) -> None:
    """Raises ValueError unless each parameter has all entries of the optimizer state, or none."""
    known = _SLOTS.get(type(optimizer).__name__.removeprefix("Fabric"))
    found: dict[int, set[str]] = {}
    for parameter, slot, value in slots:
        found.setdefault(id(parameter), set()).add(slot)
        if slot == "step" and not 1.0 <= float(value) < 2.0**53:
            raise ValueError(f"a step counter is {float(value)}")
    for names in found.values():
        if known is not None and names != known:
            raise ValueError(f"the optimizer state of a parameter has {', '.join(sorted(names))}")


def _progress(saved: dict[str, Any], settings: dict[str, Any]) -> TrainingProgress:
    """The saved progress, validated against the settings."""
    progress = make_checked(TrainingProgress, saved)
    per_epoch = n_batches(settings["n_samples"], settings["batch_size"])
    is_possible = (
        0 <= progress.epoch <= settings["epochs"]
        and 0 <= progress.batch <= (per_epoch if progress.epoch < settings["epochs"] else 0)
        and progress.step == progress.epoch * per_epoch + progress.batch
        and progress.n_losses == progress.batch
        and 0 <= progress.stale <= progress.epoch == len(progress.history)
    )
    if not is_possible:
        raise ValueError(f"epoch {progress.epoch} and step {progress.step!s:.20} do not match the settings")
    return progress
