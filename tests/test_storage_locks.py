"""Two runs on one output: the second is refused with the id of the first, and a killed run blocks nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from commands import RunCli
from torch import nn

import onlynorm as on
from onlynorm.errors import StorageError
from onlynorm.evidence.artifacts import Artifact
from onlynorm.evidence.cache import Cache, Piece
from onlynorm.evidence.papers.reproduce import Outcome, reproduce
from onlynorm.models import mlp
from onlynorm.rank import Chain, simulate
from onlynorm.storage import claim
from onlynorm.tuning import Schedule, fit, only_norms

X = torch.linspace(-1.0, 1.0, 27, dtype=torch.float64).reshape(9, 3)
HOLD = """
import sys
from onlynorm.storage import claim
held = []
for line in sys.stdin:
    if line.strip():
        held.append(claim(line.strip()))
        held[-1].__enter__()
    else:
        held.pop().__exit__(None, None, None)
    print("done", flush=True)
"""


class Holder:
    """Another process that holds paths."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def hold(self, path: Path) -> None:
        self._say(str(path))

    def release(self) -> None:
        self._say("")

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _say(self, line: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"


@pytest.fixture(scope="module")
def _process() -> Iterator[Holder]:
    holder = Holder()
    yield holder
    holder.kill()
    assert holder.process.stdin is not None
    assert holder.process.stdout is not None
    holder.process.stdin.close()
    holder.process.stdout.close()


@pytest.fixture
def other(_process: Holder) -> Holder:
    return _process


def refuses(other: Holder, path: Path, run: Callable[[], object]) -> None:
    """While the other process holds the path, the run is refused by its id; afterwards it goes through."""
    other.hold(path)
    with pytest.raises(StorageError, match=rf"one run at a time; process {other.process.pid} is writing it"):
        run()
    other.release()
    run()
    assert list(path.parent.glob(".*.lock")) == []


def test_a_path_is_held_by_one_process(tmp_path: Path, other: Holder) -> None:
    def take() -> None:
        with claim(tmp_path / "net"):
            assert (tmp_path / ".net.lock").exists()

    refuses(other, tmp_path / "net", take)


def test_a_link_and_its_target_are_one_path(tmp_path: Path, other: Holder) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")

    def take() -> None:
        with claim(tmp_path / "link" / "net"):
            pass

    refuses(other, tmp_path / "real" / "net", take)


def test_a_killed_holder_blocks_nobody(tmp_path: Path) -> None:
    holder = Holder()
    holder.hold(tmp_path / "net")
    with pytest.raises(StorageError, match=f"process {holder.process.pid}"), claim(tmp_path / "net"):
        pass
    holder.kill()
    assert (tmp_path / ".net.lock").exists()
    with claim(tmp_path / "net"):
        assert (tmp_path / ".net.lock").read_text() == str(os.getpid())
    assert list(tmp_path.iterdir()) == []
    for pipe in (holder.process.stdin, holder.process.stdout):
        assert pipe is not None
        pipe.close()


def test_threads_exclude_each_other(tmp_path: Path) -> None:
    inside, n_refused = [0], []
    start = threading.Barrier(8)

    def run() -> None:
        start.wait()
        for _ in range(30):
            try:
                with claim(tmp_path / "net"):
                    inside[0] += 1
                    assert inside[0] == 1
                    inside[0] -= 1
            except StorageError as error:
                n_refused.append(str(error))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert inside == [0]
    assert list(tmp_path.iterdir()) == []


def test_a_claim_leaves_no_folders_behind(tmp_path: Path) -> None:
    with claim(tmp_path / "a" / "b" / "net"):
        assert (tmp_path / "a" / "b").is_dir()
    assert list(tmp_path.iterdir()) == []
    with claim(tmp_path / "a" / "b" / "net"):
        (tmp_path / "a" / "b" / "net").write_text("x")
    assert (tmp_path / "a" / "b" / "net").read_text() == "x"


def test_a_run_that_fails_releases_its_path(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="division"), claim(tmp_path / "net"):
            raise ZeroDivisionError("division")


# ------------------------------------------------------------------------------- every run that resumes


def test_reconstruct_holds_its_partial_folder(tmp_path: Path, other: Holder) -> None:
    folder = tmp_path / "partial"
    refuses(other, folder, lambda: on.reconstruct(mlp((3, 2)).double().eval(), X, partial=folder))


def test_fit_holds_its_checkpoint(tmp_path: Path, other: Holder) -> None:
    data = X.float(), torch.tensor([0, 1, 1, 0, 1, 0, 0, 1, 1])

    def train() -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        only_norms(model)
        fit(model, data, schedule=Schedule(epochs=1, lr=0.01), checkpoint=tmp_path / "run", accelerator="cpu")

    refuses(other, tmp_path / "run", train)


def test_simulate_holds_the_file_of_its_state(tmp_path: Path, other: Holder) -> None:
    refuses(other, tmp_path / "state", lambda: simulate(Chain(width=3, n_chains=2), 9, checkpoint=tmp_path / "state"))


def constant(*, k: int) -> int:
    return k


def compute(run: object) -> Outcome:
    return Outcome(values={"k": run.piece("k", constant, k=1)})  # type: ignore[attr-defined]


def test_reproduce_holds_the_folder_of_an_artifact(tmp_path: Path, other: Holder) -> None:
    one = Artifact(
        id="toy:fig-1", title="t", claim="c", kind="figure", seeds=(0,), sizes={"quick": {}, "paper": {}},
        expectations=(), caveats=(), function=compute, source_digest="0",
    )  # fmt: skip
    refuses(other, tmp_path / "toy" / "fig-1", lambda: reproduce(one, out=tmp_path))


def test_a_benchmark_holds_the_piece_that_it_computes(tmp_path: Path, other: Holder) -> None:
    cache = Cache(tmp_path / "rows", modules=["onlynorm.evidence.bench.sweeps.adapt"], force=True)

    def measure() -> Piece:
        return cache.get_or_compute("row", {"seed": 1}, lambda: {"accuracy": 0.5})

    measure()
    (path,) = (tmp_path / "rows").iterdir()
    refuses(other, path, measure)


def test_commands_hold_what_they_write(tmp_path: Path, other: Holder, run: RunCli) -> None:
    (tmp_path / "records").mkdir()
    commands = {
        "report.html": ("report", "--records", "records", "--out", "report.html"),
        "net.safetensors": ("reconstruct", "mlp", "--out", "net.safetensors", "--features", "id_cond"),
        "a.safetensors": ("tune", "mlp_bn", "--data", "digits", "--epochs", "1", "--adapter", "a.safetensors"),
    }
    for name, words in commands.items():
        other.hold(tmp_path / name)
        ran = run(*words)
        assert ran.code == 2
        assert f"process {other.process.pid} is writing it" in ran.err
        assert not (tmp_path / name).exists()
        other.release()
