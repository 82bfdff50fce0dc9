"""Validation of arguments. Error messages give what is needed, what was passed, and the cure.

`as_...` functions convert their argument, `need_...` functions return it as a plain Python type; both raise if it is
invalid.
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
import torch
from torch import Tensor, nn

from onlynorm.errors import ConversionError, MemoryLimitError, ShapeError, UnknownNameError, ValueRangeError, shown

Progress = Callable[[int, int, str], None]
"""Called with (done, total, message). True for a progress bar and False are converted by `with_progress`."""
_T = TypeVar("_T")
_SEEDS = 2**64
_WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
_PLAIN = (torch.float64, torch.float32)
_MAX_ITEMS = 2**22
_MAX_INTEGER = 2**63
_SMALL = 2**28  # bytes below which free memory is not queried: a query takes 20 microseconds


# ------------------------------------------------------------------------------- tensors


def as_tensor(name: str, value: Any, *, cure: str = "Pass a tensor or a NumPy array.") -> Tensor:
    """`value` as a dense tensor. NumPy arrays, lists and scalars are converted, tensors returned unchanged.

    Unsigned integers of more than one byte become int64, since torch supports few operations on them. Raises
    `ConversionError` for sparse, quantized, nested and meta tensors.
    """
    if _is_plain(value):
        return value
    if isinstance(value, Tensor):
        dense = _need_dense(name, value)
        return dense.long() if dense.dtype in _WIDE_UNSIGNED else dense
    if isinstance(value, np.ndarray | np.generic | list | tuple | range | int | float) and not isinstance(value, bool):
        try:
            if isinstance(value, list | tuple) and value and all(isinstance(item, Tensor) for item in value):
                return as_tensor(name, torch.stack(value), cure=cure)  # NumPy supports neither bfloat16 nor gradients
            array = np.asarray(value)
            if array.dtype.kind == "u" and array.dtype.itemsize > 1:
                array = array.astype(np.int64)
            is_plain = array.flags.writeable and array.dtype.isnative and min((0, *array.strides)) >= 0
            return torch.as_tensor(array if is_plain else array.astype(array.dtype.newbyteorder("="), order="C"))
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            first = str(error).partition("\n")[0]
            raise ConversionError(f"{name} must be numeric; got {shown(value)} ({first:.80}). {cure}") from error
    raise ConversionError(f"{name} must be a tensor; got {shown(value)}. {cure}")


def as_real(
    name: str, value: Any, *, ndim: int | None = None, is_finite: bool = False, cure: str = "Pass a real tensor."
) -> Tensor:
    """`value` as a dense real tensor with `ndim` dimensions; integers and booleans become float64."""
    if ndim is None and not is_finite and _is_plain(value):
        return value
    given = as_tensor(name, value, cure=cure)
    if given.is_complex():
        raise ValueRangeError(f"{name} must be real; got {given.dtype}. {cure}")
    if ndim is not None and given.ndim != ndim:
        raise ShapeError(f"{name} must have {ndim} dimensions; got {given.ndim} in shape {tuple(given.shape)}. {cure}")
    if not given.is_floating_point():
        return given.double()
    if is_finite and not bool(torch.isfinite(given).all()):
        bad = ~torch.isfinite(given)
        where = tuple(bad.nonzero()[0].tolist())
        raise ValueRangeError(
            f"{name} must be finite; got {int(bad.sum())} NaN or infinite values, the first at {where}. {cure}"
        )
    return given


def _is_plain(value: Any) -> bool:
    """Whether `value` is a small dense tensor in float32 or float64; all checks together take longer than a product."""
    return (
        type(value) is Tensor
        and not torch.compiler.is_compiling()
        and value.dtype in _PLAIN
        and value.layout == torch.strided
        and not value.is_nested
        and not value.is_meta
        and value.nbytes <= _SMALL
    )


def _need_dense(name: str, value: Tensor) -> Tensor:
    if value.is_nested or value.layout != torch.strided or value.is_quantized:
        kind = "nested" if value.is_nested else "quantized" if value.is_quantized else str(value.layout)
        function = "dequantize" if value.is_quantized else "to_dense"
        cure = "torch.nested.to_padded_tensor" if value.is_nested else function
        raise ConversionError(
            f"{name} must be a dense tensor; got a {kind.removeprefix('torch.')} one. Convert it with {cure}."
        )
    if value.is_floating_point() and value.itemsize < 2:
        raise ConversionError(
            f"{name} must have a dtype that torch computes with; got {str(value.dtype).removeprefix('torch.')}. Pass "
            "value.float()."
        )
    if value.is_meta:
        raise ConversionError(
            f"{name} must have values; got a tensor of shape {tuple(value.shape)} on the meta device. Create it on "
            "another device."
        )
    if torch.compiler.is_compiling():  # a comparison of sizes would limit the batch of a compiled or exported model
        return value
    n_bytes = value.numel() * value.itemsize
    if n_bytes > _SMALL and n_bytes > value.untyped_storage().nbytes():  # made by `expand`
        need_free_memory(f"{name}, expanded to {shown(value)},", n_bytes, cure="Pass fewer samples.")
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

    NumPy floats of lower precision are converted through their decimal form: np.float32(1.1) becomes 1.1.
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
    raise ValueRangeError(f"{name} must be a number in {left}{low:g}, {high:g}{right}; got {shown(value)}. {cure}")


def need_integer(name: str, value: Any, *, low: int | None = None, high: int | None = None, cure: str) -> int:
    """`value` as an int between `low` and `high`; floats such as 3.0 and NumPy integers are accepted, booleans are not.

    Without `high` the value must be below 2^63, as sizes in torch.
    """
    is_small = type(value) is int and abs(value) < _MAX_INTEGER
    if is_small and (low is None or value >= low) and (high is None or value <= high):
        return int(value)
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    is_whole = is_number and (isinstance(value, numbers.Integral) or (math.isfinite(value) and value == int(value)))
    if is_whole and high is None and abs(int(value)) >= _MAX_INTEGER:
        high = _MAX_INTEGER - 1
    if is_whole and (low is None or value >= low) and (high is None or value <= high):
        return int(value)
    bounds = [f"from {low}" if low is not None else "", f"to {high}" if high is not None else ""]
    limits = " ".join(["", *filter(None, bounds)])
    raise ValueRangeError(f"{name} must be an integer{limits}; got {shown(value)}. {cure}")


def need_sizes(name: str, values: Any, *, low: int = 1, n_least: int = 0, cure: str) -> tuple[int, ...]:
    """`values` as a tuple of at least `n_least` integers, each at least `low`."""
    given = need_items(name, values, cure=cure)
    if len(given) < n_least:
        raise ShapeError(f"{name} must have at least {n_least} entries; got {shown(values)}. {cure}")
    return tuple(need_integer(name, value, low=low, high=2**31 - 1, cure=cure) for value in given)


def is_real_number(value: Any) -> bool:
    """Whether `value` is a real number, of Python or NumPy, in the range of a float; False for booleans."""
    if type(value) is float:
        return True
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def is_whole_number(value: Any) -> bool:
    """Whether `value` is an integer of Python or NumPy; False for booleans and floats."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def need_seed(value: Any, *, name: str = "seed") -> int:
    """A seed as an int in [0, 2^64); NumPy integers are accepted, floats are not."""
    if is_whole_number(value) and 0 <= int(value) < _SEEDS:
        return int(value)
    raise ValueRangeError(
        f"{name} must be an integer in [0, 2^64); got {shown(value)}. Reduce it: seed=hash_value % 2**64."
    )


def need_flag(name: str, value: Any, *, cure: str | None = None) -> bool:
    """`value` as a bool; NumPy booleans are accepted, numbers and strings are not."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise ValueRangeError(f"{name} must be True or False; got {shown(value)}. {cure or 'Leave it out.'}")


def need_text(name: str, value: Any, *, cure: str) -> str:
    """`value` if it is a non-empty string that can be encoded as UTF-8."""
    if isinstance(value, str) and value and value.isascii() | (not any("\ud800" <= c <= "\udfff" for c in value)):
        return value
    raise ValueRangeError(f"{name} must be a non-empty string; got {shown(value)}. {cure}")


def need_choice(kind: str, value: Any, known: Collection[str]) -> str:
    """`value` if it is a known name; the error suggests similar ones."""
    if isinstance(value, str) and value in known:
        return value
    raise UnknownNameError(kind, value, known)


def need_items(name: str, value: Any, *, cure: str) -> list[Any]:
    """The elements of a list, tuple, one-dimensional array or other iterable, but not of a string or mapping."""
    if isinstance(value, Tensor):
        value = _need_dense(name, value)
    is_scalar = isinstance(value, Tensor | np.ndarray) and value.ndim == 0
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | dict | nn.Module | type) and not is_scalar:
        if isinstance(value, Tensor | np.ndarray):
            _need_few(name, math.prod(value.shape), cure)
            return value.tolist()
        found = list(itertools.islice(value, _MAX_ITEMS + 1))
        _need_few(name, len(found), cure)
        return found
    raise ConversionError(f"{name} must be a list or tuple; got {shown(value)}. {cure}")


def _need_few(name: str, n: int, cure: str) -> None:
    if n > _MAX_ITEMS:  # iterators can be infinite, and expanded tensors larger than memory
        raise ValueRangeError(f"{name} must have at most {_MAX_ITEMS:,} items; got more. {cure}")


def need_instance(name: str, value: Any, kind: type[_T] | tuple[type[_T], ...], *, cure: str) -> _T:
    """`value` if it is an instance of `kind`."""
    if isinstance(value, kind):
        return value
    expected = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
    raise ConversionError(f"{name} needs a {expected}; got {shown(value)}. {cure}")


def need_callable(name: str, value: Any, *, cure: str) -> Callable[..., Any]:
    """`value` if it is callable."""
    if callable(value):
        found: Callable[..., Any] = value
        return found
    raise ConversionError(f"{name} must be callable; got {shown(value)}. {cure}")


# ------------------------------------------------------------------------------- memory, torch and files


def need_progress(value: Any) -> Progress | None:
    """`value` if it is None or can be called."""
    if value is not None:
        need_callable("progress", value, cure="Pass True for a bar, or a function of (done, total, message).")
    found: Progress | None = value
    return found


def need_free_memory(what: str, n_bytes: float, *, cure: str) -> None:
    """Raises MemoryLimitError if `n_bytes` exceeds the free memory; sizes below 256 MB are not checked."""
    if n_bytes <= _SMALL:
        return
    import psutil

    if n_bytes > (free := psutil.virtual_memory().available):
        raise MemoryLimitError(f"{what} needs {n_bytes / 1e9:.3g} GB; got {free / 1e9:.3g} GB of free memory. {cure}")


def need_float_dtype(name: str, value: Any, *, cure: str = "Pass torch.float32 or torch.float64.") -> torch.dtype:
    """`value` if it is a real floating-point dtype of torch."""
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return value
    raise ValueRangeError(f"{name} must be a floating-point dtype; got {shown(value)}. {cure}")


def need_device(name: str, value: Any, *, is_meta_allowed: bool = False) -> torch.device:
    """`value` as a device that is available on this machine; the meta device only if allowed."""
    cure = "Pass 'cpu', or 'cuda' if a GPU is available."
    if not isinstance(value, str | torch.device) or not value:
        raise ValueRangeError(f"{name} must be a torch device or its name; got {shown(value)}. {cure}")
    try:
        device = torch.device(value)
        if device.type != "meta" or is_meta_allowed:
            torch.empty(0, device=device)
            return device
    except (RuntimeError, AssertionError, ImportError, NotImplementedError) as error:  # torch raises any of these
        first = str(error).partition("\n")[0]
        raise ValueRangeError(
            f"{name} must be a device of this machine; got {shown(value)} ({first:.80}). {cure}"
        ) from None
    raise ValueRangeError(f"{name} must be a device with storage; got {shown(value)}. {cure}")


def need_path(name: str, value: Any) -> Path:
    """`value`, a non-empty string or path-like object, as a Path."""
    if isinstance(value, str | os.PathLike):
        text = os.fspath(value)
        if isinstance(text, str) and text and "\0" not in text and not any("\ud800" <= c <= "\udfff" for c in text):
            _need_short(name, text)
            return Path(text)
    raise ConversionError(f"{name} must be a path; got {shown(value)}. Pass a string or a pathlib.Path.")


def _need_short(name: str, path: str) -> None:
    try:
        os.lstat(path)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            longest = max(map(len, Path(path).parts))
            raise ConversionError(
                f"{name} must be a path that the file system supports; got {len(path):,} characters, with a name of "
                f"{longest:,}. Choose a shorter one."
            ) from error
