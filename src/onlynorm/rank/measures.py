"""Measures of the rank of a signal: the ratio r, soft, exact and effective rank, eigenvalues, regularity, cosines.

H is features x samples, M(H) = H H^T / N. All measures support leading batch dimensions, run on the device of their
input in float32 or float64, and raise for a single sample and for NaN or infinity. All except the counts (`soft_rank`,
`exact_rank`) are differentiable. The nonzero eigenvalues of M are those of H^T H / N, so the smaller matrix is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from onlynorm.display import Result
from onlynorm.errors import ShapeError, ValueRangeError
from onlynorm.validate import as_tensor, need_choice, need_integer, need_number

POSITIONS = ("pool", "samples")
METHODS = ("inertia", "eigenvalues")
BETWEEN = ("samples", "features")


def as_matrix(activations: Tensor, *, positions: str = "pool", channels: int = 1) -> Tensor:
    """H (features, columns) from the activations of a layer, with samples first and channels in dimension `channels`.

    (samples, features) is transposed. For images and sequences, "pool" makes one column per position and sample,
    (channels, samples * positions), as batch norm does; "samples" makes one column per sample,
    (channels * positions, samples). Pass channels=-1 for transformers.

    Examples:
        >>> import torch
        >>> from onlynorm.rank import as_matrix
        >>> images = torch.rand(10, 3, 8, 8)
        >>> as_matrix(images).shape, as_matrix(images, positions="samples").shape
        (torch.Size([3, 640]), torch.Size([192, 10]))
    """
    need_choice("positions", positions, POSITIONS)
    activations = as_tensor("as_matrix", activations)
    channels = need_integer("channels", channels, cure="Pass a dimension, -1 for the last.")
    shape = tuple(activations.shape)
    axis = channels % max(activations.ndim, 1)
    if activations.ndim < 2 or axis == 0 or not -activations.ndim <= channels < activations.ndim:
        raise ShapeError(
            f"as_matrix needs activations (samples, channels, positions...) and channels in a later dimension than "
            f"samples; got {shape} and channels={channels}. Pass a whole batch, and channels=-1 if they are last."
        )
    if not activations.numel():
        raise ShapeError(f"as_matrix needs activations with entries; got shape {shape}. Pass a whole batch.")
    moved = activations.movedim(axis, 0) if positions == "pool" else activations.movedim(axis, 1).movedim(0, -1)
    matrix = moved.reshape(shape[axis], -1) if positions == "pool" else moved.reshape(-1, shape[0])
    return _ready(matrix, "as_matrix")


def second_moments(H: Float[Tensor, "*batch d n"]) -> Float[Tensor, "*batch d d"]:
    """M(H) = H H^T / N, the uncentred second moments of the features.

    Examples:
        >>> import torch
        >>> from onlynorm.rank import second_moments
        >>> second_moments(torch.tensor([[1.0, -1.0], [2.0, 2.0]]))
        tensor([[1., 0.],
                [0., 4.]])
    """
    H = _ready(H, "second_moments")
    return H @ H.mT / H.shape[-1]


def unit_rows(H: Float[Tensor, "*batch d n"]) -> Float[Tensor, "*batch d n"]:
    """H with every row scaled to norm sqrt(N), as by a batch norm without centring: M has unit diagonal.

    Examples:
        >>> import torch
        >>> from onlynorm.rank import second_moments, unit_rows
        >>> second_moments(unit_rows(torch.tensor([[3.0, 4.0], [6.0, 8.0]]))).diag()
        tensor([1., 1.])
    """
    H = _ready(H, "unit_rows")
    norms = torch.linalg.vector_norm(H, dim=-1, keepdim=True)
    n_dead = int((norms == 0).sum())
    if n_dead:
        raise ValueRangeError(
            f"unit_rows needs nonzero rows; got {n_dead} zero rows of {norms.numel()} (dead units). Remove them: "
            "H[H.abs().sum(1) > 0]."
        )
    return H * (H.shape[-1] ** 0.5 / norms)


def unit_scale(H: Float[Tensor, "*batch d n"]) -> Float[Tensor, "*batch d n"]:
    """H rescaled so that Tr M = d, which makes soft ranks comparable with those of `unit_rows`.

    Examples:
        >>> import torch
        >>> from onlynorm.rank import second_moments, unit_scale
        >>> H = torch.tensor([[3.0, 4.0], [6.0, 8.0]])
        >>> round(second_moments(unit_scale(H)).trace().item(), 4)
        2.0
    """
    H = _ready(H, "unit_scale")
    _need_nonzero(H, "unit_scale")
    norms = torch.linalg.matrix_norm(H, keepdim=True)
    return H * ((H.shape[-1] * H.shape[-2]) ** 0.5 / norms)


def rank_ratio(H: Float[Tensor, "*batch d n"]) -> Float[Tensor, "*batch"]:
    """r(H) = Tr(M)^2 / |M|_F^2, a lower bound of the rank in [1, min(d, N)], computed without eigenvalues.

    Theory: daneshmand2020:lemma-1

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> round(on.rank_ratio(torch.eye(4)).item(), 6), round(on.rank_ratio(torch.ones(4, 4)).item(), 6)
        (4.0, 1.0)
    """
    H = _ready(H, "rank_ratio")
    _need_nonzero(H, "rank_ratio")
    H = H / H.detach().abs().amax((-2, -1), keepdim=True)  # does not change r, and avoids overflow of fourth powers
    G = _smaller_gram(H)
    return G.diagonal(dim1=-2, dim2=-1).sum(-1).square() / G.square().sum((-2, -1))


def soft_rank(H: Float[Tensor, "*batch d n"], tau: float, *, method: str | None = None) -> Int[Tensor, "*batch"]:
    """rank_tau(H): the number of singular values with sigma^2 / N >= tau; depends on the scale of H, see `unit_scale`.

    "inertia" counts the positive pivots of the LDL^T factorization of M - tau I (Sylvester), in a quarter of the time
    of "eigenvalues"; it is the default on CPUs. They may differ if an eigenvalue equals tau up to rounding.
    Theory: daneshmand2020:lemma-2

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> H = torch.diag(torch.tensor([2.0, 2.0, 0.1, 0.1]))
        >>> on.soft_rank(H, 0.5).item()
        2
    """
    tau = need_number("tau of soft_rank", tau, low=0.0, cure="Try tau=0.5 on unit_rows(H).")
    if method is not None:
        need_choice("method", method, METHODS)
    H = _ready(H, "soft_rank").detach()
    if tau == 0.0:
        return torch.full(H.shape[:-2], H.shape[-2], dtype=torch.int64, device=H.device)
    return count_at_least(_smaller_gram(H) / H.shape[-1], tau, method=method)


def count_at_least(M: Float[Tensor, "*batch d d"], tau: float, *, method: str | None = None) -> Int[Tensor, "*batch"]:
    """The number of eigenvalues of symmetric matrices that are at least tau, by inertia or by eigenvalues."""
    if method == "eigenvalues" or (method is None and M.device.type != "cpu"):
        return (torch.linalg.eigvalsh(M) >= tau).sum(-1)
    shifted = M.clone()
    shifted.diagonal(dim1=-2, dim2=-1).sub_(tau)
    factors, pivots, _ = torch.linalg.ldl_factor_ex(shifted)
    # A negative pivot index marks a 2 x 2 block, which has one positive and one negative eigenvalue.
    single = (pivots > 0) & (factors.diagonal(dim1=-2, dim2=-1) >= 0)
    return single.sum(-1) + (pivots < 0).sum(-1) // 2


def exact_rank(H: Float[Tensor, "*batch d n"], *, tolerance: float | None = None) -> Int[Tensor, "*batch"]:
    """The number of singular values above `tolerance` times the largest, by default max(d, N) times eps.

    Examples:
        >>> import torch
        >>> from onlynorm.rank import exact_rank
        >>> exact_rank(torch.diag(torch.tensor([1.0, 1e-3, 0.0]))).item()
        2
    """
    if tolerance is not None:
        tolerance = need_number("tolerance of exact_rank", tolerance, low=0.0, cure="Leave it out for max(d, N) eps.")
    return torch.linalg.matrix_rank(_ready(H, "exact_rank").detach(), rtol=tolerance)


def effective_rank(H: Float[Tensor, "*batch d n"]) -> Float[Tensor, "*batch"]:
    """exp of the entropy of sigma_i / sum sigma (Roy and Vetterli): r <= effective rank <= rank.

    Examples:
        >>> import torch
        >>> from onlynorm.rank import effective_rank
        >>> round(effective_rank(torch.diag(torch.tensor([1.0, 1.0, 0.0]))).item(), 4)
        2.0
    """
    H = _ready(H, "effective_rank")
    _need_nonzero(H, "effective_rank")
    sigma = torch.linalg.svdvals(H)
    weights = sigma / sigma.sum(-1, keepdim=True)
    return torch.special.entr(weights.clamp(min=torch.finfo(weights.dtype).tiny)).sum(-1).exp()


def top_eigenvalues(H: Float[Tensor, "*batch d n"], k: int = 10) -> Float[Tensor, "*batch k"]:
    """The k largest eigenvalues of M(H), in descending order; from singular values, which keeps small ones accurate.

    Examples:
        >>> import torch
        >>> from onlynorm.rank import top_eigenvalues
        >>> top_eigenvalues(torch.diag(torch.tensor([1.0, 2.0])), 2)
        tensor([2.0000, 0.5000])
    """
    H = _ready(H, "top_eigenvalues")
    limit = min(H.shape[-2:])
    k = need_integer("k of top_eigenvalues", k, low=1, high=limit, cure=f"The smaller side of H is {limit}.")
    return torch.linalg.svdvals(H)[..., :k].square() / H.shape[-1]


def regularity(H: Float[Tensor, "*batch d n"]) -> Float[Tensor, ""]:
    """alpha = E Tr(diag(M^2)^2) / E Tr(M^3) over all matrices of the batch, their rows scaled to norm sqrt(N).

    At most one, with equality if all columns of M are its eigenvectors. Theory: daneshmand2020:lemma-15

    Examples:
        >>> import torch
        >>> from onlynorm.rank import regularity
        >>> round(regularity(torch.eye(3)).item(), 4)
        1.0
    """
    M = second_moments(unit_rows(H))
    squares = M.square().sum(-1)
    return squares.square().sum(-1).mean() / ((M @ M) * M).sum((-2, -1)).mean()


@dataclass(frozen=True)
class Cosines(Result):
    """Pairwise cosines of the samples or of the features: mean, mean absolute value, and largest absolute value.

    Zero vectors are excluded and counted. With fewer than two other vectors the statistics are NaN.
    """

    mean: Tensor
    mean_absolute: Tensor
    largest: Tensor
    n_zero: Tensor
    between: str

    def __str__(self) -> str:
        parts = (("mean", self.mean), ("mean size", self.mean_absolute), ("largest", self.largest))
        values = ", ".join(f"{word} {float(value.mean()):.3f}" for word, value in parts)
        return f"cosines between {self.between}: {values}; {int(self.n_zero.sum())} zero vectors excluded"


def cosines(H: Float[Tensor, "*batch d n"], *, between: str = "samples") -> Cosines:
    """Statistics of the cosines between all pairs of columns ("samples") or rows ("features").

    Examples:
        >>> import torch
        >>> from onlynorm.rank import cosines
        >>> cosines(torch.tensor([[1.0, 0.0], [0.0, 1.0]])).mean.item()
        0.0
    """
    need_choice("between", between, BETWEEN)
    H = _ready(H, "cosines")
    vectors = H.mT if between == "samples" else H
    norms = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    alive = norms > 0
    units = vectors / torch.where(alive, norms, torch.ones_like(norms))
    angles = units @ units.mT
    angles = angles - torch.diag_embed(angles.diagonal(dim1=-2, dim2=-1))
    n_alive = alive.sum((-2, -1))
    n_pairs = n_alive * (n_alive - 1)
    largest = angles.abs().amax((-2, -1))
    return Cosines(
        mean=angles.sum((-2, -1)) / n_pairs,
        mean_absolute=angles.abs().sum((-2, -1)) / n_pairs,
        largest=torch.where(n_pairs > 0, largest, torch.full_like(largest, torch.nan)),
        n_zero=(~alive).sum((-2, -1)),
        between=between,
    )


def _ready(H: Tensor, name: str) -> Tensor:
    """H in at least float32; raises unless it is (features, samples) with finite entries and at least two samples."""
    H = as_tensor(name, H)
    if H.ndim < 2 or H.shape[-2] < 1:
        raise ShapeError(
            f"{name} needs H (features, samples) with optional batch dimensions; got {tuple(H.shape)}. "
            "Convert activations with as_matrix."
        )
    if H.shape[-1] < 2:
        raise ShapeError(
            f"{name} needs at least two samples, since one sample always has rank one; got "
            f"{tuple(H.shape)}. Pass a larger batch."
        )
    if not H.is_floating_point():
        raise ValueRangeError(f"{name} needs real floating-point entries; got {H.dtype}. Convert with H.float().")
    n_nonfinite = H.numel() - int(torch.isfinite(H.detach()).sum())
    if n_nonfinite:
        raise ValueRangeError(
            f"{name} needs finite entries; got {n_nonfinite} NaN or infinite of {H.numel()}. "
            "Find the first layer in which they appear."
        )
    return H.float() if torch.finfo(H.dtype).bits < 32 else H


def _need_nonzero(H: Tensor, name: str) -> None:
    n_zero = int((H.detach().abs().amax((-2, -1)) == 0).sum())
    if n_zero:
        raise ValueRangeError(
            f"{name} needs a nonzero matrix; got {n_zero} zero matrices of shape {tuple(H.shape[-2:])}. "
            "All units are dead: check the preceding layers."
        )


def _smaller_gram(H: Tensor) -> Tensor:
    return H @ H.mT if H.shape[-2] <= H.shape[-1] else H.mT @ H
