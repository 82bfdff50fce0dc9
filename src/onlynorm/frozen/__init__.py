"""Frozen layers: weights from a seed, norms as the only parameters.

Reconstruction computes the norms; training from scratch learns them. Reading order: options, maps, form, streaming,
pair, residual, sequence, norm_only, convert, fast_paths, checkpoint.
"""

from onlynorm.frozen import pair
from onlynorm.frozen.convert import Conversion, ConvertedLayer, converted, to_norm_only
from onlynorm.frozen.form import find_blocks
from onlynorm.frozen.norm_only import (
    NormOnlyConv1d,
    NormOnlyConv2d,
    NormOnlyConv3d,
    NormOnlyLayer,
    NormOnlyLinear,
    wrap,
)
from onlynorm.frozen.options import PRECISIONS, FrozenOptions

__all__ = [
    "PRECISIONS",
    "Conversion",
    "ConvertedLayer",
    "FrozenOptions",
    "NormOnlyConv1d",
    "NormOnlyConv2d",
    "NormOnlyConv3d",
    "NormOnlyLayer",
    "NormOnlyLinear",
    "converted",
    "find_blocks",
    "pair",
    "to_norm_only",
    "wrap",
]
