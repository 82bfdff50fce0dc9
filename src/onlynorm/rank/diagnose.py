"""`diagnose`: one batch forward and backward through a model, every signal read, and what that means in plain words.

A second backward pass through the same graph, with what the loss asks of all samples alike, shows how much of the
gradient tells samples apart. A second forward pass on random inputs, backward no further than the last linear layer,
shows whether the gradient depends on the inputs at all. All together cost about two passes of training; reading is
extra.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from onlynorm.data import seeded
from onlynorm.errors import ConversionError, ShapeError, UnknownNameError
from onlynorm.rank.contrast import contrast
from onlynorm.rank.diagnosis import Diagnosis
from onlynorm.rank.last_signal import read_last
from onlynorm.rank.losses import Loss, Output, find_output, usual_loss
from onlynorm.rank.probes import LastLayer, Probes, Reading
from onlynorm.rank.sample_gradients import cosine_between, layer_gradient, meaningless, neuron_alignment, sample_cosine
from onlynorm.rank.signals import MAX_COLUMNS
from onlynorm.rank.untouched import reseed, untouched
from onlynorm.rank.verdict import Thresholds, judge

MODES = ("train", "eval")


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
    """What happens to signals and gradients of a batch in the model, and whether it can learn; it stays as it is.

    `inputs` is a batch, a tuple of arguments or a dict of named ones, samples first. `targets` are classes (cross
    entropy) or numbers (mean square), unless `loss(output, targets)` is given; without both, gradients are left out.
    `output` picks from what the model returns what the loss gets; the logits, or the first tensor, by default. "train"
    is the mode in which batch norms use the batch, as they will in training. `random_inputs` compares with inputs that
    mean nothing. Convolutional signals are channels x (samples * positions), of which at most `max_columns` columns are
    looked at. Theory: daneshmand2020:prop-8, daneshmand2020:lemma-1
    """
    started = time.perf_counter()
    given = _checked(model, inputs, mode)
    run = _Run(model, targets, loss=loss, output=output or find_output, seed=seed, max_columns=max_columns)
    with untouched(model, is_training=mode == "train", tensors=given):
        run.read(inputs)
        if random_inputs and run.last is not None:
            run.compare(meaningless(inputs, seed=seed))
    layers = tuple(reading.layer() for reading in run.readings)
    if not layers:
        raise ConversionError(
            f"diagnose needs a model that calls layers with floating-point signals; {type(model).__name__} calls none. "
            "Scripted and compiled models hide theirs: pass the model they were made from."
        )
    last_signal = None if run.last is None else read_last(run.last, targets)
    if run.last is not None and last_signal is None:
        run.skipped.append("what samples tell in the last layer, because there are too few of them for such targets")
    directions, told = last_signal or (None, None)
    facts: dict[str, float | None] = {
        "alignment": None if run.last is None else neuron_alignment(run.last),
        "input_cosine": run.input_cosine,
        "contrast": run.contrast,
        "directions": directions,
        "told": told,
        "start": run.start,
    }
    return Diagnosis(
        layers=layers,
        verdict=judge(layers, thresholds=thresholds or Thresholds(), **facts),
        loss=run.loss,
        sample_cosine=None if run.last is None else sample_cosine(run.last),
        last_layer=None if run.last is None else run.last.name,
        skipped=tuple(run.skipped),
        n_samples=len(given[0]),
        mode=mode,
        seconds=time.perf_counter() - started,
        **facts,
    )


class _Run:
    """The passes over one batch, and what they leave: readings, the last layer's gradients, and what was skipped."""

    def __init__(
        self, model: nn.Module, targets: Any, *, loss: Loss | None, output: Output, seed: int, max_columns: int | None
    ) -> None:
        self._model, self._targets, self._output = model, targets, output
        self._loss = usual_loss if loss is None and targets is not None else loss
        self._seed, self._max_columns = seed, max_columns
        self.readings: list[Reading] = []
        self.last: LastLayer | None = None
        self.loss: float | None = None
        self.input_cosine: float | None = None
        self.contrast: float | None = None
        self.start: float | None = None
        self.skipped: list[str] = []

    def read(self, inputs: Any) -> None:
        """Forward with every signal read, and backward if there is something to go back from."""
        probes = Probes(self._model, tuple(_tensors(inputs)), self._max_columns, seeded(self._seed))
        with probes:
            value, output = self._forward(inputs, probes)
            self.readings = probes.readings
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
        if self._loss is not usual_loss:
            return None
        nothing = float(usual_loss(torch.zeros_like(output), self._targets))
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
        if isinstance(inputs, Mapping):
            returned = self._model(**inputs)
        else:
            returned = self._model(*inputs) if isinstance(inputs, tuple | list) else self._model(inputs)
        probes.end_forward()
        if self._loss is None:
            return None, None
        output = self._output(returned)
        return self._loss(output, self._targets), output

    def _obstacle(self, value: Tensor | None, trained: Sequence[nn.Parameter]) -> str:
        """Why there is no backward pass, or nothing."""
        if value is None:
            return "no targets were given"
        if value.numel() != 1:
            raise ShapeError(f"diagnose needs a loss of one number; got {tuple(value.shape)}. Take its mean.")
        self.loss = float(value.detach())
        if not math.isfinite(self.loss):
            return f"the loss is {self.loss}"
        if not trained or not value.requires_grad:
            return "no parameter requires a gradient"
        return ""


def _checked(model: nn.Module, inputs: Any, mode: str) -> list[Tensor]:
    """The tensors of the inputs, once it is known that the model can be diagnosed by them."""
    if not isinstance(model, nn.Module):
        raise ConversionError(f"diagnose needs a torch Module; got {type(model).__name__}. Pass the model itself.")
    if mode not in MODES:
        raise UnknownNameError("mode", mode, MODES)
    if any(nn.parameter.is_lazy(p) for p in (*model.parameters(), *model.buffers())):
        raise ConversionError(
            f"diagnose needs a model whose layers have their shapes; {type(model).__name__} has lazy ones. Call it "
            "on a batch first."
        )
    given = list(_tensors(inputs))
    if not given or not given[0].ndim or len(given[0]) < 2:
        got = f"a batch of shape {tuple(given[0].shape)}" if given else f"{type(inputs).__name__} without a tensor"
        raise ShapeError(
            "diagnose needs a batch of two samples or more, since one has rank one whatever the network does; got "
            f"{got}. Pass 64 samples or so, samples first."
        )
    return given


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples and dicts, whatever their numbers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)
