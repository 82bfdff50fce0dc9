"""Factors in a file: one sealed safetensors file with the cores and rotations, far smaller than all layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onlynorm.errors import FormatError, StorageError
from onlynorm.identity.factors import Factorization, Option, Run
from onlynorm.identity.rotations import Rotation
from onlynorm.modules.validate import need_instance, need_path
from onlynorm.storage import canonical, make_checked, read_tensors, write_tensors

KIND = "factorization"
FORMAT = 1
_CURE = "Make it again with onlynorm factorize, or copy it again."
_NUMBERS = ("max_norm", "bound", "least_norm", "product_error", "stretch", "seconds")


def save_factors(factors: Factorization, path: Path | str) -> None:
    """Write the factorization to `path`, whole or not at all; equal factorizations give equal bytes."""
    path = need_path("save_factors", path)
    need_instance("save_factors", factors, Factorization, cure="Pass what factorize returned.")
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
    path = need_path("load_factors", path)
    document, tensors = read_tensors(path, kind=KIND, format=FORMAT, cure=_CURE)
    try:
        facts = document["factorization"]
        runs = tuple(_run(tensors, place, count) for place, count in enumerate(facts["runs"]))
        if len(tensors) != sum(1 if run.rotation is None else 3 for run in runs):
            raise ValueError("tensors of no run")
        made = Factorization(
            runs=runs,
            method=facts["method"],
            reason=facts["reason"],
            n_extra=facts["n_extra"],
            options=tuple(make_checked(Option, option) for option in facts["options"]),
            **{name: float(facts[name]) for name in _NUMBERS},
        )
        _need_facts(made, facts)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise FormatError(
            f"factors need the tensors and facts of their runs; {path.name} has others ({error!s:.200}). {_CURE}"
        ) from error
    return made


def _need_facts(made: Factorization, facts: dict[str, Any]) -> None:
    """ValueError unless the facts in the file are those of the factors, as far as the factors tell."""
    if type(made.n_extra) is not int or made.n_extra not in (0, 1) or made.dim < 1:
        raise ValueError(f"{made.n_extra!r:.40} extra dimensions")
    if len({run.core.shape for run in made.runs}) != 1 or not isinstance(made.method + made.reason, str):
        raise ValueError("cores of several sizes")
    known = made.as_dict()
    for name, value in facts.items():
        if canonical(value) != canonical(known.get(name)):
            raise ValueError(f"{name} {value!r:.60} instead of {known.get(name)!r:.60}")
    largest = max(float(torch.linalg.matrix_norm(run.core, 2)) for run in made.runs)
    if not abs(largest - made.max_norm) <= torch.finfo(torch.float64).eps ** 0.5 * (largest + made.max_norm):
        raise ValueError(f"a largest norm of {made.max_norm} for factors of {largest}")


def _run(tensors: dict[str, Tensor], place: int, count: Any) -> Run:
    core = tensors[f"core.{place}"]
    if type(count) is not int or not 1 <= count < 2**53 or core.ndim != 2 or core.shape[0] != core.shape[1]:
        raise ValueError(f"a run of {count!r:.40} layers of shape {tuple(core.shape)}")
    if core.dtype != torch.float64 or not bool(core.isfinite().all()):
        raise ValueError("a run of layers of finite numbers in float64")
    if f"basis.{place}" not in tensors:
        return Run(core, count)
    basis, angles = tensors[f"basis.{place}"], tensors[f"angles.{place}"]
    is_finite = bool(basis.isfinite().all() and angles.isfinite().all())
    if basis.shape != core.shape or angles.ndim != 1 or 2 * len(angles) > len(core) or not is_finite:
        raise ValueError("a basis of planes")
    if {basis.dtype, angles.dtype} != {torch.float64} or not _is_orthogonal(basis):
        raise ValueError("an orthogonal basis in float64")
    return Run(core, count, Rotation(basis, angles))


def _is_orthogonal(basis: Tensor) -> bool:
    """Whether the columns are orthonormal up to rounding."""
    lacks = basis.mT @ basis - torch.eye(len(basis), dtype=basis.dtype)
    return float(lacks.abs().max()) <= 64 * len(basis) * torch.finfo(basis.dtype).eps
