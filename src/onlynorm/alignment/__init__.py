"""`align`: permute the rows of a target to reduce the error with fewer features than equations.

Reading order: objective, directions, search, align.
"""

from onlynorm.alignment.align import METHODS, Alignment, Attempt, align, align_within
from onlynorm.alignment.directions import Directions, PerOutput, find_directions
from onlynorm.alignment.objective import Objective, objective_for

__all__ = [
    "METHODS",
    "Alignment",
    "Attempt",
    "Directions",
    "Objective",
    "PerOutput",
    "align",
    "align_within",
    "find_directions",
    "objective_for",
]
