"""The paper's deep networks that do not learn, repaired in every way and trained for the same number of steps.

Fully connected networks on Fashion-MNIST, plain SGD at a constant rate, batches of 32. Each way has its own rate for
each network: the one of a common grid with the best accuracy on images put aside, tried with a seed that is not judged.
The depth-32 ReLU network is repaired in all ways; other depths and activations by default settings, beside batch norms
and none. Accuracies are taken in evaluation mode, batch norms with statistics of 2,000 training images rather than
running ones, which lag behind. Each run and each try of a rate is kept as a record.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from onlynorm.bench.arguments import listener, need_counts
from onlynorm.bench.kept import Rows, Say, fields_of
from onlynorm.bench.repair_results import MAIN, NORMS, NOTHING, OURS, RateTrial, RepairBench, RepairRun, RepairSizes
from onlynorm.data import Split, fashion_mnist, seeded
from onlynorm.errors import TrainingError, ValueRangeError
from onlynorm.models import ACTIVATIONS, mlp
from onlynorm.modules.validate import need_choice, need_integer, need_items, need_path
from onlynorm.papers.timing import warm_up_training
from onlynorm.rank.depth_evidence import Lesson, gradient_ratio, look
from onlynorm.rank.repair import repair
from onlynorm.rank.visits import find_route
from onlynorm.reconstruction.partial import tensors_digest
from onlynorm.tuning import Schedule, accuracy, fit

WAYS: dict[str, dict[str, Any] | None] = {
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
"""What `repair` is told in each way."""
BRIEF = (NOTHING, NORMS, OURS)
NETWORKS = (MAIN, (8, "relu"), (16, "relu"), (64, "relu"), (32, "tanh"), (32, "gelu"))
RATES = (0.003, 0.01, 0.03, 0.1)
"""Learning rates that are tried, the same for every way."""
TRIAL_SEED = 100
"""Seed of the networks on which rates are chosen."""
KIND = "onlynorm-bench-repair"
_N_CALIBRATION, _N_LAST, _N_CLASSES = 2000, 100, 10
_NETWORK = "Pass pairs of depth and activation, as in (32, 'relu')."


def bench_repair(
    *,
    networks: Sequence[tuple[int, str]] | None = None,
    n_seeds: int | None = None,
    sizes: RepairSizes | None = None,
    quick: bool = False,
    out: Path | str = "onlynorm-out/bench",
    force: bool = False,
    progress: Say | None = None,
    on_row: Callable[[RepairRun], None] | None = None,
) -> RepairBench:
    """Repairs and trains every network (depth, activation); what an earlier run with the same sizes did is read again.

    `force` makes it anew. `quick` trains two networks for a tenth of the steps, with three seeds.
    """
    wanted = (3 if quick else 5) if n_seeds is None else n_seeds
    n_seeds = need_integer("n_seeds", wanted, low=1, high=TRIAL_SEED, cure="Rates are tried with seeds beyond.")
    given = need_items("networks", networks or NETWORKS[: 2 if quick else None], cure=_NETWORK)
    networks = [_need_network(network) for network in given]
    say, on_row = listener("progress", progress), listener("on_row", on_row)
    sizes = need_counts(sizes or (RepairSizes.quick() if quick else RepairSizes()), RepairSizes)
    rows = Rows(need_path("out", out) / "repair", kind=KIND, module=__name__, force=force, say=say)
    bench, lab = RepairBench(sizes=sizes), _Lab(fashion_mnist(), sizes, rows)
    for network in networks:
        for way in WAYS if network == MAIN else BRIEF:
            for rate in RATES:
                say(f"depth {network[0]}, {network[1]}, {way}: trying rate {rate:g}")
                bench.trials.append(lab.trial(network, way, rate))
            for seed in range(n_seeds):
                say(f"depth {network[0]}, {network[1]}, {way}: seed {seed}")
                bench.runs.append(lab.run(network, way, seed, bench.rate(network, way)))
                if on_row is not None:
                    on_row(bench.runs[-1])
    return bench


def _need_network(network: Any) -> tuple[int, str]:
    parts = need_items("networks", network, cure=_NETWORK)
    if len(parts) != 2:
        raise ValueRangeError(f"a network needs a depth and an activation; got {network!r}. {_NETWORK}")
    return need_integer("depth", parts[0], low=1, cure=_NETWORK), need_choice("activation", parts[1], ACTIVATIONS)


def make_network(network: tuple[int, str], *, n_inputs: int, width: int, seed: int) -> nn.Module:
    """A fully connected network with so many hidden layers, as torch draws it."""
    depth, activation = network
    return mlp((n_inputs, *[width] * depth, _N_CLASSES), activation=ACTIVATIONS[activation], seed=seed)


class _Lab:
    """The images and the records that all runs share."""

    def __init__(self, split: Split, sizes: RepairSizes, rows: Rows) -> None:
        self.sizes, self.rows = sizes, rows
        self.train = split.train_inputs.flatten(1), split.train_labels
        n = sizes.n_judged
        self.test = split.test_inputs[:n].flatten(1), split.test_labels[:n]
        order = torch.randperm(len(split.train_inputs), generator=seeded(TRIAL_SEED))
        self.put_aside, self.pool = order[: sizes.n_put_aside], order[sizes.n_put_aside :]
        if sizes.n_steps * sizes.batch_size > len(self.pool):
            raise ValueRangeError(
                f"{sizes.n_steps} steps of {sizes.batch_size} need as many images that differ; got {len(self.pool)}. "
                "Take fewer steps."
            )
        self.made_of = {"data": tensors_digest(vars(split)), "sizes": asdict(sizes)}

    def trial(self, network: tuple[int, str], way: str, rate: float) -> RateTrial:
        """One rate, judged by the images put aside; a training that diverges does as well as guessing."""

        def measure() -> dict[str, Any]:
            made, _ = self._repaired(network, way, TRIAL_SEED)
            self._fit(made, TRIAL_SEED, rate, self.sizes.n_trial_steps)
            return {"accuracy": accuracy(made, self._pick(self.put_aside))}

        name = f"{network[0]}, {network[1]}, {way}, rate {rate:g}"
        made_of = {**self.made_of, "network": network, "way": way, "rate": rate}
        fields = fields_of(RateTrial, "depth", "activation", "way", "rate")
        return RateTrial(*network, way, rate, **self.rows.find(name, made_of, measure, fields=fields))

    def run(self, network: tuple[int, str], way: str, seed: int, rate: float) -> RepairRun:
        """One network, repaired, trained and judged."""

        def measure() -> dict[str, Any]:
            warm_up_training()
            start = time.process_time()
            made, method = self._repaired(network, way, seed)
            seconds = time.process_time() - start
            images, labels = self._lesson(seed, self.sizes.n_repair)
            states = look(find_route(made, (images,)), Lesson(labels))
            ranks = [states[place].r for place in (0, (len(states) - 1) // 2, len(states) - 2)]
            losses = self._fit(made, seed, rate, self.sizes.n_steps)
            return {
                "train_accuracy": accuracy(made, self._lesson(seed, self.sizes.n_judged)),
                "test_accuracy": accuracy(made, self.test), "loss": statistics.fmean(losses[-_N_LAST:]),
                "ranks": ranks, "ratio": gradient_ratio(states), "method": method, "seconds": seconds,
            }  # fmt: skip

        made_of = {**self.made_of, "network": network, "way": way, "rate": rate, "seed": seed}
        fields = fields_of(RepairRun, "depth", "activation", "way", "seed", "rate")
        row = self.rows.find(f"{network[0]}, {network[1]}, {way}, seed {seed}", made_of, measure, fields=fields)
        return RepairRun(*network, way, seed, rate, **{**row, "ranks": tuple(row["ranks"])})

    def _repaired(self, network: tuple[int, str], way: str, seed: int) -> tuple[nn.Module, str]:
        made = make_network(network, n_inputs=self.train[0].shape[1], width=self.sizes.width, seed=seed)
        options = WAYS[way]
        if options is None:
            return made, ""
        images, labels = self._lesson(seed, self.sizes.n_repair)
        result = repair(made, images, targets=labels, seed=seed, in_place=True, **options)
        return result.model, result.method

    def _fit(self, made: nn.Module, seed: int, rate: float, n_steps: int) -> list[float]:
        """The losses of so many steps; afterwards the network is ready to be judged. A training that diverges ends."""
        schedule = Schedule(
            epochs=1, batch_size=self.sizes.batch_size, lr=rate, momentum=0.0, warmup=0.0, drops=(), seed=seed
        )
        losses: list[float] = []
        lesson = self._lesson(seed, n_steps * self.sizes.batch_size)
        try:
            fit(made, lesson, schedule=schedule, step=lambda _, __, loss: losses.append(loss), accelerator="cpu")
        except TrainingError:
            for parameter in made.parameters():
                nn.init.zeros_(parameter)  # it answers the same to everything
            losses.append(float("inf"))
        update_bn([lesson[0][:_N_CALIBRATION]], made)
        return losses

    def _lesson(self, seed: int, n: int) -> tuple[Tensor, Tensor]:
        """The first n of the training images in the order of the seed."""
        return self._pick(self.pool[torch.randperm(len(self.pool), generator=seeded(seed))[:n]])

    def _pick(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        return self.train[0][chosen], self.train[1][chosen]
