"""What a model's output is judged by where nobody says: cross entropy for classes, mean squares for numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional

from onlynorm.errors import ConversionError, ShapeError
from onlynorm.rank.probes import tensors_in

Loss = Callable[[Any, Any], Tensor]
Output = Callable[[Any], Any]


def find_output(returned: Any) -> Tensor:
    """The logits of what a model returns, or the first floating-point tensor in it."""
    named = returned.get("logits") if isinstance(returned, dict) else getattr(returned, "logits", None)
    found = named if isinstance(named, Tensor) else next(tensors_in(returned), None)
    if found is None:
        raise ConversionError(
            f"a loss needs a tensor in what the model returns; got {type(returned).__name__} without one. Pass as "
            "output= a function that picks it."
        )
    return found


def usual_loss(output: Any, targets: Any) -> Tensor:
    """Cross entropy of logits with whole-number classes, or the mean square of the difference to numbers.

    Classes stand on the axis 1, as in torch, or last, as in language models.
    """
    if not isinstance(output, Tensor) or not isinstance(targets, Tensor):
        what = f"{type(output).__name__} and {type(targets).__name__}"
        raise ConversionError(
            f"the usual losses need tensors as output and targets; got {what}. Pass loss= of your own."
        )
    targets = targets.to(output.device)
    if targets.is_floating_point():
        if targets.shape != output.shape:
            raise ShapeError(
                f"mean squares need targets like the output, {tuple(output.shape)}; got {tuple(targets.shape)}. "
                "Reshape them, or pass loss= of your own."
            )
        return functional.mse_loss(output, targets.to(output.dtype))
    if output.ndim == targets.ndim + 1 and output.ndim > 1:
        if (output.shape[0], *output.shape[2:]) == tuple(targets.shape):
            return functional.cross_entropy(output, targets.long())
        if output.shape[:-1] == targets.shape:
            return functional.cross_entropy(output.flatten(0, -2), targets.flatten().long())
    raise ShapeError(
        f"cross entropy needs one class for each sample of an output (samples, classes, ...); got output "
        f"{tuple(output.shape)} and targets {tuple(targets.shape)}. Pass loss= of your own."
    )
