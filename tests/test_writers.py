"""Every function that writes: a full disk or a read-only folder is a StorageError, and no file is half written.

`test_files.py` has the same for `save`.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from broken_disks import content, fill_disk, forbid_new_files
from commands import RunCli
from torch import nn
from toy_records import make_record

import onlynorm as on
from onlynorm.errors import StorageError
from onlynorm.evidence.artifacts import Artifact
from onlynorm.evidence.cache import Cache
from onlynorm.evidence.papers.reproduce import Outcome, reproduce
from onlynorm.evidence.records import write_record
from onlynorm.evidence.report.page import write_report
from onlynorm.models import mlp
from onlynorm.rank import Chain, simulate
from onlynorm.storage import claim, write_atomically, write_sealed
from onlynorm.tuning import Schedule, fit, only_norms, save_adapter, take_adapter, write_peft

X = torch.linspace(-1.0, 1.0, 27, dtype=torch.float64).reshape(9, 3)
LABELS = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1, 1])


def tiny() -> nn.Sequential:
    return mlp((3, 2, 2)).double().eval()


def norms_model() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def constant(*, k: int) -> int:
    return k


def compute(run: Any) -> Outcome:
    return Outcome(values={"k": run.piece("k", constant, k=1)})


def rows_of(path: Path) -> None:
    cache = Cache(path, modules=["onlynorm.evidence.bench.sweeps.adapt"], force=True)
    cache.get_or_compute("row", {"seed": 1}, lambda: {"accuracy": 0.5})


def train(path: Path) -> None:
    model = norms_model()
    only_norms(model)
    path.unlink(missing_ok=True) if path.is_file() else None
    fit(model, (X.float(), LABELS), schedule=Schedule(epochs=1, lr=0.01), checkpoint=path, accelerator="cpu")


def rebuild(path: Path) -> None:
    for piece in path.glob("*") if path.is_dir() else ():
        piece.unlink()
    on.reconstruct(tiny(), X, partial=path)


def redo(path: Path) -> None:
    one = Artifact(
        id="toy:fig-1", title="t", claim="c", kind="figure", seeds=(0,), sizes={"quick": {}, "paper": {}},
        expectations=(), caveats=(), function=compute, source_digest="0",
    )  # fmt: skip
    reproduce(one, out=path, force=True)


def report(path: Path) -> None:
    records = Path(os.environ["TOY_RECORDS"])
    write_report(records, path)


def diagnosis() -> Any:
    return on.diagnose(norms_model(), X.float(), LABELS)


WRITERS: dict[str, Callable[[Path], object]] = {
    "write_atomically": lambda path: write_atomically(path, b"new content"),
    "reconstruct(partial=)": rebuild,
    "save_adapter": lambda path: save_adapter(norms_model(), path),
    "write_peft": lambda path: write_peft(take_adapter(norms_model()), path),
    "fit(checkpoint=)": train,
    "simulate(checkpoint=)": lambda path: simulate(Chain(width=3, n_samples=2, n_chains=2), 20, checkpoint=path),
    "write_sealed": lambda path: write_sealed(path, {"n": 1}, kind="k"),
    "write_record": lambda path: write_record(path, make_record()),
    "Figure.write": lambda path: make_record().figure.write(path),
    "write_report": report,
    "Figure.save": lambda path: diagnosis().plot().save(path.with_suffix(".svg")),
    "to_html": lambda path: diagnosis().to_html(path),
    "reproduce": redo,
    "benchmark rows": rows_of,
}
"""Functions that write to the path, a file or a folder; each writes when it is called a second time too."""


@pytest.fixture
def _records(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.mktemp("records")
    write_record(folder / "record.json", make_record())
    monkeypatch.setenv("TOY_RECORDS", str(folder))


@pytest.mark.usefixtures("_records")
@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_keeps_what_was_there(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out"
    WRITERS[name](path)
    if name in ("fit(checkpoint=)", "reconstruct(partial=)"):  # these would only go on from what is there
        before: dict[str, bytes] = {}
    else:
        before = content(tmp_path)

    with monkeypatch.context() as patch:
        fill_disk(tmp_path, patch)
        with pytest.raises(StorageError, match=r"needs a writable folder with space; got No space left on device"):
            WRITERS[name](path)
    assert content(tmp_path) == before
    WRITERS[name](path)


@pytest.mark.usefixtures("_records")
@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_folder_that_cannot_be_written_is_a_clear_error(
    name: str, error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_new_files(tmp_path, error, monkeypatch)
    with pytest.raises(StorageError, match=f"needs a writable folder.*{os.strerror(error)}"):
        WRITERS[name](tmp_path / "out")
    assert content(tmp_path) == {}


@pytest.mark.usefixtures("_records")
@pytest.mark.parametrize("name", WRITERS)
def test_a_path_below_a_file_is_a_clear_error(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match=r"needs a writable folder|Not a directory"):
        WRITERS[name](tmp_path / "file" / "out")
    assert content(tmp_path) == {"file": b"x"}


def test_a_disk_too_full_for_the_lock_is_a_clear_error_and_no_lock_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(StorageError, match=r"got No space left on device"), claim(tmp_path / "folder" / "out"):
            pytest.fail("the path was not claimed")
    assert content(tmp_path) == {}
    with claim(tmp_path / "folder" / "out"):
        pass


def test_commands_that_draw_end_with_one_line_where_they_cannot_write(tmp_path: Path, run: RunCli) -> None:
    (tmp_path / "file").write_text("x")
    for words in (
        ("memorize", "--points", "8", "--figure", "file/a.png"),
        ("memorize", "--points", "8", "--out", "file/a.safetensors"),
        ("spectrum", "4,3", "--out", "file/out"),
        ("factorize", "--random", "3", "--out", "file/a.safetensors"),
        ("diagnose", "mlp", "--html", "file/a.html"),
    ):
        ran = run(*words)
        assert ran.code == 2, (words, ran.out, ran.err)
        assert "error:" in ran.err
    assert content(tmp_path) == {"file": b"x"}


def test_logs_that_cannot_be_written_are_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = norms_model(), (X.float(), LABELS)
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match=r"logs needs? a .*folder|folder that can be written"):
        fit(model, data, schedule=Schedule(epochs=1, lr=0.01), logs=tmp_path / "file" / "logs", accelerator="cpu")
    assert content(tmp_path) == {"file": b"x"}


def test_a_limit_on_the_size_of_files_is_a_clear_error(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a", b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        with pytest.raises(StorageError, match=r"got File too large"):
            write_atomically(tmp_path / "a", bytes(10_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert content(tmp_path) == {"a": b"old"}


# ------------------------------------------------------------------------------- temporary files


KILLED = """
import os, signal, sys
from pathlib import Path
from onlynorm.storage import claim, write_atomically
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
def wait(one, two, real=os.replace):
    print("ready", flush=True)
    sys.stdin.readline()
    real(one, two)
os.replace = die if sys.argv[2] == "die" else wait
write_atomically(Path(sys.argv[1]), b"of another process")
"""


def test_what_a_killed_writer_left_is_deleted_by_the_next_write(tmp_path: Path) -> None:
    path = tmp_path / "a"
    ran = subprocess.run([sys.executable, "-c", KILLED, str(path), "die"], check=False)
    assert ran.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".a.")
    (tmp_path / ".a.notes.tmp").write_text("of the user")
    (tmp_path / ".ab.0123456789abcdef.tmp").write_text("of another target")
    write_atomically(path, b"new")
    assert {one.name for one in tmp_path.iterdir()} == {"a", ".a.notes.tmp", ".ab.0123456789abcdef.tmp"}


def test_the_file_of_a_writer_that_is_alive_stays(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path), "wait"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        write_atomically(path, b"ours")
        assert len(list(tmp_path.iterdir())) == 2
        other.communicate("go on\n")
        assert other.returncode == 0
    assert content(tmp_path) == {"a": b"of another process"}


def test_a_temporary_file_is_never_written_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    names = iter(["a" * 16, "b" * 16])
    (tmp_path / f".out.{'a' * 16}.tmp").symlink_to(victim)
    monkeypatch.setattr("secrets.token_hex", lambda _: next(names))
    write_atomically(tmp_path / "out", b"new")
    assert victim.read_text() == "untouched"
    assert (tmp_path / "out").read_bytes() == b"new"
    assert not (tmp_path / "out").is_symlink()


def test_a_link_at_the_target_stays_and_what_it_points_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "a")
    for data in (b"one", b"two"):  # the first one finds nothing there
        write_atomically(tmp_path / "link", data)
        assert (tmp_path / "link").is_symlink()
        assert content(tmp_path / "there") == {"a": data}
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(StorageError, match=r"[Ss]ymbolic links"):
        write_atomically(tmp_path / "loop", b"x")


def test_only_ordinary_files_are_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, message in (
        ("pipe", r"pipe is not a regular file\. Choose another name"),
        ("folder", r"saving needs a file name; .*folder is a folder\. Add the name of a file in it\.$"),
        ("a\0b", "null"),
    ):
        with pytest.raises(StorageError, match=message):
            write_atomically(tmp_path / name, b"x")
    assert {one.name for one in tmp_path.iterdir()} == {"pipe", "folder"}


def test_a_new_file_has_the_permissions_of_the_umask_and_a_replaced_one_keeps_its_own(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "a", b"x")
        assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640
        (tmp_path / "a").chmod(0o600)
        write_atomically(tmp_path / "a", b"y")
        assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)


def test_names_as_long_as_file_systems_allow_are_written(tmp_path: Path) -> None:
    path = tmp_path / ("é" * 127)
    write_atomically(path, b"x")
    write_atomically(path, b"y")
    assert content(tmp_path) == {path.name: b"y"}
