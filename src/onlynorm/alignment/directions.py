"""The directions of target space that features cannot represent with any gamma (missed directions).

Features reach the column space of M, of dimension r, and miss its orthogonal complement of dimension N - r. The smaller
of the two spaces is stored, as an orthonormal basis. If every feature has one output only (sparse id_cond), the space
decomposes into one small space per output, and no matrix of the size of M is needed.

For slightly fewer features than equations, the missed directions follow from a Cholesky factor of the Gram matrix,
which is a product of two small matrices: random vectors minus their projection onto the column space span the missed
directions. With many features the factorization is done in float32 first and refined in float64. At 50 x 50 this takes
a fortieth of the time of a singular value decomposition. The result is verified; if it fails (dependent features), the
singular value decomposition is used.

Theory: random_features:thm-4.1

Factorization in float32 with refinement in float64: most of the time is one Cholesky factorization of the Gram matrix,
which takes half the time in float32. Additional random features are eliminated with it; their remainders span the
missed directions, up to a component of about 1e-3 in the column space. That component is computed in float64 by
products with the features, and removed by solving with the same factor. One round leaves about 1e-4 of it. Finally,
random directions of the result are compared with all features. At 50 x 50 this was 2.4 times as fast as float64 only.

Theory: random_features:thm-4.1
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from onlynorm.display import Result
from onlynorm.errors import ShapeError, ValueRangeError
from onlynorm.memory import memory_limit, need_memory
from onlynorm.solvers import KhatriRao
from onlynorm.validate import as_real

CLEAN = 1e-9
"""Largest cosine between a missed direction and a feature.

At 50 x 50 the error of the missed energy was then at most 1e-10 of the energy of the target.
"""
N_SPARE = 60
"""Random features beyond the number of directions, so that they span all of them reliably."""
MAX_ROUNDS, N_TRIED = 3, 4
_BLOCK, _PIECE = 128, 128  # features eliminated together, and features whose outer products are in memory at a time
_SAFE = 1e-2  # a unit feature closer than this to the span of the others is lost in float32 rounding


def missed_by_single_factor(unit: KhatriRao) -> Float[Tensor, "eq dims"] | None:
    """An orthonormal basis of the directions that these unit features miss; None if float32 is not accurate enough."""
    n, n_missed = unit.n_features, unit.equations - unit.n_features
    left, right = unit.dense()[0].mT, unit.dense()[1]
    generator = torch.Generator().manual_seed(0)  # the spanned space does not depend on these vectors

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=unit.dtype).to(unit.device)

    n_more = n_missed + N_SPARE
    lefts = torch.cat([left, random(n_more, unit.out) / math.sqrt(unit.out)]).float()
    rights = torch.cat([right, random(n_more, unit.inp) / math.sqrt(unit.inp)]).float()
    factor = _factorize(lefts, rights, n)
    if factor is None:
        return None
    lower, single = factor[:n], (lefts[:n], rights[:n])
    missed = _remainder(factor, lefts, rights, n_missed).to(unit.dtype)
    for _ in range(MAX_ROUNDS):
        seen = _compare(missed, left, right)
        scale = seen.abs().max().clamp_min(torch.finfo(seen.dtype).tiny)
        gamma = torch.linalg.solve_triangular(lower, (seen / scale).float().mT, upper=False)
        gamma = torch.linalg.solve_triangular(lower.mT, gamma, upper=True).mT
        missed = _orthonormal(missed - scale * _combine(gamma, *single))
        tried = torch.nn.functional.normalize(random(N_TRIED, n_missed) @ missed, dim=-1)
        if float(unit.transpose(tried.reshape(N_TRIED, unit.out, unit.inp)).abs().max()) <= CLEAN:
            return missed.mT
    return None


def _factorize(left: Tensor, right: Tensor, n: int) -> Tensor | None:
    """The first n columns of the Cholesky factor of the Gram matrix of these features, one per row.

    Computed by block columns, with one matrix product each.
    """
    factor = left.new_empty(len(left), n)
    space, eye = left.new_empty(len(left) * _BLOCK), torch.eye(_BLOCK, dtype=left.dtype, device=left.device)
    for start in range(0, n, _BLOCK):
        stop = min(start + _BLOCK, n)
        width, panel = stop - start, factor[start:, start:stop]
        other = space[: panel.numel()].view(panel.shape)
        torch.mm(left[start:], left[start:stop].mT, out=panel)
        panel *= torch.mm(right[start:], right[start:stop].mT, out=other)
        panel.addmm_(factor[start:, :start], factor[start:stop, :start].mT, alpha=-1.0)
        corner, failed = torch.linalg.cholesky_ex(panel[:width])
        if int(failed) or float(corner.diagonal().min()) < _SAFE:
            return None
        inverse = torch.linalg.solve_triangular(corner, eye[:width, :width], upper=False)
        torch.mm(panel, inverse.mT, out=other)
        panel.copy_(other)
        panel[:width] = corner
    return factor


def _remainder(factor: Tensor, left: Tensor, right: Tensor, n_missed: int) -> Float[Tensor, "dims eq"]:
    """The leading directions of the remaining features orthogonal to the first n features."""
    n = factor.shape[1]
    inside, lower = factor[n:], factor[:n]
    more_left, more_right = left[n:], right[n:]
    outside = (more_left @ more_left.mT) * (more_right @ more_right.mT) - inside @ inside.mT
    mix = torch.linalg.eigh(outside)[1][:, -n_missed:].mT
    gamma = torch.linalg.solve_triangular(lower.mT, (mix @ inside).mT, upper=True).mT
    missed = _combine(mix, more_left, more_right) - _combine(gamma, left[:n], right[:n])
    return _orthonormal(missed)


def _orthonormal(rows: Float[Tensor, "dims eq"]) -> Float[Tensor, "dims eq"]:
    """An orthonormal basis of the span of nearly orthogonal rows, by the Cholesky factor of their Gram matrix."""
    return torch.linalg.solve_triangular(torch.linalg.cholesky(rows @ rows.mT), rows, upper=False).contiguous()


def _pieces(left: Tensor, right: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yields the outer products of chunks of features, in a reused buffer."""
    space = left.new_empty(_PIECE, left.shape[1], right.shape[1])
    for start in range(0, len(left), _PIECE):
        where = slice(start, min(start + _PIECE, len(left)))
        piece = space[: where.stop - start]
        yield where, torch.mul(left[where, :, None], right[where, None, :], out=piece).flatten(1)


def _combine(gamma: Float[Tensor, "dims feat"], left: Tensor, right: Tensor) -> Float[Tensor, "dims eq"]:
    """M gamma for many gammas."""
    total = gamma.new_zeros(len(gamma), left.shape[1] * right.shape[1])
    for where, columns in _pieces(left, right):
        total.addmm_(gamma[:, where], columns)
    return total


def _compare(matrices: Float[Tensor, "dims eq"], left: Tensor, right: Tensor) -> Float[Tensor, "dims feat"]:
    """M^T R for many R."""
    seen = matrices.new_empty(len(matrices), len(left))
    for where, columns in _pieces(left, right):
        seen[:, where] = matrices @ columns.mT
    return seen


SAFE = 1e-5
"""A unit feature closer than this to the span of the others may depend on them."""
_CLEAN = 1e-10  # largest cosine between a missed direction and a feature
MANY = 1000
"""Number of features from which a float32 factorization is tried first."""


@dataclass(frozen=True, eq=False)
class Directions(Result):
    """An orthonormal basis of the directions that features miss or, if `is_reached`, of those they reach."""

    basis: Float[Tensor, "out inp dims"]
    rank: int
    is_reached: bool

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the targets."""
        return self.basis.shape[0], self.basis.shape[1]

    @property
    def n_missed(self) -> int:
        """The number of missed directions."""
        return self.shape[0] * self.shape[1] - self.rank


@dataclass(frozen=True, eq=False)
class PerOutput(Result):
    """For features with one output each: a basis of the reached space of a row, per output."""

    bases: tuple[Float[Tensor, "inp _"], ...]

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the targets."""
        return len(self.bases), self.bases[0].shape[0]

    @property
    def rank(self) -> int:
        """The number of reached directions."""
        return sum(basis.shape[1] for basis in self.bases)

    @property
    def n_missed(self) -> int:
        """The number of missed directions."""
        return sum(basis.shape[0] - basis.shape[1] for basis in self.bases)

    def costs(self, target: Float[Tensor, "out inp"]) -> Float[Tensor, "out out"]:
        """The missed energy of row t of the target at output i, as [i, t]."""
        target = as_real("target", target, cure="Pass the target weight of the features.").to(self.bases[0])
        if tuple(target.shape) != self.shape:
            raise ShapeError(
                f"costs needs a target of the shape {self.shape} of the features; got {tuple(target.shape)}. Call "
                "find_directions with features for this target."
            )
        missed = [(target - (target @ basis) @ basis.mT).square().sum(-1) for basis in self.bases]
        return torch.stack(missed)


def find_directions(left: Float[Tensor, "out feat"], right: Float[Tensor, "feat inp"]) -> Directions | PerOutput:
    """The reached or missed directions of these features, for `align_within`.

    Examples:
        >>> import onlynorm as on
        >>> from onlynorm.alignment import find_directions
        >>> features = on.draw("he_normal", (6, 8), n_features=40)  # 48 equations
        >>> find_directions(features.left(), features.right()).n_missed
        8
    """
    left, right = as_real("left", left).detach().double(), as_real("right", right).detach().double()
    operator = KhatriRao(left, right)  # checks the shapes
    left, right = operator.dense()
    if not bool(left.isfinite().all() and right.isfinite().all()):
        raise ValueRangeError("align needs finite features; got NaN or infinity in left or right. Draw others.")
    if bool(((left != 0).sum(0) <= 1).all()):
        return _per_output(left, right)
    n, c = operator.equations, operator.n_features
    need_memory(
        f"align with {n} equations and {c} features",
        8 * (min(n, c) ** 2 + 2 * n * c),
        memory_limit(),
        "Align a smaller layer, or use features with one output each, such as id_cond.",
    )
    lengths = operator.column_squares().sqrt()
    alive = lengths > 0  # sparse distributions draw dead features
    is_lost = ~lengths.isfinite() | (~alive & left.any(0) & right.any(1))
    if bool(is_lost.any()):
        raise ValueRangeError(
            "align needs features whose norms are in the range of float64; got one too large or too small at feature "
            f"{int(is_lost.nonzero()[0])}. Divide left and right by their largest entries."
        )
    if not bool(alive.any()):
        return Directions(left.new_zeros(operator.out, operator.inp, 0), 0, is_reached=True)
    # Unit features span the same space, and make distances between them comparable.
    unit = KhatriRao((left / lengths)[:, alive], right[alive])
    if 2 * unit.n_features <= unit.equations:
        found = _by_qr(unit)
    elif unit.n_features < unit.equations:
        found = _by_single_factor(unit) or _by_projection(unit)
    else:
        found = _by_row_gram(unit)
    return found or _by_svd(unit)


def _per_output(left: Tensor, right: Tensor) -> PerOutput:
    bases = []
    for row in left:
        columns = right[row != 0].mT
        U, S, _ = torch.linalg.svd(columns, full_matrices=False)
        floor = max(columns.shape) * torch.finfo(S.dtype).eps * (S[0] if len(S) else 0.0)
        bases.append(U[:, : int((floor < S).sum())])
    return PerOutput(tuple(bases))


def _by_qr(unit: KhatriRao) -> Directions | None:
    Q, R = torch.linalg.qr(unit.materialise())
    if float(R.diagonal().abs().min()) < SAFE:
        return None
    return _directions(unit, Q, unit.n_features, is_reached=True)


def _by_single_factor(unit: KhatriRao) -> Directions | None:
    missed = missed_by_single_factor(unit) if unit.n_features >= MANY else None
    return None if missed is None else _directions(unit, missed, unit.n_features, is_reached=False)


def _by_projection(unit: KhatriRao) -> Directions | None:
    factor, failed = torch.linalg.cholesky_ex(unit.gram())
    if int(failed) or float(factor.diagonal().min()) < SAFE:
        return None
    matrix = unit.materialise()
    generator = torch.Generator().manual_seed(0)  # the spanned space does not depend on these vectors
    shape = unit.equations, unit.equations - unit.n_features
    missed = torch.randn(shape, generator=generator, dtype=unit.dtype).to(unit.device)
    for _ in range(2):
        missed = missed - matrix @ torch.cholesky_solve(matrix.mT @ missed, factor)
        missed = torch.linalg.qr(missed)[0]
        if float((matrix.mT @ missed).abs().max()) <= _CLEAN:
            return _directions(unit, missed, unit.n_features, is_reached=False)
    return None


def _by_row_gram(unit: KhatriRao) -> Directions | None:
    gram = unit.row_gram()
    scale = gram.diagonal().sqrt()
    factor, failed = torch.linalg.cholesky_ex(gram / torch.outer(scale, scale))
    if int(failed) or not float(factor.diagonal().min()) >= SAFE:  # NaN if an equation has no features
        return None
    nothing = torch.zeros(unit.out, unit.inp, 0, dtype=unit.dtype, device=unit.device)
    return Directions(nothing, unit.equations, is_reached=False)


def _by_svd(unit: KhatriRao) -> Directions:
    U, S, _ = torch.linalg.svd(unit.materialise())
    rank = int((max(unit.equations, unit.n_features) * torch.finfo(S.dtype).eps * S[0] < S).sum())
    is_reached = 2 * rank <= unit.equations
    basis = U[:, :rank] if is_reached else U[:, rank:]
    return _directions(unit, basis, rank, is_reached=is_reached)


def _directions(unit: KhatriRao, basis: Tensor, rank: int, *, is_reached: bool) -> Directions:
    """The columns of `basis` as matrices (out, inp, dims)."""
    return Directions(basis.contiguous().reshape(unit.out, unit.inp, -1), rank, is_reached)
