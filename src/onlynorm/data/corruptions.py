"""`corrupt`: image corruptions (noise, blur, contrast, inversion), deterministic given a seed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from onlynorm.errors import ShapeError, ValueRangeError
from onlynorm.seeds import seeded
from onlynorm.validate import as_tensor, need_choice, need_items, need_number

SMALLEST = 1e-6
"""Standard deviation of a blur, in pixels, below which nothing changes."""
CORRUPTIONS = ("noise", "blur", "contrast", "invert")
"""Corruptions by name."""
MOST_SEVERE = 5.0
_NOISE, _BLUR, _CONTRAST = 0.02, 0.2, 0.18
"""Per unit of severity: standard deviation of the noise, pixels of the blur, fraction of the contrast lost."""


def corrupt(
    images: Float[Tensor, "n channels height width"],
    kind: str,
    *,
    severity: float = 3.0,
    seed: int = 0,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Float[Tensor, "n channels height width"]:
    """A corrupted copy of the images, with severity from 0 (unchanged) to 5, clipped to the range of pixels.

    - "noise": gaussian noise of standard deviation 0.02 severity, drawn from the seed.
    - "blur": a gaussian blur of 0.2 severity pixels, with reflection at the border.
    - "contrast": the difference to the mean of each image reduced by the factor 1 - 0.18 severity.
    - "invert": values of at least 1 - severity / 5 inverted; at severity 5, all of them.

    Pixels are in [0, 1]. For normalized images pass their `mean` and `std` per channel; the result is normalized too.

    Examples:
        >>> import torch
        >>> from onlynorm.data import corrupt
        >>> images = torch.zeros(1, 1, 2, 2)
        >>> corrupt(images, "invert", severity=5.0).flatten().tolist()
        [1.0, 1.0, 1.0, 1.0]
    """
    need_choice("corruption", kind, CORRUPTIONS)
    severity = need_number("severity", severity, low=0.0, high=MOST_SEVERE, cure="Try 3.")
    images = as_tensor("images", images)
    _need_images(images)
    generator = seeded(seed)
    shift, scale = _statistics(images, mean, std)
    pixels = images * scale + shift
    _need_pixels(pixels)
    if severity == 0.0:
        return images.clone()
    if kind == "noise":
        drawn = torch.randn(images.shape, generator=generator, dtype=torch.float64)
        pixels = pixels + _NOISE * severity * drawn.to(images)
    elif kind == "blur":
        pixels = _blur(pixels, _BLUR * severity)
    elif kind == "contrast":
        pixels = pixels + _CONTRAST * severity * (pixels.mean((1, 2, 3), keepdim=True) - pixels)
    else:
        pixels = torch.where(pixels >= 1.0 - severity / MOST_SEVERE, 1.0 - pixels, pixels)
    return (pixels.clamp(0.0, 1.0) - shift) / scale


def _blur(pixels: Tensor, sigma: float) -> Tensor:
    """A separable gaussian blur."""
    reach = min(math.ceil(3.0 * sigma), min(pixels.shape[-2:]) - 1)  # reflection padding must be smaller than the image
    steps = torch.arange(-reach, reach + 1, dtype=torch.float64)
    weights = torch.exp(-0.5 * (steps / max(sigma, SMALLEST)) ** 2)  # avoids 0 / 0 for subnormal values
    kernel = (weights / weights.sum()).to(pixels)
    n, channels, height, width = pixels.shape
    rows = functional.pad(pixels.reshape(n * channels, 1, height, width), (reach,) * 4, mode="reflect")
    rows = functional.conv2d(rows, kernel.reshape(1, 1, 1, -1))
    return functional.conv2d(rows, kernel.reshape(1, 1, -1, 1)).reshape(n, channels, height, width)


def _statistics(images: Tensor, mean: Sequence[float] | None, std: Sequence[float] | None) -> tuple[Tensor, Tensor]:
    """(shift, scale) per channel that map the images to pixels."""
    n_channels = images.shape[1]
    cure = "Pass one value per channel, such as CIFAR_MEAN and CIFAR_STD."
    shift = [0.0] * n_channels if mean is None else _need_numbers("mean", mean, cure)
    scale = [1.0] * n_channels if std is None else _need_numbers("std", std, cure)
    if len(shift) != n_channels or len(scale) != n_channels or not all(value > 0.0 for value in scale):
        raise ShapeError(
            f"mean and std need one value per channel, {n_channels}, and std positive ones; got {tuple(shift)} and "
            f"{tuple(scale)}. Pass those used to normalize the images."
        )
    return tuple(torch.tensor(values).to(images).reshape(-1, 1, 1) for values in (shift, scale))  # type: ignore[return-value]


def _need_numbers(name: str, values: Sequence[float], cure: str) -> list[float]:
    return [need_number(name, value, cure=cure) for value in need_items(name, values, cure=cure)]


def _need_images(images: Tensor) -> None:
    if images.ndim != 4 or not images.is_floating_point() or not images.numel():
        raise ShapeError(
            f"corrupt needs floating-point images (n, channels, height, width); got {images.dtype} of shape "
            f"{tuple(images.shape)}. Reshape them, and divide bytes by 255."
        )


def _need_pixels(pixels: Tensor) -> None:
    low, high = float(pixels.min()), float(pixels.max())
    slack = 1e-2 if pixels.dtype in (torch.float16, torch.bfloat16) else 1e-5  # rounding of the normalization
    if not (low >= -slack and high <= 1.0 + slack):
        raise ValueRangeError(
            f"corrupt needs pixels in [0, 1]; got values from {low:.3g} to {high:.3g}. Pass the mean and std of the "
            "normalization, such as CIFAR_MEAN and CIFAR_STD."
        )
