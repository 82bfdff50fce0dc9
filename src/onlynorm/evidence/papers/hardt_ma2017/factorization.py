"""Checks of hardt_ma2017 on products of layers near the identity, and their linear algebra."""

from __future__ import annotations

import math

import scipy.linalg
import torch
from torch import Tensor

from onlynorm.evidence.registry import EPS, Evidence, normal, relative, verdict
from onlynorm.identity import (
    Landscape,
    decompositions,
    factorize,
    least_norm,
    matrices,
    paper_bound,
    rotations,
    spiral_bound,
)

EXACT = 1e-12
"""The largest relative error of an exact product; rounding gives 1e-13 at these depths and sizes."""


def positive_targets(seed: int) -> list[Tensor]:
    """Matrices of positive determinant: random, rotations by half a turn, stretched, skewed."""
    made = []
    for dim in (2, 3, 5, 8):
        matrix = normal(seed, f"target {dim}", dim, dim)
        made.append(matrix if torch.linalg.det(matrix) > 0 else matrix[[1, 0, *range(2, dim)]])
    stretched = torch.diag(torch.tensor([-2.0, -0.02, 1.0], dtype=torch.float64))
    skewed = torch.tensor([[1.0, 30.0], [0.0, 1.0]], dtype=torch.float64)
    return [*made, -torch.eye(4, dtype=torch.float64), stretched, skewed, 1e-2 * made[2]]


def products_of_layers_near_the_identity_reach_every_target(seed: int) -> Evidence:
    worst, worst_spiral, error, risk, tried = 0.0, 0.0, 0.0, 0.0, 0
    for target in positive_targets(seed):
        stretch = matrices.Decomposition.of(target).stretch
        first = max(1, math.ceil(3.0 * stretch))
        for depth in (first, first + 1, first + 3, 4 * first, 120):
            found = factorize(target, depth)
            spiral = next(option for option in found.options if option.method == "spiral")
            worst = max(worst, found.max_norm / paper_bound(stretch, depth))
            worst_spiral = max(worst_spiral, spiral.max_norm / spiral_bound(stretch, depth))
            error = max(error, found.product_error)
            risk = max(risk, float(Landscape(target).risk(found.factors())) / float(target.square().sum()))
            tried += 1
    staged, promised = _stages_at_depth_8()
    least = least_norm(-torch.eye(4, dtype=torch.float64), 120) * 120 / math.pi
    holds = worst <= 1.0 and worst_spiral <= 1.0 + EXACT and error <= EXACT and risk <= EXACT**2 and least > 0.999
    return Evidence(
        verdict(holds),
        f"{tried} factorizations from depth 3 g on: the largest norm is at most {worst:.3f} of (4 pi + 3 g) / l, and "
        f"that of the spiral at most {worst_spiral:.3f} of 2 sin(pi / 2l) + exp(g / l) - 1; product error {error:.1e}, "
        f"relative risk {risk:.1e}. For -I no factorization is below {least:.4f} pi / l. The paper's stages, "
        f"rounded to whole layers, exceed its bound: at depth 8 with half turns on both sides {staged:.3f} against "
        f"{promised:.3f}",
        {"fraction of the bound": worst, "fraction of the smaller bound": worst_spiral, "product error": error,
         "risk": risk,
         "least constant over pi": least, "stages at depth 8": staged, "bound at depth 8": promised},
    )  # fmt: skip


def _stages_at_depth_8() -> tuple[float, float]:
    """(largest norm, bound) of the paper's five stages in eight layers, with rotations by half a turn on both sides."""
    angles = torch.tensor([math.pi - 1e-9, math.pi], dtype=torch.float64)
    left = rotations.Rotation(torch.eye(4, dtype=torch.float64), angles).power(1)
    values = torch.linspace(0.1, -0.1, 4, dtype=torch.float64).exp()
    found = matrices.Decomposition(left * values @ left, left, values, left)
    runs = decompositions.METHODS["svd"](decompositions.DecomposedMatrix(found), 8)
    return max(float(torch.linalg.matrix_norm(run.core, 2)) for run in runs), paper_bound(found.stretch, 8)


def one_extra_dimension_flips_the_determinant(seed: int) -> Evidence:
    worst, error, stretched, flipped = 0.0, 0.0, 0.0, 0.0
    for dim in (1, 2, 3, 4, 7):
        target = normal(seed, f"target {dim}", dim, dim)
        target = (
            target if torch.linalg.det(target) < 0 else target * torch.tensor([-1.0] + [1.0] * (dim - 1)).to(target)
        )
        stretch = matrices.Decomposition.of(target).stretch
        found = factorize(target, max(math.ceil(3.0 * stretch), 20))
        x = normal(seed, f"x {dim}", 6, dim)
        error = max(error, relative(found.apply(x), x @ target.mT))
        worst = max(worst, found.max_norm / paper_bound(stretch, found.depth))
        stretched = max(stretched, abs(found.stretch - stretch))
        if dim % 2:
            other = factorize(-target, 20)
            flipped = max(flipped, relative(-other.apply(x), x @ target.mT) if not other.n_extra else 1.0)
    near, n_positive = 0.999, 0
    for i in range(200):  # the extra dimension is needed: I + A with |A| < 1 has positive determinant
        A = normal(seed + i, "layer", 4, 4)
        n_positive += bool(torch.linalg.det(torch.eye(4) + near * A / torch.linalg.matrix_norm(A, 2)) > 0)
    return Evidence(
        verdict(error <= EXACT and flipped <= EXACT and worst <= 1.0 and stretched <= EXACT and n_positive == 200),
        f"five targets of negative determinant: with one more dimension the error of R x is {error:.1e}, with the "
        f"same g (to {stretched:.1e}) and norms at most {worst:.3f} of the bound; in odd dimension the error with -R "
        f"is {flipped:.1e}. {n_positive} of 200 random I + A with |A| = {near} have positive determinant",
        {"error": error, "fraction of the bound": worst, "change of g": stretched, "error by -R": flipped,
         "positive determinants": n_positive},
    )  # fmt: skip


def roots_of_positive_definite_targets_are_near_the_identity(seed: int) -> Evidence:
    largest, error = 0.0, 0.0
    for i in range(6):
        vectors = torch.linalg.qr(normal(seed + i, "basis", 6, 6))[0]
        logs = torch.linspace(-1.0, 1.0, 6, dtype=torch.float64) * (i + 1)
        target = vectors * logs.exp() @ vectors.mT
        for depth in (i + 1, i + 2, 5 * (i + 1), 200):
            found = factorize(target, depth, method="root")
            largest = max(largest, found.max_norm * depth / (i + 1))
            error = max(error, found.product_error)
    by_zero = [float((torch.tensor([1.0, 0.0]) ** (1.0 / depth) - 1.0).abs().max()) for depth in (10, 1000)]
    return Evidence(
        verdict(1.71 < largest <= 3.0 and error <= EXACT, as_printed=max(by_zero) < 1.0),
        f"24 roots from depth g on: norm times l over g is at most {largest:.4f}, so e - 1 = 1.7183 would suffice "
        f"instead of 3; product error {error:.1e}. With a zero eigenvalue, which semidefinite allows, |A| is "
        f"{by_zero[0]:g} at depth 10 and {by_zero[1]:g} at depth 1000",
        {"constant": largest, "product error": error, "norm with a zero eigenvalue": by_zero[1]},
    )


def orthogonal_2_by_2_matrices_go_in_small_steps(seed: int) -> Evidence:
    worst, error, missed, tried = 0.0, 0.0, 0, 0
    shift = float(normal(seed, "shift", 1, 1)) * 1e-3
    for q in (1, 2, 3, 4, 7, 12):
        for theta in (*torch.linspace(-3.1, 3.1, 15).add(shift).tolist(), math.pi):
            for signs in ([1.0, 1.0], [-1.0, 1.0]):
                Lambda = torch.diag(torch.tensor(signs, dtype=torch.float64))
                Q, W = _turn(theta) @ Lambda, _turn(theta / q)
                norm = float(torch.linalg.matrix_norm(W - torch.eye(2), 2))
                error = max(error, relative(torch.linalg.matrix_power(W, q) @ Lambda, Q))
                worst = max(worst, norm * q / math.pi)
                missed += norm > abs(math.sin(theta / q)) + EPS
                tried += 1
            own = rotations.Rotation.of(_turn(theta)).step_norm(q)
            error = max(error, abs(own - norm))
    return Evidence(
        verdict(error <= 64 * EPS and 0.99 < worst <= 1.0),
        f"{tried} rotations and reflections in up to 12 steps: product error {error:.1e}, the largest step is "
        f"{worst:.4f} of pi / q; {missed} of them exceed the sin(theta / q) of the proof, since a step is 2 sin(theta "
        "/ 2q)",
        {"product error": error, "fraction of the bound": worst, "above the bound of the proof": missed},
    )


def _turn(theta: float) -> Tensor:
    cos, sin = math.cos(theta), math.sin(theta)
    return torch.tensor([[cos, -sin], [sin, cos]], dtype=torch.float64)


def real_normal_matrices_are_block_diagonal(seed: int) -> Evidence:
    n, outside, error = 9, 0.0, 0.0
    basis = torch.linalg.qr(normal(seed, "basis", n, n))[0]
    raw = normal(seed, "raw", n, n)
    repeated = torch.block_diag(*[torch.tensor([[0.5, -2.0], [2.0, 0.5]], dtype=torch.float64)] * 3, 3.0 * torch.eye(3))
    plain = torch.block_diag(_turn(0.3), 2.0 * _turn(2.0), 0.1 * _turn(-1.0), torch.diag(raw[0, :3]))
    matrices = [raw + raw.mT, raw - raw.mT, basis, *(basis @ D @ basis.mT for D in (repeated, plain))]
    for matrix in matrices:
        left, gap = _outside_blocks(matrix)
        outside, error = max(outside, left), max(error, gap)
    control = _outside_blocks(raw)[0]
    return Evidence(
        verdict(outside <= 1e3 * EPS and error <= 1e3 * EPS and control > 0.1),
        f"symmetric, skew, orthogonal and two more normal matrices of size {n}, one with every eigenvalue three times: "
        f"the fraction {outside:.1e} of the matrix is outside blocks of size 2, and S D S^T has error {error:.1e}; "
        f"for a matrix that is not normal the fraction is {control:.2f}",
        {"outside the blocks": outside, "error": error, "outside without normality": control},
    )


def _outside_blocks(matrix: Tensor) -> tuple[float, float]:
    """(fraction of D outside its blocks, relative error of S D S^T with the blocks alone) of the real Schur form."""
    D, S = (torch.from_numpy(part) for part in scipy.linalg.schur(matrix.numpy(), output="real"))
    blocks = torch.diag(D.diagonal())
    for i in range(len(D) - 1):
        if float(D[i + 1, i]) != 0.0:
            blocks[i, i + 1], blocks[i + 1, i] = D[i, i + 1], D[i + 1, i]
    return relative(blocks, D) if float(D.norm()) else 0.0, relative(S @ blocks @ S.mT, matrix)


def products_have_the_stated_frobenius_norm(seed: int) -> Evidence:
    least, equal = math.inf, 0.0
    for i in range(40):
        scales = torch.logspace(0, -(i % 5), 6, dtype=torch.float64)
        A, B = scales[:, None] * normal(seed + i, "A", 6, 6), normal(seed + i, "B", 6, 6)
        U, s, V = torch.linalg.svd(A)
        smallest = float(s[-1])
        for product, other in ((A @ B, B), (B @ A, B)):
            least = min(least, float(product.norm()) / (smallest * float(other.norm())))
        for product, other in (
            (A @ V[-1:].mT @ B[:1], V[-1:].mT @ B[:1]),
            (B[:, :1] @ U[:, -1:].mT @ A, B[:, :1] @ U[:, -1:].mT),
        ):
            equal = max(equal, abs(float(product.norm()) / (smallest * float(other.norm())) - 1.0))
    return Evidence(
        verdict(least >= 1.0 and equal <= 1e-8),
        "40 pairs of 6 x 6 matrices with condition up to 1e4 and more, on either side: the norm of the product is at "
        f"least {least:.2f} times the bound; for the last singular vector it equals the bound to {equal:.1e}: no "
        "larger constant holds",
        {"least ratio": least, "distance from equality": equal},
    )
