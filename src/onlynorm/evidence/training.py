"""Plain SGD, the training of experiments that ask whether a network learns at all."""

from __future__ import annotations

import math

from torch import Tensor, nn

from onlynorm.errors import TrainingError
from onlynorm.tuning import Schedule, fit


def plain_sgd(network: nn.Module, data: tuple[Tensor, Tensor], *, batch_size: int, lr: float, seed: int) -> list[float]:
    """The loss of every step of one pass over the data, at a constant learning rate and without momentum.

    If training diverges, the last loss is infinite.
    """
    losses: list[float] = []
    schedule = Schedule(epochs=1, batch_size=batch_size, lr=lr, momentum=0.0, warmup=0.0, drops=(), seed=seed)
    try:
        fit(network, data, schedule=schedule, on_step=lambda _, __, loss: losses.append(loss), accelerator="cpu")
    except TrainingError:
        losses.append(math.inf)
    return losses
