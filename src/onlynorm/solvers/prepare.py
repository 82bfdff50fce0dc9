"""Input validation and scaling for `solve`.

Invalid input raises before anything is computed. Very large or small values are scaled by powers of two, which is
exact. Outputs and inputs without a nonzero feature are removed from the system, and so are zero features if there are
many.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool
from torch import Tensor

from onlynorm.errors import InsufficientFeaturesError, ShapeError, ValueRangeError, shown
from onlynorm.solvers.operator import KhatriRao, times_power
from onlynorm.validate import as_real, is_real_number

DEFAULT_TOLERANCE = 1e-10
EXTREME = 20
"""Features whose largest entry lies within 2^+-20 are not scaled: products of four entries fit into float32."""
FIRST = 16
"""Features of a block that are checked before the others."""
SAMPLED, DENSE = 200, 0.95
"""Number of features sampled for zeros, and the fraction of nonzero entries above which features are dense."""

FEW_LEFT = 0.9
"""Zero features are removed if the fraction of nonzero features is below this."""


def need_tolerance(tolerance: float | None) -> float:
    """The tolerance as a float, 1e-10 for None; raises unless it is in (0, 1).

    Examples:
        >>> from onlynorm.solvers import need_tolerance
        >>> need_tolerance(None)
        1e-10
    """
    if tolerance is None:
        return DEFAULT_TOLERANCE
    if not is_real_number(tolerance) or not 0.0 < tolerance < 1.0:
        raise ValueRangeError(f"tolerance needs to lie in (0, 1); got {shown(tolerance)}. Try 1e-10.")
    return float(tolerance)


def need_target(operator: KhatriRao, target: Tensor, near: Tensor | float | None) -> Tensor:
    """The target in the dtype of the operator; raises unless its shape fits and its entries are finite."""
    target = as_real("target", target, cure="Pass the weight of a layer.")
    if target.ndim < 2 or target.shape[-2:] != (operator.out, operator.inp) or target.numel() == 0:
        raise ShapeError(
            f"solve needs a target (..., {operator.out}, {operator.inp}) for left ({operator.out}, "
            f"{operator.n_features}) and right ({operator.n_features}, {operator.inp}); got {tuple(target.shape)}. "
            "Flatten a convolution's kernel into its inputs: weight.flatten(1)."
        )
    need_finite("target", target)
    if near is not None:
        need_near(near, (*target.shape[:-2], operator.n_features))
    return target.detach().to(operator.dtype)


def need_near(near: Tensor | float, shape: tuple[int, ...]) -> Tensor:
    """`near` as a tensor; raises unless it broadcasts to the shape of the gammas."""
    given = as_real("near", near, cure="Pass one gamma per feature.")
    lead = given.shape[:-1]
    fits = given.ndim == 0 or (given.shape[-1] == shape[-1] and len(lead) < len(shape))
    if not fits or any(n not in (1, m) for n, m in zip(reversed(lead), reversed(shape[:-1]), strict=False)):
        raise ShapeError(
            f"near needs a scalar or {shape[-1]} entries; got {tuple(given.shape)}. Pass one gamma per feature."
        )
    need_finite("near", given)
    return given


def need_one_target(target: Tensor, near: Tensor | float | None) -> None:
    """Raises for several targets at minimum width, where the matrix of the system contains the target."""
    if target.ndim != 2 or near is not None:
        got = f"a target of shape {tuple(target.shape)}" if target.ndim != 2 else "near"
        raise ShapeError(
            f"minimum_width needs one target (out, inp) and no near; got {got}. "
            "Solve for one target at a time, or draw out * inp features and omit minimum_width."
        )


def need_enough(operator: KhatriRao, tolerance: float | None, minimum_width: bool, *, has_near: bool = False) -> None:
    """Raises if a tolerance is given with fewer features than equations."""
    if tolerance is None or minimum_width or operator.n_features >= operator.equations:
        return
    missing, otherwise = operator.equations - operator.n_features, "without near otherwise" if has_near else "otherwise"
    raise InsufficientFeaturesError(
        f"an exact solution needs {operator.equations} features for {operator.out} x {operator.inp} weights; got "
        f"{operator.n_features} (excess {operator.excess:.3g}). Draw {missing} more features if the present ones are "
        f"independent, {operator.equations} more dense ones {otherwise}, or omit the tolerance for the least-squares "
        "solution."
    )


def need_finite(name: str, values: Tensor) -> None:
    """Raises at the first NaN or infinity."""
    if not is_finite(values):
        bad = int((~torch.isfinite(values)).sum())
        where = tuple(int(i) for i in (~torch.isfinite(values)).nonzero()[0])
        raise ValueRangeError(
            f"{name} needs finite entries; got {bad} NaN or infinite, the first at {where}. "
            "Check for a diverged training run or a corrupted file."
        )


def is_finite(values: Tensor) -> bool:
    """Whether no entry is NaN or infinite."""
    # The sum is faster than isfinite; a finite sum has finite terms, others need the second test for overflow.
    return math.isfinite(float(values.detach().sum())) or bool(torch.isfinite(values).all())


def in_range(operator: KhatriRao, target: Tensor) -> tuple[KhatriRao, Tensor, int | Tensor]:
    """Operator and target scaled by powers of two to moderate size, and the power by which gamma must be multiplied.

    Each target of a batch is scaled separately; the powers then have the shape (*batch, 1).
    """
    target_power: int | Tensor
    if target.ndim == 2:
        target, target_power = to_middle(target)
    else:
        target_power = torch.frexp(target.abs().amax((-2, -1))).exponent.long()[..., None]
        target = times_power(target, -target_power[..., None])
    powers = (0, 0)
    if operator.is_stored:
        left, right = operator.dense()
        powers = (_power(_largest(left)), _power(_largest(right)))
        if max(abs(p) for p in powers) > EXTREME:
            operator = operator.scaled(-powers[0], -powers[1])
        else:
            powers = (0, 0)
    return operator, target, target_power - powers[0] - powers[1]


def to_middle(target: Tensor) -> tuple[Tensor, int]:
    """The target scaled by a power of two to a largest entry in [1/2, 1), and that power."""
    power = _power(_largest(target))
    return times_power(target, -power), power


def live(operator: KhatriRao) -> tuple[Bool[Tensor, " out"], Bool[Tensor, " inp"]] | None:
    """Masks of the outputs and the inputs that have at least one nonzero feature; None if all have."""
    left, right = operator.sample(operator.n_features)
    if bool(left.all()) and bool(right.all()):  # the first feature is dense
        return None
    outputs = torch.zeros(operator.out, dtype=torch.bool, device=operator.device)
    inputs = torch.zeros(operator.inp, dtype=torch.bool, device=operator.device)
    for _, left, right in operator.blocks():
        for some in (slice(0, FIRST), slice(FIRST, None)):  # usually the first few suffice
            outputs |= (left[some] != 0).any(0)
            inputs |= (right[some] != 0).any(0)
            if bool(outputs.all()) and bool(inputs.all()):
                return None
    return outputs, inputs


def live_features(operator: KhatriRao) -> Bool[Tensor, " feat"] | None:
    """Mask of nonzero features, or None if zero features need not be removed.

    They are removed if there are many, or if fewer nonzero features than equations remain: methods for solvable systems
    then fail.
    """
    if not operator.is_stored:
        return None
    left, right = operator.dense()
    live = left.any(0) & right.any(1)
    count = int(live.sum())
    is_overdetermined = count < operator.equations <= operator.n_features
    return live if count < FEW_LEFT * operator.n_features or is_overdetermined else None


def nonzero_fraction(operator: KhatriRao) -> float | None:
    """The fraction of nonzero entries of sparse features; None for dense features."""
    left, right = operator.sample(max(1, operator.n_features // SAMPLED))
    fractions = [float(torch.count_nonzero(factor)) / factor.numel() for factor in (left, right)]
    return None if min(fractions) > DENSE else math.sqrt(fractions[0] * fractions[1])


def need_reached(operator: KhatriRao, target: Tensor, outputs: Tensor, inputs: Tensor) -> None:
    """Raises if the target has nonzero weights without a feature."""
    wanted = (target != 0).reshape(-1, operator.out, operator.inp).any(0)
    lost = wanted & ~(outputs[:, None] & inputs[None, :])
    if bool(lost.any()):
        rows = sorted({int(i) for i in lost.nonzero()[:, 0]})[:5]
        raise InsufficientFeaturesError(
            f"an exact solution needs features at every nonzero weight; got none at {int(lost.sum())} of them, "
            f"first in outputs {', '.join(map(str, rows))} (zero rows of left or zero columns of right). "
            "Draw denser features, or omit the tolerance for the least-squares solution."
        )


def _largest(values: Tensor) -> float:
    """The largest absolute value, without a copy of `values`."""
    low, high = torch.aminmax(values)
    return max(-float(low), float(high))


def _power(size: float) -> int:
    return math.frexp(size)[1] if size > 0.0 else 0
