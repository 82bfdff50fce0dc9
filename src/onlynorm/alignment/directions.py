"""The directions of target space that features miss: what no gamma can make.

Features reach the column space of M, of dimension r, and miss N - r directions beside it. The smaller of the two spaces
is kept, as an orthonormal basis. Where every feature feeds one output only (sparse id_cond), the space falls apart into
one small piece per output, and nothing of the size of M is built.

For a little fewer features than equations, the missed directions come from a Cholesky factor of the Gram matrix, which
two small products make: random vectors minus their part in the column space span what is missed. Many features are
factorized in float32 first, and cleaned in float64. That takes a fortieth of a full singular value decomposition at
50 x 50, and is verified; where it fails (features that depend on each other), the decomposition decides.

Theory: random_features:thm-4.1
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from onlynorm.alignment.mixed import missed_by_single_factor
from onlynorm.errors import ShapeError, ValueRangeError
from onlynorm.modules import as_real
from onlynorm.solvers import KhatriRao
from onlynorm.solvers.memory import memory_limit, need_memory

SAFE = 1e-5
"""A feature of unit length that is closer than this to the span of the others may depend on them."""
_CLEAN = 1e-10  # cosine between a missed direction and a feature up to which it counts as missed
MANY = 1000
"""Features from which on a factor in float32 is tried first; below, nobody waits for either."""


@dataclass(frozen=True, eq=False)
class Directions:
    """An orthonormal basis of the directions that features miss or, if `is_reached`, of those they reach."""

    basis: Float[Tensor, "out inp dims"]
    rank: int
    is_reached: bool

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the targets these directions are of."""
        return self.basis.shape[0], self.basis.shape[1]

    @property
    def n_missed(self) -> int:
        """How many directions the features miss."""
        return self.shape[0] * self.shape[1] - self.rank


@dataclass(frozen=True, eq=False)
class PerOutput:
    """For features that feed one output each: a basis of what each output's features reach of a row."""

    bases: tuple[Float[Tensor, "inp _"], ...]

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the targets these directions are of."""
        return len(self.bases), self.bases[0].shape[0]

    @property
    def rank(self) -> int:
        """How many directions the features reach."""
        return sum(basis.shape[1] for basis in self.bases)

    @property
    def n_missed(self) -> int:
        """How many directions the features miss."""
        return sum(basis.shape[0] - basis.shape[1] for basis in self.bases)

    def costs(self, target: Float[Tensor, "out inp"]) -> Float[Tensor, "out out"]:
        """The energy that output i misses of row t of the target, at [i, t]."""
        target = as_real("target", target, cure="Pass the weight that the features are for.").to(self.bases[0])
        if tuple(target.shape) != self.shape:
            raise ShapeError(
                f"costs needs a target of the shape {self.shape} that the features are for; got {tuple(target.shape)}. "
                "Find the directions of features for this target."
            )
        missed = [(target - (target @ basis) @ basis.mT).square().sum(-1) for basis in self.bases]
        return torch.stack(missed)


def find_directions(left: Float[Tensor, "out feat"], right: Float[Tensor, "feat inp"]) -> Directions | PerOutput:
    """What these features reach and miss, to align any number of targets with them."""
    left, right = as_real("left", left).detach().double(), as_real("right", right).detach().double()
    operator = KhatriRao(left, right)  # checks the shapes
    left, right = operator.dense()
    if not bool(left.isfinite().all() and right.isfinite().all()):
        raise ValueRangeError("align needs finite features; got a NaN or an infinity in left or right. Draw them anew.")
    if bool(((left != 0).sum(0) <= 1).all()):
        return _per_output(left, right)
    n, c = operator.equations, operator.n_features
    need_memory(
        f"align with {n} equations and {c} features",
        8 * (min(n, c) ** 2 + 2 * n * c),
        memory_limit(),
        "Align a smaller layer, or features that feed one output each, as id_cond, which need no matrix.",
    )
    lengths = operator.column_squares().sqrt()
    alive = lengths > 0  # sparse distributions draw dead features
    is_lost = ~lengths.isfinite() | (~alive & left.any(0) & right.any(1))
    if bool(is_lost.any()):
        raise ValueRangeError(
            "align needs features whose lengths float64 can hold; got one too large or too small at feature "
            f"{int(is_lost.nonzero()[0])}. Divide left and right by their largest entries: what they reach stays."
        )
    if not bool(alive.any()):
        return Directions(left.new_zeros(operator.out, operator.inp, 0), 0, is_reached=True)
    # Features of unit length span the same space, and say how near they are to each other.
    unit = KhatriRao((left / lengths)[:, alive], right[alive])
    if 2 * unit.n_features <= unit.equations:
        found = _by_qr(unit)
    elif unit.n_features < unit.equations:
        found = _by_single_factor(unit) or _by_projection(unit)
    else:
        found = _all_of_them(unit)
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
    generator = torch.Generator().manual_seed(0)  # any vectors serve: the space they span does not depend on them
    shape = unit.equations, unit.equations - unit.n_features
    missed = torch.randn(shape, generator=generator, dtype=unit.dtype).to(unit.device)
    for _ in range(2):
        missed = missed - matrix @ torch.cholesky_solve(matrix.mT @ missed, factor)
        missed = torch.linalg.qr(missed)[0]
        if float((matrix.mT @ missed).abs().max()) <= _CLEAN:
            return _directions(unit, missed, unit.n_features, is_reached=False)
    return None


def _all_of_them(unit: KhatriRao) -> Directions | None:
    gram = unit.row_gram()
    scale = gram.diagonal().sqrt()
    factor, failed = torch.linalg.cholesky_ex(gram / torch.outer(scale, scale))
    if int(failed) or not float(factor.diagonal().min()) >= SAFE:  # an equation without features makes a NaN
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
    """The columns of `basis` as matrices, laid out for products with one output after the other."""
    return Directions(basis.contiguous().reshape(unit.out, unit.inp, -1), rank, is_reached)
