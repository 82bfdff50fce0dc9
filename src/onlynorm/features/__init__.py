"""Frozen random weights: `draw` features by name; ask a matching what sparse ones can reach.

The files read in the order: streams, normals, orthogonal, distributions, structured, scaled, draw, blocks, matching.
"""

from onlynorm.features.blocks import BlockFeatures, draw_blocks
from onlynorm.features.distributions import names, register
from onlynorm.features.draw import Features, draw
from onlynorm.features.matching import is_generically_invertible, structural_rank
from onlynorm.features.scaled import semicircle_spectrum

__all__ = [
    "BlockFeatures",
    "Features",
    "draw",
    "draw_blocks",
    "is_generically_invertible",
    "names",
    "register",
    "semicircle_spectrum",
    "structural_rank",
]
