"""Figure 2 of random_features: errors of LBFGS with and without preconditioning, compared with our solver.

Targets have the distribution of the features. The paper's three methods use the dense matrix in float32, the default
of its library; ours solves in float64 without the matrix. Errors are those of left diag(gamma) right in float64, over
the target's root mean square.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

import onlynorm as on
from onlynorm.display import Curve, Panel, Table
from onlynorm.evidence.bench.papers_method import lbfgs
from onlynorm.evidence.papers.reproduce import Outcome, Run

PLAIN = "LBFGS"
SCALED = "preconditioned LBFGS"
SOLVED = "preconditioned solve + LBFGS"
OURS = "onlynorm"
STRUCTURED = ("id_cond", "ortho_cond")
_FLOOR = 1e-18  # the error of structured features may be zero, which a logarithmic axis cannot show


def make_system(distribution: str, side: int, n_extra: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Left, right and target of a (side, side) layer with `n_extra` more features than equations."""
    layer = f"fig-2 {distribution}"
    count = None if distribution in STRUCTURED else side**2 + n_extra
    features = on.draw(distribution, (side, side), n_features=count, seed=seed, layer=layer)
    # The right weights of `side` features are the target; structured features do not have random ones.
    kind = "he_normal" if distribution in STRUCTURED else distribution
    target = on.draw(kind, (side, side), n_features=side, seed=seed, layer=f"{layer} target").right()
    return features.left(), features.right(), target


def relative_error(left: Tensor, right: Tensor, gamma: Tensor, target: Tensor) -> float:
    """The root mean square error of left diag(gamma) right over the target's root mean square."""
    made = (left * gamma.double()) @ right
    return float(torch.linalg.vector_norm(made - target) / torch.linalg.vector_norm(target))


def reconstruction_errors(
    *, distribution: str, side: int, n_extra: int, seed: int, methods: Sequence[str], n_iterations: int
) -> dict[str, float]:
    """The relative error of each method on one system, or NaN if the method failed."""
    left, right, target = make_system(distribution, side, n_extra, seed)
    errors = {OURS: relative_error(left, right, on.solve(left, right, target).gamma, target)} if OURS in methods else {}
    matrix = on.solvers.KhatriRao(left.float(), right.float()).materialise()
    wanted = target.flatten().float()
    if PLAIN in methods:
        gamma = _lbfgs(matrix, wanted, matrix.new_zeros(matrix.shape[1]), n_iterations)
        errors[PLAIN] = relative_error(left, right, gamma, target)
    chosen = [method for method in (SCALED, SOLVED) if method in methods]
    if chosen:
        try:
            _, S, Vh = torch.linalg.svd(matrix, full_matrices=False)
        except RuntimeError:  # raised by torch if a decomposition does not converge
            return errors | dict.fromkeys(chosen, math.nan)
        back = Vh.mT / S  # gamma = back z: the matrix of z would be orthogonal in exact arithmetic
        for method in chosen:
            errors[method] = _preconditioned(method, matrix @ back, back, wanted, (left, right, target), n_iterations)
    return errors


def _preconditioned(
    method: str, matrix: Tensor, back: Tensor, wanted: Tensor, system: tuple[Tensor, Tensor, Tensor], n_iterations: int
) -> float:
    left, right, target = system
    start = wanted.new_zeros(matrix.shape[1])
    if method == SOLVED:
        start, failed = torch.linalg.solve_ex(matrix, wanted)
        if int(failed) or not bool(start.isfinite().all()):
            return math.nan
    z = _lbfgs(matrix, wanted, start, n_iterations)
    return relative_error(left, right, back @ z, target)


def _lbfgs(matrix: Tensor, wanted: Tensor, start: Tensor, n_iterations: int) -> Tensor:
    return lbfgs(matrix.mv, matrix.mT.mv, wanted, start, max_iterations=n_iterations)[0]


def measured_condition(*, distribution: str, side: int, n_extra: int, seed: int) -> float:
    """The condition number of one feature matrix, or NaN if its smallest singular value is below rounding."""
    left, right, _ = make_system(distribution, side, n_extra, seed)
    values = on.spectrum.empirical_spectrum(left, right)
    return float(values[0] / values[-1]) if float(values[-1]) > 1e-7 * float(values[0]) else math.nan


Key = tuple[str, int, int]
"""Distribution, side, and number of extra features."""


def systems(run: Run) -> dict[Key, tuple[int, ...]]:
    """Every system of the figure with its seeds; the largest systems have one seed."""
    return {
        (distribution, side, n_extra): run.seeds[:1] if side > run.sizes["all_seeds_up_to"] else run.seeds
        for distribution in (*run.sizes["distributions"], *STRUCTURED)
        for side in run.sizes["sides"]
        for n_extra in ((0,) if distribution in STRUCTURED else run.sizes["extra"])
    }


def over_systems(run: Run, methods: Sequence[str]) -> dict[str, dict[Key, float]]:
    """The errors of each method on every system, as geometric means over seeds."""
    chosen = systems(run)
    run.announce(sum(map(len, chosen.values())))
    found: dict[Key, list[Mapping[str, float]]] = {}
    for key, seeds in chosen.items():
        distribution, side, n_extra = key
        found[key] = [
            run.piece(
                f"{distribution} c={side} +{n_extra} seed={seed}",
                reconstruction_errors,
                distribution=distribution,
                side=side,
                n_extra=n_extra,
                seed=seed,
                methods=list(methods),
                n_iterations=run.sizes["iterations"],
            )
            for seed in seeds
        ]
    return {
        method: {key: _geometric_mean([one[method] for one in row]) for key, row in found.items()} for method in methods
    }


def figure_2_a(run: Run) -> Outcome:
    """Errors of LBFGS against the size of the target. Theory: random_features:thm-2.2"""
    errors = over_systems(run, (PLAIN, OURS))
    plain = errors[PLAIN]
    structured = [error for (name, _, _), error in plain.items() if name in STRUCTURED]
    values = {
        "onlynorm over LBFGS, largest ratio": _largest_ratio(errors[OURS], plain),
        "LBFGS, largest target over smallest, exact width": _growth(run, plain, 0),
        "LBFGS, 100 more features over the exact number, largest target": _gain(run, plain),
        "LBFGS with id_cond and ortho_cond, largest error": max(structured),
    }
    return _outcome(run, values, errors, "relative error")


def figure_2_b(run: Run) -> Outcome:
    """Condition numbers against the size of the target. Theory: random_features:thm-2.2"""
    chosen = systems(run)
    run.announce(sum(map(len, chosen.values())))
    measured = {
        (name, side, extra): _geometric_mean([
            run.piece(
                f"{name} c={side} +{extra} seed={seed}", measured_condition, distribution=name, side=side,
                n_extra=extra, seed=seed,
            )
            for seed in seeds
        ])
        for (name, side, extra), seeds in chosen.items()
    }  # fmt: skip
    law = {
        (name, side, extra): 1.0 if name in STRUCTURED else on.spectrum.condition_number(side**2, side**2 + extra)
        for name, side, extra in chosen
    }
    side, extra = run.sizes["sides"][-1], run.sizes["extra"][-1]
    over_law = [measured[name, side, extra] / law[name, side, extra] for name in run.sizes["distributions"]]
    values = {
        "condition number, largest target over smallest, exact width": _growth(run, measured, 0),
        "condition number, 100 more features over the exact number, largest target": _gain(run, measured),
        "condition number of id_cond and ortho_cond, largest": max(
            one for (name, _, _), one in measured.items() if name in STRUCTURED
        ),
        "condition number over the law's, 100 more features, largest target": _geometric_mean(over_law),
    }
    return _outcome(run, values, {"measured": measured, "law": law}, "condition number")


def figure_2_c(run: Run) -> Outcome:
    """Errors of LBFGS on a system preconditioned by its singular values. Theory: random_features:thm-2.2"""
    return _preconditioned_outcome(run, SCALED)


def figure_2_d(run: Run) -> Outcome:
    """Errors of a direct solve of the preconditioned system, refined by LBFGS. Theory: random_features:thm-2.2"""
    return _preconditioned_outcome(run, SOLVED)


def _preconditioned_outcome(run: Run, method: str) -> Outcome:
    errors = over_systems(run, (method, PLAIN, OURS))
    values = {
        f"onlynorm over {method}, largest ratio": _largest_ratio(errors[OURS], errors[method]),
        f"{method} over LBFGS, exact width": _geometric_mean(
            [
                errors[method][key] / error
                for key, error in errors[PLAIN].items()
                if key[2] == 0 and key[0] not in STRUCTURED
            ]
        ),
        f"{method}, largest target over smallest, exact width": _growth(run, errors[method], 0),
    }
    return _outcome(run, values, errors, "relative error")


def _growth(run: Run, numbers: Mapping[Key, float], n_extra: int) -> float:
    """The value at the largest target over that at the smallest, as a geometric mean over random distributions."""
    small, large = run.sizes["sides"][0], run.sizes["sides"][-1]
    names = run.sizes["distributions"]
    return _geometric_mean([numbers[name, large, n_extra] / numbers[name, small, n_extra] for name in names])


def _gain(run: Run, numbers: Mapping[Key, float]) -> float:
    """The value with most features over that with the exact number, at the largest target."""
    side, extra = run.sizes["sides"][-1], run.sizes["extra"][-1]
    return _geometric_mean([numbers[name, side, extra] / numbers[name, side, 0] for name in run.sizes["distributions"]])


def _largest_ratio(ours: Mapping[Key, float], theirs: Mapping[Key, float]) -> float:
    """The largest ratio of our error to theirs; systems where their method failed are left out."""
    return max(ours[key] / error for key, error in theirs.items() if not math.isnan(error))


def _geometric_mean(numbers: Sequence[float]) -> float:
    """The geometric mean without NaN."""
    values = [max(number, _FLOOR) for number in numbers if not math.isnan(number)]
    return math.exp(float(np.mean(np.log(values)))) if values else math.nan


def _outcome(
    run: Run, values: Mapping[str, float], numbers: Mapping[str, Mapping[Key, float]], y_label: str
) -> Outcome:
    """One panel per number of extra features with the first method of each distribution, and a table of all."""
    first, *others = numbers
    panels, curves = [], []
    sides = run.sizes["sides"]
    for extra in run.sizes["extra"]:
        panel = f"+{extra} features" if extra else "exact number of features"
        panels.append(Panel(panel, f"{first}, {panel}", "side of the target", y_label, y_log=True))
        for name in (*run.sizes["distributions"], *(STRUCTURED if extra == 0 else ())):
            heights = [numbers[first][name, side, extra] for side in sides]
            curves.append(Curve(name, sides, heights, kind="line+points", panel=panel))
        for other in others:
            name = run.sizes["distributions"][0]
            heights = [max(numbers[other][name, side, extra], _FLOOR) for side in sides]
            curves.append(Curve(f"{other}, {name}", sides, heights, panel=panel, style="law"))
    rows: list[list[float | str]] = [
        [name, side, extra, *(numbers[method][name, side, extra] for method in numbers)]
        for name, side, extra in numbers[first]
    ]
    columns = ["features", "side", "extra features", *numbers]
    return Outcome(values=values, curves=curves, panels=panels, table=Table(columns=columns, rows=rows))
