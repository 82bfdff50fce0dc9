"""The batch and the networks that diagnoses are tried on."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from onlynorm.data import digits
from onlynorm.models import mlp
from onlynorm.rank import Diagnosis, Layer
from onlynorm.seeds import own_randomness

SPLIT = digits()
INPUTS, CLASSES = SPLIT.train_inputs[:96], SPLIT.train_labels[:96]


def deep(norm: str = "none", *, depth: int = 32, width: int = 128, **choices: Any) -> nn.Sequential:
    return mlp((64, *[width] * (depth - 1), 10), norm=norm, **choices)


def named(found: Diagnosis) -> dict[str, Layer]:
    return {layer.label: layer for layer in found.layers}


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with own_randomness(0):
            self.first, self.shared, self.last = nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.first(x))
        x = functional.relu(self.shared(x))
        logits: Tensor = self.last(functional.relu(self.shared(x)))
        return logits
