"""`verify`: do two networks compute the same function, and is what is frozen really known by its seed?

`compare`: `verify` in batches, and how often each of the two networks is right.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor, nn

from onlynorm.errors import ShapeError
from onlynorm.frozen import NormOnlyLayer
from onlynorm.frozen.form import Block, find_frozen
from onlynorm.frozen.maps import FrozenMap
from onlynorm.intervals.tensor import Box
from onlynorm.modules.affine import Affine
from onlynorm.modules.norms import NORMS
from onlynorm.modules.validate import need_batch, need_evaluation
from onlynorm.modules.walk import Inputs, as_inputs, cast, precision, run
from onlynorm.reconstruction.ranges import is_outside, watching
from onlynorm.reconstruction.result import Reconstruction, as_network
from onlynorm.validate import need_callable, need_instance, need_integer, need_number


@dataclass(frozen=True)
class Verification:
    """How far two networks differ on a batch, and where the numbers of the second come from.

    `outside` is the largest share of samples that left a block's range, `outside_box` the share that left the box (None
    without one). `n_frozen` numbers come from the seed, `n_norm` stand in norms; `others` names the tensors of the
    `n_other` that are neither. What a block keeps to watch its range takes no part in its function and is not counted.
    `n_not_finite` samples have a NaN or an infinity in either output: they agree in nothing, and the errors are NaN or
    infinite.
    """

    max_error: float
    relative_error: float
    agreement: float
    outside: float
    is_reproducible: bool
    n_samples: int
    n_frozen: int = 0
    n_norm: int = 0
    n_other: int = 0
    others: tuple[str, ...] = ()
    outside_box: float | None = None
    n_not_finite: int = 0

    @property
    def is_only_norms(self) -> bool:
        """Whether the network is a seed and its norms, and nothing else."""
        return self.is_reproducible and not self.others

    def is_same(self, tolerance: float) -> bool:
        """Whether the outputs agree to this relative error."""
        return self.relative_error <= need_number("tolerance", tolerance, low=0.0, cure="Try 1e-6.")

    def __str__(self) -> str:
        frozen = "every frozen tensor comes from the seed" if self.is_reproducible else "FROZEN TENSORS DIFFER"
        box = "" if self.outside_box is None else f", {100 * self.outside_box:.2f} % outside the certified box"
        named = ", ".join(self.others[:5]) + (", ..." if len(self.others) > 5 else "")
        others = f"{self.n_other:,} neither ({named})" if self.others else "no others"
        broken = f"NaN OR INFINITY IN THE OUTPUT OF {self.n_not_finite} OF " if self.n_not_finite else ""
        return (
            f"{broken}{self.n_samples} samples: relative error {self.relative_error:.1e}, largest {self.max_error:.1e}"
            f", same prediction on {100 * self.agreement:.2f} %, {100 * self.outside:.2f} % outside the calibrated "
            f"range{box}; {frozen}: {self.n_frozen:,} numbers, {self.n_norm:,} in norms, {others}"
        )


def verify(
    target: nn.Module | Reconstruction,
    network: nn.Module | Reconstruction,
    inputs: Inputs | NDArray[Any],
    *,
    batch_size: int | None = None,
    box: Box | None = None,
    step: Callable[[int, int], None] | None = None,
) -> Verification:
    """The differences between target and network on a batch, each run in its own precision.

    `batch_size` bounds the memory: so many samples at a time. `box` is the one that certified the ranges: inputs
    outside are counted. `step` is called with (samples done, samples in all).
    """
    target, network = as_network("verify", target), as_network("verify", network)
    given = as_inputs("verify", inputs)
    if box is not None:
        need_instance("box", box, Box, cure="Pass Box(low, high).")
    if step is not None:
        need_callable("step", step, cure="It is called with (samples done, samples in all).")
    for one in (target, network):
        need_evaluation("verify", one)
        need_batch("verify", one, given)
    rest_size = wanted_size = largest = 0.0
    n_same = n_samples = n_not_finite = 0
    with watching(network) as outside:
        for part in _parts(given, batch_size):
            made, wanted = _outputs(network, target, part)
            rest = made - wanted
            rest_size = math.hypot(rest_size, float(torch.linalg.vector_norm(rest)))
            wanted_size = math.hypot(wanted_size, float(torch.linalg.vector_norm(wanted)))
            worst = float(rest.abs().max())
            largest = math.nan if math.isnan(worst + largest) else max(worst, largest)
            is_finite = (made.isfinite() & wanted.isfinite()).all(1)
            n_same += int(((made.argmax(1) == wanted.argmax(1)) & is_finite).sum())
            n_not_finite += int((~is_finite).sum())
            n_samples += len(made)
            if step is not None:
                step(min(n_samples, len(given[0])), len(given[0]))
    n_frozen, n_norm, others = count_numbers(network)
    return Verification(
        max_error=largest,
        relative_error=rest_size / max(wanted_size, 1e-300) if math.isfinite(wanted_size) else math.nan,
        agreement=n_same / n_samples,
        outside=outside.share,
        is_reproducible=all(layer.is_reproducible() for layer in set(find_frozen(network).values())),
        n_samples=n_samples,
        n_frozen=n_frozen,
        n_norm=n_norm,
        n_other=sum(others.values()),
        others=tuple(others),
        outside_box=None if box is None else float(is_outside(given[0], box).double().mean()),
        n_not_finite=n_not_finite,
    )


def count_numbers(network: nn.Module) -> tuple[int, int, dict[str, int]]:
    """(numbers from the seed, numbers in norms, size of every other tensor by name) of a network.

    Tensors of whole numbers (counters, tables of positions) are not counted.
    """
    n_frozen = sum(layer.n_frozen for layer in set(find_frozen(network).values()))
    n_norm, others = 0, {}
    for place, module in network.named_modules():
        # The buffers of a block are its frozen weights, which `is_reproducible` compares, and its range.
        buffers = [] if isinstance(module, Block | FrozenMap) else [*module.named_buffers(recurse=False)]
        for name, tensor in (*module.named_parameters(recurse=False), *buffers):
            if isinstance(module, (*NORMS, Affine, NormOnlyLayer)):
                n_norm += tensor.numel() * tensor.is_floating_point()
            elif tensor.is_floating_point() or tensor.is_complex():
                others[f"{place}.{name}" if place else name] = tensor.numel()
    return n_frozen, n_norm, others


def _parts(inputs: tuple[Tensor, ...], batch_size: int | None) -> Iterator[tuple[Tensor, ...]]:
    if batch_size is None:
        yield inputs
        return
    batch_size = need_integer("batch_size", batch_size, low=1, cure="Try 64.")
    if any(x.ndim == 0 or len(x) != len(inputs[0]) for x in inputs):
        raise ShapeError(
            f"batch_size needs inputs with the same number of samples; got {[tuple(x.shape) for x in inputs]}. Leave "
            "batch_size out."
        )
    for start in range(0, len(inputs[0]), batch_size):
        yield tuple(x[start : start + batch_size] for x in inputs)


def _outputs(network: nn.Module, target: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """What both return, as (samples, numbers) in float64."""
    made, wanted = (run(one, cast(inputs, precision(one))) for one in (network, target))
    if not isinstance(made, Tensor) or not isinstance(wanted, Tensor) or made.shape != wanted.shape or not made.numel():
        raise ShapeError(
            "verify needs two networks that return one tensor of the same shape; got "
            f"{getattr(wanted, 'shape', type(wanted).__name__)} and {getattr(made, 'shape', type(made).__name__)}. "
            "Wrap them so that they return their logits."
        )
    if made.is_complex() or wanted.is_complex():
        raise ShapeError(
            f"verify needs networks with real outputs; got {wanted.dtype} and {made.dtype}. Wrap them so that they "
            "return real and imaginary parts apart: torch.view_as_real(output)."
        )
    n_samples = len(made) if made.ndim else 1
    return made.double().reshape(n_samples, -1), wanted.double().reshape(n_samples, -1)


BATCH = 50
"""Samples in one pass: enough to keep a few cores busy, few enough that a bar moves."""


@dataclass(frozen=True)
class Comparison:
    """How far two networks differ, and how often each of them is right; accuracies are None without labels."""

    check: Verification
    target_accuracy: float | None
    network_accuracy: float | None
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        own = {name: value for name, value in vars(self).items() if name != "check"}
        return asdict(self.check) | own

    def __str__(self) -> str:
        if self.target_accuracy is None or self.network_accuracy is None:
            return str(self.check)
        return (
            f"{self.check}; accuracy {100 * self.target_accuracy:.2f} % of the target, "
            f"{100 * self.network_accuracy:.2f} % of the network"
        )


def compare(
    target: nn.Module | Reconstruction,
    network: nn.Module | Reconstruction,
    *,
    inputs: Tensor,
    labels: Int[Tensor, " n_labels"] | None = None,
    batch_size: int = BATCH,
    step: Callable[[int, int], None] | None = None,
) -> Comparison:
    """The verification on all samples, and the accuracies of target and network where there are labels.

    `step` is called with (samples done, samples in all).
    """
    start = time.perf_counter()
    target, network = as_network("compare", target), as_network("compare", network)
    predictions: dict[nn.Module, list[Tensor]] = {target: [], network: []}

    def remember(module: nn.Module, _: object, output: object) -> None:
        if isinstance(output, Tensor):
            flat = output.flatten(1)
            found = flat.argmax(1).where(flat.isfinite().all(1), -1)  # NaN predicts no class
            predictions[module].append(found.cpu())

    has_labels = labels is not None and len(labels) > 0
    if labels is not None and has_labels and len(labels) != len(inputs):
        raise ShapeError(f"compare needs a label per sample, {len(inputs)}; got {len(labels)}. Cut both alike.")
    hooks = [one.register_forward_hook(remember) for one in predictions] if has_labels else []
    try:
        check = verify(target, network, inputs, batch_size=batch_size, step=step)
    finally:
        for hook in hooks:
            hook.remove()
    step_size = 2 if target is network else 1  # a network beside itself is called twice per batch
    right = [_accuracy(found[::step_size], labels) for found in predictions.values()]
    return Comparison(check, right[0], right[-1], time.perf_counter() - start)


def _accuracy(predictions: list[Tensor], labels: Tensor | None) -> float | None:
    if not predictions or labels is None:
        return None
    return float((torch.cat(predictions) == labels.cpu()).double().mean())
