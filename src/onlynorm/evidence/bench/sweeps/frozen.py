"""Frozen random networks that learn by their norms alone, beside head only and training everything.

ResNets for CIFAR-10 of growing width and growing depth keep the weights that torch drew for them; scales start uniform
on [0, 1], as Frankle, Schwab and Morcos start them, and on one size at one as well. All ways share a schedule but for
the rate, which is higher where only norms learn. Their observation is that norms-only training switches about a third
of the features off: we count the scales below 0.01 and below 0.05 in magnitude, over all norms of a network. Each
run is kept as a record.

What training frozen random networks measured: every run, tables, goals, and the histogram of the scales.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from onlynorm.data import Split, cifar10
from onlynorm.display import Curve, Figure, Panel
from onlynorm.errors import ValueRangeError
from onlynorm.evidence.arguments import listener, need_counts
from onlynorm.evidence.cache import Rows, Say, fields_of, note_of
from onlynorm.evidence.goals import Goal, Table
from onlynorm.evidence.spread import Spread
from onlynorm.evidence.timing import warm_up_training
from onlynorm.models import cifar_resnet
from onlynorm.modules import find_norms
from onlynorm.seeds import seeded
from onlynorm.storage import tensors_digest
from onlynorm.tuning import Schedule, accuracy, fit, init_gamma, only_norms
from onlynorm.validate import need_integer, need_items, need_path, need_sizes

NORMS, NORMS_FROM_ONES, HEAD, FULL = "norms only", "norms only, from ones", "head only", "everything"
WAYS = (NORMS, NORMS_FROM_ONES, HEAD, FULL)
SMALL = (0.01, 0.05)
"""Magnitudes below which a scale counts as close to zero."""
LEAST_SEEDS = 3
COLUMNS = (
    "depth", "width", "trained", "numbers", "of", "accuracy %", *(f"below {size:g}, %" for size in SMALL), "seeds",
    "seconds", "note",
)  # fmt: skip
EDGES = np.linspace(-1.0, 2.0, 61)
"""Bins of the histogram; scales beyond the ends are counted in the outermost ones."""


@dataclass(frozen=True)
class FrozenSizes:
    """Images, averaged down to `side`, and the schedule: SGD with momentum, its rate falling on a cosine.

    Norms alone take the higher of the two rates.
    """

    n_train: int = 8000
    n_test: int = 5000
    side: int = 16
    epochs: int = 8
    batch_size: int = 32
    rate: float = 0.1
    norm_rate: float = 0.5
    weight_decay: float = 1e-4

    @classmethod
    def quick(cls) -> FrozenSizes:
        """Few of each."""
        return cls(n_train=256, n_test=100, epochs=1, batch_size=64, side=8)


@dataclass(frozen=True)
class FrozenRun:
    """One network trained in one way. `is_frozen`: what was not to be trained is as it was, to the last bit."""

    depth: int
    width: int
    way: str
    seed: int
    accuracy: float
    n_trained: int
    n_total: int
    gammas: Sequence[float]
    is_frozen: bool
    seconds: float
    note: str = ""


def share_below(runs: Sequence[FrozenRun], size: float) -> Spread:
    """The share of scales below this magnitude, run by run."""
    return Spread.of([float(np.mean(np.abs(run.gammas) < size)) for run in runs])


@dataclass
class FrozenBench:
    """All runs, and where the histogram of their scales lies."""

    runs: list[FrozenRun] = field(default_factory=list)
    sizes: FrozenSizes = field(default_factory=FrozenSizes)
    figure: str = ""

    @property
    def networks(self) -> list[tuple[int, int]]:
        """(depth, width) of the networks, in the order in which they were measured."""
        return list(dict.fromkeys((run.depth, run.width) for run in self.runs))

    def find(self, network: tuple[int, int] | None, way: str) -> list[FrozenRun]:
        """The runs of one way on one network, or on all of them."""
        return [run for run in self.runs if run.way == way and network in (None, (run.depth, run.width))]

    @property
    def goals(self) -> list[Goal]:
        """What was promised, as far as this run measured it."""
        return list(_goals(self))

    def tables(self) -> list[Table]:
        """Every network in every way, and what became of the scales over all networks."""
        rows = [_cells(runs) for net in self.networks for way in WAYS if (runs := self.find(net, way))]
        zeros = [
            (way, *(share_below(runs, size).percent() for size in SMALL), f"{sum(len(r.gammas) for r in runs):,}")
            for way in WAYS
            if way != HEAD and (runs := self.find(None, way))
        ]
        heads = ("scales of all networks", *(f"below {size:g}, %" for size in SMALL), "scales")
        start = [("uniform, before training", *(f"{100 * size:.1f}" for size in SMALL), "-")]
        return [Table(COLUMNS, rows), Table(heads, [*zeros, *start])]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        return {
            "sizes": asdict(self.sizes),
            "runs": [_plain(run) for run in self.runs],
            "figure": self.figure,
            "goals": [asdict(goal) for goal in self.goals],
        }


def _plain(run: FrozenRun) -> dict[str, Any]:
    """The run with counts in place of its scales, which are in its record."""
    facts = {name: value for name, value in asdict(run).items() if name != "gammas"}
    return facts | {f"below {size:g}": share_below([run], size).mean for size in SMALL}


def _cells(runs: list[FrozenRun]) -> tuple[str, ...]:
    first = runs[0]
    shares = ["-" if first.way == HEAD else share_below(runs, size).percent() for size in SMALL]
    return (
        str(first.depth), str(first.width), first.way, f"{first.n_trained:,}", f"{first.n_total:,}",
        Spread.of([run.accuracy for run in runs]).percent(), *shares, str(len(runs)),
        f"{statistics.fmean(run.seconds for run in runs):.0f}", note_of([run.note for run in runs]),
    )  # fmt: skip


def _goals(bench: FrozenBench) -> Iterator[Goal]:
    if not bench.runs:
        return
    fewest = min(len(runs) for net in bench.networks for way in WAYS if (runs := bench.find(net, way)))
    yield Goal(
        f"every way is measured on every network with {LEAST_SEEDS} seeds or more", f"{fewest} or more",
        fewest >= LEAST_SEEDS,
    )  # fmt: skip
    n_frozen = sum(run.is_frozen for run in bench.runs)
    yield Goal(
        "what is frozen is as it was drawn, to the last bit", f"{n_frozen} of {len(bench.runs)} runs",
        n_frozen == len(bench.runs),
    )  # fmt: skip
    for what, place in (("width", 1), ("depth", 0)):
        sweep = _sweep(bench.networks, place)
        if len(sweep) < 2:
            continue
        found = [Spread.of([run.accuracy for run in bench.find(net, NORMS)]) for net in (sweep[0], sweep[-1])]
        yield Goal(
            f"{NORMS}: accuracy grows with the {what}, {sweep[0][place]} to {sweep[-1][place]}",
            f"{found[0].percent()} % to {found[1].percent()} %",
            found[1].mean > found[0].mean,
        )


def _sweep(networks: Sequence[tuple[int, int]], place: int) -> list[tuple[int, int]]:
    """The longest series of networks that differ only at this place, in rising order."""
    series: dict[int, list[tuple[int, int]]] = {}
    for network in networks:
        series.setdefault(network[1 - place], []).append(network)
    longest = max(series.values(), key=len)
    return sorted(longest)


def draw_histogram(bench: FrozenBench) -> Figure:
    """All scales after training: by width, by depth, and of all networks by method."""
    curves = []
    for place, what in ((1, "width"), (0, "depth")):
        for net in _sweep(bench.networks, place):
            curves += _histogram(bench.find(net, NORMS), f"{what} {net[place]}", what)
    for way in (NORMS, NORMS_FROM_ONES, FULL):
        curves += _histogram(bench.find(None, way), way, "all")
    x_label, y_label = "scale after training; the last bins hold all beyond", "share of scales"
    titles = {"width": f"{NORMS}, by width", "depth": f"{NORMS}, by depth", "all": "all networks"}
    return Figure(curves, [Panel(name, title, x_label, y_label) for name, title in titles.items()])


def _histogram(runs: Sequence[FrozenRun], label: str, panel: str) -> list[Curve]:
    if not runs:
        return []
    values = np.concatenate([np.asarray(run.gammas) for run in runs])
    heights, _ = np.histogram(np.clip(values, EDGES[0], EDGES[-1]), EDGES)
    return [Curve(label, EDGES.tolist(), (heights / len(values)).tolist(), "histogram", panel)]


WIDER = tuple((8, width) for width in (4, 8, 16, 32))
DEEPER = tuple((depth, 8) for depth in (8, 14, 20, 32))
NETWORKS = tuple(dict.fromkeys((*WIDER, *DEEPER)))
"""(depth, width) of the networks, by one and by the other."""
FROM_ONES = (8, 16)
"""The network whose scales start at one as well."""
KIND = "onlynorm-bench-frozen"
_QUICK = ((8, 2), (8, 4), (14, 2))
_FIRST = 1000
"""Seeds of weights start here, so that no weight is drawn with the seed of scales or of the order of the images."""


def bench_frozen(
    *,
    networks: Sequence[tuple[int, int]] | None = None,
    n_seeds: int = 3,
    sizes: FrozenSizes | None = None,
    quick: bool = False,
    out: Path | str = "onlynorm-out/bench",
    force: bool = False,
    progress: Say | None = None,
    on_row: Callable[[FrozenRun], None] | None = None,
) -> FrozenBench:
    """Trains every network (depth, width) in every way; what an earlier run with the same sizes did is read again.

    `force` makes it anew. The histogram of all scales is drawn into the folder of the records.
    """
    say, on_row = listener("progress", progress), listener("on_row", on_row)
    n_seeds = need_integer("n_seeds", n_seeds, low=1, cure="Take 3.")
    cure = f"Pass pairs of depth and width, as in {NETWORKS[0]}."
    given = need_items("networks", (_QUICK if quick else NETWORKS) if networks is None else networks, cure=cure)
    networks = [_need_pair(network, cure) for network in given]
    if not networks:
        raise ValueRangeError(f"bench_frozen needs a network; got none. {cure}")
    sizes = need_counts(sizes or (FrozenSizes.quick() if quick else FrozenSizes()), FrozenSizes)
    folder = need_path("out", out) / "frozen"
    rows, split = Rows(folder, kind=KIND, module=__name__, force=force, say=say), cifar10().smaller(sizes.side)
    made_of = {"data": tensors_digest(vars(split)), "sizes": asdict(sizes)}
    ones = FROM_ONES if FROM_ONES in networks else networks[0]
    plan = [
        (depth, width, way, seed) for seed in range(n_seeds) for depth, width in networks for way in WAYS
        if way != NORMS_FROM_ONES or (depth, width) == ones
    ]  # fmt: skip
    bench = FrozenBench(sizes=sizes)
    for place, (depth, width, way, seed) in enumerate(plan):
        name = f"ResNet-{depth}, width {width}, {way}, seed {seed}"
        told = f"run {place + 1} of {len(plan)}: {name}"
        say(told)

        def measure(depth: int = depth, width: int = width, way: str = way, seed: int = seed, told: str = told) -> Any:
            return train(
                depth, width, way=way, seed=seed, split=split, sizes=sizes,
                step=lambda now, steps, _: say(f"{told}: step {now} of {steps}"),
            )  # fmt: skip

        kept = {**made_of, "depth": depth, "width": width, "way": way, "seed": seed}
        fields = fields_of(FrozenRun, "depth", "width", "way", "seed")
        bench.runs.append(FrozenRun(depth, width, way, seed, **rows.find(name, kept, measure, fields=fields)))
        if on_row is not None:
            on_row(bench.runs[-1])
    bench.figure = str(draw_histogram(bench).write(folder, "gammas")[0])
    return bench


def _need_pair(network: Any, cure: str) -> tuple[int, int]:
    sizes = need_sizes("networks", network, cure=cure)
    if len(sizes) != 2:
        raise ValueRangeError(f"a network needs a depth and a width; got {network!r}. {cure}")
    return sizes[0], sizes[1]


def train(
    depth: int,
    width: int,
    *,
    way: str,
    seed: int,
    split: Split,
    sizes: FrozenSizes,
    step: Callable[[int, int, float], None] | None = None,
) -> dict[str, Any]:
    """What one run measured: accuracy, counts, all scales after training, and whether the rest stayed as drawn."""
    network = cifar_resnet(depth, width=width, seed=_FIRST + seed)
    prepare(network, way, seed=seed)
    frozen = {name: p.detach().clone() for name, p in network.named_parameters() if not p.requires_grad}
    chosen = torch.randperm(len(split.train_inputs), generator=seeded(seed))[: sizes.n_train]
    schedule = Schedule(
        epochs=sizes.epochs, batch_size=sizes.batch_size, weight_decay=sizes.weight_decay, augmentation="crop-flip",
        lr=sizes.norm_rate if way in (NORMS, NORMS_FROM_ONES) else sizes.rate, seed=seed,
    )  # fmt: skip
    warm_up_training()
    start = time.perf_counter()
    fit(network, (split.train_inputs[chosen], split.train_labels[chosen]), schedule=schedule, step=step)
    seconds = time.perf_counter() - start
    state = network.state_dict()
    return {
        "accuracy": accuracy(network, (split.test_inputs[: sizes.n_test], split.test_labels[: sizes.n_test])),
        "n_trained": sum(p.numel() for p in network.parameters() if p.requires_grad),
        "n_total": sum(p.numel() for p in network.parameters()),
        "gammas": gammas(network),
        "is_frozen": all(torch.equal(state[name].cpu(), value) for name, value in frozen.items()),
        "seconds": seconds,
    }


def prepare(network: nn.Module, way: str, *, seed: int) -> None:
    """Freezes what this way does not train and draws the scales. Statistics follow the batches in every way."""
    if way == HEAD:
        only_norms(network, also=("linear",), which=lambda _: False)
    elif way != FULL:
        init_gamma(only_norms(network), how="uniform" if way == NORMS else "ones", seed=seed)


def gammas(network: nn.Module) -> list[float]:
    """The scales of all norms, one after the other."""
    scales = [getattr(network.get_submodule(norm.name), norm.scale) for norm in find_norms(network).norms if norm.scale]
    return [float(value) for scale in scales for value in scale.detach().flatten()]
