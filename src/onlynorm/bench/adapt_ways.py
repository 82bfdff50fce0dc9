"""The ways of adapting a trained image network to other images: what each trains, keeps in a file, and loads again.

Each keeps no more than what it changed: statistics only the running statistics, head only the last layer, norms only
scales, shifts and statistics, full training the whole network.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from onlynorm.tuning import Schedule, fit, load_adapter, only_norms, save_adapter, take_adapter, write_adapter

NOTHING, STATISTICS, HEAD = "nothing", "statistics only", "head only"
NORMS, BOTH, FULL = "norms only", "norms and head", "full training"
TRAINED = (HEAD, NORMS, BOTH, FULL)
"""Ways with a learning rate."""
WAYS = (NOTHING, STATISTICS, *TRAINED)
_LAST = "linear"
_FILE = "kept.safetensors"
_MOVED = ("running_mean", "running_var", "num_batches_tracked")
Step = Callable[[int, int, float], None]


def adapt(
    base: nn.Module, way: str, *, data: tuple[Tensor, Tensor], schedule: Schedule, step: Step | None = None
) -> nn.Module:
    """A copy of the base adapted in this way to images and labels, of which statistics only sees the images."""
    network = copy.deepcopy(base)
    if way == STATISTICS:
        handle = only_norms(network, statistics="recalibrate")
        handle.recalibrate(data[0].split(schedule.batch_size))
    elif way != NOTHING:
        train_only(network, way)
        fit(network, data, schedule=schedule, step=step)
    return network.eval()


def train_only(network: nn.Module, way: str) -> None:
    """Lets gradients reach what this way trains. Statistics stay with the head alone, else they follow the batches."""
    if way == FULL:
        network.requires_grad_(True)
    elif way == HEAD:
        only_norms(network, also=(_LAST,), which=lambda _: False, statistics="freeze")
    else:
        only_norms(network, also=(_LAST,) if way == BOTH else (), statistics="track")


def keep(network: nn.Module, way: str, *, folder: Path) -> int:
    """Bytes of the file in which what was learned is kept, none for nothing."""
    path = folder / _FILE
    if way == NOTHING:
        return 0
    if way == FULL:
        save_file(network.state_dict(), path)
    elif way == STATISTICS:
        adapter = take_adapter(network)
        moved = {name: value for name, value in adapter.tensors.items() if name.rpartition(".")[2] in _MOVED}
        others = tuple(sorted(adapter.tensors.keys() - moved.keys()))
        write_adapter(dataclasses.replace(adapter, tensors=moved, free=others), path)
    else:
        save_adapter(network, path)
    return path.stat().st_size


def reload(base: nn.Module, way: str, *, folder: Path) -> nn.Module:
    """The adapted network again, from a copy of the base and the file."""
    network = copy.deepcopy(base)
    if way == FULL:
        network.load_state_dict(load_file(folder / _FILE))
    elif way != NOTHING:
        load_adapter(network, folder / _FILE)
    return network.eval()
