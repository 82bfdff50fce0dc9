"""`Memorizer`: the residual network of `memorize` as a module.

    h_0 = lift(x),    h_j = h_(j-1) + outer_j(relu(inner_j(h_(j-1)))),    y = values(relu(cues(h_l)))

The last coordinate of the hidden vector is a flag: 0 before a point is moved by a block, -1 after (times the unit of
the goals, which is above one only for samples with outliers).

A file contains the parameters, the sizes and the facts, as sealed safetensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.display import Result
from onlynorm.errors import ConversionError, FormatError, ShapeError
from onlynorm.frozen.options import PRECISIONS
from onlynorm.storage import make_checked, read_tensors, write_tensors
from onlynorm.validate import as_tensor, need_free_memory, need_integer

ROWS = 8192
"""Samples per chunk of the forward pass, so that its memory does not grow with the batch."""
SILENT = -1
"""The class of an input without positive outputs."""


@dataclass(frozen=True, kw_only=True)
class MemorizerFacts(Result):
    """Sizes and accuracy of a memorizer.

    `constant` is n_parameters / (n log n + r^2), the constant of theorem 3.2; `smallest_gap` is the smallest distance
    along the direction of a neuron between its point and the points after it, in units of the median length of a
    hidden point; `rounding` bounds the error of any output at the training points in float64. A network that is cast
    to another dtype has no facts, since they hold in float64 only.
    """

    n_points: int
    n_merged: int
    n_outputs: int
    width: int
    n_blocks: int
    n_parameters: int
    constant: float
    smallest_gap: float
    n_tilted: int
    rounding: float
    projection: str
    seed: int
    seconds: float

    def __str__(self) -> str:
        merged = f" ({self.n_merged} repeated points merged)" if self.n_merged else ""
        tilted = f", {self.n_tilted} directions tilted" if self.n_tilted else ""
        return (
            f"{self.n_points:,} points{merged} in {self.n_blocks:,} blocks of width {self.width}, "
            f"{self.n_outputs} outputs\n"
            f"{self.n_parameters:,} parameters = {self.constant:.3g} (n log n + r^2)\n"
            f"smallest gap {self.smallest_gap:.2e}{tilted}; outputs exact to {self.rounding:.1e} in float64\n"
            f"{self.projection} projection, seed {self.seed}, built in {self.seconds:.3g} s"
        )


def in_parts(rows: Tensor, size: int) -> tuple[Tensor, ...]:
    """The rows in parts of `size`; all in one for torch.export, whose graph would contain the number of parts."""
    is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)  # is_exporting is new in 2.7
    return (rows,) if is_exporting() else rows.split(size)


class MemorizerBlock(nn.Module):
    """h -> h + outer(relu(inner(h))); with all weights zero it is the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = _zero_linear(width, width)
        self.outer = _zero_linear(width, width, bias=False)

    def forward(self, h: Float[Tensor, "n width"]) -> Float[Tensor, "n width"]:
        """The hidden vectors after the block."""
        return h + self.outer(functional.relu(self.inner(h), inplace=True))


class Memorizer(nn.Module):
    """A residual network of theorem 3.2, initialized with zeros; `memorize` sets its weights.

    `n_cues` is the number of neurons of the last layer: one per class, or two per real output. Parameters are float64.

    Theory: hardt_ma2017:thm-3.2
    """

    def __init__(self, n_inputs: int, n_outputs: int, *, width: int, n_blocks: int, n_cues: int) -> None:
        super().__init__()
        n_inputs, n_outputs, width, n_blocks, n_cues = (
            need_integer(f"{name} of a memorizer", value, low=1, high=2**31 - 1, cure="memorize chooses it.")
            for name, value in (
                ("n_inputs", n_inputs), ("n_outputs", n_outputs), ("width", width), ("n_blocks", n_blocks),
                ("n_cues", n_cues),
            )
        )  # fmt: skip
        size = 8.0 * (width * (n_inputs + 1) + n_blocks * (2 * width + 1) * width + n_cues * (width + 1 + n_outputs))
        need_free_memory(f"a memorizer of {n_blocks} blocks of width {width}", size, cure="Choose smaller sizes.")
        self.n_inputs, self.n_outputs, self.width, self.n_cues = n_inputs, n_outputs, width, n_cues
        self.lift = _zero_linear(n_inputs, width)
        self.blocks = nn.ModuleList(MemorizerBlock(width) for _ in range(n_blocks))
        self.cues = _zero_linear(width, n_cues)
        self.values = _zero_linear(n_cues, n_outputs, bias=False)
        self.facts: MemorizerFacts | None = None

    @property
    def is_real(self) -> bool:
        """Whether the outputs are real targets instead of one-hot classes."""
        return self.n_cues == 2 * self.n_outputs

    def forward(self, x: Tensor | np.ndarray) -> Float[Tensor, "n n_outputs"]:
        """Outputs for samples of any shape and dtype, computed in the dtype of the network, `ROWS` at a time.

        Autocast is disabled, since thresholds need full precision. Without gradients the memory does not depend on the
        number of blocks or samples, except for the outputs.
        """
        rows = self.rows(x)
        with torch.autocast(next(self.parameters()).device.type, enabled=False):
            return torch.cat([self.read(self.move(self.enter(part))) for part in in_parts(rows, ROWS)])

    def rows(self, x: Tensor | np.ndarray) -> Tensor:
        """The validated samples as rows."""
        x = as_tensor("a memorizer", x)
        flat = x.flatten(1) if x.ndim > 1 else x[:, None] if x.ndim == 1 and self.n_inputs == 1 else x
        if flat.ndim != 2 or flat.shape[1] != self.n_inputs or not flat.shape[0] or flat.is_complex():
            raise ShapeError(
                f"this memorizer needs samples of {self.n_inputs} real numbers, one sample at least; got {x.dtype} of "
                f"shape {tuple(x.shape)}. Put the samples along the first axis."
            )
        return flat

    def enter(self, rows: Tensor) -> Tensor:
        """The hidden vectors of the rows before the first block, with flag zero."""
        own = next(self.parameters())
        lifted: Tensor = self.lift(rows.to(own))
        return lifted

    def move(self, h: Tensor) -> Tensor:
        """The hidden vectors after all blocks; those of training points are at their class vectors."""
        for block in self.blocks:
            h = block(h)
        return h

    def read(self, h: Tensor) -> Tensor:
        """The outputs for hidden vectors after the last block."""
        outputs: Tensor = self.values(functional.relu(self.cues(h)))
        return outputs

    @torch.no_grad()
    def classify(self, x: Tensor | np.ndarray) -> Int[Tensor, " n"]:
        """The class with the largest output, or `SILENT` (-1) where no output is positive."""
        if self.is_real:
            raise ConversionError(
                f"classify needs a memorizer of classes; this one has {self.n_outputs} real outputs, since its targets "
                "were floating-point numbers. Call the network itself, or memorize labels.long()."
            )
        outputs = self(x)
        largest, classes = outputs.max(1)
        return torch.where(largest > 0.0, classes, SILENT)

    def extra_repr(self) -> str:
        """The sizes, and the number of memorized points if it is known."""
        sizes = f"{self.n_inputs} inputs, {self.n_outputs} {'outputs' if self.is_real else 'classes'}"
        return sizes if self.facts is None else f"{sizes}, {self.facts.n_points:,} memorized points"

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Memorizer:
        super()._apply(fn, recurse=recurse)  # type: ignore[no-untyped-call]
        if any(parameter.dtype != torch.float64 for parameter in self.parameters()):
            self.facts = None
        return self

    @property
    def n_parameters(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel() for parameter in self.parameters())


def _zero_linear(n_inputs: int, n_outputs: int, *, bias: bool = True) -> nn.Linear:
    # On the meta device, since the usual initialization would draw from the global generator.
    layer = nn.Linear(n_inputs, n_outputs, bias=bias, device="meta")
    layer.weight = nn.Parameter(torch.zeros(n_outputs, n_inputs, dtype=torch.float64))
    if bias:
        layer.bias = nn.Parameter(torch.zeros(n_outputs, dtype=torch.float64))
    return layer


KIND = "onlynorm-memorizer"
FORMAT = 1
_CURE = "Save it again with onlynorm.save or `onlynorm memorize --out`."


def save_memorizer(network: Memorizer, path: Path) -> None:
    """Writes the network to a sealed file atomically."""
    document = {
        "n_inputs": network.n_inputs,
        "n_outputs": network.n_outputs,
        "width": network.width,
        "n_blocks": len(network.blocks),
        "n_cues": network.n_cues,
        "facts": None if network.facts is None else dataclasses.asdict(network.facts),
    }
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
    write_tensors(path, tensors, kind=KIND, format=FORMAT, document=document)


def load_memorizer(path: Path) -> Memorizer:
    """The network of a file written by `save_memorizer`; raises `FormatError` for other, damaged or altered files."""
    document, tensors = read_tensors(path, kind=KIND, format=FORMAT, cure=_CURE)
    try:
        sizes = {name: document[name] for name in ("n_inputs", "n_outputs", "width", "n_blocks", "n_cues")}
        _need_sizes(sizes, tensors)
        facts = document["facts"]
        checked = None if facts is None else make_checked(MemorizerFacts, facts)
        network = Memorizer(sizes.pop("n_inputs"), sizes.pop("n_outputs"), **sizes)
        for name, held in network.named_parameters():
            held.data = tensors[name]
        if checked is not None and network.lift.weight.dtype != torch.float64:
            raise ValueError("facts, which are valid in float64 only, of a network in another precision")
        if checked is not None and (checked.width, checked.n_blocks, checked.n_parameters) != (
            network.width, len(network.blocks), network.n_parameters,
        ):  # fmt: skip
            raise ValueError("facts of another network")
        network.facts = checked
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise FormatError(
            f"a memorizer needs sizes that fit its parameters; {path.name} has others ({type(error).__name__}: "
            f"{error!s:.200}). {_CURE}"
        ) from error
    return network


def _need_sizes(sizes: dict[str, int], tensors: dict[str, Tensor]) -> None:
    """Raises ValueError if the sizes do not match the tensors; called before the network is built."""
    if not all(type(size) is int and size >= (name != "n_blocks") for name, size in sizes.items()):
        raise ValueError(f"sizes {sizes!s:.100}")
    n_inputs, n_outputs, width, n_blocks, n_cues = sizes.values()
    if len(tensors) != 3 * n_blocks + 5:
        raise ValueError(f"{n_blocks} blocks for {len(tensors)} tensors")
    wanted = {"lift.weight": (width, n_inputs), "lift.bias": (width,), "cues.weight": (n_cues, width),
              "cues.bias": (n_cues,), "values.weight": (n_outputs, n_cues)}  # fmt: skip
    for place in range(n_blocks):
        wanted |= {f"blocks.{place}.inner.weight": (width, width), f"blocks.{place}.inner.bias": (width,),
                   f"blocks.{place}.outer.weight": (width, width)}  # fmt: skip
    dtype = tensors["lift.weight"].dtype
    for name, shape in wanted.items():
        tensor = tensors[name]
        is_own = tensor.dtype == dtype and dtype in PRECISIONS.values() and tuple(tensor.shape) == shape
        if not is_own or not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} of {tensor.dtype} and shape {tuple(tensor.shape)}, not finite of shape {shape}")
