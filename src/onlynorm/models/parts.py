"""What all reference networks are made of: a norm by name, an initialization by name, and randomness of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from onlynorm.data import seeded
from onlynorm.errors import UnknownNameError

NORMS = ("batch", "layer", "group", "none")
"""Norms by name."""
INITS = ("standard", "asymmetric")
"""Initializations by name."""
_MOST_GROUPS, _LEAST_CHANNELS = 8, 4


@contextlib.contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """Inside, torch draws from this seed; outside, the global generator has not moved."""
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(seeded(seed).get_state())  # torch.manual_seed would reach the generators of GPUs too
        yield


def image_norm(kind: str, n_channels: int) -> nn.Module:
    """The norm of this name for images (n, channels, height, width); none is an Identity.

    A layer norm of images is taken over all channels and positions: a group norm with one group.
    """
    need_norm(kind)
    if kind == "batch":
        return nn.BatchNorm2d(n_channels)
    if kind == "none":
        return nn.Identity()
    return nn.GroupNorm(1 if kind == "layer" else n_groups(n_channels), n_channels)


def vector_norm(kind: str, n_channels: int) -> nn.Module:
    """The norm of this name for vectors (n, channels); none is an Identity."""
    need_norm(kind)
    if kind == "batch":
        return nn.BatchNorm1d(n_channels)
    if kind == "layer":
        return nn.LayerNorm(n_channels)
    return nn.Identity() if kind == "none" else nn.GroupNorm(n_groups(n_channels), n_channels)


def n_groups(n_channels: int) -> int:
    """Groups of a group norm: the largest divisor up to 8 that leaves 4 channels or more in each, else one.

    A group of one number would normalise it away.
    """
    most = max(1, min(_MOST_GROUPS, n_channels // _LEAST_CHANNELS))
    return next(n for n in range(most, 0, -1) if n_channels % n == 0)


@torch.no_grad()
def initialise(network: nn.Module, init: str) -> None:
    """Leaves the weights as torch drew them, or draws every Linear and Conv2d from U(0, 2 / sqrt(d)), d its fan-in.

    "asymmetric" is torch's own U(-1 / sqrt(d), 1 / sqrt(d)) shifted off zero, which keeps batch norm from preserving
    the rank of the signal. Biases stay as they are.
    """
    if init not in INITS:
        raise UnknownNameError("init", init, INITS)
    if init == "standard":
        return
    for layer in network.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.uniform_(layer.weight, 0.0, 2.0 / layer.weight[0].numel() ** 0.5)


def need_norm(kind: str) -> None:
    """Raises UnknownNameError unless there is a norm of this name."""
    if kind not in NORMS:
        raise UnknownNameError("norm", str(kind), NORMS)
