"""`untouched`: a block in which a model may run in training mode and leaves no trace, whatever happens inside.

Put back are the modes of all modules, all buffers (running statistics, by value and by identity), and the states of the
random generators of torch, numpy and Python. Gradients are taken by torch.autograd.grad, which touches no `.grad`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from onlynorm.data import seeded


@contextmanager
def untouched(model: nn.Module, *, is_training: bool, tensors: Iterable[Tensor] = ()) -> Iterator[None]:
    """Inside, the model is in training mode or not and gradients are on; afterwards everything is as it was.

    `tensors` are the inputs: the generators of their devices, and of the model's, are put back too.
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    python, numbers = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=_gpus(model, tensors)), torch.enable_grad():
            model.train(is_training)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)
        for module, mode in modes:
            module.training = mode  # model.train(mode) may be overridden, and would reach further
        _restore(buffers)


@torch.no_grad()
def _restore(buffers: list[tuple[nn.Module, str, Tensor | None, Tensor | None]]) -> None:
    for module, name, buffer, kept in buffers:
        module._buffers[name] = buffer
        if buffer is not None and kept is not None:
            buffer.copy_(kept)


def reseed(model: nn.Module, seed: int) -> None:
    """Makes dropout and the like draw from this seed, on the CPU and on the model's GPUs; use it inside `untouched`."""
    torch.set_rng_state(seeded(seed).get_state())  # torch.manual_seed would reach GPUs whose state is not put back
    random.seed(seed)
    np.random.seed(seed % 2**32)
    for gpu in _gpus(model, ()):
        with torch.cuda.device(gpu):
            torch.cuda.manual_seed(seed)


def _gpus(model: nn.Module, tensors: Iterable[Tensor]) -> list[int]:
    places = {tensor.device for tensor in (*model.parameters(), *model.buffers(), *tensors)}
    return sorted(place.index or 0 for place in places if place.type == "cuda")
