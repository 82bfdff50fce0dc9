"""Random features on a grid: M = U2 (x) U1 with two matrices of independent normal entries.

Feature (q, d) is column q of U2 (rows x n_q) times row d of U1 (n_d x cols), as in Ortho cond, but U2 and U1 are random
and may have more columns and rows than the target. M gamma = U2 grid(gamma) U1, so that the least-norm solution for all
outputs takes one factorization of each:

    grid(gamma) = pinv(U2) T pinv(U1)

The singular values of M are all products of one of U2 and one of U1, each of which follows the Marchenko-Pastur law
(see `solvers.spectrum`). The condition number of M is the product of theirs. For a given number of features it is
smallest if n_q / rows = n_d / cols.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from onlynorm.errors import ValueRangeError
from onlynorm.features.streams import Stream
from onlynorm.features.structured import check_gamma, check_matrix

_PIECE = 2**20  # normals per task
_BLOCK = 512  # columns of a Gram matrix computed at once
REFINED = 1e-14
"""Relative residual at which a solution is not refined further."""
SMALL = 1e-10
"""Relative residual that one refinement brings to rounding."""
ACCURATE = 1e-12
"""A factor whose Cholesky factorization leaves a larger residual is factored by Householder reflections."""
MAX_REFINEMENTS = 4
MAX_RATIO = 1e5
"""Entries on the diagonal of a Cholesky factor differ at most by this factor, a lower bound of the condition number."""


def grid_for_excess(rows: int, cols: int, excess: Fraction) -> tuple[int, int]:
    """(n_q, n_d) with at least `excess` >= 1 features per entry of the target, a square root of it for each factor.

    A factor for one row or one column has condition number 1 at any size, so that it stays square.
    """
    if rows == 1:
        return 1, math.ceil(excess * cols)
    if cols == 1:
        return math.ceil(excess * rows), 1
    return _ceil_root(excess * rows**2), _ceil_root(excess * cols**2)


def find_grid(rows: int, cols: int, n_features: int) -> tuple[int, int]:
    """(n_q, n_d) with n_q n_d = n_features, n_q >= rows and n_d >= cols: the pair closest to n_q / rows = n_d / cols.

    A pure function of its arguments, so that the number of features is enough to draw them again.
    """
    small = np.arange(1, math.isqrt(n_features) + 1, dtype=np.int64)
    small = small[n_features % small == 0]
    divisors = {int(q) for q in small} | {n_features // int(q) for q in small}
    fitting = [(q, n_features // q) for q in sorted(divisors) if q >= rows and n_features // q >= cols]
    if rows == 1 or cols == 1:  # that factor stays square
        fitting = [(q, d) for q, d in fitting if (q if rows == 1 else d) == 1]
    if not fitting:
        n_q, n_d = grid_for_excess(rows, cols, max(Fraction(1), Fraction(n_features, rows * cols)))
        raise ValueRangeError(
            f"kron_normal needs n_features = q * d with q at least {rows} and d at least {cols}, as in {n_q * n_d} = "
            f"{n_q} * {n_d}; got {n_features}. Use n_features={n_q * n_d}, or pass excess instead."
        )

    def imbalance(pair: tuple[int, int]) -> Fraction:
        q, d = pair[0] * cols, pair[1] * rows
        return Fraction(max(q, d), min(q, d))

    return min(fitting, key=imbalance)


def _ceil_root(x: Fraction) -> int:
    """The smallest integer whose square is at least x > 0."""
    return math.isqrt(math.ceil(x) - 1) + 1


@dataclass(frozen=True, eq=False)
class KronNormal:
    """Feature k, with (q, d) = divmod(k, n_d), is column q of U2 times row d of U1.

    `left_factor` is U2 (rows x n_q), `right_factor` U1 (n_d x cols).
    """

    left_factor: Float[Tensor, "rows n_q"]
    right_factor: Float[Tensor, "n_d cols"]

    @classmethod
    def draw(cls, rows: int, cols: int, grid: tuple[int, int], *, fan_in: int, seed: int, layer: str) -> KronNormal:
        """Normal factors from the streams "left/kron", column by column, and "right/kron", row by row.

        Their variances are 2 / fan_in, the number of inputs of an output of U2, and 2 / cols.
        """
        left = _normals(Stream(seed, layer, "left/kron"), grid[0], rows, math.sqrt(2.0 / fan_in))
        right = _normals(Stream(seed, layer, "right/kron"), grid[1], cols, math.sqrt(2.0 / cols))
        return cls(left.mT, right)

    @property
    def rows(self) -> int:
        return len(self.left_factor)

    @property
    def cols(self) -> int:
        return self.right_factor.shape[1]

    @property
    def grid_shape(self) -> tuple[int, int]:
        """(n_q, n_d), the shape of the grid of features."""
        return self.left_factor.shape[1], len(self.right_factor)

    @property
    def n_features(self) -> int:
        return math.prod(self.grid_shape)

    def numbers(self) -> list[Tensor]:
        """The tensors that determine both factors."""
        return [self.left_factor, self.right_factor]

    def apply(self, gamma: Float[Tensor, "*batch feat"]) -> Float[Tensor, "*batch rows cols"]:
        """M gamma = U2 G U1 with G = grid(gamma)."""
        G = self.grid(gamma)
        return self.left_factor.to(G) @ G @ self.right_factor.to(G)

    def grid(self, values: Float[Tensor, "*batch feat"]) -> Float[Tensor, "*batch n_q n_d"]:
        """One value per feature as an (n_q, n_d) matrix."""
        check_gamma("kron_normal", values, self.n_features)
        return values.reshape(*values.shape[:-1], *self.grid_shape)

    def constant(self, beta: Float[Tensor, "*batch feat"]) -> Float[Tensor, "*batch rows"]:
        """The contribution of beta, one value per feature, to every row: U2 times the row sums of the grid."""
        return self.grid(beta).sum(-1) @ self.left_factor.to(beta).mT

    def input_of(self, k: Int[Tensor, "*k"] | int | None = None) -> Int[Tensor, "*k"]:
        """Row of U1 of feature k, or of all features."""
        return torch.as_tensor(torch.arange(self.n_features, device="cpu") if k is None else k) % self.grid_shape[1]

    def transpose(self, residual: Float[Tensor, "*batch rows cols"]) -> Float[Tensor, "*batch feat"]:
        """M^T r = U2^T R U1^T."""
        check_matrix("kron_normal", residual, self.rows, self.cols)
        return (self.left_factor.to(residual).mT @ residual @ self.right_factor.to(residual).mT).flatten(-2)

    def solve(self, target: Float[Tensor, "*batch rows cols"]) -> Float[Tensor, "*batch feat"]:
        """The gamma of least norm with apply(gamma) = target; to solve repeatedly, keep a `KronInverse`."""
        return KronInverse(self)(target)

    def left(self, start: int, stop: int) -> Float[Tensor, "rows block"]:
        n_d = self.grid_shape[1]
        return self.left_factor[:, torch.arange(start, stop, device=self.left_factor.device) // n_d]

    def right(self, start: int, stop: int) -> Float[Tensor, "block cols"]:
        n_d = self.grid_shape[1]
        return self.right_factor[torch.arange(start, stop, device=self.right_factor.device) % n_d]

    def to(self, dtype: torch.dtype, device: torch.device) -> KronNormal:
        return KronNormal(self.left_factor.to(device, dtype), self.right_factor.to(device, dtype))

    def digest_bytes(self) -> bytes:
        """A line with name and sizes, then U1 row by row and U2 column by column as little-endian float64."""
        n_q, n_d = self.grid_shape
        name = f"kron_normal {self.rows}x{self.cols} grid {n_q}x{n_d}\n".encode()
        return name + b"".join(
            u.double().cpu().contiguous().numpy().astype("<f8", copy=False).tobytes()
            for u in (self.right_factor, self.left_factor.mT)
        )


class KronInverse:
    """The pseudo-inverse of M from one factorization of U2 and one of U1, in their precision, float64 as a rule.

    `is_refined=False` is cheaper, for steps whose error is part of the next target.
    """

    is_wide = True

    def __init__(self, structure: KronNormal, *, is_refined: bool = True) -> None:
        self.structure, self.is_refined = structure, is_refined
        self._left = _Factorization(structure.left_factor)
        self._right = _Factorization(structure.right_factor.mT)

    def __call__(self, target: Float[Tensor, "*batch rows cols"]) -> Float[Tensor, "*batch feat"]:
        """The gamma of least norm with apply(gamma) = target, refined to rounding."""
        check_matrix("kron_normal", target, self.structure.rows, self.structure.cols)
        target = target.to(self.structure.left_factor)
        if not self.is_refined:
            return self._once(target)
        gamma, residual = self._refined(target)
        factors = (self._left, self._right)
        if not residual <= ACCURATE and not all(one.is_orthogonal for one in factors):
            for one in factors:  # the Gram matrix squares the condition number, which square factors do not stand
                one.orthogonalize()
            gamma, _ = self._refined(target)
        return gamma

    def _refined(self, target: Tensor) -> tuple[Tensor, float]:
        size = float(torch.linalg.vector_norm(target))
        gamma = self._once(target)
        if size == 0.0:
            return gamma, 0.0
        rest = target - self.structure.apply(gamma)
        residual = float(torch.linalg.vector_norm(rest)) / size
        for _ in range(MAX_REFINEMENTS):
            if residual <= REFINED:
                break
            better = gamma + self._once(rest)
            if residual <= SMALL:  # its square is rounding: not measured
                return better, REFINED
            rest = target - self.structure.apply(better)
            now = float(torch.linalg.vector_norm(rest)) / size
            if not now < residual:
                break
            gamma, is_slow, residual = better, now > residual / 2, now
            if is_slow:
                break
        return gamma, residual

    def _once(self, target: Tensor) -> Tensor:
        """pinv(U2) T pinv(U1), first the inputs of all outputs of the batch at once."""
        flat = self._right(target.reshape(-1, target.shape[-1]).mT).mT
        by_output = flat.reshape(*target.shape[:-1], flat.shape[-1])
        return self._left(by_output).flatten(-2)


class _Factorization:
    """The pseudo-inverse of a matrix U with at least as many columns as rows and full rank.

    U^T (U U^T)^-1 by a Cholesky factorization, or Q R^-T with U^T = Q R if that is not accurate.
    """

    def __init__(self, U: Float[Tensor, "m n"]) -> None:
        self.U, self.is_orthogonal = U, False
        self.L, failed = torch.linalg.cholesky_ex(_gram(U))
        diagonal = self.L.diagonal().abs()
        if int(failed) or not float(diagonal.max()) <= MAX_RATIO * float(diagonal.min()):
            self.orthogonalize()

    def orthogonalize(self) -> None:
        """Factors U^T = Q R instead."""
        if self.is_orthogonal:
            return
        self.is_orthogonal = True
        self.U, R = torch.linalg.qr(self.U.mT)
        self.L = R.mT

    def __call__(self, b: Float[Tensor, "*batch m k"]) -> Float[Tensor, "*batch n k"]:
        if self.is_orthogonal:
            return self.U @ torch.linalg.solve_triangular(self.L, b, upper=False)
        if b.ndim == 2:
            return self.U.mT @ torch.cholesky_solve(b, self.L)
        return self.U.mT @ torch.cholesky_solve(b, self.L.expand(*b.shape[:-2], *self.L.shape))


def _gram(U: Tensor) -> Tensor:
    """The lower triangle of U U^T, block by block: half the operations of the product."""
    made = U.new_zeros(len(U), len(U))
    for start in range(0, len(U), _BLOCK):
        made[start:, start : start + _BLOCK] = U[start:] @ U[start : start + _BLOCK].mT
    return made


def _normals(stream: Stream, n_rows: int, width: int, scale: float) -> Tensor:
    """Normal entries row by row, in pieces over as many threads as torch uses."""
    made = torch.empty(n_rows * width, dtype=torch.float64)

    def fill(start: int) -> None:
        stop = min(start + _PIECE, len(made))
        made[start:stop] = torch.from_numpy(stream.normals(start, stop) * scale)

    starts = range(0, len(made), _PIECE)
    if len(starts) == 1:
        fill(0)
    else:
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(fill, starts))
    return made.view(n_rows, width)
