"""onlynorm: build, tune and explain neural networks through only their normalization layers.

The walk: target -> plan -> features -> solve -> norm parameters -> network -> verify -> report.
"""

from onlynorm import theorems
from onlynorm.features import Features, draw
from onlynorm.reconstruction import Reconstruction, Verification, collapse, reconstruct, verify
from onlynorm.solvers import KhatriRao, Solution, choose, solve, solve_features, spectrum

__version__ = "0.1.0"

__all__ = [
    "Features",
    "KhatriRao",
    "Reconstruction",
    "Solution",
    "Verification",
    "__version__",
    "choose",
    "collapse",
    "draw",
    "reconstruct",
    "solve",
    "solve_features",
    "spectrum",
    "theorems",
    "verify",
]
