"""Checks of what random_features says about permuted targets: the error of an order, and sparse targets that fit."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from onlynorm.alignment.align import align
from onlynorm.features import draw, match_bounds
from onlynorm.features.match_bounds import Mask, fits_inside
from onlynorm.solvers import KhatriRao
from onlynorm.solvers.checks import normal, verdict
from onlynorm.theorems import Evidence, check


@check("random_features:thm-4.1")
def a_permutation_misses_its_energy_outside_the_column_space(seed: int) -> Evidence:
    rows, cols, n_features = 5, 6, 17
    features = draw("he_normal", (rows, cols), n_features=n_features, seed=seed)
    # Two features again: the rank is smaller than their number, and neither count equals N - r.
    left = torch.cat([features.left(), 2.0 * features.left(0, 2)], 1)
    right = torch.cat([features.right(), features.right(0, 2)])
    matrix = KhatriRao(left, right).materialise()
    U = torch.linalg.svd(matrix)[0]
    n, rank = len(matrix), int(torch.linalg.matrix_rank(matrix))
    target = normal(seed, "target", rows, cols)
    energy = float(target.square().sum())
    ours, printed, errors = 0.0, 0.0, []
    for order in itertools.permutations(range(rows)):
        wanted = target[list(order)].flatten()
        gamma = torch.linalg.pinv(matrix) @ wanted
        error = float((matrix @ gamma - wanted).square().sum())
        coordinates = (U.mT @ wanted).square()
        ours = max(ours, abs(error - float(coordinates[rank:].sum())) / energy)
        printed = max(printed, abs(error - float(coordinates[n - rank :].sum())) / energy)
        errors.append(error)
    found = align(target, left, right, seed=seed)
    gap = abs(found.objective - min(errors)) / energy
    return Evidence(
        verdict(max(ours, gap) <= 1e-12 and rank == n_features, as_printed=printed <= 1e-12),
        f"N = {n}, {left.shape[1]} features of rank r = {rank}, all {len(errors)} permutations: least squares and the "
        f"energy in the last N - r = {n - rank} coordinates differ by {ours:.1e} of the target's; with the printed "
        f"last r by {printed:.2f}. The best permutation misses {min(errors) / energy:.3f}, the identity "
        f"{errors[0] / energy:.3f}; align finds the best up to {gap:.1e}",
        {"difference": ours, "printed difference": printed, "rank": rank, "gap of align": gap},
    )


def exact_chance(target: Mask, density: float) -> float:
    """The probability that a random mask of the target's shape contains it in some order, from all masks."""
    chance = 0.0
    for bits in itertools.product([False, True], repeat=target.size):
        mask = np.array(bits).reshape(target.shape)
        if fits_inside(target, mask):
            n_kept = int(mask.sum())
            chance += density**n_kept * (1 - density) ** (mask.size - n_kept)
    return chance


@check("random_features:thm-4.2")
def no_target_fits_more_often_than_the_bound(seed: int) -> Evidence:
    p = 0.5 + 0.05 * (seed % 5)
    lone = np.zeros((4, 2), dtype=np.bool_)
    lone[0] = True  # a single row is the only one to choose: here the bound is the truth, to the last digit
    sharp = abs(exact_chance(lone, p) - match_bounds.match_bound([2, 0, 0, 0], density=p))
    apart = exact_chance(np.eye(2, dtype=np.bool_), 0.5)
    bound = match_bounds.match_bound([1, 1], density=0.5)
    worst = -1.0
    rows = itertools.product([False, True], repeat=2)
    targets = [np.array(chosen) for chosen in itertools.combinations_with_replacement(rows, 3)]  # up to their order
    for target in targets:
        most = match_bounds.match_bound(target.sum(1).tolist(), density=p)
        worst = max(worst, exact_chance(target, p) - most)
    wide = np.kron(np.eye(10, dtype=np.int8), np.ones((1, 2), dtype=np.int8)).astype(np.bool_)
    trials = match_bounds.simulate_match(wide, density=0.5, n_tries=800, seed=seed)
    most = match_bounds.match_bound([2] * 10, density=0.5)
    holds = worst <= 1e-12 and sharp <= 1e-12 and trials.interval()[0] <= most
    return Evidence(
        verdict(holds),
        f"all {len(targets)} targets of 3 x 2 at p = {p:g}, exactly: the chance is never above the bound (largest "
        f"excess {worst:.1e}), and equals it up to {sharp:.1e} where only one row has weights. Rows with disjoint "
        f"inputs stay below: {apart:.4f} against {bound:.4f} at 2 x 2, {trials.chance:.3f} against {most:.3f} for ten "
        "rows of two weights",
        {"largest excess": worst, "gap of one row": sharp, "disjoint": apart, "disjoint bound": bound,
         "ten rows": trials.chance, "ten rows bound": most},
    )  # fmt: skip


@check("random_features:thm-4.3")
def the_outputs_that_a_random_target_needs(seed: int) -> Evidence:
    setting = {"target_density": 0.5, "density": 0.5}
    printed = match_bounds.printed_outputs_per_row(1, 10, chance=0.9, **setting)
    needed = match_bounds.outputs_per_row(1, 10, chance=0.9, **setting)
    chances, agree = {}, True
    for k in (printed, needed):
        trials = match_bounds.simulate_random_match(
            1, 10, target_density=0.5, density=0.5, outputs_per_row=k, n_tries=6000, seed=seed
        )
        low, high = trials.interval()
        agree = agree and low <= match_bounds.partition_chance(1, 10, outputs_per_row=k, **setting) <= high
        chances[k] = trials
    four = match_bounds.printed_outputs_per_row(4, 10, chance=0.9, **setting)
    shared = match_bounds.simulate_random_match(
        4, 10, target_density=0.5, density=0.5, outputs_per_row=four, n_tries=1000, seed=seed, is_partitioned=False
    )
    # The needed k keeps the promise up to what so many tries can tell; one that is too small does not.
    holds = agree and chances[needed].interval()[1] >= 0.9
    keeps = chances[printed].interval()[1] >= 0.9
    return Evidence(
        verdict(holds, as_printed=keeps),
        f"c0 = 10, q = p = 1/2, chance 0.9, one row: the printed k = {printed} succeeds with "
        f"{chances[printed].chance:.3f} of 6000 random targets, the corrected k = {needed} with "
        f"{chances[needed].chance:.3f}; both as (1 - E (1 - p^D)^k) says. With four rows the printed "
        f"k = {four} succeeds with {shared.chance:.3f} even if every row may use every output",
        {"printed k": printed, "needed k": needed, "printed chance": chances[printed].chance,
         "needed chance": chances[needed].chance, "four rows, shared": shared.chance},
    )  # fmt: skip
