"""Standard normals from uniforms, bit-identical on every machine.

The inverse normal distribution function is a set of rational approximations (Wichura 1988, algorithm AS 241,
routine PPND16). Only operations that IEEE 754 rounds exactly are used, one at a time and in a fixed order:
add, subtract, multiply, divide, square root, and frexp. A library `log` or `exp` differs in the last bit between
machines and versions, and a fused multiply-add rounds once instead of twice; either would change the regenerated
weights. The logarithm is therefore implemented here, and every step is a separate numpy ufunc, which cannot be fused.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

# Coefficients for Horner's scheme, highest power first.
_CENTRE_ABOVE = (
    2.5090809287301226727e3,
    3.3430575583588128105e4,
    6.7265770927008700853e4,
    4.5921953931549871457e4,
    1.3731693765509461125e4,
    1.9715909503065514427e3,
    1.3314166789178437745e2,
    3.3871328727963666080e0,
)
_CENTRE_BELOW = (
    5.2264952788528545610e3,
    2.8729085735721942674e4,
    3.9307895800092710610e4,
    2.1213794301586595867e4,
    5.3941960214247511077e3,
    6.8718700749205790830e2,
    4.2313330701600911252e1,
    1.0,
)
_TAIL_ABOVE = (
    7.74545014278341407640e-4,
    2.27238449892691845833e-2,
    2.41780725177450611770e-1,
    1.27045825245236838258e0,
    3.64784832476320460504e0,
    5.76949722146069140550e0,
    4.63033784615654529590e0,
    1.42343711074968357734e0,
)
_TAIL_BELOW = (
    1.05075007164441684324e-9,
    5.47593808499534494600e-4,
    1.51986665636164571966e-2,
    1.48103976427480074590e-1,
    6.89767334985100004550e-1,
    1.67638483018380384940e0,
    2.05319162663775882187e0,
    1.0,
)
_FAR_TAIL_ABOVE = (
    2.01033439929228813265e-7,
    2.71155556874348757815e-5,
    1.24266094738807843860e-3,
    2.65321895265761230930e-2,
    2.96560571828504891230e-1,
    1.78482653991729133580e0,
    5.46378491116411436990e0,
    6.65790464350110377720e0,
)
_FAR_TAIL_BELOW = (
    2.04426310338993978564e-15,
    1.42151175831644588870e-7,
    1.84631831751005468180e-5,
    7.86869131145613259100e-4,
    1.48753612908506148525e-2,
    1.36929880922735805310e-1,
    5.99832206555887937690e-1,
    1.0,
)
_CENTRE_SHIFT = 0.180625  # 0.425 squared; the central approximation holds for |u - 1/2| <= 0.425
_TAIL_SHIFT = 1.6
_FAR_TAIL_START = 5.0
_SQRT_HALF = float.fromhex("0x1.6a09e667f3bcdp-1")
_LOG2_HIGH = float.fromhex("0x1.62e42fee00000p-1")  # 33 leading bits of log 2: exponent * high is exact
_LOG2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_LOG_TERMS = tuple(2.0 / n for n in range(23, 0, -2))  # 2/23, ..., 2/3, 2: log m = f * poly(f^2)
CHUNK = 32768  # numbers per step: the buffers stay in a core's cache and numpy's call overhead is hidden


class NormalTransform:
    """Uniforms to normals, up to `n` at a time, with buffers that are allocated once."""

    def __init__(self, n: int) -> None:
        self._buffers = np.empty((3, n))

    def __call__(self, uniforms: Array, *, out: Array) -> Array:
        """Inverse normal distribution function of `uniforms`: multiples of 2^-53 strictly between 0 and 1.

        Relative error below 2e-15 on that grid; between its points u - 1/2 would round.
        """
        q, r, below = self._buffers[:, : uniforms.size]
        np.subtract(uniforms, 0.5, out=q)  # exact on the grid
        np.multiply(q, q, out=r)
        np.subtract(_CENTRE_SHIFT, r, out=r)
        tails = np.flatnonzero(r < 0.0)
        np.maximum(r, 0.0, out=r)  # keeps the discarded tail entries away from the poles of the quotient
        _horner(_CENTRE_ABOVE, r, out=out)
        _horner(_CENTRE_BELOW, r, out=below)
        np.divide(out, below, out=out)
        np.multiply(out, q, out=out)
        out[tails] = _tail(q[tails])
        return out


def log_of_small(x: Array) -> Array:
    """Natural logarithm of positive normal numbers by exactly rounded operations: log x = e log 2 + log m.

    m in [sqrt(1/2), sqrt(2)) and log m = 2 atanh f with f = (m - 1)/(m + 1), |f| < 0.172, by its series.
    """
    m, exponent = np.frexp(x)
    low = m < _SQRT_HALF
    e = exponent.astype(np.float64)
    np.add(m, m, out=m, where=low)
    np.subtract(e, 1.0, out=e, where=low)
    f = (m - 1.0) / (m + 1.0)
    series = _horner(_LOG_TERMS, f * f)
    series *= f
    series += e * _LOG2_LOW
    series += e * _LOG2_HIGH
    return series


def _tail(q: Array) -> Array:
    """The quantile of 1/2 + q for |q| outside the central interval."""
    distance = 0.5 - np.abs(q)  # exact: the smaller of u and 1 - u
    t = np.sqrt(-log_of_small(distance))
    far = np.flatnonzero(t > _FAR_TAIL_START)
    far_t = t[far] - _FAR_TAIL_START
    t -= _TAIL_SHIFT
    value = _horner(_TAIL_ABOVE, t)
    value /= _horner(_TAIL_BELOW, t)
    if far.size:
        value[far] = _horner(_FAR_TAIL_ABOVE, far_t) / _horner(_FAR_TAIL_BELOW, far_t)
    return np.copysign(value, q)


def _horner(coefficients: tuple[float, ...], x: Array, *, out: Array | None = None) -> Array:
    """Polynomial by Horner's scheme, highest coefficient first, rounded after every operation."""
    value = np.empty_like(x) if out is None else out
    np.multiply(x, coefficients[0], out=value)
    np.add(value, coefficients[1], out=value)
    for c in coefficients[2:]:
        np.multiply(value, x, out=value)
        np.add(value, c, out=value)
    return value
