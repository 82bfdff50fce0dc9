"""A trained ResNet-20 rebuilt from eight kinds of frozen features, each compared with it on real images.

A row is rebuilt with a ReLU between the frozen layers, calibrated on training images, and compared with the trained
network on test images: in float64 and in float32 through its blocks, and collapsed. Finished rows are cached, and so
are the finished layers of an unfinished row: a killed run resumes.

A second table compares the papers' method, a dense float32 solve and LBFGS, with ours on layers of the same network.
A third one has the cost of networks like ResNet-50 with id_cond features, at several widths.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from onlynorm.data import Split, cifar10
from onlynorm.evidence.bench.competitors import OURS, PAPERS, SOLVERS
from onlynorm.evidence.bench.duels import ROW_COLUMNS, race_layers
from onlynorm.evidence.bench.networks import make_target
from onlynorm.evidence.bench.scaling import SCALING_COLUMNS, scaling_goals, scaling_rows
from onlynorm.evidence.cache import OnMessage
from onlynorm.evidence.harness import Goal, Session, Sizes, setting
from onlynorm.evidence.race import Race, RaceResult
from onlynorm.files import save
from onlynorm.reconstruction import Comparison, Wide, collapse, compare, reconstruct
from onlynorm.storage import digest, tensors_digest

RECIPES: dict[str, dict[str, Any]] = {
    "he_normal": {"excess": 1.25}, "he_uniform": {"excess": 1.25}, "orthogonal": {"excess": 1.25},
    "sparse_he_normal": {"excess": 1.25, "density": 0.5}, "id_cond": {}, "ortho_cond": {}, "fast_ortho_cond": {},
    "kron_normal": {"excess": 1.25},
}  # fmt: skip
"""Kinds of features and their excess; structured ones other than kron_normal have none."""
PAPERS_LAYERS = ("layer1.0.conv1", "layer2.0.conv1")
"""2,304 and 4,608 equations, for which the papers' dense matrix fits into memory."""
PAPERS_EXCESSES = (1.0, 1.25)
ERROR, AGREEMENT, SOLVING = 1e-8, 0.998, 1200.0
"""Goals of a row: relative logit error in float64, fraction of equal predictions in float32, seconds of solving."""


@dataclass(frozen=True)
class ReconstructSizes(Sizes):
    """Kinds of features; numbers of images for calibration, and for tests in float64, in float32, and collapsed.

    A quick run has a narrow ResNet-8 with random weights and takes a minute or two.
    """

    features: tuple[str, ...] = setting(
        tuple(RECIPES), choices=RECIPES, help=f"{', '.join(RECIPES)}; may be repeated.", is_key=False
    )
    images: int = setting(500, quick=16, help="Test images in float32.")
    calibration: int = setting(64, quick=16, help="Training images for the ranges.")
    exact: int = setting(64, quick=8)
    collapsed: int = setting(5000, quick=100)

    def within(self, split: Split) -> ReconstructSizes:
        """The sizes, limited by the size of the data."""
        n_test = len(split.test_inputs)
        most = {"calibration": len(split.train_inputs), "exact": n_test, "images": n_test, "collapsed": n_test}
        return replace(self, **{name: min(getattr(self, name), n) for name, n in most.items()})


@dataclass(frozen=True)
class RebuiltRow:
    """One kind of features. Errors and agreements are relative to the trained network on test images."""

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
        """Whether the row meets its goal."""
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


race = Race(
    "reconstruct", "A trained ResNet-20 from eight kinds of frozen features.", ReconstructSizes, is_stored=True,
    width=140, columns={
        "rows": {
            "features": "features", "solving (s)": "solve_seconds:.3g", "residual": "residual:.1e",
            "float64 error": "error:.1e", "outside %": "outside*100:.2f", "float32 %": "agreement*100:.2f",
            "collapsed %": "collapsed_agreement*100:.2f", "accuracy %": "accuracy*100:.2f",
            "target %": "target_accuracy*100:.2f", "file": "file_size:bytes", "seconds": "seconds:.0f", "note": "note",
        },
        "papers": ROW_COLUMNS,
        "scaling": SCALING_COLUMNS,
    },
)  # fmt: skip


@race.measure
def measure(sizes: ReconstructSizes, session: Session) -> Iterator[tuple[str, Any]]:
    """Rebuilds the network once per kind of features, then computes the other two tables."""
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
    methods = {method: SOLVERS[method] for method in (OURS, PAPERS)}
    yield "papers", race_layers(target, PAPERS_LAYERS, PAPERS_EXCESSES, methods, status=session.status)
    yield "scaling", scaling_rows(session.folder, session.status, quick=sizes.quick)


@race.goals
def goals(result: RaceResult[ReconstructSizes]) -> Iterator[Goal]:
    """A goal for every kind of features, and cost proportional to the number of weights."""
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
