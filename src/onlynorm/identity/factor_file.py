"""Factors in a file: one sealed safetensors file with the cores and rotations, far smaller than all layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onlynorm.errors import FormatError, StorageError
from onlynorm.identity.factors import Factorization, Option, Run
from onlynorm.identity.rotations import Rotation
from onlynorm.storage import read_tensors, write_tensors

KIND = "factorization"
FORMAT = 1
_CURE = "Make it again with onlynorm factorize, or copy it again."
_NUMBERS = ("max_norm", "bound", "least_norm", "product_error", "stretch", "seconds")


def save_factors(factors: Factorization, path: Path | str) -> None:
    """Write the factorization to `path`, whole or not at all; equal factorizations give equal bytes."""
    path = Path(path)
    if path.is_dir():
        raise StorageError(f"factors need the name of a file; {path} is a folder. Try {path / 'factors.safetensors'}.")
    tensors: dict[str, Tensor] = {}
    for place, run in enumerate(factors.runs):
        tensors[f"core.{place}"] = run.core.cpu().contiguous()
        if run.rotation is not None:
            tensors[f"basis.{place}"] = run.rotation.basis.cpu().contiguous()
            tensors[f"angles.{place}"] = run.rotation.angles.cpu().contiguous()
    write_tensors(path, tensors, kind=KIND, format=FORMAT, document={"factorization": factors.as_dict()})


def load_factors(path: Path | str) -> Factorization:
    """The factorization in a file that `save_factors` wrote; `FormatError` where it is damaged or something else."""
    path = Path(path)
    document, tensors = read_tensors(path, kind=KIND, format=FORMAT, cure=_CURE)
    try:
        facts: dict[str, Any] = document["factorization"]
        runs = tuple(_run(tensors, place, int(count)) for place, count in enumerate(facts["runs"]))
        dims = {tuple(run.core.shape) for run in runs}
        if len(dims) != 1 or dims != {(facts["dim"] + facts["n_extra"],) * 2}:
            raise ValueError("cores of one size")
        return Factorization(
            runs=runs,
            method=str(facts["method"]),
            reason=str(facts["reason"]),
            n_extra=int(facts["n_extra"]),
            options=tuple(Option(**option) for option in facts["options"]),
            **{name: float(facts[name]) for name in _NUMBERS},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(
            f"factors need the tensors and facts of their runs; {path.name} lacks some. {_CURE}"
        ) from error


def _run(tensors: dict[str, Tensor], place: int, count: int) -> Run:
    core = tensors[f"core.{place}"]
    if count < 1 or core.dtype != torch.float64:
        raise ValueError("a run of layers in float64")
    if f"basis.{place}" not in tensors:
        return Run(core, count)
    basis, angles = tensors[f"basis.{place}"], tensors[f"angles.{place}"]
    if basis.shape != core.shape or angles.ndim != 1 or 2 * len(angles) > len(core):
        raise ValueError("a basis of planes")
    return Run(core, count, Rotation(basis, angles))
