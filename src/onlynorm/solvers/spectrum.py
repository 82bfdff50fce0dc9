"""The law of the singular values of random features, and what it predicts before anything is computed.

For a random Khatri-Rao matrix M with N equations, c features and entries of variance 1/N, put l = c / N. The
squared singular values follow the Marchenko-Pastur law with edges (1 - sqrt(l))^2 and (1 + sqrt(l))^2, so

    density of a nonzero singular value:  p(x) = sqrt((x^2 - a^2)(b^2 - x^2)) / (pi * min(l, 1) * x),  a <= x <= b
    a = |1 - sqrt(l)|,   b = 1 + sqrt(l),   kappa = b / a

kappa is the same for l and 1 / l. At l = 1 the lower edge is zero and only the size keeps M invertible: the
smallest singular value is of order 1 / N.

Theory: random_features:thm-2.2
"""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from onlynorm.errors import ValueRangeError
from onlynorm.solvers.khatri_rao import KhatriRao

SQUARE_CONSTANT = 0.66
"""Typical N * (smallest singular value) of a square matrix: Edelman's limit law for sqrt(N) s_min has density
(1 + x) exp(-x^2 / 2 - x) for real Gaussian entries of variance one; its mean is 0.656, its median 0.545."""


def edges(n_equations: int, n_features: int) -> tuple[float, float]:
    """The ends (a, b) of the support of the nonzero singular values, for entries of variance 1 / n_equations."""
    _need_counts(n_equations, n_features)
    root = math.sqrt(n_features / n_equations)
    return abs(1.0 - root), 1.0 + root


def density(x: NDArray[np.float64], n_equations: int, n_features: int) -> NDArray[np.float64]:
    """The density at x of the min(n_equations, n_features) nonzero singular values; it integrates to one."""
    low, high = edges(n_equations, n_features)
    x = np.asarray(x, dtype=np.float64)
    inside = np.clip((x**2 - low**2) * (high**2 - x**2), 0.0, None)
    share = min(n_features / n_equations, 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = np.sqrt(inside) / (math.pi * share * x)
    # At l = 1 the formula is sqrt(4 - x^2) / pi: finite at zero, where the quotient is 0 / 0.
    value = np.where(x == 0.0, 2.0 / math.pi if low == 0.0 else 0.0, value)
    return np.where((x >= low) & (x <= high), value, 0.0)


def cumulative(x: NDArray[np.float64], n_equations: int, n_features: int) -> NDArray[np.float64]:
    """The share of the nonzero singular values that are at most x.

    The substitution x = (a + b) / 2 - (b - a) / 2 cos(theta) removes the square-root ends, so that 256
    Gauss-Legendre points per half circle are exact to rounding for every shape.
    """
    low, high = edges(n_equations, n_features)
    x = np.atleast_1d(np.asarray(x, dtype=np.float64))
    middle, half = (low + high) / 2, (high - low) / 2
    end = np.arccos(np.clip((middle - x) / half, -1.0, 1.0))
    nodes, weights = np.polynomial.legendre.leggauss(256)
    theta = end[:, None] * (nodes + 1.0) / 2
    values = density(middle - half * np.cos(theta), n_equations, n_features) * half * np.sin(theta)
    return np.clip((values * weights).sum(-1) * end / 2, 0.0, 1.0)


def condition_number(n_equations: int, n_features: int) -> float:
    """The predicted ratio of the largest to the smallest nonzero singular value.

    kappa = (1 + sqrt l) / |1 - sqrt l|, with the lower edge never below what a matrix of this size has at the
    square case (about 0.66 / N). It grows like N at l = 1 and does not depend on N away from it.
    """
    smaller, larger = sorted((n_equations, n_features))  # a matrix and its transpose have one condition number
    low, high = edges(smaller, larger)
    if smaller == 1:
        return 1.0
    # Below about N^(-2/3) the edge is blurred by fluctuations; the quadratic mean joins both regimes smoothly.
    return high / math.hypot(low, SQUARE_CONSTANT / smaller)


def predicted_iterations(n_equations: int, n_features: int, *, tolerance: float) -> int:
    """How many conjugate-gradient steps on the Gram operator of random features reach `tolerance`."""
    return iterations_for(condition_number(n_equations, n_features), tolerance)


def iterations_for(condition: float, tolerance: float) -> int:
    """The Chebyshev bound: the smallest k with 2 ((kappa - 1) / (kappa + 1))^k <= tolerance."""
    if not 0.0 < tolerance < 1.0:
        raise ValueRangeError(f"a number of iterations needs a tolerance in (0, 1); got {tolerance}. Try 1e-10.")
    if condition <= 1.0 + 1e-12:
        return 1
    return max(1, math.ceil(math.log(2.0 / tolerance) / math.log((condition + 1.0) / (condition - 1.0))))


def condition_for(iterations: int, tolerance: float) -> float:
    """The largest condition number at which `iterations` steps reach the tolerance: the bound turned round."""
    return 1.0 / math.tanh(math.log(2.0 / tolerance) / (2.0 * iterations))


def features_for_condition(n_equations: int, condition: float) -> int:
    """The number of features, at least n_equations, from which on the law's edges promise this condition number."""
    if condition <= 1.0:
        raise ValueRangeError(
            f"features_for_condition needs a condition number above 1; got {condition}. "
            "Only id_cond and ortho_cond features reach 1."
        )
    if condition_number(n_equations, n_equations) <= condition:
        return n_equations
    root = (condition + 1.0) / (condition - 1.0)
    return max(n_equations + 1, math.ceil(n_equations * root * root))


def empirical_spectrum(left: Float[Tensor, "out feat"], right: Float[Tensor, "feat inp"]) -> Float[Tensor, " values"]:
    """The min(equations, features) largest singular values of M, descending, scaled to entry variance 1 / equations.

    From the smaller Gram matrix in float64: values below about 1e-8 of the largest are rounding.
    """
    operator = KhatriRao(left.double(), right.double())
    gram = operator.gram() if operator.n_features <= operator.equations else operator.row_gram()
    scale = operator.column_squares().sum() / operator.n_features
    return torch.linalg.eigvalsh(gram).clamp_min(0.0).div(scale).sqrt().flip(0)


def _need_counts(n_equations: int, n_features: int) -> None:
    if n_equations < 1 or n_features < 1:
        raise ValueRangeError(
            "the law needs at least one equation and one feature; "
            f"got {n_equations} equations and {n_features} features. Leave empty layers out."
        )
