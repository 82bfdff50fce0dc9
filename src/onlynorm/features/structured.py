"""Structured features with a closed-form solution; M is not built.

| name | M | gamma for a target T |
| --- | --- | --- |
| id_cond | rows of the identity | gamma_(ij) = T_ij |
| id_cond_minimal | identity, but one column shares a feature | g2_i = T_is, gamma_(ij) = T_ij / T_is |
| ortho_cond | U2 (x) U1, orthogonal | U2^T T U1^T |
| fast_ortho_cond | the same with fast orthogonal factors | U2^T T U1^T |

Every structure has `apply(gamma)` = M gamma as a (rows, cols) matrix, `transpose(residual)` = M^T r and
`solve(target)`, all with optional leading batch dimensions. `left` and `right` return blocks of the source weights.

Features form a grid: feature (q, d) is column q of U2 times row d of U1, so that all features of one d have the same
input, and M gamma = U2 grid(gamma) U1. For ID cond, U1 and U2 are the identity.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from onlynorm.errors import InsufficientFeaturesError, ShapeError, ValueRangeError, shown
from onlynorm.features.fast_orthogonal import FastOrthogonal
from onlynorm.features.orthogonal import haar_matrix
from onlynorm.features.streams import Stream, as_integer
from onlynorm.memory import memory_budget


@runtime_checkable
class Structure(Protocol):
    """Interface of a closed form: sizes, products with M and M^T, the solution, and blocks of the weights."""

    @property
    def n_features(self) -> int: ...
    def apply(self, gamma: Float[Tensor, "*batch feat"]) -> Float[Tensor, "*batch rows cols"]: ...
    def transpose(self, residual: Float[Tensor, "*batch rows cols"]) -> Float[Tensor, "*batch feat"]: ...
    def solve(self, target: Float[Tensor, "*batch rows cols"]) -> Any: ...
    def grid(self, values: Float[Tensor, "*batch feat"]) -> Float[Tensor, "*batch rows cols"]: ...
    def constant(self, beta: Float[Tensor, "*batch feat"]) -> Float[Tensor, "*batch rows"]: ...
    def input_of(self, k: Int[Tensor, "*k"] | int | None = None) -> Int[Tensor, "*k"]: ...
    def left(self, start: int, stop: int) -> Float[Tensor, "rows block"]: ...
    def right(self, start: int, stop: int) -> Float[Tensor, "block cols"]: ...
    def to(self, dtype: torch.dtype, device: torch.device) -> Structure: ...
    def digest_bytes(self) -> bytes: ...


@dataclass(frozen=True, eq=False)
class IdCond:
    """One feature per entry of the target: M = I, or the rows of I selected by a mask.

    `kept` has the row-major indices of the entries with a feature, ascending; None means all entries.
    Theory: random_features:thm-3.1
    """

    rows: int
    cols: int
    kept: Int[Tensor, " feat"] | None = None

    @classmethod
    def draw(cls, rows: int, cols: int, *, seed: int, layer: str, density: float | None) -> IdCond:
        """Selects all entries, or each with probability `density` by the stream "mask"."""
        if density is None:
            return cls(rows, cols)
        mask = torch.from_numpy(Stream(seed, layer, "mask").mask(density, 0, rows * cols))
        kept = mask.nonzero().reshape(-1)
        if not len(kept):
            raise InsufficientFeaturesError(
                f"id_cond needs at least one feature; got none of {rows * cols} with density {density}. "
                "Raise the density or change the seed."
            )
        return cls(rows, cols, kept.int() if rows * cols < 2**31 else kept)

    @property
    def n_features(self) -> int:
        return self.rows * self.cols if self.kept is None else len(self.kept)

    def entry_of(self, k: Int[Tensor, "*k"] | int | None = None) -> Int[Tensor, "*k"]:
        """Row-major index in the target matrix of the entry of feature k, or of all features."""
        if k is None:
            return torch.arange(self.n_features, device="cpu") if self.kept is None else self.kept.long()
        index = torch.as_tensor(k)
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < self.n_features:
            raise ValueRangeError(
                f"feature indices must be in [0, {self.n_features}); got {int(index.min())} to "
                f"{int(index.max())}. Indices start at zero."
            )
        return index if self.kept is None else self.kept.to(index.device)[index].long()

    def output_of(self, k: Int[Tensor, "*k"] | int | None = None) -> Int[Tensor, "*k"]:
        """Row of feature k in the target matrix."""
        return self.entry_of(k) // self.cols

    def input_of(self, k: Int[Tensor, "*k"] | int | None = None) -> Int[Tensor, "*k"]:
        """Column of feature k in the target matrix."""
        return self.entry_of(k) % self.cols

    def apply(self, gamma: Float[Tensor, "*batch feat"]) -> Float[Tensor, "*batch rows cols"]:
        """The matrix with gamma_k at the entry of feature k and zero elsewhere."""
        check_gamma("id_cond", gamma, self.n_features)
        if self.kept is not None:
            flat = gamma.new_zeros(*gamma.shape[:-1], self.rows * self.cols)
            gamma = flat.index_copy(-1, self.entry_of().to(gamma.device), gamma)
        return gamma.reshape(*gamma.shape[:-1], self.rows, self.cols)

    def grid(self, values: Float[Tensor, "*batch feat"]) -> Float[Tensor, "*batch rows cols"]:
        """One value per feature at its entry, zero elsewhere."""
        return self.apply(values)

    def constant(self, beta: Float[Tensor, "*batch feat"]) -> Float[Tensor, "*batch rows"]:
        """The contribution of beta, one value per feature, to every row: the row sums of the grid."""
        return self.grid(beta).sum(-1)

    def transpose(self, residual: Float[Tensor, "*batch rows cols"]) -> Float[Tensor, "*batch feat"]:
        """The entries of `residual` that have a feature."""
        check_matrix("id_cond", residual, self.rows, self.cols)
        flat = residual.reshape(*residual.shape[:-2], self.rows * self.cols)
        return flat if self.kept is None else flat[..., self.entry_of().to(flat.device)]

    def solve(self, target: Float[Tensor, "*batch rows cols"]) -> Float[Tensor, "*batch feat"]:
        """The entries of the target; M gamma is its orthogonal projection on the features."""
        return self.transpose(target)

    def left(self, start: int, stop: int) -> Float[Tensor, "rows block"]:
        return one_hot(self.output_of(torch.arange(start, stop)), self.rows, axis=0)

    def right(self, start: int, stop: int) -> Float[Tensor, "block cols"]:
        return one_hot(self.input_of(torch.arange(start, stop)), self.cols)

    def to(self, dtype: torch.dtype, device: torch.device) -> IdCond:
        return self if self.kept is None else IdCond(self.rows, self.cols, self.kept.to(device))

    def digest_bytes(self) -> bytes:
        """A line with name and sizes, then `kept` as 8-byte little-endian integers."""
        kept = b"" if self.kept is None else self.kept.long().cpu().numpy().astype("<i8").tobytes()
        return f"id_cond {self.rows}x{self.cols}\n".encode() + kept


@dataclass(frozen=True, eq=False)
class OrthoCond:
    """Feature k, with (q, d) = divmod(k, cols), is column q of U2 times row d of U1, so that M is orthogonal.

    `left_factor` is U2 (rows x rows), `right_factor` U1 (cols x cols). Theory: random_features:ortho-cond
    """

    left_factor: Float[Tensor, "rows rows"]
    right_factor: Float[Tensor, "cols cols"]

    @classmethod
    def draw(cls, rows: int, cols: int, *, seed: int, layer: str) -> OrthoCond:
        """Draws independent Haar matrices from the streams "left" and "right", with an LRU cache.

        Drawing takes rows^3 + cols^3 operations, and saving and loading a network needs the same factors again. The
        cache is limited to a fraction `CACHED` of the machine's memory. Factors that were modified in place are drawn
        again.
        """
        key = (rows, cols, seed, layer)
        with _lock:
            if key in _drawn and not any(u._version for u in (_drawn[key].left_factor, _drawn[key].right_factor)):
                _drawn.move_to_end(key)
                return _drawn[key]
        with torch.inference_mode(False):  # inference tensors have no version
            left = torch.from_numpy(haar_matrix(Stream(seed, layer, "left"), rows))
            right = torch.from_numpy(haar_matrix(Stream(seed, layer, "right"), cols))
            made = cls(left, torch.from_numpy(np.ascontiguousarray(right.numpy().T)))
        with _lock:
            _drawn[key] = made
            while sum(one.n_bytes for one in _drawn.values()) > CACHED * memory_budget():
                _drawn.popitem(last=False)
        return made

    def numbers(self) -> list[Tensor]:
        """The tensors that determine both factors."""
        return [self.left_factor, self.right_factor]

    @property
    def n_bytes(self) -> int:
        """Size of both factors in bytes."""
        return sum(u.numel() * u.element_size() for u in (self.left_factor, self.right_factor))

    @property
    def rows(self) -> int:
        return len(self.left_factor)

    @property
    def cols(self) -> int:
        return len(self.right_factor)

    @property
    def n_features(self) -> int:
        return self.rows * self.cols

    def apply(self, gamma: Float[Tensor, "*batch feat"]) -> Float[Tensor, "*batch rows cols"]:
        """M gamma = U2 G U1 with G = grid(gamma)."""
        G = self.grid(gamma)
        return self.left_factor.to(G) @ G @ self.right_factor.to(G)

    def grid(self, values: Float[Tensor, "*batch feat"]) -> Float[Tensor, "*batch rows cols"]:
        """One value per feature as a (rows, cols) matrix."""
        check_gamma("ortho_cond", values, self.n_features)
        return values.reshape(*values.shape[:-1], self.rows, self.cols)

    def constant(self, beta: Float[Tensor, "*batch feat"]) -> Float[Tensor, "*batch rows"]:
        """The contribution of beta, one value per feature, to every row: U2 times the row sums of the grid."""
        return self.grid(beta).sum(-1) @ self.left_factor.to(beta).mT

    def input_of(self, k: Int[Tensor, "*k"] | int | None = None) -> Int[Tensor, "*k"]:
        """Row of U1 of feature k, or of all features."""
        return torch.as_tensor(torch.arange(self.n_features, device="cpu") if k is None else k) % self.cols

    def transpose(self, residual: Float[Tensor, "*batch rows cols"]) -> Float[Tensor, "*batch feat"]:
        """M^T r = U2^T R U1^T."""
        check_matrix("ortho_cond", residual, self.rows, self.cols)
        return (self.left_factor.to(residual).mT @ residual @ self.right_factor.to(residual).mT).flatten(-2)

    def solve(self, target: Float[Tensor, "*batch rows cols"]) -> Float[Tensor, "*batch feat"]:
        """Gamma with apply(gamma) = target: the transpose is the inverse."""
        return self.transpose(target)

    def left(self, start: int, stop: int) -> Float[Tensor, "rows block"]:
        return self.left_factor[:, torch.arange(start, stop, device=self.left_factor.device) // self.cols]

    def right(self, start: int, stop: int) -> Float[Tensor, "block cols"]:
        return self.right_factor[torch.arange(start, stop, device=self.right_factor.device) % self.cols]

    def to(self, dtype: torch.dtype, device: torch.device) -> OrthoCond:
        return OrthoCond(self.left_factor.to(device, dtype), self.right_factor.to(device, dtype))

    def digest_bytes(self) -> bytes:
        """A line with name and sizes, then U1 row by row and U2 column by column as little-endian float64."""
        factors = (self.right_factor, self.left_factor.T)
        return f"ortho_cond {self.rows}x{self.cols}\n".encode() + b"".join(
            u.double().cpu().contiguous().numpy().astype("<f8").tobytes() for u in factors
        )


@dataclass(frozen=True, eq=False)
class FastOrthoCond:
    """As `OrthoCond`, with U2 and U1 from sign changes, permutations and Hadamard blocks, applied in O(n log n).

    `left_factor` applies U2, `right_factor` U1.
    """

    left_factor: FastOrthogonal
    right_factor: FastOrthogonal

    @classmethod
    def draw(cls, rows: int, cols: int, *, seed: int, layer: str) -> FastOrthoCond:
        """Draws independent factors for the parts "left" and "right"."""
        left, right = (
            FastOrthogonal.draw(n, seed=seed, layer=layer, part=part) for n, part in ((rows, "left"), (cols, "right"))
        )
        return cls(left, right)

    @property
    def rows(self) -> int:
        return self.left_factor.n

    @property
    def cols(self) -> int:
        return self.right_factor.n

    @property
    def n_features(self) -> int:
        return self.rows * self.cols

    def numbers(self) -> list[Tensor]:
        """The tensors that determine both factors."""
        return [values for one in (self.left_factor, self.right_factor) for values in (one.signs, one.orders)]

    def apply(self, gamma: Float[Tensor, "*batch feat"]) -> Float[Tensor, "*batch rows cols"]:
        """M gamma = U2 G U1 with G = grid(gamma)."""
        return self.transform_outputs(self.right_factor.apply_transpose(self.grid(gamma)).mT).mT

    def rotate_(self, grid: Float[Tensor, "rows cols"]) -> Float[Tensor, "rows cols"]:
        """U2 G U1, in place and without gradients."""
        self.right_factor.apply_transpose_(grid)
        self.left_factor.apply_(grid.mT)
        return grid

    def transform_inputs(self, x: Float[Tensor, "*batch cols"]) -> Float[Tensor, "*batch cols"]:
        """U1 x for every vector x: the inputs of the features."""
        return self.right_factor.apply(x)

    def transform_outputs(self, v: Float[Tensor, "*batch rows"]) -> Float[Tensor, "*batch rows"]:
        """U2 v for every vector v of sums over features."""
        return self.left_factor.apply(v)

    def grid(self, values: Float[Tensor, "*batch feat"]) -> Float[Tensor, "*batch rows cols"]:
        """One value per feature as a (rows, cols) matrix."""
        check_gamma("fast_ortho_cond", values, self.n_features)
        return values.reshape(*values.shape[:-1], self.rows, self.cols)

    def constant(self, beta: Float[Tensor, "*batch feat"]) -> Float[Tensor, "*batch rows"]:
        """The contribution of beta, one value per feature, to every row: U2 times the row sums of the grid."""
        return self.transform_outputs(self.grid(beta).sum(-1))

    def input_of(self, k: Int[Tensor, "*k"] | int | None = None) -> Int[Tensor, "*k"]:
        """Row of U1 of feature k, or of all features."""
        return torch.as_tensor(torch.arange(self.n_features, device="cpu") if k is None else k) % self.cols

    def transpose(self, residual: Float[Tensor, "*batch rows cols"]) -> Float[Tensor, "*batch feat"]:
        """M^T r = U2^T R U1^T."""
        check_matrix("fast_ortho_cond", residual, self.rows, self.cols)
        return self.transform_inputs(self.left_factor.apply_transpose(residual.mT).mT).flatten(-2)

    def solve(self, target: Float[Tensor, "*batch rows cols"]) -> Float[Tensor, "*batch feat"]:
        """Gamma with apply(gamma) = target: the transpose is the inverse."""
        return self.transpose(target)

    def left(self, start: int, stop: int) -> Float[Tensor, "rows block"]:
        first = start // self.cols
        columns = self.left_factor.columns(first, -(-stop // self.cols))
        outputs = torch.arange(start, stop, device=columns.device) // self.cols
        return columns.mT.index_select(1, outputs - first)

    def right(self, start: int, stop: int) -> Float[Tensor, "block cols"]:
        inputs = torch.arange(start, stop, device=self.right_factor.signs.device) % self.cols
        is_one_row = start // self.cols == max(start, stop - 1) // self.cols
        first, last = (start % self.cols, start % self.cols + stop - start) if is_one_row else (0, self.cols)
        return self.right_factor.rows(first, last).index_select(0, inputs - first)

    def to(self, dtype: torch.dtype, device: torch.device) -> FastOrthoCond:
        return FastOrthoCond(self.left_factor.to(dtype, device), self.right_factor.to(dtype, device))

    def digest_bytes(self) -> bytes:
        """A line with name and sizes, then `digest_bytes` of U1 and U2."""
        name = f"fast_ortho_cond {self.rows}x{self.cols}\n".encode()
        return name + self.right_factor.digest_bytes() + self.left_factor.digest_bytes()


CACHED = 0.125
"""Maximum size of the cache of drawn factors, as a fraction of the machine's memory."""
_drawn: OrderedDict[tuple[int, int, int, str], OrthoCond] = OrderedDict()
_lock = threading.Lock()


def one_hot(index: Int[Tensor, " block"], n: int, *, axis: int = 1) -> Float[Tensor, "_ _"]:
    """One-hot rows of length n, or columns for axis 0, in float64 on the CPU."""
    which = (torch.arange(len(index)), index.cpu())
    hot = torch.zeros((len(index), n) if axis else (n, len(index)), dtype=torch.float64)
    hot[which if axis else which[::-1]] = 1.0
    return hot


def check_gamma(name: str, gamma: Tensor, n: int) -> None:
    """Raises unless the last dimension is n."""
    if gamma.ndim < 1 or gamma.shape[-1] != n:
        raise ShapeError(
            f"{name} needs a last dimension of {n}; got {tuple(gamma.shape)}. Put batch dimensions in front."
        )


def check_matrix(name: str, matrix: Tensor, rows: int, cols: int) -> None:
    """Raises unless the last two dimensions are (rows, cols)."""
    if matrix.ndim < 2 or tuple(matrix.shape[-2:]) != (rows, cols):
        raise ShapeError(
            f"{name} needs a matrix (..., {rows}, {cols}); got shape {tuple(matrix.shape)}. "
            "Convert a weight with features.as_matrix(weight)."
        )


_NAMED_ROWS = 5  # rows listed in a message


@dataclass(frozen=True, eq=False)
class IdCondMinimal:
    """ID cond features at minimum width: one position of every output shares feature 0.

    With n positions per output there are n_outputs (n - 1) + 1 features. Feature 1 + i (n - 1) + j' is position j of
    output i, where j skips the shared position; the scales g2 of the outputs (the gamma of the second norm) determine
    the shared position. `shared_column` is part of the frozen weights, so it must not depend on the target.
    Theory: random_features:eq-3
    """

    rows: int
    cols: int
    n_outputs: int
    shared_column: int = 0

    def __post_init__(self) -> None:
        shared = as_integer(self.shared_column)
        if shared is None or not 0 <= shared < self.n_positions:
            raise ValueRangeError(
                f"shared_column needs an integer in [0, {self.n_positions}); got {shown(self.shared_column)}. "
                "Omit it for the first."
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
        """M gamma, multiplied by `output_gamma` per output if given."""
        check_gamma("id_cond_minimal", gamma, self.n_features)
        batch = gamma.shape[:-1]
        own = gamma[..., 1:].reshape(*batch, self.n_outputs, self.n_positions - 1)
        shared = gamma[..., :1, None].expand(*batch, self.n_outputs, 1)
        s = self.shared_column
        matrix = torch.cat([own[..., :s], shared, own[..., s:]], dim=-1)
        if output_gamma is not None:
            check_gamma("output_gamma of id_cond_minimal", output_gamma, self.n_outputs)
            scale = output_gamma[..., None]
            learns = torch.is_grad_enabled() and (matrix.requires_grad or scale.requires_grad)
            matrix = scale * matrix if learns or scale.dtype != matrix.dtype else matrix.mul_(scale)
        return matrix.reshape(*batch, self.rows, self.cols)

    def part(self, start: int, stop: int) -> tuple[IdCondMinimal, slice]:
        """The structure of outputs [start, stop), and the features of these outputs except the shared one."""
        n_own = self.n_positions - 1
        rows = (stop - start) * (self.rows // self.n_outputs)
        own = slice(1 + start * n_own, 1 + stop * n_own)
        return IdCondMinimal(rows, self.cols, stop - start, self.shared_column), own

    def grid(self, values: Float[Tensor, "*batch feat"]) -> Float[Tensor, "*batch rows cols"]:
        """One value per feature at its entry; that of the shared feature at one entry of every output."""
        return self.apply(values)

    def constant(self, beta: Float[Tensor, "*batch feat"]) -> Float[Tensor, "*batch rows"]:
        """The contribution of beta, one value per feature, to every row: the row sums of the grid."""
        return self.grid(beta).sum(-1)

    def input_of(self, k: Int[Tensor, "*k"] | int | None = None) -> Int[Tensor, "*k"]:
        """Column of feature k in the target matrix, or of all features."""
        index = torch.arange(self.n_features, device="cpu") if k is None else torch.as_tensor(k)
        position = (index - 1) % max(self.n_positions - 1, 1)
        position += position >= self.shared_column
        return torch.where(index == 0, self.shared_column, position) % self.cols

    def transpose(self, residual: Float[Tensor, "*batch rows cols"]) -> Float[Tensor, "*batch feat"]:
        """M^T r: the sum over outputs for the shared feature, one entry for every other feature."""
        shared, own = self._split(residual)
        return torch.cat([shared.sum(-1, keepdim=True), own.flatten(-2)], dim=-1)

    def solve(
        self, target: Float[Tensor, "*batch rows cols"]
    ) -> tuple[Float[Tensor, "*batch feat"], Float[Tensor, "*batch outputs"]]:
        """(gamma, output_gamma) with apply(gamma, output_gamma) = target: g2_i = T_is, gamma_(ij) = T_ij / T_is.

        The gamma of the shared feature is 1. Zero outputs get g2_i = 0. Raises if a nonzero output is zero at the
        shared position. Gammas grow with max_j |T_ij / T_is|.
        """
        check_matrix("id_cond_minimal", target, self.rows, self.cols)
        batch, s = target.shape[:-2], self.shared_column
        flat = target.reshape(*batch, self.n_outputs, self.n_positions)
        pivot = flat[..., s]
        is_blocked = (pivot == 0) & (flat != 0).any(-1)
        if bool(is_blocked.any()):
            self._raise_blocked(target, is_blocked)
        divisor = torch.where(pivot == 0, torch.ones_like(pivot), pivot)[..., None]
        gamma = target.new_ones(*batch, self.n_features)
        own = gamma[..., 1:].view(*batch, self.n_outputs, self.n_positions - 1)
        own[..., :s] = flat[..., :s] / divisor
        own[..., s:] = flat[..., s + 1 :] / divisor
        return gamma, pivot.clone()

    def left(self, start: int, stop: int) -> Float[Tensor, "rows block"]:
        row, _, is_shared = self._joins(torch.arange(start, stop))
        left = one_hot(row, self.rows, axis=0)
        kernel_position = self.shared_column // self.cols
        left[kernel_position :: self.rows // self.n_outputs, is_shared] = 1.0
        return left

    def right(self, start: int, stop: int) -> Float[Tensor, "block cols"]:
        return one_hot(self.input_of(torch.arange(start, stop)), self.cols)

    def to(self, dtype: torch.dtype, device: torch.device) -> IdCondMinimal:
        return self

    def digest_bytes(self) -> bytes:
        """A line with the name, the sizes and the shared position."""
        sizes = f"{self.rows}x{self.cols} outputs {self.n_outputs} shared {self.shared_column}"
        return f"id_cond_minimal {sizes}\n".encode()

    def _joins(self, k: Int[Tensor, "*k"]) -> tuple[Tensor, Tensor, Tensor]:
        """(row, column, is_shared) of features; the shared one is assigned to output 0."""
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

    def _raise_blocked(self, target: Tensor, is_blocked: Tensor) -> None:
        flat = target.reshape(-1, self.n_outputs, self.n_positions)
        blocked = is_blocked.reshape(-1, self.n_outputs).any(0).nonzero().reshape(-1).tolist()
        named = ", ".join(str(row) for row in blocked[:_NAMED_ROWS])
        named += f" and {len(blocked) - _NAMED_ROWS} more" if len(blocked) > _NAMED_ROWS else ""
        is_good = ((flat != 0) | (flat == 0).all(-1, keepdim=True)).all(0).all(0)
        good = is_good.nonzero().reshape(-1).tolist()
        cure = f"Draw with shared_column={good[0]}" if good else "No column is free of zeros: draw id_cond"
        raise ValueRangeError(
            f"id_cond_minimal needs a nonzero weight in column {self.shared_column} of every nonzero output; "
            f"got zeros in outputs {named}. {cure}, or make these weights nonzero."
        )
