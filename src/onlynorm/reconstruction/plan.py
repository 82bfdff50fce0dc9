"""`plan`: what rebuilding a network will take, layer by layer, before anything large is computed.

Widths, memory, condition numbers, errors and seconds are predicted from shapes alone; one forward pass of a batch tells
at how many positions each layer works, which sets the multiplications of the rebuilt network.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onlynorm.errors import MemoryLimitError
from onlynorm.reconstruction.calls import Inputs, as_tuple, cast, copy_network, need_batch, run
from onlynorm.reconstruction.costs import Costs, add_costs
from onlynorm.reconstruction.recipe import Construction, Recipe, make_recipe
from onlynorm.reconstruction.target import Left, TargetLayer, find_layers
from onlynorm.solvers.memory import memory_limit, readable

COLUMNS = (
    "layer", "equations", "features", "norms/target", "memory", "condition", "error", "seconds", "shape", "frozen",
    "operations",
)  # fmt: skip
"""Heads of the table: parameters of the norms over those of the target; operations are multiplications per input."""

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
class Plan:
    """What the whole network will take: a row per layer, their total, and what stays as it is."""

    layers: tuple[PlannedLayer, ...]
    left: tuple[Left, ...]
    recipe: Recipe

    @property
    def total(self) -> PlannedLayer:
        """Sums over the layers; of condition and error the worst, of memory the most that one layer takes."""
        rows, costs = self.layers, [row.costs for row in self.layers if row.costs is not None]
        return PlannedLayer(
            "total", (), sum(row.n_target_parameters for row in rows), sum(row.n_positions for row in rows),
            sum(row.n_multiplications for row in rows), add_costs(costs) if costs else None, self.is_feasible,
        )  # fmt: skip

    @property
    def is_feasible(self) -> bool:
        """Whether every layer fits into the memory that is free."""
        return all(row.is_feasible for row in self.layers)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What is out of the ordinary: notes of layers, and the modules that are left."""
        notes = (f"{row.name}: {row.note}" for row in self.layers if row.note)
        return (*notes, *(f"left as it is: {item}" for item in self.left))

    def as_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        return {
            "recipe": {name: _plain(value) for name, value in self.recipe.changed().items()},
            "layers": [row.as_dict() for row in self.layers],
            "total": self.total.as_dict(),
            "left": [str(item) for item in self.left],
        }

    def __str__(self) -> str:
        rows = [COLUMNS, *(row.cells() for row in (*self.layers, self.total))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            padded = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join([row[0].ljust(widths[0]), *padded[1:]]))
        return "\n".join([*lines, *self.remarks])


def plan(network: nn.Module, *, inputs: Inputs, strict: bool = False, **choices: Any) -> Plan:
    """What `reconstruct` with these choices will take: equations, features, memory, conditioning, error and time.

    `choices` are the fields of a `Recipe`. `inputs` is a batch, or a tuple of batches; one sample is enough: it passes
    through the network once, and only the sizes of the layers' outputs are kept. Seconds are those of solving, on this
    machine.
    """
    recipe, construction = make_recipe(**choices)
    need_batch("a plan", network, inputs)
    found = find_layers(network, strict=strict)
    positions = count_positions(network, found.layers, inputs)
    rows = (_plan_layer(construction, layer, recipe, positions.get(layer.name, 0)) for layer in found.layers)
    return Plan(tuple(rows), found.left, recipe)


def _plan_layer(construction: Construction, layer: TargetLayer, recipe: Recipe, n_positions: int) -> PlannedLayer:
    n_target = layer.n_weights + layer.shape[0] * layer.has_bias
    notes = [] if n_positions else ["not called on this batch, so it cannot be calibrated"]
    limit = memory_limit()
    try:
        costs = construction.estimate(layer, recipe)
    except MemoryLimitError as error:
        note = "; ".join([*notes, str(error)])
        return PlannedLayer(layer.name, layer.shape, n_target, n_positions, 0, None, False, note)
    if costs.memory > limit:
        notes.append(f"needs {readable(costs.memory)}, more than the {readable(limit)} that may be used")
    note = "; ".join([*notes, costs.note] if costs.note else notes)
    multiplications = n_positions * costs.multiplications
    is_feasible = costs.memory <= limit
    return PlannedLayer(layer.name, layer.shape, n_target, n_positions, multiplications, costs, is_feasible, note)


def count_positions(network: nn.Module, layers: tuple[TargetLayer, ...], inputs: Inputs) -> dict[str, int]:
    """Outputs per channel and sample of every layer that the batch reaches, over all its calls."""
    counts: dict[str, int] = {}
    n_samples = len(as_tuple(inputs)[0])
    # A copy in evaluation mode, so that neither statistics nor dropout of the target move.
    measured = copy_network(network).float().eval()
    for layer in layers:

        def count(_: nn.Module, args: object, output: Tensor, layer: TargetLayer = layer) -> None:
            counts[layer.name] = counts.get(layer.name, 0) + output.numel() // (layer.shape[0] * n_samples)

        measured.get_submodule(layer.name).register_forward_hook(count)
    run(measured, cast(inputs, torch.float32))
    return counts


def short(number: int) -> str:
    """A count as people read it: 36.9k, 1.89G."""
    size, unit = float(number), 0
    while size >= 999.5 and unit < len(UNITS) - 1:
        size, unit = size / 1000.0, unit + 1
    return f"{size:.3g}{UNITS[unit]}"


def _plain(value: object) -> object:
    return value if isinstance(value, bool | int | float | str) else str(value)
