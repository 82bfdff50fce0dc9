"""A trained network from a frozen random one, by its norms only.

The files read in the order of the work: target, norms, linearize, blocks, ranges, recipe, plan, the constructions
(wide, low_rank, residual, deep, multilayer), convert, verify, checkpoint.
"""

from onlynorm.reconstruction import deep as deep  # registers its construction
from onlynorm.reconstruction import low_rank as low_rank  # registers its construction
from onlynorm.reconstruction import multilayer as multilayer  # registers its construction
from onlynorm.reconstruction import residual as residual  # registers its construction
from onlynorm.reconstruction import wide as wide  # registers its construction
from onlynorm.reconstruction.checkpoint import load, save
from onlynorm.reconstruction.convert import collapse, reconstruct
from onlynorm.reconstruction.deep_law import DeepRow, deep_table, unique_solution
from onlynorm.reconstruction.equal_size import pad_equal
from onlynorm.reconstruction.folding import fold_network
from onlynorm.reconstruction.intervals import interval_rule
from onlynorm.reconstruction.linearize import Window, linearize
from onlynorm.reconstruction.norms import Affine, fold, unfold
from onlynorm.reconstruction.plan import Plan, plan
from onlynorm.reconstruction.price import CertifiedPrice, certified_price
from onlynorm.reconstruction.ranges import Box
from onlynorm.reconstruction.recipe import Recipe, constructions
from onlynorm.reconstruction.result import Calibration, LayerResult, Reconstruction
from onlynorm.reconstruction.target import find_layers
from onlynorm.reconstruction.tradeoff import Tradeoff, tradeoff
from onlynorm.reconstruction.verify import Verification, verify

__all__ = [
    "Affine",
    "Box",
    "Calibration",
    "CertifiedPrice",
    "DeepRow",
    "LayerResult",
    "Plan",
    "Recipe",
    "Reconstruction",
    "Tradeoff",
    "Verification",
    "Window",
    "certified_price",
    "collapse",
    "constructions",
    "deep_table",
    "find_layers",
    "fold",
    "fold_network",
    "interval_rule",
    "linearize",
    "load",
    "pad_equal",
    "plan",
    "reconstruct",
    "save",
    "tradeoff",
    "unfold",
    "unique_solution",
    "verify",
]

from onlynorm.reconstruction import (  # noqa: F401, each registers its checks
    checks_activations,
    checks_deep,
    checks_linear,
    checks_singular,
    checks_sources,
    checks_sparse,
)
