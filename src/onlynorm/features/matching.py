"""Can sparse features reach every target? A question about a pattern, answered by a bipartite matching.

Entry ((i, j), f) of the feature matrix M is left[i, f] * right[f, j]. Expand a minor of M: every way to match
its equations to its features adds the product over f of left[i_f, f] * right[f, j_f]. That monomial names the
equation (i_f, j_f) of each feature, so different matchings are different monomials, each with coefficient +1
or -1, and nothing can cancel, although the entries of M are dependent. The minor is a nonzero polynomial
exactly if a matching exists, so the rank of M is the size of a maximum matching for all values of the nonzero
weights outside a set of measure zero. That needs independent weights with a density (sparse_he_normal,
er_normal). For er_sign it is an upper bound only: signs fall on the exceptional set with positive probability
(of random matched patterns with up to 4 outputs and 4 inputs, two in five had a singular M).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool
from torch import Tensor

if TYPE_CHECKING:
    from scipy.sparse import csr_array

from onlynorm.errors import MemoryLimitError, ShapeError
from onlynorm.validate import as_tensor

MAX_NONZEROS = 50_000_000
"""Largest pattern a matching is computed for; about 20 bytes of memory per nonzero."""
_NAMED_ROWS = 5  # how many unmatched equations a message lists
_MAX_EQUATIONS = 2**31 - 1  # scipy's matching counts in 32 bits


@dataclass(frozen=True)
class StructuralRank:
    """Rank of M for almost all values of the nonzero weights, and the equations a matching left out."""

    rank: int
    equations: int
    n_features: int
    unmatched_rows: tuple[tuple[int, int], ...]

    @property
    def is_full(self) -> bool:
        """Whether every equation has a feature of its own, so that every target can be reached."""
        return self.rank == self.equations

    def __str__(self) -> str:
        head = f"structural rank {self.rank} of {self.equations} equations with {self.n_features} features"
        if self.is_full:
            return f"{head}: almost all weights of this pattern reach every target"
        named = ", ".join(str(pair) for pair in self.unmatched_rows[:_NAMED_ROWS])
        more = len(self.unmatched_rows) - _NAMED_ROWS
        return f"{head}: no feature left for (output, input) {named}" + (f" and {more} more" if more > 0 else "")


def is_generically_invertible(left_mask: Bool[Tensor, "rows feat"], right_mask: Bool[Tensor, "feat cols"]) -> bool:
    """Whether almost all weights with these nonzeros reach every target: M has full row rank.

    With as many features as equations that is invertibility of M. Theory: giannou2023:lemma-9
    """
    left_mask, right_mask = _check_masks(left_mask, right_mask)
    if left_mask.shape[1] < left_mask.shape[0] * right_mask.shape[1]:
        return False
    return structural_rank(left_mask, right_mask).is_full


def structural_rank(left_mask: Bool[Tensor, "rows feat"], right_mask: Bool[Tensor, "feat cols"]) -> StructuralRank:
    """Size of a maximum matching of equations (i, j) to features f with left_mask[i, f] and right_mask[f, j].

    It bounds the rank of M for all weights of the pattern and equals it for almost all of them.
    Theory: giannou2023:lemma-9
    """
    from scipy.sparse.csgraph import maximum_bipartite_matching

    left_mask, right_mask = _check_masks(left_mask, right_mask)
    (rows, n_features), cols = left_mask.shape, right_mask.shape[1]
    pattern = _pattern(left_mask.cpu().numpy(), right_mask.cpu().numpy())
    equation_of_feature = maximum_bipartite_matching(pattern, perm_type="column")
    is_matched = np.zeros(rows * cols, dtype=np.bool_)
    is_matched[equation_of_feature[equation_of_feature >= 0]] = True
    i, j = np.divmod(np.flatnonzero(~is_matched), cols)
    return StructuralRank(
        rank=int(is_matched.sum()),
        equations=rows * cols,
        n_features=n_features,
        unmatched_rows=tuple(zip(i.tolist(), j.tolist(), strict=True)),
    )


def reaches(
    left_mask: Bool[Tensor, "rows feat"], right_mask: Bool[Tensor, "feat cols"], wanted: Bool[Tensor, "rows cols"]
) -> bool:
    """Whether almost all weights with these nonzeros make almost every target with the nonzeros `wanted`.

    Asked where M has not full rank but the target has zeros. A target t can be made where [M | t] has the rank of M,
    so where some maximum matching of [M | t] leaves t out; the entries of t are independent of the weights, so that
    again nothing cancels.
    """
    from scipy.sparse import csr_array, vstack

    left_mask, right_mask = _check_masks(left_mask, right_mask)
    pattern = _pattern(left_mask.cpu().numpy(), right_mask.cpu().numpy())
    target = csr_array(wanted.cpu().numpy().reshape(1, -1).astype(np.int8))
    return bool(_is_spare(vstack([pattern, target], format="csr"))[-1])


def free_scales(
    left_mask: Bool[Tensor, "rows feat"], right_mask: Bool[Tensor, "feat cols"], wanted: Bool[Tensor, "rows cols"]
) -> Bool[Tensor, " rows"]:
    """For which outputs left diag(gamma) right = diag(scale) T can have a nonzero scale, for almost every such T.

    T has the nonzeros `wanted`. The scale of output i is a column with the nonzeros of T_i; it can be nonzero where
    that column lies in the span of all others, so where some maximum matching leaves it out. Where all are free, some
    solution has no scale of zero.
    """
    left_mask, right_mask = _check_masks(left_mask, right_mask)
    one_each = torch.eye(len(left_mask), dtype=torch.bool, device=left_mask.device)
    left, right = torch.cat([left_mask, one_each], 1), torch.cat([right_mask, wanted])
    is_spare = _is_spare(_pattern(left.cpu().numpy(), right.cpu().numpy()))
    return torch.from_numpy(is_spare[left_mask.shape[1] :])


def _is_spare(pattern: csr_array) -> npt.NDArray[np.bool_]:
    """Which features some maximum matching leaves out: those an alternating path joins to an unmatched one."""
    from scipy.sparse.csgraph import maximum_bipartite_matching

    equation_of_feature = maximum_bipartite_matching(pattern, perm_type="column")
    is_spare: npt.NDArray[np.bool_] = equation_of_feature < 0
    feature_of_equation = np.full(pattern.shape[1], -1)
    feature_of_equation[equation_of_feature[~is_spare]] = np.flatnonzero(~is_spare)
    found = np.flatnonzero(is_spare)
    while len(found):
        # An equation beside an unmatched feature is matched, else the matching could grow.
        found = np.unique(feature_of_equation[pattern[found].indices])
        found = found[~is_spare[found]]
        is_spare[found] = True
    return is_spare


def _pattern(left_mask: npt.NDArray[np.bool_], right_mask: npt.NDArray[np.bool_]) -> csr_array:
    """The transposed pattern of M: one row per feature, a one for each equation (i, j) it takes part in."""
    from scipy.sparse import csr_array

    (rows, n_features), cols = left_mask.shape, right_mask.shape[1]
    n_left = left_mask.sum(0, dtype=np.int64)
    n_right = right_mask.sum(1, dtype=np.int64)
    nonzeros = int((n_left * n_right).sum())
    if nonzeros > MAX_NONZEROS or rows * cols > _MAX_EQUATIONS:
        raise MemoryLimitError(
            f"structural_rank needs a pattern of at most {MAX_NONZEROS} nonzeros; got {nonzeros} for "
            f"{rows * cols} equations. Thin both masks at random first: a full matching of fewer nonzeros is "
            "one of all of them."
        )
    feature, output = np.nonzero(left_mask.T)
    inputs = np.nonzero(right_mask)[1].astype(np.int32)
    # Each nonzero of left, in order of features, meets all nonzeros of right of its feature in turn.
    repeats = n_right[feature]
    ends = np.cumsum(repeats)
    first_input = (np.cumsum(n_right) - n_right)[feature]
    position = np.arange(nonzeros, dtype=np.int32)
    position += np.repeat((first_input - (ends - repeats)).astype(np.int32), repeats)
    equation = np.repeat((output * cols).astype(np.int32), repeats)
    equation += inputs[position]
    starts = np.concatenate([[0], np.cumsum(n_left * n_right)]).astype(np.int32)
    ones = np.ones(nonzeros, dtype=np.int8)
    return csr_array((ones, equation, starts), shape=(n_features, rows * cols))


def _check_masks(left_mask: Tensor, right_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Both masks as tensors, or an error unless they are the pattern of one layer's features."""
    cure = "Pass features.mask_left() and features.mask_right(), or left != 0 and right != 0."
    left_mask, right_mask = as_tensor("left_mask", left_mask, cure=cure), as_tensor("right_mask", right_mask, cure=cure)
    if (
        left_mask.ndim != 2
        or right_mask.ndim != 2
        or left_mask.shape[1] != right_mask.shape[0]
        or left_mask.dtype != torch.bool
        or right_mask.dtype != torch.bool
    ):
        raise ShapeError(
            "a pattern needs bool masks left (out, feat) and right (feat, inp) with equal feat; got "
            f"{tuple(left_mask.shape)} {left_mask.dtype} and {tuple(right_mask.shape)} {right_mask.dtype}. {cure}"
        )
    return left_mask, right_mask
