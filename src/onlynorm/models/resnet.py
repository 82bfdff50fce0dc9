"""ResNets for CIFAR images, and ImageNet ResNets with the parameter names of torchvision."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.errors import ShapeError, UnknownNameError, shown
from onlynorm.models.build import as_whole, image_norm, initialise, need_norm, need_parameters, need_size
from onlynorm.seeds import own_randomness

_STAGES = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
_BOTTLENECK_FROM = 50
_DEEPEST = 6 * 10_000 + 2


def cifar_resnet(
    depth: int = 20,
    *,
    n_classes: int = 10,
    width: int = 16,
    norm: str = "batch",
    init: str = "standard",
    seed: int = 0,
) -> CifarResNet:
    """A ResNet for CIFAR images with random weights.

    Examples:
        >>> import torch
        >>> from onlynorm.models import cifar_resnet
        >>> cifar_resnet(8)(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    with own_randomness(seed):
        return CifarResNet(depth, n_classes=n_classes, width=width, norm=norm, init=init)


def resnet(
    depth: int = 18,
    *,
    n_classes: int = 1000,
    width: int = 64,
    in_channels: int = 3,
    norm: str = "batch",
    init: str = "standard",
    seed: int = 0,
) -> ResNet:
    """An ImageNet ResNet with random weights and the parameter names of torchvision.

    Examples:
        >>> import torch
        >>> from onlynorm.models import resnet
        >>> resnet(18, width=8, n_classes=10).eval()(torch.rand(1, 3, 64, 64)).shape
        torch.Size([1, 10])
    """
    with own_randomness(seed):
        return ResNet(depth, n_classes=n_classes, width=width, in_channels=in_channels, norm=norm, init=init)


class CifarBlock(nn.Module):
    """Two 3 x 3 convolutions with norms; the shortcut subsamples and pads new channels with zeros."""

    def __init__(self, n_in: int, n_out: int, stride: int, *, norm: str = "batch") -> None:
        super().__init__()
        need_norm(norm)
        n_in, n_out, stride = (
            need_size("a CIFAR block", name, value)
            for name, value in (("n_in", n_in), ("n_out", n_out), ("stride", stride))
        )
        if n_out < n_in:
            raise ShapeError(f"a CIFAR block needs n_out of at least n_in; got {n_in} and {n_out}. Widen it.")
        need_parameters("a CIFAR block", 9 * n_out * (n_in + n_out))
        bias = norm == "none"
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride=stride, padding=1, bias=bias)
        self.bn1 = image_norm(norm, n_out)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, padding=1, bias=bias)
        self.bn2 = image_norm(norm, n_out)
        self.stride, self.new_channels = stride, n_out - n_in

    def forward(self, x: Tensor) -> Tensor:
        """The output of the block for a batch of images."""
        made = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        if self.new_channels:
            half = self.new_channels // 2
            x = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, half, self.new_channels - half))
        return torch.relu(made + x)


class CifarResNet(nn.Module):
    """A ResNet for 32 x 32 images with 6 n + 2 layers in three stages of width, 2 width and 4 width channels."""

    def __init__(
        self, depth: int = 20, *, n_classes: int = 10, width: int = 16, norm: str = "batch", init: str = "standard"
    ) -> None:
        super().__init__()
        if not 8 <= as_whole(depth) <= _DEEPEST or (as_whole(depth) - 2) % 6:
            raise ShapeError(f"a CIFAR ResNet needs a depth of 6 n + 2; got {shown(depth)}. Try 20, 32, 44 or 56.")
        n_classes = need_size("a ResNet", "n_classes", n_classes)
        width = need_size("a ResNet", "width", width)
        need_norm(norm)
        n_blocks = (as_whole(depth) - 2) // 6
        need_parameters("a CIFAR ResNet", 9 * 2 * n_blocks * 21 * width**2 + 4 * width * n_classes)
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=norm == "none")
        self.bn1 = image_norm(norm, width)
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(
                CifarBlock(n_in, n_out, 1 if n_in == n_out else 2, norm=norm),
                *(CifarBlock(n_out, n_out, 1, norm=norm) for _ in range(n_blocks - 1)),
            )
            for n_in, n_out in ((width, width), (width, 2 * width), (2 * width, 4 * width))
        )
        self.linear = nn.Linear(4 * width, n_classes)
        initialise(self, init)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of images (n, 3, 32, 32)."""
        x = torch.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean((2, 3)))


class Block(nn.Module):
    """A basic (3 x 3, 3 x 3) or bottleneck (1 x 1, 3 x 3, 1 x 1) block; the shortcut is a 1 x 1 convolution if needed.

    The stride is that of the 3 x 3 convolution, as in torchvision.
    """

    def __init__(self, n_in: int, width: int, stride: int, *, is_bottleneck: bool, norm: str) -> None:
        super().__init__()
        bias = norm == "none"
        n_out = 4 * width if is_bottleneck else width
        kernels = (1, 3, 1) if is_bottleneck else (3, 3)
        widths = (n_in, *(width,) * (len(kernels) - 1), n_out)
        strided = kernels.index(3)
        for i, kernel in enumerate(kernels):
            step = stride if i == strided else 1
            convolution = nn.Conv2d(widths[i], widths[i + 1], kernel, stride=step, padding=kernel // 2, bias=bias)
            self.add_module(f"conv{i + 1}", convolution)
            self.add_module(f"bn{i + 1}", image_norm(norm, widths[i + 1]))
        self.n_layers = len(kernels)
        self.downsample: nn.Module | None = None
        if stride != 1 or n_in != n_out:
            self.downsample = nn.Sequential(
                nn.Conv2d(n_in, n_out, 1, stride=stride, bias=bias), image_norm(norm, n_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        """The output of the block for a batch of images."""
        made = x
        for i in range(1, self.n_layers + 1):
            made = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(made))
            made = torch.relu(made) if i < self.n_layers else made
        return torch.relu(made + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """An ImageNet ResNet: a 7 x 7 convolution and four stages, for images of any size."""

    def __init__(
        self,
        depth: int = 18,
        *,
        n_classes: int = 1000,
        width: int = 64,
        in_channels: int = 3,
        norm: str = "batch",
        init: str = "standard",
    ) -> None:
        super().__init__()
        if as_whole(depth) not in _STAGES:
            raise UnknownNameError("depth of a ResNet", shown(depth).strip("'"), map(str, _STAGES))
        depth = as_whole(depth)
        n_classes = need_size("a ResNet", "n_classes", n_classes)
        width = need_size("a ResNet", "width", width)
        in_channels = need_size("a ResNet", "in_channels", in_channels)
        need_norm(norm)
        blocks_like_the_last = 18 * sum(n << 2 * place for place, n in enumerate(_STAGES[depth]))
        need_parameters("a ResNet", blocks_like_the_last * width**2 + 49 * in_channels * width + 8 * width * n_classes)
        is_bottleneck = depth >= _BOTTLENECK_FROM
        self.conv1 = nn.Conv2d(in_channels, width, 7, stride=2, padding=3, bias=norm == "none")
        self.bn1 = image_norm(norm, width)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        n_in = width
        for place, n_blocks in enumerate(_STAGES[depth]):
            blocks = []
            for i in range(n_blocks):
                stride = 2 if place and not i else 1
                blocks.append(Block(n_in, width << place, stride, is_bottleneck=is_bottleneck, norm=norm))
                n_in = (width << place) * (4 if is_bottleneck else 1)
            self.add_module(f"layer{place + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(n_in, n_classes)
        initialise(self, init)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of images (n, in_channels, height, width)."""
        x = self.maxpool(torch.relu(self.bn1(self.conv1(x))))
        for place in range(1, 5):
            x = getattr(self, f"layer{place}")(x)
        return self.fc(x.mean((2, 3)))
