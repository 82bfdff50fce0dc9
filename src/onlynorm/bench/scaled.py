"""Accuracy against the condition number of the features: what conditioning alone costs a network.

A ResNet-8 on CIFAR-10 and a fully connected network on Fashion-MNIST are trained from scratch with ID cond features
whose singular values have mean square one and follow a law at a chosen condition number (`papers/scaled_training.py`):
the semi-circle of random features, which hardly changes between large condition numbers, as only the smallest of its
values know them; and, to see conditioning without that limit, a geometric one. Each spectrum has its own rate, the one
of a common grid with the best accuracy on images put aside, and is also judged at the ordinary network's rate. Each run
and each try of a rate is kept as a record.

Theory: random_features:thm-3.1
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from onlynorm.bench.arguments import listener, need_counts, need_names
from onlynorm.bench.kept import Rows, Say, fields_of
from onlynorm.bench.scaled_results import ORDINARY, Scale, ScaledBench, ScaledLaw, ScaledRun, ScaledSizes, ScaledTrial
from onlynorm.modules.validate import need_integer, need_path
from onlynorm.papers.lessons import TRIAL_SEED
from onlynorm.papers.scaled_training import (
    GEOMETRIC,
    LAWS,
    SEMICIRCLE,
    SUBJECTS,
    images_of,
    spectrum_change,
    squared_spectrum,
    step_gap,
    train,
)
from onlynorm.reconstruction.partial import tensors_digest
from onlynorm.report.figure import COLOURS, STYLE, write_pictures

CONDITIONS: Mapping[str, Sequence[float]] = {
    SEMICIRCLE: (1.0, 3.0, 10.0, 30.0, 100.0, 1000.0, 1e6),
    GEOMETRIC: (10.0, 1000.0, 1e6),
}
"""Condition numbers of each law, ascending; the geometric law of condition 1 is the ordinary network too."""
RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
"""Peak rates that are tried, the same for every spectrum."""
N_SEEDS: Mapping[str, int] = {"cifar10": 3, "fashion_mnist": 10}
"""Networks of each kind unless told otherwise; the fully connected ones are ten times cheaper."""
KIND = "onlynorm-bench-scaled"
_QUICK_CONDITIONS: Mapping[str, Sequence[float]] = {SEMICIRCLE: (1.0, 1e6), GEOMETRIC: (1e6,)}


def bench_scaled(
    *,
    data: Sequence[str] | None = None,
    laws: Sequence[str] | None = None,
    n_seeds: int | None = None,
    sizes: ScaledSizes | None = None,
    quick: bool = False,
    out: Path | str = "onlynorm-out/bench",
    force: bool = False,
    progress: Say | None = None,
    on_row: Callable[[ScaledRun], None] | None = None,
) -> ScaledBench:
    """Trains every network with every spectrum; what an earlier run with the same sizes did is read again.

    `force` makes it anew. `quick` takes few spectra and two seeds, and trains too shortly for accuracies to mean much.
    """
    data = need_names("data", tuple(SUBJECTS) if data is None else data, SUBJECTS)
    laws = need_names("law of a spectrum", LAWS if laws is None else laws, LAWS)
    if n_seeds is not None:
        n_seeds = need_integer("n_seeds", n_seeds, low=1, high=TRIAL_SEED, cure="Rates are tried with seeds beyond.")
    say, on_row = listener("progress", progress), listener("on_row", on_row)
    folder = need_path("out", out) / "scaled"
    sizes = need_counts(sizes or (ScaledSizes.quick() if quick else ScaledSizes()), ScaledSizes)
    bench = ScaledBench(sizes=sizes)
    lab = _Lab(bench.sizes, Rows(folder, kind=KIND, module=__name__, force=force, say=say), say)
    conditions = {law: (_QUICK_CONDITIONS if quick else CONDITIONS)[law] for law in laws}
    for name in data:
        scales = [ORDINARY, *(Scale(law, condition) for law in laws for condition in conditions[law])]
        bench.laws += [law for one in laws for law in lab.laws(name, one, conditions[one])]
        bench.trials += [lab.trial(name, scale, rate) for scale in scales for rate in RATES]
        for scale, seed in itertools.product(scales, range(n_seeds or (2 if quick else N_SEEDS[name]))):
            for rate in dict.fromkeys((bench.rate(name, scale), bench.rate(name, ORDINARY))):
                bench.runs.append(lab.run(name, scale, seed, rate))
                if on_row is not None:
                    on_row(bench.runs[-1])
    bench.figure = str(draw_scaled(bench, folder))
    return bench


def draw_scaled(bench: ScaledBench, folder: Path) -> Path:
    """The path of the picture of accuracy over condition number, as PNG; the same as SVG lies beside it."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.6 * len(bench.data), 3.8), layout="constrained")
        FigureCanvasAgg(figure)
        for axes, data in zip(figure.subplots(1, len(bench.data), squeeze=False).flat, bench.data, strict=True):
            usual = bench.rate(data, ORDINARY)
            ways = [(law, at) for law in LAWS for at in (None, usual)]
            for place, (law, at) in enumerate(ways):
                scales = [ORDINARY, *(s for s in bench.scales(data) if s.law == law and s.condition > 1.0)]
                found = [bench.test(data, scale, at=at) for scale in scales]
                if len(scales) > 1:
                    axes.errorbar(
                        # Side by side, or one interval would hide another.
                        [scale.condition * 1.07**place for scale in scales], [100 * one.mean for one in found],
                        [0.0 if math.isnan(one.half) else 100 * one.half for one in found],
                        label=f"{law}, " + ("rates of its own" if at is None else f"rate {usual:g}"),
                        color=COLOURS[place], marker="o", markersize=3.5, capsize=2.5, linewidth=1.1,
                    )  # fmt: skip
            axes.set(title=data, xlabel="condition number", ylabel="test accuracy, %", xscale="log")
            axes.legend()
        return write_pictures(figure, folder, "accuracy")[0]


class _Lab:
    """The sizes and the records that all runs share."""

    def __init__(self, sizes: ScaledSizes, rows: Rows, say: Say) -> None:
        self.sizes, self.rows, self.say = sizes, rows, say
        self.digests: dict[str, str] = {}

    def laws(self, data: str, law: str, conditions: Sequence[float]) -> list[ScaledLaw]:
        """What the spectra of a law do to the weights of the network."""
        made = []
        for before, condition in itertools.pairwise((1.0, *conditions)):
            self.say(f"{data}, {law} {condition:g}: one step beside the ordinary one")
            squares = squared_spectrum(data, condition=condition, law=law)
            made.append(ScaledLaw(
                data, Scale(law, condition), largest=float(squares.max()),
                slow=float((squares < 0.1).double().mean()), stuck=float((squares < 0.01).double().mean()),
                change=spectrum_change(data, before, second=condition, law=law),
                gap=step_gap(data, condition=condition, law=law, seed=TRIAL_SEED, n_images=self.sizes.batch_size),
            ))  # fmt: skip
        return made

    def trial(self, data: str, scale: Scale, rate: float) -> ScaledTrial:
        """One rate, judged by the images put aside."""
        found = self._find(data, scale, TRIAL_SEED, rate, n_epochs=self.sizes.n_trial_epochs, is_trial=True)
        return ScaledTrial(data, scale, rate, found["accuracy"], found["note"])

    def run(self, data: str, scale: Scale, seed: int, rate: float) -> ScaledRun:
        """One network, trained and judged by the test images."""
        found = self._find(data, scale, seed, rate, n_epochs=self.sizes.n_epochs, is_trial=False)
        return ScaledRun(data, scale, seed, rate, **found)

    def _find(self, data: str, scale: Scale, seed: int, rate: float, **how: Any) -> dict[str, Any]:
        spectrum = {"condition": None} if scale == ORDINARY else scale._asdict()
        settings = {"data": data, **spectrum, "rate": rate, "seed": seed, **how,
                    "n_train": self.sizes.n_train, "batch_size": self.sizes.batch_size}  # fmt: skip
        name = f"{data}, {scale}, rate {rate:g}, seed {seed}"
        self.say(name + (", a trial" if how["is_trial"] else ""))
        if data not in self.digests:
            self.digests[data] = tensors_digest(vars(images_of(data)))
        made_of, fields = (
            {**settings, "images": self.digests[data]},
            fields_of(ScaledRun, "data", "scale", "seed", "rate"),
        )
        return self.rows.find(name, made_of, lambda: train(**settings), fields=fields)
