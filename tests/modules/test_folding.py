"""Norms become part of the layer in front of them where, and only where, that leaves the function alone."""

from __future__ import annotations

import pytest
import torch
from tensors import normal
from torch import Tensor, nn

from onlynorm.errors import ConversionError, ValueRangeError
from onlynorm.modules.fold import fold_network
from onlynorm.modules.norms import FoldedNorm
from onlynorm.modules.walk import run

ROUNDING = 1e-13
"""Two layers of float64 products of about ten terms each."""


def settled(network: nn.Module, inputs: Tensor) -> nn.Module:
    """In double precision, with statistics from a pass over the batch, in evaluation mode."""
    network.double().train()
    with torch.no_grad():
        network(inputs)
        for module in network.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
                module.weight.copy_(normal(module.num_features, seed=3))
                module.bias.copy_(normal(module.num_features, seed=4))
    return network.eval()


class Wired(nn.Module):
    """A layer, a norm, and something between or beside them, as `way` says."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.conv = nn.Conv2d(2, 3, 3, bias=False)
        self.norm = nn.BatchNorm2d(3)
        self.other = nn.Conv2d(3, 3, 1)
        self.other_norm = nn.BatchNorm2d(3, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        if self.way == "activation in place":
            torch.relu_(h)
        made = self.norm(h)
        if self.way == "norm called twice":
            made = self.norm(made)
        if self.way == "layer called twice":
            made = made + self.conv(x).tanh()
        if self.way == "output used elsewhere":
            made = made + h
        return self.other_norm(self.other(torch.relu(made)))


@pytest.mark.parametrize(
    ("way", "folded"),
    [
        ("directly", ("norm", "other_norm")),
        ("activation in place", ("other_norm",)),
        ("norm called twice", ("other_norm",)),
        ("layer called twice", ("other_norm",)),
        ("output used elsewhere", ("other_norm",)),
    ],
)
def test_a_norm_is_folded_where_it_directly_follows_a_layer(way: str, folded: tuple[str, ...]) -> None:
    x = normal(4, 2, 5, 5)
    network = settled(Wired(way), x)
    wanted = run(network, (x,))
    made = fold_network(network, x)
    assert made.names == folded
    assert [n for n, m in made.network.named_modules() if isinstance(m, FoldedNorm)] == list(folded)
    assert torch.linalg.vector_norm(run(made.network, (x,)) - wanted) <= ROUNDING * torch.linalg.vector_norm(wanted)
    assert isinstance(network.norm, nn.BatchNorm2d)
    assert network.conv.bias is None


def test_a_linear_layer_with_leading_axes_keeps_its_norm() -> None:
    x = normal(4, 3, 5)
    network = settled(nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)), x)  # the norm works along the middle axis
    assert fold_network(network, x).names == ()
    flat = settled(nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)), x[:, 0])
    assert fold_network(flat, x[:, 0]).names == ("1",)


def test_a_norm_without_statistics_stays() -> None:
    x = normal(4, 5)
    network = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3, track_running_stats=False)).double().eval()
    assert fold_network(network, x).names == ()


def test_a_shared_norm_is_replaced_at_all_its_places() -> None:
    x = normal(4, 2, 5, 5)
    network = Wired("directly")
    network.again = network.norm
    made = fold_network(settled(network, x), x)
    assert isinstance(made.network.norm, FoldedNorm)
    assert isinstance(made.network.again, FoldedNorm)


def test_single_precision_comes_back_as_single_precision() -> None:
    x = normal(4, 2, 5, 5)
    network = settled(Wired("directly"), x).float()
    made = fold_network(network, x.float())
    assert made.names == ("norm", "other_norm")
    assert made.network.conv.weight.dtype == torch.float32
    assert torch.allclose(run(made.network, (x.float(),)), run(network, (x.float(),)), rtol=1e-4, atol=1e-4)


def test_bad_input_is_refused() -> None:
    x = normal(4, 2, 5, 5)
    with pytest.raises(ValueRangeError, match=r"folding needs a target in evaluation mode.*'norm'.*network.eval"):
        fold_network(Wired("directly").double(), x)
    with pytest.raises(ConversionError, match=r"returns tensors.*; got none"):
        fold_network(Nothing().eval(), x)
    with pytest.raises(ConversionError, match=r"the network needs inputs .*; got \(4, 5\) float64.*failed with"):
        fold_network(Wired("directly").double().eval(), normal(4, 5))


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> str:
        return "nothing"
