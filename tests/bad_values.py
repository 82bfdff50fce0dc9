"""Arguments that no caller should pass, and the same argument in other forms that must be accepted."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class UserError(Exception):
    """What the caller's own code raises; it may pass through."""


class Raises(nn.Module):
    """A module whose forward pass fails in the caller's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, *args: Any) -> Tensor:
        raise UserError("forward of the caller's own module")


class Unprintable:
    """A value whose repr is too long for a message."""

    def __repr__(self) -> str:
        return "x" * 5000


@functools.cache
def scripted() -> Any:
    """A module that torch compiled; calling or indexing it is not what it is in Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch advises against scripting
        return torch.jit.script(nn.Linear(3, 2))


def _inference_tensor() -> Tensor:
    with torch.inference_mode():
        return torch.ones(4, 3)


def does_nothing(*args: Any, **options: Any) -> None:
    """A function that takes anything and returns nothing."""


ALWAYS: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "'nope'": lambda: "nope",
    "''": lambda: "",
    "-1": lambda: -1,
    "0": lambda: 0,
    "1.5": lambda: 1.5,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "-inf": lambda: -math.inf,
    "True": lambda: True,
    "1e300": lambda: 1e300,
    "10**30": lambda: 10**30,
    "2**40": lambda: 2**40,
    "-(10**30)": lambda: -(10**30),
    "2**64 - 1": lambda: 2**64 - 1,
    "-(2**63)": lambda: -(2**63),
    "numpy bool": lambda: np.True_,
    "numpy uint64": lambda: np.uint64(2**64 - 1),
    "numpy float16": lambda: np.float16(0.5),
    "numpy nan": lambda: np.float32(math.nan),
    "1j": lambda: 1j,
    "b'x'": lambda: b"x",
    "[]": list,
    "{}": dict,
    "()": tuple,
    "['a', None]": lambda: ["a", None],
    "[[1.0], [2.0, 3.0]]": lambda: [[1.0], [2.0, 3.0]],
    "object": object,
    "unprintable": Unprintable,
    "function": lambda: does_nothing,
    "class": lambda: dict,
    "dtype": lambda: torch.float64,
    "device": lambda: torch.device("cpu"),
    "numpy array": lambda: np.zeros((2, 2)),
    "numpy strings": lambda: np.array(["a", "b"]),
    "numpy objects": lambda: np.array([None, "b"], dtype=object),
    "numpy object numbers": lambda: np.array([[1, 2.0], [None, 4]], dtype=object),
    "numpy dates": lambda: np.array(["2020-01-01"], dtype="datetime64[D]"),
    "numpy complex": lambda: np.ones((2, 2), dtype=np.complex64),
    "numpy nan inside": lambda: np.array([[1.0, math.nan], [math.inf, 1.0]]),
    "0-d numpy array": lambda: np.array(3),
    "numpy array without entries": lambda: np.zeros((0, 3)),
    "masked numpy array": lambda: np.ma.masked_array([1.0, 2.0], mask=[True, False]),
    "empty tensor": lambda: torch.empty(0),
    "empty integer tensor": lambda: torch.empty(0, dtype=torch.int64),
    "0-d tensor": lambda: torch.tensor(1.0),
    "0-d integer tensor": lambda: torch.tensor(3),
    "0-d boolean tensor": lambda: torch.tensor(True),
    "0-d uint64 tensor": lambda: torch.tensor(2**63 + 5, dtype=torch.uint64),
    "uint64 tensor": lambda: torch.full((4, 3), 2**63 + 5, dtype=torch.uint64),
    "uint16 tensor": lambda: torch.ones(4, 3, dtype=torch.uint16),
    "complex tensor": lambda: torch.ones(4, 3, dtype=torch.complex64),
    "half tensor": lambda: torch.ones(4, 3, dtype=torch.float16),
    "conjugate view": lambda: torch.ones(4, 3, dtype=torch.complex64).conj(),
    "inference tensor": lambda: _inference_tensor(),
    "nan tensor": lambda: torch.full((4, 3), math.nan),
    "7-d tensor": lambda: torch.zeros((1,) * 7),
    "sparse tensor": lambda: torch.eye(3, dtype=torch.float64).to_sparse(),
    "compressed sparse tensor": lambda: torch.eye(3, dtype=torch.float64).to_sparse_csr(),
    "nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantized tensor": lambda: torch.quantize_per_tensor(torch.ones(8, 3), 0.1, 0, torch.quint8),
    "float8 tensor": lambda: torch.ones(8, 3).to(torch.float8_e4m3fn),
    "tensor expanded to 4 TB": lambda: torch.ones(1).expand(2**20, 2**20),
    "tensor without columns": lambda: torch.empty(3, 0, dtype=torch.float64),
    "structured numpy array": lambda: np.zeros(2, dtype=[("a", "f8")]),
    "10**400": lambda: 10**400,
    "smallest float": lambda: 5e-324,
    "fraction": lambda: Fraction(1, 3),
    "iterator without end": lambda: iter(int, 1),
    "path that is too long": lambda: "x" * 5000,
    "path with a null byte": lambda: "a\0b",
    "scripted module": lambda: scripted(),
    "compiled module": lambda: torch.compile(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))),
    "compiled function": lambda: torch.compile(does_nothing),
    "parallel module": lambda: nn.DataParallel(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))),
    "parallel scripted module": lambda: nn.DataParallel(scripted()),
    "module with complex weights": lambda: nn.Linear(3, 2, dtype=torch.complex64),
    "meta tensor": lambda: torch.zeros(3, 3, device="meta"),
    "module without parameters": nn.Identity,
    "lazy module": lambda: nn.Sequential(nn.LazyLinear(2)),
    "meta module": lambda: nn.Sequential(nn.Linear(3, 2, device="meta"), nn.BatchNorm1d(2, device="meta")),
    "module that raises": Raises,
    "missing path": lambda: Path("no-such-folder") / "no-such-file",
    "directory": lambda: Path("."),
}
"""Tried in the place of every argument."""
CALLABLE = (
    "class", "scripted module", "module without parameters", "lazy module", "meta module", "compiled module",
    "compiled function", "parallel module", "parallel scripted module", "module with complex weights",
)  # fmt: skip
"""Values that can be called, but only with arguments of their own."""


def variants(valid: Any) -> Iterator[tuple[str, Any, bool]]:
    """(label, value, whether it must be accepted) derived from the valid value of an argument."""
    if isinstance(valid, bool):
        return
    if isinstance(valid, int):
        yield "numpy int64", np.int64(valid), True
        yield "numpy int32", np.int32(valid) if abs(valid) < 2**31 else np.int64(valid), True
        yield "minus", -valid, False
    if isinstance(valid, float):
        yield "numpy float64", np.float64(valid), True
        yield "numpy float32", np.float32(valid), True
        yield "minus", -valid, False
    if isinstance(valid, str):
        yield "with a space", valid + " ", False
        yield "surrogate", "\udc80", False
        yield "null byte", "a\0b", False
    if isinstance(valid, Path):
        yield from _path_variants(valid)
    if isinstance(valid, nn.Module):
        yield "half precision", copy.deepcopy(valid).half(), False
        yield "bfloat16", copy.deepcopy(valid).bfloat16(), False
        yield "other precision", copy.deepcopy(valid).to(_other_precision(valid)), False
        yield "compiled", torch.compile(copy.deepcopy(valid)), False
        yield "parallel", nn.DataParallel(copy.deepcopy(valid)), False
        yield "does not train", copy.deepcopy(valid).requires_grad_(False), False
        yield "on meta", copy.deepcopy(valid).to("meta"), False
        yield "no parameters left", nn.Sequential(nn.ReLU()), False
        yield "other sizes", nn.Sequential(nn.Linear(7, 5)), False
    if isinstance(valid, (list, tuple)) and valid:
        yield "first element None", type(valid)([None, *valid[1:]]), False
        yield "last element 'a'", type(valid)([*valid[:-1], "a"]), False
        yield "one element less", type(valid)(valid[:-1]), False
        if isinstance(valid[0], int):
            yield "first element 2**40", type(valid)([2**40, *valid[1:]]), False
            yield "first element 10**30", type(valid)([10**30, *valid[1:]]), False
            yield "first element 0", type(valid)([0, *valid[1:]]), False
            yield "all numpy", type(valid)([np.int64(v) for v in valid]), True
            yield "numpy array of them", np.array(valid), False
        if all(isinstance(element, Tensor) for element in valid):
            yield "all as numpy", type(valid)([element.numpy() for element in valid]), True
            for place in {0, len(valid) - 1}:
                for label, bad, _ in _tensor_variants(valid[place]):
                    yield f"element {place} {label}", type(valid)([*valid[:place], bad, *valid[place + 1 :]]), False
        yield "twice as many", type(valid)([*valid, *valid]), False
    if isinstance(valid, Tensor):
        yield from _tensor_variants(valid)


def _other_precision(model: nn.Module) -> torch.dtype:
    first = next((p.dtype for p in model.parameters()), torch.float32)
    return torch.float64 if first == torch.float32 else torch.float32


def _path_variants(valid: Path) -> Iterator[tuple[str, Any, bool]]:
    yield "path as text", str(valid), True
    other = Path("not-ours.txt")  # in the folder of the test, since a function that writes may overwrite it
    for label, path in (("not ours", other), ("below a file", other / "x"), ("null byte", Path("a\0b"))):
        if not other.exists():
            other.write_text("a text that onlynorm did not write")
        yield label, path, False


def _tensor_variants(valid: Tensor) -> Iterator[tuple[str, Any, bool]]:
    yield "same as numpy", valid.detach().numpy().copy(), True
    yield "same as list", valid.tolist(), False
    yield "trains", valid.clone().requires_grad_() if valid.is_floating_point() else valid, False
    yield "one axis more", valid[None], False
    yield "first slice", valid[0], False
    yield "flat", valid.flatten(), False
    yield "one sample less", valid[:-1], False
    yield "one column more", torch.cat([valid, valid[..., :1]], -1), False
    yield "no samples", valid[:0], False
    yield "no columns", valid[..., :0], False
    yield "sparse", valid.to_sparse(), False
    yield "meta", valid.to("meta"), False
    for dtype in (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.int64,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.uint64,
        torch.bool,
    ):
        if dtype != valid.dtype:
            yield str(dtype).removeprefix("torch."), valid.to(dtype), False
    yield "complex", valid.to(torch.complex128), False
    if valid.is_floating_point():
        limits = torch.finfo(valid.dtype)
        for name, number in (("nan", math.nan), ("inf", math.inf), ("largest", limits.max), ("tiny", limits.tiny)):
            bad = valid.clone()
            bad.view(-1)[-1] = number
            yield f"{name} inside", bad, False
        yield "all zero", torch.zeros_like(valid), False
        yield "all equal", torch.ones_like(valid), False
    elif valid.dtype != torch.bool:
        yield "label beyond", torch.where(valid == valid.max(), 10**6, valid), False
        yield "negative label", torch.where(valid == valid.max(), -7, valid), False
