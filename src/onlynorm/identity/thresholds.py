"""Directions and thresholds that single out one point after another: lemma B.1, made to work for any distinct points.

Points are taken by decreasing length. A point a_i is then never hidden by one that is still to come: with
|a_j| <= |a_i|,

    <a_i, a_i> - <a_i, a_j>  >=  |a_i - a_j|^2 / 2  >  0,

so that a neuron relu(<a_i, h> - t_i) with t_i half-way between fires at a_i and at no later point. It may fire at
earlier ones: those are moved away before, or share the block, where a triangular system takes care of them. The
paper's common threshold 1 - 2 rho has no such order and fails for close points.

For very close points the square above drowns in rounding. Their directions are tilted until every difference to a
later point meets them at a fair angle; the gap is then of the order of the distance, not of its square.

Theory: hardt_ma2017:lemma-B.1
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from onlynorm.errors import ValueRangeError

CHUNK = 2**23
"""Inner products held at a time: 64 MB."""
SHAKY = 1e-6
"""Share of a gap that rounding may blur before the direction is tilted."""
LOST = 1e-2
"""Share of a gap that rounding may blur at most: beyond, the activation itself would be noise."""
FAIR = 0.1
"""Cosine between a tilted direction and every difference at which tilting stops."""
STEPS = 500


@dataclass(frozen=True)
class Separation:
    """One direction per point and the gap between the point and the largest later point along it.

    <direction_i, point_i> - <direction_i, point_j> >= gap_i for every j > i; the last gap is infinite.
    """

    directions: Tensor
    gaps: Tensor
    n_tilted: int


def by_length(points: Float[Tensor, "n size"]) -> Int[Tensor, " n"]:
    """The order in which to move the points: by decreasing length, equal ones as they stand."""
    return torch.linalg.vector_norm(points, dim=1).argsort(descending=True, stable=True)


def separate(
    points: Float[Tensor, "n size"],
    *,
    noise: Float[Tensor, " n"],
    names: Int[Tensor, " n"],
    progress: Callable[[int, int], None] | None = None,
) -> Separation:
    """Directions and gaps for points in the order of `by_length`.

    `noise` is by how much rounding may move a point; a gap that drowns in it raises, and `names` says of which points.
    """
    lengths = torch.linalg.vector_norm(points, dim=1)
    directions, gaps = points.clone(), points.square().sum(1) - largest_later(points, progress=progress)
    # A neuron's weights are its direction and a flag, which is at most one plus half of both lengths.
    blur = 2.0 * noise * (1.0 + 2.0 * lengths)
    close = (~(blur <= SHAKY * gaps)).nonzero().flatten()  # what is no number is close, too
    for i in close.tolist():
        directions[i], gaps[i] = _tilt(points, i)
        if not float(2.0 * noise[i] * (2.0 + lengths[i])) <= LOST * float(gaps[i]):
            _refuse(points, i, names)
    return Separation(directions, gaps, len(close))


def largest_later(
    points: Float[Tensor, "n size"], *, progress: Callable[[int, int], None] | None = None
) -> Float[Tensor, " n"]:
    """For each point its largest inner product with any later one, minus infinity for the last; rows by rows."""
    n = len(points)
    largest = points.new_full((n,), -torch.inf)
    start = 0
    while start < n:
        stop = min(n, start + max(1, CHUNK // (n - start)))
        products = points[start:stop] @ points[start:].mT
        rows = torch.arange(stop - start, device=points.device)
        # Only the corner at the front holds products with the point itself or with earlier ones.
        corner = products[:, : stop - start]
        corner.masked_fill_(rows[None, :] <= rows[:, None], -torch.inf)
        largest[start:stop] = products.amax(1)
        start = stop
        if progress is not None:
            progress(start, n)
    return largest


def fit_outgoing(
    activations: Float[Tensor, "blocks width width"], moves: Float[Tensor, "blocks width size"]
) -> Float[Tensor, "blocks width size"]:
    """What each neuron of a block has to add so that every point of the block makes its move.

    activations[b, l, i] is what neuron i says at point l: zero for l > i, positive for l = i.
    """
    return torch.linalg.solve_triangular(activations.triu(), moves, upper=True)


def _tilt(points: Tensor, i: int) -> tuple[Tensor, Tensor]:
    """(direction, gap) for a point with very close later ones: a perceptron on the directions of the differences."""
    differences = points[i] - points[i + 1 :]
    units = differences / torch.linalg.vector_norm(differences, dim=1, keepdim=True)
    length = torch.linalg.vector_norm(points[i])
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


def _refuse(points: Tensor, i: int, names: Tensor) -> None:
    near = int(torch.linalg.vector_norm(points[i] - points[i + 1 :], dim=1).argmin()) + i + 1
    apart = float(torch.linalg.vector_norm(points[i] - points[near]) / torch.linalg.vector_norm(points[i]))
    raise ValueRangeError(
        f"memorize needs points that float64 can tell apart in the hidden space; got {int(names[i])} and "
        f"{int(names[near])}, which differ there by {apart:.1e} of their length. Remove one of them, choose a larger "
        "width, or shift and scale the inputs so that they differ in more digits."
    )
