"""`memorize`: a residual network that maps every point of a sample to its label or target, built and not trained.

    lift       x -> (z, 1): a random projection to width - 1 coordinates, centred and scaled to length about one; flag 1
    blocks     neuron i fires at point i and at no later one; what it adds carries the point to (v_i, -1)
    read       from the class vectors v (or the embedded real targets) to the outputs

Points go by decreasing length of z, `width` to a block: `thresholds` says why that works for any distinct points, and
what the paper's order misses. All blocks are known at once: a point stays bit for bit where it is until its own block,
and the flag keeps those that arrived away from every later neuron.

Theory: hardt_ma2017:thm-3.2, hardt_ma2017:lemma-B.1, hardt_ma2017:lemma-B.2
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Shaped
from torch import Tensor

from onlynorm.errors import ToleranceError, UnknownNameError, ValueRangeError
from onlynorm.features.streams import as_integer, check_seed
from onlynorm.identity.memorizer import Block, Memorizer, MemorizerFacts
from onlynorm.identity.points import Sample, collect, merge
from onlynorm.identity.readout import EPS, RADIUS, Readout, choose_readout, normals
from onlynorm.identity.thresholds import Separation, by_length, fit_outgoing, separate
from onlynorm.solvers.memory import memory_limit, need_memory

PROJECTIONS = ("random", "principal")
FACTOR = 4.0
"""Width over the logarithm of the number of points."""
_POWER = -0.25
"""Principal coordinates are scaled by this power of their variance: half-way to whitening gave the widest margins."""

Progress = Callable[[int, int], None]


def memorize(
    x: Shaped[Tensor, "n ..."],
    labels: Shaped[Tensor, "n ..."],
    *,
    width: int | None = None,
    n_classes: int | None = None,
    projection: str = "random",
    seed: int = 0,
    progress: Progress | None = None,
) -> Memorizer:
    """A residual ReLU network that sends every point x[i] to its label, one-hot, or to its real target.

    Whole-number labels (n,) are classes; floating-point ones (n,) or (n, outputs) are real targets. Inputs of any
    dtype count as the float64 numbers they are: for those the network is exact, the class at every point, real
    outputs up to `facts.rounding`. Repeated points merge if their targets agree and are refused if not.

    `width` is 4 log n if left out, and more for very many classes or outputs. `projection="principal"` takes the
    leading principal directions instead of random ones: wider margins, but points that differ only in what it drops
    are refused. `progress` hears (points, of how many) while thresholds are sought.

    Theory: hardt_ma2017:thm-3.2
    """
    started = time.perf_counter()
    seed = check_seed(seed)
    if projection not in PROJECTIONS:
        raise UnknownNameError("projection", projection, PROJECTIONS)
    sample = collect(x, labels, n_classes=n_classes)
    width = _choose_width(sample, width)
    _need_room(sample, width)
    lift = _draw_lift(sample.points, width - 1, projection=projection, seed=seed)
    hidden = lift(sample.points)
    order = _order(sample, hidden)
    targets, hidden, noise = sample.targets[order], hidden[order], _rounding_of(lift, sample.points, hidden)[order]
    noise = noise.flip(0).cummax(0).values.flip(0)  # a neuron has to tell its point from any later one
    found = separate(hidden, noise=noise, names=sample.places[order], progress=progress)
    read = choose_readout(targets, sample.n_outputs, width=width, seed=seed)
    filled = _fill_blocks(hidden, found, read.goals, noise, width)
    network = Memorizer(
        sample.points.shape[1], sample.n_outputs, width=width, n_blocks=len(filled.inner), n_cues=len(read.cues)
    ).to(hidden.device)
    _copy_into(network, lift, filled, read)
    n, n_parameters = len(hidden), network.n_parameters
    network.facts = MemorizerFacts(
        n_points=n, n_merged=len(x) - n, n_outputs=sample.n_outputs, width=width, n_blocks=len(filled.inner),
        n_parameters=n_parameters, constant=n_parameters / (n * math.log(max(n, 2)) + sample.n_outputs**2),
        smallest_gap=filled.smallest_gap, n_tilted=found.n_tilted, rounding=read.error(filled.error), seed=seed,
        projection=projection, seconds=time.perf_counter() - started,
    )  # fmt: skip
    if not sample.is_real:
        _need_classes(network, sample)
    return network


@dataclass(frozen=True)
class _Lift:
    """x -> weight x + bias: centred, projected, scaled to a median length of one."""

    weight: Tensor
    bias: Tensor

    def __call__(self, points: Tensor) -> Tensor:
        return points @ self.weight.mT + self.bias


@dataclass(frozen=True)
class _Filled:
    """The weights of all blocks; `error` is how far from its goal rounding may leave a point."""

    inner: Tensor
    shifts: Tensor
    outer: Tensor
    smallest_gap: float
    error: float


def _choose_width(sample: Sample, width: int | None) -> int:
    """4 log n, and at least what the goals need: 4 log r coordinates for classes, one per real output, and a flag."""
    n, r = len(sample.points), sample.n_outputs
    least = r + 1 if sample.is_real else 3
    if width is None:
        roomy = 0 if sample.is_real else math.ceil(4.0 * math.log(r)) + 1
        return max(3, least, roomy, math.ceil(FACTOR * math.log(n)))
    asked = as_integer(width)
    if asked is None or asked < max(3, least):
        raise ValueRangeError(
            f"width needs a whole number from {max(3, least)} on, room for the goals and a flag; got {width!r}. Leave "
            "it out, or choose a larger one."
        )
    return asked


def _need_room(sample: Sample, width: int) -> None:
    n_cues = 2 * sample.n_outputs if sample.is_real else sample.n_outputs
    n_blocks = -(-len(sample.points) // width)
    size = 8 * (n_blocks * 4 * width**2 + n_cues * (sample.n_outputs + width) + width * sample.points.shape[1])
    cure = "Number the classes without gaps, or take fewer points."
    need_memory(f"a memorizer of {n_blocks} blocks and {sample.n_outputs} outputs", size, memory_limit(None), cure)


def _draw_lift(points: Tensor, size: int, *, projection: str, seed: int) -> _Lift:
    mean = points.mean(0)
    if projection == "random":
        weight = normals(seed, "memorize/lift", points.shape[1], size).mT.to(points)
    else:
        centred = points - mean
        variances, axes = torch.linalg.eigh(centred.mT @ centred / len(points))
        kept = min(size, int((variances > EPS * len(variances) * variances[-1]).sum()))
        weight = points.new_zeros(size, points.shape[1])
        if kept:
            weight[:kept] = (axes[:, -kept:] * variances[-kept:] ** _POWER).mT
    lengths = torch.linalg.vector_norm(points @ weight.mT - weight @ mean, dim=1)
    scale = float(lengths.median()) or float(lengths.amax()) or 1.0
    if not math.isfinite(scale):
        raise ValueRangeError(
            "memorize needs points whose squares fit into float64; got numbers up to "
            f"{float(points.abs().amax()):.1e}. Scale the inputs down."
        )
    weight = weight / scale
    return _Lift(weight, -(weight @ mean))


def _order(sample: Sample, hidden: Tensor) -> Tensor:
    """The order in which points are moved; those the projection cannot tell apart go as one if their targets agree."""
    kept = merge(hidden, sample.targets, sample.places, what="projected").to(hidden.device)
    return kept[by_length(hidden[kept])]


def _rounding_of(lift: _Lift, points: Tensor, hidden: Tensor) -> Tensor:
    """By how much rounding may move each hidden point, at most: n eps |a| |b| for every inner product of length n."""
    size = torch.linalg.matrix_norm(lift.weight) * torch.linalg.vector_norm(points, dim=1)
    lifted = (points.shape[1] + 1) * (size + torch.linalg.vector_norm(lift.bias))
    return EPS * (lifted + (hidden.shape[1] + 2) * (1.0 + torch.linalg.vector_norm(hidden, dim=1)))


def _fill_blocks(hidden: Tensor, found: Separation, goals: Tensor, noise: Tensor, width: int) -> _Filled:
    """The weights of all blocks at once, the last one filled up with zeros."""
    own = (found.directions * hidden).sum(1)
    lengths = torch.linalg.vector_norm(found.directions, dim=1)
    # At a goal a neuron says at most RADIUS * length - flag: its share of the flag keeps that two below its point.
    flags = 1.0 + torch.relu(RADIUS * lengths - own) / 2.0
    gaps = found.gaps.clamp(max=2.0)
    here = torch.cat([hidden, torch.ones_like(flags)[:, None]], 1)
    n_blocks = -(-len(hidden) // width)
    rest = n_blocks * width - len(hidden)

    def blocked(rows: Tensor) -> Tensor:
        filled = torch.cat([rows, rows.new_zeros(rest, *rows.shape[1:])]) if rest else rows
        return filled.reshape(n_blocks, width, *rows.shape[1:])

    inner = blocked(torch.cat([found.directions, flags[:, None]], 1))
    shifts = blocked(gaps / 2.0 - own - flags)
    said = torch.relu(blocked(here) @ inner.mT + shifts[:, None, :]).triu()
    if rest:  # what is filled up has nothing to say, and a one on the diagonal keeps the system solvable
        said[-1, width - rest :] = 0.0
        said[-1].diagonal()[width - rest :] = 1.0
    added = fit_outgoing(said, blocked(goals - here))
    steps = torch.linalg.vector_norm(added, dim=2) * torch.linalg.vector_norm(inner, dim=2)
    moved = blocked(noise) * ((said > 0.0).to(steps) @ steps[..., None])[..., 0]
    return _Filled(inner, shifts, added.mT, float(gaps.amin()), float(moved.amax()))


@torch.no_grad()
def _copy_into(network: Memorizer, lift: _Lift, filled: _Filled, read: Readout) -> None:
    network.lift.weight[:-1].copy_(lift.weight)
    network.lift.bias[:-1].copy_(lift.bias)
    network.lift.bias[-1] = 1.0
    for block, inner, shift, outer in zip(network.blocks, filled.inner, filled.shifts, filled.outer, strict=True):
        assert isinstance(block, Block)
        block.inner.weight.copy_(inner)
        block.inner.bias.copy_(shift)
        block.outer.weight.copy_(outer)
    network.cues.weight.copy_(read.cues)
    network.cues.bias.copy_(read.shifts)
    network.values.weight.copy_(read.values)


def _need_classes(network: Memorizer, sample: Sample) -> None:
    """Raises where a class is wrong; an error below one half cannot change one, and then nothing is computed."""
    assert network.facts is not None
    if network.facts.rounding < 0.5:
        return
    wrong = (network.classify(sample.points) != sample.targets).nonzero().flatten()
    if len(wrong):
        raise ToleranceError(
            f"memorize needs every class right; rounding (up to {network.facts.rounding:.1e}) left {len(wrong)} wrong, "
            f"the first at {int(sample.places[wrong[0]])}. Choose a larger width, or remove points that nearly "
            "coincide."
        )
