"""Solvers for gamma: the linear operator, its spectrum, the methods, and `solve`, which selects one.

Reading order: operator, spectrum, prepare, choose, methods, fallback, solve, multilayer.
"""

from onlynorm.solvers import spectrum
from onlynorm.solvers.choose import Choice, choose
from onlynorm.solvers.methods.blocks import solve_blocks
from onlynorm.solvers.methods.minimum_width import minimum_features
from onlynorm.solvers.multilayer.gammas import MultilayerSolution, solve_multilayer, widths_for
from onlynorm.solvers.operator import KhatriRao
from onlynorm.solvers.prepare import DEFAULT_TOLERANCE, need_tolerance
from onlynorm.solvers.solve import Solution, solve, solve_features, solve_operator
from onlynorm.solvers.spectrum import ExcessSweep, Prediction, Spectrum

__all__ = [
    "DEFAULT_TOLERANCE",
    "Choice",
    "ExcessSweep",
    "KhatriRao",
    "MultilayerSolution",
    "Prediction",
    "Solution",
    "Spectrum",
    "choose",
    "minimum_features",
    "need_tolerance",
    "solve",
    "solve_blocks",
    "solve_features",
    "solve_multilayer",
    "solve_operator",
    "spectrum",
    "widths_for",
]
