"""ID cond features at the minimum width: as many numbers to choose as the target has, and not one more."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from onlynorm.errors import ValueRangeError, shown
from onlynorm.features.streams import as_integer
from onlynorm.features.structured import check_gamma, check_matrix, one_hot

_NAMED_ROWS = 5  # how many rows an error lists


@dataclass(frozen=True, eq=False)
class IdCondMinimal:
    """The fewest features that reach every target: one position of each output shares feature 0.

    With n positions per output there are n_outputs (n - 1) + 1 features. Feature 1 + i (n - 1) + j' makes
    position j of output i alone, j counting past the shared one; the scales g2 of the outputs (the gamma of
    the second norm) carry the shared position. The choice of `shared_column` belongs to the frozen weights,
    so it must not come from the target. Theory: random_features:eq-3
    """

    rows: int
    cols: int
    n_outputs: int
    shared_column: int = 0

    def __post_init__(self) -> None:
        shared = as_integer(self.shared_column)
        if shared is None or not 0 <= shared < self.n_positions:
            raise ValueRangeError(
                f"shared_column needs a whole number in [0, {self.n_positions}); got {shown(self.shared_column)}. "
                "Leave it out for the first."
            )

    @property
    def n_positions(self) -> int:
        """Weights of the target per output."""
        return self.rows * self.cols // self.n_outputs

    @property
    def n_features(self) -> int:
        return self.n_outputs * (self.n_positions - 1) + 1

    def apply(
        self,
        gamma: Float[Tensor, "*batch feat"],
        output_gamma: Float[Tensor, "*batch outputs"] | None = None,
    ) -> Float[Tensor, "*batch rows cols"]:
        """M gamma, and every output times its `output_gamma` if given."""
        check_gamma("id_cond_minimal", gamma, self.n_features)
        batch = gamma.shape[:-1]
        own = gamma[..., 1:].reshape(*batch, self.n_outputs, self.n_positions - 1)
        shared = gamma[..., :1, None].expand(*batch, self.n_outputs, 1)
        s = self.shared_column
        matrix = torch.cat([own[..., :s], shared, own[..., s:]], dim=-1)
        if output_gamma is not None:
            check_gamma("output_gamma of id_cond_minimal", output_gamma, self.n_outputs)
            matrix = output_gamma[..., None] * matrix
        return matrix.reshape(*batch, self.rows, self.cols)

    def transpose(self, residual: Float[Tensor, "*batch rows cols"]) -> Float[Tensor, "*batch feat"]:
        """M^T r: the shared feature collects its position of every output, each other feature its own."""
        shared, own = self._split(residual)
        return torch.cat([shared.sum(-1, keepdim=True), own.flatten(-2)], dim=-1)

    def solve(
        self, target: Float[Tensor, "*batch rows cols"]
    ) -> tuple[Float[Tensor, "*batch feat"], Float[Tensor, "*batch outputs"]]:
        """(gamma, output_gamma) whose `apply` is the target: g2_i = T_is, gamma_(ij) = T_ij / T_is.

        The shared feature's own gamma is free and set to 1. Outputs that are zero throughout get g2_i = 0. An
        output that is zero only at the shared position cannot be made: an error names it. Gammas grow with
        max_j |T_ij / T_is|.
        """
        pivot, own = self._split(target)
        is_blocked = (pivot == 0) & (own != 0).any(-1)
        if bool(is_blocked.any()):
            self._refuse(target, is_blocked)
        gamma = own / torch.where(pivot == 0, torch.ones_like(pivot), pivot)[..., None]
        return torch.cat([torch.ones_like(pivot[..., :1]), gamma.flatten(-2)], dim=-1), pivot.clone()

    def left(self, start: int, stop: int) -> Float[Tensor, "rows block"]:
        row, _, is_shared = self._joins(start, stop)
        left = one_hot(row, self.rows, axis=0)
        kernel_position = self.shared_column // self.cols
        left[kernel_position :: self.rows // self.n_outputs, is_shared] = 1.0
        return left

    def right(self, start: int, stop: int) -> Float[Tensor, "block cols"]:
        return one_hot(self._joins(start, stop)[1], self.cols)

    def to(self, dtype: torch.dtype, device: torch.device) -> IdCondMinimal:
        return self

    def digest_bytes(self) -> bytes:
        """A line of text with the name, the sizes and the shared position."""
        sizes = f"{self.rows}x{self.cols} outputs {self.n_outputs} shared {self.shared_column}"
        return f"id_cond_minimal {sizes}\n".encode()

    def _joins(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """Row, column and is-shared of features [start, stop); the shared one counts for output 0."""
        k = torch.arange(start, stop)
        own = (k - 1).clamp(min=0)
        n_own = max(self.n_positions - 1, 1)
        output, position = own // n_own, own % n_own
        position = position + (position >= self.shared_column)
        is_shared = k == 0
        position = torch.where(is_shared, self.shared_column, position)
        entry = torch.where(is_shared, 0, output) * self.n_positions + position
        return entry // self.cols, entry % self.cols, is_shared

    def _split(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """The shared position (..., outputs) and the others (..., outputs, positions - 1)."""
        check_matrix("id_cond_minimal", matrix, self.rows, self.cols)
        flat = matrix.reshape(*matrix.shape[:-2], self.n_outputs, self.n_positions)
        s = self.shared_column
        return flat[..., s], torch.cat([flat[..., :s], flat[..., s + 1 :]], dim=-1)

    def _refuse(self, target: Tensor, is_blocked: Tensor) -> None:
        flat = target.reshape(-1, self.n_outputs, self.n_positions)
        blocked = is_blocked.reshape(-1, self.n_outputs).any(0).nonzero().reshape(-1).tolist()
        named = ", ".join(str(row) for row in blocked[:_NAMED_ROWS])
        named += f" and {len(blocked) - _NAMED_ROWS} more" if len(blocked) > _NAMED_ROWS else ""
        is_good = ((flat != 0) | (flat == 0).all(-1, keepdim=True)).all(0).all(0)
        good = is_good.nonzero().reshape(-1).tolist()
        cure = f"Draw with shared_column={good[0]}" if good else "No column is free of zeros: draw id_cond"
        raise ValueRangeError(
            f"id_cond_minimal needs a nonzero weight in column {self.shared_column} of every output that is "
            f"not zero throughout; got zeros in outputs {named}. {cure}, or nudge these weights off zero."
        )
