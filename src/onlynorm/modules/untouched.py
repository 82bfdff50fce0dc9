"""`untouched`: a context manager that runs a model in training mode and restores its state afterwards.

It restores the modes of all modules, all buffers (value and identity), tensors stored as plain attributes (identity),
and the random generators of torch, numpy and Python. Gradients are computed by torch.autograd.grad, which does not
change `.grad`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from onlynorm.errors import ConversionError
from onlynorm.modules.walk import input_cure, need_model, unwrap, without_compiling
from onlynorm.seeds import GLOBAL_GENERATORS, seeded


@contextmanager
def untouched(model: nn.Module, *, is_training: bool, tensors: Iterable[Tensor] = ()) -> Iterator[None]:
    """Context in which the model has this mode and gradients are enabled; its state is restored afterwards.

    Dropout is off in both modes: its noise has full rank and differs between samples, which would hide a collapse.
    `tensors` are the inputs; the generators of their devices and of the model's devices are restored too.
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    dropouts = [(m, m.dropout) for m in model.modules() if isinstance(m, nn.RNNBase | nn.MultiheadAttention)]
    attributes = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)  # as older versions of weight_norm and spectral_norm store them
    ]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        devices = _gpus(model, tensors)
        forked = torch.random.fork_rng(devices=devices)
        with GLOBAL_GENERATORS, without_compiling(), torch.inference_mode(False), forked, torch.enable_grad():
            model.train(is_training)
            for layer, _ in dropouts:
                layer.dropout = 0.0
            for module in model.modules():
                if isinstance(module, nn.modules.dropout._DropoutNd):
                    module.training = False
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for module, mode in modes:
            module.training = mode  # model.train(mode) may be overridden, and sets children too
        for layer, rate in dropouts:
            layer.dropout = rate
        for module, name, value in attributes:
            vars(module)[name] = value
        _restore([module for module, _ in modes], buffers)


@torch.no_grad()
def _restore(modules: list[nn.Module], buffers: list[tuple[nn.Module, str, Tensor | None, Tensor | None]]) -> None:
    known = {(module, name) for module, name, *_ in buffers}
    for module in modules:
        for name in [name for name in module._buffers if (module, name) not in known]:
            del module._buffers[name]  # created by the forward pass
    for module, name, buffer, saved in buffers:
        module._buffers[name] = buffer
        if buffer is not None and saved is not None:
            buffer.copy_(saved)


@contextmanager
def full_precision() -> Iterator[None]:
    """Context without autocast: measurements need full precision, and its weight cache would hide changed weights."""
    with ExitStack() as stack:
        for device, _ in autocasts():
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def autocasts() -> list[tuple[str, torch.dtype]]:
    """(device type, dtype) of every active autocast."""
    devices = ("cpu", *(("cuda",) if torch.cuda.is_available() else ()))
    return [(device, torch.get_autocast_dtype(device)) for device in devices if torch.is_autocast_enabled(device)]


def need_layers(what: str, model: object) -> nn.Module:
    """The model without wrappers; raises for scripted and exported models, whose layers are not called as modules.

    `what` names the caller in errors. Models traced by torch.fx are allowed: they call their layers as modules.
    """
    inner = unwrap(need_model(what, model))
    if any(p.is_inference() for p in inner.parameters()):
        raise ConversionError(
            f"{what} needs parameters with autograd; got a {type(inner).__name__} created inside "
            "torch.inference_mode(). Create it outside."
        )
    for name, module in inner.named_modules():
        where = f"at {name!r}" if name else "as the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise ConversionError(
                f"{what} needs layers that Python calls; got a traced or scripted {type(module).__name__} {where}. "
                "Pass the model that it was made from."
            )
        if isinstance(module, torch.fx.GraphModule) and not _calls_layers(module):
            raise ConversionError(
                f"{what} needs layers that Python calls; got an exported graph {where}, which only calls functions. "
                "Pass the model that it was made from."
            )
    return inner


def failed_on(what: str, model: nn.Module, inputs: Iterable[Tensor], error: Exception) -> ConversionError:
    """The error to raise if the model raised `error` on these inputs."""
    inputs, cure = list(inputs), "Pass a tensor, or a tuple of the arguments of forward."
    shapes = ", ".join(f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}" for x in inputs)
    first = str(error).partition("\n")[0]
    return ConversionError(
        f"{what} needs inputs that the model accepts; got {shapes}, on which {type(model).__name__} failed with "
        f"{type(error).__name__}: {first:.200}. {input_cure(model, inputs, error, otherwise=cure)}"
    )


def _calls_layers(graph: torch.fx.GraphModule) -> bool:
    """Whether a graph calls modules with parameters, or has no parameters at all."""
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_module"]
    has_any = next(graph.parameters(), None) is not None
    return not has_any or any(next(graph.get_submodule(name).parameters(), None) is not None for name in called)


def reseed(model: nn.Module, seed: int) -> None:
    """Seeds the global generators of the CPU and of the model's GPUs; use it inside `untouched`."""
    torch.set_rng_state(seeded(seed).get_state())  # torch.manual_seed would also seed GPUs whose state is not restored
    random.seed(seed)
    np.random.seed(seed % 2**32)
    for gpu in _gpus(model, ()):
        with torch.cuda.device(gpu):
            torch.cuda.manual_seed(seed)


def _gpus(model: nn.Module, tensors: Iterable[Tensor]) -> list[int]:
    places = {tensor.device for tensor in (*model.parameters(), *model.buffers(), *tensors)}
    return sorted(place.index or 0 for place in places if place.type == "cuda")
