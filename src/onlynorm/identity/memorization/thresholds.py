"""Directions and thresholds that separate each point from all later ones: lemma B.1 for any distinct points.

Points are processed by decreasing length. Every point a_i can then be separated from all later points: with
|a_j| <= |a_i| and the unit vector u_i = a_i / |a_i|,

    <u_i, a_i> - <u_i, a_j>  >=  |a_i - a_j|^2 / (2 |a_i|)  >  0,

so a neuron relu(<u_i, h> - t_i) with t_i halfway between is active at a_i and at no later point. It may be active at
earlier points, which were moved before, or are in the same block, where a triangular system accounts for them. The
common threshold 1 - 2 rho of the paper uses no such order and fails for close points.

For very close points the square above is below rounding. Their directions are tilted until the cosine with every
difference to a later point is large enough; the gap is then of the order of the distance, not of its square.

Directions have norm one, so that gaps are distances: neither a gap nor its rounding depends on the norm of the point,
and no product of two long vectors overflows.

Theory: hardt_ma2017:lemma-B.1
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from onlynorm.errors import ValueRangeError
from onlynorm.validate import Progress

CHUNK = 2**23
"""Inner products in memory at a time: 64 MB."""
SHAKY = 1e-6
"""Rounding error relative to a gap above which the direction is tilted."""
LOST = 1e-2
"""Largest rounding error relative to a gap; beyond it, the activation would be noise."""
FAIR = 0.1
"""Smallest cosine between a tilted direction and the differences at which tilting stops."""
STEPS = 500


@dataclass(frozen=True)
class Separation:
    """One unit direction per point and the gap between the point and the largest later point along it.

    <direction_i, point_i> - <direction_i, point_j> >= gap_i for every j > i; the last gap is infinite.
    """

    directions: Tensor
    gaps: Tensor
    n_tilted: int


def lengths_of(rows: Float[Tensor, "n size"]) -> Float[Tensor, " n"]:
    """The norm of every row, without overflow or underflow."""
    largest = rows.abs().amax(1)
    unit = torch.where(largest > 0.0, largest, 1.0)
    return torch.linalg.vector_norm(rows / unit[:, None], dim=1) * unit


def by_length(points: Float[Tensor, "n size"]) -> Int[Tensor, " n"]:
    """The indices of points by decreasing norm, with a stable sort."""
    return lengths_of(points).argsort(descending=True, stable=True)


def separate(
    points: Float[Tensor, "n size"],
    *,
    noise: Float[Tensor, " n"],
    names: Int[Tensor, " n"],
    progress: Progress | None = None,
) -> Separation:
    """Directions and gaps for points in the order of `by_length`.

    `noise[i]` bounds the rounding error of neuron i at its own point and at later ones; a gap that is too small raises,
    with the points named by `names`.
    """
    lengths = lengths_of(points)
    directions = points / torch.where(lengths > 0.0, lengths, 1.0)[:, None]
    directions[lengths == 0.0, 0] = 1.0  # zero has no direction; it is last, and any direction works
    gaps = (directions * points).sum(1) - largest_later(directions, points, progress=progress)
    close = (~(2.0 * noise <= SHAKY * gaps)).nonzero().flatten()  # NaN counts as close
    for i in close.tolist():
        directions[i], gaps[i] = _tilt(points, i)
        if not float(2.0 * noise[i]) <= LOST * float(gaps[i]):
            _refuse(points, i, names, noise=float(noise[i]))
    return Separation(directions, gaps, len(close))


def largest_later(
    directions: Float[Tensor, "n size"],
    points: Float[Tensor, "n size"],
    *,
    progress: Progress | None = None,
) -> Float[Tensor, " n"]:
    """For each direction its largest inner product with any later point, minus infinity for the last; in chunks."""
    n = len(points)
    largest = points.new_full((n,), -torch.inf)
    start = 0
    while start < n:
        stop = min(n, start + max(1, CHUNK // (n - start)))
        products = directions[start:stop] @ points[start:].mT
        rows = torch.arange(stop - start, device=points.device)
        # Only the first columns have products with the point itself or with earlier ones.
        corner = products[:, : stop - start]
        corner.masked_fill_(rows[None, :] <= rows[:, None], -torch.inf)
        largest[start:stop] = products.amax(1)
        start = stop
        if progress is not None:
            progress(start, n, "thresholds")
    return largest


def fit_outgoing(
    activations: Float[Tensor, "blocks width width"], moves: Float[Tensor, "blocks width size"]
) -> Float[Tensor, "blocks width size"]:
    """The output weights of the neurons of a block, such that every point of the block is moved as given.

    activations[b, l, i] is the activation of neuron i at point l: zero for l > i, positive for l = i.
    """
    return torch.linalg.solve_triangular(activations.triu(), moves, upper=True)


def _tilt(points: Tensor, i: int) -> tuple[Tensor, Tensor]:
    """(direction, gap) for a point with very close later ones: a perceptron on the directions of the differences."""
    if i + 1 == len(points):
        raise ValueRangeError(
            "memorize needs points with a finite rounding error; got NaN. Scale the inputs to about one."
        )
    differences = points[i] - points[i + 1 :]
    units = differences / lengths_of(differences)[:, None]
    length = lengths_of(points[i : i + 1])[0]
    direction = points[i] / length if float(length) > 0.0 else units[0].clone()
    best, best_cosine = direction, -1.0
    for _ in range(STEPS):
        cosines = units @ direction
        worst = int(cosines.argmin())
        cosine = float(cosines[worst] / torch.linalg.vector_norm(direction))
        if cosine > best_cosine:
            best, best_cosine = direction, cosine
        if cosine >= FAIR:
            break
        direction = direction + units[worst]
    best = best / torch.linalg.vector_norm(best)
    return best, (differences @ best).amin()


def _refuse(points: Tensor, i: int, names: Tensor, *, noise: float) -> None:
    distances = lengths_of(points[i] - points[i + 1 :])
    near = int(distances.argmin()) + i + 1
    raise ValueRangeError(
        f"memorize needs points that are distinct in the hidden space in float64; got {int(names[i])} and "
        f"{int(names[near])}, which are {float(distances.amin()):.1e} apart there, in units of the median length, "
        f"where rounding may move a point by {noise:.1e}. Subtract the mean of the inputs and scale them to about one, "
        "choose a larger width, or remove one of the points."
    )
