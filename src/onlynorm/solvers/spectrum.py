"""The Marchenko-Pastur law of the singular values of random features, its predictions, and measured spectra.

For a random Khatri-Rao matrix M with N equations, c features and entries of variance 1/N, put l = c / N. The
squared singular values follow the Marchenko-Pastur law with edges (1 - sqrt(l))^2 and (1 + sqrt(l))^2, so

    density of a nonzero singular value:  p(x) = sqrt((x^2 - a^2)(b^2 - x^2)) / (pi * min(l, 1) * x),  a <= x <= b
    a = |1 - sqrt(l)|,   b = 1 + sqrt(l),   kappa = b / a

This is the limit of large N. `condition_number` is the median at finite N: both edges are shifted by the median of the
Tracy-Widom law. kappa is the same for l and 1 / l, and of order N at l = 1, where the lower edge is zero: as a function
of the excess l it is a double descent.

Features in m orthogonal groups (`orthogonal`) have another law, that of a sum of free projections: the edges are
|sqrt(l - l / m) -+ sqrt(1 - l / m)|, and the density is multiplied by m / (m - x^2).

Predictions and measurements are for features of unit length: columns of M divided by their norm
|left[:, f]| |right[f, :]|, as in the solver. Features as drawn have random lengths, and their condition number is
larger, most of all for layers with few outputs or inputs.

`Spectrum.follows_law` is a test at the 1 % level. The null hypothesis: features are unit-length products of two
independent Gaussian vectors or, for `orthogonal` features, of columns of two Haar matrices per group. The statistic:
the Kolmogorov distance between the singular values and the law. Singular values repel each other, so that the distance
of n values is of order log(n) / n, not 1 / sqrt(n), and tables of the Kolmogorov-Smirnov test do not apply.

The matrix of kron_normal features is a Kronecker product, so that its singular values are all products of one singular
value of each factor. Both factors have independent normal entries and follow the law with their own l.

Theory: random_features:thm-2.2
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from onlynorm.display import Curve, Figure, Panel, Result, ShownResult, Table, View
from onlynorm.display.result import Tone
from onlynorm.errors import InsufficientFeaturesError, ValueRangeError, shown
from onlynorm.features import Features, draw
from onlynorm.features.kronecker import KronNormal
from onlynorm.features.streams import Stream, as_integer, check_density
from onlynorm.memory import memory_limit, need_memory
from onlynorm.progress import with_progress
from onlynorm.solvers.operator import KhatriRao, Operator
from onlynorm.validate import (
    Progress,
    as_real,
    is_real_number,
    need_flag,
    need_instance,
    need_integer,
    need_items,
    need_number,
    need_progress,
)

TRACY_WIDOM = -1.2680
"""Median of the Tracy-Widom law for real matrices. Its 95 % quantile is 0.9793."""
HARD_EDGE = 0.5
"""Added to the larger of both counts. It extends the soft-edge formula to the square case, where the smallest singular
value of an n x n matrix has the median 0.545 / n (Edelman) and the formula gives 0.512 / n; with k = 1, 2, 3, 5 and 8
more columns than rows simulations give 1.19, 1.79, 2.34, 3.45 and 5.07, the formula 1.19, 1.81, 2.40, 3.53 and 5.18."""
SQUARE_SPREADS = (11.0, 3.7, 2.6)
"""95 % quantile of the condition number over its median for 0, 1 and 2 more columns than rows, simulated."""
MIN_COVERAGE, MIN_ENTRIES, MIN_SIDE, MIN_EQUATIONS, MIN_MARGIN = 20.0, 8.0, 4, 128, 3.0
"""Sparse features follow the law of their nonzero ones if an equation has at least 20 of them, a feature at least 8
nonzero entries, the layer at least 4 outputs and inputs and 128 equations, and the number of nonzero features differs
from the number of equations by 3 standard deviations. Of 384 such systems, signs and normal, with densities 0.2 to 0.8
and excess 0.5 to 4, all but one had a condition number, and all a number of iterations, within a factor of 1.5 of the
prediction."""
MAX_RESOLVED, MIN_SIGNIFICANCE = 20.0, 6.0
"""A Lanczos estimate is accepted up to this condition number, and if its lower edge is at least this many standard
errors above zero. Measured with 12 products on 1170 systems (shapes 1 x 300 to 24 x 24, excess 0.5 to 4): of 555
accepted dense systems and systems of density 0.2 to 0.8 all are within a factor of 1.5; of 197 of density 0.05 and 0.1,
97 %."""
_MOST_POINTS = 10**7
N_QUANTILES, N_POINTS = 1000, 2001
"""Quantiles of the law of one factor, and points at which the law of a product is computed."""
_DRAWN = "Pass the features that onlynorm.draw returns."
SAMPLED = 200
"""Number of features from which the norms of rows are estimated."""
ROUNDING = 1e3
"""Squared singular values below this many eps of the largest count as zero."""


def edges(n_equations: int, n_features: int, *, n_groups: float | None = None) -> tuple[float, float]:
    """The ends (a, b) of the support of the nonzero singular values, for entries of variance 1 / n_equations.

    `n_groups` is the number of groups of orthogonal features; the last may be a part of one.

    Examples:
        >>> import onlynorm as on
        >>> on.spectrum.edges(n_equations=100, n_features=400)
        (1.0, 3.0)
    """
    n_equations, n_features = _need_counts(n_equations, n_features)
    excess = n_features / n_equations
    part = 0.0 if n_groups is None else excess / _need_groups(n_groups, excess)
    ends = math.sqrt(excess - part), math.sqrt(1.0 - part)
    return abs(ends[0] - ends[1]), ends[0] + ends[1]


def density(
    x: NDArray[np.float64], n_equations: int, n_features: int, *, n_groups: float | None = None
) -> NDArray[np.float64]:
    """The density at x of the min(n_equations, n_features) nonzero singular values; it integrates to one.

    `n_groups` as in `edges`.

    Examples:
        >>> import numpy as np
        >>> import onlynorm as on
        >>> on.spectrum.density(np.array([0.5, 2.0]), n_equations=100, n_features=400)
        array([0.        , 0.61640444])
    """
    low, high = edges(n_equations, n_features, n_groups=n_groups)
    x = _need_points(x)
    inside = np.clip((x**2 - low**2) * (high**2 - x**2), 0.0, None)
    fraction = min(n_features / n_equations, 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = np.sqrt(inside) / (math.pi * fraction * x)
        if n_groups is not None:
            value = value * n_groups / (n_groups - x**2)
    # At l = 1 the formula is sqrt(b^2 - x^2) / pi: finite at zero, where the quotient is 0 / 0.
    value = np.where(x == 0.0, high / math.pi if low == 0.0 else 0.0, value)
    return np.where((x >= low) & (x <= high), value, 0.0)


def cumulative(
    x: NDArray[np.float64], n_equations: int, n_features: int, *, n_groups: float | None = None
) -> NDArray[np.float64]:
    """The fraction of the nonzero singular values that are at most x. `n_groups` as in `edges`.

    The substitution x = (a + b) / 2 - (b - a) / 2 cos(theta) removes the square-root ends, so that 256
    Gauss-Legendre points per half circle are exact to rounding for every shape.

    Examples:
        >>> import numpy as np
        >>> import onlynorm as on
        >>> on.spectrum.cumulative(np.array([0.0, 3.0]), n_equations=100, n_features=400).round(3)
        array([0., 1.])
    """
    low, high = edges(n_equations, n_features, n_groups=n_groups)
    x = np.atleast_1d(_need_points(x))
    middle, half = (low + high) / 2, (high - low) / 2
    end = np.arccos(np.clip((middle - x) / half, -1.0, 1.0))
    nodes, weights = np.polynomial.legendre.leggauss(256)
    theta = end[..., None] * (nodes + 1.0) / 2
    points = middle - half * np.cos(theta)
    values = density(points, n_equations, n_features, n_groups=n_groups) * half * np.sin(theta)
    return np.clip((values * weights).sum(-1) * end / 2, 0.0, 1.0)


def condition_number(n_equations: int, n_features: int) -> float:
    """The predicted ratio of the largest to the smallest nonzero singular value, for features of unit length.

    This is the median over draws. With n the smaller and c the larger count plus 1/2, the squared edges are

        (sqrt c +- sqrt n)^2 +- TW (sqrt c +- sqrt n) (1 / sqrt n +- 1 / sqrt c)^(1/3),    TW = -1.268

    It grows like N at l = 1 and hardly depends on N elsewhere. Near l = 1 single draws vary strongly: the 95 % quantile
    is 11 times the median (see `predict_condition`).

    Examples:
        >>> import onlynorm as on
        >>> round(on.spectrum.condition_number(n_equations=100, n_features=400), 3)
        2.897
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
    """The Chebyshev bound: the smallest k with 2 ((kappa - 1) / (kappa + 1))^k <= tolerance.

    Examples:
        >>> import onlynorm as on
        >>> on.spectrum.iterations_for(10.0, tolerance=1e-6)
        73
    """
    _need_tolerance(tolerance)
    condition = need_number("condition", condition, low=0.0, high=1e300, cure="It is at least 1.")
    if condition <= 1.0 + 1e-12:
        return 1
    return max(1, math.ceil((math.log(2.0) - math.log(tolerance)) / math.log1p(2.0 / (condition - 1.0))))


def condition_for(iterations: int, tolerance: float) -> float:
    """The largest condition number at which `iterations` steps reach the tolerance, the inverse of the bound.

    Examples:
        >>> import onlynorm as on
        >>> round(on.spectrum.condition_for(100, tolerance=1e-6), 2)
        13.81
    """
    iterations = need_integer("iterations", iterations, low=1, high=2**62, cure="Try 1000.")
    _need_tolerance(tolerance)
    return 1.0 / math.tanh(math.log(2.0 / tolerance) / (2.0 * iterations))


def _factor_counts(features: Features) -> list[tuple[int, int]]:
    """(equations, features) of every law whose product has the singular values of these features.

    One pair for random features; for kron_normal those of U2 and of U1.
    """
    if features.name != "kron_normal":
        return [(features.equations, features.n_features)]
    n_q, n_d = features.grid_shape
    return [(features.rows, n_q), (features.cols, n_d)]


def _law_edges(features: Features) -> tuple[float, float]:
    """The ends of the support of the law of these features."""
    ends = [_factor_edges(*counts) for counts in _factor_counts(features)]
    return math.prod(low for low, _ in ends), math.prod(high for _, high in ends)


def _law_cumulative(x: NDArray[np.float64], features: Features) -> NDArray[np.float64]:
    """The fraction of the singular values of these features that are at most x, according to the law.

    For kron_normal, singular values are products s t of those of U2 and U1: P(s t <= x) is the mean of P(t <= x / s)
    over quantiles s of the first law.
    """
    counts = _factor_counts(features)
    if len(counts) == 1:
        return cumulative(x, *counts[0])
    counts.sort(key=lambda pair: pair[0] > 1)  # a single value of U1 first as well: the second law is continuous
    (first, _), second = _law_table(*counts[0]), _law_table(*counts[1])
    low, high = _law_edges(features)
    points = low + (high - low) * (1.0 - np.cos(np.linspace(0.0, np.pi, N_POINTS))) / 2
    made = np.zeros(N_POINTS)
    for s in first:
        made += np.interp(points / s, *second, left=0.0, right=1.0)
    x = np.atleast_1d(_need_points(x))
    return np.interp(x, points, made / len(first), left=0.0, right=1.0)


def _factor_edges(n_equations: int, n_features: int) -> tuple[float, float]:
    """As `edges`; a single singular value has the length of its row."""
    return (math.sqrt(n_features),) * 2 if n_equations == 1 else edges(n_equations, n_features)


def _law_table(n_equations: int, n_features: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Quantiles of the law at evenly spaced levels, and the levels; one point for a single singular value."""
    low, high = _factor_edges(n_equations, n_features)
    if low == high:
        return np.array([low]), np.array([1.0])
    points = low + (high - low) * (1.0 - np.cos(np.linspace(0.0, np.pi, 2049))) / 2
    levels = (np.arange(N_QUANTILES) + 0.5) / N_QUANTILES
    return np.interp(levels, cumulative(points, n_equations, n_features), points), levels


def features_for_condition(n_equations: int, condition: float) -> int:
    """The smallest number of features, at least n_equations, with this condition number according to the law.

    Examples:
        >>> import onlynorm as on
        >>> on.spectrum.features_for_condition(n_equations=100, condition=10.0)
        150
    """
    if not is_real_number(condition) or not 1.0 < condition < math.inf:
        raise ValueRangeError(
            f"features_for_condition needs a condition number above 1; got {shown(condition)}. "
            "Only id_cond, ortho_cond and fast_ortho_cond features reach 1."
        )
    n_equations, _ = _need_counts(n_equations, 1)
    if condition_number(n_equations, n_equations) <= condition:
        return n_equations
    root = (condition + 1.0) / (condition - 1.0)
    return max(n_equations + 1, math.ceil(n_equations * root * root))


@dataclass(frozen=True)
class Prediction(Result):
    """A predicted condition number of features of unit length, and its source.

    If `is_known`, the median over draws is within a factor of 1.5 of `condition`; otherwise `condition` is a lower
    bound. `source` is "law", "lanczos" or "unknown". 95 % of draws are below `spread` times `condition`, if given.
    `n_values` is the number of singular values, which limits the number of iterations.
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
    """The predicted condition number of unit-length features from their shape alone.

    Sparse features of the given `density` follow the law of their nonzero features,
    c (1 - (1 - density)^out)(1 - (1 - density)^inp) of them. For very sparse features, whose number per equation
    varies, the prediction is unknown, with the bound 1. `is_orthogonal` is for features in groups of max(out, inp) from
    one orthogonal matrix each, which are better conditioned: with a = 1 / min(out, inp) the edges of l = c / N are 1 +
    l - 2 a +- 2 sqrt((l - a)(1 - a)), the law of a sum of free projections. Known for at least 4 outputs and inputs.

    Examples:
        >>> import onlynorm as on
        >>> prediction = on.spectrum.predict_condition(n_outputs=32, n_inputs=64, n_features=4096)
        >>> round(prediction.condition, 2)
        5.78
    """
    out, inp = (
        need_integer(name, size, low=1, high=2**62, cure="Pass the sizes of the layer.")
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
    """Predicted steps of conjugate gradients in float64 to a residual of `tolerance` for a random target.

    For random features the residual falls by (kappa - 1) / (kappa + 1) per step, without the factor 2 of the bound in
    `iterations_for`. n singular values take at most about 2 n / (1 + 3 / sqrt n) steps: n in exact arithmetic, more in
    float64. Both are combined as 1 / k^2 = 1 / a^2 + 1 / b^2. For a float argument n is unknown and ignored.

    Examples:
        >>> import onlynorm as on
        >>> on.spectrum.predict_iterations(10.0, tolerance=1e-6)
        69
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

    A Golub-Kahan bidiagonalization from a fixed start vector, without zero features and equations without features. Its
    entries alpha_k and beta_k converge if the singular values fill one interval, which then is
    [|alpha - beta|, alpha + beta]. The estimate uses root mean squares from the third step. It is known if the lower
    end of the interval is six standard errors above zero and kappa is at most 20, or if all singular values were found.
    Otherwise the ratio of the extreme Ritz values is returned, a lower bound unless features are linearly dependent.
    One more product finds zero features and equations.

    Examples:
        >>> import onlynorm as on
        >>> from onlynorm.solvers import KhatriRao
        >>> features = on.draw("he_normal", (8, 16))
        >>> operator = KhatriRao(features.left(), features.right())
        >>> on.spectrum.estimate_condition(operator).condition > 1
        True
    """
    import scipy.linalg

    need_instance("estimate_condition", operator, Operator, cure="Pass KhatriRao(left, right).")
    n_products = need_integer("n_products", n_products, low=4, high=1000, cure="Omit it for 12.")
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


def condition_of_rows(operator: KhatriRao) -> float:
    """A lower bound of the condition number from rows of unequal norm, with fewer features than equations; else 1.

    Some combination of c unit-length features vanishes in the c - 1 largest equations, so that its norm is that of the
    other equations; other combinations add up in the largest ones. Both norms are estimated from a sample of features,
    for outputs and for inputs. Rows of equal norm give less than the law.

    Examples:
        >>> import onlynorm as on
        >>> from onlynorm.solvers import KhatriRao
        >>> features = on.draw("he_normal", (8, 16))
        >>> operator = KhatriRao(features.left(), features.right())
        >>> round(on.spectrum.condition_of_rows(operator), 3)
        1.0
    """
    need_instance("condition_of_rows", operator, KhatriRao, cure="Pass KhatriRao(left, right).")
    if operator.n_features >= operator.equations:
        return 1.0
    left, right = operator.sample(max(1, operator.n_features // SAMPLED))
    left, right = left.double().square(), right.double().square()
    square = 1.0
    for rows, other, width in ((left, right, operator.inp), (right, left, operator.out)):
        masses = (rows.mT @ other.sum(1)).sort(descending=True).values
        fractions = masses / masses.sum().clamp_min(torch.finfo(masses.dtype).tiny)
        tail = float(fractions[(operator.n_features - 1) // width :].sum())
        top = max(1.0, operator.n_features * float(fractions[0]) / width)
        square = max(square, top / max(tail, torch.finfo(masses.dtype).eps))
    return math.sqrt(square)


def _lanczos(operator: Operator, n_products: int) -> tuple[NDArray[np.float64], NDArray[np.float64], int, bool]:
    """The Lanczos matrix of the smaller Gram operator.

    Returns its diagonal, its off-diagonal, the size of the operator, and whether the run found all singular values.
    """
    normals = Stream(0, "estimate_condition", "start").normals(0, operator.equations + operator.n_features)
    random = torch.from_numpy(normals).to(operator.device, operator.dtype)
    rows, columns = random[: operator.equations].view(operator.out, operator.inp), random[operator.equations :]
    # Zero features and equations without features only add zero singular values: they are zero in the start vector.
    rows, columns = rows * (operator.apply(columns) != 0.0), columns * (operator.transpose(rows) != 0.0)
    is_wide = int(columns.count_nonzero()) >= int(rows.count_nonzero())
    start = rows if is_wide else columns
    n = int(start.count_nonzero())
    if n == 0:
        raise InsufficientFeaturesError(
            f"a condition number needs at least one nonzero feature; got none of {operator.n_features}. Raise "
            "the density or change the seed."
        )
    tiny = ROUNDING * torch.finfo(operator.dtype).eps
    basis = [start.flatten() / start.norm()]
    diagonal: list[float] = []
    off: list[float] = []
    for _ in range(n_products):
        v = basis[-1].view(start.shape)
        w = (operator.row_gram_apply(v) if is_wide else operator.gram_apply(v)).flatten()
        diagonal.append(float(basis[-1] @ w))
        for _ in range(2):  # full reorthogonalization: cheaper than one product for a dozen vectors
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

    `unit_length=True` first divides every nonzero feature by its length. Computed from the smaller Gram matrix in
    float64: values below about 1e-8 of the largest are rounding error.

    Examples:
        >>> import onlynorm as on
        >>> features = on.draw("he_normal", (8, 16))
        >>> values = on.spectrum.empirical_spectrum(features.left(), features.right())
        >>> values.shape
        torch.Size([128])
    """
    left = as_real("left", left, is_finite=True).detach().double()
    right = as_real("right", right, is_finite=True).detach().double()
    unit_length = need_flag("unit_length", unit_length)
    operator = KhatriRao(left, right)
    if not bool(left.any(0).logical_and(right.any(1)).any()):
        raise InsufficientFeaturesError(
            f"a spectrum needs at least one nonzero feature; got none of {operator.n_features}. Raise the "
            "density or change the seed."
        )
    if unit_length:
        normalize = torch.nn.functional.normalize
        operator = KhatriRao(normalize(left, dim=0, eps=1e-300), normalize(right, dim=1, eps=1e-300))
    gram = operator.gram() if operator.n_features <= operator.equations else operator.row_gram()
    scale = torch.ones(()) if unit_length else operator.column_squares().sum() / operator.n_features
    if not bool(torch.isfinite(gram).all() and torch.isfinite(scale) and scale > 0):
        raise ValueRangeError(
            "a spectrum needs features whose products fit into float64; got a largest entry of "
            f"{float(left.abs().max()):.1e} in left and {float(right.abs().max()):.1e} in right. Divide them by it."
        )
    return torch.linalg.eigvalsh(gram).clamp_min(0.0).div(scale).sqrt().flip(0)


def _need_counts(n_equations: int, n_features: int) -> tuple[int, int]:
    """Both counts as ints; raises unless both are at least 1."""
    counts = [as_integer(n) for n in (n_equations, n_features)]
    if any(n is None or not 1 <= n <= 2**124 for n in counts):
        raise ValueRangeError(
            "the law needs at least one equation and one feature; "
            f"got {shown(n_equations)} equations and {shown(n_features)} features. Remove empty layers."
        )
    return int(n_equations), int(n_features)


def _need_groups(n_groups: float, excess: float) -> float:
    cure = "Pass the number of features over the size of a group."
    return need_number("n_groups", n_groups, low=max(1.0, excess), high=1e300, open_low=True, cure=cure)


def _need_points(x: object) -> NDArray[np.float64]:
    return as_real("x", x, cure="Pass singular values.").detach().double().cpu().numpy()


def _need_tolerance(tolerance: float) -> None:
    if not is_real_number(tolerance) or not 0.0 < tolerance < 1.0:
        raise ValueRangeError(f"a number of iterations needs a tolerance in (0, 1); got {shown(tolerance)}. Try 1e-10.")


LEVEL = 0.01
"""Significance level of `follows_law`."""
LIMIT, LIMIT_SLOPE = 1.2, 0.55
"""The distance of n singular values is below (1.2 + 0.55 log n) / n for 99 % of draws. Fitted to simulated quantiles
for shapes 2 x 2 to 24 x 24, 2 x 32 and 4 x 64 with normal and uniform entries and excess 0.5 to 2, 120 to 3,000 draws
each: the 99 % quantile of distance times n was 2.6 at n = 16, 3.4 at 64, 3.8 at 144, 4.2 at 256 and 4.4 at 576."""
PRODUCT_LIMIT = 1.25
"""The same for products of the singular values of two factors, of which there are n and m: 1.25 sqrt(1/n^2 + 1/m^2).
The simulated 99 % quantile is 0.91 to 1.16 times the root for shapes 4 x 4 to 32 x 64, excess 1 to 2, of unit length
and as drawn, 150 draws each, and 1.15 for 600 draws of 16 x 16."""
MIN_PRODUCT_SIDE = 8
"""Minimum rows of a factor, if not one, at which unit-length features have the predicted condition number: the median
is 0.78 to 0.93 of it for shapes 8 x 30 to 32 x 64, but 0.49 for 4 x 4 and 0.60 for 3 x 50. As drawn it is 0.95 to 1.07,
0.90 and 0.79."""
DENSE = ("he_normal", "he_uniform", "uniform", "orthogonal")
"""Dense distributions that were compared with the law; heavy-tailed custom distributions need not follow it."""
EQUAL_LENGTHS = 0.01
"""Maximum relative variation of lengths at which features as drawn have the spectrum of unit-length features."""
MIN_VALUES = 4
"""Minimum number of singular values for the test."""
MIN_GROUPS = 3
"""Orthogonal features follow their law from 3 groups on; with fewer, if no group is truncated."""
RESOLVED = 1e-7
"""Singular values below this fraction of the largest are rounding error of the float64 Gram matrix."""
N_BINS = 48
"""Bins of the histogram in plots."""
EXCESSES = (0.25, 0.5, 0.75, 0.9, 0.96, 1.0, 1.04, 1.1, 1.25, 1.5, 2.0, 4.0)
Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False, repr=False)
class Spectrum(ShownResult):
    """The singular values of a feature matrix, ascending, scaled to entry variance 1 / equations, and the law.

    `is_random` is False for structured features that have singular values by design; the law of kron_normal features is
    that of products of singular values of their two factors. `is_unit_length` is whether every feature was divided by
    its length; `length_spread` is the standard deviation of the lengths over their mean.
    """

    features: Features
    values: Array
    is_unit_length: bool = True
    length_spread: float = 0.0

    @property
    def is_random(self) -> bool:
        """Whether the singular values are random."""
        return not self.features.is_structured or self.features.name == "kron_normal"

    @property
    def n_groups(self) -> float | None:
        """The number of orthogonal groups, the last of which may be truncated; None for other features."""
        features = self.features
        return features.n_features / max(features.rows, features.cols) if features.name == "orthogonal" else None

    @property
    def has_law(self) -> bool:
        """Whether the law of the singular values is known.

        It is unknown for structured features, and for orthogonal ones with fewer than 4 outputs or inputs, with one
        group, or with fewer than 3 groups of which one is truncated.
        """
        n_groups = self.n_groups
        if not self.is_random or n_groups is None:
            return self.is_random
        is_whole = n_groups == int(n_groups) and n_groups > 1
        return min(self.features.rows, self.features.cols) >= MIN_SIDE and (is_whole or n_groups >= MIN_GROUPS)

    @property
    def n_unresolved(self) -> int:
        """Number of singular values that are zero up to rounding error."""
        return int((self.values <= RESOLVED * self.values[-1]).sum())

    @property
    def condition(self) -> float:
        """The largest over the smallest resolved singular value."""
        return float(self.values[-1] / self.values[self.n_unresolved])

    @property
    def law_condition(self) -> float:
        """The predicted condition number, or a bound if it is unknown; the measured one for structured features."""
        return self.prediction.condition

    @property
    def prediction(self) -> Prediction:
        """The predicted condition number; unknown for features as drawn whose lengths vary."""
        if not self.is_random:
            return Prediction(self.condition, True, "measured")
        if self.features.name == "kron_normal":  # Gaussian factors, to which the law applies as drawn
            is_known = not self.is_unit_length or all(
                n == 1 or n >= MIN_PRODUCT_SIDE for n, _ in _factor_counts(self.features)
            )
        else:
            is_known = self.is_unit_length or self.length_spread <= EQUAL_LENGTHS
        if not is_known:
            return Prediction(1.0, False, "unknown")
        return predict_features(self.features)

    @property
    def distance(self) -> float:
        """Kolmogorov distance between the singular values and the law; NaN if it is unknown."""
        if not self.has_law:
            return math.nan
        law = self.law_cumulative(self.values)
        steps = np.arange(len(self.values) + 1) / len(self.values)
        return float(max(np.max(law - steps[:-1]), np.max(steps[1:] - law)))

    @property
    def limit(self) -> float:
        """The 99 % quantile of the distance for features of this size that follow the law."""
        sizes = [n for n in (min(counts) for counts in _factor_counts(self.features)) if n > 1]
        if len(sizes) == 2:
            return PRODUCT_LIMIT * math.hypot(*(1.0 / n for n in sizes))
        n = len(self.values)
        return (LIMIT + LIMIT_SLOPE * math.log(n)) / n

    @property
    def follows_law(self) -> bool | None:
        """Whether the distance is within the limit: a test at the 1 % level.

        None if the law is unknown, and for fewer than four singular values.
        """
        if not self.has_law or len(self.values) < MIN_VALUES:
            return None
        return self.distance <= self.limit

    def histogram(self, n_bins: int) -> tuple[Array, Array, Array]:
        """Bin edges, the fraction of singular values per bin, and the law's fraction, NaN if it is unknown."""
        n_bins = need_integer("n_bins", n_bins, low=1, high=_MOST_POINTS, cure="Try 24.")
        top = max(float(self.values[-1]), self.law_edges()[1] if self.has_law else 0.0) * (1.0 + 1e-9)
        counts, bins = np.histogram(self.values, bins=n_bins, range=(0.0, top))
        law = np.diff(self.law_cumulative(bins)) if self.has_law else np.full(n_bins, np.nan)
        return bins, counts / len(self.values), law

    def law_edges(self) -> tuple[float, float]:
        """The ends of the support of the law."""
        self._need_law("law_edges")
        if self.n_groups is None:
            return _law_edges(self.features)
        return edges(self.features.equations, self.features.n_features, n_groups=self.n_groups)

    def law_cumulative(self, x: Array) -> Array:
        """The fraction of the singular values that are at most x according to the law."""
        self._need_law("law_cumulative")
        if self.n_groups is None:
            return _law_cumulative(x, self.features)
        return cumulative(x, self.features.equations, self.features.n_features, n_groups=self.n_groups)

    def _need_law(self, caller: str) -> None:
        if not self.has_law:
            raise ValueRangeError(
                f"{caller} needs features with a known law; got {self.features.name} features, {self.features.rows} x "
                f"{self.features.cols}, excess {self.features.excess:.3g}. Check has_law first."
            )

    def law_curve(self, n_points: int) -> tuple[Array, Array]:
        """Points (x, density) of the law, denser near its edges, where it behaves like a square root."""
        n_points = need_integer("n_points", n_points, low=2, high=_MOST_POINTS, cure="Try 200.")
        self._need_law("law_curve")
        low, high = self.law_edges()
        x = low + (high - low) * (1.0 - np.cos(np.linspace(0.01, np.pi, n_points))) / 2
        counts = _factor_counts(self.features)
        if len(counts) == 1:
            return x, density(x, *counts[0], n_groups=self.n_groups)
        width = (high - low) / N_BINS / 4
        return x, (self.law_cumulative(x + width) - self.law_cumulative(x - width)) / (2.0 * width)

    def as_dict(self) -> dict[str, Any]:
        """The result as a dictionary of plain values."""
        bins, fractions, law = self.histogram(24)
        facts: dict[str, Any] = {
            "features": self.features.name,
            "shape": list(self.features.shape),
            "equations": self.features.equations,
            "n_features": self.features.n_features,
            "excess": self.features.excess,
            "smallest": float(self.values[0]),
            "largest": float(self.values[-1]),
            "unresolved": self.n_unresolved,
            "condition_number": self.condition,
            "is_unit_length": self.is_unit_length,
            "length_spread": self.length_spread,
            "histogram": {"edges": bins.tolist(), "share": fractions.tolist()},
        }
        if self.has_law:
            low, high = self.law_edges()
            facts["histogram"]["law"] = law.tolist()
            facts["law"] = {
                "smallest": low, "largest": high, "condition_number": self.law_condition,
                "is_known": self.prediction.is_known, "distance": self.distance, "limit": self.limit, "level": LEVEL,
                "follows": self.follows_law,
            }  # fmt: skip
        return facts

    def plot(self) -> Figure:
        """A histogram of the singular values, and the density of the law."""
        features = self.features
        bins, fractions, _ = self.histogram(N_BINS)
        heights = fractions / (bins[1] - bins[0])
        curves = [Curve(f"{features.name} features", bins.tolist(), heights.tolist(), "histogram", "spectrum")]
        if self.has_law:
            x, y = self.law_curve(300)
            curves.append(Curve("law", x.tolist(), y.tolist(), panel="spectrum", style="law"))
        title = f"{features.equations:,} equations, {features.n_features:,} features"
        return Figure(curves, [Panel("spectrum", title, "singular value", "density")])

    def view(self) -> View:
        """The condition number, and whether the singular values follow the law."""
        verdicts: dict[bool | None, tuple[str, Tone]] = {
            True: ("follows the law", "good"), False: ("does not follow the law", "warn"), None: ("", ""),
        }  # fmt: skip
        facts = {
            "shape of the target": "x".join(map(str, self.features.shape)), "excess": self.features.excess,
            "singular values": f"{self.values[0]:.4g} to {self.values[-1]:.4g}",
            "zero or unresolved": self.n_unresolved, "condition number": self.condition,
        }  # fmt: skip
        if self.has_law:
            low, high = self.law_edges()
            facts |= {
                "singular values of the law": f"{low:.4g} to {high:.4g}",
                "prediction": str(self.prediction),
                "distance to the law": f"{self.distance:.4f}, limit {self.limit:.4f} at the {LEVEL:.0%} level",
            }
        return View(f"Spectrum of {self.features.name} features", *verdicts[self.follows_law], facts=facts)

    def __str__(self) -> str:
        zeros = f", {self.n_unresolved} of them zero or unresolved" if self.n_unresolved else ""
        head = (
            f"{len(self.values)} singular values in [{self.values[0]:.4g}, {self.values[-1]:.4g}]{zeros}, condition "
            f"number {self.condition:.4g}"
        )
        if not self.is_random:
            return f"{head}, by design"
        of = "features of unit length" if self.is_unit_length else "features as drawn"
        if not self.has_law:
            return f"{of}: {head}; their law is unknown. Lengths vary by {self.length_spread:.1%}"
        low, high = self.law_edges()
        if self.follows_law is None:
            verdict = "too few values for a test"
        else:
            verdict = f"{'within' if self.follows_law else 'above'} the limit {self.limit:.4f} at the {LEVEL:.0%} level"
        return (
            f"{of}: {head}; law [{low:.4g}, {high:.4g}], {self.prediction}. Distance to the law "
            f"{self.distance:.4f}, {verdict}. Lengths vary by {self.length_spread:.1%}"
        )


@dataclass(frozen=True, repr=False)
class ExcessSweep(ShownResult):
    """Condition numbers over the excess: measured for several seeds, and the law's."""

    equations: int
    n_features: tuple[int, ...]
    measured: tuple[tuple[float, ...], ...]
    law: tuple[float, ...]

    @property
    def excesses(self) -> tuple[float, ...]:
        """Features per equation."""
        return tuple(n / self.equations for n in self.n_features)

    @property
    def medians(self) -> tuple[float, ...]:
        """The median over the seeds, at each excess."""
        return tuple(statistics.median(values) for values in self.measured)

    @property
    def peak(self) -> float:
        """The excess at which the median condition number is largest."""
        return self.excesses[self.medians.index(max(self.medians))]

    def as_dict(self) -> dict[str, Any]:
        """Lists with one entry per excess; the law is None where it does not apply."""
        return {
            "excess": list(self.excesses), "n_features": list(self.n_features),
            "condition_number": [list(row) for row in self.measured], "median": list(self.medians),
            "law": [None if math.isnan(one) else one for one in self.law], "peak": self.peak,
        }  # fmt: skip

    def plot(self) -> Figure:
        """The median condition number over the excess, and the law."""
        curves = [Curve("median", self.excesses, self.medians, "line+points", "descent")]
        known = [(x, y) for x, y in zip(self.excesses, self.law, strict=True) if not math.isnan(y)]
        if known:
            xs, ys = zip(*known, strict=True)
            curves.append(Curve("law", xs, ys, panel="descent", style="law"))
        panel = Panel("descent", "Condition number over the excess", "features per equation", "condition number",
                      x_log=True, y_log=True)  # fmt: skip
        return Figure(curves, [panel])

    def view(self) -> View:
        """A table with one row per excess."""
        heads = ("excess", "features", "condition number (median)", "lowest", "highest", "law")
        rows = [
            (f"{excess:.4g}", f"{n:,}", f"{median:.4g}", f"{min(found):.4g}", f"{max(found):.4g}",
             "unknown" if math.isnan(law) else f"{law:.4g}")
            for excess, n, median, found, law in zip(
                self.excesses, self.n_features, self.medians, self.measured, self.law, strict=True
            )
        ]  # fmt: skip
        lines = [f"The condition number peaks at {self.peak:.4g} features per equation."]
        return View("Double descent of the condition number", lines=lines,
                    tables={"Condition numbers": Table(heads, rows)})  # fmt: skip

    def __str__(self) -> str:
        lines = [
            f"  {excess:6.3g}  {median:10.4g}  {law:10.4g}"
            for excess, median, law in zip(self.excesses, self.medians, self.law, strict=True)
        ]
        return "\n".join(["  excess   condition         law", *lines])


def predict_features(features: Features) -> Prediction:
    """The predicted condition number of these features at unit length; unknown for custom distributions.

    For kron_normal, which is solved as drawn, it is the product of the condition numbers of both factors.

    Examples:
        >>> import onlynorm as on
        >>> on.spectrum.predict_features(on.draw("id_cond", (8, 16))).condition
        1.0
    """
    need_instance("features", features, Features, cure=_DRAWN)
    if features.name == "kron_normal":
        parts = _factor_counts(features)
        kappa = math.prod(_condition(*counts) for counts in parts)
        spread = math.exp(math.hypot(*(math.log(_spread(*counts)) for counts in parts)))
        return Prediction(kappa, True, "law", spread, features.equations)
    if features.density is None and features.name not in DENSE:
        return Prediction(1.0, False, "unknown")
    return predict_condition(
        features.rows,
        features.cols,
        features.n_features,
        density=features.density,
        is_orthogonal=features.name == "orthogonal",
    )


def measure_spectrum(features: Features, *, unit_length: bool = True) -> Spectrum:
    """The singular values of these features, from the smaller Gram matrix.

    Features are scaled to unit length first, as in the solver; `unit_length=False` measures them as drawn.

    Examples:
        >>> import onlynorm as on
        >>> on.spectrum.measure_spectrum(on.draw("id_cond", (8, 16))).condition
        1.0
    """
    need_instance("features", features, Features, cure=_DRAWN)
    need_flag("unit_length", unit_length)
    n = min(features.equations, features.n_features)
    if features.name in ("id_cond", "ortho_cond", "fast_ortho_cond"):  # orthonormal columns
        return Spectrum(features, np.ones(n))
    if isinstance(features.structure, KronNormal):
        return _measure_product(features, features.structure, unit_length)
    need_memory(
        f"the spectrum of {features.equations} x {features.n_features}",
        3 * 8 * n**2,
        memory_limit(),
        "Use a smaller layer: the law depends on the excess, not on the size.",
    )
    left, right = features.left(), features.right()
    values = empirical_spectrum(left, right, unit_length=unit_length and not features.is_structured)
    lengths = (left.double().norm(dim=0) * right.double().norm(dim=1)).cpu().numpy()
    return Spectrum(features, np.sort(values.cpu().numpy()), unit_length, float(lengths.std() / lengths.mean()))


def _measure_product(features: Features, structure: KronNormal, unit_length: bool) -> Spectrum:
    """The products of the singular values of both factors."""
    sizes = (*structure.grid_shape, structure.rows, structure.cols)
    need_memory(
        f"the spectrum of {structure.rows} x {structure.cols} products",
        3 * 8 * max(sizes) ** 2 + 3 * 8 * features.equations,
        memory_limit(),
        "Use a smaller layer: the law depends on the excess, not on the size.",
    )
    values, lengths = [], []
    for factor in (structure.left_factor.double(), structure.right_factor.double().mT):  # one feature per column
        own = factor.norm(dim=0)
        factor = factor / own if unit_length else factor / own.square().mean().sqrt()
        values.append(torch.linalg.svdvals(factor).cpu().numpy())
        lengths.append(own.cpu().numpy())
    squares = [1.0 + float(own.std() / own.mean()) ** 2 for own in lengths]
    made = np.sort(np.outer(*values).ravel())
    return Spectrum(features, made, unit_length, math.sqrt(math.prod(squares) - 1.0))


@with_progress
def sweep_excess(
    name: str,
    shape: Sequence[int],
    *,
    excesses: Sequence[float] = EXCESSES,
    seeds: Sequence[int] = (0, 1, 2),
    density: float | None = None,
    unit_length: bool = True,
    progress: Progress | bool | None = None,
) -> ExcessSweep:
    """Condition numbers of random features over the excess. Theory: random_features:thm-2.2

    `law` of the result is NaN if the law does not apply.

    Examples:
        >>> import onlynorm as on
        >>> sweep = on.spectrum.sweep_excess("he_normal", (4, 6), excesses=(1.5, 3.0))
        >>> sweep.excesses
        (1.5, 3.0)
    """
    excesses = need_items("excesses", excesses, cure="List features per equation, as (0.5, 1.25, 2.0).")
    seeds = need_items("seeds", seeds, cure="List seeds, as (0, 1, 2).")
    progress = need_progress(progress)
    if not seeds or not excesses:
        raise ValueRangeError("a sweep needs at least one excess and one seed; got none. Omit them for the defaults.")
    rows: list[tuple[float, ...]] = []
    counts: list[int] = []
    predictions: list[Prediction] = []
    for done, excess in enumerate(excesses):
        drawn = [draw(name, shape, excess=excess, seed=seed, density=density) for seed in seeds]
        if progress is not None:
            progress(done, len(excesses), f"excess {excess:g}")
        counts.append(drawn[0].n_features)
        spectra = [measure_spectrum(features, unit_length=unit_length) for features in drawn]
        rows.append(tuple(one.condition for one in spectra))
        predictions.append(spectra[0].prediction)
    law = tuple(one.condition if one.is_known else math.nan for one in predictions)
    return ExcessSweep(drawn[0].equations, tuple(counts), tuple(rows), law)
