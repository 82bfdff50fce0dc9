"""Reference networks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import nn

from onlynorm.data import seeded
from onlynorm.errors import ShapeError


def mlp(widths: Sequence[int], *, activation: Callable[[], nn.Module] = nn.ReLU, seed: int = 0) -> nn.Sequential:
    """A fully connected network through the given widths, inputs first, with activations in between."""
    if len(widths) < 2 or min(widths) < 1:
        raise ShapeError(f"mlp needs at least two widths, all positive; got {tuple(widths)}. Try (64, 32, 10).")
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(seeded(seed).get_state())  # torch.manual_seed would reach the generators of GPUs too
        for n_in, n_out in itertools.pairwise(widths):
            layers += [nn.Linear(n_in, n_out), activation()]
    return nn.Sequential(*layers[:-1])
