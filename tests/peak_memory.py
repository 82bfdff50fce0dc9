"""Planned and measured memory and seconds of a reconstruction, in a process of its own.

    python tests/peak_memory.py '{"network": "resnet", "sizes": [8], "features": "id_cond"}'

prints one row: the peak of resident memory above its level before the run, and the processor time on one thread.
Without a case it prints the table of docs/reconstruct.md, each row measured in a process of its own: ten minutes.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import scipy.linalg
import scipy.sparse.linalg
import scipy.special  # noqa: F401
import torch
from rebuilding import plan_with, reconstruct_with
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.memory import MemoryMeter, readable, release_free_memory
from onlynorm.models import CifarResNet, mlp, vit
from onlynorm.seeds import own_randomness

TABLE: dict[str, dict[str, Any]] = {
    "MLP 64-32-10, he_normal": {"network": "mlp", "sizes": [64, 32, 10]},
    "MLP 64-32-10, he_normal, from the seed": {"network": "mlp", "sizes": [64, 32, 10], "storage": "seed"},
    "MLP 256-128-10, id_cond": {"network": "mlp", "sizes": [256, 128, 10], "features": "id_cond"},
    "MLP 256-128-10, ortho_cond, from the seed": {
        "network": "mlp", "sizes": [256, 128, 10], "features": "ortho_cond", "storage": "seed"
    },
    "2 convolutions, 16 channels, 16 x 16, he_normal": {"network": "conv", "sizes": [16, 16]},
    "2 convolutions, 8 channels, 8 x 8, deep, orthogonal": {
        "network": "conv", "sizes": [8, 8], "construction": "deep", "features": "orthogonal"
    },
    "transformer, 2 layers of width 48, id_cond": {
        "network": "transformer", "sizes": [48, 4, 96, 2], "features": "id_cond"
    },
    "vision transformer, 2 layers of width 48, id_cond": {"network": "vit", "sizes": [48, 2], "features": "id_cond"},
    "ResNet-8, id_cond": {"network": "resnet", "sizes": [8], "features": "id_cond"},
    "MiniLM's shape (6 layers of width 384), id_cond, 16 samples": {
        "network": "transformer", "sizes": [384, 12, 1536, 6], "features": "id_cond", "n_samples": 16
    },
    "ResNet-56, id_cond, 16 samples": {
        "network": "resnet", "sizes": [56], "features": "id_cond", "n_samples": 16
    },
    "ResNet-56, he_normal, 16 samples": {"network": "resnet", "sizes": [56], "n_samples": 16},
}  # fmt: skip


class Layer(nn.Module):
    """A layer of BERT: attention of four linear layers, and a feed-forward network of two."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        parts = (
            layer(x).view(n, length, self.heads, -1).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(n, length, width)
        x = self.first_norm(x + self.out(mixed))
        return self.second_norm(x + self.down(functional.gelu(self.up(x))))


def make(kind: str, sizes: list[int], n_samples: int) -> tuple[nn.Module, Tensor]:
    """A network of this kind and a batch for it."""
    if kind == "mlp":
        return mlp(sizes), torch.randn(n_samples, sizes[0])
    if kind == "conv":
        channels, size = sizes
        layers = [nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2)]
        return nn.Sequential(layers[0], nn.ReLU(), layers[1]), torch.randn(n_samples, channels, size, size)
    if kind == "layer":
        channels, size = sizes
        layer = nn.Conv2d(channels, channels, 3, padding=1)
        return nn.Sequential(layer), torch.randn(n_samples, channels, size, size)
    if kind == "transformer":
        width, heads, hidden, depth = sizes
        blocks = [Layer(width, heads, hidden) for _ in range(depth)]
        return nn.Sequential(nn.Embedding(500, width), *blocks), torch.randint(0, 500, (n_samples, 32))
    if kind == "vit":
        return vit(width=sizes[0], depth=sizes[1]), torch.randn(n_samples, 3, 32, 32)
    return CifarResNet(*sizes), torch.randn(n_samples, 3, 32, 32)


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """The row of one case: a kind of network, its sizes, and options of the reconstruction."""
    torch.set_num_threads(1)
    choices = dict(case)
    kind, sizes, n_samples = choices.pop("network"), choices.pop("sizes"), choices.pop("n_samples", 64)
    choices["activation"] = {"relu": nn.ReLU(), "tanh": nn.Tanh(), "linear": None}[choices.pop("activation", "relu")]
    with own_randomness(0):
        network, inputs = make(kind, sizes, n_samples)
        small = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 6)).eval()
        images = torch.randn(4, 3, 4, 4)
    # Libraries are loaded and buffers made by a small run of the same kind.
    reconstruct_with(small, images, **choices)
    plan_with(network.eval(), inputs, **choices)
    planned = plan_with(network, inputs, **choices)
    gc.collect()
    release_free_memory()
    start = time.process_time()
    with MemoryMeter() as meter:
        made = reconstruct_with(network, inputs, **choices)
    seconds = time.process_time() - start
    return {
        **case, "planned memory": planned.memory.total, "memory": meter.peak, "planned seconds": planned.seconds,
        "seconds": seconds, "methods": sorted({layer.method for layer in made.layers}),
    }  # fmt: skip


def measure_in_subprocess(case: dict[str, Any]) -> dict[str, Any]:
    """The row of a case, measured in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, json.dumps(case)]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr
    row: dict[str, Any] = json.loads(ran.stdout)
    return row


def table() -> Iterator[str]:
    """The lines of the table of the documentation."""
    yield "| network | memory, planned | measured | seconds, planned | measured |"
    yield "| --- | --- | --- | --- | --- |"
    for name, case in TABLE.items():
        row = measure_in_subprocess(case)
        memory = (readable(row[key]) for key in ("planned memory", "memory"))
        seconds = (f"{row[key]:.2g}" if row[key] < 10 else f"{row[key]:.0f}" for key in ("planned seconds", "seconds"))
        yield f"| {' | '.join([name, *memory, *seconds])} |"


if __name__ == "__main__":
    for line in table() if len(sys.argv) < 2 else [json.dumps(measure(json.loads(sys.argv[1])))]:
        print(line, flush=True)
