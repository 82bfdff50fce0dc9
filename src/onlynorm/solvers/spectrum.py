"""The law of the singular values of random features, and what it predicts before anything is computed.

For a random Khatri-Rao matrix M with N equations, c features and entries of variance 1/N, put l = c / N. The
squared singular values follow the Marchenko-Pastur law with edges (1 - sqrt(l))^2 and (1 + sqrt(l))^2, so

    density of a nonzero singular value:  p(x) = sqrt((x^2 - a^2)(b^2 - x^2)) / (pi * min(l, 1) * x),  a <= x <= b
    a = |1 - sqrt(l)|,   b = 1 + sqrt(l),   kappa = b / a

This is the limit of large N. `condition_number` is the median at finite N: both edges are moved by the median of the
Tracy-Widom law. kappa is the same for l and 1 / l, and of the order of N at l = 1, where the lower edge is zero.

Predictions are about features of unit length: columns of M divided by their norm |left[:, f]| |right[f, :]|, as every
method of the solver uses them. Features as drawn have random lengths, and their condition number is larger, most of
all for layers with few outputs or inputs.

Theory: random_features:thm-2.2
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy.linalg
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from onlynorm.errors import InsufficientFeaturesError, ValueRangeError, shown
from onlynorm.features.streams import Stream, as_integer, check_density
from onlynorm.modules import as_real, is_real_number, need_flag, need_instance, need_integer, need_number
from onlynorm.solvers.khatri_rao import KhatriRao, Operator

TRACY_WIDOM = -1.2680
"""Median of the Tracy-Widom law for real matrices. Its 95 % quantile is 0.9793."""
HARD_EDGE = 0.5
"""Added to the larger of both counts. It moves the soft-edge formula on to the square case, where the smallest singular
value of an n x n matrix has the median 0.545 / n (Edelman) and the formula says 0.512 / n; with k = 1, 2, 3, 5 and 8
more columns than rows simulations have 1.19, 1.79, 2.34, 3.45 and 5.07, the formula 1.19, 1.81, 2.40, 3.53 and 5.18."""
SQUARE_SPREADS = (11.0, 3.7, 2.6)
"""The 95 % quantile of the condition number over its median for 0, 1 and 2 more columns than rows, simulated."""
MIN_COVERAGE, MIN_ENTRIES, MIN_SIDE, MIN_EQUATIONS, MIN_MARGIN = 20.0, 8.0, 4, 128, 3.0
"""Sparse features follow the law of their nonzero ones where an equation has at least 20 of them, a feature at least 8
nonzero entries, the layer at least 4 outputs and inputs and 128 equations, and the number of nonzero features is 3
standard deviations away from the number of equations. Of 384 such systems, signs and normal, with densities 0.2 to 0.8
and excess 0.5 to 4, all but one had a condition number within a factor of 1.5 of the law's, and all the number of
iterations."""
MAX_RESOLVED, MIN_SIGNIFICANCE = 20.0, 6.0
"""The largest condition number that a Lanczos estimate claims to know, and the least distance of its lower edge from
zero in standard errors. Measured with 12 products at 1170 systems (shapes 1 x 300 to 24 x 24, excess 0.5 to 4): of 555
dense ones and ones of density 0.2 to 0.8 that it knows, all are within a factor of 1.5; of 197 of density 0.05 and 0.1,
97 %."""
ROUNDING = 1e3
"""Squared singular values below this many eps of the largest are taken as zero."""


def edges(n_equations: int, n_features: int) -> tuple[float, float]:
    """The ends (a, b) of the support of the nonzero singular values, for entries of variance 1 / n_equations."""
    n_equations, n_features = _need_counts(n_equations, n_features)
    root = math.sqrt(n_features / n_equations)
    return abs(1.0 - root), 1.0 + root


def density(x: NDArray[np.float64], n_equations: int, n_features: int) -> NDArray[np.float64]:
    """The density at x of the min(n_equations, n_features) nonzero singular values; it integrates to one."""
    low, high = edges(n_equations, n_features)
    x = _need_points(x)
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
    x = np.atleast_1d(_need_points(x))
    middle, half = (low + high) / 2, (high - low) / 2
    end = np.arccos(np.clip((middle - x) / half, -1.0, 1.0))
    nodes, weights = np.polynomial.legendre.leggauss(256)
    theta = end[..., None] * (nodes + 1.0) / 2
    values = density(middle - half * np.cos(theta), n_equations, n_features) * half * np.sin(theta)
    return np.clip((values * weights).sum(-1) * end / 2, 0.0, 1.0)


def condition_number(n_equations: int, n_features: int) -> float:
    """The predicted ratio of the largest to the smallest nonzero singular value, for features of unit length.

    This is the median over draws. With n the smaller and c the larger count plus 1/2, the squared edges are

        (sqrt c +- sqrt n)^2 +- TW (sqrt c +- sqrt n) (1 / sqrt n +- 1 / sqrt c)^(1/3),    TW = -1.268

    It grows like N at l = 1 and hardly depends on N away from it. A single draw can be far off near l = 1: there the
    95 % quantile is 11 times the median. `predict_condition` says by how much.
    """
    return _condition(*_need_counts(n_equations, n_features))


def _condition(n_equations: float, n_features: float, quantile: float = TRACY_WIDOM) -> float:
    """The formula of `condition_number`, with the quantile of the Tracy-Widom law at the lower edge."""
    n, c = sorted((n_equations, n_features))  # a matrix and its transpose have one condition number
    if n <= 1:
        return 1.0
    extra, c = c - n + HARD_EDGE, c + HARD_EDGE
    total = math.sqrt(n) + math.sqrt(c)
    gap = extra / total  # sqrt c - sqrt n, without cancellation
    high = total**2 + TRACY_WIDOM * total * (total / math.sqrt(n * c)) ** (1 / 3)
    low = gap**2 - quantile * gap * (gap / math.sqrt(n * c)) ** (1 / 3)
    return math.sqrt(high / low) if low > 0.0 else math.inf


def _spread(n_equations: float, n_features: float) -> float:
    """The 95 % quantile of the condition number over its median."""
    extra = abs(n_equations - n_features)
    if min(n_equations, n_features) <= 1:
        return 1.0
    if extra < len(SQUARE_SPREADS):
        return SQUARE_SPREADS[int(extra)]
    return _condition(n_equations, n_features, 0.9793) / _condition(n_equations, n_features)


def iterations_for(condition: float, tolerance: float) -> int:
    """The Chebyshev bound: the smallest k with 2 ((kappa - 1) / (kappa + 1))^k <= tolerance."""
    _need_tolerance(tolerance)
    condition = need_number("condition", condition, low=0.0, high=1e300, cure="It is at least 1.")
    if condition <= 1.0 + 1e-12:
        return 1
    return max(1, math.ceil((math.log(2.0) - math.log(tolerance)) / math.log1p(2.0 / (condition - 1.0))))


def condition_for(iterations: int, tolerance: float) -> float:
    """The largest condition number at which `iterations` steps reach the tolerance: the bound turned round."""
    iterations = need_integer("iterations", iterations, low=1, high=2**62, cure="Try 1000.")
    _need_tolerance(tolerance)
    return 1.0 / math.tanh(math.log(2.0 / tolerance) / (2.0 * iterations))


def features_for_condition(n_equations: int, condition: float) -> int:
    """The number of features, at least n_equations, from which on the law's edges promise this condition number."""
    if not is_real_number(condition) or not 1.0 < condition < math.inf:
        raise ValueRangeError(
            f"features_for_condition needs a condition number above 1; got {shown(condition)}. "
            "Only id_cond and ortho_cond features reach 1."
        )
    n_equations, _ = _need_counts(n_equations, 1)
    if condition_number(n_equations, n_equations) <= condition:
        return n_equations
    root = (condition + 1.0) / (condition - 1.0)
    return max(n_equations + 1, math.ceil(n_equations * root * root))


@dataclass(frozen=True)
class Prediction:
    """The condition number of features of unit length, and where the number comes from.

    `is_known` says that the median over draws is within a factor of 1.5 of `condition`; otherwise `condition` is a
    lower bound. `source` is "law", "lanczos" or "unknown". 95 % of draws are below `spread` times `condition`, if
    given. `n_values` is the number of singular values, which limits the number of iterations.
    """

    condition: float
    is_known: bool
    source: str
    spread: float | None = None
    n_values: int | None = None

    def __str__(self) -> str:
        if not self.is_known:
            return f"condition number unknown, at least {self.condition:.4g}"
        spread = "" if self.spread is None else f", 95 % of draws below {self.spread * self.condition:.4g}"
        return f"condition number {self.condition:.4g} ({self.source}{spread})"


def predict_condition(
    n_outputs: int,
    n_inputs: int,
    n_features: int,
    *,
    density: float | None = None,
    is_orthogonal: bool = False,
) -> Prediction:
    """The condition number of unit-length features from their shape alone.

    `density` is that of sparse features. They follow the law of their nonzero features, of which there are
    c (1 - (1 - density)^out)(1 - (1 - density)^inp), unless they are so sparse that equations differ in how many
    features they have: those are unknown, with the bound 1. `is_orthogonal` is for features in groups of max(out, inp)
    from one orthogonal matrix each, which are better conditioned: with a = 1 / min(out, inp) the edges of l = c / N are
    1 + l - 2 a +- 2 sqrt((l - a)(1 - a)), the law of a sum of free projections. Known from 4 outputs and inputs on.
    """
    out, inp = (
        need_integer(name, size, low=1, high=2**62, cure="Count those of the layer.")
        for name, size in (("n_outputs", n_outputs), ("n_inputs", n_inputs))
    )
    n, c = _need_counts(out * inp, n_features)
    if density is not None:
        return _predict_sparse(out, inp, c, check_density(density))
    kappa = _condition(n, c)
    if need_flag("is_orthogonal", is_orthogonal):
        excess, group = c / n, 1.0 / min(out, inp)
        if excess <= group:  # one orthogonal matrix
            return Prediction(1.0, True, "law", 1.0, min(n, c))
        if min(out, inp) < MIN_SIDE:
            return Prediction(1.0, False, "unknown", None, min(n, c))
        top = 1.0 + excess - 2.0 * group + 2.0 * math.sqrt((excess - group) * (1.0 - group))
        kappa = max(1.0, kappa * top / (1.0 + math.sqrt(excess)) ** 2)
    return Prediction(kappa, True, "law", _spread(n, c), min(n, c))


def _predict_sparse(out: int, inp: int, n_features: int, density: float) -> Prediction:
    nonzero = (1.0 - (1.0 - density) ** out) * (1.0 - (1.0 - density) ** inp)
    n, c = out * inp, n_features * nonzero
    deviation = math.sqrt(n_features * nonzero * (1.0 - nonzero))
    is_known = (
        n_features * density**2 >= MIN_COVERAGE
        and n * density**2 >= MIN_ENTRIES
        and min(out, inp) >= MIN_SIDE
        and n >= MIN_EQUATIONS
        and abs(c - n) >= MIN_MARGIN * deviation
    )
    if not is_known:
        return Prediction(1.0, False, "unknown", None, min(n, n_features))
    return Prediction(_condition(n, c), True, "law", _spread(n, c), min(n, math.ceil(c)))


def predict_iterations(prediction: Prediction | float, tolerance: float) -> int:
    """How many steps of conjugate gradients in float64 take a random target to a residual of `tolerance`.

    For random features the residual falls by (kappa - 1) / (kappa + 1) per step, without the factor 2 of the bound in
    `iterations_for`. n singular values take at most about 2 n / (1 + 3 / sqrt n) steps: n in exact arithmetic, more in
    float64. Both are joined as 1 / k^2 = 1 / a^2 + 1 / b^2. For a plain number the limit by n is left out.
    """
    _need_tolerance(tolerance)
    kappa, n = (prediction.condition, prediction.n_values) if isinstance(prediction, Prediction) else (prediction, None)
    kappa = need_number("condition", kappa, low=1.0, high=1e300, cure="It is at least 1.")
    if kappa <= 1.0 + 1e-12:
        return 1
    steps = -math.log(tolerance) / math.log1p(2.0 / (kappa - 1.0))
    if n is not None:
        steps = 1.0 / math.hypot(1.0 / steps, (1.0 + 3.0 / math.sqrt(n)) / (2.0 * n))
    return max(1, math.ceil(steps))


def estimate_condition(operator: Operator, *, n_products: int = 12) -> Prediction:
    """The condition number of unit-length features from `n_products` products with M M^T or M^T M.

    A Golub-Kahan bidiagonalisation from a fixed start, without zero features and equations that have no feature. Its
    entries alpha_k and beta_k settle where the singular values fill one interval, which then is
    [|alpha - beta|, alpha + beta]. The estimate takes the root mean squares from the third step on. It is known where
    the interval's lower end is six standard errors above zero and kappa is at most 20, or where the run ends because
    all singular values are found. Otherwise the ratio of the extreme Ritz values is returned, a lower bound unless
    features are linearly dependent. Costs one more product to find what is zero.
    """
    need_instance("estimate_condition", operator, Operator, cure="Pass KhatriRao(left, right).")
    n_products = need_integer("n_products", n_products, low=4, high=1000, cure="Leave it out for 12.")
    diagonal, off, n, is_complete = _lanczos(operator, n_products)
    values = scipy.linalg.eigvalsh_tridiagonal(diagonal, off)
    values = values[values > ROUNDING * torch.finfo(operator.dtype).eps * values[-1]]
    bound = math.sqrt(float(values[-1] / values[0]))
    if is_complete:
        return Prediction(bound, True, "lanczos", None, n)
    alpha, beta = (entries[2:] for entries in _bidiagonal(diagonal, off))
    sizes = [math.sqrt(float(np.mean(entries**2))) for entries in (alpha, beta)]
    gap = abs(sizes[0] - sizes[1])
    error = math.sqrt(float(np.var(alpha, ddof=1) / len(alpha) + np.var(beta, ddof=1) / len(beta)))
    kappa = max(bound, sum(sizes) / gap) if gap > 0.0 else math.inf
    if kappa <= MAX_RESOLVED and gap >= MIN_SIGNIFICANCE * error:
        return Prediction(kappa, True, "lanczos", None, n)
    return Prediction(bound, False, "unknown", None, n)


def _lanczos(operator: Operator, n_products: int) -> tuple[NDArray[np.float64], NDArray[np.float64], int, bool]:
    """The Lanczos matrix of the smaller Gram operator.

    Returns its diagonal, its off-diagonal, the size of the operator, and whether the run found all singular values.
    """
    numbers = Stream(0, "estimate_condition", "start").normals(0, operator.equations + operator.n_features)
    random = torch.from_numpy(numbers).to(operator.device, operator.dtype)
    rows, columns = random[: operator.equations].view(operator.out, operator.inp), random[operator.equations :]
    # Features that are zero and equations without a feature only add zero singular values: the start leaves them out.
    rows, columns = rows * (operator.apply(columns) != 0.0), columns * (operator.transpose(rows) != 0.0)
    is_wide = int(columns.count_nonzero()) >= int(rows.count_nonzero())
    start = rows if is_wide else columns
    n = int(start.count_nonzero())
    if n == 0:
        raise InsufficientFeaturesError(
            f"a condition number needs at least one feature that is not zero; got none of {operator.n_features}. Raise "
            "the density or change the seed."
        )
    tiny = ROUNDING * torch.finfo(operator.dtype).eps
    basis = [start.flatten() / start.norm()]
    diagonal: list[float] = []
    off: list[float] = []
    for _ in range(n_products):
        v = basis[-1].view(start.shape)
        w = (operator.row_gram_apply(v) if is_wide else operator.transpose(operator.apply(v))).flatten()
        diagonal.append(float(basis[-1] @ w))
        for _ in range(2):  # against all earlier vectors: a dozen of them cost less than one product
            for u in basis:
                w = w - (u @ w) * u
        size = float(w.norm())
        if not size > tiny * max(diagonal):
            return np.array(diagonal), np.array(off), n, True
        off.append(size)
        basis.append(w / size)
    return np.array(diagonal), np.array(off[:-1]), n, False


def _bidiagonal(
    diagonal: NDArray[np.float64], off: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The Golub-Kahan entries: diagonal_k = alpha_k^2 + beta_(k-1)^2 and off_k = alpha_k beta_k."""
    alpha, beta = [math.sqrt(diagonal[0])], []
    for entry, side in zip(diagonal[1:], off, strict=True):
        beta.append(side / alpha[-1])
        alpha.append(math.sqrt(max(entry - beta[-1] ** 2, 1e-30)))
    return np.array(alpha), np.array(beta)


def empirical_spectrum(
    left: Float[Tensor, "out feat"], right: Float[Tensor, "feat inp"], *, unit_length: bool = False
) -> Float[Tensor, " values"]:
    """The min(equations, features) largest singular values of M, descending, scaled to entry variance 1 / equations.

    `unit_length=True` first divides every feature by its length; features that are zero stay zero. From the smaller
    Gram matrix in float64: values below about 1e-8 of the largest are rounding.
    """
    left = as_real("left", left, is_finite=True).detach().double()
    right = as_real("right", right, is_finite=True).detach().double()
    unit_length = need_flag("unit_length", unit_length)
    operator = KhatriRao(left, right)
    if not bool(left.any(0).logical_and(right.any(1)).any()):
        raise InsufficientFeaturesError(
            f"a spectrum needs at least one feature that is not zero; got none of {operator.n_features}. Raise the "
            "density or change the seed."
        )
    if unit_length:
        normalize = torch.nn.functional.normalize
        operator = KhatriRao(normalize(left, dim=0, eps=1e-300), normalize(right, dim=1, eps=1e-300))
    gram = operator.gram() if operator.n_features <= operator.equations else operator.row_gram()
    scale = torch.ones(()) if unit_length else operator.column_squares().sum() / operator.n_features
    if not bool(torch.isfinite(gram).all() and torch.isfinite(scale) and scale > 0):
        raise ValueRangeError(
            "a spectrum needs features whose products float64 can hold; got a largest entry of "
            f"{float(left.abs().max()):.1e} in left and {float(right.abs().max()):.1e} in right. Divide them by it."
        )
    return torch.linalg.eigvalsh(gram).clamp_min(0.0).div(scale).sqrt().flip(0)


def _need_counts(n_equations: int, n_features: int) -> tuple[int, int]:
    """Both counts as ints, or an error unless there is at least one of each."""
    counts = [as_integer(n) for n in (n_equations, n_features)]
    if any(n is None or not 1 <= n <= 2**124 for n in counts):
        raise ValueRangeError(
            "the law needs at least one equation and one feature; "
            f"got {shown(n_equations)} equations and {shown(n_features)} features. Leave empty layers out."
        )
    return int(n_equations), int(n_features)


def _need_points(x: object) -> NDArray[np.float64]:
    return as_real("x", x, cure="Pass singular values.").detach().double().cpu().numpy()


def _need_tolerance(tolerance: float) -> None:
    if not is_real_number(tolerance) or not 0.0 < tolerance < 1.0:
        raise ValueRangeError(f"a number of iterations needs a tolerance in (0, 1); got {shown(tolerance)}. Try 1e-10.")
