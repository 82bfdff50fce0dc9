"""Validated points and targets to memorize, with repeated points merged."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from onlynorm.errors import ShapeError, ValueRangeError
from onlynorm.modules import is_class_labels
from onlynorm.validate import as_tensor, need_integer

SHOWN = 5
"""Maximum number of pairs listed in an error."""
CLASS_LIMIT = 0.25
"""Largest error of a class output; from one half on, the class could be wrong."""
REAL_LIMIT = 1e-6
"""Largest error of a real output, relative to the largest target of that output."""


@dataclass(frozen=True)
class Sample:
    """Distinct points (n, inputs) in float64, their targets, and their indices in the given sample.

    `targets` are class indices (n,), or real vectors (n, outputs) if `is_real`.
    """

    points: Tensor
    targets: Tensor
    places: Tensor
    n_outputs: int
    is_real: bool
    n_given: int


def collect(x: Any, labels: Any, *, n_classes: int | None, what: str = "memorize") -> Sample:
    """The distinct points with their targets; raises if equal points have different targets.

    `what` names the caller in errors.
    """
    points = _need_points(what, as_tensor("points", x))
    targets, n_outputs = _need_targets(what, as_tensor("labels", labels), len(points), n_classes)
    places = merge(points, targets, torch.arange(len(points)), what=what)
    places = places.to(points.device)
    n_given = len(points)
    points = points if len(places) == n_given else points[places]  # avoids a copy of large data
    return Sample(points, targets.to(points.device)[places], places, n_outputs, targets.ndim == 2, n_given)


def relative_errors(outputs: Float[Tensor, "n outputs"], targets: Float[Tensor, "n outputs"]) -> Float[Tensor, " n"]:
    """The largest error at each point, with each output relative to its largest target, or to one if all are zero.

    Examples:
        >>> import torch
        >>> from onlynorm.identity import relative_errors
        >>> relative_errors(torch.tensor([[1.0], [1.5]]), torch.tensor([[1.0], [2.0]]))
        tensor([0.0000, 0.2500])
    """
    size = targets.abs().amax(0)
    return ((outputs - targets) / torch.where(size > 0.0, size, 1.0)).abs().amax(1)


def merge(
    rows: Float[Tensor, "n size"],
    targets: Tensor,
    places: Tensor,
    *,
    are_projected: bool = False,
    what: str = "memorize",
) -> Int[Tensor, " distinct"]:
    """Indices of the first row of every set of equal rows, in order; equal rows must have equal targets.

    `places` are the indices of rows in errors; `are_projected` selects the message for rows after a projection.
    """
    first_at: dict[bytes, int] = {}
    rows = rows.detach().cpu() + 0.0  # converts negative zeros, whose bytes differ
    firsts = [
        first_at.setdefault(hashlib.blake2b(row.tobytes(), digest_size=16).digest(), i)
        for i, row in enumerate(rows.numpy())
    ]
    first = torch.tensor(firsts)
    own = targets.detach().cpu()
    differs = (own != own[first]).reshape(len(own), -1).any(1)
    if bool(differs.any()):
        second = differs.nonzero().flatten()
        pairs = [(int(places[first[i]]), int(places[i])) for i in second[:SHOWN]]
        more = f" and {len(second) - SHOWN} more" if len(second) > SHOWN else ""
        if are_projected:
            raise ValueRangeError(
                "memorize needs points that are distinct in the hidden space in float64; got equal ones with "
                f"different targets at {_named(pairs)}{more}. Subtract the mean of the inputs and scale "
                'them to about one, choose a larger width, or use projection="random".'
            )
        raise ValueRangeError(
            f"{what} needs one target per point; got equal points with different targets at {_named(pairs)}{more}. "
            "Remove one of each pair, or give both the same target."
        )
    return (first == torch.arange(len(first))).nonzero().flatten()


def _named(pairs: list[tuple[int, int]]) -> str:
    return ", ".join(f"{a} and {b}" for a, b in pairs)


def _need_points(what: str, x: Tensor) -> Tensor:
    if x.ndim == 1:
        x = x[:, None]
    if x.ndim < 2 or not x.numel() or x.is_complex():
        raise ShapeError(
            f"{what} needs real points (n, ...), at least one point with one feature; got {x.dtype} of shape "
            f"{tuple(x.shape)}. Put the points along the first axis."
        )
    points = x.detach().flatten(1).double()
    _need_finite(what, "points", points)
    return points


def _need_targets(what: str, labels: Tensor, n: int, n_classes: int | None) -> tuple[Tensor, int]:
    """(class indices (n,), classes) for integers, (real targets (n, outputs), outputs) for floating-point labels."""
    is_real = not is_class_labels(labels)
    axes = (1, 2) if is_real else (1,)
    if labels.is_complex() or labels.ndim not in axes or len(labels) != n or not labels.numel():
        raise ShapeError(
            f"{what} needs one label per point, {n} integers, or real targets ({n},) or ({n}, outputs); got "
            f"{labels.dtype} of shape {tuple(labels.shape)}. Convert one-hot labels with labels.argmax(1)."
        )
    if is_real:
        if n_classes is not None:
            raise ValueRangeError(
                f"n_classes needs integer labels; got {n_classes} with {labels.dtype} targets. Leave it out, or "
                "pass labels.long()."
            )
        targets = labels.detach().double().reshape(n, -1)
        _need_finite(what, "targets", targets)
        return targets, targets.shape[1]
    classes = labels.detach().long()
    low, high = int(classes.min()), int(classes.max())
    n_outputs = high + 1
    if n_classes is not None:
        n_outputs = need_integer("n_classes", n_classes, low=1, high=2**31 - 1, cure="Leave it out to count.")
    if low < 0 or high >= n_outputs:
        raise ValueRangeError(
            f"labels need integers from 0 to {max(n_outputs, 1) - 1}; got {low} to {high}. Number the classes "
            "from zero: torch.unique(labels, return_inverse=True)[1]."
        )
    return classes, n_outputs


def _need_finite(what: str, name: str, values: Tensor) -> None:
    bad = (~torch.isfinite(values)).any(1).nonzero().flatten()
    if len(bad):
        raise ValueRangeError(
            f"{what} needs finite {name}; got NaN or infinity at {', '.join(str(int(i)) for i in bad[:SHOWN])} "
            f"({len(bad)} in total). Remove or fix them."
        )
