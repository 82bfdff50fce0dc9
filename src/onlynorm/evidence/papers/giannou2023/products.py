"""Checks of products of random matrices: identities, invertibility, sparse patterns."""

from __future__ import annotations

import torch
from torch import Tensor

from onlynorm.evidence.registry import EPS, Evidence, normal, relative, verdict
from onlynorm.features import draw, is_generically_invertible
from onlynorm.solvers import KhatriRao


def _khatri_rao(a: Tensor, b: Tensor) -> Tensor:
    """The column-wise Kronecker product of a (n, c) and b (m, c)."""
    return KhatriRao(a, b.mT).materialise()


def a_diagonal_between_two_matrices_is_a_linear_system(seed: int) -> Evidence:
    C, B, x = normal(seed, "C", 9, 63), normal(seed, "B", 63, 7), normal(seed, "x", 63, 1)[:, 0]
    error = relative(_khatri_rao(C, B.mT) @ x, (C @ torch.diag(x) @ B).flatten())
    return Evidence(verdict(error <= 63 * EPS), f"n = 9, m = 7: relative difference {error:.1e}", {"difference": error})


def kronecker_and_khatri_rao_products_obey_their_identities(seed: int) -> Evidence:
    A, B = normal(seed, "A", 5, 4), normal(seed, "B", 6, 3)
    A2, B2 = normal(seed, "A2", 4, 8), normal(seed, "B2", 3, 8)
    low = normal(seed, "low", 6, 2) @ normal(seed, "low2", 2, 5)
    ranks = int(torch.linalg.matrix_rank(torch.kron(low, A)))
    mixed = relative(torch.kron(A, B) @ torch.kron(A2, B2), torch.kron(A @ A2, B @ B2))
    columns = relative(_khatri_rao(A @ A2, B @ B2), torch.kron(A, B) @ _khatri_rao(A2, B2))
    C, D = normal(seed, "C", 4, 8), normal(seed, "D", 3, 8)
    entries = relative(_khatri_rao(A2, B2) * _khatri_rao(C, D), _khatri_rao(A2 * C, B2 * D))
    worst = max(mixed, columns, entries)
    return Evidence(
        verdict(ranks == 8 and worst <= 64 * EPS),
        f"rank(2) kron rank(4) has rank {ranks}; the three product identities differ by {mixed:.1e}, {columns:.1e} and "
        f"{entries:.1e}",
        {"rank": ranks, "difference": worst},
    )


def a_product_keeps_full_rank_unless_null_and_column_space_meet(seed: int) -> Evidence:
    n, m = 6, 10

    def measure(A: Tensor, B: Tensor) -> tuple[bool, bool]:
        """Whether A B has full rank, and whether the null space of A and the column space of B meet only in zero."""
        null = torch.linalg.svd(A)[2][n:].mT
        apart = int(torch.linalg.matrix_rank(torch.cat([null, B], 1))) == null.shape[1] + B.shape[1]
        return int(torch.linalg.matrix_rank(A @ B)) == min(n, B.shape[1]), apart

    agree, tried = 0, 0
    for i in range(20):
        A = normal(seed + i, "A", n, m)
        generic = normal(seed + i, "B", m, 5)
        meeting = torch.cat([generic[:, :4], torch.linalg.svd(A)[2][-1:].mT + generic[:, :1]], 1)
        for B in (generic, meeting):
            full, apart = measure(A, B)
            agree, tried = agree + (full == apart), tried + 1
    printed = sum(
        full == apart for full, apart in (measure(normal(i, "A", n, m), normal(i, "B", m, 8)) for i in range(20))
    )
    return Evidence(
        verdict(agree == tried, as_printed=printed == 20),
        f"for l = 5 <= n = {n} < m = {m} the condition and full rank agree in {agree} of {tried} products, half of "
        f"them built to intersect; for l = 8 > n, where the text has it too, in {printed} of 20",
        {"agree": agree, "tried": tried, "agree beyond n": printed},
    )


def random_khatri_rao_products_are_invertible(seed: int) -> Evidence:
    n, m = 9, 11
    full, tried, smallest = 0, 0, 1.0
    for i in range(8):
        for name in ("he_normal", "he_uniform"):
            features = draw(name, (n, m), excess=1.0, seed=seed + i)
            left, right = features.left(), features.right()
            square = normal(seed + i, "B", n * m, n * m)
            for matrix in (KhatriRao(left, right).materialise(), KhatriRao(left @ square, right).materialise()):
                values = torch.linalg.svdvals(matrix)
                ratio = float(values[-1] / values[0])
                full, tried, smallest = full + (ratio > n * m * EPS), tried + 1, min(smallest, ratio)
    features = draw("he_normal", (n, m), excess=1.0, seed=seed)
    left, right = features.left().clone(), features.right().clone()
    left[:, 0], right[0] = left[:, 1], right[1]
    control = torch.linalg.svdvals(KhatriRao(left, right).materialise())
    seen = float(control[-1] / control[0])
    return Evidence(
        verdict(full == tried and seen <= n * m * EPS),
        f"{full} of {tried} square products of {n * m} features have full rank, half of them with a random matrix "
        f"inside; the smallest ratio of singular values is {smallest:.1e}, against {seen:.1e} where one feature "
        "is repeated",
        {"full": full, "tried": tried, "smallest ratio": smallest, "ratio with a repeated feature": seen},
    )


def no_coordinate_of_gamma_vanishes(seed: int) -> Evidence:
    n, m, smallest, noise = 6, 7, 1.0, 0.0
    w = torch.zeros(n * m, dtype=torch.float64)
    w[0] = 1.0  # a sparse right-hand side, where a zero would be most likely
    D = torch.linspace(1.0, 2.0, n * m, dtype=torch.float64)
    for i in range(20):
        features = draw("he_normal", (n, m), excess=1.0, seed=seed + i)
        matrix = KhatriRao(features.left(), D[:, None] * features.right()).materialise()
        gamma = torch.linalg.solve(matrix, w)
        relative_size = gamma.abs() / gamma.abs().max()
        smallest = min(smallest, float(relative_size.min()))
        noise = max(noise, n * m * EPS * float(torch.linalg.cond(matrix)))
    return Evidence(
        verdict(smallest > noise),
        f"the smallest of {20 * n * m} gammas is {smallest:.1e} of the largest of its system; rounding could hide "
        f"{noise:.1e}",
        {"smallest relative size": smallest, "rounding": noise},
    )


def only_the_sparsity_pattern_decides(seed: int) -> Evidence:
    d, agree, invertible, tried = 5, 0, 0, 80
    for i in range(tried):
        density = 0.45 + 0.35 * i / tried  # from rarely to mostly invertible
        features = draw("er_normal", (d, d), excess=1.0, density=density, seed=seed * tried + i)
        masks = features.mask_left(), features.mask_right()
        matched = is_generically_invertible(*masks)
        ranks = []
        for again in range(3):  # other weights with the same nonzeros
            P, Q = normal(again, f"P{i}", d, d * d), normal(again, f"Q{i}", d * d, d)
            ranks.append(int(torch.linalg.matrix_rank(KhatriRao(P * masks[0], Q * masks[1]).materialise())))
        agree += all((rank == d * d) == matched for rank in ranks)
        invertible += matched
    return Evidence(
        verdict(agree == tried and 0 < invertible < tried),
        f"matching and rank agree for {agree} of {tried} patterns with d = {d}, three draws of weights each; "
        f"{invertible} patterns are invertible",
        {"agree": agree, "tried": tried, "invertible": invertible},
    )
