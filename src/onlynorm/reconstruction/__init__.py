"""Rebuild a trained network from a frozen random one by setting only its norms.

Reading order: linearize, ranges, costs, activation_memory, the constructions, plan, resume, result, reconstruct,
verify, certified_price.
"""

from onlynorm.reconstruction.certified_price import CertifiedPrice, certified_price
from onlynorm.reconstruction.constructions import deep, slices
from onlynorm.reconstruction.constructions.options import (
    Construction,
    Deep,
    LowRank,
    Multilayer,
    Ranges,
    Residual,
    Settings,
    Wide,
)
from onlynorm.reconstruction.linearize import Window, linearize
from onlynorm.reconstruction.plan import Plan, plan
from onlynorm.reconstruction.reconstruct import collapse, reconstruct
from onlynorm.reconstruction.result import Calibration, LayerResult, Reconstruction
from onlynorm.reconstruction.verify import Comparison, Verification, compare, verify

__all__ = [
    "Calibration",
    "CertifiedPrice",
    "Comparison",
    "Construction",
    "Deep",
    "LayerResult",
    "LowRank",
    "Multilayer",
    "Plan",
    "Ranges",
    "Reconstruction",
    "Residual",
    "Settings",
    "Verification",
    "Wide",
    "Window",
    "certified_price",
    "collapse",
    "compare",
    "deep",
    "linearize",
    "plan",
    "reconstruct",
    "slices",
    "verify",
]
