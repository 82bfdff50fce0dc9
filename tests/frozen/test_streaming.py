"""The forward pass as matrix products: the outputs of convolutions, in parts, and only where nothing is learned."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rebuilding import reconstruct_with
from tensors import normal
from torch import Tensor, nn
from torch.nn import functional

from onlynorm import Multilayer, Wide
from onlynorm.features import draw
from onlynorm.frozen import pair, streaming
from onlynorm.frozen.form import FrozenBlock
from onlynorm.frozen.pair import NormOnlyBlock
from onlynorm.frozen.sequence import DeepBlock, MultilayerBlock
from onlynorm.frozen.streaming import ConvPatches
from onlynorm.reconstruction import reconstruct, verify
from onlynorm.reconstruction.constructions.slices import draw_layers

CONVOLVE = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
ROUNDING = 1e-11
"""Float64, sums of some hundred products of order one, shifted by the ranges."""


def rebuilt(layer: nn.Module, inputs: Tensor, **options: object) -> NormOnlyBlock:
    block = reconstruct_with(nn.Sequential(layer.double()).eval(), inputs, **options).network[0]  # type: ignore[arg-type,index]
    assert isinstance(block, NormOnlyBlock)
    return block


def by_convolutions(block: NormOnlyBlock, inputs: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(NormOnlyBlock, "_is_fixed_map", lambda *_: False)
        return block(inputs)  # type: ignore[no-any-return]


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize(("kernel", "stride", "dilation"), [(1, 1, 1), (3, 1, 1), (3, 2, 1), (2, 1, 2), (3, 2, 2)])
def test_a_convolution_is_its_weight_times_the_patches(axes: int, kernel: int, stride: int, dilation: int) -> None:
    x, weight = normal(2, 3, *range(7, 7 + axes)), normal(4, 3, *(kernel,) * axes, seed=1)
    seen = ConvPatches((kernel,) * axes, (stride,) * axes, (dilation,) * axes)
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
    inputs = normal(5, layer.in_channels, *(6,) * (layer.weight.ndim - 2))  # type: ignore[arg-type,operator,union-attr]
    block = rebuilt(layer, inputs, activation=activation, norms=norms, storage=storage)
    expected = by_convolutions(block, inputs, monkeypatch)
    monkeypatch.setattr(streaming, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(pair, "PATCH_BYTES", 2048)
    with torch.no_grad():
        made = block(inputs)
    assert made.shape == expected.shape
    assert float((made - expected).abs().max()) <= ROUNDING * float(expected.abs().max())


def test_samples_outside_the_ranges_are_counted_in_parts_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    target = nn.Sequential(nn.Conv2d(2, 3, 3)).double().eval()
    inputs = normal(40, 2, 5, 5)
    network = reconstruct(target, inputs, Wide(activation=nn.ReLU())).network
    strange = torch.cat([inputs, 100 * inputs[:10]])
    assert verify(target, network, strange, batch_size=50).outside == 0.2
    monkeypatch.setattr(pair, "PATCH_BYTES", 2048)
    assert verify(target, network, strange, batch_size=50).outside == 0.2


def test_norms_still_learn_through_the_block() -> None:
    block = rebuilt(nn.Conv2d(2, 3, 3), normal(8, 2, 5, 5), activation=nn.ReLU())
    for parameter in block.parameters():
        parameter.requires_grad_(True)
    block(normal(4, 2, 5, 5)).square().sum().backward()
    assert block.first_norm.weight.grad is not None
    assert float(block.first_norm.weight.grad.abs().max()) > 0.0


def test_gradients_reach_the_input_of_a_frozen_block() -> None:
    block = rebuilt(nn.Conv2d(2, 3, 3), normal(8, 2, 5, 5), activation=nn.ReLU())
    x = normal(2, 2, 5, 5).requires_grad_(True)
    block(x).sum().backward()
    assert x.grad is not None


def test_no_sample_gives_no_output() -> None:
    block = rebuilt(nn.Conv2d(2, 3, 3), normal(8, 2, 5, 5))
    with torch.no_grad():
        assert block(normal(0, 2, 5, 5)).shape == (0, 3, 3, 3)


N_FROZEN = 5 * 2**23
"""Frozen numbers of the blocks below: 336 MB in float64, five times what a chunk may take."""


def seeded_blocks() -> dict[str, tuple[Callable[[str], FrozenBlock], Tensor]]:
    """Blocks by name, made for a storage, and the smallest batch for each."""
    wide = draw("uniform", (64, 192), n_features=N_FROZEN // 256)
    image = draw("uniform", (40, 24, 3, 3), n_features=N_FROZEN // 256)
    options = {"kernel_size": (3, 3), "stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1,
               "padding_mode": "zeros"}  # fmt: skip
    deep = draw_layers("uniform", (64, 192), inputs_per_slice=192, n_features=N_FROZEN // 256)
    rows = [draw("uniform", (1, 192), n_features=N_FROZEN // 256), draw("uniform", (1, N_FROZEN // 256), n_features=64)]
    made: dict[str, tuple[Callable[[str], FrozenBlock], Tensor]] = {
        "linear": (lambda storage: NormOnlyBlock({}, [wide], activation=nn.ReLU(), storage=storage), normal(1, 192)),
        "convolution": (lambda storage: NormOnlyBlock(options, [image], storage=storage), normal(1, 24, 3, 3)),
        "deep": (lambda storage: DeepBlock({}, deep, activation=nn.ReLU(), storage=storage), normal(1, 192)),
        "multilayer": (lambda storage: MultilayerBlock({}, [rows], storage=storage), normal(1, 192)),
    }
    return made


PEAK = """
import sys
sys.path[:0] = sys.argv[2:]
import torch
from test_streaming import seeded_blocks
from onlynorm.memory import MemoryMeter, release_free_memory
make, inputs = seeded_blocks()[sys.argv[1]]
block = make("seed")
with torch.no_grad():
    block(inputs)
    release_free_memory()
    with MemoryMeter() as meter:
        block(inputs)
print(meter.peak)
"""


@pytest.mark.parametrize("name", seeded_blocks())
def test_frozen_weights_from_the_seed_stream_in_blocks_whatever_the_batch(name: str) -> None:
    here = Path(__file__).parent
    ran = subprocess.run(  # memory of other tests in this process would be counted
        [sys.executable, "-c", PEAK, name, str(here), str(here.parent)], capture_output=True, text=True, check=True
    )
    # A chunk as it is drawn and as it is laid out, of either side, and the scratch memory of drawing.
    assert int(ran.stdout) <= 3 * pair.CHUNK_BYTES < 8 * N_FROZEN
    make, inputs = seeded_blocks()[name]
    block, kept = make("seed"), make("dense")
    kept.load_state_dict(block.state_dict())
    with torch.no_grad():
        assert torch.equal(kept(inputs), block(inputs))


@pytest.mark.parametrize("n_layers", [2, 3])
def test_a_layer_in_pieces_is_the_whole_layer(n_layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2)).double().eval()
    inputs = normal(5, 4, 6, 6)
    made = reconstruct(target, inputs, Multilayer(n_layers=n_layers, activation=nn.ReLU()), storage="seed").network
    with torch.no_grad():
        whole = made(inputs)
        monkeypatch.setattr("onlynorm.frozen.sequence.CHUNK_BYTES", 2**11)
        pieces = made(inputs)
    assert float((pieces - whole).abs().max()) <= ROUNDING * float(whole.abs().max())
