"""Gamma from features and a target: the operator, its spectrum, the methods, and `solve`, which picks one."""

from onlynorm.solvers.choose import Choice, choose
from onlynorm.solvers.khatri_rao import KhatriRao
from onlynorm.solvers.solution import Solution, solve, solve_features, solve_operator

__all__ = ["Choice", "KhatriRao", "Solution", "choose", "solve", "solve_features", "solve_operator"]
