"""The deep networks of the paper that do not learn, after every repair, trained for the same number of steps.

Fully connected networks are trained on Fashion-MNIST by plain SGD with a constant learning rate and batches of 32. Each
method has its own learning rate for each network. The depth-32 ReLU network is repaired by all methods, the others by
the default settings, and compared with batch norms and with no repair. Accuracies are measured in evaluation mode;
batch norms have the statistics of 2,000 training images, since running statistics lag.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from onlynorm.data import fashion_mnist
from onlynorm.evidence.harness import Goal, Sizes, number, setting
from onlynorm.evidence.sweep import Results, Sweep, TrainingRun, mean, percent
from onlynorm.evidence.timing import warm_up_training
from onlynorm.evidence.training import plain_sgd
from onlynorm.evidence.validation import TRIAL_SEED, first_test_images, training_subset, validation_subset
from onlynorm.models import ACTIVATIONS, mlp
from onlynorm.rank import diagnose, repair
from onlynorm.tuning import accuracy

NOTHING, NORMS, OURS = "as it is", "with batch norms", "repair, by default settings"
METHODS: dict[str, dict[str, Any] | None] = {
    NOTHING: None,
    NORMS: {"method": "batch_norm"},
    OURS: {},
    "rank ascent with a watch": {"method": "rank"},
    "rank ascent, all layers at once": {"method": "whole"},
    "rank ascent as in the paper, 25 steps": {"method": "paper", "n_steps": 25},
    "rank ascent as in the paper, 75 steps": {"method": "paper", "n_steps": 75},
    "LSUV": {"method": "lsuv"},
    "orthogonal": {"method": "orthogonal"},
    "skips with scaled branches": {"method": "residual"},
    "near the identity": {"method": "near_identity"},
}
"""Arguments of `repair` for each method."""
BRIEF = (NOTHING, NORMS, OURS)
"""Methods for all networks except the main one."""
MAIN = (32, "relu")
"""The paper's network that does not learn."""
NETWORKS = (MAIN, (8, "relu"), (16, "relu"), (64, "relu"), (32, "tanh"), (32, "gelu"))
_N_CALIBRATION, _N_LAST, _N_CLASSES = 2000, 100, 10


@dataclass(frozen=True)
class RepairSizes(Sizes):
    """The width, the number of steps, and the numbers of images for repair and test."""

    seeds: int = setting(5, quick=3, high=TRIAL_SEED, help="Networks of each kind.", is_key=False)
    steps: int = setting(1000, quick=120, help="Steps of training.")
    trial_steps: int = setting(250, quick=60)
    width: int = 128
    batch_size: int = 32
    n_repair: int = 256
    n_validation: int = setting(2000, quick=500)
    n_test: int = setting(5000, quick=1000)


class RepairCase(NamedTuple):
    """A network and the method of repair."""

    depth: int
    activation: str
    method: str


@dataclass(frozen=True)
class RepairOutcome:
    """One network repaired and trained. Ranks and the gradient ratio are measured before training."""

    train_accuracy: float
    accuracy: float
    loss: float
    ranks: tuple[float, ...]
    ratio: float
    chosen: str
    seconds: float


def cases(sizes: RepairSizes) -> list[RepairCase]:
    """The main network with all methods, the others with `BRIEF`; a quick run has two networks."""
    networks = NETWORKS[: 2 if sizes.quick else None]
    return [RepairCase(*network, m) for network in networks for m in (METHODS if network == MAIN else BRIEF)]


split = functools.cache(fashion_mnist)
sweep = Sweep(
    "repair", "Deep networks on Fashion-MNIST after every repair, against batch norms.", RepairSizes, cases=cases,
    lrs=(0.003, 0.01, 0.03, 0.1), width=160, made_of=lambda _case, _sizes: {"data": split()},
    columns={
        "chosen": lambda _, case, runs: ", ".join(dict.fromkeys(runs["chosen"])) if case.method == OURS else "",
        "training accuracy %": percent("train_accuracy"), "test accuracy %": percent("accuracy"),
        "rank first / middle / last": lambda _, __, runs: (
            " / ".join(f"{statistics.fmean(ranks):.3g}" for ranks in zip(*runs["ranks"], strict=True))
        ),
        "gradient first / last": lambda _, __, runs: number(float(runs["ratio"].median()), ".2g"),
        "seconds to repair": mean("seconds", ".1f"),
    },
)  # fmt: skip


@sweep.trial
def validation_accuracy(case: RepairCase, run: TrainingRun, sizes: RepairSizes) -> float:
    """The accuracy on validation images after a short training; chance if it diverges."""
    made, _ = repaired(case, run.seed, sizes)
    train(made, run, sizes, n_steps=sizes.trial_steps)
    images, labels = validation_subset(split(), sizes.n_validation)
    return accuracy(made, (images.flatten(1), labels))


@sweep.measure
def repair_and_train(case: RepairCase, run: TrainingRun, sizes: RepairSizes) -> RepairOutcome:
    """One network, repaired, trained and tested."""
    warm_up_training()
    start = time.process_time()
    made, chosen = repaired(case, run.seed, sizes)
    seconds = time.process_time() - start
    found = diagnose(made, *training_images(run.seed, sizes.n_repair, sizes))
    layers = found.weighted_layers
    ranks = tuple(layers[place].r for place in (0, (len(layers) - 1) // 2, len(layers) - 2))
    losses = train(made, run, sizes, n_steps=sizes.steps)
    images, labels = first_test_images(split(), sizes.n_test)
    return RepairOutcome(
        accuracy(made, training_images(run.seed, sizes.n_test, sizes)), accuracy(made, (images.flatten(1), labels)),
        statistics.fmean(losses[-_N_LAST:]), ranks, found.gradient_ratio, chosen, seconds,
    )  # fmt: skip


def repaired(case: RepairCase, seed: int, sizes: RepairSizes) -> tuple[nn.Module, str]:
    """The network as torch initializes it, repaired, and the method that `repair` selected."""
    widths = (split().train_inputs[0].numel(), *[sizes.width] * case.depth, _N_CLASSES)
    made: nn.Module = mlp(widths, activation=ACTIVATIONS[case.activation], seed=seed)
    options = METHODS[case.method]
    if options is None:
        return made, ""
    images, labels = training_images(seed, sizes.n_repair, sizes)
    result = repair(made, images, targets=labels, seed=seed, in_place=True, **options)
    return result.model, result.method


def train(made: nn.Module, run: TrainingRun, sizes: RepairSizes, *, n_steps: int) -> list[float]:
    """The losses of `n_steps` steps; the network is then in evaluation mode. Stops if the training diverges."""
    chosen = training_images(run.seed, n_steps * sizes.batch_size, sizes)
    losses = plain_sgd(made, chosen, batch_size=sizes.batch_size, lr=run.lr, seed=run.seed)
    if losses[-1] == math.inf:
        for parameter in made.parameters():
            nn.init.zeros_(parameter)  # its outputs are constant
    update_bn([chosen[0][:_N_CALIBRATION]], made)
    return losses


def training_images(seed: int, n: int, sizes: RepairSizes) -> tuple[Tensor, Tensor]:
    """The first n training images, outside the validation images, in the order of the seed, and their labels."""
    images, labels = training_subset(split(), n, n_validation=sizes.n_validation, seed=seed)
    return images.flatten(1), labels


@sweep.goals
def goals(results: Results[RepairSizes, RepairCase]) -> Iterator[Goal]:
    """Significantly more accurate than batch norms on the paper's network, and not significantly less on others."""
    for depth, activation in results.axis("depth", "activation"):
        ours, theirs = (RepairCase(depth, activation, method) for method in (OURS, NORMS))
        columns = {"training": "train_accuracy", "test": "accuracy"}
        leads = {part: results.gap(ours, theirs, column) for part, column in columns.items()}
        if leads["test"].n < 2:
            continue
        sign, better = (-1.0, "is at least as good as") if (depth, activation) == MAIN else (1.0, "is not worse than")
        aim = f"depth {depth}, {activation}: after {results.sizes.steps} steps the default repair {better} batch norms"
        measured = ", ".join(f"{lead.percent()} points ({part})" for part, lead in leads.items())
        yield Goal(aim, f"ahead by {measured}", all(lead.mean + sign * lead.half >= 0.0 for lead in leads.values()))
