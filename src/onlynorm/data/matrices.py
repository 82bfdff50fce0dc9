"""Read a matrix from a .npy, .safetensors or .csv file, without executing code."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from onlynorm.data.tensor_files import read_npy, read_safetensors
from onlynorm.errors import FormatError, MissingDataError, OnlynormError, UnknownNameError
from onlynorm.storage import read_file

ENDINGS = (".npy", ".safetensors", ".csv")


def read_matrix(path: Path | str, *, name: str | None = None) -> Tensor:
    """The matrix in a file, in float64; `name` selects a tensor of a .safetensors file."""
    path = Path(path)
    ending = path.suffix.lower()
    if ending not in ENDINGS:
        raise UnknownNameError("ending of a matrix file", path.suffix or path.name, ENDINGS)
    if not path.is_file():
        raise MissingDataError(f"a matrix needs a file; got none at {path}. Check the path, or try --random 8.")
    if name is not None and ending != ".safetensors":
        raise FormatError(f"--name needs a .safetensors file; {path.name} holds one matrix. Leave --name out.")
    try:
        if ending == ".safetensors":
            found = _pick(read_safetensors(path), path, name)
        else:
            found = torch.from_numpy(_read_csv(path) if ending == ".csv" else _read_npy(path))
        if found.is_complex():
            raise ValueError(f"{found.dtype} instead of real values")
    except OnlynormError:
        raise
    except Exception as error:  # numpy.loadtxt raises several kinds
        first = (str(error).splitlines() or ["no more"])[0]
        raise FormatError(
            f"{path.name} needs to be a complete {ending} file of numeric values; got {type(error).__name__}: "
            f"{first}. Save it again, without objects, text and headers."
        ) from error
    if found.ndim != 2:
        raise FormatError(f"{path.name} needs a matrix (rows, columns); got shape {tuple(found.shape)}. Reshape it.")
    return found.to(torch.float64)


def _read_npy(path: Path) -> np.ndarray:
    array = read_npy(path)
    if array.dtype.kind not in "fiu":
        raise FormatError(f"{path.name} needs real values; got {array.dtype}. Save array.astype('float64').")
    return array.astype(np.float64)


def _read_csv(path: Path) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # an empty file is an empty matrix, which raises below
        text = read_file(path, what="a matrix").decode("utf-8-sig")
        array = np.loadtxt(io.StringIO(text, newline=None), delimiter=",", ndmin=2, dtype=np.float64)
    if not array.size:
        raise ValueError("no values")
    return array


def _pick(tensors: dict[str, Tensor], path: Path, name: str | None) -> Tensor:
    if name is not None:
        if name not in tensors:
            raise UnknownNameError(f"tensor of {path.name}", name, tensors)
        return tensors[name]
    if len(tensors) != 1:
        some = ", ".join(sorted(tensors)[:5]) or "none"
        raise FormatError(f"{path.name} needs one tensor, or --name; got {len(tensors)}: {some}. Pass the name of one.")
    return next(iter(tensors.values()))
