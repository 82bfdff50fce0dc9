"""Norms with chosen parameters: in evaluation mode a norm is an affine map per channel, and back.

    scale = weight / sqrt(variance + eps),    shift = bias - scale * mean

`fold` turns a batch norm into the plain `Affine` it is in evaluation mode, `unfold` turns an affine map into a real
batch norm with any given statistics. The function does not change either way.

Theory: giannou2023:prop-1
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.errors import ConversionError, ShapeError, UnknownNameError, ValueRangeError
from onlynorm.modules.validate import need_model
from onlynorm.validate import as_real, need_float_dtype, need_free_memory, need_instance, need_integer

BatchNorm: TypeAlias = nn.modules.batchnorm._BatchNorm
NORM_KINDS = ("batch", "affine")
_CURE = "Pass the number of channels."
_BATCH_NORMS: dict[int, type[BatchNorm]] = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


class Affine(nn.Module):
    """x -> weight * x + bias per channel, channels second: a norm without statistics."""

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
        """The batch (samples, channels, *positions) with every channel scaled and shifted."""
        return normalise(self, x, slice(None))


Norm: TypeAlias = BatchNorm | Affine


def make_norm(kind: str, n_channels: int, *, axes: int, dtype: torch.dtype) -> Norm:
    """A norm of this kind that changes nothing in evaluation mode; `axes` counts the positions' axes."""
    if kind == "affine":
        return Affine(n_channels, dtype=dtype)
    if kind != "batch":
        raise UnknownNameError("norms", kind, NORM_KINDS)
    norm = _BATCH_NORMS[axes](n_channels, dtype=dtype)
    assert norm.running_var is not None
    norm.running_var.fill_(1.0 - norm.eps)
    return norm.eval()


def affine(norm: Norm) -> tuple[Float[Tensor, " feat"], Float[Tensor, " feat"]]:
    """(scale, shift) of a norm in evaluation mode: x -> scale * x + shift. Theory: giannou2023:prop-1"""
    if isinstance(norm, Affine):
        return norm.weight, norm.bias
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    return scale, norm.bias - scale * norm.running_mean


def set_affine(
    norm: Norm,
    scale: Float[Tensor, " feat"],
    shift: Float[Tensor, " feat"],
    *,
    mean: Float[Tensor, " feat"] | None = None,
    variance: Float[Tensor, " feat"] | None = None,
) -> None:
    """Gives the norm the parameters with which it is x -> scale * x + shift, under these statistics (0 and 1 if none).

    Theory: giannou2023:prop-1
    """
    with torch.no_grad():
        if isinstance(norm, Affine):
            norm.weight.copy_(scale)
            norm.bias.copy_(shift)
            return
        assert norm.running_mean is not None
        assert norm.running_var is not None
        norm.running_mean.copy_(torch.zeros_like(shift) if mean is None else mean)
        norm.running_var.copy_(torch.ones_like(shift) - norm.eps if variance is None else variance)
        norm.weight.copy_(scale * torch.sqrt(norm.running_var + norm.eps))
        norm.bias.copy_(shift + scale * norm.running_mean)


def normalise(norm: Norm, x: Tensor, which: slice) -> Tensor:
    """The norm's channels `which` applied to x (samples, channels, *positions)."""
    if isinstance(norm, Affine):
        shape = (-1, *(1,) * (x.ndim - 2))
        return torch.addcmul(norm.bias[which].reshape(shape), x, norm.weight[which].reshape(shape))
    assert norm.running_mean is not None
    assert norm.running_var is not None
    return functional.batch_norm(
        x, norm.running_mean[which], norm.running_var[which], norm.weight[which], norm.bias[which],
        training=norm.training, momentum=norm.momentum or 0.0, eps=norm.eps,
    )  # fmt: skip


def to_affine(norm: BatchNorm) -> Affine:
    """The affine map that a batch norm is in evaluation mode. Theory: giannou2023:prop-1"""
    need_instance("fold", norm, BatchNorm, cure="Pass one BatchNorm layer.")
    need_model("fold", norm)
    if norm.running_mean is None or norm.running_var is None:
        raise ConversionError(
            "fold needs a batch norm with running statistics; got one without (track_running_stats=False), which "
            "normalises by each batch and is no fixed map. Recalibrate it with statistics first."
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
    """A batch norm over `axes` axes of positions with these statistics that is the affine map in evaluation mode."""
    need_instance("unfold", map, Affine, cure="Pass what fold returned.")
    axes = need_integer("axes", axes, low=0, high=3, cure="Images have 2.")
    mean, variance = as_real("mean", mean).detach(), as_real("variance", variance).detach()
    if mean.shape != map.weight.shape or variance.shape != map.weight.shape:
        raise ShapeError(
            f"unfold needs one mean and one variance per channel, {map.num_features}; got {tuple(mean.shape)} and "
            f"{tuple(variance.shape)}. Pass the statistics of the batch over all axes but the channels."
        )
    if not bool((variance >= 0.0).all()) or not bool(torch.isfinite(mean).all() and torch.isfinite(variance).all()):
        raise ValueRangeError("unfold needs finite means and variances of at least 0; got others. Pass x.mean, x.var.")
    norm = make_norm("batch", map.num_features, axes=axes, dtype=map.weight.dtype).to(map.weight.device)
    assert isinstance(norm, BatchNorm)
    set_affine(norm, map.weight.detach(), map.bias.detach(), mean=mean, variance=variance)
    return norm
