"""`ModuleTree`: the modules of a model with their output shapes and parameters, as an indented table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from onlynorm.display import Result, Table
from onlynorm.errors import visible
from onlynorm.modules.walk import tensors_in
from onlynorm.validate import need_integer

MAX_ROWS = 50
"""Maximum number of rows of the text of a tree; deeper modules are counted in the modules that contain them."""
WIDTH = 80
"""Maximum width of the text."""
_MIN_NAME = 16


@dataclass(frozen=True)
class ModuleRow(Result):
    """A module: its place, class and level in the tree, the shape of its first output, and its parameters.

    Parameters include those of the modules inside, each counted once. `shape` is None if the module was not called, or
    returned no floating-point tensor.
    """

    name: str
    kind: str
    level: int
    shape: tuple[int, ...] | None
    n_parameters: int
    n_trainable: int

    @property
    def state(self) -> str:
        """Whether the parameters are trainable: "trainable", "frozen", "partly", or "" without parameters."""
        if not self.n_parameters:
            return ""
        return "trainable" if self.n_trainable == self.n_parameters else "partly" if self.n_trainable else "frozen"

    def cells(self) -> tuple[str, ...]:
        """The row of the table, formatted."""
        own = self.name.rpartition(".")[2]
        label = f"{own} ({self.kind})" if own else self.kind
        shape = "-" if self.shape is None else " x ".join(map(str, self.shape)) or "scalar"
        return f"{'  ' * self.level}{label}", shape, f"{self.n_parameters:,}" if self.n_parameters else "-", self.state


@dataclass(frozen=True)
class ModuleTree(Result):
    """The modules of a model, from the outside in; printed as a table of at most 80 columns."""

    rows: tuple[ModuleRow, ...]

    def text(self, max_rows: int | None = MAX_ROWS) -> str:
        """The table; the levels that fit into `max_rows`, or all of them with None."""
        if max_rows is not None:
            max_rows = need_integer("max_rows", max_rows, low=1, cure="Pass None for all modules.")
        rows = [row for row in self.rows if row.level <= self._level(max_rows)][:max_rows]
        cells = [("module", "output", "parameters", "state"), *(row.cells() for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        widths[0] = min(widths[0], max(_MIN_NAME, WIDTH - sum(widths[1:]) - 6))
        lines = [
            f"{_cut(name, widths[0]):<{widths[0]}}  {shape:>{widths[1]}}  {count:>{widths[2]}}  {state}".rstrip()
            for name, shape, count, state in cells
        ]
        whole = self.rows[0]
        frozen = whole.n_parameters - whole.n_trainable
        lines.append(f"{whole.n_parameters:,} parameters: {whole.n_trainable:,} trainable, {frozen:,} frozen")
        if len(rows) < len(self.rows):
            lines.append(f"{len(rows)} of {len(self.rows)} modules are shown; text(max_rows=None) has all")
        return visible("\n".join(lines))

    def table(self) -> Table:
        """The table of all modules, with their places."""
        cells = [(row.name or "model", row.kind, *row.cells()[1:]) for row in self.rows]
        return Table(("module", "class", "output", "parameters", "state"), cells)

    def _level(self, max_rows: int | None) -> int:
        """The deepest level of which all modules fit; one at least."""
        levels = [row.level for row in self.rows]
        allowed = len(levels) if max_rows is None else max_rows
        deepest = range(max(levels), 0, -1)
        return next((level for level in deepest if sum(one <= level for one in levels) <= allowed), 1)

    def __str__(self) -> str:
        return self.text()


@dataclass
class Recorder:
    """The shapes of the first outputs of the modules of a model, recorded by `recording`."""

    model: nn.Module
    shapes: dict[nn.Module, tuple[int, ...]] = field(default_factory=dict)

    def tree(self) -> ModuleTree:
        """The tree with the recorded shapes. Frozen layers are not entered: what they hold is drawn from a seed."""
        rows = []
        for name, module in _modules(self.model):
            sizes = {p: p.numel() for p in module.parameters()}
            n_trainable = sum(size for p, size in sizes.items() if p.requires_grad)
            level = name.count(".") + 1 if name else 0
            rows.append(
                ModuleRow(name, type(module).__name__, level, self.shapes.get(module), sum(sizes.values()), n_trainable)
            )
        return ModuleTree(tuple(rows))


@contextmanager
def recording(model: nn.Module) -> Iterator[Recorder]:
    """Context that records the shapes of the outputs of all modules of the model."""
    recorder = Recorder(model)

    def record(module: nn.Module, _: Any, output: Any) -> None:
        if module not in recorder.shapes and (made := next(tensors_in(output), None)) is not None:
            recorder.shapes[module] = tuple(made.shape)

    open_modules = (module for _, module in _modules(model) if not isinstance(module, torch.jit.ScriptModule))
    handles = [module.register_forward_hook(record) for module in open_modules]  # scripted ones have no hooks
    try:
        yield recorder
    finally:
        for handle in handles:
            handle.remove()


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules by place, except those inside frozen layers and parametrizations."""
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside or "parametrizations" in name.split("."):
            continue
        if hasattr(type(module), "plain_parameters"):  # the class of frozen layers is in a later room
            inside.update(part for part in module.modules() if part is not module)
        yield name, module


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
