"""How a memorizer behaves off its sample: held-out data, noise of growing size, and the distance to a threshold.

A memorizer does not generalise. Away from its points it is mostly silent, every output exactly zero (`SILENT`): either
no neuron fires and the flag stays up, or one fires by the wrong amount and the input ends near no class vector. A
neuron fires on a half-space beyond its own point, so an input that lies far out in the direction of some point is moved
by it, and now and then it lands near a class, right or wrong. What is measured here says how often each happens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from onlynorm.data import seeded
from onlynorm.errors import ShapeError, ValueRangeError
from onlynorm.identity.memorizer import ROWS, SILENT, Block, Memorizer

SIZES = (0.0, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
"""Sizes of the noise: its length over the median distance of a point from the mean."""
MOST = 2000
"""Training points that noise is added to."""


@dataclass(frozen=True)
class Answers:
    """Shares of the inputs with the right class, with no class, and with a wrong one."""

    right: float
    silent: float
    wrong: float

    def __str__(self) -> str:
        return f"{100 * self.right:.2f} % right, {100 * self.silent:.2f} % silent, {100 * self.wrong:.2f} % wrong"


@dataclass(frozen=True, kw_only=True)
class OffSample:
    """What a memorizer does off its sample.

    `margins` are the smallest, the median and the largest distance from a training point to the nearest threshold it
    meets, over `scale`, the median distance of a point from the mean; `noise` has (size, answers) rows in that unit;
    `chance` is the share of the commonest held-out class.
    """

    scale: float
    margins: tuple[float, float, float]
    noise: tuple[tuple[float, Answers], ...]
    n_noisy: int
    held_out: Answers | None
    n_held_out: int
    chance: float

    def __str__(self) -> str:
        low, middle, high = self.margins
        lines = [f"distance to the nearest threshold: {low:.1e}, median {middle:.1e}, at most {high:.1e}"]
        lines += [f"noise of size {size:g}: {answers}" for size, answers in self.noise]
        if self.held_out is not None:
            lines.append(
                f"{self.n_held_out} held-out samples: {self.held_out}; always the commonest class would be "
                f"{100 * self.chance:.2f} % right"
            )
        lines.append("lengths are shares of the median distance of a point from the mean")
        return "\n".join(lines)


@torch.no_grad()
def measure_off_sample(
    network: Memorizer,
    x: Tensor,
    *,
    labels: Int[Tensor, " n"],
    held_out: tuple[Tensor, Tensor] | None = None,
    sizes: Sequence[float] = SIZES,
    most: int = MOST,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> OffSample:
    """Margins at the training points, answers under noise of each size, and answers on held-out samples.

    Noise is gaussian and the same for a seed, added to at most `most` points, evenly spread over the sample.
    """
    if not all(size >= 0.0 for size in sizes) or most < 1:
        raise ValueRangeError(
            f"sizes of noise need to be zero or more, and most at least one; got {list(sizes)} and {most}. Try 0.01."
        )
    _need_labels(network.rows(x), labels)
    points = network.rows(x).double()
    step = max(1, -(-len(points) // most))
    chosen, expected = points[::step], labels[::step]
    scale = float(torch.linalg.vector_norm(points - points.mean(0), dim=1).median()) or 1.0
    total = len(sizes) + 2
    distances = margins(network, chosen) / scale
    _tell(progress, 1, total)
    rows = []
    for place, size in enumerate(sizes):
        noisy = chosen
        if size:
            drawn = torch.randn(chosen.shape, generator=seeded(seed), dtype=torch.float64).to(chosen)
            noisy = chosen + drawn * (size * scale / chosen.shape[1] ** 0.5)
        rows.append((float(size), _judge(network.classify(noisy), expected)))
        _tell(progress, place + 2, total)
    answers, n_held_out, chance = None, 0, 0.0
    if held_out is not None:
        inputs, truth = held_out
        _need_labels(network.rows(inputs), truth)
        answers, n_held_out = _judge(network.classify(inputs), truth), len(truth)
        chance = float(truth.unique(return_counts=True)[1].amax()) / n_held_out
    _tell(progress, total, total)
    return OffSample(
        scale=scale,
        margins=(float(distances.amin()), float(distances.median()), float(distances.amax())),
        noise=tuple(rows), n_noisy=len(chosen), held_out=answers, n_held_out=n_held_out, chance=chance,
    )  # fmt: skip


@torch.no_grad()
def margins(network: Memorizer, x: Tensor) -> Float[Tensor, " n"]:
    """For each input, how far it may move before any neuron it meets up to its own block changes its mind.

    Pre-activations over the length of their gradient with respect to the input, the smallest over all blocks up to and
    including the first in which a neuron fires. Inside that distance the same neurons fire.
    """
    rows, lift = network.rows(x), network.lift.weight
    found = []
    steepness = []
    for block in network.blocks:
        assert isinstance(block, Block)
        steepness.append(torch.linalg.vector_norm(block.inner.weight @ lift, dim=1))
    for part in rows.split(ROWS):
        h = network.enter(part)
        nearest, waits = h.new_full((len(h),), torch.inf), torch.ones(len(h), dtype=torch.bool, device=h.device)
        for block, steep in zip(network.blocks, steepness, strict=True):
            assert isinstance(block, Block)
            said = block.inner(h)
            # Neurons that only fill up the last block have no gradient and no threshold to cross.
            distance = torch.where(steep > 0.0, said.abs() / steep, torch.inf).amin(1)
            nearest = torch.where(waits, torch.minimum(nearest, distance), nearest)
            waits &= (said <= 0.0).all(1)
            h = h + block.outer(functional.relu(said))
        found.append(nearest)
    return torch.cat(found)


def _judge(answers: Tensor, expected: Tensor) -> Answers:
    n, right, silent = len(answers), int((answers == expected).sum()), int((answers == SILENT).sum())
    return Answers(right / n, silent / n, (n - right - silent) / n)


def _tell(progress: Callable[[int, int], None] | None, done: int, total: int) -> None:
    if progress is not None:
        progress(done, total)


def _need_labels(rows: Tensor, labels: Tensor) -> None:
    if labels.shape != rows.shape[:1] or labels.is_floating_point():
        raise ShapeError(
            f"measure_off_sample needs one whole-number label per sample, {len(rows)}; got {labels.dtype} of shape "
            f"{tuple(labels.shape)}. It judges classes; real targets have none."
        )
