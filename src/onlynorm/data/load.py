"""Data sets by name or from a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from onlynorm.data.cifar import cifar10, cifar100
from onlynorm.data.digits import digits
from onlynorm.data.fashion import fashion_mnist
from onlynorm.data.split import Split
from onlynorm.data.teacher import teacher
from onlynorm.data.tensor_files import read_npy, read_safetensors
from onlynorm.errors import FormatError, MissingDataError, ShapeError, UnknownNameError
from onlynorm.validate import need_text

DATA_SETS: dict[str, Callable[[], Split]] = {
    "digits": digits,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "fashion_mnist": fashion_mnist,
    "teacher": teacher,
}
"""Data sets by name."""


def load_data(spec: str) -> Split:
    """The data set of this name, or the samples in a .safetensors or .npy file.

    A .safetensors file has `inputs` and optionally `labels`, `test_inputs` and `test_labels`; without a test set, the
    training set is used. A .npy file has the inputs.

    Examples:
        >>> import numpy as np
        >>> from onlynorm.data import load_data
        >>> np.save("inputs.npy", np.zeros((5, 8), dtype=np.float32))
        >>> load_data("inputs.npy").train_inputs.shape
        torch.Size([5, 8])
        >>> load_data("digits").train_inputs.shape
        torch.Size([1438, 64])
    """
    need_text("load_data", spec, cure=f"Pass one of {', '.join(DATA_SETS)}, or the path of a file.")
    if spec in DATA_SETS:
        return DATA_SETS[spec]()
    path = Path(spec)
    if path.suffix not in (".safetensors", ".npy"):
        raise UnknownNameError("data", spec, (*DATA_SETS, "FILE.safetensors", "FILE.npy"))
    if not path.is_file():
        raise MissingDataError(f"data needs a file; got none at {path}. Check the path, or use digits.")
    tensors = _read_npy(path) if path.suffix == ".npy" else read_safetensors(path)
    if "inputs" not in tensors:
        got = ", ".join(sorted(tensors)[:5]) or "nothing"
        raise FormatError(f"{path.name} needs a tensor named inputs; got {got}. Save it under that name.")
    inputs, labels = tensors["inputs"], tensors.get("labels")
    test_inputs, test_labels = tensors.get("test_inputs", inputs), tensors.get("test_labels")
    if "test_inputs" not in tensors and test_labels is None:
        test_labels = labels
    parts = (inputs, _labels_for(inputs, labels, path), test_inputs, _labels_for(test_inputs, test_labels, path))
    return Split(path.name, *parts)


def _read_npy(path: Path) -> dict[str, Tensor]:
    array = read_npy(path)
    if array.dtype.kind != "f":
        raise FormatError(f"{path.name} needs floating-point values; got {array.dtype}. Save array.astype('float32').")
    return {"inputs": torch.from_numpy(array)}


def _labels_for(inputs: Tensor, labels: Tensor | None, path: Path) -> Tensor:
    """The labels as int64, one per sample, or an empty tensor."""
    if not inputs.ndim or not len(inputs) or not inputs.dtype.is_floating_point:
        raise ShapeError(
            f"{path.name} needs floating-point inputs (samples, ...), at least one; got {inputs.dtype} of shape "
            f"{tuple(inputs.shape)}. Save inputs.float(), samples first."
        )
    if labels is None:
        return torch.empty(0, dtype=torch.long)
    if labels.shape != inputs.shape[:1] or labels.dtype.is_floating_point:
        raise ShapeError(
            f"{path.name} needs one integer label per sample, {len(inputs)}; got {labels.dtype} of shape "
            f"{tuple(labels.shape)}. Save labels.long(), or leave them out."
        )
    return labels.long()
