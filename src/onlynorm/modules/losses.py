"""Default losses: cross entropy for integer targets, mean squared error for float targets.

`fit`, `diagnose`, `repair` and `memorize` share this rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from onlynorm.errors import ConversionError, OnlynormError, ShapeError, ValueRangeError, shown
from onlynorm.modules.walk import outputs_of
from onlynorm.seeds import seeded

Loss = Callable[[Any, Any], Tensor]
_IGNORED = -100
"""The label that cross entropy ignores, as in torch."""


def is_class_labels(targets: Tensor) -> bool:
    """Whether targets are class labels (integers or booleans); floating-point targets are real values.

    Examples:
        >>> import torch
        >>> from onlynorm.modules import is_class_labels
        >>> is_class_labels(torch.tensor([0, 1])), is_class_labels(torch.tensor([0.5, 1.0]))
        (True, False)
    """
    return not targets.is_floating_point() and not targets.is_complex()


def default_loss(output: Any, targets: Any, *, label_smoothing: float = 0.0) -> Tensor:
    """Cross entropy of logits with integer class labels, or the mean squared error to floating-point targets.

    Classes are on axis 1, as in torch, or on the last axis, as in language models.

    Examples:
        >>> import torch
        >>> from onlynorm.modules import default_loss
        >>> default_loss(torch.tensor([[1.0], [3.0]]), torch.tensor([[1.0], [1.0]]))
        tensor(2.)
        >>> default_loss(torch.zeros(2, 4), torch.tensor([0, 3]))
        tensor(1.3863)
    """
    if not isinstance(output, Tensor) or not isinstance(targets, Tensor):
        what = f"{type(output).__name__} and {type(targets).__name__}"
        raise ConversionError(
            f"the default losses need tensors as output and targets; got {what}. Pass a custom loss=."
        )
    targets = targets.to(output.device)
    if targets.is_complex() or output.is_complex():
        raise ValueRangeError(
            f"the default losses need real outputs and targets; got {output.dtype} and {targets.dtype}. Pass real and "
            "imaginary parts separately, or a custom loss=."
        )
    if not is_class_labels(targets):
        if targets.shape != output.shape:
            raise ShapeError(
                f"the mean squared error needs targets of the shape of the output, {tuple(output.shape)}; got "
                f"{tuple(targets.shape)}. Reshape them, or pass a custom loss=."
            )
        return functional.mse_loss(output, targets.to(output.dtype))
    if output.ndim == targets.ndim + 1 and output.ndim > 1:
        targets = targets.long()
        if (output.shape[0], *output.shape[2:]) == tuple(targets.shape):
            _need_outputs(targets, output.shape[1])
            return functional.cross_entropy(output, targets, label_smoothing=label_smoothing)
        if output.shape[:-1] == targets.shape:
            _need_outputs(targets, output.shape[-1])
            flat = targets.flatten()
            return functional.cross_entropy(output.flatten(0, -2), flat, label_smoothing=label_smoothing)
    raise ShapeError(
        f"cross entropy needs one class for each sample of an output (samples, classes, ...); got output "
        f"{tuple(output.shape)} and targets {tuple(targets.shape)}. Pass a custom loss=."
    )


def call_loss(what: str, loss: Loss, *, output: Any, targets: Any) -> Any:
    """`loss(output, targets)`; errors of the loss are raised again with the shapes. `what` names the caller."""
    try:
        return loss(output, targets)
    except (OnlynormError, MemoryError, Warning, torch.OutOfMemoryError):
        raise
    except Exception as error:
        first = str(error).partition("\n")[0]
        raise ConversionError(
            f"{what} needs a loss that accepts the output and the targets; got {_described(output)} and "
            f"{_described(targets)}, on which {getattr(loss, '__name__', type(loss).__name__)} failed with "
            f"{type(error).__name__}: {first:.200}. Pass targets that fit this loss, or another loss=."
        ) from error


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return shown(value)


def random_projection(seed: int) -> Loss:
    """A loss for networks without targets: the inner products of all outputs with random normal tensors.

    Its gradient shows how gradients grow or shrink from the last layer to the first. Each product is divided by the
    number of samples.
    """

    def loss(returned: Any, _: Any) -> Tensor:
        outputs = [output for output in outputs_of(returned) if output.requires_grad]
        if not outputs:
            raise ConversionError(
                f"a model without targets needs to return tensors that depend on its weights; got "
                f"{type(returned).__name__} without one. Return them in a tuple or a dict."
            )
        generator = seeded(seed)
        parts = [(x * torch.randn(x.shape, generator=generator).to(x)).sum() / max(1, *x.shape[:1]) for x in outputs]
        return torch.stack(parts).sum()

    return loss


def _need_outputs(labels: Tensor, n_outputs: int) -> None:
    """Raises unless every label has an output; -100 marks labels to ignore."""
    used = labels[labels != _IGNORED]
    if used.numel() and not 0 <= int(used.min()) <= int(used.max()) < n_outputs:
        odd = int(used.max()) if int(used.max()) >= n_outputs else int(used.min())
        raise ValueRangeError(
            f"class labels need to be integers from 0 to {n_outputs - 1}, one for each output; got {odd}. Give "
            "the model more outputs, or number the classes from 0."
        )
