"""Which weights of a target sparse features cannot make, and the density at which they could.

Known before anything is solved, from the masks alone: every equation needs a feature of its own (a bipartite matching).
Where some stay unmatched, the target itself is asked: with t the column of its nonzero weights, it can be made exactly
if the rank of [M | t] is that of M. At the minimum width the scales of the outputs take part, as columns T_i of their
own, and none of them may come out zero.

Masks of one seed are nested: what a low density keeps, a higher one keeps too. So

- a matching found in thinned masks is one of the whole. Thinned to log(n_features) + 4 nonzeros per feature and side,
  a pattern of 36,864 equations with 46,080 features has 10 million nonzeros instead of 400 million and takes 3 seconds.
  The chance that any feature loses all nonzeros of a side by it is below e^-4; where a matching of the thinned masks is
  not full, they are thinned less, down to not at all;
- a density that would do, with this seed and shape, is found by bisection: the smallest in hundredths where the target
  has no zeros.

A pattern too large even when thinned (about 150,000 features) is left to the solver, whose residual tells.

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

_NAMED = 5  # how many weights a message lists
_STEPS = 100  # densities are searched on this grid
Places = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Unreached:
    """Weights (output, input, *kernel position) without a feature, and a density that has one for each."""

    weights: tuple[tuple[int, ...], ...]
    n_weights: int
    density: float
    enough: float

    def __str__(self) -> str:
        named = ", ".join(str(weight) for weight in self.weights[:_NAMED])
        more = f" and {len(self.weights) - _NAMED} more" if len(self.weights) > _NAMED else ""
        place = "(output, input)" if len(self.weights[0]) == 2 else "(output, input, kernel position)"
        return (
            f"{len(self.weights)} of {self.n_weights} weights have no feature of their own at density "
            f"{self.density:g}: {place} {named}{more}; with this seed density {self.enough:g} reaches all (searched in "
            "hundredths)"
        )


def find_unreached(
    features: Features, weight: Float[Tensor, "*shape"], *, minimum_width: bool = False, first_output: int = 0
) -> Unreached | None:
    """The weights that keep these features from the target; None if they reach it or if that cannot be told.

    `first_output` is added to the outputs named: groups are asked one by one.
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
    """The equations that keep the features from the target, none of them if it is reached; None: cannot be told."""
    wanted = (matrix != 0).cpu()
    if features.name == "id_cond":
        structure = build_structure(features)
        return wanted & (structure.apply(torch.ones(structure.n_features)) == 0)
    # At the minimum width outputs that are zero throughout are switched off and leave the system.
    rows = wanted.any(1).nonzero().flatten() if minimum_width else torch.arange(len(wanted))
    missing = torch.zeros_like(wanted)
    if not len(rows):
        return missing
    density = features.density or 1.0
    per_side = math.log(features.n_features) + 4.0
    ask = _ask_with_scales if minimum_width else _ask
    while True:
        left = _mask(dataclasses.replace(features, density=min(density, per_side / features.rows)), "left")[rows]
        right = _mask(dataclasses.replace(features, density=min(density, per_side / features.cols)), "right")
        if int((left.sum(0) * right.sum(1)).sum()) > MAX_NONZEROS:
            return None
        is_whole = per_side >= density * max(features.rows, features.cols)
        unmatched = ask(left, right, wanted[rows], is_whole=is_whole)
        if is_whole or not len(unmatched):
            i, j = torch.tensor(unmatched, dtype=torch.long).reshape(-1, 2).mT
            missing[rows[i], j] = True
            return missing
        per_side *= 2


def _mask(features: Features, side: str) -> Tensor:
    """The mask of one side, made in pieces: the random words behind it take eight times its memory."""
    make, width, axis = (
        (features.mask_left, features.rows, 1) if side == "left" else (features.mask_right, features.cols, 0)
    )
    step = max(1, 2**22 // width)
    starts = range(0, features.n_features, step)
    return torch.cat([make(start, min(start + step, features.n_features)).cpu() for start in starts], axis)


def _ask(left: Tensor, right: Tensor, wanted: Tensor, *, is_whole: bool) -> Places:
    """The equations without a feature, none if the target is reached; of thinned masks only "none" is an answer."""
    found = structural_rank(left, right)
    if found.is_full or (is_whole and reaches(left, right, wanted)):
        return ()
    return found.unmatched_rows


def _ask_with_scales(left: Tensor, right: Tensor, wanted: Tensor, *, is_whole: bool) -> Places:
    """The same with a scale to choose for every output, none of which may be zero.

    A scale that would have to be zero carries nothing: the equations are those that the features and the other scales
    leave unmatched.
    """
    free = free_scales(left, right, wanted)
    found = structural_rank(
        torch.cat([left, torch.eye(len(left), dtype=torch.bool)[:, free]], 1), torch.cat([right, wanted[free]])
    )
    if bool(free.all()) and (found.is_full or is_whole):
        return ()
    return found.unmatched_rows
