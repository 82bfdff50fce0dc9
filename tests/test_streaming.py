"""The forward pass as matrix products: the outputs of convolutions, in parts, and only where nothing is learned."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.reconstruction import blocks, reconstruct, streaming, verify
from onlynorm.reconstruction.blocks import NormOnlyBlock
from onlynorm.reconstruction.streaming import Patches

CONVOLVE = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
ROUNDING = 1e-11
"""Float64, sums of some hundred products of order one, shifted by the ranges."""


def batch(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def rebuilt(layer: nn.Module, inputs: Tensor, **options: object) -> NormOnlyBlock:
    block = reconstruct(nn.Sequential(layer.double()).eval(), inputs=inputs, **options).network[0]  # type: ignore[arg-type,index]
    assert isinstance(block, NormOnlyBlock)
    return block


def by_convolutions(block: NormOnlyBlock, inputs: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(NormOnlyBlock, "_is_fixed_map", lambda *_: False)
        return block(inputs)  # type: ignore[no-any-return]


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize(("kernel", "stride", "dilation"), [(1, 1, 1), (3, 1, 1), (3, 2, 1), (2, 1, 2), (3, 2, 2)])
def test_a_convolution_is_its_weight_times_the_patches(axes: int, kernel: int, stride: int, dilation: int) -> None:
    x, weight = batch(2, 3, *range(7, 7 + axes)), batch(4, 3, *(kernel,) * axes, seed=1)
    seen = Patches((kernel,) * axes, (stride,) * axes, (dilation,) * axes)
    columns = seen.columns(x)
    expected = CONVOLVE[axes](x, weight, stride=stride, dilation=dilation)
    made = (weight.reshape(4, -1) @ columns).reshape(4, 2, *seen.positions(x)).movedim(0, 1)
    assert made.shape == expected.shape
    assert torch.allclose(made, expected, rtol=0, atol=1e-12)
    assert seen.n_bytes(x) == columns.numel() * columns.element_size()


@pytest.mark.parametrize("storage", ["dense", "seed"])
@pytest.mark.parametrize("norms", ["batch", "affine"])
@pytest.mark.parametrize("activation", [None, nn.ReLU(), nn.LeakyReLU(0.1)], ids=["none", "relu", "leaky"])
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 4, 3, padding=1),
        nn.Conv2d(4, 4, 3, stride=2, groups=2, bias=False),
        nn.Conv1d(3, 2, 3, dilation=2),
        nn.Conv3d(2, 2, 2),
        nn.Conv2d(3, 2, 3, padding="same", padding_mode="reflect"),
    ],
    ids=["padded", "groups", "conv1d", "conv3d", "reflect"],
)
def test_products_and_convolutions_give_the_same_outputs(
    layer: nn.Module, activation: nn.Module | None, norms: str, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = batch(5, layer.in_channels, *(6,) * (layer.weight.ndim - 2))  # type: ignore[arg-type,operator,union-attr]
    block = rebuilt(layer, inputs, activation=activation, norms=norms, storage=storage)
    expected = by_convolutions(block, inputs, monkeypatch)
    monkeypatch.setattr(streaming, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(blocks, "PATCH_BYTES", 2048)
    with torch.no_grad():
        made = block(inputs)
    assert made.shape == expected.shape
    assert float((made - expected).abs().max()) <= ROUNDING * float(expected.abs().max())


def test_samples_outside_the_ranges_are_counted_in_parts_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    target = nn.Sequential(nn.Conv2d(2, 3, 3)).double().eval()
    inputs = batch(40, 2, 5, 5)
    network = reconstruct(target, inputs=inputs, activation=nn.ReLU()).network
    strange = torch.cat([inputs, 100 * inputs[:10]])
    assert verify(target, network, strange, batch_size=50).outside == 0.2
    monkeypatch.setattr(blocks, "PATCH_BYTES", 2048)
    assert verify(target, network, strange, batch_size=50).outside == 0.2


def test_norms_still_learn_through_the_block() -> None:
    block = rebuilt(nn.Conv2d(2, 3, 3), batch(8, 2, 5, 5), activation=nn.ReLU())
    for parameter in block.parameters():
        parameter.requires_grad_(True)
    block(batch(4, 2, 5, 5)).square().sum().backward()
    assert block.first_norm.weight.grad is not None
    assert float(block.first_norm.weight.grad.abs().max()) > 0.0


def test_gradients_reach_the_input_of_a_frozen_block() -> None:
    block = rebuilt(nn.Conv2d(2, 3, 3), batch(8, 2, 5, 5), activation=nn.ReLU())
    x = batch(2, 2, 5, 5).requires_grad_(True)
    block(x).sum().backward()
    assert x.grad is not None


def test_no_sample_gives_no_output() -> None:
    block = rebuilt(nn.Conv2d(2, 3, 3), batch(8, 2, 5, 5))
    with torch.no_grad():
        assert block(batch(0, 2, 5, 5)).shape == (0, 3, 3, 3)
