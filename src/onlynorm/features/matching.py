"""Structural rank of sparse features, by bipartite matching.

Entry ((i, j), f) of the feature matrix M is left[i, f] * right[f, j]. In the expansion of a minor of M, every matching
of its equations to its features contributes the product over f of left[i_f, f] * right[f, j_f]. This monomial
determines the equation (i_f, j_f) of each feature, so different matchings give different monomials with coefficients
+1 or -1, which cannot cancel. The minor is a nonzero polynomial if and only if a matching exists. The rank of M is
therefore the size of a maximum matching, for all values of the nonzero weights outside a set of measure zero. This
requires independent weights with a density (sparse_he_normal, er_normal). For er_sign it is only an upper bound: signs
are in the exceptional set with positive probability (of random matched patterns with up to 4 outputs and 4 inputs, two
in five had a singular M).
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

from onlynorm.display import Result
from onlynorm.errors import MemoryLimitError, ShapeError
from onlynorm.validate import as_tensor

MAX_NONZEROS = 50_000_000
"""Maximum number of nonzeros of a pattern; a matching needs about 20 bytes per nonzero."""
_NAMED_ROWS = 5  # unmatched equations listed in a message
_MAX_EQUATIONS = 2**31 - 1  # scipy's matching uses 32-bit indices


@dataclass(frozen=True)
class StructuralRank(Result):
    """Rank of M for almost all values of the nonzero weights, and the unmatched equations."""

    rank: int
    equations: int
    n_features: int
    unmatched_rows: tuple[tuple[int, int], ...]

    @property
    def is_full(self) -> bool:
        """Whether all equations are matched, so that every target has a solution."""
        return self.rank == self.equations

    def __str__(self) -> str:
        head = f"structural rank {self.rank} of {self.equations} equations with {self.n_features} features"
        if self.is_full:
            return f"{head}: every target has a solution for almost all weights of this pattern"
        named = ", ".join(str(pair) for pair in self.unmatched_rows[:_NAMED_ROWS])
        more = len(self.unmatched_rows) - _NAMED_ROWS
        return f"{head}: unmatched (output, input) {named}" + (f" and {more} more" if more > 0 else "")


def is_generically_invertible(left_mask: Bool[Tensor, "rows feat"], right_mask: Bool[Tensor, "feat cols"]) -> bool:
    """Whether M has full row rank for almost all weights with these nonzeros, so that every target has a solution.

    For a square M this is invertibility. Theory: giannou2023:lemma-9

    Examples:
        >>> import torch
        >>> from onlynorm.features import is_generically_invertible
        >>> left, right = torch.ones(2, 6, dtype=torch.bool), torch.ones(6, 3, dtype=torch.bool)
        >>> is_generically_invertible(left, right), is_generically_invertible(left[:, :5], right[:5])
        (True, False)
    """
    left_mask, right_mask = _check_masks(left_mask, right_mask)
    if left_mask.shape[1] < left_mask.shape[0] * right_mask.shape[1]:
        return False
    return structural_rank(left_mask, right_mask).is_full


def structural_rank(left_mask: Bool[Tensor, "rows feat"], right_mask: Bool[Tensor, "feat cols"]) -> StructuralRank:
    """Size of a maximum matching of equations (i, j) to features f with left_mask[i, f] and right_mask[f, j].

    An upper bound of the rank of M for all weights of the pattern, with equality for almost all.
    Theory: giannou2023:lemma-9

    Examples:
        >>> import torch
        >>> from onlynorm.features import structural_rank
        >>> left, right = torch.ones(2, 5, dtype=torch.bool), torch.ones(5, 3, dtype=torch.bool)
        >>> structural_rank(left, right).rank
        5
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
    """Whether almost every target with the nonzeros `wanted` has a solution, for almost all weights of the pattern.

    For targets with zeros, where M need not have full rank. A target t has a solution if [M | t] has the rank of M, so
    if some maximum matching of [M | t] does not use t. The entries of t are independent of the weights, so that again
    nothing cancels.
    """
    from scipy.sparse import csr_array, vstack

    left_mask, right_mask = _check_masks(left_mask, right_mask)
    pattern = _pattern(left_mask.cpu().numpy(), right_mask.cpu().numpy())
    target = csr_array(wanted.cpu().numpy().reshape(1, -1).astype(np.int8))
    return bool(_is_spare(vstack([pattern, target], format="csr"))[-1])


def free_scales(
    left_mask: Bool[Tensor, "rows feat"], right_mask: Bool[Tensor, "feat cols"], wanted: Bool[Tensor, "rows cols"]
) -> Bool[Tensor, " rows"]:
    """Mask of outputs whose scale in left diag(gamma) right = diag(scale) T can be nonzero, for almost every T.

    T has the nonzeros `wanted`. The scale of output i is the coefficient of a column with the nonzeros of T_i. It can
    be nonzero if that column is in the span of the others, so if some maximum matching does not use it. If all are
    free, a solution without zero scales exists.
    """
    left_mask, right_mask = _check_masks(left_mask, right_mask)
    one_each = torch.eye(len(left_mask), dtype=torch.bool, device=left_mask.device)
    left, right = torch.cat([left_mask, one_each], 1), torch.cat([right_mask, wanted])
    is_spare = _is_spare(_pattern(left.cpu().numpy(), right.cpu().numpy()))
    return torch.from_numpy(is_spare[left_mask.shape[1] :])


def _is_spare(pattern: csr_array) -> npt.NDArray[np.bool_]:
    """Mask of features that some maximum matching does not use: an alternating path joins them to an unmatched one."""
    from scipy.sparse.csgraph import maximum_bipartite_matching

    equation_of_feature = maximum_bipartite_matching(pattern, perm_type="column")
    is_spare: npt.NDArray[np.bool_] = equation_of_feature < 0
    feature_of_equation = np.full(pattern.shape[1], -1)
    feature_of_equation[equation_of_feature[~is_spare]] = np.flatnonzero(~is_spare)
    found = np.flatnonzero(is_spare)
    while len(found):
        # Equations adjacent to an unmatched feature are matched, else the matching would not be maximum.
        found = np.unique(feature_of_equation[pattern[found].indices])
        found = found[~is_spare[found]]
        is_spare[found] = True
    return is_spare


def _pattern(left_mask: npt.NDArray[np.bool_], right_mask: npt.NDArray[np.bool_]) -> csr_array:
    """The transposed pattern of M: one row per feature, a one for each equation (i, j) with a nonzero entry."""
    from scipy.sparse import csr_array

    (rows, n_features), cols = left_mask.shape, right_mask.shape[1]
    n_left = left_mask.sum(0, dtype=np.int64)
    n_right = right_mask.sum(1, dtype=np.int64)
    nonzeros = int((n_left * n_right).sum())
    if nonzeros > MAX_NONZEROS or rows * cols > _MAX_EQUATIONS:
        raise MemoryLimitError(
            f"structural_rank needs a pattern of at most {MAX_NONZEROS} nonzeros; got {nonzeros} for "
            f"{rows * cols} equations. Set random entries of both masks to False first: a full matching of the "
            "rest is one of the whole pattern."
        )
    feature, output = np.nonzero(left_mask.T)
    inputs = np.nonzero(right_mask)[1].astype(np.int32)
    # Combine each nonzero of left, in order of features, with all nonzeros of right of the same feature.
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
    """Both masks as tensors; raises unless they are boolean matrices of matching shape."""
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
