"""A small vision transformer with the parameter names of timm."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.errors import ShapeError, shown
from onlynorm.models.build import as_whole, need_parameters, need_size
from onlynorm.seeds import own_randomness

_DEEPEST = 10_000
_SPREAD = 0.02
"""Initial standard deviation of the class token and position embedding."""


def vit(
    *,
    patch: int = 4,
    depth: int = 6,
    width: int = 192,
    heads: int = 3,
    image_size: int = 32,
    in_channels: int = 3,
    n_classes: int = 10,
    seed: int = 0,
) -> ViT:
    """A vision transformer with `depth` blocks, patches of patch x patch pixels and random weights.

    Examples:
        >>> import torch
        >>> from onlynorm.models import vit
        >>> vit(depth=1, width=12)(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    sizes = {
        "patch": patch, "depth": depth, "width": width, "heads": heads, "image_size": image_size,
        "in_channels": in_channels, "n_classes": n_classes,
    }  # fmt: skip
    whole = {name: as_whole(value) for name, value in sizes.items()}
    if min(whole.values()) < 1 or whole["width"] % whole["heads"] or whole["image_size"] % whole["patch"]:
        raise ShapeError(
            "vit needs positive sizes, a width divisible by heads and an image size divisible by patch; got "
            f"{', '.join(f'{name}={shown(value)}' for name, value in sizes.items())}. Try width=192, heads=3, patch=4."
        )
    image_size, patch = whole["image_size"], whole["patch"]
    with own_randomness(seed):
        return ViT(
            patch=patch, depth=depth, width=width, heads=heads, n_patches=(image_size // patch) ** 2,
            in_channels=in_channels, n_classes=n_classes,
        )  # fmt: skip


class Attention(nn.Module):
    """Multi-head self-attention with two linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The attention output (n, tokens, width)."""
        n, n_tokens, width = x.shape
        query, key, value = self.qkv(x).reshape(n, n_tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return self.proj(mixed.transpose(1, 2).reshape(n, n_tokens, width))


class Feedforward(nn.Module):
    """Two linear layers with a GELU in between and 4 width hidden features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Applies both layers to each token."""
        return self.fc2(functional.gelu(self.fc1(x)))


class TransformerBlock(nn.Module):
    """Attention and feedforward, each with a layer norm before it and a skip connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Feedforward(width)

    def forward(self, x: Tensor) -> Tensor:
        """The output of the block for a batch of tokens."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Patches(nn.Module):
    """Patch embedding: one token per image patch."""

    def __init__(self, in_channels: int, width: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, width, patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (n, patches, width) of images."""
        return self.proj(x).flatten(2).mT


class ViT(nn.Module):
    """A vision transformer with a class token, learned position embedding and a head on the class token."""

    def __init__(self, *, patch: int, depth: int, width: int, heads: int, n_patches: int, in_channels: int,
                 n_classes: int) -> None:  # fmt: skip
        super().__init__()
        sizes = {
            "patch": patch, "depth": depth, "width": width, "heads": heads, "n_patches": n_patches,
            "in_channels": in_channels, "n_classes": n_classes,
        }  # fmt: skip
        patch, depth, width, heads, n_patches, in_channels, n_classes = (
            need_size("a ViT", name, value, high=_DEEPEST if name == "depth" else 2**31 - 1)
            for name, value in sizes.items()
        )
        if width % heads:
            raise ShapeError(f"a ViT needs a width divisible by heads; got {width} and {heads}. Try 192 and 3.")
        ends = in_channels * patch**2 + n_patches + 1 + n_classes
        need_parameters("a ViT", 12 * width**2 * depth + ends * width)
        self.patch_embed = Patches(in_channels, width, patch)
        self.cls_token = nn.Parameter(_SPREAD * torch.randn(1, 1, width))
        self.pos_embed = nn.Parameter(_SPREAD * torch.randn(1, 1 + n_patches, width))
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of images with `n_patches` patches."""
        tokens = self.patch_embed(x)
        tokens = torch.cat([self.cls_token.expand(len(tokens), -1, -1), tokens], dim=1)
        if tokens.shape[1] != self.pos_embed.shape[1]:
            raise ShapeError(
                f"this vit needs images of {self.pos_embed.shape[1] - 1} patches; got {tokens.shape[1] - 1}, from "
                f"images {tuple(x.shape[1:])}. Resize them, or create it with their image_size."
            )
        return self.head(self.norm(self.blocks(tokens + self.pos_embed))[:, 0])
