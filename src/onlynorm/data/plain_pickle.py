"""`read_plain`: numbers, text, lists, dicts and arrays of bytes out of a pickle, of which nothing is run.

A pickle is a program. Ours may use only the operations that build plain containers, and only the few names with which
numpy writes arrays; those stand for inert objects of this file, so that not even numpy's own code is reached. Anything
else is refused before the first operation is carried out.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from typing import Any

import numpy as np

from onlynorm.errors import FormatError

_OPERATIONS = frozenset((
    "PROTO", "FRAME", "STOP", "MARK", "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "TUPLE", "TUPLE1", "TUPLE2",
    "TUPLE3", "EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "LIST", "DICT", "APPEND", "APPENDS", "SETITEM", "SETITEMS",
    "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "BINFLOAT", "STRING",
    "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES",
    "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET",
    "LONG_BINGET",
))  # fmt: skip
_PUTS = frozenset(("PUT", "BINPUT", "LONG_BINPUT"))
_BYTES = ("u1", "|u1", b"u1", b"|u1")
_CURE = "Copy the file again from where it was published."


def read_plain(raw: bytes, *, name: str) -> Any:
    """What the pickle holds, text of Python 2 as bytes; arrays of bytes, alone or in a dict, as numpy arrays.

    `name` is what errors call the file. FormatError if it holds, or would do, anything else.
    """
    try:
        _need_plain(raw)
        found = _Reader(io.BytesIO(raw), encoding="bytes").load()
        return {key: _to_array(item) for key, item in found.items()} if isinstance(found, dict) else _to_array(found)
    # Whatever else a damaged program makes the reader raise, the file is no plain one.
    except Exception as error:
        told = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise FormatError(f"{name} needs a pickle of plain lists, dicts and arrays; got {told}. {_CURE}") from error


def _need_plain(raw: bytes) -> None:
    for n_before, (operation, argument, _) in enumerate(pickletools.genops(raw)):
        if operation.name not in _OPERATIONS:
            raise pickle.UnpicklingError(f"the operation {operation.name}")
        # The reader makes room for every place of the memo up to this one.
        if operation.name in _PUTS and (not isinstance(argument, int) or argument > n_before):
            raise pickle.UnpicklingError(f"place {argument} of the memo after {n_before} operations")


class _Array:
    """Stands for a numpy array until it is known to be one of bytes."""

    __slots__ = ("state",)

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Name:
    """Stands for a function or type that numpy's pickles name; calling it makes inert objects only."""

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __call__(self, *given: Any) -> Any:
        if self._what == "array":
            return _Array()
        if self._what == "buffer":
            data, dtype, shape, order = given
            return _Array((1, shape, dtype, order == "F", data))
        if self._what == "dtype":
            return _Type(given[0])
        if self._what == "encode" and len(given) == 2 and given[1] in ("latin1", b"latin1"):
            return given[0].encode("latin1")
        if self._what == "bytes" and not given:
            return b""
        raise pickle.UnpicklingError(f"a call of {self._what}")

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("a change of a name")


class _Type:
    """Stands for numpy's dtype; only its name is kept."""

    __slots__ = ("name",)

    def __init__(self, name: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        """Byte order and alignment, which bytes do not have."""


_NAMES = {
    ("numpy", "ndarray"): _Name("ndarray"),
    ("numpy", "dtype"): _Name("dtype"),
    ("_codecs", "encode"): _Name("encode"),
    ("__builtin__", "bytes"): _Name("bytes"),
    ("builtins", "bytes"): _Name("bytes"),
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _Name("array") for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _Name("buffer") for core in ("core", "_core")},
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """The inert object that stands for the name; there is none for names that could run something."""
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"the name {module}.{name}")
        return _NAMES[module, name]


def _to_array(value: Any) -> Any:
    """The array that a stand-in stands for; any other value as it is."""
    if not isinstance(value, _Array):
        return value
    _, shape, dtype, is_fortran, data = value.state
    is_bytes = isinstance(dtype, _Type) and dtype.name in _BYTES
    is_whole = isinstance(data, bytes | bytearray) and isinstance(shape, tuple)
    if not is_bytes or not is_whole or not all(type(n) is int and n >= 0 for n in shape):
        raise pickle.UnpicklingError("an array of something other than bytes")
    if math.prod(shape) != len(data):
        raise pickle.UnpicklingError(f"{len(data)} bytes for an array of shape {shape}")
    return np.frombuffer(data, np.uint8).reshape(shape, order="F" if is_fortran else "C")
