"""Norms trained from scratch beside the ordinary network, on real images with tuned learning rates.

Small VGGs with batch norms, SGD with momentum, the rate on a cosine, as many epochs for every way. The rate of a way is
the one with the best accuracy on training images put aside, the mean of several networks that are not judged: all ways
begin with the same four rates and go on to their neighbours while the best lies at an end. Then every seed is judged on
test images. Below the width bound features reach only a part of the weights: accuracy against their share is drawn.
Each run and each try of a rate is kept as a record.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from onlynorm.bench.arguments import listener, need_names
from onlynorm.bench.kept import Rows, Say, fields_of
from onlynorm.bench.scratch_picture import write_shares
from onlynorm.bench.scratch_results import WAYS, ScratchBench, ScratchRun, ScratchTrial
from onlynorm.modules.validate import need_integer, need_path
from onlynorm.papers.lessons import TRIAL_SEED
from onlynorm.papers.scratch_training import Training, best_rate, images, lesson, train, try_rates
from onlynorm.reconstruction.partial import tensors_digest

TRAININGS = {
    "fashion_mnist": Training(
        "fashion_mnist", ((8, 8), (16,)), image_size=14, n_train=8000, n_put_aside=10_000, n_test=10_000, epochs=8
    ),
    "cifar10": Training(
        "cifar10", ((8, 8), (16, 16)), image_size=16, n_train=8000, n_put_aside=5000, n_test=10_000, epochs=8
    ),
}
"""Networks, images and schedules by data set."""
QUICK = {
    name: replace(one, stages=((4,), (8,)), n_train=1024, n_put_aside=500, n_test=1000, epochs=2, batch_size=32)
    for name, one in TRAININGS.items()
}
KIND = "onlynorm-bench-scratch"


def bench_scratch(
    *,
    data: Sequence[str] | None = None,
    n_seeds: int = 5,
    n_trials: int = 3,
    epochs: int | None = None,
    trainings: dict[str, Training] | None = None,
    quick: bool = False,
    out: Path | str = "onlynorm-out/bench",
    force: bool = False,
    progress: Say | None = None,
    on_row: Callable[[ScratchRun], None] | None = None,
) -> ScratchBench:
    """Trains every way on each of these data sets; what an earlier run with the same sizes did is read again.

    `n_trials` networks choose the rate of a way, `n_seeds` others are judged.
    `force` makes it anew. The picture of accuracy against the share of features lies in the folder of the records.
    """
    n_seeds = need_integer("n_seeds", n_seeds, low=1, high=TRIAL_SEED, cure="Rates are tried with seeds beyond.")
    n_trials = need_integer("n_trials", n_trials, low=1, cure="Rates are tried on so many networks; take 3.")
    if epochs is not None:
        epochs = need_integer("epochs", epochs, low=1, cure="Leave it out for those of each data set.")
    known = trainings or (QUICK if quick else TRAININGS)
    data = need_names("data", tuple(known) if data is None else data, known)
    say, on_row = listener("progress", progress), listener("on_row", on_row)
    folder = need_path("out", out) / "scratch"
    rows = Rows(folder, kind=KIND, module=__name__, force=force, say=say)
    chosen = {name: replace(known[name], epochs=epochs or known[name].epochs) for name in data}
    bench = ScratchBench(trainings=chosen)
    for name, training in chosen.items():
        lab = _Lab(training, rows, say, range(TRIAL_SEED, TRIAL_SEED + n_trials))
        for way in WAYS:
            bench.trials += lab.trials(way)
            rate = best_rate(bench.tried(name, way))
            for seed in range(n_seeds):
                bench.runs.append(lab.run(way, seed, rate))
                if on_row is not None:
                    on_row(bench.runs[-1])
    bench.figure = str(write_shares(bench, folder))
    return bench


class _Lab:
    """One data set and the records of its runs."""

    def __init__(self, training: Training, rows: Rows, say: Say, trial_seeds: Sequence[int]) -> None:
        self.training, self.rows, self.say, self.trial_seeds = training, rows, say, trial_seeds
        split = images(training.data, training.image_size)
        lesson(training, 0)  # says now what would fail after the trials
        self.made_of = {"data": tensors_digest(vars(split)), "training": asdict(training)}

    def trials(self, way: str) -> list[ScratchTrial]:
        """Every rate that was tried for this way."""
        found: list[ScratchTrial] = []

        def attempt(rate: float) -> float:
            for seed in self.trial_seeds:
                row = self._find(way, seed, rate, f"trying rate {rate:g}, seed {seed}", is_trial=True)
                found.append(ScratchTrial(self.training.data, way, seed, rate, row["accuracy"], row["note"]))
            return statistics.fmean(trial.accuracy for trial in found if trial.rate == rate)

        try_rates(attempt)
        return found

    def run(self, way: str, seed: int, rate: float) -> ScratchRun:
        """One network, trained and judged."""
        row = self._find(way, seed, rate, f"seed {seed}", is_trial=False)
        return ScratchRun(self.training.data, way, seed, rate, **{**row, "losses": tuple(row["losses"])})

    def _find(self, way: str, seed: int, rate: float, what: str, *, is_trial: bool) -> dict[str, Any]:
        told = f"{self.training.data}, {way}: {what}"
        self.say(told)
        chosen = asdict(WAYS[way])

        def measure() -> dict[str, Any]:
            return train(
                way=chosen, training=asdict(self.training), rate=rate, seed=seed, is_trial=is_trial,
                step=lambda now, n_steps, _: self.say(f"{told}: step {now} of {n_steps}"),
            )  # fmt: skip

        made_of = {**self.made_of, "way": chosen, "rate": rate, "seed": seed, "is_trial": is_trial}
        fields = fields_of(ScratchRun, "data", "way", "seed", "rate")
        return self.rows.find(
            f"{self.training.data}, {way}, rate {rate:g}, seed {seed}", made_of, measure, fields=fields
        )
