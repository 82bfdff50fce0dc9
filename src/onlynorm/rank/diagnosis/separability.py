"""`measure_last_layer`: the number of directions in which the inputs of the last layer vary, and explained variance.

A signal may have a large variance and still be useless: with positive weights only, each sample is reduced to one
value, and the network cannot learn more than this value contains about the targets. The mean over samples is removed
first; `contrast` measures whether the rest is large enough relative to the mean.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from onlynorm.rank.diagnosis.gradients import MAX_SAMPLES
from onlynorm.rank.diagnosis.probes import LastLayer

MAX_CHANCE = 0.5
"""Maximum fraction of noise that the targets may explain by chance; above it there are too few samples."""


def measure_last_layer(last: LastLayer, targets: Any) -> tuple[float, float] | None:
    """(directions, explained variance) of the inputs of the last linear layer; None for unsuitable targets.

    With H the centred inputs, directions is tr(HH^T)^2 / |HH^T|_F^2, corrected for the number m of samples:
    1 / directions = 1 / ratio - 1 / (m - 1). The explained variance is the fraction of the squares of H that a linear
    function of the targets explains, on a scale where noise has 0 and a function of the targets 1.
    """
    wanted = _target_rows(targets, last)
    if wanted is None:
        return None
    rows = last.inputs.flatten(0, 1) if len(wanted) == last.inputs[..., 0].numel() else last.inputs.float().mean(1)
    is_used = wanted.isfinite().all(1)
    is_used &= torch.arange(len(is_used), device=is_used.device) % -(-len(is_used) // MAX_SAMPLES) == 0
    H, Y = _centred(rows[is_used.to(rows.device)]), _centred(wanted[is_used])
    n_rows = len(H)
    if n_rows < 3 or Y.shape[1] > n_rows:
        return None
    left, sizes, _ = torch.linalg.svd(Y, full_matrices=False)
    basis = left[:, sizes > n_rows * torch.finfo(Y.dtype).eps * sizes.max()]
    chance = basis.shape[1] / (n_rows - 1)
    if not 0.0 < chance <= MAX_CHANCE:
        return None
    trace = float(H.square().sum())
    if trace == 0.0:
        return 1.0, 0.0
    G = H @ H.mT if n_rows <= H.shape[1] else H.mT @ H
    inverse = float(G.square().sum()) / trace**2 - 1.0 / (n_rows - 1)
    fraction = float((basis.mT @ H).square().sum()) / trace
    return 1.0 / max(inverse, 1.0 / H.shape[1]), max(0.0, (fraction - chance) / (1.0 - chance))


def _target_rows(targets: Any, last: LastLayer) -> Float[Tensor, "rows targets"] | None:
    """The targets as a matrix with a row per sample or position: real values, or one-hot classes.

    Negative classes, which losses ignore, give rows of NaN.
    """
    n_samples, n_positions, _ = last.inputs.shape
    if not isinstance(targets, Tensor) or not targets.ndim or len(targets) != n_samples:
        return None
    if targets.is_floating_point():
        return targets.detach().flatten(1).double() if targets.ndim > 1 else targets.detach().double()[:, None]
    if targets.numel() not in (n_samples, n_samples * n_positions):
        return None
    known, classes = targets.flatten().unique(return_inverse=True)
    if len(known) > MAX_SAMPLES:
        return None
    return functional.one_hot(classes).double().masked_fill((targets.flatten() < 0)[:, None], torch.nan)


def _centred(rows: Tensor) -> Float[Tensor, "rows units"]:
    """The rows minus their mean, in float64 on the CPU, scaled so that squares do not overflow."""
    rows = rows.detach().cpu().double()
    return _unit(_unit(rows) - _unit(rows).mean(0))


def _unit(rows: Tensor) -> Tensor:
    largest = rows.abs().amax() if rows.numel() else rows.new_zeros(())
    return rows / largest if 0.0 < float(largest) < float("inf") else rows
