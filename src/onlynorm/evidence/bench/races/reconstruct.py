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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onlynorm.data import Split, cifar10
from onlynorm.evidence.bench.competitors import OURS, PAPERS, SOLVERS
from onlynorm.evidence.bench.networks import bottleneck_network, make_target
from onlynorm.evidence.bench.races.solve import Row, race_solvers
from onlynorm.evidence.harness import Column, Goal, Race, RaceResult, Session, Sizes, setting
from onlynorm.evidence.timing import one_thread
from onlynorm.features import draw
from onlynorm.files import load, save
from onlynorm.memory import MemoryMeter, release_free_memory
from onlynorm.reconstruction import Comparison, Wide, collapse, compare, plan, reconstruct, verify
from onlynorm.seeds import own_randomness
from onlynorm.storage import digest, tensors_digest

RECIPES: dict[str, dict[str, Any]] = {
    "he_normal": {"excess": 1.25},
    "he_uniform": {"excess": 1.25},
    "orthogonal": {"excess": 1.25},
    "sparse_he_normal": {"excess": 1.25, "density": 0.5},
    "id_cond": {},
    "ortho_cond": {},
    "fast_ortho_cond": {},
}
"""Kinds of features and how many; structured ones fix their own number."""
PAPERS_LAYERS = ("layer1.0.conv1", "layer2.0.conv1")
"""2,304 and 4,608 equations, which the papers' dense matrix can hold."""
PAPERS_EXCESSES = (1.0, 1.25)
ERROR, AGREEMENT, SOLVING = 1e-8, 0.998, 1200.0
"""Goals of a row: relative logit error in float64, share of equal predictions in float32, seconds of solving."""
OnMessage = Callable[[str], None]
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
        return replace(
            self, calibration=min(self.calibration, len(split.train_inputs)), exact=min(self.exact, n_test),
            images=min(self.images, n_test), collapsed=min(self.collapsed, n_test),
        )  # fmt: skip


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


def _percent(name: str) -> Column:
    return lambda row: f"{100 * getattr(row, name):.2f}"


def _short(name: str) -> Column:
    return lambda row: f"{getattr(row, name):.{'2g' if getattr(row, name) < 10 else '0f'}}"


race = Race(
    "reconstruct", "A trained ResNet-20 from six kinds of frozen features.", ReconstructSizes, is_stored=True,
    width=140, columns={
        "rows": {
            "features": "features", "solving (s)": "solve_seconds:.3g", "residual": "residual:.1e",
            "float64 error": "error:.1e", "outside %": _percent("outside"), "float32 %": _percent("agreement"),
            "collapsed %": _percent("collapsed_agreement"), "accuracy %": _percent("accuracy"),
            "target %": _percent("target_accuracy"), "file": "file_size:bytes", "seconds": "seconds:.0f",
            "note": "note",
        },
        "papers": {
            "system": "system", "excess": "excess:g", "method": "method", "seconds": "seconds:.3g",
            "times ours": "ratio:.3g", "extra memory": "memory:bytes", "residual": "residual:.1e",
            "iterations": lambda row: str(row.iterations or "-"), "note": "note",
        },
        "scaling": {
            "width": "width", "weights": "n_weights:,", "plan (s)": _short("plan_seconds"),
            "reconstruct (s)": _short("seconds"), "save (s)": _short("save_seconds"),
            "load (s)": _short("load_seconds"), "verify (s)": _short("verify_seconds"),
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
    """What is promised of every kind of features, and cost in proportion to the number of weights."""
    yield from (row.goal for row in result.parts["rows"])
    yield from scaling_goals(result.parts["scaling"])


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
        on_step=lambda layer, steps, residual: status(
            f"{name}: {layer}, residual {residual:.1e} after {steps} iterations"
        ),
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
    for name in PAPERS_LAYERS:
        weight = target.get_submodule(name).weight
        assert isinstance(weight, Tensor)
        for excess in PAPERS_EXCESSES:
            status(f"{name} at excess {excess}: the papers' method beside ours")
            features = draw("he_normal", tuple(weight.shape), excess=excess, seed=0, layer=name)
            matrix = features.as_matrix(weight.detach().double())
            system = (features.left(), features.right(), matrix)
            with one_thread():
                rows += race_solvers(name, excess, system, {m: SOLVERS[m] for m in (OURS, PAPERS)}, repeats=3)
    return rows


def scaling_row(width: int, out: Path, status: OnMessage, *, size: int = 64, n_samples: int = 8) -> ScalingRow:
    """One width: a ReLU between the frozen layers, images of `size` x `size`."""
    status(f"id_cond at width {width}: plan, reconstruct, save, load, verify")
    with own_randomness(0):
        target, inputs = bottleneck_network(width), torch.randn(n_samples, 3, size, size)
        wide = Wide(features="id_cond", activation=nn.ReLU())
        reconstruct(nn.Sequential(nn.Conv2d(3, 4, 3)).eval(), inputs, wide)  # libraries are loaded
    times = [time.perf_counter()]
    plan(target, inputs, wide)
    times.append(time.perf_counter())
    release_free_memory()
    with MemoryMeter() as meter:
        result = reconstruct(target, inputs, wide)
    times.append(time.perf_counter())
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"bottleneck-{width}.safetensors"
    save(result, path)
    times.append(time.perf_counter())
    loaded = load(path, like=bottleneck_network(width))
    times.append(time.perf_counter())
    check = verify(target, loaded, inputs)
    times.append(time.perf_counter())
    n_stored = path.stat().st_size / 4
    path.unlink()
    n_weights = sum(math.prod(layer.shape) for layer in result.layers)
    seconds = [after - before for before, after in itertools.pairwise(times)]
    return ScalingRow(
        width, n_weights, seconds[0], seconds[1], seconds[2], seconds[3], seconds[4], meter.peak, n_stored / n_weights,
        check.relative_error,
    )  # fmt: skip


def scaling_goals(rows: Sequence[ScalingRow]) -> Iterator[Goal]:
    """Cost in proportion to the number of weights, from the second width on: small networks cost Python's own time."""
    if len(rows) < 2:
        return
    first, last = rows[-2:]
    growth = [
        (getattr(last, name) / last.n_weights) / (getattr(first, name) / first.n_weights)
        for name in ("seconds", "memory")
    ]
    yield Goal(
        f"id_cond: seconds and bytes per weight at width {last.width} at most {LINEAR:g} times those at {first.width}",
        f"{growth[0]:.2f} and {growth[1]:.2f} times", max(growth) <= LINEAR,
    )  # fmt: skip
    yield Goal(
        f"id_cond: a file of at most {STORED} numbers per weight at width {last.width}", f"{last.stored:.3f}",
        last.stored <= STORED,
    )  # fmt: skip
