"""Weights of a target that sparse features cannot represent, and the density at which they could.

This follows from the masks before solving: every equation needs a separate feature (a bipartite matching). If some are
unmatched, the target decides: with t the column of its nonzero weights, it is exactly representable if the rank of
[M | t] is that of M. At the minimum width the scales of the outputs are additional columns T_i, and none of them may
be zero.

Masks of one seed are nested: entries at a low density are also present at a higher one. So

- a matching in thinned masks is one of the full masks. Thinned to log(n_features) + 4 nonzeros per feature and side, a
  pattern of 36,864 equations with 46,080 features has 10 million nonzeros instead of 400 million and takes 3 seconds.
  The probability that any feature loses all nonzeros of a side is below e^-4. If a matching of the thinned masks is not
  full, they are thinned less, and finally not at all;
- a sufficient density for this seed and shape is found by bisection, in hundredths; it is the smallest if the target
  has no zeros.

A pattern too large even when thinned (about 150,000 features) is not checked; the residual of the solver shows the
error.

Theory: giannou2023:lemma-9, giannou2023:thm-3
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from onlynorm.features import Features
from onlynorm.features.draw import build_structure
from onlynorm.features.matching import MAX_NONZEROS, free_scales, reaches, structural_rank

_NAMED = 5  # number of weights listed in a message
_STEPS = 100  # grid of densities
Places = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Unreached:
    """Weights (output, input, *kernel position) without a feature, and a density at which all have one."""

    weights: tuple[tuple[int, ...], ...]
    n_weights: int
    density: float
    enough: float

    def __str__(self) -> str:
        named = ", ".join(str(weight) for weight in self.weights[:_NAMED])
        more = f" and {len(self.weights) - _NAMED} more" if len(self.weights) > _NAMED else ""
        place = "(output, input)" if len(self.weights[0]) == 2 else "(output, input, kernel position)"
        return (
            f"{len(self.weights)} of {self.n_weights} weights have no feature at density {self.density:g}: "
            f"{place} {named}{more}; with this seed density {self.enough:g} reaches all (searched in hundredths)"
        )


def find_unreached(
    features: Features, weight: Float[Tensor, "*shape"], *, minimum_width: bool = False, first_output: int = 0
) -> Unreached | None:
    """The weights that these features cannot represent; None if there are none, or if that is unknown.

    `first_output`, the first output of the group, is added to the listed outputs.
    """
    if features.density is None or features.density == 1.0:
        return None
    matrix = features.as_matrix(weight)
    missing = _missing(features, matrix, minimum_width)
    if missing is None or not bool(missing.any()):
        return None

    def is_enough(step: int) -> bool:
        found = _missing(dataclasses.replace(features, density=step / _STEPS), matrix, minimum_width)
        return found is not None and not bool(found.any())

    steps = range(math.floor(features.density * _STEPS) + 1, _STEPS)
    enough = bisect.bisect_left(steps, True, key=is_enough)
    places = features.as_weight(missing.double()).nonzero().tolist()
    return Unreached(
        tuple((first_output + output, *rest) for output, *rest in places),
        features.equations,
        features.density,
        steps[enough] / _STEPS if enough < len(steps) else 1.0,
    )


def _missing(features: Features, matrix: Tensor, minimum_width: bool) -> Bool[Tensor, "rows cols"] | None:
    """A mask of the equations that the features cannot satisfy; None if that is unknown."""
    wanted = (matrix != 0).cpu()
    if features.name == "id_cond":
        structure = build_structure(features)
        return wanted & (structure.apply(torch.ones(structure.n_features)) == 0)
    # At the minimum width zero outputs are removed from the system.
    rows = wanted.any(1).nonzero().flatten() if minimum_width else torch.arange(len(wanted))
    missing = torch.zeros_like(wanted)
    if not len(rows):
        return missing
    density = features.density or 1.0
    per_side = math.log(features.n_features) + 4.0
    find = _unmatched_with_scales if minimum_width else _unmatched
    while True:
        left = _mask(dataclasses.replace(features, density=min(density, per_side / features.rows)), "left")[rows]
        right = _mask(dataclasses.replace(features, density=min(density, per_side / features.cols)), "right")
        if int((left.sum(0) * right.sum(1)).sum()) > MAX_NONZEROS:
            return None
        is_whole = per_side >= density * max(features.rows, features.cols)
        unmatched = find(left, right, wanted[rows], is_whole=is_whole)
        if is_whole or not len(unmatched):
            i, j = torch.tensor(unmatched, dtype=torch.long).reshape(-1, 2).mT
            missing[rows[i], j] = True
            return missing
        per_side *= 2


def _mask(features: Features, side: str) -> Tensor:
    """The mask of one side, drawn in pieces, since its random integers take eight times its memory."""
    make, width, axis = (
        (features.mask_left, features.rows, 1) if side == "left" else (features.mask_right, features.cols, 0)
    )
    step = max(1, 2**22 // width)
    starts = range(0, features.n_features, step)
    return torch.cat([make(start, min(start + step, features.n_features)).cpu() for start in starts], axis)


def _unmatched(left: Tensor, right: Tensor, wanted: Tensor, *, is_whole: bool) -> Places:
    """The equations without a feature, empty if the target is representable; for thinned masks a superset."""
    found = structural_rank(left, right)
    if found.is_full or (is_whole and reaches(left, right, wanted)):
        return ()
    return found.unmatched_rows


def _unmatched_with_scales(left: Tensor, right: Tensor, wanted: Tensor, *, is_whole: bool) -> Places:
    """The same with a nonzero scale for every output.

    Scales that would have to be zero are excluded: the result is unmatched by the features and the other scales.
    """
    free = free_scales(left, right, wanted)
    found = structural_rank(
        torch.cat([left, torch.eye(len(left), dtype=torch.bool)[:, free]], 1), torch.cat([right, wanted[free]])
    )
    if bool(free.all()) and (found.is_full or is_whole):
        return ()
    return found.unmatched_rows
