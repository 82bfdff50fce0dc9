"""A trained ResNet-20 adapted to corrupted images in six ways: what each wins back, and for how many bytes.

Seeds change which training images are drawn, their noise and their order; the test images and their noise stay. Ways
that train have one learning rate each, the one of a grid with the best mean accuracy over all corruptions on images
put aside for this. The interval is over seeds: what another choice of test images would change is not in it.
Each run and each try of a rate is kept as a record, so a killed benchmark goes on where it stopped.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onlynorm.bench.adapt_results import CLEAN, AdaptBench, AdaptRun, AdaptSizes, Trial
from onlynorm.bench.adapt_ways import NOTHING, TRAINED, WAYS, adapt, keep, reload
from onlynorm.bench.arguments import listener, need_counts, need_names
from onlynorm.bench.kept import Rows, Say, fields_of
from onlynorm.bench.reconstruct import make_target
from onlynorm.data import CIFAR_MEAN, CIFAR_STD, CORRUPTIONS, Split, cifar10, corrupt, seeded
from onlynorm.errors import TrainingError
from onlynorm.modules.validate import need_integer, need_number, need_path
from onlynorm.papers.timing import warm_up_training
from onlynorm.reconstruction.partial import tensors_digest
from onlynorm.tuning import Schedule, accuracy

RATES = (0.003, 0.01, 0.03, 0.1, 0.3)
"""Learning rates that are tried, the same for every way."""
KIND = "onlynorm-bench-adapt"
_PUT_ASIDE = 2**32
"""Seed of the images put aside and of the runs that try rates: not one a user would ask for."""
_PROBE = 100


def bench_adapt(
    *,
    corruptions: Sequence[str] = CORRUPTIONS,
    n_seeds: int = 5,
    severity: float = 3.0,
    sizes: AdaptSizes | None = None,
    quick: bool = False,
    out: Path | str = "onlynorm-out/bench",
    force: bool = False,
    progress: Say | None = None,
    on_row: Callable[[AdaptRun], None] | None = None,
) -> AdaptBench:
    """Adapts the network in every way to every corruption; what an earlier run with the same sizes did is read again.

    `force` makes it anew. `quick` takes few images and a short training: it shows that all works, in a few minutes.
    """
    corruptions = need_names("corruption", corruptions, CORRUPTIONS)
    n_seeds = need_integer("n_seeds", n_seeds, low=1, high=_PUT_ASIDE, cure="Take 5.")
    severity = need_number("severity", severity, low=0.0, cure="Take 1 for mild and 5 for strong corruptions.")
    say, on_row = listener("progress", progress), listener("on_row", on_row)
    sizes = need_counts(sizes or (AdaptSizes.quick() if quick else AdaptSizes()), AdaptSizes)
    rows = Rows(need_path("out", out) / "adapt", kind=KIND, module=__name__, force=force, say=say)
    bench, lab = AdaptBench(sizes=sizes), _Lab(make_base(), cifar10(), sizes, severity, rows)
    tries = [(images, way, rate) for images in corruptions for way in TRAINED for rate in RATES]
    for place, (images, way, rate) in enumerate(tries):
        say(f"rate {place + 1} of {len(tries)}: {images}, {way}, {rate:g}")
        bench.trials.append(lab.trial(images, way, rate))
    plan = [(CLEAN, NOTHING, 0), *((images, NOTHING, 0) for images in corruptions)]
    plan += [(images, way, seed) for seed in range(n_seeds) for images in corruptions for way in WAYS[1:]]
    for place, (images, way, seed) in enumerate(plan):
        say(f"run {place + 1} of {len(plan)}: {images}, {way}, seed {seed}")
        bench.runs.append(lab.run(images, way, seed, bench.rate(way)))
        if on_row is not None:
            on_row(bench.runs[-1])
    return bench


def make_base() -> nn.Module:
    """The trained ResNet-20 of the data folder."""
    return make_target(quick=False)


class _Lab:
    """The network, the images and the records that all runs share."""

    def __init__(self, base: nn.Module, split: Split, sizes: AdaptSizes, severity: float, rows: Rows) -> None:
        self.base, self.split, self.sizes, self.severity, self.rows = base, split, sizes, severity, rows
        order = torch.randperm(len(split.train_inputs), generator=seeded(_PUT_ASIDE))
        self.put_aside, self.pool = order[: sizes.n_put_aside], order[sizes.n_put_aside :]
        self.made_of = {
            "base": tensors_digest(base.state_dict()), "data": tensors_digest(vars(split)), "sizes": asdict(sizes),
            "severity": severity,
        }  # fmt: skip

    def trial(self, images: str, way: str, rate: float) -> Trial:
        """One rate, tried on the images put aside; a training that diverges has no accuracy."""
        name = f"{images}, {way}, rate {rate:g}"

        def measure() -> dict[str, Any]:
            try:
                network = self._adapted(images, way, _PUT_ASIDE, rate)
            except TrainingError:
                return {"accuracy": 0.0}
            judged = self._corrupted(self.split.train_inputs[self.put_aside], images, seed=1)
            return {"accuracy": accuracy(network, (judged, self.split.train_labels[self.put_aside]))}

        made_of = {**self.made_of, "images": images, "way": way, "rate": rate}
        fields = fields_of(Trial, "images", "way", "rate")
        return Trial(images, way, rate, **self.rows.find(name, made_of, measure, fields=fields))

    def run(self, images: str, way: str, seed: int, rate: float) -> AdaptRun:
        """One network adapted, judged, kept in a file and loaded again."""

        def measure() -> dict[str, Any]:
            warm_up_training()
            start = time.perf_counter()
            network = self._adapted(images, way, seed, rate)
            seconds = time.perf_counter() - start
            n = self.sizes.n_test
            judged = self._corrupted(self.split.test_inputs[:n], images, seed=0)
            with tempfile.TemporaryDirectory() as folder:
                size = keep(network, way, folder=Path(folder))
                again = reload(self.base, way, folder=Path(folder))
            return {
                "accuracy": accuracy(again, (judged, self.split.test_labels[:n])), "file_size": size,
                "is_exact": torch.equal(_outputs(network, judged), _outputs(again, judged)), "seconds": seconds,
            }  # fmt: skip

        made_of = {**self.made_of, "images": images, "way": way, "rate": rate, "seed": seed}
        fields = fields_of(AdaptRun, "images", "way", "seed", "rate")
        row = self.rows.find(f"{images}, {way}, seed {seed}", made_of, measure, fields=fields)
        return AdaptRun(images, way, seed, rate, **row)

    def _adapted(self, images: str, way: str, seed: int, rate: float) -> nn.Module:
        """The base, adapted to images drawn by the seed."""
        order = torch.randperm(len(self.pool), generator=seeded(seed))
        chosen = self.pool[order[: self.sizes.n_train]]
        inputs = self._corrupted(self.split.train_inputs[chosen], images, seed=seed + 2)
        schedule = Schedule(
            epochs=self.sizes.epochs, batch_size=self.sizes.batch_size, lr=0.0 if math.isnan(rate) else rate, seed=seed
        )
        return adapt(self.base, way, data=(inputs, self.split.train_labels[chosen]), schedule=schedule)

    def _corrupted(self, inputs: Tensor, images: str, *, seed: int) -> Tensor:
        if images == CLEAN:
            return inputs
        return corrupt(inputs, images, severity=self.severity, seed=seed, mean=CIFAR_MEAN, std=CIFAR_STD)


@torch.no_grad()
def _outputs(network: nn.Module, inputs: Tensor) -> Tensor:
    device = next(network.parameters()).device
    return network.eval()(inputs[:_PROBE].to(device)).cpu()
