"""Runs that fail, are stopped or killed: the target is left alone, and finished layers are not built again."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rebuilding import X, is_untouched, net, reconstruct_with, with_norm
from tensors import normal
from torch import nn

from onlynorm import Wide
from onlynorm.errors import FormatError, StorageError, ToleranceError
from onlynorm.reconstruction import reconstruct
from onlynorm.reconstruction.constructions import BUILDERS
from onlynorm.reconstruction.constructions.base import Builder
from onlynorm.reconstruction.resume import KIND
from onlynorm.storage import read_tensors, write_tensors


def test_a_failure_leaves_the_target_alone_even_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    network = with_norm()
    before = copy.deepcopy(network.state_dict())
    with pytest.raises(ToleranceError, match=r"layer '0'"):
        reconstruct(network, X, Wide(activation=nn.Sigmoid()), error=1e-13, in_place=True, fold_norms=True)
    counted(monkeypatch, stop_at=2)
    with pytest.raises(KeyboardInterrupt):
        reconstruct(network, X, in_place=True, fold_norms=True)
    assert is_untouched(network, before)


def test_a_run_that_was_stopped_resumes_behind_the_last_finished_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = net(6, 5, 5, 4)
    whole = reconstruct(network, X, Wide(activation=nn.ReLU()))
    folder = tmp_path / "net.partial"
    built = counted(monkeypatch, stop_at=3)
    with pytest.raises(KeyboardInterrupt):
        reconstruct(network, X, Wide(activation=nn.ReLU()), partial=folder)
    assert built == ["0", "2", "4"]
    assert sorted(path.name for path in folder.iterdir()) == ["layer-0000.safetensors", "layer-0001.safetensors"]
    built = counted(monkeypatch)
    told: list[str] = []
    resumed = reconstruct(
        network, X, Wide(activation=nn.ReLU()), partial=folder, on_step=lambda name, n, residual: told.append(name)
    )
    assert built == ["4"]
    assert told[:2] == ["0", "2"]
    assert is_untouched(resumed.network, whole.network.state_dict())
    assert torch.equal(resumed.network(X), whole.network(X))
    assert [layer.error for layer in resumed.layers] == [layer.error for layer in whole.layers]
    assert resumed.partial == folder
    built = counted(monkeypatch)
    again = reconstruct(network, X, Wide(activation=nn.ReLU()), partial=folder)
    assert built == []
    assert again.layers == resumed.layers


def counted(monkeypatch: pytest.MonkeyPatch, stop_at: int | None = None) -> list[str]:
    """The layers that are really built from now on; the last of them is interrupted."""
    monkeypatch.undo()
    real = BUILDERS[Wide]
    built: list[str] = []

    def build(target: Any, *rest: Any) -> Any:
        built.append(target.name)
        if len(built) == stop_at:
            raise KeyboardInterrupt
        return real.build(target, *rest)

    monkeypatch.setitem(BUILDERS, Wide, Builder(build, real.estimate))  # type: ignore[arg-type]
    return built


KILLED = """
import os, signal, sys, torch
from torch import nn
from onlynorm import Wide, reconstruct
from onlynorm.models import mlp

real, calls = os.fsync, []
def fsync(handle):
    calls.append(handle)
    if len(calls) > 2:  # each layer is flushed as a file and in its folder: the second dies with its file half made
        os.kill(os.getpid(), signal.SIGKILL)
    real(handle)
os.fsync = fsync
x = torch.randn((30, 6), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
reconstruct(mlp((6, 5, 4)).double().eval(), x, Wide(activation=nn.ReLU()), partial=sys.argv[1])
"""


def test_a_killed_process_loses_at_most_the_layer_it_was_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "net.partial"
    ran = subprocess.run([sys.executable, "-c", KILLED, str(folder)], capture_output=True, timeout=600, check=False)
    assert ran.returncode == -signal.SIGKILL
    kept = sorted(path.name for path in folder.iterdir())
    assert [name for name in kept if not name.startswith(".")] == ["layer-0000.safetensors"]
    assert len(kept) == 2  # and the file that was being written, which no reader takes for a layer
    built = counted(monkeypatch)
    resumed = reconstruct(net(), X, Wide(activation=nn.ReLU()), partial=folder)
    assert built == ["2"]
    assert is_untouched(resumed.network, reconstruct(net(), X, Wide(activation=nn.ReLU())).network.state_dict())


MOMENTS = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
from torch import nn
import onlynorm as on

folder = Path(sys.argv[1])
torch.manual_seed(0)
network = nn.Sequential(
    nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 8, 3), nn.ReLU(), nn.Conv2d(8, 12, 3, stride=2),
    nn.ReLU(), nn.Flatten(), nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 10),
).eval()
inputs = torch.randn(16, 3, 9, 9)
small = nn.Sequential(nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 2)).eval()
on.save(on.reconstruct(small, torch.randn(4, 9), on.Wide(activation=nn.ReLU())), folder / "small.safetensors")

def start(name):  # a copy of this process, which has imported all that the first run imports
    child = os.fork()
    if child == 0:
        made = on.reconstruct(network, inputs, on.Wide(activation=nn.ReLU()), partial=folder / f"{name}.partial")
        on.save(made, folder / f"{name}.safetensors")
        os._exit(0)
    return child

def finish(name):
    begun = time.perf_counter()
    assert os.waitpid(start(name), 0)[1] == 0
    assert not (folder / f"{name}.partial").exists()
    return (folder / f"{name}.safetensors").read_bytes(), time.perf_counter() - begun

whole, seconds = finish("whole")
generator, killed = random.Random(0), []
for number in range(20):
    # One moment in each twentieth of the run, so that they spread over it on a machine of any speed.
    moment = (number + generator.random()) / 20 * seconds
    for attempt in range(10):  # earlier, where the machine became faster and the run was done
        name = f"{number}-{attempt}"
        child = start(name)
        time.sleep(moment * 0.7**attempt)
        os.kill(child, signal.SIGKILL)
        was_killed = os.waitpid(child, 0)[1] == signal.SIGKILL
        if was_killed:
            break
    n_layers = len([*(folder / f"{name}.partial").glob("layer-*")])
    is_same = finish(name)[0] == whole
    killed.append((was_killed, n_layers, is_same))
print(json.dumps(killed))
"""


@pytest.mark.slow
def test_killed_at_twenty_moments_a_resumed_run_writes_the_same_file(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", MOMENTS, str(tmp_path)], capture_output=True, timeout=900, check=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    found = json.loads(ran.stdout)
    assert len(found) == 20
    assert all(was_killed for was_killed, _, _ in found)
    assert len({n_layers for _, n_layers, _ in found}) >= 3  # kills before, between and after layers
    assert all(is_same for _, _, is_same in found)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seed": 1}, r"another seed: 0 saved, 1 now"),
        ({"features": "he_uniform"}, r"another features: 'he_normal' saved, 'he_uniform' now"),
        ({"activation": nn.Tanh()}, r"another activation: "),
        ({"inputs": normal(30, 6, seed=1)}, r"another calibration batch: "),
        ({"fold_norms": True}, r"another fold_norms: False saved, True now"),
        ({"error": 1e-6}, r"another error: None saved, 1e-06 now; tolerance: None saved, .*; window: "),
    ],
)
def test_other_arguments_do_not_mix_with_a_partial_run(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    arguments = {"activation": nn.ReLU(), "partial": tmp_path / "partial"}
    reconstruct_with(net(), X, **arguments)
    with pytest.raises(
        FormatError, match=rf"resuming needs the arguments.*{says}.*Delete the folder .* to start again"
    ):
        reconstruct_with(net(), changes.pop("inputs", X), **{**arguments, **changes})


def test_another_target_does_not_mix_with_a_partial_run(tmp_path: Path) -> None:
    reconstruct(net(), X, partial=tmp_path)
    other = net()
    with torch.no_grad():
        other[2].bias[0] += 1e-12
    with pytest.raises(FormatError, match=r"got another target network: .*Delete the folder"):
        reconstruct(other, X, partial=tmp_path)
    leaky = nn.Sequential(other[0], nn.LeakyReLU(), net()[2])
    with pytest.raises(FormatError, match=r"got another architecture: .*Delete the folder"):
        reconstruct(leaky, X, partial=tmp_path)


def test_a_folder_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    reconstruct(net(), X, partial=tmp_path)
    piece = tmp_path / "layer-0000.safetensors"
    document, tensors = read_tensors(piece, kind=KIND, format=2, cure="")
    write_tensors(piece, tensors, kind=KIND, format=1, document=document)
    with pytest.raises(FormatError, match=r"format 2; layer-0000.* has format 1.*Delete the folder .* to start again"):
        reconstruct(net(), X, partial=tmp_path)


def test_a_damaged_piece_is_refused(tmp_path: Path) -> None:
    reconstruct(net(), X, partial=tmp_path)
    piece = tmp_path / "layer-0001.safetensors"
    data = bytearray(piece.read_bytes())
    data[len(data) // 2] ^= 1
    piece.write_bytes(data)
    with pytest.raises(FormatError, match=r"safetensors file.*layer-0001.*Delete the folder .* to start again"):
        reconstruct(net(), X, partial=tmp_path)
    piece.write_bytes((tmp_path / "layer-0000.safetensors").read_bytes())
    with pytest.raises(FormatError, match=r"layer-0001.safetensors needs to hold '2'; it holds '0'"):
        reconstruct(net(), X, partial=tmp_path)
    with pytest.raises(StorageError, match=r"partial needs the path of a folder"):
        reconstruct(net(), X, partial=piece)
