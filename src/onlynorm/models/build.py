"""Norms, initializations and validation shared by the reference networks."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from onlynorm.errors import ConversionError, ShapeError, shown
from onlynorm.validate import need_choice, need_free_memory

NORMS = ("batch", "layer", "group", "none")
"""Norms by name."""
INITS = ("standard", "asymmetric")
"""Initializations by name."""
_MOST_GROUPS, _LEAST_CHANNELS = 8, 4


def image_norm(kind: str, n_channels: int) -> nn.Module:
    """The norm of this name for images (n, channels, height, width); an Identity for "none".

    A layer norm of images normalizes all channels and positions: a group norm with one group.
    """
    need_norm(kind)
    if kind == "batch":
        return nn.BatchNorm2d(n_channels)
    if kind == "none":
        return nn.Identity()
    return nn.GroupNorm(1 if kind == "layer" else n_groups(n_channels), n_channels)


def vector_norm(kind: str, n_channels: int) -> nn.Module:
    """The norm of this name for vectors (n, channels); an Identity for "none"."""
    need_norm(kind)
    if kind == "batch":
        return nn.BatchNorm1d(n_channels)
    if kind == "layer":
        return nn.LayerNorm(n_channels)
    return nn.Identity() if kind == "none" else nn.GroupNorm(n_groups(n_channels), n_channels)


def n_groups(n_channels: int) -> int:
    """Number of groups of a group norm: the largest divisor up to 8 with at least 4 channels per group, else one.

    Groups of a single value would be normalized to zero.
    """
    most = max(1, min(_MOST_GROUPS, n_channels // _LEAST_CHANNELS))
    return next(n for n in range(most, 0, -1) if n_channels % n == 0)


@torch.no_grad()
def initialise(network: nn.Module, init: str) -> None:
    """Initializes Linear and Conv2d weights: "standard" is torch's default, "asymmetric" is U(0, 2 / sqrt(fan in)).

    "asymmetric" is torch's U(-1 / sqrt(d), 1 / sqrt(d)) shifted to positive values; batch norm does not preserve the
    rank of the signal then. Biases are not changed.
    """
    need_choice("init", init, INITS)
    if init == "standard":
        return
    for layer in network.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.uniform_(layer.weight, 0.0, 2.0 / layer.weight[0].numel() ** 0.5)


def need_norm(kind: str) -> None:
    """Raises UnknownNameError unless this is the name of a norm."""
    need_choice("norm", kind, NORMS)


def as_whole(value: Any) -> int:
    """An integer below 2^31 as an int; any other value as -1."""
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return int(value) if is_whole and int(value) < 2**31 else -1


def need_size(what: str, name: str, value: Any, *, high: int = 2**31 - 1) -> int:
    """`value` as a positive int."""
    count = as_whole(value)
    if not 1 <= count <= high:
        raise ShapeError(f"{what} needs a positive {name}; got {shown(value)}. Pass an integer up to {high}.")
    return count


def need_parameters(what: str, n_parameters: int) -> None:
    """Raises unless about this many parameters fit into memory."""
    need_free_memory(f"{what} of {float(n_parameters):.3g} parameters", 4.0 * n_parameters, cure="Make it smaller.")


def make_activation(activation: Callable[[], nn.Module]) -> nn.Module:
    """The module returned by a class or function; raises if it is not a module."""
    if isinstance(activation, nn.Module) or not callable(activation):
        raise ConversionError(
            f"activation needs a class or function that returns a module; got {shown(activation)}. Pass torch.nn.ReLU, "
            "without parentheses."
        )
    made = activation()
    if not isinstance(made, nn.Module):
        raise ConversionError(
            f"activation needs a class or function that returns a module; {shown(activation)} returned {shown(made)}. "
            "Pass torch.nn.ReLU."
        )
    return made
