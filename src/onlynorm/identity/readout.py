"""Where a memorizer sends its points, and how it reads its outputs there.

Every goal has the flag -1 and lies within `RADIUS` of the axis of the flag. Classes have a random vector each, which
one more block of lemma B.1 turns into a one-hot label; real targets are laid out in a subspace and read off again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onlynorm.features import draw

EPS = torch.finfo(torch.float64).eps
RADIUS = 0.5
"""Length of the vectors that stand for classes, where the median point has one: none gets near a threshold."""


@dataclass(frozen=True)
class Readout:
    """Where points are sent, and how outputs are read there: values relu(cues h + shifts)."""

    goals: Tensor
    cues: Tensor
    shifts: Tensor
    values: Tensor

    def error(self, distance: float) -> float:
        """The largest error of an output at points that arrived within this distance of their goals."""
        longest = float(torch.linalg.vector_norm(self.goals, dim=1).amax())
        sizes = torch.linalg.vector_norm(self.cues, dim=1) * (distance + EPS * (self.cues.shape[1] + 2) * longest)
        return float((self.values.abs() @ (sizes + 2.0 * EPS * self.shifts.abs())).amax())


def choose_readout(targets: Tensor, n_outputs: int, *, width: int, seed: int) -> Readout:
    """The goals of class numbers (n,) or real targets (n, outputs), and the last layer that reads them."""
    return (_read_real if targets.ndim == 2 else _read_classes)(targets, n_outputs, width, seed)


def _read_classes(targets: Tensor, r: int, width: int, seed: int) -> Readout:
    """A random vector per class, and one block of lemma B.1 that turns each into its one-hot label."""
    vectors = normals(seed, "memorize/classes", width - 1, r).mT.to(targets.device)
    vectors = RADIUS * vectors / torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    vectors = torch.cat([vectors, -vectors.new_ones(r, 1)], 1)
    products = vectors @ vectors.mT
    own = products.diagonal().clone()
    products.fill_diagonal_(-torch.inf)
    # Vectors of one length hide none: each threshold lies above all others, so that a cue speaks for its class alone.
    # An input that never moved has the flag +1, and a cue says at most |z| / 2 - 1 to it.
    gaps = (own - products.amax(1)).clamp(max=1.0)
    return Readout(vectors[targets], vectors, gaps / 2.0 - own, torch.diag(2.0 / gaps))


def _read_real(targets: Tensor, r: int, width: int, seed: int) -> Readout:
    """Targets as points of an r-dimensional subspace, and two neurons per output, one for each sign."""
    middle = (targets.amax(0) + targets.amin(0)) / 2.0
    reach = float(torch.linalg.vector_norm(targets - middle, dim=1).amax()) or 1.0
    axes = torch.linalg.qr(normals(seed, "memorize/targets", width - 1, r))[0].to(targets)
    goals = torch.cat([(targets - middle) @ axes.mT * (RADIUS / reach), -targets.new_ones(len(targets), 1)], 1)
    shift = middle * (RADIUS / reach)
    away = 1.0 + shift.abs()  # times the flag, it switches both neurons off at inputs that never moved
    cues = torch.cat([torch.cat([sign * axes.mT, -away[:, None]], 1) for sign in (1.0, -1.0)])
    value = torch.eye(r, dtype=targets.dtype, device=targets.device) * (reach / RADIUS)
    return Readout(goals, cues, torch.cat([shift - away, -shift - away]), torch.cat([value, -value], 1))


def normals(seed: int, name: str, rows: int, columns: int) -> Tensor:
    """Standard normal numbers (rows, columns) that depend on nothing but their arguments."""
    return draw("er_normal", (rows, 1), n_features=columns, density=1.0, seed=seed, layer=name).left().contiguous()
