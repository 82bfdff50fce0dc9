"""Networks trained on real images while the rank of their signal is watched.

Ranks are r(H) of the last hidden layer: of what enters its activation, every position of every image a column, or of
what enters the classifier where the activation is no module of its own. Alignment is the mean of |cos| over all pairs
of images of what enters the classifier: up to their signs, the gradients of each of its neurons. Accuracies are those
on training images in training mode, with the statistics of the batch.

Theory: daneshmand2020:prop-8
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

import onlynorm as on
from onlynorm.data import Split, cifar10, fashion_mnist, seeded
from onlynorm.errors import TrainingError
from onlynorm.models import mlp, resnet, vgg
from onlynorm.rank import as_matrix, cosines, rank_ratio, repair

_DATA: dict[str, Callable[[], Split]] = {"CIFAR-10": cifar10, "Fashion-MNIST": fashion_mnist}
_N_WATCHED = 256
"""Images on which rank, alignment and accuracy are measured, in one batch."""
_VGG19 = ((1, 1), (2, 2), (4, 4, 4, 4), (8, 8, 8, 8), (8, 8, 8, 8))
_N_CLASSES = 10


def best_rate(*, rates: Sequence[float], seed: int, **settings: Any) -> float:
    """The learning rate with the highest training accuracy at the end, tried on a seed of its own."""
    found = {rate: train(rate=rate, seed=seed, **settings)["accuracy"][-1] for rate in rates}
    return max(found, key=lambda rate: found[rate])


def train(
    *, network: Mapping[str, Any], data: str, n_train: int, n_epochs: int, n_looks: int, batch_size: int, rate: float,
    seed: int, noise: bool = False, pretraining: int = 0,
) -> dict[str, list[float]]:  # fmt: skip
    """Plain SGD at a constant rate, and at evenly spaced steps, the start among them, what the last layer sees.

    With `noise` every image is replaced by uniform noise over the range of pixels and keeps its label. `pretraining`
    are the paper's steps of ascent on the rank, layer by layer, before the training. A training whose
    loss is no longer a number stops there: its loss and accuracy are those of guessing, the rest is what was last seen.
    """
    inputs, labels = _lesson(data, n_train, noise, seed)
    made = build(seed=seed, inputs=inputs, **network)
    watched = inputs[:_N_WATCHED], labels[:_N_WATCHED]
    if pretraining:
        made = repair(made, watched[0], method="paper", n_steps=pretraining, seed=seed).model
    looks: list[dict[str, float]] = [{"step": 0, **observe(made, *watched)}]

    def look(step: int, n_steps: int, _: float) -> None:
        if step * n_looks // n_steps > (step - 1) * n_looks // n_steps:
            looks.append({"step": step, **observe(made, *watched)})

    schedule = on.Schedule(
        epochs=n_epochs, batch_size=batch_size, lr=rate, momentum=0.0, warmup=0.0, drops=(), seed=seed
    )
    try:
        on.fit(made, (inputs, labels), schedule=schedule, step=look, accelerator="cpu")
    except TrainingError:
        n_steps = n_epochs * -(-n_train // batch_size)
        guess = {**looks[-1], "loss": math.log(_N_CLASSES), "accuracy": 100.0 / _N_CLASSES}
        looks += [{**guess, "step": turn * n_steps // n_looks} for turn in range(len(looks), n_looks + 1)]
    return {name: [one[name] for one in looks] for name in looks[0]}


def build(
    *,
    kind: str,
    seed: int,
    inputs: Tensor,
    norm: str = "none",
    init: str = "standard",
    depth: int = 32,
    width: int = 128,
) -> nn.Module:
    """The network of this kind for these inputs: an MLP of this depth, a VGG-19 or ResNet-50 of this first width.

    The norm "meanless" is a batch norm that divides without taking the mean off.
    """
    is_meanless = norm == "meanless"
    norm = "batch" if is_meanless else norm
    if kind == "mlp":
        widths = [inputs[0].numel(), *[width] * depth, _N_CLASSES]
        made: nn.Module = nn.Sequential(nn.Flatten(), *mlp(widths, norm=norm, init=init, seed=seed))
    elif kind == "vgg":
        stages = [[width * times for times in stage] for stage in _VGG19]
        made = vgg(stages, norm=norm, init=init, in_channels=inputs.shape[1], image_size=inputs.shape[2], seed=seed)
    else:
        made = resnet(
            50, n_classes=_N_CLASSES, width=width, in_channels=inputs.shape[1], norm=norm, init=init, seed=seed
        )
    return without_means(made) if is_meanless else made


class MeanlessBatchNorm2d(nn.Module):
    """Channels divided by the root of their mean square over the batch and all positions, then scaled and shifted."""

    def __init__(self, n_channels: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(n_channels)), nn.Parameter(torch.zeros(n_channels))
        self.eps = eps

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
        """The normalised batch; there are no running statistics."""
        scale = self.weight * (x.square().mean((0, 2, 3)) + self.eps).rsqrt()
        return x * scale[:, None, None] + self.bias[:, None, None]


def without_means(network: nn.Module) -> nn.Module:
    """The network with every BatchNorm2d replaced by one that leaves the mean in, in place."""
    for name, module in list(network.named_children()):
        if isinstance(module, nn.BatchNorm2d):
            setattr(network, name, MeanlessBatchNorm2d(module.num_features, eps=module.eps))
        else:
            without_means(module)
    return network


@torch.no_grad()
def observe(network: nn.Module, images: Tensor, labels: Tensor) -> dict[str, float]:
    """Loss, accuracy, rank and alignment on these images; running statistics move as in any training step."""
    modules = list(network.modules())
    classifier = next(m for m in reversed(modules) if isinstance(m, nn.Linear))
    activation = next((m for m in reversed(modules) if isinstance(m, nn.ReLU)), None)
    caught: dict[str, Tensor] = {}
    handles = [classifier.register_forward_pre_hook(lambda _, args: caught.update(features=args[0].clone()))]
    if activation is not None:
        handles.append(activation.register_forward_pre_hook(lambda _, args: caught.update(hidden=args[0].clone())))
    try:
        logits = network.train()(images)
    finally:
        for handle in handles:
            handle.remove()
    features = caught["features"]
    hidden = caught.get("hidden", features)
    return {
        "loss": float(functional.cross_entropy(logits, labels)),
        "accuracy": 100.0 * float((logits.argmax(1) == labels).double().mean()),
        "rank": float(rank_ratio(as_matrix(hidden))) if _has_rank(hidden) else math.nan,
        "alignment": float(cosines(features.T).mean_absolute) if _has_rank(features) else math.nan,
    }


def _has_rank(signal: Tensor) -> bool:
    return bool(torch.isfinite(signal).all() and signal.any())


@functools.lru_cache(maxsize=2)
def _lesson(data: str, n_train: int, noise: bool, seed: int) -> tuple[Tensor, Tensor]:
    """Training images drawn with the seed, and their labels."""
    split = _split(data)
    generator = seeded(seed)
    chosen = torch.randperm(len(split.train_inputs), generator=generator)[:n_train]
    inputs, labels = split.train_inputs[chosen], split.train_labels[chosen]
    if noise:
        low, high = inputs.aminmax()
        inputs = low + (high - low) * torch.rand(inputs.shape, generator=generator)
    return inputs, labels


@functools.lru_cache(maxsize=1)
def _split(data: str) -> Split:
    return _DATA[data]()
