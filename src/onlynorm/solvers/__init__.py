"""Gamma from features and a target: the operator, its spectrum, the methods, and `solve`, which picks one."""

from onlynorm.solvers.choose import Choice, choose
from onlynorm.solvers.khatri_rao import KhatriRao
from onlynorm.solvers.multilayer import MultilayerSolution, solve_multilayer, widths_for
from onlynorm.solvers.solution import Solution, solve, solve_features, solve_operator

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

from onlynorm.solvers import checks as _checks  # noqa: F401
from onlynorm.solvers import checks_spectrum as _checks_spectrum  # noqa: F401
from onlynorm.solvers import checks_width as _checks_width  # noqa: F401
