"""The paper's deep networks that do not learn, repaired in every way and trained for the same number of steps.

Fully connected networks on Fashion-MNIST, plain SGD at a constant rate, batches of 32. Each way has its own rate for
each network: the one of a common grid with the best accuracy on images put aside, tried with a seed that is not judged.
The depth-32 ReLU network is repaired in all ways; other depths and activations by default settings, beside batch norms
and none. Accuracies are taken in evaluation mode, batch norms with statistics of 2,000 training images rather than
running ones, which lag behind. Each run and each try of a rate is kept as a record.

What training after every repair measured: every run, the rates tried, tables and goals.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from onlynorm.data import Split, fashion_mnist
from onlynorm.errors import TrainingError, ValueRangeError
from onlynorm.evidence.arguments import listener, need_counts
from onlynorm.evidence.cache import Rows, Say, fields_of, note_of
from onlynorm.evidence.goals import Goal, Table, number
from onlynorm.evidence.spread import Spread
from onlynorm.evidence.timing import warm_up_training
from onlynorm.models import ACTIVATIONS, mlp
from onlynorm.rank import diagnose, repair
from onlynorm.seeds import seeded
from onlynorm.storage import tensors_digest
from onlynorm.tuning import Schedule, accuracy, fit
from onlynorm.validate import need_choice, need_integer, need_items, need_path

NOTHING, NORMS, OURS = "as it is", "batch norms put in", "repair, by default settings"
MAIN = (32, "relu")
"""The paper's network that does not learn."""
COLUMNS = (
    "depth", "activation", "repair", "training accuracy %", "test accuracy %", "rank first / middle / last",
    "gradient first / last", "rate", "seeds", "seconds to repair", "note",
)  # fmt: skip


@dataclass(frozen=True)
class RepairSizes:
    """How wide networks are, how long they are trained, and by how many images they are repaired and judged."""

    width: int = 128
    n_steps: int = 1000
    n_trial_steps: int = 250
    batch_size: int = 32
    n_repair: int = 256
    n_put_aside: int = 2000
    n_judged: int = 5000

    @classmethod
    def quick(cls) -> RepairSizes:
        """A short training."""
        return cls(n_steps=120, n_trial_steps=60, n_put_aside=500, n_judged=1000)


@dataclass(frozen=True)
class RepairRun:
    """One network repaired and trained. Ranks and the gradient ratio are those before training."""

    depth: int
    activation: str
    way: str
    seed: int
    rate: float
    train_accuracy: float
    test_accuracy: float
    loss: float
    ranks: tuple[float, float, float]
    ratio: float
    method: str
    seconds: float
    note: str = ""


@dataclass(frozen=True)
class RateTrial:
    """One rate tried for one way with a seed that is not judged: the accuracy on images put aside."""

    depth: int
    activation: str
    way: str
    rate: float
    accuracy: float
    note: str = ""


@dataclass
class RepairBench:
    """All runs, and the trials that chose their rates."""

    runs: list[RepairRun] = field(default_factory=list)
    trials: list[RateTrial] = field(default_factory=list)
    sizes: RepairSizes = field(default_factory=RepairSizes)

    @property
    def networks(self) -> list[tuple[int, str]]:
        """(depth, activation) of the networks that were trained."""
        return list(dict.fromkeys((run.depth, run.activation) for run in self.runs))

    def ways(self, network: tuple[int, str]) -> list[str]:
        """The ways in which a network was repaired."""
        return list(dict.fromkeys(run.way for run in self.runs if (run.depth, run.activation) == network))

    def find(self, network: tuple[int, str], way: str) -> list[RepairRun]:
        """The runs of one way of repairing one network."""
        return [run for run in self.runs if (run.depth, run.activation, run.way) == (*network, way)]

    def rate(self, network: tuple[int, str], way: str) -> float:
        """The rate that did best on the images put aside; the lower one of two that did equally well."""
        tried = [one for one in self.trials if (one.depth, one.activation, one.way) == (*network, way)]
        return max(tried, key=lambda one: (one.accuracy, -one.rate)).rate if tried else math.nan

    def lead(self, network: tuple[int, str], part: str) -> Spread:
        """By how much our accuracy on the part, "training" or "test", exceeds that with batch norms, seed by seed."""
        pairs = zip(self.find(network, OURS), self.find(network, NORMS), strict=True)
        return Spread.of([_accuracy(ours, part) - _accuracy(theirs, part) for ours, theirs in pairs])

    @property
    def goals(self) -> list[Goal]:
        """What the repair promises, as far as this run measured it."""
        return list(_goals(self))

    def tables(self) -> list[Table]:
        """Every way of repairing every network, and the rates that were tried."""
        rows = [self._cells(network, way) for network in self.networks for way in self.ways(network)]
        rates = sorted({trial.rate for trial in self.trials})
        tried = []
        for network in self.networks:
            for way in self.ways(network):
                found = {t.rate: t.accuracy for t in self.trials if (t.depth, t.activation, t.way) == (*network, way)}
                cells = (f"{100 * found[rate]:.1f}" if rate in found else "-" for rate in rates)
                tried.append((str(network[0]), network[1], way, *cells))
        heads = (
            "depth",
            "activation",
            "accuracy % on images put aside, at a rate of",
            *(f"{rate:g}" for rate in rates),
        )
        return [Table(COLUMNS, rows, 160), Table(heads, tried)]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        return {
            "sizes": asdict(self.sizes),
            "runs": [asdict(run) for run in self.runs],
            "trials": [asdict(trial) for trial in self.trials],
            "goals": [asdict(goal) for goal in self.goals],
        }

    def _cells(self, network: tuple[int, str], way: str) -> tuple[str, ...]:
        runs = self.find(network, way)
        methods = ", ".join(dict.fromkeys(run.method for run in runs))
        ranks = (statistics.fmean(run.ranks[place] for run in runs) for place in range(3))
        return (
            str(network[0]), network[1], f"{way}: {methods}" if way == OURS else way,
            Spread.of([run.train_accuracy for run in runs]).percent(),
            Spread.of([run.test_accuracy for run in runs]).percent(), " / ".join(f"{r:.3g}" for r in ranks),
            number(statistics.median(run.ratio for run in runs), ".2g"), number(runs[0].rate, "g"), str(len(runs)),
            f"{statistics.fmean(run.seconds for run in runs):.1f}", note_of([run.note for run in runs]),
        )  # fmt: skip


def _goals(bench: RepairBench) -> Iterator[Goal]:
    """The paper's network has to be ahead by more than chance, the others may not fall behind by more than chance."""
    for network in bench.networks:
        leads = {part: bench.lead(network, part) for part in ("training", "test")}
        if leads["test"].n < 2:
            continue
        sign = -1.0 if network == MAIN else 1.0
        aim = "is at least as good as batch norms" if network == MAIN else "is not worse than batch norms"
        yield Goal(
            f"depth {network[0]}, {network[1]}: after {bench.sizes.n_steps} steps the default repair {aim}",
            "ahead by " + ", ".join(f"{lead.percent()} points ({part})" for part, lead in leads.items()),
            all(lead.mean + sign * lead.half >= 0.0 for lead in leads.values()),
        )


def _accuracy(run: RepairRun, part: str) -> float:
    return run.train_accuracy if part == "training" else run.test_accuracy


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
            found = diagnose(made, images, labels)
            layers = found.weighted_layers
            ranks = [layers[place].r for place in (0, (len(layers) - 1) // 2, len(layers) - 2)]
            losses = self._fit(made, seed, rate, self.sizes.n_steps)
            return {
                "train_accuracy": accuracy(made, self._lesson(seed, self.sizes.n_judged)),
                "test_accuracy": accuracy(made, self.test), "loss": statistics.fmean(losses[-_N_LAST:]),
                "ranks": ranks, "ratio": found.gradient_ratio, "method": method, "seconds": seconds,
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
