"""The expected change of |M|_F^2 in one step of the linear chain with batch norms, to second order in gamma."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor


def frobenius_drift(M: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch"]:
    """delta(M) with E |M+|_F^2 - |M|_F^2 = gamma^2 delta(M) + O(gamma^4), for M of unit diagonal.

    delta(M) = 2 d^2 - 2 |M|_F^2 - 8 Tr(M^3) + 8 Tr(diag(M^2)^2), the expectation over one W with independent symmetric
    entries of variance one. Theory: daneshmand2020:lemma-12
    """
    squares = M.square().sum(-1)
    cube = ((M @ M) * M).sum((-2, -1))
    return 2 * M.shape[-1] ** 2 - 2 * squares.sum(-1) - 8 * cube + 8 * squares.square().sum(-1)


def drift_of_eigenvalues(eigenvalues: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
    """delta(M) from the eigenvalues, where all rows of M have equal norm. Theory: daneshmand2020:prop-13"""
    d = eigenvalues.shape[-1]
    second, third = eigenvalues.square().sum(-1), eigenvalues.pow(3).sum(-1)
    return 2 * d**2 - 2 * second - 8 * third + 8 * second.square() / d
