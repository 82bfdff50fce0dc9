"""Checks of random_features on permuted targets, and figure 4: the error with too few features after alignment.

Two panels show targets W2 W1 of every distribution for features of every distribution, and one shows sparse targets.
Errors are |left diag(gamma) right - permuted target| over the target's norm, at the best gamma: for the target as
given, after the paper's greedy alignment, and after our best method.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import onlynorm as on
from onlynorm.alignment import Directions, PerOutput, align, align_within, find_directions
from onlynorm.display import Curve, Panel, Table
from onlynorm.evidence.papers.random_features import match_bounds
from onlynorm.evidence.papers.random_features.match_bounds import Mask, fits_inside
from onlynorm.evidence.papers.reproduce import Outcome, Run
from onlynorm.evidence.registry import Evidence, normal, verdict
from onlynorm.features import draw
from onlynorm.solvers import KhatriRao


def a_permutation_misses_its_energy_outside_the_column_space(seed: int) -> Evidence:
    rows, cols, n_features = 5, 6, 17
    features = draw("he_normal", (rows, cols), n_features=n_features, seed=seed)
    # Two features are repeated: the rank is smaller than their number, and neither number equals N - r.
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
        f"energy in the last N - r = {n - rank} coordinates differ by {ours:.1e} of the target's energy; with the "
        f"printed last r by {printed:.2f}. The error of the best permutation is {min(errors) / energy:.3f}, of the "
        f"identity {errors[0] / energy:.3f}; align finds the best to {gap:.1e}",
        {"difference": ours, "printed difference": printed, "rank": rank, "gap of align": gap},
    )


def exact_chance(target: Mask, density: float) -> float:
    """The exact probability that a random mask of the target's shape contains a permutation of its rows."""
    chance = 0.0
    for bits in itertools.product([False, True], repeat=target.size):
        mask = np.array(bits).reshape(target.shape)
        if fits_inside(target, mask):
            n_kept = int(mask.sum())
            chance += density**n_kept * (1 - density) ** (mask.size - n_kept)
    return chance


def no_target_fits_more_often_than_the_bound(seed: int) -> Evidence:
    p = 0.5 + 0.05 * (seed % 5)
    lone = np.zeros((4, 2), dtype=np.bool_)
    lone[0] = True  # with weights in a single row, the bound is exact
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
        f"all {len(targets)} targets of 3 x 2 at p = {p:g}, exact: the probability never exceeds the bound (largest "
        f"excess {worst:.1e}), and equals it to {sharp:.1e} if only one row has weights. Rows with disjoint "
        f"inputs are below: {apart:.4f} against {bound:.4f} at 2 x 2, {trials.chance:.3f} against {most:.3f} for ten "
        "rows of two weights",
        {"largest excess": worst, "gap of one row": sharp, "disjoint": apart, "disjoint bound": bound,
         "ten rows": trials.chance, "ten rows bound": most},
    )  # fmt: skip


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
    # The needed k has the stated probability within the error of this many trials; a smaller one does not.
    holds = agree and chances[needed].interval()[1] >= 0.9
    keeps = chances[printed].interval()[1] >= 0.9
    return Evidence(
        verdict(holds, as_printed=keeps),
        f"c0 = 10, q = p = 1/2, probability 0.9, one row: the printed k = {printed} succeeds with "
        f"{chances[printed].chance:.3f} of 6000 random targets, the corrected k = {needed} with "
        f"{chances[needed].chance:.3f}; as (1 - E (1 - p^D)^k) predicts. With four rows the printed "
        f"k = {four} succeeds with {shared.chance:.3f} even if every row may use every output",
        {"printed k": printed, "needed k": needed, "printed chance": chances[printed].chance,
         "needed chance": chances[needed].chance, "four rows, shared": shared.chance},
    )  # fmt: skip


PLAIN, GREEDY, BEST = "as given", "greedy", "best"
STRUCTURED = ("id_cond", "ortho_cond")


def some_features(distribution: str, side: int, n_features: int, seed: int) -> tuple[Tensor, Tensor]:
    """Left and right weights of `n_features` features; a random subset for a structured distribution."""
    layer = f"fig-4 {distribution}"
    if distribution not in STRUCTURED:
        drawn = on.draw(distribution, (side, side), n_features=n_features, seed=seed, layer=layer)
        return drawn.left(), drawn.right()
    drawn = on.draw(distribution, (side, side), seed=seed, layer=layer)
    lots = on.draw("uniform", (1, 1), n_features=side**2, seed=seed, layer=f"{layer} chosen").right()[:, 0]
    chosen = lots.argsort()[:n_features].sort().values
    return drawn.left()[:, chosen], drawn.right()[chosen]


def low_rank_target(distribution: str, side: int, rank: int, seed: int) -> Tensor:
    """W2 W1 of this distribution, with `rank` features between them."""
    if distribution in STRUCTURED:
        left, right = some_features(distribution, side, min(rank, side**2), 1000 + seed)
        gamma = on.draw("er_normal", (1, 1), n_features=left.shape[1], density=1.0, seed=seed, layer="fig-4 gamma")
        return (left * gamma.right()[:, 0]) @ right
    drawn = on.draw(distribution, (side, side), n_features=rank, seed=seed, layer=f"fig-4 target {distribution}")
    return drawn.left() @ drawn.right()


def sparse_target(density: float, side: int, seed: int) -> Tensor:
    """Normal weights that are nonzero with probability `density`; at least one is nonzero."""
    drawn = on.draw("er_normal", (side, side), n_features=side, density=density, seed=seed, layer="fig-4 sparse")
    target = drawn.right().clone()
    if not bool(target.any()):
        target[0, 0] = 1.0
    return target


def errors_of(target: Tensor, directions: Directions | PerOutput, *, with_best: bool, seed: int) -> dict[str, float]:
    """The relative errors without alignment, after greedy alignment, and with `with_best` after the best method."""
    greedy = align_within(target, directions, method="greedy", seed=seed)
    errors = {PLAIN: greedy.unaligned_error, GREEDY: greedy.error}
    if with_best:
        errors[BEST] = align_within(target, directions, seed=seed).error
    return errors


def aligned_low_rank(
    *, features: str, targets: Sequence[str], side: int, rank: int, n_features: int, seed: int, with_best: bool
) -> dict[str, dict[str, float]]:
    """The errors for one draw of features and one target of each distribution."""
    directions = find_directions(*some_features(features, side, n_features, seed))
    return {
        name: errors_of(low_rank_target(name, side, rank, seed), directions, with_best=with_best, seed=seed)
        for name in targets
    }


def aligned_sparse(
    *, features: str, densities: Sequence[float], side: int, n_features: int, seed: int, with_best: bool
) -> list[dict[str, float]]:
    """The errors for one draw of features and one sparse target of each density."""
    directions = find_directions(*some_features(features, side, n_features, seed))
    return [
        errors_of(sparse_target(density, side, seed), directions, with_best=with_best, seed=seed)
        for density in densities
    ]


def figure_4(run: Run) -> Outcome:
    """Errors before and after alignment: two panels of low-rank targets and one of sparse ones.

    Theory: random_features:thm-4.1, random_features:thm-4.2
    """
    sizes, side = run.sizes, run.sizes["side"]
    names, sparse_names = sizes["distributions"], sizes["sparse_features"]
    dense = [name for name in names if name not in STRUCTURED]
    run.announce((2 * len(names) + len(sparse_names)) * len(run.seeds))
    grids = {
        panel: {
            name: _mean([
                run.piece(
                    f"{panel} {name} seed={seed}", aligned_low_rank, features=name, targets=names, side=side,
                    rank=sizes[panel][0], n_features=sizes[panel][1], seed=seed,
                    with_best=seed in run.seeds[: sizes["n_best"]],
                )
                for seed in run.seeds
            ])
            for name in names
        }
        for panel in ("left", "middle")
    }  # fmt: skip
    right = {
        name: _mean([
            dict(enumerate(run.piece(
                f"right {name} seed={seed}", aligned_sparse, features=name, densities=sizes["densities"], side=side,
                n_features=sizes["middle"][1], seed=seed, with_best=seed in run.seeds[: sizes["n_best"]],
            )))
            for seed in run.seeds
        ])
        for name in sparse_names
    }  # fmt: skip
    values = _low_rank_values(grids, dense) | _sparse_values(right)
    return Outcome(
        values=values,
        curves=_curves(grids, right, sizes["densities"]),
        panels=_panels(grids, names, side, sizes),
        table=_table(grids, right, sizes["densities"]),
    )


Cell = Mapping[str, float]
Grid = Mapping[str, Mapping[Any, Cell]]
"""Mean errors by features, then by target."""


def _mean(draws: Sequence[Mapping[Any, Cell]]) -> dict[Any, Cell]:
    """Means over seeds; "greedy, same seeds" is the mean of greedy over the seeds of `BEST`."""
    means: dict[Any, Cell] = {}
    for target in draws[0]:
        cells = [draw[target] for draw in draws]
        both = [cell for cell in cells if BEST in cell]
        means[target] = {
            PLAIN: float(np.mean([cell[PLAIN] for cell in cells])),
            GREEDY: float(np.mean([cell[GREEDY] for cell in cells])),
            BEST: float(np.mean([cell[BEST] for cell in both])),
            "greedy, same seeds": float(np.mean([cell[GREEDY] for cell in both])),
        }
    return means


def _low_rank_values(grids: Mapping[str, Grid], dense: Sequence[str]) -> dict[str, float]:
    values: dict[str, float] = {}
    for panel, grid in grids.items():
        cells = [grid[features][target] for features in dense for target in dense]
        by_features = {name: float(np.mean([grid[name][target][GREEDY] for target in dense])) for name in grid}
        dense_means = [by_features[name] for name in dense]
        same = [
            grid[name][name][GREEDY] / float(np.mean([grid[name][other][GREEDY] for other in dense if other != name]))
            for name in dense
        ]
        values |= {
            f"greedy over no alignment, dense, {panel}": float(np.mean([c[GREEDY] / c[PLAIN] for c in cells])),
            f"smallest error after greedy, dense, {panel}": min(cell[GREEDY] for cell in cells),
            f"same distribution over others, {panel}": float(np.mean(same)),
            f"largest over smallest mean error of dense features, {panel}": max(dense_means) / min(dense_means),
            f"id_cond over dense features after greedy, {panel}": by_features["id_cond"] / float(np.mean(dense_means)),
            f"best method over greedy, dense, {panel}, largest ratio": max(
                cell[BEST] / cell["greedy, same seeds"] for cell in cells
            ),
        }
    return values


def _sparse_values(right: Grid) -> dict[str, float]:
    sparse = list(right["id_cond"].values())
    dense = [cell for name, row in right.items() if name not in STRUCTURED for cell in row.values()]
    return {
        "id_cond, sparsest target, no alignment": sparse[0][PLAIN],
        "id_cond, sparsest target, best method": sparse[0][BEST],
        "id_cond, densest target, best method": sparse[-1][BEST],
        "dense features, sparsest target, greedy, smallest error": min(
            next(iter(row.values()))[GREEDY] for name, row in right.items() if name not in STRUCTURED
        ),
        "best method over greedy, sparse targets, dense features, largest ratio": max(
            cell[BEST] / cell["greedy, same seeds"] for cell in dense
        ),
        "best method over greedy, sparse targets, id_cond, largest ratio": max(
            cell[BEST] / cell["greedy, same seeds"] if cell["greedy, same seeds"] else 1.0 for cell in sparse
        ),
    }


def _panels(grids: Mapping[str, Grid], names: Sequence[str], side: int, sizes: Mapping[str, Any]) -> list[Panel]:
    low = [
        Panel(panel, f"{side} x {side}, rank {sizes[panel][0]}, {sizes[panel][1]} features", "target",
              "relative error after greedy", x_names=names)
        for panel in grids
    ]  # fmt: skip
    title = f"sparse targets, {sizes['middle'][1]} features (points: best method)"
    return [*low, Panel("right", title, "density of the target", "relative error")]


def _curves(grids: Mapping[str, Grid], right: Grid, densities: Sequence[float]) -> list[Curve]:
    curves = []
    for panel, grid in grids.items():
        for name, row in grid.items():
            heights = [cell[GREEDY] for cell in row.values()]
            curves.append(Curve(name, list(range(1, len(heights) + 1)), heights, kind="points", panel=panel))
    for name, row in right.items():
        before, after = ([cell[method] for cell in row.values()] for method in (PLAIN, BEST))
        if name in ("he_normal", "id_cond"):  # the other curves would overlap
            curves.append(Curve(f"{name}, {PLAIN}", densities, before, panel="right", style="law"))
        curves.append(Curve(name, densities, after, kind="line+points", panel="right"))
    return curves


def _table(grids: Mapping[str, Grid], right: Grid, densities: Sequence[float]) -> Table:
    rows: list[list[float | str]] = []
    for panel, grid in grids.items():
        for features, cells in grid.items():
            rows += [[panel, features, str(target), *_numbers(cell)] for target, cell in cells.items()]
    for features, cells in right.items():
        rows += [
            ["right", features, f"density {density:g}", *_numbers(cell)]
            for density, cell in zip(densities, cells.values(), strict=True)
        ]
    return Table(["panel", "features", "target", PLAIN, GREEDY, BEST, "best over greedy, same seeds"], rows)


def _numbers(cell: Cell) -> list[float]:
    same = cell["greedy, same seeds"]
    return [cell[PLAIN], cell[GREEDY], cell[BEST], cell[BEST] / same if same else math.nan]
