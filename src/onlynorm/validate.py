"""Checks of arguments that public functions share. Every error says what was needed, what came, and the cure.

`as_...` converts what can be converted, `need_...` returns the value in its plain type; both raise otherwise.
"""

from __future__ import annotations

import errno
import itertools
import math
import numbers
import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from onlynorm.errors import ConversionError, MemoryLimitError, ShapeError, UnknownNameError, ValueRangeError, shown

_T = TypeVar("_T")
_SEEDS = 2**64
_WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
_MOST_ITEMS = 2**22
_MOST_COUNT = 2**63
_SMALL = 2**28  # bytes for which the free memory is not looked up, which takes 20 microseconds


# ------------------------------------------------------------------------------- tensors


def as_tensor(name: str, value: Any, *, cure: str = "Pass a tensor or a NumPy array.") -> Tensor:
    """`value` as a dense tensor: tensors as they are, NumPy arrays, and lists or scalars of numbers converted.

    Unsigned integers of more than one byte become int64: torch hardly computes with them. Sparse, quantized and nested
    tensors and those on the meta device are refused.
    """
    if isinstance(value, Tensor):
        dense = _need_dense(name, value)
        return dense.long() if dense.dtype in _WIDE_UNSIGNED else dense
    if isinstance(value, np.ndarray | np.generic | list | tuple | range | int | float) and not isinstance(value, bool):
        try:
            if isinstance(value, list | tuple) and value and all(isinstance(item, Tensor) for item in value):
                return as_tensor(name, torch.stack(value), cure=cure)  # NumPy has no bfloat16, and no gradients
            array = np.asarray(value)
            if array.dtype.kind == "u" and array.dtype.itemsize > 1:
                array = array.astype(np.int64)
            is_plain = array.flags.writeable and array.dtype.isnative and min((0, *array.strides)) >= 0
            return torch.as_tensor(array if is_plain else array.astype(array.dtype.newbyteorder("="), order="C"))
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            first = str(error).partition("\n")[0]
            raise ConversionError(f"{name} needs numbers; got {shown(value)} ({first:.80}). {cure}") from error
    raise ConversionError(f"{name} needs a tensor; got {shown(value)}. {cure}")


def as_real(
    name: str, value: Any, *, ndim: int | None = None, is_finite: bool = False, cure: str = "Pass a real tensor."
) -> Tensor:
    """`value` as a dense tensor of real numbers with `ndim` axes; integers and booleans become float64."""
    given = as_tensor(name, value, cure=cure)
    if given.is_complex():
        raise ValueRangeError(f"{name} needs real numbers; got {given.dtype}. {cure}")
    if ndim is not None and given.ndim != ndim:
        raise ShapeError(f"{name} needs {ndim} axes; got {given.ndim} in the shape {tuple(given.shape)}. {cure}")
    if not given.is_floating_point():
        return given.double()
    if is_finite and not bool(torch.isfinite(given).all()):
        bad = ~torch.isfinite(given)
        where = tuple(bad.nonzero()[0].tolist())
        raise ValueRangeError(
            f"{name} needs finite numbers; got {int(bad.sum())} NaN or infinite, the first at {where}. {cure}"
        )
    return given


def _need_dense(name: str, value: Tensor) -> Tensor:
    if value.is_nested or value.layout != torch.strided or value.is_quantized:
        kind = "nested" if value.is_nested else "quantized" if value.is_quantized else str(value.layout)
        made_by = "dequantize" if value.is_quantized else "to_dense"
        cure = "torch.nested.to_padded_tensor" if value.is_nested else made_by
        raise ConversionError(
            f"{name} needs a dense tensor; got a {kind.removeprefix('torch.')} one. Pass a dense copy, made by {cure}."
        )
    if value.is_floating_point() and value.itemsize < 2:
        raise ConversionError(
            f"{name} needs a type that torch computes with; got {str(value.dtype).removeprefix('torch.')}. Pass "
            "value.float()."
        )
    if value.is_meta:
        raise ConversionError(
            f"{name} needs a tensor with values; got one of shape {tuple(value.shape)} on the meta device. Make it on "
            "a real device."
        )
    n_bytes = value.numel() * value.itemsize
    if n_bytes > _SMALL and n_bytes > value.untyped_storage().nbytes():  # one that `expand` made larger than its memory
        need_free_memory(f"{name}, expanded to {shown(value)},", n_bytes, cure="Pass fewer samples, or a smaller one.")
    return value


# ------------------------------------------------------------------------------- numbers, names, flags


def need_number(
    name: str,
    value: Any,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    open_low: bool = False,
    open_high: bool = False,
    cure: str,
) -> float:
    """`value` as a finite float between `low` and `high`; NumPy scalars are accepted, booleans and strings are not.

    A NumPy float of fewer digits counts as the decimal that it prints: np.float32(1.1) is 1.1.
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    is_narrow = isinstance(value, np.floating) and value.itemsize < 8
    try:
        number = float(str(value) if is_narrow else value) if is_number else math.nan
    except OverflowError:
        number = math.nan
    is_above = low < number if open_low else low <= number
    is_below = number < high if open_high else number <= high
    if math.isfinite(number) and is_above and is_below:
        return number
    left, right = "(" if open_low or low == -math.inf else "[", ")" if open_high or high == math.inf else "]"
    raise ValueRangeError(f"{name} needs to be a number in {left}{low:g}, {high:g}{right}; got {shown(value)}. {cure}")


def need_integer(name: str, value: Any, *, low: int | None = None, high: int | None = None, cure: str) -> int:
    """`value` as an int between `low` and `high`; whole floats and NumPy integers are accepted, booleans are not.

    Without `high`, it has to be below 2^63, as torch's own sizes.
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    is_whole = is_number and (isinstance(value, numbers.Integral) or (math.isfinite(value) and value == int(value)))
    if is_whole and high is None and abs(int(value)) >= _MOST_COUNT:
        high = _MOST_COUNT - 1
    if is_whole and (low is None or value >= low) and (high is None or value <= high):
        return int(value)
    bounds = [f"from {low}" if low is not None else "", f"to {high}" if high is not None else ""]
    limits = " ".join(["", *filter(None, bounds)])
    raise ValueRangeError(f"{name} needs to be a whole number{limits}; got {shown(value)}. {cure}")


def need_sizes(name: str, values: Any, *, low: int = 1, n_least: int = 0, cure: str) -> tuple[int, ...]:
    """`values` as a tuple of at least `n_least` whole numbers from `low` on."""
    given = need_items(name, values, cure=cure)
    if len(given) < n_least:
        raise ShapeError(f"{name} needs {n_least} numbers or more; got {shown(values)}. {cure}")
    return tuple(need_integer(name, value, low=low, high=2**31 - 1, cure=cure) for value in given)


def is_real_number(value: Any) -> bool:
    """Whether `value` is a real number that a float can hold, NumPy's included; booleans are not."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def is_whole_number(value: Any) -> bool:
    """Whether `value` is an integer, NumPy's included; booleans and floats are not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def need_seed(value: Any, *, name: str = "seed") -> int:
    """A seed as an int in [0, 2^64); NumPy integers are accepted, floats are not."""
    if is_whole_number(value) and 0 <= int(value) < _SEEDS:
        return int(value)
    raise ValueRangeError(
        f"{name} needs a whole number in [0, 2^64); got {shown(value)}. Reduce it: seed=hash_value % 2**64."
    )


def need_flag(name: str, value: Any, *, cure: str | None = None) -> bool:
    """`value` as a bool; NumPy booleans are accepted, numbers and strings are not."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise ValueRangeError(f"{name} needs True or False; got {shown(value)}. {cure or 'Leave it out.'}")


def need_text(name: str, value: Any, *, cure: str) -> str:
    """`value` if it is a string that is not empty and that UTF-8 can encode."""
    if isinstance(value, str) and value and value.isascii() | (not any("\ud800" <= c <= "\udfff" for c in value)):
        return value
    raise ValueRangeError(f"{name} needs a text; got {shown(value)}. {cure}")


def need_choice(kind: str, value: Any, known: Collection[str]) -> str:
    """`value` if it is one of the known names, else an error that suggests the nearest one."""
    if isinstance(value, str) and value in known:
        return value
    raise UnknownNameError(kind, value, known)


def need_items(name: str, value: Any, *, cure: str) -> list[Any]:
    """The elements of a list, tuple, one-dimensional array or other iterable; strings and mappings are refused."""
    if isinstance(value, Tensor):
        value = _need_dense(name, value)
    is_scalar = isinstance(value, Tensor | np.ndarray) and value.ndim == 0
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | dict | nn.Module | type) and not is_scalar:
        if isinstance(value, Tensor | np.ndarray):
            _need_few(name, math.prod(value.shape), cure)
            return value.tolist()
        found = list(itertools.islice(value, _MOST_ITEMS + 1))
        _need_few(name, len(found), cure)
        return found
    raise ConversionError(f"{name} needs a list or tuple; got {shown(value)}. {cure}")


def _need_few(name: str, n: int, cure: str) -> None:
    if n > _MOST_ITEMS:  # an iterator may have no end, and an expanded tensor more entries than memory
        raise ValueRangeError(f"{name} needs at most {_MOST_ITEMS:,} items; got more. {cure}")


def need_instance(name: str, value: Any, kind: type[_T] | tuple[type[_T], ...], *, cure: str) -> _T:
    """`value` if it is of this class."""
    if isinstance(value, kind):
        return value
    wanted = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
    raise ConversionError(f"{name} needs a {wanted}; got {shown(value)}. {cure}")


def need_callable(name: str, value: Any, *, cure: str) -> Callable[..., Any]:
    """`value` if it can be called."""
    if callable(value):
        found: Callable[..., Any] = value
        return found
    raise ConversionError(f"{name} needs a function; got {shown(value)}. {cure}")


# ------------------------------------------------------------------------------- memory, torch and files


def need_free_memory(what: str, n_bytes: float, *, cure: str) -> None:
    """Raises MemoryLimitError if `n_bytes` are more than the machine has free; small sizes are not looked up."""
    if n_bytes > _SMALL and n_bytes > (free := psutil.virtual_memory().available):
        raise MemoryLimitError(f"{what} needs {n_bytes / 1e9:.3g} GB; got {free / 1e9:.3g} GB of free memory. {cure}")


def need_float_dtype(name: str, value: Any, *, cure: str = "Pass torch.float32 or torch.float64.") -> torch.dtype:
    """`value` if it is a real floating-point dtype of torch."""
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return value
    raise ValueRangeError(f"{name} needs a real floating-point type; got {shown(value)}. {cure}")


def need_device(name: str, value: Any, *, is_meta_allowed: bool = False) -> torch.device:
    """`value` as a device on which this machine can make a tensor that holds values, or the meta device if allowed."""
    cure = "Pass 'cpu', or 'cuda' where there is a GPU."
    if not isinstance(value, str | torch.device) or not value:
        raise ValueRangeError(f"{name} needs a torch device or its name; got {shown(value)}. {cure}")
    try:
        device = torch.device(value)
        if device.type != "meta" or is_meta_allowed:
            torch.empty(0, device=device)
            return device
    except (RuntimeError, AssertionError, ImportError, NotImplementedError) as error:  # torch has no one class for it
        first = str(error).partition("\n")[0]
        raise ValueRangeError(
            f"{name} needs a device of this machine; got {shown(value)} ({first:.80}). {cure}"
        ) from None
    raise ValueRangeError(f"{name} needs a device that holds values; got {shown(value)}. {cure}")


def need_path(name: str, value: Any) -> Path:
    """`value`, a string or path object that is not empty, as a Path."""
    if isinstance(value, str | os.PathLike):
        text = os.fspath(value)
        if isinstance(text, str) and text and "\0" not in text and not any("\ud800" <= c <= "\udfff" for c in text):
            _need_short(name, text)
            return Path(text)
    raise ConversionError(f"{name} needs a path; got {shown(value)}. Pass a string or a pathlib.Path.")


def _need_short(name: str, path: str) -> None:
    try:
        os.lstat(path)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            longest = max(map(len, Path(path).parts))
            raise ConversionError(
                f"{name} needs a path that the file system allows; got {len(path):,} characters, the longest part of "
                f"{longest:,}. Choose a shorter name."
            ) from error
