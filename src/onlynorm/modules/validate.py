"""Checks of models and of the batches that they are called with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from onlynorm.errors import ConversionError, ShapeError, ValueRangeError, shown
from onlynorm.modules.walk import Inputs, as_tuple


def need_model(what: str, model: Any, *, is_empty_allowed: bool = True) -> nn.Module:
    """`model` as an `nn.Module` whose parameters have values; a result that holds a `network` stands for that network.

    `what` is the verb that needs it. Lazy layers and parameters on the meta device are refused, and without
    `is_empty_allowed` models that have no parameters.
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
            f"{what} needs a model whose weights exist; got a lazy layer in {type(model).__name__}. Run one batch "
            "through the model first."
        )
    if any(x.is_meta for x in tensors):
        raise ConversionError(
            f"{what} needs a model whose weights have values; got a {type(model).__name__} on the meta device. Make "
            "it on a real device."
        )
    if not tensors and not is_empty_allowed:
        raise ConversionError(f"{what} needs a model with parameters; got a {type(model).__name__} without any.")
    return model


def need_batch(what: str, network: nn.Module, inputs: Inputs) -> None:
    """Raises unless the inputs are tensors of finite real numbers, not empty, on the network's device."""
    given = as_tuple(inputs)
    if not given or not all(isinstance(x, Tensor) for x in given):
        kinds = ", ".join(type(x).__name__ for x in given) or "nothing"
        raise ShapeError(f"{what} needs a batch, or a tuple of batches; got {kinds}. Pass tensors, samples first.")
    devices = {x.device for x in (*network.parameters(), *network.buffers())}
    for x in given:
        if devices and x.device not in devices:
            raise ValueRangeError(
                f"{what} needs inputs on the network's device, {', '.join(map(str, devices))}; got {x.device}. Call "
                "inputs.to(device)."
            )
        if x.is_complex():
            raise ValueRangeError(f"{what} needs real inputs; got {x.dtype}. Pass real and imaginary parts apart.")
        if not x.numel() or not bool(torch.isfinite(x).all()):
            raise ValueRangeError(
                f"{what} needs a batch of finite inputs; got shape {tuple(x.shape)}, empty or with NaN or infinity. "
                "Pass a few dozen real samples."
            )


def need_evaluation(what: str, network: nn.Module) -> None:
    """Raises where a norm or a dropout of the network is in training mode."""
    kinds = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    for name, module in network.named_modules():
        if isinstance(module, kinds) and module.training:
            raise ValueRangeError(
                f"{what} needs a target in evaluation mode; got {type(module).__name__} in training mode at {name!r}, "
                "whose output depends on the rest of the batch or on chance, so that there is no one function to "
                "compare with. Call network.eval() first."
            )
