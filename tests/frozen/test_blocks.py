"""Blocks against the layers they are made of, and the contract that files, verify and collapse rely on."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from tensors import normal
from torch import Tensor, nn
from torch.nn import functional

import onlynorm as on
from onlynorm.errors import ConversionError, ShapeError
from onlynorm.features import draw
from onlynorm.frozen.form import find_blocks
from onlynorm.frozen.maps import features_from_settings, kind_of
from onlynorm.frozen.pair import CHUNK_BYTES, LowRankBlock, NormOnlyBlock
from onlynorm.frozen.residual import SkipBlock
from onlynorm.modules.affine import set_affine
from onlynorm.modules.convolution import explicit_padding
from onlynorm.modules.layers import layer_options
from onlynorm.reconstruction.ranges import count_outside

ROUNDING = 1e-12
"""Sums of a few hundred products of order one, in another order."""
CONVOLVE = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}


def make(layer: nn.Module, *, storage: str = "dense", kernel: str = "first", more: int = 0, **options: Any) -> Any:
    """A block with arbitrary norms in place of the layer, with a source kernel that is larger by `more`."""
    groups = getattr(layer, "groups", 1)
    shape = (layer.weight.shape[0] // groups, layer.weight.shape[1], *(size + more for size in layer.weight.shape[2:]))
    features = [draw("he_normal", shape, n_features=11, layer=f"{i}", kernel=kernel) for i in range(groups)]
    cls = SkipBlock if "place" in options else NormOnlyBlock
    block = cls(layer_options(layer), features, activation=nn.ReLU(), storage=storage, **options)
    fill(block)
    return block


def fill(block: NormOnlyBlock) -> None:
    n, n_seen, out = block.n_features, len(block.low), block.second_norm.num_features
    mean, variance = normal(n_seen, seed=2), normal(n_seen).square()
    set_affine(block.first_norm, normal(n), normal(n, seed=1) + 9.0, mean=mean, variance=variance)
    set_affine(block.second_norm, normal(out, seed=3), normal(out, seed=4))


LAYERS = [
    lambda: nn.Linear(5, 3),
    lambda: nn.Conv1d(3, 4, 3, stride=2, padding=1),
    lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2),
    lambda: nn.Conv2d(2, 3, 3, padding=2, padding_mode="circular"),
    lambda: nn.Conv3d(2, 2, 2, padding=1, padding_mode="replicate"),
]


def inputs_of(layer: nn.Module) -> Tensor:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return normal(4, weight.shape[1] * getattr(layer, "groups", 1), *(7,) * (weight.ndim - 2), seed=5)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("kernel", ["first", "second"])
@pytest.mark.parametrize("more", [0, 1, 2])
def test_a_block_is_its_two_frozen_layers_its_norms_and_its_activation(layer: Any, kernel: str, more: int) -> None:
    layer = layer()
    block, inputs = make(layer, kernel=kernel, more=more), inputs_of(layer)
    made, padded = [], inputs
    if block.axes:
        mode = layer.padding_mode
        padding = explicit_padding(block.options, block.features[0].shape[2:])
        padded = functional.pad(inputs, padding, mode="constant" if mode == "zeros" else mode)
    for part, one in zip(padded.chunk(len(block.features), 1), block.features, strict=True):
        weights = [one.first_weight(), one.second_weight()]
        made.append((part, weights))
    hidden = torch.cat([apply(block, weights[0], part, kernel == "first") for part, weights in made], 1)
    hidden = torch.relu(block.first_norm(hidden)).chunk(len(made), 1)
    parts = zip(hidden, made, strict=True)
    wanted = torch.cat([apply(block, weights[1], h, kernel == "second") for h, (_, weights) in parts], 1)
    assert torch.allclose(block(inputs), block.second_norm(wanted), rtol=ROUNDING, atol=ROUNDING)


def apply(block: NormOnlyBlock, weight: Tensor, x: Tensor, holds_kernel: bool) -> Tensor:
    if not block.axes:
        return x @ weight.mT
    stride, dilation = (block.options[name] if holds_kernel else 1 for name in ("stride", "dilation"))
    return CONVOLVE[block.axes](x, weight, stride=stride, dilation=dilation)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("more", [0, 1, 2])
@pytest.mark.parametrize("place", [None, "inside", "outside"])
def test_the_plain_layer_computes_what_the_block_does(layer: Any, more: int, place: str | None) -> None:
    layer = layer()
    groups, (out, inp) = getattr(layer, "groups", 1), layer.weight.shape[:2]
    skips = [draw("he_normal", (1, inp), n_features=out // groups, layer=f"skip {i}") for i in range(groups)]
    options = {} if place is None else {"place": place, "skips": skips}
    block, inputs = make(layer, more=more, **options), 0.1 * inputs_of(layer)
    # Shifts of about nine keep the activation on its line.
    set_affine(block.first_norm, normal(block.n_features), torch.full((block.n_features,), 9.0).double())
    plain = block.to_plain()
    assert type(plain) is type(layer)
    assert torch.allclose(plain(inputs), block(inputs), rtol=ROUNDING, atol=ROUNDING)
    if not more and block.axes:
        assert layer_options(plain) == layer_options(layer)


@pytest.mark.parametrize("place", [None, "inside"])
def test_settings_make_the_same_block_again(place: str | None) -> None:
    layer = nn.Conv2d(2, 3, 3, padding="same", padding_mode="reflect")
    skips = [draw("uniform", (1, 2), n_features=3, layer="skip", seed=3)]
    block = make(layer, more=1, **({} if place is None else {"place": place, "skips": skips}))
    settings = json.loads(json.dumps(block.settings()))
    for storage in ("dense", "seed"):
        again = type(block).from_settings(settings, activation=nn.ReLU(), storage=storage)
        again.load_state_dict(block.state_dict())
        assert again.settings() == block.settings()
        assert torch.equal(again(inputs_of(layer)), block(inputs_of(layer)))
        assert [one.weights_digest() for one in again.sources()] == [one.weights_digest() for one in block.sources()]


def test_sources_are_described_by_plain_words() -> None:
    features = draw("er_sign", (3, 2, 3), n_features=7, seed=5, layer="x", kernel="second", density=0.25)
    shared = draw("id_cond_minimal", (3, 4), shared_column=2)
    for one in (features, shared):
        assert features_from_settings(json.loads(json.dumps(kind_of(one)(one).settings()))) == one


@pytest.mark.parametrize("features", ["he_normal", "ortho_cond", "fast_ortho_cond", "kron_normal"])
def test_chunks_made_from_the_seed_give_the_same_bits(features: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onlynorm.frozen.pair.CHUNK_BYTES", 3 * 20 * 8)
    blocks = []
    for storage in ("dense", "seed"):
        block = NormOnlyBlock({}, [draw(features, (4, 9))], activation=nn.ReLU(), storage=storage)
        fill(block)
        blocks.append(block)
    assert len(list(blocks[0].chunks(blocks[0].features[0], normal(20, 9)))) > 2
    assert torch.equal(blocks[0](normal(20, 9)), blocks[1](normal(20, 9)))
    assert [one.stored_tensors() for one in blocks[1].maps] == [[]]


def test_a_changed_frozen_weight_is_noticed_wherever_it_sits() -> None:
    skips = [draw("he_normal", (1, 5), n_features=3)]
    for number, side in ((0, "right"), (0, "left"), (1, "right")):
        block = make(nn.Linear(5, 3), place="inside", skips=skips)
        assert block.is_reproducible()
        getattr(block.maps[number], side)[1, 2] += 1e-12
        assert not block.is_reproducible()
    assert make(nn.Linear(5, 3), storage="seed", place="inside", skips=skips).is_reproducible()


def test_blocks_inside_a_block_are_its_own_affair() -> None:
    inner = LowRankBlock(make(nn.Linear(5, 2)), make(nn.Linear(2, 3)))
    tied = make(nn.Linear(3, 3))
    network = nn.Sequential(inner, nn.Sequential(tied, nn.ReLU()), tied)
    assert find_blocks(network) == {"0": inner, "1.0": tied, "2": tied}
    assert find_blocks(inner) == {"": inner}


def test_samples_outside_the_range_are_counted_once_per_call() -> None:
    block = make(nn.Linear(5, 3))
    block.low.fill_(-1e3)
    block.high.fill_(1e3)
    block.high[7] = -1e4  # one feature is outside for every sample
    with count_outside(block) as outside:
        block(normal(6, 5))
    assert outside.fraction == 1.0
    block.high[7] = 1e3
    inputs = normal(8, 5)
    inputs[:2] *= 1e9
    with count_outside(block) as outside:
        block(inputs)
        block(normal(8, 5))
    assert outside.fraction == 2 / 16


def test_the_text_of_a_block_names_its_source() -> None:
    assert "he_normal, 22 features" in str(make(nn.Conv2d(4, 6, 3, groups=2)))
    block = make(nn.Linear(5, 5), place="outside", skips=[])
    assert "identity skip, norm outside" in str(block)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_chunk_of_frozen_weights_fits_as_it_is_drawn(dtype: torch.dtype) -> None:
    features = draw("he_normal", (700, 900))
    block = NormOnlyBlock({}, [draw("he_normal", (2, 3))], storage="seed")
    start, stop = next(iter(block.chunks(features, torch.zeros(1, 900, dtype=dtype))))
    assert (stop - start) * (700 + 900) * 8 <= CHUNK_BYTES  # drawn in float64, whatever the inputs are


CONSTRUCTIONS = {
    "wide": on.Wide(),
    "structured": on.Wide(features="fast_ortho_cond"),
    "low_rank": on.LowRank(rank=2),
    "residual": on.Residual(),
    "deep": on.Deep(features="orthogonal", inputs_per_slice=2),
    "multilayer": on.Multilayer(features="orthogonal"),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("storage", ["dense", "seed"])
@pytest.mark.parametrize(
    ("construction", "groups"), [(name, n) for name in CONSTRUCTIONS for n in (0, 1, 2) if (name, n) != ("deep", 2)]
)
def test_a_block_refuses_inputs_that_the_replaced_layer_refuses(construction: str, groups: int, storage: str) -> None:
    layer = nn.Conv1d(4, 4, 3, groups=groups) if groups else nn.Linear(4, 4)
    sizes = (7,) if groups else ()
    inputs = normal(9, 4, *sizes).float()
    block = on.reconstruct(layer.eval(), inputs, CONSTRUCTIONS[construction], storage=storage).network
    for accepted in (inputs, inputs[0], *(() if groups else (inputs[:6].view(2, 3, 4),))):
        assert block(accepted).shape == layer(accepted).shape
    for n in (3, 5):
        for shape in ((2, n, *sizes), (n, *sizes)):
            with pytest.raises(ShapeError, match=rf"4.*got .*{n}"):
                block(torch.ones(shape))
    for shape in [(), (4,), (1, 1, 4, 7)] if groups else [()]:
        with pytest.raises(ShapeError, match=rf"got {re.escape(str(shape))}"):
            block(torch.ones(shape))
    for value in (None, "a", [1.0]):
        with pytest.raises(ConversionError, match="Tensor; got"):
            block(value)
