"""The all-convolutional residual network of hardt_ma2017, section 4: convolutions and ReLU, without any norm.

A convolution, then blocks x + C2 relu(C1 x) in three stages of width, 2 width and 4 width channels, global average
pooling, and a fixed random projection to the classes. Initial weights are so small that every block is close to its
shortcut: normal with standard deviation 1 / (k^2 c) for a k x k convolution with c output channels, instead of the
usual 1 / (k sqrt(c)).
"""

from __future__ import annotations

import itertools

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.errors import ConversionError, ShapeError
from onlynorm.features import draw
from onlynorm.identity.near_identity import small_deviation
from onlynorm.modules import need_model, unwrap
from onlynorm.seeds import own_randomness
from onlynorm.validate import need_choice, need_free_memory, need_instance, need_integer, need_seed

STARTS = ("near_identity", "standard")
"""Initializations of the convolutions of the blocks."""
HEADS = ("fixed", "trained")
"""Whether the last layer is fixed or trained."""
_STEM = 16  # channels of the paper's first convolution
_KERNEL = 3


def all_convolutional(
    depth: int = 55,
    *,
    width: int = 64,
    n_classes: int = 10,
    in_channels: int = 3,
    init: str = "near_identity",
    norm: str | None = None,
    head: str = "fixed",
    seed: int = 0,
) -> AllConvolutional:
    """The all-convolutional residual network with `depth` convolutions; the defaults are those of the paper.

    `depth` is 6 n + 1: n blocks in each of three stages, of width, 2 width and 4 width channels. Images may have any
    size. For comparison, `init="standard"` uses the usual initialization, `norm="batch"` adds a batch norm after every
    convolution, and `head="trained"` makes the projection trainable, with the same initial values.

    Examples:
        >>> import torch
        >>> from onlynorm.identity import all_convolutional
        >>> network = all_convolutional(13, width=4)
        >>> network(torch.rand(2, 3, 16, 16)).shape
        torch.Size([2, 10])
    """
    depth = need_integer("depth of an all-convolutional net", depth, high=6001, cure="Try 7, 19 or 55.")
    if depth < 7 or (depth - 1) % 6:
        raise ShapeError(f"an all-convolutional net needs a depth of 6 n + 1; got {depth}. Try 7, 19 or 55.")
    for name, value in (("width", width), ("n_classes", n_classes), ("in_channels", in_channels)):
        if need_integer(f"{name} of an all-convolutional net", value, high=2**31 - 1, cure="Leave it out.") < 1:
            raise ShapeError(f"an all-convolutional net needs a positive {name}; got {value}. Leave it out.")
    width, n_classes, in_channels = int(width), int(n_classes), int(in_channels)
    need_choice("init", init, STARTS)
    if norm is not None:
        need_choice("norm", norm, ("batch",))
    need_choice("head", head, HEADS)
    seed = need_seed(seed)
    size = 4.0 * (9 * width * in_channels + (depth // 3) * 9 * 21 * width**2 + 4 * width * n_classes)
    need_free_memory("an all-convolutional net", size, cure="Choose a smaller width or depth.")
    n_blocks = (depth - 1) // 6
    channels = [min(_STEM, width), *(width << stage for stage in range(3) for _ in range(n_blocks))]
    with own_randomness(seed):
        stem = _convolution(in_channels, channels[0], start="standard")
        blocks = [
            ResidualBlock(n_in, n_out, stride=2 if place in (n_blocks, 2 * n_blocks) else 1, init=init, norm=norm)
            for place, (n_in, n_out) in enumerate(itertools.pairwise(channels))
        ]
    last = Projection(channels[-1], n_classes, is_trained=head == "trained", seed=seed)
    return AllConvolutional(stem, blocks, last, norm=norm)


class ResidualBlock(nn.Module):
    """x + C2 relu(C1 x), optionally with batch norms after both convolutions."""

    def __init__(self, n_in: int, n_out: int, *, stride: int, init: str, norm: str | None) -> None:
        super().__init__()
        self.conv1 = _convolution(n_in, n_out, start=init, stride=stride)
        self.norm1 = _norm(norm, n_out)
        self.conv2 = _convolution(n_out, n_out, start=init)
        self.norm2 = _norm(norm, n_out)
        self.stride, self.new_channels = stride, n_out - n_in

    def forward(self, x: Float[Tensor, "n inp height width"]) -> Float[Tensor, "n out high wide"]:
        """The output of the block for a batch of images."""
        return self.shortcut(x) + self.branch(x)

    def branch(self, x: Float[Tensor, "n inp height width"]) -> Float[Tensor, "n out high wide"]:
        """The residual branch."""
        return self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))

    def shortcut(self, x: Float[Tensor, "n inp height width"]) -> Float[Tensor, "n out high wide"]:
        """The input, average-pooled by the stride and padded with zero channels on both sides."""
        if self.stride > 1:
            x = functional.avg_pool2d(x, self.stride, ceil_mode=True)  # the size of the strided convolution's output
        before = self.new_channels // 2
        return functional.pad(x, (0, 0, 0, 0, before, self.new_channels - before)) if self.new_channels else x


class Projection(nn.Module):
    """A linear map to the classes with normal entries of variance 1 / inputs, as a buffer or trainable parameter."""

    weight: Tensor

    def __init__(self, n_in: int, n_out: int, *, is_trained: bool, seed: int) -> None:
        super().__init__()
        drawn = draw("er_normal", (n_out, 1), n_features=n_in, density=1.0, seed=seed, layer="head").left()
        weight = (drawn / n_in**0.5).to(torch.get_default_dtype()).contiguous()
        if is_trained:
            self.weight = nn.Parameter(weight)
        else:
            self.register_buffer("weight", weight)

    def forward(self, x: Float[Tensor, "n inp"]) -> Float[Tensor, "n out"]:
        """The logits."""
        return functional.linear(x, self.weight)


class AllConvolutional(nn.Module):
    """The network of `all_convolutional`: `stem`, `blocks`, global average pooling, `head`."""

    def __init__(self, stem: nn.Conv2d, blocks: list[ResidualBlock], head: Projection, *, norm: str | None) -> None:
        super().__init__()
        self.stem, self.norm = stem, _norm(norm, stem.out_channels)
        self.blocks, self.head = nn.Sequential(*blocks), head

    def forward(self, x: Float[Tensor, "n channels height width"]) -> Float[Tensor, "n classes"]:
        """Logits of a batch of images of any size."""
        return self.head(self.blocks(self.norm(self.stem(x))).mean((2, 3)))

    @property
    def residual_blocks(self) -> list[ResidualBlock]:
        """The blocks in order."""
        return [block for block in self.blocks if isinstance(block, ResidualBlock)]

    @property
    def n_convolutions(self) -> int:
        """Number of convolutions, including the first."""
        return sum(isinstance(layer, nn.Conv2d) for layer in self.modules())

    @property
    def n_trained(self) -> int:
        """Number of trainable parameters."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)


def branch_bounds(network: AllConvolutional) -> list[float]:
    """Upper bounds |C1| |C2| of the Lipschitz constants of the residual branches, one per block.

    A pixel is in at most k^2 patches, so the norm of a k x k convolution is at most k times the spectral norm of its
    weight as a matrix (out, inp k^2), for any stride. Blocks with a bound below one are near the identity.

    Theory: hardt_ma2017:thm-2.2

    Examples:
        >>> from onlynorm.identity import all_convolutional, branch_bounds
        >>> bounds = branch_bounds(all_convolutional(13, width=4))
        >>> len(bounds)
        6
    """
    network = need_instance(
        "branch_bounds",
        unwrap(need_model("branch_bounds", network)),
        AllConvolutional,
        cure="Pass the result of all_convolutional.",
    )
    if any(isinstance(layer, nn.BatchNorm2d) for layer in network.modules()):
        raise ConversionError(
            "branch_bounds needs a network without norms, whose scales depend on the batch; got one with batch norms. "
            "Build it with norm=None."
        )
    return [_bound(block.conv1) * _bound(block.conv2) for block in network.residual_blocks]


def _bound(layer: nn.Conv2d) -> float:
    rows = layer.weight.detach().double().flatten(1)
    largest = torch.linalg.eigvalsh(rows @ rows.mT)[-1]  # squared singular values, from a much smaller matrix
    return layer.kernel_size[0] * float(largest.clamp_min(0.0).sqrt())


def _convolution(n_in: int, n_out: int, *, start: str, stride: int = 1) -> nn.Conv2d:
    """A convolution without bias and with "same" padding."""
    layer = nn.Conv2d(n_in, n_out, _KERNEL, stride=stride, padding=_KERNEL // 2, bias=False)
    small = small_deviation(layer.kernel_size, n_out)
    deviation = small if start == "near_identity" else 1.0 / (_KERNEL * n_out**0.5)
    nn.init.normal_(layer.weight, std=deviation)
    return layer


def _norm(kind: str | None, n_channels: int) -> nn.Module:
    return nn.Identity() if kind is None else nn.BatchNorm2d(n_channels)
