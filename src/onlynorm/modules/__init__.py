"""Tools for any `nn.Module`: layers and norms, outputs, wrappers, folding, and default losses.

Reading order: walk, norms, layers, convolution, activations, affine, fold, losses, untouched, tree, structure.
"""

from onlynorm.modules import activations, affine
from onlynorm.modules.affine import Affine, from_affine, to_affine
from onlynorm.modules.fold import Folded, FoldedModel, KeptNorm, fold, fold_network, unfold
from onlynorm.modules.layers import Left, Target, TargetLayer, find_layers
from onlynorm.modules.losses import Loss, default_loss, is_class_labels
from onlynorm.modules.norms import NormLayer, Norms, SkippedNorm, find_norms
from onlynorm.modules.tree import ModuleRow, ModuleTree
from onlynorm.modules.walk import (
    Output,
    find_output,
    is_autocast,
    need_model,
    tensors_in,
    unwrap,
    without_autocast,
    without_compiling,
)

__all__ = [
    "Affine",
    "Folded",
    "FoldedModel",
    "KeptNorm",
    "Left",
    "Loss",
    "ModuleRow",
    "ModuleTree",
    "NormLayer",
    "Norms",
    "Output",
    "SkippedNorm",
    "Target",
    "TargetLayer",
    "activations",
    "affine",
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
