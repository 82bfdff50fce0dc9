"""Batch norms as affine maps: conversion in both directions.

In evaluation mode a batch norm is an affine map per channel:

    scale = weight / sqrt(variance + eps),    shift = bias - scale * mean

`to_affine` converts a batch norm to an equivalent `Affine`; `from_affine` converts an affine map to an equivalent batch
norm with given statistics.

Theory: giannou2023:prop-1
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.errors import ConversionError, ShapeError, UnknownNameError, ValueRangeError
from onlynorm.modules.walk import need_model
from onlynorm.validate import as_real, need_float_dtype, need_free_memory, need_instance, need_integer

BatchNorm: TypeAlias = nn.modules.batchnorm._BatchNorm
NORM_KINDS = ("batch", "affine")
_CURE = "Pass the number of channels."
_BATCH_NORMS: dict[int, type[BatchNorm]] = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


class Affine(nn.Module):
    """x -> weight * x + bias per channel (dimension 1): a norm without statistics."""

    def __init__(self, num_features: int, *, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        num_features = need_integer("num_features", num_features, low=0, cure="Pass the number of channels.")
        dtype = need_float_dtype("dtype", dtype)
        need_free_memory(f"an Affine of {num_features:.3g} channels", 2.0 * num_features * dtype.itemsize, cure=_CURE)
        self.num_features = num_features
        self.weight = nn.Parameter(torch.ones(num_features, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(num_features, dtype=dtype))

    def extra_repr(self) -> str:
        return str(self.num_features)

    def forward(self, x: Tensor) -> Tensor:
        """Scales and shifts every channel of a batch (samples, channels, *positions)."""
        return normalise(self, x, slice(None))


@dataclass(frozen=True, eq=False)
class Sharing:
    """Maps each channel to one of a few distinct inputs; `n_inputs` is the number of inputs per group of channels.

    `inputs` returns the index of the input of each of some channels. Without it, channels cycle through the inputs of
    their group.
    """

    n_channels: int
    n_inputs: tuple[int, ...]
    inputs: Callable[[Int[Tensor, " feat"]], Int[Tensor, " feat"]] | None = None

    def spread(self, values: Shaped[Tensor, " inp"], which: slice = slice(None)) -> Shaped[Tensor, " feat"]:
        """Values per input as values per channel, for the channels `which`."""
        start, stop, _ = which.indices(self.n_channels)
        if self.inputs is not None:
            return values[self.inputs(torch.arange(start, stop, device="cpu")).to(values.device)]
        n, n_groups = self.n_inputs[0], len(self.n_inputs)
        per_group = self.n_channels // n_groups
        if start % n == stop % n == 0 and start // per_group == (stop - 1) // per_group:  # whole rows of a group
            own = values[start // per_group * n :][:n]
            return own.repeat((stop - start) // n)
        k = torch.arange(start, stop, device=values.device)
        return values[k // per_group * n + k % n]


class SharedNorm(BatchNorm):
    """A batch norm with one mean and variance per distinct input, and one weight and bias per channel.

    Equivalent to a batch norm on a copy of the input for every channel; copies have equal statistics, which are stored
    once. It is a subclass of batch norm, so that it is found, frozen, trained and counted as one norm.
    """

    def __init__(self, sharing: Sharing, *, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(sum(sharing.n_inputs), affine=False, dtype=dtype)
        self.sharing, self.num_features, self.affine = sharing, sharing.n_channels, True
        self.weight = nn.Parameter(torch.ones(sharing.n_channels, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(sharing.n_channels, dtype=dtype))

    def _check_input_dim(self, input: Tensor) -> None:
        n_inputs = sum(self.sharing.n_inputs)
        if input.ndim < 2 or input.shape[1] != n_inputs:
            raise ShapeError(
                f"a shared norm needs a batch (samples, {n_inputs}, *positions); got {tuple(input.shape)}. Pass one "
                "channel per distinct input."
            )

    def forward(self, input: Tensor) -> Tensor:
        """Normalizes a batch with one channel per input; returns all channels."""
        self._check_input_dim(input)
        plain = normalise_inputs(self, input, slice(None))
        copied = plain[:, self.sharing.spread(torch.arange(input.shape[1], device=input.device))]
        shape = (-1, *(1,) * (input.ndim - 2))
        return torch.addcmul(self.bias.reshape(shape), copied, self.weight.reshape(shape))


Norm: TypeAlias = BatchNorm | Affine


def make_norm(
    kind: str,
    n_channels: int,
    *,
    axes: int,
    dtype: torch.dtype,
    sharing: Sharing | None = None,
) -> Norm:
    """A norm of this kind that is the identity in evaluation mode; `axes` is the number of spatial dimensions.

    With `sharing`, channels share statistics.
    """
    if kind == "affine":
        return Affine(n_channels, dtype=dtype)
    if kind != "batch":
        raise UnknownNameError("norms", kind, NORM_KINDS)
    norm = _BATCH_NORMS[axes](n_channels, dtype=dtype) if sharing is None else SharedNorm(sharing, dtype=dtype)
    assert norm.running_var is not None
    norm.running_var.fill_(1.0 - norm.eps)
    return norm.eval()


def affine(norm: Norm, which: slice = slice(None)) -> tuple[Float[Tensor, " feat"], Float[Tensor, " feat"]]:
    """(scale, shift) of channels of a norm in evaluation mode: x -> scale * x + shift. Theory: giannou2023:prop-1"""
    if isinstance(norm, Affine):
        return norm.weight[which], norm.bias[which]
    mean, deviation = _statistics(norm, which)
    scale = norm.weight[which] / deviation
    return scale, norm.bias[which] - scale * mean


def _statistics(norm: BatchNorm, which: slice) -> tuple[Float[Tensor, " feat"], Float[Tensor, " feat"]]:
    """Mean and standard deviation of channels."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    mean, deviation = norm.running_mean, torch.sqrt(norm.running_var + norm.eps)
    if isinstance(norm, SharedNorm):
        return norm.sharing.spread(mean, which), norm.sharing.spread(deviation, which)
    return mean[which], deviation[which]


def set_statistics(norm: Norm, mean: Float[Tensor, " inp"] | None, variance: Float[Tensor, " inp"] | None) -> None:
    """Sets the statistics of a batch norm, by default 0 and 1; a shared norm has one of each per input."""
    if isinstance(norm, Affine):
        return
    assert norm.running_mean is not None
    assert norm.running_var is not None
    with torch.no_grad():
        norm.running_mean.copy_(torch.zeros_like(norm.running_mean) if mean is None else mean)
        norm.running_var.copy_(torch.ones_like(norm.running_var) - norm.eps if variance is None else variance)


def set_affine(
    norm: Norm,
    scale: Float[Tensor, " feat"],
    shift: Float[Tensor, " feat"],
    *,
    mean: Float[Tensor, " inp"] | None = None,
    variance: Float[Tensor, " inp"] | None = None,
) -> None:
    """Sets a norm to x -> scale * x + shift in evaluation mode, with these statistics (by default 0 and 1).

    Theory: giannou2023:prop-1
    """
    set_statistics(norm, mean, variance)
    set_channels(norm, scale, shift, slice(None))


@torch.no_grad()
def set_channels(norm: Norm, scale: Float[Tensor, " feat"], shift: Float[Tensor, " feat"], which: slice) -> None:
    """Sets some channels of a norm to x -> scale * x + shift, with its current statistics."""
    if isinstance(norm, Affine):
        norm.weight[which], norm.bias[which] = scale, shift
        return
    mean, deviation = _statistics(norm, which)
    norm.weight[which] = scale * deviation
    norm.bias[which] = shift + scale * mean


def normalise(norm: Norm, x: Tensor, which: slice) -> Tensor:
    """Applies the channels `which` of a norm to x (samples, channels, *positions)."""
    if isinstance(norm, Affine):
        shape = (-1, *(1,) * (x.ndim - 2))
        return torch.addcmul(norm.bias[which].reshape(shape), x, norm.weight[which].reshape(shape))
    return normalise_inputs(norm, x, which, norm.weight[which], norm.bias[which])


def normalise_inputs(
    norm: BatchNorm, x: Tensor, which: slice, weight: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Normalizes some inputs of a batch norm; in training mode with batch statistics, which update the running ones."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    return functional.batch_norm(
        x, norm.running_mean[which], norm.running_var[which], weight, bias, training=norm.training,
        momentum=norm.momentum or 0.0, eps=norm.eps,
    )  # fmt: skip


def to_affine(norm: BatchNorm) -> Affine:
    """The affine map equivalent to a batch norm in evaluation mode. Theory: giannou2023:prop-1

    Examples:
        >>> import torch
        >>> from onlynorm.modules import to_affine
        >>> norm = torch.nn.BatchNorm1d(3).eval()
        >>> x = torch.rand(5, 3)
        >>> torch.allclose(to_affine(norm)(x), norm(x))
        True
    """
    need_instance("fold", norm, BatchNorm, cure="Pass one BatchNorm layer.")
    need_model("fold", norm)
    if norm.running_mean is None or norm.running_var is None:
        raise ConversionError(
            "fold needs a batch norm with running statistics; got one with track_running_stats=False, which "
            "normalizes by batch statistics and is not a fixed map. Create it with track_running_stats=True."
        )
    made = Affine(norm.num_features, dtype=norm.running_var.dtype).to(norm.running_var.device)
    ones = torch.ones_like(norm.running_var)
    weight = norm.weight if norm.affine else ones
    scale = weight.detach() / torch.sqrt(norm.running_var + norm.eps)
    shift = (norm.bias.detach() if norm.affine else 0.0 * ones) - scale * norm.running_mean
    set_affine(made, scale, shift)
    return made


def from_affine(
    map: Affine, *, mean: Float[Tensor, " feat"], variance: Float[Tensor, " feat"], axes: int = 2
) -> BatchNorm:
    """A batch norm with these statistics and `axes` spatial dimensions, equivalent to the affine map.

    Examples:
        >>> import torch
        >>> from onlynorm.modules import from_affine, to_affine
        >>> norm = torch.nn.BatchNorm1d(3).eval()
        >>> again = from_affine(to_affine(norm), mean=torch.ones(3), variance=torch.full((3,), 4.0), axes=0)
        >>> x = torch.rand(5, 3)
        >>> torch.allclose(again(x), norm(x), atol=1e-5)
        True
    """
    need_instance("unfold", map, Affine, cure="Pass the result of fold.")
    axes = need_integer("axes", axes, low=0, high=3, cure="Images have 2.")
    mean, variance = as_real("mean", mean).detach(), as_real("variance", variance).detach()
    if mean.shape != map.weight.shape or variance.shape != map.weight.shape:
        raise ShapeError(
            f"unfold needs one mean and one variance per channel, {map.num_features}; got {tuple(mean.shape)} and "
            f"{tuple(variance.shape)}. Pass the statistics of the batch over all axes but the channels."
        )
    if not bool((variance >= 0.0).all()) or not bool(torch.isfinite(mean).all() and torch.isfinite(variance).all()):
        raise ValueRangeError("unfold needs finite means and finite variances >= 0; got others. Pass x.mean, x.var.")
    norm = make_norm("batch", map.num_features, axes=axes, dtype=map.weight.dtype).to(map.weight.device)
    assert isinstance(norm, BatchNorm)
    set_affine(norm, map.weight.detach(), map.bias.detach(), mean=mean, variance=variance)
    return norm
