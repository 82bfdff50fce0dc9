"""Validation of matrices, the nearest invertible matrix, and random matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Num
from torch import Tensor

from onlynorm.errors import ShapeError, ValueRangeError
from onlynorm.features import draw
from onlynorm.validate import as_tensor, need_free_memory, need_integer, need_number

EPS = torch.finfo(torch.float64).eps
CLIP = 1e-6
"""Singular values below this fraction of the largest one are raised to it by `nearest_invertible` by default."""
MAX_DEPTH = 1_000_000
"""Maximum depth: all layers are applied once to measure the error."""


Matrix: TypeAlias = Float[Tensor, "out inp"]


@dataclass(frozen=True, eq=False)
class Decomposition:
    """The singular value decomposition matrix = left diag(values) right, values descending.

    The matrix may be rectangular; `left` and `right` are orthogonal.
    """

    matrix: Matrix
    left: Float[Tensor, "out out"]
    values: Float[Tensor, " rank"]
    right: Float[Tensor, "inp inp"]

    @classmethod
    def of(cls, matrix: Matrix) -> Decomposition:
        """The decomposition of a matrix in float64."""
        return cls(matrix, *torch.linalg.svd(matrix))

    @property
    def sign(self) -> float:
        """The sign of the determinant of a square matrix, from the orthogonal factors."""
        return float(torch.linalg.slogdet(self.left)[0] * torch.linalg.slogdet(self.right)[0])

    @property
    def stretch(self) -> float:
        """The largest |log| of a singular value: the gamma of the paper."""
        return float(self.values.log().abs().max())

    @property
    def is_singular(self) -> bool:
        """Whether the smallest singular value is below the rounding of the largest."""
        return bool(self.values[-1] <= len(self.values) * EPS * self.values[0])


def need_matrix(matrix: Any, *, what: str = "factorize", cure: str = "Pass a tensor or a NumPy array.") -> Matrix:
    """The matrix in float64; raises unless it is real, finite and non-empty."""
    matrix = as_tensor(what, matrix, cure=cure)
    if matrix.ndim != 2 or not matrix.numel():
        raise ShapeError(f"{what} needs a matrix (rows, columns); got shape {tuple(matrix.shape)}. Reshape it.")
    if matrix.is_complex():
        raise ValueRangeError(f"{what} needs a real matrix; got {matrix.dtype}. Pass its real part.")
    made = matrix.detach().to(torch.float64)
    rows, columns = made.shape
    size = 64.0 * max(rows, columns) ** 2
    need_free_memory(f"{what} of a {rows} x {columns} matrix", size, cure="Pass a smaller one.")
    if not torch.isfinite(made).all():
        n_bad = int((~torch.isfinite(made)).sum())
        raise ValueRangeError(f"{what} needs finite entries; got {n_bad} NaN or infinite. Check the matrix.")
    return made


def need_square(matrix: Any, *, what: str) -> Float[Tensor, "dim dim"]:
    """The matrix in float64; raises unless it is square, real, finite and non-empty."""
    made = need_matrix(matrix, what=what)
    if made.shape[0] != made.shape[1]:
        raise ShapeError(f"{what} needs a square matrix (d, d); got shape {tuple(made.shape)}. Pad the smaller side.")
    return made


def need_depth(depth: int, *, what: str = "factorize") -> int:
    """The depth as an int from 1 to `MAX_DEPTH`."""
    return need_integer(f"depth of {what}", depth, low=1, high=MAX_DEPTH, cure="Deeper means smaller norms.")


def need_invertible(found: Decomposition, *, what: str = "factorize") -> None:
    """Raises if the matrix has no full rank, with the distance to the nearest one that has."""
    if not bool(torch.isfinite(found.values).all()):
        raise ValueRangeError(
            f"{what} needs singular values in the range of float64; got an overflow, with entries up to "
            f"{float(found.matrix.abs().max()):.1e}. Scale the matrix down."
        )
    if not found.is_singular:
        return
    rank = int((found.values > len(found.values) * EPS * found.values[0]).sum())
    distance = _floor(found, None) - float(found.values[-1])
    rows, columns = found.matrix.shape
    kind = "an invertible matrix" if rows == columns else f"a {rows} x {columns} matrix of full rank"
    raise ValueRangeError(
        f"{what} needs {kind}, as products of I + A with |A| < 1 are; got rank {rank} of "
        f"{len(found.values)} with singular values from {float(found.values[0]):.2g} to "
        f"{float(found.values[-1]):.2g}. nearest_invertible(matrix) raises the "
        f"small ones to {_floor(found, None):.2g}, at a distance of {distance:.2g} in spectral norm."
    )


def nearest_invertible(
    matrix: Num[Tensor | np.ndarray, "out inp"], *, smallest: float | None = None
) -> Float[Tensor, "out inp"]:
    """The nearest matrix in spectral norm with singular values >= `smallest`, by default 1e-6 of the largest.

    For a singular square matrix the determinant of the result is positive. A rectangular result has full rank.

    Examples:
        >>> import torch
        >>> from onlynorm.identity import nearest_invertible
        >>> torch.linalg.matrix_rank(nearest_invertible(torch.ones(3, 3).double())).item()
        3
    """
    if smallest is not None:
        smallest = need_number(
            "the smallest singular value",
            smallest,
            low=0.0,
            open_low=True,
            cure=f"Leave it out for {CLIP} of the largest.",
        )
    found = Decomposition.of(need_matrix(matrix, what="nearest_invertible"))
    values = found.values.clamp(min=_floor(found, smallest))
    rows, columns = found.matrix.shape
    if rows == columns and found.is_singular and found.sign < 0:
        values[-1] = -values[-1]
    n = len(values)
    return found.left[:, :n] * values @ found.right[:n]


def _floor(found: Decomposition, smallest: float | None) -> float:
    return smallest if smallest is not None else CLIP * (float(found.values[0]) or 1.0)


def random_matrix(dim: int, *, seed: int = 0, name: str = "matrix") -> Float[Tensor, "dim dim"]:
    """A (dim, dim) matrix with independent normal entries of variance 1 / dim.

    Examples:
        >>> from onlynorm.identity import random_matrix
        >>> random_matrix(4, seed=1).shape
        torch.Size([4, 4])
        >>> bool((random_matrix(4, seed=1) == random_matrix(4, seed=1)).all())
        True
    """
    dim = need_integer("dim of a random matrix", dim, low=1, high=2**31 - 1, cure="Try 8.")
    need_free_memory(f"a random {dim} x {dim} matrix", 24.0 * dim**2, cure="Pass a smaller one.")
    drawn = draw("er_normal", (dim, 1), n_features=dim, density=1.0, seed=seed, layer=name).left()
    return (drawn / drawn.shape[0] ** 0.5).contiguous()
