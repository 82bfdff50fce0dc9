"""Networks without skips: fully connected, and VGG-like with convolutions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from torch import nn

from onlynorm.errors import ShapeError, shown
from onlynorm.models.build import (
    as_whole,
    image_norm,
    initialise,
    make_activation,
    need_norm,
    need_parameters,
    need_size,
    vector_norm,
)
from onlynorm.seeds import own_randomness
from onlynorm.validate import need_items

VGG_STAGES = ((64,) * 2, (64,) * 2, (64,) * 4, (64,) * 4, (64,) * 5)
"""17 convolutions of 64 channels, as the targets of burkholz2024, which does not specify the pooling."""
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "celu": nn.CELU, "elu": nn.ELU, "gelu": nn.GELU, "hardsigmoid": nn.Hardsigmoid, "hardswish": nn.Hardswish,
    "hardtanh": nn.Hardtanh, "leaky_relu": nn.LeakyReLU, "logsigmoid": nn.LogSigmoid, "mish": nn.Mish,
    "relu": nn.ReLU, "relu6": nn.ReLU6, "selu": nn.SELU, "sigmoid": nn.Sigmoid, "silu": nn.SiLU,
    "softplus": nn.Softplus, "tanh": nn.Tanh,
}  # fmt: skip
"""Activations by name."""


def mlp(
    widths: Sequence[int],
    *,
    activation: Callable[[], nn.Module] = nn.ReLU,
    norm: str = "none",
    init: str = "standard",
    seed: int = 0,
) -> nn.Sequential:
    """A fully connected network with the given widths, inputs first, and norms and activations in between.

    Examples:
        >>> from onlynorm.models import mlp
        >>> mlp((8, 16, 4), norm="batch")
        Sequential(
          (0): Linear(in_features=8, out_features=16, bias=True)
          (1): BatchNorm1d(16, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True)
          (2): ReLU()
          (3): Linear(in_features=16, out_features=4, bias=True)
        )
    """
    given = need_items("mlp", widths, cure="List the widths: (64, 32, 10).")
    widths = [as_whole(width) for width in given]
    if len(widths) < 2 or min(widths) < 1:
        raise ShapeError(f"mlp needs at least two widths, all positive; got {shown(tuple(given))}. Try (64, 32, 10).")
    need_parameters("an mlp", sum(n_in * n_out for n_in, n_out in itertools.pairwise(widths)))
    need_norm(norm)
    layers: list[nn.Module] = []
    with own_randomness(seed):
        for n_in, n_out in itertools.pairwise(widths):
            layers += [nn.Linear(n_in, n_out), *_norms(vector_norm(norm, n_out)), make_activation(activation)]
        network = nn.Sequential(*layers[: -1 if norm == "none" else -2])
        initialise(network, init)
    return network


def vgg(
    stages: Sequence[Sequence[int]] = VGG_STAGES,
    *,
    activation: Callable[[], nn.Module] = nn.ReLU,
    norm: str = "batch",
    init: str = "standard",
    n_classes: int = 10,
    in_channels: int = 3,
    image_size: int = 32,
    seed: int = 0,
) -> nn.Sequential:
    """A VGG-like network: 3 x 3 convolutions with the widths of each stage, and max pooling between stages.

    Every convolution is followed by a norm (unless `norm` is "none") and an activation; the last stage by global
    average pooling and a linear layer.

    Examples:
        >>> import torch
        >>> from onlynorm.models import vgg
        >>> vgg(((8,), (16,)), image_size=8)(torch.rand(2, 3, 8, 8)).shape
        torch.Size([2, 10])
    """
    cure = "Try [[8, 8], [16, 16]]."
    given = [need_items("a stage of vgg", stage, cure=cure) for stage in need_items("vgg", stages, cure=cure)]
    stages = [[as_whole(width) for width in stage] for stage in given]
    sizes = [as_whole(size) for size in (in_channels, n_classes)]
    if not stages or not all(stages) or min(min(map(min, stages)), *sizes) < 1:
        raise ShapeError(
            f"vgg needs stages of positive widths, with positive in_channels and n_classes; got {shown(given)}, "
            f"{shown(in_channels)} and {shown(n_classes)}. {cure}"
        )
    in_channels, n_classes = sizes
    image_size = need_size("vgg", "image_size", image_size)
    widths = [in_channels, *itertools.chain(*stages)]
    n_parameters = 9 * sum(n_in * n_out for n_in, n_out in itertools.pairwise(widths)) + widths[-1] * n_classes
    need_parameters("a vgg", n_parameters)
    if image_size < 2 ** (len(stages) - 1):
        raise ShapeError(
            f"vgg halves its images {len(stages) - 1} times and needs at least {2 ** (len(stages) - 1)} pixels; got "
            f"image_size={image_size}. Use fewer stages."
        )
    need_norm(norm)
    layers: list[nn.Module] = []
    n_in = in_channels
    with own_randomness(seed):
        for place, stage in enumerate(stages):
            layers += [nn.MaxPool2d(2)] if place else []
            for n_out in stage:
                layers += [nn.Conv2d(n_in, n_out, 3, padding=1, bias=norm == "none")]
                layers += [*_norms(image_norm(norm, n_out)), make_activation(activation)]
                n_in = n_out
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n_in, n_classes)]
        network = nn.Sequential(*layers)
        initialise(network, init)
    return network


def digits_cnn() -> nn.Sequential:
    """Three convolutions with batch norms and a linear layer, for flattened images of 8 x 8 pixels.

    Examples:
        >>> import torch
        >>> from onlynorm.models import digits_cnn
        >>> digits_cnn()(torch.rand(2, 64)).shape
        torch.Size([2, 10])
    """
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *vgg(((16, 16), (32,)), in_channels=1, image_size=8))


def _norms(norm: nn.Module) -> list[nn.Module]:
    """[norm], or an empty list for an Identity."""
    return [] if isinstance(norm, nn.Identity) else [norm]
