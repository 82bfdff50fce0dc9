"""The expected change of |M|_F^2 in one step of the linear chain with batch norms, to second order in gamma."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from onlynorm.errors import ShapeError
from onlynorm.modules import as_real


def frobenius_drift(M: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch"]:
    """delta(M) with E |M+|_F^2 - |M|_F^2 = gamma^2 delta(M) + O(gamma^4), for M of unit diagonal.

    delta(M) = 2 d^2 - 2 |M|_F^2 - 8 Tr(M^3) + 8 Tr(diag(M^2)^2), the expectation over one W with independent symmetric
    entries of variance one. Theory: daneshmand2020:lemma-12
    """
    M = as_real("frobenius_drift", M)
    if M.ndim < 2 or M.shape[-1] != M.shape[-2]:
        raise ShapeError(f"frobenius_drift needs square M; got {tuple(M.shape)}. Pass second_moments(unit_rows(H)).")
    squares = M.square().sum(-1)
    cube = ((M @ M) * M).sum((-2, -1))
    return 2 * M.shape[-1] ** 2 - 2 * squares.sum(-1) - 8 * cube + 8 * squares.square().sum(-1)


def drift_of_eigenvalues(eigenvalues: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
    """delta(M) from the eigenvalues, where all rows of M have equal norm. Theory: daneshmand2020:prop-13"""
    eigenvalues = as_real("drift_of_eigenvalues", eigenvalues)
    if eigenvalues.ndim < 1 or not eigenvalues.shape[-1]:
        raise ShapeError(f"drift_of_eigenvalues needs eigenvalues; got {tuple(eigenvalues.shape)}. Pass eigvalsh(M).")
    d = eigenvalues.shape[-1]
    second, third = eigenvalues.square().sum(-1), eigenvalues.pow(3).sum(-1)
    return 2 * d**2 - 2 * second - 8 * third + 8 * second.square() / d
