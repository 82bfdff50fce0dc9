"""What `onlynorm memorize` learns by heart: a data set by name, or a file of inputs with labels or real targets."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from onlynorm.data import DATA_SETS, load_data
from onlynorm.errors import FormatError, MissingDataError, ShapeError, UnknownNameError, ValueRangeError

FILES = (".npz", ".safetensors")


@dataclass(frozen=True)
class ToMemorize:
    """Training inputs with classes or real targets, and held-out samples with classes if there are any."""

    name: str
    inputs: Tensor
    targets: Tensor
    held_out: tuple[Tensor, Tensor] | None

    @property
    def is_real(self) -> bool:
        """Whether the targets are real numbers and not classes."""
        return self.targets.is_floating_point()

    @property
    def n_classes(self) -> int | None:
        """Classes among all labels, held-out ones included; None for real targets or no points."""
        if self.is_real or not self.targets.numel():
            return None
        held = -1 if self.held_out is None else int(self.held_out[1].max())
        return max(int(self.targets.max()), held) + 1


def find_sample(data: str, n_points: int | None) -> ToMemorize:
    """The first so many training points of a data set or file, all if `n_points` is None."""
    if data in DATA_SETS:
        split = load_data(data)
        held = (split.test_inputs, split.test_labels) if split.has_labels else None
        found = ToMemorize(data, split.train_inputs, split.train_labels, held)
    else:
        found = _read(data)
    if n_points is not None and n_points > len(found.inputs):
        raise ValueRangeError(
            f"--points {n_points} needs as many in the data; got {len(found.inputs)}. Ask for fewer, or leave it out."
        )
    return ToMemorize(found.name, found.inputs[:n_points], found.targets[:n_points], found.held_out)


def _read(data: str) -> ToMemorize:
    path = Path(data)
    if path.suffix not in FILES:
        raise UnknownNameError("data", data, (*DATA_SETS, *(f"FILE{ending}" for ending in FILES)))
    if not path.is_file():
        raise MissingDataError(f"data needs a file; there is none at {path}. Check the path, or take the digits.")
    tensors = _read_npz(path) if path.suffix == ".npz" else _read_tensors(path)
    goals = [name for name in ("labels", "targets") if name in tensors]
    if "inputs" not in tensors or not tensors["inputs"].ndim or len(goals) != 1:
        got = ", ".join(sorted(tensors)[:5]) or "nothing"
        raise FormatError(
            f"{path.name} needs inputs and one of labels (whole numbers) and targets (real numbers), a row per point; "
            f"got {got}. Save them under those names."
        )
    targets = tensors[goals[0]]
    if targets.is_floating_point() != (goals[0] == "targets") or not targets.ndim:
        raise ShapeError(
            f"{path.name} needs labels as whole numbers and targets as floating-point ones, one per input; got "
            f"{goals[0]} of {targets.dtype} and shape {tuple(targets.shape)}. Save labels.long() or targets.float()."
        )
    held = None
    if goals[0] == "labels" and "test_inputs" in tensors and "test_labels" in tensors:
        held = (tensors["test_inputs"], tensors["test_labels"])
    return ToMemorize(path.name, tensors["inputs"], targets, held)


def _read_npz(path: Path) -> dict[str, Tensor]:
    """Every array of the file, without pickle: arrays of objects are refused."""
    try:
        with open(path, "rb") as handle, np.load(handle, allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("a single array")
            return {name: torch.from_numpy(file[name]) for name in file.files}
    except (OSError, ValueError, TypeError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise FormatError(
            f"{path.name} needs a whole .npz file of plain numbers; got {type(error).__name__}: {error}. Save it with "
            "numpy.savez and without objects."
        ) from error


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise FormatError(f"{path.name} needs a whole safetensors file; got {error}. Save or copy it again.") from error
