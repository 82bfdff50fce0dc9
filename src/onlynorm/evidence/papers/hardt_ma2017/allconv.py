"""Section 4 of hardt_ma2017: the all-convolutional residual network and variants of it, trained on CIFAR-10.

Theory: hardt_ma2017:thm-2.2
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import onlynorm as on
from onlynorm.data import Split, cifar10
from onlynorm.display import Curve, Panel, Table
from onlynorm.errors import TrainingError
from onlynorm.evidence.harness import Spread
from onlynorm.evidence.papers.reproduce import Outcome, Run
from onlynorm.identity import AllConvolutional, all_convolutional, branch_bounds
from onlynorm.tuning import accuracy

NEAR_IDENTITY, STANDARD, SLOW = "near identity", "standard init", "standard init, learning rate / 100"
BATCH, HEAD = "batch norm", "trained head"


@dataclass(frozen=True)
class Variant:
    """Changes of the paper's network, and the factor of the learning rate."""

    init: str = "near_identity"
    norm: str | None = None
    head: str = "fixed"
    rate: float = 1.0


VARIANTS = {
    NEAR_IDENTITY: Variant(),
    STANDARD: Variant(init="standard"),
    SLOW: Variant(init="standard", rate=0.01),
    BATCH: Variant(init="standard", norm="batch"),
    HEAD: Variant(head="trained"),
}
"""Variants by name; batch norms remove the scale of the weights, so they use the standard initialization."""
DROPS = (0.5, 5 / 6)
"""Fractions of training after which the learning rate drops tenfold: the paper's 30,000 and 50,000 of 60,000 steps."""
MOMENTUM, WEIGHT_DECAY = 0.9, 1e-4
_GUESSING = 90.0  # error of chance in percent


@dataclass(frozen=True)
class AllconvTraining:
    """The settings of a training except the variant and the seed."""

    depth: int
    width: int
    image_size: int
    n_train: int
    n_test: int
    n_epochs: int
    batch_size: int
    rate: float
    n_evaluations: int
    n_evaluation_images: int


def train(*, variant: str, seed: int, training: dict[str, Any]) -> dict[str, Any]:
    """Errors in percent during and after training, on `n_test` test images and as many training images.

    During training, errors are measured `n_evaluations` times at evenly spaced steps, on `n_evaluation_images` images.
    Training stops if the loss is NaN or infinite; the error is then that of chance.
    """
    chosen, changed = AllconvTraining(**training), VARIANTS[variant]
    split = images(chosen.image_size)
    network = all_convolutional(
        chosen.depth, width=chosen.width, init=changed.init, norm=changed.norm, head=changed.head, seed=seed
    )
    seen = split.train_inputs[: chosen.n_train], split.train_labels[: chosen.n_train]
    held = split.test_inputs[: chosen.n_test], split.test_labels[: chosen.n_test]
    parts = {"train": seen, "test": held}
    history: list[dict[str, float]] = []

    def evaluate(step: int, n_steps: int, loss: float) -> None:
        if step * chosen.n_evaluations // n_steps > (step - 1) * chosen.n_evaluations // n_steps:
            errors = {name: _error(network, part, chosen.n_evaluation_images) for name, part in parts.items()}
            history.append({"step": step, "loss": loss, **errors})

    schedule = on.Schedule(
        epochs=chosen.n_epochs, batch_size=chosen.batch_size, lr=changed.rate * chosen.rate, momentum=MOMENTUM,
        warmup=0.0, weight_decay=WEIGHT_DECAY, drops=DROPS, augmentation="crop-flip", seed=seed,
    )  # fmt: skip
    try:
        result = on.fit(network, seen, schedule=schedule, on_step=evaluate, accelerator="cpu")
    except TrainingError:
        return {**dict.fromkeys(parts, _GUESSING), "history": history, "is_finite": False}
    errors = {name: _error(network, part, chosen.n_test) for name, part in parts.items()}
    return {**errors, "history": history, "is_finite": True, "n_steps": result.n_steps}


@functools.lru_cache(maxsize=1)
def images(size: int) -> Split:
    """CIFAR-10 with images averaged over squares of pixels to this size."""
    return cifar10().smaller(size)


def _error(network: AllConvolutional, data: tuple[Tensor, Tensor], n_images: int) -> float:
    """The classification error on the first images, in percent."""
    inputs, labels = data
    return 100.0 * (1.0 - accuracy(network, (inputs[:n_images], labels[:n_images])))


_SIDE = 32  # of CIFAR's images
PRINTED = {NEAR_IDENTITY: "6.38 (Ours)", BATCH: "6.43 (ResNet)"}
"""Errors on CIFAR-10 in the paper's table 2, for comparison."""


def table_1(run: Run) -> Outcome:
    """The layers of the paper's network as built here. Theory: hardt_ma2017:thm-2.2"""
    counts: Sequence[int] = run.sizes["n_classes"]
    run.announce(len(counts))
    found = [run.piece(f"classes={n}", architecture, n_classes=n, seed=run.seeds[0]) for n in counts]
    first = found[0]
    millions = first["n_trained"] / 1e6
    values = {
        "convolutions": first["n_convolutions"],
        "trained parameters, millions": millions,
        "trained parameters, millions, against section 4.1": millions,
        "side of the averaged images": first["side"],
        "trained parameters that depend on the number of classes": max(one["n_trained"] for one in found)
        - min(one["n_trained"] for one in found),
        "initial network, largest Lipschitz bound of a branch": max(first["bounds"]),
    }
    columns = [
        "variable dimensions",
        "initial stride",
        "description",
        "convolutions",
        "trained parameters",
        "output side",
    ]
    return Outcome(values=values, table=Table(columns, first["rows"]))


def architecture(*, n_classes: int, seed: int) -> dict[str, Any]:
    """The paper's network: the rows of its table 1, its counts, and the bounds of its branches at initialization."""
    network = all_convolutional(n_classes=n_classes, seed=seed)
    x = network.stem(torch.zeros(1, network.stem.in_channels, _SIDE, _SIDE))
    rows = [[_dimensions(network.stem), network.stem.stride[0], "1 standard conv", *_counts(network.stem), x.shape[-1]]]
    for _, stage in itertools.groupby(network.residual_blocks, key=lambda block: block.conv2.out_channels):
        blocks = list(stage)
        chain, first, description = nn.Sequential(*blocks), blocks[0].conv1, f"{len(blocks)} residual blocks"
        x = chain(x)
        rows.append([_dimensions(first), first.stride[0], description, *_counts(chain), x.shape[-1]])
    side = x.shape[-1]
    n_out, n_in = network.head.weight.shape
    rows.append(["-", "-", f"{side} x {side} global average pool", 0, 0, 1])
    rows.append([f"{n_in} x {n_out}", "-", "random projection (not trained)", *_counts(network.head), 1])
    counts = {"n_convolutions": network.n_convolutions, "n_trained": network.n_trained}
    return {"rows": rows, "side": side, **counts, "bounds": branch_bounds(network)}


def table_2(run: Run) -> Outcome:
    """Errors of the network and its variants for every seed. Theory: hardt_ma2017:thm-2.2"""
    run.announce(len(VARIANTS) * len(run.seeds))
    found: dict[str, list[Mapping[str, Any]]] = {variant: [] for variant in VARIANTS}
    for seed in run.seeds:  # so that an interrupted run has complete comparisons
        for variant, made in found.items():
            made.append(
                run.piece(f"{variant} seed={seed}", train, variant=variant, seed=seed, training=run.sizes["training"])
            )
    errors = {variant: [float(one["test"]) for one in made] for variant, made in found.items()}
    finite = {variant: statistics.fmean(one["is_finite"] for one in made) for variant, made in found.items()}
    values = {f"{variant}, test error %": statistics.fmean(numbers) for variant, numbers in errors.items()}
    values |= {f"{variant}, fraction of finite trainings": fraction for variant, fraction in finite.items()}
    pairs = ((NEAR_IDENTITY, BATCH), (STANDARD, NEAR_IDENTITY), (SLOW, NEAR_IDENTITY), (HEAD, NEAR_IDENTITY))
    for more, less in pairs:
        gaps = [a - b for a, b in zip(errors[more], errors[less], strict=True)]
        values[f"{more} minus {less}, points"] = statistics.fmean(gaps)
        values[f"{more} minus {less}, half its 95 % interval"] = Spread.of(gaps).half
    columns = ["network", "test error, %", "half its 95 % interval", "training error, %", "each seed",
               "finite trainings", "the paper's, %"]  # fmt: skip
    rows: list[list[float | str]] = [
        [
            variant, statistics.fmean(errors[variant]), Spread.of(errors[variant]).half,
            statistics.fmean(float(one["train"]) for one in made), ", ".join(f"{e:.1f}" for e in errors[variant]),
            f"{round(finite[variant] * len(made))} of {len(made)}", PRINTED.get(variant, "-"),
        ]
        for variant, made in found.items()
    ]  # fmt: skip
    curves = [_mean_curve(variant, made) for variant, made in found.items()]
    panel = Panel("", "Test error during training, mean over seeds", "step", "error, %")
    return Outcome(values=values, curves=curves, panels=(panel,), table=Table(columns, rows))


def fig_1(run: Run) -> Outcome:
    """Errors of the network against the steps of one longer training. Theory: hardt_ma2017:thm-2.2"""
    run.announce(1)
    seed = run.seeds[0]
    made = run.piece(f"seed={seed}", train, variant=NEAR_IDENTITY, seed=seed, training=run.sizes["training"])
    history = made["history"]
    steps = [one["step"] for one in history]
    drops = [fraction * steps[-1] for fraction in DROPS]
    before = [one["test"] for one in history if one["step"] <= drops[0]][-1]
    last = history[-1]["test"]
    values = {
        "test error at the end, %": made["test"],
        "training error at the end, %": made["train"],
        "test error at the first drop of the learning rate minus at the end, points": before - last,
        "test error at the end minus the lowest during training, points": last - min(one["test"] for one in history),
        "test error minus training error at the end, points": made["test"] - made["train"],
    }
    curves = [
        Curve(f"{part} images", steps, [one[name] for one in history], kind="line+points")
        for part, name in (("training", "train"), ("test", "test"))
    ]
    lowest, highest = (bound(one[name] for one in history for name in ("train", "test")) for bound in (min, max))
    curves += [Curve("learning rate drops tenfold", [d for d in drops for _ in range(3)],
                     [lowest, highest, math.nan] * len(drops), style="law")]  # fmt: skip
    panel = Panel("", "Errors of the all-convolutional network on CIFAR-10", "step", "error, %")
    return Outcome(values=values, curves=curves, panels=(panel,))


def _mean_curve(variant: str, made: Sequence[Mapping[str, Any]]) -> Curve:
    """The mean test error at the steps that all seeds reached."""
    histories = list(zip(*(one["history"] for one in made), strict=False))
    steps = [of_seeds[0]["step"] for of_seeds in histories]
    return Curve(variant, steps, [statistics.fmean(one["test"] for one in of_seeds) for of_seeds in histories],
                 kind="line+points")  # fmt: skip


def _dimensions(layer: nn.Conv2d) -> str:
    return " x ".join(str(n) for n in (*layer.kernel_size, layer.in_channels, layer.out_channels))


def _counts(part: nn.Module) -> tuple[int, int]:
    """The numbers of convolutions and of trained parameters."""
    n_convolutions = sum(isinstance(layer, nn.Conv2d) for layer in part.modules())
    return n_convolutions, sum(p.numel() for p in part.parameters())
