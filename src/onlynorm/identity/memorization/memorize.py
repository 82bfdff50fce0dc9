"""`memorize`: construct a residual network that fits every point of a sample, without training.

    lift       x -> (z, 0): a random projection to width - 1 coordinates, centred and scaled to length about one; flag 0
    blocks     neuron i is active at point i and at no later point; its output moves the point to (v_i, -1)
    read       from the class vectors v (or the embedded real targets) to the outputs

Points are processed by decreasing norm of z, `width` per block; `thresholds` explains why this works for any distinct
points. All blocks are computed at once: a point does not move before its own block, and the flag keeps moved points
away from all later neurons.

Outliers do not reduce the accuracy of other points. The flag of a point that has not moved is exactly zero, so neurons
do not depend on it; goals are scaled with the farthest points (`readout`); and outliers have separate blocks, since
they would activate other neurons in proportion to their norm. Every network is evaluated at every point before it is
returned.

Theory: hardt_ma2017:thm-3.2, hardt_ma2017:lemma-B.1, hardt_ma2017:lemma-B.2
"""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.nn import functional

from onlynorm.errors import ToleranceError, ValueRangeError
from onlynorm.features.streams import check_seed
from onlynorm.identity.memorization.memorizer import ROWS, Memorizer, MemorizerBlock, MemorizerFacts
from onlynorm.identity.memorization.points import CLASS_LIMIT, REAL_LIMIT, Sample, collect, merge, relative_errors
from onlynorm.identity.memorization.readout import EPS, Readout, choose_readout, normals
from onlynorm.identity.memorization.thresholds import Separation, by_length, fit_outgoing, lengths_of, separate
from onlynorm.memory import memory_limit, need_memory
from onlynorm.progress import with_progress
from onlynorm.validate import Progress, need_choice, need_integer, need_progress

PROJECTIONS = ("random", "principal")
FACTOR = 4.0
"""Width divided by the logarithm of the number of points."""
FAR = 1000.0
"""Points beyond this multiple of the median norm are outliers."""
_CENTRED_BY = 1001
"""Number of points used to detect whether outliers shift the mean."""
_CLIP = 10.0
"""Norms are clipped to this multiple of the median for the principal directions."""
_POWER = -0.25
"""Principal coordinates are scaled by this power of their variance: halfway to whitening gave the largest radii."""


@with_progress
def memorize(
    inputs: Shaped[Tensor | np.ndarray, "n ..."],
    labels: Shaped[Tensor | np.ndarray, "n ..."],
    *,
    width: int | None = None,
    n_classes: int | None = None,
    projection: str = "random",
    seed: int = 0,
    progress: Progress | bool | None = None,
) -> Memorizer:
    """A residual ReLU network that maps every point inputs[i] to its one-hot label or its real target.

    Integer labels (n,) are classes; floating-point labels (n,) or (n, outputs) are real targets, as in `fit` and
    `diagnose`. Inputs are converted to float64; real outputs are exact up to `facts.rounding`. Repeated points are
    merged if their targets agree, else they raise. The network is evaluated at every point before it is returned: a
    wrong class, an error of a one-hot output above 0.25, or of a real output above 1e-6 of its largest target, raises.

    `width` is 4 log n by default, and more for many classes or outputs. `projection="principal"` uses the leading
    principal directions instead of random ones: class radii are larger, but points that differ only in the remaining
    directions raise. `progress=True` shows a bar; a function is called with (points done, total points, message).

    Theory: hardt_ma2017:thm-3.2

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> generator = torch.Generator().manual_seed(0)
        >>> inputs, labels = torch.rand(100, 8, generator=generator), torch.randint(3, (100,), generator=generator)
        >>> network = on.memorize(inputs, labels)
        >>> (network.classify(inputs) == labels).all()
        tensor(True)
    """
    started = time.perf_counter()
    seed = check_seed(seed)
    progress = need_progress(progress)
    need_choice("projection", projection, PROJECTIONS)
    sample = collect(inputs, labels, n_classes=n_classes)
    width = _choose_width(sample, width)
    _need_room(sample, width)
    lift = _draw_lift(sample.points, width - 1, projection=projection, seed=seed)
    hidden = lift(sample.points)
    _need_finite(hidden, sample.points)
    order = _order(sample, hidden)
    targets, hidden, noise = sample.targets[order], hidden[order], _rounding_of(lift, sample.points, hidden)[order]
    noise = noise.flip(0).cummax(0).values.flip(0)  # a neuron must separate its point from all later ones
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
    _need_fit(network, sample, facts, lift=lift)
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
    """The weights of all blocks; `error` bounds the distance of a point from its goal by rounding."""

    inner: Tensor
    shifts: Tensor
    outer: Tensor
    smallest_gap: float
    error: float


def _choose_width(sample: Sample, width: int | None) -> int:
    """4 log n, and at least the dimension of the goals: 4 log r for classes, one per real output, and a flag."""
    n, r = len(sample.points), sample.n_outputs
    least = r + 1 if sample.is_real else 3
    if width is None:
        roomy = 0 if sample.is_real else math.ceil(4.0 * math.log(r)) + 1
        return max(3, least, roomy, math.ceil(FACTOR * math.log(n)))
    cure = "It must have room for the goals and a flag. Leave it out, or pass a larger one."
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
    """A power of two close to the median point; one if its squares neither overflow nor underflow."""
    largest = points.abs().amax(1)
    usual = float(largest.median()) or float(largest.amax())
    return 1.0 if usual == 0.0 or 2.0**-300 < usual < 2.0**300 else 2.0 ** (math.frexp(usual)[1] - 1)


def _centre(points: Tensor) -> Tensor:
    """The mean, or the coordinatewise median if outliers shift the mean.

    They do if the median distance from the mean is more than twice that from the median.
    """
    some = points[:: max(1, -(-len(points) // _CENTRED_BY))]
    mean, middle = points.mean(0), some.median(0).values
    far, near = (float(lengths_of(some - centre).median()) for centre in (mean, middle))
    return mean if far <= 2.0 * near else middle


def _principal_directions(centred: Tensor, size: int) -> Tensor:
    """The leading principal directions (size, inputs), scaled; norms of outliers are clipped."""
    lengths = lengths_of(centred)
    usual = float(lengths.median()) or float(lengths.amax()) or 1.0
    clipped = centred / (lengths / _CLIP).clamp(min=usual)[:, None]
    variances, axes = torch.linalg.eigh(clipped.mT @ clipped / len(clipped))
    n_axes = min(size, int((variances > EPS * len(variances) * variances[-1]).sum()))
    weight = centred.new_zeros(size, centred.shape[1])
    if n_axes:
        weight[:n_axes] = (axes[:, -n_axes:] * variances[-n_axes:] ** _POWER).mT
    return weight


def _order(sample: Sample, hidden: Tensor) -> Tensor:
    """The order in which points are moved; points with equal projection are merged if their targets agree."""
    distinct = merge(hidden, sample.targets, sample.places, are_projected=True).to(hidden.device)
    return distinct[by_length(hidden[distinct])]


def _need_finite(hidden: Tensor, points: Tensor) -> None:
    if bool(torch.isfinite(hidden).all()):
        return
    largest = points.abs().amax(1)
    raise ValueRangeError(
        "memorize needs points in the range of float64 after scaling their median norm to one; got entries up to "
        f"{float(largest.amax()):.1e}, and {float(largest.median()):.1e} for the median point. Scale the inputs to "
        "about one, and remove outliers."
    )


def _rounding_of(lift: _Lift, points: Tensor, hidden: Tensor) -> Tensor:
    """Bounds of the rounding error of each hidden point: n eps |a| |b| for an inner product of length n."""
    size = lengths_of(lift.weight.reshape(1, -1))[0] * lengths_of(points)
    lifted = (points.shape[1] + 1) * (size + lengths_of(lift.bias[None])[0])
    return EPS * (lifted + 2.0 * (hidden.shape[1] + 2) * lengths_of(hidden))


def _slots(lengths: Tensor, width: int) -> Tensor:
    """The slot of each point's neuron, block * width + index: full blocks, but none with outliers and other points.

    A point activates later neurons of its block in proportion to its norm, which the block has to compensate.
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
    """The weights of all blocks; slots without a point are zero."""
    own = (found.directions * hidden).sum(1)
    lengths = lengths_of(hidden)
    # The last point has no later points; its gap only sets its threshold.
    gaps = torch.where(torch.isinf(found.gaps), lengths.clamp(min=1.0), found.gaps)
    # The flag is zero before a point is moved, and -unit after, with a norm of unit / 2: the value of its neuron is
    # then at most -(unit + gap) / 2.
    flags = 2.0 + (gaps + torch.relu(-own)) / unit
    here = torch.cat([hidden, torch.zeros_like(flags)[:, None]], 1)
    n_blocks = int(slots[-1]) // width + 1

    def blocked(rows: Tensor) -> Tensor:
        filled = rows.new_zeros(n_blocks * width, *rows.shape[1:])
        filled[slots] = rows
        return filled.reshape(n_blocks, width, *rows.shape[1:])

    inner = blocked(torch.cat([found.directions, flags[:, None]], 1))
    shifts = blocked(gaps / 2.0 - own)
    activations = torch.relu(blocked(here) @ inner.mT + shifts[:, None, :]).triu()
    is_free = blocked(torch.ones_like(gaps)) == 0.0
    activations[is_free] = 0.0
    activations.diagonal(dim1=1, dim2=2)[is_free] = 1.0  # makes the system solvable; an unused slot moves nothing
    added = fit_outgoing(activations, blocked(goals - here))
    steps = lengths_of(added.flatten(0, 1)).reshape(n_blocks, width, 1)
    # Per active neuron: the rounding of its value, of the solve and of the sum.
    moved = blocked(noise) * ((activations > 0.0).to(steps) @ steps)[..., 0] + EPS * (
        4.0 * width * (activations @ steps)[..., 0] + 2.0 * blocked(lengths)
    )
    return _Filled(inner, shifts, added.mT, float(gaps.amin()), float(moved[~is_free].amax()))


@torch.no_grad()
def _copy_into(network: Memorizer, lift: _Lift, filled: _Filled, read: Readout) -> None:
    network.lift.weight[:-1].copy_(lift.weight)
    network.lift.bias[:-1].copy_(lift.bias)
    for block, inner, shift, outer in zip(network.blocks, filled.inner, filled.shifts, filled.outer, strict=True):
        assert isinstance(block, MemorizerBlock)
        block.inner.weight.copy_(inner)
        block.inner.bias.copy_(shift)
        block.outer.weight.copy_(outer)
    network.cues.weight.copy_(read.cues)
    network.cues.bias.copy_(read.shifts)
    network.values.weight.copy_(read.values)


def _need_fit(network: Memorizer, sample: Sample, facts: MemorizerFacts, *, lift: _Lift) -> None:
    """Raises unless the network fits every point."""
    outputs = _evaluate(network, sample.points)
    if sample.is_real:
        errors, limit = relative_errors(outputs, sample.targets), REAL_LIMIT
        what = f"every output within {limit:.0e} of the largest target"
    else:
        errors, limit = (outputs - functional.one_hot(sample.targets, sample.n_outputs)).abs().amax(1), CLASS_LIMIT
        errors = torch.where(outputs.argmax(1) == sample.targets, errors, torch.inf)
        what = f"every class correct and every output within {limit}"
    bad = (~(errors <= limit)).nonzero().flatten()  # NaN is bad
    if not len(bad):
        return
    worst = int(bad[errors[bad].nan_to_num(torch.inf).argmax()])
    lengths = lengths_of(lift(sample.points))
    raise ToleranceError(
        f"memorize needs {what}; rounding (up to {facts.rounding:.1e}) left {len(bad)} of {len(errors)} points wrong, "
        f"the worst at {int(sample.places[worst])} with error {float(errors[worst]):.1e}. That point is "
        f"{float(lengths[worst]):.1e} median lengths from the centre, the farthest {float(lengths.amax()):.1e}; the "
        f"smallest gap between points is {facts.smallest_gap:.1e} such lengths. Remove points that nearly coincide, "
        "choose a larger width, or scale outliers down."
    )


@torch.no_grad()
def _evaluate(network: Memorizer, points: Tensor) -> Tensor:
    """The outputs at the points; rows without an active neuron skip the second layer of a block."""
    parts = []
    for part in points.split(ROWS):
        h = network.enter(part)
        for block in network.blocks:
            assert isinstance(block, MemorizerBlock)
            pre = block.inner(h)
            active = (~(pre.amax(1) <= 0.0)).nonzero().flatten()
            if len(active):
                h[active] += block.outer(functional.relu(pre[active]))
        parts.append(network.read(h))
    return torch.cat(parts)
