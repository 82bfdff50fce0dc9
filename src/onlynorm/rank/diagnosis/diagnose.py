"""`diagnose`: measures all signals and gradients of a model on one batch, and returns a verdict.

A second backward pass through the same graph, with the mean output gradient, measures how fast differences between
samples are learned. A second forward pass on noise, with a backward pass to the last linear layer only, measures
whether the gradient depends on the inputs. The passes cost about as much as two training steps, without the measures.
"""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from onlynorm.errors import ConversionError, ShapeError, UnknownNameError
from onlynorm.modules import Loss, ModuleTree, Output
from onlynorm.modules.norms import plain_name
from onlynorm.modules.tree import recording
from onlynorm.modules.untouched import full_precision, need_layers, untouched
from onlynorm.modules.walk import outputs_of
from onlynorm.rank.coverage import can_repair
from onlynorm.rank.diagnosis.gradients import neuron_alignment, noise_like, sample_cosine
from onlynorm.rank.diagnosis.passes import Passes
from onlynorm.rank.diagnosis.probes import is_weighty
from onlynorm.rank.diagnosis.result import Diagnosis
from onlynorm.rank.diagnosis.separability import measure_last_layer
from onlynorm.rank.diagnosis.signals import MAX_COLUMNS
from onlynorm.rank.diagnosis.verdict import Thresholds, judge
from onlynorm.validate import as_tensor, need_choice, need_flag, need_instance, need_integer, need_items, need_seed

MODES = ("train", "eval")


def diagnose(
    model: nn.Module,
    inputs: Any,
    targets: Any = None,
    *,
    loss: Loss | None = None,
    output: Output | None = None,
    which: Iterable[str] | str | None = None,
    mode: str = "train",
    random_inputs: bool = True,
    max_columns: int | None = MAX_COLUMNS,
    thresholds: Thresholds | None = None,
    seed: int = 0,
) -> Diagnosis:
    """Signals and gradients of a batch in every layer, and whether plain SGD is likely to train the model.

    The model is not changed.

    `inputs` is a batch (tensor or NumPy array), a tuple of arguments or a dict of keyword arguments, with samples along
    the first axis. `targets` are class labels (integers: cross entropy) or real values (mean squared error), unless
    `loss(output, targets)` is given; without both, gradients are not measured. `output` selects the argument of the
    loss from the output of the model, by default the logits or the first tensor. `which` are patterns of the modules
    to watch, such as "layer4.*": only their inputs and outputs are measured, and only these are judged, beside the
    gradients of the last linear layer. With `mode="train"`, batch norms use
    the statistics of the batch. `random_inputs` compares gradients with those on noise. Convolutional signals are
    channels x (samples * positions), of which at most `max_columns` columns are used. Wrappers (DDP, DataParallel,
    torch.compile) are removed first; traced, scripted and exported models raise. Autocast, if enabled, applies to the
    passes through the model, not to the measures. Theory: daneshmand2020:prop-8, daneshmand2020:lemma-1

    Examples:
        >>> import onlynorm as on
        >>> from onlynorm.data import digits
        >>> from onlynorm.models import mlp
        >>> found = on.diagnose(mlp((64, *[64] * 30, 10)), *digits().train)
        >>> found.is_trainable
        False
        >>> found.verdict.findings[0]
        'the signal collapses to rank 1.001 at layer 6 of 31 (11)'
    """
    started = time.perf_counter()
    network, arguments = need_layers("diagnose", model), _ready(inputs)
    given = _checked(inputs, arguments)
    wanted = as_tensor("targets", targets) if loss is None and targets is not None else _ready(targets)
    if max_columns is not None:
        max_columns = need_integer("max_columns", max_columns, low=2, cure="Pass None to use all columns.")
    passes = Passes(
        network, arguments, wanted, loss=loss, output=output, seed=need_seed(seed), max_columns=max_columns,
        watched=None if which is None else _watched(network, which),
    )  # fmt: skip
    need_flag("random_inputs", random_inputs)
    limits = Thresholds() if thresholds is None else thresholds
    need_instance("thresholds", limits, Thresholds, cure="Pass onlynorm.rank.Thresholds(rank=0.01).")
    is_training = need_choice("mode", mode, MODES) == "train"
    with full_precision():
        with untouched(network, is_training=is_training, tensors=given):
            with recording(network) as shapes:
                passes.measure(with_contrast=True)
            if random_inputs and passes.last is not None:
                passes.compare(noise_like(arguments, seed=seed))
        return _result(passes, limits, mode=mode, n_samples=len(given[0]), tree=shapes.tree(), started=started)


def _result(
    passes: Passes, thresholds: Thresholds, *, mode: str, n_samples: int, tree: ModuleTree, started: float
) -> Diagnosis:
    """The diagnosis from the measures of all passes."""
    layers = passes.layers
    if not any(is_weighty(module) for module in passes.called):
        raise ConversionError(
            f"diagnose needs a model that calls layers with weights as modules, on floating-point signals; got "
            f"{type(passes.model).__name__}, which calls none. Replace functional calls by modules."
        )
    if not layers:
        raise ConversionError(
            "diagnose needs which= to match a module that is called and returns a batch of signals; got none. Change "
            "the pattern."
        )
    last_signal = None if passes.last is None else measure_last_layer(passes.last, passes.targets)
    skipped = passes.skipped
    if passes.last is not None and last_signal is None:
        skipped = [
            *skipped,
            "the variance explained by the targets in the last layer, because there are too few samples",
        ]
    directions, explained_variance = last_signal or (None, None)
    facts: dict[str, float | None] = {
        "alignment": None if passes.last is None else neuron_alignment(passes.last),
        "input_cosine": passes.input_cosine,
        "contrast": passes.contrast,
        "directions": directions,
        "explained_variance": explained_variance,
        "initial_loss_ratio": passes.initial_loss_ratio,
    }
    verdict = judge(
        layers, loss=passes.loss, unobserved=passes.unobserved, thresholds=thresholds,
        can_repair=lambda: can_repair(passes.model, passes.called, unused=passes.unused), **facts,
    )  # fmt: skip
    return Diagnosis(
        layers=layers,
        verdict=verdict,
        loss=passes.loss,
        sample_cosine=None if passes.last is None else sample_cosine(passes.last),
        last_layer=None if passes.last is None else passes.last.name,
        skipped=tuple(skipped),
        unseen_fraction=passes.unobserved,
        n_samples=n_samples,
        mode=mode,
        seconds=time.perf_counter() - started,
        tree=tree,
        **facts,
    )


def _watched(network: nn.Module, which: Iterable[str] | str) -> set[nn.Module]:
    """The modules that the patterns match, by any of their places."""
    cure = "Write which='layer4.*'."
    places = {plain_name(name): module for name, module in network.named_modules(remove_duplicate=False)}
    found: set[nn.Module] = set()
    for pattern in [which] if isinstance(which, str) else need_items("which", which, cure=cure):
        if not isinstance(pattern, str):
            raise ConversionError(f"which needs names of modules; got a {type(pattern).__name__}. {cure}")
        matches = {module for place, module in places.items() if fnmatch.fnmatchcase(place, pattern)}
        if not matches:
            raise UnknownNameError("module of which=", pattern, [place for place in places if place])
        found |= matches
    return found


def _checked(inputs: Any, arguments: Any) -> list[Tensor]:
    """The tensors of the arguments; raises unless the first is a batch of two samples or more."""
    given = outputs_of(arguments)
    if not given or not given[0].ndim or len(given[0]) < 2:
        got = f"a batch of shape {tuple(given[0].shape)}" if given else f"{type(inputs).__name__} without a tensor"
        raise ShapeError(
            "diagnose needs a batch of two samples or more, since one sample always has rank one; got "
            f"{got}. Pass about 64 samples along the first axis."
        )
    return given


def _ready(value: Any) -> Any:
    """Nested lists, tuples and dicts with all arrays as dense tensors that support autograd."""
    if isinstance(value, Mapping):
        return {name: _ready(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_ready(item) for item in value)
    if not isinstance(value, Tensor | np.ndarray):
        return value
    made = as_tensor("diagnose", value)
    with torch.inference_mode(False):
        return made.clone() if made.is_inference() else made
