"""Two processes train as one where theory says so, and where not, what differs: gloo on the CPU, one real run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from onlynorm.seeds import seeded
from onlynorm.tuning import Schedule, fit, only_norms
from onlynorm.tuning.batches import order_of

POLICIES = ("freeze", "track")
SCHEDULE = Schedule(epochs=2, batch_size=32, lr=0.1, seed=5)
SCRIPT = f"""
import atexit, os, sys
import torch
atexit.register(lambda: print("group at exit:", torch.distributed.is_initialized()))
sys.path.insert(0, {str(Path(__file__).parent)!r})
from safetensors.torch import save_file
from test_train_two_processes import POLICIES, train
for policy in POLICIES:
    model = train(policy, devices=2, strategy="ddp")
    save_file(model.state_dict(), f"{{policy}}-{{os.environ.get('LOCAL_RANK', '0')}}.safetensors")
"""


def data() -> tuple[Tensor, Tensor]:
    """96 samples are three batches of 32, half a batch for each of two processes."""
    inputs = torch.randn(96, 6, generator=seeded(0), dtype=torch.float64)
    return inputs, torch.arange(96) % 3


def make() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = (nn.BatchNorm1d(6), nn.Linear(6, 12), nn.LayerNorm(12), nn.ReLU(), nn.Linear(12, 8))
        return nn.Sequential(*layers, nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()


def train(policy: str, *, devices: int, strategy: str = "auto") -> nn.Module:
    model = make()
    only_norms(model, statistics=policy)
    fit(model, data(), schedule=SCHEDULE, accelerator="cpu", devices=devices, strategy=strategy, precision="64-true")
    return model


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one run of two processes: what each of them has at the end, under each policy."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "run.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "run.py"], cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    # A process that exits within its group may abort: gloo's threads need the interpreter that is going away.
    assert "group at exit: False" in done.stdout
    return folder


def read(folder: Path, policy: str, rank: int) -> dict[str, Tensor]:
    return load_file(folder / f"{policy}-{rank}.safetensors")


def test_with_frozen_statistics_two_processes_are_one_with_the_joint_batch(ran: Path) -> None:
    # Equal shares of a mean loss: the mean of the two gradients is the gradient of the joint batch.
    wanted = train("freeze", devices=1).state_dict()
    before = make().state_dict()
    for rank in (0, 1):
        for name, value in read(ran, "freeze", rank).items():
            # Six steps of sums of at most 32 terms in another order; 1e-12 leaves a thousand roundings of room.
            torch.testing.assert_close(value, wanted[name], rtol=1e-12, atol=1e-12)
    moved = {name for name, value in wanted.items() if not torch.equal(value, before[name])}
    assert moved == {f"{place}.{kind}" for place in (0, 2, 5) for kind in ("weight", "bias")}


def test_both_processes_hold_the_same_parameters_to_the_last_bit(ran: Path) -> None:
    names = [name for name, _ in make().named_parameters()]
    for policy in POLICIES:
        first, second = (read(ran, policy, rank) for rank in (0, 1))
        assert all(torch.equal(first[name], second[name]) for name in names)


def test_tracked_statistics_are_those_of_the_first_processes_share(ran: Path) -> None:
    # Without SyncBatchNorm, which needs GPUs, each process normalises by its own share of a batch; before each step the
    # first one's running statistics go to all. The first norm sees the data themselves, so its mean is known.
    inputs, _ = data()
    expected = torch.zeros(6, dtype=torch.float64)
    for epoch in range(2):
        order = order_of(96, seed=SCHEDULE.seed, epoch=epoch)
        for batch in order.split(32):
            expected = 0.9 * expected + 0.1 * inputs[batch[0::2]].mean(0)
    first = read(ran, "track", 0)
    torch.testing.assert_close(first["0.running_mean"], expected, rtol=1e-12, atol=1e-12)
    assert int(first["0.num_batches_tracked"]) == 6
    alone = train("track", devices=1).state_dict()
    assert not torch.allclose(first["0.running_mean"], alone["0.running_mean"], rtol=1e-3)
