"""Checks of daneshmand2020 on single matrices: ranks, eigenvalues, regularity, gradients of one layer.

Matrices with given eigenvalues are built from Hadamard matrices: with entries of Q of equal absolute value,
H = sqrt(d) Q diag(sqrt lambda) has rows of norm sqrt(N), and all rows of M(H) have equal norm. `frobenius_drift` is the
expected change of |M|_F^2 in one step of the linear chain with batch norms, to second order in gamma.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from scipy.linalg import hadamard
from torch import Tensor

from onlynorm.errors import ShapeError
from onlynorm.evidence.registry import EPS, Evidence, normal, verdict
from onlynorm.rank import exact_rank, rank_ratio, regularity, second_moments, soft_rank, unit_rows
from onlynorm.validate import as_real


def frobenius_drift(M: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch"]:
    """delta(M) with E |M+|_F^2 - |M|_F^2 = gamma^2 delta(M) + O(gamma^4), for M of unit diagonal.

    delta(M) = 2 d^2 - 2 |M|_F^2 - 8 Tr(M^3) + 8 Tr(diag(M^2)^2), the expectation over one W with independent symmetric
    entries of variance one. Theory: daneshmand2020:lemma-12
    """
    M = as_real("frobenius_drift", M)
    if M.ndim < 2 or M.shape[-1] != M.shape[-2]:
        raise ShapeError(f"frobenius_drift needs square M; got {tuple(M.shape)}. Pass second_moments(unit_rows(H)).")
    squares = M.square().sum(-1)
    cube = ((M @ M) * M).sum((-2, -1))
    return 2 * M.shape[-1] ** 2 - 2 * squares.sum(-1) - 8 * cube + 8 * squares.square().sum(-1)


def drift_of_eigenvalues(eigenvalues: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
    """delta(M) from the eigenvalues, if all rows of M have equal norm. Theory: daneshmand2020:prop-13"""
    eigenvalues = as_real("drift_of_eigenvalues", eigenvalues)
    if eigenvalues.ndim < 1 or not eigenvalues.shape[-1]:
        raise ShapeError(f"drift_of_eigenvalues needs eigenvalues; got {tuple(eigenvalues.shape)}. Pass eigvalsh(M).")
    d = eigenvalues.shape[-1]
    second, third = eigenvalues.square().sum(-1), eigenvalues.pow(3).sum(-1)
    return 2 * d**2 - 2 * second - 8 * third + 8 * second.square() / d


def with_eigenvalues(eigenvalues: Tensor) -> Tensor:
    """H (d, d) with rows of norm sqrt(d) whose M has these eigenvalues, of mean one; d is a power of two."""
    d = len(eigenvalues)
    Q = torch.from_numpy(hadamard(d).astype(float)) / math.sqrt(d)
    return math.sqrt(d) * Q * eigenvalues.sqrt()


def spectra(seed: int, *, d: int, n: int) -> Tensor:
    """n rows of d eigenvalues with mean one, from nearly equal to nearly rank one."""
    sizes = normal(seed, "lambda", n, d).mul(torch.linspace(0.1, 4.0, n, dtype=torch.float64)[:, None]).exp()
    return sizes * d / sizes.sum(1, keepdim=True)


def the_ratio_bounds_the_rank(seed: int) -> Evidence:
    worst, tried = 0.0, 0
    for i in range(60):
        rank = 1 + i % 8
        sizes = torch.logspace(0, -(i // 8) / 4, rank, dtype=torch.float64)
        H = normal(seed + i, "left", 8, rank) @ (sizes[:, None] * normal(seed + i, "right", rank, 40))
        found = int(exact_rank(H))
        worst, tried = max(worst, float(rank_ratio(H)) / found), tried + (found == rank)
    equal = abs(float(rank_ratio(torch.linalg.qr(normal(seed, "Q", 8, 8))[0])) - 8.0)
    return Evidence(
        verdict(worst <= 1 + 8 * EPS and tried == 60 and equal <= 64 * EPS, as_printed=False),
        f"r is at most {worst:.3f} of the rank for 60 matrices of ranks 1 to 8; for orthogonal rows it equals the rank "
        f"to {equal:.0e}, where the text has a strict inequality",
        {"largest ratio": worst, "distance for orthogonal rows": equal},
    )


def the_ratio_bounds_the_soft_rank(seed: int) -> Evidence:
    d, least = 64, math.inf
    for i, eigenvalues in enumerate(spectra(seed, d=d, n=40)):
        mixed = normal(seed + i, "mix", d, d) @ (eigenvalues.sqrt()[:, None] * normal(seed + i, "H", d, 80))
        H = with_eigenvalues(eigenvalues) if i % 2 else unit_rows(mixed)
        for tau in (0.0, 0.1, 0.5, 0.9, 1.0):
            bound = (1 - tau) ** 2 * float(rank_ratio(H))
            least = min(least, int(soft_rank(H, tau, method="eigenvalues")) / bound if bound else math.inf)
    # The worst case: one large eigenvalue and all others just below tau. The bound is reached as d grows.
    tau, d = 0.5, 1024
    others = torch.full((d,), tau * (1 - 1e-9), dtype=torch.float64)
    others[0] = d - others[1:].sum()
    tight = with_eigenvalues(others)
    ratio = int(soft_rank(tight, tau, method="eigenvalues")) / ((1 - tau) ** 2 * float(rank_ratio(tight)))
    return Evidence(
        verdict(least >= 1 - 1e-12 and 1 - 1e-12 <= ratio <= 1 + 4 / d),
        f"rank_tau is at least {least:.3f} times the bound for 40 matrices and five tau; in the worst case, d = {d}, "
        f"it is {ratio:.5f} times the bound: no larger constant holds",
        {"least ratio": least, "ratio in the worst case": ratio},
    )


def gradients_of_a_rank_one_layer_share_a_line(seed: int) -> Evidence:
    d, n, n_classes = 12, 20, 5
    u, w = normal(seed, "u", d, 1), normal(seed, "w", 1, n)
    labels = torch.arange(n) % n_classes
    weight = normal(seed, "W", n_classes, d).requires_grad_()

    def spread(features: Tensor) -> tuple[float, float]:
        """The largest distance of |cosine| from one over all pairs, and from zero over pairs of different sign."""
        losses = torch.nn.functional.cross_entropy((weight @ features).mT, labels, reduction="none")
        gradients = torch.stack([torch.autograd.grad(loss, weight, retain_graph=True)[0] for loss in losses])
        rows = gradients[:, 0] / gradients[:, 0].norm(dim=1, keepdim=True)
        cosines = (rows @ rows.mT).abs()
        same = (w.sign().mT * w.sign()) > 0
        return float((1 - cosines).abs().max()), float(cosines[~same].max())

    linear, _ = spread(u @ w)
    relu, across = spread(torch.relu(u @ w))
    one_sign, _ = spread(torch.relu(u @ w.abs()))
    return Evidence(
        verdict(max(linear, one_sign) <= 1e-12 and across <= 1e-12, as_printed=relu <= 1e-12),
        f"{n} samples: |cosine| of per-sample gradients differs from one by {linear:.0e} (linear) and {one_sign:.0e} "
        f"(ReLU, one sign); with both signs by {relu:.2f}: gradients of different sign have cosine {across:.0e}",
        {"linear": linear, "relu, one sign": one_sign, "relu, both signs": relu, "cosine across signs": across},
    )


def the_change_follows_from_eigenvalues(seed: int) -> Evidence:
    worst = 0.0
    for eigenvalues in spectra(seed, d=32, n=20):
        M = second_moments(with_eigenvalues(eigenvalues))
        size = float(eigenvalues.square().sum() ** 2 / 4)  # of the largest term
        worst = max(worst, abs(float(frobenius_drift(M) - drift_of_eigenvalues(eigenvalues))) / size)
    M = second_moments(unit_rows(normal(seed, "H", 32, 40) + torch.linspace(0.0, 3.0, 32).double()[:, None]))
    other = frobenius_drift(M) / drift_of_eigenvalues(torch.linalg.eigvalsh(M)) - 1
    return Evidence(
        verdict(worst <= 32 * EPS and abs(float(other)) > 1e-3),
        f"d = 32: both forms agree to {worst:.0e} for 20 spectra; where rows of M differ in norm they do not "
        f"({float(other):+.1%})",
        {"difference": worst, "with unequal rows": float(other)},
    )


def the_regularity_constant_is_at_most_one(seed: int) -> Evidence:
    largest = 0.0
    for i in range(200):
        d, n = 2 + i % 14, 2 + i % 9
        largest = max(largest, float(regularity(normal(seed + i, "H", d, n))))
    equal = abs(float(regularity(with_eigenvalues(torch.ones(16, dtype=torch.float64)))) - 1)
    rank_one = abs(float(regularity(torch.ones(6, 4, dtype=torch.float64))) - 1)
    return Evidence(
        verdict(largest < 1.0 and max(equal, rank_one) <= 64 * EPS),
        f"largest of 200 random matrices: {largest:.4f}; one, up to {max(equal, rank_one):.0e}, for orthogonal rows "
        "and for rank one, where columns of M are eigenvectors",
        {"largest": largest, "distance from one at equality": max(equal, rank_one)},
    )


def of_eigenvalues(eigenvalues: Tensor) -> float:
    """alpha = (sum lambda^2)^2 / (d sum lambda^3), if rows of M have equal norm."""
    d = len(eigenvalues)
    return float(eigenvalues.square().sum() ** 2 / (d * eigenvalues.pow(3).sum()))


def regularity_one_means_equal_eigenvalues(seed: int) -> Evidence:
    """1 - alpha is the variance of lambda under the weights lambda / d, over the second moment."""
    off, smallest = 0.0, 1.0
    for eigenvalues in spectra(seed, d=32, n=30):
        alpha = float(regularity(with_eigenvalues(eigenvalues)))
        weights = eigenvalues / 32
        mean, second = (weights * eigenvalues).sum(), (weights * eigenvalues.square()).sum()
        variance = float((weights * (eigenvalues - mean).square()).sum() / second)
        off, smallest = max(off, abs(1 - alpha - variance)), min(smallest, 1 - alpha)
    halves = torch.zeros(32, dtype=torch.float64)
    halves[:8] = 4.0
    equal = abs(1 - float(regularity(with_eigenvalues(halves))))
    return Evidence(
        verdict(off <= 256 * EPS and smallest > 1e-4 and equal <= 64 * EPS),
        f"1 - alpha is the relative variance of the eigenvalues to {off:.0e} for 30 spectra, smallest {smallest:.4f}; "
        f"for 8 equal eigenvalues of 32 it is {equal:.0e}",
        {"difference": off, "smallest 1 - alpha": smallest, "for equal eigenvalues": equal},
    )


def one_dominant_eigenvalue_makes_the_law_regular(seed: int) -> Evidence:
    b = 0.75

    def dominant(d: int) -> Tensor:
        eigenvalues = torch.full((d,), (d - d**b) / (d - 1), dtype=torch.float64)
        eigenvalues[0] = d**b
        return eigenvalues

    sizes = [2**k for k in range(10, 23, 2)]
    alphas = [of_eigenvalues(dominant(d)) for d in sizes]
    slope = math.log(alphas[-1] / alphas[-2]) / math.log(sizes[-1] / sizes[-2])
    matrix = abs(float(regularity(with_eigenvalues(dominant(1024)))) / alphas[0] - 1)

    def printed(d: float, b: float) -> float:
        """One eigenvalue d^b, the others d^b / log d or, if that is less, equal, with sum d."""
        size = max(d**b / math.log(d), (d - d**b) / (d - 1))
        count = (d - d**b) / size
        return (d ** (2 * b) + count * size**2) ** 2 / (d * (d ** (3 * b) + count * size**3))

    counter = [printed(2.0**k, 0.25) for k in (10, 16, 24)]
    return Evidence(
        verdict(abs(slope - (b - 1)) <= 0.05 and alphas[-1] < 0.9 and matrix <= 1e-9, as_printed=counter[-1] < 0.9),
        f"one eigenvalue d^0.75, all others equal: alpha falls from {alphas[0]:.3f} to {alphas[-1]:.3f} between d = "
        f"2^10 and 2^22, like d^{slope:.3f} for large d. Others of order d^b / log d, b = 1/4, which the text allows: "
        f"{counter[0]:.2f}, {counter[1]:.3f}, {counter[2]:.4f} at d = 2^10, 2^16, 2^24",
        {"exponent": slope, "alpha at 2^22": alphas[-1], "alpha of the counterexample": counter[-1]},
    )


def one_step_moves_every_entry_a_little(seed: int) -> Evidence:
    d, n = 8, 12
    slack, cap = math.inf, math.sqrt(3.0)
    bounded: list[tuple[Callable[[Tensor], Tensor], float]] = [
        (torch.clone, 1.0), (torch.tanh, 1.0), (torch.relu, 1.0), (lambda x: 0.5 * torch.sin(x), 0.5)
    ]  # fmt: skip
    for i, (F, B) in enumerate(bounded):
        H = unit_rows(normal(seed + i, "H", d, n))
        for j in range(50):
            gamma = 10.0 ** (-j / 12) / (B * d)
            W = normal(seed + j, f"W{i}", d, d).sign() * cap
            moved = H + gamma * W @ F(H)
            change = float((second_moments(moved) - second_moments(H)).abs().max())
            slack = min(slack, (2 * cap * d * B * gamma + 3 * (d * B * gamma) ** 2) / change)
    ones, gamma = torch.ones(d, n, dtype=torch.float64), 1 / (8 * d)
    reached = float((second_moments(ones + gamma * cap * torch.ones(d, d).double() @ ones) - 1).max())
    bound = 2 * cap * d * gamma + 3 * (d * gamma) ** 2
    return Evidence(
        verdict(slack >= 1 and abs(reached / bound - 1) <= 64 * EPS and bound < 0.5),
        f"the bound is at least {slack:.2f} times the change for 200 steps with weights of extreme size; equal rows "
        f"and weights reach it, {reached:.4f} at gamma = 1/(8d), which is below 1/2",
        {"least ratio": slack, "reached": reached, "bound": bound},
    )


def the_swap_keeps_the_two_axes(seed: int) -> Evidence:
    swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    axes = normal(seed, "axes", 20, 1)[:, :, None] * torch.eye(2, dtype=torch.float64)
    stays = int(((swap @ axes == 0).sum(1) == 1).sum())
    other = swap @ normal(seed, "others", 2, 20)
    return Evidence(
        verdict(stays == 40 and bool((other != 0).all())),
        f"{stays} of 40 multiples of the axes stay on one of them; {int((other != 0).all(0).sum())} of 20 others "
        "stay off both",
        {"stay": stays},
    )
