"""Frozen layers: weights from a seed, norms as the only parameters.

Reconstruction computes the norms, training from scratch learns them. The files read in the order: form, options, maps,
streaming, pair, residual, sequence, fast_paths, norm_only, convert, checkpoint.
"""

from onlynorm.frozen.checkpoint import load_norm_only, save_norm_only
from onlynorm.frozen.convert import Conversion, ConvertedLayer, converted, norm_only
from onlynorm.frozen.norm_only import (
    NormOnlyConv1d,
    NormOnlyConv2d,
    NormOnlyConv3d,
    NormOnlyLayer,
    NormOnlyLinear,
    wrap,
)
from onlynorm.frozen.options import Choice

__all__ = [
    "Choice",
    "Conversion",
    "ConvertedLayer",
    "NormOnlyConv1d",
    "NormOnlyConv2d",
    "NormOnlyConv3d",
    "NormOnlyLayer",
    "NormOnlyLinear",
    "converted",
    "load_norm_only",
    "norm_only",
    "save_norm_only",
    "wrap",
]
