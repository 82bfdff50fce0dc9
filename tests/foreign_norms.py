"""Norms as other libraries write them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LlamaRMSNorm(nn.Module):
    """As in transformers: a weight, no bias, not a subclass of anything."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class FrozenBatchNorm2d(nn.Module):
    """As in torchvision: everything is a buffer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((size,), value))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * torch.rsqrt(self.running_var + 1e-5)
        return x * scale[:, None, None] + (self.bias - self.running_mean * scale)[:, None, None]


class BatchNormAct2d(nn.BatchNorm2d):
    """As in timm: a batch norm with an activation inside."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


class GlobalResponseNorm(nn.Module):
    """As in timm's ConvNeXt: weight and bias of shape (1, 1, 1, channels)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 1, 1, size))
        self.bias = nn.Parameter(torch.zeros(1, 1, 1, size))
