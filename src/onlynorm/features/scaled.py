"""ID cond features with given singular values: M = diag(s), so the effective weight is s * gamma.

A gradient step on gamma changes the effective weight by s^2 times the ordinary step: only the conditioning changes, so
that its effect on training can be measured. Singular values of random square features have the quarter-circle density
sqrt(4 - x^2) / pi on (0, 2]; `semicircle_spectrum` uses its part above 2 / condition. The mean square is one, so that
learning rates are comparable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from onlynorm.errors import OnlynormError, ShapeError, ValueRangeError, shown
from onlynorm.features.streams import Stream, as_integer
from onlynorm.features.structured import IdCond
from onlynorm.validate import as_real, is_real_number, need_free_memory

_HALVINGS = 60
MAX_CONDITION = 1e37
"""Limit at which the smallest value still fits into float32."""


def semicircle_spectrum(n: int, *, condition: float, seed: int = 0, layer: str = "") -> Float[Tensor, " n"]:
    """n positive singular values with ratio `condition` by the quarter-circle law, in random order.

    They are evenly spaced quantiles, not samples, so that the condition number is exact for every seed; the stream
    "spectrum" of (seed, layer) gives their order. Returned as float64 but rounded to float32, so that they are
    identical on machines whose sines differ in the last bit.

    Examples:
        >>> from onlynorm.features import semicircle_spectrum
        >>> values = semicircle_spectrum(8, condition=10.0)
        >>> round((values.max() / values.min()).item(), 4)
        10.0
    """
    count = as_integer(n) or 0
    highest = MAX_CONDITION if count > 1 else 1.0
    if not 1 <= count < 2**62 or not is_real_number(condition) or not 1.0 <= condition <= highest:
        raise ValueRangeError(
            "a spectrum needs at least two values and a condition of at least 1 and at most "
            f"{MAX_CONDITION:.0e}; got {shown(n)} values at condition {shown(condition)}. A single value has "
            "condition 1."
        )
    need_free_memory(f"a spectrum of {count:.3g} values", 64.0 * count, cure="Pass the number of features of a layer.")
    # With x = 2 sin(angle) the distribution function is (angle + sin(angle) cos(angle)) * 2 / pi.
    smallest = math.asin(1.0 / condition)
    low, high = np.full(count, smallest), np.full(count, math.pi / 2)
    begin, end = _mass(low[:1])[0], _mass(high[:1])[0]
    wanted = np.linspace(begin, end, count)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        is_below = _mass(middle) < wanted
        low, high = np.where(is_below, middle, low), np.where(is_below, high, middle)
    values = 2.0 * np.sin((low + high) / 2)
    values[0], values[-1] = 2.0 / condition, 2.0
    values /= math.sqrt(float(np.mean(values**2)))
    ordered = values[Stream(seed, layer, "spectrum").permutation(count)]
    return torch.from_numpy(ordered.astype(np.float32).astype(np.float64))


def as_spectrum(spectrum: object) -> Float[Tensor, " n"]:
    """The spectrum as a 1-d float64 tensor on the CPU; raises unless its entries are real."""
    try:
        values = as_real("a spectrum", spectrum).detach()
    except OnlynormError as error:
        raise ValueRangeError(
            f"a spectrum needs real numbers; got {shown(spectrum)}. Pass a tensor with one value per feature."
        ) from error
    return values.double().cpu().reshape(-1)


def need_spectrum(spectrum: Tensor, n_features: int) -> Float[Tensor, " feat"]:
    """The spectrum as a 1-d float64 tensor; raises unless it has one finite positive entry per feature."""
    values = as_spectrum(spectrum)
    if len(values) != n_features:
        raise ShapeError(
            f"a spectrum needs one value per feature, {n_features}; got {len(values)}. Make it with "
            f"semicircle_spectrum({n_features}, condition=100.0)."
        )
    is_bad = ~(torch.isfinite(values) & (values > 0.0))
    if bool(is_bad.any()):
        where = int(is_bad.nonzero()[0])
        raise ValueRangeError(
            f"a spectrum needs positive finite values; got {float(values[where])} at feature {where} and "
            f"{int(is_bad.sum())} such in total. To remove features, use density= instead of zeros."
        )
    return values


@dataclass(frozen=True, eq=False)
class Scaled:
    """ID cond features times a spectrum: feature k is s_k in the first source layer and 1 in the second."""

    base: IdCond
    spectrum: Float[Tensor, " feat"]

    @property
    def n_features(self) -> int:
        return self.base.n_features

    def apply(self, gamma: Float[Tensor, "*batch feat"]) -> Float[Tensor, "*batch rows cols"]:
        """s_k gamma_k at the entry of feature k."""
        return self.base.apply(self.spectrum.to(gamma) * gamma)

    def transpose(self, residual: Float[Tensor, "*batch rows cols"]) -> Float[Tensor, "*batch feat"]:
        """The entries of `residual` that have a feature, times its s."""
        return self.spectrum.to(residual) * self.base.transpose(residual)

    def solve(self, target: Float[Tensor, "*batch rows cols"]) -> Float[Tensor, "*batch feat"]:
        """gamma_k = (entry of feature k) / s_k."""
        return self.base.solve(target) / self.spectrum.to(target)

    def grid(self, values: Float[Tensor, "*batch feat"]) -> Float[Tensor, "*batch rows cols"]:
        """One value per feature at its entry, zero elsewhere."""
        return self.base.grid(values)

    def constant(self, beta: Float[Tensor, "*batch feat"]) -> Float[Tensor, "*batch rows"]:
        """The contribution of beta, one value per feature, to every row."""
        return self.base.constant(beta)

    def input_of(self, k: Int[Tensor, "*k"] | int | None = None) -> Int[Tensor, "*k"]:
        """Column of the target matrix that feature k reads, times its s."""
        return self.base.input_of(k)

    def left(self, start: int, stop: int) -> Float[Tensor, "rows block"]:
        return self.base.left(start, stop)

    def right(self, start: int, stop: int) -> Float[Tensor, "block cols"]:
        return self.spectrum[start:stop, None].double().cpu() * self.base.right(start, stop)

    def to(self, dtype: torch.dtype, device: torch.device) -> Scaled:
        return Scaled(self.base.to(dtype, device), self.spectrum.to(device, dtype))

    def digest_bytes(self) -> bytes:
        """Bytes of the base, then the spectrum as little-endian float64."""
        return self.base.digest_bytes() + self.spectrum.double().cpu().numpy().astype("<f8").tobytes()


def _mass(angle: np.ndarray[tuple[int], np.dtype[np.float64]]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """pi / 2 times the fraction of the law below 2 sin(angle)."""
    return angle + np.sin(angle) * np.cos(angle)
