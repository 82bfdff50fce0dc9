"""Quantities of M(H) that are averaged along a chain, by name, for all chains at once.

H is first scaled so that Tr M = d, as with batch norms:

    r             Tr(M)^2 / |M|_F^2, the lower bound of the rank
    frobenius     |M|_F^2
    cube          Tr(M^3)
    squares       Tr(diag(M^2)^2)
    offdiagonal   the mean of M_ij over i different from j
    soft_rank t   the number of eigenvalues of M that are at least t, as in "soft_rank 0.5"

The regularity constant alpha is the average of squares divided by that of cube, both for M with unit diagonal. With
norms the diagonal is one. Without norms, rows are scaled to norm sqrt(N) first: `ROWWISE` names these two quantities.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from onlynorm.errors import UnknownNameError, ValueRangeError
from onlynorm.rank.measures import count_at_least
from onlynorm.validate import need_items

PLAIN = ("r", "frobenius", "cube", "squares", "offdiagonal")
_TINY = 1e-30  # a smaller trace counts as zero
USUAL = ("r", "frobenius", "cube", "squares", "soft_rank 0.5")
ROWWISE = {"squares": "squares of unit rows", "cube": "cube of unit rows"}
"""Numerator and denominator of alpha if rows do not have equal norms."""


def check_quantities(names: Sequence[str]) -> tuple[str, ...]:
    """The names as a tuple; raises unless all are known and distinct."""
    if isinstance(names, str):
        names = (names,)
    names = tuple(need_items("quantities", names, cure="Pass names such as ('r', 'frobenius')."))
    for name in names:
        if not isinstance(name, str) or (name not in PLAIN and not _tau(name) > 0.0):
            raise UnknownNameError("quantity", name, (*PLAIN, "soft_rank 0.5"))
    if not names or len(set(names)) < len(names):
        raise ValueRangeError(f"a chain needs distinct quantities; got {', '.join(names) or 'none'}. Drop one.")
    return tuple(names)


def observe(H: Tensor, names: Sequence[str]) -> Tensor:
    """(chains, quantities) in float64; all zero for a chain whose H is zero."""
    d = H.shape[-2]
    M = H @ H.mT
    trace = M.diagonal(dim1=-2, dim2=-1).sum(-1)
    M = M.mul_((d / trace.clamp(min=_TINY))[:, None, None])
    found: dict[str, Tensor] = {}
    plain = [name for name in names if name not in ROWWISE.values()]
    if len(plain) < len(names):
        scales = M.diagonal(dim1=-2, dim2=-1).clamp(min=_TINY).rsqrt()
        unit = M * scales[..., None, :] * scales[..., :, None]
        found = _quantities({row: name for name, row in ROWWISE.items()}, unit)
    found |= _quantities({name: name for name in plain}, M)
    return torch.stack([found[name] for name in names], -1)


def _quantities(named: Mapping[str, str], M: Tensor) -> dict[str, Tensor]:
    """Quantities of M by name."""
    squares = M.square().sum(-1)
    return {key: _quantity(name, M, squares).to("cpu", torch.float64) for key, name in named.items()}


def _quantity(name: str, M: Tensor, squares: Tensor) -> Tensor:
    d = M.shape[-1]
    if name == "r":
        frobenius = squares.sum(-1)
        return torch.where(frobenius > 0, d * d / frobenius, torch.zeros_like(frobenius))
    if name == "frobenius":
        return squares.sum(-1)
    if name == "cube":
        return ((M @ M) * M).sum((-2, -1))
    if name == "squares":
        return squares.square().sum(-1)
    if name == "offdiagonal":
        return (M.sum((-2, -1)) - M.diagonal(dim1=-2, dim2=-1).sum(-1)) / max(d * (d - 1), 1)
    return count_at_least(M, _tau(name))


def _tau(name: str) -> float:
    """tau of "soft_rank 0.5"; NaN for other names."""
    word, _, tail = name.partition(" ")
    try:
        return float(tail) if word == "soft_rank" else math.nan
    except ValueError:
        return math.nan
