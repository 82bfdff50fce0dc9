"""The cost of norm-only layers compared with ordinary layers, with a preconditioned step, and with blocks of features.

The forward and backward passes of structured layers are compared with those of the ordinary layer. ID cond computes its
weight without cost. Ortho cond needs two products, a fraction 2 / (3 load) of the work, where the load is the number of
samples and positions per input and output of the layer; for few samples it rotates these instead, and a square layer
needs 7 / 3 of the operations of an ordinary one. Steps of SGD on random features are compared for gamma and, with
`follow_weights`, for the effective weight. Another table shows the cost against the number of blocks. All times are
processor times on one thread, best of several repeats.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onlynorm.evidence.bench.blocks import BLOCK_COLUMNS, EXCESS, NOISE, BlockRow, block_goals, measure_blocks
from onlynorm.evidence.harness import Goal, Session, Sizes, setting
from onlynorm.evidence.race import Column, Race, RaceResult
from onlynorm.evidence.timing import one_thread
from onlynorm.evidence.timing import race as take_turns
from onlynorm.frozen import FrozenOptions, wrap
from onlynorm.optim import follow_weights
from onlynorm.seeds import own_randomness

ORDINARY, PLAIN, FOLLOWED, ORTHO = "ordinary", "SGD on gamma", "SGD by follow_weights", "ortho_cond"
METHODS: dict[str, dict[str, Any]] = {
    "id_cond": {}, "id_cond, density 0.2": {"density": 0.2}, "id_cond_minimal": {"features": "id_cond_minimal"},
    ORTHO: {"features": "ortho_cond"},
}  # fmt: skip
LAYER_FACTOR, STEP_FACTOR = 1.3, 2.0
ORTHO_LOAD = 3.0
"""Load from which Ortho cond is tested; below 2.2 it needs too many operations."""
FEW_FACTOR = 7 / 3
"""Limit of the cost of rotating few samples, relative to an ordinary layer: four products in addition to three."""


@dataclass(frozen=True)
class LayersSizes(Sizes):
    """Repeats; a quick run omits the step with 32 channels, whose factorization takes minutes."""

    repeats: int = setting(15, help="Number of repeats; the best one counts.")


@dataclass(frozen=True)
class CostRow:
    """Seconds of one method on one layer; `ratio` is relative to the ordinary layer, or to the plain step.

    `load` is the number of samples and positions per input and output; a large one makes the weight of Ortho cond
    relatively cheap.
    """

    layer: str
    method: str
    seconds: float
    ratio: float
    n_trained: int
    n_frozen: int
    load: float = 0.0


def _costs(compared: str) -> dict[str, Column]:
    return {
        "layer": "layer", "method": "method", "ms": "seconds*1e3:.2f", compared: "ratio:.2f", "trained": "n_trained:,",
        "frozen": "n_frozen:,",
    }  # fmt: skip


race = Race(
    "layers", "Norm-only layers against ordinary ones, preconditioned steps, and features in blocks.", LayersSizes,
    columns={
        "layers": _costs("x ordinary"), "few": _costs("x ordinary"), "steps": _costs("x plain step"),
        "blocks": BLOCK_COLUMNS,
    },
)  # fmt: skip


@race.measure
def measure(sizes: LayersSizes, session: Session) -> Iterator[tuple[str, list[CostRow] | list[BlockRow]]]:
    """Layers, few samples, steps and blocks."""
    with one_thread():
        for name, plain, x in _subjects():
            session.status(f"{name}: forward and backward")
            yield "layers", measure_layer(name, plain, x, repeats=sizes.repeats)
        session.status("few samples: forward and backward")
        yield "few", measure_layer(*_linear(256, n_samples=32), repeats=4 * sizes.repeats, methods=(ORTHO,))
        for n_channels in (16,) if sizes.quick else (16, 32):
            session.status(f"{n_channels} channels: steps")
            yield "steps", measure_step(n_channels, repeats=sizes.repeats)
        session.status("blocks")
        yield "blocks", measure_blocks(32, repeats=max(1, sizes.repeats // 5))


@race.goals
def goals(result: RaceResult[LayersSizes]) -> Iterator[Goal]:
    """Limits of the ratios that this run measured."""
    for method in METHODS:
        least = ORTHO_LOAD if method == ORTHO else 0.0
        rows = [row for row in result.parts["layers"] if row.method == method and row.load >= least]
        if rows:
            worst = max(rows, key=lambda row: row.ratio)
            aim = f"{method}: forward and backward at most {LAYER_FACTOR:g} times the ordinary layer's"
            aim += f", from a load of {least:g} on" if least else ""
            yield Goal(aim, f"{worst.ratio:.2f} times at {worst.layer}", worst.ratio <= LAYER_FACTOR)
    for row in result.parts["few"]:
        if row.method == ORTHO:
            aim = f"{ORTHO}, few samples: forward and backward at most 7 / 3 of the ordinary layer's"
            yield Goal(aim, f"{row.ratio:.2f} times at {row.layer}", row.ratio <= NOISE * FEW_FACTOR)
    for row in result.parts["steps"]:
        if row.method == FOLLOWED:
            aim = f"{row.layer}: a preconditioned step costs at most {STEP_FACTOR:g} times the plain one"
            yield Goal(aim, f"{row.ratio:.2f} times", row.ratio <= STEP_FACTOR)
    yield from block_goals(result.parts["blocks"])


def measure_layer(
    name: str, plain: nn.Linear | nn.Conv2d, x: Tensor, *, repeats: int, methods: Iterable[str] = tuple(METHODS)
) -> list[CostRow]:
    """Forward and backward passes, including the gradient of the input, of an ordinary and of structured layers."""
    layers: dict[str, nn.Module] = {ORDINARY: plain}
    layers |= {method: wrap(plain, FrozenOptions(**METHODS[method])) for method in methods}
    x = x.clone().requires_grad_()
    towards = torch.ones_like(plain(x))
    load = towards.numel() / plain.weight.flatten(1).shape[0] / sum(plain.weight.flatten(1).shape)

    def run(method: str) -> object:
        return torch.autograd.grad(layers[method](x), [x, *layers[method].parameters()], towards)

    return _rows(name, layers, run, against=ORDINARY, repeats=repeats, load=load)


def measure_step(n_channels: int, *, repeats: int, n_images: int = 128) -> list[CostRow]:
    """Whole steps of SGD on a 3 x 3 convolution: ordinary, on the gammas of he_normal, and by `follow_weights`."""
    name, plain, x = _convolution(n_channels, n_images=n_images)
    options = FrozenOptions(features="he_normal", excess=EXCESS)
    layers: dict[str, nn.Module] = {PLAIN: wrap(plain, options), FOLLOWED: wrap(plain, options), ORDINARY: plain}
    optimizers: dict[str, torch.optim.Optimizer] = {  # the cost of a step does not depend on its size
        PLAIN: torch.optim.SGD(layers[PLAIN].parameters(), lr=1e-6),
        FOLLOWED: follow_weights(layers[FOLLOWED], torch.optim.SGD, lr=1e-6),
        ORDINARY: torch.optim.SGD(plain.parameters(), lr=1e-6),
    }

    def step(method: str) -> None:
        optimizers[method].zero_grad()
        layers[method](x).square().mean().backward()
        optimizers[method].step()

    return _rows(name, layers, step, against=PLAIN, repeats=repeats)


def _subjects() -> list[tuple[str, nn.Linear | nn.Conv2d, Tensor]]:
    return [*(_linear(256, n_samples=load * 512) for load in (2, 3, 8)), _convolution(32, n_images=32)]


def _convolution(n_channels: int, *, n_images: int) -> tuple[str, nn.Linear | nn.Conv2d, Tensor]:
    name = f"Conv2d {n_channels} -> {n_channels}, 3 x 3, {n_images} images of 16 x 16"
    with own_randomness(0):
        return name, nn.Conv2d(n_channels, n_channels, 3, padding=1), torch.randn(n_images, n_channels, 16, 16)


def _linear(n: int, *, n_samples: int) -> tuple[str, nn.Linear | nn.Conv2d, Tensor]:
    with own_randomness(0):
        return f"Linear {n} -> {n}, {n_samples:,} samples", nn.Linear(n, n), torch.randn(n_samples, n)


def _rows(
    name: str, layers: dict[str, nn.Module], run: Callable[[str], object], *, against: str, repeats: int,
    load: float = 0.0,
) -> list[CostRow]:  # fmt: skip
    """A row for every method, with the ratio to the one named `against`."""
    times = take_turns({method: functools.partial(run, method) for method in layers}, rounds=repeats)
    return [
        CostRow(
            name, method, times[method].seconds, times[method].seconds / times[against].seconds,
            sum(p.numel() for p in layer.parameters()), getattr(getattr(layer, "frozen", None), "n_frozen", 0), load,
        )
        for method, layer in layers.items()
    ]  # fmt: skip
