"""Boxes, points inside them, and whether what a network computes stays inside."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from onlynorm.intervals.propagate import propagate
from onlynorm.intervals.tensor import Box

WIDTHS = (0.0, 1e-13, 1e-3, 1.0, 30.0)
"""Boxes from a single point, where only the outward rounding makes room, to ones that saturate every activation."""


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_box(shape: tuple[int, ...], seed: int, width: float) -> Box:
    generator = seeded(seed)
    centre = torch.randn(shape, dtype=torch.float64, generator=generator)
    low = centre - width * torch.rand(shape, dtype=torch.float64, generator=generator)
    return Box(low, low + width * torch.rand(shape, dtype=torch.float64, generator=generator))


def points_in(box: Box, seed: int, n: int = 8) -> Tensor:
    """Random points of the box, and corners, and points with some coordinates at a corner; low and high among them."""
    generator = seeded(seed)
    share = torch.rand((n, *box.low.shape), dtype=torch.float64, generator=generator)
    corner = share.round()
    mixed = torch.where(torch.rand(share.shape, generator=generator) < 0.5, share, corner)
    share = torch.cat([share, corner, mixed, torch.zeros_like(share[:1]), torch.ones_like(share[:1])])
    return torch.minimum(torch.maximum(box.low + share * (box.high - box.low), box.low), box.high)


def assert_holds(box: Box, values: Tensor) -> None:
    """Every sample of `values` (samples, *shape of the box) lies in the box and in its ball."""
    assert bool((values >= box.low).all())
    assert bool((values <= box.high).all())
    if box.ball is not None:
        assert float((values - box.ball.centre).flatten(1).norm(dim=1).max()) <= box.ball.radius


def assert_network_holds(network: nn.Module, names: list[str], box: Box, *, seed: int) -> dict[str, Box]:
    """Boxes of the named layers, after a run of the network on points of the box has stayed inside."""
    network = network.double().eval()
    boxes = propagate(network, names, box)
    seen: dict[str, list[Tensor]] = {name: [] for name in names}
    for name in names:
        keep = lambda _, args, name=name: seen[name].append(args[0].detach().clone())  # noqa: E731
        network.get_submodule(name).register_forward_pre_hook(keep)
    with torch.no_grad():
        network(points_in(box, seed))
    for name, values in seen.items():
        assert_holds(boxes[name], torch.cat(values))
    return boxes


def shaken(network: nn.Module, seed: int) -> nn.Module:
    """The network with all numbers drawn at random, statistics of its norms included."""
    generator = seeded(seed)
    for name, values in network.state_dict().items():
        if values.is_floating_point():
            drawn = torch.randn(values.shape, generator=generator)
            values.copy_(drawn.abs() + 0.1 if name.endswith("running_var") else drawn)
    return network
