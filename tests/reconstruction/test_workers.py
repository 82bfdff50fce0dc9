"""Reconstructions on several workers: the bits of one process, and nothing lost if processes are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import onlynorm as on
from onlynorm.errors import ConversionError, FormatError, InsufficientFeaturesError, ValueRangeError
from onlynorm.reconstruction import Reconstruction
from onlynorm.seeds import own_randomness, seeded

X = torch.randn(6, 1, 8, 8, generator=seeded(0))
WAIT = "ONLYNORM_TEST_WAIT"


def network() -> nn.Module:
    """Four layers of different sizes, on images of 8 x 8."""
    with own_randomness(0):
        layers = [nn.Conv2d(1, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 4, 3, stride=2), nn.Tanh()]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(36, 7), nn.ReLU(), nn.Linear(7, 3)).eval()


def bits(result: Reconstruction) -> list[tuple[str, torch.Tensor]]:
    return [(name, value) for name, value in result.network.state_dict().items()]


def evidence(result: Reconstruction) -> list[dict[str, Any]]:
    return [row.as_dict() | {"seconds": 0.0} for row in result.layers]


def are_equal(first: Reconstruction, second: Reconstruction) -> bool:
    return evidence(first) == evidence(second) and all(
        a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(bits(first), bits(second), strict=True)
    )


@pytest.fixture(scope="module")
def serial() -> Reconstruction:
    return on.reconstruct(network(), X, on.Wide(excess=1.25), seed=3)


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_network_has_the_bits_of_one_process(serial: Reconstruction, workers: int) -> None:
    seen: list[tuple[int, int, str]] = []
    result = on.reconstruct(
        network(), X, on.Wide(excess=1.25), seed=3, workers=workers, progress=lambda *step: seen.append(step)
    )
    assert are_equal(result, serial)
    assert result.partial is None
    assert result.threads == serial.threads == 1
    assert seen[0] == (0, 4, "6"), "the largest layer comes first"
    assert seen[-1] == (4, 4, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"construction": on.Residual()}, {"construction": on.Deep(), "fold_norms": True},
        {"construction": on.Wide(activation=nn.Tanh()), "error": 1e-3},
        {"construction": on.LowRank(rank=2), "storage": "seed"},
        {"ranges": on.Ranges(box=on.Box(X.amin(0) - 0.1, X.amax(0) + 0.1))},
    ],
    ids=["residual", "deep and folded", "error", "low rank", "box"],
)  # fmt: skip
def test_all_options_reach_the_workers(options: dict[str, Any]) -> None:
    target = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).eval()
    inputs = torch.randn(6, 6, generator=seeded(0))
    if "ranges" in options:
        options = {"ranges": on.Ranges(box=on.Box(inputs.amin(0) - 0.1, inputs.amax(0) + 0.1))}
    assert are_equal(on.reconstruct(target, inputs, **options), on.reconstruct(target, inputs, workers=2, **options))


def test_finished_layers_are_not_rebuilt_and_the_last_bits_depend_on_the_threads(
    serial: Reconstruction, tmp_path: Path
) -> None:
    folder = tmp_path / "net.partial"
    on.reconstruct(network(), X, on.Wide(excess=1.25), seed=3, partial=folder)
    (folder / "layer-0002.safetensors").unlink()
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    seen: list[tuple[int, int, str]] = []
    result = on.reconstruct(
        network(), X, on.Wide(excess=1.25), seed=3, partial=folder, workers=2, progress=lambda *step: seen.append(step)
    )
    assert are_equal(result, serial)
    assert [step for step in seen if step[0] < 4] == [(3, 4, "6")]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert sorted(path.name for path in folder.iterdir()) == [f"layer-000{n}.safetensors" for n in range(4)]
    with pytest.raises(FormatError, match="another threads"):
        on.reconstruct(network(), X, on.Wide(excess=1.25), seed=3, partial=folder, threads=2)


class Unpicklable(nn.Module):
    """An activation that is a lambda."""

    def __init__(self) -> None:
        super().__init__()
        self.function = lambda x: x.clamp(min=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The activation."""
        return self.function(x)


def test_what_workers_cannot_do_is_refused_with_a_cure() -> None:
    with pytest.raises(ConversionError, match=r"a model that can be pickled; got .* omit workers"):
        on.reconstruct(nn.Sequential(nn.Linear(2, 2), Unpicklable()).eval(), torch.randn(3, 2), workers=2)
    with pytest.raises(ValueRangeError, match=r"workers must be an integer .*; got 0"):
        on.reconstruct(network(), X, workers=0)


@pytest.mark.slow
def test_layers_that_fail_are_named_with_the_error_of_one_process() -> None:
    target = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)).eval()
    inputs = torch.randn(5, 4, generator=seeded(0))
    with pytest.raises(InsufficientFeaturesError, match="layer '0'"):
        on.reconstruct(target, inputs, on.Wide(excess=0.5), tolerance=1e-10)
    with pytest.raises(InsufficientFeaturesError, match=r"layer '0'.*Other failed tasks: '2'"):
        on.reconstruct(target, inputs, on.Wide(excess=0.5), tolerance=1e-10, workers=2)


# ------------------------------------------------------------------------------- killed processes


class Waiting(nn.Module):
    """An activation that stops its process while the file in the folder `WAIT` exists; says so in another file."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        folder = os.environ.get(WAIT)
        if folder and x.dtype == torch.float64 and os.getpid() != int(os.environ[f"{WAIT}_NOT"]):
            try:
                (Path(folder) / "wait").unlink()  # one process takes it
            except FileNotFoundError:
                return x.clamp(min=0)
            (Path(folder) / "waiting").write_text(str(os.getpid()))
            time.sleep(600)
        return x.clamp(min=0)


def waiting_network() -> nn.Module:
    with own_randomness(1):
        return nn.Sequential(nn.Linear(6, 9), Waiting(), nn.Linear(9, 5), nn.ReLU(), nn.Linear(5, 2)).eval()


def main() -> None:
    """Rebuilds the network on two workers: `python test_workers.py FOLDER`."""
    os.environ[f"{WAIT}_NOT"] = str(os.getpid())
    result = on.reconstruct(
        waiting_network(), torch.ones(4, 6), partial=Path(sys.argv[1]) / "partial", workers=2, seed=1
    )
    on.save(result, Path(sys.argv[1]) / "net.safetensors")


def start(folder: Path, *, waits: bool) -> subprocess.Popen[str]:
    if waits:
        (folder / "wait").touch()
    return subprocess.Popen(
        [sys.executable, __file__, str(folder)], env={**os.environ, WAIT: str(folder)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def wait_for(path: Path) -> int:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        if path.exists() and path.read_text():
            return int(path.read_text())
        time.sleep(0.05)
    raise AssertionError(f"no {path.name}")


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a run that nobody killed."""
    folder = tmp_path_factory.mktemp("whole")
    run = start(folder, waits=False)
    said, _ = run.communicate(timeout=120)
    assert run.returncode == 0, said
    return (folder / "net.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_a_killed_worker_costs_its_layer_only(whole: bytes, tmp_path: Path) -> None:
    run = start(tmp_path, waits=True)
    os.kill(wait_for(tmp_path / "waiting"), signal.SIGKILL)
    said, _ = run.communicate(timeout=120)
    assert run.returncode == 0, said
    assert (tmp_path / "net.safetensors").read_bytes() == whole
    assert not (tmp_path / "partial").exists()


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["SIGINT", "SIGKILL"])
def test_a_killed_run_leaves_no_worker_and_resumes_to_the_same_file(
    whole: bytes, tmp_path: Path, number: signal.Signals
) -> None:
    run = start(tmp_path, waits=True)
    waiting = wait_for(tmp_path / "waiting")
    if number == signal.SIGINT:
        os.killpg(run.pid, number)
    else:
        run.kill()
    run.communicate(timeout=60)
    end = time.monotonic() + 10
    while is_running(waiting) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_running(waiting)
    again = start(tmp_path, waits=False)
    said, _ = again.communicate(timeout=120)
    assert again.returncode == 0, said
    assert (tmp_path / "net.safetensors").read_bytes() == whole
    assert not (tmp_path / "partial").exists(), "what the killed run left is deleted too"


def test_the_command_rebuilds_on_workers(run: Any, tmp_path: Path) -> None:
    options = ("reconstruct", "digits_cnn", "--features", "id_cond", "--calibration", 8, "--images", 4, "--json")
    one = run(*options, "--out", "one.safetensors")
    two = run(*options, "--out", "two.safetensors", "--workers", 2)
    assert one.code == two.code == 0
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "two.safetensors").read_bytes()
    assert two.json()["threads"] == 1


if __name__ == "__main__":
    main()
