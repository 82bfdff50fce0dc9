"""The named distributions, and `draw`, which turns a name and a target's shape into frozen features.

Scales follow He et al. (2015): variance 2 / fan_in, where fan_in counts the inputs of a neuron of the source
layer at hand, inp * kernel positions for the first and features * kernel positions for the second.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

import torch

from onlynorm.errors import ShapeError, UnknownNameError, ValueRangeError
from onlynorm.features.orthogonal import haar_columns
from onlynorm.features.registry import Array, Side, lookup, names, register
from onlynorm.features.streams import Stream, as_integer, check_density, check_seed
from onlynorm.features.weights import Features, build_structure

__all__ = ["Features", "draw", "names", "register"]

DEFAULT_EXCESS = 1.25
_KERNELS = ("first", "second")


@register("he_normal")
def he_normal(side: Side, start: int, stop: int) -> Array:
    """Normal entries of variance 2 / fan_in."""
    return side.normals(start, stop) * math.sqrt(2.0 / side.fan_in)


@register("he_uniform")
def he_uniform(side: Side, start: int, stop: int) -> Array:
    """Uniform entries on +-sqrt(6 / fan_in), of variance 2 / fan_in."""
    return uniform(side, start, stop) * math.sqrt(6.0 / side.fan_in)


@register("uniform")
def uniform(side: Side, start: int, stop: int) -> Array:
    """Uniform entries on (-1, 1), without a scale: 2 u - 1, exact in float64."""
    numbers = side.uniforms(start, stop)
    numbers -= 0.5
    numbers += numbers
    return numbers


@register("orthogonal", is_grouped=True)
def orthogonal(side: Side, start: int, stop: int) -> Array:
    """Groups of `width` consecutive features, each the columns of its own Haar matrix; the last one is cut.

    Scaled by sqrt(2 width / fan_in), so that entries have the variance 2 / fan_in of He's.
    """
    return haar_columns(side.stream(), side.width, start, stop) * math.sqrt(2.0 * side.width / side.fan_in)


@register("sparse_he_normal", density=0.5)
def sparse_he_normal(side: Side, start: int, stop: int) -> Array:
    """Normal entries that stay with probability `density`, of variance 2 / (density fan_in) where they stay.

    Counted with the zeros the variance is He's 2 / fan_in: the signal keeps its size at any density.
    """
    density = 1.0 if side.density is None else side.density
    return side.normals(start, stop) * math.sqrt(2.0 / (density * side.fan_in))


@register("er_normal", density=0.5)
def er_normal(side: Side, start: int, stop: int) -> Array:
    """Standard normal entries that stay with probability `density` (Erdos-Renyi mask), without a scale."""
    return side.normals(start, stop)


@register("er_sign", density=0.5)
def er_sign(side: Side, start: int, stop: int) -> Array:
    """Random signs that stay with probability `density` (Erdos-Renyi mask), without a scale."""
    return side.signs(start, stop)


def draw(
    name: str,
    shape: Sequence[int],
    *,
    n_features: int | None = None,
    excess: float | None = None,
    seed: int = 0,
    layer: str = "",
    kernel: str = "first",
    density: float | None = None,
    shared_column: int = 0,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Features:
    """Frozen features for a target weight of `shape`: (out, inp) or (out, inp, *kernel), 1 to 3 kernel axes.

    `n_features`, or `excess` = features per equation (1.25 if neither is given), sets how many; structured
    distributions fix their own number. `kernel` says which source layer holds the kernel: "first" gives right
    (feat, inp * positions) and left (out, feat), "second" right (feat, inp) and left (out * positions, feat).
    `density` belongs to the sparse distributions and to id_cond, `shared_column` to id_cond_minimal. Features
    of equal seed and different `layer` are independent. Nothing large is computed before a block is asked for.
    """
    distribution = lookup(name)
    shape = check_shape(shape)
    if kernel not in _KERNELS:
        raise UnknownNameError("kernel", str(kernel), _KERNELS)
    if distribution is not None and distribution.density is not None:
        density = distribution.density if density is None else check_density(density)
    elif density is not None:
        if name != "id_cond":
            raise ValueRangeError(
                f"density needs a sparse distribution; got {density!r} for {name}, which is dense. Leave "
                "density out, or draw sparse_he_normal, er_normal, er_sign or id_cond."
            )
        density = check_density(density)
    if shared_column != 0 and name != "id_cond_minimal":
        raise ValueRangeError(
            f"shared_column needs id_cond_minimal; got {shared_column!r} for {name}. Leave shared_column out."
        )
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueRangeError(f"dtype needs a real floating-point type; got {dtype!r}. Pass torch.float32 or float64.")
    features = Features(
        name=name,
        shape=shape,
        n_features=0 if distribution is None else _count(n_features, excess, math.prod(shape)),
        seed=check_seed(seed),
        layer=Stream(0, layer, "").layer,
        kernel=kernel,
        density=density,
        shared_column=shared_column,
        dtype=dtype,
        device=torch.device(device),
    )
    return features if distribution is not None else _with_own_count(features, n_features, excess)


def _with_own_count(features: Features, n_features: int | None, excess: float | None) -> Features:
    # The factors of ortho_cond are dear to draw and not needed to count its features.
    own = features.equations if features.name == "ortho_cond" else build_structure(features).n_features
    if excess is not None or n_features not in (None, own):
        raise ValueRangeError(
            f"{features.name} needs exactly its own {own} features; got n_features={n_features!r}, "
            f"excess={excess!r}. Leave both out."
        )
    return dataclasses.replace(features, n_features=own)


def check_shape(shape: object) -> tuple[int, ...]:
    """The shape of a target's weight as ints, or an error that says what it may be."""
    sizes = [as_integer(size) for size in shape] if isinstance(shape, Iterable) else []
    if not 2 <= len(sizes) <= 5 or any(size is None or size < 1 for size in sizes):
        raise ShapeError(
            f"shape needs 2 to 5 positive whole numbers, (out, inp) or (out, inp, *kernel); got {shape!r}. "
            "Pass tuple(layer.weight.shape)."
        )
    return tuple(size for size in sizes if size is not None)


def _count(n_features: object, excess: object, equations: int) -> int:
    if n_features is not None and excess is not None:
        raise ValueRangeError(
            f"draw needs one of n_features and excess; got n_features={n_features!r} and excess={excess!r}. "
            "Leave one out."
        )
    if n_features is not None:
        count = as_integer(n_features)
        if count is None or count < 1:
            raise ValueRangeError(
                f"n_features needs a positive whole number; got {n_features!r}. For {equations} equations "
                f"{math.ceil(DEFAULT_EXCESS * equations)} is a good choice."
            )
        return count
    excess = DEFAULT_EXCESS if excess is None else excess
    if not isinstance(excess, (int, float)) or isinstance(excess, bool) or not 0.0 < excess < math.inf:
        raise ValueRangeError(
            f"excess needs a positive finite number, features per equation; got {excess!r}. Pass excess=1.25."
        )
    return math.ceil(Fraction(str(float(excess))) * equations)  # the decimal as written: 1.1 times 10 is 11
