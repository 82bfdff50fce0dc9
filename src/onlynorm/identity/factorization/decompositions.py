"""Five factorizations of a matrix with positive determinant into layers near the identity.

polar, spiral and svd use R = Q P, a rotation times a symmetric matrix (polar decomposition):

    root    R symmetric positive definite: every layer is R^(1/l)
    log     the principal logarithm exists: every layer is exp(log(R) / l)
    polar   P^(1/p), p times, then Q^(1/q), q times, with p + q = l
    spiral  both in every layer: I + A_j = G^(j+1) E G^-j with G = Q^(1/l), E = P^(1/l)
    svd     as in the paper: R = U K V^T, with layers for V^T, then K, then U

The layers of a spiral are orthogonally similar to each other, so all have the norm |G E - I| <= |G - I| + |E - I|,
and their product telescopes to G^l E^l = Q P.
"""

from __future__ import annotations

import functools
import heapq
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from onlynorm.identity.factorization.factors import LayerRun
from onlynorm.identity.factorization.matrices import EPS, Decomposition
from onlynorm.identity.factorization.rotations import Rotation


class ObstacleError(Exception):
    """A construction does not apply to this matrix and depth; the message is "needs ...; got ..."."""


@dataclass(frozen=True, eq=False)
class Stretching:
    """The symmetric matrix basis diag(exp(logs)) basis^T."""

    basis: Float[Tensor, "dim dim"]
    logs: Float[Tensor, " dim"]

    @property
    def largest(self) -> float:
        """The largest |log|."""
        return float(self.logs.abs().max())

    def step_norm(self, count: int) -> float:
        """|P^(1/count) - I|."""
        return float(torch.expm1(self.logs / count).abs().max())

    def step(self, count: int) -> Float[Tensor, "dim dim"]:
        """P^(1/count) - I, computed without cancellation."""
        return self.basis * torch.expm1(self.logs / count) @ self.basis.mT


@dataclass(frozen=True, eq=False)
class DecomposedMatrix:
    """A matrix with positive determinant and its decompositions, computed lazily."""

    found: Decomposition

    @property
    def matrix(self) -> Float[Tensor, "dim dim"]:
        """The matrix itself."""
        return self.found.matrix

    @functools.cached_property
    def rotation(self) -> Rotation:
        """Q of R = Q P."""
        return Rotation.of(self.found.left @ self.found.right)

    @functools.cached_property
    def eigenvalues(self) -> Tensor:
        """The eigenvalues of R."""
        try:
            return torch.linalg.eigvals(self.matrix)
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
            raise ObstacleError("needs eigenvalues; got none, their iteration did not converge") from error

    def stretching(self) -> Stretching:
        """P of R = Q P."""
        return Stretching(self.found.right.mT, self.found.values.log())


def _root(parts: DecomposedMatrix, depth: int) -> tuple[LayerRun, ...]:
    matrix = parts.matrix
    gap = float((matrix - matrix.mT).abs().max() / matrix.abs().max())
    if gap > len(matrix) * EPS:
        raise ObstacleError(f"needs a symmetric matrix; got one that differs from its transpose by {gap:.1e}")
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    if not float(values[0]) > 0.0:
        raise ObstacleError(f"needs positive eigenvalues; got {float(values[0]):.2g}")
    return (LayerRun(Stretching(vectors, values.log()).step(depth), depth),)


def _log(parts: DecomposedMatrix, depth: int) -> tuple[LayerRun, ...]:
    import scipy.linalg

    values = parts.eigenvalues
    on_axis = (values.imag == 0) & (values.real <= 0)
    if on_axis.any():
        raise ObstacleError(f"needs no eigenvalue on the negative axis; got {float(values.real[on_axis].min()):.2g}")
    # log R = log(R / c) + log(c) I: scipy's squares neither overflow nor vanish around one
    scale = 2.0 ** round(float(parts.found.values.log2().mean()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about its error estimates; errors are measured separately
        logarithm = scipy.linalg.logm((parts.matrix / scale).cpu().numpy()).real
    grown = logarithm / depth + math.log(scale) / depth * np.eye(len(logarithm))
    step = torch.from_numpy(scipy.linalg.expm(grown)).to(parts.matrix)
    if not bool(torch.isfinite(step).all()):
        raise ObstacleError("needs a logarithm within float64; got NaN or infinity")
    return (LayerRun(step - torch.eye(len(step)).to(step), depth),)


def need_chance(parts: DecomposedMatrix, depth: int, smallest: float) -> None:
    """Raises if the eigenvalues of the logarithm alone require a norm of at least `smallest`."""
    angles, logs = parts.eigenvalues.angle(), parts.eigenvalues.abs().log()
    needed = float((torch.polar(torch.exp(logs / depth), angles / depth) - 1.0).abs().max())
    if needed >= smallest:
        raise ObstacleError(f"its eigenvalues alone need {needed:.3g}")


def _polar(parts: DecomposedMatrix, depth: int) -> tuple[LayerRun, ...]:
    return _in_turn([parts.stretching(), parts.rotation], depth)


def _spiral(parts: DecomposedMatrix, depth: int) -> tuple[LayerRun, ...]:
    rotation, step = parts.rotation, parts.stretching().step(depth)
    turned = Rotation(rotation.basis, rotation.angles / depth)
    whole = turned.power(1)
    return (LayerRun(whole @ step + (whole - torch.eye(len(step)).to(step)), depth, turned),)


def _svd(parts: DecomposedMatrix, depth: int) -> tuple[LayerRun, ...]:
    """Rotations by pi have separate layers, as in the paper; identity factors have none."""
    found = parts.found
    left, right = found.left.clone(), found.right.clone()
    if torch.linalg.slogdet(left)[0] < 0:
        left[:, 0], right[0] = -left[:, 0], -right[0]
    first, last = Rotation.of(right), Rotation.of(left)
    diagonal = Stretching(torch.eye(len(left)).to(left), found.values.log())
    return _in_turn([*first.split(), diagonal, *last.split()], depth)


def _in_turn(stages: Sequence[Rotation | Stretching], depth: int) -> tuple[LayerRun, ...]:
    """Layers for consecutive stages; layers are assigned one by one to the stage with the largest norm."""
    dim = len(stages[0].basis)
    active = [stage for stage in stages if stage.largest > dim * EPS] or [stages[0]]
    if depth < len(active):
        raise ObstacleError(f"needs a layer for each of its {len(active)} stages; got depth {depth}")
    counts = [1] * len(active)
    waiting = [(-stage.step_norm(1), place) for place, stage in enumerate(active)]
    heapq.heapify(waiting)
    for _ in range(depth - len(active)):
        place = waiting[0][1]
        counts[place] += 1
        heapq.heapreplace(waiting, (-active[place].step_norm(counts[place]), place))
    return tuple(LayerRun(_step(stage, count), count) for stage, count in zip(active, counts, strict=True))


def _step(stage: Rotation | Stretching, count: int) -> Float[Tensor, "dim dim"]:
    if isinstance(stage, Stretching):
        return stage.step(count)
    return stage.power(1.0 / count) - torch.eye(len(stage.basis)).to(stage.basis)


METHODS: dict[str, Callable[[DecomposedMatrix, int], tuple[LayerRun, ...]]] = {
    "root": _root,
    "log": _log,
    "polar": _polar,
    "spiral": _spiral,
    "svd": _svd,
}
