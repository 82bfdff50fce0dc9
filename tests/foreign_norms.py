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

    def forward(self, x: Tensor) -> Tensor:
        strength = x.norm(dim=(1, 2), keepdim=True)
        return x + self.weight * (x * strength / (strength.mean(-1, keepdim=True) + 1e-6)) + self.bias


class GemmaRMSNorm(nn.Module):
    """As in transformers: it multiplies by (1 + weight)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        normal = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return (normal * (1.0 + self.weight.float())).type_as(x)


class LayerNorm1P(nn.LayerNorm):
    """As in NeMo: a layer norm of torch whose scale is 1 + weight."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight + 1.0, self.bias, self.eps)


class OwnBatchNorm(nn.Module):
    """A batch norm without scale and shift that updates its statistics in training mode, or always."""

    def __init__(self, size: int, *, is_stubborn: bool = False) -> None:
        super().__init__()
        self.is_stubborn = is_stubborn
        self.register_buffer("moving_mean", torch.zeros(size))
        self.register_buffer("moving_var", torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        if self.training or self.is_stubborn:
            with torch.no_grad():
                self.moving_mean.lerp_(x.mean((0, 2, 3)), 0.1)
                self.moving_var.lerp_(x.var((0, 2, 3)), 0.1)
        mean, var = (t.view(-1, 1, 1) for t in (self.moving_mean, self.moving_var))
        return (x - mean) * torch.rsqrt(var + 1e-5)


class UnitNorm(nn.Module):
    """A norm of one's own with nothing to tune."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(x, dim=1)
