"""Layers whose only parameters are norms, to train from scratch.

The files read in the order: choice, pseudo_inverse, block_operator, solve_blocks, frozen, modules, converter,
layer_file.
"""

from onlynorm.features.blocks import BlockFeatures, draw_blocks
from onlynorm.features.scaled import semicircle_spectrum
from onlynorm.layers.choice import Choice
from onlynorm.layers.converter import Conversion, ConvertedLayer, converted, norm_only
from onlynorm.layers.layer_file import load_norm_only, save_norm_only
from onlynorm.layers.modules import NormOnlyConv2d, NormOnlyLayer, NormOnlyLinear, wrap

__all__ = [
    "BlockFeatures",
    "Choice",
    "Conversion",
    "ConvertedLayer",
    "NormOnlyConv2d",
    "NormOnlyLayer",
    "NormOnlyLinear",
    "converted",
    "draw_blocks",
    "load_norm_only",
    "norm_only",
    "save_norm_only",
    "semicircle_spectrum",
    "wrap",
]
