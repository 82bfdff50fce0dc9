"""A trained network from a frozen random one, by its norms only.

The files read in the order of the work: linearize, ranges, costs, activation_memory, the constructions, plan, resume,
result, reconstruct, verify, checkpoint, certified_price.
"""

from onlynorm.reconstruction.certified_price import CertifiedPrice, certified_price
from onlynorm.reconstruction.checkpoint import load, save
from onlynorm.reconstruction.constructions.base import Recipe, constructions
from onlynorm.reconstruction.linearize import Window, linearize
from onlynorm.reconstruction.plan import Plan, plan
from onlynorm.reconstruction.reconstruct import collapse, reconstruct
from onlynorm.reconstruction.result import Calibration, LayerResult, Reconstruction
from onlynorm.reconstruction.verify import Verification, verify

__all__ = [
    "Calibration",
    "CertifiedPrice",
    "LayerResult",
    "Plan",
    "Recipe",
    "Reconstruction",
    "Verification",
    "Window",
    "certified_price",
    "collapse",
    "constructions",
    "linearize",
    "load",
    "plan",
    "reconstruct",
    "save",
    "verify",
]
