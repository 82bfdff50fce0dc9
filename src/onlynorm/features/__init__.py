"""Frozen random weights: `draw` features by name, and structural rank of sparse ones.

Reading order: streams, normals, orthogonal, fast_orthogonal, distributions, structured, scaled, draw,
blocks, matching.
"""

from onlynorm.features import streams
from onlynorm.features.blocks import BlockFeatures, draw_blocks
from onlynorm.features.distributions import names, register
from onlynorm.features.draw import Features, check_shape, draw
from onlynorm.features.matching import StructuralRank, is_generically_invertible, structural_rank
from onlynorm.features.scaled import semicircle_spectrum

__all__ = [
    "BlockFeatures",
    "Features",
    "StructuralRank",
    "check_shape",
    "draw",
    "draw_blocks",
    "is_generically_invertible",
    "names",
    "register",
    "semicircle_spectrum",
    "streams",
    "structural_rank",
]
