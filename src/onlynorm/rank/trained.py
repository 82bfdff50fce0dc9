"""`find_training`: signs that a network was trained. Repairs check for them before drawing new weights.

Training removes properties of an initialization, in weights, biases and norms:

- Entries of a weight are independent and identically distributed, so that shuffling them changes nothing. Training
  makes norms of rows and columns differ and correlates rows. Both are compared with shuffled entries, per weight and
  over all weights, since short training changes each weight only slightly.
- Orthogonal weights are orthogonal up to rounding. After training they are only nearly orthogonal.
- Biases are constant, or uniform as torch draws them, or drawn like the weights of their layer.
- Shifts of norms are constant, or their scales are.

Zero rows and columns and exact copies are excluded first: mirrored and centred weights have them by construction.
Running statistics are not used: one forward pass in training mode changes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from onlynorm.modules.norms import norm_modules
from onlynorm.seeds import seeded

MIN_Z = 8.0
"""Standard deviations from shuffled weights beyond which the entries of a weight are not independent."""
N_SHUFFLES = 32
MAX_ROWS, MAX_COLUMNS = 128, 512
"""Of a larger weight, a random subset of rows and columns is used."""
MIN_SIDE = 8
"""Smaller weights have too few entries for a test."""
MIN_P = 1e-6
"""Significance level of the Kolmogorov-Smirnov tests of biases."""
NEGLIGIBLE = 1e-5
"""Biases below it count as zero: some initializations add such noise."""
NEARLY = 0.5
"""Rows are nearly orthogonal if their cosines are below this fraction of those of independent entries."""


def find_training(model: nn.Module, layers: Iterable[tuple[str, nn.Module, Tensor, bool]]) -> str:
    """The first sign of training in the norms of a model or in (name, layer, weight (out, ...), is last), else "".

    The bias of the last layer may be initialized from class frequencies, so it is not tested. Nor are frozen norms.
    """
    for name, norm, _ in norm_modules(model):
        if any(p.requires_grad for p in norm.parameters(recurse=False)) and _is_norm_trained(norm):
            return f"scales and shifts of the norm {name!r} differ between channels"
    biased: list[tuple[Tensor, Tensor]] = []
    scores: list[Tensor] = []
    for name, layer, weight, is_last in layers:
        bias, own = getattr(layer, "bias", None), getattr(layer, "weight", None)
        if isinstance(bias, Tensor) and isinstance(own, Tensor) and not is_last and not _is_constant(bias):
            biased.append((bias.detach(), own.detach()))
        found, score = _weight_sign(weight.detach())
        if found:
            return f"{found} of {name!r}"
        scores += [] if score is None else [score]
    if scores:
        together = torch.stack(scores).sum(0) / math.sqrt(len(scores))  # independent, of mean zero and variance one
        if float(together.max()) >= MIN_Z:
            return f"{_text(together)} are in all weights together"
    if biased and not _are_uniform(biased) and not _are_like_weights(biased):
        return "biases are neither constant nor of a usual distribution"
    return ""


def _is_norm_trained(norm: nn.Module) -> bool:
    scale, shift = getattr(norm, "weight", None), getattr(norm, "bias", None)
    if not isinstance(scale, Tensor) or not isinstance(shift, Tensor) or _is_constant(scale) or _is_constant(shift):
        return False
    # if all parameters are drawn from one distribution, scales are around zero
    values = scale.detach().double()
    return float(values.mean().abs()) * math.sqrt(values.numel()) > MIN_Z * float(values.std())


def _is_constant(values: Tensor) -> bool:
    values = values.detach().double()
    return float(values.max() - values.min()) <= 2.0 * NEGLIGIBLE


def _are_uniform(biased: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether the biases of all layers together are uniform in +-1 / sqrt(fan in), as torch draws them."""
    scaled = torch.cat([_plain(bias) * math.sqrt(weight.shape[1:].numel()) for bias, weight in biased])
    slack = 1.0 + max(2.0 * torch.finfo(bias.dtype).eps for bias, _ in biased)
    return float(scaled.abs().max()) <= slack and _is_uniform((scaled + 1.0) / 2.0)


def _are_like_weights(biased: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether biases are distributed like the weights of their layers: their ranks among these are then uniform."""
    ranks = []
    for bias, weight in biased:
        values, entries = _plain(bias), _plain(weight).sort().values
        is_flat = (
            float(entries.pow(4).mean()) < 2.1 * float(entries.square().mean()) ** 2
        )  # 1.8 for a uniform distribution
        if is_flat and float(values.abs().max()) > (1.0 + 10.0 / len(entries)) * float(entries.abs().max()):
            return False
        ranks.append(torch.searchsorted(entries, values).double() / len(entries))
    return _is_uniform(torch.cat(ranks))


def _is_uniform(values: Tensor) -> bool:
    from scipy import stats

    return bool(stats.kstest(values.numpy(), "uniform").pvalue >= MIN_P)


def _plain(values: Tensor) -> Tensor:
    return values.double().cpu().flatten()


def _weight_sign(weight: Tensor) -> tuple[str, Tensor | None]:
    """(sign of training, or "", and the z-scores relative to shuffled weights, if there are enough entries)."""
    generator = seeded(0)
    A = _without_copies(weight.cpu().flatten(1))
    if min(A.shape) < MIN_SIDE or not bool(torch.isfinite(A).all()):
        return "", None
    rows, columns = (
        torch.randperm(n, generator=generator)[:most].sort().values
        for n, most in zip(A.shape, (MAX_ROWS, MAX_COLUMNS), strict=True)
    )
    if _is_nearly_orthogonal(A.double(), eps=torch.finfo(weight.dtype).eps):
        return "rows that are nearly orthogonal, and not exactly, are in the weight", None
    A = A[rows][:, columns].double()
    A = A - A.mean()
    if float(A.abs().max()) == 0.0:
        return "", None
    flat = A.flatten()
    shuffled = [flat[torch.randperm(len(flat), generator=generator)].view_as(A) for _ in range(N_SHUFFLES)]
    null = torch.stack([_unevenness(B) for B in shuffled])
    z = (_unevenness(A) - null.mean(0)) / null.std(0).clamp(min=1e-9)
    return (f"{_text(z)} are in the weight" if float(z.max()) >= MIN_Z else ""), z


def _text(z: Tensor) -> str:
    names = ("rows of different size", "columns of different size", "correlated rows")
    worst = int(z.argmax())
    return f"{names[worst]} ({float(z[worst]):.0f} standard deviations from independent entries)"


def _unevenness(A: Tensor) -> Tensor:
    """Logarithms of the sums of squares of: squared norms of rows, those of columns, products of different rows."""
    squares = A.square()
    rows, columns = squares.sum(1).square().sum(), squares.sum(0).square().sum()
    products = (A @ A.mT).square().sum() - rows
    return torch.stack([rows, columns, products.clamp(min=torch.finfo(A.dtype).tiny)]).log()


def _is_nearly_orthogonal(A: Tensor, *, eps: float) -> bool:
    """Whether rows, or columns if there are fewer, have cosines far below chance and far above rounding."""
    A = A if A.shape[0] <= A.shape[1] else A.mT
    A = A[:MAX_ROWS]
    squares = A.square()
    if float(squares.square().mean()) > 10.0 * float(squares.mean()) ** 2:
        return False  # few entries dominate: the identity with noise is an initialization
    A = A / torch.linalg.vector_norm(A, dim=1, keepdim=True)
    products = (A @ A.mT).fill_diagonal_(0.0)
    size = math.sqrt(float(products.square().sum()) / (len(A) * (len(A) - 1)))
    return 64.0 * eps < size * math.sqrt(A.shape[1]) < NEARLY


def _without_copies(A: Tensor) -> Tensor:
    """Nonzero rows and columns, with the first of those that are equal up to sign."""
    return _distinct_rows(_distinct_rows(A).mT).mT


def _distinct_rows(A: Tensor) -> Tensor:
    A = A[A.any(1)].contiguous()
    if not A.numel():
        return A
    first = A.gather(1, (A != 0).int().argmax(1, keepdim=True))
    _, group = torch.unique(A * first.sign() + 0.0, dim=0, return_inverse=True)
    order = torch.arange(len(A))
    places = torch.full((int(group.max()) + 1,), len(A)).scatter_reduce(0, group, order, "amin")
    return A[places.sort().values]
