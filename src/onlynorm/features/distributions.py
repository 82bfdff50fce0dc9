"""The named distributions, and `draw`, which turns a name and a target's shape into frozen features.

Scales follow He et al. (2015): variance 2 / fan_in, where fan_in counts the inputs of a neuron of the source
layer at hand, inp * kernel positions for the first and features * kernel positions for the second.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

import numpy as np
import torch

from onlynorm.errors import ShapeError, ValueRangeError, shown
from onlynorm.features.orthogonal import haar_columns
from onlynorm.features.registry import Array, Side, lookup, names, register
from onlynorm.features.streams import Stream, as_integer, check_density, check_seed
from onlynorm.features.weights import Features, build_structure
from onlynorm.modules import is_real_number, need_choice, need_device, need_float_dtype, need_free_memory

__all__ = ["Features", "draw", "names", "register"]

DEFAULT_EXCESS = 1.25
_KERNELS = ("first", "second")
_MOST_WEIGHTS = 2**62
"""Entries of a weight, or features: more have no address."""


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

    Distributions of one seed and layer name share their underlying random numbers, so that he_normal and he_uniform are
    then dependent: the larger number of one is the larger of the other. Use another seed or layer name for independent
    draws.
    """
    distribution = lookup(name)
    shape = check_shape(shape)
    kernel = need_choice("kernel", kernel, _KERNELS)
    if distribution is not None and distribution.density is not None:
        density = distribution.density if density is None else check_density(density)
    elif density is not None:
        if name != "id_cond":
            raise ValueRangeError(
                f"density needs a sparse distribution; got {shown(density)} for {name}, which is dense. Leave "
                "density out, or draw sparse_he_normal, er_normal, er_sign or id_cond."
            )
        density = check_density(density)
    column = as_integer(shared_column)
    if column != 0 and name != "id_cond_minimal":
        raise ValueRangeError(
            f"shared_column needs id_cond_minimal; got {shown(shared_column)} for {name}. Leave shared_column out."
        )
    features = Features(
        name=name,
        shape=shape,
        n_features=0 if distribution is None else _need_room(_count(n_features, excess, math.prod(shape))),
        seed=check_seed(seed),
        layer=Stream(0, layer, "").layer,
        kernel=kernel,
        density=density,
        shared_column=shared_column if column is None else column,  # the structure refuses what is no column
        dtype=need_float_dtype("dtype", dtype),
        device=need_device("device", device, is_meta_allowed=True),
    )
    return features if distribution is not None else _with_own_count(features, n_features, excess)


def _with_own_count(features: Features, n_features: int | None, excess: float | None) -> Features:
    # The factors of ortho_cond are dear to draw and not needed to count its features.
    own = features.equations if features.name == "ortho_cond" else build_structure(features).n_features
    if excess is not None or (n_features is not None and as_integer(n_features) != own):
        raise ValueRangeError(
            f"{features.name} needs exactly its own {own} features; got n_features={shown(n_features)}, "
            f"excess={shown(excess)}. Leave both out."
        )
    return dataclasses.replace(features, n_features=_need_room(own))


def check_shape(shape: object) -> tuple[int, ...]:
    """The shape of a target's weight as ints, or an error that says what it may be."""
    is_listed = isinstance(shape, Iterable) and not isinstance(shape, torch.nn.Module)
    is_listed = is_listed and not (isinstance(shape, torch.Tensor) and (shape.is_nested or not shape.ndim))
    sizes = [as_integer(size) for size in itertools.islice(shape, 6)] if is_listed else []  # type: ignore[call-overload]
    if not 2 <= len(sizes) <= 5 or any(size is None or size < 1 for size in sizes):
        raise ShapeError(
            f"shape needs 2 to 5 positive whole numbers, (out, inp) or (out, inp, *kernel); got {shown(shape)}. "
            "Pass tuple(layer.weight.shape)."
        )
    found = tuple(size for size in sizes if size is not None)
    if math.prod(found) > _MOST_WEIGHTS:
        raise ShapeError(
            f"shape needs a weight that a computer can address, of fewer than 2^62 entries; got {shown(shape)}. Is an "
            "axis too long?"
        )
    return found


def _count(n_features: object, excess: object, equations: int) -> int:
    if n_features is not None and excess is not None:
        raise ValueRangeError(
            f"draw needs one of n_features and excess; got n_features={shown(n_features)} and excess={shown(excess)}. "
            "Leave one out."
        )
    if n_features is not None:
        count = as_integer(n_features)
        if count is None or count < 1:
            raise ValueRangeError(
                f"n_features needs a positive whole number; got {shown(n_features)}. For {equations} equations "
                f"{math.ceil(DEFAULT_EXCESS * equations)} is a good choice."
            )
        return count
    excess = DEFAULT_EXCESS if excess is None else excess
    if not is_real_number(excess) or not 0.0 < excess < math.inf:  # type: ignore[operator]
        raise ValueRangeError(
            f"excess needs a positive finite number, features per equation; got {shown(excess)} for {equations} "
            "equations. Pass excess=1.25."
        )
    return math.ceil(_as_written(excess) * equations)  # the decimal as written: 1.1 times 10 is 11


def _need_room(n_features: int) -> int:
    """Raises where not even one number for each feature fits into memory: their gammas could not be held."""
    n_bytes = 8.0 * min(n_features, 10**300)
    need_free_memory(
        f"one gamma for each of {n_bytes / 8:.3g} features", n_bytes, cure="Take a smaller excess or fewer n_features."
    )
    return n_features


def _as_written(number: object) -> Fraction:
    """The shortest decimal that rounds to this float, in its own precision."""
    narrow = isinstance(number, np.floating) and number.itemsize < 8
    return Fraction(str(number) if narrow else str(float(number)))  # type: ignore[arg-type]
