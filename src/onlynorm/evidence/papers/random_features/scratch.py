"""The CIFAR-10 numbers of random_features, section 5: he_normal features trained from scratch, beside ordinary layers.

The paper trains a VGG of width 100 with a hundred features more than weights per layer. Its relative excess, 1/900, is
what fixes the condition number of the features, so that is what we keep where the network shrinks. A fourth method is
ours: the same features, with gammas that follow the weights.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict
from typing import Any

from onlynorm.display import Curve, Panel, Table
from onlynorm.evidence.papers.random_features.scratch_training import Method, Training, choose_lr, train
from onlynorm.evidence.papers.reproduce import Outcome, Run
from onlynorm.evidence.spread import Spread

EXCESS = 1.0 + 100 / 90_000
LONGER = 500 / 300
"""Epochs of the paper's longer training per epoch of its shorter one."""
WARMUP = 0.1
"""Share of the steps; the paper does not give its own."""
ORDINARY, PLAIN, WARMED, FOLLOWED = (
    "ordinary",
    "he_normal",
    "he_normal, longer with warmup",
    "he_normal, follow_weights",
)
METHODS = {
    ORDINARY: Method(), PLAIN: Method("he_normal", EXCESS), WARMED: Method("he_normal", EXCESS),
    FOLLOWED: Method("he_normal", EXCESS, follow_weights=True),
}  # fmt: skip
STATED = {ORDINARY: "in the order of 94", PLAIN: "86.64 ± 0.08", WARMED: "90.08 ± 0.03", FOLLOWED: "-"}
"""What the paper has for them, in per cent."""


def section_5(run: Run) -> Outcome:
    """Test accuracies after training from scratch, each method at the learning rate that was best for it.

    Theory: random_features:thm-2.2, random_features:thm-3.1
    """
    run.announce(len(METHODS) * (1 + len(run.seeds)))
    lrs: dict[str, float] = {}
    found: dict[str, list[dict[str, Any]]] = {}
    for name, method in METHODS.items():
        config = {"method": asdict(method), "training": training_of(name, run)}
        lrs[name] = run.piece(f"{name}, lr", choose_lr, **config)["lr"]
        found[name] = [
            run.piece(f"{name}, seed {seed}", train, **config, lr=lrs[name], seed=seed) for seed in run.seeds
        ]
    accuracies = {name: [100.0 * one["accuracy"] for one in runs] for name, runs in found.items()}
    means = {name: statistics.fmean(values) for name, values in accuracies.items()}
    rows: list[list[float | str]] = []
    for name, values in accuracies.items():
        plan = training_of(name, run)
        half = Spread.of(values).half
        interval = "-" if math.isnan(half) else half
        rows.append([name, plan["epochs"], plan["warmup"], lrs[name], means[name], interval, STATED[name]])
    columns = ["method", "epochs", "warmup", "lr", "accuracy %", "± (95 %)", "paper %"]
    return Outcome(
        values={
            **{f"accuracy, {name}": mean for name, mean in means.items()},
            "ordinary over he_normal, points": means[ORDINARY] - means[PLAIN],
            "longer with warmup over he_normal, points": means[WARMED] - means[PLAIN],
            "ordinary over longer with warmup, points": means[ORDINARY] - means[WARMED],
            "ordinary over follow_weights, points": means[ORDINARY] - means[FOLLOWED],
        },
        curves=[_curve(name, runs) for name, runs in found.items()],
        panels=[Panel(title="training loss", x_label="epoch", y_label="cross entropy", y_log=True)],
        table=Table(columns, rows),
    )


def training_of(name: str, run: Run) -> dict[str, Any]:
    """The training of this method at the sizes of the run."""
    is_longer = name == WARMED
    sizes = {key: value for key, value in run.sizes.items() if key not in ("epochs", "n_seeds")}
    epochs = round(run.sizes["epochs"] * (LONGER if is_longer else 1.0))
    return asdict(Training("cifar10", epochs=epochs, warmup=WARMUP if is_longer else 0.0, **sizes))


def _curve(name: str, runs: list[dict[str, Any]]) -> Curve:
    losses = [statistics.fmean(epoch) for epoch in zip(*(one["losses"] for one in runs), strict=False)]
    return Curve(name, range(1, len(losses) + 1), losses)
