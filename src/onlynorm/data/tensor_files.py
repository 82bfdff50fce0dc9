"""Read arrays and tensors from .npy, .npz, .safetensors, PyTorch and gzip files, without executing code.

Files are not trusted. Declared sizes are compared with the length of the file before memory is allocated, and
compressed content may expand to `INFLATED_BYTES`, or to `INFLATED_RATIO` times the size of the file if that is more.
Invalid files
raise `FormatError`; content that does not fit into memory raises `MemoryLimitError`.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import math
import mmap
import os
import struct
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from onlynorm.data.plain_pickle import OPERATIONS, need_plain
from onlynorm.errors import FormatError, MemoryLimitError, MissingDataError, OnlynormError
from onlynorm.storage import open_file

INFLATED_BYTES = 2**28
"""Size to which compressed content may always expand: 256 MiB."""
INFLATED_RATIO = 20
"""Maximum compression ratio of larger content; images and weights have 1 to 5."""
_CHUNK = 2**20
_TORCH_OPERATIONS = (OPERATIONS - {"STACK_GLOBAL"}) | {"BINPERSID"}
_STORAGES = ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool", "ComplexFloat",
             "ComplexDouble", "Untyped")  # fmt: skip
_TORCH_NAMES = frozenset((
    "collections OrderedDict", "torch Size", "torch device", "_codecs encode",
    *(f"torch._utils {name}" for name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter",
                                          "_rebuild_parameter_with_state")),
    *(f"{room} {name}Storage" for name in _STORAGES for room in ("torch", "torch.storage")),
    *(f"torch {name}" for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)),
))  # fmt: skip


def inflated_limit(n_bytes: int) -> int:
    """Maximum size of the content of a compressed file of `n_bytes`."""
    return max(INFLATED_BYTES, INFLATED_RATIO * n_bytes)


def read_npy(path: Path) -> np.ndarray:
    """The array in a .npy file: real or boolean, up to 64 bits, in native byte order."""
    cure = "Save it with numpy.save, without objects."
    with _reading(path, "to be a complete .npy file of numeric values", cure), open_file(path) as file:
        return _array(file, os.fstat(file.fileno()).st_size)


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """The arrays in a .npz file by name, as in `read_npy`."""
    with (
        _reading(path, "to be a complete .npz file of numeric values", "Save it with numpy.savez, without objects."),
        open_file(path) as file,
        zipfile.ZipFile(file) as archive,
    ):
        _need_allowed_size(archive, path)
        found: dict[str, np.ndarray] = {}
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if name in found:
                raise ValueError(f"two arrays named {name!r:.60}")
            data = archive.read(member)
            found[name] = _array(io.BytesIO(data), len(data))
        return found


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors in a .safetensors file by name."""
    with _reading(path, "to be a complete safetensors file", "Save or copy it again."):
        open_file(path).close()
        return load_file(path)


def read_torch(path: Path) -> Any:
    """The content of a PyTorch file: tensors, numbers and strings in dicts and lists, read with `weights_only=True`."""
    cure = "Save network.state_dict(): pickled networks are not read, because they could run code."
    with _reading(path, "to be a complete file of tensors", cure), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with open_file(path) as file:
            if file.read(4) == b"PK\x03\x04":
                _need_plain_archive(path)
            else:  # five pickles, then the data
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:  # never reads beyond the end
                    for _ in range(5):
                        need_plain(cast("IO[bytes]", whole), _TORCH_OPERATIONS, _TORCH_NAMES)
        return torch.load(path, map_location="cpu", weights_only=True)


def inflate(path: Path, n_bytes: int | None = None) -> bytes:
    """The content of a gzip file, or its first `n_bytes`."""
    with _reading(path, "to be a complete gzip file", "Copy the file again."):
        limit = inflated_limit(path.stat().st_size)
        remaining = limit + 1 if n_bytes is None else n_bytes
        if n_bytes is not None and n_bytes > limit:
            raise _too_large(path, n_bytes, limit)
        parts: list[bytes] = []
        with open_file(path) as raw, gzip.open(raw) as file:
            while remaining and (part := file.read(min(remaining, _CHUNK))):
                parts.append(part)
                remaining -= len(part)
        if n_bytes is None and not remaining:
            raise _too_large(path, limit + 1, limit)
        return b"".join(parts)


@contextlib.contextmanager
def _reading(path: Path, what: str, cure: str) -> Iterator[None]:
    """Converts exceptions of file readers to onlynorm errors."""
    try:
        yield
    except OnlynormError:
        raise
    except FileNotFoundError as error:
        raise MissingDataError(f"{path.name} needs to be a file; got none at {path}. Check the path.") from error
    except MemoryError as error:
        raise MemoryLimitError(f"{path.name} needs more memory than available. Save a part of it.") from error
    except Exception as error:
        first = (str(error).splitlines() or ["no more"])[0][:300]
        raise FormatError(f"{path.name} needs {what}; got {type(error).__name__}: {first}. {cure}") from error


def _too_large(path: Path, n_bytes: int, limit: int) -> FormatError:
    return FormatError(
        f"{path.name} needs to expand to at most {limit:,} bytes (the larger of {INFLATED_BYTES:,} and "
        f"{INFLATED_RATIO} times its size); got {n_bytes:,}. Save it without compression."
    )


def _need_allowed_size(archive: zipfile.ZipFile, path: Path) -> None:
    """Raises unless the members are stored or deflated, with a total size within the limit."""
    members = archive.infolist()
    for member in members:
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or member.flag_bits & 0x1:
            raise ValueError(f"a member {member.filename!r:.60} with another compression than deflate")
    total, limit = sum(member.file_size for member in members), inflated_limit(os.path.getsize(path))
    if total > limit:
        raise _too_large(path, total, limit)


def _need_plain_archive(path: Path) -> None:
    """Raises unless a PyTorch file in zip format is within the size limit and has a plain pickle."""
    with open_file(path) as file, zipfile.ZipFile(file) as archive:
        _need_one_directory(file)
        _need_allowed_size(archive, path)
        # PyTorch's reader ignores case and does not truncate names at null bytes, unlike Python's.
        names = {member: member.orig_filename.lower() for member in archive.infolist()}
        pickles = [member for member, name in names.items() if name.endswith("data.pkl")]
        if len(pickles) != 1 or any("\0" in name for name in names.values()):
            raise ValueError(f"{len(pickles)} members named data.pkl, or names with null bytes")
        need_plain(io.BytesIO(archive.read(pickles[0])), _TORCH_OPERATIONS, _TORCH_NAMES)


def _need_one_directory(file: IO[bytes]) -> None:
    """Raises unless the location of the directory of a zip file is unambiguous.

    Python reads the directory directly before the end record, PyTorch the one at the offset in that record. If they
    differed, the members checked here would not be those that PyTorch reads.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 98))
    tail = file.read().rjust(98, b"\0")
    signature, n_bytes, offset, n_comment = struct.unpack("<4s8xIIH", tail[-22:])
    start = size - 22
    is_one = signature == b"PK\5\6" and n_comment == 0
    if tail[-42:-38] == b"PK\6\7":  # 64-bit sizes, which PyTorch always writes
        start = size - 98
        place = int.from_bytes(tail[-34:-26], "little")
        long_bytes, long_offset = struct.unpack("<QQ", tail[40:56])
        is_one &= tail[:4] == b"PK\6\6" and place == start
        is_one &= n_bytes in (2**32 - 1, long_bytes) and offset in (2**32 - 1, long_offset)
        n_bytes, offset = long_bytes, long_offset
    if not is_one or offset + n_bytes != start:
        raise ValueError("a zip file whose directory is not directly before its end record")


def _array(file: IO[bytes], size: int) -> np.ndarray:
    """The array of a .npy file of this size, which the data must fill exactly."""
    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"format {version}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about headers written by Python 2
        shape, is_fortran, dtype = readers[version](file)
    if dtype.kind not in "fiub" or dtype.itemsize > 8:
        raise ValueError(f"{dtype} instead of real values")
    if any(type(n) is not int or n < 0 for n in shape) or math.prod(shape) * dtype.itemsize != size - file.tell():
        raise ValueError(f"{size - file.tell()} bytes for {dtype} of shape {shape!s:.80}")
    count = math.prod(shape)
    if isinstance(file, io.BytesIO):
        flat = np.frombuffer(file.getbuffer(), dtype, offset=file.tell()) if count else np.empty(0, dtype)
    else:
        flat = np.fromfile(file, dtype, count)
    if flat.size != count:
        raise EOFError(f"{flat.size} of {count} values")
    array = flat.reshape(shape, order="F" if is_fortran else "C")
    return array.astype(dtype.newbyteorder("="), copy=isinstance(file, io.BytesIO))
