"""`Passes`: forward and backward passes of a batch through a model that measure all signals and gradients.

`diagnose` runs all passes. `repair` runs the first one, `measure_layers`, after every change of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from onlynorm.errors import ConversionError, OnlynormError, ShapeError, shown
from onlynorm.modules import Loss, Output, default_loss, find_output
from onlynorm.modules.losses import call_loss
from onlynorm.modules.untouched import autocasts, failed_on, full_precision, reseed, untouched
from onlynorm.modules.walk import outputs_of
from onlynorm.rank.diagnosis.gradients import contrast, cosine_between, layer_gradient
from onlynorm.rank.diagnosis.probes import LastLayer, Probes, Reading
from onlynorm.rank.diagnosis.signals import MAX_COLUMNS, Layer
from onlynorm.seeds import seeded
from onlynorm.validate import need_callable

MIN_UNOBSERVED_NOTE = 0.01
"""Fraction of parameters in unobserved layers above which it is reported."""


class Passes:
    """The passes of one batch through a model: signals, gradients of the last layer, and skipped measures."""

    def __init__(
        self, model: nn.Module, inputs: Any, targets: Any = None, *, loss: Loss | None = None,
        output: Output | None = None, seed: int = 0, max_columns: int | None = MAX_COLUMNS,
        watched: Container[nn.Module] | None = None,
    ) -> None:  # fmt: skip
        for name, function in (("loss", loss), ("output", output)):
            if function is not None:
                need_callable(name, function, cure="Leave it out for the default.")
        self.model, self.inputs, self.targets = model, inputs, targets
        self._output = output or find_output
        self._loss = default_loss if loss is None and targets is not None else loss
        self._seed, self._max_columns, self._watched = seed, max_columns, watched
        self.called: set[nn.Module] = set()
        self._autocasts = autocasts()
        self.readings: list[Reading] = []
        self.last: LastLayer | None = None
        self.loss: float | None = None
        self.input_cosine: float | None = None
        self.contrast: float | None = None
        self.initial_loss_ratio: float | None = None
        self.unobserved = 0.0
        self.unused: frozenset[nn.Parameter] = frozenset()
        self.skipped: list[str] = []

    @property
    def layers(self) -> tuple[Layer, ...]:
        """All signals in the order in which they were computed."""
        return tuple(reading.layer() for reading in self.readings)

    def measure(self, *, with_contrast: bool) -> None:
        """Runs the batch forward with every signal read, and backward if there is a loss."""
        probes = Probes(
            self.model, tuple(outputs_of(self.inputs)), self._max_columns, seeded(self._seed), watched=self._watched
        )
        with probes:
            value, output = self._forward(self.inputs, probes)
            self.readings, self.called = probes.readings, probes.called
            self.unobserved = probes.unobserved()
            if self.unobserved >= MIN_UNOBSERVED_NOTE:
                self.skipped.append(
                    f"{self.unobserved:.1%} of the parameters, which belong to no layer that was called"
                )
            trained = [p for p in self.model.parameters() if p.requires_grad]
            obstacle = self._obstacle(value, trained)
            if obstacle or value is None:
                self.skipped.append(f"everything about gradients, because {obstacle}")
                return
            self.initial_loss_ratio = self._over_zeros(output, float(value.detach()))
            is_by_sample = with_contrast and isinstance(output, Tensor) and output.requires_grad and output.ndim > 0
            wanted = [*trained, output] if is_by_sample else trained
            found = torch.autograd.grad(value, wanted, allow_unused=True, retain_graph=is_by_sample)
            probes.end_backward()
            gradients = found[: len(trained)]
            self.unused = frozenset(p for p, g in zip(trained, gradients, strict=True) if g is None)
            probes.add_gradients({p: g for p, g in zip(trained, gradients, strict=True) if g is not None})
            if with_contrast:
                self._contrast(output if is_by_sample else None, trained, output_grad=found[-1], gradients=gradients)
        self.last = probes.last
        if self.last is None:
            self.skipped.append("the alignment of gradients, because no linear layer gets one")

    def compare(self, inputs: Any) -> None:
        """Compares the gradient of the last layer with that on other inputs; the backward pass stops at this layer."""
        assert self.last is not None
        layer = self.model.get_submodule(self.last.name)
        weights = [p for p in layer.parameters() if p.requires_grad]
        reached = weights or [p for p in self.model.parameters() if p.requires_grad]
        probes = Probes(self.model, (), self._max_columns, seeded(self._seed), is_reading=False)
        with probes:
            value, _ = self._forward(inputs, probes)
            if value is not None and math.isfinite(float(value.detach())):
                torch.autograd.grad(value, reached, allow_unused=True)  # calls the hooks
        if probes.last is None or probes.last.name != self.last.name:
            self.skipped.append("the comparison with random inputs, because they give no gradient")
            return
        self.input_cosine = cosine_between(layer_gradient(self.last), layer_gradient(probes.last))

    def _contrast(
        self, output: Any, trained: Sequence[nn.Parameter], *, output_grad: Tensor | None,
        gradients: Sequence[Tensor | None],
    ) -> None:  # fmt: skip
        """Runs a second backward pass with the mean of the output gradients over samples."""
        reason = "the mean output gradient has no effect on a parameter"
        if output is None or output_grad is None:
            reason = "the output in the loss is not a tensor with a row per sample"
        else:
            try:
                self.contrast = contrast(output, trained, output_grad=output_grad, gradients=gradients)
            except RuntimeError as error:  # layers with a single backward pass
                reason = f"a second backward pass fails ({str(error).splitlines()[0]})"
        if self.contrast is None:
            self.skipped.append(f"the contrast of samples, because {reason}")

    def _over_zeros(self, output: Any, loss: float) -> float | None:
        """The loss relative to that of zero outputs, for default losses."""
        if self._loss is not default_loss:
            return None
        of_zeros = float(default_loss(torch.zeros_like(output), self.targets))
        return loss / of_zeros if of_zeros > 0.0 else None

    def _forward(self, inputs: Any, probes: Probes) -> tuple[Any, Any]:
        """(loss, output) of a forward pass; (None, None) without a loss."""
        reseed(self.model, self._seed)
        named = inputs if isinstance(inputs, Mapping) else {}
        placed = () if isinstance(inputs, Mapping) else inputs if isinstance(inputs, tuple | list) else (inputs,)
        with ExitStack() as stack:
            for device, dtype in self._autocasts:  # the autocast of the caller
                stack.enter_context(torch.autocast(device, dtype=dtype))
            try:
                returned = self.model(*placed, **named)
            except (OnlynormError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                raise failed_on("diagnose", self.model, outputs_of(inputs), error) from error
            probes.end_forward()
            if self._loss is None:
                return None, None
            output = self._selected(returned)
            return call_loss("diagnose", self._loss, output=output, targets=self.targets), output

    def _selected(self, returned: Any) -> Any:
        """The argument of the loss, from what the model returned."""
        try:
            return self._output(returned)
        except OnlynormError:
            raise
        except Exception as error:
            first = str(error).partition("\n")[0]
            raise ConversionError(
                f"output= needs a function of what the model returns; got {shown(returned)}, on which it failed with "
                f"{type(error).__name__}: {first:.200}. Pass a function that selects the logits."
            ) from error

    def _obstacle(self, value: Any, trained: Sequence[nn.Parameter]) -> str:
        """The reason why there is no backward pass; empty if there is one."""
        if value is None:
            return "no targets were given"
        if not isinstance(value, Tensor) or value.numel() != 1 or value.is_complex():
            got = f"shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
            raise ShapeError(f"the loss needs to be one real number as a tensor; got {got}. Take its mean.")
        self.loss = float(value.detach())
        if not math.isfinite(self.loss):
            return f"the loss is {self.loss}"
        if not trained or not value.requires_grad:
            return "no parameter requires a gradient"
        return ""


def measure_layers(
    model: nn.Module, inputs: Any, targets: Any = None, *, loss: Loss | None = None, output: Output | None = None,
    seed: int = 0,
) -> tuple[Layer, ...]:  # fmt: skip
    """All signals of a batch with their gradients, from one forward and one backward pass in training mode."""
    passes = Passes(model, inputs, targets, loss=loss, output=output, seed=seed)
    with full_precision(), untouched(model, is_training=True, tensors=outputs_of(inputs)):
        passes.measure(with_contrast=False)
    return passes.layers
