"""Calling networks: what goes in, what comes out, what their layers see, and how far outputs differ."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from onlynorm.errors import ConversionError, OnlynormError, ShapeError, ValueRangeError
from onlynorm.modules import as_tensor, without_compiling

Inputs: TypeAlias = "Tensor | tuple[Tensor, ...]"
"""A batch, or a tuple of batches for a network that takes several."""


def as_inputs(what: str, inputs: Any) -> tuple[Tensor, ...]:
    """The positional arguments of a network from a batch or a tuple or list of batches, NumPy arrays included."""
    cure = "Pass a batch, or a tuple of batches, as tensors or NumPy arrays with samples first."
    is_several = isinstance(inputs, tuple) or (
        isinstance(inputs, list) and any(hasattr(item, "shape") for item in inputs)
    )
    given = tuple(inputs) if is_several else (inputs,)
    if not given:
        raise ShapeError(f"{what} needs a batch, or a tuple of batches; got nothing. {cure}")
    return tuple(as_tensor(f"{what}: inputs", item, cure=cure) for item in given)


def first_samples(inputs: tuple[Tensor, ...], n_samples: int) -> tuple[Tensor, ...]:
    """The first few samples, if all inputs have as many; else the inputs."""
    if any(x.ndim == 0 or len(x) != len(inputs[0]) for x in inputs):
        return inputs
    return tuple(x[:n_samples] for x in inputs)


def accepted_samples(network: nn.Module, inputs: tuple[Tensor, ...], n_samples: int) -> tuple[Tensor, ...]:
    """The first few samples if the network takes them; all inputs where they are no batch, or one of a fixed size."""
    few = first_samples(inputs, n_samples)
    try:
        run(network, few)
    except OnlynormError:
        return inputs
    return few


def as_tuple(inputs: Inputs) -> tuple[Tensor, ...]:
    """The inputs as the positional arguments of the network."""
    return inputs if isinstance(inputs, tuple) else (inputs,)


def cast(inputs: Inputs, dtype: torch.dtype, device: torch.device | str | None = None) -> tuple[Tensor, ...]:
    """The inputs with floating numbers in this precision; whole numbers (tokens, masks) stay what they are."""
    return tuple(x.to(device, dtype if x.is_floating_point() else x.dtype) for x in as_tuple(inputs))


def precision(network: nn.Module) -> torch.dtype:
    """The precision of the network's inputs: that of its tensors outside blocks, else of its blocks, else float64."""
    kept = (module for module in network.modules() if getattr(module, "keeps_precision", False))
    inner = {id(module) for outer in kept for module in outer.modules()}
    others = [module for module in network.modules() if id(module) not in inner]
    tensors = itertools.chain(
        (p for module in others for p in module.parameters(recurse=False)),
        (b for module in others for b in module.buffers(recurse=False)),
        network.parameters(),
    )
    return next((x.dtype for x in tensors if x.is_floating_point()), torch.float64)


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


def copy_network(network: nn.Module) -> nn.Module:
    """A copy that shares nothing with the network."""
    try:
        return copy.deepcopy(network)
    except Exception as error:
        raise ConversionError(
            f"the network needs to be copied, so that it is left alone; copy.deepcopy says: {error}. Make a fresh one "
            "and load its weights (old weight_norm hooks have to be removed first)."
        ) from error


@torch.no_grad()
def run(network: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
    """What the network returns for the inputs."""
    try:
        with without_compiling():
            return network(*inputs)
    except OnlynormError:
        raise
    except (RuntimeError, TypeError, IndexError, ValueError) as error:
        shapes = ", ".join(f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}" for x in inputs)
        raise ConversionError(
            f"the network needs to take the inputs in its own precision; got {shapes}, and it failed with: {error}. "
            "Pass inputs as forward takes them, and remove casts to a fixed precision or device from it."
        ) from error


def outputs_of(returned: object) -> list[Tensor]:
    """The tensors in what a network returned, whichever containers hold them."""
    if isinstance(returned, Tensor):
        return [returned]
    if isinstance(returned, Mapping):
        returned = list(returned.values())
    if isinstance(returned, list | tuple):
        return [tensor for item in returned for tensor in outputs_of(item)]
    return []


def relative_difference(made: list[Tensor], wanted: list[Tensor], *, scale: list[Tensor] | None = None) -> float:
    """|made - wanted| / |wanted| over all tensors; relative to `scale` (or absolute) where wanted is zero."""
    rest = _norm([a.double() - b.double() for a, b in zip(made, wanted, strict=True)])
    return rest / (_norm(wanted) or _norm(scale or []) or 1.0)


def _norm(tensors: list[Tensor]) -> float:
    sizes = [torch.linalg.vector_norm(tensor.double()) for tensor in tensors]
    return float(torch.linalg.vector_norm(torch.stack(sizes))) if sizes else 0.0
