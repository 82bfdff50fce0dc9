"""A rebuilt network whose frozen layers all have one size computes the same function."""

from __future__ import annotations

import pytest
import torch
from tensors import normal
from torch import nn

from onlynorm import Wide
from onlynorm.errors import ConversionError, ShapeError
from onlynorm.evidence.papers.giannou2023.equal_size import pad_equal
from onlynorm.models import mlp
from onlynorm.reconstruction import reconstruct


@pytest.mark.parametrize("norms", ["batch", "affine"])
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Sigmoid()])  # sigmoid(0) is not zero, in padded channels too
@pytest.mark.parametrize("width", [None, 60])
def test_all_layers_have_one_size_and_the_function_is_the_same(
    norms: str, activation: nn.Module, width: int | None
) -> None:
    network, inputs = mlp((5, 7, 3), activation=nn.Sigmoid).double().eval(), normal(20, 5)
    made = reconstruct(network, inputs, Wide(activation=activation, norms=norms, width="minimum")).network
    padded = pad_equal(made, width=width)
    frozen = [layer for layer in padded if isinstance(layer, nn.Linear)]
    size = 29 if width is None else width  # 7 * 5 - 7 + 1 features
    assert [tuple(layer.weight.shape) for layer in frozen] == [(size, size)] * 4
    assert {p.numel() for p in padded.parameters() if p.requires_grad} == {size}
    wanted = made(inputs).detach()
    # The same sums with zeros in between; gammas and shifts of the window set their size.
    assert torch.allclose(padded(inputs), wanted, rtol=0, atol=1e-6 if type(activation) is nn.Sigmoid else 1e-12)


def test_what_cannot_be_padded_is_refused() -> None:
    inputs = normal(8, 2, 6)
    conv = nn.Sequential(nn.Conv1d(2, 3, 3), nn.ReLU()).double().eval()
    with pytest.raises(ConversionError, match=r"sequence of linear layers.*got NormOnlyBlock"):
        pad_equal(reconstruct(conv, inputs).network)
    network = mlp((5, 7, 3)).double().eval()
    with pytest.raises(ConversionError, match=r"got Linear"):
        pad_equal(network)
    with pytest.raises(ConversionError, match=r"at least one rebuilt layer; got none"):
        pad_equal(nn.Sequential(nn.ReLU()))
    with pytest.raises(ShapeError, match=r"a width of at least 44, the largest layer; got 40"):
        pad_equal(reconstruct(network, normal(20, 5)).network, width=40)
