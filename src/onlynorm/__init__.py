"""onlynorm: build, tune and explain neural networks through only their normalization layers.

The walk: target -> plan -> features -> solve -> norm parameters -> network -> verify.
"""

from onlynorm import optim
from onlynorm.alignment import align
from onlynorm.features import draw
from onlynorm.files import load, save
from onlynorm.frozen import NormOnlyConv2d, NormOnlyLinear, to_norm_only
from onlynorm.identity import factorize, memorize, memorize_norms
from onlynorm.intervals import Box
from onlynorm.modules import fold, unfold
from onlynorm.rank import Chain, diagnose, rank_ratio, repair, simulate, soft_rank
from onlynorm.reconstruction import (
    Deep,
    LowRank,
    Multilayer,
    Ranges,
    Residual,
    Wide,
    collapse,
    plan,
    reconstruct,
    verify,
)
from onlynorm.solvers import solve, solve_features, spectrum
from onlynorm.tuning import Adapters, Schedule, fit, load_adapter, only_norms, save_adapter

__version__ = "0.1.0"

__all__ = [
    "Adapters",
    "Box",
    "Chain",
    "Deep",
    "LowRank",
    "Multilayer",
    "NormOnlyConv2d",
    "NormOnlyLinear",
    "Ranges",
    "Residual",
    "Schedule",
    "Wide",
    "__version__",
    "align",
    "collapse",
    "diagnose",
    "draw",
    "factorize",
    "fit",
    "fold",
    "load",
    "load_adapter",
    "memorize",
    "memorize_norms",
    "only_norms",
    "optim",
    "plan",
    "rank_ratio",
    "reconstruct",
    "repair",
    "save",
    "save_adapter",
    "simulate",
    "soft_rank",
    "solve",
    "solve_features",
    "spectrum",
    "to_norm_only",
    "unfold",
    "verify",
]
