"""`diagnose`: one batch forward and backward through a model, every signal measured, and a verdict in plain words.

A second backward pass through the same graph, with what the loss asks of all samples alike, shows how much of the
gradient tells samples apart. A second forward pass on random inputs, backward no further than the last linear layer,
shows whether the gradient depends on the inputs at all. All together cost about two passes of training; reading is
extra.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from onlynorm.errors import ConversionError, OnlynormError, ShapeError
from onlynorm.modules import Loss, Output, default_loss, find_output
from onlynorm.modules.untouched import autocasts, failed_on, full_precision, need_layers, reseed, untouched
from onlynorm.rank.coverage import can_repair
from onlynorm.rank.diagnosis.gradients import (
    contrast,
    cosine_between,
    layer_gradient,
    meaningless,
    neuron_alignment,
    sample_cosine,
)
from onlynorm.rank.diagnosis.probes import LastLayer, Probes, Reading
from onlynorm.rank.diagnosis.result import Diagnosis
from onlynorm.rank.diagnosis.separability import read_last
from onlynorm.rank.diagnosis.signals import MAX_COLUMNS
from onlynorm.rank.diagnosis.verdict import Thresholds, judge
from onlynorm.seeds import seeded
from onlynorm.validate import as_tensor, need_callable, need_choice, need_flag, need_instance, need_integer, need_seed

MODES = ("train", "eval")
WORTH_A_NOTE = 0.01
"""Fraction of the parameters in layers that were not observed from which on it is reported."""


def diagnose(
    model: nn.Module,
    inputs: Any,
    targets: Any = None,
    *,
    loss: Loss | None = None,
    output: Output | None = None,
    mode: str = "train",
    random_inputs: bool = True,
    max_columns: int | None = MAX_COLUMNS,
    thresholds: Thresholds | None = None,
    seed: int = 0,
) -> Diagnosis:
    """Signals and gradients of a batch in every layer, and whether plain SGD is likely to train the model.

    The model is left exactly as it was.

    `inputs` is a batch (tensor or NumPy array), a tuple of arguments or a dict of named ones, samples first. `targets`
    are class labels (integers: cross entropy) or real values (mean squared error), unless `loss(output, targets)` is
    given; without both, gradients are left out. `output` picks the argument of the loss from what the model returns; by
    default the logits, or the first tensor. `mode="train"` makes batch norms use the batch, as they do in training.
    `random_inputs` compares gradients with those on noise. Convolutional signals are channels x (samples * positions),
    of which at most `max_columns` columns are used. The model inside DistributedDataParallel, DataParallel and
    torch.compile is diagnosed; traced, scripted and exported models are refused. An active autocast applies to the
    passes through the model, not to the measures. Theory: daneshmand2020:prop-8, daneshmand2020:lemma-1
    """
    started = time.perf_counter()
    network, arguments = need_layers("diagnose", model), _ready(inputs)
    given = _checked(inputs, arguments)
    wanted = as_tensor("targets", targets) if loss is None and targets is not None else _ready(targets)
    run = _Run(network, wanted, loss=loss, output=output, seed=need_seed(seed), max_columns=max_columns)
    need_flag("random_inputs", random_inputs)
    limits = Thresholds() if thresholds is None else thresholds
    need_instance("thresholds", limits, Thresholds, cure="Pass onlynorm.rank.Thresholds(rank=0.01).")
    is_training = need_choice("mode", mode, MODES) == "train"
    with full_precision():
        with untouched(network, is_training=is_training, tensors=given):
            run.read(arguments)
            if random_inputs and run.last is not None:
                run.compare(meaningless(arguments, seed=seed))
        return run.result(limits, mode=mode, n_samples=len(given[0]), started=started)


class _Run:
    """The passes over one batch, and their results: readings, the last layer's gradients, and what was skipped."""

    def __init__(
        self, model: nn.Module, targets: Any, *, loss: Loss | None, output: Output | None, seed: int,
        max_columns: int | None,
    ) -> None:  # fmt: skip
        for name, function in (("loss", loss), ("output", output)):
            if function is not None:
                need_callable(name, function, cure="Leave it out for the default.")
        if max_columns is not None:
            max_columns = need_integer("max_columns", max_columns, low=2, cure="None takes all columns.")
        self._model, self._targets, self._output = model, targets, output or find_output
        self._loss = default_loss if loss is None and targets is not None else loss
        self._seed, self._max_columns = seed, max_columns
        self._autocasts = autocasts()
        self.readings: list[Reading] = []
        self.last: LastLayer | None = None
        self.loss: float | None = None
        self.input_cosine: float | None = None
        self.contrast: float | None = None
        self.start: float | None = None
        self.unobserved = 0.0
        self.skipped: list[str] = []

    def result(self, thresholds: Thresholds, *, mode: str, n_samples: int, started: float) -> Diagnosis:
        """The diagnosis, once all passes are done."""
        layers = tuple(reading.layer() for reading in self.readings)
        if not any(layer.has_weights for layer in layers):
            raise ConversionError(
                f"diagnose needs a model that calls layers with weights as modules, on floating-point signals; got "
                f"{type(self._model).__name__}, which calls none. Make layers of what it computes by functions."
            )
        last_signal = None if self.last is None else read_last(self.last, self._targets)
        if self.last is not None and last_signal is None:
            self.skipped.append("what the targets explain in the last layer, because there are too few samples")
        directions, told = last_signal or (None, None)
        facts: dict[str, float | None] = {
            "alignment": None if self.last is None else neuron_alignment(self.last),
            "input_cosine": self.input_cosine,
            "contrast": self.contrast,
            "directions": directions,
            "told": told,
            "start": self.start,
        }
        return Diagnosis(
            layers=layers,
            verdict=judge(
                layers,
                loss=self.loss,
                unobserved=self.unobserved,
                thresholds=thresholds,
                can_repair=self._can_repair,
                **facts,
            ),
            loss=self.loss,
            sample_cosine=None if self.last is None else sample_cosine(self.last),
            last_layer=None if self.last is None else self.last.name,
            skipped=tuple(self.skipped),
            n_samples=n_samples,
            mode=mode,
            seconds=time.perf_counter() - started,
            **facts,
        )

    def _can_repair(self) -> bool:
        called = {reading.module for reading in self.readings if reading.module is not None}
        return can_repair(self._model, called)

    def read(self, inputs: Any) -> None:
        """Forward with every signal read, and backward if there is a loss."""
        probes = Probes(self._model, tuple(_tensors(inputs)), self._max_columns, seeded(self._seed))
        with probes:
            value, output = self._forward(inputs, probes)
            self.readings = probes.readings
            self.unobserved = probes.unobserved()
            if self.unobserved >= WORTH_A_NOTE:
                self.skipped.append(
                    f"{self.unobserved:.0%} of the parameters, which belong to no layer that was called"
                )
            trained = [p for p in self._model.parameters() if p.requires_grad]
            obstacle = self._obstacle(value, trained)
            if obstacle or value is None:
                self.skipped.append(f"everything about gradients, because {obstacle}")
                return
            self.start = self._over_zeros(output, float(value.detach()))
            is_by_sample = isinstance(output, Tensor) and output.requires_grad and output.ndim > 0
            wanted = [*trained, output] if is_by_sample else trained
            found = torch.autograd.grad(value, wanted, allow_unused=True, retain_graph=is_by_sample)
            probes.end_backward()
            gradients = found[: len(trained)]
            probes.add_gradients({p: g for p, g in zip(trained, gradients, strict=True) if g is not None})
            self._contrast(output if is_by_sample else None, trained, wish=found[-1], gradients=gradients)
        self.last = probes.last
        if self.last is None:
            self.skipped.append("the alignment of gradients, because no linear layer gets one")

    def _contrast(
        self, output: Any, trained: Sequence[nn.Parameter], *, wish: Tensor | None, gradients: Sequence[Tensor | None]
    ) -> None:
        """Backward once more, with what the loss asks of all samples alike."""
        reason = "no common part of the gradient moves a parameter"
        if output is None or wish is None:
            reason = "the loss is not taken of a tensor with a row for each sample"
        else:
            try:
                self.contrast = contrast(output, trained, wish=wish, gradients=gradients)
            except RuntimeError as error:  # of layers whose backward pass works once only
                reason = f"a second backward pass fails ({str(error).splitlines()[0]})"
        if self.contrast is None:
            self.skipped.append(f"the contrast of samples, because {reason}")

    def _over_zeros(self, output: Any, loss: float) -> float | None:
        """The loss over that of outputs of zero; what these would cost by a loss of one's own, nobody knows."""
        if self._loss is not default_loss:
            return None
        nothing = float(default_loss(torch.zeros_like(output), self._targets))
        return loss / nothing if nothing > 0.0 else None

    def compare(self, inputs: Any) -> None:
        """The same layer's gradient on other inputs; the backward pass ends there."""
        assert self.last is not None
        layer = self._model.get_submodule(self.last.name)
        weights = [p for p in layer.parameters() if p.requires_grad]
        reached = weights or [p for p in self._model.parameters() if p.requires_grad]
        probes = Probes(self._model, (), self._max_columns, seeded(self._seed), is_reading=False)
        with probes:
            value, _ = self._forward(inputs, probes)
            if value is not None and math.isfinite(float(value.detach())):
                torch.autograd.grad(value, reached, allow_unused=True)  # for the hooks
        if probes.last is None or probes.last.name != self.last.name:
            self.skipped.append("the comparison with random inputs, because they give no gradient")
            return
        self.input_cosine = cosine_between(layer_gradient(self.last), layer_gradient(probes.last))

    def _forward(self, inputs: Any, probes: Probes) -> tuple[Tensor | None, Any]:
        """(loss, what it is taken of), if there is one."""
        reseed(self._model, self._seed)
        named = inputs if isinstance(inputs, Mapping) else {}
        placed = () if isinstance(inputs, Mapping) else inputs if isinstance(inputs, tuple | list) else (inputs,)
        with ExitStack() as stack:
            for device, dtype in self._autocasts:  # as in the caller's training
                stack.enter_context(torch.autocast(device, dtype=dtype))
            try:
                returned = self._model(*placed, **named)
            except (OnlynormError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                raise failed_on("diagnose", self._model, list(_tensors(inputs)), error) from error
            probes.end_forward()
            if self._loss is None:
                return None, None
            output = self._output(returned)
            return self._loss(output, self._targets), output

    def _obstacle(self, value: Tensor | None, trained: Sequence[nn.Parameter]) -> str:
        """Why there is no backward pass, or nothing."""
        if value is None:
            return "no targets were given"
        if not isinstance(value, Tensor) or value.numel() != 1 or value.is_complex():
            got = f"shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
            raise ShapeError(f"diagnose needs a loss that is one real number as a tensor; got {got}. Take its mean.")
        self.loss = float(value.detach())
        if not math.isfinite(self.loss):
            return f"the loss is {self.loss}"
        if not trained or not value.requires_grad:
            return "no parameter requires a gradient"
        return ""


def _checked(inputs: Any, arguments: Any) -> list[Tensor]:
    """The tensors of the arguments, if the first is a batch of two samples or more."""
    given = list(_tensors(arguments))
    if not given or not given[0].ndim or len(given[0]) < 2:
        got = f"a batch of shape {tuple(given[0].shape)}" if given else f"{type(inputs).__name__} without a tensor"
        raise ShapeError(
            "diagnose needs a batch of two samples or more, since one has rank one whatever the network does; got "
            f"{got}. Pass 64 samples or so, samples first."
        )
    return given


def _ready(value: Any) -> Any:
    """Nested lists, tuples and dicts with all arrays as dense tensors that gradients can be taken of."""
    if isinstance(value, Mapping):
        return {name: _ready(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_ready(item) for item in value)
    if not isinstance(value, Tensor | np.ndarray):
        return value
    made = as_tensor("diagnose", value)
    with torch.inference_mode(False):
        return made.clone() if made.is_inference() else made


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples and dicts, of any dtype."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)
