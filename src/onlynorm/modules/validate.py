"""Validation of models and their inputs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from onlynorm.errors import ConversionError, ShapeError, ValueRangeError, shown
from onlynorm.modules.walk import Inputs, as_tuple


def need_model(what: str, model: Any, *, is_empty_allowed: bool = True) -> nn.Module:
    """`model` as an `nn.Module` whose parameters have values; for a result object, its `network`.

    `what` names the caller in errors. Raises for lazy layers and parameters on the meta device, and for models without
    parameters unless `is_empty_allowed`.
    """
    if not isinstance(model, nn.Module):
        inner = None if isinstance(model, type) else getattr(model, "network", None)
        if not isinstance(inner, nn.Module):
            raise ConversionError(
                f"{what} needs a model, a torch.nn.Module; got {shown(model)}. Pass the network itself."
            )
        model = inner
    tensors = [*model.parameters(), *model.buffers()]
    if any(is_lazy(x) for x in tensors):
        raise ConversionError(
            f"{what} needs initialized weights; got a lazy layer in {type(model).__name__}. Run one batch through the "
            "model first."
        )
    if any(x.is_meta for x in tensors):
        raise ConversionError(
            f"{what} needs a model whose weights have values; got a {type(model).__name__} on the meta device. Create "
            "it on another device."
        )
    if not tensors and not is_empty_allowed:
        raise ConversionError(f"{what} needs a model with parameters; got a {type(model).__name__} without any.")
    return model


def need_batch(what: str, network: nn.Module, inputs: Inputs) -> None:
    """Raises unless the inputs are non-empty, real, finite tensors on the device of the network."""
    given = as_tuple(inputs)
    if not given or not all(isinstance(x, Tensor) for x in given):
        counts = Counter(type(x).__name__ for x in given)
        kinds = ", ".join(f"{n:,} x {kind}" if n > 1 else kind for kind, n in counts.items()) or "nothing"
        raise ShapeError(f"{what} needs a batch, or a tuple of batches; got {kinds}. Pass tensors, samples first.")
    devices = {x.device for x in (*network.parameters(), *network.buffers())}
    for x in given:
        if devices and x.device not in devices:
            raise ValueRangeError(
                f"{what} needs inputs on the network's device, {', '.join(map(str, devices))}; got {x.device}. Call "
                "inputs.to(device)."
            )
        if x.is_complex():
            raise ValueRangeError(f"{what} needs real inputs; got {x.dtype}. Pass real and imaginary parts separately.")
        if not x.numel() or not bool(torch.isfinite(x).all()):
            raise ValueRangeError(
                f"{what} needs a batch of finite inputs; got shape {tuple(x.shape)}, empty or with NaN or infinity. "
                "Pass a few dozen real samples."
            )


def need_evaluation(what: str, network: nn.Module) -> None:
    """Raises if a batch norm or dropout of the network is in training mode."""
    kinds = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    for name, module in network.named_modules():
        if isinstance(module, kinds) and module.training:
            raise ValueRangeError(
                f"{what} needs a target in evaluation mode; got {type(module).__name__} in training mode at {name!r}, "
                "whose output depends on the other samples or is random. Call network.eval() first."
            )
