"""A trained network from a frozen random one, by its norms only.

The files read in the order of the work: target, norms, linearize, blocks, ranges, recipe, the constructions (wide ...),
convert, verify.
"""

from onlynorm.reconstruction import wide as wide  # registers its construction
from onlynorm.reconstruction.convert import LayerResult, Reconstruction, collapse, reconstruct
from onlynorm.reconstruction.linearize import Window, linearize
from onlynorm.reconstruction.norms import Affine, fold, unfold
from onlynorm.reconstruction.recipe import Recipe, constructions
from onlynorm.reconstruction.target import find_layers
from onlynorm.reconstruction.verify import Verification, verify

__all__ = [
    "Affine",
    "LayerResult",
    "Recipe",
    "Reconstruction",
    "Verification",
    "Window",
    "collapse",
    "constructions",
    "find_layers",
    "fold",
    "linearize",
    "reconstruct",
    "unfold",
    "verify",
]
