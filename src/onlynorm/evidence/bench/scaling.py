"""The cost of a whole network against its number of weights: seconds, memory and file size.

Networks like ResNet-50 of several widths go through plan, reconstruct, save, load and verify. The time of small
networks is dominated by Python, so the two widest are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from onlynorm.evidence.bench.networks import bottleneck_network
from onlynorm.evidence.cache import OnMessage
from onlynorm.evidence.harness import Goal
from onlynorm.evidence.race import Column
from onlynorm.evidence.timing import once, one_thread
from onlynorm.files import load, save
from onlynorm.reconstruction import Wide, plan, reconstruct, verify
from onlynorm.seeds import own_randomness

WIDTHS, QUICK_WIDTHS = (16, 32, 64), (4, 8)
"""Channels of the first stage; ResNet-50 has 64, and 25 million weights."""
LINEAR, STORED = 1.5, 2.05
"""Goals: growth of seconds and bytes per weight with the width, stored values per weight."""


@dataclass(frozen=True)
class ScalingRow:
    """The cost of a network of bottleneck blocks of one width, from plan to verify, with id_cond features."""

    width: int
    n_weights: int
    plan_seconds: float
    seconds: float
    save_seconds: float
    load_seconds: float
    verify_seconds: float
    memory: int
    stored: float
    error: float


SCALING_COLUMNS: dict[str, Column] = {
    "width": "width", "weights": "n_weights:,", "plan (s)": "plan_seconds:short",
    "reconstruct (s)": "seconds:short", "save (s)": "save_seconds:short", "load (s)": "load_seconds:short",
    "verify (s)": "verify_seconds:short",
    "us / weight": lambda row: f"{1e6 * row.seconds / row.n_weights:.2f}", "peak memory": "memory:bytes",
    "float64 / weight": lambda row: f"{row.memory / 8 / row.n_weights:.2f}",
    "stored / weight": "stored:.3f", "float32 error": "error:.1e",
}  # fmt: skip
"""Columns of the table with a row per width."""


def scaling_rows(out: Path, status: OnMessage, *, quick: bool) -> list[ScalingRow]:
    """A row per width, on one thread; networks are saved temporarily in `out`."""
    with one_thread():
        return [scaling_row(width, out, status) for width in (QUICK_WIDTHS if quick else WIDTHS)]


def scaling_row(width: int, out: Path, status: OnMessage, *, size: int = 64, n_samples: int = 8) -> ScalingRow:
    """One width: a ReLU between the frozen layers, images of `size` x `size`."""
    status(f"id_cond at width {width}: plan, reconstruct, save, load, verify")
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"bottleneck-{width}.safetensors"
    with own_randomness(0):
        target, inputs = bottleneck_network(width), torch.randn(n_samples, 3, size, size)
        wide = Wide(features="id_cond", activation=nn.ReLU())
        reconstruct(nn.Sequential(nn.Conv2d(3, 4, 3)).eval(), inputs, wide)  # libraries are loaded
    planned = once(lambda: plan(target, inputs, wide))
    built = once(lambda: reconstruct(target, inputs, wide), metered=True)
    saved = once(lambda: save(built.result, path))
    loaded = once(lambda: load(path, like=bottleneck_network(width)))
    checked = once(lambda: verify(target, loaded.result, inputs))
    n_weights, n_stored = sum(math.prod(layer.shape) for layer in built.result.layers), path.stat().st_size / 4
    path.unlink()
    return ScalingRow(
        width, n_weights, planned.seconds, built.seconds, saved.seconds, loaded.seconds, checked.seconds, built.memory,
        n_stored / n_weights, checked.result.relative_error,
    )  # fmt: skip


def scaling_goals(rows: Sequence[ScalingRow]) -> Iterator[Goal]:
    """Cost proportional to the number of weights, from the second width on."""
    if len(rows) < 2:
        return
    first, last = rows[-2:]
    before, after, n_more = f"at {first.width}", f"at width {last.width}", last.n_weights / first.n_weights
    slower, larger = last.seconds / first.seconds / n_more, last.memory / first.memory / n_more
    aim = f"id_cond: seconds and bytes per weight {after} at most {LINEAR:g} times those {before}"
    yield Goal(aim, f"{slower:.2f} and {larger:.2f} times", max(slower, larger) <= LINEAR)
    aim = f"id_cond: a file with at most {STORED} values per weight {after}"
    yield Goal(aim, f"{last.stored:.3f}", last.stored <= STORED)
