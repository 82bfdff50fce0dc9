"""`memorize`: a residual network that maps every point of a sample to its label or target, built and not trained.

    lift       x -> (z, 0): a random projection to width - 1 coordinates, centred and scaled to length about one; flag 0
    blocks     neuron i fires at point i and at no later one; what it adds carries the point to (v_i, -1)
    read       from the class vectors v (or the embedded real targets) to the outputs

Points go by decreasing length of z, `width` to a block: `thresholds` says why that works for any distinct points, and
what the paper's order misses. All blocks are known at once: a point stays bit for bit where it is until its own block,
and the flag keeps those that arrived away from every later neuron.

Points far out cost no digits of the others. The flag of a point that waits is exactly zero, so that no neuron sees it;
goals lie as far out as the farthest points need (`readout`); and points far out share no block with the rest, whose
neurons they would set off by as much as they are longer. Every network is checked at every point before it is returned.

Theory: hardt_ma2017:thm-3.2, hardt_ma2017:lemma-B.1, hardt_ma2017:lemma-B.2
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.nn import functional

from onlynorm.errors import ToleranceError, ValueRangeError
from onlynorm.features.streams import check_seed
from onlynorm.identity.memorization.memorizer import ROWS, Block, Memorizer, MemorizerFacts
from onlynorm.identity.memorization.points import CLASS_LIMIT, REAL_LIMIT, Sample, collect, merge, relative_errors
from onlynorm.identity.memorization.readout import EPS, Readout, choose_readout, normals
from onlynorm.identity.memorization.thresholds import Separation, by_length, fit_outgoing, lengths_of, separate
from onlynorm.memory import memory_limit, need_memory
from onlynorm.validate import need_callable, need_choice, need_integer

PROJECTIONS = ("random", "principal")
FACTOR = 4.0
"""Width over the logarithm of the number of points."""
FAR = 1000.0
"""Times the median length from where on a point counts as far out."""
_CENTRED_BY = 1001
"""Points, evenly spread over the sample, that tell whether outliers pull the mean away."""
_CLIP = 10.0
"""Median lengths beyond which a point counts no more for the principal directions."""
_POWER = -0.25
"""Principal coordinates are scaled by this power of their variance: half-way to whitening gave the largest radii."""
Progress = Callable[[int, int], None]


def memorize(
    x: Shaped[Tensor | np.ndarray, "n ..."],
    labels: Shaped[Tensor | np.ndarray, "n ..."],
    *,
    width: int | None = None,
    n_classes: int | None = None,
    projection: str = "random",
    seed: int = 0,
    progress: Progress | None = None,
) -> Memorizer:
    """A residual ReLU network that sends every point x[i] to its label, one-hot, or to its real target.

    Integer labels (n,) are classes; floating-point ones (n,) or (n, outputs) are real targets, as in `fit` and
    `diagnose`. Inputs of any dtype count as the float64 numbers they are: for those the network is exact, the class
    at every point, real outputs up to `facts.rounding`. Repeated points merge if their targets agree and are refused
    if not. The network is evaluated at every point before it is returned: a wrong class, a one-hot output that is off
    by more than 0.25, or a real output that is off by more than 1e-6 of the largest target of that output raises.

    `width` is 4 log n if left out, and more for very many classes or outputs. `projection="principal"` takes the
    leading principal directions instead of random ones: larger class radii, but points that differ only in what it
    drops are refused. `progress` hears (points, of how many) while thresholds are sought.

    Theory: hardt_ma2017:thm-3.2
    """
    started = time.perf_counter()
    seed = check_seed(seed)
    if progress is not None:
        need_callable("progress", progress, cure="It is called with how many points are done, and of how many.")
    need_choice("projection", projection, PROJECTIONS)
    sample = collect(x, labels, n_classes=n_classes)
    width = _choose_width(sample, width)
    _need_room(sample, width)
    lift = _draw_lift(sample.points, width - 1, projection=projection, seed=seed)
    hidden = lift(sample.points)
    _need_finite(hidden, sample.points)
    order = _order(sample, hidden)
    targets, hidden, noise = sample.targets[order], hidden[order], _rounding_of(lift, sample.points, hidden)[order]
    noise = noise.flip(0).cummax(0).values.flip(0)  # a neuron has to tell its point from any later one
    found = separate(hidden, noise=noise, names=sample.places[order], progress=progress)
    lengths = lengths_of(hidden)
    unit = max(1.0, float(lengths[0]) / FAR)
    read = choose_readout(targets, sample.n_outputs, width=width, seed=seed).scaled(unit)
    filled = _fill_blocks(hidden, found, read.goals, noise, unit, _slots(lengths, width), width)
    network = Memorizer(
        sample.points.shape[1], sample.n_outputs, width=width, n_blocks=len(filled.inner), n_cues=len(read.cues)
    ).to(hidden.device)
    _copy_into(network, lift, filled, read)
    n, n_parameters = len(hidden), network.n_parameters
    facts = MemorizerFacts(
        n_points=n, n_merged=sample.n_given - n, n_outputs=sample.n_outputs, width=width, n_blocks=len(filled.inner),
        n_parameters=n_parameters, constant=n_parameters / (n * math.log(max(n, 2)) + sample.n_outputs**2),
        smallest_gap=filled.smallest_gap, n_tilted=found.n_tilted, rounding=read.error(filled.error), seed=seed,
        projection=projection, seconds=time.perf_counter() - started,
    )  # fmt: skip
    _need_right(network, sample, facts, lift=lift)
    network.facts = dataclasses.replace(facts, seconds=time.perf_counter() - started)
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
    cure = "It is room for the goals and a flag. Leave it out, or choose a larger one."
    return need_integer("width", width, low=max(3, least), high=2**31 - 1, cure=cure)


def _need_room(sample: Sample, width: int) -> None:
    n_cues = 2 * sample.n_outputs if sample.is_real else sample.n_outputs
    n_blocks = -(-len(sample.points) // width)
    size = 8 * (n_blocks * 4 * width**2 + n_cues * (sample.n_outputs + width) + width * sample.points.shape[1])
    cure = "Number the classes without gaps, or take fewer points."
    need_memory(f"a memorizer of {n_blocks} blocks and {sample.n_outputs} outputs", size, memory_limit(None), cure)


def _draw_lift(points: Tensor, size: int, *, projection: str, seed: int) -> _Lift:
    unit = _usual_size(points)
    scaled = points if unit == 1.0 else points / unit
    centre = _centre(scaled)
    if projection == "random":
        weight = normals(seed, "memorize/lift", points.shape[1], size).mT.to(points)
    else:
        weight = _principal_directions(scaled - centre, size)
    lengths = lengths_of(scaled @ weight.mT - weight @ centre)
    scale = float(lengths.median()) or float(lengths.amax()) or 1.0
    weight = weight / scale / unit
    return _Lift(weight, -(weight @ (centre * unit)))


def _usual_size(points: Tensor) -> float:
    """The power of two nearest to the median point, or one where no square of it overflows or vanishes anyway."""
    largest = points.abs().amax(1)
    usual = float(largest.median()) or float(largest.amax())
    return 1.0 if usual == 0.0 or 2.0**-300 < usual < 2.0**300 else 2.0 ** (math.frexp(usual)[1] - 1)


def _centre(points: Tensor) -> Tensor:
    """The mean, unless outliers pull it away: then the median of every coordinate.

    They do where the median distance from it is more than twice that from the coordinates' medians.
    """
    some = points[:: max(1, -(-len(points) // _CENTRED_BY))]
    mean, middle = points.mean(0), some.median(0).values
    far, near = (float(lengths_of(some - centre).median()) for centre in (mean, middle))
    return mean if far <= 2.0 * near else middle


def _principal_directions(centred: Tensor, size: int) -> Tensor:
    """The leading principal directions (size, inputs), scaled; points far out count as if they were nearer."""
    lengths = lengths_of(centred)
    usual = float(lengths.median()) or float(lengths.amax()) or 1.0
    clipped = centred / (lengths / _CLIP).clamp(min=usual)[:, None]
    variances, axes = torch.linalg.eigh(clipped.mT @ clipped / len(clipped))
    kept = min(size, int((variances > EPS * len(variances) * variances[-1]).sum()))
    weight = centred.new_zeros(size, centred.shape[1])
    if kept:
        weight[:kept] = (axes[:, -kept:] * variances[-kept:] ** _POWER).mT
    return weight


def _order(sample: Sample, hidden: Tensor) -> Tensor:
    """The order in which points are moved; those the projection cannot tell apart go as one if their targets agree."""
    kept = merge(hidden, sample.targets, sample.places, are_projected=True).to(hidden.device)
    return kept[by_length(hidden[kept])]


def _need_finite(hidden: Tensor, points: Tensor) -> None:
    if bool(torch.isfinite(hidden).all()):
        return
    largest = points.abs().amax(1)
    raise ValueRangeError(
        "memorize needs points that stay within float64 when their median length is scaled to one; got entries up to "
        f"{float(largest.amax()):.1e} where the median point has {float(largest.median()):.1e}. Scale the inputs to "
        "about one, and remove what lies that far out."
    )


def _rounding_of(lift: _Lift, points: Tensor, hidden: Tensor) -> Tensor:
    """By how much rounding may move each hidden point, at most: n eps |a| |b| for every inner product of length n."""
    size = lengths_of(lift.weight.reshape(1, -1))[0] * lengths_of(points)
    lifted = (points.shape[1] + 1) * (size + lengths_of(lift.bias[None])[0])
    return EPS * (lifted + 2.0 * (hidden.shape[1] + 2) * lengths_of(hidden))


def _slots(lengths: Tensor, width: int) -> Tensor:
    """Where each point's neuron goes, as block * width + place: full blocks, but none with far and near points.

    A point sets off later neurons of its block in proportion to its length, which the block has to take back.
    """
    slots, start, block = torch.empty(len(lengths), dtype=torch.long), 0, 0
    falling = -lengths.cpu()
    while start < len(lengths):
        stop = min(start + width, len(lengths))
        longest = -float(falling[start])
        if longest > FAR:
            near = int(torch.searchsorted(falling, torch.tensor(-max(longest / FAR, 1.0)), right=True))
            stop = max(start + 1, min(stop, near))
        slots[start:stop] = torch.arange(block * width, block * width + stop - start)
        start, block = stop, block + 1
    return slots.to(lengths.device)


def _fill_blocks(
    hidden: Tensor, found: Separation, goals: Tensor, noise: Tensor, unit: float, slots: Tensor, width: int
) -> _Filled:
    """The weights of all blocks at once; places without a point have zeros."""
    own = (found.directions * hidden).sum(1)
    lengths = lengths_of(hidden)
    # Nothing comes after the last point; its gap only says from where on inputs set it off.
    gaps = torch.where(torch.isinf(found.gaps), lengths.clamp(min=1.0), found.gaps)
    # A point that waits has the flag zero and one that arrived has -unit and a length of unit / 2: its neuron's value
    # is then at most -(unit + gap) / 2.
    flags = 2.0 + (gaps + torch.relu(-own)) / unit
    here = torch.cat([hidden, torch.zeros_like(flags)[:, None]], 1)
    n_blocks = int(slots[-1]) // width + 1

    def blocked(rows: Tensor) -> Tensor:
        filled = rows.new_zeros(n_blocks * width, *rows.shape[1:])
        filled[slots] = rows
        return filled.reshape(n_blocks, width, *rows.shape[1:])

    inner = blocked(torch.cat([found.directions, flags[:, None]], 1))
    shifts = blocked(gaps / 2.0 - own)
    said = torch.relu(blocked(here) @ inner.mT + shifts[:, None, :]).triu()
    is_free = blocked(torch.ones_like(gaps)) == 0.0
    said[is_free] = 0.0
    said.diagonal(dim1=1, dim2=2)[is_free] = 1.0  # keeps the system solvable; a free place moves nothing
    added = fit_outgoing(said, blocked(goals - here))
    steps = lengths_of(added.flatten(0, 1)).reshape(n_blocks, width, 1)
    # Per neuron that fires: the rounding of its value, and that of the solve and of the sum of all that is added.
    moved = blocked(noise) * ((said > 0.0).to(steps) @ steps)[..., 0] + EPS * (
        4.0 * width * (said @ steps)[..., 0] + 2.0 * blocked(lengths)
    )
    return _Filled(inner, shifts, added.mT, float(gaps.amin()), float(moved[~is_free].amax()))


@torch.no_grad()
def _copy_into(network: Memorizer, lift: _Lift, filled: _Filled, read: Readout) -> None:
    network.lift.weight[:-1].copy_(lift.weight)
    network.lift.bias[:-1].copy_(lift.bias)
    for block, inner, shift, outer in zip(network.blocks, filled.inner, filled.shifts, filled.outer, strict=True):
        assert isinstance(block, Block)
        block.inner.weight.copy_(inner)
        block.inner.bias.copy_(shift)
        block.outer.weight.copy_(outer)
    network.cues.weight.copy_(read.cues)
    network.cues.bias.copy_(read.shifts)
    network.values.weight.copy_(read.values)


def _need_right(network: Memorizer, sample: Sample, facts: MemorizerFacts, *, lift: _Lift) -> None:
    """Raises unless the network, evaluated at every point, has every class and every output right."""
    outputs = _evaluate(network, sample.points)
    if sample.is_real:
        errors, limit = relative_errors(outputs, sample.targets), REAL_LIMIT
        what = f"every output within {limit:.0e} of the largest target"
    else:
        errors, limit = (outputs - functional.one_hot(sample.targets, sample.n_outputs)).abs().amax(1), CLASS_LIMIT
        errors = torch.where(outputs.argmax(1) == sample.targets, errors, torch.inf)
        what = f"every class right and every output within {limit}"
    bad = (~(errors <= limit)).nonzero().flatten()  # NaN is bad
    if not len(bad):
        return
    worst = int(bad[errors[bad].nan_to_num(torch.inf).argmax()])
    lengths = lengths_of(lift(sample.points))
    raise ToleranceError(
        f"memorize needs {what}; rounding (up to {facts.rounding:.1e}) left {len(bad)} of {len(errors)} points wrong, "
        f"the worst at {int(sample.places[worst])}, off by {float(errors[worst]):.1e}. That point lies "
        f"{float(lengths[worst]):.1e} median lengths from the centre, the farthest {float(lengths.amax()):.1e}; the "
        f"smallest gap between points is {facts.smallest_gap:.1e} such lengths. Remove points that nearly coincide, "
        "choose a larger width, or scale outliers down."
    )


@torch.no_grad()
def _evaluate(network: Memorizer, points: Tensor) -> Tensor:
    """The outputs at the points. Rows at which no neuron of a block fires are not multiplied by its zeros."""
    parts = []
    for part in points.split(ROWS):
        h = network.enter(part)
        for block in network.blocks:
            assert isinstance(block, Block)
            said = block.inner(h)
            fires = (~(said.amax(1) <= 0.0)).nonzero().flatten()
            if len(fires):
                h[fires] += block.outer(functional.relu(said[fires]))
        parts.append(network.read(h))
    return torch.cat(parts)
