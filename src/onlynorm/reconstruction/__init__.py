"""A trained network from a frozen random one, by its norms only.

The files read in the order of the work: target, linearize, blocks, ranges, wide, convert, verify.
"""

from onlynorm.reconstruction.convert import LayerResult, Reconstruction, collapse, reconstruct
from onlynorm.reconstruction.linearize import Window, linearize
from onlynorm.reconstruction.target import find_layers
from onlynorm.reconstruction.verify import Verification, verify

__all__ = [
    "LayerResult",
    "Reconstruction",
    "Verification",
    "Window",
    "collapse",
    "find_layers",
    "linearize",
    "reconstruct",
    "verify",
]
