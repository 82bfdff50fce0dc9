"""The state of a training run as a sealed file: everything that a resumed run needs to give the same numbers.

Trained tensors and all buffers of the model, the optimizer's moments, the random generators, and where the run stands.
No pickle: tensors in safetensors, numbers in JSON. A file is checked as a whole before anything of it is used.

Where an optimizer steps on weights that gammas follow (`onlynorm.optim`), its moments are kept under the gamma's name,
and the weights are made from the gammas again. What rounding left of them is not kept: a run drops it whenever its
state is due to be saved (`settle`), killed or not, so that both go on with the same numbers.
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
from onlynorm.storage import make_checked, read_tensors, write_tensors
from onlynorm.tuning.adapter import write_values
from onlynorm.tuning.batches import n_batches
from onlynorm.tuning.fingerprint import hidden_buffers, is_plain, state_of

FORMAT = 1
_SLOTS = {"SGD": {"momentum_buffer"}, "AdamW": {"step", "exp_avg", "exp_avg_sq"}}
"""What the optimizers of `fit` remember of each parameter."""
_DIGESTS = {"data_digest": "other inputs or labels", "frozen_digest": "other values of what is not trained"}
"""Settings that are digests, and what it means that they differ."""


@dataclass
class Progress:
    """Where a run stands: epoch, batch in it, steps so far, the best score and the epochs without a better one.

    `total` is the sum of the `n_losses` losses of the epoch so far.
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
    """The random state of one run: that of the CPU, and that of the device it trains on.

    Dropout draws from torch's global generators. `own()` lends them the run's state for as long as it takes and gives
    them back as they were, so that a run is a function of its seed whatever other code and callbacks draw. One run at a
    time can have them: `fit`, the models and `diagnose` of onlynorm in other threads wait for their turn. Nothing can
    stop other threads that draw from the global generators by themselves, as `nn.Linear(...)` does.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self.states = {"generator": torch.Generator().manual_seed(seed).get_state()}
        if device.type != "cpu":
            self.states["device_generator"] = torch.Generator(device).manual_seed(seed).get_state()

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        """Inside, the global generators go on from the run's state."""
        with GLOBAL_GENERATORS:
            before = self._present()
            self._set(self.states)
            try:
                yield
            finally:
                self.states = self._present()
                self._set(before)

    def restore(self, states: dict[str, Tensor]) -> None:
        """Goes on from saved states; raises RuntimeError, and changes nothing, if they are not those of generators."""
        for name, state in states.items():
            torch.Generator(self.device if name == "device_generator" else "cpu").set_state(state)
        self.states = {name: states.get(name, own) for name, own in self.states.items()}

    def _present(self) -> dict[str, Tensor]:
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
    """The tensors of the model that training changes: trained parameters and all buffers."""
    taken = trained | {plain_name(name) for name, _ in model.named_buffers(remove_duplicate=False)}
    state = state_of(model) | hidden_buffers(model)
    return {name: t.detach() for name, t in state.items() if name in taken and is_plain(t)}


def stepped_on(model: nn.Module) -> dict[str, Tensor]:
    """What an optimizer steps on, by the names of trained parameters: a weight in the place of the gamma it leads."""
    weights = {id(layer.gamma): weight for layer, weight in _followed(model)}
    return {plain_name(name): weights.get(id(p), p) for name, p in model.named_parameters() if p.requires_grad}


def settle(model: nn.Module) -> None:
    """Drops the rounding remainder of gammas that follow weights, so that a resumed run is bit-identical."""
    for layer, _ in _followed(model):
        increment_version(layer.gamma)


def _followed(model: nn.Module) -> Iterator[tuple[NormOnlyLayer, Tensor]]:
    """Layers whose gammas follow a weight, and that weight."""
    for layer in model.modules():
        if isinstance(layer, NormOnlyLayer) and layer.held is not None:
            yield layer, layer.held


def save_state(
    path: Path,
    model: nn.Module,
    optimizer: Optimizer,
    progress: Progress,
    *,
    settings: dict[str, Any],
    randomness: Randomness,
) -> None:
    """Writes the state of the run, whole or not at all."""
    named = stepped_on(model)
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
    write_tensors(path, tensors, kind="training run", format=FORMAT, document=document)


def load_state(
    path: Path, model: nn.Module, optimizer: Optimizer, *, settings: dict[str, Any], randomness: Randomness
) -> Progress:
    """Puts a run back where it stood; a run with other settings or another model is refused, and changes nothing."""
    cure = "Delete it to begin again."
    document, tensors = read_tensors(path, kind="training run", format=FORMAT, cure=cure)
    saved = document.get("settings")
    if not isinstance(saved, dict):
        raise FormatError(f"a training run needs its settings; {path.name} has none. {cure}")
    changed = sorted(key for key in settings.keys() | saved.keys() if settings.get(key) != saved.get(key))
    other = [words for key, words in _DIGESTS.items() if key in changed]
    if changed and len(other) == len(changed):
        raise ConversionError(
            f"resuming needs the model and the data of the run in {path.name}; got {' and '.join(other)}. {cure}"
        )
    if changed:
        listed = ", ".join(
            f"{key}: {saved.get(key)!r} there, {settings.get(key)!r} now"
            for key in [key for key in changed if key not in _DIGESTS][:4]
        )
        raise ConversionError(f"resuming needs the settings of the run in {path.name}; got others ({listed}). {cure}")
    named = stepped_on(model)
    values: dict[str, Tensor] = {}
    hidden = hidden_buffers(model)
    for name, held in state_tensors(model, set(named)).items():
        value = tensors.get(f"model/{name}")
        if name in hidden and (value is None or value.shape != held.shape):
            continue  # a cache, which forward makes again
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
            f"a training run needs the state of its optimizer, its generators and its progress; {path.name} has "
            f"others ({error!s:.200}). {cure}"
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
    """(parameter, name, value) of everything that the optimizer remembers."""
    found: list[tuple[Tensor, str, Any]] = []
    for key, value in tensors.items():
        if key.startswith("optimizer/"):
            name, _, slot = key.removeprefix("optimizer/").rpartition("/")
            parameter = named[name]
            layout = (torch.Size(), torch.float32) if slot == "step" else (parameter.shape, parameter.dtype)
            if (value.shape, value.dtype) != layout:
                raise ValueError(f"{key} has the shape {tuple(value.shape)} and the type {value.dtype}")
            # Adam keeps its step on the CPU whatever the device; moments live beside their parameter.
            found.append((parameter, slot, value.to(parameter.device if value.ndim else torch.device("cpu"))))
    for key, number in numbers.items():
        name, _, slot = key.rpartition("/")
        if not isinstance(number, int | float):
            raise TypeError(f"{key} is not a number")
        found.append((named[name], slot, number))
    return found


def _need_whole_slots(optimizer: Optimizer, slots: list[tuple[Tensor, str, Any]]) -> None:
    """Raises ValueError unless each parameter has all that the optimizer remembers of it, or nothing."""
    known = _SLOTS.get(type(optimizer).__name__.removeprefix("Fabric"))
    found: dict[int, set[str]] = {}
    for parameter, slot, value in slots:
        found.setdefault(id(parameter), set()).add(slot)
        if slot == "step" and not 1.0 <= float(value) < 2.0**53:
            raise ValueError(f"a step counter is {float(value)}")
    for names in found.values():
        if known is not None and names != known:
            raise ValueError(f"the optimizer remembers {', '.join(sorted(names))} of a parameter")


def _progress(saved: dict[str, Any], settings: dict[str, Any]) -> Progress:
    """Where a run stands, with fields of the right types and counts that a run of these settings can have."""
    progress = make_checked(Progress, saved)
    per_epoch = n_batches(settings["n_samples"], settings["batch_size"])
    is_possible = (
        0 <= progress.epoch <= settings["epochs"]
        and 0 <= progress.batch <= (per_epoch if progress.epoch < settings["epochs"] else 0)
        and progress.step == progress.epoch * per_epoch + progress.batch
        and progress.n_losses == progress.batch
        and 0 <= progress.stale <= progress.epoch == len(progress.history)
    )
    if not is_possible:
        raise ValueError(f"no run of these settings stands at epoch {progress.epoch}, step {progress.step!s:.20}")
    return progress
