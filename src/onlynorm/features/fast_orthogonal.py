"""Random orthogonal matrices applied in O(n log n): sign changes, permutations and Hadamard blocks.

With m the largest power of two up to n and H the m x m Hadamard matrix (Sylvester's, which is symmetric), each of three
rounds maps x to

    x_i <- x_(p_i)                                      a random permutation p
    x_i <- s_i x_i,  x_(0 .. m-1) <- H x_(0 .. m-1) / sqrt m          random signs s, first block
    x_i <- t_i x_i,  x_(n-m .. n-1) <- H x_(n-m .. n-1) / sqrt m      other signs t, last block

without the last line if n is a power of two. Every step is orthogonal, and so is the product. The blocks overlap;
without the signs between them they would nearly cancel for n slightly above m. Three rounds spread every unit vector
over all entries about as evenly as a Haar matrix, but the distribution is not Haar: for n = 2 there are only 8
matrices.

A vector takes at most 6 n log2 n additions; a Haar matrix takes n^3 operations to draw and n^2 to apply. All operations
are elementwise and in a fixed order: results are bit-identical on every machine and for any batch size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from onlynorm.features.streams import Stream

ROUNDS = 3
"""Fewer rounds mix too little if n is not a power of two; more make no measurable difference."""
_PANEL = 2**16  # entries that are transformed at once: they and their sums fit into the cache of a core
_LARGE = 2**20  # entries from which the memory of the results matters
_FEWEST = 16  # minimum number of columns of a panel, for vectorization


@dataclass(frozen=True, eq=False)
class FastOrthogonal:
    """A random orthogonal n x n matrix F: `apply(x)` = F x along the last axis, `apply_transpose(x)` = F^T x.

    `orders` has one row per round, `signs` one per block of a round.
    """

    signs: Float[Tensor, "rounds blocks n"]
    orders: Int[Tensor, "rounds n"]

    @classmethod
    def draw(cls, n: int, *, seed: int, layer: str, part: str) -> FastOrthogonal:
        """Draws from the streams "<part>/fast/<round>/signs", n per block, and "<part>/fast/<round>/order"."""
        streams = [
            [Stream(seed, layer, f"{part}/fast/{i}/{what}") for what in ("signs", "order")] for i in range(ROUNDS)
        ]
        signs = np.stack([words.signs(0, n_blocks(n) * n).reshape(-1, n) for words, _ in streams])
        orders = np.stack([words.permutation(n) for _, words in streams])
        return cls(torch.from_numpy(signs), torch.from_numpy(orders))

    @property
    def n(self) -> int:
        """Size of the matrix."""
        return self.signs.shape[-1]

    def apply(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        """F x for every vector x; differentiable. Half precision is computed in float32."""
        return self._by_panels(x, is_transposed=False)

    def apply_transpose(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        """F^T x, which is F^-1 x, for every vector x."""
        return self._by_panels(x, is_transposed=True)

    def apply_(self, x: Float[Tensor, "k n"]) -> Float[Tensor, "k n"]:
        """As `apply`, in place and without gradients."""
        return self._by_panels(x, is_transposed=False, made=x)

    def apply_transpose_(self, x: Float[Tensor, "k n"]) -> Float[Tensor, "k n"]:
        """As `apply_transpose`, in place and without gradients."""
        return self._by_panels(x, is_transposed=True, made=x)

    def columns(self, start: int, stop: int) -> Float[Tensor, "block n"]:
        """Columns [start, stop) of F, one per row of the result, computed in float64."""
        return self.apply(self._unit_vectors(start, stop)).to(self.signs.dtype)

    def rows(self, start: int, stop: int) -> Float[Tensor, "block n"]:
        """Rows [start, stop) of F, computed in float64."""
        return self.apply_transpose(self._unit_vectors(start, stop)).to(self.signs.dtype)

    def to(self, dtype: torch.dtype, device: torch.device) -> FastOrthogonal:
        return FastOrthogonal(self.signs.to(device, dtype), self.orders.to(device))

    def digest_bytes(self) -> bytes:
        """Signs, then orders, round by round, as 8-byte little-endian integers."""
        return b"".join(values.cpu().numpy().astype("<i8").tobytes() for values in (self.signs, self.orders))

    def _unit_vectors(self, start: int, stop: int) -> Tensor:
        units = torch.zeros(stop - start, self.n, dtype=torch.float64, device=self.signs.device)
        units[:, start:stop].fill_diagonal_(1.0)
        return units

    def _by_panels(self, x: Tensor, *, is_transposed: bool, made: Tensor | None = None) -> Tensor:
        rows = x.reshape(-1, self.n).to(torch.promote_types(x.dtype, torch.float32))
        signs, orders = self.signs.to(rows), self.orders.to(rows.device)
        apply, orders = (_apply_transpose, orders.argsort(1)) if is_transposed else (_apply, orders)
        panels = (apply(part.mT, signs, orders).mT for part in rows.split(max(_FEWEST, _PANEL // self.n)))
        if made is None:
            if x.numel() < _LARGE or (torch.is_grad_enabled() and x.requires_grad):
                return torch.cat(list(panels)).reshape(x.shape).to(x.dtype)
            made = torch.empty_like(rows, dtype=x.dtype, memory_format=torch.contiguous_format)
        start = 0
        for panel in panels:  # without a second copy of the results
            made[start : start + len(panel)] = panel
            start += len(panel)
        return made.reshape(x.shape)


def n_blocks(n: int) -> int:
    """Number of Hadamard blocks of a round: 1 if n is a power of two, else 2."""
    return 1 if n & (n - 1) == 0 else 2


def count_parameters(n: int) -> int:
    """Number of signs and positions that determine a matrix of this size."""
    return ROUNDS * (n_blocks(n) + 1) * n


def count_additions(n: int) -> int:
    """Number of additions to multiply one vector."""
    return ROUNDS * n_blocks(n) * n * (n.bit_length() - 1)


def _apply(x: Float[Tensor, "n k"], signs: Tensor, orders: Tensor) -> Float[Tensor, "n k"]:
    for both, order in zip(signs, orders, strict=True):
        x = x.index_select(0, order)
        for block, sign in enumerate(both):
            x = _hadamard_block(x * sign[:, None], block)
    return x


def _apply_transpose(x: Float[Tensor, "n k"], signs: Tensor, inverses: Tensor) -> Float[Tensor, "n k"]:
    for both, inverse in zip(signs.flip(0), inverses.flip(0), strict=True):
        for block, sign in reversed(list(enumerate(both))):
            x = _hadamard_block(x, block) * sign[:, None]
        x = x.index_select(0, inverse)
    return x


def _hadamard_block(x: Float[Tensor, "n k"], block: int) -> Float[Tensor, "n k"]:
    """The first m entries (block 0) or the last m (block 1) times H / sqrt m."""
    m = 1 << (len(x).bit_length() - 1)
    if m == len(x):
        return _hadamard(x)
    return torch.cat((x[:-m], _hadamard(x[-m:])) if block else (_hadamard(x[:m]), x[m:]))


def _hadamard(x: Float[Tensor, "m k"]) -> Float[Tensor, "m k"]:
    """H x / sqrt m. Each of log2 m steps puts sums and differences of neighbours into the two halves."""
    m = len(x)
    for _ in range(m.bit_length() - 1):
        even, odd = x[0::2], x[1::2]
        x = torch.cat((even + odd, even - odd))
    return x * (1.0 / math.sqrt(m))
