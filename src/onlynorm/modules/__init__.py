"""Any `nn.Module`: its layers and norms, what it returns, what it is wrapped in, and default losses.

The files read in the order: walk, validate, norms, layers, convolution, activations, affine, fold, losses, untouched.
"""

from onlynorm.modules.affine import Affine, from_affine, to_affine
from onlynorm.modules.fold import FoldedModel, KeptNorm, fold, fold_network, unfold
from onlynorm.modules.layers import find_layers
from onlynorm.modules.losses import Loss, default_loss, is_class_labels
from onlynorm.modules.norms import NormLayer, Norms, SkippedNorm, find_norms
from onlynorm.modules.validate import need_model
from onlynorm.modules.walk import (
    Output,
    find_output,
    is_autocast,
    tensors_in,
    unwrap,
    without_autocast,
    without_compiling,
)

__all__ = [
    "Affine",
    "FoldedModel",
    "KeptNorm",
    "Loss",
    "NormLayer",
    "Norms",
    "Output",
    "SkippedNorm",
    "default_loss",
    "find_layers",
    "find_norms",
    "find_output",
    "fold",
    "fold_network",
    "from_affine",
    "is_autocast",
    "is_class_labels",
    "need_model",
    "tensors_in",
    "to_affine",
    "unfold",
    "unwrap",
    "without_autocast",
    "without_compiling",
]
