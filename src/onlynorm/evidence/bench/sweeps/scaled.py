"""Test accuracy against the condition number of the features.

The experiment of table 1 of random_features with other settings: a ResNet-8 on CIFAR-10 and a fully connected network
on Fashion-MNIST. Singular values follow the semi-circle law of random features, of which only the smallest values
depend on a large condition number, or a geometric law, without that limitation. Each spectrum has its own learning rate
and is also tested with that of the ordinary network.

Theory: random_features:thm-3.1
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from onlynorm.display import Figure, Panel, Table
from onlynorm.evidence.harness import Goal, number
from onlynorm.evidence.papers.random_features.scaled import (
    GEOMETRIC,
    LAWS,
    ORDINARY,
    SEMICIRCLE,
    ScaledCase,
    ScaledSizes,
    images_of,
    ordinary,
    spectrum_change,
    squared_spectrum,
    step_gap,
    train_case,
    validation_accuracy,
)
from onlynorm.evidence.sweep import Results, Sweep, percent
from onlynorm.evidence.validation import TRIAL_SEED

ROUNDING = 1e-10
"""Maximum relative difference between a step and s^2 times the ordinary one in float64, in a whole network."""
CONDITIONS: Mapping[str, Sequence[float]] = {
    SEMICIRCLE: (1.0, 3.0, 10.0, 30.0, 100.0, 1000.0, 1e6),
    GEOMETRIC: (10.0, 1000.0, 1e6),
}
"""Condition numbers of each law, ascending; the geometric law of condition 1 is the ordinary network too."""
QUICK_CONDITIONS: Mapping[str, Sequence[float]] = {SEMICIRCLE: (1.0, 1e6), GEOMETRIC: (1e6,)}
N_SEEDS: Mapping[str, int] = {"cifar10": 3, "fashion_mnist": 10}
"""Networks of each kind by default; the fully connected ones are ten times cheaper."""


@dataclass(frozen=True)
class LawFacts:
    """The spectrum over all weights of a network: the largest s^2, and the fractions below 0.1 and 0.01.

    `change` is the mean change of s^2 from the next smaller condition number, `gap` the relative difference between one
    step and the prediction of the spectrum.
    """

    data: str
    spectrum: str
    condition: float
    largest: float
    below_tenth: float
    below_hundredth: float
    change: float
    gap: float


def cases(sizes: ScaledSizes) -> list[ScaledCase]:
    """The ordinary network and every spectrum, for each data set."""
    conditions = QUICK_CONDITIONS if sizes.quick else CONDITIONS
    spectra = [(law, condition) for law in sizes.law for condition in conditions[law]]
    return [ScaledCase(data, *spectrum) for data in sizes.data for spectrum in [(ORDINARY, 1.0), *spectra]]


sweep = Sweep(
    "scaled", "Networks with features of increasing condition number, trained from scratch.", ScaledSizes, cases=cases,
    lrs=(0.01, 0.03, 0.1, 0.3, 1.0), also_at=ordinary,
    seeds=lambda case, sizes: sizes.seeds or N_SEEDS[case.data],
    made_of=lambda case, _: {"images": images_of(case.data)}, width=160,
    columns={
        "test accuracy %": percent("accuracy"), "training accuracy %": percent("train_accuracy"),
        "test below ordinary, points": lambda results, case, _: (
            "-" if case.spectrum == ORDINARY else results.gap(ordinary(case), case).percent()
        ),
        "test accuracy % at the ordinary lr": lambda results, case, _: (
            results.spread(case, lr=results.lr(ordinary(case))).percent()
        ),
    },
)  # fmt: skip


sweep.trial(validation_accuracy)
sweep.measure(train_case)


@sweep.facts
def spectra(results: Results[ScaledSizes, ScaledCase], status: Callable[[str], None]) -> dict[str, Any]:
    """The spectra over the weights of the networks."""
    made = []
    for data, law in itertools.product(results.sizes.data, results.sizes.law):
        conditions = [case.condition for case in results.where(data=data, spectrum=law)]
        for before, condition in itertools.pairwise((1.0, *conditions)):
            status(f"{data}, {law} {condition:g}: one step against the ordinary one")
            squares = squared_spectrum(data, condition=condition, law=law)
            below, far_below = (float((squares < limit).double().mean()) for limit in (0.1, 0.01))
            change = spectrum_change(data, before, second=condition, law=law)
            gap = step_gap(data, condition=condition, law=law, seed=TRIAL_SEED, n_images=results.sizes.batch_size)
            made.append(asdict(LawFacts(data, law, condition, float(squares.max()), below, far_below, change, gap)))
    return {"laws": made}


@sweep.tables
def law_tables(results: Results[ScaledSizes, ScaledCase]) -> list[Table]:
    """The spectra, with the decrease of the accuracy from one condition number to the next."""
    heads = (
        "data", "spectrum", "condition", "largest s²", "weights with s² < 0.1, %", "weights with s² < 0.01, %",
        "mean change of s² from the condition before", "test accuracy below it, points",
    )  # fmt: skip
    rows, last = [], dict[tuple[str, str], ScaledCase]()
    for law in (LawFacts(**one) for one in results.facts.get("laws", ())):
        case = ScaledCase(law.data, law.spectrum, law.condition)
        above = last.get(case[:2], ordinary(case))
        rows.append((
            law.data, law.spectrum, f"{law.condition:g}", f"{law.largest:.3g}", f"{100 * law.below_tenth:.1f}",
            f"{100 * law.below_hundredth:.2f}", number(law.change, ".2g"), results.gap(above, case).percent(),
        ))  # fmt: skip
        last[case[:2]] = case
    return [Table(heads, rows, 140)]


@sweep.goals
def goals(results: Results[ScaledSizes, ScaledCase]) -> Iterator[Goal]:
    """Condition 1 is bit-identical to the ordinary network; the largest condition of a law is significantly worse."""
    for plain in dict.fromkeys(ordinary(case) for case in results.cases):
        usual, first = results.of(plain), results.of(ScaledCase(plain.data, SEMICIRCLE, 1.0), lr=results.lr(plain))
        if len(usual) and len(first):
            names = ["seed", "accuracy", "train_accuracy", "loss"]
            n_equal = int((usual[names].to_numpy() == first[names].to_numpy()).all(axis=1).sum())
            yield Goal(
                f"{plain.data}: condition 1 trains exactly as the ordinary network",
                f"{n_equal} of {len(usual)} seeds are bit-identical", n_equal == len(usual),
            )  # fmt: skip
        gaps = [one["gap"] for one in results.facts.get("laws", ()) if one["data"] == plain.data]
        if gaps:
            aim = f"{plain.data}: a step moves each weight by s² times the ordinary step, to {ROUNDING:g} in float64"
            yield Goal(aim, f"{max(gaps):.1e}", max(gaps) <= ROUNDING)
        if results.sizes.quick or len(usual) < 2:
            continue
        worse = [case for case in results.where(data=plain.data) if case.condition > 1.0]
        for case in {case.spectrum: case for case in worse}.values():
            best, last = results.spread(plain), results.spread(case)
            yield Goal(
                f"{case.data}, {case.spectrum}: the interval of accuracy at condition {case.condition:g} lies below "
                "that at 1",
                f"{last.percent()} % against {best.percent()} %; {results.gap(plain, case).percent()} points lower "
                "for equal seeds",
                last.mean + last.half < best.mean - best.half,
            )


@sweep.figures
def draw(results: Results[ScaledSizes, ScaledCase]) -> dict[str, Figure]:
    """Accuracy against the condition number, with the learning rate of each spectrum and with the ordinary one."""
    curves = []
    for plain in dict.fromkeys(ordinary(case) for case in results.cases):
        for place, (law, is_own) in enumerate(itertools.product(LAWS, (True, False))):
            found = [case for case in results.where(data=plain.data, spectrum=law) if case.condition > 1.0]
            if found:
                lr = None if is_own else results.lr(plain)
                # Shifted, so that intervals do not overlap.
                x = [case.condition * 1.07**place for case in (plain, *found)]
                label = f"{law}, " + ("its own lr" if is_own else "the ordinary lr")
                curves.append(results.curve(label, x, (plain, *found), lr=lr, kind="line+points", panel=plain.data))
    panels = [Panel(data, data, "condition number", "test accuracy, %", x_log=True) for data in results.sizes.data]
    return {"accuracy": Figure(curves, panels)}
