"""The goals to which a memorizer moves its points, and the last layer.

Every goal has the flag -unit and is within `RADIUS` units of the axis of the flag. Each class has a random vector,
which another block of lemma B.1 maps to a one-hot label; real targets are embedded in a subspace. The unit is one, and
larger for samples with outliers: a sum of values of size L has a rounding error of about eps L, so goals must be large
enough compared with the longest distance to a goal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onlynorm.features import draw
from onlynorm.identity.memorization.thresholds import lengths_of

EPS = torch.finfo(torch.float64).eps
RADIUS = 0.5
"""Length of class vectors relative to the median point, which keeps them away from thresholds."""
_FLAG = 2.0
"""Weight of the flag in the last layer: an input that no block moved activates it only beyond four median lengths."""


@dataclass(frozen=True)
class Readout:
    """The goals of points, and the last layer: values relu(cues h + shifts)."""

    goals: Tensor
    cues: Tensor
    shifts: Tensor
    values: Tensor

    def error(self, distance: float) -> float:
        """The largest error of an output at points within this distance of their goals."""
        longest = float(lengths_of(self.goals).amax())
        sizes = lengths_of(self.cues) * (distance + EPS * (self.cues.shape[1] + 2) * longest)
        return float((self.values.abs() @ (sizes + 2.0 * EPS * self.shifts.abs())).amax())

    def scaled(self, unit: float) -> Readout:
        """The readout of the same outputs for goals scaled by `unit`."""
        return Readout(self.goals * unit, self.cues, self.shifts * unit, self.values / unit)


def choose_readout(targets: Tensor, n_outputs: int, *, width: int, seed: int) -> Readout:
    """The goals of class numbers (n,) or real targets (n, outputs) in units of one, and the last layer."""
    return (_read_real if targets.ndim == 2 else _read_classes)(targets, n_outputs, width, seed)


def _read_classes(targets: Tensor, r: int, width: int, seed: int) -> Readout:
    """A random vector per class, and one block of lemma B.1 that maps each to its one-hot label."""
    vectors = normals(seed, "memorize/classes", width - 1, r).mT.to(targets.device)
    vectors = RADIUS * vectors / torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    products = vectors @ vectors.mT
    own = products.diagonal().clone()
    products.fill_diagonal_(-torch.inf)
    # For vectors of equal length, each neuron is active for its own class only: its threshold is above all others.
    gaps = (own - products.amax(1)).clamp(max=1.0)
    flag = vectors.new_ones(r, 1)
    goals, cues = torch.cat([vectors, -flag], 1), torch.cat([vectors, -_FLAG * flag], 1)
    return Readout(goals[targets], cues, gaps / 2.0 - own - _FLAG, torch.diag(2.0 / gaps))


def _read_real(targets: Tensor, r: int, width: int, seed: int) -> Readout:
    """Targets as points of an r-dimensional subspace, and two neurons per output, one for each sign.

    Every output has its own scale, half of its range, so that outputs do not reduce the accuracy of others.
    """
    middle = targets.amax(0) / 2.0 + targets.amin(0) / 2.0  # avoids overflow
    reach = (targets - middle).abs().amax(0)
    reach = torch.where(reach > 0.0, reach, middle.abs())  # zero if all targets are zero; then the output is zero too
    unit = torch.where(reach > 0.0, reach, 1.0)
    at = (targets - middle) / unit
    longest = float(torch.linalg.vector_norm(at, dim=1).amax()) or 1.0
    axes = torch.linalg.qr(normals(seed, "memorize/targets", width - 1, r))[0].to(targets)
    goals = torch.cat([at @ axes.mT * (RADIUS / longest), -targets.new_ones(len(targets), 1)], 1)
    shift = middle / unit * (RADIUS / longest)
    away = _FLAG * (1.0 + shift.abs())  # times the flag, it makes both neurons inactive at inputs that no block moved
    cues = torch.cat([torch.cat([sign * axes.mT, -away[:, None]], 1) for sign in (1.0, -1.0)])
    value = torch.diag(reach / RADIUS * longest)
    return Readout(goals, cues, torch.cat([shift - away, -shift - away]), torch.cat([value, -value], 1))


def normals(seed: int, name: str, rows: int, columns: int) -> Tensor:
    """Standard normal values (rows, columns), determined by the arguments."""
    return draw("er_normal", (rows, 1), n_features=columns, density=1.0, seed=seed, layer=name).left().contiguous()
