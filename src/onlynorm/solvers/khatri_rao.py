"""The linear operator behind every reconstruction: gamma -> left diag(gamma) right.

Column f of the matrix M is the outer product of left[:, f] and right[f, :], so M has out * inp rows and one
column per feature: a Khatri-Rao product. M itself is never needed. With R of shape (out, inp):

    M gamma   = left @ (gamma[:, None] * right)
    M^T R     = ((left^T @ R) * right).sum(1)
    M^T M     = (left^T left) * (right right^T)            elementwise
    M M^T R   = both products in one sweep over the features

which cost the same multiplications as a dense product but run at the speed of matrix-matrix products and keep
n_features * (out + inp) numbers instead of n_features * out * inp.

Two choices make it fast. Both factors lie feature-major in memory, so that a block of features is one piece,
and every intermediate has the width of the *smaller* side, so that elementwise work is negligible.

Theory: giannou2023:thm-1, random_features:thm-2.1
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from onlynorm.errors import ShapeError
from onlynorm.solvers.memory import memory_limit, need_memory

CACHE_BYTES = 8 * 2**20
"""A block of features of about this size stays in the processor's cache between the two products of a sweep."""


PANEL = 384
"""Features per product where a block is cut into panels for the cache of one core."""


@runtime_checkable
class FeatureSource(Protocol):
    """Anything that can hand out a block of features on request, such as `onlynorm.Features`."""

    @property
    def n_features(self) -> int: ...
    def left(self, start: int = 0, stop: int | None = None) -> Tensor: ...
    def right(self, start: int = 0, stop: int | None = None) -> Tensor: ...


@runtime_checkable
class Operator(Protocol):
    """What a solver needs of a system: its sizes, both products, both Gram matrices, and copies to factorize."""

    out: int
    inp: int
    n_features: int
    dtype: torch.dtype
    device: torch.device

    @property
    def equations(self) -> int: ...
    def apply(self, gamma: Tensor) -> Tensor: ...
    def transpose(self, residual: Tensor) -> Tensor: ...
    def row_gram_apply(self, residual: Tensor, *, work: Tensor | None = None) -> Tensor: ...
    def scratch(self) -> Tensor: ...
    def gram(self) -> Tensor: ...
    def row_gram(self) -> Tensor: ...
    def one_norm(self) -> float: ...
    def materialise(self, *, dtype: torch.dtype | None = None) -> Tensor: ...
    def to(self, dtype: torch.dtype) -> Operator: ...


class KhatriRao:
    """The operator gamma -> left diag(gamma) right, for stored features or for features made on request.

    `left` is (out, feat) and `right` is (feat, inp). `KhatriRao.regenerating(source)` stores nothing and asks
    the source for each block of features when it is needed.
    """

    def __init__(
        self, left: Float[Tensor, "out feat"], right: Float[Tensor, "feat inp"], *, block: int | None = None
    ) -> None:
        if left.ndim != 2 or right.ndim != 2 or left.shape[1] != right.shape[0]:
            cure = "Both must be matrices with one feature per column of left and per row of right."
            if left.ndim == 2 and right.ndim == 2 and left.shape[1] == right.shape[1]:
                cure = "If right is stored as (inp, feat), pass right.mT."
            raise ShapeError(
                "KhatriRao needs left (out, feat) and right (feat, inp) with equal feat; "
                f"got {tuple(left.shape)} and {tuple(right.shape)}. {cure}"
            )
        if 0 in left.shape or 0 in right.shape:
            raise ShapeError(
                "KhatriRao needs at least one output, one input and one feature; "
                f"got left {tuple(left.shape)} and right {tuple(right.shape)}. Leave empty layers out of the system."
            )
        if left.dtype != right.dtype or left.device != right.device or not left.dtype.is_floating_point:
            raise ShapeError(
                "KhatriRao needs left and right of one floating dtype on one device; "
                f"got {left.dtype} on {left.device} and {right.dtype} on {right.device}. Cast one with .to(other)."
            )
        self.out, self.n_features = left.shape
        self.inp = right.shape[1]
        self.dtype, self.device = left.dtype, left.device
        self._left: Tensor | None = left.mT.contiguous()
        self._right: Tensor | None = right.contiguous()
        self._source: FeatureSource | None = None
        self.block = self._block_size(block)

    @classmethod
    def regenerating(
        cls, source: FeatureSource, *, dtype: torch.dtype | None = None, block: int | None = None
    ) -> KhatriRao:
        """The operator of features that are made anew, block by block, each time they are needed."""
        self = cls.__new__(cls)
        left, right = source.left(0, 1), source.right(0, 1)
        self.out, self.inp, self.n_features = left.shape[0], right.shape[1], source.n_features
        self.dtype, self.device = dtype or left.dtype, left.device
        self._left = self._right = None
        self._source = source
        self.block = self._block_size(block)
        return self

    def _block_size(self, block: int | None) -> int:
        if block is not None:
            if block < 1:
                raise ShapeError(f"KhatriRao needs block >= 1; got {block}. Leave it out for the default.")
            return min(block, self.n_features)
        per_feature = (self.out + self.inp) * self.dtype.itemsize
        if self._source is None and per_feature * self.n_features <= 2 * CACHE_BYTES:
            return self.n_features
        return max(1, min(self.n_features, CACHE_BYTES // per_feature))

    @property
    def equations(self) -> int:
        """The number of rows of M: one per weight of the target."""
        return self.out * self.inp

    @property
    def excess(self) -> float:
        """Features per equation."""
        return self.n_features / self.equations

    @property
    def is_stored(self) -> bool:
        """Whether the features lie in memory; otherwise each sweep makes them anew."""
        return self._source is None

    @property
    def stored_bytes(self) -> int:
        """Memory of the stored features."""
        return 0 if self._source else self.n_features * (self.out + self.inp) * self.dtype.itemsize

    def blocks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Blocks of features: (which, left as (n, out), right as (n, inp))."""
        for start in range(0, self.n_features, self.block):
            stop = min(start + self.block, self.n_features)
            where = slice(start, stop)
            if self._source is not None:
                left = self._source.left(start, stop).mT.to(self.dtype).contiguous()
                yield where, left, self._source.right(start, stop).to(self.dtype)
            else:
                assert self._left is not None
                assert self._right is not None
                yield where, self._left[where], self._right[where]

    def _thin_blocks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Blocks as (which, thinner factor, wider factor): intermediates take the thinner one's width."""
        for where, left, right in self.blocks():
            yield (where, left, right) if self.out <= self.inp else (where, right, left)

    def _to_thin(self, matrix: Tensor) -> Tensor:
        return matrix if self.out <= self.inp else matrix.mT

    def apply(self, gamma: Float[Tensor, "*batch feat"]) -> Float[Tensor, "*batch out inp"]:
        """M gamma, as the matrix left diag(gamma) right."""
        if gamma.shape[-1:] != (self.n_features,):
            raise ShapeError(
                f"apply needs gamma (..., {self.n_features}); got {tuple(gamma.shape)}. One entry per feature."
            )
        total = gamma.new_zeros(*gamma.shape[:-1], max(self.out, self.inp), min(self.out, self.inp))
        for where, narrow, broad in self._thin_blocks():
            _accumulate(total, broad, gamma[..., where, None] * narrow)
        return self._to_thin(total.mT)

    def transpose(self, residual: Float[Tensor, "*batch out inp"]) -> Float[Tensor, "*batch feat"]:
        """M^T R: how strongly each feature sees the matrix R."""
        self._need_matrix("transpose", residual)
        matrix = self._to_thin(residual).mT
        gamma = residual.new_empty(*residual.shape[:-2], self.n_features)
        for where, narrow, broad in self._thin_blocks():
            gamma[..., where] = ((broad @ matrix) * narrow).sum(-1)
        return gamma

    def row_gram_apply(
        self, residual: Float[Tensor, "*batch out inp"], *, work: Tensor | None = None
    ) -> Float[Tensor, "*batch out inp"]:
        """M M^T R in one sweep: each block of features is read once for both products.

        An iteration passes `work = scratch()` again and again, since fresh memory costs as much as the arithmetic of
        a small block.
        """
        self._need_matrix("row_gram_apply", residual)
        matrix = self._to_thin(residual).mT.contiguous()
        total = torch.zeros_like(matrix)
        for _, narrow, broad in self._thin_blocks():
            product = _product(broad, matrix, None if work is None or matrix.ndim > 2 else work[: len(narrow)])
            product *= narrow
            weight = product.sum(-1, keepdim=True)
            _accumulate(total, broad, torch.mul(narrow, weight, out=product))
        return self._to_thin(total.mT)

    def scratch(self) -> Tensor:
        """A buffer for the intermediate of one block in `row_gram_apply`."""
        return torch.empty(self.block, min(self.out, self.inp), dtype=self.dtype, device=self.device)

    def _need_matrix(self, name: str, residual: Tensor) -> None:
        if residual.shape[-2:] != (self.out, self.inp):
            raise ShapeError(
                f"{name} needs a matrix (..., {self.out}, {self.inp}); got {tuple(residual.shape)}. "
                "A convolution's weight is passed as (out, inp * kernel positions)."
            )

    def column_squares(self) -> Float[Tensor, " feat"]:
        """The squared norm of every column of M: |left[:, f]|^2 |right[f, :]|^2."""
        squares = torch.empty(self.n_features, dtype=self.dtype, device=self.device)
        for where, left, right in self.blocks():
            squares[where] = left.square().sum(-1) * right.square().sum(-1)
        return squares

    def one_norm(self) -> float:
        """The largest column sum of |M|, which factors: |left[:, f]|_1 |right[f, :]|_1."""
        return max(float((left.abs().sum(-1) * right.abs().sum(-1)).max()) for _, left, right in self.blocks())

    def gram(self) -> Float[Tensor, "feat feat"]:
        """M^T M, elementwise from two small products; n_features squared numbers."""
        left, right = self.dense()
        return (left.mT @ left).mul_(right @ right.mT)

    def row_gram(self) -> Float[Tensor, "eq eq"]:
        """M M^T, block row by block row; equations squared numbers, M is not built."""
        total = torch.zeros(self.equations, self.equations, dtype=self.dtype, device=self.device)
        # Wide enough that the update is bound by arithmetic, narrow enough that the live piece of M stays small.
        step = max(256, CACHE_BYTES // (self.equations * self.dtype.itemsize))
        for _, left, right in self.blocks():
            for start in range(0, left.shape[0], step):
                piece = slice(start, start + step)
                columns = (left[piece, :, None] * right[piece, None, :]).flatten(1)
                total.addmm_(columns.mT, columns)
        return total

    def materialise(self, *, dtype: torch.dtype | None = None) -> Float[Tensor, "eq feat"]:
        """M as a dense matrix in column-major order, to check against and to factorize."""
        dtype = dtype or self.dtype
        need_memory(
            f"materialise of {self.equations} x {self.n_features}",
            self.equations * self.n_features * dtype.itemsize,
            memory_limit(),
            "Use apply and transpose, which never build the matrix.",
        )
        by_feature = torch.empty(self.n_features, self.out, self.inp, dtype=dtype, device=self.device)
        for where, left, right in self.blocks():
            torch.mul(left.to(dtype)[:, :, None], right.to(dtype)[:, None, :], out=by_feature[where])
        return by_feature.flatten(1).mT

    def dense(self) -> tuple[Float[Tensor, "out feat"], Float[Tensor, "feat inp"]]:
        """Both factors as whole tensors."""
        if self._left is not None and self._right is not None:
            return self._left.mT, self._right
        pairs = [(left, right) for _, left, right in self.blocks()]
        return torch.cat([left for left, _ in pairs]).mT, torch.cat([right for _, right in pairs])

    def to(self, dtype: torch.dtype) -> KhatriRao:
        """The same operator stored in another precision (stored even if this one regenerates)."""
        if dtype == self.dtype and self.is_stored:
            return self
        left = torch.empty(self.n_features, self.out, dtype=dtype, device=self.device)
        right = torch.empty(self.n_features, self.inp, dtype=dtype, device=self.device)
        for where, left_block, right_block in self.blocks():
            left[where], right[where] = left_block, right_block
        return KhatriRao(left.mT, right)

    def restrict(self, outputs: Bool[Tensor, " out"], inputs: Bool[Tensor, " inp"]) -> KhatriRao:
        """The operator on some outputs and inputs only, stored."""
        left, right = self.dense()
        return KhatriRao(left[outputs], right[:, inputs])

    def scaled(self, left_power: int, right_power: int) -> KhatriRao:
        """The operator of left * 2^left_power and right * 2^right_power, exactly, stored."""
        left, right = self.dense()
        return KhatriRao(times_power(left, left_power), times_power(right, right_power))

    def cast(self, dtype: torch.dtype) -> KhatriRao:
        """The same operator in another precision, without storing what is regenerated."""
        if self._source is None:
            return self.to(dtype)
        return KhatriRao.regenerating(self._source, dtype=dtype, block=self.block)

    def sample(self, step: int) -> tuple[Float[Tensor, "some out"], Float[Tensor, "some inp"]]:
        """Every step-th feature of both factors, in float32, to look at their statistics."""
        if self._left is not None and self._right is not None:
            return self._left[::step].float(), self._right[::step].float()
        # A regenerated source is random and exchangeable: its first features serve as well and cost one block.
        count = -(-self.n_features // step)
        assert self._source is not None
        return self._source.left(0, count).mT.float(), self._source.right(0, count).float()

    def __repr__(self) -> str:
        kind = "stored" if self.is_stored else "regenerated"
        return (
            f"KhatriRao({self.out} x {self.inp} = {self.equations} equations, {self.n_features} features, "
            f"excess {self.excess:.3g}, {self.dtype}, {kind} in blocks of {self.block})"
        )


def _product(broad: Tensor, matrix: Tensor, out: Tensor | None) -> Tensor:
    """broad @ matrix for a thin matrix; on a CPU as many small products, each in the cache of one core."""
    if out is None:
        return broad @ matrix
    rows = len(broad) // PANEL * PANEL if broad.device.type == "cpu" else 0
    if rows >= 4 * PANEL:
        panels = broad[:rows].view(rows // PANEL, PANEL, -1)
        torch.bmm(panels, matrix.expand(len(panels), *matrix.shape), out=out[:rows].view(len(panels), PANEL, -1))
    else:
        rows = 0
    if rows < len(broad):
        torch.mm(broad[rows:], matrix, out=out[rows:])
    return out


def _accumulate(total: Tensor, broad: Tensor, scaled: Tensor) -> None:
    """total += broad^T scaled; with the wide side first the product runs at full speed for thin results."""
    if total.ndim == 2:
        total.addmm_(broad.mT, scaled)
    else:
        total += broad.mT @ scaled


def times_power(values: Tensor, power: int) -> Tensor:
    """values * 2^power in steps that neither overflow nor underflow on the way."""
    while power:
        step = max(-1000, min(1000, power))
        values = values * 2.0**step
        power -= step
    return values
