"""The minimum-width system: solves for both norms, which needs out - 1 fewer features.

Find gamma and output_gamma with diag(output_gamma) left diag(gamma) right = T. With s = 1 / output_gamma this is
linear: left diag(gamma) right = diag(s) T. Solutions are unique up to a factor, so the mean of s is set to one,
s = 1 + u with sum(u) = 0, and

    left diag(gamma) right - diag(u) T = T

has n_features + out - 1 unknowns for out * inp equations. The paper eliminates s with one pivot per row. Here the
columns "e_i (x) T_i" are added to the features instead: the solutions are the same, no pivot is divided by, and the
operator is a Khatri-Rao operator plus out - 1 columns. A dense matrix is built only to factorize small systems.

Zero rows of T get output_gamma = 0 and are removed from the system.

Theory: burkholz2024:lemma-2.1, burkholz2024:thm-2.2, random_features:thm-2.1
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from onlynorm.errors import InsufficientFeaturesError
from onlynorm.solvers.operator import KhatriRao, times_power

ROW_POWERS = 3
"""Rows of left are scaled up if they are smaller than the largest by more than this power of two."""


def minimum_features(n_outputs: int, n_inputs: int) -> int:
    """Number of features at which a generic target has a solution: out * inp - out + 1.

    Examples:
        >>> from onlynorm.solvers import minimum_features
        >>> minimum_features(4, 8)
        29
    """
    return n_outputs * n_inputs - n_outputs + 1


class MinimumWidth:
    """The operator (gamma, v) -> left diag(gamma) right - diag(u) T with u = sigma * (Q v), sum(u) = 0.

    sigma scales the added columns to the mean norm of the features; Q is an orthonormal basis of {v: sum(u) = 0}.
    """

    def __init__(self, features: KhatriRao, target: Float[Tensor, "out inp"]) -> None:
        self.features, self.target = features, target
        self.out, self.inp = features.out, features.inp
        self.dtype, self.device = features.dtype, features.device
        self.n_features = features.n_features + self.out - 1
        largest = target.abs().amax(1)  # squares of a tiny row would underflow
        rows = largest * torch.linalg.vector_norm(target / largest[:, None], dim=1)
        mean_column = features.column_squares().double().mean().sqrt().to(self.dtype)
        self.sigma = torch.where(mean_column > 0, mean_column, 1.0) / rows
        self.basis = _complement(self.sigma)

    @property
    def equations(self) -> int:
        """One per weight of the target."""
        return self.out * self.inp

    def row_factors(self, unknowns: Float[Tensor, " feat"]) -> Float[Tensor, " out"]:
        """s = 1 + u, the inverse of output_gamma."""
        return 1.0 + self.sigma * (unknowns[self.features.n_features :] @ self.basis.mT)

    def apply(self, gamma: Float[Tensor, "*batch feat"]) -> Float[Tensor, "*batch out inp"]:
        """left diag(gamma) right - diag(u) T."""
        split = self.features.n_features
        u = self.sigma * (gamma[..., split:] @ self.basis.mT)
        return self.features.apply(gamma[..., :split]) - u[..., None] * self.target

    def transpose(self, residual: Float[Tensor, "*batch out inp"]) -> Float[Tensor, "*batch feat"]:
        """The adjoint of `apply`."""
        seen = (residual * self.target).sum(-1) * self.sigma
        return torch.cat([self.features.transpose(residual), -(seen @ self.basis)], dim=-1)

    def scratch(self) -> Tensor:
        """The buffer of the features."""
        return self.features.scratch()

    def gram_apply(
        self, gamma: Float[Tensor, "*batch feat"], *, work: Tensor | None = None
    ) -> Float[Tensor, "*batch feat"]:
        """transpose(apply(gamma)); `work` is not needed."""
        return self.transpose(self.apply(gamma))

    def row_gram_apply(
        self, residual: Float[Tensor, "*batch out inp"], *, work: Tensor | None = None
    ) -> Float[Tensor, "*batch out inp"]:
        """apply(transpose(residual)) in one sweep over the features."""
        seen = (residual * self.target).sum(-1) * self.sigma
        u = self.sigma * ((seen @ self.basis) @ self.basis.mT)
        return self.features.row_gram_apply(residual, work=work) + u[..., None] * self.target

    def _added(self) -> Float[Tensor, "eq added"]:
        """The added columns, dense."""
        columns = self.sigma[:, None] * self.basis
        return -(columns[:, None, :] * self.target[:, :, None]).flatten(0, 1)

    def gram(self, *, is_whole: bool = True) -> Float[Tensor, "feat feat"]:
        """M^T M of the whole system."""
        whole = self.materialise()
        return whole.mT @ whole

    def row_gram(self) -> Float[Tensor, "eq eq"]:
        """M M^T of the whole system."""
        added = self._added()
        return self.features.row_gram().addmm_(added, added.mT)

    def one_norm(self) -> float:
        """The largest column sum of absolute values."""
        return max(self.features.one_norm(), float(self._added().abs().sum(0).amax()) if self.out > 1 else 0.0)

    def materialise(self, *, dtype: torch.dtype | None = None) -> Float[Tensor, "eq feat"]:
        """The whole matrix, column-major."""
        dtype = dtype or self.dtype
        by_column = torch.empty(self.n_features, self.equations, dtype=dtype, device=self.device)
        split = self.features.n_features
        for where, left, right in self.features.blocks():
            piece = by_column[where].view(-1, self.out, self.inp)
            torch.mul(left.to(dtype)[:, :, None], right.to(dtype)[:, None, :], out=piece)
        by_column[split:] = self._added().mT.to(dtype)
        return by_column.mT

    def to(self, dtype: torch.dtype) -> MinimumWidth:
        """The same operator in another precision."""
        if dtype == self.dtype:
            return self
        other = object.__new__(MinimumWidth)
        other.__dict__.update(self.__dict__)
        other.features, other.dtype = self.features.to(dtype), dtype
        other.target, other.sigma, other.basis = (x.to(dtype) for x in (self.target, self.sigma, self.basis))
        return other


def equal_rows(features: KhatriRao) -> tuple[KhatriRao, Tensor]:
    """The features with rows of left of similar size, and the powers of two by which the rows were scaled.

    Rows within a factor of eight of the largest and regenerated features are not scaled.
    """
    powers = torch.zeros(features.out, dtype=torch.long)
    if features.is_stored:
        left, right = features.dense()
        largest = left.abs().amax(1)
        exponents = torch.frexp(largest).exponent.long().cpu()
        powers = torch.where(largest.cpu() > 0, exponents.max() - exponents, 0)
        powers = torch.where(powers > ROW_POWERS, powers, 0)
        if bool(powers.any()):
            features = KhatriRao(times_power(left, powers[:, None]), right)
    return features, powers


def _complement(direction: Float[Tensor, " out"]) -> Float[Tensor, "out rest"]:
    """Orthonormal columns v with <direction, v> = 0: all but the first column of one Householder reflection."""
    unit = direction / torch.linalg.vector_norm(direction)
    mirror = unit.clone()
    mirror[0] += torch.copysign(torch.ones_like(unit[0]), unit[0])
    mirror = mirror / torch.linalg.vector_norm(mirror)
    identity = torch.eye(len(unit), dtype=unit.dtype, device=unit.device)
    return (identity - 2.0 * torch.outer(mirror, mirror))[:, 1:]


def need_minimum_width(operator: KhatriRao) -> None:
    """Raises if both norms together have too few parameters for the target."""
    need = minimum_features(operator.out, operator.inp)
    if operator.n_features < need:
        raise InsufficientFeaturesError(
            f"minimum width needs {need} features for {operator.out} nonzero outputs of {operator.inp} weights; "
            f"got {operator.n_features}. Draw {need - operator.n_features} more features."
        )
