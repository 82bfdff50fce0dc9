"""onlynorm: build, tune and explain neural networks through only their normalization layers.

The walk: target -> plan -> features -> solve -> norm parameters -> network -> verify -> report.
"""

from onlynorm import theorems
from onlynorm.features import Features, draw
from onlynorm.identity import Factorization, Memorizer, factorize, memorize, memorize_norms
from onlynorm.rank import Chain, Diagnosis, Repaired, diagnose, rank_ratio, repair, simulate, soft_rank
from onlynorm.reconstruction import (
    Box,
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
from onlynorm.tuning import Adapters, Schedule, find_norms, fit, fold, load_adapter, only_norms, save_adapter, unfold

__version__ = "0.1.0"

__all__ = [
    "Adapters",
    "Box",
    "Chain",
    "Diagnosis",
    "Factorization",
    "Features",
    "KhatriRao",
    "Memorizer",
    "Plan",
    "Reconstruction",
    "Repaired",
    "Schedule",
    "Solution",
    "Verification",
    "__version__",
    "choose",
    "collapse",
    "diagnose",
    "draw",
    "factorize",
    "find_norms",
    "fit",
    "fold",
    "load",
    "load_adapter",
    "memorize",
    "memorize_norms",
    "only_norms",
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
    "theorems",
    "unfold",
    "verify",
]
