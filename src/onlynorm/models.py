"""Reference networks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.data import seeded
from onlynorm.errors import FormatError, ShapeError


def mlp(widths: Sequence[int], *, activation: Callable[[], nn.Module] = nn.ReLU, seed: int = 0) -> nn.Sequential:
    """A fully connected network through the given widths, inputs first, with activations in between."""
    if len(widths) < 2 or min(widths) < 1:
        raise ShapeError(f"mlp needs at least two widths, all positive; got {tuple(widths)}. Try (64, 32, 10).")
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(seeded(seed).get_state())  # torch.manual_seed would reach the generators of GPUs too
        for n_in, n_out in itertools.pairwise(widths):
            layers += [nn.Linear(n_in, n_out), activation()]
    return nn.Sequential(*layers[:-1])


class CifarBlock(nn.Module):
    """Two 3 x 3 convolutions with norms; the shortcut drops every second pixel and pads new channels with zeros."""

    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(n_out)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(n_out)
        self.stride, self.new_channels = stride, n_out - n_in

    def forward(self, x: Tensor) -> Tensor:
        """The block's output for a batch of images."""
        made = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        if self.new_channels:
            half = self.new_channels // 2
            x = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, half, self.new_channels - half))
        return torch.relu(made + x)


class CifarResNet(nn.Module):
    """The residual network for 32 x 32 images with 6 n + 2 layers in three stages of 16, 32 and 64 channels."""

    def __init__(self, depth: int = 20, *, n_classes: int = 10) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ShapeError(f"a CIFAR ResNet needs a depth of 6 n + 2; got {depth}. Try 20, 32, 44 or 56.")
        n_blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(
                CifarBlock(n_in, n_out, 1 if n_in == n_out else 2),
                *(CifarBlock(n_out, n_out, 1) for _ in range(n_blocks - 1)),
            )
            for n_in, n_out in ((16, 16), (16, 32), (32, 64))
        )
        self.linear = nn.Linear(64, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of images (n, 3, 32, 32)."""
        x = torch.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean((2, 3)))


def load_weights(network: nn.Module, path: Path | str) -> nn.Module:
    """The network with the weights of a safetensors file, every name matched; nothing in the file can run."""
    weights = load_file(path)
    own = network.state_dict()
    counters = {name for name in own if name.endswith("num_batches_tracked")}
    missing, unknown = own.keys() - weights.keys() - counters, weights.keys() - own.keys()
    if missing or unknown:
        raise FormatError(
            f"the file needs the network's own tensors; got {len(missing)} missing ({', '.join(sorted(missing)[:3])}), "
            f"{len(unknown)} unknown ({', '.join(sorted(unknown)[:3])}). Is it a file for this architecture?"
        )
    network.load_state_dict(weights, strict=False)
    return network
