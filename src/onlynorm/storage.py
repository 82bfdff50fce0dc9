"""Atomic writing of files with a checksum, and validation when they are read.

A sealed tensor file is a safetensors file whose metadata contains one JSON document under the key "onlynorm". Its
"sha256" is the SHA-256 of the whole file (length, header and data), computed with 64 zeros in place of the hash. It is
checked before the content is parsed. Nothing in the file is executed.

Every file of the library is written by `write_atomically`. A long run holds `claim(path)`, so that two runs never write
to the same path at the same time. A checksum proves that a file is undamaged, not who wrote it: readers check every
declared size and type against the content of the file before they use it.

A sealed JSON file is one JSON object `{"kind", "format", "checksum", "body"}`. The checksum is the SHA-256 of the body
in canonical form. A file is accepted only if serializing its content again gives the same bytes. NaN and infinities,
which JSON lacks, are stored as `{"$float": "nan"}`.
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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, ParamSpec, TypeVar

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from onlynorm.errors import FormatError, MemoryLimitError, OnlynormError, StorageError

fcntl: Any = None
with contextlib.suppress(ImportError):  # Windows: open files cannot be deleted, so there are no locks
    fcntl = importlib.import_module("fcntl")
MAX_NESTING = 64
"""Maximum nesting of a JSON document; files of this library have fewer than ten levels."""
MAX_HEADER = 100_000_000
"""Maximum bytes of the header of a tensor file, the limit of safetensors."""
_P = ParamSpec("_P")
_T = TypeVar("_T")
_KEY = "onlynorm"
_SEAL = b'\\"sha256\\":\\"'  # escaped, since the document is JSON inside a JSON string
_BLANK = b"0" * 64


def version() -> str:
    """The installed version of this library."""
    try:
        return importlib.metadata.version("onlynorm")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
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
    if hasattr(value, "tolist"):  # numpy arrays and torch tensors on any device
        return to_plain(value.tolist())
    raise FormatError(
        f"a stored result needs numbers, strings, lists and dicts; got {type(value).__name__}. "
        "Return its fields as a dict."
    )


def from_plain(value: Any) -> Any:
    """The inverse of `to_plain`, except for container types: restores NaN and infinities."""
    if isinstance(value, dict):
        if set(value) == {"$float"}:
            if value["$float"] not in ("nan", "inf", "-inf"):
                raise FormatError(f"$float needs to be nan, inf or -inf; got {value['$float']!r:.40}.")
            return float(value["$float"])
        return {key: from_plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    return value


def changed_settings(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Every setting of a run that differs from the saved one, with both values as text."""
    return {
        name: f"{name}: {saved.get(name)!r:.60} saved, {now.get(name)!r:.60} now"
        for name in sorted(saved.keys() | now.keys())
        if saved.get(name) != now.get(name)
    }


def canonical(value: Any) -> str:
    """`value` as canonical JSON: sorted keys, no spaces."""
    return json.dumps(to_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: Any) -> str:
    """SHA-256 of `value` in canonical JSON; equal values have equal digests."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """Writes `data` to `path` atomically and flushes it to the disk.

    The data is written to a temporary file with a random name in the same folder, which is then renamed. Temporary
    files of killed processes are deleted by the next write to the same path. If `path` is a symbolic link, the linked
    file is replaced. A replaced file keeps its permissions; a new file gets those of the umask.
    """
    try:
        target = _real_target(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(target)
        handle, temporary = _create_temporary(target)
        try:
            _write_all(handle, data)
            if fcntl is None:
                os.close(handle)
                handle = -1
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        finally:
            if handle >= 0:
                os.close(handle)
        _flush_folder(target.parent)
    except StorageError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise _unwritable(path, error) from error


def move_atomically(source: Path, target: Path) -> None:
    """Renames a finished file of the same folder, after flushing it to the disk; a file at `target` is replaced."""
    handle = os.open(source, os.O_RDWR | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0))
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    os.replace(source, target)
    _flush_folder(target.parent)


def _unwritable(path: Path | str, error: Exception) -> StorageError:
    return StorageError(
        f"saving results needs a writable folder with space; got {getattr(error, 'strerror', None) or error} for "
        f"{path}. Free space there or choose another folder; finished parts are saved."
    )


def _real_target(path: Path) -> Path:
    """The path with symbolic links resolved; raises unless it is free or a regular file."""
    target = Path(os.path.realpath(path))
    try:
        mode = os.lstat(target).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return target
    if stat.S_ISLNK(mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    if stat.S_ISDIR(mode):
        raise StorageError(f"saving needs a file name; {path} is a folder. Add the name of a file in it.")
    if not stat.S_ISREG(mode):
        raise StorageError(
            f"saving needs a regular file or a new name; {path} is not a regular file. Choose another name."
        )
    return target


def _stem(target: Path) -> str:
    """The prefix of temporary files: the name of the target, or its digest if the name is too long."""
    name = os.fsencode(target.name)
    return target.name if len(name) <= 200 else hashlib.sha256(name).hexdigest()[:32]


def _create_temporary(target: Path) -> tuple[int, Path]:
    """(handle, path) of a new file in the folder of the target, locked until it is closed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    while True:
        temporary = target.with_name(f".{_stem(target)}.{secrets.token_hex(8)}.tmp")
        try:
            handle = os.open(temporary, flags, 0o666)
        except FileExistsError:
            continue
        try:
            if fcntl is None or (_try_lock(handle) and os.fstat(handle).st_nlink):
                with contextlib.suppress(OSError):  # no target yet, or a file system without permissions
                    os.chmod(temporary, stat.S_IMODE(os.stat(target).st_mode))
                return handle, temporary
        except BaseException:
            os.close(handle)
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        os.close(handle)  # another writer deleted it as stale before it was locked


def _write_all(handle: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest[: 2**30]) :]
    os.fsync(handle)


def _remove_stale(target: Path) -> None:
    """Deletes temporary files of this target whose writer has ended."""
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
    """Tries to lock an open file; True on success, and on file systems without locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EAGAIN)
    return True


@contextlib.contextmanager
def claim(path: Path | str) -> Iterator[None]:
    """Locks `path`, a file or a folder, for this run; raises `StorageError` if another run has locked it.

    The lock is a file `.NAME.lock` in the same folder, which is deleted afterwards. The operating system releases it
    when the process ends, also when it is killed. Threads of one process exclude each other too. On Windows, and on
    file systems without locks, nothing is locked.
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
        handle = _acquire(lock)
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
                fcntl.flock(handle, fcntl.LOCK_UN)  # a forked child may have the file open
            os.close(handle)
        for folder in made:
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()


def _acquire(lock: Path) -> int | None:
    """The handle of the lock file, with the process id written to it; None if another process or thread holds it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        handle = os.open(lock, flags, 0o666)
        try:
            if not _try_lock(handle):
                os.close(handle)
                return None
            locked = os.fstat(handle)
            try:
                is_current = os.path.samestat(locked, os.lstat(lock))
            except FileNotFoundError:
                is_current = False
            if is_current:
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
        os.close(handle)  # deleted by its holder after it was opened here


def _holder(lock: Path) -> str:
    try:
        return f"process {int(lock.read_bytes()[:20])}"
    except (OSError, ValueError):
        return "another process"


def claiming(name: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """A decorator that holds a `claim` on the keyword argument `name`, if it is not None, during the call."""

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
    """Whether this process has rank 0 in a distributed run; only that one writes."""
    return all(os.environ.get(rank, "0") == "0" for rank in ("RANK", "NODE_RANK", "LOCAL_RANK"))


def _flush_folder(folder: Path) -> None:
    """Flushes a rename to the disk, where the file system can flush folders."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], *, kind: str, format: int, document: Mapping[str, Any]
) -> None:
    """Writes tensors and a document as one sealed file; equal content gives equal bytes."""
    whole = {**document, "kind": kind, "format": format, "onlynorm": version(), "sha256": _BLANK.decode()}
    dense = {name: tensor.contiguous() for name, tensor in tensors.items()}  # e.g. channels_last or transposed
    write_atomically(path, seal(save(dense, metadata={_KEY: canonical(whole)})))


def seal(data: bytes) -> bytes:
    """The bytes of a tensor file with its checksum filled in."""
    place = data.index(_SEAL) + len(_SEAL)
    blank = bytearray(data)
    blank[place : place + len(_BLANK)] = _BLANK
    blank[place : place + len(_BLANK)] = hashlib.sha256(blank).hexdigest().encode()
    return bytes(blank)


def open_file(path: Path | str) -> BinaryIO:
    """A regular file, open for reading; raises OSError for other files, such as pipes."""
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    # Otherwise opening a pipe waits for a writer, and a terminal may become the controlling one.
    flags |= getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
    handle = os.open(path, flags)
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_file(path: Path, *, what: str, limit: int | None = None) -> bytes:
    """The bytes of a regular file of at most `limit` bytes; `what` names its content in errors.

    Data appended by another process during the call is not read.
    """
    with _reading(path, what) as file:
        size = os.fstat(file.fileno()).st_size
        if limit is not None and size > limit:
            raise FormatError(f"{what} needs at most {limit:,} bytes; {path.name} has {size:,}. Pass another file.")
        return file.read(size)


@contextlib.contextmanager
def _reading(path: Path, what: str) -> Iterator[BinaryIO]:
    """A regular file, open for reading; system errors are raised as errors of this library."""
    try:
        with open_file(path) as file:
            yield file
    except (MemoryError, OverflowError) as error:
        raise MemoryLimitError(f"{what} needs to be read at once; {path.name} does not fit into memory.") from error
    except FormatError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = getattr(error, "strerror", None) or error
        raise StorageError(f"{what} needs a readable file; got {reason} for {path}. Check the path.") from error


def parse_json(data: bytes | str) -> Any:
    """The value of a JSON document; raises ValueError if it is invalid or nested too deeply."""

    def reject(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a JSON number")

    try:
        value = json.loads(data, parse_constant=reject)
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
    """An instance of a dataclass from a dict of a file; raises ValueError for missing fields or wrong types.

    Fields with a default may be missing. Lists are converted to tuples, and integers to floats.
    """
    hints = typing.get_type_hints(kind)
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    if not isinstance(written, dict):
        raise ValueError(f"{kind.__name__} needs a dict of fields, not {type(written).__name__}")
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
    """The value converted to this type (integers to floats, lists to tuples); raises ValueError for other types."""
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


def read_tensors(
    path: Path, *, kind: str | tuple[str, ...], format: int, cure: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(document, tensors) of a sealed file; raises `FormatError` if it is damaged, newer or of another kind.

    If several kinds are given, the first is the current one; `document["kind"]` is that of the file.
    """
    kinds = (kind,) if isinstance(kind, str) else kind
    kind = kinds[0]
    data = read_file(path, what=f"the {kind}")
    header = _open_seal(data, path.name, kind, cure)
    try:
        document = parse_json(parse_json(header)["__metadata__"][_KEY])
        written, own = document["format"], document["kind"]
        if type(written) is not int or written < 1:
            raise TypeError("a format is a positive integer")
        if written > format:
            raise FormatError(f"the {kind} needs format {format} or older; {path.name} has {written}. Update onlynorm.")
        if own not in kinds:
            raise FormatError(f"expected a file of kind {kind!r}; {path.name} is of kind {own!r}. Pass another file.")
        restored: dict[str, Any] = from_plain(document)
        return restored, load(data)
    except FormatError:
        raise
    except MemoryError as error:
        raise MemoryLimitError(f"the {kind} needs to be read at once; {path.name} does not fit into memory.") from error
    except Exception as error:  # a forged header may raise any error in the parsers
        raise FormatError(f"the {kind} needs a header written by onlynorm; {path.name} has another. {cure}") from error


def read_kind(path: Path, *, known: Collection[str], cure: str) -> str:
    """The kind in the header of a sealed tensor file.

    The checksum is left to the reader of a known kind. For an unknown kind it is checked here, so that a damaged file
    is not reported as one of another kind.
    """
    with _reading(path, "load") as file:
        start = file.read(8)
        size = int.from_bytes(start, "little")
        if size > min(MAX_HEADER, os.fstat(file.fileno()).st_size - len(start)) or len(start) < 8:
            raise _invalid(path.name, "load", "is not one, or it is truncated", cure)
        header = file.read(size)
    if _SEAL not in header:
        raise _invalid(path.name, "load", "has no checksum of onlynorm", cure)
    try:
        kind = parse_json(parse_json(header)["__metadata__"][_KEY])["kind"]
        if isinstance(kind, str) and kind in known:
            return kind
    except Exception:  # a forged header may raise any error in the parsers
        kind = None
    _open_seal(read_file(path, what="load"), path.name, "file", cure)
    if isinstance(kind, str):
        return kind
    raise FormatError(f"load needs a header written by onlynorm; {path.name} has another. {cure}")


def _open_seal(data: bytes, name: str, kind: str, cure: str) -> bytes:
    """The header of the file; raises FormatError unless the checksum matches."""
    end = 8 + int.from_bytes(data[:8], "little")
    if len(data) < 8 or end > len(data):
        raise _invalid(name, f"the {kind}", "is not one, or it is truncated", cure)
    header = data[8:end]
    if _SEAL not in header:
        raise _invalid(name, f"the {kind}", "has no checksum of onlynorm", cure)
    place = 8 + header.index(_SEAL) + len(_SEAL)
    seal = hashlib.sha256(data[:place])
    seal.update(_BLANK)
    seal.update(memoryview(data)[place + len(_BLANK) :])
    if data[place : place + len(_BLANK)] != seal.hexdigest().encode():
        raise _invalid(name, f"the {kind}", "does not match its checksum: it was altered or truncated", cure)
    return header


def _invalid(name: str, what: str, why: str, cure: str) -> FormatError:
    return FormatError(f"{what} needs a safetensors file written by onlynorm; {name} {why}. {cure}")


__all__ = ["digest", "from_plain", "read_sealed", "seal_json", "to_plain", "write_atomically", "write_sealed"]
FORMAT = 1


def write_sealed(path: Path, body: Mapping[str, Any], *, kind: str) -> None:
    """Writes `body` as a sealed JSON file of this `kind`."""
    write_atomically(path, seal_json(to_plain(body), kind=kind))


def seal_json(plain: Mapping[str, Any], *, kind: str) -> bytes:
    """The bytes of a sealed JSON file; `plain` is its body in JSON types."""
    sealed = {"kind": kind, "format": FORMAT, "checksum": digest(plain), "body": plain}
    return (json.dumps(sealed, allow_nan=False) + "\n").encode()


def read_sealed(path: Path, *, kind: str) -> dict[str, Any]:
    """The body of a sealed JSON file; raises `FormatError` if it is damaged, altered, newer or of another kind."""
    cure = "Delete the file and run `reproduce` again."
    try:
        data = read_file(path, what=f"the {kind}")
        sealed = parse_json(data)
    except OnlynormError:
        raise
    except ValueError as error:
        raise FormatError(f"the {kind} needs valid JSON; {path.name} is damaged or truncated. {cure}") from error
    if not isinstance(sealed, dict) or sealed.get("kind") != kind or not isinstance(sealed.get("body"), dict):
        raise FormatError(f"expected a file of kind {kind!r}; {path.name} is not. {cure}")
    if sealed.get("format") != FORMAT:
        raise FormatError(
            f"the {kind} needs format {FORMAT}; {path.name} has {sealed.get('format')!r}. "
            "Update onlynorm, or run `reproduce` again."
        )
    body = sealed["body"]
    try:
        intact = data == seal_json(body, kind=kind)  # including the checksum
        restored = from_plain(body)
    except (ValueError, TypeError, OverflowError):
        intact = False
    if not intact or not isinstance(restored, dict):
        raise FormatError(f"the {kind} needs a matching checksum; {path.name} was altered or damaged. {cure}")
    return restored


def tensors_digest(tensors: Mapping[str, object]) -> str:
    """SHA-256 of the names, dtypes, shapes and bytes of tensors."""
    total = hashlib.sha256()
    for name, value in tensors.items():
        total.update(f"{name!r}: {getattr(value, 'dtype', value)} {tuple(getattr(value, 'shape', ()))}\n".encode())
        if isinstance(value, Tensor):
            total.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
