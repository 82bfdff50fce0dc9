"""Aligning a target's rows with too few features: our greedy search against a direct implementation of the paper's.

The cases are those of figure 4 of random_features, at 50 x 50. The paper's search computes the singular values of the
whole feature matrix and then scores one pair of rows at a time; ours makes the same choices from tables. Both are timed
without and with the steps before the search. Both orders are evaluated with the paper's directions. Times are processor
times on one thread, which depend little on other load. The other methods are compared by the missed energy.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onlynorm.alignment import Directions, PerOutput, align_within, find_directions
from onlynorm.evidence.bench.papers_method import missed_as_described, search_as_described
from onlynorm.evidence.harness import Goal, Session, Sizes, setting
from onlynorm.evidence.race import Race, RaceResult
from onlynorm.evidence.timing import one_thread
from onlynorm.evidence.timing import race as take_turns
from onlynorm.features import draw

UNALIGNED, DESCRIBED = "as given", "greedy as described"
FACTOR = 50.0
N_RUNS = 40
MARGIN = 1e-6
"""Minimum relative difference of missed energies that counts: equal orders differ by rounding."""
SIDE, QUICK_SIDE = 50, 16
LOW, MIDDLE, SPARSE, INSIDE = "low rank", "higher rank", "sparse target", "sparse target, sparse features"


@dataclass(frozen=True)
class AlignSizes(Sizes):
    """Repeats; a quick run has 16 x 16 targets, which are too small for the goals of speed."""

    repeats: int = setting(5, help="Number of repeats; the best one counts.")

    @property
    def side(self) -> int:
        """Rows and columns of a target."""
        return QUICK_SIDE if self.quick else SIDE


@dataclass(frozen=True)
class AlignRow:
    """One method on one case; `missed` is the missed energy as a fraction of the target's.

    `search` are seconds for given directions, `whole` includes computing them; ratios are relative to ours.
    """

    case: str
    method: str
    missed: float
    search: float
    search_ratio: float = math.nan
    whole: float = math.nan
    whole_ratio: float = math.nan


race = Race(
    "align", "Rows of a target aligned with too few features, against the paper's greedy search.", AlignSizes,
    columns={"rows": {
        "case": "case", "method": "method", "missed fraction": "missed:.4g", "search s": "search:.2g",
        "search x ours": "search_ratio:.3g", "with directions s": "whole:.2g",
        "with directions x ours": "whole_ratio:.3g",
    }},
)  # fmt: skip


@race.measure
def measure(sizes: AlignSizes, session: Session) -> Iterator[tuple[str, list[AlignRow]]]:
    """Times both greedy searches and runs the other methods."""
    with one_thread():
        for case in (LOW, MIDDLE, SPARSE, INSIDE):
            session.status(f"{case}, {sizes.side} x {sizes.side}")
            measured = _measure_inside if case == INSIDE else functools.partial(_measure, case)
            yield "rows", measured(sizes.side, sizes.repeats)


@race.goals
def goals(result: RaceResult[AlignSizes]) -> Iterator[Goal]:
    """Faster than the paper's greedy search, never worse, and another method with a smaller error."""
    pairs = {case: result.pair("greedy", DESCRIBED, case=case) for case in (LOW, MIDDLE, SPARSE)}
    for _, slow in pairs[LOW] if result.sizes.side == SIDE else ():
        for what, ratio in (("greedy search", slow.search_ratio), ("whole greedy alignment", slow.whole_ratio)):
            aim = f"{SIDE} x {SIDE}: the {what} {FACTOR:g} times faster than as described"
            yield Goal(aim, f"{ratio:.0f} times", ratio >= FACTOR)
    both = [ours.missed / described.missed for found in pairs.values() for ours, described in found]
    if both:
        worst = max(both)
        yield Goal("our greedy search never misses more than the paper's", f"{worst:.9f} of it", worst <= 1 + 1e-9)
    for case in (LOW, MIDDLE, SPARSE, INSIDE):
        greedy = result.find(case=case, method="greedy")
        others = [r for r in result.rows if r.case == case and r.method not in (UNALIGNED, DESCRIBED, "greedy")]
        best = min(others, key=lambda row: row.missed, default=None)
        if greedy and best:
            yield Goal(
                f"{case}: a method that misses less energy than the greedy search",
                f"{best.method} misses {best.missed:.4g}, greedy {greedy.missed:.4g}",
                best.missed < (1 - MARGIN) * greedy.missed,
            )


def make_case(case: str, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Target, left and right of a case, in the proportions of figure 4."""
    missing = (0.024 if case == LOW else 0.04) * side**2
    features = draw("he_normal", (side, side), n_features=side**2 - round(missing), seed=0, layer=case)
    rank = 2 * side if case == LOW else 6 * side
    low = draw("he_normal", (side, side), n_features=rank, seed=1, layer=case)
    target = low.left() @ low.right()
    if case == SPARSE:
        target = target * _mask(side, 0.2)
    return target, features.left(), features.right()


def _mask(side: int, density: float) -> Tensor:
    kept = draw("id_cond", (side, side), density=density, seed=2)
    assert kept.structure is not None
    return kept.structure.apply(torch.ones(kept.n_features, dtype=torch.float64))


def _measure(case: str, side: int, repeats: int) -> list[AlignRow]:
    target, left, right = make_case(case, side)
    setups: dict[str, Callable[..., Any]] = {"greedy": find_directions, DESCRIBED: missed_as_described}
    before = take_turns({m: functools.partial(setup, left, right) for m, setup in setups.items()}, rounds=repeats)
    directions, missed = before["greedy"].result, before[DESCRIBED].result
    searches: dict[str, Callable[[], Any]] = {
        # As many runs as take the time of the other method: a single one is too short to be timed.
        "greedy": functools.partial(_many_times, align_within, target, directions, method="greedy"),
        DESCRIBED: functools.partial(search_as_described, missed, target),
    }
    search = take_turns(searches, rounds=repeats)
    found, order = search["greedy"].result, search[DESCRIBED].result
    ours, theirs = search["greedy"].seconds / N_RUNS, search[DESCRIBED].seconds
    whole, their_whole = before["greedy"].seconds + ours, before[DESCRIBED].seconds + theirs
    reached, described = (_missed_energy(missed, target[o]) / found.energy for o in (found.permutation, order))
    rows = [
        AlignRow(case, UNALIGNED, found.unaligned / found.energy, math.nan),
        AlignRow(case, "greedy", reached, ours, 1.0, whole, 1.0),
        AlignRow(case, DESCRIBED, described, theirs, theirs / ours, their_whole, their_whole / whole),
    ]
    return rows + _other_methods(case, target, directions, ("two_opt", "random", "tabu"), repeats)


def _measure_inside(side: int, repeats: int) -> list[AlignRow]:
    """A sparse target inside sparse id_cond features, where the optimum is an assignment."""
    features = draw("id_cond", (side, side), density=0.96, seed=0, layer=INSIDE)
    target = make_case(SPARSE, side)[0]
    directions = find_directions(features.left(), features.right())
    found = align_within(target, directions, method="greedy")
    unaligned = AlignRow(INSIDE, UNALIGNED, found.unaligned / found.energy, math.nan)
    return [unaligned, *_other_methods(INSIDE, target, directions, ("greedy", "assignment"), repeats)]


def _other_methods(
    case: str, target: Tensor, directions: Directions | PerOutput, methods: Sequence[str], repeats: int
) -> list[AlignRow]:
    runs = {method: functools.partial(align_within, target, directions, method=method) for method in methods}
    return [
        AlignRow(case, method, timing.result.objective / timing.result.energy, timing.seconds)
        for method, timing in take_turns(runs, rounds=repeats).items()
    ]


def _missed_energy(missed: Tensor, target: Tensor) -> float:
    return float(torch.einsum("ijk,ij->k", missed, target).square().sum())


def _many_times(run: Callable[..., Any], *args: Any, **options: Any) -> Any:
    for _ in range(N_RUNS):
        result = run(*args, **options)
    return result
