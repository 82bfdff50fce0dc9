"""`plan`: what rebuilding a network will take, layer by layer and as a whole, before anything large is computed.

Widths, memory, condition numbers, errors and seconds are predicted from shapes; a forward pass of one or two samples
counts what each layer receives, which sets the memory and the time of calibration.
"""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from onlynorm.errors import MemoryLimitError, OnlynormError
from onlynorm.features.distributions import STRUCTURED
from onlynorm.frozen.fast_paths import set_fast_paths
from onlynorm.memory import memory_limit, need_memory, readable
from onlynorm.modules.layers import Left, TargetLayer, find_layers
from onlynorm.modules.validate import need_batch
from onlynorm.modules.walk import Inputs, accepted_samples, as_inputs, cast, copy_network, run
from onlynorm.reconstruction.activation_memory import Activations, measure_activations
from onlynorm.reconstruction.constructions.base import Construction, Recipe, make_recipe
from onlynorm.reconstruction.costs import ALONE, NOTHING, Costs, add_costs, slowness
from onlynorm.reconstruction.result import ENOUGH, Reconstruction, as_network
from onlynorm.validate import need_flag, need_integer

COLUMNS = (
    "layer", "equations", "features", "norms/target", "memory", "condition", "error", "seconds", "shape", "frozen",
    "operations",
)  # fmt: skip
"""Heads of the table: parameters of the norms over those of the target; operations are multiplications per input."""
ALLOCATOR = 1.1
"""What the allocator holds on top: freed pieces between others, sizes rounded up."""
OVERHEAD = 300_000
"""Bytes of Python's own objects."""
BUFFERS = 2_000_000
"""Bytes that the library of matrix products keeps for its copies of parts of what it multiplies, at most."""
UNITS = ("", "k", "M", "G", "T", "P", "E")


@dataclass(frozen=True)
class PlannedLayer:
    """What one layer will take.

    `n_positions` counts its outputs per channel and sample, over all calls; `n_multiplications` is what the rebuilt
    layer does for one input of the network. `costs` is None where no method fits into memory at all.
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
        """The row as words, under `COLUMNS`."""
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
        """Every number as plain data."""
        own = {name: value for name, value in asdict(self).items() if name not in ("costs", "note")}
        costs = {} if self.costs is None else asdict(self.costs)
        costs.pop("multiplications", None)  # at one position; of no use beside those per input
        return own | costs | {"note": self.note}


@dataclass(frozen=True)
class PeakMemory:
    """Bytes that are alive when a run takes the most, by what they hold, and the layer at which that is.

    `network` is the float64 copy, `inputs` the float64 calibration batch, `activations` what the network holds at this
    point of the pass, `stored` the blocks that are finished, `layer` what the layer at work takes.
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

    def __str__(self) -> str:
        parts = {
            "copy of the network": self.network, "inputs": self.inputs, "calibration activations": self.activations,
            "finished blocks": self.stored, f"work at {self.place}": self.layer,
        }  # fmt: skip
        return f"{readable(self.total)}: " + ", ".join(f"{name} {readable(size)}" for name, size in parts.items())


@dataclass(frozen=True)
class Plan:
    """What the whole network will take: a row per layer, their total, and what stays as it is.

    `memory` is the peak of the whole run, beside what the process holds before it; `limit` is what may be used, 80 % of
    what was free. `cures` are choices that would fit where this one does not.
    """

    layers: tuple[PlannedLayer, ...]
    left: tuple[Left, ...]
    recipe: Recipe
    memory: PeakMemory
    n_samples: int
    limit: int
    cures: tuple[str, ...] = ()

    @property
    def total(self) -> PlannedLayer:
        """Sums over the layers; of condition and error the worst; the memory of the whole run."""
        rows, costs = self.layers, [row.costs for row in self.layers if row.costs is not None]
        total = dataclasses.replace(add_costs(costs), memory=self.memory.total) if costs else None
        return PlannedLayer(
            "total", (), sum(row.n_target_parameters for row in rows), sum(row.n_positions for row in rows),
            sum(row.n_multiplications for row in rows), total, self.is_feasible,
        )  # fmt: skip

    @property
    def seconds(self) -> float:
        """The time of the whole run on this machine."""
        costs = self.total.costs
        return 0.0 if costs is None else costs.seconds

    @property
    def is_feasible(self) -> bool:
        """Whether the whole run fits into the memory that is free."""
        return all(row.is_feasible for row in self.layers) and self.memory.total <= self.limit

    @property
    def remarks(self) -> tuple[str, ...]:
        """What is out of the ordinary: too little memory, notes of layers, and the modules that are left."""
        notes = [f"{row.name}: {row.note}" for row in self.layers if row.note]
        if self.memory.total > self.limit:
            cure = f" Cure: {'; '.join(self.cures)}." if self.cures else ""
            notes.insert(
                0,
                f"the run needs {readable(self.memory.total)}; {readable(self.limit)} may be used, 80 % of what is "
                f"free.{cure}",
            )
        return (*notes, *(f"left as it is: {item}" for item in self.left))

    @property
    def basis(self) -> str:
        """What the totals are made of."""
        missing = sum(row.costs is None for row in self.layers)
        rest = f", without {missing} of {len(self.layers)} layers that cannot be solved" if missing else ""
        return f"{self.n_samples} calibration samples; peak memory {self.memory}{rest}"

    def as_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        return {
            "recipe": {name: _plain(value) for name, value in self.recipe.changed().items()},
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

    def __str__(self) -> str:
        rows = [COLUMNS, *(row.cells() for row in (*self.layers, self.total))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            padded = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join([row[0].ljust(widths[0]), *padded[1:]]))
        return "\n".join([*lines, self.basis, *self.remarks])


def plan(
    network: nn.Module | Reconstruction,
    *,
    inputs: Inputs | NDArray[Any],
    n_samples: int | None = None,
    strict: bool = False,
    **choices: Any,
) -> Plan:
    """What `reconstruct` with these choices will take: equations, features, memory, conditioning, error and time.

    `choices` are the fields of a `Recipe`. `inputs` is the calibration batch, or a tuple of batches, or one sample of
    it: one or two samples pass through a copy of the network, to count what its layers receive. `n_samples` is the size
    of the batch to plan for, if it is not that of `inputs`; one sample alone stands for the 64 that are recommended.

    Memory is the peak of the whole run: the float64 copy of the network, the calibration batch and what the network
    makes of it up to the layer at work, the finished blocks (their frozen weights too, unless `storage="seed"`), and
    the work on one layer.
    Seconds count drawing, solving, calibrating and measuring, on this machine as fast as it is now.
    """
    recipe, construction = make_recipe(**choices)
    network = as_network("a plan", network)
    given = inputs = as_inputs("a plan", inputs)
    need_batch("a plan", network, inputs)
    copied = set_fast_paths(copy_network(network).float().eval(), calibrating=True)
    few = accepted_samples(copied, cast(inputs, torch.float32), 1)
    found = find_layers(copied, strict=need_flag("strict", strict), call=lambda: run(copied, few))
    counted = len(given[0]) if given[0].ndim else 1
    if n_samples is None:
        n_samples = counted if counted > 1 else ENOUGH
    n_samples = need_integer("n_samples", n_samples, low=1, cure=f"Leave it out, or pass {ENOUGH}.")
    measured = measure_activations(copied, found.layers, inputs, n_samples)
    rows = tuple(_plan_layer(construction, layer, recipe, measured) for layer in found.layers)
    own = {
        "network": sum(8 * x.numel() for x in (*network.parameters(), *network.buffers()) if x.is_floating_point()),
        "inputs": sum(8 * x.numel() * n_samples // counted for x in given if x.is_floating_point()),
    }
    memory, limit = _peak(rows, measured, own), memory_limit()
    cures: list[str] = []
    if memory.total > limit:
        for other in _alternatives(recipe):
            planned = tuple(_plan_layer(construction, layer, other, measured) for layer in found.layers)
            need = _peak(planned, measured, own).total
            if need < memory.total and all(row.costs is not None for row in planned):
                changed = {name: value for name, value in other.changed().items() if getattr(recipe, name) != value}
                words = ", ".join(f"{name}={value!r}" for name, value in changed.items())
                cures.append(f"{words} needs {readable(need)}")
    return Plan(rows, found.left, recipe, memory, n_samples, limit, tuple(cures))


def need_room(layers: tuple[TargetLayer, ...], recipe: Recipe, construction: Construction) -> None:
    """Raises before anything is computed where frozen weights and solving alone need more memory than is free.

    Calibration is not counted: it depends on the batch, and comes on top.
    """
    cure = "Draw fewer features (a smaller excess), or pass features='id_cond' with storage='seed'."
    if recipe.storage == "dense":
        cure = f"Pass storage='seed', which makes frozen weights again when they are needed. {cure}"
    stored, limit = 0, memory_limit()
    for layer in layers:
        try:
            costs = construction.estimate(layer, recipe, NOTHING)
        except MemoryLimitError as error:
            raise MemoryLimitError(f"layer {layer.name!r}: {error}") from error
        except OnlynormError:  # not for want of memory: the construction itself says what is wrong
            return
        need_memory(f"rebuilding the layers up to {layer.name!r}", stored + costs.memory, limit, cure)
        stored += costs.stored


def _alternatives(recipe: Recipe) -> list[Recipe]:
    """Recipes that take less memory, from the smallest change on."""
    found = [dataclasses.replace(recipe, storage="seed")] if recipe.storage == "dense" else []
    if recipe.construction in ("wide", "low_rank", "residual") and recipe.features not in STRUCTURED:
        found.append(
            dataclasses.replace(recipe, features="id_cond", excess=None, density=None, storage="seed", width="maximum")
        )
    return found


def _plan_layer(construction: Construction, layer: TargetLayer, recipe: Recipe, measured: Activations) -> PlannedLayer:
    n_target = layer.n_weights + layer.shape[0] * layer.has_bias
    load = measured.loads.get(layer.name)
    n_positions = 0 if load is None else load.n_positions
    notes = [] if n_positions else ["not called on this batch, so it cannot be calibrated"]
    limit = memory_limit()
    try:
        costs = construction.estimate(layer, recipe, load or ALONE)
    except MemoryLimitError as error:
        note = "; ".join([*notes, str(error)])
        return PlannedLayer(layer.name, layer.shape, n_target, n_positions, 0, None, False, note)
    costs = dataclasses.replace(costs, seconds=costs.seconds * slowness(torch.get_num_threads()))
    if costs.memory > limit:
        notes.append(f"needs {readable(costs.memory)}, more than the {readable(limit)} that may be used")
    note = "; ".join([*notes, costs.note] if costs.note else notes)
    multiplications = n_positions * costs.multiplications
    is_feasible = costs.memory <= limit
    return PlannedLayer(layer.name, layer.shape, n_target, n_positions, multiplications, costs, is_feasible, note)


def _peak(rows: tuple[PlannedLayer, ...], measured: Activations, own: dict[str, int]) -> PeakMemory:
    """The moment of the run that takes the most: the calibration pass, a layer, or the cast at the end."""
    moments = [PeakMemory(**own, activations=measured.peak, stored=0, layer=0, place="the calibration pass")]
    stored, largest, by_name = 0, 0, {row.name: row for row in rows}
    alone = sum(8 * load.n_inputs for load in measured.loads.values())  # one sample is passed by itself and held
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
    """A count as people read it: 36.9k, 1.89G."""
    size, unit = float(min(number, 10**300)), 0
    while size >= 999.5 and unit < len(UNITS) - 1:
        size, unit = size / 1000.0, unit + 1
    return f"{size:.3g}{UNITS[unit]}"


def _plain(value: object) -> object:
    return value if isinstance(value, bool | int | float | str) else str(value)
