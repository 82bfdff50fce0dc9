"""`get_data` and `list_data`: fill the data folder, and show what is in it."""

from __future__ import annotations

import errno
import hashlib
import os
import posixpath
import shutil
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from onlynorm.data.downloads.download import PAUSE, TIMEOUT, download, is_right, sha256_of, writing
from onlynorm.data.downloads.sources import SOURCES, RemoteFile, Source
from onlynorm.data.split import data_folder
from onlynorm.display import Result
from onlynorm.errors import FormatError, MissingDataError, UnknownNameError
from onlynorm.storage import claim, move_atomically, open_file
from onlynorm.validate import Progress, need_number, need_path, need_progress, need_text

_CHUNK = 2**20
_SLACK = 2**24
"""Bytes of an archive beyond its members: headers, read-me files."""
CHECKSUMS = "SHA256SUMS"
"""The file with the checksums of what was unpacked, in the format of the command sha256sum."""


@dataclass(frozen=True)
class DataState(Result):
    """Whether a data set or a file of weights is in the data folder.

    `state` is "present", "incomplete" (files are missing, or have another size) or "missing". `n_bytes` is its size in
    the data folder, `n_download` the number of bytes to download, 0 if unknown.
    """

    name: str
    title: str
    state: str
    path: Path
    n_bytes: int
    n_download: int

    @property
    def is_present(self) -> bool:
        """Whether it can be used."""
        return self.state == "present"

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON types."""
        return {**super().as_dict(), "path": str(self.path)}

    def __str__(self) -> str:
        return f"{self.name}: {self.state}, {self.path}"


def list_data() -> tuple[DataState, ...]:
    """The state of everything that `get_data` can get. Sizes of files are compared, checksums are not.

    Examples:
        >>> from onlynorm.data import list_data
        >>> [state.name for state in list_data()]
        ['cifar10', 'cifar100', 'fashion_mnist', 'resnet20']
    """
    return tuple(_state(name, source) for name, source in SOURCES.items())


def get_data(
    name: str,
    *,
    source: str | os.PathLike[str] | None = None,
    timeout: float = TIMEOUT,
    progress: Progress | None = None,
) -> DataState:
    """Downloads a data set, or copies it from the folder `source`, into the data folder; nothing if it is there.

    Names are "cifar10", "cifar100", "fashion_mnist" and "resnet20", the weights of the built-in network. Checksums are
    verified before a file gets its name, and again by every later call, which replaces what is damaged. An interrupted
    download is resumed by the next call. `timeout` is the number of seconds without data after which a connection is
    closed.

    Examples:
        >>> import onlynorm as on
        >>> from onlynorm.data import get_data
        >>> try:
        ...     get_data("resnet20", source="downloads")  # a folder with the downloaded file
        ... except on.errors.OnlynormError as error:
        ...     print(error)
        copying data needs a folder; got none at downloads. Check the path.
    """
    name = need_text("get_data", name, cure=f"Pass one of {', '.join(SOURCES)}.").replace("-", "_")
    timeout = need_number("timeout", timeout, low=0.0, high=86400.0, open_low=True, cure="Try 30 seconds.")
    progress = need_progress(progress)
    if name not in SOURCES:
        raise UnknownNameError("data to get", name, SOURCES)
    wanted = SOURCES[name]
    folder = None if source is None else _need_folder(need_path("source", source))
    if _is_complete(name, wanted):
        return _state(name, wanted)
    with writing(data_folder()):
        data_folder().mkdir(parents=True, exist_ok=True)
        if not os.access(data_folder(), os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    with claim(data_folder() / name):
        if wanted.members:
            _get_archive(wanted, folder, timeout=timeout, progress=progress)
        else:
            _get_files(wanted, folder, timeout=timeout, progress=progress)
    return _state(name, wanted)


def _need_folder(folder: Path) -> Path:
    if not folder.is_dir():
        raise MissingDataError(f"copying data needs a folder; got none at {folder}. Check the path.")
    return folder


def _state(name: str, source: Source) -> DataState:
    root = data_folder()
    folder = root / source.folder
    sizes: dict[str, int | None] = dict(source.members) or {file.name: file.n_bytes for file in source.files}
    found = {file: _size(folder / file) for file in sizes}
    n_bytes = sum(size for size in found.values() if size)
    # Copies that are compressed differently have another size.
    fits = [size is not None and (not source.members or size == sizes[file]) for file, size in found.items()]
    path = folder / next(iter(sizes)) if len(sizes) == 1 else folder
    other = _other(source)
    if n_bytes or other is None:
        state = "present" if all(fits) else "incomplete" if n_bytes else "missing"
        return DataState(name, source.title, state, path, n_bytes, source.n_download)
    files = [other] if other.is_file() else [file for file in other.rglob("*") if file.is_file()]
    return DataState(name, source.title, "present", other, sum(_size(file) or 0 for file in files), source.n_download)


def _is_complete(name: str, source: Source) -> bool:
    """Whether nothing is left to do; checksums that are known are verified."""
    state = _state(name, source)
    if not state.is_present or state.path == _other(source):
        return state.is_present
    if source.members:
        return _is_undamaged(data_folder() / source.folder, source)
    return all(is_right(data_folder() / source.folder / file.name, file) for file in source.files)


def _other(source: Source) -> Path | None:
    """What is used if nothing was downloaded, such as another version of the data set."""
    paths = (data_folder() / other for other in source.others)
    return next((path for path in paths if path.exists()), None)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None


# ------------------------------------------------------------------------------- files


def _get_files(source: Source, given: Path | None, *, timeout: float, progress: Progress | None) -> None:
    folder = data_folder() / source.folder
    for file in source.files:
        if _size(folder / file.name) and is_right(folder / file.name, file):
            continue
        if given is None:
            download(file, folder, timeout=timeout, pause=PAUSE, progress=progress)
        else:
            _copy(_find(given, source, file), folder, file, progress)


def _find(given: Path, source: Source, file: RemoteFile) -> Path:
    """The file in the given folder, or in the subfolder that it has in the data folder."""
    places = (given / file.name, given / source.folder / file.name)
    for path in places:
        if path.is_file():
            return path
    raise MissingDataError(
        f"copying needs {file.name} in {given}, or in {source.folder} below it; got none. Copy the file as its authors "
        "distribute it."
    )


def _copy(path: Path, folder: Path, file: RemoteFile, progress: Progress | None) -> None:
    """Copies a file into the data folder; it gets its name only if its checksum is right."""
    with _temporary(folder / f"{file.name}.copy") as copy:
        _write(path, copy, _size(path) or 0, file.name, progress)
        if not is_right(copy, file):
            raise _wrong_content(path, file)
        with writing(folder):
            move_atomically(copy, folder / file.name)
            (folder / f"{file.name}.part").unlink(missing_ok=True)


def _write(path: Path, copy: Path, n_bytes: int, name: str, progress: Progress | None) -> None:
    with writing(copy):
        copy.parent.mkdir(parents=True, exist_ok=True)
    try:
        opened = open_file(path)
    except OSError as error:
        raise MissingDataError(
            f"copying needs readable files; got {error.strerror or error} for {path}. Check the path."
        ) from error
    with opened as stored, writing(copy), copy.open("wb") as made:
        _pour(stored, made, n_bytes, name, progress)


def _pour(stored: IO[bytes], made: IO[bytes], n_bytes: int, name: str, progress: Progress | None) -> None:
    """Copies exactly `n_bytes`, or all that there are if there are fewer."""
    done = 0
    while done < n_bytes and (chunk := stored.read(min(_CHUNK, n_bytes - done))):
        made.write(chunk)
        done += len(chunk)
        if progress is not None:
            progress(done, n_bytes, name)


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """A path for a temporary file or folder, which is deleted first and last."""
    _remove(path)
    try:
        yield path
    finally:
        with suppress(OSError):
            _remove(path)


def _remove(path: Path) -> None:
    with writing(path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


# ------------------------------------------------------------------------------- archives


def _get_archive(source: Source, given: Path | None, *, timeout: float, progress: Progress | None) -> None:
    """Unpacks the members of the archive into a temporary folder, then renames it."""
    root, (file,) = data_folder(), source.files
    archive = root / file.name
    with _temporary(root / f"{source.folder}.unpacking") as unpacked:
        if given is not None and (members := _find_members(given, source)):
            for member, path in members.items():
                _write(path, unpacked / member, source.members[member], member, progress)
            sums = {member: sha256_of(path) for member, path in members.items()}
        else:
            if given is not None:
                archive = _find(given, source, file)
                if not is_right(archive, file):
                    raise _wrong_content(archive, file)
            elif not is_right(archive, file):
                download(file, root, timeout=timeout, pause=PAUSE, progress=progress)
            sums = _unpack(archive, unpacked, source, progress)
        _finish(unpacked, source, sums)
        folder = root / source.folder
        with writing(folder):
            if not folder.exists():
                os.rename(unpacked, folder)
            else:
                for member in (*source.members, CHECKSUMS):
                    move_atomically(unpacked / member, folder / member)
            for leftover in (root / file.name, root / f"{file.name}.part"):
                leftover.unlink(missing_ok=True)


def _finish(folder: Path, source: Source, sums: Mapping[str, str]) -> None:
    """Writes the checksums of the members, and compares them with what is on the disk."""
    with writing(folder):
        lines = "".join(f"{sums[member]}  {member}\n" for member in source.members)
        (folder / CHECKSUMS).write_text(lines, encoding="ascii")
    if not _is_undamaged(folder, source):
        raise FormatError(
            f"{source.folder} needs the content of its archive; got other content on the disk. Get it again, and check "
            "the disk."
        )


def _is_undamaged(folder: Path, source: Source) -> bool:
    """Whether the members have the sizes and, if they were stored, the checksums of the archive."""
    if any(_size(folder / member) != size for member, size in source.members.items()):
        return False
    if not (folder / CHECKSUMS).is_file():
        return True
    with open_file(folder / CHECKSUMS) as stored:
        lines = stored.read(2**16).decode("ascii", errors="replace").splitlines()
    sums = {name: checksum for checksum, _, name in (line.partition("  ") for line in lines)}
    return all(sums.get(member) == sha256_of(folder / member) for member in source.members)


def _wrong_content(path: Path, file: RemoteFile) -> FormatError:
    return FormatError(
        f"{file.name} needs to be the published file, with the SHA-256 {file.sha256[:16]}...; got other content in "
        f"{path}. Copy or download it again."
    )


def _find_members(given: Path, source: Source) -> dict[str, Path]:
    """The unpacked members in the given folder, or in its subfolder, if all are there and undamaged."""
    for folder in (given, given / source.folder):
        if _is_undamaged(folder, source):
            return {member: folder / member for member in source.members}
    return {}


class _Limited:
    """A gzip file that ends with an error after `n_bytes` of content."""

    def __init__(self, stored: IO[bytes], n_bytes: int) -> None:
        self._stored, self._left = stored, n_bytes
        self._inflater = zlib.decompressobj(16 + zlib.MAX_WBITS)

    def read(self, n_bytes: int) -> bytes:
        """The next bytes of the content, at most `n_bytes`; none at its end."""
        while not self._inflater.eof:
            chunk = self._inflater.unconsumed_tail or self._stored.read(_CHUNK)
            content = self._inflater.decompress(chunk, max(n_bytes, 1))
            self._left -= len(content)
            if self._left < 0:
                raise ValueError("more content than expected")
            if content:
                return content
            if not chunk:
                raise EOFError("a gzip file without an end")
        return b""


def _unpack(archive: Path, folder: Path, source: Source, progress: Progress | None) -> dict[str, str]:
    """Writes the expected members of a tar.gz file into a new folder, skips all others; returns their checksums."""
    total, done = sum(source.members.values()), 0
    sums: dict[str, str] = {}
    left = dict(source.members)
    with writing(folder):
        folder.mkdir(parents=True)
        stored = open_file(archive)
    with stored:
        content = cast("IO[bytes]", _Limited(stored, total + _SLACK))
        try:
            with tarfile.open(fileobj=content, mode="r|", errorlevel=2) as members:
                for member in members:
                    inside, _, name = posixpath.normpath(member.name).rpartition("/")
                    if inside != source.folder or name not in source.members:
                        continue
                    if name not in left or not member.isreg() or member.size != left.pop(name):
                        raise ValueError(f"{name} twice, as a link, or of {member.size:,} bytes")
                    data = members.extractfile(member)
                    assert data is not None, "a regular file has data"
                    checksum = hashlib.sha256()
                    with writing(folder / name), (folder / name).open("xb") as made:
                        while chunk := data.read(_CHUNK):
                            made.write(chunk)
                            checksum.update(chunk)
                            done += len(chunk)
                            if progress is not None:
                                progress(done, total, f"unpacking {archive.name}")
                    sums[name] = checksum.hexdigest()
            if left:
                raise ValueError(f"no {', '.join(left)}")
        except (tarfile.TarError, ValueError, EOFError, zlib.error) as error:
            raise FormatError(
                f"{archive.name} needs to be an archive of {len(source.members)} files in {source.folder}; got {error}."
                " Download it again."
            ) from error
    return sums
