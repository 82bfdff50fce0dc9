"""`verify`: compares the outputs of two networks, and checks that frozen weights are those of the seed.

`compare`: `verify` in batches, with the accuracies of both networks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor, nn

from onlynorm.display import Curve, Figure, Panel, Result, ShownResult, Table, View
from onlynorm.errors import ShapeError
from onlynorm.frozen.form import FrozenLayer, find_frozen
from onlynorm.frozen.maps import FrozenMap
from onlynorm.intervals.tensor import Box
from onlynorm.modules.affine import Affine
from onlynorm.modules.norms import NORMS
from onlynorm.modules.walk import Inputs, as_inputs, cast, counting_samples, need_batch, need_evaluation, precision, run
from onlynorm.progress import with_progress
from onlynorm.reconstruction.ranges import count_outside, is_outside
from onlynorm.reconstruction.result import Reconstruction, as_network
from onlynorm.validate import Progress, need_instance, need_integer, need_number, need_progress


@dataclass(frozen=True, repr=False)
class Verification(ShownResult):
    """Differences between two networks on a batch, and the origin of the second network's tensors.

    `outside` is the largest fraction of samples outside the range of a block, `outside_box` the fraction outside the
    box (None without a box). `n_frozen` entries are drawn from the seed and `n_norm` are parameters of norms; `others`
    names the other tensors, with `n_other` entries. The ranges of blocks are not counted. `n_not_finite` samples have
    NaN or infinity in either output: they never agree, and the errors are NaN or infinite. `output_errors` are the
    largest errors of each output, `sample_errors` the relative errors of each sample.
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
    output_errors: tuple[float, ...] = field(default=(), compare=False)
    sample_errors: tuple[float, ...] = field(default=(), compare=False)

    @property
    def is_only_norms(self) -> bool:
        """Whether the network consists of frozen weights from the seed and norms only."""
        return self.is_reproducible and not self.others

    def is_same(self, tolerance: float) -> bool:
        """Whether the relative error of the outputs is at most `tolerance`."""
        return self.relative_error <= need_number("tolerance", tolerance, low=0.0, cure="Try 1e-6.")

    def as_dict(self) -> dict[str, Any]:
        """All fields except the errors of single outputs and samples as JSON types."""
        return {
            **{
                name: value
                for name, value in super().as_dict().items()
                if name not in ("output_errors", "sample_errors")
            },
            "is_only_norms": self.is_only_norms,
        }

    def plot(self) -> Figure:
        """The error of every output, and the sorted errors of the samples."""
        outputs = [(place, y) for place, y in enumerate(self.output_errors, start=1) if y > 0 and math.isfinite(y)]
        samples = sorted(y for y in self.sample_errors if y > 0 and math.isfinite(y))
        curves = []
        if outputs:
            places, errors = zip(*outputs, strict=True)
            curves.append(Curve("", places, errors, "points", "outputs"))
        if samples:
            curves.append(Curve("", range(1, len(samples) + 1), samples, "line", "samples"))
        return Figure(curves, (
            Panel("outputs", "Largest error of every output", "output", "absolute error", y_log=True),
            Panel("samples", "Samples by their error", "sample", "relative error", y_log=True),
        ))  # fmt: skip

    def view(self) -> View:
        """The differences between the networks, and the origin of the tensors."""
        is_known = self.is_reproducible and not self.n_not_finite
        fractions = {"outside the calibrated range": self.outside, "outside the certified box": self.outside_box}
        return View(
            "Verification of a network", f"relative error {self.relative_error:.1e}", "" if is_known else "bad",
            [] if self.is_reproducible else ["Frozen tensors differ from what the seed gives."],
            facts={
                "samples": self.n_samples, "largest error": f"{self.max_error:.2e}",
                "same prediction": f"{100 * self.agreement:.2f} %",
                **{name: f"{100 * fraction:.2f} %" for name, fraction in fractions.items() if fraction is not None},
                "samples with NaN or infinity": self.n_not_finite,
                "every frozen tensor comes from the seed": self.is_reproducible, "frozen entries": self.n_frozen,
                "parameters of norms": self.n_norm, "other parameters": self.n_other,
            },
            tables={"Other tensors": Table(("tensor",), [(name,) for name in self.others])} if self.others else {},
        )  # fmt: skip

    def __str__(self) -> str:
        frozen = "every frozen tensor comes from the seed" if self.is_reproducible else "FROZEN TENSORS DIFFER"
        box = "" if self.outside_box is None else f", {100 * self.outside_box:.2f} % outside the certified box"
        named = ", ".join(self.others[:5]) + (", ..." if len(self.others) > 5 else "")
        others = f"{self.n_other:,} neither ({named})" if self.others else "no others"
        noun = "sample" if self.n_samples == 1 else "samples"
        broken = f"NaN OR INFINITY IN THE OUTPUT OF {self.n_not_finite} OF " if self.n_not_finite else ""
        return (
            f"{broken}{self.n_samples} {noun}: relative error {self.relative_error:.1e}, largest {self.max_error:.1e}"
            f", same prediction on {100 * self.agreement:.2f} %\n"
            f"{100 * self.outside:.2f} % outside the calibrated range{box}\n"
            f"{frozen}: {self.n_frozen:,} entries, {self.n_norm:,} in norms, {others}"
        )


@with_progress
def verify(
    model: nn.Module | Reconstruction,
    network: nn.Module | Reconstruction,
    inputs: Inputs | NDArray[Any],
    *,
    batch_size: int | None = None,
    box: Box | None = None,
    progress: Progress | bool | None = None,
) -> Verification:
    """The differences between the outputs of model and network on a batch, each in its own precision.

    `batch_size` is the number of samples per forward pass. `box` is the box of certified ranges; inputs outside it are
    counted. `progress=True` shows a bar; a function is called with (samples done, total samples, message).

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> from onlynorm.models import mlp
        >>> model, inputs = mlp((8, 16, 4)).double(), torch.rand(64, 8).double()
        >>> check = on.verify(model, on.reconstruct(model, inputs), inputs)
        >>> check.agreement, check.relative_error < 1e-8
        (1.0, True)
    """
    model, network = as_network("verify", model), as_network("verify", network)
    given = as_inputs("verify", inputs)
    if box is not None:
        need_instance("box", box, Box, cure="Pass Box(low, high).")
    progress = need_progress(progress)
    for one in (model, network):
        need_evaluation("verify", one)
        need_batch("verify", one, given)
    rest_size = wanted_size = largest = 0.0
    n_same = n_samples = n_not_finite = 0
    by_output, by_sample = list[Tensor](), list[Tensor]()
    with count_outside(network) as outside, counting_samples(model, given) as n_given:
        for part in _parts(given, batch_size):
            made, wanted = _outputs(network, model, part, n_given)
            rest = made - wanted
            rest_size = math.hypot(rest_size, float(torch.linalg.vector_norm(rest)))
            wanted_size = math.hypot(wanted_size, float(torch.linalg.vector_norm(wanted)))
            by_output.append(rest.abs().amax(0).cpu())
            sizes = torch.linalg.vector_norm(wanted, dim=1).clamp_min(1e-300)
            by_sample.append((torch.linalg.vector_norm(rest, dim=1) / sizes).cpu())
            worst = float(rest.abs().max())
            largest = math.nan if math.isnan(worst + largest) else max(worst, largest)
            is_finite = (made.isfinite() & wanted.isfinite()).all(1)
            n_same += int(((made.argmax(1) == wanted.argmax(1)) & is_finite).sum())
            n_not_finite += int((~is_finite).sum())
            n_samples += len(made)
            if progress is not None:
                done, total = min(n_samples, n_given()), n_given()
                progress(done, total, f"{done} of {total} samples compared")
    n_frozen, n_norm, others = count_entries(network)
    return Verification(
        max_error=largest,
        relative_error=rest_size / max(wanted_size, 1e-300) if math.isfinite(wanted_size) else math.nan,
        agreement=n_same / n_samples,
        outside=outside.fraction,
        is_reproducible=all(layer.is_reproducible() for layer in set(find_frozen(network).values())),
        n_samples=n_samples,
        n_frozen=n_frozen,
        n_norm=n_norm,
        n_other=sum(others.values()),
        others=tuple(others),
        outside_box=None if box is None else float(is_outside(given[0], box).double().mean()),
        n_not_finite=n_not_finite,
        output_errors=tuple(torch.stack(by_output).amax(0).tolist()) if len({*map(len, by_output)}) == 1 else (),
        sample_errors=tuple(torch.cat(by_sample).tolist()),
    )


def count_entries(network: nn.Module) -> tuple[int, int, dict[str, int]]:
    """(entries drawn from the seed, entries in norms, size of every other tensor by name) of a network.

    Integer tensors (counters, position indices) are not counted.
    """
    n_frozen = sum(layer.n_frozen for layer in set(find_frozen(network).values()))
    n_norm, others = 0, {}
    for place, module in network.named_modules():
        # Buffers of frozen layers are ranges, and frozen tensors that `is_reproducible` compares.
        buffers = [] if isinstance(module, FrozenLayer | FrozenMap) else [*module.named_buffers(recurse=False)]
        for name, tensor in (*module.named_parameters(recurse=False), *buffers):
            if isinstance(module, (*NORMS, Affine, FrozenLayer)):
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


def _outputs(
    network: nn.Module, model: nn.Module, inputs: tuple[Tensor, ...], n_given: Callable[[], int]
) -> tuple[Tensor, Tensor]:
    """The outputs of both, as (samples, entries) in float64; one row for one sample without a batch axis."""
    made, wanted = (run(one, cast(inputs, precision(one))) for one in (network, model))
    if not isinstance(made, Tensor) or not isinstance(wanted, Tensor) or made.shape != wanted.shape or not made.numel():
        raise ShapeError(
            "verify needs two networks that return one tensor of the same shape; got "
            f"{getattr(wanted, 'shape', type(wanted).__name__)} and {getattr(made, 'shape', type(made).__name__)}. "
            "Wrap them so that they return their logits."
        )
    if made.is_complex() or wanted.is_complex():
        raise ShapeError(
            f"verify needs networks with real outputs; got {wanted.dtype} and {made.dtype}. Wrap them so that they "
            "return torch.view_as_real(output)."
        )
    n_samples = 1 if not made.ndim or (inputs[0].ndim and n_given() < len(inputs[0])) else len(made)
    return made.double().reshape(n_samples, -1), wanted.double().reshape(n_samples, -1)


BATCH = 50
"""Default number of samples per forward pass."""


@dataclass(frozen=True)
class Comparison(Result):
    """The verification of a network, and the accuracies of both networks (None without labels)."""

    check: Verification
    target_accuracy: float | None
    network_accuracy: float | None
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """All results as JSON types."""
        own = {name: value for name, value in vars(self).items() if name != "check"}
        return self.check.as_dict() | own

    def __str__(self) -> str:
        if self.target_accuracy is None or self.network_accuracy is None:
            return str(self.check)
        return (
            f"{self.check}\naccuracy {100 * self.target_accuracy:.2f} % of the target, "
            f"{100 * self.network_accuracy:.2f} % of the network"
        )


@with_progress
def compare(
    model: nn.Module | Reconstruction,
    network: nn.Module | Reconstruction,
    inputs: Tensor,
    *,
    labels: Int[Tensor, " n_labels"] | None = None,
    batch_size: int = BATCH,
    progress: Progress | bool | None = None,
) -> Comparison:
    """The verification on all samples, and the accuracies of model and network if labels are given.

    `progress=True` shows a bar; a function is called with (samples done, total samples, message).

    Examples:
        >>> import onlynorm as on
        >>> from onlynorm.data import digits
        >>> from onlynorm.models import load_model
        >>> from onlynorm.reconstruction import compare
        >>> model, data = load_model("digits_cnn"), digits()
        >>> rebuilt = on.reconstruct(model, data.train_inputs[:64], on.Wide(features="id_cond"))
        >>> compared = compare(model, rebuilt, data.test_inputs, labels=data.test_labels)
        >>> f"{compared.target_accuracy:.1%}", f"{compared.network_accuracy:.1%}"
        ('99.4%', '99.4%')
    """
    start = time.perf_counter()
    model, network = as_network("compare", model), as_network("compare", network)
    predictions: dict[nn.Module, list[Tensor]] = {model: [], network: []}

    def record(module: nn.Module, _: object, output: object) -> None:
        if isinstance(output, Tensor):
            flat = output.flatten(1)
            found = flat.argmax(1).where(flat.isfinite().all(1), -1)  # NaN predicts no class
            predictions[module].append(found.cpu())

    has_labels = labels is not None and len(labels) > 0
    if labels is not None and has_labels and len(labels) != len(inputs):
        raise ShapeError(f"compare needs a label per sample, {len(inputs)}; got {len(labels)}. Slice both equally.")
    hooks = [one.register_forward_hook(record) for one in predictions] if has_labels else []
    try:
        check = verify(model, network, inputs, batch_size=batch_size, progress=progress)
    finally:
        for hook in hooks:
            hook.remove()
    step_size = 2 if model is network else 1  # the same network is called twice per batch
    accuracies = [_accuracy(found[::step_size], labels) for found in predictions.values()]
    return Comparison(check, accuracies[0], accuracies[-1], time.perf_counter() - start)


def _accuracy(predictions: list[Tensor], labels: Tensor | None) -> float | None:
    if not predictions or labels is None:
        return None
    return float((torch.cat(predictions) == labels.cpu()).double().mean())
