"""Frozen random networks that learn by their norms alone, beside head only and training everything.

ResNets for CIFAR-10 of growing width and growing depth keep the weights that torch drew for them; scales start uniform
on [0, 1], as Frankle, Schwab and Morcos start them, and on one size at one as well. All ways share a schedule but for
the rate, which is higher where only norms learn. Their observation is that norms-only training switches about a third
of the features off: we count the scales below 0.01 and below 0.05 in magnitude, over all norms of a network. Each
run is kept as a record.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onlynorm.bench.arguments import listener, need_counts
from onlynorm.bench.frozen_results import (
    FULL,
    HEAD,
    NORMS,
    NORMS_FROM_ONES,
    WAYS,
    FrozenBench,
    FrozenRun,
    FrozenSizes,
    write_histogram,
)
from onlynorm.bench.kept import Rows, Say, fields_of
from onlynorm.data import Split, cifar10, seeded
from onlynorm.errors import ValueRangeError
from onlynorm.models import cifar_resnet
from onlynorm.modules.validate import need_integer, need_items, need_path, need_sizes
from onlynorm.papers.timing import warm_up_training
from onlynorm.reconstruction.partial import tensors_digest
from onlynorm.tuning import Schedule, accuracy, find_norms, fit, init_gamma, only_norms

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
    bench.figure = str(write_histogram(bench, folder))
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
