"""`plan`: estimates the cost of rebuilding a network, layer by layer and in total.

Widths, memory, condition numbers, errors and seconds are predicted from shapes. A forward pass of one or two samples
measures the inputs of each layer, which determine the memory and time of calibration.
"""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray
from torch import nn

from onlynorm.cluster import fixed_threads
from onlynorm.display import Curve, Figure, Panel, Result, ShownResult, Table, View
from onlynorm.errors import MemoryLimitError, OnlynormError, visible
from onlynorm.features.distributions import STRUCTURED
from onlynorm.frozen.fast_paths import set_fast_paths
from onlynorm.memory import memory_limit, need_memory, readable
from onlynorm.modules.layers import Left, TargetLayer, find_layers
from onlynorm.modules.tree import ModuleTree, recording
from onlynorm.modules.walk import (
    Inputs,
    accepted_samples,
    as_inputs,
    cast,
    copy_network,
    counting_samples,
    need_batch,
    need_open,
    run,
)
from onlynorm.reconstruction.activation_memory import Activations, measure_activations
from onlynorm.reconstruction.constructions import find_builder
from onlynorm.reconstruction.constructions.options import Construction, Settings, Wide, to_json
from onlynorm.reconstruction.costs import ALONE, NOTHING, Costs, add_costs, slowness
from onlynorm.reconstruction.result import ENOUGH, Reconstruction, as_network
from onlynorm.validate import need_flag, need_integer

COLUMNS = (
    "layer", "equations", "features", "norms/target", "memory", "condition", "error", "seconds", "shape", "frozen",
    "operations",
)  # fmt: skip
"""Columns of the table: norms/target are parameters of each; operations are multiplications per input."""
ALLOCATOR = 1.1
"""Overhead factor of the allocator, for fragmentation and rounding of sizes."""
OVERHEAD = 300_000
"""Bytes of Python objects."""
BUFFERS = 2_000_000
"""Maximum bytes of the work buffers of matrix products."""
UNITS = ("", "k", "M", "G", "T", "P", "E")


@dataclass(frozen=True)
class PlannedLayer(Result):
    """The estimated cost of one layer.

    `n_positions` counts its outputs per channel and sample, over all calls; `n_multiplications` those of the rebuilt
    layer per input of the network. `costs` is None if no method fits into memory.
    """

    name: str
    shape: tuple[int, ...]
    n_target_parameters: int
    n_positions: int
    n_multiplications: int
    costs: Costs | None
    is_feasible: bool
    note: str = ""

    def cells(self) -> tuple[str, ...]:
        """The row of the table, formatted; see `COLUMNS`."""
        if self.costs is None:
            return (self.name, *("-",) * (len(COLUMNS) - 1))
        c = self.costs
        return (
            self.name, short(c.equations), short(c.n_features),
            f"{short(c.n_norm_parameters)}/{short(self.n_target_parameters)}", readable(c.memory),
            f"{c.condition:.3g}", f"{c.error:.0e}", f"{c.seconds:.{2 if c.seconds < 100 else 3}g}",
            "x".join(map(str, self.shape)), short(c.n_frozen), short(self.n_multiplications),
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """All values as JSON types."""
        own = {name: value for name, value in asdict(self).items() if name not in ("costs", "note")}
        costs = {} if self.costs is None else asdict(self.costs)
        costs.pop("multiplications", None)  # per position; n_multiplications has those per input
        return own | costs | {"note": self.note}


@dataclass(frozen=True)
class PeakMemory(Result):
    """Peak memory of a run in bytes, by content, and the layer at which it is reached.

    `network` is the float64 copy, `inputs` the float64 calibration batch, `activations` those alive at this point of
    the pass, `stored` the finished blocks, `layer` the memory for rebuilding the current layer.
    """

    network: int
    inputs: int
    activations: int
    stored: int
    layer: int
    place: str

    @property
    def total(self) -> int:
        """The sum."""
        return self.network + self.inputs + self.activations + self.stored + self.layer

    def parts(self) -> dict[str, int]:
        """The bytes by content."""
        return {
            "copy of the network": self.network, "inputs": self.inputs, "calibration activations": self.activations,
            "finished blocks": self.stored, f"work at {self.place}": self.layer,
        }  # fmt: skip

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {readable(size)}" for name, size in self.parts().items())
        return f"{readable(self.total)}: {sizes}"


@dataclass(frozen=True, repr=False)
class Plan(ShownResult):
    """The estimated cost of rebuilding a network: a row per layer, the total, and modules that are not rebuilt.

    `memory` is the additional peak memory of the run; `limit` is the available memory, 80 % of what was free. `cures`
    are options that need less memory, if the run does not fit. `tree` has all modules of the target with their output
    shapes and parameters, and prints as a table.
    """

    columns: ClassVar[tuple[str, ...]] = COLUMNS
    layers: tuple[PlannedLayer, ...]
    left: tuple[Left, ...]
    construction: Construction
    settings: Settings
    memory: PeakMemory
    n_samples: int
    limit: int
    cures: tuple[str, ...] = ()
    tree: ModuleTree | None = dataclasses.field(default=None, repr=False)

    @property
    def total(self) -> PlannedLayer:
        """Sums over the layers, the largest condition number and error, and the memory of the run."""
        rows, costs = self.layers, [row.costs for row in self.layers if row.costs is not None]
        total = dataclasses.replace(add_costs(costs), memory=self.memory.total) if costs else None
        return PlannedLayer(
            "total", (), sum(row.n_target_parameters for row in rows), sum(row.n_positions for row in rows),
            sum(row.n_multiplications for row in rows), total, self.is_feasible,
        )  # fmt: skip

    @property
    def seconds(self) -> float:
        """Estimated seconds of the run on this machine."""
        costs = self.total.costs
        return 0.0 if costs is None else costs.seconds

    @property
    def is_feasible(self) -> bool:
        """Whether the run fits into the available memory."""
        return all(row.is_feasible for row in self.layers) and self.memory.total <= self.limit

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks: too little memory, notes of layers, and modules that are not rebuilt."""
        notes = [f"{row.name}: {row.note}" for row in self.layers if row.note]
        if self.memory.total > self.limit:
            cure = f" Cure: {'; '.join(self.cures)}." if self.cures else ""
            notes.insert(
                0,
                f"the run needs {readable(self.memory.total)}; {readable(self.limit)} may be used, 80 % of the free "
                f"memory.{cure}",
            )
        return (*notes, *(f"left as it is: {item}" for item in self.left))

    @property
    def basis(self) -> str:
        """A description of the totals."""
        missing = sum(row.costs is None for row in self.layers)
        rest = f", without {missing} of {len(self.layers)} layers that cannot be solved" if missing else ""
        return f"{self.n_samples} calibration samples; peak memory {self.memory}{rest}"

    def as_dict(self) -> dict[str, Any]:
        """All results as JSON types."""
        return {
            "recipe": {name: to_json(value) for name, value in _options(self.construction, self.settings).items()},
            "layers": [row.as_dict() for row in self.layers],
            "total": self.total.as_dict(),
            "memory": asdict(self.memory) | {"total": self.memory.total},
            "seconds": self.seconds,
            "n_samples": self.n_samples,
            "limit": self.limit,
            "is_feasible": self.is_feasible,
            "cures": list(self.cures),
            "left": [str(item) for item in self.left],
        }

    def plot(self) -> Figure:
        """Seconds, memory and predicted error of every layer."""
        found = [(place, row.costs) for place, row in enumerate(self.layers, start=1) if row.costs is not None]
        if not found:
            return Figure()
        places, costs = zip(*found, strict=True)
        names = [row.name for row in self.layers]
        errors = [(x, one.error) for x, one in found if one.error > 0]
        curves = [
            Curve("", places, [one.seconds for one in costs], "bars", "seconds"),
            Curve("", places, [one.memory / 1e6 for one in costs], "bars", "memory"),
        ]
        if errors:
            xs, ys = zip(*errors, strict=True)
            curves.append(Curve("", xs, ys, "points", "error"))
        return Figure(curves, (
            Panel("seconds", f"Seconds, {self.seconds:.3g} in all", y_label="seconds", x_names=names),
            Panel("memory", f"Memory, {readable(self.memory.total)} at the peak", y_label="MB", x_names=names),
            Panel("error", "Relative error of the weights", y_log=True, x_names=names),
        ))  # fmt: skip

    def view(self) -> View:
        """Whether the run fits into memory, and the cost of every layer."""
        total = self.total
        facts: dict[str, object] = {
            "layers": len(self.layers), "target parameters": total.n_target_parameters,
            "peak memory": readable(self.memory.total), "memory that may be used": readable(self.limit),
            "seconds on this machine": self.seconds, "calibration samples": self.n_samples,
        }  # fmt: skip
        if total.costs is not None:
            facts["norm parameters"] = total.costs.n_norm_parameters
        rows = [row.cells() for row in (*self.layers, total)]
        return View(
            "Plan of a reconstruction", "fits into memory" if self.is_feasible else "does not fit into memory",
            "good" if self.is_feasible else "bad", [f"{text[:1].upper()}{text[1:]}" for text in self.remarks],
            facts=facts,
            tables={"Layers": Table(COLUMNS, rows)} | ({} if self.tree is None else {"Modules": self.tree.table()}),
            details={"Peak memory": {name: readable(size) for name, size in self.memory.parts().items()}},
        )  # fmt: skip

    def __str__(self) -> str:
        rows = [COLUMNS, *(row.cells() for row in (*self.layers, self.total))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            padded = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join([row[0].ljust(widths[0]), *padded[1:]]))
        return visible("\n".join([*lines, self.basis, *self.remarks]))


def plan(
    model: nn.Module | Reconstruction,
    inputs: Inputs | NDArray[Any],
    construction: Construction | None = None,
    *,
    seed: int = 0,
    tolerance: float | None = None,
    storage: str = "dense",
    n_samples: int | None = None,
    strict: bool = False,
) -> Plan:
    """The estimated cost of `reconstruct` with these options: equations, features, memory, conditioning, error, time.

    - `inputs`: the calibration batch, a tuple of batches, or one sample: one or two samples are passed through a copy
      of the model to measure the inputs of its layers.
    - `construction`: how layers are rebuilt, `Wide()` by default.
    - `seed`, `tolerance`, `storage`, `strict`: as in `reconstruct`.
    - `n_samples`: size of the calibration batch, by default that of `inputs`, or the recommended 64 for one sample.

    Memory is the peak of the run: the float64 copy of the model, the calibration batch, its activations up to the
    current layer, the finished blocks (including frozen weights, unless `storage="seed"`), and the work on one layer.
    Seconds include drawing, solving, calibrating and measuring on this machine.

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> from onlynorm.models import mlp
        >>> plan = on.plan(mlp((8, 16, 4)), torch.rand(64, 8), on.Wide(excess=1.5))
        >>> [(layer.name, layer.shape, layer.costs.n_features) for layer in plan.layers]
        [('0', (16, 8), 192), ('2', (4, 16), 96)]
        >>> plan.is_feasible
        True
    """
    construction = Wide() if construction is None else construction
    find_builder(construction)  # validates the construction first
    settings = Settings(seed=seed, tolerance=tolerance, storage=storage)
    model = as_network("a plan", model)
    given = inputs = as_inputs("a plan", inputs)
    need_open("a plan", model)
    need_batch("a plan", model, inputs)
    copied = set_fast_paths(copy_network(model).float().eval(), calibrating=True)
    few = accepted_samples(copied, cast(inputs, torch.float32), 1)
    found = find_layers(copied, strict=need_flag("strict", strict), call=lambda: run(copied, few), what="a plan")
    with recording(copied) as shapes, counting_samples(copied, given) as n_given:
        run(copied, few)
    counted = n_given()
    if n_samples is None:
        n_samples = counted if counted > 1 else ENOUGH
    n_samples = need_integer("n_samples", n_samples, low=1, cure=f"Leave it out, or pass {ENOUGH}.")
    measured = measure_activations(copied, found.layers, inputs, n_samples, n_given=counted)
    rows = tuple(_plan_layer(layer, construction, settings, measured) for layer in found.layers)
    own = {
        "network": sum(8 * x.numel() for x in (*model.parameters(), *model.buffers()) if x.is_floating_point()),
        "inputs": sum(8 * x.numel() * n_samples // counted for x in given if x.is_floating_point()),
    }
    memory, limit = _peak(rows, measured, own), memory_limit()
    cures: list[str] = []
    if memory.total > limit:
        current = _options(construction, settings)
        for other in _alternatives(construction, settings):
            planned = tuple(_plan_layer(layer, *other, measured) for layer in found.layers)
            need = _peak(planned, measured, own).total
            if need < memory.total and all(row.costs is not None for row in planned):
                changed = {name: value for name, value in _options(*other).items() if current.get(name) != value}
                options = ", ".join(f"{name}={value!r}" for name, value in changed.items())
                cures.append(f"{options} needs {readable(need)}")
    return Plan(rows, found.left, construction, settings, memory, n_samples, limit, tuple(cures), shapes.tree())


def need_room(layers: tuple[TargetLayer, ...], construction: Construction, settings: Settings) -> None:
    """Raises if frozen weights and solving need more than the available memory.

    The additional memory of calibration, which depends on the batch, is not counted.
    """
    cure = "Draw fewer features (a smaller excess), or pass features='id_cond' with storage='seed'."
    if settings.storage == "dense":
        cure = f"Pass storage='seed', which draws frozen weights when they are needed. {cure}"
    stored, limit = 0, memory_limit()
    for layer in layers:
        try:
            costs = find_builder(construction).estimate(layer, construction, settings, NOTHING)
        except MemoryLimitError as error:
            raise MemoryLimitError(f"layer {layer.name!r}: {error}") from error
        except OnlynormError:  # not a lack of memory: raised again when the layer is built
            return
        need_memory(f"rebuilding the layers up to {layer.name!r}", stored + costs.memory, limit, cure)
        stored += costs.stored


def _options(construction: Construction, settings: Settings) -> dict[str, Any]:
    """The options that differ from their defaults, and the name of the construction if it is not the default."""
    defaults = Settings().as_dict()
    keywords = {name: value for name, value in settings.as_dict().items() if value != defaults[name]}
    name = {} if construction.name == Wide.name else {"construction": construction.name}
    return {**name, **construction.changed(), **keywords}


def _alternatives(construction: Construction, settings: Settings) -> list[tuple[Construction, Settings]]:
    """Options that need less memory, smallest change first."""
    from_seed = dataclasses.replace(settings, storage="seed")
    found: list[tuple[Construction, Settings]] = [(construction, from_seed)] if settings.storage == "dense" else []
    has_fewer = construction.features not in STRUCTURED or construction.features == "kron_normal"
    if isinstance(construction, Wide) and has_fewer:
        structured = dataclasses.replace(construction, features="id_cond", excess=None, density=None, width="maximum")
        found.append((structured, from_seed))
    return found


def _slowness() -> float:
    with fixed_threads(1):  # as `reconstruct` by default
        return slowness(1)


def _plan_layer(
    layer: TargetLayer, construction: Construction, settings: Settings, measured: Activations
) -> PlannedLayer:
    n_target = layer.n_weights + layer.shape[0] * layer.has_bias
    load = measured.loads.get(layer.name)
    n_positions = 0 if load is None else load.n_positions
    notes = [] if n_positions else ["not called on this batch, so it cannot be calibrated"]
    limit = memory_limit()
    try:
        costs = find_builder(construction).estimate(layer, construction, settings, load or ALONE)
    except MemoryLimitError as error:
        note = "; ".join([*notes, str(error)])
        return PlannedLayer(layer.name, layer.shape, n_target, n_positions, 0, None, False, note)
    costs = dataclasses.replace(costs, seconds=costs.seconds * _slowness())
    if costs.memory > limit:
        notes.append(f"needs {readable(costs.memory)}, more than the {readable(limit)} that may be used")
    note = "; ".join([*notes, costs.note] if costs.note else notes)
    multiplications = n_positions * costs.multiplications
    is_feasible = costs.memory <= limit
    return PlannedLayer(layer.name, layer.shape, n_target, n_positions, multiplications, costs, is_feasible, note)


def _peak(rows: tuple[PlannedLayer, ...], measured: Activations, own: dict[str, int]) -> PeakMemory:
    """The maximum over the calibration pass, all layers, and the cast at the end."""
    moments = [PeakMemory(**own, activations=measured.peak, stored=0, layer=0, place="the calibration pass")]
    stored, largest, by_name = 0, 0, {row.name: row for row in rows}
    alone = sum(8 * load.n_inputs for load in measured.loads.values())  # the inputs of one sample are stored
    for name, alive in measured.alive.items():
        row = by_name[name]
        if row.costs is not None:
            buffers = min(BUFFERS, row.costs.memory // 8)
            work = OVERHEAD + buffers + int(ALLOCATOR * row.costs.memory)
            moments.append(PeakMemory(**own, activations=alone + alive, stored=stored, layer=work, place=name))
            stored, largest = stored + row.costs.stored, max(largest, row.costs.stored)
    moments.append(PeakMemory(**own, activations=0, stored=stored, layer=largest // 2, place="the end"))
    return max(moments, key=lambda moment: moment.total)


def short(number: int) -> str:
    """A count with a unit prefix: 36.9k, 1.89G."""
    size, unit = float(min(number, 10**300)), 0
    while size >= 999.5 and unit < len(UNITS) - 1:
        size, unit = size / 1000.0, unit + 1
    return f"{size:.3g}{UNITS[unit]}"
