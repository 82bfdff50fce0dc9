"""The networks whose learning the verdict shall foretell: those it was calibrated on, and others to test it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from onlynorm.errors import UnknownNameError
from onlynorm.models import ACTIVATIONS, cifar_resnet, mlp, resnet, vgg

N_CLASSES = 10
FASHION, CIFAR = "Fashion-MNIST", "CIFAR-10"
FIRST_SEEDS = {"test": 5000, "calibration": 2000}
"""Sets of networks by name, and the seed of the first network of each; the next has the next one."""
_INITS = ("standard", "asymmetric")
_IMAGENET_DEPTHS = (18, 34)
"""ResNets of these depths are built in ImageNet's shape, which takes images with one channel too."""


@dataclass(frozen=True)
class Subject:
    """A network to foretell, by what it is made of, and the images it learns."""

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
        """The network for such inputs, drawn from the seed."""
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


def subjects(name: str = "test") -> list[Subject]:
    """The networks of the set: MLPs without skips, residual and VGG-like ones, with every norm, both starts."""
    if name not in FIRST_SEEDS:
        raise UnknownNameError("set of networks", name, FIRST_SEEDS)
    return _test() if name == "test" else _calibration()


def _test() -> list[Subject]:
    """All norms and starts in every shape; activations take turns."""
    shapes = [
        *(("MLP", depth, width, FASHION) for depth, width in ((2, 96), (6, 96), (16, 64), (48, 48))),
        *(("MLP", depth, width, CIFAR) for depth, width in ((4, 64), (8, 96), (24, 64))),
        ("VGG", 8, 8, CIFAR), ("VGG", 12, 12, FASHION), ("ResNet", 14, 4, CIFAR), ("ResNet", 18, 8, FASHION),
    ]  # fmt: skip
    turns = itertools.cycle(("relu", "tanh", "gelu", "sigmoid", "silu"))
    return [
        Subject(kind, depth, width, norm, init, "relu" if kind == "ResNet" else next(turns), data)
        for kind, depth, width, data in shapes
        for norm in ("none", "batch", "layer", "group") for init in _INITS
    ]  # fmt: skip


def _calibration() -> list[Subject]:
    norms = ("none", "batch", "layer")
    made = [
        Subject("MLP", depth, width, norm, init, activation)
        for (depth, width) in ((3, 64), (12, 128), (32, 64))
        for norm in norms for init in _INITS for activation in ("relu", "tanh", "gelu")
    ]  # fmt: skip
    convolutional = (("ResNet", 8), ("ResNet", 20), ("VGG", 4), ("VGG", 16))
    made += [
        Subject(kind, depth, 8, norm, init, data=CIFAR)
        for kind, depth in convolutional for norm in norms for init in _INITS
    ]  # fmt: skip
    return made
