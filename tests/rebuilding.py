"""Batches and small networks that the tests of reconstruction share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import onlynorm as on
from onlynorm.models import mlp


def batch(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def net(*widths: int) -> nn.Sequential:
    return mlp(widths or (6, 5, 4)).double().eval()


X = batch(30, 6)


def is_untouched(network: nn.Module, before: dict[str, Tensor]) -> bool:
    now = network.state_dict()
    return now.keys() == before.keys() and all(torch.equal(now[name], before[name]) for name in now)


class Branches(nn.Module):
    """Two inputs, one of them tokens; a layer called with and without leading axes, one on images of two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.linear = nn.Linear(6, 3)
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    def forward(self, tokens: Tensor, images: Tensor) -> Tensor:
        h = self.linear(self.embed(tokens)).sum(1) + self.linear(self.embed(tokens[:, 0]))
        pooled = nn.functional.avg_pool2d(images, 2)
        seen = self.conv(images).mean((2, 3)) + self.conv(pooled).amax((2, 3))
        return torch.cat([h, seen * torch.exp(self.mask)], 1)


def with_norm() -> nn.Sequential:
    network = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4)).double()
    with torch.no_grad():
        network(X)
    return network.eval()


def rebuilt(network: nn.Module, inputs: Tensor, **options: Any) -> on.Reconstruction:
    return on.reconstruct(network.eval(), inputs=inputs, **options)
