"""The behaviour of a memorizer outside its sample: held-out data, noise, and certified class radii.

A memorizer does not generalize. Away from its points all outputs are mostly zero (`SILENT`): either no neuron is
active, or one is active with a wrong value, and the hidden vector is not close to any class vector. A neuron is active
on a half-space beyond its point, so inputs far out in the direction of a point are moved by it, and sometimes end near
a class vector, of the correct class or not. The functions here measure how often each happens.

`activation_distances`: the distance of an input within which the same neurons are active, so that the network is
linear. `class_radii`: the distance within which the class cannot change. The second is much smaller, since a few
percent of the first move the hidden vector past its class vector.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from onlynorm.display import Curve, Figure, Panel, Result, ShownResult, Table, View
from onlynorm.errors import ConversionError, ShapeError, shown
from onlynorm.identity.memorization.memorizer import ROWS, SILENT, Memorizer, MemorizerBlock
from onlynorm.identity.memorization.thresholds import lengths_of
from onlynorm.modules import is_class_labels, need_model, unwrap
from onlynorm.progress import with_progress
from onlynorm.seeds import seeded
from onlynorm.validate import (
    Progress,
    as_tensor,
    need_instance,
    need_integer,
    need_items,
    need_number,
    need_progress,
    need_seed,
)

SIZES = (0.0, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
"""Norms of the noise, relative to the median distance of a point from the mean."""
MOST = 2000
"""Maximum number of training points with noise."""
_LINEAR = 256
"""Inputs whose linear maps are in memory at a time."""


@dataclass(frozen=True)
class Answers(Result):
    """Fractions of inputs with the correct class, no class, and a wrong class."""

    right: float
    silent: float
    wrong: float

    def __str__(self) -> str:
        return f"{100 * self.right:.2f} % right, {100 * self.silent:.2f} % silent, {100 * self.wrong:.2f} % wrong"


@dataclass(frozen=True, kw_only=True, repr=False)
class OffSample(ShownResult):
    """The behaviour of a memorizer outside its sample.

    Lengths are relative to `scale`, the median distance of a point from the mean. `class_radius` has the minimum,
    median and maximum of the class radii of training points, `activation_distance` those of the distance to the nearest
    activation boundary. `noise` has rows (size, answers); `chance` is the fraction of the most frequent held-out class.
    """

    scale: float
    class_radius: tuple[float, float, float]
    activation_distance: tuple[float, float, float]
    noise: tuple[tuple[float, Answers], ...]
    n_noisy: int
    held_out: Answers | None
    n_held_out: int
    chance: float

    def plot(self) -> Figure:
        """The answers under noise, with the class radii of the training points."""
        rows = sorted((size, answers) for size, answers in self.noise if size > 0.0)
        if not rows:
            return Figure()
        sizes = [size for size, _ in rows]
        curves = [
            Curve(name, sizes, [getattr(answers, name) for _, answers in rows], "line+points")
            for name in ("right", "silent", "wrong")
        ]
        low, middle, _ = self.class_radius
        for radius, name in ((middle, "median class radius"), (low, "smallest class radius")):
            if 0.0 < radius < math.inf:
                curves.append(Curve(name, (radius, radius), (0.0, 1.0), style="law"))
        if self.held_out is not None:
            level = self.held_out.right
            curves.append(Curve("right on held-out samples", (sizes[0], sizes[-1]), (level, level), style="law"))
        x_label, y_label = "length of the noise over the median distance from the mean", "fraction of the inputs"
        return Figure(curves, [Panel("", "Answers under noise", x_label, y_label, x_log=True)])

    def view(self) -> View:
        """The answers, class radii and distances."""
        rows = [(f"noise of size {size:g}", answers) for size, answers in self.noise]
        if self.held_out is not None:
            rows.append((f"{self.n_held_out:,} held-out samples", self.held_out))
        columns = ("inputs", "right %", "silent %", "wrong %")
        cells = [(name, *(f"{100 * fraction:.2f}" for fraction in (a.right, a.silent, a.wrong))) for name, a in rows]
        lengths = {"class radius": self.class_radius, "distance to an activation boundary": self.activation_distance}
        return View(
            "A memorizer outside its sample",
            lines=["Lengths are relative to the median distance of a point from the mean."],
            facts={
                **{
                    f"{what}, {which}": f"{length:.2e}"
                    for what, found in lengths.items()
                    for which, length in zip(("smallest", "median"), found, strict=False)
                },
                **({} if self.held_out is None else {"most frequent held-out class": f"{100 * self.chance:.2f} %"}),
            },
            tables={"Answers": Table(columns, cells)},
        )

    def __str__(self) -> str:
        lines = [
            f"{what}: at least {low:.1e}, median {middle:.1e}, at most {high:.1e}"
            for what, (low, middle, high) in (
                ("class radius", self.class_radius),
                ("distance to the nearest activation boundary", self.activation_distance),
            )
        ]
        lines += [f"noise of size {size:g}: {answers}" for size, answers in self.noise]
        if self.held_out is not None:
            lines.append(
                f"{self.n_held_out} held-out samples: {self.held_out}; the most frequent class alone would be "
                f"{100 * self.chance:.2f} % right"
            )
        lines.append("lengths are relative to the median distance of a point from the mean")
        return "\n".join(lines)


@torch.no_grad()
@with_progress
def measure_off_sample(
    network: Memorizer,
    inputs: Tensor | np.ndarray,
    labels: Int[Tensor | np.ndarray, " n"],
    *,
    held_out: tuple[Tensor | np.ndarray, Tensor | np.ndarray] | None = None,
    sizes: Sequence[float] = SIZES,
    most: int = MOST,
    seed: int = 0,
    progress: Progress | bool | None = None,
) -> OffSample:
    """Class radii at the training points, answers under noise of each size, and answers on held-out samples.

    Noise is gaussian and the same for a seed, added to at most `most` points, evenly spread over the sample.

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> from onlynorm.identity import measure_off_sample
        >>> inputs, labels = torch.eye(6), torch.arange(6) % 2
        >>> network = on.memorize(inputs, labels)
        >>> measured = measure_off_sample(network, inputs, labels, sizes=(0.0,))
        >>> measured.noise[0]
        (0.0, 100.00 % right, 0.00 % silent, 0.00 % wrong)
    """
    network = _need_memorizer(network, what="measure_off_sample")
    progress = need_progress(progress)
    seed = need_seed(seed)
    sizes = need_items("sizes of noise", sizes, cure=f"Leave them out for {SIZES}.")
    sizes = [need_number("a size of noise", size, low=0.0, cure="Try 0.01.") for size in sizes]
    most = need_integer("most", most, low=1, cure=f"Leave it out for {MOST}.")
    points, labels = _need_labels(network, inputs, labels)
    step = max(1, -(-len(points) // most))
    chosen, expected = points[::step], labels[::step]
    scale = float(lengths_of(points - points.mean(0)).median()) or 1.0
    total = len(sizes) + 2
    radii, distances = class_radii(network, chosen) / scale, activation_distances(network, chosen) / scale
    _report(progress, 1, total, "class radii")
    rows = []
    for place, size in enumerate(sizes):
        noisy = chosen
        if size:
            drawn = torch.randn(chosen.shape, generator=seeded(seed), dtype=torch.float64).to(chosen)
            noisy = chosen + drawn * (size * scale / chosen.shape[1] ** 0.5)
        rows.append((float(size), _count(network.classify(noisy), expected)))
        _report(progress, place + 2, total, f"noise of size {size:g}")
    answers, n_held_out, chance = None, 0, 0.0
    if held_out is not None:
        if not isinstance(held_out, tuple | list) or len(held_out) != 2:
            raise ConversionError(
                f"held_out needs a pair of inputs and labels; got {shown(held_out)}. Pass (inputs, labels)."
            )
        others, truth = _need_labels(network, *held_out)
        answers, n_held_out = _count(network.classify(others), truth), len(truth)
        chance = float(truth.unique(return_counts=True)[1].amax()) / n_held_out
    _report(progress, total, total, "held-out samples")
    return OffSample(
        scale=scale, class_radius=_spread(radii), activation_distance=_spread(distances),
        noise=tuple(rows), n_noisy=len(chosen), held_out=answers, n_held_out=n_held_out, chance=chance,
    )  # fmt: skip


@torch.no_grad()
def activation_distances(network: Memorizer, inputs: Tensor | np.ndarray) -> Float[Tensor, " n"]:
    """For each input, the distance to the nearest activation boundary of all blocks up to its own.

    Its own block is the first with an active neuron. The distance is the minimum of |pre-activation| / |gradient|. The
    class may change earlier; see `class_radii`.

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> from onlynorm.identity import activation_distances
        >>> inputs, labels = torch.eye(6), torch.arange(6) % 2
        >>> network = on.memorize(inputs, labels)
        >>> bool((activation_distances(network, inputs) > 0).all())
        True
    """
    network = _need_memorizer(network)
    rows, lift = network.rows(inputs), network.lift.weight
    found = []
    steepness = [lengths_of(block.inner.weight @ lift) for block in _blocks(network)]
    for part in rows.split(ROWS):
        h = network.enter(part)
        nearest, unmoved = h.new_full((len(h),), torch.inf), torch.ones(len(h), dtype=torch.bool, device=h.device)
        for block, steep in zip(_blocks(network), steepness, strict=True):
            pre = block.inner(h)
            nearest = torch.where(unmoved, torch.minimum(nearest, _nearest(pre, steep)), nearest)
            unmoved &= (pre <= 0.0).all(1)
            h = h + block.outer(functional.relu(pre))
        found.append(nearest)
    return torch.cat(found)


@torch.no_grad()
def class_radii(network: Memorizer, inputs: Tensor | np.ndarray) -> Float[Tensor, " n"]:
    """For each input, a radius within which the result of `classify` cannot change, including `SILENT`.

    Within the distance to the nearest activation boundary the network is linear in its input. Where the hidden vector
    is M lift(x) + constant, a neuron with weights w keeps its sign within |pre-activation| / |w M lift|, and one output
    stays above another within their difference divided by the norm of its gradient. The radius is the minimum over all
    neurons, the last layer and the classes. For blocks after the first that moves an input, |w M lift| <= |w| |M lift|
    saves a product per neuron. The radius holds in exact arithmetic: rounding in float64 moves the boundaries by about
    1e-16 times the norm of the input, and more in lower precision.

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> from onlynorm.identity import class_radii
        >>> inputs, labels = torch.eye(6), torch.arange(6) % 2
        >>> network = on.memorize(inputs, labels)
        >>> bool((class_radii(network, inputs) > 0).all())
        True
    """
    network = _need_memorizer(network)
    if network.is_real:
        raise ConversionError(
            f"class_radii needs a memorizer of classes; this one has {network.n_outputs} real outputs. "
            "activation_distances needs no classes."
        )
    rows = network.rows(inputs)
    # lift = small Q^T with orthonormal columns of Q, so |w lift| = |w small|, and no matrix has the size of the inputs.
    small = torch.linalg.qr(network.lift.weight.mT)[1].mT
    return torch.cat([_radii_of(network, small, network.enter(part)) for part in rows.split(_LINEAR)])


def _radii_of(network: Memorizer, small: Tensor, h: Tensor) -> Tensor:
    radii = h.new_full((len(h),), torch.inf)
    has_moved = torch.zeros(len(h), dtype=torch.bool, device=h.device)
    maps, gains = small.expand(len(h), -1, -1).clone(), h.new_zeros(len(h))
    for block in _blocks(network):
        pre, inner = block.inner(h), block.inner.weight
        steep = torch.where(has_moved[:, None], gains[:, None] * lengths_of(inner), lengths_of(inner @ small))
        radii = torch.minimum(radii, _nearest(pre, steep))
        active = (~(pre.amax(1) <= 0.0)).nonzero().flatten()
        if len(active):
            maps[active] += block.outer.weight @ ((pre[active] > 0.0)[:, :, None] * (inner @ maps[active]))
            gains[active] = torch.linalg.matrix_norm(maps[active], 2)
            has_moved[active] = True
            h[active] += block.outer(functional.relu(pre[active]))
    return torch.minimum(radii, _readout_radii(network, h, maps))


def _readout_radii(network: Memorizer, h: Tensor, maps: Float[Tensor, "n width size"]) -> Float[Tensor, " n"]:
    """The distance within which no neuron of the last layer changes sign and the largest output stays largest."""
    pre, slopes = network.cues(h), network.cues.weight @ maps
    radii = _nearest(pre, torch.linalg.vector_norm(slopes, dim=2))
    outputs = network.values(functional.relu(pre))
    largest, best = outputs.max(1)
    slopes = network.values.weight @ ((pre > 0.0)[:, :, None] * slopes)
    chosen = torch.arange(len(h), device=h.device)
    ahead = largest[:, None] - outputs
    steep = torch.linalg.vector_norm(slopes[chosen, best][:, None] - slopes, dim=2)
    # The largest output only has to stay positive.
    ahead[chosen, best], steep[chosen, best] = largest, torch.linalg.vector_norm(slopes[chosen, best], dim=1)
    return torch.where(largest > 0.0, torch.minimum(radii, _nearest(ahead, steep)), radii)


def _nearest(values: Float[Tensor, "n neurons"], steep: Tensor) -> Float[Tensor, " n"]:
    """The minimum of |value| / slope; unused neurons have slope zero and no boundary."""
    return torch.where(steep > 0.0, values.abs() / steep, torch.inf).amin(1)


def _need_memorizer(network: Memorizer, *, what: str = "a measurement outside the sample") -> Memorizer:
    """The network in float64."""
    network = need_instance(what, unwrap(need_model(what, network)), Memorizer, cure="Pass the result of memorize.")
    is_double = all(parameter.dtype == torch.float64 for parameter in network.parameters())
    return network if is_double else copy.deepcopy(network).double()


def _blocks(network: Memorizer) -> list[MemorizerBlock]:
    return [block for block in network.blocks if isinstance(block, MemorizerBlock)]


def _spread(values: Tensor) -> tuple[float, float, float]:
    return float(values.amin()), float(values.median()), float(values.amax())


def _count(answers: Tensor, expected: Tensor) -> Answers:
    n, right, silent = len(answers), int((answers == expected).sum()), int((answers == SILENT).sum())
    return Answers(right / n, silent / n, (n - right - silent) / n)


def _report(progress: Progress | None, done: int, total: int, message: str) -> None:
    if progress is not None:
        progress(done, total, message)


def _need_labels(network: Memorizer, x: Tensor | np.ndarray, labels: Tensor | np.ndarray) -> tuple[Tensor, Tensor]:
    """The samples as float64 rows and their labels, checked."""
    rows, labels = network.rows(x).double(), as_tensor("labels", labels)
    if labels.shape != rows.shape[:1] or not is_class_labels(labels):
        raise ShapeError(
            f"measure_off_sample needs one integer label per sample, {len(rows)}; got {labels.dtype} of shape "
            f"{tuple(labels.shape)}. Real targets are not supported."
        )
    return rows, labels.long().to(rows.device)
