"""onlynorm: build, tune and explain neural networks through only their normalization layers.

The walk: target -> plan -> features -> solve -> norm parameters -> network -> verify.
"""

from onlynorm import optim
from onlynorm.alignment import Alignment, align
from onlynorm.features import Features, draw, semicircle_spectrum
from onlynorm.frozen import (
    NormOnlyConv2d,
    NormOnlyLinear,
    converted,
    load_norm_only,
    norm_only,
    save_norm_only,
)
from onlynorm.identity import Factorization, Memorizer, factorize, memorize, memorize_norms
from onlynorm.intervals import Box
from onlynorm.modules import find_norms, fold, unfold
from onlynorm.rank import Chain, Diagnosis, Repaired, diagnose, rank_ratio, repair, simulate, soft_rank
from onlynorm.reconstruction import (
    Plan,
    Reconstruction,
    Verification,
    collapse,
    load,
    plan,
    reconstruct,
    save,
    verify,
)
from onlynorm.solvers import KhatriRao, Solution, choose, solve, solve_features, spectrum
from onlynorm.tuning import Adapters, Schedule, fit, load_adapter, only_norms, save_adapter

__version__ = "0.1.0"

__all__ = [
    "Adapters",
    "Alignment",
    "Box",
    "Chain",
    "Diagnosis",
    "Factorization",
    "Features",
    "KhatriRao",
    "Memorizer",
    "NormOnlyConv2d",
    "NormOnlyLinear",
    "Plan",
    "Reconstruction",
    "Repaired",
    "Schedule",
    "Solution",
    "Verification",
    "__version__",
    "align",
    "choose",
    "collapse",
    "converted",
    "diagnose",
    "draw",
    "factorize",
    "find_norms",
    "fit",
    "fold",
    "load",
    "load_adapter",
    "load_norm_only",
    "memorize",
    "memorize_norms",
    "norm_only",
    "only_norms",
    "optim",
    "plan",
    "rank_ratio",
    "reconstruct",
    "repair",
    "save",
    "save_adapter",
    "save_norm_only",
    "semicircle_spectrum",
    "simulate",
    "soft_rank",
    "solve",
    "solve_features",
    "spectrum",
    "unfold",
    "verify",
]
