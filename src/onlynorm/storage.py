"""Files that are whole or refused: written beside their place and renamed, sealed by a checksum, checked when read.

A sealed tensor file is a safetensors file whose metadata hold one JSON document under the key "onlynorm". Its "sha256"
is the SHA-256 of the whole file, length, header and data, taken with 64 zeros in its own place: a single altered byte
anywhere is noticed before anything in the file is looked at. Nothing in it can run.

Every file of the library is written by `write_atomically`, and a run that writes for a while holds `claim(path)`, so
that two runs never write to one path at the same time. A checksum proves that a file is undamaged, not who wrote it:
readers check every declared size and type against the content of the file before they use it.

Sealed JSON files: written whole or not at all, and never trusted when damaged.

A sealed file is one JSON object `{"kind", "format", "checksum", "body"}`; the checksum is the SHA-256 of the
body in canonical form. It is written beside its place, flushed to the disk and renamed, so a killed process
leaves the old file or the new one. A file is accepted only if its content, written again, gives the same bytes.
Numbers that JSON lacks (NaN, infinities) are kept as `{"$float": "nan"}`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import re
import secrets
import stat
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, ParamSpec, TypeVar

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from onlynorm.errors import FormatError, MemoryLimitError, OnlynormError, StorageError

fcntl: Any = None
with contextlib.suppress(ImportError):  # on Windows an open file cannot be deleted, and runs are not kept apart
    fcntl = importlib.import_module("fcntl")
MAX_NESTING = 64
"""Lists and objects inside each other in a JSON document that is read; our own files have fewer than ten."""
_P = ParamSpec("_P")
_T = TypeVar("_T")
_KEY = "onlynorm"
_SEAL = b'\\"sha256\\":\\"'  # as it stands in the header, where the document is JSON inside a JSON string
_BLANK = b"0" * 64


def version() -> str:
    """The version of this library, as installed."""
    try:
        return importlib.metadata.version("onlynorm")
    except importlib.metadata.PackageNotFoundError:  # run from its sources
        return "unknown"


def to_plain(value: Any) -> Any:
    """`value` as JSON-able numbers, strings, lists and dicts; numpy arrays and torch tensors become lists."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.generic):
        return to_plain(value.item())
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, Mapping):
        odd = [key for key in value if not isinstance(key, str)]
        if odd:
            raise FormatError(f"a stored result needs string keys; got {odd[0]!r}. Use str(key).")
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | range):
        return [to_plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy arrays and torch tensors, wherever they live
        return to_plain(value.tolist())
    raise FormatError(
        f"a stored result needs numbers, strings, lists and dicts; got {type(value).__name__}. "
        "Return its fields as a dict."
    )


def from_plain(value: Any) -> Any:
    """The inverse of `to_plain` up to containers: non-finite numbers are floats again."""
    if isinstance(value, dict):
        if set(value) == {"$float"}:
            if value["$float"] not in ("nan", "inf", "-inf"):
                raise FormatError(f"a stored number needs to be nan, inf or -inf; got {value['$float']!r:.40}.")
            return float(value["$float"])
        return {key: from_plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    return value


def canonical(value: Any) -> str:
    """`value` as canonical JSON: sorted keys, no spaces."""
    return json.dumps(to_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: Any) -> str:
    """SHA-256 of `value` in canonical JSON: equal values, equal digests."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """Put `data` at `path` whole or not at all, flushed to the disk.

    The data go to a new file with a random name beside the target, which is then renamed. What a killed process left
    of such a file is deleted by the next write to the same target. If `path` is a symbolic link, the file it points to
    is replaced and the link stays. A replaced file keeps its permissions; a new one gets those of the umask.
    """
    try:
        target = _real_target(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(target)
        handle, beside = _create_beside(target)
        try:
            _write_all(handle, data)
            if fcntl is None:
                os.close(handle)
                handle = -1
            os.replace(beside, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise
        finally:
            if handle >= 0:
                os.close(handle)
        _flush_folder(target.parent)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise _unwritable(path, error) from error


def _unwritable(path: Path | str, error: Exception) -> StorageError:
    return StorageError(
        f"saving results needs a writable folder with space; got {getattr(error, 'strerror', None) or error} for "
        f"{path}. Free space there or choose another folder; finished pieces are kept."
    )


def _real_target(path: Path) -> Path:
    """The path without symbolic links; only ordinary files may be replaced."""
    target = Path(os.path.realpath(path))
    try:
        mode = os.lstat(target).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return target
    if stat.S_ISLNK(mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "Not an ordinary file")
    return target


def _stem(target: Path) -> str:
    """The start of the names of temporary files: that of the target, or its digest where that would be too long."""
    name = os.fsencode(target.name)
    return target.name if len(name) <= 200 else hashlib.sha256(name).hexdigest()[:32]


def _create_beside(target: Path) -> tuple[int, Path]:
    """A new, empty file beside the target, locked while this process lives, and its path."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    while True:
        beside = target.with_name(f".{_stem(target)}.{secrets.token_hex(8)}.tmp")
        try:
            handle = os.open(beside, flags, 0o666)
        except FileExistsError:
            continue
        try:
            if fcntl is None or (_try_lock(handle) and os.fstat(handle).st_nlink):
                with contextlib.suppress(OSError):  # there is no target yet, or no permissions on this file system
                    os.chmod(beside, stat.S_IMODE(os.stat(target).st_mode))
                return handle, beside
        except BaseException:
            os.close(handle)
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise
        os.close(handle)  # another writer took it for a leftover before it was locked


def _write_all(handle: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest[: 2**30]) :]
    os.fsync(handle)


def _remove_stale(target: Path) -> None:
    """Delete temporary files of this target whose writers are gone."""
    pattern = re.compile(rf"\.{re.escape(_stem(target))}\.[0-9a-f]{{16}}\.tmp")
    with contextlib.suppress(OSError), os.scandir(target.parent) as entries:
        for entry in entries:
            if pattern.fullmatch(entry.name) is None or not entry.is_file(follow_symlinks=False):
                continue
            with contextlib.suppress(OSError):
                if fcntl is None:
                    os.unlink(entry.path)
                    continue
                handle = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    if _try_lock(handle):
                        os.unlink(entry.path)
                finally:
                    os.close(handle)


def _try_lock(handle: int) -> bool:
    """Whether this open file is now locked by us; True too where the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EAGAIN)
    return True


@contextlib.contextmanager
def claim(path: Path | str) -> Iterator[None]:
    """Hold `path`, a file or a folder, for this run; `StorageError` with the process id if another run holds it.

    The claim is a locked file `.NAME.lock` beside the path, which is deleted afterwards. The system releases the lock
    when the process ends, however it ends, so a killed run blocks nobody. Threads of one process exclude each other as
    processes do. On Windows, and on file systems without locks, nothing is held.
    """
    if fcntl is None:
        yield
        return
    made: list[Path] = []
    try:
        target = Path(os.path.realpath(path))
        lock = target.with_name(f".{_stem(target)}.lock")
        made = [folder for folder in (target.parent, *target.parent.parents) if not folder.exists()]
        target.parent.mkdir(parents=True, exist_ok=True)
        handle = _take(lock)
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from error
    try:
        if handle is None:
            raise StorageError(
                f"{path} needs to be written by one run at a time; {_holder(lock)} is writing it. Wait until that run "
                "ends, or choose another path."
            )
        yield
    finally:
        if handle is not None:
            with contextlib.suppress(OSError):
                os.unlink(lock)
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)  # a forked child may still have the file open
            os.close(handle)
        for folder in made:
            with contextlib.suppress(OSError):  # it has content by now
                folder.rmdir()


def _take(lock: Path) -> int | None:
    """The locked file with our process id in it; None if another process or thread holds it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        handle = os.open(lock, flags, 0o666)
        try:
            if not _try_lock(handle):
                os.close(handle)
                return None
            held = os.fstat(handle)
            try:
                is_there = os.path.samestat(held, os.lstat(lock))
            except FileNotFoundError:
                is_there = False
            if is_there:
                try:
                    os.ftruncate(handle, 0)
                    os.write(handle, str(os.getpid()).encode())
                except BaseException:  # the disk is full
                    with contextlib.suppress(OSError):
                        os.unlink(lock)
                    raise
                return handle
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(handle)
            raise
        os.close(handle)  # its holder deleted it between our opening and locking


def _holder(lock: Path) -> str:
    try:
        return f"process {int(lock.read_bytes()[:20])}"
    except (OSError, ValueError):
        return "another process"


def claiming(name: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """A decorator: the function holds a `claim` on its keyword argument `name` while it runs, unless that is None."""

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(function)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            path = kwargs.get(name)
            if isinstance(path, str | Path) and is_first_process():
                with claim(path):
                    return function(*args, **kwargs)
            return function(*args, **kwargs)

        return run

    return decorate


def is_first_process() -> bool:
    """Whether this is the process that writes, where a launcher has started several for one run."""
    return all(os.environ.get(rank, "0") == "0" for rank in ("RANK", "NODE_RANK", "LOCAL_RANK"))


def _flush_folder(folder: Path) -> None:
    """Make the rename itself durable; file systems that cannot flush a folder are left alone."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], *, kind: str, format: int, document: Mapping[str, Any]
) -> None:
    """Write the tensors and the document as one sealed file of this kind and format; equal content, equal bytes."""
    whole = {**document, "kind": kind, "format": format, "onlynorm": version(), "sha256": _BLANK.decode()}
    dense = {name: tensor.contiguous() for name, tensor in tensors.items()}  # channels_last, transposed and so on
    write_atomically(path, seal(save(dense, metadata={_KEY: canonical(whole)})))


def seal(data: bytes) -> bytes:
    """The bytes of a tensor file with its checksum filled in."""
    place = data.index(_SEAL) + len(_SEAL)
    blank = bytearray(data)
    blank[place : place + len(_BLANK)] = _BLANK
    blank[place : place + len(_BLANK)] = hashlib.sha256(blank).hexdigest().encode()
    return bytes(blank)


def open_file(path: Path | str) -> BinaryIO:
    """An ordinary file, open for reading; OSError for anything else, such as a pipe, which may never have an end."""
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    # Opening a pipe that nobody writes to waits for a writer, and opening a terminal may make it ours.
    flags |= getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
    handle = os.open(path, flags)
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not an ordinary file")
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_file(path: Path, *, what: str, limit: int | None = None) -> bytes:
    """The bytes of an ordinary file; `what` is what errors call its content, `limit` the most bytes it may have.

    What another process appends meanwhile is not read.
    """
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            if limit is not None and size > limit:
                raise FormatError(f"{what} needs at most {limit:,} bytes; {path.name} has {size:,}. Pass another file.")
            return file.read(size)
    except (MemoryError, OverflowError) as error:
        raise MemoryLimitError(f"{what} needs to be read at once; {path.name} does not fit into memory.") from error
    except FormatError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        told = getattr(error, "strerror", None) or error
        raise StorageError(f"{what} needs a readable file; got {told} for {path}. Check the path.") from error


def parse_json(data: bytes | str) -> Any:
    """The value of a JSON document; ValueError where it is damaged, nested too deeply, or has numbers JSON lacks."""

    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a JSON number")

    try:
        value = json.loads(data, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError(f"nested more than {MAX_NESTING} deep") from error
    level = [value]
    for _ in range(MAX_NESTING + 1):
        level = [item for outer in level if isinstance(outer, dict | list) for item in _items(outer)]
        if not level:
            return value
    raise ValueError(f"nested more than {MAX_NESTING} deep")


def _items(outer: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return outer.values() if isinstance(outer, dict) else outer


def make_checked(kind: type[_T], written: object) -> _T:
    """An instance of a dataclass from a dict of a file; ValueError unless all fields are there and of their type.

    Fields with a default may be missing. Lists stand for tuples, and whole numbers for floats.
    """
    hints = typing.get_type_hints(kind)
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    if not isinstance(written, dict):
        raise ValueError(f"{kind.__name__} needs a table of fields, not {type(written).__name__}")
    if unknown := written.keys() - {field.name for field in fields}:
        raise ValueError(f"{kind.__name__} has no field {min(unknown)!r:.60}")
    values = {}
    for field in fields:
        if field.name in written:
            values[field.name] = _checked(hints[field.name], written[field.name], field.name)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{kind.__name__} needs the field {field.name!r}")
    return kind(**values)


def _checked(hint: Any, value: Any, name: str) -> Any:
    """The value, if it is of this type; numbers as floats and lists as tuples where those are asked for."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for one in inner:
            with contextlib.suppress(ValueError):
                return _checked(one, value, name)
    elif hint is Any or (hint in (str, bool, int, type(None)) and type(value) is hint):
        return value
    elif hint is float and (type(value) is float or (type(value) is int and abs(value) < 2**1023)):
        return float(value)
    elif origin in (tuple, list) and isinstance(value, list):
        made = [_checked(inner[0], item, name) for item in value]
        return tuple(made) if origin is tuple else made
    elif origin in (dict, Mapping) and isinstance(value, dict):
        return {key: _checked(inner[1], item, name) for key, item in value.items()}
    raise ValueError(f"the field {name!r} needs {getattr(hint, '__name__', hint)}, not {value!r:.60}")


def read_tensors(path: Path, *, kind: str, format: int, cure: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(document, tensors) of a sealed file; `FormatError` where it is damaged, altered, newer or of another kind."""
    data = read_file(path, what=f"the {kind}")
    header = _open_seal(data, path.name, kind, cure)
    try:
        document = parse_json(parse_json(header)["__metadata__"][_KEY])
        written, own = document["format"], document["kind"]
        if type(written) is not int or written < 1:
            raise TypeError("a format is a positive whole number")
        if written > format:
            raise FormatError(f"the {kind} needs format {format} or older; {path.name} has {written}. Update onlynorm.")
        if own != kind:
            raise FormatError(f"expected a file of kind {kind!r}; {path.name} is of kind {own!r}. Pass another file.")
        restored: dict[str, Any] = from_plain(document)
        return restored, load(data)
    except FormatError:
        raise
    except MemoryError as error:
        raise MemoryLimitError(f"the {kind} needs more memory than there is to read {path.name}.") from error
    except Exception as error:  # whatever a forged header sets off in the parsers, it is the file's fault
        raise FormatError(f"the {kind} needs a header of our own making; {path.name} has another. {cure}") from error


def _open_seal(data: bytes, name: str, kind: str, cure: str) -> bytes:
    """The header of the file, once the checksum of the whole holds."""

    def refuse(why: str) -> NoReturn:
        raise FormatError(f"the {kind} needs a whole safetensors file written by onlynorm; {name} {why}. {cure}")

    end = 8 + int.from_bytes(data[:8], "little")
    if len(data) < 8 or end > len(data):
        refuse("is not one, or it is truncated")
    header = data[8:end]
    if _SEAL not in header:
        refuse("has no checksum of ours: it comes from elsewhere or was altered")
    place = 8 + header.index(_SEAL) + len(_SEAL)
    seal = hashlib.sha256(data[:place])
    seal.update(_BLANK)
    seal.update(memoryview(data)[place + len(_BLANK) :])
    if data[place : place + len(_BLANK)] != seal.hexdigest().encode():
        refuse("does not match its checksum: it was altered or truncated")
    return header


__all__ = ["digest", "from_plain", "read_sealed", "seal_json", "to_plain", "write_atomically", "write_sealed"]
FORMAT = 1


def write_sealed(path: Path, body: Mapping[str, Any], *, kind: str) -> None:
    """Write `body` as a sealed file of this `kind`."""
    write_atomically(path, seal_json(to_plain(body), kind=kind))


def seal_json(plain: Mapping[str, Any], *, kind: str) -> bytes:
    """The bytes of a sealed file with this body, in JSON types."""
    sealed = {"kind": kind, "format": FORMAT, "checksum": digest(plain), "body": plain}
    return (json.dumps(sealed, allow_nan=False) + "\n").encode()


def read_sealed(path: Path, *, kind: str) -> dict[str, Any]:
    """The body of a sealed file; `FormatError` when it is damaged, altered, newer, or of another kind."""
    cure = "Delete the file and run `reproduce` again."
    try:
        data = read_file(path, what=f"the {kind}")
        sealed = parse_json(data)
    except OnlynormError:
        raise
    except ValueError as error:
        raise FormatError(f"the {kind} needs whole JSON; {path.name} is damaged or truncated. {cure}") from error
    if not isinstance(sealed, dict) or sealed.get("kind") != kind or not isinstance(sealed.get("body"), dict):
        raise FormatError(f"expected a file of kind {kind!r}; {path.name} is something else. {cure}")
    if sealed.get("format") != FORMAT:
        raise FormatError(
            f"the {kind} needs format {FORMAT}; {path.name} has {sealed.get('format')!r}. "
            "Update onlynorm, or run `reproduce` again."
        )
    body = sealed["body"]
    try:
        intact = data == seal_json(body, kind=kind)  # byte for byte, the checksum among them
        restored = from_plain(body)
    except (ValueError, TypeError, OverflowError):
        intact = False
    if not intact or not isinstance(restored, dict):
        raise FormatError(f"the {kind} needs its own checksum; {path.name} was altered or damaged. {cure}")
    return restored


def tensors_digest(tensors: Mapping[str, object]) -> str:
    """SHA-256 over names, types, shapes and bytes of tensors."""
    total = hashlib.sha256()
    for name, value in tensors.items():
        total.update(f"{name!r}: {getattr(value, 'dtype', value)} {tuple(getattr(value, 'shape', ()))}\n".encode())
        if isinstance(value, Tensor):
            total.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
