"""The data of `onlynorm memorize`: a data set by name, or a file of inputs with labels or real targets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from onlynorm.cli.datasets import need_source
from onlynorm.data import DATA_SETS, load_data, tensor_files
from onlynorm.errors import FormatError, MissingDataError, ShapeError, UnknownNameError, ValueRangeError
from onlynorm.modules import is_class_labels

FILES = (".npz", ".safetensors")


@dataclass(frozen=True)
class ToMemorize:
    """Training inputs with class labels or real targets, and an optional labeled test set."""

    name: str
    inputs: Tensor
    targets: Tensor
    held_out: tuple[Tensor, Tensor] | None

    @property
    def is_real(self) -> bool:
        """Whether the targets are real numbers instead of class labels."""
        return not is_class_labels(self.targets)

    @property
    def n_classes(self) -> int | None:
        """Number of classes, including those of held-out samples; None for real targets or no points."""
        if self.is_real or not self.targets.numel():
            return None
        held = -1 if self.held_out is None else int(self.held_out[1].max())
        return max(int(self.targets.max()), held) + 1


def find_sample(data: str, n_points: int | None) -> ToMemorize:
    """The first `n_points` training points of a data set or file, or all."""
    if data in DATA_SETS:
        split = load_data(data)
        held = (split.test_inputs, split.test_labels) if split.has_labels else None
        found = ToMemorize(data, split.train_inputs, split.train_labels, held)
    else:
        found = _read(data)
    if n_points is not None and n_points > len(found.inputs):
        raise ValueRangeError(
            f"--points {n_points} needs as many in the data; got {len(found.inputs)}. Pass fewer, or omit it."
        )
    return ToMemorize(found.name, found.inputs[:n_points], found.targets[:n_points], found.held_out)


def _read(data: str) -> ToMemorize:
    path = Path(data)
    ending = path.suffix.lower()
    need_source(data, endings=FILES)
    if ending not in FILES:
        raise UnknownNameError("data", data, (*DATA_SETS, *(f"FILE{ending}" for ending in FILES)))
    if not path.is_file():
        raise MissingDataError(f"data needs a file; there is none at {path}. Check the path, or use digits.")
    tensors = _read_npz(path) if ending == ".npz" else tensor_files.read_safetensors(path)
    goals = [name for name in ("labels", "targets") if name in tensors]
    if "inputs" not in tensors or not tensors["inputs"].ndim or len(goals) != 1:
        got = ", ".join(sorted(tensors)[:5]) or "nothing"
        raise FormatError(
            f"{path.name} needs inputs and either labels (integers) or targets (real numbers), one row per point; "
            f"got {got}. Save them under those names."
        )
    targets = tensors[goals[0]]
    if targets.is_complex() or is_class_labels(targets) != (goals[0] == "labels") or not targets.ndim:
        raise ShapeError(
            f"{path.name} needs integer labels or floating-point targets, one per input; got "
            f"{goals[0]} of {targets.dtype} and shape {tuple(targets.shape)}. Save labels.long() or targets.float()."
        )
    held = None
    if goals[0] == "labels":
        targets = targets.long()
        held = _held_out(tensors, path)
    return ToMemorize(path.name, tensors["inputs"], targets, held)


def _held_out(tensors: dict[str, Tensor], path: Path) -> tuple[Tensor, Tensor] | None:
    """The test set of a file, None if it has none or an empty one."""
    if "test_inputs" not in tensors or "test_labels" not in tensors:
        return None
    inputs, labels = tensors["test_inputs"], tensors["test_labels"]
    if inputs.ndim and labels.ndim and not len(inputs) and not len(labels):
        return None
    is_like = inputs.ndim > 0 and inputs.shape[1:] == tensors["inputs"].shape[1:]
    if not is_like or not is_class_labels(labels) or labels.shape != inputs.shape[:1] or int(labels.long().min()) < 0:
        raise ShapeError(
            f"{path.name} needs test_inputs like its inputs, (n, {', '.join(map(str, tensors['inputs'].shape[1:]))}), "
            f"and as many test_labels, integers from 0; got {tuple(inputs.shape)}, and {labels.dtype} of shape "
            f"{tuple(labels.shape)}. Omit both if there is no test set."
        )
    return inputs, labels.long()


def _read_npz(path: Path) -> dict[str, Tensor]:
    """All arrays of the file; unsigned dtypes that torch hardly supports are converted to int64."""
    found = {}
    for name, array in tensor_files.read_npz(path).items():
        if array.dtype.kind == "u" and array.dtype.itemsize > 1:
            if array.dtype.itemsize == 8 and array.size and int(array.max()) >= 2**63:
                raise FormatError(
                    f"{path.name} needs integers below 2^63; {name!r} has {int(array.max())}. Save int64."
                )
            array = array.astype(np.int64)
        found[name] = torch.from_numpy(array)
    return found
