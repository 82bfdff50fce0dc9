"""Zero configuration: the norms of many architectures are found, trained and kept, without a name being given.

The networks of transformers are built from small configurations, nothing is downloaded. How many norms each has is
worked out from its configuration, never from what was found.
"""

from __future__ import annotations

import copy
import functools
import os
import warnings
from collections.abc import Callable
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from torch import Tensor, nn

from onlynorm.models import CifarResNet
from onlynorm.modules import find_norms
from onlynorm.seeds import own_randomness
from onlynorm.tuning import apply_adapter, only_norms, take_adapter

transformers = pytest.importorskip("transformers", reason="transformers is not installed; `pip install -e .[dev]`")

L = 2
"""Layers of every transformer here."""
TEXT: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": L, "num_attention_heads": 2,
                        "intermediate_size": 24, "max_position_embeddings": 40}  # fmt: skip
GROUPED = TEXT | {"num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0}
IMAGE: dict[str, Any] = {"image_size": 16, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": L,
                         "num_attention_heads": 2, "intermediate_size": 24}  # fmt: skip
BART: dict[str, Any] = {"vocab_size": 32, "d_model": 16, "encoder_layers": L, "decoder_layers": L,
                        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24,
                        "decoder_ffn_dim": 24}  # fmt: skip
STAGES = 2
"""Stages of every hierarchical network here, with one block each unless said otherwise."""

TOKENS = {"input_ids": torch.arange(12).reshape(2, 6) + 3}
PAIRS = TOKENS | {"decoder_input_ids": torch.arange(8).reshape(2, 4) + 3}


def pixels(size: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))}


def hugging(name: str, settings: dict[str, Any]) -> Callable[[], nn.Module]:
    """A maker of the class of this name from its configuration."""

    def make() -> nn.Module:
        config = getattr(transformers, f"{name.removesuffix('Model')}Config")(**settings)
        return getattr(transformers, name)(config)

    return make


# ------------------------------------------------------------------------------- modules in the manner of timm


class LayerNorm2d(nn.LayerNorm):
    """A layer norm over the channels of images."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class BatchNormAct2d(nn.BatchNorm2d):
    """A batch norm with its activation inside."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


class ConvNormAct(nn.Module):
    """A wrapper that has norm in its name and is none."""

    def __init__(self, n_in: int, n_out: int, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(n_in, n_out, 3, padding=1, groups=groups, bias=False)
        self.bn = BatchNormAct2d(n_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x))


class LayerScale(nn.Module):
    """One-dimensional and called gamma, but it normalises nothing."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((size,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Attention(nn.Module):
    """Attention whose queries and keys are normalised."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.q_norm, self.k_norm, self.norm = nn.RMSNorm(size), nn.RMSNorm(size), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        made = nn.functional.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        return self.proj(self.norm(made))


class Block(nn.Module):
    """A block of a vision transformer with layer scale."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm1, self.attn, self.ls1 = nn.LayerNorm(size), Attention(size), LayerScale(size)
        self.norm2, self.mlp, self.ls2 = nn.LayerNorm(size), nn.Linear(size, size), LayerScale(size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class VisionTransformer(nn.Module):
    """Patches, blocks, a last norm, a head."""

    def __init__(self, depth: int = L) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 8, 4, stride=4)
        self.blocks = nn.Sequential(*(Block(8) for _ in range(depth)))
        self.norm, self.fc_norm, self.head = nn.LayerNorm(8), nn.Identity(), nn.Linear(8, 3)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.norm(self.blocks(self.patch_embed(pixel_values).flatten(2).mT))
        return self.head(self.fc_norm(x.mean(1)))


class MobileNet(nn.Module):
    """Depthwise and pointwise convolutions, norms with activations inside."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvNormAct(3, 8)
        self.blocks = nn.Sequential(*(ConvNormAct(8, 8, groups=8) for _ in range(L)))
        self.norm, self.head = LayerNorm2d(8), nn.Linear(8, 3)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.stem(pixel_values))).mean((2, 3)))


class Images(nn.Module):
    """A network of images that is called with a name."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.network(pixel_values)


# ------------------------------------------------------------------------------- name: (maker, inputs, norms)

Case = tuple[Callable[[], nn.Module], dict[str, Tensor], int]
AUDIO = {"input_features": torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0)),
         "decoder_input_ids": PAIRS["decoder_input_ids"]}  # fmt: skip
CLIP = {"text_config": TEXT | {"projection_dim": 8}, "vision_config": IMAGE, "projection_dim": 8}
POOLED = {"num_encoder_blocks": STAGES, "depths": [1] * STAGES, "hidden_sizes": [8, 16], "sr_ratios": [2, 1],
          "num_attention_heads": [1, 2], "patch_sizes": [3, 3], "strides": [2, 2], "mlp_ratios": [1, 1]}  # fmt: skip
CONV = {"num_stages": STAGES, "hidden_sizes": [8, 16], "depths": [1] * STAGES, "patch_size": 2}

CASES: dict[str, Case] = {
    # Embeddings, then two a layer.
    "Bert": (hugging("BertModel", TEXT), TOKENS, 1 + 2 * L),
    "Roberta": (hugging("RobertaModel", TEXT), TOKENS, 1 + 2 * L),
    "Electra": (hugging("ElectraModel", TEXT | {"embedding_size": 16}), TOKENS, 1 + 2 * L),
    "DebertaV2": (hugging("DebertaV2Model", TEXT), TOKENS, 1 + 2 * L),
    "DistilBert": (
        hugging("DistilBertModel", {"vocab_size": 32, "dim": 16, "hidden_dim": 24, "n_layers": L, "n_heads": 2}),
        TOKENS, 1 + 2 * L,
    ),
    # All layers are one.
    "Albert": (hugging("AlbertModel", TEXT | {"embedding_size": 8, "num_hidden_groups": 1}), TOKENS, 1 + 2),
    # Two a layer, then a last one.
    "GPT2": (hugging("GPT2Model", {"vocab_size": 32, "n_embd": 16, "n_layer": L, "n_head": 2}), TOKENS, 2 * L + 1),
    "GPTNeoX": (hugging("GPTNeoXModel", TEXT), TOKENS, 2 * L + 1),
    "OPT": (hugging("OPTModel", TEXT | {"ffn_dim": 24, "word_embed_proj_dim": 16}), TOKENS, 2 * L + 1),
    "Llama": (hugging("LlamaModel", GROUPED), TOKENS, 2 * L + 1),
    "Mistral": (hugging("MistralModel", GROUPED), TOKENS, 2 * L + 1),
    "Qwen2": (hugging("Qwen2Model", GROUPED), TOKENS, 2 * L + 1),
    "Gemma": (hugging("GemmaModel", GROUPED), TOKENS, 2 * L + 1),
    # Queries and keys too, or norms after the layers as well.
    "Qwen3": (hugging("Qwen3Model", GROUPED), TOKENS, 4 * L + 1),
    "Gemma2": (hugging("Gemma2Model", GROUPED), TOKENS, 4 * L + 1),
    "Olmo2": (hugging("Olmo2Model", GROUPED), TOKENS, 4 * L + 1),
    # A layer norm with (1 + weight).
    "Nemotron": (hugging("NemotronModel", GROUPED), TOKENS, 2 * L + 1),
    # One a layer, a last one; with norms of queries and keys, whose scale is a matrix: one row a head.
    "Cohere": (hugging("CohereModel", GROUPED), TOKENS, L + 1),
    "Cohere with norms of heads": (hugging("CohereModel", GROUPED | {"use_qk_norm": True}), TOKENS, 3 * L + 1),
    "Phi": (hugging("PhiModel", GROUPED), TOKENS, L + 1),
    # Embeddings, two a layer, a last one.
    "RobertaPreLayerNorm": (hugging("RobertaPreLayerNormModel", TEXT), TOKENS, 2 * L + 2),
    "Bloom": (
        hugging("BloomModel", {"vocab_size": 32, "hidden_size": 16, "n_layer": L, "n_head": 2}), TOKENS, 2 * L + 2,
    ),
    "Mamba": (hugging("MambaModel", TEXT | {"state_size": 4}), TOKENS, L + 1),
    # Encoder and decoder: two and three a layer, one each beside.
    "T5": (
        hugging("T5Model", {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": L, "num_heads": 2}),
        PAIRS, 2 * L + 1 + 3 * L + 1,
    ),
    "Bart": (hugging("BartModel", BART), PAIRS, 2 * L + 1 + 3 * L + 1),
    "Whisper": (
        hugging("WhisperModel", BART | {"num_mel_bins": 8, "max_source_positions": 8, "pad_token_id": 0,
                                        "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}),
        AUDIO, 2 * L + 1 + 3 * L + 1,
    ),
    "ViT": (hugging("ViTModel", IMAGE), pixels(16), 2 * L + 1),
    "DeiT": (hugging("DeiTModel", IMAGE), pixels(16), 2 * L + 1),
    "Dinov2": (hugging("Dinov2Model", IMAGE), pixels(16), 2 * L + 1),
    # With a mean over the patches the last norm moves into the pooler.
    "Beit": (hugging("BeitModel", IMAGE | {"vocab_size": 8}), pixels(16), 2 * L + 1),
    # Patches, two a block, one before each merging, a last one.
    "Swin": (
        hugging("SwinModel", {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1] * STAGES,
                              "num_heads": [1, 2], "window_size": 2}),
        pixels(16), 1 + 2 * STAGES + (STAGES - 1) + 1,
    ),
    "ConvNext": (hugging("ConvNextModel", CONV), pixels(16), 1 + STAGES + (STAGES - 1) + 1),
    # As before, and a global response norm in each block.
    "ConvNextV2": (hugging("ConvNextV2Model", CONV), pixels(16), 1 + 2 * STAGES + (STAGES - 1) + 1),
    # The stem; two convolutions a block; a shortcut where the size changes.
    "ResNet": (
        hugging("ResNetModel", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}),
        pixels(16), 1 + 2 * STAGES + (STAGES - 1),
    ),
    # The stem of three convolutions, sixteen blocks of three, a last convolution.
    "MobileNetV2": (
        hugging("MobileNetV2Model", {"image_size": 32, "depth_multiplier": 0.1, "min_depth": 8}),
        pixels(32), 3 + 3 * 16 + 1,
    ),
    # A stage: the patches', two a block, a last one; and one of the shortened keys in the first stage.
    "Segformer": (hugging("SegformerModel", POOLED), pixels(16), STAGES * (1 + 2 + 1) + 1),
    "PoolFormer": (
        hugging("PoolFormerModel", POOLED | {"strides": [2, 2], "patch_sizes": [3, 3], "padding": [1, 1],
                                          "layer_scale_init_value": 1.0}),
        pixels(16), STAGES * 2,
    ),
    # The text's last norm; the vision's first and last.
    "CLIP": (hugging("CLIPModel", CLIP), TOKENS | pixels(16), 2 * L + 1 + 2 * L + 2),
    # Group norm in the first convolution, layer norms of the projection and the encoder; a weight norm beside.
    "Wav2Vec2": (
        hugging("Wav2Vec2Model", TEXT | {"conv_dim": (8, 8), "conv_stride": (2, 2), "conv_kernel": (3, 3),
                                         "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4,
                                         "num_conv_pos_embedding_groups": 2}),
        {"input_values": torch.randn(2, 64, generator=torch.Generator().manual_seed(0))}, 1 + 1 + 1 + 2 * L,
    ),
    "CifarResNet": (lambda: Images(CifarResNet(8, width=4)), pixels(16), 8 - 1),
    "timm VisionTransformer": (VisionTransformer, pixels(16), 4 * L + 1),
    "timm MobileNet": (MobileNet, pixels(16), 1 + L + 1),
}  # fmt: skip


# ------------------------------------------------------------------------------- what must hold for each


@functools.cache
def made(name: str) -> nn.Module:
    """The network of a case, made once; every test takes a copy."""
    with own_randomness(0), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of special tokens outside a tiny vocabulary
        return CASES[name][0]().eval()


def output(model: nn.Module, name: str) -> Tensor:
    """The first tensor that the network returns."""
    result = model(**CASES[name][1])
    if isinstance(result, Tensor):
        return result
    return result.logits_per_image if name == "CLIP" else result[0]


def train(model: nn.Module, name: str) -> None:
    """One step down the square of the outputs, in training mode."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with own_randomness(1):  # of dropout
        model.train()
        (output(model, name) - 1.0).square().mean().backward()
    optimizer.step()
    model.eval()


def test_there_are_more_than_twenty_architectures() -> None:
    assert len(CASES) > 20


@pytest.mark.parametrize("name", CASES)
def test_all_norms_are_found_and_nothing_else(name: str) -> None:
    found = find_norms(made(name))
    assert len(found.norms) == CASES[name][2]
    assert all("Identity" in str(skipped) for skipped in found.skipped), "nothing that could be tuned is left out"
    places = {place for norm in found.norms for place in norm.names}
    for place, module in made(name).named_modules(remove_duplicate=False):
        is_named = type(module).__name__.lower().endswith("norm")
        if place not in places and is_named and list(module.parameters(recurse=False)):
            pytest.fail(f"{place} ({type(module).__name__}) looks like a norm and was not found")


@pytest.mark.parametrize("name", CASES)
def test_a_step_changes_the_norms_and_nothing_else(name: str) -> None:
    model = copy.deepcopy(made(name))
    handle = only_norms(model)
    wanted = {f"{norm.name}.{tensor}" for norm in find_norms(model).norms for tensor in norm.tensors}
    assert {n for n, p in model.named_parameters() if p.requires_grad} == wanted
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train(model, name)
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    moved = {n for n, p in handle.named_parameters() if p.grad is not None and p.grad.abs().max() > 1e-6}
    assert changed <= wanted
    assert moved <= changed
    assert len(changed) > len(wanted) / 2, "the step reaches most of the norms"


@pytest.mark.parametrize("name", CASES)
def test_an_adapter_gives_the_trained_network_back_to_the_last_bit(name: str) -> None:
    model, fresh = copy.deepcopy(made(name)), copy.deepcopy(made(name))
    only_norms(model)
    train(model, name)
    apply_adapter(fresh, take_adapter(model))
    state = model.state_dict()
    assert all(torch.equal(t, state[key]) for key, t in fresh.state_dict().items())
    with torch.no_grad():
        wanted = output(model, name)
        assert torch.equal(output(fresh, name), wanted)
        assert not torch.equal(output(made(name), name), wanted)
