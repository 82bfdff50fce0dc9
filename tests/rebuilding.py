"""Batches and small networks that the tests of reconstruction share."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from tensors import normal
from torch import Tensor, nn

import onlynorm as on
from onlynorm.models import mlp
from onlynorm.reconstruction import Construction


def net(*widths: int) -> nn.Sequential:
    return mlp(widths or (6, 5, 4)).double().eval()


X = normal(30, 6)


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


CONSTRUCTIONS: dict[str, type[Construction]] = {
    kind.name: kind for kind in (on.Deep, on.LowRank, on.Multilayer, on.Residual, on.Wide)
}


def split_options(construction: str = "wide", **loose: Any) -> tuple[Construction, dict[str, Any]]:
    """The construction, and the keywords of `reconstruct`, from one table of both, as parametrized tests hold them."""
    kind = CONSTRUCTIONS[construction]
    own = {field.name: loose.pop(field.name) for field in fields(kind) if field.name in loose}
    ranges = {field.name: loose.pop(field.name) for field in fields(on.Ranges) if field.name in loose}
    return kind(**own), loose | ({"ranges": on.Ranges(**ranges)} if ranges else {})


def reconstruct_with(model: nn.Module, inputs: Any, /, **loose: Any) -> on.reconstruction.Reconstruction:
    construction, keywords = split_options(**loose)
    return on.reconstruct(model, inputs, construction, **keywords)


def plan_with(model: nn.Module, inputs: Any, /, **loose: Any) -> on.reconstruction.Plan:
    """The plan; ranges, which it does not take, are left out."""
    construction, keywords = split_options(**loose)
    return on.plan(model, inputs, construction, **{k: v for k, v in keywords.items() if k != "ranges"})


def rebuilt(network: nn.Module, inputs: Tensor, **loose: Any) -> on.reconstruction.Reconstruction:
    return reconstruct_with(network.eval(), inputs, **loose)
