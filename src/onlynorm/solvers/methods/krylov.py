"""Conjugate gradients on the Gram operator in float32, with float64 refinement.

With at least as many features as equations the minimum-norm solution is gamma = M^T y with M M^T y = t; with
fewer, the least-squares solution satisfies M^T M gamma = M^T t. Both Gram operators are symmetric and cost two
sweeps of matrix products.

Almost all work is done in float32, which is twice as fast and needs half the memory. Each round solves for a
*correction* only: the residual is recomputed in float64 from the original features, and the next round solves for the
remainder.

For features that are not isotropic (sparse, pretrained, correlated), whitening both factors first,

    left' = L2^-1 left,  right' = right L1^-T,  with  L2 L2^T = left left^T,  L1 L1^T = right^T right

(features scaled to unit length in both factors) is a Kronecker preconditioner. It takes two small Cholesky
factorizations and no extra work per iteration. The solution still has minimum norm, because only equations are
recombined.

Theory: random_features:thm-2.1, random_features:thm-2.2
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from onlynorm.solvers.operator import KhatriRao, OnStep, Operator

DIGITS_PER_ROUND = 1e-5
"""Tolerance of one float32 round; far enough above float32 rounding for condition numbers up to about 100."""
PIECE = 256
"""Features that are normalized at once."""
MOST_STEPS = 400
"""Maximum number of steps from which the condition number is estimated."""
DIVERGED = 1e6
"""Growth of the residual at which the iteration stops: it may grow by kappa, so the system is singular."""


@dataclass
class KrylovResult:
    """Result of the iteration; `history` has the relative residual after each round."""

    gamma: Tensor
    iterations: int
    rounds: int
    condition: float
    history: list[float] = field(default_factory=list)


def solve_krylov(
    operator: Operator,
    target: Float[Tensor, "*batch out inp"],
    *,
    tolerance: float,
    max_iterations: int,
    inner_dtype: torch.dtype = torch.float32,
    whiten: bool = False,
    store: bool = True,
    least_squares: bool = False,
    on_step: OnStep | None = None,
) -> KrylovResult:
    """The minimum-norm or least-squares gamma by refined conjugate gradients.

    `store=False` stores no float32 copy of the features but converts or regenerates them block by block: slower, with
    constant memory. `least_squares` iterates on M^T M for any number of features, which converges even if no gamma is
    exact; for dependent features the norm is then minimal up to float32 rounding only. Stops at the relative residual
    `tolerance` (of the normal equations with too few features), at `max_iterations`, or when neither a float32 nor a
    float64 round reduces the residual.
    """
    least_squares = least_squares or operator.n_features < operator.equations
    whitening = None
    if whiten and store and not least_squares and isinstance(operator, KhatriRao):  # whitened features are stored
        whitening = Whitening.of(operator)
    inner = _inner_operator(operator, inner_dtype, whitening, store)
    axes = (-1,) if least_squares else (-2, -1)
    start = operator.transpose(target) if least_squares else target
    scale = torch.linalg.vector_norm(start, dim=axes, keepdim=True)
    tiny = torch.finfo(scale.dtype).tiny
    gamma = target.new_zeros(*target.shape[:-2], operator.n_features)
    rest, norms, error = start, scale, 1.0
    result = KrylovResult(gamma, 0, 0, math.nan, [error])
    while error > tolerance and result.iterations < max_iterations:
        if on_step is not None:
            on_step(result.iterations, error)
        unit = norms.clamp_min(tiny)
        step, count, extremes = _correct(
            operator,
            inner,
            rest / unit,
            least_squares=least_squares,
            whitening=whitening,
            tolerance=max(_round_tolerance(tolerance / error, inner.dtype), 0.3 * tolerance / error),
            max_iterations=max_iterations - result.iterations,
        )
        result.iterations += count
        result.rounds += 1
        if math.isnan(result.condition) or extremes > result.condition:
            result.condition = extremes
        corrected = gamma + step.to(gamma.dtype) * (unit if least_squares else unit.squeeze(-1))
        left = target - operator.apply(corrected)
        left = operator.transpose(left) if least_squares else left
        left_norms = torch.linalg.vector_norm(left, dim=axes, keepdim=True)
        left_error = float((left_norms / scale.clamp_min(tiny)).max())
        stalled = not left_error <= 0.5 * error  # also for NaN
        if left_error < error:  # else the correction is discarded
            gamma, rest, norms, error = corrected, left, left_norms, left_error
        result.history.append(error)
        if stalled:
            if inner.dtype == operator.dtype:
                break
            inner = _inner_operator(operator, operator.dtype, whitening, store=False)
    if on_step is not None:
        on_step(result.iterations, error)
    result.gamma = gamma
    return result


def _round_tolerance(wanted: float, dtype: torch.dtype) -> float:
    """The tolerance of one round: the total reduction split evenly into rounds that the precision can reach."""
    if dtype == torch.float64:
        return 0.5 * wanted
    rounds = max(1, math.ceil(math.log(wanted) / math.log(DIGITS_PER_ROUND) - 1e-9))
    return 0.7 * float(wanted ** (1.0 / rounds))


def _correct(
    operator: Operator,
    inner: Operator,
    rest: Tensor,
    *,
    least_squares: bool,
    whitening: Whitening | None,
    tolerance: float,
    max_iterations: int,
) -> tuple[Tensor, int, float]:
    """One round: (correction of gamma for the normalized residual `rest`, number of steps, condition estimate).

    The last product uses the original features, not their float32 copy: gamma = M^T y then has no part in the null
    space of M beyond float64 rounding. No residual would show such a part.
    """
    work = inner.scratch()
    if least_squares:
        rhs = rest.to(inner.dtype)
        return conjugate_gradients(
            lambda g: inner.gram_apply(g, work=work), rhs, 1, tolerance=tolerance, max_iterations=max_iterations
        )
    rhs = (whitening.forward(rest) if whitening else rest).to(inner.dtype)
    y, count, condition = conjugate_gradients(
        lambda p: inner.row_gram_apply(p, work=work), rhs, 2, tolerance=tolerance, max_iterations=max_iterations
    )
    y = y.to(operator.dtype)
    return operator.transpose(whitening.backward(y) if whitening else y), count, condition


def conjugate_gradients(
    gram: Callable[[Tensor], Tensor], rhs: Tensor, n_axes: int, *, tolerance: float, max_iterations: int
) -> tuple[Tensor, int, float]:
    """Solves gram(x) = rhs for every batch element; the last `n_axes` axes hold one vector.

    Returns x, the number of steps and an estimate of the condition number of M, from the extreme eigenvalues of the
    Lanczos tridiagonal matrix of the coefficients.
    """
    axes = tuple(range(-n_axes, 0))
    x = torch.zeros_like(rhs)
    r = rhs.clone()
    p = rhs.clone()
    rr = r.square().sum(axes, keepdim=True)
    stop, broken = rr * tolerance**2, rr * DIVERGED**2
    # Read at the end, since reading an entry synchronizes the device. One tensor for all coefficients, since many small
    # ones would fragment memory.
    steps = rhs.new_empty(min(max_iterations, MOST_STEPS), 2)
    n_steps = 0
    tiny = torch.finfo(rhs.dtype).tiny
    while n_steps < max_iterations and bool(((rr > stop) & (rr <= broken)).any()):
        q = gram(p)
        alpha = rr / (p * q).sum(axes, keepdim=True).clamp_min(tiny)
        x += alpha * p
        r -= alpha * q
        previous, rr = rr, r.square().sum(axes, keepdim=True)
        beta = rr / previous.clamp_min(tiny)
        p = torch.add(r, beta * p, out=p)
        if n_steps < len(steps):
            steps[n_steps, 0], steps[n_steps, 1] = alpha.flatten()[0], beta.flatten()[0]
        n_steps += 1
    return x, n_steps, _condition_from_steps(steps[:n_steps])


def _condition_from_steps(steps: Float[Tensor, "steps 2"]) -> float:
    """sqrt(largest / smallest Ritz value): a lower bound of kappa(M) that converges during the solve."""
    import scipy.linalg

    if len(steps) < 2:
        return 1.0
    alpha, beta = steps.double().cpu().numpy().T
    if not (np.all(alpha > 0) and np.all(np.isfinite(alpha)) and np.all(beta >= 0)):
        return math.nan
    diagonal = 1.0 / alpha
    diagonal[1:] += beta[:-1] / alpha[:-1]
    off = np.sqrt(beta[:-1]) / alpha[:-1]
    values = scipy.linalg.eigvalsh_tridiagonal(diagonal, off)
    return float(np.sqrt(values[-1] / values[0])) if values[0] > 0 else math.inf


@dataclass(frozen=True)
class Whitening:
    """Triangular factors of left left^T and right^T right: the Kronecker preconditioner."""

    left: Tensor
    right: Tensor

    @classmethod
    def of(cls, operator: KhatriRao) -> Whitening | None:
        """The whitening of these features, or None if a factor does not have full row rank."""
        left_gram = torch.zeros(operator.out, operator.out, dtype=operator.dtype, device=operator.device)
        right_gram = torch.zeros(operator.inp, operator.inp, dtype=operator.dtype, device=operator.device)
        for _, left, right in operator.blocks():
            for total, gram in zip((left_gram, right_gram), _direction_grams(left, right, operator.dtype), strict=True):
                total += gram
        factors = []
        for gram in (left_gram, right_gram):
            factor, info = torch.linalg.cholesky_ex(gram)
            spread = factor.diagonal().amax() / factor.diagonal().amin().clamp_min(1e-300)
            if int(info) != 0 or float(spread) > 1e7:
                return None
            factors.append(factor)
        return cls(*factors)

    def forward(self, matrix: Tensor) -> Tensor:
        """L2^-1 matrix L1^-T: the equations in whitened coordinates."""
        half = torch.linalg.solve_triangular(self.left, matrix, upper=False)
        return torch.linalg.solve_triangular(self.right, half.mT, upper=False).mT

    def backward(self, matrix: Tensor) -> Tensor:
        """L2^-T matrix L1^-1: the transpose of `forward`."""
        half = torch.linalg.solve_triangular(self.left.mT, matrix, upper=True)
        return torch.linalg.solve_triangular(self.right.mT, half.mT, upper=True).mT

    def features(self, operator: KhatriRao, dtype: torch.dtype) -> KhatriRao:
        """The whitened features, stored in `dtype`."""
        left, right = operator.empty_factors(dtype)
        for where, left_block, right_block in operator.blocks():
            left[where] = torch.linalg.solve_triangular(self.left, left_block.mT, upper=False).mT.to(dtype)
            right[where] = torch.linalg.solve_triangular(self.right, right_block.mT, upper=False).mT.to(dtype)
        return KhatriRao(left.mT, right)


def _direction_grams(
    left: Float[Tensor, "feat out"], right: Float[Tensor, "feat inp"], dtype: torch.dtype
) -> tuple[Float[Tensor, "out out"], Float[Tensor, "inp inp"]]:
    """Gram matrices of both factors with rows scaled to unit length, computed in chunks.

    Unit-length features may have factors of different lengths, which would appear as anisotropy.
    """
    grams = []
    for factor in (left, right):
        n = factor.shape[1]
        gram = torch.zeros(n, n, dtype=dtype, device=factor.device)
        for piece in factor.split(PIECE):
            rows = torch.nn.functional.normalize(piece.to(dtype), dim=1, eps=torch.finfo(dtype).tiny)
            gram.addmm_(rows.mT, rows)
        grams.append(gram)
    return grams[0], grams[1]


def anisotropy(operator: KhatriRao) -> float:
    """A lower bound of the factor by which whitening reduces kappa; near one for isotropic features.

    Estimated from a subset of features, sixteen per row of each factor, and divided by its value for an isotropic
    sample of that size: (1 + r) / (1 - r) with r^2 = width / sample.
    """
    step = max(1, operator.n_features // (16 * max(operator.out, operator.inp)))
    total = 1.0
    left, right = operator.sample(step)
    for gram in _direction_grams(left, right, torch.float32):
        values = torch.linalg.eigvalsh(gram)
        if not float(values[0]) > 0.0:
            return math.inf
        chance = math.sqrt(min(1.0, len(gram) / len(left)))
        spread = math.sqrt(float(values[-1] / values[0])) * (1.0 - chance) / (1.0 + chance)
        total *= max(1.0, spread)
    return total


def _inner_operator(operator: Operator, dtype: torch.dtype, whitening: Whitening | None, store: bool) -> Operator:
    if whitening is not None and isinstance(operator, KhatriRao):
        return whitening.features(operator, dtype)
    if not store and isinstance(operator, KhatriRao):
        return operator.borrow(dtype)
    return operator.to(dtype)
