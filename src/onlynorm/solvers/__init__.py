"""Gamma from features and a target: the operator, its spectrum, the methods, and `solve`, which picks one.

The files read in the order: operator, spectrum, prepare, choose, methods, fallback, solve, multilayer.
"""

from onlynorm.solvers.choose import Choice, choose
from onlynorm.solvers.multilayer.gammas import MultilayerSolution, solve_multilayer, widths_for
from onlynorm.solvers.operator import KhatriRao
from onlynorm.solvers.solve import Solution, solve, solve_features, solve_operator

__all__ = [
    "Choice",
    "KhatriRao",
    "MultilayerSolution",
    "Solution",
    "choose",
    "solve",
    "solve_features",
    "solve_multilayer",
    "solve_operator",
    "widths_for",
]
