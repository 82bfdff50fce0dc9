"""Transformers of torch, rebuilt: the fast path of their layers reads weights, which blocks do not have."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tensors import normal
from torch import Tensor, nn

import onlynorm as on
from onlynorm.frozen.fast_paths import PaddedEncoder

TOLERANCE = 1e-9
"""Ten times the residual that the solver aims at."""
WIDTH, LENGTH = 8, 7

pytestmark = [  # what torch says once per process about its own layers
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True, but self.use_nested_tensor is False"),
]


def layer(*, batch_first: bool = True, decoder: bool = False, **options: Any) -> nn.Module:
    kind = nn.TransformerDecoderLayer if decoder else nn.TransformerEncoderLayer
    return kind(WIDTH, 2, dim_feedforward=12, batch_first=batch_first, **options)


class Encode(nn.Module):
    """An encoder, or one layer of it, with masks made from its input."""

    def __init__(self, inner: nn.Module, *, padding: str = "", is_causal: bool = False) -> None:
        super().__init__()
        self.inner, self.padding, self.is_causal = inner, padding, is_causal

    def forward(self, x: Tensor) -> Tensor:
        named: dict[str, Any] = {}
        n_samples, length = (x.shape[0], x.shape[1])
        if self.padding:
            lengths = 2 + torch.arange(n_samples) % (length - 1)
            mask = torch.arange(length)[None] >= lengths[:, None]
            if self.padding == "scattered":
                mask = mask.roll(1, 1)
            if self.padding == "float":
                mask = torch.zeros(mask.shape, dtype=x.dtype).masked_fill(mask, -torch.inf)
            named["src_key_padding_mask"] = mask
        if self.is_causal:
            causal = nn.Transformer.generate_square_subsequent_mask(length, dtype=x.dtype)
            return self.inner(x, causal, **named)
        return self.inner(x, **named)


class Pairs(nn.Module):
    """A transformer that maps a sequence to the sequence behind it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.inner(y, x) if isinstance(self.inner, nn.TransformerDecoder) else self.inner(x, y)


def agree(make: Any, *inputs: Tensor, path: Path) -> on.reconstruction.Reconstruction:
    """Rebuilds what `make` makes and compares it with its target everywhere a call may go."""
    torch.manual_seed(0)
    network = make().double().eval()
    result = on.reconstruct(network, inputs, on.Wide(activation=nn.ReLU()))
    assert on.verify(network, result, inputs).is_same(TOLERANCE)
    assert torch.is_grad_enabled()
    torch.testing.assert_close(result.network(*inputs), network(*inputs), rtol=TOLERANCE, atol=TOLERANCE)
    on.save(result, path / "net")
    loaded = on.load(path / "net", like=make().double())
    assert on.verify(result, loaded, inputs).max_error == 0.0
    plain = on.collapse(loaded)
    assert on.verify(network, plain, inputs).is_same(TOLERANCE)
    assert not any(isinstance(module, PaddedEncoder) for module in plain.modules())
    assert [str(module) for module in plain.modules()] == [str(module) for module in network.modules()]
    inside = copy.deepcopy(network)
    on.reconstruct(inside, inputs, on.Wide(activation=nn.ReLU()), in_place=True)
    assert on.verify(network, inside, inputs).is_same(TOLERANCE)
    return result


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_an_encoder_layer_works(batch_first: bool, norm_first: bool, activation: str, tmp_path: Path) -> None:
    def make() -> nn.Module:
        return layer(batch_first=batch_first, norm_first=norm_first, activation=activation)

    result = agree(make, normal(9, LENGTH, WIDTH), path=tmp_path)
    assert [one.name for one in result.layers] == ["linear1", "linear2"]
    assert [item.name for item in result.left] == ["self_attn"]


@pytest.mark.parametrize(
    ("padding", "is_causal"),
    [("", False), ("left", False), ("float", False), ("scattered", False), ("", True), ("float", True)],
)
@pytest.mark.parametrize("with_norm", [True, False])
def test_an_encoder_works_with_masks(padding: str, is_causal: bool, with_norm: bool, tmp_path: Path) -> None:
    def make() -> nn.Module:
        norm = nn.LayerNorm(WIDTH) if with_norm else None
        return Encode(nn.TransformerEncoder(layer(), 2, norm), padding=padding, is_causal=is_causal)

    agree(make, normal(9, LENGTH, WIDTH), path=tmp_path)


class Inherits(nn.TransformerEncoder):
    """An encoder of one's own that has the forward of torch's."""


class Calls(nn.TransformerEncoder):
    """An encoder of one's own that calls the forward of torch's."""

    def forward(self, *args: Any, **named: Any) -> Tensor:
        made: Tensor = 2.0 * super().forward(*args, **named)
        return made


@pytest.mark.parametrize("kind", [Inherits, Calls])
def test_subclasses_of_encoders_work_with_padding(kind: type[nn.TransformerEncoder], tmp_path: Path) -> None:
    def make() -> nn.Module:
        return Encode(kind(layer(), 2), padding="left")

    result = agree(make, normal(9, LENGTH, WIDTH), path=tmp_path)
    assert isinstance(result.network.inner, kind)
    torch.save(result.network, tmp_path / "pickled.pt")
    for again in (copy.deepcopy(result.network), torch.load(tmp_path / "pickled.pt", weights_only=False)):
        assert on.verify(result, again, normal(9, LENGTH, WIDTH)).max_error == 0.0
    assert type(on.collapse(result).inner) is kind


def test_padding_is_zero_where_torch_makes_it_zero() -> None:
    torch.manual_seed(0)
    network = Encode(nn.TransformerEncoder(layer(), 1), padding="left").double().eval()
    rebuilt = on.reconstruct(network, normal(9, LENGTH, WIDTH)).network
    for is_fast in (True, False):
        with torch.set_grad_enabled(not is_fast):
            made, wanted = rebuilt(normal(9, LENGTH, WIDTH)), network(normal(9, LENGTH, WIDTH))
        assert [bool((one[0, 2:] == 0.0).all()) for one in (made, wanted)] == [is_fast, is_fast]
        torch.testing.assert_close(made, wanted, rtol=TOLERANCE, atol=TOLERANCE)


def test_nested_tensors_go_through_a_block() -> None:
    torch.manual_seed(0)
    network = layer().double().eval()
    rebuilt = on.reconstruct(network, normal(9, LENGTH, WIDTH)).network
    nested = torch.nested.as_nested_tensor([normal(n, WIDTH, seed=n) for n in (2, 5, 3)])
    with torch.no_grad():
        made, wanted = rebuilt(nested), network(nested)
    assert made.is_nested
    for one, other in zip(made.unbind(), wanted.unbind(), strict=True):
        torch.testing.assert_close(one, other, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("batch_first", [True, False])
def test_decoders_and_whole_transformers_work(batch_first: bool, tmp_path: Path) -> None:
    def decoder() -> nn.Module:
        return Pairs(nn.TransformerDecoder(layer(batch_first=batch_first, decoder=True), 2))

    def transformer() -> nn.Module:
        return Pairs(
            nn.Transformer(
                WIDTH, 2, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=12, batch_first=batch_first
            )
        )

    for make in (decoder, transformer):
        agree(make, normal(9, LENGTH, WIDTH), normal(9, LENGTH, WIDTH, seed=1), path=tmp_path)
