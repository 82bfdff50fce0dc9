"""`read_plain`: reads numbers, strings, lists, dicts and byte arrays from a pickle without executing it.

A pickle is a program. Only operations that build plain containers are allowed, and only the names that numpy uses for
arrays, which are replaced by inert placeholder objects, so that no code of numpy runs. Dict keys must be strings or
small integers, since hashing nested tuples can take exponential time. Any other pickle, and any with more than
`MAX_OPERATIONS`, raises before the first operation is executed.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Container
from typing import IO, Any

import numpy as np

from onlynorm.errors import FormatError

MAX_OPERATIONS = 2**20
"""Maximum number of operations of a pickle. CIFAR-100 has a fifth of it; a tensor in a PyTorch file takes about 25."""
OPERATIONS = frozenset((
    "PROTO", "FRAME", "STOP", "MARK", "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "TUPLE", "TUPLE1", "TUPLE2",
    "TUPLE3", "EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "LIST", "DICT", "APPEND", "APPENDS", "SETITEM", "SETITEMS",
    "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "BINFLOAT", "STRING",
    "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES",
    "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET",
    "LONG_BINGET",
))  # fmt: skip
"""Operations that build plain containers."""
_PUTS = frozenset(("PUT", "BINPUT", "LONG_BINPUT"))
_GETS = frozenset(("GET", "BINGET", "LONG_BINGET"))
_KEYS = frozenset((
    "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES",
    "SHORT_BINBYTES", "BINBYTES8", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "REDUCE",
))  # fmt: skip
"""Operations whose results may be dict keys: hashing them is cheap, and collisions cannot be constructed. Calls
(REDUCE) return bytes here, or objects compared by identity."""
_BYTES = ("u1", "|u1", b"u1", b"|u1")
_CURE = "Download the file again."


def read_plain(raw: bytes, *, name: str) -> Any:
    """The content of a pickle, with Python 2 strings as bytes and byte arrays as numpy arrays.

    `name` is the file name in errors. Raises FormatError if the pickle contains anything else.
    """
    try:
        need_plain(io.BytesIO(raw))
        found = _Reader(io.BytesIO(raw), encoding="bytes").load()
        made = {key: _to_array(item) for key, item in found.items()} if isinstance(found, dict) else _to_array(found)
        _need_no_placeholders(made)
        return made
    # A damaged pickle can make the reader raise anything.
    except Exception as error:
        first = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise FormatError(f"{name} needs a pickle of plain lists, dicts and arrays; got {first}. {_CURE}") from error


def need_plain(file: IO[bytes], operations: frozenset[str] = OPERATIONS, names: Container[str] | None = None) -> None:
    """Scans the operations of one pickle and raises UnpicklingError at the first that is not allowed.

    `operations` are the allowed operations, `names` the names ("module name") allowed for GLOBAL; None allows all.
    """
    stack: list[bool] = []  # for every object on the stack, whether it may be a dict key
    marks: list[int] = []
    memo: dict[int, bool] = {}
    for n_before, (operation, argument, _) in enumerate(pickletools.genops(file)):
        name = operation.name
        if name not in operations:
            raise pickle.UnpicklingError(f"the operation {name}")
        if n_before >= MAX_OPERATIONS:
            raise pickle.UnpicklingError(f"more than {MAX_OPERATIONS} operations")
        if name == "GLOBAL" and names is not None and argument not in names:
            raise pickle.UnpicklingError(f"the name {argument!s:.60}")
        if name in _PUTS or name == "MEMOIZE":
            place = len(memo) if name == "MEMOIZE" else argument
            # The reader allocates the memo up to this index.
            if not isinstance(place, int) or place > n_before:
                raise pickle.UnpicklingError(f"memo index {place} after {n_before} operations")
            memo[place] = bool(stack) and stack[-1]
        elif name in _GETS:
            stack.append(isinstance(argument, int) and memo.get(argument, False))
        elif name == "MARK":
            marks.append(len(stack))
        else:
            taken = _take(operation, stack, marks)
            keys = taken[1:2] if name == "SETITEM" else taken[::2] if name in ("SETITEMS", "DICT") else []
            if not all(keys):
                raise pickle.UnpicklingError("a dict key that is neither a string nor a small integer")
            if operation.stack_after and pickletools.markobject not in operation.stack_before[1:]:
                stack.append(name in _KEYS)


def _take(operation: pickletools.OpcodeInfo, stack: list[bool], marks: list[int]) -> list[bool]:
    """Pops the arguments of an operation from the stack, down to the last mark for operations that use it."""
    if pickletools.markobject in operation.stack_before:
        if not marks:
            raise pickle.UnpicklingError("an operation without its mark")
        height = marks.pop()
    else:
        height = len(stack) - len(operation.stack_before)
    if not (marks[-1] if marks else 0) <= height <= len(stack):
        raise pickle.UnpicklingError("an operation on an empty stack")
    taken = stack[height:]
    del stack[height:]
    return taken


class _Array:
    """Placeholder for a numpy array until its state is validated."""

    __slots__ = ("state",)

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Name:
    """Placeholder for a function or type in numpy's pickles; calling it returns placeholders only."""

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
    """Placeholder for a numpy dtype with its name."""

    __slots__ = ("name",)

    def __init__(self, name: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        """Ignores byte order and alignment, which do not apply to bytes."""


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
        """The placeholder for a name; raises for all other names."""
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"the name {module}.{name}")
        return _NAMES[module, name]


def _need_no_placeholders(value: Any) -> None:
    """Raises if a placeholder is left in the content; shared containers are visited once."""
    waiting, seen = [value], set()
    while waiting:
        item = waiting.pop()
        if isinstance(item, _Array | _Name | _Type):
            raise pickle.UnpicklingError("an array or a name inside another object")
        if isinstance(item, dict | list | tuple) and id(item) not in seen:
            seen.add(id(item))
            waiting += [*item, *item.values()] if isinstance(item, dict) else item


def _to_array(value: Any) -> Any:
    """The array of a placeholder; other values unchanged."""
    if not isinstance(value, _Array):
        return value
    _, shape, dtype, is_fortran, data = value.state
    is_bytes = isinstance(dtype, _Type) and dtype.name in _BYTES
    is_whole = isinstance(data, bytes | bytearray) and isinstance(shape, tuple)
    if not is_bytes or not is_whole or not all(type(n) is int and n >= 0 for n in shape):
        raise pickle.UnpicklingError("an array that is not of bytes")
    if math.prod(shape) != len(data):
        raise pickle.UnpicklingError(f"{len(data)} bytes for an array of shape {shape}")
    return np.frombuffer(data, np.uint8).reshape(shape, order="F" if is_fortran else "C")
