"""Block features: each feature contributes to one group of outputs, so that M is block diagonal.

The outputs are split into equal groups. All groups use the same frozen weights, drawn for a target of one group. The
system of N equations splits into n_blocks systems with the same matrix of N / n_blocks equations:

    left = [L 0 0; 0 L 0; 0 0 L],    right = [R; R; R],    W_b = L diag(gamma_b) R

The number of frozen entries, the entries of M and the operations all decrease by the number of blocks or more, and at a
given excess the condition number is that of the smaller system. With one block per output the outputs are independent,
as in ID cond.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from onlynorm.display import Result
from onlynorm.errors import ShapeError, ValueRangeError, shown
from onlynorm.features.draw import Features, check_shape, draw
from onlynorm.features.streams import as_integer, check_range
from onlynorm.validate import as_tensor


@dataclass(frozen=True)
class BlockFeatures(Result):
    """The result of `draw_blocks`; `base` has the features of one block, a target (out / n_blocks, inp, *kernel)."""

    base: Features
    n_blocks: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole target."""
        return (self.base.shape[0] * self.n_blocks, *self.base.shape[1:])

    @property
    def n_features(self) -> int:
        """Features over all blocks; feature f belongs to block f // base.n_features."""
        return self.base.n_features * self.n_blocks

    @property
    def equations(self) -> int:
        """Weights of the target."""
        return self.base.equations * self.n_blocks

    @property
    def n_frozen(self) -> int:
        """Number of frozen entries: both factors of one block."""
        return self.base.n_features * (self.base.rows + self.base.cols)

    def left(self, start: int = 0, stop: int | None = None) -> Float[Tensor, "rows block"]:
        """Second source layer of features [start, stop), zero outside the block of each feature."""
        block, within = self._where(start, stop)
        rows = self.base.rows
        left = torch.zeros(rows * self.n_blocks, len(block), dtype=self.base.dtype, device=self.base.device)
        own = self.base.left()[:, within]
        at = torch.arange(rows, device=own.device)[:, None] + rows * block[None, :]
        return left.scatter(0, at, own)

    def right(self, start: int = 0, stop: int | None = None) -> Float[Tensor, "block cols"]:
        """First source layer of features [start, stop), one row per feature."""
        return self.base.right()[self._where(start, stop)[1]]

    def as_blocks(self, weight: Float[Tensor, "*shape"]) -> Float[Tensor, "blocks rows cols"]:
        """A weight of the target's shape as the matrices that L diag(gamma_b) R must equal."""
        weight = as_tensor("as_blocks", weight, cure="Pass the weight of the target layer.")
        if tuple(weight.shape) != self.shape:
            raise ShapeError(f"as_blocks needs a weight of shape {self.shape}; got {tuple(weight.shape)}. Reshape it.")
        return weight.reshape(self.n_blocks, self.base.rows, self.base.cols)

    def weights_digest(self) -> str:
        """The digest of one block's frozen weights."""
        return self.base.weights_digest()

    def __str__(self) -> str:
        return f"{self.n_blocks} blocks of {self.base}"

    def _where(self, start: int, stop: int | None) -> tuple[Tensor, Tensor]:
        """(block, index within the block) of features [start, stop)."""
        first, last = check_range(start, self.n_features if stop is None else stop, self.n_features)
        k = torch.arange(first, last, device=self.base.device)
        return k // self.base.n_features, k % self.base.n_features


def draw_blocks(
    name: str,
    shape: tuple[int, ...],
    *,
    n_blocks: int = 1,
    excess: float | None = None,
    density: float | None = None,
    seed: int = 0,
    layer: str = "",
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> BlockFeatures:
    """Block features for a target weight (out, inp, *kernel) with `n_blocks` groups of outputs.

    `name` is any random distribution of `draw`; `excess` is the number of features per equation of a block.

    Examples:
        >>> from onlynorm.features import draw_blocks
        >>> blocks = draw_blocks("he_normal", (8, 4), n_blocks=2)
        >>> blocks.n_features
        40
    """
    shape, count = check_shape(shape), as_integer(n_blocks)
    if count is None or count < 1 or shape[0] % count:
        fitting = [d for d in range(1, min(shape[0], 4096) + 1) if shape[0] % d == 0]
        raise ValueRangeError(
            f"n_blocks needs a divisor of the {shape[0]} outputs; got {shown(n_blocks)}. Use one of {fitting[:8]}."
        )
    base = draw(
        name, (shape[0] // count, *shape[1:]), excess=excess, density=density, seed=seed, layer=layer, dtype=dtype,
        device=device,
    )  # fmt: skip
    if base.is_structured:
        raise ValueRangeError(
            f"block features need a random distribution; got the structured {name}. Draw he_normal, he_uniform, "
            "orthogonal or a sparse one."
        )
    return BlockFeatures(base, count)
