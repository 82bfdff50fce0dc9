"""A trained ResNet-20 rebuilt from six kinds of frozen features, each compared with it on real images.

A row is rebuilt with a ReLU between the frozen layers, calibrated on training images, and compared with the trained
network on test images: in float64 and in float32 through its blocks, and collapsed. Finished rows are cached, and so
are the finished layers of an unfinished row: a killed run resumes.

A second table has the papers' own method, a dense float32 solve and LBFGS, on layers of the same network beside ours.
A third one shows what whole networks of the shape of ResNet-50 cost with id_cond features, at several widths.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onlynorm.data import Split, cifar10
from onlynorm.evidence.bench.competitors import OURS, PAPERS, SOLVERS
from onlynorm.evidence.bench.duels import ROW_COLUMNS, Row, race_solvers
from onlynorm.evidence.bench.networks import bottleneck_network, make_target
from onlynorm.evidence.bench.systems import System
from onlynorm.evidence.cache import OnMessage
from onlynorm.evidence.harness import Goal, Session, Sizes, setting
from onlynorm.evidence.race import Race, RaceResult
from onlynorm.evidence.timing import once, one_thread
from onlynorm.files import load, save
from onlynorm.reconstruction import Comparison, Wide, collapse, compare, plan, reconstruct, verify
from onlynorm.seeds import own_randomness
from onlynorm.storage import digest, tensors_digest

RECIPES: dict[str, dict[str, Any]] = {
    "he_normal": {"excess": 1.25}, "he_uniform": {"excess": 1.25}, "orthogonal": {"excess": 1.25},
    "sparse_he_normal": {"excess": 1.25, "density": 0.5}, "id_cond": {}, "ortho_cond": {}, "fast_ortho_cond": {},
}  # fmt: skip
"""Kinds of features and how many; structured ones fix their own number."""
PAPERS_LAYERS = ("layer1.0.conv1", "layer2.0.conv1")
"""2,304 and 4,608 equations, which the papers' dense matrix can hold."""
PAPERS_EXCESSES = (1.0, 1.25)
ERROR, AGREEMENT, SOLVING = 1e-8, 0.998, 1200.0
"""Goals of a row: relative logit error in float64, share of equal predictions in float32, seconds of solving."""
SCALING_WIDTHS, QUICK_WIDTHS = (16, 32, 64), (4, 8)
"""Channels of the first stage; 64 make the 25 million weights of ResNet-50."""
LINEAR, STORED = 1.5, 2.05
"""Goals of the third table: growth of seconds and bytes per weight with the width, numbers of a file per weight."""


@dataclass(frozen=True)
class ReconstructSizes(Sizes):
    """Kinds of features; how many images calibrate, and how many test: in float64, in float32, and collapsed.

    A quick run takes a narrow ResNet-8 with random weights: it shows that all works, in a minute or two.
    """

    features: tuple[str, ...] = setting(
        tuple(RECIPES), choices=RECIPES, help=f"{', '.join(RECIPES)}; may be repeated.", is_key=False
    )
    images: int = setting(500, quick=16, help="Test images in float32.")
    calibration: int = setting(64, quick=16, help="Training images for the ranges.")
    exact: int = setting(64, quick=8)
    collapsed: int = setting(5000, quick=100)

    def within(self, split: Split) -> ReconstructSizes:
        """The sizes, none larger than the data."""
        n_test = len(split.test_inputs)
        most = {"calibration": len(split.train_inputs), "exact": n_test, "images": n_test, "collapsed": n_test}
        return replace(self, **{name: min(getattr(self, name), n) for name, n in most.items()})


@dataclass(frozen=True)
class RebuiltRow:
    """One kind of features. Errors and agreements are against the trained network on test images."""

    features: str
    solve_seconds: float
    residual: float
    error: float
    outside: float
    agreement: float
    collapsed_agreement: float
    accuracy: float
    target_accuracy: float
    file_size: int
    seconds: float
    n_exact: int
    n_images: int
    n_collapsed: int
    note: str = ""

    @property
    def goal(self) -> Goal:
        """Whether the row is what was promised."""
        return Goal(
            f"{self.features}: logit error {ERROR:.0e} on {self.n_exact} images, same prediction on "
            f"{100 * AGREEMENT:.1f} % of {self.n_images} images and, collapsed, of {self.n_collapsed}, "
            f"{SOLVING / 60:.0f} minutes of solving",
            f"error {self.error:.1e}, {100 * self.agreement:.2f} %, {100 * self.collapsed_agreement:.2f} %, "
            f"{self.solve_seconds:.0f} s",
            self.error <= ERROR
            and min(self.agreement, self.collapsed_agreement) >= AGREEMENT
            and self.solve_seconds <= SOLVING,
        )


@dataclass(frozen=True)
class ScalingRow:
    """What a network of bottleneck blocks of one width takes, from plan to verify, with id_cond features."""

    width: int
    n_weights: int
    plan_seconds: float
    seconds: float
    save_seconds: float
    load_seconds: float
    verify_seconds: float
    memory: int
    stored: float
    error: float


race = Race(
    "reconstruct", "A trained ResNet-20 from six kinds of frozen features.", ReconstructSizes, is_stored=True,
    width=140, columns={
        "rows": {
            "features": "features", "solving (s)": "solve_seconds:.3g", "residual": "residual:.1e",
            "float64 error": "error:.1e", "outside %": "outside*100:.2f", "float32 %": "agreement*100:.2f",
            "collapsed %": "collapsed_agreement*100:.2f", "accuracy %": "accuracy*100:.2f",
            "target %": "target_accuracy*100:.2f", "file": "file_size:bytes", "seconds": "seconds:.0f", "note": "note",
        },
        "papers": ROW_COLUMNS,
        "scaling": {
            "width": "width", "weights": "n_weights:,", "plan (s)": "plan_seconds:short",
            "reconstruct (s)": "seconds:short", "save (s)": "save_seconds:short", "load (s)": "load_seconds:short",
            "verify (s)": "verify_seconds:short",
            "us / weight": lambda row: f"{1e6 * row.seconds / row.n_weights:.2f}", "peak memory": "memory:bytes",
            "float64 / weight": lambda row: f"{row.memory / 8 / row.n_weights:.2f}",
            "stored / weight": "stored:.3f", "float32 error": "error:.1e",
        },
    },
)  # fmt: skip


@race.measure
def measure(sizes: ReconstructSizes, session: Session) -> Iterator[tuple[str, RebuiltRow | list[Row] | ScalingRow]]:
    """Rebuilds the network once per kind of features, then the other two tables."""
    target, split = make_target(quick=sizes.quick), cifar10()
    sizes = sizes.within(split)
    for name in sizes.features:
        made_of = {
            "features": name, "recipe": RECIPES[name], "sizes": sizes.key(), "row": list(RebuiltRow.__annotations__),
            "target": tensors_digest(target.state_dict()),
            "data": tensors_digest({"train": split.train_inputs[: sizes.calibration], "test": split.test_inputs}),
        }  # fmt: skip
        stem = session.folder / f"{name}-{digest(made_of)[:16]}"
        make = functools.partial(rebuild, name, target, split, sizes, stem, session.status)
        row, note = session.get_or_compute(RebuiltRow, name, made_of, make)
        session.log(f"{name}: {row.goal.measured}")
        yield "rows", replace(row, note=note or row.note)
    yield "papers", papers_rows(target, session.status)
    with one_thread():
        for width in QUICK_WIDTHS if sizes.quick else SCALING_WIDTHS:
            yield "scaling", scaling_row(width, session.folder, session.status)


@race.goals
def goals(result: RaceResult[ReconstructSizes]) -> Iterator[Goal]:
    """What is promised of every kind of features, and cost in proportion to the number of weights.

    From the second width on: small networks cost Python's own time.
    """
    yield from (row.goal for row in result.parts["rows"])
    for first, last in list(itertools.pairwise(result.parts["scaling"]))[-1:]:
        before, after, n_more = f"at {first.width}", f"at width {last.width}", last.n_weights / first.n_weights
        slower, larger = last.seconds / first.seconds / n_more, last.memory / first.memory / n_more
        aim = f"id_cond: seconds and bytes per weight {after} at most {LINEAR:g} times those {before}"
        yield Goal(aim, f"{slower:.2f} and {larger:.2f} times", max(slower, larger) <= LINEAR)
        aim = f"id_cond: a file of at most {STORED} numbers per weight {after}"
        yield Goal(aim, f"{last.stored:.3f}", last.stored <= STORED)


def rebuild(
    name: str, target: nn.Module, split: Split, sizes: ReconstructSizes, stem: Path, status: OnMessage
) -> RebuiltRow:
    """One kind of features: rebuilt, compared three times, and saved as `stem`.safetensors."""
    start = time.perf_counter()
    partial = stem.with_name(f"{stem.name}.partial")
    is_resumed = partial.exists()
    exact_target = copy.deepcopy(target).double()
    result = reconstruct(
        exact_target,
        split.train_inputs[: sizes.calibration].double(),
        Wide(features=name, activation=nn.ReLU(), **RECIPES[name]),
        partial=partial,
        on_step=lambda layer, n, residual: status(f"{name}: {layer}, residual {residual:.1e} after {n} iterations"),
    )

    def judge(what: str, pair: tuple[nn.Module, nn.Module], n: int, batch_size: int) -> Comparison:
        return compare(
            *pair, split.test_inputs[:n], labels=split.test_labels[:n], batch_size=batch_size,
            progress=lambda done, total, _: status(f"{name}: {what}, {done} of {total} images"),
        )  # fmt: skip

    exact = judge("float64", (exact_target, result.network), sizes.exact, 16)
    collapsed = judge("collapsed", (target, collapse(result.network).float()), sizes.collapsed, 250)
    single = judge("float32", (target, copy.deepcopy(result.network).float()), sizes.images, 50)
    path = stem.with_name(f"{stem.name}.safetensors")
    save(result, path)
    return RebuiltRow(
        name, sum(layer.seconds for layer in result.layers), max(layer.residual for layer in result.layers),
        exact.check.relative_error, single.check.outside, single.check.agreement, collapsed.check.agreement,
        collapsed.network_accuracy or 0.0, collapsed.target_accuracy or 0.0, path.stat().st_size,
        time.perf_counter() - start, sizes.exact, sizes.images, sizes.collapsed, "resumed" if is_resumed else "",
    )  # fmt: skip


def papers_rows(target: nn.Module, status: OnMessage) -> list[Row]:
    """Ours and the papers' method on a few layers of the network, with he_normal features."""
    rows = []
    for name, excess in itertools.product(PAPERS_LAYERS, PAPERS_EXCESSES):
        status(f"{name} at excess {excess}: the papers' method beside ours")
        weight = target.get_parameter(f"{name}.weight").detach().double()
        left, right, _ = System("convolution", name, tuple(weight.shape), excess).make()
        with one_thread():
            solvers = {method: SOLVERS[method] for method in (OURS, PAPERS)}
            rows += race_solvers(name, excess, (left, right, weight.flatten(1)), solvers, repeats=3)
    return rows


def scaling_row(width: int, out: Path, status: OnMessage, *, size: int = 64, n_samples: int = 8) -> ScalingRow:
    """One width: a ReLU between the frozen layers, images of `size` x `size`."""
    status(f"id_cond at width {width}: plan, reconstruct, save, load, verify")
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"bottleneck-{width}.safetensors"
    with own_randomness(0):
        target, inputs = bottleneck_network(width), torch.randn(n_samples, 3, size, size)
        wide = Wide(features="id_cond", activation=nn.ReLU())
        reconstruct(nn.Sequential(nn.Conv2d(3, 4, 3)).eval(), inputs, wide)  # libraries are loaded
    planned = once(lambda: plan(target, inputs, wide))
    built = once(lambda: reconstruct(target, inputs, wide), metered=True)
    saved = once(lambda: save(built.result, path))
    loaded = once(lambda: load(path, like=bottleneck_network(width)))
    checked = once(lambda: verify(target, loaded.result, inputs))
    n_weights, n_stored = sum(math.prod(layer.shape) for layer in built.result.layers), path.stat().st_size / 4
    path.unlink()
    return ScalingRow(
        width, n_weights, planned.seconds, built.seconds, saved.seconds, loaded.seconds, checked.seconds, built.memory,
        n_stored / n_weights, checked.result.relative_error,
    )  # fmt: skip
