"""Frozen random weights: `draw` features by name; ask a matching what sparse ones can reach."""

from onlynorm.features.distributions import draw, names, register
from onlynorm.features.matching import is_generically_invertible, structural_rank
from onlynorm.features.weights import Features

__all__ = ["Features", "draw", "is_generically_invertible", "names", "register", "structural_rank"]
