"""All blocks of a layer as one system: block diagonal, with one and the same matrix in every block.

Blocks stand side by side in every product, so that a sweep over all of them is two products of full size with the
features of one block: as fast per multiplication as the dense system, and as many times less work as there are blocks.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from onlynorm.solvers import KhatriRao

PIECE = 1024
"""Features of a sweep that are alive at one time."""


class BlockOperator:
    """The operator gamma -> the weight (out, inp) of all blocks; an `Operator` for the solvers."""

    def __init__(self, block: KhatriRao, n_blocks: int) -> None:
        self.block, self.n_blocks = block, n_blocks
        self.out, self.inp = block.out * n_blocks, block.inp
        self.n_features = block.n_features * n_blocks
        self.dtype, self.device = block.dtype, block.device
        left, self.right = block.dense()
        self.left = left.contiguous()

    @property
    def equations(self) -> int:
        """Weights of all blocks."""
        return self.out * self.inp

    def apply(self, gamma: Float[Tensor, " feat"]) -> Float[Tensor, "out inp"]:
        """M gamma."""
        return (gamma.view(self.n_blocks, 1, -1) * self.left).flatten(0, 1) @ self.right

    def transpose(self, residual: Float[Tensor, "out inp"]) -> Float[Tensor, " feat"]:
        """M^T R."""
        seen = (residual @ self.right.mT).view(self.n_blocks, self.block.out, -1)
        return (seen * self.left).sum(1).flatten()

    def row_gram_apply(
        self, residual: Float[Tensor, "out inp"], *, work: Tensor | None = None
    ) -> Float[Tensor, "out inp"]:
        """M M^T R in one sweep: a piece of the features stays in the cache for both products."""
        total = torch.zeros_like(residual)
        for start in range(0, len(self.right), PIECE):
            right, left = self.right[start : start + PIECE], self.left[:, start : start + PIECE]
            seen = (residual @ right.mT).view(self.n_blocks, self.block.out, -1)
            weight = seen.mul_(left).sum(1, keepdim=True)
            total.addmm_(torch.mul(weight, left, out=seen).flatten(0, 1), right)
        return total

    def scratch(self) -> Tensor:
        """Nothing: products of full size need no buffer of their own."""
        return torch.empty(0, dtype=self.dtype, device=self.device)

    def gram(self) -> Float[Tensor, "feat feat"]:
        """M^T M, block diagonal."""
        return torch.block_diag(*[self.block.gram()] * self.n_blocks)

    def row_gram(self) -> Float[Tensor, "eq eq"]:
        """M M^T, block diagonal."""
        return torch.block_diag(*[self.block.row_gram()] * self.n_blocks)

    def one_norm(self) -> float:
        """The largest column sum of |M|."""
        return self.block.one_norm()

    def materialise(self, *, dtype: torch.dtype | None = None) -> Float[Tensor, "eq feat"]:
        """M as a dense matrix, to check against."""
        return torch.block_diag(*[self.block.materialise(dtype=dtype)] * self.n_blocks)

    def to(self, dtype: torch.dtype) -> BlockOperator:
        """The same operator in another precision."""
        return BlockOperator(self.block.to(dtype), self.n_blocks)
