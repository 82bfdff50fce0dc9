"""`read_last`: how many directions of what the last layer takes in differ between samples, and what they tell.

A signal may vary widely and still be of no use: with weights that are all positive it shrinks to one number for each
sample. Such a network learns what this number says about the targets, and no more. What all samples share is taken off
first: whether the rest is large enough beside it is another question, see `contrast`.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from onlynorm.rank.diagnosis.gradients import MAX_SAMPLES
from onlynorm.rank.diagnosis.probes import LastLayer

MOST_CHANCE = 0.5
"""Where the targets would explain a larger share of noise than this, the samples are too few to say anything."""


def read_last(last: LastLayer, targets: Any) -> tuple[float, float] | None:
    """(directions, told) of the inputs of the last linear layer, or None where the targets do not allow it.

    With H the inputs less their mean over samples, directions is tr(HH^T)^2 / |HH^T|_F^2, freed of what m samples
    take off: 1 / directions = 1 / ratio - 1 / (m - 1). Told is the share of the squares of H that a linear function of
    the targets explains, on a scale on which noise has none and a function of the targets has all: 0 to 1.
    """
    asked = _asked(targets, last)
    if asked is None:
        return None
    rows = last.inputs.flatten(0, 1) if len(asked) == last.inputs[..., 0].numel() else last.inputs.float().mean(1)
    kept = asked.isfinite().all(1)
    kept &= torch.arange(len(kept), device=kept.device) % -(-len(kept) // MAX_SAMPLES) == 0
    H, Y = _centred(rows[kept.to(rows.device)]), _centred(asked[kept])
    n_rows = len(H)
    if n_rows < 3 or Y.shape[1] > n_rows:
        return None
    left, sizes, _ = torch.linalg.svd(Y, full_matrices=False)
    basis = left[:, sizes > n_rows * torch.finfo(Y.dtype).eps * sizes.max()]
    chance = basis.shape[1] / (n_rows - 1)
    if not 0.0 < chance <= MOST_CHANCE:
        return None
    trace = float(H.square().sum())
    if trace == 0.0:
        return 1.0, 0.0
    G = H @ H.mT if n_rows <= H.shape[1] else H.mT @ H
    inverse = float(G.square().sum()) / trace**2 - 1.0 / (n_rows - 1)
    share = float((basis.mT @ H).square().sum()) / trace
    return 1.0 / max(inverse, 1.0 / H.shape[1]), max(0.0, (share - chance) / (1.0 - chance))


def _asked(targets: Any, last: LastLayer) -> Float[Tensor, "rows asked"] | None:
    """What the targets ask for, a row for each sample or for each position: numbers as they are, classes one by one.

    Classes below zero, by which losses leave positions out, give rows that are not finite.
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
    """The rows less their mean, in float64 on the CPU, where squares stay in range."""
    rows = rows.detach().cpu().double()
    return _unit(_unit(rows) - _unit(rows).mean(0))


def _unit(rows: Tensor) -> Tensor:
    largest = rows.abs().amax() if rows.numel() else rows.new_zeros(())
    return rows / largest if 0.0 < float(largest) < float("inf") else rows
