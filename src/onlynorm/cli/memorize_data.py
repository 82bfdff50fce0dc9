"""The data of `onlynorm memorize`: a data set by name, or a file of inputs with labels or real targets.

A .npz or .safetensors file has arrays `inputs` and `labels` or `targets`. A .npy file has the inputs, and another one
the labels. A .csv file has a row per point and its label in one column: text and integers are classes, other numbers
are real targets.
"""

from __future__ import annotations

import csv
import io
import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from onlynorm.cli.datasets import need_source
from onlynorm.data import DATA_SETS, load_data, tensor_files
from onlynorm.errors import FormatError, MissingDataError, ShapeError, UnknownNameError, ValueRangeError
from onlynorm.modules import is_class_labels
from onlynorm.storage import read_file

FILES = (".csv", ".npy", ".npz", ".safetensors")
_INTEGER = re.compile(r"[-+]?\d{1,18}")


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


def find_sample(data: str, n_points: int | None, labels: str | None = None) -> ToMemorize:
    """The first `n_points` training points of a data set or file, or all.

    `labels` is the name of the label column of a .csv file, by default the last one, or the .npy file with the labels
    of a .npy file.
    """
    if data in DATA_SETS:
        _need_no_labels(labels, data)
        split = load_data(data)
        held = (split.test_inputs, split.test_labels) if split.has_labels else None
        found = ToMemorize(data, split.train_inputs, split.train_labels, held)
    else:
        found = _read(data, labels)
    if n_points is not None and n_points > len(found.inputs):
        raise ValueRangeError(
            f"--points {n_points} needs as many in the data; got {len(found.inputs)}. Pass fewer, or omit it."
        )
    return ToMemorize(found.name, found.inputs[:n_points], found.targets[:n_points], found.held_out)


def _need_no_labels(labels: str | None, data: str) -> None:
    if labels is not None:
        raise ValueRangeError(f"--labels needs a .csv or .npy file; got {data}, which has its own labels. Omit it.")


def _read(data: str, labels: str | None) -> ToMemorize:
    path = Path(data)
    ending = path.suffix.lower()
    need_source(data, endings=FILES)
    if ending not in FILES:
        raise UnknownNameError("data", data, (*DATA_SETS, *(f"FILE{ending}" for ending in FILES)))
    if not path.is_file():
        raise MissingDataError(f"data needs a file; there is none at {path}. Check the path, or use digits.")
    if ending == ".csv":
        return ToMemorize(path.name, *_read_csv(path, labels), None)
    if ending == ".npy":
        return ToMemorize(path.name, *_read_npy(path, labels), None)
    _need_no_labels(labels, data)
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
    """All arrays of the file."""
    return {name: _tensor(array, f"{path.name}: {name!r}") for name, array in tensor_files.read_npz(path).items()}


def _tensor(array: np.ndarray, what: str) -> Tensor:
    """The array as a tensor; unsigned dtypes that torch hardly supports are converted to int64."""
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        if array.dtype.itemsize == 8 and array.size and int(array.max()) >= 2**63:
            raise FormatError(f"{what} needs integers below 2^63; got {int(array.max())}. Save int64.")
        array = array.astype(np.int64)
    return torch.from_numpy(array)


def _read_npy(path: Path, labels: str | None) -> tuple[Tensor, Tensor]:
    """The inputs in a .npy file and the labels or real targets in another one."""
    if labels is None:
        raise FormatError(
            f"{path.name} needs labels in a second file; got none. Pass --labels labels.npy, with integers for "
            "classes or floating-point numbers for real targets."
        )
    other = Path(labels)
    if other.suffix.lower() != ".npy":
        raise FormatError(f"--labels of a .npy file needs a .npy file; got {labels}. Save them with numpy.save.")
    inputs, targets = (_tensor(tensor_files.read_npy(one), one.name) for one in (path, other))
    if not inputs.ndim or not targets.ndim:
        scalar = path if not inputs.ndim else other
        raise ShapeError(f"{scalar.name} needs one row per point; got a single number. Save an array.")
    return inputs, targets.long() if is_class_labels(targets) else targets


def _read_csv(path: Path, labels: str | None) -> tuple[Tensor, Tensor]:
    """The inputs and the labels or real targets in a .csv file with or without a header."""
    try:
        text = read_file(path, what="data").decode("utf-8-sig")
        rows = [row for row in csv.reader(io.StringIO(text, newline="")) if any(map(str.strip, row))]
    except (UnicodeDecodeError, csv.Error) as error:
        raise FormatError(
            f"{path.name} needs comma-separated text in UTF-8; got {error!s:.200}. Save it again as CSV."
        ) from error
    rows = [[cell.strip() for cell in row] for row in rows]
    n_columns = len(rows[0]) if rows else 0
    # Without a header, the last cell of the first row may be a class name.
    has_header = n_columns > 0 and (labels is not None or any(_number(cell) is None for cell in rows[0][:-1]))
    header, rows = (rows[0], rows[1:]) if has_header else ([], rows)
    if not rows or n_columns < 2:
        raise FormatError(
            f"{path.name} needs rows with one number at least and a label; got {len(rows)} rows with {n_columns} "
            "columns after the header. Separate the columns by commas."
        )
    place = n_columns - 1
    if labels is not None:
        if header.count(labels) != 1:
            raise UnknownNameError(f"label column of {path.name}", labels, header)
        place = header.index(labels)
    goals: list[str] = []
    inputs = np.empty((len(rows), n_columns - 1))
    for number, row in enumerate(rows):
        values = [_number(cell) for cell in (*row[:place], *row[place + 1 :])]
        if len(row) != n_columns or not row[place] or None in values:
            got = f"{len(row)} cells, not {n_columns}," if len(row) != n_columns else _first_bad(row, place)
            raise FormatError(
                f"{path.name} needs {n_columns - 1} numbers and a label in every row; got {got} in row "
                f"{number + 1 + has_header}. Fill or remove that row, or name the label column with --labels."
            )
        goals.append(row[place])
        inputs[number] = values
    return torch.from_numpy(inputs), _goals(goals, path)


def _first_bad(row: list[str], place: int) -> str:
    """The first cell of the row that is empty, or is not a number and not the label."""
    bad = next(cell for at, cell in enumerate(row) if not cell or (at != place and _number(cell) is None))
    return f"{bad!r:.40}" if bad else "an empty cell"


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _goals(cells: list[str], path: Path) -> Tensor:
    """Integers and names as classes, names numbered in sorted order; other numbers as real targets."""
    if all(map(_INTEGER.fullmatch, cells)):
        return torch.tensor([int(cell) for cell in cells])
    values = [_number(cell) for cell in cells]
    n_names = values.count(None)
    if n_names == len(cells):
        numbers = {name: number for number, name in enumerate(sorted(set(cells)))}
        return torch.tensor([numbers[cell] for cell in cells])
    if n_names:
        bad = next(cell for cell, value in zip(cells, values, strict=True) if value is None)
        raise FormatError(
            f"{path.name} needs labels that are all numbers or all names; got {bad!r:.40} among {len(cells) - n_names} "
            "numbers. Fill or remove those rows."
        )
    return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)
