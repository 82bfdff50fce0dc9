"""Downloads a file over HTTP: resumes partial downloads, tries several addresses, and checks size and checksum.

The bytes go to `NAME.part`, which is kept if the download ends early: the next call asks for the rest. The file gets
its name only after its checksum was verified.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import os
import re
import shutil
import socket
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import urlsplit

from onlynorm.data.downloads.sources import MAX_BYTES, RemoteFile
from onlynorm.errors import MissingDataError, StorageError
from onlynorm.storage import move_atomically, open_file, version
from onlynorm.validate import Progress

TIMEOUT = 30.0
"""Seconds without data after which a connection is closed."""
PAUSE = 1.0
"""Seconds before the first repetition; doubled for each further one."""
MAX_TRIES = 5
"""Maximum number of requests to one address that bring less than `MIN_GAIN` new bytes."""
MIN_GAIN = 2**20
_CHUNK = 2**18
_OK, _PARTIAL, _BAD_RANGE = 200, 206, 416
_BUSY = (408, 429, 500, 502, 503, 504)
_RANGE = re.compile(r"bytes\s+(\d{1,15})-(\d{1,15})/(\d{1,15}|\*)")


class _RefusedError(Exception):
    """An address does not have the file."""


class _BrokenError(Exception):
    """A transfer ended early, and can be resumed."""


class _StartOverError(Exception):
    """The partial file cannot be resumed."""


def download(
    file: RemoteFile,
    folder: Path,
    *,
    timeout: float = TIMEOUT,
    pause: float = PAUSE,
    progress: Progress | None = None,
) -> Path:
    """Downloads a file from the first of its addresses that has it; returns its path in the folder.

    Only one process may do this at a time: the caller holds a `claim`. Raises `MissingDataError` if no address has the
    file, and `StorageError` if the folder cannot be written to.
    """
    part, failed = folder / f"{file.name}.part", list[str]()
    _need_space(file, part)
    for address in file.addresses:
        n_tries = 1 + (_size(part) > 0)  # if the start of the file came from elsewhere, once more without it
        for _ in range(n_tries):
            try:
                _transfer(address, part, file, timeout=timeout, pause=pause, progress=progress)
            except _RefusedError as error:
                failed.append(f"{address}: {error}")
                break
            if is_right(part, file):
                with writing(part):
                    move_atomically(part, folder / file.name)
                return folder / file.name
            with writing(part):
                part.unlink()
            failed.append(f"{address}: the checksum of what it sent is wrong")
    here = f" {_size(part):,} bytes are in {part}: a new try resumes there." if _size(part) else ""
    raise MissingDataError(
        f"{file.name} needs one of {len(file.addresses)} addresses to have it; got {'; '.join(failed)}.{here} Try "
        "again later, or download the file by other means and copy it with `onlynorm data get NAME --from FOLDER`."
    )


def is_right(path: Path, file: RemoteFile) -> bool:
    """Whether a file has the checksum of the remote file, or the same content compressed differently."""
    if _size(path) == 0:
        return False
    with open_file(path) as stored:
        if _sha256(stored) == file.sha256:
            return True
        if file.unpacked is None:
            return False
        stored.seek(0)
        return _sha256_unpacked(stored, file.n_unpacked) == file.unpacked


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file."""
    with open_file(path) as stored:
        return _sha256(stored)


def _sha256(stored: IO[bytes]) -> str:
    made = hashlib.sha256()
    while chunk := stored.read(_CHUNK):
        made.update(chunk)
    return made.hexdigest()


def _sha256_unpacked(stored: IO[bytes], n_bytes: int) -> str:
    """The SHA-256 of the content of a gzip file with one member; "" if it is damaged or has more than `n_bytes`."""
    made, inflater, n_read = hashlib.sha256(), zlib.decompressobj(16 + zlib.MAX_WBITS), 0
    try:
        while (chunk := inflater.unconsumed_tail or stored.read(_CHUNK)) and not inflater.eof:
            content = inflater.decompress(chunk, _CHUNK)
            n_read += len(content)
            if n_read > n_bytes:
                return ""
            made.update(content)
    except zlib.error:
        return ""
    return made.hexdigest() if inflater.eof and not inflater.unused_data else ""


# ------------------------------------------------------------------------------- one address


def _transfer(
    address: str, part: Path, file: RemoteFile, *, timeout: float, pause: float, progress: Progress | None
) -> None:
    """Requests the rest of the file until it is complete."""
    if urlsplit(address).scheme not in ("http", "https"):
        raise _RefusedError("not an http or https address")
    validator, furthest, n_failed, n_restarts = "", _size(part), 0, 0
    while True:
        have = _size(part)
        if file.n_bytes is not None and have == file.n_bytes:
            return
        if have > (file.n_bytes or MAX_BYTES):
            with writing(part):
                part.unlink()
            have = 0
        try:
            with closing(_request(address, have, validator, timeout)) as answer:
                validator = _validator(answer)
                _receive(answer, part, have, file, progress)
            return
        except _StartOverError as error:
            n_restarts += 1
            if have and is_right(part, file):  # a server that was asked for what follows the last byte
                return
            with writing(part):
                part.unlink(missing_ok=True)
            validator = ""
            if n_restarts > 2:
                raise _RefusedError(str(error)) from error
        except _BrokenError as error:
            reached = _size(part)
            n_failed = 1 if reached >= furthest + MIN_GAIN else n_failed + 1
            furthest = max(furthest, reached)
            if n_failed >= MAX_TRIES:
                raise _RefusedError(f"{error} (tried {n_failed} times)") from error
            time.sleep(pause * 2 ** (n_failed - 1))


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Redirects to http and https only: there are no handlers of other schemes in this module."""

    max_redirections = 5


def _opener() -> urllib.request.OpenerDirector:
    made = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler, urllib.request.HTTPHandler, urllib.request.HTTPSHandler, _Redirects,
        urllib.request.HTTPDefaultErrorHandler, urllib.request.HTTPErrorProcessor,
    ):  # fmt: skip
        made.add_handler(handler())
    return made


def _request(address: str, have: int, validator: str, timeout: float) -> http.client.HTTPResponse:
    """The answer to a request for everything after the first `have` bytes: 200, 206 or 416."""
    headers = {"User-Agent": f"onlynorm/{version()}", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
        headers |= {"If-Range": validator} if validator else {}
    try:
        found: Any = _opener().open(urllib.request.Request(address, headers=headers), timeout=timeout)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == _BAD_RANGE and have:
            raise _StartOverError("it refuses to resume") from None
        words = f"{error.code} {error.reason!s:.80}"
        raise (_BrokenError if error.code in _BUSY else _RefusedError)(words) from None
    except urllib.error.URLError as error:
        raise _RefusedError(f"no connection: {error.reason!s:.200}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _BrokenError(_reason(error)) from error
    if found is None or found.status not in (_OK, _PARTIAL):
        raise _RefusedError("an answer that is no file")
    return cast("http.client.HTTPResponse", found)


def _validator(answer: http.client.HTTPResponse) -> str:
    """The strong ETag of an answer, else its date: the server resumes only if the file has not changed since."""
    tag = answer.headers.get("ETag", "")
    return tag if tag.startswith('"') else answer.headers.get("Last-Modified", "")


def _receive(
    answer: http.client.HTTPResponse, part: Path, have: int, file: RemoteFile, progress: Progress | None
) -> None:
    """Writes the body of an answer to the end of the partial file, or to a new one if the server sends everything."""
    start, total = (have, _total(answer, have)) if answer.status == _PARTIAL else (0, answer.length)
    if file.n_bytes is not None and total not in (None, file.n_bytes):
        raise _RefusedError(f"its file has {total:,} bytes instead of {file.n_bytes:,}")
    limit = file.n_bytes or MAX_BYTES
    if (total or 0) > limit:
        raise _RefusedError(f"its file has {total:,} bytes, more than {limit:,}")
    n_expected = file.n_bytes if total is None else total
    flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if start else os.O_TRUNC)
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    with writing(part):
        handle = os.open(part, flags, 0o666)
    try:
        done = start
        while True:
            if progress is not None:
                progress(done, n_expected or 0, file.name)
            try:
                chunk = answer.read1(_CHUNK)
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise _BrokenError(_reason(error)) from error
            done += len(chunk)
            if done > limit:
                raise _RefusedError(f"it sends more than {limit:,} bytes")
            if not chunk:
                break
            with writing(part):
                rest = memoryview(chunk)
                while rest:
                    rest = rest[os.write(handle, rest) :]
    finally:
        os.close(handle)
    if n_expected is not None and done < n_expected:
        raise _BrokenError(f"it ended after {done:,} of {n_expected:,} bytes")


def _total(answer: http.client.HTTPResponse, have: int) -> int | None:
    """The size of the whole file according to a partial answer, None if unknown; raises unless it starts at `have`."""
    found = _RANGE.fullmatch(answer.headers.get("Content-Range", "").strip())
    if found is None:
        raise _StartOverError("a partial answer without a valid range")
    start, end = int(found[1]), int(found[2])
    total = None if found[3] == "*" else int(found[3])
    is_whole = total is None or end < total
    if start != have or end < start or not is_whole or answer.length not in (None, end - start + 1):
        raise _StartOverError(f"a partial answer with another range than asked for ({found[0]:.60})")
    return total


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError | socket.timeout):
        return "no data within the timeout"
    return f"the connection broke off ({type(error).__name__})"


# ------------------------------------------------------------------------------- the disk


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _need_space(file: RemoteFile, part: Path) -> None:
    missing = (file.n_bytes or 0) - _size(part)
    with writing(part):
        part.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(part.parent).free < missing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises system errors as `StorageError`."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"the data folder needs to be writable, with enough free space; got {error.strerror or error} for {path}. "
            "Free space there, or set ONLYNORM_DATA to another folder. What was downloaded is resumed."
        ) from error
