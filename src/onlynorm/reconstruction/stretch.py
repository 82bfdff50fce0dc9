"""How far a linear layer can pull two inputs apart: upper bounds of its largest singular value.

A convolution is bounded in two ways, whatever its stride, padding and dilation and however large the images:

- As a matrix on patches. A number lies in at most k patches (k kernel positions), so |A| <= sqrt(k) |W| with W the
  weight as (out, inp k); the same holds for the transposed map and W as (out k, inp).
- By frequencies. Zero padding, strides and borders only leave rows and columns of the full convolution out, whose norm
  is the largest |W(w)| over all frequencies w, with W(w) the (out, inp) matrix sum_t W_t e^(-i w t). A grid of N
  frequencies per axis may miss the maximum, but u* W(w) v is a trigonometric polynomial of degree n = (k - 1) / 2 up to
  a phase, which by a lemma of M. Riesz stays above cos(n d) times its maximum within d of it, and no frequency is
  farther than pi / N from the grid: dividing by cos(pi n / N) per axis makes it a bound.

Eigenvalues and Fourier sums are backward stable, with errors far below `SLACK`, which is added on top.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

SLACK = 1e-9
"""Relative room for the rounding in eigenvalues and Fourier sums."""
N_FREQUENCIES = 16
"""Frequencies per axis and kernel position beyond the first: half a percent above the maximum per axis."""
LARGEST_WORK = 2e9
"""Multiplications up to which the eigenvalues of a matrix, or of all frequencies of a convolution, are computed."""


@dataclass(frozen=True)
class Stretch:
    """The linear part of a layer, by its weight (out, inp per group, *kernel)."""

    weight: Float[Tensor, "out inp *kernel"]
    groups: int = 1

    def scaled(self, scale: Float[Tensor, " out"]) -> Stretch:
        """The layer followed by one factor per output, such as a norm in evaluation mode."""
        return Stretch(self.weight * scale.reshape(-1, *(1,) * (self.weight.ndim - 1)), self.groups)

    def bound(self) -> float:
        """A number that |A x| / |x| never exceeds."""
        return (1.0 + SLACK) * max(_bound(part) for part in self.weight.chunk(self.groups))


def _bound(weight: Tensor) -> float:
    n_kernel = math.prod(weight.shape[2:])
    if n_kernel == 1:
        return _largest(weight.flatten(1))
    flat = weight.flatten(2)
    patches = math.sqrt(n_kernel) * min(_largest(flat.flatten(1)), _largest(flat.mT.flatten(0, 1)))
    sizes = [max(1, N_FREQUENCIES * (k - 1)) for k in weight.shape[2:]]
    if math.prod(sizes) / 2 * min(weight.shape[:2]) ** 3 > LARGEST_WORK:
        return patches
    axes = tuple(range(2, weight.ndim))
    # Frequencies w and -w have conjugate matrices, so half of them suffice.
    spectrum = torch.fft.rfftn(weight, s=sizes, dim=axes).flatten(2).permute(2, 0, 1)
    missed = math.prod(math.cos(math.pi * (k - 1) / 2 / n) for k, n in zip(weight.shape[2:], sizes, strict=True))
    return min(patches, _largest(spectrum) / missed)


def _largest(matrices: Tensor) -> float:
    """The largest singular value of one or many matrices, from their smaller Gram matrices; of a huge one a bound."""
    if matrices.ndim == 2 and min(matrices.shape) ** 3 > LARGEST_WORK:
        sizes = matrices.abs()
        by_sums = math.sqrt(float(sizes.sum(0).max()) * float(sizes.sum(1).max()))
        return min(by_sums, float(torch.linalg.vector_norm(matrices)))
    if matrices.shape[-2] > matrices.shape[-1]:
        matrices = matrices.mH
    return math.sqrt(max(0.0, float(torch.linalg.eigvalsh(matrices @ matrices.mH)[..., -1].max())))
