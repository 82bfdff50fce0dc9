"""Norms trained from scratch against the ordinary network, on real images with tuned learning rates.

The experiment of section 5 of random_features with other methods and sizes: small VGGs with batch norms, SGD with
momentum, a cosine learning rate, and the same number of epochs for every method. Learning rates are selected by the
mean of several networks that are not tested. With fewer features than weights only some weights can be represented: a
figure shows accuracy against features per weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from onlynorm.display import Figure, Panel
from onlynorm.evidence.harness import NARROW, Goal, Sizes, Spread, setting
from onlynorm.evidence.papers.random_features.scratch import Method, ScratchCase, ScratchTraining, make_sweep
from onlynorm.evidence.sweep import Results, first, mean, percent
from onlynorm.evidence.validation import TRIAL_SEED

FRACTIONS = (0.25, 0.5, 0.75)
"""Features per weight, fewer than the theorem needs."""
BOUND, ABOVE = 1.0, 1.25
EXCESSES = (*FRACTIONS, BOUND, ABOVE)
ORDINARY, ID_COND, ORTHO_COND, SPARSE = "ordinary network", "id_cond", "ortho_cond", "id_cond, density 0.2"


def plain(excess: float) -> str:
    """The method that trains the gammas of `excess` he_normal features per weight."""
    return f"he_normal {excess:g}"


def followed(excess: float) -> str:
    """The same with `follow_weights`."""
    return f"he_normal {excess:g}, follow_weights"


METHODS: dict[str, Method] = {
    ORDINARY: Method(), ID_COND: Method("id_cond"), ORTHO_COND: Method("ortho_cond"),
    SPARSE: Method("id_cond", density=0.2),
    **{plain(excess): Method("he_normal", excess) for excess in EXCESSES},
    **{followed(excess): Method("he_normal", excess, follow_weights=True) for excess in EXCESSES},
}  # fmt: skip
"""The methods of training by name."""
TRAININGS = {
    "fashion_mnist": ScratchTraining(
        "fashion_mnist", ((8, 8), (16,)), image_size=14, n_train=8000, n_validation=10_000, n_test=10_000, epochs=8
    ),
    "cifar10": ScratchTraining(
        "cifar10", ((8, 8), (16, 16)), image_size=16, n_train=8000, n_validation=5000, n_test=10_000, epochs=8
    ),
}
"""Networks, images and schedules by data set."""
QUICK = {
    name: replace(one, stages=((4,), (8,)), n_train=1024, n_validation=500, n_test=1000, epochs=2, batch_size=32)
    for name, one in TRAININGS.items()
}


@dataclass(frozen=True)
class ScratchSizes(Sizes):
    """Data sets, seeds and trials; the settings of each data set are in `TRAININGS`, smaller ones in `QUICK`."""

    data: tuple[str, ...] = setting(tuple(TRAININGS), choices=TRAININGS, help="fashion_mnist or cifar10.", is_key=False)
    seeds: int = setting(5, high=TRIAL_SEED, help="Networks of each method.", is_key=False)
    trials: int = setting(3, help="Other networks, for the selection of the learning rate.", is_key=False)
    epochs: int | None = setting(None, help="Epochs of training.", is_key=False)

    def training(self, data: str) -> ScratchTraining:
        """All settings of the training on this data except method, learning rate and seed."""
        one = (QUICK if self.quick else TRAININGS)[data]
        return replace(one, epochs=self.epochs or one.epochs)


def cases(sizes: ScratchSizes) -> list[ScratchCase]:
    """Every method on every data set."""
    return [ScratchCase(data, method) for data in sizes.data for method in METHODS]


def deficit(results: Results[ScratchSizes, ScratchCase], case: ScratchCase) -> Spread:
    """The difference between the accuracy of the ordinary network and that of a method, for each seed."""
    return results.gap(ScratchCase(case.data, ORDINARY), case)


sweep = make_sweep(
    "scratch", "Norms trained from scratch, on gamma and on weights, against the ordinary network.", ScratchSizes,
    methods=METHODS, training=lambda case, sizes: sizes.training(case.data), cases=cases, width=160,
    trial_seeds=lambda sizes: range(TRIAL_SEED, TRIAL_SEED + sizes.trials),
    columns={
        "trained": first("n_trained", ","), "test accuracy %": percent("accuracy"),
        "below ordinary, points": lambda results, case, _: (
            "-" if case.method == ORDINARY else deficit(results, case).percent()
        ),
        "last loss": lambda _, __, runs: f"{Spread.of([one[-1] for one in runs['losses'] if one]).mean:.3f}",
        "seconds": mean("seconds", ".1f"),
    },
)  # fmt: skip


@sweep.goals
def goals(results: Results[ScratchSizes, ScratchCase]) -> Iterator[Goal]:
    """The goals for every data set."""
    for data in dict.fromkeys(case.data for case in results.cases):
        yield from _goals(results, data)


def _goals(results: Results[ScratchSizes, ScratchCase], data: str) -> Iterator[Goal]:
    both = results.of(ScratchCase(data, ID_COND)).merge(
        results.of(ScratchCase(data, ORDINARY)), on="seed", suffixes=("", "_ordinary")
    )
    if len(both):
        is_equal = (both["accuracy"] == both["accuracy_ordinary"]) & (both["losses"] == both["losses_ordinary"])
        yield Goal(
            f"{data}: training id_cond is bit-identical to the ordinary network",
            f"accuracy and the losses of all epochs equal for {int(is_equal.sum())} of {len(both)} seeds",
            bool(is_equal.all()),
        )
    ordinary = results.spread(ScratchCase(data, ORDINARY))
    for method in (ORTHO_COND, followed(BOUND), followed(ABOVE)):
        gap = deficit(results, ScratchCase(data, method))
        if gap.n > 1:
            yield Goal(
                f"{data}: {method} is as accurate as the ordinary network, within the interval of its seeds",
                f"{100 * gap.mean:.2f} points below, interval ± {100 * ordinary.half:.2f}",
                abs(gap.mean) <= ordinary.half <= NARROW,
            )
    for excess in (BOUND, ABOVE):
        gap = deficit(results, ScratchCase(data, plain(excess)))
        if gap.n > 1:
            yield Goal(
                f"{data}: the paper's finding that {plain(excess)} is below the ordinary network",
                f"{gap.percent()} points below: {_decided(gap)}", gap.low > 0.0,
            )  # fmt: skip


def _decided(gap: Spread) -> str:
    """The conclusion from the interval of a difference that should be positive."""
    if gap.low > 0.0:
        return "confirmed"
    return "refuted" if gap.high < 0.0 else "neither confirmed nor refuted"


@sweep.figures
def draw(results: Results[ScratchSizes, ScratchCase]) -> dict[str, Figure]:
    """Accuracy against features per weight, a panel for every data set."""
    named: dict[str, Callable[[float], str]] = {
        ORDINARY: lambda _: ORDINARY, "he_normal, steps on weights": followed, "he_normal, steps on gamma": plain,
    }  # fmt: skip
    curves, data_sets = [], dict.fromkeys(case.data for case in results.cases)
    for data in data_sets:
        for label, name in named.items():
            style: Any = {"style": "law"} if label == ORDINARY else {"kind": "line+points"}
            curves.append(
                results.curve(label, EXCESSES, [ScratchCase(data, name(e)) for e in EXCESSES], panel=data, **style)
            )
    panels = [Panel(data, data, "features per weight", "test accuracy, %") for data in data_sets]
    return {"-".join(("fractions", *data_sets)): Figure(curves, panels)}
