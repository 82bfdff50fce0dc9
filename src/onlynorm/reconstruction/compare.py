"""`compare`: `verify` in batches, and how often each of the two networks is right."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from onlynorm.errors import ShapeError
from onlynorm.reconstruction.result import Reconstruction, as_network
from onlynorm.reconstruction.verify import Verification, verify

BATCH = 50
"""Samples in one pass: enough to keep a few cores busy, few enough that a bar moves."""


@dataclass(frozen=True)
class Comparison:
    """How far two networks differ, and how often each of them is right; accuracies are None without labels."""

    check: Verification
    target_accuracy: float | None
    network_accuracy: float | None
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        own = {name: value for name, value in vars(self).items() if name != "check"}
        return asdict(self.check) | own

    def __str__(self) -> str:
        if self.target_accuracy is None or self.network_accuracy is None:
            return str(self.check)
        return (
            f"{self.check}; accuracy {100 * self.target_accuracy:.2f} % of the target, "
            f"{100 * self.network_accuracy:.2f} % of the network"
        )


def compare(
    target: nn.Module | Reconstruction,
    network: nn.Module | Reconstruction,
    *,
    inputs: Tensor,
    labels: Int[Tensor, " n_labels"] | None = None,
    batch_size: int = BATCH,
    step: Callable[[int, int], None] | None = None,
) -> Comparison:
    """The verification on all samples, and the accuracies of target and network where there are labels.

    `step` is called with (samples done, samples in all).
    """
    start = time.perf_counter()
    target, network = as_network("compare", target), as_network("compare", network)
    predictions: dict[nn.Module, list[Tensor]] = {target: [], network: []}

    def remember(module: nn.Module, _: object, output: object) -> None:
        if isinstance(output, Tensor):
            flat = output.flatten(1)
            found = flat.argmax(1).where(flat.isfinite().all(1), -1)  # NaN predicts no class
            predictions[module].append(found.cpu())

    has_labels = labels is not None and len(labels) > 0
    if labels is not None and has_labels and len(labels) != len(inputs):
        raise ShapeError(f"compare needs a label per sample, {len(inputs)}; got {len(labels)}. Cut both alike.")
    hooks = [one.register_forward_hook(remember) for one in predictions] if has_labels else []
    try:
        check = verify(target, network, inputs, batch_size=batch_size, step=step)
    finally:
        for hook in hooks:
            hook.remove()
    step_size = 2 if target is network else 1  # a network beside itself is called twice per batch
    right = [_accuracy(found[::step_size], labels) for found in predictions.values()]
    return Comparison(check, right[0], right[-1], time.perf_counter() - start)


def _accuracy(predictions: list[Tensor], labels: Tensor | None) -> float | None:
    if not predictions or labels is None:
        return None
    return float((torch.cat(predictions) == labels.cpu()).double().mean())
