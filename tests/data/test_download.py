"""Downloads from a real server on this machine that breaks off, lies about ranges and sends wrong bytes."""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from broken_disks import fill_disk, forbid_new_files
from serving import CONTENT, Answer, Server, partial, ranged, reply, serving, whole

from onlynorm.data import SOURCES, RemoteFile, Source, cifar10, data_folder, find_data, get_data, list_data, load_data
from onlynorm.data.downloads import get as getting
from onlynorm.data.downloads.download import MAX_TRIES, download, is_right
from onlynorm.data.downloads.get import CHECKSUMS
from onlynorm.errors import FormatError, MissingDataError, StorageError, UnknownNameError
from onlynorm.models import load_model

N = len(CONTENT)
HALF = N // 2
REAL = os.environ.get("ONLYNORM_DATA", "nowhere")


@pytest.fixture(autouse=True)
def _without_proxy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("ONLYNORM_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(getting, "PAUSE", 0.0)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "files"


def fetch(file: RemoteFile, folder: Path, **options: Any) -> bytes:
    """The bytes of the downloaded file; nothing else is left in the folder."""
    path = download(file, folder, pause=0.0, timeout=options.pop("timeout", 5.0), **options)
    assert [one.name for one in folder.iterdir()] == [path.name]
    return path.read_bytes()


def put_part(folder: Path, content: bytes) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "file.bin.part").write_bytes(content)


# ------------------------------------------------------------------------------- resuming


def test_a_file_is_downloaded_in_one_request_with_progress(server: Server, folder: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    assert fetch(server.file(ranged()), folder, progress=lambda *state: seen.append(state)) == CONTENT
    assert server.ranges == [""]
    assert seen[0] == (0, N, "file.bin")
    assert seen[-1] == (N, N, "file.bin")


def test_a_transfer_that_breaks_off_is_resumed_where_it_ended(server: Server, folder: Path) -> None:
    assert fetch(server.file(ranged(n_sent=HALF), ranged(n_sent=100), ranged()), folder) == CONTENT
    assert server.ranges == ["", f"bytes={HALF}-", f"bytes={HALF + 100}-"]


def test_a_part_of_an_earlier_run_is_resumed(server: Server, folder: Path) -> None:
    put_part(folder, CONTENT[:777])
    assert fetch(server.file(ranged()), folder) == CONTENT
    assert server.ranges == ["bytes=777-"]


def test_a_file_that_changed_on_the_server_is_downloaded_from_its_start(server: Server, folder: Path) -> None:
    old = bytes(N)
    file = server.file(ranged(old, n_sent=HALF, tag='"old"'), ranged(CONTENT, tag='"new"'))
    assert fetch(file, folder) == CONTENT
    assert [request.get("If-Range") for request in server.requests] == [None, '"old"']


def test_a_weak_tag_is_not_used_for_resuming(server: Server, folder: Path) -> None:
    cut = reply(200, CONTENT[:HALF], length=N, ETag='W/"1"', Last_Modified="Wed, 21 Oct 2015 07:28:00 GMT")
    assert fetch(server.file(cut, partial(f"bytes {HALF}-{N - 1}/{N}", CONTENT[HALF:])), folder) == CONTENT
    assert [one.get("If-Range") for one in server.requests] == [None, "Wed, 21 Oct 2015 07:28:00 GMT"]


def test_a_server_without_ranges_sends_everything_again(server: Server, folder: Path) -> None:
    put_part(folder, CONTENT[:HALF])
    assert fetch(server.file(whole()), folder) == CONTENT
    assert server.ranges == [f"bytes={HALF}-"]


def test_a_part_of_wrong_bytes_is_replaced(server: Server, folder: Path) -> None:
    put_part(folder, bytes(HALF))
    assert fetch(server.file(ranged()), folder) == CONTENT
    assert server.ranges == [f"bytes={HALF}-", ""]


def test_a_part_that_is_too_long_is_replaced(server: Server, folder: Path) -> None:
    put_part(folder, CONTENT + b"more")
    assert fetch(server.file(ranged()), folder) == CONTENT
    assert server.ranges == [""]


def test_a_complete_part_needs_no_request(server: Server, folder: Path) -> None:
    put_part(folder, CONTENT)
    assert fetch(server.file(ranged()), folder) == CONTENT
    assert server.requests == []


def test_a_complete_part_of_unknown_size_is_recognized_by_the_refused_range(server: Server, folder: Path) -> None:
    put_part(folder, CONTENT)
    assert fetch(server.file(ranged(), n_bytes=None), folder) == CONTENT
    assert server.ranges == [f"bytes={N}-"]


@pytest.mark.parametrize("answer", [reply(416), reply(416, Content_Range="bytes */12")], ids=["bare", "with size"])
def test_a_refused_range_starts_over(server: Server, folder: Path, answer: Answer) -> None:
    put_part(folder, CONTENT[:HALF])
    assert fetch(server.file(answer, ranged()), folder) == CONTENT
    assert server.ranges == [f"bytes={HALF}-", ""]


@pytest.mark.parametrize(
    ("header", "body"),
    [
        (f"bytes 0-{N - 1}/{N}", CONTENT),
        (f"bytes {HALF + 1}-{N - 1}/{N}", CONTENT[HALF + 1 :]),
        (f"bytes {HALF}-{N - 1}/{N}", CONTENT[HALF:] + b"more"),
        (f"bytes {HALF}-{N}/{N}", CONTENT[HALF:]),
        (f"bytes {HALF}-1/{N}", CONTENT[HALF:]),
        (f"bytes {HALF}-{10**30}/{10**30}", CONTENT[HALF:]),
        ("bytes all of it", CONTENT[HALF:]),
        (None, CONTENT[HALF:]),
    ],
    ids=["from the start", "a byte late", "too many bytes", "beyond the end", "backwards", "huge", "words", "none"],
)
def test_a_server_that_lies_about_the_range_is_asked_for_everything(
    server: Server, folder: Path, header: str | None, body: bytes
) -> None:
    put_part(folder, CONTENT[:HALF])
    assert fetch(server.file(partial(header, body), whole()), folder) == CONTENT
    assert server.ranges == [f"bytes={HALF}-", ""]


def test_a_range_of_right_size_with_wrong_bytes_is_noticed(server: Server, folder: Path) -> None:
    put_part(folder, CONTENT[:HALF])
    lie = partial(f"bytes {HALF}-{N - 1}/{N}", bytes(N - HALF))
    assert fetch(server.file(lie, whole()), folder) == CONTENT
    assert server.ranges == [f"bytes={HALF}-", ""]


def test_a_range_shorter_than_asked_for_is_continued(server: Server, folder: Path) -> None:
    put_part(folder, CONTENT[:10])
    assert fetch(server.file(partial(f"bytes 10-19/{N}", CONTENT[10:20]), ranged()), folder) == CONTENT
    assert server.ranges == ["bytes=10-", "bytes=20-"]


def test_a_server_that_answers_every_request_with_a_wrong_range_is_given_up(server: Server, folder: Path) -> None:
    put_part(folder, CONTENT[:HALF])
    with pytest.raises(MissingDataError, match=r"file\.bin needs one of 1 addresses.*another range than asked for"):
        fetch(server.file(partial(f"bytes 7-{N - 1}/{N}", CONTENT[7:])), folder)
    assert len(server.requests) == 3


# ------------------------------------------------------------------------------- bad servers


def test_a_server_that_always_breaks_off_is_given_up_and_its_bytes_are_kept(server: Server, folder: Path) -> None:
    with pytest.raises(MissingDataError, match=rf"tried {MAX_TRIES} times.* 500 bytes are in .*part"):
        fetch(server.file(ranged(n_sent=100)), folder)
    assert len(server.requests) == MAX_TRIES
    assert (folder / "file.bin.part").read_bytes() == CONTENT[: 100 * MAX_TRIES]
    server.answers[:] = [ranged()]
    assert fetch(server.file(ranged()), folder) == CONTENT


def test_a_large_file_may_break_off_more_often_while_it_grows(server: Server, folder: Path) -> None:
    content = os.urandom(8 * 2**20)
    file = server.file(ranged(content, n_sent=2**20), content=content)
    assert fetch(file, folder) == content
    assert len(server.requests) == 8 > MAX_TRIES


def test_a_server_that_starts_over_and_breaks_off_is_given_up(server: Server, folder: Path) -> None:
    with pytest.raises(MissingDataError, match=rf"tried {MAX_TRIES} times"):
        fetch(server.file(reply(200, CONTENT[:HALF], length=N)), folder)
    assert len(server.requests) == MAX_TRIES


def test_wrong_bytes_are_deleted_and_the_next_address_is_asked(server: Server, folder: Path) -> None:
    file = server.file(whole(bytes(N)), whole(), addresses=(f"{server.address}/a", f"{server.address}/b"))
    assert fetch(file, folder) == CONTENT
    assert [request["path"] for request in server.requests] == ["/a", "/b"]


def test_wrong_bytes_from_the_last_address_are_an_error_and_leave_nothing(server: Server, folder: Path) -> None:
    with pytest.raises(MissingDataError, match=r"the checksum of what it sent is wrong.*onlynorm data get"):
        fetch(server.file(whole(bytes(N))), folder)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (reply(404), "404 Not Found"),
        (reply(200, b"x", length=10**13), "10,000,000,000,000 bytes instead of 200,000"),
        (partial(f"bytes 0-{10**13 - 1}/{10**13}", b"x", length=10**13), "10,000,000,000,000 bytes instead of"),
        (reply(200, CONTENT + b"more", length=None), "sends more than 200,000 bytes"),
        (whole(CONTENT[:-1]), "199,999 bytes instead of 200,000"),
        (reply(204), "an answer that is no file"),
        (reply(302, Location="file:///etc/passwd"), "302"),
        (reply(302, Location="ftp://127.0.0.1/file.bin"), "302"),
        (reply(302, Location="/again"), "302"),
        (reply(302), "302"),
        (reply(200, b"", length="some"), "ended after 0 of 200,000 bytes"),
    ],
    ids=["missing", "terabytes", "terabytes in parts", "endless", "short", "empty", "redirected to a file",
         "redirected to ftp", "redirected in a circle", "redirected nowhere", "no length"],
)  # fmt: skip
def test_a_bad_answer_is_no_file_and_the_message_says_why(
    server: Server, folder: Path, answer: Answer, what: str
) -> None:
    with pytest.raises(MissingDataError, match=what):
        fetch(server.file(answer), folder)
    server.requests.clear()
    with serving() as second:
        second.answers[:] = [ranged()]
        file = server.file(answer, addresses=(f"{server.address}/bad", f"{second.address}/good"))
        assert fetch(file, folder) == CONTENT


def test_a_file_of_unknown_size_has_a_limit(server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onlynorm.data.downloads.download.MAX_BYTES", N - 1)
    for answer in (whole(), reply(200, CONTENT, length=None)):
        with pytest.raises(MissingDataError, match=r"more than 199,999"):
            fetch(server.file(answer, n_bytes=None), folder)
    monkeypatch.setattr("onlynorm.data.downloads.download.MAX_BYTES", N)
    assert fetch(server.file(reply(200, CONTENT, length=None), n_bytes=None), folder) == CONTENT


def test_a_busy_server_is_asked_again(server: Server, folder: Path) -> None:
    assert fetch(server.file(reply(503), reply(429), ranged()), folder) == CONTENT


def test_a_redirect_is_followed_and_keeps_the_range(server: Server, folder: Path) -> None:
    put_part(folder, CONTENT[:HALF])
    assert fetch(server.file(reply(302, Location=f"{server.address}/moved"), ranged()), folder) == CONTENT
    assert [request["path"] for request in server.requests] == ["/file.bin", "/moved"]
    assert server.ranges[1] == f"bytes={HALF}-"


def test_a_server_that_hangs_is_asked_again(server: Server, folder: Path) -> None:
    def wait(request: object) -> None:
        time.sleep(1.0)

    file = server.file(reply(200, after=1.0), ranged(n_sent=HALF, then=wait), ranged())
    assert fetch(file, folder, timeout=0.2) == CONTENT
    assert server.ranges == ["", "", f"bytes={HALF}-"]


def test_a_server_that_always_hangs_is_given_up(server: Server, folder: Path) -> None:
    with pytest.raises(MissingDataError, match="no data within the timeout"):
        fetch(server.file(reply(200, after=0.5)), folder, timeout=0.05)


def test_garbage_instead_of_http_is_given_up(server: Server, folder: Path) -> None:
    def garbage(request: Any) -> None:
        request.wfile.write(b"\x00\x1b[31m no http at all\r\n\r\n")

    with pytest.raises(MissingDataError, match=r"broke off \(BadStatusLine\)"):
        fetch(server.file(garbage), folder)


@pytest.mark.parametrize("address", ["file:///etc/passwd", "ftp://127.0.0.1/x", "data:,x", "/etc/passwd"])
def test_only_http_addresses_are_asked(folder: Path, address: str) -> None:
    with pytest.raises(MissingDataError, match="not an http or https address"):
        fetch(RemoteFile("file.bin", (address,), "0" * 64), folder)


def test_an_address_that_cannot_be_reached_is_not_asked_again(server: Server, folder: Path) -> None:
    closed = "http://127.0.0.1:9/x"
    assert fetch(server.file(ranged(), addresses=(closed, f"{server.address}/x")), folder) == CONTENT
    with pytest.raises(MissingDataError, match=r"http://127.0.0.1:9/x: no connection"):
        fetch(server.file(ranged(), addresses=(closed,)), folder)


def test_control_characters_of_a_server_are_escaped(server: Server, folder: Path) -> None:
    def answer(request: Any) -> None:
        request.wfile.write(b"HTTP/1.0 404 \x1b[31mred\r\n\r\n")

    with pytest.raises(MissingDataError) as raised:
        fetch(server.file(answer), folder)
    assert "\x1b" not in str(raised.value)


# ------------------------------------------------------------------------------- disks


def test_a_full_disk_is_noticed_before_the_first_request(
    server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(N, 1, N - 1))
    with pytest.raises(StorageError, match=r"enough free space.*No space left.*ONLYNORM_DATA"):
        fetch(server.file(ranged()), folder)
    assert server.requests == []
    put_part(folder, CONTENT[:HALF])
    assert fetch(server.file(ranged()), folder) == CONTENT  # the rest fits


def test_a_disk_that_becomes_full_keeps_what_was_written(
    server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    with monkeypatch.context() as limited:
        fill_disk(folder, limited)
        with pytest.raises(StorageError, match="No space left"):
            fetch(server.file(ranged()), folder)
    written = (folder / "file.bin.part").read_bytes()
    assert 0 < len(written) < N
    assert fetch(server.file(ranged()), folder) == CONTENT


@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES], ids=["read-only", "forbidden"])
def test_a_folder_that_cannot_be_written_to_is_refused(
    server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    folder.mkdir()
    forbid_new_files(folder, error, monkeypatch)
    with pytest.raises(StorageError, match=os.strerror(error)):
        fetch(server.file(ranged()), folder)


def test_a_part_that_is_a_link_is_not_written_through(server: Server, folder: Path, tmp_path: Path) -> None:
    folder.mkdir()
    (tmp_path / "precious").write_bytes(b"")
    (folder / "file.bin.part").symlink_to(tmp_path / "precious")
    with pytest.raises(StorageError, match=r"file\.bin\.part"):
        fetch(server.file(ranged()), folder)
    assert (tmp_path / "precious").read_bytes() == b""


# ------------------------------------------------------------------------------- data sets


def source(server: Server, *answers: Answer, folder: str = "toys", **others: Any) -> Source:
    return Source("a toy", folder, (server.file(*answers),), **others)


def test_a_data_set_is_downloaded_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "toy_set", source(server, ranged()))
    assert {one.name: one.state for one in list_data()}["toy_set"] == "missing"
    state = get_data("toy-set")
    assert (state.state, state.n_bytes, state.path) == ("present", N, data_folder() / "toys/file.bin")
    assert get_data("toy_set") == state
    assert len(server.requests) == 1
    assert [path.name for path in data_folder().iterdir()] == ["toys"]  # no lock, no part


def test_a_damaged_file_is_downloaded_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "toy", source(server, ranged()))
    path = get_data("toy").path
    path.write_bytes(bytes(N))
    assert get_data("toy").path.read_bytes() == CONTENT


def test_what_is_complete_is_found_in_a_folder_that_cannot_be_written_to(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SOURCES, "toy", source(server, ranged()))
    get_data("toy")
    forbid_new_files(data_folder(), errno.EROFS, monkeypatch)
    assert get_data("toy").is_present


def test_a_data_folder_that_cannot_be_written_to_is_named(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(SOURCES, "toy", source(server, ranged()))
    with monkeypatch.context() as limited:
        limited.setattr(os, "access", lambda path, mode: path != data_folder())
        with pytest.raises(StorageError, match=r"data folder needs to be writable.*Permission denied.*ONLYNORM_DATA"):
            get_data("toy")
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("ONLYNORM_DATA", str(tmp_path / "file/data"))
    with pytest.raises(StorageError, match=r"data folder needs to be writable.*Not a directory"):
        get_data("toy")
    assert server.requests == []


def test_another_version_of_a_data_set_is_used(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "toy", source(server, ranged(), others=("toys-py",)))
    (data_folder() / "toys-py").mkdir(parents=True)
    (data_folder() / "toys-py/batch").write_bytes(b"12345")
    state = get_data("toy")
    assert (state.state, state.n_bytes, state.path.name) == ("present", 5, "toys-py")
    assert server.requests == []


def test_a_second_run_for_the_same_data_is_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    arrived, ended = threading.Event(), threading.Event()

    def wait(request: object) -> None:
        arrived.set()
        ended.wait(30)

    monkeypatch.setitem(SOURCES, "toy", source(server, ranged(n_sent=HALF, then=wait), ranged()))
    first = threading.Thread(target=get_data, args=("toy",))
    first.start()
    try:
        assert arrived.wait(30)
        with pytest.raises(StorageError, match=rf"one run at a time; process {os.getpid()}"):
            get_data("toy")
    finally:
        ended.set()
        first.join(30)
    assert get_data("toy").path.read_bytes() == CONTENT


KILLED = """
import sys
from onlynorm.data import SOURCES, RemoteFile, Source, get_data
address, sha256, n_bytes = sys.argv[1:]
SOURCES["toy"] = Source("a toy", "toys", (RemoteFile("file.bin", (address,), sha256, int(n_bytes)),))
print(get_data("toy").path)
"""


def test_a_download_that_was_killed_is_resumed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(request: object) -> None:
        time.sleep(60)

    file = server.file(ranged(n_sent=HALF, then=wait), ranged())
    monkeypatch.setitem(SOURCES, "toy", Source("a toy", "toys", (file,)))
    part = data_folder() / "toys/file.bin.part"
    command = [sys.executable, "-c", KILLED, file.addresses[0], file.sha256, str(N)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as running:
        deadline = time.monotonic() + 120
        while not (part.exists() and part.stat().st_size == HALF) and time.monotonic() < deadline:
            assert running.poll() is None
            time.sleep(0.02)
        running.send_signal(signal.SIGKILL)
    assert not (part.parent / "file.bin").exists()
    assert part.read_bytes() == CONTENT[:HALF]
    assert get_data("toy").path.read_bytes() == CONTENT
    assert server.ranges == ["", f"bytes={HALF}-"]


def test_unknown_names_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"got 'cifar'.*cifar10"):
        get_data("cifar")
    with pytest.raises(MissingDataError, match=r"needs a folder; got none at .*nowhere"):
        get_data("cifar10", source=tmp_path / "nowhere")


# ------------------------------------------------------------------------------- from a folder


def test_files_are_copied_from_a_folder_if_their_checksum_is_right(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(SOURCES, "toy", source(server, reply(404)))
    stick = tmp_path / "stick"
    (stick / "toys").mkdir(parents=True)
    with pytest.raises(MissingDataError, match=r"needs file\.bin in .*stick, or in toys below it; got none"):
        get_data("toy", source=stick)
    (stick / "file.bin").write_bytes(bytes(N))
    with pytest.raises(FormatError, match=r"file\.bin needs to be the published file.*got other content"):
        get_data("toy", source=stick)
    assert [path for path in data_folder().rglob("*") if path.is_file()] == []
    (stick / "file.bin").rename(stick / "toys/file.bin")
    (stick / "toys/file.bin").write_bytes(CONTENT)
    put_part(data_folder() / "toys", b"of an interrupted download")
    assert get_data("toy", source=stick).path.read_bytes() == CONTENT
    assert [path.name for path in (data_folder() / "toys").iterdir()] == ["file.bin"]
    assert server.requests == []


def test_a_copy_that_is_compressed_differently_is_accepted_for_its_content(tmp_path: Path) -> None:
    content = bytes(range(256)) * 5000
    sha256 = hashlib.sha256(content).hexdigest()
    file = RemoteFile("a.gz", (), "0" * 64, 12, unpacked=sha256, n_unpacked=len(content))
    path = tmp_path / "a.gz"

    def accepts(data: bytes) -> bool:
        path.write_bytes(data)
        return is_right(path, file)

    for level in (1, 9):
        assert accepts(gzip.compress(content, level))
    good = gzip.compress(content)
    assert not accepts(gzip.compress(content + b"x"))
    assert not accepts(gzip.compress(content[:-1]))
    assert not accepts(gzip.compress(bytes(2**24)))
    assert not accepts(good[:-1])
    assert not accepts(good + b"x")
    assert not accepts(content)
    assert not accepts(b"")


def test_the_real_fashion_mnist_is_recognized() -> None:
    if not Path(REAL, "fashion-mnist").is_dir():
        pytest.skip("no real data: set ONLYNORM_DATA to a folder with fashion-mnist")
    state = get_data("fashion_mnist", source=REAL)
    assert state.is_present
    assert sorted(path.name for path in state.path.iterdir()) == sorted(one.name for one in SOURCES[state.name].files)


# ------------------------------------------------------------------------------- archives

MEMBERS = {"data_batch_1.bin": 3073 * 4, "test_batch.bin": 3073 * 2}


def batch(name: str) -> bytes:
    return b"".join(bytes([i % 10]) + bytes([i]) * 3072 for i in range(MEMBERS[name] // 3073))


def packed(*entries: tuple[str, bytes | str]) -> bytes:
    """A tar.gz of these members; text is the target of a link."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for name, content in entries:
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                archive.addfile(info)
            else:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return made.getvalue()


GOOD = [(f"cifar-10-batches-bin/{name}", batch(name)) for name in MEMBERS]


def archived(server: Server, content: bytes, **others: Any) -> Source:
    file = server.file(ranged(content), content=content)
    return Source("a toy", "cifar-10-batches-bin", (file,), MEMBERS, **others)


def test_an_archive_is_unpacked_and_deleted(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    content = packed(("cifar-10-batches-bin/readme.html", b"<p>"), *GOOD, ("../../escaped", b"x"), ("/tmp/h", b"x"))
    monkeypatch.setitem(SOURCES, "cifar10", archived(server, content))
    state = get_data("cifar10")
    assert (state.state, state.n_bytes) == ("present", sum(MEMBERS.values()))
    found = sorted(path.relative_to(data_folder()).as_posix() for path in data_folder().rglob("*") if path.is_file())
    assert found == sorted([*(name for name, _ in GOOD), f"cifar-10-batches-bin/{CHECKSUMS}"])
    split = cifar10()
    assert (len(split.train_inputs), len(split.test_inputs)) == (4, 2)
    assert get_data("cifar10") == state
    assert len(server.requests) == 1


def test_an_incomplete_folder_is_completed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "cifar10", archived(server, packed(*GOOD)))
    folder = data_folder() / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    (folder / "test_batch.bin").write_bytes(b"cut short")
    (folder / "batches.meta.txt").write_bytes(b"mine")
    (data_folder() / "cifar-10-batches-bin.unpacking").mkdir()  # of a killed run
    (data_folder() / "cifar-10-batches-bin.unpacking/test_batch.bin").write_bytes(b"half")
    assert list_data()[0].state == "incomplete"
    assert get_data("cifar10").is_present
    assert {path.name for path in folder.iterdir()} == {*MEMBERS, CHECKSUMS, "batches.meta.txt"}
    assert [path.name for path in data_folder().iterdir()] == ["cifar-10-batches-bin"]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (packed(GOOD[0]), "no test_batch.bin"),
        (packed(GOOD[0], (GOOD[1][0], "/etc/passwd")), "as a link"),
        (packed(GOOD[0], GOOD[1], GOOD[1]), "twice"),
        (packed(GOOD[0], (GOOD[1][0], b"short")), "5 bytes"),
        (packed(*GOOD)[:150], "without an end|unexpected end"),
        (packed(*GOOD, ("zeros", bytes(2**25))), "more content than expected"),
        (gzip.compress(b"no archive" * 100), "invalid header|truncated|bad checksum|not a tar"),
        (b"no gzip", "incorrect header"),
    ],
    ids=["incomplete", "a link", "twice", "another size", "truncated", "a bomb", "no tar", "no gzip"],
)
def test_an_archive_with_other_content_is_refused_and_leaves_nothing(
    server: Server, monkeypatch: pytest.MonkeyPatch, content: bytes, what: str
) -> None:
    monkeypatch.setitem(SOURCES, "cifar10", archived(server, content))
    with pytest.raises(FormatError, match=what):
        get_data("cifar10")
    assert [path.name for path in data_folder().iterdir() if path.is_dir()] == []


def test_an_archive_is_taken_from_a_folder_packed_or_unpacked(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    content = packed(*GOOD)
    monkeypatch.setitem(SOURCES, "cifar10", archived(server, content))
    stick = tmp_path / "stick"
    stick.mkdir()
    (stick / "file.bin").write_bytes(content[:-1] + b"!")
    with pytest.raises(FormatError, match="got other content"):
        get_data("cifar10", source=stick)
    (stick / "file.bin").write_bytes(content)
    assert get_data("cifar10", source=stick).is_present
    assert (stick / "file.bin").exists()
    folder = data_folder() / "cifar-10-batches-bin"
    folder.rename(tmp_path / "cifar-10-batches-bin")
    assert get_data("cifar10", source=tmp_path).is_present
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != CHECKSUMS}
    assert found == {name: batch(name) for name in MEMBERS}
    assert server.requests == []


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3073])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[3 * len(content) // 4] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [_truncate, _flip, Path.unlink])
@pytest.mark.parametrize("name", [*MEMBERS, CHECKSUMS])
def test_unpacked_files_that_are_damaged_are_repaired_by_the_next_call(
    server: Server, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], object], name: str
) -> None:
    monkeypatch.setitem(SOURCES, "cifar10", archived(server, packed(*GOOD)))
    get_data("cifar10")
    folder = data_folder() / "cifar-10-batches-bin"
    damage(folder / name)
    assert get_data("cifar10").is_present
    assert {member: (folder / member).read_bytes() for member in MEMBERS} == {name: batch(name) for name in MEMBERS}
    # Without checksums, as in a folder that was copied by hand, sizes are compared.
    n_requests = 1 if (damage, name) == (Path.unlink, CHECKSUMS) else 2
    assert len(server.requests) == n_requests
    get_data("cifar10")
    assert len(server.requests) == n_requests


def test_a_disk_that_stores_something_else_is_noticed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "cifar10", archived(server, packed(*GOOD)))
    unpack = getting._unpack

    def damaged(archive: Path, folder: Path, *others: Any) -> Any:
        sums = unpack(archive, folder, *others)
        _flip(folder / "test_batch.bin")
        return sums

    monkeypatch.setattr(getting, "_unpack", damaged)
    with pytest.raises(FormatError, match=r"cifar-10-batches-bin needs the content of its archive.*check the disk"):
        get_data("cifar10")
    assert list_data()[0].state == "missing"


def test_damaged_files_are_not_copied_from_a_folder(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(SOURCES, "cifar10", archived(server, packed(*GOOD)))
    get_data("cifar10")
    folder = tmp_path / "cifar-10-batches-bin"
    (data_folder() / "cifar-10-batches-bin").rename(folder)
    _flip(folder / "test_batch.bin")
    with pytest.raises(MissingDataError, match=r"copying needs file.bin in .*; got none"):
        get_data("cifar10", source=tmp_path)


def test_a_kill_while_unpacking_leaves_no_half_data_set(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "cifar10", archived(server, packed(*GOOD)))

    def stop(done: int, total: int, message: str) -> None:
        if message.startswith("unpacking"):
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        get_data("cifar10", progress=stop)
    with pytest.raises(MissingDataError, match="onlynorm data get cifar10"):
        cifar10()
    assert get_data("cifar10").is_present
    assert len(server.requests) == 1  # the archive was complete


# ------------------------------------------------------------------------------- the table


def test_the_table_names_each_file_by_http_and_by_a_whole_checksum() -> None:
    for name, one in SOURCES.items():
        assert name == name.lower().replace("-", "_")
        for file in one.files:
            assert len(file.addresses) >= 2
            assert all(address.startswith(("https://", "http://")) for address in file.addresses)
            assert all(address.endswith(f"/{file.name}") for address in file.addresses)
            assert len(bytes.fromhex(file.sha256)) == 32
            assert file.unpacked is None or len(bytes.fromhex(file.unpacked)) == 32


@pytest.mark.parametrize("name", SOURCES)
def test_the_message_about_missing_data_names_the_command_that_gets_it(name: str) -> None:
    with pytest.raises(MissingDataError, match=f"`onlynorm data get {name}`"):
        load_model(name) if name == "resnet20" else load_data(name)
    with pytest.raises(MissingDataError, match="needs to be in the data folder"):
        find_data(SOURCES[name].folder)
