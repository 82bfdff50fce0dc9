"""Runs that are killed at random moments and started again end with the bytes of a run that was not killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

N_KILLS = 20
SCRIPT = '''
import json, os, random, signal, sys, time, traceback
from pathlib import Path
import lightning_fabric, torch
from safetensors.torch import save
from torch import nn
from onlynorm.cli import main
from onlynorm.data import digits
from onlynorm.tuning import Schedule, fit, only_norms

torch.set_num_threads(1)
kind, n_kills = sys.argv[1], int(sys.argv[2])
split = digits()
data = split.train_inputs[:600], split.train_labels[:600]


def run_fit():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, 10), nn.BatchNorm1d(10)
    )
    only_norms(model, also="4")
    schedule = Schedule(epochs=20, batch_size=30, optimizer="adamw", lr=0.01, seed=5)
    result = fit(model, data, test=data, schedule=schedule, checkpoint="run.safetensors", save_every=7)
    rows = [{key: value for key, value in row.items() if key != "seconds"} for row in result.history]
    Path("result.tmp").write_bytes(save(model.state_dict()) + json.dumps(rows).encode())
    os.replace("result.tmp", "result")


def run_tune():
    sys.argv = ["onlynorm", "tune", "mlp_bn", "--data", "digits", "--epochs", "25", "--adapter", "result", "--json"]
    sys.stdout = sys.stderr = open(os.devnull, "w")
    main()


def attempt(seconds):
    """Runs in a process of its own, killed after so many seconds; whether it came to its end."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            {"fit": run_fit, "tune": run_tune}[kind]()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        os._exit(code)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert status == 0, status
            return True
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


started = time.monotonic()
assert attempt(600)
whole = time.monotonic() - started
wanted = Path("result").read_bytes()
moments = random.Random(7)
n_killed = n_ended = n_resumed = 0
for name in ("result", "run.safetensors"):
    Path(name).unlink(missing_ok=True)
while n_killed < n_kills or n_ended == 0:
    n_resumed += any(Path(name).exists() for name in ("run.safetensors", "result.run"))
    if attempt(moments.uniform(0.0, 0.4 * whole) if n_killed < n_kills else 600):
        assert Path("result").read_bytes() == wanted, f"other bytes after {n_killed} kills"
        n_ended += 1
        for name in ("result", "run.safetensors"):
            Path(name).unlink(missing_ok=True)
    else:
        n_killed += 1
print(json.dumps({"killed": n_killed, "ended": n_ended, "resumed": n_resumed}))
'''


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fit", "tune"])
def test_a_run_killed_at_twenty_random_moments_ends_with_the_same_bytes(kind: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, kind, str(N_KILLS)],
        cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts["killed"] == N_KILLS
    assert counts["ended"] >= 1
    assert counts["resumed"] >= 1
