"""The linear operator of every reconstruction: gamma -> left diag(gamma) right.

Column f of the matrix M is the outer product of left[:, f] and right[f, :], so M has out * inp rows and one
column per feature: a Khatri-Rao product. M itself is never needed. With R of shape (out, inp):

    M gamma   = left @ (gamma[:, None] * right)
    M^T R     = ((left^T @ R) * right).sum(1)
    M^T M     = (left^T left) * (right right^T)            elementwise
    M M^T R   = both products in one sweep over the features
    M M^T     = sum over features of (left_f left_f^T) (x) (right_f right_f^T)

which cost the same multiplications as a dense product but run at the speed of matrix-matrix products and store
n_features * (out + inp) entries instead of n_features * out * inp.

Three choices make it fast. The wider factor is stored feature-major and the thinner one transposed: the opposite layout
takes up to nine times as long for products with few rows. Every intermediate has the width of the *thinner* side, so
that elementwise work is negligible. M M^T is symmetric in its outputs and in its inputs separately and is computed from
a quarter of its entries.

Theory: giannou2023:thm-1, random_features:thm-2.1
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from onlynorm.errors import ShapeError, shown
from onlynorm.memory import aligned
from onlynorm.validate import (
    as_real,
    as_tensor,
    need_flag,
    need_float_dtype,
    need_free_memory,
    need_instance,
    need_integer,
)

CACHE_BYTES = 4 * 2**20
"""A block of features of about this size stays in the processor's cache between the two products of a sweep."""
_MOST_POWER = 10_000
THIN = 8
"""min(outputs, inputs) from which M M^T is one product over pairs of both sides; below, one product per pair."""
FEW = 24
"""Number of entries up to which all pairs are gathered at once; above, they are multiplied row by row."""
COLUMNS = 96
"""Block size of symmetric products: wide enough for full speed, narrow enough to skip nearly half of the product."""
SHORTEST = 2.0**-900
"""Lower limit of the length of a feature relative to the longest: a larger gamma would overflow float64."""
UNEQUAL = 2.0**20
"""Rows of the wider factor are normalized too if their lengths differ by more: products would overflow float32."""


@runtime_checkable
class FeatureSource(Protocol):
    """An object that returns blocks of features, such as `onlynorm.features.Features`."""

    @property
    def n_features(self) -> int: ...
    def left(self, start: int = 0, stop: int | None = None) -> Tensor: ...
    def right(self, start: int = 0, stop: int | None = None) -> Tensor: ...


@runtime_checkable
class Operator(Protocol):
    """Interface of a linear system: sizes, products with M and M^T, both Gram matrices, and the dense matrix."""

    out: int
    inp: int
    n_features: int
    dtype: torch.dtype
    device: torch.device

    @property
    def equations(self) -> int: ...
    def apply(self, gamma: Tensor) -> Tensor: ...
    def transpose(self, residual: Tensor) -> Tensor: ...
    def gram_apply(self, gamma: Tensor, *, work: Tensor | None = None) -> Tensor: ...
    def row_gram_apply(self, residual: Tensor, *, work: Tensor | None = None) -> Tensor: ...
    def scratch(self) -> Tensor: ...
    def gram(self, *, is_whole: bool = True) -> Tensor: ...
    def row_gram(self) -> Tensor: ...
    def one_norm(self) -> float: ...
    def materialise(self, *, dtype: torch.dtype | None = None) -> Tensor: ...
    def to(self, dtype: torch.dtype) -> Operator: ...


class KhatriRao:
    """The operator gamma -> left diag(gamma) right, for stored or regenerated features.

    `left` is (out, feat) and `right` is (feat, inp). `KhatriRao.regenerating(source)` stores no features and generates
    each block when it is needed.
    """

    def __init__(
        self, left: Float[Tensor, "out feat"], right: Float[Tensor, "feat inp"], *, block: int | None = None
    ) -> None:
        left, right = as_tensor("left", left), as_tensor("right", right)
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
                f"got left {tuple(left.shape)} and right {tuple(right.shape)}. Remove empty layers from the system."
            )
        if left.dtype != right.dtype or left.device != right.device or not left.dtype.is_floating_point:
            raise ShapeError(
                "KhatriRao needs left and right of one floating dtype on one device; "
                f"got {left.dtype} on {left.device} and {right.dtype} on {right.device}. Cast one with .to(other)."
            )
        self.out, self.n_features = left.shape
        self.inp = right.shape[1]
        self.dtype, self.device = left.dtype, left.device
        # Both are indexed by feature first; in memory the thinner one is transposed.
        if self.out <= self.inp:
            left, right = aligned(left.contiguous()).mT, aligned(right.contiguous())
        else:
            left, right = aligned(left.mT.contiguous()), aligned(right.mT.contiguous()).mT
        self._left: Tensor | None = left
        self._right: Tensor | None = right
        self._source: FeatureSource | None = None
        self._lengths: Tensor | None = None
        self._buffers: tuple[Tensor, Tensor] | None = None
        self.block = self._block_size(block)

    @classmethod
    def regenerating(
        cls, source: FeatureSource, *, dtype: torch.dtype | None = None, block: int | None = None
    ) -> KhatriRao:
        """The operator of features that are generated block by block each time they are needed."""
        need_instance("KhatriRao", source, FeatureSource, cure="Pass the result of draw.")
        self = cls.__new__(cls)
        left, right = source.left(0, 1), source.right(0, 1)
        self.out, self.inp, self.n_features = left.shape[0], right.shape[1], source.n_features
        self.dtype, self.device = left.dtype if dtype is None else need_float_dtype("dtype", dtype), left.device
        self._left = self._right = self._lengths = self._buffers = None
        self._source = source
        self.block = self._block_size(block)
        return self

    def _block_size(self, block: int | None) -> int:
        if block is not None:
            return min(need_integer("block", block, low=1, cure="Omit it for the default."), self.n_features)
        per_feature = (self.out + self.inp) * self.dtype.itemsize
        return cached_features(self.n_features, per_feature, is_stored=self._source is None)

    @property
    def equations(self) -> int:
        """Number of rows of M, one per weight of the target."""
        return self.out * self.inp

    @property
    def excess(self) -> float:
        """Features per equation."""
        return self.n_features / self.equations

    @property
    def is_stored(self) -> bool:
        """Whether the features are stored; otherwise each sweep generates them."""
        return self._source is None

    @property
    def stored_bytes(self) -> int:
        """Size in bytes of the stored features."""
        return 0 if self._source else self.n_features * (self.out + self.inp) * self.dtype.itemsize

    def blocks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Blocks of features: (slice, left as (n, out), right as (n, inp))."""
        for start in range(0, self.n_features, self.block):
            stop = min(start + self.block, self.n_features)
            where = slice(start, stop)
            if self._source is not None:
                left = self._source.left(start, stop).to(self.dtype).mT
                right = self._source.right(start, stop).to(self.dtype)
                if self._lengths is not None:
                    left = left / self._lengths[where, None].to(self.dtype)
                if self.out > self.inp:
                    left, right = left.contiguous(), right.mT.contiguous().mT
                yield where, left, right
            else:
                assert self._left is not None
                assert self._right is not None
                left, right = self._left[where], self._right[where]
                if self._buffers is not None:  # reused for all blocks, to avoid memory fragmentation
                    left, right = (
                        buffer[: len(side)].copy_(side)
                        for buffer, side in zip(self._buffers, (left, right), strict=True)
                    )
                yield where, left, right

    def _thin_blocks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Blocks as (slice, thinner factor (thin, n), wider factor (n, wide))."""
        for where, left, right in self.blocks():
            yield (where, left.mT, right) if self.out <= self.inp else (where, right.mT, left)

    def _to_thin(self, matrix: Tensor) -> Tensor:
        """(out, inp) as (thin, wide), and back."""
        return matrix if self.out <= self.inp else matrix.mT

    def apply(self, gamma: Float[Tensor, "*batch feat"]) -> Float[Tensor, "*batch out inp"]:
        """M gamma, as the matrix left diag(gamma) right."""
        gamma = as_real("gamma", gamma, cure="Pass one entry per feature.").to(self.dtype)
        if gamma.shape[-1:] != (self.n_features,):
            raise ShapeError(
                f"apply needs gamma (..., {self.n_features}); got {tuple(gamma.shape)}. One entry per feature."
            )
        total = gamma.new_zeros(*gamma.shape[:-1], *sorted((self.out, self.inp)))
        for where, narrow, broad in self._thin_blocks():
            _accumulate(total, narrow * gamma[..., None, where], broad)
        return self._to_thin(total)

    def transpose(self, residual: Float[Tensor, "*batch out inp"]) -> Float[Tensor, "*batch feat"]:
        """M^T R: the inner product of R with each feature."""
        residual = self._need_matrix("transpose", residual)
        matrix = self._to_thin(residual)
        gamma = residual.new_empty(*residual.shape[:-2], self.n_features)
        for where, narrow, broad in self._thin_blocks():
            gamma[..., where] = ((matrix @ broad.mT) * narrow).sum(-2)
        return gamma

    def gram_apply(
        self, gamma: Float[Tensor, "*batch feat"], *, work: Tensor | None = None
    ) -> Float[Tensor, "*batch feat"]:
        """M^T M gamma in two sweeps. `work` as in `row_gram_apply`."""
        gamma = as_real("gamma", gamma, cure="Pass one entry per feature.").to(self.dtype)
        if work is None or gamma.ndim > 1:
            return self.transpose(self.apply(gamma))
        self._need_scratch(work)
        if len(gamma) != self.n_features:
            raise ShapeError(f"gram_apply needs gamma ({self.n_features},); got {tuple(gamma.shape)}.")
        gamma = gamma.detach()  # products into a buffer have no gradient
        matrix = gamma.new_zeros(sorted((self.out, self.inp)))
        for where, narrow, broad in self._thin_blocks():
            _accumulate(matrix, torch.mul(narrow, gamma[where], out=_part(work, narrow)), broad)
        seen = torch.empty_like(gamma)
        for where, narrow, broad in self._thin_blocks():
            seen[where] = torch.mm(matrix, broad.mT, out=_part(work, narrow)).mul_(narrow).sum(-2)
        return seen

    def row_gram_apply(
        self, residual: Float[Tensor, "*batch out inp"], *, work: Tensor | None = None
    ) -> Float[Tensor, "*batch out inp"]:
        """M M^T R in one sweep: each block of features is read once for both products.

        Iterations should reuse one buffer `work = scratch()`: allocating memory takes as long as the arithmetic of a
        small block.
        """
        residual = self._need_matrix("row_gram_apply", residual).detach()  # products into a buffer have no gradient
        if work is not None:
            self._need_scratch(work)
        matrix = self._to_thin(residual).contiguous()
        total = torch.zeros_like(matrix)
        for _, narrow, broad in self._thin_blocks():
            if work is None or matrix.ndim > 2:
                seen = matrix @ broad.mT
            else:
                seen = torch.mm(matrix, broad.mT, out=_part(work, narrow))
            seen *= narrow
            _accumulate(total, torch.mul(narrow, seen.sum(-2, keepdim=True), out=seen), broad)
        return self._to_thin(total)

    def scratch(self) -> Tensor:
        """A buffer for the intermediate of one block in `gram_apply` and `row_gram_apply`."""
        return torch.empty(self.block, min(self.out, self.inp), dtype=self.dtype, device=self.device)

    def _need_matrix(self, name: str, residual: Tensor) -> Tensor:
        residual = as_real(name, residual, cure=f"Pass a matrix ({self.out}, {self.inp}).").to(self.dtype)
        if residual.shape[-2:] != (self.out, self.inp):
            raise ShapeError(
                f"{name} needs a matrix (..., {self.out}, {self.inp}); got {tuple(residual.shape)}. "
                "Reshape the weight of a convolution to (out, inp * kernel positions)."
            )
        return residual

    def _need_scratch(self, work: Tensor) -> None:
        needed = (self.block, min(self.out, self.inp))
        is_dense = isinstance(work, Tensor) and not work.is_nested
        if not is_dense or tuple(work.shape) != needed or work.dtype != self.dtype or work.is_sparse:
            raise ShapeError(f"work needs a {self.dtype} buffer {needed}; got {shown(work)}. Pass scratch().")

    def column_squares(self) -> Float[Tensor, " feat"]:
        """Squared norm of every column of M: |left[:, f]|^2 |right[f, :]|^2."""
        squares = torch.empty(self.n_features, dtype=self.dtype, device=self.device)
        for where, left, right in self.blocks():
            squares[where] = left.square().sum(-1) * right.square().sum(-1)
        return squares

    def one_norm(self) -> float:
        """Maximum column sum of |M|: max over f of |left[:, f]|_1 |right[f, :]|_1."""
        return max(float((left.abs().sum(-1) * right.abs().sum(-1)).max()) for _, left, right in self.blocks())

    def gram(self, *, is_whole: bool = True) -> Float[Tensor, "feat feat"]:
        """M^T M of shape (feat, feat), the elementwise product of two symmetric products.

        With `is_whole=False` entries below the diagonal may be undefined: a Cholesky factorization does not read them.
        """
        need_flag("is_whole", is_whole)
        left, right = self.dense()
        if min(self.out, self.inp) == 1:
            return _self_product(left.mT * right, is_whole=is_whole)
        return _self_product(left.mT, right, is_whole=is_whole)

    def row_gram(self) -> Float[Tensor, "eq eq"]:
        """M M^T of shape (equations, equations), computed without M."""
        thin, wide = sorted((self.out, self.inp))
        whole = self._row_gram_by_pairs() if thin < THIN else self._row_gram_distinct()
        if self.out > self.inp:
            whole = whole.permute(1, 0, 3, 2)
        return whole.reshape(thin * wide, thin * wide)

    def _row_gram_by_pairs(self) -> Float[Tensor, "thin wide thin wide"]:
        """One symmetric product of the wide factor with itself for each pair of thin indices."""
        thin, wide = sorted((self.out, self.inp))
        total = torch.zeros(thin, wide, thin, wide, dtype=self.dtype, device=self.device)
        step = max(COLUMNS, -(-wide // 8))
        for _, narrow, broad in self._thin_blocks():
            for i in range(thin):
                for j in range(i + 1):
                    scaled = broad * (narrow[i] * narrow[j])[:, None]
                    for start in range(0, wide, step):  # the lower triangle, in block columns
                        total[i, start:, j, start : start + step].addmm_(
                            scaled[:, start:].mT, broad[:, start : start + step]
                        )
        for i in range(thin):
            for j in range(i + 1):
                block = total[i, :, j]
                for start in range(0, wide, step):
                    stop = start + step
                    block[start:stop, stop:] = block[stop:, start:stop].mT
                total[j, :, i] = block
        return total

    def _row_gram_distinct(self) -> Float[Tensor, "thin wide thin wide"]:
        """One product over all pairs of thin and of wide indices, each pair once."""
        thin, wide = sorted((self.out, self.inp))
        n_pairs = thin * (thin + 1) // 2, wide * (wide + 1) // 2
        total = torch.zeros(n_pairs, dtype=self.dtype, device=self.device)
        step = max(64, CACHE_BYTES // (2 * n_pairs[1] * self.dtype.itemsize))
        for _, narrow, broad in self._thin_blocks():
            for start in range(0, len(broad), step):
                piece = slice(start, start + step)
                total.addmm_(_pairs(narrow[:, piece].mT).mT, _pairs(broad[piece]))
        blocks = total.index_select(1, _pair_indices(wide, self.device)).view(-1, wide, wide)
        whole = blocks.index_select(0, _pair_indices(thin, self.device))
        return whole.view(thin, thin, wide, wide).transpose(1, 2)

    def materialise(self, *, dtype: torch.dtype | None = None) -> Float[Tensor, "eq feat"]:
        """M as a dense matrix in column-major order."""
        dtype = self.dtype if dtype is None else need_float_dtype("dtype", dtype)
        need_free_memory(
            f"materialise of {self.equations} x {self.n_features}",
            self.equations * self.n_features * dtype.itemsize,
            cure="Use apply and transpose, which do not build the matrix.",
        )
        by_feature = torch.empty(self.n_features, self.out, self.inp, dtype=dtype, device=self.device)
        for where, left, right in self.blocks():
            torch.mul(left.to(dtype)[:, :, None], right.to(dtype)[:, None, :], out=by_feature[where])
        return by_feature.flatten(1).mT

    def dense(self) -> tuple[Float[Tensor, "out feat"], Float[Tensor, "feat inp"]]:
        """Both factors as dense tensors."""
        if self._left is not None and self._right is not None:
            return self._left.to(self.dtype).mT, self._right.to(self.dtype)
        pairs = [(left, right) for _, left, right in self.blocks()]
        return torch.cat([left for left, _ in pairs]).mT, torch.cat([right for _, right in pairs])

    def to(self, dtype: torch.dtype) -> KhatriRao:
        """The operator in another dtype, with stored features."""
        if need_float_dtype("dtype", dtype) == self.dtype and self.is_stored:
            return self
        left, right = self.empty_factors(dtype)
        for where, left_block, right_block in self.blocks():
            left[where], right[where] = left_block, right_block
        return KhatriRao(left.mT, right)

    def empty_factors(self, dtype: torch.dtype) -> tuple[Float[Tensor, "feat out"], Float[Tensor, "feat inp"]]:
        """Uninitialized factors in the internal layout, which the constructor accepts without a copy."""
        return _empty_factors(self.out, self.inp, self.n_features, need_float_dtype("dtype", dtype), self.device)

    def restrict(
        self,
        outputs: Bool[Tensor, " out"] | None = None,
        inputs: Bool[Tensor, " inp"] | None = None,
        features: Bool[Tensor, " feat"] | None = None,
    ) -> KhatriRao:
        """The operator restricted to subsets of outputs, inputs and features, stored; None selects all."""
        left, right = self.dense()
        if outputs is not None:
            left = left[_need_mask("outputs", outputs, self.out)]
        if inputs is not None:
            right = right[:, _need_mask("inputs", inputs, self.inp)]
        if features is not None:
            features = _need_mask("features", features, self.n_features)
            left, right = left[:, features], right[features]
        return KhatriRao(left, right)

    def copied(self) -> KhatriRao:
        """The operator of copies of both factors."""
        left, right = self.dense()
        return KhatriRao(left.clone(), right.clone())

    def scaled(self, left_power: int, right_power: int) -> KhatriRao:
        """The stored operator of left * 2^left_power and right * 2^right_power, exact."""
        powers = [
            need_integer(f"{side}_power", power, low=-_MOST_POWER, high=_MOST_POWER, cure="Pass a power of two.")
            for side, power in (("left", left_power), ("right", right_power))
        ]
        left, right = self.dense()
        return KhatriRao(times_power(left, powers[0]), times_power(right, powers[1]))

    def unit(self) -> tuple[KhatriRao, Float[Tensor, " feat"]]:
        """The operator with columns of unit length, and the lengths: gamma of this operator = gamma of that / lengths.

        Zero columns get length one. Only the thinner factor is copied, unless the lengths of the wider one differ
        strongly; regenerated features are divided block by block.
        """
        pairs = [(_row_lengths(left), _row_lengths(right)) for _, left, right in self.blocks()]
        sides = pairs[0] if len(pairs) == 1 else tuple(torch.cat(blocks) for blocks in zip(*pairs, strict=True))
        shortest = tuple(float(side.min()) for side in sides)
        lengths = sides[0] * sides[1]
        lengths = lengths.clamp_min(SHORTEST * float(lengths.max()))
        if min(shortest) == 0.0:
            lengths = lengths.masked_fill((sides[0] == 0) | (sides[1] == 0), 1.0)
        other = KhatriRao.__new__(KhatriRao)
        other.__dict__.update(self.__dict__)
        if self._left is None or self._right is None:
            other._lengths = lengths if self._lengths is None else lengths * self._lengths
            return other, lengths
        is_right_wider = self.out <= self.inp
        wide, narrowest = sides[is_right_wider], shortest[is_right_wider]
        if narrowest == 0.0:
            wide = torch.where(wide > 0, wide, 1.0)
            narrowest = float(wide.min())
        is_unequal = float(wide.max()) > UNEQUAL * narrowest
        thin_divisor = (lengths / wide if is_unequal else lengths)[:, None]
        if is_right_wider:
            other._left = self._left / thin_divisor
            other._right = self._right / wide[:, None] if is_unequal else self._right
        else:
            other._left = self._left / wide[:, None] if is_unequal else self._left
            other._right = self._right / thin_divisor
        return other, lengths

    def cast(self, dtype: torch.dtype) -> KhatriRao:
        """The operator in another dtype; regenerated features are not stored."""
        if self._source is None or not isinstance(dtype, torch.dtype):
            return self.to(dtype)
        other = KhatriRao.regenerating(self._source, dtype=dtype, block=self.block)
        other._lengths = self._lengths
        return other

    def borrow(self, dtype: torch.dtype) -> KhatriRao:
        """The operator in another dtype without a copy: each sweep converts the features block by block."""
        if self._source is not None or need_float_dtype("dtype", dtype) == self.dtype:
            return self.cast(dtype)
        other = KhatriRao.__new__(KhatriRao)
        other.__dict__.update(self.__dict__)
        other.dtype = dtype
        other.block = max(1, min(self.n_features, CACHE_BYTES // ((self.out + self.inp) * dtype.itemsize)))
        other._buffers = _empty_factors(self.out, self.inp, other.block, dtype, self.device)
        return other

    def sample(self, step: int) -> tuple[Float[Tensor, "some out"], Float[Tensor, "some inp"]]:
        """Every step-th feature of both factors, for statistics; views of stored features."""
        step = min(need_integer("step", step, low=1, cure="1 returns every feature."), self.n_features)
        if self._left is not None and self._right is not None:
            return self._left[::step], self._right[::step]
        # Regenerated features are random and exchangeable: the first ones are as good and cost one block.
        count = -(-self.n_features // step)
        assert self._source is not None
        left = self._source.left(0, count).mT
        if self._lengths is not None:
            left = left / self._lengths[:count, None]
        return left, self._source.right(0, count)

    def __repr__(self) -> str:
        kind = "stored" if self.is_stored else "regenerated"
        return (
            f"KhatriRao({self.out} x {self.inp} = {self.equations} equations, {self.n_features} features, "
            f"excess {self.excess:.3g}, {self.dtype}, {kind} in blocks of {self.block})"
        )


def _row_lengths(rows: Float[Tensor, "some side"]) -> Float[Tensor, " some"]:
    """The Euclidean length of every row, also where its squares underflow or overflow."""
    lengths = torch.linalg.vector_norm(rows, dim=1)
    info = torch.finfo(rows.dtype)
    low, high = torch.aminmax(lengths)
    if not (float(low) > info.tiny**0.5 / info.eps and float(high) < info.max**0.5):  # also for NaN
        largest = rows.abs().amax(1, keepdim=True)
        divisor = torch.where(largest > 0, largest, 1.0)
        lengths = torch.linalg.vector_norm(rows / divisor, dim=1) * largest[:, 0]
    return lengths


def cached_features(n_features: int, per_feature: int, *, is_stored: bool = True) -> int:
    """Number of features of a block that fits into the cache, or all if they are stored and hardly exceed it."""
    if is_stored and 2 * per_feature * n_features <= 3 * CACHE_BYTES:
        return n_features
    return max(1, min(n_features, CACHE_BYTES // per_feature))


def _empty_factors(
    out: int, inp: int, n_features: int, dtype: torch.dtype, device: torch.device
) -> tuple[Float[Tensor, "feat out"], Float[Tensor, "feat inp"]]:
    """Uninitialized factors indexed by feature first, the thinner one transposed in memory."""
    left, right = (
        torch.empty(size, n_features, dtype=dtype, device=device).mT
        if is_thin
        else torch.empty(n_features, size, dtype=dtype, device=device)
        for size, is_thin in ((out, out <= inp), (inp, out > inp))
    )
    return left, right


def _need_mask(name: str, mask: Tensor, n: int) -> Tensor:
    """The mask as a tensor; raises unless it has n booleans."""
    mask = as_tensor(name, mask, cure=f"Pass {n} booleans.")
    if mask.dtype != torch.bool or tuple(mask.shape) != (n,):
        raise ShapeError(f"{name} needs {n} booleans; got {shown(mask)}. Pass a mask of that length.")
    return mask


def _part(work: Tensor, like: Tensor) -> Tensor:
    """The start of a buffer, viewed in the shape of another tensor."""
    return work.view(-1)[: like.numel()].view(like.shape)


def _accumulate(total: Tensor, scaled: Tensor, broad: Tensor) -> None:
    """total += scaled @ broad."""
    if total.ndim == 2:
        total.addmm_(scaled, broad)
    else:
        total += scaled @ broad


def _self_product(
    rows: Float[Tensor, "n k"], other: Float[Tensor, "n m"] | None = None, *, is_whole: bool = True
) -> Float[Tensor, "n n"]:
    """rows @ rows^T, times other @ other^T elementwise if given: the upper triangle in block rows, then mirrored.

    The second product is computed one block row at a time: allocating more takes as long as the arithmetic. A single
    product without the mirrored triangle uses BLAS syrk.
    """
    n = len(rows)
    if other is None and not is_whole and rows.device.type == "cpu":
        import scipy.linalg

        columns = rows.contiguous().numpy().T
        (syrk,) = scipy.linalg.get_blas_funcs(("syrk",), (columns,))
        return torch.from_numpy(syrk(1.0, columns, trans=1, lower=1)).mT
    if n <= COLUMNS:
        return rows @ rows.mT if other is None else (rows @ rows.mT).mul_(other @ other.mT)
    step = max(COLUMNS, -(-n // 8))
    product = rows.new_empty(n, n)
    for start in range(0, n, step):
        stop = start + step
        part = torch.mm(rows[start:stop], rows[start:].mT, out=product[start:stop, start:])
        if other is not None:
            part *= other[start:stop] @ other[start:].mT
        if is_whole:
            product[stop:, start:stop] = product[start:stop, stop:].mT
    return product


def _pairs(rows: Float[Tensor, "feat n"]) -> Float[Tensor, "feat pairs"]:
    """rows[:, i] * rows[:, j] for i >= j, each pair once: (0, 0), (1, 0), (1, 1), (2, 0), ..."""
    n = rows.shape[1]
    if n <= FEW:
        high, low = _lower_indices(n, rows.device)
        return rows.index_select(1, high) * rows.index_select(1, low)
    products = rows.new_empty(len(rows), n * (n + 1) // 2)
    start = 0
    for i in range(n):
        torch.mul(rows[:, : i + 1], rows[:, i : i + 1], out=products[:, start : start + i + 1])
        start += i + 1
    return products


@functools.lru_cache(maxsize=2 * FEW)
def _lower_indices(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows and columns of the lower triangle, in the order of `_pairs`."""
    with torch.inference_mode(False):  # a later call may need gradients
        high, low = torch.tril_indices(n, n, device=device)
    return high, low


def _pair_indices(n: int, device: torch.device) -> Tensor:
    """Index in `_pairs` of each of the n * n pairs."""
    return _few_pair_indices(n, device) if n <= FEW else _make_pair_indices(n, device)


def _make_pair_indices(n: int, device: torch.device) -> Tensor:
    index = torch.arange(n, device=device)
    high, low = torch.maximum(index[:, None], index), torch.minimum(index[:, None], index)
    return (high * (high + 1) // 2 + low).flatten()


@functools.lru_cache(maxsize=2 * FEW)
def _few_pair_indices(n: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # a later call may need gradients
        return _make_pair_indices(n, device)


def times_power(values: Tensor, power: int | Tensor) -> Tensor:
    """values * 2^power without intermediate overflow or underflow; `power` is an int or a tensor that broadcasts."""
    if isinstance(power, int) and abs(power) <= 1000:
        return values * 2.0**power if power else values
    powers = torch.as_tensor(power)
    while bool(powers.any()):
        step = powers.clamp(-1000, 1000)
        factor = torch.as_tensor(np.ldexp(1.0, step.cpu().numpy()))  # exact; exp2 may round
        values = values * factor.to(values)
        powers = powers - step
    return values


OnStep = Callable[[int, float], None]
"""Callback with (iterations, relative residual)."""
