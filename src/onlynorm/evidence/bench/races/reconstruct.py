"""The showcase: a trained ResNet-20 rebuilt from six kinds of frozen features, each judged on real images.

A row is rebuilt with a ReLU between the frozen layers, calibrated on training images, and compared with the trained
network on test images: in float64 and in float32 through its blocks, and collapsed. Finished rows are kept as records,
and so are the finished layers of an unfinished row: a killed run resumes.

A second table has the papers' own method, a dense float32 solve and LBFGS, on layers of the same network beside ours.
A third one shows what whole networks of the shape of ResNet-50 cost with id_cond features, at several widths.
"""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onlynorm.data import Split, cifar10, find_data
from onlynorm.display import Table
from onlynorm.evidence.bench.competitors import OURS, PAPERS, SOLVERS
from onlynorm.evidence.bench.races.solve import Row, race_solvers
from onlynorm.evidence.cache import Cache
from onlynorm.evidence.harness import Benchmark, Goal, Voice, number, setting
from onlynorm.evidence.harness import Sizes as BaseSizes
from onlynorm.evidence.records import parse
from onlynorm.evidence.timing import one_thread
from onlynorm.features import draw
from onlynorm.memory import MemoryMeter, readable, release_free_memory
from onlynorm.models import CifarResNet, load_weights
from onlynorm.reconstruction import collapse, load, plan, reconstruct, save, verify
from onlynorm.reconstruction.verify import Comparison, compare
from onlynorm.seeds import own_randomness
from onlynorm.storage import digest, tensors_digest

RECIPES: dict[str, dict[str, Any]] = {
    "he_normal": {"excess": 1.25},
    "he_uniform": {"excess": 1.25},
    "orthogonal": {"excess": 1.25},
    "sparse_he_normal": {"excess": 1.25, "density": 0.5},
    "id_cond": {},
    "ortho_cond": {},
}
"""Kinds of features and how many; structured ones fix their own number."""
PAPERS_LAYERS = ("layer1.0.conv1", "layer2.0.conv1")
"""2,304 and 4,608 equations, which the papers' dense matrix can hold."""
PAPERS_EXCESSES = (1.0, 1.25)
ERROR, AGREEMENT, SOLVING = 1e-8, 0.998, 1200.0
"""Goals of a row: relative logit error in float64, share of equal predictions in float32, seconds of solving."""
COLUMNS = (
    "features", "solving (s)", "residual", "float64 error", "outside %", "float32 %", "collapsed %", "accuracy %",
    "target %", "file", "seconds", "note",
)  # fmt: skip
PAPERS_COLUMNS = (
    "system", "excess", "method", "seconds", "times ours", "extra memory", "residual", "iterations", "note",
)  # fmt: skip
SCALING_COLUMNS = (
    "width", "weights", "plan (s)", "reconstruct (s)", "save (s)", "load (s)", "verify (s)", "us / weight",
    "peak memory", "float64 / weight", "stored / weight", "float32 error",
)  # fmt: skip
SCALING_WIDTHS, QUICK_WIDTHS = (16, 32, 64), (4, 8)
"""Channels of the first stage; 64 make the 25 million weights of ResNet-50."""
LINEAR, STORED = 1.5, 2.05
"""Goals of the third table: growth of seconds and bytes per weight with the width, numbers of a file per weight."""
WIDTH = 140
"""Columns of a terminal that the table needs."""


@dataclass(frozen=True)
class Sizes(BaseSizes):
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

    def within(self, split: Split) -> Sizes:
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


@dataclass
class ReconstructBench:
    """The tables of one run."""

    rows: list[RebuiltRow] = field(default_factory=list)
    papers: list[Row] = field(default_factory=list)
    scaling: list[ScalingRow] = field(default_factory=list)

    @property
    def goals(self) -> list[Goal]:
        """What every row promised, and whether it was kept."""
        return [*(row.goal for row in self.rows), *_scaling_goals(self.scaling)]

    def tables(self) -> list[Table]:
        """The rebuilt networks, the papers' method beside ours on a few layers, and cost against size."""
        tables = [Table(COLUMNS, [_cells(row) for row in self.rows], WIDTH), _papers_table(self.papers)]
        scaling = Table(SCALING_COLUMNS, [_scaling_cells(row) for row in self.scaling], WIDTH)
        return [*tables, scaling] if self.scaling else tables

    def as_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        return {
            "rows": [asdict(row) for row in self.rows],
            "papers": [asdict(row) for row in self.papers],
            "scaling": [asdict(row) for row in self.scaling],
            "goals": [asdict(goal) for goal in self.goals],
        }


def _cells(row: RebuiltRow) -> tuple[str, ...]:
    shares = (row.outside, row.agreement, row.collapsed_agreement, row.accuracy, row.target_accuracy)
    return (
        row.features, f"{row.solve_seconds:.3g}", f"{row.residual:.1e}", f"{row.error:.1e}",
        *(f"{100 * share:.2f}" for share in shares), readable(row.file_size),
        f"{row.seconds:.0f}", row.note,
    )  # fmt: skip


Say = Callable[[str], None]


class ReconstructRace(Benchmark[Sizes]):
    """Rebuilds the network once per kind of features; rows that a run with the same sizes finished are read again."""

    is_stored = True

    def work(self, sizes: Sizes, folder: Path, force: bool, voice: Voice) -> ReconstructBench:
        """Both tables."""
        target, split = make_target(quick=sizes.quick), cifar10()
        bench = ReconstructBench()
        for name in sizes.features:
            bench.rows.append(_row(name, target, split, sizes.within(split), folder, force, voice.say))
            voice.tell(f"{name}: {bench.rows[-1].goal.measured}")
        bench.papers = papers_rows(target, voice.say)
        with one_thread():
            for width in QUICK_WIDTHS if sizes.quick else SCALING_WIDTHS:
                bench.scaling.append(scaling_row(width, folder, voice.say))
        return bench


showcase = ReconstructRace("reconstruct", "A trained ResNet-20 from six kinds of frozen features.", Sizes)


def make_target(*, quick: bool) -> nn.Module:
    """The trained ResNet-20 of the data folder, or a narrow one with random weights."""
    if not quick:
        return load_weights(CifarResNet(20), find_data("weights/resnet20_cifar10.safetensors")).eval()
    with own_randomness(0):
        return CifarResNet(8, width=4).eval()


def _row(name: str, target: nn.Module, split: Split, sizes: Sizes, out: Path, force: bool, say: Say) -> RebuiltRow:
    """The row of an earlier run with the same network, data, recipe and sizes, or a new one."""
    made_of = {
        "features": name, "recipe": RECIPES[name], "sizes": sizes.key(), "row": list(RebuiltRow.__annotations__),
        "target": tensors_digest(target.state_dict()),
        "data": tensors_digest({"train": split.train_inputs[: sizes.calibration], "test": split.test_inputs}),
    }  # fmt: skip
    stem = out / f"{name}-{digest(made_of)[:16]}"
    cache = Cache(out, modules=[__name__], force=force, say=say)

    def read(stored: object) -> RebuiltRow:
        return parse(RebuiltRow, stored, what="a row", cure="It is made again.")

    piece = cache.get_or_compute(
        name, made_of, lambda: asdict(measure_row(name, target, split, sizes, stem, say)), check=read
    )
    row = read(piece.result)
    return replace(row, note=piece.note or row.note)


def measure_row(name: str, target: nn.Module, split: Split, sizes: Sizes, stem: Path, say: Say) -> RebuiltRow:
    """One kind of features: rebuilt, compared three times, and saved as `stem`.safetensors."""
    start = time.perf_counter()
    partial = stem.with_name(f"{stem.name}.partial")
    is_resumed = partial.exists()
    exact_target = copy.deepcopy(target).double()
    result = reconstruct(
        exact_target,
        inputs=split.train_inputs[: sizes.calibration].double(),
        activation=nn.ReLU(),
        features=name,
        partial=partial,
        step=lambda layer, steps, residual: say(f"{name}: {layer}, residual {residual:.1e} after {steps} iterations"),
        **RECIPES[name],
    )

    def judge(what: str, pair: tuple[nn.Module, nn.Module], n: int, batch_size: int) -> Comparison:
        return compare(
            *pair, inputs=split.test_inputs[:n], labels=split.test_labels[:n], batch_size=batch_size,
            step=lambda done, total: say(f"{name}: {what}, {done} of {total} images"),
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


def papers_rows(target: nn.Module, say: Say) -> list[Row]:
    """Ours and the papers' method on a few layers of the network, with he_normal features."""
    rows = []
    for name in PAPERS_LAYERS:
        weight = target.get_submodule(name).weight
        assert isinstance(weight, Tensor)
        for excess in PAPERS_EXCESSES:
            say(f"{name} at excess {excess}: the papers' method beside ours")
            features = draw("he_normal", tuple(weight.shape), excess=excess, seed=0, layer=name)
            matrix = features.as_matrix(weight.detach().double())
            system = (features.left(), features.right(), matrix)
            with one_thread():
                rows += race_solvers(name, excess, system, {way: SOLVERS[way] for way in (OURS, PAPERS)}, repeats=3)
    return rows


class Bottleneck(nn.Module):
    """Three convolutions, the middle one 3 x 3, around which the input is added."""

    def __init__(self, n_in: int, width: int, stride: int) -> None:
        super().__init__()
        n_out = 4 * width
        layers = [(n_in, width, 1, 1), (width, width, 3, stride), (width, n_out, 1, 1)]
        parts = [_normed(*layer) for layer in layers]
        self.branch = nn.Sequential(parts[0], nn.ReLU(), parts[1], nn.ReLU(), parts[2])
        self.skip = nn.Identity() if n_in == n_out and stride == 1 else _normed(n_in, n_out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return (self.branch(x) + self.skip(x)).relu()


def _normed(n_in: int, n_out: int, kernel: int, stride: int) -> nn.Sequential:
    layer = nn.Conv2d(n_in, n_out, kernel, stride=stride, padding=kernel // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(n_out))


def bottleneck_network(width: int) -> nn.Sequential:
    """A network of the shape of ResNet-50 with random weights, of this width in its first stage."""
    stages, n_in = [], width
    for stage, n_blocks in enumerate((3, 4, 6, 3)):
        for block in range(n_blocks):
            stages.append(Bottleneck(n_in, width * 2**stage, 2 if stage and not block else 1))
            n_in = 4 * width * 2**stage
    stem = [_normed(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    with_head = [*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n_in, 1000)]
    return nn.Sequential(*stem, *with_head).eval()


def scaling_row(width: int, out: Path, say: Say, *, size: int = 64, n_samples: int = 8) -> ScalingRow:
    """One width: a ReLU between the frozen layers, images of `size` x `size`."""
    say(f"id_cond at width {width}: plan, reconstruct, save, load, verify")
    with own_randomness(0):
        target, inputs = bottleneck_network(width), torch.randn(n_samples, 3, size, size)
        choices: dict[str, Any] = {"features": "id_cond", "activation": nn.ReLU()}
        reconstruct(nn.Sequential(nn.Conv2d(3, 4, 3)).eval(), inputs=inputs, **choices)  # libraries are loaded
    times = [time.perf_counter()]
    plan(target, inputs=inputs, **choices)
    times.append(time.perf_counter())
    release_free_memory()
    with MemoryMeter() as meter:
        result = reconstruct(target, inputs=inputs, **choices)
    times.append(time.perf_counter())
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"bottleneck-{width}.safetensors"
    save(result, path)
    times.append(time.perf_counter())
    loaded = load(path, into=bottleneck_network(width))
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


def _scaling_goals(rows: Sequence[ScalingRow]) -> list[Goal]:
    """Cost in proportion to the number of weights, from the second width on: small networks cost Python's own time."""
    if len(rows) < 2:
        return []
    first, last = rows[-2:]
    growth = [
        (getattr(last, name) / last.n_weights) / (getattr(first, name) / first.n_weights)
        for name in ("seconds", "memory")
    ]
    return [
        Goal(
            f"id_cond: seconds and bytes per weight at width {last.width} at most {LINEAR:g} times those at "
            f"{first.width}",
            f"{growth[0]:.2f} and {growth[1]:.2f} times", max(growth) <= LINEAR,
        ),
        Goal(
            f"id_cond: a file of at most {STORED} numbers per weight at width {last.width}", f"{last.stored:.3f}",
            last.stored <= STORED,
        ),
    ]  # fmt: skip


def _scaling_cells(row: ScalingRow) -> tuple[str, ...]:
    seconds = (row.plan_seconds, row.seconds, row.save_seconds, row.load_seconds, row.verify_seconds)
    return (
        str(row.width), f"{row.n_weights:,}", *(f"{value:.2g}" if value < 10 else f"{value:.0f}" for value in seconds),
        f"{1e6 * row.seconds / row.n_weights:.2f}", readable(row.memory), f"{row.memory / 8 / row.n_weights:.2f}",
        f"{row.stored:.3f}", f"{row.error:.1e}",
    )  # fmt: skip


def _papers_table(rows: Sequence[Row]) -> Table:
    """Rows of solvers as text."""
    return Table(
        PAPERS_COLUMNS,
        [
            (
                row.system, f"{row.excess:g}", row.method, number(row.seconds, ".3g"), number(row.ratio, ".3g"),
                readable(row.memory), number(row.residual, ".1e"), str(row.iterations or "-"), row.note,
            )
            for row in rows
        ],
    )  # fmt: skip
