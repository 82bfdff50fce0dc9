"""The state of a training run as a sealed file: everything that a resumed run needs to give the same numbers.

Trained tensors and all buffers of the model, the optimizer's moments, the random generator, and where the run stands.
No pickle: tensors in safetensors, numbers in JSON.

Where an optimizer steps on weights that gammas follow (`onlynorm.optim`), its moments are kept under the gamma's name,
and the weights are made from the gammas again. What rounding left of them is not kept: a run drops it whenever its
state is due to be saved (`settle`), killed or not, so that both go on with the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from onlynorm.errors import ConversionError, FormatError
from onlynorm.layers import NormOnlyLayer
from onlynorm.storage import read_tensors, write_tensors
from onlynorm.tuning.adapter import assign

FORMAT = 1


@dataclass
class Progress:
    """Where a run stands: epoch, batch in it, steps so far, the best score and the epochs without a better one."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    best: float = float("-inf")
    stale: int = 0
    history: list[dict[str, float]] = field(default_factory=list)


def state_tensors(model: nn.Module, trained: set[str]) -> dict[str, Tensor]:
    """The tensors of the model that training changes: trained parameters and all buffers."""
    buffers = {name for name, _ in model.named_buffers()}
    return {name: t.detach() for name, t in model.state_dict().items() if name in trained or name in buffers}


def stepped_on(model: nn.Module) -> dict[str, Tensor]:
    """What an optimizer steps on, by the names of trained parameters: a weight in the place of the gamma it leads."""
    weights = {id(layer.gamma): weight for layer, weight in _followed(model)}
    return {name: weights.get(id(p), p) for name, p in model.named_parameters() if p.requires_grad}


def settle(model: nn.Module) -> None:
    """Lets gammas that follow weights go on as if they had just been loaded."""
    for layer, _ in _followed(model):
        increment_version(layer.gamma)


def _followed(model: nn.Module) -> Iterator[tuple[NormOnlyLayer, Tensor]]:
    """Layers whose gammas follow a weight, and that weight."""
    for layer in model.modules():
        if isinstance(layer, NormOnlyLayer) and layer.held is not None:
            yield layer, layer.held


def save_state(
    path: Path, model: nn.Module, optimizer: Optimizer, progress: Progress, *, settings: dict[str, Any]
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
    tensors["generator"] = torch.get_rng_state()
    document = {"progress": progress.__dict__, "settings": settings, "numbers": numbers}
    tensors = {name: t.contiguous() for name, t in tensors.items()}
    write_tensors(path, tensors, kind="training run", format=FORMAT, document=document)


def load_state(path: Path, model: nn.Module, optimizer: Optimizer, *, settings: dict[str, Any]) -> Progress:
    """Puts a run back where it stood; a run with other settings or another model is refused."""
    cure = "Delete it to begin anew."
    document, tensors = read_tensors(path, kind="training run", format=FORMAT, cure=cure)
    kept = document.get("settings")
    if not isinstance(kept, dict):
        raise FormatError(f"a training run needs its settings; {path.name} has none. {cure}")
    changed = sorted(key for key in settings.keys() | kept.keys() if settings.get(key) != kept.get(key))
    if changed:
        told = ", ".join(f"{key}: {kept.get(key)!r} there, {settings.get(key)!r} now" for key in changed[:4])
        raise ConversionError(f"resuming needs the settings of the run in {path.name}; got others ({told}). {cure}")
    named = stepped_on(model)
    wanted = state_tensors(model, set(named))
    for name, held in wanted.items():
        value = tensors.get(f"model/{name}")
        if value is None or value.shape != held.shape:
            raise ConversionError(f"resuming needs the model of the run in {path.name}; {name!r} does not fit. {cure}")
    for name in wanted:
        assign(model, name, tensors[f"model/{name}"])
    with torch.no_grad():
        for layer, weight in _followed(model):
            weight.copy_(layer.frozen(*layer.gammas))
    for key, value in tensors.items():
        if key.startswith("optimizer/"):
            name, _, slot = key.removeprefix("optimizer/").rpartition("/")
            # Adam keeps its step on the CPU whatever the device; moments live beside their parameter.
            place = named[name].device if value.ndim else torch.device("cpu")
            optimizer.state[named[name]][slot] = value.to(place)
    for key, number in document.get("numbers", {}).items():
        name, _, slot = key.rpartition("/")
        optimizer.state[named[name]][slot] = number
    torch.set_rng_state(tensors["generator"])
    return Progress(**document["progress"])
